/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.c - the held-out text token for token, O54's stream decoding, long words, and
 * tokenizer files that are refused.
 */
#include "engine/model/tokenizer.h"
#include "tests/unit/model/modeldir.h"

static struct eng_tokenizer *load(void)
{
	struct eng_tokenizer *tok = NULL;
	struct eng_err err = {{0}};

	if (eng_tokenizer_load(md_model("tiny-k2/tokenizer.json"), &tok, &err))
		KVT_FAIL("%s", err.text);
	return tok;
}

/* heldout_ids.json: [1, 2, ...] */
static u32 *load_ids(size_t *ret_nr)
{
	size_t bytes, nr = 0;
	char *text = md_read(md_model("heldout_ids.json"), &bytes), *p = text;
	u32 *ids = malloc((bytes / 2 + 1) * sizeof(*ids));

	KVT_EXPECT(ids && *p == '[');
	while (*p == '[' || *p == ',' || *p == ' ') {
		ids[nr++] = (u32)strtoul(p + 1, &p, 10);
		while (*p == ' ' || *p == '\n')
			p++;
	}
	KVT_EXPECT(*p == ']');
	free(text);
	*ret_nr = nr;
	return ids;
}

KVT_TEST(heldout_text_is_reproduced)
{
	struct eng_tokenizer *tok = load();
	size_t bytes, nr_want, at = 0, nr = 0;
	char *text = md_read(md_model("heldout.txt"), &bytes);
	u32 *want = load_ids(&nr_want), *ids;
	int documents = 0;

	KVT_EXPECT_EQ(nr_want, 316373);
	while (at <= bytes) {
		size_t n = strnlen(text + at, bytes - at), k = 0;

		KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text + at, n, 0, &ids, &k), 0);
		KVT_EXPECT(nr + k < nr_want);
		for (size_t i = 0; i < k; i++)
			if (ids[i] != want[nr + i])
				KVT_FAIL("document %d, token %zu is %u, expected %u",
					 documents, i, ids[i], want[nr + i]);
		KVT_EXPECT_EQ(want[nr + k], 0); /* the end token after each */
		nr += k + 1;
		at += n + 1;
		documents++;
		free(ids);
	}
	KVT_EXPECT_EQ(nr, nr_want);
	KVT_EXPECT_EQ(documents, 164);
	free(want);
	free(text);
	eng_tokenizer_free(tok);
}

KVT_TEST(heldout_text_is_decoded_back)
{
	struct eng_tokenizer *tok = load();
	size_t bytes, nr, from = 0, at = 0, n;
	char *text = md_read(md_model("heldout.txt"), &bytes), *out;
	u32 *ids = load_ids(&nr);

	for (size_t i = 0; i < nr; i++) {
		if (ids[i])
			continue;
		KVT_EXPECT_EQ(
			eng_tokenizer_decode(tok, ids + from, i - from, false, &out, &n),
			0);
		KVT_EXPECT(n <= bytes - at && !memcmp(out, text + at, n));
		at += n;
		KVT_EXPECT(at == bytes || text[at] == 0);
		at++;
		from = i + 1;
		free(out);
	}
	KVT_EXPECT_EQ(at, bytes + 1);
	/* all at once: end tokens are text unless special ones are left out */
	KVT_EXPECT_EQ(eng_tokenizer_decode(tok, ids, nr, true, &out, &n), 0);
	KVT_EXPECT_EQ(n, bytes + 1 - 164);
	free(out);
	free(ids);
	free(text);
	eng_tokenizer_free(tok);
}

static void expect_ids(const struct eng_tokenizer *tok, const char *text, size_t n,
		       u32 flags, size_t want_nr, u32 first)
{
	u32 *ids;
	size_t nr;

	KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text, n, flags, &ids, &nr), 0);
	KVT_EXPECT_EQ(nr, want_nr);
	if (nr)
		KVT_EXPECT_EQ(ids[0], first);
	free(ids);
}

