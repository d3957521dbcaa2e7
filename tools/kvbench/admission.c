/* SPDX-License-Identifier: Apache-2.0 */
/*
 * admission.c - kvbench admission: what a small request waits for while 90 % of the pool is
 * reclaimed again and again (R3), beside what it waits for while the same pages only change
 * hands.
 *
 * Where that is allowed kvmd and the small client run before all other work (SCHED_FIFO): what
 * is timed is then what kvmd does, not who else wants its CPU. One thread here; the hog is a
 * process of its own and is killed at the end of each row.
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "base/clock.h"
#include "tools/kvbench/chaos.h"
#include "tools/kvbench/mm.h"

enum { BATCH = 256, RUN = 64, HOG_MAX = 1 << 20 };

/**
 * struct hog - the process beside it
 * @nr: pages that it takes each round
 * @seals: they stay in the cache then, and the next round has to reclaim them
 * @ready: pipe: a byte after two rounds
 */
struct hog {
	u32 nr;
	bool seals;
	int ready;
};

/**
 * struct row - one hog's
 * @ns: of kvc_alloc() of two pages
 * @max_ns: the longest
 * @got: requests that got their pages
 * @evictions: of the pool meanwhile
 */
struct row {
	const char *what;
	struct kvb_dist ns;
	double max_ns, evictions;
	u32 got;
};

static int open_pool(const struct chaos_kvmd *kvmd, struct kvc **ret_c,
		     struct kvc_pool **ret_pool)
{
	const struct kvc_options opt = {.size_bytes = sizeof(opt),
					.socket_path = kvmd->k.socket_path,
					.client_name = "kvbench-admission"};
	const struct kv_layout layout = kvb_layout(0);
	int r = kvc_open(&opt, ret_c);

	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(*ret_c, &layout, NULL, NULL, ret_pool);
	if (r) {
		kvc_close(*ret_c);
		return kvb_said("kvc_pool_open", r);
	}
	return 0;
}

static int seal_run(struct kvc_pool *pool, const struct kv_grant *pages, u32 seq)
{
	static u32 tokens[RUN * KV_PAGE_TOKENS];
	static const u32 crc[RUN];
	struct kv_seal_ret rets[RUN];
	const struct kvc_seal seal = {.size_bytes = sizeof(seal),
				      .nr_pages = RUN,
				      .pages = pages,
				      .crc32c = crc,
				      .tokens = tokens,
				      .ret_seals = rets};

	for (u32 i = 0; i < RUN * KV_PAGE_TOKENS; i++)
		tokens[i] = seq * 7919 + i;
	return kvc_seal(pool, &seal);
}

/* Until it is killed, or something fails. */
static int hog_run(const struct chaos_kvmd *kvmd, const struct hog *h)
{
	struct kv_grant *pages = malloc(h->nr * sizeof(*pages));
	struct kvc_pool *pool;
	u32 seq = 0, got = 0;
	struct kvc *c;
	int r = pages ? open_pool(kvmd, &c, &pool) : -ENOMEM;

	for (u32 round = 0; !r; round++) {
		for (got = 0; !r && got < h->nr;) {
			r = kvc_alloc(pool, BATCH, KV_GFP_NOWAIT, pages + got);
			got += r ? 0 : BATCH;
			r = r == KV_PENDING || r == KV_FULL ? 0 : r;
		}
		for (u32 i = 0; !r && h->seals && i < h->nr; i += RUN)
			r = seal_run(pool, pages + i, seq++);
		for (u32 i = 0; !r && i < h->nr; i += BATCH)
			r = kvc_free(pool, pages + i, BATCH);
		if (!r && round == 1 && write(h->ready, "x", 1) != 1)
			r = -errno;
	}
	fprintf(stderr, "kvbench admission: the process beside it: %d\n", r);
	return 1;
}

/* @samples times two pages and back. Return: 0, or what a call answered */
static int sample(struct kvc_pool *pool, double *ns, u32 samples, u32 *ret_got)
{
	struct kv_grant pages[2];

	*ret_got = 0;
	for (u32 i = 0; i < samples; i++) {
		u64 start_ns = kv_now_ns();
		int r = kvc_alloc(pool, 2, KV_GFP_NOWAIT, pages);

		ns[i] = (double)(kv_now_ns() - start_ns);
		if (!r) {
			r = kvc_free(pool, pages, 2);
			*ret_got += 1;
		}
		if (r && r != KV_PENDING)
			return kvb_said("kvc_alloc or kvc_free", r);
		usleep(200);
	}
	return 0;
}

static double evictions(const struct chaos_kvmd *kvmd)
{
	return chaos_admin_number(kvmd, "{\"op\":\"pool\"}", "evictions");
}

