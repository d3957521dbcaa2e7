/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_main.cu - kvbench-kernels attn|moe|all [--table|--json] [--filter S] [--quick]
 * [--no-check]: times the kernel families on device 0 beside their stored targets.
 * Exit: 0 ok, 1 a launch failed or a result was wrong, 2 usage, 3 no GPU. One thread.
 */
#include "gpu_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int usage(const char *what)
{
	fprintf(stderr,
		"kvbench-kernels: %s\nusage: kvbench-kernels attn|moe|all [--table|--json] "
		"[--filter S] [--quick] [--no-check]\n",
		what);
	return 2;
}

int main(int argc, char **argv)
{
	static struct kvb_ctx ctx;
	bool json = false, attn, moe;
	int r = 0;

	if (argc < 2)
		return usage("which family?");
	attn = !strcmp(argv[1], "attn") || !strcmp(argv[1], "all");
	moe = !strcmp(argv[1], "moe") || !strcmp(argv[1], "all");
	if (!attn && !moe)
		return usage(argv[1]);
	ctx.check = true;
	for (int i = 2; i < argc; i++) {
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
	if (attn)
		r = kvb_kernels_attn(&ctx);
	if (moe && !r)
		r = kvb_kernels_moe(&ctx);
	kvb_print(&ctx, argv[1], json);
	if (r)
		fprintf(stderr, "kvbench-kernels: %s\n", strerror(-r));
	return r || ctx.failed ? 1 : 0;
}