KVT_TEST(added_tokens_are_tokens_unless_plain)
{
	struct eng_tokenizer *tok = load();
	const char *text = "<|endoftext|>a<|pad|>";
	u32 *ids;
	size_t nr;

	expect_ids(tok, "<|endoftext|>", 13, 0, 1, 0);
	expect_ids(tok, "", 0, 0, 0, 0);
	KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text, strlen(text), 0, &ids, &nr), 0);
	KVT_EXPECT_EQ(nr, 3);
	KVT_EXPECT(ids[0] == 0 && ids[2] == 1);
	free(ids);
	KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text, strlen(text), ENG_ENCODE_PLAIN,
					   &ids, &nr),
		      0);
	KVT_EXPECT(nr > 3);
	for (size_t i = 0; i < nr; i++)
		KVT_EXPECT(ids[i] > 1);
	free(ids);
	KVT_EXPECT_EQ(eng_tokenizer_find(tok, "<|endoftext|>"), 0);
	KVT_EXPECT_EQ(eng_tokenizer_find(tok, "no such token"), -1);
	eng_tokenizer_free(tok);
}

/* Any bytes at all come back as they were, whatever the pieces. */
KVT_TEST(any_bytes_round_trip)
{
	struct eng_tokenizer *tok = load();
	char text[600], *out;

	for (int round = 0; round < 2000; round++) {
		size_t n = kvt_rand_below(sizeof(text)), nr, bytes;
		u32 *ids, kind = kvt_rand_below(3);

		for (size_t i = 0; i < n; i++)
			text[i] = kind == 0   ? (char)kvt_rand64()
				  : kind == 1 ? "ab \n1\xc3\xa9"[kvt_rand_below(7)]
					      : (char)(32 + kvt_rand_below(95));
		KVT_EXPECT_EQ(
			eng_tokenizer_encode(tok, text, n, ENG_ENCODE_PLAIN, &ids, &nr),
			0);
		KVT_EXPECT_EQ(eng_tokenizer_decode(tok, ids, nr, false, &out, &bytes), 0);
		KVT_EXPECT(bytes == n && !memcmp(out, text, n));
		free(ids);
		free(out);
	}
	eng_tokenizer_free(tok);
}

/* One word of a megabyte: n log n, and the same tokens as many short words would suggest.
 */
KVT_TEST(long_words_are_merged_in_time)
{
	struct eng_tokenizer *tok = load();
	size_t n = 1000000, nr, bytes;
	char *text = malloc(n), *out;
	struct timespec t0, t1;
	u32 *ids;

	KVT_EXPECT(text);
	for (size_t i = 0; i < n; i++)
		text[i] = (char)('a' + kvt_rand_below(26));
	clock_gettime(CLOCK_MONOTONIC, &t0);
	KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text, n, 0, &ids, &nr), 0);
	clock_gettime(CLOCK_MONOTONIC, &t1);
	KVT_NOTE("1 MB word: %zu tokens, %.3f s", nr,
		 (double)(t1.tv_sec - t0.tv_sec) +
			 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec));
	KVT_EXPECT(t1.tv_sec - t0.tv_sec < 20);
	KVT_EXPECT_EQ(eng_tokenizer_decode(tok, ids, nr, false, &out, &bytes), 0);
	KVT_EXPECT(bytes == n && !memcmp(out, text, n));
	free(ids);
	free(out);
	memset(text, ' ', n);
	KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text, n, 0, &ids, &nr), 0);
	free(ids);
	free(text);
	eng_tokenizer_free(tok);
}

/* The heap of long words and the scan of short ones are the same algorithm. */
KVT_TEST(long_and_short_words_agree)
{
	struct eng_tokenizer *tok = load();

	for (int round = 0; round < 500; round++) {
		char text[65];
		u32 *a, *b, len = 33 + kvt_rand_below(32);
		size_t na, nb, same;

		/* letters that merge often; a word over 32 bytes goes through the heap */
		for (u32 i = 0; i < len; i++)
			text[i] = "etaoinshr"[kvt_rand_below(9)];
		KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text, len, 0, &a, &na), 0);
		/* its tokens, one by one, are single tokens by the scan as well */
		for (size_t i = 0, at = 0; i < na; i++) {
			eng_tokenizer_piece(tok, a[i], &same, NULL);
			if (same <= 32) {
				KVT_EXPECT_EQ(eng_tokenizer_encode(tok, text + at, same,
								   0, &b, &nb),
					      0);
				KVT_EXPECT_EQ(nb, 1);
				KVT_EXPECT_EQ(b[0], a[i]);
				free(b);
			}
			at += same;
		}
		free(a);
	}
	eng_tokenizer_free(tok);
}

