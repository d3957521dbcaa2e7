/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `kvbench attach` as it is: a process that attaches to a full pool maps all its extents,
 * and what it tells adds up.
 */
#include "tests/ipc/common.h"

static char out[16384];

static double p50(const char *name)
{
	char head[64], *at;

	snprintf(head, sizeof(head), "\"%s\":", name);
	at = strstr(out, head);
	at = at ? strstr(at, "\"p50\":") : NULL;
	if (!at)
		KVT_FAIL("no %s in %s", name, out);
	return strtod(at + 6, NULL);
}

static void attach(const char *args, u32 extents)
{
	char bench[1024], cmd[2048], text[32];
	FILE *in;
	size_t n;

	ipc_build_path("kvbench", bench, sizeof(bench));
	if (access(bench, X_OK))
		KVT_FAIL("%s is not built", bench);
	snprintf(cmd, sizeof(cmd), "%s attach --runs 2 --json %s", bench, args);
	in = popen(cmd, "r");
	KVT_EXPECT(in);
	n = fread(out, 1, sizeof(out) - 1, in);
	out[n] = 0;
	KVT_EXPECT_EQ(pclose(in), 0);
	snprintf(text, sizeof(text), "\"extents\":\t%u,", extents);
	KVT_EXPECT_HAS(out, text);
	KVT_NOTE("first page %.2f ms after the start, all mapped after %.2f ms",
		 p50("start_to_first_page_ms"), p50("start_to_all_mapped_ms"));
	KVT_EXPECT(p50("exec_ms") > 0 && p50("pool_open_ms") > 0);
	KVT_EXPECT_LE(p50("start_to_first_page_ms"), p50("start_to_all_mapped_ms"));
}

KVT_TEST(attach_on_the_host)
{
	attach("--backend host --gib 0.5", 7);
}

KVT_TEST(attach_on_the_cuda_backend)
{
	ipc_use_fake_cuda();
	attach("--backend cuda --gib 0.5", 7);
	KVT_EXPECT(p50("import_ms") > 0 && p50("map_ms") > 0);
}

KVT_MAIN()
