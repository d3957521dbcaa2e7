/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.h - tokenizer.json: byte-level BPE with a PCRE2 split pattern.
 *
 * A loaded tokenizer is immutable; any number of threads may use it. A struct eng_detok
 * belongs to one request.
 */
#ifndef ENG_MODEL_TOKENIZER_H
#define ENG_MODEL_TOKENIZER_H

#include <stdbool.h>
#include "base/util.h"
#include "engine/model/err.h"

struct eng_tokenizer;

/* Text that looks like an added token ("<|endoftext|>") is plain text: for users' input.
 */
#define ENG_ENCODE_PLAIN 0x01u

/**
 * eng_tokenizer_load() - read a tokenizer.json
 * @path: the file
 * @ret: owner; eng_tokenizer_free()
 * @err: names file, field and reason when refused
 *
 * Return: 0; -ENOENT; -EINVAL malformed; -ENOTSUP a kind of tokenizer that is not built.
 */
int eng_tokenizer_load(const char *path, struct eng_tokenizer **ret, struct eng_err *err);

void eng_tokenizer_free(struct eng_tokenizer *tok);

/** eng_tokenizer_size() - one more than the largest token id */
u32 eng_tokenizer_size(const struct eng_tokenizer *tok);

/**
 * eng_tokenizer_encode() - text to token ids
 * @text, @nr_bytes: UTF-8; an invalid byte is split off and encoded as itself
 * @flags: ENG_ENCODE_*
 * @ret_ids: malloc'd [*ret_nr] (never NULL on success); caller frees
 *
 * Return: 0; -ENOMEM; -EINVAL a byte has no token; -E2BIG text over 1 GiB.
 */
int eng_tokenizer_encode(const struct eng_tokenizer *tok, const char *text,
			 size_t nr_bytes, u32 flags, u32 **ret_ids, size_t *ret_nr);

/**
 * eng_tokenizer_piece() - the bytes of one token, which need not be whole characters
 * @ret_bytes: length; 0 for an id that is no token
 * @ret_special: set if the token is an added special one (may be NULL)
 *
 * Return: the bytes, not NUL-terminated, valid while @tok is.
 */
const char *eng_tokenizer_piece(const struct eng_tokenizer *tok, u32 id,
				size_t *ret_bytes, bool *ret_special);

/**
 * eng_tokenizer_find() - id of a token by its text ("<|endoftext|>")
 * Return: the id, or -1.
 */
s32 eng_tokenizer_find(const struct eng_tokenizer *tok, const char *text);

/**
 * eng_tokenizer_decode() - token ids to text, bytes exactly as the tokens have them
 * @skip_special: leave added special tokens out
 * @ret_text: malloc'd, NUL-terminated; caller frees
 *
 * Return: 0; -ENOMEM; -EINVAL an id is no token.
 */
int eng_tokenizer_decode(const struct eng_tokenizer *tok, const u32 *ids, size_t nr,
			 bool skip_special, char **ret_text, size_t *ret_bytes);

/**
 * struct eng_detok - streaming decode into valid UTF-8
 *
 * Nothing of a character is emitted before its last byte is there. Invalid bytes become
 * one U+FFFD per maximal subpart (Unicode 3.9, table 3-8), so that the concatenation of
 * all chunks is the one-shot decode of the whole, however tokens split it.
 */
struct eng_detok {
	const struct eng_tokenizer *tok;
	bool skip_special;
	u8 nr_pending;
	u8 pending[4];
};

void eng_detok_init(struct eng_detok *d, const struct eng_tokenizer *tok,
		    bool skip_special);

/** eng_detok_room() - bytes of @out that one eng_detok_push() or _flush() can ever need
 */
size_t eng_detok_room(const struct eng_tokenizer *tok);

/**
 * eng_detok_push() - add one token
 * @out: eng_detok_room() bytes; not NUL-terminated
 * Return: bytes written (0: nothing complete yet).
 */
size_t eng_detok_push(struct eng_detok *d, u32 id, char *out);

/** eng_detok_flush() - end of text: an unfinished character becomes U+FFFD */
size_t eng_detok_flush(struct eng_detok *d, char *out);

/**
 * eng_utf8_push() - the same for raw bytes
 * @out: 3 * (nr_bytes + 3) bytes
 */
size_t eng_utf8_push(struct eng_detok *d, const char *bytes, size_t nr_bytes, char *out);

/** eng_utf8_prefix() - Return: bytes of @text up to the first that is not UTF-8 */
size_t eng_utf8_prefix(const char *text, size_t len);

#endif
