/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer_priv.h - a loaded tokenizer's tables: private to tokenizer.c and bpe.c.
 */
#ifndef ENG_MODEL_TOKENIZER_PRIV_H
#define ENG_MODEL_TOKENIZER_PRIV_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include "engine/model/tokenizer.h"

#define TOK_SPLITS_MAX 8u
#define TOK_ID_MAX     (1u << 24)
#define TOK_NONE       UINT32_MAX

/**
 * struct tok_piece - one token
 * @bytes: raw bytes (the byte-level letters undone); owned
 * @len: their number
 * @used: the id is a token
 * @added, @special: from added_tokens
 */
struct tok_piece {
	char *bytes;
	u32 len;
	bool used;
	bool added;
	bool special;
};

/** struct tok_merge - a slot of the merge table; key TOK_NONE, TOK_NONE = empty */
struct tok_merge {
	u32 left, right;
	u32 rank, result;
};

/**
 * struct eng_tokenizer
 * @pieces, @nr_pieces: by id
 * @slots, @slot_mask: open-addressed table from bytes to id; empty = TOK_NONE
 * @merges, @merge_mask: open-addressed table of merges
 * @byte_ids: id of each single byte, or TOK_NONE
 * @splits, @nr_splits: patterns, applied one after the other
 * @added_first: a byte begins some added token
 * @added, @nr_added: ids of added tokens, longest first
 * @ignore_merges: a whole word that is a token is not merged
 * @piece_max: longest piece
 */
struct eng_tokenizer {
	struct tok_piece *pieces;
	u32 nr_pieces;
	u32 *slots;
	u32 slot_mask;
	struct tok_merge *merges;
	u32 merge_mask;
	u32 byte_ids[256];
	pcre2_code *splits[TOK_SPLITS_MAX];
	u32 nr_splits;
	bool added_first[256];
	u32 *added;
	u32 nr_added;
	bool ignore_merges;
	u32 piece_max;
};

/** tok_find_bytes() - Return: id of the token with exactly these bytes, or TOK_NONE */
u32 tok_find_bytes(const struct eng_tokenizer *tok, const char *bytes, size_t len);

/** tok_find_merge() - Return: the merge of two neighbours, or NULL */
const struct tok_merge *tok_find_merge(const struct eng_tokenizer *tok, u32 left,
				       u32 right);

#endif
