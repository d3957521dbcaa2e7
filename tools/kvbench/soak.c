/* SPDX-License-Identifier: Apache-2.0 */
/*
 * soak.c - kvbench soak: for a long time, at random: engines, kvmd, keeper and mover are
 * killed -9, bits flip in page records and in pages that lie in the DRAM tier.
 *
 * What must hold: no engine sees a wrong byte in a page that passed its check; kvmd starts
 * again each time; when all is over a last kvmd adopts what is there and its audit is
 * clean. Time to detection is taken for flips in records of pages that this process holds
 * and leaves alone (audit sweep). A flip in any other record is made on a stopped kvmd
 * that is then killed, so that the next one has to notice. Bytes of pages that are in use
 * have no digest that is looked at, so nothing flips there (docs/safety.md).
 */
#include "chaos.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "json.h"
#include "tests/bench/record_flip.h"

#define ENGINES	  3u
#define MINE	  32u /* pages that nobody touches */
#define MTTD_MAX  1000u
#define ANSWER_MS 300u			 /* then we look whether there is a kvmd */
#define LAST_NS	  (15 * KV_NSEC_PER_SEC) /* no held record flips so near to the end */
#define DETECT_NS (90 * KV_NSEC_PER_SEC)
#define CONFIG                                                                           \
	"{\"tenants\": [{\"name\": \"red\", \"uids\": [%u], \"gpus\": [{\"gpu\": \"*\"," \
	" \"max\": \"1GiB\"}]}], \"tiers\": {\"dram\": {\"size\": \"%uMiB\"}}}"

enum event {
	KILL_ENGINE,
	KILL_KVMD,
	KILL_KEEPER,
	KILL_MOVER,
	FLIP_PAGE,
	FLIP_RECORD,
	FLIP_MINE,
	EVENTS
};

static const char *const event_names[EVENTS] = {
	"engines killed",     "kvmd killed",	 "keeper killed",	"mover killed",
	"bits of tier pages", "bits of records", "bits of held records"};

/* In 64ths. The bits of held records come by themselves, one at a time. */
static const u8 weights[EVENTS] = {30, 8, 3, 5, 12, 6, 0};

struct scene {
	struct chaos_kvmd kvmd;
	struct chaos_count *counts;
	pid_t pids[ENGINES];
	struct chaos_count dead; /* sums of engines that were killed */
	char config[128];
	u64 random, seconds;
	u64 done[EVENTS], noticed, aborts;
	struct kvc *c;
	struct kvc_pool *pool;
	struct kv_grant mine[MINE];
	u32 nr_mine;
	u64 end_ns, flipped_ns, session, cold;
	bool timed;
	double mttd_s[MTTD_MAX];
	u32 nr_mttd;
	double digests; /* of kvmds that are gone */
};

/* --------------------------------------------------------------------------- opening */

/* The tier's memory: allocated at once, or while engines are served (ipc/filling.h). */
static int config_write(struct scene *s)
{
	u32 mib = chaos_random(&s->random) & 1 ? 32 : 96;
	FILE *f;

	snprintf(s->config, sizeof(s->config), "/tmp/kvbench-soak-%d.json", getpid());
	f = fopen(s->config, "w");
	if (!f)
		return -errno;
	fprintf(f, CONFIG, getuid(), mib);
	return fclose(f) ? -errno : 0;
}

static int engine_start(struct scene *s, u32 i)
{
	struct chaos_engine e = {.socket_path = s->kvmd.k.socket_path,
				 .count = &s->counts[i],
				 .seed = chaos_random(&s->random),
				 .fork_in_step = 64};

	s->pids[i] = chaos_fork(&e);
	return s->pids[i] < 0 ? s->pids[i] : 0;
}

/* A session and pages of our own, for flips whose detection is timed. */
static int mine_open(struct scene *s)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = s->kvmd.k.socket_path,
				  .client_name = "kvbench-soak",
				  .timeout_ms = ANSWER_MS};
	struct kv_layout layout = chaos_layout();
	const float scales[2] = {1, 1};
	int r = kvc_open(&opt, &s->c);

	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(s->c, &layout, scales, NULL, &s->pool);
	return r ? kvb_said("kvc_pool_open", r) : 0;
}

static void mine_take(struct scene *s)
{
	if (kvc_alloc(s->pool, MINE, KV_GFP_PREFILL, s->mine) == 0)
		s->nr_mine = MINE;
}

