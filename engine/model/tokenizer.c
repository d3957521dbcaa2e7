/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.c - read tokenizer.json into tables (tokenizer_priv.h); look-ups and decode.
 *
 * Byte-level BPE only: tokens are strings over 256 letters, one per byte. Anything a file
 * asks for that is not built (normalizers, byte fallback, other splits) is refused,
 * because a tokenizer that is nearly right gives a model that is subtly wrong. Load: one
 * thread; after that immutable.
 */
#include "base/mutant.h"
#include "engine/model/tokenizer_priv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "engine/model/json.h"

#define LETTER_MAX 324u /* letters are the code points 33..323 */
#define PIECE_MAX  4096u

/* GPT-2's pattern: what pre_tokenizer ByteLevel with use_regex means. */
static const char gpt2_pattern[] =
	"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* -------------------------------------------------------------------- tables */

static u32 bytes_hash(const char *bytes, size_t len)
{
	u32 h = 2166136261u;

	for (size_t i = 0; i < len; i++)
		h = (h ^ (u8)bytes[i]) * 16777619u;
	return h ^ h >> 15;
}

static u32 pair_hash(u32 left, u32 right)
{
	u64 h = ((u64)left << 32 | right) * 0x9e3779b97f4a7c15ull;

	return (u32)(h >> 32);
}

u32 tok_find_bytes(const struct eng_tokenizer *tok, const char *bytes, size_t len)
{
	u32 i = bytes_hash(bytes, len) & tok->slot_mask;

	for (; tok->slots[i] != TOK_NONE; i = (i + 1) & tok->slot_mask) {
		const struct tok_piece *p = &tok->pieces[tok->slots[i]];

		if (p->len == len && !memcmp(p->bytes, bytes, len))
			return tok->slots[i];
	}
	return TOK_NONE;
}

const struct tok_merge *tok_find_merge(const struct eng_tokenizer *tok, u32 left,
				       u32 right)
{
	u32 i = pair_hash(left, right) & tok->merge_mask;

	for (; tok->merges[i].left != TOK_NONE; i = (i + 1) & tok->merge_mask)
		if (tok->merges[i].left == left && tok->merges[i].right == right)
			return &tok->merges[i];
	return NULL;
}

/* A table at most half full, so that probing ends. */
static u32 table_slots(size_t nr)
{
	u32 n = 1024;

	while (n < 2 * nr + 2)
		n *= 2;
	return n;
}

/* -------------------------------------------------------- letters and pieces */

static bool letter_is_plain(u32 b)
{
	return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
}

/* Code point to byte: printable Latin-1 means itself, 256 + n is the n-th of the others.
 */
static void letters_init(s16 ret[LETTER_MAX])
{
	u32 next = 256;

	for (u32 i = 0; i < LETTER_MAX; i++)
		ret[i] = -1;
	for (u32 b = 0; b < 256; b++)
		ret[letter_is_plain(b) ? b : next++] = (s16)b;
}

/* "Ġthe" to " the". Return: bytes, or -1 if a character is no letter. */
static int letters_undo(const s16 letters[LETTER_MAX], const char *text, char *ret)
{
	int n = 0;

	for (const u8 *p = (const u8 *)text; *p;) {
		u32 cp = *p++;

		if (cp >= 0xc3 && cp <= 0xc5 && (*p & 0xc0) == 0x80)
			cp = (cp & 0x1f) << 6 | (*p++ & 0x3f);
		else if (cp == 0xc2 && (*p & 0xc0) == 0x80)
			cp = *p++;
		else if (cp >= 0x80)
			return -1;
		if (cp >= LETTER_MAX || letters[cp] < 0)
			return -1;
		ret[n++] = (char)letters[cp];
	}
	return n;
}

static int piece_set(struct eng_tokenizer *tok, u32 id, const char *bytes, size_t len)
{
	struct tok_piece *p = &tok->pieces[id];

	free(p->bytes);
	p->bytes = malloc(len + 1);
	if (!p->bytes)
		return -ENOMEM;
	memcpy(p->bytes, bytes, len);
	p->bytes[len] = 0;
	p->len = (u32)len;
	p->used = true;
	tok->piece_max = KV_MAX(tok->piece_max, (u32)len);
	return 0;
}

