/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.c - what a file may not say: cases O51, O52, O53 and their neighbours, and
 * a seeded mutation of headers that must never crash.
 */
#include <sys/resource.h>
#include "engine/model/safetensors.h"
#include "tests/unit/model/modeldir.h"

#define F32_4(name, b, e) \
	"\"" name "\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[" #b "," #e "]}"

static const u8 zeros[4096];
static volatile u8 sink; /* so that reading is not optimised away */

/* Opens a file with this header; the file says what it says. */
static int open_text(const char *header, size_t nr_data, struct eng_err *err)
{
	char *dir = md_temp(), *path = strdup(md_path("%s/model.safetensors", dir));
	struct eng_tensors ts;
	int r;

	md_write_shard(path, strlen(header), header, zeros, nr_data);
	err->text[0] = 0;
	r = eng_shard_open(path, &ts, err);
	if (!r)
		eng_tensors_close(&ts);
	else
		KVT_EXPECT_HAS(err->text, "model.safetensors");
	free(path);
	md_remove(dir);
	return r;
}

static void refused(const char *header, size_t nr_data, const char *tensor,
		    const char *why)
{
	struct eng_err err;

	KVT_EXPECT(open_text(header, nr_data, &err) < 0);
	KVT_NOTE("%s", strrchr(err.text, '/') + 1);
	KVT_EXPECT_HAS(err.text, tensor);
	KVT_EXPECT_HAS(err.text, why);
}

KVT_TEST(good_file_opens)
{
	char *dir = md_temp(), *path = strdup(md_path("%s/model.safetensors", dir));
	const char *header = "{\"__metadata__\":{\"format\":\"pt\"}," F32_4("b", 16, 32) "," F32_4(
		"a", 0,
		16) ",\"empty\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[32,32]},"
		    "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[32,40]}}   ";
	struct eng_tensors ts;
	struct eng_err err;
	float data[10] = {1, 2, 3, 4, 5, 6, 7, 8};

	md_write_shard(path, strlen(header), header, data, 40);
	KVT_EXPECT_EQ(eng_tensors_open(dir, &ts, &err), 0);
	KVT_EXPECT_EQ(ts.nr, 4);
	KVT_EXPECT(eng_tensor_is(eng_tensors_find(&ts, "b"), ENG_ST_F32, 4, 0));
	KVT_EXPECT(!memcmp(eng_tensors_find(&ts, "b")->data, data + 4, 16));
	KVT_EXPECT(!eng_tensors_find(&ts, "c"));
	KVT_EXPECT_EQ(eng_tensors_find(&ts, "scalar")->nr_dims, 0);
	eng_tensors_close(&ts);
	free(path);
	md_remove(dir);
}

KVT_TEST(o51_duplicate_names_are_refused)
{
	refused("{" F32_4("k.0", 0, 16) "," F32_4("k.0", 16, 32) "}", 32, "k.0", "twice");
	/* equal spans too: nothing says which entry was meant */
	refused("{" F32_4("k.0", 0, 16) "," F32_4("k.0", 0, 16) "}", 16, "k.0", "twice");
	/* escapes spell the same name */
	refused("{" F32_4("k.0", 0, 16) "," F32_4("k\\u002e0", 16, 32) "}", 32, "k.0",
		"twice");
	/* and inside an entry */
	refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"shape\":[4],\"data_offsets\":[0,16]}}",
		16, "shape", "twice");
}

KVT_TEST(o51_a_name_in_two_shards_is_refused)
{
	char *dir = md_temp();
	const char *one = "{" F32_4("k.0", 0, 16) "}";
	const char *two = "{" F32_4("k.0", 0, 16) "," F32_4("k.1", 16, 32) "}";
	const char *index =
		"{\"weight_map\":{\"k.0\":\"a.safetensors\",\"k.1\":\"b.safetensors\"}}";
	struct eng_tensors ts;
	struct eng_err err;

	md_write_shard(md_path("%s/a.safetensors", dir), strlen(one), one, zeros, 16);
	md_write_shard(md_path("%s/b.safetensors", dir), strlen(two), two, zeros, 32);
	md_write(md_path("%s/model.safetensors.index.json", dir), index, strlen(index));
	KVT_EXPECT(eng_tensors_open(dir, &ts, &err) < 0);
	KVT_EXPECT_HAS(err.text, "tensor k.0 is also in");
	md_remove(dir);
}