static int row_run(const struct chaos_kvmd *kvmd, struct kvc_pool *pool, struct hog h,
		   u32 samples, struct row *ret)
{
	double *ns = malloc(samples * sizeof(*ns));
	int fds[2], r = -ENOMEM;
	pid_t pid = -1;
	char byte;

	if (!ns || pipe(fds))
		goto out;
	h.ready = fds[1];
	pid = fork();
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fds[0]);
		_exit(hog_run(kvmd, &h));
	}
	close(fds[1]);
	r = pid > 0 && read(fds[0], &byte, 1) == 1 ? 0 : -ECHILD;
	close(fds[0]);
	if (r)
		goto out;
	ret->evictions = evictions(kvmd);
	r = sample(pool, ns, samples, &ret->got);
	ret->evictions = evictions(kvmd) - ret->evictions;
	if (r)
		goto out;
	kvb_dist_of(&ret->ns, ns, samples);
	ret->max_ns = ns[samples - 1];
out:
	if (pid > 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
	free(ns);
	return r;
}

static bool go_first(const struct chaos_kvmd *kvmd)
{
	const struct sched_param p = {.sched_priority = 1};

	return !sched_setscheduler(kvmd->k.pid, SCHED_FIFO, &p) &&
	       !sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &p);
}

static int report(const struct row *rows, u32 nr, bool first, u32 hog_pages, bool json)
{
	cJSON *doc, *list, *o;

	if (!json) {
		printf("two pages for a client that does not wait, beside a process that "
		       "takes %u pages and frees them (%s)\n",
		       hog_pages,
		       first ? "kvmd and the client first: SCHED_FIFO"
			     : "no real-time scheduling: other work counts");
		printf("%-22s %9s %9s %9s %9s %12s\n", "", "p50 us", "p99 us", "max us",
		       "got", "evictions");
		for (u32 i = 0; i < nr; i++)
			printf("%-22s %9.1f %9.1f %9.1f %5u/%-5u %10.0f\n", rows[i].what,
			       rows[i].ns.p50 * 1e-3, rows[i].ns.p99 * 1e-3,
			       rows[i].max_ns * 1e-3, rows[i].got, rows[i].ns.nr,
			       rows[i].evictions);
		return 0;
	}
	doc = cJSON_CreateObject();
	cJSON_AddStringToObject(doc, "schema", "kvbench.admission/1");
	kvb_json_where(doc, KVB_HOST);
	cJSON_AddNumberToObject(doc, "cores", (double)sysconf(_SC_NPROCESSORS_ONLN));
	cJSON_AddBoolToObject(doc, "first", first);
	cJSON_AddNumberToObject(doc, "hog_pages", hog_pages);
	list = cJSON_AddArrayToObject(doc, "rows");
	for (u32 i = 0; i < nr; i++) {
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "beside", rows[i].what);
		kvb_json_dist(o, "ns", &rows[i].ns);
		cJSON_AddNumberToObject(o, "max_ns", rows[i].max_ns);
		cJSON_AddNumberToObject(o, "got", rows[i].got);
		cJSON_AddNumberToObject(o, "evictions", rows[i].evictions);
		cJSON_AddItemToArray(list, o);
	}
	return kvb_json_print(doc) ? 1 : 0;
}

static int parse(int argc, char **argv, u64 *samples, bool *json)
{
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--json")) {
			*json = true;
		} else if (!strcmp(argv[i], "--samples") && i + 1 < argc) {
			int r = kvb_number("samples", argv[++i], 100, 1000000, samples);

			if (r)
				return r;
		} else {
			fprintf(stderr, "usage: kvbench admission [--samples 100..1M] "
					"[--json]\n");
			return 2;
		}
	}
	return 0;
}

/* Both rows on @kvmd. Return: exit code */
static int measure(const struct chaos_kvmd *kvmd, u32 samples, bool json)
{
	struct row rows[] = {{.what = "pages change hands"},
			     {.what = "pages are reclaimed"}};
	bool first = go_first(kvmd);
	struct kvc_pool_info info;
	struct kvc_pool *pool;
	struct hog h = {0};
	struct kvc *c;
	int r = open_pool(kvmd, &c, &pool);

	if (r)
		return 1;
	kvc_pool_get_info(pool, &info);
	h.nr = KV_MIN(info.geometry.nr_pages * 9 / 10 / BATCH * BATCH, (u32)HOG_MAX);
	for (u32 i = 0; i < KV_ARRAY_SIZE(rows) && !r; i++) {
		h.seals = i == 1;
		r = row_run(kvmd, pool, h, samples, &rows[i]);
	}
	kvc_close(c);
	if (r) {
		fprintf(stderr, "kvbench admission: %d\n", r);
		return 1;
	}
	return report(rows, KV_ARRAY_SIZE(rows), first, h.nr, json);
}

int kvb_admission(int argc, char **argv)
{
	struct chaos_kvmd kvmd = {0};
	u64 samples = 4000;
	bool json = false;
	int r = parse(argc, argv, &samples, &json);

	if (r)
		return r;
	if (kvb_kvmd_start(KVB_HOST, 256ull << 20, NULL, &kvmd.k))
		return 1;
	r = measure(&kvmd, (u32)samples, json);
	eng_private_kvmd_stop(&kvmd.k);
	return r;
}
