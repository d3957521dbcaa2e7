/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crashes.c - kvbench crashes: engine processes killed -9 at random points of their life:
 * in HELLO, while a pool opens, inside a step, with a forked child that lives on.
 *
 * Two at a time. Now and then all is let come to rest: pages, quota, sessions, kvmd's
 * descriptors and memory must be what they were after the first KILLS_WARM kills, which
 * fill the caches.
 */
#include "chaos.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "json.h"

#define AT_ONCE	   2u
#define KILLS_WARM 1000u
#define REST_NS	   (10 * KV_NSEC_PER_SEC)
#define ANON_SLACK 512u /* KiB */

/** struct rest - what is there when nobody runs */
struct rest {
	struct kv_stat st;
	double sessions;
	u32 fds, keeper_fds, extents; /* an extent is a descriptor in both */
	u64 anon_kib;
};

struct scene {
	struct chaos_kvmd kvmd;
	struct chaos_count *counts;
	struct kvc *c;
	struct kvc_pool *pool;
	u64 random, deaths[CHAOS_PHASES], wrong, bytes, children;
	pid_t keeper;
	u32 extent_pages;
};

static const char *const phase_names[CHAOS_PHASES] = {"hello",	"open", "alloc",  "step",
						      "forked", "seal", "lookup", "free"};

static int open_all(struct scene *s)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .client_name = "kvbench-crashes"};
	struct kv_layout layout = chaos_layout();
	const float scales[2] = {1, 1};
	struct kvc_pool_info info;
	int r = chaos_start(&s->kvmd, "128MiB", NULL);

	if (r)
		return r;
	s->counts = chaos_counts(AT_ONCE);
	s->keeper = chaos_keeper();
	if (!s->counts || !s->keeper)
		return -ENOMEM;
	opt.socket_path = s->kvmd.k.socket_path;
	r = kvc_open(&opt, &s->c);
	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(s->c, &layout, scales, NULL, &s->pool);
	if (r)
		return kvb_said("kvc_pool_open", r);
	kvc_pool_get_info(s->pool, &info);
	s->extent_pages = 1u << info.geometry.shift;
	return 0;
}

/* Connections that died in HELLO have no session: they are closed when kvmd gets to them. */
static u32 steady_fds(pid_t pid)
{
	u32 was = chaos_fds(pid), same = 0;

	for (u32 i = 0; i < 100 && same < 4; i++) {
		u32 now;

		usleep(50000);
		now = chaos_fds(pid);
		same = now == was ? same + 1 : 0;
		was = now;
	}
	return was;
}

/* All dead engines' pages are back, or it is too late. Return: 0; -ETIMEDOUT */
static int come_to_rest(struct scene *s, struct rest *ret)
{
	u64 end_ns = kv_now_ns() + REST_NS;
	int r;

	do {
		usleep(2000);
		kvc_dispatch(s->c, NULL, NULL);
		r = kvc_stat(s->pool, &ret->st);
		if (r)
			return kvb_said("kvc_stat", r);
		ret->sessions =
			chaos_admin_number(&s->kvmd, "{\"op\":\"status\"}", "sessions");
		if (!ret->st.nr_active && !ret->st.nr_sealed && !ret->st.nr_quarantine &&
		    !ret->st.nr_magazine && ret->sessions == 1) {
			ret->extents = ret->st.nr_pages / s->extent_pages;
			ret->fds = steady_fds(s->kvmd.k.pid);
			ret->keeper_fds = steady_fds(s->keeper);
			ret->anon_kib = chaos_anon_kib(s->kvmd.k.pid);
			return 0;
		}
	} while (kv_now_ns() < end_ns);
	fprintf(stderr,
		"kvbench: LEAK: active %u, sealed %u, quarantine %u, magazine %u, "
		"sessions %.0f\n",
		ret->st.nr_active, ret->st.nr_sealed, ret->st.nr_quarantine,
		ret->st.nr_magazine, ret->sessions);
	return -ETIMEDOUT;
}

static void rest_text(u64 kills, const struct rest *r)
{
	printf("%6llu kills: pages %u, held %u, cached %u, charged %llu KiB, sessions "
	       "%.0f, fds %u, keeper's %u (extents %u), own memory %llu KiB\n",
	       (unsigned long long)kills, r->st.nr_pages,
	       r->st.nr_active + r->st.nr_sealed + r->st.nr_magazine, r->st.nr_cached,
	       (unsigned long long)r->st.tenant_used_bytes >> 10, r->sessions, r->fds,
	       r->keeper_fds, r->extents, (unsigned long long)r->anon_kib);
}

/* kvmd serves so many new connections a second (kvmd/ipc/pace.h): who is to die later than
 * in HELLO lives from when that is over. */
static void await_hello(const struct chaos_count *n)
{
	for (u32 i = 0; i < 200; i++) {
		if (__atomic_load_n(&n->phase, __ATOMIC_ACQUIRE) != CHAOS_HELLO)
			return;
		usleep(200);
	}
}

static void end_one(struct scene *s, u32 i, pid_t pid)
{
	struct chaos_count *n = &s->counts[i];

	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	s->deaths[n->phase % CHAOS_PHASES]++;
	s->wrong += n->wrong;
	s->bytes += n->bytes;
	if (n->child > 0) { /* it outlived its parent by a moment */
		usleep(500);
		kill(n->child, SIGKILL);
		s->children++;
	}
	memset(n, 0, sizeof(*n));
}