static long peak_kib(void)
{
	struct rusage ru;

	getrusage(RUSAGE_SELF, &ru);
	return ru.ru_maxrss;
}

/* A sparse file of @bytes that claims a header of @claim; Return: growth of memory in KiB
 */
static long try_claim(unsigned long long claim, off_t bytes, int want, const char *why)
{
	char *dir = md_temp(), *path = strdup(md_path("%s/model.safetensors", dir));
	struct eng_tensors ts;
	struct eng_err err;
	long before;

	md_write_shard(path, claim, "{}", NULL, 0);
	KVT_EXPECT_EQ(truncate(path, bytes), 0);
	before = peak_kib();
	KVT_EXPECT_EQ(eng_shard_open(path, &ts, &err), want);
	before = peak_kib() - before;
	KVT_EXPECT_HAS(err.text, why);
	free(path);
	md_remove(dir);
	return before;
}

KVT_TEST(o52_header_length_is_checked_before_memory_is_used)
{
	const struct {
		unsigned long long claim;
		off_t bytes;
		int want;
		const char *why;
	} cases[] = {
		{100000001, 200000000, -EFBIG,
		 "100000001 is over the limit of 100000000 bytes"},
		{1ull << 63, 4096, -EFBIG,
		 "9223372036854775808 is over the limit of 100000000"},
		{UINT64_MAX, 4096, -EFBIG, "over the limit of 100000000 bytes"},
		{1ull << 40, 10, -EFBIG, "1099511627776 is over the limit"},
		{100000000, 10, -EINVAL, "header length 100000000, but 2 bytes follow"},
		{100000000, 100000007, -EINVAL, "truncated"},
		{0, 4096, -EINVAL, "header length 0"},
		{1, 4096, -EINVAL, "header length 1"},
		{9, 16, -EINVAL, "header length 9, but 8 bytes follow"},
	};
	long grown;

	/* the first open pulls in what printf and friends need once */
	try_claim(1ull << 62, 4096, -EFBIG, "over the limit");
	for (size_t i = 0; i < KV_ARRAY_SIZE(cases); i++) {
		grown = try_claim(cases[i].claim, cases[i].bytes, cases[i].want,
				  cases[i].why);
#ifndef KV_SANITIZED
		KVT_EXPECT(grown < 64);
#endif
		(void)grown;
	}
}

KVT_TEST(o52_header_of_exactly_the_limit_is_read)
{
	char *dir = md_temp(), *path = strdup(md_path("%s/model.safetensors", dir)), *raw;
	const char *header = "{" F32_4("a", 0, 16) "}";
	size_t n = strlen(header), bytes = 8 + 100000000 + 16;
	struct eng_tensors ts;
	struct eng_err err = {{0}};

	raw = malloc(bytes);
	KVT_EXPECT(raw);
	memset(raw, ' ', bytes);
	memcpy(raw, (u64[]){100000000}, 8);
	memcpy(raw + 8, header, n);
	md_write(path, raw, bytes);
	free(raw);
	KVT_EXPECT_EQ(eng_shard_open(path, &ts, &err), 0);
	eng_tensors_close(&ts);
	free(path);
	md_remove(dir);
}

KVT_TEST(short_files_are_refused)
{
	char *dir = md_temp(), *path = strdup(md_path("%s/model.safetensors", dir));
	struct eng_tensors ts;
	struct eng_err err;

	for (size_t n = 0; n < 8; n++) {
		md_write(path, zeros, n);
		KVT_EXPECT_EQ(eng_shard_open(path, &ts, &err), -EINVAL);
		KVT_EXPECT_HAS(err.text, "too short");
	}
	unlink(path);
	KVT_EXPECT_EQ(eng_shard_open(path, &ts, &err), -ENOENT);
	KVT_EXPECT_EQ(mkfifo(path, 0600), 0); /* must not hang */
	KVT_EXPECT_EQ(eng_shard_open(path, &ts, &err), -EINVAL);
	KVT_EXPECT_HAS(err.text, "not a regular file");
	KVT_EXPECT_EQ(eng_shard_open(dir, &ts, &err), -EINVAL);
	free(path);
	md_remove(dir);
}

