/* SPDX-License-Identifier: Apache-2.0 */
/* The policy file: each bad one is refused as a whole, naming line, field and value. */
#include "kvmd/config.h"

#include <fcntl.h>

#include "tests/kvt.h"

static struct kvd_config config;
static char error[KVD_CONFIG_ERROR_BYTES];

static int parse(const char *text)
{
	memset(&config, 0x5a, sizeof(config));
	return kvd_config_parse(text, strlen(text), &config, error);
}

/* @line 0: not checked */
static void bad(const char *text, int line, const char *path, const char *value)
{
	struct kvd_config before;
	char want[32];

	if (parse(text) != -EINVAL)
		KVT_FAIL("accepted: %s", text);
	memset(&before, 0x5a, sizeof(before));
	if (memcmp(&before, &config, sizeof(config)))
		KVT_FAIL("something was applied: %s", text);
	snprintf(want, sizeof(want), "line %d: ", line);
	if (line && strncmp(error, want, strlen(want)))
		KVT_FAIL("\"%s\" does not start with \"%s\"", error, want);
	KVT_EXPECT_HAS(error, path);
	KVT_EXPECT_HAS(error, value);
}

static const char good[] =
	"{\n"
	"  \"domains\": [{\"name\": \"lab\", \"tenants\": [\"red\", \"green\"]}],\n"
	"  \"tenants\": [\n"
	"    {\"name\": \"red\", \"uids\": [1000, 1001], \"gpus\": [\n"
	"      {\"gpu\": \"host\", \"min\": \"64MiB\", \"high\": \"1GiB\", \"max\": \"2GiB\"},\n"
	"      {\"gpu\": \"*\", \"max\": 4096, \"weight\": 7}]},\n"
	"    {\"name\": \"green\", \"gids\": [50]},\n"
	"    {\"name\": \"blue\", \"uids\": [2000]}\n"
	"  ],\n"
	"  \"pool\": {\"extent\": \"4MiB\", \"idle_shrink_ms\": 500},\n"
	"  \"check\": \"strict\", \"stall_ms\": 250, \"on_stall\": \"kill\",\n"
	"  \"host_bytes\": \"8GiB\"\n"
	"}\n";

KVT_TEST(a_good_file_says_what_it_means)
{
	const struct kvd_config_gpu *q;

	if (parse(good))
		KVT_FAIL("%s", error);
	KVT_EXPECT_EQ(config.nr_tenants, 3);
	KVT_EXPECT_EQ(config.nr_domains, 2);
	KVT_EXPECT_STR(config.domains[config.tenants[0].domain].name, "lab");
	KVT_EXPECT_STR(config.domains[config.tenants[1].domain].name, "lab");
	KVT_EXPECT_STR(config.domains[config.tenants[2].domain].name, "blue");
	q = kvd_config_quota(&config.tenants[0], "host");
	KVT_EXPECT_EQ(q->min_bytes, 64u << 20);
	KVT_EXPECT_EQ(q->high_bytes, 1u << 30);
	KVT_EXPECT_EQ(q->max_bytes, 2ull << 30);
	q = kvd_config_quota(&config.tenants[0],
			     "GPU-00000000-0000-0000-0000-000000000000");
	KVT_EXPECT_EQ(q->max_bytes, 4096);
	KVT_EXPECT_EQ(q->high_bytes, 4096);
	KVT_EXPECT_EQ(q->weight, 7);
	KVT_EXPECT(!kvd_config_quota(&config.tenants[2], "host"));
	KVT_EXPECT_EQ(config.extent_bytes, 4u << 20);
	KVT_EXPECT_EQ(config.idle_shrink_ms, 500);
	KVT_EXPECT_EQ(config.check, KV_CHECK_STRICT);
	KVT_EXPECT_EQ(config.stall_ms, 250);
	KVT_EXPECT_EQ(config.on_stall, KVD_STALL_KILL);
	KVT_EXPECT_EQ(config.host_bytes, 8ull << 30);
}

/* The example of docs/operations.md, as it stands there. */
KVT_TEST(policy_of_the_manual_is_good)
{
	char text[32768], *from, *to;
	FILE *f = fopen("docs/operations.md", "r");
	size_t n;

	if (!f)
		KVT_SKIP("not run from the top of the tree");
	n = fread(text, 1, sizeof(text) - 1, f);
	fclose(f);
	text[n] = 0;
	from = strstr(text, "```json\n");
	KVT_EXPECT(from);
	from += strlen("```json\n");
	to = strstr(from, "```");
	KVT_EXPECT(to);
	*to = 0;
	if (parse(from))
		KVT_FAIL("%s", error);
	KVT_EXPECT_EQ(config.nr_tenants, 3);
	KVT_EXPECT_EQ(config.nr_domains, 2);
	KVT_EXPECT_EQ(config.tenants[1].gpus[0].weight, 50);
	KVT_EXPECT_EQ(config.tiers.nvme_bytes, 1ull << 40);
}