/* ------------------------------------------------------- O54: streams of bytes */

/* One-shot decode of @n bytes, and the same bytes in the chunks that @cuts says. */
static size_t decode_chunks(const char *bytes, size_t n, u32 cuts, char *out)
{
	struct eng_detok d;
	size_t from = 0, done = 0;

	eng_detok_init(&d, NULL, false);
	for (size_t i = 1; i <= n; i++) {
		if (i < n && !(cuts & 1u << i))
			continue;
		done += eng_utf8_push(&d, bytes + from, i - from, out + done);
		from = i;
	}
	return done + eng_detok_flush(&d, out + done);
}

#define R "\xef\xbf\xbd"

static const struct {
	const char *bytes, *want;
} utf8_cases[] = {
	{"plain", "plain"},
	{"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80"},
	{"a\xc3\xa9z", "a\xc3\xa9z"},
	{"\x80", R},
	{"\x80\xbf", R R},
	{"\xc0\xaf", R R},		  /* overlong '/' */
	{"\xe0\x80\xaf", R R R},	  /* overlong, three bytes */
	{"\xf0\x80\x80\xaf", R R R R},	  /* overlong, four */
	{"\xed\xa0\x80", R R R},	  /* surrogate D800 */
	{"\xed\xbf\xbf", R R R},	  /* surrogate DFFF */
	{"\xed\x9f\xbf", "\xed\x9f\xbf"}, /* D7FF is a character */
	{"\xf4\x90\x80\x80", R R R R},	  /* above 10FFFF */
	{"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
	{"\xf5\x80\x80\x80", R R R R},
	{"\xff\xfe", R R},
	{"\xe2\x82", R}, /* cut off: one maximal subpart */
	{"\xf0\x9f\x98", R},
	{"\xe2\x82\x41", R "A"},
	{"\xe2\x82\xe2\x82\xac", R "\xe2\x82\xac"},
	{"\xf0\x9f\xc3\xa9", R "\xc3\xa9"},
	{"\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64", R R R "b" R "c" R R "d"},
	{"\xc2\xc2\xc2", R R R},
};

KVT_TEST(o54_strict_decoding_of_a_stream)
{
	for (size_t c = 0; c < KV_ARRAY_SIZE(utf8_cases); c++) {
		const char *bytes = utf8_cases[c].bytes, *want = utf8_cases[c].want;
		size_t n = strlen(bytes);

		/* every way to cut the bytes into chunks */
		for (u32 cuts = 0; cuts < 1u << n; cuts++) {
			char out[128] = "";
			size_t got = decode_chunks(bytes, n, cuts, out);

			out[got] = 0;
			if (strcmp(out, want))
				KVT_FAIL("case %zu cut %x: \"%s\", expected \"%s\"", c,
					 cuts, out, want);
		}
	}
}

KVT_TEST(o54_nothing_before_a_character_is_complete)
{
	const char emoji[] = "\xf0\x9f\x98\x80";
	struct eng_detok d;
	char out[64];

	eng_detok_init(&d, NULL, false);
	KVT_EXPECT_EQ(eng_utf8_push(&d, emoji, 1, out), 0);
	KVT_EXPECT_EQ(eng_utf8_push(&d, emoji + 1, 1, out), 0);
	KVT_EXPECT_EQ(eng_utf8_push(&d, emoji + 2, 1, out), 0);
	KVT_EXPECT_EQ(eng_utf8_push(&d, emoji + 3, 1, out), 4);
	KVT_EXPECT(!memcmp(out, emoji, 4));
	KVT_EXPECT_EQ(eng_detok_flush(&d, out), 0);
	KVT_EXPECT_EQ(eng_utf8_push(&d, emoji, 3, out), 0);
	KVT_EXPECT_EQ(eng_detok_flush(&d, out), 3);
	KVT_EXPECT_EQ(eng_detok_flush(&d, out), 0);
}

/* The same through tokens: random ids, streamed, against one decode of all their bytes.
 */
KVT_TEST(o54_streamed_tokens_equal_one_shot)
{
	struct eng_tokenizer *tok = load();
	char *out = malloc(1 << 20), *text, *whole = malloc(1 << 20);
	u32 ids[200], size = eng_tokenizer_size(tok);

	KVT_EXPECT(out && whole);
	for (int round = 0; round < 300; round++) {
		size_t done = 0, bytes, nr = 1 + kvt_rand_below(KV_ARRAY_SIZE(ids)), n;
		struct eng_detok d;

		/* the first 256 tokens after the special ones are single bytes */
		for (size_t i = 0; i < nr; i++)
			ids[i] = 2 + kvt_rand_below(round % 2 ? 256 : size - 2);
		eng_detok_init(&d, tok, true);
		for (size_t i = 0; i < nr; i++) {
			n = eng_detok_push(&d, ids[i], out + done);
			KVT_EXPECT(n <= eng_detok_room(tok));
			done += n;
		}
		done += eng_detok_flush(&d, out + done);
		KVT_EXPECT_EQ(eng_tokenizer_decode(tok, ids, nr, true, &text, &bytes), 0);
		eng_detok_init(&d, tok, true);
		n = eng_utf8_push(&d, text, bytes, whole);
		n += eng_detok_flush(&d, whole + n);
		KVT_EXPECT(n == done && !memcmp(out, whole, n));
		free(text);
	}
	KVT_EXPECT_EQ(
		eng_tokenizer_decode(tok, (u32[]){size}, 1, false, &text, &(size_t){0}),
		-EINVAL);
	free(out);
	free(whole);
	eng_tokenizer_free(tok);
}

/* ---------------------------------------------------------------- other files */

static int load_edited(const char *field, const char *value, struct eng_err *err)
{
	char *dir = md_clone("tiny-k2");
	struct eng_tokenizer *tok;
	int r;

	md_edit(dir, "tokenizer.json", field, value);
	err->text[0] = 0;
	r = eng_tokenizer_load(md_path("%s/tokenizer.json", dir), &tok, err);
	if (!r)
		eng_tokenizer_free(tok);
	md_remove(dir);
	return r;
}

KVT_TEST(other_tokenizers_are_refused_by_field)
{
	static const struct {
		const char *field, *value, *has;
	} cases[] = {
		{"model.merges", NULL, "model.merges is missing"},
		{"model.merges", "[]", "model.merges is []"},
		{"model.merges", "[[\"a\"]]", "merge 0 is neither"},
		{"model.merges", "[\"a b c\"]", "merge 0 is neither"},
		{"model.merges", "[\"i n\", \"i n\"]",
		 "merge 1 (\"i\", \"n\") is there twice"},
		{"model.merges", "[[\"zz\",\"qqqq\"]]",
		 "names tokens that are not in model.vocab"},
		{"model.vocab", NULL, "model.vocab is missing"},
		{"model.vocab", "{\"a\":-1}", "id of \"a\" is not in"},
		{"model.vocab", "{\"a\":99999999}", "id of \"a\" is not in"},
		{"model.vocab", "{\"a\":1.5}", "id of \"a\" is not in"},
		{"model.vocab", "{\"a\":5,\"b\":5}", "id 5 has two tokens"},
		{"model.type", "\"Unigram\"", "model.type is \"Unigram\""},
		{"model.byte_fallback", "true", "model.byte_fallback is true"},
		{"model.dropout", "0.1", "model.dropout is 0.1"},
		{"model.end_of_word_suffix", "\"</w>\"",
		 "end_of_word_suffix is \"</w>\""},
		{"model", "7", "model is 7"},
		{"normalizer", "{\"type\":\"NFC\"}", "normalizer is {\"type\":\"NFC\"}"},
		{"pre_tokenizer", "null", "pre_tokenizer is null"},
		{"pre_tokenizer", "{\"type\":\"Metaspace\"}",
		 "pre_tokenizer.type is \"Metaspace\""},
		{"pre_tokenizer.pretokenizers", "[]", "pre_tokenizer"},
		{"pre_tokenizer.pretokenizers",
		 "[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\"}]",
		 "pattern, byte 1"},
		{"pre_tokenizer.pretokenizers",
		 "[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\"}]",
		 "behavior is \"Removed\""},
		{"post_processor", "{\"type\":\"TemplateProcessing\"}",
		 "post_processor is {\"type\":\"TemplateProcessing\"}"},
		{"post_processor",
		 "{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},{\"type\":"
		 "\"TemplateProcessing\"}]}",
		 "post_processor"},
		{"post_processor", "7", "post_processor is 7"},
		{"decoder.type", "\"WordPiece\"", "decoder.type is \"WordPiece\""},
		{"added_tokens", "[{\"id\":0}]", "added_tokens"},
		{"added_tokens", "[{\"id\":7,\"content\":\"<x>\"}]",
		 "id 7 has another token"},
		{"added_tokens",
		 "[{\"id\":0,\"content\":\"<|endoftext|>\",\"lstrip\":true}]", "lstrip"},
	};
	struct eng_err err;

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		int r = load_edited(cases[i].field, cases[i].value, &err);

		KVT_NOTE("%s", err.text);
		KVT_EXPECT(r < 0);
		KVT_EXPECT_HAS(err.text, "tokenizer.json");
		KVT_EXPECT_HAS(err.text, cases[i].has);
	}
}

