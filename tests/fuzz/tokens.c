/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes, split into tokens anywhere: what comes out is valid UTF-8, and the chunks
 * joined are the same as in one piece.
 */
#include "tests/fuzz/fuzz.h"
#include "engine/model/tokenizer.h"
#include "engine/model/tokenizer_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	size_t room = 3 * (bytes + 8), whole_nr, split_nr = 0, at = 0;
	char *whole = malloc(room), *split = malloc(room + 64);
	struct eng_detok d;

	FUZZ_CHECK(whole && split);
	eng_detok_init(&d, NULL, false);
	whole_nr = eng_utf8_push(&d, (const char *)data, bytes, whole);
	whole_nr += eng_detok_flush(&d, whole + whole_nr);
	FUZZ_CHECK(whole_nr <= room);
	FUZZ_CHECK(eng_utf8_prefix(whole, whole_nr) == whole_nr);
	eng_detok_init(&d, NULL, false);
	while (at < bytes) {
		/* the byte itself says how long the next piece is */
		size_t n = KV_MIN((size_t)(data[at] % 5), bytes - at);

		n = KV_MAX(n, (size_t)1);
		split_nr +=
			eng_utf8_push(&d, (const char *)data + at, n, split + split_nr);
		FUZZ_CHECK(eng_utf8_prefix(split, split_nr) == split_nr);
		at += n;
	}
	split_nr += eng_detok_flush(&d, split + split_nr);
	FUZZ_CHECK(split_nr == whole_nr && !memcmp(whole, split, whole_nr));
	free(whole);
	free(split);
	return 0;
}
