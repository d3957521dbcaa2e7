/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engines.c - kvbench engines: one, two, four engines on one GPU, and what MPS changes.
 *
 * The engines of a run start together and work for the same time; their sum is compared with
 * one engine alone. With --mps all runs are made twice, the second time as clients of an
 * MPS server of our own, with its pipe in a private directory. kvmd stays outside of it.
 * This process touches no CUDA before the last engine has ended.
 */
#include "engines.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "json.h"

#define RUN_LIMIT_NS (120 * KV_NSEC_PER_SEC)
#define REPEAT_MAX   20u
#define MPS_CONTROL  "nvidia-cuda-mps-control"

extern char **environ;

static const char *const kind_names[] = {"decode", "read 2.2 GB", "read 44 GB"};

struct run {
	struct engines_options opt;
	u32 n[ENGINES_MAX];
	u32 nr_n;
	u32 kinds; /* bits */
	u64 repeat;
	bool mps;
	bool json;
	struct engines_shared *shared;
	struct eng_private_kvmd kvmd;
	double alone[ENGINES_KINDS];
	char mps_dir[64];
};

static int usage(void)
{
	fprintf(stderr, "usage: kvbench engines [--n 1,2,4] [--mps] [--only "
			"decode,read] [--model DIR] [--weights NAME]\n"
			"                       [--batch 1..256] [--ms 100..60000] "
			"[--repeat 1..20] [--backend auto|host|cuda] [--json]\n");
	return 2;
}

/* ----------------------------------------------------------------------------- options */

static int parse_n(const char *text, struct run *run)
{
	run->nr_n = 0;
	for (;;) {
		char *end;
		unsigned long v = strtoul(text, &end, 10);

		if (end == text || (*end && *end != ',') || !v || v > ENGINES_MAX ||
		    run->nr_n == ENGINES_MAX) {
			fprintf(stderr, "kvbench: --n %s: numbers of 1 to %u\n", text,
				ENGINES_MAX);
			return 2;
		}
		run->n[run->nr_n++] = (u32)v;
		if (!*end)
			return 0;
		text = end + 1;
	}
}

static int parse_one(struct run *run, int c)
{
	int r;

	switch (c) {
	case 'n':
		return parse_n(optarg, run);
	case 'm':
		run->mps = true;
		return 0;
	case 'o':
		run->kinds = strstr(optarg, "decode") ? 1u << ENGINES_DECODE : 0;
		if (strstr(optarg, "read"))
			run->kinds |= 1u << ENGINES_SHORT | 1u << ENGINES_LONG;
		return run->kinds ? 0 : usage();
	case 'd':
		run->opt.model = optarg;
		return 0;
	case 'w':
		run->opt.weights = optarg;
		return 0;
	case 'B':
		return kvb_number("batch", optarg, 1, 256, &run->opt.batch);
	case 'r':
		return kvb_number("repeat", optarg, 1, REPEAT_MAX, &run->repeat);
	case 't':
		return kvb_number("ms", optarg, 100, 60000, &run->opt.seconds_ms);
	case 'b':
		r = kvb_backend_parse(optarg);
		run->opt.backend = (enum kvb_backend)r;
		return r < 0 ? 2 : 0;
	case 'j':
		run->json = true;
		return 0;
	default:
		return usage();
	}
}

static int parse(int argc, char **argv, struct run *run)
{
	static const struct option longs[] = {
		{"n", 1, 0, 'n'},     {"mps", 0, 0, 'm'},     {"only", 1, 0, 'o'},
		{"model", 1, 0, 'd'}, {"weights", 1, 0, 'w'}, {"batch", 1, 0, 'B'},
		{"ms", 1, 0, 't'},    {"backend", 1, 0, 'b'}, {"repeat", 1, 0, 'r'},
		{"json", 0, 0, 'j'},  {0, 0, 0, 0},
	};
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0)
		r = parse_one(run, c);
	if (!r && run->opt.backend == KVB_FAKE) {
		fprintf(stderr, "kvbench: engines: needs a GPU, or --backend host\n");
		r = 2;
	}
	if (run->opt.backend == KVB_HOST)
		run->kinds &= 1u << ENGINES_DECODE;
	return r;
}

/* --------------------------------------------------------------------------------- MPS */