static int some_kills(struct scene *s, u64 nr)
{
	for (u64 k = 0; k < nr; k += AT_ONCE) {
		pid_t pids[AT_ONCE];

		for (u32 i = 0; i < AT_ONCE; i++) {
			struct chaos_engine e = {.socket_path = s->kvmd.k.socket_path,
						 .count = &s->counts[i],
						 .seed = chaos_random(&s->random),
						 .fork_in_step = 16};

			pids[i] = chaos_fork(&e);
			if (pids[i] < 0)
				return pids[i];
		}
		for (u32 i = 0; i < AT_ONCE; i++) {
			u64 x = chaos_random(&s->random);

			if (!(x & 1))
				await_hello(&s->counts[i]);
			usleep((u32)(x >> 8) % (x & 1 ? 1200 : 9000));
			end_one(s, i, pids[i]);
		}
	}
	return 0;
}

/* Return: leaks */
static u32 compare(const struct rest *a, const struct rest *b)
{
	u64 a_own = a->st.tenant_used_bytes - a->st.nr_cached * 8192ull;
	u64 b_own = b->st.tenant_used_bytes - b->st.nr_cached * 8192ull;

	return (a_own != b_own) + (b->fds - b->extents > a->fds - a->extents) +
	       (b->keeper_fds - b->extents > a->keeper_fds - a->extents) +
	       (b->sessions != a->sessions) + (b->anon_kib > a->anon_kib + ANON_SLACK);
}

static void rest_json(cJSON *list, u64 kills, const struct rest *r)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddNumberToObject(o, "kills", (double)kills);
	cJSON_AddNumberToObject(o, "pages", r->st.nr_pages);
	cJSON_AddNumberToObject(o, "cached", r->st.nr_cached);
	cJSON_AddNumberToObject(o, "charged_bytes", (double)r->st.tenant_used_bytes);
	cJSON_AddNumberToObject(o, "fds", r->fds);
	cJSON_AddNumberToObject(o, "keeper_fds", r->keeper_fds);
	cJSON_AddNumberToObject(o, "extents", r->extents);
	cJSON_AddNumberToObject(o, "anon_kib", (double)r->anon_kib);
	cJSON_AddItemToArray(list, o);
}

static void report(struct scene *s, u64 kills, u32 leaks, double damage, double rate,
		   cJSON *o)
{
	if (!o) {
		printf("killed in:");
		for (u32 i = 0; i < CHAOS_PHASES; i++)
			printf(" %s %llu", phase_names[i],
			       (unsigned long long)s->deaths[i]);
		printf("; children that lived on %llu\n",
		       (unsigned long long)s->children);
		printf("%llu kills, %.0f a second, %u leaks, wrong bytes %llu of %llu, "
		       "audit damage %.0f\n",
		       (unsigned long long)kills, rate, leaks,
		       (unsigned long long)s->wrong, (unsigned long long)s->bytes,
		       damage);
		return;
	}
	cJSON_AddStringToObject(o, "schema", "kvbench-crashes/1");
	kvb_json_where(o, KVB_HOST);
	for (u32 i = 0; i < CHAOS_PHASES; i++)
		cJSON_AddNumberToObject(o, phase_names[i], (double)s->deaths[i]);
	cJSON_AddNumberToObject(o, "kills", (double)kills);
	cJSON_AddNumberToObject(o, "kills_per_s", rate);
	cJSON_AddNumberToObject(o, "leaks", leaks);
	cJSON_AddNumberToObject(o, "wrong_bytes", (double)s->wrong);
	cJSON_AddNumberToObject(o, "bytes_checked", (double)s->bytes);
	cJSON_AddNumberToObject(o, "audit_damage", damage);
	kvb_json_print(o);
}

static int run(struct scene *s, u64 nr, bool json, u32 *ret_leaks, double *ret_damage)
{
	cJSON *o = json ? cJSON_CreateObject() : NULL,
	      *list = json ? cJSON_AddArrayToObject(o, "rests") : NULL;
	u64 slice = KV_MAX(nr / 5, 2ull), start_ns = kv_now_ns(), done = 0;
	struct rest first = {0}, now;
	double rate;
	int r;

	r = some_kills(s, KILLS_WARM);
	if (!r)
		r = come_to_rest(s, &first);
	now = first;
	start_ns = kv_now_ns();
	while (!r) {
		if (json)
			rest_json(list, done, &now);
		else
			rest_text(done, &now);
		if (done >= nr)
			break;
		r = some_kills(s, KV_MIN(slice, nr - done));
		done += KV_MIN(slice, nr - done);
		if (!r)
			r = come_to_rest(s, &now);
	}
	if (r) {
		cJSON_Delete(o);
		*ret_leaks = 1;
		return r;
	}
	rate = (double)done / ((double)(kv_now_ns() - start_ns) * 1e-9);
	*ret_leaks = compare(&first, &now);
	*ret_damage = chaos_admin_number(&s->kvmd, "{\"op\":\"audit\"}", "damage");
	report(s, done, *ret_leaks, *ret_damage, rate, o);
	return 0;
}

int kvb_crashes(int argc, char **argv)
{
	static const struct option longs[] = {
		{"kills", 1, 0, 'k'}, {"json", 0, 0, 'j'}, {0, 0, 0, 0}};
	static struct scene s;
	double damage = -1;
	bool json = false;
	u64 nr = 1000;
	u32 leaks = 0;
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		if (c == 'k')
			r = kvb_number("kills", optarg, 2, 1000000, &nr);
		else if (c == 'j')
			json = true;
		else
			r = 2;
	}
	if (r) {
		fprintf(stderr, "usage: kvbench crashes [--kills N] [--json]\n");
		return 2;
	}
	s.random = 7;
	r = open_all(&s);
	if (!r)
		r = run(&s, nr, json, &leaks, &damage);
	kvc_close(s.c);
	if (s.kvmd.k.pid > 0 && chaos_stop(&s.kvmd))
		r = -ECHILD;
	return r || leaks || s.wrong || damage != 0 ? 1 : 0;
}
