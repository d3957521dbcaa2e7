/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - kvbench: one program for all measurements, one table of what it can measure.
 *
 * Each row's function gets argc and argv from its own name on and answers the exit code:
 * 0 ok, 1 failed, 2 usage, 3 what it needs is not here.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"
#include "engine/openmp.h"
#include "tests/bench/mover_rate.h"
#include "tests/bench/tier_rate.h"
#include "tools/kvbench/chaos.h"
#include "tools/kvbench/inject.h"
#include "tools/kvbench/mm.h"
#include "tools/kvbench/rank.h"
#include "tools/kvbench/safety.h"
#include "tools/kvbench/spill.h"

/* The kernels' bench is a program of its own: static, so that it runs on bare GPU hosts.
 */
static int run_kernels(int argc, char **argv)
{
	char path[1024];
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 32);

	if (n < 0)
		return 1;
	path[n] = 0;
	strcpy(strrchr(path, '/') + 1, "kvbench-kernels");
	argv[0] = path;
	execv(path, argv);
	fprintf(stderr, "kvbench: %s: %s (it is built where nvcc is: make %s)\n", path,
		strerror(errno), "build/kvbench-kernels");
	return 3;
}

static const struct {
	const char *name;
	int (*fn)(int argc, char **argv);
	const char *help;
} commands[] = {
	{"mm", kvb_mm, "memory manager, rings, lookup, attach beside their references"},
	{"replay", kvb_replay,
	 "hit rates of an agent trace, one noisy tenant, nine quiet"},
	{"scale", kvb_scale, "1 to 16 engines side by side: operations a second"},
	{"admission", kvb_admission,
	 "what a small request waits for while 90 % is being reclaimed"},
	{"inject", kvb_inject, "faults against a real kvmd: are they caught?"},
	{"mover", kvb_mover, "GB/s between extents and pinned host memory"},
	{"tier", kvb_tier, "GB/s of pages to a disk and back, beside the disk's own"},
	{"check-cost", kvb_check_cost, "what the batch check adds to a decode step"},
	{"race", kvb_race, "page re-issues between two engines: foreign bytes"},
	{"kill", kvb_kill, "kill -9 of an engine in a step: what ends when"},
	{"spill", kvb_spill, "pages through a whole kvmd to its DRAM tier and back"},
	{"attach", kvb_attach, "process start to first usable page, by pool size"},
	{"engines", kvb_engines,
	 "one, two, four engines on one GPU, with MPS and without"},
	{"rank", kvb_rank, "the decode step of one tensor-parallel rank, taken apart"},
	{"restarts", kvb_restarts, "kvmd killed -9 under load: restart to serving"},
	{"crashes", kvb_crashes, "engines killed -9 at random points: what leaks?"},
	{"soak", kvb_soak, "everybody killed at random, bits flipped: is all noticed?"},
	{"kernels", run_kernels,
	 "GPU kernels beside floors and peers (attn, moe, pages, step, all)"},
};

static void usage(FILE *to)
{
	fprintf(to, "Usage: kvbench COMMAND [--json] [OPTION]...\n\n");
	for (size_t i = 0; i < KV_ARRAY_SIZE(commands); i++)
		fprintf(to, "  %-12s %s\n", commands[i].name, commands[i].help);
	fprintf(to, "\nWithout --socket a command starts a private kvmd and stops it.\n");
}

int main(int argc, char **argv)
{
	eng_openmp_passive(argv);
	if (argc < 2) {
		usage(stderr);
		return 2;
	}
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") ||
	    !strcmp(argv[1], "help")) {
		usage(stdout);
		return 0;
	}
	for (size_t i = 0; i < KV_ARRAY_SIZE(commands); i++)
		if (!strcmp(argv[1], commands[i].name))
			return commands[i].fn(argc - 1, argv + 1);
	fprintf(stderr, "kvbench: %s: no such command\n", argv[1]);
	usage(stderr);
	return 2;
}