/* Return: exit status of the control program with @input on its stdin; 127 none here. */
static int mps_control(const char *args, const char *input)
{
	char cmd[128];
	FILE *out;
	int status;

	snprintf(cmd, sizeof(cmd), MPS_CONTROL " %s >/dev/null 2>&1", args);
	out = popen(cmd, "w");
	if (!out)
		return 127;
	fputs(input, out);
	status = pclose(out);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/* Return: 0; 127 the program is not on this machine; another status it gave. */
static int mps_start(struct run *run)
{
	char log[80];
	int r;

	strcpy(run->mps_dir, "/tmp/kvbench-mps-XXXXXX");
	if (!mkdtemp(run->mps_dir))
		return 1;
	snprintf(log, sizeof(log), "%s/log", run->mps_dir);
	setenv("CUDA_MPS_PIPE_DIRECTORY", run->mps_dir, 1);
	setenv("CUDA_MPS_LOG_DIRECTORY", log, 1);
	r = mps_control("-d", "");
	if (r)
		unsetenv("CUDA_MPS_PIPE_DIRECTORY");
	return r;
}

static void mps_stop(struct run *run)
{
	char cmd[128];

	mps_control("", "quit\n");
	unsetenv("CUDA_MPS_PIPE_DIRECTORY");
	unsetenv("CUDA_MPS_LOG_DIRECTORY");
	snprintf(cmd, sizeof(cmd), "rm -rf '%s'", run->mps_dir);
	if (system(cmd))
		fprintf(stderr, "kvbench: %s stays\n", run->mps_dir);
}

/* What kvmctl doctor says of MPS: the finding as it is. */
static cJSON *doctor_says(void)
{
	cJSON *all, *list, *one, *found = NULL;
	char path[1100], text[65536];
	ssize_t n = readlink("/proc/self/exe", path, 1000);
	FILE *in;

	if (n < 0)
		return NULL;
	path[n] = 0;
	strcpy(strrchr(path, '/') + 1, "kvmctl doctor --json 2>/dev/null");
	in = popen(path, "r");
	if (!in)
		return NULL;
	n = (ssize_t)fread(text, 1, sizeof(text) - 1, in);
	text[n] = 0;
	pclose(in);
	all = cJSON_Parse(text);
	cJSON_ArrayForEach(list, all) cJSON_ArrayForEach(one, list)
	{
		const cJSON *check = cJSON_GetObjectItem(one, "check");

		if (cJSON_IsString(check) && !strcmp(check->valuestring, "mps"))
			found = cJSON_Duplicate(one, true);
	}
	cJSON_Delete(all);
	return found;
}

/* -------------------------------------------------------------------------------- runs */

static void end_all(const pid_t *pids, u32 n)
{
	for (u32 i = 0; i < n; i++)
		if (pids[i] > 0)
			kill(pids[i], SIGKILL);
}

/* Start @n engines, let them go together, wait for all. Return: 0; 1 one failed. */
static int run_engines(struct run *run, enum engines_kind kind, u32 n)
{
	u64 limit_ns = kv_now_ns() + RUN_LIMIT_NS;
	struct engines_shared *shared = run->shared;
	pid_t pids[ENGINES_MAX] = {0};
	u32 left = n;
	int status, failed = 0;

	memset(shared, 0, sizeof(*shared));
	for (u32 i = 0; i < n; i++) {
		pids[i] = fork();
		if (pids[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(engines_child(&run->opt, kind, run->kvmd.socket_path, i,
					    shared));
		}
	}
	while (left) {
		if (!shared->start_ns &&
		    __atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) == n)
			__atomic_store_n(&shared->start_ns,
					 kv_now_ns() + 5 * KV_NSEC_PER_MSEC,
					 __ATOMIC_SEQ_CST);
		for (u32 i = 0; i < n; i++) {
			if (!pids[i] || waitpid(pids[i], &status, WNOHANG) == 0)
				continue;
			pids[i] = 0;
			left--;
			failed |= status;
		}
		if (failed || kv_now_ns() > limit_ns) {
			failed = 1;
			end_all(pids, n);
		}
		usleep(200);
	}
	return failed ? 1 : 0;
}

/**
 * struct line - one number of engines, all its repeats
 * @total: units per second of all engines, by repeat
 * @least, @most: of any engine in any repeat
 * @us: steps of all
 */
struct line {
	double total[REPEAT_MAX];
	double least, most;
	double us[ENGINES_MAX * ENGINES_SAMPLES];
	u32 nr_us;
};

static void line_add(struct line *line, const struct engines_shared *shared, u32 n,
		     u32 at)
{
	line->total[at] = 0;
	for (u32 i = 0; i < n; i++) {
		const struct engines_result *e = &shared->engine[i];
		double rate = (double)e->units / e->seconds;

		line->total[at] += rate;
		line->least = at + i ? KV_MIN(line->least, rate) : rate;
		line->most = at + i ? KV_MAX(line->most, rate) : rate;
		for (u32 k = 0;
		     k < e->nr_samples && line->nr_us < KV_ARRAY_SIZE(line->us); k++)
			line->us[line->nr_us++] = (double)e->step_us[k];
	}
}

static void report(struct run *run, enum engines_kind kind, u32 n, bool mps,
		   struct line *line, cJSON *rows)
{
	double unit = kind == ENGINES_DECODE ? 1 : 1e-12, of_one;
	struct kvb_dist d, total;
	cJSON *o;

	kvb_dist_of(&d, line->us, line->nr_us);
	kvb_dist_of(&total, line->total, (u32)run->repeat);
	if (n == 1 && !mps)
		run->alone[kind] = total.p50;
	of_one = run->alone[kind] > 0 ? total.p50 / run->alone[kind] : 0;
	if (!run->json)
		printf("%-12s %s %u engines: %8.5g (%.5g to %.5g) %s in total, %.1f %% of "
		       "one; each %.4g to %.4g; step %.0f us (p99 %.0f)\n",
		       kind_names[kind], mps ? "MPS" : "   ", n, total.p50 * unit,
		       line->total[0] * unit, line->total[run->repeat - 1] * unit,
		       kind == ENGINES_DECODE ? "tok/s" : "TB/s", 100 * of_one,
		       line->least * unit, line->most * unit, d.p50, d.p99);
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "work", kind_names[kind]);
	cJSON_AddBoolToObject(o, "mps", mps);
	cJSON_AddNumberToObject(o, "engines", n);
	cJSON_AddStringToObject(o, "unit", kind == ENGINES_DECODE ? "tok/s" : "B/s");
	cJSON_AddNumberToObject(o, "total", total.p50);
	cJSON_AddNumberToObject(o, "total_min", line->total[0]);
	cJSON_AddNumberToObject(o, "total_max", line->total[run->repeat - 1]);
	cJSON_AddNumberToObject(o, "of_one", of_one);
	cJSON_AddNumberToObject(o, "least", line->least);
	cJSON_AddNumberToObject(o, "most", line->most);
	kvb_json_dist(o, "step_us", &d);
	cJSON_AddItemToArray(rows, o);
	fflush(stdout);
}