KVT_TEST(both_forms_of_merges_and_patterns)
{
	static const struct {
		const char *field, *value;
	} cases[] = {
		{"model.merges", "[\"i n\", \"h e\"]"},
		{"model.merges", "[[\"i\", \"n\"], [\"h\", \"e\"]]"},
	};
	struct eng_err err;

	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++)
		KVT_EXPECT_EQ(load_edited(cases[i].field, cases[i].value, &err), 0);
	KVT_EXPECT_EQ(load_edited("normalizer",
				  "{\"type\":\"Sequence\",\"normalizers\":[]}", &err),
		      0);
	KVT_EXPECT_EQ(load_edited("post_processor", "{\"type\":\"ByteLevel\"}", &err), 0);
	KVT_EXPECT_EQ(load_edited("post_processor",
				  "{\"type\":\"Sequence\",\"processors\":[{\"type\":"
				  "\"ByteLevel\",\"trim_offsets\":false}]}",
				  &err),
		      0);
	KVT_EXPECT_EQ(load_edited("pre_tokenizer",
				  "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
				  &err),
		      0);
	KVT_EXPECT_EQ(
		load_edited(
			"pre_tokenizer.pretokenizers",
			"[{\"type\":\"Split\",\"pattern\":{\"String\":\".\"},\"behavior\":"
			"\"Isolated\"},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
			"\"use_regex\":false}]",
			&err),
		0);
}

