/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scale.c - kvbench scale: 1 to 16 engines against one kvmd.
 *
 * Each engine is a process of its own. All of them wait at a barrier in shared memory,
 * then do one kind of work for the time given: pairs of one page from their magazines,
 * 100 pages got and freed through the ring, or a STAT there and back. Told are the
 * operations of all of them a second, and the p50 and p99 of one operation over all of
 * them.
 */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "base/clock.h"
#include "engine/private.h"
#include "kvclient.h"
#include "tools/kvbench/mm.h"

#define CLIENTS_MAX 64u
#define SAMPLES	    65536u
#define PAIRS	    64u /* of one page, timed together: the clock costs as much as one */

enum work { WORK_PAIR, WORK_BATCH, WORK_STAT, WORKS };

static const struct {
	const char *name, *text;
	u32 ops; /* in one sample */
} works[WORKS] = {
	[WORK_PAIR] = {"magazine_pair", "alloc + free, magazine", PAIRS},
	[WORK_BATCH] = {"batch_100", "100 pages get + free", 1},
	[WORK_STAT] = {"ring", "request and back", 1},
};

/* One client's half of the shared memory. */
struct lane {
	u64 nr; /* samples, also those not kept */
	s32 error;
	u32 kept;
	double ns[SAMPLES];
};

struct shared {
	u32 ready, go;
	struct lane lanes[CLIENTS_MAX];
};

struct options {
	u32 clients[16];
	u32 nr_clients;
	u32 ms;
	bool json;
	const char *socket_path;
};

struct row {
	u32 clients;
	double per_s;
	struct kvb_dist ns;
};

static int one(struct kvc_pool *pool, enum work work)
{
	struct kv_grant pages[100];
	struct kv_stat stat;
	int r = 0;

	switch (work) {
	case WORK_PAIR:
		for (u32 i = 0; i < PAIRS && !r; i++) {
			r = kvc_alloc(pool, 1, KV_GFP_NOWAIT, pages);
			if (!r)
				r = kvc_free(pool, pages, 1);
		}
		return r;
	case WORK_BATCH:
		r = kvc_alloc(pool, 100, KV_GFP_NOWAIT, pages);
		/* pages of the last turn may still be on their way back */
		return r == KV_PENDING || r == KV_FULL ? 0
		       : r			       ? r
						       : kvc_free(pool, pages, 100);
	default:
		return kvc_stat(pool, &stat);
	}
}

static int lane_open(const char *socket_path, struct kvc **ret_c,
		     struct kvc_pool **ret_pool)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = socket_path,
				  .client_name = "kvbench-scale"};
	struct kv_layout layout = {.format_version = KV_LAYOUT_VERSION,
				   .kind = KV_LAYOUT_GQA,
				   .dtype = KV_DTYPE_E4M3,
				   .scale_kind = KV_SCALE_TOKEN,
				   .page_tokens = KV_PAGE_TOKENS,
				   .nr_layers = 1,
				   .nr_kv_heads = 2,
				   .head_dim = 64};
	int r = kvc_open(&opt, ret_c);

	if (r)
		return r;
	r = kvc_pool_open(*ret_c, &layout, NULL, NULL, ret_pool);
	if (r)
		kvc_close(*ret_c);
	return r;
}

static void lane_run(struct shared *sh, u32 i, const struct options *opt,
		     const char *socket_path, enum work work)
{
	struct lane *l = &sh->lanes[i];
	struct kvc_pool *pool;
	struct kvc *c;
	u64 end_ns;

	l->error = lane_open(socket_path, &c, &pool);
	if (!l->error)
		l->error = one(pool, work); /* the first one grows the pool */
	__atomic_fetch_add(&sh->ready, 1, __ATOMIC_ACQ_REL);
	while (!__atomic_load_n(&sh->go, __ATOMIC_ACQUIRE))
		usleep(100);
	end_ns = kv_now_ns() + opt->ms * KV_NSEC_PER_MSEC;
	while (!l->error) {
		u64 start_ns = kv_now_ns(), now_ns;

		l->error = one(pool, work);
		now_ns = kv_now_ns();
		if (now_ns >= end_ns)
			break;
		l->ns[l->nr++ % SAMPLES] = (double)(now_ns - start_ns) / works[work].ops;
	}
	l->kept = (u32)KV_MIN(l->nr, (u64)SAMPLES);
	_exit(l->error ? 1 : 0);
}

static int lanes_wait(const pid_t *pids, u32 nr)
{
	int status, r = 0;

	for (u32 i = 0; i < nr; i++) {
		if (waitpid(pids[i], &status, 0) < 0 || !WIFEXITED(status) ||
		    WEXITSTATUS(status))
			r = -EIO;
	}
	return r;
}

static int gather(struct shared *sh, u32 nr, const struct options *opt, enum work work,
		  struct row *ret)
{
	u64 kept = 0, samples = 0;
	double *all;

	for (u32 i = 0; i < nr; i++) {
		kept += sh->lanes[i].kept;
		samples += sh->lanes[i].nr;
	}
	all = malloc(KV_MAX(kept, (u64)1) * sizeof(*all));
	if (!all)
		return -ENOMEM;
	kept = 0;
	for (u32 i = 0; i < nr; i++) {
		memcpy(all + kept, sh->lanes[i].ns, sh->lanes[i].kept * sizeof(*all));
		kept += sh->lanes[i].kept;
	}
	ret->clients = nr;
	ret->per_s = (double)samples * works[work].ops * 1000.0 / opt->ms;
	kvb_dist_of(&ret->ns, all, (u32)kept);
	free(all);
	return kept ? 0 : -ENODATA;
}