static int run_line(struct run *run, enum engines_kind kind, u32 n, bool mps, cJSON *rows)
{
	static struct line line;
	int r = 0;

	line.nr_us = 0;
	for (u32 i = 0; i < run->repeat && !r; i++) {
		r = run_engines(run, kind, n);
		if (!r)
			line_add(&line, run->shared, n, i);
	}
	if (!r)
		report(run, kind, n, mps, &line, rows);
	return r;
}

static int run_all(struct run *run, bool mps, cJSON *rows)
{
	int r = 0;

	for (u32 kind = 0; kind < ENGINES_KINDS; kind++) {
		if (!(run->kinds >> kind & 1))
			continue;
		for (u32 i = 0; i < run->nr_n && !r; i++)
			r = run_line(run, (enum engines_kind)kind, run->n[i], mps, rows);
	}
	return r;
}

static int run_mps(struct run *run, cJSON *o, cJSON *rows)
{
	int r = mps_start(run);
	const char *text = r == 127 ? "no " MPS_CONTROL " on this machine"
			   : r	    ? "the MPS server did not start"
				    : "run";

	cJSON_AddStringToObject(o, "mps_runs", text);
	if (r) {
		if (!run->json)
			printf("MPS: %s\n", text);
		rmdir(run->mps_dir);
		return r == 127 ? 0 : 1;
	}
	cJSON_AddItemToObject(o, "doctor_with_mps", doctor_says());
	r = run_all(run, true, rows);
	mps_stop(run);
	return r;
}

int kvb_engines(int argc, char **argv)
{
	static struct run run = {.opt = {.model = "tests/models/tiny-k2",
					 .weights = "bf16",
					 .batch = 32,
					 .seconds_ms = 1500},
				 .n = {1, 2, 4},
				 .nr_n = 3,
				 .repeat = 1,
				 .kinds = (1u << ENGINES_KINDS) - 1};
	cJSON *o, *rows;
	int r;

	run.opt.backend = (enum kvb_backend)kvb_backend_parse("auto");
	r = parse(argc, argv, &run);
	if (r)
		return r;
	run.shared = mmap(NULL, sizeof(*run.shared), PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (run.shared == MAP_FAILED ||
	    kvb_kvmd_start(run.opt.backend, 8ull << 30, NULL, &run.kvmd))
		return 1;
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kvbench-engines/1");
	cJSON_AddStringToObject(o, "model", basename(run.opt.model));
	cJSON_AddStringToObject(o, "weights", run.opt.weights);
	cJSON_AddNumberToObject(o, "batch", (double)run.opt.batch);
	cJSON_AddNumberToObject(o, "ms", (double)run.opt.seconds_ms);
	cJSON_AddNumberToObject(o, "repeats", (double)run.repeat);
	rows = cJSON_AddArrayToObject(o, "rows");
	cJSON_AddItemToObject(o, "doctor", doctor_says());
	r = run_all(&run, false, rows);
	if (!r && run.mps)
		r = run_mps(&run, o, rows);
	eng_private_kvmd_stop(&run.kvmd);
	kvb_json_where(o, run.opt.backend);
	if (run.json && !r)
		kvb_json_print(o);
	else
		cJSON_Delete(o);
	return r;
}
