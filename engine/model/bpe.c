/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bpe.c - text to tokens and back (tokenizer.h).
 *
 * Encode: added tokens are cut out first, what lies between is cut into valid UTF-8 runs
 * and single invalid bytes, runs are cut by the split patterns one after the other, and
 * each word is merged: the neighbours of lowest rank first, leftmost of equals. Short
 * words are scanned, long ones use a heap, so that a megabyte without a split costs n log
 * n. All state of a call is in struct enc; a tokenizer may be used by any number of
 * threads.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "engine/model/tokenizer_priv.h"

#define TEXT_MAX    (1ull << 30)
#define SHORT_WORD  32u
#define JIT_STACK   (1u << 20)
#define MATCH_LIMIT 100000000u

/* A symbol of the word being merged; a removed one has len 0. */
struct sym {
	u32 id;
	u32 prev, next;
	u32 dead;
};

/* A pair that may be merged: the one of lowest (rank, at) is on top of the heap. */
struct cand {
	u32 rank, at;
	u32 left, right;
};

/**
 * struct enc - one call of eng_tokenizer_encode()
 * @ids, @nr, @room: the answer so far
 * @syms, @syms_room, @heap, @heap_room: scratch of one word
 * @match: one per split level, because levels nest
 */
struct enc {
	const struct eng_tokenizer *tok;
	u32 *ids;
	size_t nr, room;
	struct sym *syms;
	size_t syms_room;
	struct cand *heap;
	size_t nr_heap, heap_room;
	pcre2_match_data *match[TOK_SPLITS_MAX];
	pcre2_match_context *context;
	pcre2_jit_stack *stack;
};

/* @array has room for @nr more elements than @used. */
static int reserve(void **array, size_t *room, size_t want, size_t elem)
{
	size_t n = KV_MAX(*room * 2, KV_MAX(want, (size_t)64));
	void *p;

	if (want <= *room)
		return 0;
	p = realloc(*array, n * elem);
	if (!p)
		return -ENOMEM;
	*array = p;
	*room = n;
	return 0;
}

static int push_id(struct enc *e, u32 id)
{
	int r = reserve((void **)&e->ids, &e->room, e->nr + 1, sizeof(*e->ids));

	if (!r)
		e->ids[e->nr++] = id;
	return r;
}

/* ------------------------------------------------------------------- merging */

/* Few symbols: look for the lowest rank again after each merge. */
static u32 merge_short(const struct eng_tokenizer *tok, u32 *ids, u32 nr)
{
	while (nr > 1) {
		const struct tok_merge *best = NULL;
		u32 at = 0;

		for (u32 i = 0; i + 1 < nr; i++) {
			const struct tok_merge *m =
				tok_find_merge(tok, ids[i], ids[i + 1]);

			if (m && (!best || m->rank < best->rank)) {
				best = m;
				at = i;
			}
		}
		if (!best)
			break;
		ids[at] = best->result;
		memmove(ids + at + 1, ids + at + 2, (nr - at - 2) * sizeof(*ids));
		nr--;
	}
	return nr;
}