/* Largest id of vocabulary and added tokens decides the size of all tables. */
static int count_ids(const struct eng_json *j, const cJSON *vocab, const cJSON *added,
		     u32 *ret_nr)
{
	const cJSON *v;
	u64 id, max = 0;

	cJSON_ArrayForEach(v, vocab)
	{
		if (!eng_json_int(v, &id) || id >= TOK_ID_MAX)
			return eng_refuse(
				j->err, -EINVAL,
				"%s: model.vocab: id of \"%.100s\" is not in 0..%u",
				j->file, v->string, TOK_ID_MAX - 1);
		max = KV_MAX(max, id);
	}
	cJSON_ArrayForEach(v, added)
	{
		const cJSON *content = cJSON_GetObjectItemCaseSensitive(v, "content");

		if (!eng_json_int(cJSON_GetObjectItemCaseSensitive(v, "id"), &id) ||
		    id >= TOK_ID_MAX || !cJSON_IsString(content) ||
		    !content->valuestring[0])
			return eng_refuse(
				j->err, -EINVAL,
				"%s: added_tokens: an entry lacks a content or an id in 0..%u",
				j->file, TOK_ID_MAX - 1);
		max = KV_MAX(max, id);
	}
	*ret_nr = (u32)max + 1;
	return 0;
}

static void slot_add(struct eng_tokenizer *tok, u32 id)
{
	const struct tok_piece *p = &tok->pieces[id];
	u32 i = bytes_hash(p->bytes, p->len) & tok->slot_mask;

	while (tok->slots[i] != TOK_NONE)
		i = (i + 1) & tok->slot_mask;
	tok->slots[i] = id;
}

static int load_vocab(struct eng_tokenizer *tok, const struct eng_json *j,
		      const cJSON *vocab, const s16 *letters)
{
	char bytes[PIECE_MAX];
	const cJSON *v;
	u64 id = 0;

	cJSON_ArrayForEach(v, vocab)
	{
		size_t len = strlen(v->string);
		int n;

		eng_json_int(v, &id);
		if (len == 0 || len >= PIECE_MAX)
			return eng_refuse(
				j->err, -EINVAL,
				"%s: model.vocab: token %llu has %zu bytes, expected 1..%u",
				j->file, (unsigned long long)id, len, PIECE_MAX - 1);
		if (tok->pieces[id].used)
			return eng_refuse(
				j->err, -EINVAL,
				"%s: model.vocab: id %llu has two tokens, the second is "
				"\"%.100s\"",
				j->file, (unsigned long long)id, v->string);
		n = letters_undo(letters, v->string, bytes);
		/* a token that is no byte string can only be an added one: kept as it is
		 */
		if (piece_set(tok, (u32)id, n < 0 ? v->string : bytes,
			      n < 0 ? len : (size_t)n))
			return eng_refuse(j->err, -ENOMEM, "%s: out of memory", j->file);
		if (n >= 0)
			slot_add(tok, (u32)id);
		if (n == 1)
			tok->byte_ids[(u8)bytes[0]] = (u32)id;
	}
	return 0;
}

/* -------------------------------------------------------------- added tokens */

static int longest_first(const void *a, const void *b, void *arg)
{
	const struct eng_tokenizer *tok = arg;
	const struct tok_piece *x = &tok->pieces[*(const u32 *)a];
	const struct tok_piece *y = &tok->pieces[*(const u32 *)b];

	return x->len > y->len ? -1 : x->len < y->len;
}

static int load_added(struct eng_tokenizer *tok, const struct eng_json *j,
		      const cJSON *added)
{
	static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
	const cJSON *v;
	u64 id = 0;

	tok->added = calloc((size_t)cJSON_GetArraySize(added) + 1, sizeof(*tok->added));
	if (!tok->added)
		return eng_refuse(j->err, -ENOMEM, "%s: out of memory", j->file);
	cJSON_ArrayForEach(v, added)
	{
		const char *text =
			cJSON_GetObjectItemCaseSensitive(v, "content")->valuestring;
		size_t len = strlen(text);
		struct tok_piece *p;

		eng_json_int(cJSON_GetObjectItemCaseSensitive(v, "id"), &id);
		p = &tok->pieces[id];
		for (size_t i = 0; i < KV_ARRAY_SIZE(flags); i++)
			if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(v, flags[i])))
				return eng_refuse(
					j->err, -ENOTSUP,
					"%s: added_tokens: \"%.100s\" sets %s, which is not "
					"built",
					j->file, text, flags[i]);
		if (p->added || len >= PIECE_MAX ||
		    (p->used && (p->len != len || memcmp(p->bytes, text, len))))
			return eng_refuse(
				j->err, -EINVAL,
				"%s: added_tokens: \"%.100s\": id %llu has another token",
				j->file, text, (unsigned long long)id);
		if (piece_set(tok, (u32)id, text, len))
			return eng_refuse(j->err, -ENOMEM, "%s: out of memory", j->file);
		p->added = true;
		p->special = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(v, "special"));
		tok->added_first[(u8)text[0]] = true;
		tok->added[tok->nr_added++] = (u32)id;
	}
	qsort_r(tok->added, tok->nr_added, sizeof(*tok->added), longest_first, tok);
	return 0;
}

