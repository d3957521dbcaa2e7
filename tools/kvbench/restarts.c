/* SPDX-License-Identifier: Apache-2.0 */
/*
 * restarts.c - kvbench restarts: kvmd killed -9 under load, many times.
 *
 * The pool holds 100,000 pages of this process (half of them cached, a quarter sealed, a
 * quarter held unsealed) and what two engines do. After each kill some of the held pages
 * are compared; at the end all of them, and every page must be accounted for. --dram-mib
 * gives it a DRAM tier, whose memory each new kvmd has to allocate.
 */
#include "chaos.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "json.h"

#define KILLS_MAX 10000u
#define ENGINES	  2u
#define PAGES	  100000u
#define ROOM	  "840MiB" /* PAGES of 8 KiB and 7,000 more for the engines */
#define WRITTEN	  4096u	   /* held pages with a pattern: memory is not for all of them */

struct scene {
	struct chaos_kvmd kvmd;
	char config[32]; /* "": none */
	u64 dram_mib;
	struct chaos_count *counts;
	pid_t pids[ENGINES];
	struct kvc *c;
	struct kvc_pool *pool;
	u64 words, random, session;
	u64 checked, wrong, lost;
	u64 *want;
	double serve_ms[KILLS_MAX], whole_ms[KILLS_MAX], cpu_ms[KILLS_MAX];
};

static struct scene scene;
static struct kv_grant pages[PAGES];

/* The last quarter of @pages is held unsealed; its first WRITTEN have patterns. */
#define FIRST_HELD (PAGES * 3 / 4)

static int look(struct scene *s, u32 i, bool write)
{
	struct kv_row row =
		kv_row_make(pages[i].pfn, pages[i].tag, write ? KV_ROW_WRITE : 0, 3, 0);
	struct kvc_check_request q = {
		.rows = &row, .nonce = 3, .nr_rows = 1, .length = 1};
	struct kvc_step *step;
	struct kv_verdict v;
	u64 *page;
	int r = kvc_step_begin(s->c, &step);

	if (r)
		return kvb_said("kvc_step_begin", r);
	r = kvc_step_check(step, s->pool, &q, 1, &v);
	if (!r && !kv_verdict_ok(v, kvc_step_number(step), 1)) {
		s->lost++;
	} else if (!r) {
		page = kvc_page_addr(s->pool, pages[i].pfn);
		chaos_fill(s->want, s->words, i, 0);
		if (write)
			memcpy(page, s->want, s->words * 8);
		for (u64 k = 0; k < s->words; k++)
			s->wrong += page[k] == s->want[k] ? 0 : 8;
		s->checked += s->words * 8;
	}
	kvc_step_retire(step);
	return r ? kvb_said("kvc_step_check", r) : 0;
}

static int seal_run(struct scene *s, u32 first)
{
	u32 tokens[8 * KV_PAGE_TOKENS], crc[8] = {0};
	struct kv_seal_ret rets[8];
	struct kvc_seal q = {.size_bytes = sizeof(q),
			     .nr_pages = 8,
			     .pages = pages + first,
			     .crc32c = crc,
			     .tokens = tokens,
			     .ret_seals = rets};

	chaos_tokens(tokens, 1000000 + first);
	return kvc_seal(s->pool, &q);
}

static int fill_pool(struct scene *s)
{
	int r = 0;

	for (u32 i = 0; i < PAGES && !r; i += 4000)
		r = kvc_alloc(s->pool, 4000, KV_GFP_PREFILL, pages + i);
	if (r)
		return kvb_said("kvc_alloc", r);
	for (u32 i = 0; i < FIRST_HELD && !r; i += 8)
		r = seal_run(s, i);
	if (!r)
		r = kvc_free(s->pool, pages, PAGES / 2);
	if (!r)
		r = kvc_flush(s->c);
	if (r)
		return kvb_said("filling the pool", r);
	for (u32 i = 0; i < WRITTEN && !r; i++)
		r = look(s, FIRST_HELD + i, true);
	return r;
}

static int config_write(struct scene *s)
{
	int fd;

	strcpy(s->config, "/tmp/kvbench-restarts-XXXXXX");
	fd = mkstemp(s->config);
	if (fd < 0) {
		s->config[0] = 0;
		return kvb_said("mkstemp", -errno);
	}
	dprintf(fd,
		"{\"tiers\": {\"dram\": {\"size\": \"%lluMiB\"}}, \"tenants\": [{\"name\": "
		"\"bench\", \"uids\": [%u], \"gpus\": [{\"gpu\": \"*\", \"max\": "
		"\"1TiB\"}]}]}",
		(unsigned long long)s->dram_mib, getuid());
	close(fd);
	return 0;
}

