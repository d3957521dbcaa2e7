/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race.c - kvbench race: page re-issues raced between two engine processes (race.h).
 *
 * This process starts kvmd and the engines, waits, and adds up. One thread.
 */
#include "race.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "json.h"

static const char *const kind_names[] = {"read", "write", "late", "share"};
static const char *const request_names[] = {"own", "freed", "late", "shared"};

static int usage(void)
{
	fprintf(stderr, "usage: kvbench race [--reissues N] [--per-step 1..512] "
			"[--backend auto|host|cuda]\n"
			"                    [--pages N] [--seed N] [--check batch|off] "
			"[--only read,write,late,share]\n"
			"                    [--seconds N] [--json]\n");
	return 2;
}

static int parse_kinds(const char *text, u32 *ret)
{
	u32 kinds = 0;

	while (*text) {
		size_t n = strcspn(text, ",");
		u32 i = 0;

		while (i < 4 &&
		       (strlen(kind_names[i]) != n || strncmp(kind_names[i], text, n)))
			i++;
		if (i == 4) {
			fprintf(stderr, "kvbench: --only %s: read, write, late, share\n",
				text);
			return 2;
		}
		kinds |= 1u << i;
		text += n + (text[n] == ',');
	}
	*ret = kinds;
	return kinds ? 0 : usage();
}

static int parse_one(struct race_options *opt, int c)
{
	int r;

	switch (c) {
	case 'r':
		return kvb_number("reissues", optarg, 1, 1ull << 40, &opt->reissues);
	case 'p':
		return kvb_number("per-step", optarg, 1, RACE_PER_MAX, &opt->per_step);
	case 'g':
		return kvb_number("pages", optarg, 128, RACE_PAGES_MAX, &opt->pages);
	case 's':
		return kvb_number("seed", optarg, 0, ~0ull, &opt->seed);
	case 't':
		return kvb_number("seconds", optarg, 1, 86400, &opt->seconds);
	case 'b':
		r = kvb_backend_parse(optarg);
		opt->backend = (enum kvb_backend)r;
		return r < 0 ? 2 : 0;
	case 'c':
		opt->check = optarg;
		return strcmp(optarg, "batch") && strcmp(optarg, "off") ? usage() : 0;
	case 'o':
		return parse_kinds(optarg, &opt->kinds);
	case 'j':
		opt->json = true;
		return 0;
	default:
		return usage();
	}
}

static int parse(int argc, char **argv, struct race_options *opt)
{
	static const struct option longs[] = {
		{"reissues", 1, 0, 'r'}, {"per-step", 1, 0, 'p'},
		{"backend", 1, 0, 'b'},	 {"pages", 1, 0, 'g'},
		{"seed", 1, 0, 's'},	 {"check", 1, 0, 'c'},
		{"only", 1, 0, 'o'},	 {"seconds", 1, 0, 't'},
		{"json", 0, 0, 'j'},	 {0, 0, 0, 0},
	};
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0)
		r = parse_one(opt, c);
	if (!r && optind < argc)
		r = usage();
	if (!r && !opt->pages)
		opt->pages = opt->per_step * 8;
	/* each engine holds its newest run, one more, and takes a third */
	if (!r && opt->pages < opt->per_step * 6) {
		fprintf(stderr, "kvbench: --pages %llu: at least six times --per-step\n",
			(unsigned long long)opt->pages);
		r = 2;
	}
	return r;
}

/* Return: 0; 1 an engine failed or took too long. All engines have ended. */
static int run_engines(const struct race_options *opt, const char *socket_path,
		       struct race_shared *shared)
{
	u64 end_ns = kv_now_ns() + opt->seconds * KV_NSEC_PER_SEC;
	pid_t pids[RACE_ENGINES];
	int status, failed = 0;
	u32 left = 0;

	for (u32 i = 0; i < RACE_ENGINES; i++) {
		pids[i] = fork();
		if (pids[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(race_engine(opt, socket_path, i, shared));
		}
		left += pids[i] > 0;
		failed |= pids[i] < 0;
	}
	while (left) {
		for (u32 i = 0; i < RACE_ENGINES; i++) {
			if (pids[i] <= 0 || waitpid(pids[i], &status, WNOHANG) != pids[i])
				continue;
			pids[i] = 0;
			left--;
			failed |= status;
			if (status)
				fprintf(stderr, "kvbench: race: engine %u: status %#x\n",
					i, status);
		}
		/* one that waits for the other's pages would wait for ever */
		for (u32 i = 0; i < RACE_ENGINES; i++)
			if (pids[i] > 0 && (failed || kv_now_ns() > end_ns)) {
				failed = 1;
				kill(pids[i], SIGKILL);
			}
		usleep(1000);
	}
	return failed ? 1 : 0;
}

static struct race_count total_of(const struct race_shared *shared)
{
	struct race_count t = {0};