/* -------------------------------------------------------------------- merges */

/* "a b" or ["a", "b"] as two strings; @buf holds the first form's copy. */
static int merge_parts(const cJSON *v, char *buf, const char **ret_a, const char **ret_b)
{
	const char *space;

	if (cJSON_IsArray(v) && cJSON_GetArraySize(v) == 2 && cJSON_IsString(v->child) &&
	    cJSON_IsString(v->child->next)) {
		*ret_a = v->child->valuestring;
		*ret_b = v->child->next->valuestring;
		return 0;
	}
	if (!cJSON_IsString(v) || strlen(v->valuestring) >= 2 * PIECE_MAX)
		return -EINVAL;
	space = strchr(v->valuestring, ' ');
	if (!space || strchr(space + 1, ' '))
		return -EINVAL;
	strcpy(buf, v->valuestring);
	buf[space - v->valuestring] = 0;
	*ret_a = buf;
	*ret_b = buf + (space - v->valuestring) + 1;
	return 0;
}

/* Ids of both parts and of what they become, or -EINVAL. */
static int merge_ids(const struct eng_tokenizer *tok, const s16 *letters, const char *a,
		     const char *b, struct tok_merge *ret)
{
	char bytes[2 * PIECE_MAX];
	int na, nb;

	if (strlen(a) >= PIECE_MAX || strlen(b) >= PIECE_MAX)
		return -EINVAL;
	na = letters_undo(letters, a, bytes);
	nb = na > 0 ? letters_undo(letters, b, bytes + na) : 0;
	if (na <= 0 || nb <= 0)
		return -EINVAL;
	ret->left = tok_find_bytes(tok, bytes, (size_t)na);
	ret->right = tok_find_bytes(tok, bytes + na, (size_t)nb);
	ret->result = tok_find_bytes(tok, bytes, (size_t)na + (size_t)nb);
	if (ret->result == TOK_NONE && !KV_MUTANT(merge_to_nothing))
		return -EINVAL;
	return ret->left == TOK_NONE || ret->right == TOK_NONE ? -EINVAL : 0;
}

static int load_merges(struct eng_tokenizer *tok, const struct eng_json *j,
		       const cJSON *merges, const s16 *letters)
{
	u32 nr_slots = table_slots((size_t)cJSON_GetArraySize(merges)), rank = 0;
	char buf[2 * PIECE_MAX];
	const cJSON *v;

	if (!cJSON_IsArray(merges) || !merges->child)
		return eng_json_refuse(j, "merges", -EINVAL, "a list of merges");
	tok->merges = malloc(nr_slots * sizeof(*tok->merges));
	if (!tok->merges)
		return eng_refuse(j->err, -ENOMEM, "%s: out of memory", j->file);
	memset(tok->merges, 0xff, nr_slots * sizeof(*tok->merges));
	tok->merge_mask = nr_slots - 1;
	cJSON_ArrayForEach(v, merges)
	{
		struct tok_merge m = {.rank = rank};
		const char *a = NULL, *b = NULL;
		u32 i;

		if (merge_parts(v, buf, &a, &b))
			return eng_refuse(
				j->err, -EINVAL,
				"%s: model.merges: merge %u is neither \"a b\" nor "
				"[\"a\", \"b\"]",
				j->file, rank);
		if (merge_ids(tok, letters, a, b, &m))
			return eng_refuse(
				j->err, -EINVAL,
				"%s: model.merges: merge %u (\"%.60s\", \"%.60s\") names "
				"tokens that are not in model.vocab",
				j->file, rank, a, b);
		if (tok_find_merge(tok, m.left, m.right))
			return eng_refuse(
				j->err, -EINVAL,
				"%s: model.merges: merge %u (\"%.60s\", \"%.60s\") is there "
				"twice",
				j->file, rank, a, b);
		i = pair_hash(m.left, m.right) & tok->merge_mask;
		while (tok->merges[i].left != TOK_NONE)
			i = (i + 1) & tok->merge_mask;
		tok->merges[i] = m;
		rank++;
	}
	return 0;
}

/* -------------------------------------------------------------------- splits */