static int open_all(struct scene *s)
{
	const char *args[] = {"--config", s->config, NULL};
	int r = config_write(s);

	if (!r)
		r = chaos_start(&s->kvmd, "12MiB", args);
	if (r)
		return r;
	s->counts = chaos_counts(ENGINES);
	if (!s->counts)
		return -ENOMEM;
	r = mine_open(s);
	for (u32 i = 0; i < ENGINES && !r; i++)
		r = engine_start(s, i);
	if (!r)
		mine_take(s);
	return r;
}

/* ---------------------------------------------------------------------- what is done */

static void count_dead(struct scene *s, u32 i)
{
	struct chaos_count both[2] = {s->dead, s->counts[i]};

	s->dead = chaos_sum(both, 2);
	if (s->counts[i].child > 0)
		kill(s->counts[i].child, SIGKILL);
	memset(&s->counts[i], 0, sizeof(s->counts[i]));
}

static int kill_engine(struct scene *s)
{
	u32 i = (u32)(chaos_random(&s->random) % ENGINES);

	kill(s->pids[i], SIGKILL);
	waitpid(s->pids[i], NULL, 0);
	count_dead(s, i);
	return engine_start(s, i);
}

static int again(struct scene *s)
{
	double ms;
	int r = config_write(s);

	return r ? r : chaos_again(&s->kvmd, &ms);
}

static void digests_count(struct scene *s)
{
	double n = chaos_admin_number(&s->kvmd, "{\"op\":\"tier\"}", "bad_digests");

	s->digests += n > 0 ? n : 0;
}

static int kill_kvmd(struct scene *s)
{
	digests_count(s);
	chaos_kill(&s->kvmd);
	return again(s);
}

static int kill_helper(struct scene *s, bool keeper)
{
	pid_t pid = keeper ? chaos_keeper()
			   : (pid_t)chaos_admin_number(&s->kvmd, "{\"op\":\"status\"}",
						       "mover.pid");

	if (pid <= 1 || pid == s->kvmd.k.pid)
		return -ENOENT;
	kill(pid, SIGKILL);
	/* Both gone at once is a cold start: the next keeper first. */
	for (u32 i = 0; keeper && i < 5000; i++) {
		pid_t next = chaos_keeper();

		if (next && next != pid)
			break;
		usleep(1000);
	}
	usleep(50000);
	return 0;
}

/* A memfd of kvmd by its name, as somebody who can flip bits in it. */
static u8 *memory_map(struct scene *s, const char *name, size_t *ret_bytes)
{
	char path[64], link[128];
	struct stat st;
	u8 *map = NULL;

	for (int i = 0; i < 512 && !map; i++) {
		ssize_t n;
		int fd;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", s->kvmd.k.pid, i);
		n = readlink(path, link, sizeof(link) - 1);
		link[n > 0 ? n : 0] = 0;
		if (!strstr(link, name))
			continue;
		fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd < 0 || fstat(fd, &st)) {
			if (fd >= 0)
				close(fd);
			continue;
		}
		map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			   fd, 0);
		close(fd);
		*ret_bytes = (size_t)st.st_size;
	}
	return map == MAP_FAILED ? NULL : map;
}

/* At any time, also while the page is copied: the digest is taken after that. */
static int flip_page(struct scene *s)
{
	size_t bytes = 0;
	u8 *map = memory_map(s, "kvmd-mover-pool", &bytes);
	u64 x = chaos_random(&s->random);

	if (!map)
		return -ENOENT;
	/* several, as only some of the memory has pages of which one is read again */
	for (u32 i = 0; i < 64; i++, x = chaos_random(&s->random))
		map[(x >> 8) % bytes] ^= (u8)(1 << (x & 7));
	munmap(map, bytes);
	return 0;
}

/* Bits that the check word covers: all before it. */
static int flip_in_record(struct scene *s, u32 pfn)
{
	size_t bytes = 0, checked, at = kvb_record_at(pfn, &checked);
	u8 *map = memory_map(s, "kvmd-frames", &bytes);
	u64 x = chaos_random(&s->random);

	if (!map)
		return -ENOENT;
	map[at + (x >> 8) % checked] ^= (u8)(1 << (x & 7));
	munmap(map, bytes);
	return 0;
}

static int flip_record(struct scene *s)
{
	struct kv_stat st;
	int r = kvc_stat(s->pool, &st);

	if (r || !st.nr_pages)
		return -ENOENT;
	kill(s->kvmd.k.pid, SIGSTOP);
	r = flip_in_record(s, (u32)(chaos_random(&s->random) % st.nr_pages));
	chaos_kill(&s->kvmd);
	return again(s) ? -ECHILD : r;
}

