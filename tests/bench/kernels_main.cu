/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_main.cu - kvbench-kernels [attn|moe|pages|step|all] [--table|--json] [--filter S]
 * [--quick] [--no-check]: times the kernel families on device 0 beside their stored targets.
 * Exit: 0 ok, 1 a launch failed or a result was wrong, 2 usage, 3 no GPU. One thread.
 */
#include "gpu_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int usage(const char *what)
{
	fprintf(stderr,
		"kvbench-kernels: %s\nusage: kvbench-kernels [attn|moe|pages|step|all] "
		"[--table|--json] [--filter S] [--quick] [--no-check]\n",
		what);
	return 2;
}

static const struct {
	const char *name;
	int (*fn)(struct kvb_ctx *ctx);
} families[] = {
	{"attn", kvb_kernels_attn}, {"attn", kvb_kernels_prefill},
	{"moe", kvb_kernels_moe},   {"pages", kvb_kernels_pages},
	{"step", kvb_kernels_step},
};

static bool family_known(const char *name)
{
	for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++)
		if (!strcmp(name, families[i].name))
			return true;
	return !strcmp(name, "all");
}

int main(int argc, char **argv)
{
	static struct kvb_ctx ctx;
	const char *family = "all";
	bool json = false;
	int first = 1, r = 0;

	if (argc > 1 && argv[1][0] != '-')
		family = argv[first++];
	if (!family_known(family))
		return usage(family);
	ctx.check = true;
	for (int i = first; i < argc; i++) {
		if (!strcmp(argv[i], "--json"))
			json = true;
		else if (!strcmp(argv[i], "--quick"))
			ctx.quick = true;
		else if (!strcmp(argv[i], "--no-check"))
			ctx.check = false;
		else if (!strcmp(argv[i], "--filter") && i + 1 < argc)
			ctx.filter = argv[++i];
		else if (strcmp(argv[i], "--table"))
			return usage(argv[i]);
	}
	if (kvb_init(&ctx)) {
		fprintf(stderr, "kvbench-kernels: no usable GPU\n");
		return 3;
	}
	fprintf(stderr, "read ceiling %.3f TB/s\n", ctx.ceiling * 1e-12);
	for (size_t i = 0; i < sizeof(families) / sizeof(families[0]) && !r; i++)
		if (!strcmp(family, "all") || !strcmp(family, families[i].name))
			r = families[i].fn(&ctx);
	kvb_print(&ctx, family, json);
	if (r)
		fprintf(stderr, "kvbench-kernels: %s\n", strerror(-r));
	else if (!ctx.nr_rows)
		fprintf(stderr, "kvbench-kernels: --filter %s: no such line\n",
			ctx.filter);
	return r || ctx.failed || !ctx.nr_rows ? 1 : 0;
}