KVT_TEST(mutated_tokenizers_never_crash)
{
	char *dir = md_temp(), *path = strdup(md_path("%s/tokenizer.json", dir));
	const char *text =
		"{\"added_tokens\":[{\"id\":0,\"content\":\"<e>\",\"special\":true}],"
		"\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
		"\"model\":{\"type\":\"BPE\",\"vocab\":{\"<e>\":0,\"a\":1,\"b\":2,\"ab\":3,"
		"\"\xc4\xa0\":4,\"abb\":5},\"merges\":[[\"a\",\"b\"],\"ab b\"]}}";
	size_t n = strlen(text);
	int opened = 0, refusals = 0;

	for (int round = 0; round < 3000; round++) {
		struct eng_tokenizer *tok;
		struct eng_err err = {{0}};
		char raw[512];
		u32 *ids;
		size_t nr;

		memcpy(raw, text, n);
		for (u32 i = round ? 1 + kvt_rand_below(3) : 0; i; i--)
			raw[kvt_rand_below((u32)n)] =
				kvt_rand_below(2) ? text[kvt_rand_below((u32)n)]
						  : (char)kvt_rand64();
		md_write(path, raw, n);
		if (eng_tokenizer_load(path, &tok, &err)) {
			KVT_EXPECT(err.text[0]);
			refusals++;
			continue;
		}
		opened++;
		if (!eng_tokenizer_encode(tok, "abb ab<e>b", 10, 0, &ids, &nr))
			free(ids);
		eng_tokenizer_free(tok);
	}
	KVT_NOTE("%d opened, %d refused", opened, refusals);
	KVT_EXPECT(opened > 0 && refusals > 0);
	free(path);
	md_remove(dir);
}

KVT_MAIN()