static bool cand_before(const struct cand *a, const struct cand *b)
{
	return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static int heap_push(struct enc *e, u32 at)
{
	u32 next = e->syms[at].next;
	const struct tok_merge *m;
	struct cand c;
	size_t i;

	if (next == TOK_NONE)
		return 0;
	m = tok_find_merge(e->tok, e->syms[at].id, e->syms[next].id);
	if (!m)
		return 0;
	if (reserve((void **)&e->heap, &e->heap_room, e->nr_heap + 1, sizeof(*e->heap)))
		return -ENOMEM;
	c = (struct cand){.rank = m->rank, .at = at, .left = m->left, .right = m->right};
	for (i = e->nr_heap++; i && cand_before(&c, &e->heap[(i - 1) / 2]);
	     i = (i - 1) / 2)
		e->heap[i] = e->heap[(i - 1) / 2];
	e->heap[i] = c;
	return 0;
}

static struct cand heap_pop(struct enc *e)
{
	struct cand top = e->heap[0], last = e->heap[--e->nr_heap];
	size_t i = 0, child;

	for (; (child = 2 * i + 1) < e->nr_heap; i = child) {
		if (child + 1 < e->nr_heap &&
		    cand_before(&e->heap[child + 1], &e->heap[child]))
			child++;
		if (!cand_before(&e->heap[child], &last))
			break;
		e->heap[i] = e->heap[child];
	}
	e->heap[i] = last;
	return top;
}

/* A candidate whose symbols have changed since is skipped: the change pushed its own. */
static int merge_long(struct enc *e)
{
	int r = 0;

	while (e->nr_heap && !r) {
		struct cand c = heap_pop(e);
		struct sym *s = &e->syms[c.at];
		const struct tok_merge *m;
		u32 next = s->next;

		if (s->dead || s->id != c.left || next == TOK_NONE ||
		    e->syms[next].id != c.right)
			continue;
		m = tok_find_merge(e->tok, c.left, c.right);
		s->id = m->result;
		s->next = e->syms[next].next;
		e->syms[next].dead = 1;
		if (s->next != TOK_NONE)
			e->syms[s->next].prev = c.at;
		if (s->prev != TOK_NONE)
			r = heap_push(e, s->prev);
		r = r ?: heap_push(e, c.at);
	}
	return r;
}

static int encode_long(struct enc *e, const char *word, size_t len)
{
	int r = reserve((void **)&e->syms, &e->syms_room, len, sizeof(*e->syms));

	e->nr_heap = 0;
	for (size_t i = 0; i < len && !r; i++) {
		u32 id = e->tok->byte_ids[(u8)word[i]];

		if (id == TOK_NONE)
			r = -EINVAL;
		else
			e->syms[i] =
				(struct sym){.id = id,
					     .prev = i ? (u32)i - 1 : TOK_NONE,
					     .next = i + 1 < len ? (u32)i + 1 : TOK_NONE};
	}
	for (size_t i = 0; i < len && !r; i++)
		r = heap_push(e, (u32)i);
	r = r ?: merge_long(e);
	for (u32 i = 0; i != TOK_NONE && !r; i = e->syms[i].next)
		r = push_id(e, e->syms[i].id);
	return r;
}

static int encode_word(struct enc *e, const char *word, size_t len)
{
	u32 ids[SHORT_WORD], nr;
	int r = 0;

	if (e->tok->ignore_merges) {
		u32 id = tok_find_bytes(e->tok, word, len);

		if (id != TOK_NONE && !e->tok->pieces[id].added)
			return push_id(e, id);
	}
	if (len > SHORT_WORD)
		return encode_long(e, word, len);
	for (size_t i = 0; i < len; i++) {
		ids[i] = e->tok->byte_ids[(u8)word[i]];
		if (ids[i] == TOK_NONE)
			return -EINVAL;
	}
	nr = merge_short(e->tok, ids, (u32)len);
	for (u32 i = 0; i < nr && !r; i++)
		r = push_id(e, ids[i]);
	return r;
}

/* ------------------------------------------------------------------- cutting */

/* Next match at or after @at; *ret_begin == *ret_end == @len when there is none. */
static int next_match(struct enc *e, u32 level, const char *text, size_t len, size_t at,
		      size_t *ret_begin, size_t *ret_end)
{
	pcre2_match_data *md = e->match[level];
	u32 options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
	const PCRE2_SIZE *v;
	int n;

	n = pcre2_match(e->tok->splits[level], (PCRE2_SPTR)text, len, at, options, md,
			e->context);
	if (n == PCRE2_ERROR_JIT_STACKLIMIT)
		n = pcre2_match(e->tok->splits[level], (PCRE2_SPTR)text, len, at,
				options | PCRE2_NO_JIT, md, e->context);
	if (n == PCRE2_ERROR_NOMEMORY)
		return -ENOMEM;
	if (n < 0 && n != PCRE2_ERROR_NOMATCH)
		return -E2BIG; /* a limit of the matcher */
	v = pcre2_get_ovector_pointer(md);
	*ret_begin = n < 0 ? len : v[0];
	*ret_end = n < 0 ? len : v[1];
	return 0;
}

/* Matches and the gaps between them go to the next level; recursion is as deep as splits.
 */
static int encode_split(struct enc *e, u32 level, const char *text, size_t len)
{
	size_t at = 0, begin, end;
	int r = 0;

	if (level == e->tok->nr_splits)
		return len ? encode_word(e, text, len) : 0;
	while (at < len && !r) {
		r = next_match(e, level, text, len, at, &begin, &end);
		if (!r && begin > at)
			r = encode_split(e, level + 1, text + at, begin - at);
		if (!r && end > begin)
			r = encode_split(e, level + 1, text + begin, end - begin);
		at = r ? len : end;
	}
	return r;
}

static int encode_plain(struct enc *e, const char *text, size_t len)
{
	int r = 0;

	while (len && !r) {
		size_t n = eng_utf8_prefix(text, len);

		if (n)
			r = encode_split(e, 0, text, n);
		else
			r = encode_word(e, text, n = 1);
		text += n;
		len -= n;
	}
	return r;
}

/* The added token that begins at @text, longest first, or TOK_NONE. */
static u32 added_at(const struct eng_tokenizer *tok, const char *text, size_t len)
{
	for (u32 i = 0; i < tok->nr_added; i++) {
		const struct tok_piece *p = &tok->pieces[tok->added[i]];

		if (p->len <= len && !memcmp(p->bytes, text, p->len))
			return tok->added[i];
	}
	return TOK_NONE;
}

static int encode_text(struct enc *e, const char *text, size_t len, u32 flags)
{
	size_t from = 0;
	int r = 0;

	if (flags & ENG_ENCODE_PLAIN)
		return encode_plain(e, text, len);
	for (size_t i = 0; i < len && !r;) {
		u32 id = e->tok->added_first[(u8)text[i]]
				 ? added_at(e->tok, text + i, len - i)
				 : TOK_NONE;

		if (id == TOK_NONE) {
			i++;
			continue;
		}
		r = encode_plain(e, text + from, i - from);
		r = r ?: push_id(e, id);
		i += e->tok->pieces[id].len;
		from = i;
	}
	return r ?: encode_plain(e, text + from, len - from);
}

static int enc_init(struct enc *e, const struct eng_tokenizer *tok)
{
	*e = (struct enc){.tok = tok};
	e->context = pcre2_match_context_create(NULL);
	e->stack = pcre2_jit_stack_create(32 * 1024, JIT_STACK, NULL);
	if (!e->context)
		return -ENOMEM;
	pcre2_set_match_limit(e->context, MATCH_LIMIT);
	if (e->stack)
		pcre2_jit_stack_assign(e->context, NULL, e->stack);
	for (u32 i = 0; i < tok->nr_splits; i++) {
		e->match[i] = pcre2_match_data_create_from_pattern(tok->splits[i], NULL);
		if (!e->match[i])
			return -ENOMEM;
	}
	return 0;
}

static void enc_fini(struct enc *e)
{
	for (u32 i = 0; i < e->tok->nr_splits; i++)
		pcre2_match_data_free(e->match[i]);
	pcre2_jit_stack_free(e->stack);
	pcre2_match_context_free(e->context);
	free(e->syms);
	free(e->heap);
}

int eng_tokenizer_encode(const struct eng_tokenizer *tok, const char *text,
			 size_t nr_bytes, u32 flags, u32 **ret_ids, size_t *ret_nr)
{
	struct enc e;
	int r;

	if (nr_bytes > TEXT_MAX)
		return -E2BIG;
	r = enc_init(&e, tok);
	r = r ?: reserve((void **)&e.ids, &e.room, nr_bytes / 4 + 1, sizeof(*e.ids));
	r = r ?: encode_text(&e, text, nr_bytes, flags);
	enc_fini(&e);
	if (r) {
		free(e.ids);
		return r;
	}
	*ret_ids = e.ids;
	*ret_nr = e.nr;
	return 0;
}

/* ------------------------------------------------------- look-ups and decode */

u32 eng_tokenizer_size(const struct eng_tokenizer *tok)
{
	return tok->nr_pieces;
}

const char *eng_tokenizer_piece(const struct eng_tokenizer *tok, u32 id,
				size_t *ret_bytes, bool *ret_special)
{
	bool known = id < tok->nr_pieces && tok->pieces[id].used;

	*ret_bytes = known ? tok->pieces[id].len : 0;
	if (ret_special)
		*ret_special = known && tok->pieces[id].special;
	return known ? tok->pieces[id].bytes : "";
}

s32 eng_tokenizer_find(const struct eng_tokenizer *tok, const char *text)
{
	size_t len = strlen(text);
	u32 id;

	for (u32 i = 0; i < tok->nr_added; i++) {
		const struct tok_piece *p = &tok->pieces[tok->added[i]];

		if (p->len == len && !memcmp(p->bytes, text, len))
			return (s32)tok->added[i];
	}
	id = tok_find_bytes(tok, text, len);
	return id == TOK_NONE ? -1 : (s32)id;
}

int eng_tokenizer_decode(const struct eng_tokenizer *tok, const u32 *ids, size_t nr,
			 bool skip_special, char **ret_text, size_t *ret_bytes)
{
	size_t bytes = 0, len, at = 0;
	bool special;
	char *text;

	for (size_t i = 0; i < nr; i++) {
		eng_tokenizer_piece(tok, ids[i], &len, &special);
		if (!len)
			return -EINVAL;
		bytes += len;
	}
	text = malloc(bytes + 1);
	if (!text)
		return -ENOMEM;
	for (size_t i = 0; i < nr; i++) {
		const char *p = eng_tokenizer_piece(tok, ids[i], &len, &special);

		if (special && skip_special)
			continue;
		memcpy(text + at, p, len);
		at += len;
	}
	text[at] = 0;
	*ret_text = text;
	*ret_bytes = at;
	return 0;
}
