/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank.c - kvbench rank with its tiny preset: the command that measures one rank's step, on host
 * memory, so that its figures are figures.
 */
#include "tests/kvt.h"

#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include <cjson/cJSON.h>

/* Output of a command; NULL if it failed. *ret_code: its exit code. */
static char *run(const char *args, int *ret_code)
{
	const char *build = getenv("KV_BUILD");
	char line[512];
	char *out = calloc(1, 1 << 20);
	size_t n = 0;
	FILE *f;

	snprintf(line, sizeof(line), "%s/kvbench rank %s 2>&1", build ? build : "build",
		 args);
	f = popen(line, "r");
	if (!f || !out)
		return NULL;
	while (n < (1 << 20) - 1 && !feof(f))
		n += fread(out + n, 1, (1 << 20) - 1 - n, f);
	*ret_code = pclose(f) >> 8;
	return out;
}

static double number(const cJSON *o, const char *name)
{
	const cJSON *v = cJSON_GetObjectItem(o, name);

	KVT_EXPECT(cJSON_IsNumber(v));
	return cJSON_GetNumberValue(v);
}

static void row_check(const cJSON *row, u32 requests, u32 layers)
{
	const cJSON *kernels = cJSON_GetObjectItem(row, "kernels"), *k;
	double sum = 0, attn = 0, moe = 0;

	KVT_EXPECT_EQ((u32)number(row, "requests"), requests);
	cJSON_ArrayForEach(k, kernels)
	{
		const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(k, "name"));

		sum += number(k, "us");
		if (!strcmp(name, "attn_mla"))
			attn += number(k, "calls");
		if (!strcmp(name, "moe_int4"))
			moe += number(k, "calls");
	}
	/* every layer has attention, all but the dense one have experts */
	KVT_EXPECT_EQ((u32)attn, layers);
	KVT_EXPECT_EQ((u32)moe, layers - 1);
	KVT_EXPECT(number(row, "step_us") > 0 && number(row, "floor_us") > 0);
	KVT_EXPECT(sum > 0.99 * number(row, "sum_of_kernels_us") &&
		   sum < 1.01 * number(row, "sum_of_kernels_us") + 5);
	/* requests have tokens, and so experts, of their own */
	KVT_EXPECT(number(row, "distinct_experts") >= 4);
	KVT_EXPECT(requests == 1 || number(row, "distinct_experts") > 5);
}

KVT_TEST(rank_tiny_tells_a_step_apart)
{
	int code = -1;
	char *out =
		run("--preset tiny --device host --in 130 --out 4 --requests 1,4 --json",
		    &code);
	cJSON *d;

	KVT_EXPECT(out != NULL);
	if (code)
		KVT_FAIL("exit code %d: %.300s", code, out);
	d = cJSON_Parse(strchr(out, '{') ? strchr(out, '{') : out);
	KVT_EXPECT(d != NULL);
	KVT_EXPECT_EQ(cJSON_GetArraySize(cJSON_GetObjectItem(d, "rows")), 2);
	row_check(cJSON_GetArrayItem(cJSON_GetObjectItem(d, "rows"), 0), 1, 3);
	row_check(cJSON_GetArrayItem(cJSON_GetObjectItem(d, "rows"), 1), 4, 3);
	KVT_EXPECT(number(d, "kv_bytes") > 60e6 && number(d, "kv_pages") > 100);
	KVT_EXPECT(strstr(cJSON_GetStringValue(cJSON_GetObjectItem(d, "left_out")),
			  "collectives") != NULL);
	cJSON_Delete(d);
	free(out);
}

KVT_TEST(rank_fp8_weights_and_static_scales)
{
	int code = -1;
	char *out = run(
		"--preset tiny --device host --in 70 --out 2 --requests 2 --weights fp8 "
		"--kv fp8_s --attention fast --json",
		&code);

	KVT_EXPECT(out != NULL);
	KVT_EXPECT_EQ(code, 0);
	KVT_EXPECT(strstr(out, "\"moe_fp8\"") != NULL);
	KVT_EXPECT_HAS(out, "\"attention\":\t\"fast\"");
	free(out);
}

KVT_TEST(rank_names_what_it_refuses)
{
	static const struct {
		const char *args, *told;
	} bad[] = {{"--preset nothing", "--preset nothing"},
		   {"--preset tiny --tp 3", "--tp 3"},
		   {"--preset tiny --kv f32", "kv f32"},
		   {"--preset tiny --attention 1", "attention 1"},
		   {"--preset tiny --in 1", "in 1"},
		   {"--in 100", "--preset is needed"},
		   {"--preset tiny --requests 0", "requests 0"},
		   {"--preset tiny --weights int5", "weights int5"}};

	for (u32 i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		char args[256];
		int code = -1;
		char *out;

		snprintf(args, sizeof(args), "--device host %s", bad[i].args);
		out = run(args, &code);
		KVT_EXPECT(out != NULL);
		if (code != 2 || !strstr(out, bad[i].told))
			KVT_FAIL("%s: exit code %d: %.200s", bad[i].args, code, out);
		free(out);
	}
}

KVT_TEST(rank_more_requests_than_pages)
{
	int code = -1;
	char *out = run("--preset tiny --device host --in 30000 --out 2 --requests 64",
			&code);

	KVT_EXPECT(out != NULL);
	KVT_EXPECT_EQ(code, 1);
	KVT_EXPECT(strstr(out, "more than --kv-bytes holds") != NULL);
	free(out);
}

KVT_MAIN()