	for (u32 e = 0; e < RACE_ENGINES; e++) {
		const struct race_count *c = &shared->count[e];

		t.steps += c->steps;
		t.grants += c->grants;
		t.cross += c->cross;
		t.races += c->races;
		t.hits += c->hits;
		t.seals += c->seals;
		t.words += c->words;
		t.foreign_bytes += c->foreign_bytes;
		for (u32 i = 0; i < 4; i++) {
			t.ok[i] += c->ok[i];
			t.bad[i] += c->bad[i];
			t.foreign_pages[i] += c->foreign_pages[i];
		}
	}
	return t;
}

static void report_text(const struct race_options *opt, const struct race_count *t,
			u64 reissues, double seconds)
{
	printf("%llu page re-issues, %llu of them the other engine's, in %llu steps of "
	       "%llu pages, %.1f s (%s, check %s, seed %llu)\n",
	       (unsigned long long)reissues, (unsigned long long)t->cross,
	       (unsigned long long)t->steps, (unsigned long long)opt->per_step, seconds,
	       kvb_backend_str(opt->backend), opt->check, (unsigned long long)opt->seed);
	printf("%llu runs freed between announce and launch, %llu sealed before they "
	       "were written, %llu pages found\n",
	       (unsigned long long)t->races, (unsigned long long)t->seals,
	       (unsigned long long)t->hits);
	printf("%-8s %12s %12s %14s\n", "request", "passed", "failed", "foreign pages");
	for (u32 i = 0; i < 4; i++)
		printf("%-8s %12llu %12llu %14llu\n", request_names[i],
		       (unsigned long long)t->ok[i], (unsigned long long)t->bad[i],
		       (unsigned long long)t->foreign_pages[i]);
	printf("%llu foreign bytes in %.3f GB read\n",
	       (unsigned long long)t->foreign_bytes, (double)t->words * 8e-9);
}

static void report_json(const struct race_options *opt, const struct race_count *t,
			u64 reissues, double seconds)
{
	cJSON *o = cJSON_CreateObject(), *list;

	cJSON_AddStringToObject(o, "schema", "kvbench-race/1");
	kvb_json_where(o, opt->backend);
	cJSON_AddNumberToObject(o, "seed", (double)opt->seed);
	cJSON_AddStringToObject(o, "check", opt->check);
	cJSON_AddNumberToObject(o, "per_step", (double)opt->per_step);
	cJSON_AddNumberToObject(o, "pages", (double)opt->pages);
	cJSON_AddNumberToObject(o, "seconds", seconds);
	cJSON_AddNumberToObject(o, "steps", (double)t->steps);
	cJSON_AddNumberToObject(o, "reissues", (double)reissues);
	cJSON_AddNumberToObject(o, "of_the_other_engine", (double)t->cross);
	cJSON_AddNumberToObject(o, "freed_before_launch", (double)t->races);
	cJSON_AddNumberToObject(o, "sealed_before_written", (double)t->seals);
	cJSON_AddNumberToObject(o, "pages_found", (double)t->hits);
	cJSON_AddNumberToObject(o, "bytes_read", (double)t->words * 8);
	list = cJSON_AddObjectToObject(o, "requests");
	for (u32 i = 0; i < 4; i++) {
		cJSON *r = cJSON_AddObjectToObject(list, request_names[i]);

		cJSON_AddNumberToObject(r, "passed", (double)t->ok[i]);
		cJSON_AddNumberToObject(r, "failed", (double)t->bad[i]);
		cJSON_AddNumberToObject(r, "foreign_pages", (double)t->foreign_pages[i]);
	}
	cJSON_AddNumberToObject(o, "foreign_bytes", (double)t->foreign_bytes);
	kvb_json_print(o);
}

int kvb_race(int argc, char **argv)
{
	struct race_options opt = {.reissues = 100000,
				   .per_step = 64,
				   .seconds = 600,
				   .kinds = RACE_ALL,
				   .check = "batch"};
	const char *args[] = {"--check", NULL, NULL, NULL};
	struct eng_private_kvmd kvmd;
	struct race_shared *shared;
	struct kv_layout layout = kvb_layout(0);
	struct race_count total;
	double seconds;
	u64 start_ns;
	int r;

	opt.backend = (enum kvb_backend)kvb_backend_parse("auto");
	r = parse(argc, argv, &opt);
	if (r)
		return r;
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		return 1;
	args[1] = opt.check;
	args[2] = opt.backend == KVB_HOST ? NULL : "--test-extents";
	if (kvb_kvmd_start(opt.backend, opt.pages * kv_page_stride(&layout), args, &kvmd))
		return 1;
	start_ns = kv_now_ns();
	r = run_engines(&opt, kvmd.socket_path, shared);
	seconds = (double)(kv_now_ns() - start_ns) * 1e-9;
	eng_private_kvmd_stop(&kvmd);
	total = total_of(shared);
	if (opt.json)
		report_json(&opt, &total, shared->reissues, seconds);
	else
		report_text(&opt, &total, shared->reissues, seconds);
	if (total.foreign_bytes)
		r = 1;
	munmap(shared, sizeof(*shared));
	return r;
}