KVT_TEST(credentials_decide_the_tenant)
{
	KVT_EXPECT_EQ(parse(good), 0);
	KVT_EXPECT_EQ(kvd_config_tenant_of(&config, 1001, 9), 0);
	KVT_EXPECT_EQ(kvd_config_tenant_of(&config, 9, 50), 1);
	KVT_EXPECT_EQ(kvd_config_tenant_of(&config, 2000, 50), 2); /* uid before gid */
	KVT_EXPECT_EQ(kvd_config_tenant_of(&config, 3000, 9), -EACCES);
}

KVT_TEST(not_json_is_named_by_line)
{
	bad("", 1, "not JSON", "");
	bad("{\n \"tenants\": [\n  {\"name\": \"a\", }\n]}", 3, "not JSON", "}");
	bad("{\"tenants\": []", 1, "not JSON", "");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1]}]}\n\n trailing", 3, "not JSON",
	    "trailing");
	KVT_EXPECT_EQ(kvd_config_parse("{}\0{}", 5, &config, error), -EINVAL);
	KVT_EXPECT_HAS(error, "not JSON");
}

KVT_TEST(unknown_and_doubled_fields)
{
	bad("{\n\"tenants\": [{\"name\":\"a\",\"uids\":[1]}],\n\"chek\": \"off\"}", 3,
	    "chek", "\"off\"");
	bad("{\"tenants\": [\n{\"name\":\"a\",\n\"uids\":[1],\n\"uid\": 4}]}", 4,
	    "tenants[0].uid", "4");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1],\"gpus\":[\n{\"gpu\":\"*\",\"max\":1,\n"
	    "\"mx\":2}]}]}",
	    3, "tenants[0].gpus[0].mx", "2");
	bad("{\"tenants\": [{\"name\":\"a\",\n\"name\":\"b\",\"uids\":[1]}]}", 2,
	    "tenants[0].name", "given twice");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1]}],\"pool\":{\"low\":1}}", 1,
	    "pool.low", "unknown");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1]}],\n"
	    "\"domains\":[{\"name\":\"d\",\"tenants\":[\"a\"],\n\"x\":null}]}",
	    3, "domains[0].x", "unknown");
}

KVT_TEST(bad_names)
{
	bad("{\"tenants\": [{\"name\":\"\",\"uids\":[1]}]}", 1, "tenants[0].name",
	    "\"\"");
	bad("{\"tenants\": [{\"name\":\"a b\",\"uids\":[1]}]}", 1, "tenants[0].name",
	    "\"a b\"");
	bad("{\"tenants\": [{\"name\":7,\"uids\":[1]}]}", 1, "tenants[0].name", "7");
	bad("{\"tenants\": [{\"uids\":[1]}]}", 1, "tenants[0]", "\"name\" is missing");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1]},\n{\"name\":\"a\",\"uids\":[2]}]}",
	    2, "tenants[1].name", "\"a\"");
	bad("{\"tenants\": [{\"name\":"
	    "\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\","
	    "\"uids\":[1]}]}",
	    1, "tenants[0].name", "63 characters");
}

KVT_TEST(bad_ids)
{
	bad("{\"tenants\": [{\"name\":\"a\"}]}", 1, "tenants[0]",
	    "neither uids nor gids");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[]}]}", 1, "tenants[0]", "\"a\"");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":7}]}", 1, "tenants[0].uids", "7");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[\n1,\n-1]}]}", 3,
	    "tenants[0].uids[1]", "-1");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1.5]}]}", 1, "tenants[0].uids[0]",
	    "1.5");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[\"root\"]}]}", 1,
	    "tenants[0].uids[0]", "\"root\"");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[4294967295]}]}", 1,
	    "tenants[0].uids[0]", "4294967295");
	bad("{\"tenants\": [{\"name\":\"a\",\"uids\":[1]},\n{\"name\":\"b\",\"uids\":[2,1]}]}",
	    2, "tenants[1].uids[1]", "belongs to tenant \"a\"");
	bad("{\"tenants\": [{\"name\":\"a\",\"gids\":[5,5]}]}", 1, "tenants[0].gids[1]",
	    "belongs to tenant");
}

static void bad_gpu(const char *line, const char *path, const char *value)
{
	char text[512];

	snprintf(text, sizeof(text),
		 "{\"tenants\": [{\"name\":\"a\",\"uids\":[1],\n\"gpus\":[\n%s]}]}",
		 line);
	bad(text, 3, path, value);
}