static int add_split(struct eng_tokenizer *tok, const struct eng_json *j,
		     const char *pattern, u32 options)
{
	PCRE2_SIZE at = 0;
	pcre2_code *code;
	u8 why[128];
	int e = 0;

	if (tok->nr_splits == TOK_SPLITS_MAX)
		return eng_refuse(j->err, -ENOTSUP,
				  "%s: pre_tokenizer: more than %u splits", j->file,
				  TOK_SPLITS_MAX);
	code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
			     PCRE2_UTF | options, &e, &at, NULL);
	if (!code) {
		pcre2_get_error_message(e, why, sizeof(why));
		return eng_refuse(j->err, -EINVAL,
				  "%s: pre_tokenizer: pattern, byte %zu: %s", j->file,
				  (size_t)at, (const char *)why);
	}
	/* without JIT (a hardened kernel) matching is slower and the same */
	pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
	tok->splits[tok->nr_splits++] = code;
	return 0;
}

/* Split: {"pattern": {"Regex": ...}, "behavior": "Isolated", "invert": false} */
static int load_split(struct eng_tokenizer *tok, const struct eng_json *j)
{
	const cJSON *pattern = eng_json_field(j, "pattern");
	const cJSON *regex = cJSON_GetObjectItemCaseSensitive(pattern, "Regex");
	const cJSON *literal = cJSON_GetObjectItemCaseSensitive(pattern, "String");
	int r = eng_json_only_str(j, "behavior", "Isolated");

	if (!r && cJSON_IsTrue(eng_json_field(j, "invert")))
		r = eng_json_refuse(j, "invert", -ENOTSUP, "false");
	if (r)
		return r;
	if (cJSON_IsString(regex))
		return add_split(tok, j, regex->valuestring, PCRE2_UCP);
	if (cJSON_IsString(literal) && literal->valuestring[0])
		return add_split(tok, j, literal->valuestring, PCRE2_LITERAL);
	return eng_json_refuse(j, "pattern", -EINVAL, "a Regex or String");
}

static int load_byte_level(struct eng_tokenizer *tok, const struct eng_json *j)
{
	bool regex = true, prefix = false;
	int r;

	r = eng_json_bool_or(j, "use_regex", true, &regex);
	r = r ?: eng_json_bool_or(j, "add_prefix_space", true, &prefix);
	if (!r && prefix)
		r = eng_json_refuse(j, "add_prefix_space", -ENOTSUP, "false");
	if (!r && regex)
		r = add_split(tok, j, gpt2_pattern, PCRE2_UCP);
	return r;
}

/* Splits in order, ending with ByteLevel. */
static int load_pre_tokenizer(struct eng_tokenizer *tok, const struct eng_json *top)
{
	const cJSON *pre = eng_json_field(top, "pre_tokenizer");
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(pre, "pretokenizers");
	const cJSON *v = cJSON_IsArray(list) ? list->child : pre;
	bool byte_level = false;

	for (; v; v = cJSON_IsArray(list) ? v->next : NULL) {
		struct eng_json j = {.file = top->file,
				     .path = "pre_tokenizer.",
				     .obj = v,
				     .err = top->err};
		const char *type = "";
		int r;

		if (!cJSON_IsObject(v))
			return eng_json_refuse(top, "pre_tokenizer", -ENOTSUP,
					       "\"Split\" steps, then \"ByteLevel\"");
		r = eng_json_str(&j, "type", &type);
		if (r)
			return r;
		if (byte_level || (strcmp(type, "Split") && strcmp(type, "ByteLevel")))
			return eng_json_refuse(&j, "type", -ENOTSUP,
					       "\"Split\" steps, then \"ByteLevel\"");
		byte_level = !strcmp(type, "ByteLevel");
		r = byte_level ? load_byte_level(tok, &j) : load_split(tok, &j);
		if (r)
			return r;
	}
	if (!byte_level)
		return eng_json_refuse(top, "pre_tokenizer", -ENOTSUP,
				       "one that ends in ByteLevel");
	return 0;
}

/* ------------------------------------------------------------------ the file */

/* {"type": "Sequence", "normalizers": []}: how some files say none */
static bool is_empty_sequence(const struct eng_json *top, const char *field)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(eng_json_field(top, field),
							     "normalizers");

	return cJSON_IsArray(list) && !list->child;
}

/*
 * Tokens that a post-processor adds would be left out without a word. ByteLevel adds none: its
 * trim_offsets is about offsets.
 */
static int check_post_processor(const struct eng_json *top)
{
	const cJSON *post = eng_json_field(top, "post_processor");
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(post, "processors");
	const cJSON *v = cJSON_IsArray(list) ? list->child : post;

	if (eng_json_absent(top, "post_processor"))
		return 0;
	for (; v; v = cJSON_IsArray(list) ? v->next : NULL) {
		const cJSON *type = cJSON_GetObjectItemCaseSensitive(v, "type");

		if (!cJSON_IsString(type) || strcmp(type->valuestring, "ByteLevel"))
			return eng_json_refuse(top, "post_processor", -ENOTSUP,
					       "null or ByteLevel, which adds no token");
	}
	return 0;
}