static int open_all(struct scene *s)
{
	const char *args[] = {"--config", s->config, NULL};
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .client_name = "kvbench-restarts",
				  .timeout_ms = 20000};
	struct kv_layout layout = chaos_layout();
	const float scales[2] = {1, 1};
	struct kvc_info info;
	int r = s->dram_mib ? config_write(s) : 0;

	if (!r)
		r = chaos_start(&s->kvmd, ROOM, s->dram_mib ? args : NULL);
	if (r)
		return r;
	s->counts = chaos_counts(ENGINES);
	s->words = kv_page_bytes(&layout) / 8;
	s->want = malloc(s->words * 8);
	if (!s->counts || !s->want)
		return -ENOMEM;
	opt.socket_path = s->kvmd.k.socket_path;
	r = kvc_open(&opt, &s->c);
	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(s->c, &layout, scales, NULL, &s->pool);
	if (r)
		return kvb_said("kvc_pool_open", r);
	kvc_info(s->c, &info);
	s->session = info.session;
	return fill_pool(s);
}

static int start_engines(struct scene *s)
{
	for (u32 i = 0; i < ENGINES; i++) {
		struct chaos_engine e = {.socket_path = s->kvmd.k.socket_path,
					 .count = &s->counts[i],
					 .seed = i + 1};

		s->pids[i] = chaos_fork(&e);
		if (s->pids[i] < 0)
			return s->pids[i];
	}
	return 0;
}

/* What kvmd has used of a CPU so far: the rest of its start it waited for one. */
static double cpu_ms(pid_t pid)
{
	struct timespec ts = {0};
	clockid_t clock;

	if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &ts))
		return 0;
	return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec * 1e-6;
}

static int kills(struct scene *s, u32 nr)
{
	int r = 0;

	for (u32 i = 0; i < nr && !r; i++) {
		u64 start_ns;

		usleep((u32)(chaos_random(&s->random) % 40000));
		start_ns = kv_now_ns();
		chaos_kill(&s->kvmd);
		r = chaos_again(&s->kvmd, &s->serve_ms[i]);
		s->cpu_ms[i] = r ? 0 : cpu_ms(s->kvmd.k.pid);
		s->whole_ms[i] = (double)(kv_now_ns() - start_ns) * 1e-6;
		for (u32 k = 0; k < 16 && !r; k++)
			r = look(s,
				 FIRST_HELD + (u32)(chaos_random(&s->random) % WRITTEN),
				 false);
	}
	return r;
}

static int stop_engines(struct scene *s)
{
	int failed = 0, status;

	for (u32 i = 0; i < ENGINES; i++)
		__atomic_store_n(&s->counts[i].stop, 1, __ATOMIC_RELEASE);
	for (u32 i = 0; i < ENGINES; i++)
		if (s->pids[i] > 0 && (waitpid(s->pids[i], &status, 0) < 0 || status))
			failed = -ECHILD;
	return failed;
}

/* Every page is where it should be: what we hold passes, and nobody holds any other. */
static int account(struct scene *s)
{
	struct kvc_info info;
	struct kv_stat st;
	int r = 0;

	kvc_info(s->c, &info);
	if (info.session != s->session) {
		fprintf(stderr, "kvbench: the session is another: all is lost\n");
		s->lost += PAGES / 2;
		return 0;
	}
	for (u32 i = 0; i < WRITTEN && !r; i++)
		r = look(s, FIRST_HELD + i, false);
	for (u32 i = 0; i < 5000 && !r; i++) {
		r = kvc_stat(s->pool, &st);
		if (st.nr_active + st.nr_magazine == PAGES / 4 && !st.nr_quarantine)
			break;
		usleep(1000);
	}
	if (r)
		return kvb_said("the last look", r);
	if (st.nr_active != PAGES / 4 || st.nr_sealed != PAGES / 4 || st.nr_quarantine ||
	    st.nr_magazine ||
	    st.nr_free + st.nr_active + st.nr_sealed + st.nr_cached != st.nr_pages) {
		fprintf(stderr,
			"kvbench: %u pages: free %u, active %u, sealed %u, cached %u, "
			"quarantine %u, magazine %u\n",
			st.nr_pages, st.nr_free, st.nr_active, st.nr_sealed, st.nr_cached,
			st.nr_quarantine, st.nr_magazine);
		s->lost++;
	}
	return 0;
}