KVT_TEST(o53_shape_and_span_must_agree)
{
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[32,8],\"data_offsets\":[0,4096]}}",
		4096, "w", "shape and dtype need 1024 bytes, data_offsets span 4096");
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[32,8],\"data_offsets\":[0,65536]}}",
		4096, "w", "data ends at 65536");
	/* 2^62 * 16 * 4 bytes = 2^68 wraps to 0, which is what the span says */
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[4294967296,1073741824,16],"
		"\"data_offsets\":[0,0]}}",
		0, "w", "overflow");
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]}}", 16,
		"w", "ends at 0 before it begins at 16");
	refused("{" F32_4("a", 0, 16) "," F32_4("w", 8, 24) "}", 24, "w",
		"overlaps tensor a");
	refused("{" F32_4("a", 0, 16) "," F32_4("w", 0, 16) "}", 16, "", "overlaps");
	refused("{" F32_4("a", 0, 16) "," F32_4("w", 20, 36) "}", 36, "w",
		"hole of 4 bytes");
	refused("{" F32_4("w", 4, 20) "}", 20, "w", "hole of 4 bytes");
	refused("{" F32_4("w", 0, 16) "}", 20, "4 bytes after the last",
		"belong to none");
	refused("{" F32_4("w", 0, 16) "}", 15, "w", "truncated");
}

KVT_TEST(odd_entries_are_refused)
{
	static const char *const shapes[] = {
		"-1", "1.5", "1e30", "\"4\"", "null", "[4]", "9007199254740994"};
	char header[256];

	for (size_t i = 0; i < KV_ARRAY_SIZE(shapes); i++) {
		snprintf(
			header, sizeof(header),
			"{\"w\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[0,16]}}",
			shapes[i]);
		refused(header, 16, "w", "shape");
		snprintf(
			header, sizeof(header),
			"{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,%s]}}",
			shapes[i]);
		refused(header, 16, "w", "data_");
	}
	refused("{\"w\":{\"dtype\":\"F33\",\"shape\":[4],\"data_offsets\":[0,16]}}", 16,
		"w", "dtype");
	refused("{\"w\":{\"shape\":[4],\"data_offsets\":[0,16]}}", 16, "w", "entry");
	refused("{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,16]}}", 16, "w", "entry");
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[4]}}", 16, "w", "entry");
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0]}}", 16, "w",
		"two whole");
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],\"x\":1}}",
		16, "w", "entry");
	refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,16]}}",
		16, "w", "shape is not up to 8");
	refused("{\"w\":7}", 0, "w", "entry");
	refused("[1,2]", 0, "", "begin with '{'");
	refused("{\"w\":", 0, "", "not JSON");
	refused("{} x", 0, "", "after the JSON value");
}

KVT_TEST(deep_headers_are_refused)
{
	size_t n = 1000000;
	char *header = malloc(2 * n + 8);
	struct eng_err err;

	KVT_EXPECT(header);
	strcpy(header, "{\"a\":");
	memset(header + 5, '[', n);
	strcpy(header + 5 + n, "}");
	KVT_EXPECT_EQ(open_text(header, 0, &err), -EINVAL);
	KVT_EXPECT_HAS(err.text, "nested 1000001 deep, the limit is 64");
	free(header);
}

/* ---------------------------------------------------------------- the index */

static void index_refused(const char *index, const char *part, const char *why)
{
	char *dir = md_temp();
	const char *a = "{" F32_4("k.0", 0, 16) "}", *b = "{" F32_4("k.1", 0, 16) "}";
	struct eng_tensors ts;
	struct eng_err err;

	md_write_shard(md_path("%s/a.safetensors", dir), strlen(a), a, zeros, 16);
	md_write_shard(md_path("%s/b.safetensors", dir), strlen(b), b, zeros, 16);
	md_write(md_path("%s/model.safetensors.index.json", dir), index, strlen(index));
	KVT_EXPECT(eng_tensors_open(dir, &ts, &err) < 0);
	KVT_NOTE("%s", err.text);
	KVT_EXPECT_HAS(err.text, part);
	KVT_EXPECT_HAS(err.text, why);
	md_remove(dir);
}