/* One at a time; when it is found, the next kvmd has to make the best of it. */
static int mine_turn(struct scene *s)
{
	struct kvc_info info;
	double errors;
	int r;

	kvc_info(s->c, &info);
	if (info.session != s->session) { /* lost: the pages are others' now */
		s->cold += s->session != 0;
		s->session = info.session;
		s->nr_mine = 0;
		s->flipped_ns = 0;
	}
	if (!s->nr_mine) {
		mine_take(s);
		return 0;
	}
	if (!s->flipped_ns && kv_now_ns() + LAST_NS > s->end_ns)
		return 0;
	if (!s->flipped_ns) {
		r = flip_in_record(s, s->mine[s->nr_mine - 1].pfn);
		s->flipped_ns = r ? 0 : kv_now_ns();
		s->timed =
			chaos_random(&s->random) & 1; /* else the next kvmd may find it */
		s->done[FLIP_MINE] += !r;
		return 0;
	}
	errors = chaos_admin_number(&s->kvmd, "{\"op\":\"status\"}", "audit_errors");
	if (errors <= 0)
		return kv_now_ns() - s->flipped_ns > DETECT_NS ? -ETIMEDOUT : 0;
	if (s->timed && s->nr_mttd < MTTD_MAX)
		s->mttd_s[s->nr_mttd++] = (double)(kv_now_ns() - s->flipped_ns) * 1e-9;
	s->flipped_ns = 0;
	s->nr_mine--;
	s->noticed++;
	s->done[KILL_KVMD]++;
	return kill_kvmd(s);
}

/* Any other start in between finds it as well: then it is not timed. */
static void mine_lost(struct scene *s)
{
	if (!s->flipped_ns)
		return;
	s->flipped_ns = 0;
	s->nr_mine--;
	s->noticed++;
}

static int one_event(struct scene *s)
{
	u32 x = (u32)(chaos_random(&s->random) % 64), e = 0;
	int r = 0;

	while (x >= weights[e])
		x -= weights[e++];
	/* While a flip's detection is timed kvmd lives. */
	if ((e == KILL_KVMD || e == FLIP_RECORD) && s->flipped_ns && s->timed)
		e = KILL_ENGINE;
	if (e == KILL_ENGINE)
		r = kill_engine(s);
	else if (e == KILL_KVMD)
		r = kill_kvmd(s);
	else if (e == KILL_KEEPER)
		r = kill_helper(s, true);
	else if (e == KILL_MOVER)
		r = kill_helper(s, false);
	else if (e == FLIP_PAGE)
		r = flip_page(s);
	else
		r = flip_record(s);
	if (e == KILL_KVMD || e == FLIP_RECORD)
		mine_lost(s);
	s->done[e] += !r;
	return r == -ENOENT ? 0 : r;
}

/* kvmd ends itself when it finds something of its own broken: started again. */
static int watch_kvmd(struct scene *s)
{
	int status;

	if (waitpid(s->kvmd.k.pid, &status, WNOHANG) != s->kvmd.k.pid)
		return 0;
	s->aborts++;
	mine_lost(s);
	return again(s);
}

/* ---------------------------------------------------------------------------- the end */

static int stop_engines(struct scene *s)
{
	int failed = 0, status;

	for (u32 i = 0; i < ENGINES; i++)
		__atomic_store_n(&s->counts[i].stop, 1, __ATOMIC_RELEASE);
	for (u32 i = 0; i < ENGINES; i++) {
		if (s->pids[i] > 0 && (waitpid(s->pids[i], &status, 0) < 0 || status))
			failed = -ECHILD;
		count_dead(s, i);
	}
	return failed;
}

static int finish(struct scene *s, double *ret_damage, struct kv_stat *st)
{
	int r = stop_engines(s);

	kvc_close(s->c);
	s->c = NULL;
	if (!r)
		r = kill_kvmd(s);
	if (!r)
		r = mine_open(s);
	for (u32 i = 0; i < 5000 && !r; i++) {
		r = kvc_stat(s->pool, st);
		if (!st->nr_active && !st->nr_quarantine && !st->nr_sealed &&
		    !st->nr_magazine)
			break;
		usleep(1000);
	}
	digests_count(s);
	*ret_damage = chaos_admin_number(&s->kvmd, "{\"op\":\"audit\"}", "damage");
	if (*ret_damage > 0) {
		char *text = chaos_admin(&s->kvmd, "{\"op\":\"audit\"}");

		fprintf(stderr, "kvbench: soak: %s", text ? text : "no answer\n");
		free(text);
	}
	return r;
}