static int check_options(const struct eng_json *top, const struct eng_json *model,
			 struct eng_tokenizer *tok)
{
	struct eng_json dec = {.file = top->file,
			       .path = "decoder.",
			       .obj = eng_json_field(top, "decoder"),
			       .err = top->err};
	const cJSON *dropout = eng_json_field(model, "dropout");
	bool fallback = false;
	int r = 0;

	r = r ?: eng_json_only_str(model, "continuing_subword_prefix", "");
	r = r ?: eng_json_only_str(model, "end_of_word_suffix", "");
	r = r ?: eng_json_bool_or(model, "byte_fallback", false, &fallback);
	r = r ?: eng_json_bool_or(model, "ignore_merges", false, &tok->ignore_merges);
	if (!r && fallback)
		r = eng_json_refuse(model, "byte_fallback", -ENOTSUP, "false");
	if (!r && cJSON_IsNumber(dropout) && dropout->valuedouble != 0)
		r = eng_json_refuse(model, "dropout", -ENOTSUP, "null");
	if (!r && !eng_json_absent(top, "normalizer") &&
	    !is_empty_sequence(top, "normalizer"))
		r = eng_json_refuse(top, "normalizer", -ENOTSUP, "null");
	if (!r && cJSON_IsObject(dec.obj))
		r = eng_json_only_str(&dec, "type", "ByteLevel");
	return r ?: check_post_processor(top);
}

static int build(struct eng_tokenizer *tok, const struct eng_json *top)
{
	struct eng_json j = {.file = top->file,
			     .path = "model.",
			     .obj = eng_json_field(top, "model"),
			     .err = top->err};
	const cJSON *added = eng_json_field(top, "added_tokens"), *vocab;
	const char *type = NULL;
	s16 letters[LETTER_MAX];
	u32 nr_slots;
	int r;

	if (!cJSON_IsObject(j.obj))
		return eng_json_refuse(top, "model", -EINVAL, "an object");
	r = eng_json_str(&j, "type", &type);
	r = r ?: eng_json_only_str(&j, "type", "BPE");
	r = r ?: check_options(top, &j, tok);
	if (r)
		return r;
	vocab = eng_json_field(&j, "vocab");
	if (!cJSON_IsObject(vocab) || !vocab->child)
		return eng_json_refuse(&j, "vocab", -EINVAL, "an object with tokens");
	r = count_ids(top, vocab, added, &tok->nr_pieces);
	if (r)
		return r;
	nr_slots = table_slots(tok->nr_pieces);
	tok->pieces = calloc(tok->nr_pieces, sizeof(*tok->pieces));
	tok->slots = malloc(nr_slots * sizeof(*tok->slots));
	if (!tok->pieces || !tok->slots)
		return eng_refuse(top->err, -ENOMEM, "%s: out of memory", top->file);
	memset(tok->slots, 0xff, nr_slots * sizeof(*tok->slots));
	memset(tok->byte_ids, 0xff, sizeof(tok->byte_ids));
	tok->slot_mask = nr_slots - 1;
	letters_init(letters);
	r = load_vocab(tok, top, vocab, letters);
	r = r ?: load_merges(tok, &j, eng_json_field(&j, "merges"), letters);
	r = r ?: load_added(tok, top, added);
	return r ?: load_pre_tokenizer(tok, top);
}

int eng_tokenizer_load(const char *path, struct eng_tokenizer **ret, struct eng_err *err)
{
	struct eng_json top = {.file = path, .path = "", .err = err};
	struct eng_tokenizer *tok;
	cJSON *root = NULL;
	int r;

	r = eng_json_load(path, &root, err);
	if (r)
		return r;
	top.obj = root;
	tok = calloc(1, sizeof(*tok));
	r = tok ? build(tok, &top) : eng_refuse(err, -ENOMEM, "%s: out of memory", path);
	cJSON_Delete(root);
	if (r)
		eng_tokenizer_free(tok);
	else
		*ret = tok;
	return r;
}

void eng_tokenizer_free(struct eng_tokenizer *tok)
{
	if (!tok)
		return;
	for (u32 i = 0; i < tok->nr_splits; i++)
		pcre2_code_free(tok->splits[i]);
	for (u32 i = 0; tok->pieces && i < tok->nr_pieces; i++)
		free(tok->pieces[i].bytes);
	free(tok->pieces);
	free(tok->slots);
	free(tok->merges);
	free(tok->added);
	free(tok);
}
