/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench mm as scripts call it: the JSON's names and units are an interface. */
#include "tests/ipc/common.h"

static char path[1100];

static void find_kvbench(void)
{
	ipc_build_path("kvbench", path, sizeof(path));
	if (access(path, X_OK))
		KVT_SKIP("%s is not built", path);
}

static int run(const char *args, char *ret, size_t bytes)
{
	char cmd[1200];
	size_t used;
	FILE *f;

	snprintf(cmd, sizeof(cmd), "%s %s 2>&1", path, args);
	f = popen(cmd, "r");
	KVT_EXPECT(f != NULL);
	used = fread(ret, 1, bytes - 1, f);
	ret[used] = 0;
	return WEXITSTATUS(pclose(f));
}

static double number_after(const char *text, const char *name, const char *field)
{
	char want[64];
	const char *p;

	snprintf(want, sizeof(want), "\"%s\"", name);
	p = strstr(text, want);
	if (!p)
		KVT_FAIL("no %s in %s", want, text);
	snprintf(want, sizeof(want), "\"%s\":", field);
	p = strstr(p, want);
	KVT_EXPECT(p != NULL);
	return strtod(p + strlen(want), NULL);
}

KVT_TEST(kvbench_mm_has_its_rows)
{
	static const char *const names[] = {
		"magazine_pair_ns",	 "core_pair_ns",
		"ring_rtt_ns",		 "alloc100_ns",
		"lookup_32k_ns",	 "seqpacket_rtt_ns",
		"lookup_1k_ns",		 "lookup_8k_ns",
		"lookup_1k_unknown_ns",	 "lookup_8k_unknown_ns",
		"lookup_32k_unknown_ns", "lookup_32k_1m_ns",
		"lookup_32k_1m_keys_ns", "attach_ns",
		"hash_512_ns",		 "attach_ns",
		"jemalloc_pair_ns",
	};
	static char text[16384];

	find_kvbench();
	if (run("mm --quick --json", text, sizeof(text)))
		KVT_FAIL("kvbench mm: %s", text);
	for (u32 i = 0; i < KV_ARRAY_SIZE(names); i++) {
		double p50 = number_after(text, names[i], "p50");
		double p99 = number_after(text, names[i], "p99");

		KVT_NOTE("%-18s p50 %10.1f p99 %12.1f", names[i], p50, p99);
		KVT_EXPECT(p50 > 0 && p50 <= p99);
	}
}

/* All pages out and in through a whole kvmd; it compares each. On a machine that is so busy
 * that the mover stands still pages are dropped, and it says that. */
KVT_TEST(kvbench_spill_brings_the_bytes_back)
{
	static char text[16384];
	int r;

	find_kvbench();
	r = run("spill --mib 64 --json", text, sizeof(text));
	KVT_EXPECT(!strstr(text, "wrong bytes"));
	if (r)
		KVT_EXPECT_HAS(text, "pages came back");
	else
		KVT_EXPECT(number_after(text, "evict_gbps", "p50") > 0 &&
			   number_after(text, "restore_gbps", "p50") > 0);
	KVT_EXPECT_EQ(run("spill --mib 1", text, sizeof(text)), 2);
	KVT_EXPECT_HAS(text, "--mib 64..65536");
}

/* dynamo (R3): a standby asks for pages while 90 % is being reclaimed. What it waits for is for
 * kvbench to tell and for own/scenes r3_admission_beside_reclaim to bound, without a clock; here
 * every request is answered, and pages trickle to it. */
KVT_TEST(r3_small_requests_are_served_beside_reclaim)
{
	static char text[16384];

	find_kvbench();
	if (run("admission --samples 2000 --json", text, sizeof(text)))
		KVT_FAIL("kvbench admission: %s", text);
	KVT_EXPECT_EQ(number_after(text, "pages change hands", "evictions"), 0);
	KVT_EXPECT(number_after(text, "pages are reclaimed", "evictions") >
		   number_after(text, "schema", "hog_pages"));
	KVT_EXPECT(number_after(text, "pages are reclaimed", "got") > 0);
	KVT_EXPECT_EQ(run("admission --samples 1", text, sizeof(text)), 2);
	KVT_EXPECT_HAS(text, "--samples 1: 100 to 1000000");
}

KVT_TEST(kvbench_names_what_it_does_not_know)
{
	static char text[8192];

	find_kvbench();
	KVT_EXPECT_EQ(run("nonsense", text, sizeof(text)), 2);
	KVT_EXPECT_HAS(text, "nonsense: no such command");
	KVT_EXPECT_EQ(run("mm --nonsense", text, sizeof(text)), 2);
	KVT_EXPECT_EQ(run("mm --quick --socket /nonexistent", text, sizeof(text)), 1);
	KVT_EXPECT_HAS(text, "/nonexistent");
	KVT_EXPECT_EQ(run("--help", text, sizeof(text)), 0);
	KVT_EXPECT_HAS(text, "check-cost");
}

KVT_MAIN()
