/* SPDX-License-Identifier: Apache-2.0 */
/*
 * utf8.c - streaming decode of tokens into valid UTF-8 (tokenizer.h).
 *
 * A state is the bytes of one unfinished character. A byte that cannot continue it ends
 * it as one U+FFFD and is looked at again as a first byte; so a maximal subpart gives
 * exactly one U+FFFD and no byte is lost. One struct eng_detok belongs to one thread.
 */
#include <string.h>
#include "engine/model/tokenizer_priv.h"
#include "base/mutant.h"

static const char replacement[3] = {(char)0xef, (char)0xbf, (char)0xbd};

/* Bytes of the character that @first begins; 0 if none can. */
static u32 utf8_length(u8 first)
{
	if (first < 0x80)
		return 1;
	if (first >= 0xc2 && first <= 0xdf)
		return 2;
	if (first >= 0xe0 && first <= 0xef)
		return 3;
	return first >= 0xf0 && first <= 0xf4 ? 4 : 0;
}

/* May @b follow? The second byte rules out overlong forms, surrogates and > U+10FFFF. */
static bool utf8_follows(const u8 *pending, u32 nr, u8 b)
{
	u8 low = 0x80, high = 0xbf;

	if (nr == 1) {
		low = pending[0] == 0xe0 ? 0xa0 : pending[0] == 0xf0 ? 0x90 : low;
		high = pending[0] == 0xed ? 0x9f : pending[0] == 0xf4 ? 0x8f : high;
	}
	return b >= low && b <= high;
}

size_t eng_utf8_prefix(const char *text, size_t len)
{
	const u8 *p = (const u8 *)text;
	size_t at = 0;

	while (at < len) {
		u32 n = utf8_length(p[at]);

		if (!n || n > len - at)
			break;
		for (u32 i = 1; i < n; i++)
			if (!utf8_follows(p + at, i, p[at + i]))
				return at;
		at += n;
	}
	return at;
}

static size_t emit(char *out, const void *bytes, size_t n)
{
	memcpy(out, bytes, n);
	return n;
}

size_t eng_utf8_push(struct eng_detok *d, const char *bytes, size_t nr_bytes, char *out)
{
	size_t n = 0;

	for (size_t i = 0; i < nr_bytes; i++) {
		u8 b = (u8)bytes[i];

		if (d->nr_pending && !utf8_follows(d->pending, d->nr_pending, b)) {
			n += emit(out + n, replacement, sizeof(replacement));
			d->nr_pending = 0;
		}
		if (!d->nr_pending && !utf8_length(b)) {
			n += emit(out + n, replacement, sizeof(replacement));
			continue;
		}
		d->pending[d->nr_pending++] = b;
		if (d->nr_pending == utf8_length(d->pending[0]) ||
		    KV_MUTANT(utf8_early)) {
			n += emit(out + n, d->pending, d->nr_pending);
			d->nr_pending = 0;
		}
	}
	return n;
}

size_t eng_detok_flush(struct eng_detok *d, char *out)
{
	if (!d->nr_pending)
		return 0;
	d->nr_pending = 0;
	return emit(out, replacement, sizeof(replacement));
}

void eng_detok_init(struct eng_detok *d, const struct eng_tokenizer *tok,
		    bool skip_special)
{
	*d = (struct eng_detok){.tok = tok, .skip_special = skip_special};
}

size_t eng_detok_room(const struct eng_tokenizer *tok)
{
	return 3 * ((size_t)tok->piece_max + 3);
}

size_t eng_detok_push(struct eng_detok *d, u32 id, char *out)
{
	bool special = false;
	size_t len = 0;
	const char *bytes = eng_tokenizer_piece(d->tok, id, &len, &special);

	if (!len || (special && d->skip_special))
		return 0;
	return eng_utf8_push(d, bytes, len, out);
}