static void report(struct scene *s, u32 nr, bool json, double damage)
{
	struct chaos_count n = chaos_sum(s->counts, ENGINES);
	struct kvb_dist serve, whole, cpu;
	cJSON *o;

	kvb_dist_of(&serve, s->serve_ms, nr);
	kvb_dist_of(&whole, s->whole_ms, nr);
	kvb_dist_of(&cpu, s->cpu_ms, nr);
	s->lost += n.refused + n.sessions;
	s->wrong += n.wrong;
	if (!json) {
		printf("%u kills of kvmd, %u pages, %u engines (%llu rounds)\n", nr,
		       PAGES, ENGINES, (unsigned long long)n.rounds);
		printf("start to serving  p50 %.1f ms, p99 %.1f ms, max %.1f ms\n",
		       serve.p50, serve.p99, s->serve_ms[nr - 1]);
		printf("of that on a CPU  p50 %.1f ms, p99 %.1f ms\n", cpu.p50, cpu.p99);
		printf("kill to serving   p50 %.1f ms, p99 %.1f ms; longest round of an "
		       "engine %.1f ms\n",
		       whole.p50, whole.p99, (double)n.gap_ns * 1e-6);
		printf("pages lost %llu, wrong bytes %llu of %llu checked, audit damage "
		       "%.0f; stale %llu, errors %llu\n",
		       (unsigned long long)s->lost, (unsigned long long)s->wrong,
		       (unsigned long long)(s->checked + n.bytes), damage,
		       (unsigned long long)n.stale, (unsigned long long)n.errors);
		return;
	}
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kvbench-restarts/1");
	kvb_json_where(o, KVB_HOST);
	cJSON_AddNumberToObject(o, "kills", nr);
	cJSON_AddNumberToObject(o, "pages", PAGES);
	cJSON_AddNumberToObject(o, "dram_mib", (double)s->dram_mib);
	cJSON_AddBoolToObject(o, "realtime", s->kvmd.realtime);
	kvb_json_dist(o, "start_to_serving_ms", &serve);
	kvb_json_dist(o, "kill_to_serving_ms", &whole);
	kvb_json_dist(o, "cpu_ms", &cpu);
	cJSON_AddNumberToObject(o, "engine_longest_round_ms", (double)n.gap_ns * 1e-6);
	cJSON_AddNumberToObject(o, "pages_lost", (double)s->lost);
	cJSON_AddNumberToObject(o, "wrong_bytes", (double)s->wrong);
	cJSON_AddNumberToObject(o, "bytes_checked", (double)(s->checked + n.bytes));
	cJSON_AddNumberToObject(o, "audit_damage", damage);
	cJSON_AddNumberToObject(o, "engine_errors", (double)n.errors);
	kvb_json_print(o);
}

int kvb_restarts(int argc, char **argv)
{
	static const struct option longs[] = {{"kills", 1, 0, 'k'},
					      {"dram-mib", 1, 0, 'd'},
					      {"json", 0, 0, 'j'},
					      {"realtime", 0, 0, 'r'},
					      {0, 0, 0, 0}};
	struct scene *s = &scene;
	double damage = -1;
	bool json = false;
	u64 nr = 100;
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		if (c == 'k')
			r = kvb_number("kills", optarg, 1, KILLS_MAX, &nr);
		else if (c == 'd')
			r = kvb_number("dram-mib", optarg, 1, 1u << 20, &s->dram_mib);
		else if (c == 'r')
			s->kvmd.realtime = true;
		else if (c == 'j')
			json = true;
		else
			r = 2;
	}
	if (r) {
		fprintf(stderr,
			"usage: kvbench restarts [--kills 1..%u] [--dram-mib N] "
			"[--realtime] [--json]\n",
			KILLS_MAX);
		return 2;
	}
	s->random = 1;
	r = open_all(s);
	if (!r)
		r = start_engines(s);
	if (!r)
		r = kills(s, (u32)nr);
	if (s->counts && stop_engines(s))
		r = r ? r : -ECHILD;
	if (!r)
		r = account(s);
	if (!r) {
		damage = chaos_admin_number(&s->kvmd, "{\"op\":\"audit\"}", "damage");
		report(s, (u32)nr, json, damage);
	}
	kvc_close(s->c);
	if (s->kvmd.k.pid > 0)
		chaos_stop(&s->kvmd);
	if (s->config[0])
		unlink(s->config);
	return r || s->lost || s->wrong || damage != 0 ? 1 : 0;
}