KVT_TEST(bad_quotas)
{
	bad_gpu("{\"gpu\":\"host\",\"max\":\"4GBB\"}", "tenants[0].gpus[0].max",
		"\"4GBB\"");
	bad_gpu("{\"gpu\":\"host\",\"max\":0}", "tenants[0].gpus[0].max", "more than 0");
	bad_gpu("{\"gpu\":\"host\",\"max\":-1}", "tenants[0].gpus[0].max", "-1");
	bad_gpu("{\"gpu\":\"host\",\"max\":1.5}", "tenants[0].gpus[0].max", "1.5");
	bad_gpu("{\"gpu\":\"host\",\"max\":1e300}", "tenants[0].gpus[0].max", "1e+300");
	bad_gpu("{\"gpu\":\"host\",\"max\":true}", "tenants[0].gpus[0].max", "true");
	bad_gpu("{\"gpu\":\"host\",\"max\":\"99999999999TiB\"}", "tenants[0].gpus[0].max",
		"99999");
	bad_gpu("{\"gpu\":\"host\"}", "tenants[0].gpus[0]", "\"max\" is missing");
	bad_gpu("{\"max\":1}", "tenants[0].gpus[0]", "\"gpu\" is missing");
	bad_gpu("{\"gpu\":\"gpu0\",\"max\":1}", "tenants[0].gpus[0].gpu", "\"gpu0\"");
	bad_gpu("{\"gpu\":\"GPU-1234\",\"max\":1}", "tenants[0].gpus[0].gpu",
		"\"GPU-1234\"");
	bad_gpu("{\"gpu\":\"*\",\"max\":1,\"high\":2}", "tenants[0].gpus[0].high", "2");
	bad_gpu("{\"gpu\":\"*\",\"max\":9,\"high\":5,\"min\":6}",
		"tenants[0].gpus[0].min", "6");
	bad_gpu("{\"gpu\":\"*\",\"max\":1,\"weight\":0}", "tenants[0].gpus[0].weight",
		"0");
	bad_gpu("{\"gpu\":\"*\",\"max\":1,\"weight\":1001}", "tenants[0].gpus[0].weight",
		"1001");
	bad_gpu("{\"gpu\":\"*\",\"max\":1},{\"gpu\":\"*\",\"max\":2}",
		"tenants[0].gpus[1].gpu", "\"*\"");
	bad_gpu("7", "tenants[0].gpus[0]", "7");
}

KVT_TEST(guarantees_must_exist)
{
	bad("{\"host_bytes\":\"1GiB\",\"tenants\":[\n"
	    "{\"name\":\"a\",\"uids\":[1],\"gpus\":[{\"gpu\":\"host\",\"min\":\"600MiB\","
	    "\"max\":\"1GiB\"}]},\n"
	    "{\"name\":\"b\",\"uids\":[2],\"gpus\":[{\"gpu\":\"*\",\"min\":\"600MiB\","
	    "\"max\":\"1GiB\"}]}]}",
	    3, "tenants[1].gpus", "1258291200");
}

KVT_TEST(bad_domains)
{
	const char *t = "{\"tenants\":[{\"name\":\"a\",\"uids\":[1]},"
			"{\"name\":\"b\",\"uids\":[2]}],\n\"domains\":";
	char text[512];

	snprintf(text, sizeof(text), "%s[{\"name\":\"d\",\"tenants\":[\"a\",\"c\"]}]}",
		 t);
	bad(text, 2, "domains[0].tenants[1]", "\"c\"");
	snprintf(text, sizeof(text), "%s[{\"name\":\"d\",\"tenants\":[]}]}", t);
	bad(text, 2, "domains[0].tenants", "[]");
	snprintf(text, sizeof(text), "%s[{\"name\":\"d\"}]}", t);
	bad(text, 2, "domains[0]", "\"tenants\" is missing");
	snprintf(
		text, sizeof(text),
		"%s[{\"name\":\"d\",\"tenants\":[\"a\"]},\n{\"name\":\"e\",\"tenants\":[\"a\"]}]}",
		t);
	bad(text, 3, "domains[1].tenants[0]", "in domain \"d\"");
	snprintf(
		text, sizeof(text),
		"%s[{\"name\":\"d\",\"tenants\":[\"a\"]},\n{\"name\":\"d\",\"tenants\":[\"b\"]}]}",
		t);
	bad(text, 3, "domains[1].name", "\"d\"");
	/* Domain "b" of tenant a, beside tenant b that is a domain alone. */
	snprintf(text, sizeof(text), "%s[\n{\"name\":\"b\",\"tenants\":[\"a\"]}]}", t);
	bad(text, 3, "domains[0].name", "also a tenant");
	snprintf(text, sizeof(text), "%s7}", t);
	bad(text, 2, "domains", "7");
}