static int run(const struct options *opt, const char *socket_path, enum work work, u32 nr,
	       struct row *ret)
{
	struct shared *sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE,
				 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pids[CLIENTS_MAX];
	u32 started;
	int r = 0;

	if (sh == MAP_FAILED)
		return -errno;
	for (started = 0; started < nr; started++) {
		pids[started] = fork();
		if (pids[started] < 0) {
			r = -errno;
			break;
		}
		if (!pids[started]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			lane_run(sh, started, opt, socket_path, work);
		}
	}
	while (__atomic_load_n(&sh->ready, __ATOMIC_ACQUIRE) < started)
		usleep(100);
	__atomic_store_n(&sh->go, 1, __ATOMIC_RELEASE);
	r = lanes_wait(pids, started) ?: r;
	for (u32 i = 0; i < started; i++) {
		if (sh->lanes[i].error)
			fprintf(stderr, "kvbench scale: client %u: %s: %d\n", i,
				works[work].text, sh->lanes[i].error);
	}
	if (!r)
		r = gather(sh, nr, opt, work, ret);
	munmap(sh, sizeof(*sh));
	return r;
}

static int parse(int argc, char **argv, struct options *opt)
{
	for (int i = 1; i < argc; i++) {
		char *value = i + 1 < argc ? argv[i + 1] : NULL, *end, *save = NULL;

		if (!strcmp(argv[i], "--json")) {
			opt->json = true;
			continue;
		}
		if (!value)
			goto usage;
		i++;
		if (!strcmp(argv[i - 1], "--socket")) {
			opt->socket_path = value;
		} else if (!strcmp(argv[i - 1], "--ms")) {
			opt->ms = (u32)strtoul(value, &end, 10);
			if (*end || opt->ms < 10 || opt->ms > 60000)
				goto usage;
		} else if (!strcmp(argv[i - 1], "--clients")) {
			opt->nr_clients = 0;
			for (value = strtok_r(value, ",", &save); value;
			     value = strtok_r(NULL, ",", &save)) {
				unsigned long n = strtoul(value, &end, 10);

				if (*end || !n || n > CLIENTS_MAX ||
				    opt->nr_clients == KV_ARRAY_SIZE(opt->clients))
					goto usage;
				opt->clients[opt->nr_clients++] = (u32)n;
			}
			if (!opt->nr_clients)
				goto usage;
		} else {
			goto usage;
		}
	}
	return 0;
usage:
	fprintf(stderr, "usage: kvbench scale [--clients 1,2,4,8,16] [--ms 10..60000] "
			"[--socket PATH] [--json]\n");
	return 2;
}

static int report(const struct options *opt, struct row (*rows)[WORKS])
{
	cJSON *doc, *list, *o;

	if (!opt->json) {
		printf("%-24s %8s %14s %8s %12s %12s\n", "work", "clients", "per second",
		       "x one", "p50 ns", "p99 ns");
		for (u32 w = 0; w < WORKS; w++)
			for (u32 i = 0; i < opt->nr_clients; i++)
				printf("%-24s %8u %14.0f %8.2f %12.1f %12.1f\n",
				       works[w].text, rows[i][w].clients,
				       rows[i][w].per_s,
				       rows[i][w].per_s / rows[0][w].per_s,
				       rows[i][w].ns.p50, rows[i][w].ns.p99);
		return 0;
	}
	doc = cJSON_CreateObject();
	cJSON_AddStringToObject(doc, "schema", "kvbench.scale/1");
	cJSON_AddNumberToObject(doc, "cores", (double)sysconf(_SC_NPROCESSORS_ONLN));
	list = cJSON_AddArrayToObject(doc, "rows");
	for (u32 w = 0; w < WORKS; w++) {
		for (u32 i = 0; i < opt->nr_clients; i++) {
			o = cJSON_CreateObject();
			cJSON_AddStringToObject(o, "work", works[w].name);
			cJSON_AddNumberToObject(o, "clients", rows[i][w].clients);
			cJSON_AddNumberToObject(o, "per_s", rows[i][w].per_s);
			kvb_json_dist(o, "ns", &rows[i][w].ns);
			cJSON_AddItemToArray(list, o);
		}
	}
	return kvb_json_print(doc) ? 1 : 0;
}

int kvb_scale(int argc, char **argv)
{
	struct options opt = {.clients = {1, 2, 4, 8, 16}, .nr_clients = 5, .ms = 500};
	struct row rows[KV_ARRAY_SIZE(opt.clients)][WORKS];
	struct eng_private_kvmd kvmd;
	char error[256];
	int r = parse(argc, argv, &opt);

	if (r)
		return r;
	if (!opt.socket_path) {
		r = eng_private_kvmd_start(NULL, &kvmd, error, sizeof(error));
		if (r) {
			fprintf(stderr, "kvbench scale: %s\n", error);
			return 1;
		}
	}
	for (u32 w = 0; w < WORKS && !r; w++)
		for (u32 i = 0; i < opt.nr_clients && !r; i++)
			r = run(&opt,
				opt.socket_path ? opt.socket_path : kvmd.socket_path,
				(enum work)w, opt.clients[i], &rows[i][w]);
	if (!opt.socket_path)
		eng_private_kvmd_stop(&kvmd);
	if (r) {
		fprintf(stderr, "kvbench scale: %s\n", strerror(-r));
		return 1;
	}
	return report(&opt, rows);
}