KVT_TEST(index_and_shards_must_agree)
{
	index_refused(
		"{\"weight_map\":{\"k.0\":\"a.safetensors\",\"k.1\":\"c.safetensors\"}}",
		"c.safetensors", "No such file");
	index_refused(
		"{\"weight_map\":{\"k.0\":\"a.safetensors\",\"k.1\":\"b.safetensors\","
		"\"k.2\":\"b.safetensors\"}}",
		"k.2", "b.safetensors, which lacks it");
	index_refused(
		"{\"weight_map\":{\"k.0\":\"b.safetensors\",\"k.1\":\"a.safetensors\"}}",
		"k.0", "which lacks it");
	index_refused(
		"{\"weight_map\":{\"k.0\":\"a.safetensors\",\"k.0\":\"a.safetensors\"}}",
		"k.0", "twice");
	index_refused("{\"weight_map\":{\"k.0\":\"../a.safetensors\"}}", "k.0",
		      "plain file name");
	index_refused("{\"weight_map\":{\"k.0\":\"/etc/passwd\"}}", "k.0",
		      "plain file name");
	index_refused("{\"weight_map\":{\"k.0\":7}}", "k.0", "plain file name");
	index_refused("{\"weight_map\":{}}", "index.json", "weight_map");
	index_refused("{\"weight_map\":[]}", "index.json", "weight_map");
	index_refused("{}", "index.json", "weight_map");
	index_refused("[]", "index.json", "object");
	index_refused("", "index.json", "not JSON");
}

KVT_TEST(a_tensor_the_index_leaves_out_is_refused)
{
	char *dir = md_temp();
	const char *a = "{" F32_4("k.0", 0, 16) "," F32_4("k.9", 16, 32) "}";
	const char *index = "{\"weight_map\":{\"k.0\":\"a.safetensors\"}}";
	struct eng_tensors ts;
	struct eng_err err;

	md_write_shard(md_path("%s/a.safetensors", dir), strlen(a), a, zeros, 32);
	md_write(md_path("%s/model.safetensors.index.json", dir), index, strlen(index));
	KVT_EXPECT_EQ(eng_tensors_open(dir, &ts, &err), -EINVAL);
	KVT_EXPECT_HAS(err.text, "k.9: not in model.safetensors.index.json");
	unlink(md_path("%s/model.safetensors.index.json", dir));
	KVT_EXPECT_EQ(eng_tensors_open(dir, &ts, &err), -ENOENT);
	KVT_EXPECT_HAS(err.text, "neither");
	md_remove(dir);
}

/* ------------------------------------------------------------------ mutation */

/* A real file: random damage to its first bytes is refused or harmless, never a crash. */
KVT_TEST(mutated_headers_never_crash)
{
	const char *header = "{\"__metadata__\":{\"format\":\"pt\"}," F32_4(
		"model.layers.0.a", 0,
		16) ","
		    "\"m\":{\"dtype\":\"BF16\",\"shape\":[2,4],\"data_offsets\":[16,32]},"
		    "\"n\":{\"dtype\":\"F8_E4M3\",\"shape\":[8],\"data_offsets\":[32,40]}}";
	size_t n = strlen(header), bytes = 8 + n + 40;
	static const char alphabet[] = "{}[]\",:0123456789eE+-.\\ unltrfase";
	char *dir = md_temp(), *path = strdup(md_path("%s/model.safetensors", dir)), *raw;
	int opened = 0, refusals = 0;

	raw = malloc(bytes);
	KVT_EXPECT(raw);
	for (int round = 0; round < 4000; round++) {
		struct eng_tensors ts;
		struct eng_err err = {{0}};
		u32 hits = 1 + kvt_rand_below(4);

		memset(raw, 0, bytes);
		memcpy(raw, (u64[]){n}, 8);
		memcpy(raw + 8, header, n);
		for (u32 i = 0; i < hits; i++) {
			u32 at = kvt_rand_below((u32)(8 + n));

			raw[at] = kvt_rand_below(3) && at >= 8
					  ? alphabet[kvt_rand_below(sizeof(alphabet) - 1)]
					  : (char)kvt_rand64();
		}
		md_write(path, raw,
			 kvt_rand_below(8) ? bytes : kvt_rand_below((u32)bytes));
		if (eng_shard_open(path, &ts, &err)) {
			KVT_EXPECT(err.text[0]);
			refusals++;
			continue;
		}
		opened++;
		for (size_t i = 0; i < ts.nr; i++) {
			u8 sum = 0;

			for (u64 k = 0; k < ts.list[i].bytes; k++)
				sum = (u8)(sum + ts.list[i].data[k]);
			sink = sum;
		}
		eng_tensors_close(&ts);
	}
	KVT_NOTE("%d opened, %d refused", opened, refusals);
	KVT_EXPECT(opened > 0 && refusals > 0);
	free(raw);
	free(path);
	md_remove(dir);
}

KVT_MAIN()