KVT_TEST(bad_modes)
{
	const char *t = "{\"tenants\":[{\"name\":\"a\",\"uids\":[1]}],\n";
	static const char *const rows[][3] = {
		{"\"check\":\"on\"", "check", "\"on\""},
		{"\"check\":1", "check", "1"},
		{"\"stall_ms\":0", "stall_ms", "0"},
		{"\"stall_ms\":\"1s\"", "stall_ms", "\"1s\""},
		{"\"on_stall\":\"ignore\"", "on_stall", "\"ignore\""},
		{"\"host_bytes\":\"lots\"", "host_bytes", "\"lots\""},
		{"\"host_bytes\":4096", "host_bytes", "4096"},
		{"\"gpu_bytes\":\"1MiB\"", "gpu_bytes", "2MiB"},
		{"\"pool\":[]", "pool", "[]"},
		{"\"pool\":{\"extent\":\"3MiB\"}", "pool.extent", "\"3MiB\""},
		{"\"pool\":{\"extent\":\"1MiB\"}", "pool.extent", "\"1MiB\""},
		{"\"pool\":{\"extent\":\"2GiB\"}", "pool.extent", "\"2GiB\""},
		{"\"pool\":{\"idle_shrink_ms\":0}", "pool.idle_shrink_ms", "0"},
		{"\"tenants\":[]", "tenants", "given twice"},
	};
	char text[256];
	size_t i;

	for (i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		snprintf(text, sizeof(text), "%s%s}", t, rows[i][0]);
		bad(text, 2, rows[i][1], rows[i][2]);
	}
	bad("[]", 1, "(root)", "[]");
	bad("{}", 1, "(root)", "\"tenants\" is missing");
	bad("{\"tenants\":[]}", 1, "tenants", "no tenant");
	bad("{\"tenants\":{}}", 1, "tenants", "{}");
}

KVT_TEST(sizes)
{
	u64 v = 0;

	KVT_EXPECT_EQ(kvd_size_parse("0", &v), 0);
	KVT_EXPECT_EQ(v, 0);
	KVT_EXPECT_EQ(kvd_size_parse("3KiB", &v), 0);
	KVT_EXPECT_EQ(v, 3072);
	KVT_EXPECT_EQ(kvd_size_parse("3 MB", &v), 0);
	KVT_EXPECT_EQ(v, 3000000);
	KVT_EXPECT_EQ(kvd_size_parse("8388608TiB", &v), 0);
	KVT_EXPECT_EQ(v, 1ull << 63);
	KVT_EXPECT_EQ(kvd_size_parse("8388609TiB", &v), -ERANGE);
	KVT_EXPECT_EQ(kvd_size_parse("99999999999999999999", &v), -ERANGE);
	KVT_EXPECT_EQ(kvd_size_parse("", &v), -EINVAL);
	KVT_EXPECT_EQ(kvd_size_parse("GiB", &v), -EINVAL);
	KVT_EXPECT_EQ(kvd_size_parse("1 GiB ", &v), -EINVAL);
	KVT_EXPECT_EQ(kvd_size_parse("-1", &v), -EINVAL);
	KVT_EXPECT_EQ(v, 1ull << 63);
}

KVT_TEST(random_damage_never_crashes)
{
	char text[sizeof(good)];
	int i, k, refused = 0;

	for (i = 0; i < 20000; i++) {
		memcpy(text, good, sizeof(good));
		for (k = 1 + (int)kvt_rand_below(3); k; k--)
			text[kvt_rand_below(sizeof(good) - 1)] =
				(char)kvt_rand_below(256);
		refused += kvd_config_parse(text, sizeof(good) - 1, &config, error) != 0;
		KVT_EXPECT(strlen(error) < KVD_CONFIG_ERROR_BYTES);
	}
	KVT_EXPECT(refused > 1000);
}

KVT_TEST(files_that_cannot_be_read)
{
	char path[] = "/tmp/kvt-config.XXXXXX";
	static char big[KVD_CONFIG_BYTES_MAX + 2];
	int fd = mkstemp(path);

	KVT_EXPECT_EQ(kvd_config_load("/nonexistent/kvmd.json", &config, error), -ENOENT);
	KVT_EXPECT_HAS(error, "/nonexistent/kvmd.json");
	memset(big, ' ', sizeof(big));
	KVT_EXPECT_EQ(write(fd, big, sizeof(big)), sizeof(big));
	KVT_EXPECT_EQ(kvd_config_load(path, &config, error), -EFBIG);
	KVT_EXPECT_EQ(ftruncate(fd, 0), 0);
	KVT_EXPECT_EQ(pwrite(fd, good, sizeof(good) - 1, 0), sizeof(good) - 1);
	KVT_EXPECT_EQ(kvd_config_load(path, &config, error), 0);
	unlink(path);
	close(fd);
}

KVT_MAIN()