static void report(struct scene *s, double damage, const struct kv_stat *st, bool json)
{
	struct kvb_dist d = {0};
	cJSON *o;

	if (s->nr_mttd)
		kvb_dist_of(&d, s->mttd_s, s->nr_mttd);
	if (!json) {
		printf("%llu s:", (unsigned long long)s->seconds);
		for (u32 i = 0; i < EVENTS; i++)
			printf(" %s %llu%s", event_names[i],
			       (unsigned long long)s->done[i],
			       i + 1 < EVENTS ? "," : "\n");
		printf("noticed: %llu held records (timed %u: p50 %.1f s, max %.1f s), "
		       "%.0f digests; aborts %llu, cold starts %llu\n",
		       (unsigned long long)s->noticed, s->nr_mttd, d.p50,
		       s->nr_mttd ? s->mttd_s[s->nr_mttd - 1] : 0, s->digests,
		       (unsigned long long)s->aborts, (unsigned long long)s->cold);
		printf("engines: rounds %llu, hits %llu, refused pages %llu, lost "
		       "sessions %llu, errors %llu, wrong bytes %llu of %llu\n",
		       (unsigned long long)s->dead.rounds,
		       (unsigned long long)s->dead.hits,
		       (unsigned long long)s->dead.refused,
		       (unsigned long long)s->dead.sessions,
		       (unsigned long long)s->dead.errors,
		       (unsigned long long)s->dead.wrong,
		       (unsigned long long)s->dead.bytes);
		printf("at the end: audit damage %.0f; held %u, quarantine %u, cached "
		       "%u, free %u of %u pages\n",
		       damage, st->nr_active + st->nr_sealed + st->nr_magazine,
		       st->nr_quarantine, st->nr_cached, st->nr_free, st->nr_pages);
		return;
	}
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kvbench-soak/1");
	kvb_json_where(o, KVB_HOST);
	cJSON_AddNumberToObject(o, "seconds", (double)s->seconds);
	for (u32 i = 0; i < EVENTS; i++)
		cJSON_AddNumberToObject(o, event_names[i], (double)s->done[i]);
	kvb_json_dist(o, "time_to_detection_s", &d);
	cJSON_AddNumberToObject(o, "bad_digests", s->digests);
	cJSON_AddNumberToObject(o, "aborts", (double)s->aborts);
	cJSON_AddNumberToObject(o, "cold_starts", (double)s->cold);
	cJSON_AddNumberToObject(o, "wrong_bytes", (double)s->dead.wrong);
	cJSON_AddNumberToObject(o, "bytes_checked", (double)s->dead.bytes);
	cJSON_AddNumberToObject(o, "audit_damage", damage);
	kvb_json_print(o);
}

static int run(struct scene *s)
{
	int r = 0;

	s->end_ns = kv_now_ns() + s->seconds * KV_NSEC_PER_SEC;
	while (!r && kv_now_ns() < s->end_ns) {
		usleep((u32)(chaos_random(&s->random) % 120000));
		kvc_dispatch(s->c, NULL, NULL);
		r = watch_kvmd(s);
		if (!r)
			r = one_event(s);
		if (!r)
			r = mine_turn(s);
	}
	return r;
}

static int soak_parse(int argc, char **argv, struct scene *s, bool *ret_json)
{
	static const struct option longs[] = {{"seconds", 1, 0, 's'},
					      {"seed", 1, 0, 'r'},
					      {"json", 0, 0, 'j'},
					      {0, 0, 0, 0}};
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		if (c == 's')
			r = kvb_number("seconds", optarg, 1, 1000000, &s->seconds);
		else if (c == 'r')
			r = kvb_number("seed", optarg, 0, ~0ull >> 1, &s->random);
		else if (c == 'j')
			*ret_json = true;
		else
			r = 2;
	}
	if (r)
		fprintf(stderr,
			"usage: kvbench soak [--seconds N] [--seed N] [--json]\n");
	return r;
}

int kvb_soak(int argc, char **argv)
{
	static struct scene s = {.seconds = 30, .random = 1};
	struct kv_stat st = {0};
	bool json = false;
	double damage = -1;
	int r = soak_parse(argc, argv, &s, &json), end;

	if (r)
		return r;
	r = open_all(&s);
	if (!r)
		r = run(&s);
	if (r)
		fprintf(stderr, "kvbench: soak: %s; kvmd's log follows\n", strerror(-r));
	end = s.kvmd.k.pid > 0 && s.counts ? finish(&s, &damage, &st) : -ENOENT;
	report(&s, damage, &st, json);
	kvc_close(s.c);
	if (r || end || damage != 0)
		fprintf(stderr, "kvbench: soak: the log is in %s\n", s.kvmd.k.log_path);
	else
		chaos_stop(&s.kvmd);
	unlink(s.config);
	return r || end || damage != 0 || s.dead.wrong ? 1 : 0;
}
