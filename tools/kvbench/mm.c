/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm.c - kvbench mm: what an allocation, a round trip, a lookup and an attach cost.
 *
 * The references that can be had run in the same process right before: a Unix seqpacket
 * round trip between two processes, jemalloc, the bare hashes of a lookup. Operations of
 * some ns are timed in blocks, so that the clock's own 20-30 ns do not count; a block's
 * time over its operations is one sample. kvmd is started with --spin: both sides are
 * awake, as between two decode steps. One thread here, one process of kvmd.
 */
#include "tools/kvbench/mm.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <sched.h>
#ifndef KV_SANITIZED
#include <jemalloc/jemalloc.h>
#endif
#include <signal.h>
#include <sodium.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/private.h"
#include "kvclient.h"

#define SAMPLES_MAX   40000u
#define PAIRS_A_BLOCK 8u
#define CORE_PAGES    (1u << 20)
#define LOOKUP_PAGES  512u
#define LIVE_OBJECTS  (1u << 20)

struct bench {
	struct kvc *c;
	struct kvc_pool *pool;
	const char *socket_path;
	pid_t kvmd; /* private: may be pinned; -1 */
	bool pinned;
	u32 scale; /* samples are divided by it */
	double *samples;
};

/* Rows in the order they are printed. */
enum row_id {
	ROW_MAGAZINE,
	ROW_CORE,
	ROW_CORE_RANDOM,
	ROW_JEMALLOC,
	ROW_JEMALLOC_1M,
	ROW_ALLOC100,
	ROW_ALLOC100_GET,
	ROW_PYTHON_POOL,
	ROW_RING,
	ROW_SEQPACKET,
	ROW_LOOKUP_1K,
	ROW_LOOKUP_8K,
	ROW_LOOKUP,
	ROW_UNKNOWN_1K,
	ROW_UNKNOWN_8K,
	ROW_UNKNOWN,
	ROW_LOOKUP_1M,
	ROW_LOOKUP_1M_KEY,
	ROW_HASH,
	ROW_PYTHON_CHAIN,
	ROW_ATTACH,
	ROW_NR
};

static const struct {
	const char *name;
	const char *what;
	const char *reference;
	const char *target;
} rows[ROW_NR] = {
	[ROW_MAGAZINE] = {"magazine_pair_ns", "alloc + free, thread's magazine",
			  "kvcached page list 52", "<= 60"},
	[ROW_CORE] = {"core_pair_ns", "alloc + free, kvmd's core, 1 M pages",
		      "Mooncake 152-184", "<= 150"},
	[ROW_CORE_RANDOM] = {"core_random_pair_ns", "the same, random of 1 M live pages",
			     "Mooncake 531-560", ""},
	[ROW_JEMALLOC] = {"jemalloc_pair_ns", "alloc + free of 64 bytes, jemalloc",
			  "(this run)", ""},
	[ROW_JEMALLOC_1M] = {"jemalloc_1m_pair_ns",
			     "the same, random of 1 M live objects", "(this run)", ""},
	[ROW_ALLOC100] = {"alloc100_ns", "100 pages get + free through kvmd",
			  "its Python peer below", "<= 5000"},
	[ROW_ALLOC100_GET] = {"alloc100_get_ns", "of that, the get", "", ""},
	[ROW_PYTHON_POOL] = {"python_pool_ns", "100 blocks get + free, Python block pool",
			     "(this run)", ""},
	[ROW_RING] = {"ring_rtt_ns", "request to kvmd and back (STAT)",
		      "LMCache server RPC 1.3-1.8 ms", "<= 3000 p50, <= 20000 p99"},
	[ROW_SEQPACKET] = {"seqpacket_rtt_ns", "64 bytes by Unix seqpacket and back",
			   "(this run)", ""},
	[ROW_LOOKUP_1K] = {"lookup_1k_ns", "lookup of 1,024 known tokens, 16 hits", "",
			   ""},
	[ROW_LOOKUP_8K] = {"lookup_8k_ns", "lookup of 8,192 known tokens, 128 hits", "",
			   ""},
	[ROW_LOOKUP] = {"lookup_32k_ns", "lookup of 32,768 known tokens, 512 hits", "",
			"<= 1.25 x hash_512_ns"},
	[ROW_UNKNOWN_1K] = {"lookup_1k_unknown_ns", "lookup of 1,024 unknown tokens", "",
			    ""},
	[ROW_UNKNOWN_8K] = {"lookup_8k_unknown_ns", "lookup of 8,192 unknown tokens", "",
			    ""},
	[ROW_UNKNOWN] = {"lookup_32k_unknown_ns", "lookup of 32,768 unknown tokens", "",
			 ""},
	[ROW_LOOKUP_1M] = {"lookup_32k_1m_ns", "core: random 512 known of 1 M pages", "",
			   "<= 60000"},
	[ROW_LOOKUP_1M_KEY] = {"lookup_32k_1m_keys_ns", "core: the same, keys computed",
			       "", "<= 1.25 x hash_512_ns"},
	[ROW_HASH] = {"hash_512_ns", "its 512 BLAKE2b hashes alone", "(this run)", ""},
	[ROW_PYTHON_CHAIN] = {"python_chain_ns",
			      "32,768 tokens by SHA-256 chain in Python", "(this run)",
			      ""},
	[ROW_ATTACH] = {"attach_ns", "connect, open a pool, first page", "", ""},
};

static u64 rng_state = 88172645463325252ull;

static u32 rng_below(u32 n)
{
	rng_state ^= rng_state << 13;
	rng_state ^= rng_state >> 7;
	rng_state ^= rng_state << 17;
	return (u32)((rng_state >> 32) * n >> 32);
}

static int fail(const struct bench *b, const char *what, int r)
{
	fprintf(stderr, "kvbench mm: %s: %d %s\n", what, r,
		r < 0 ? kvc_strerror(b->c) : kv_outcome_str(r));
	return r ? r : -EIO;
}

/* --------------------------------------------------------------------------- references
 */

static int bench_seqpacket(struct bench *b, struct kvb_dist *ret)
{
	u32 nr = 20000 / b->scale;
	char buf[64] = "ping";
	int fds[2];
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds))
		return -errno;
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fds[0]);
		while (recv(fds[1], buf, sizeof(buf), 0) > 0)
			if (send(fds[1], buf, sizeof(buf), MSG_NOSIGNAL) < 0)
				break;
		_exit(0);
	}
	close(fds[1]);
	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();

		if (send(fds[0], buf, sizeof(buf), MSG_NOSIGNAL) < 0 ||
		    recv(fds[0], buf, sizeof(buf), 0) < 0)
			break;
		b->samples[i] = (double)(kv_now_ns() - start_ns);
	}
	close(fds[0]);
	waitpid(pid, NULL, 0);
	kvb_dist_of(ret, b->samples, nr);
	return 0;
}

static void *ref_alloc(size_t bytes)
{
#ifdef KV_SANITIZED
	return malloc(bytes);
#else
	return mallocx(bytes, 0);
#endif
}

static void ref_free(void *p)
{
#ifdef KV_SANITIZED
	free(p);
#else
	dallocx(p, 0);
#endif
}

static int bench_jemalloc(struct bench *b, struct kvb_dist *ret,
			  struct kvb_dist *ret_live)
{
	u32 nr = SAMPLES_MAX / b->scale, live = LIVE_OBJECTS / b->scale;
	void **objects;

	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();

		for (u32 k = 0; k < PAIRS_A_BLOCK; k++) {
			void *volatile p = ref_alloc(64);

			ref_free(p);
		}
		b->samples[i] = (double)(kv_now_ns() - start_ns) / PAIRS_A_BLOCK;
	}
	kvb_dist_of(ret, b->samples, nr);
	objects = calloc(live, sizeof(*objects));
	if (!objects)
		return -ENOMEM;
	for (u32 i = 0; i < live; i++)
		objects[i] = ref_alloc(64);
	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();

		for (u32 k = 0; k < PAIRS_A_BLOCK; k++) {
			void **p = &objects[rng_below(live)];

			ref_free(*p);
			*p = ref_alloc(64);
		}
		b->samples[i] = (double)(kv_now_ns() - start_ns) / PAIRS_A_BLOCK;
	}
	kvb_dist_of(ret_live, b->samples, nr);
	for (u32 i = 0; i < live; i++)
		ref_free(objects[i]);
	free(objects);
	return 0;
}

static void fill_tokens(u32 *tokens, u32 nr)
{
	for (u32 i = 0; i < nr; i++)
		tokens[i] = i * 2654435761u;
}

/* The chain of a lookup: key i = BLAKE2b-128 of 64 ids, salted with key i - 1 (design 8).
 */
static int bench_hash(struct bench *b, struct kvb_dist *ret)
{
	static u32 tokens[LOOKUP_PAGES * KV_PAGE_TOKENS];
	u8 key[KV_KEY_BYTES] = {1}, personal[16] = {2};
	u32 nr = 400 / b->scale;

	fill_tokens(tokens, KV_ARRAY_SIZE(tokens));
	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();

		for (u32 k = 0; k < LOOKUP_PAGES; k++)
			crypto_generichash_blake2b_salt_personal(
				key, sizeof(key),
				(const u8 *)(tokens + k * KV_PAGE_TOKENS),
				KV_PAGE_TOKENS * sizeof(u32), NULL, 0, key, personal);
		b->samples[i] = (double)(kv_now_ns() - start_ns);
	}
	kvb_dist_of(ret, b->samples, nr);
	return 0;
}

/* ---------------------------------------------------------------------------- ours */

static struct kv_layout bench_layout(void)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_GQA,
				  .dtype = KV_DTYPE_E4M3,
				  .scale_kind = KV_SCALE_TOKEN,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = 1,
				  .nr_kv_heads = 2,
				  .head_dim = 64};
}

static int open_pool(struct bench *b)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = b->socket_path,
				  .client_name = "kvbench-mm"};
	struct kv_layout layout = bench_layout();
	int r;

	r = kvc_open(&opt, &b->c);
	if (r)
		return fail(b, "kvc_open", r);
	r = kvc_pool_open(b->c, &layout, NULL, NULL, &b->pool);
	if (r) {
		fail(b, "kvc_pool_open", r);
		kvc_close(b->c);
		b->c = NULL;
	}
	return r;
}

static int bench_attach(struct bench *b, struct kvb_dist *ret)
{
	u32 nr = 200 / b->scale;
	struct kv_grant page;
	int r;

	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();

		r = open_pool(b);
		if (r)
			return r;
		r = kvc_alloc(b->pool, 1, KV_GFP_NOWAIT, &page);
		if (r)
			return fail(b, "kvc_alloc", r);
		b->samples[i] = (double)(kv_now_ns() - start_ns);
		kvc_close(b->c);
		b->c = NULL;
	}
	kvb_dist_of(ret, b->samples, nr);
	return 0;
}

static int bench_magazine(struct bench *b, struct kvb_dist *ret)
{
	u32 nr = SAMPLES_MAX / b->scale;
	struct kv_grant page;
	int r;

	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();

		for (u32 k = 0; k < PAIRS_A_BLOCK; k++) {
			r = kvc_alloc(b->pool, 1, KV_GFP_NOWAIT, &page);
			if (r)
				return fail(b, "kvc_alloc", r);
			r = kvc_free(b->pool, &page, 1);
			if (r)
				return fail(b, "kvc_free", r);
		}
		b->samples[i] = (double)(kv_now_ns() - start_ns) / PAIRS_A_BLOCK;
	}
	kvb_dist_of(ret, b->samples, nr);
	return kvc_flush(b->c) < 0 ? -EIO : 0;
}

static int bench_alloc100(struct bench *b, struct kvb_dist *ret, struct kvb_dist *ret_get)
{
	u32 nr = 10000 / b->scale;
	double *get = b->samples + SAMPLES_MAX / 2;
	struct kv_grant pages[100];

	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();
		int r = kvc_alloc(b->pool, 100, KV_GFP_NOWAIT, pages);

		if (r)
			return fail(b, "kvc_alloc of 100", r);
		get[i] = (double)(kv_now_ns() - start_ns);
		r = kvc_free(b->pool, pages, 100);
		if (r)
			return fail(b, "kvc_free of 100", r);
		b->samples[i] = (double)(kv_now_ns() - start_ns);
	}
	kvb_dist_of(ret, b->samples, nr);
	kvb_dist_of(ret_get, get, nr);
	return 0;
}

static int bench_ring(struct bench *b, struct kvb_dist *ret)
{
	u32 nr = 20000 / b->scale;
	struct kv_stat stat;

	for (u32 i = 0; i < nr; i++) {
		u64 start_ns = kv_now_ns();
		int r = kvc_stat(b->pool, &stat);

		if (r)
			return fail(b, "kvc_stat", r);
		b->samples[i] = (double)(kv_now_ns() - start_ns);
	}
	kvb_dist_of(ret, b->samples, nr);
	return 0;
}

static int seal_prefix(struct bench *b, const u32 *tokens)
{
	static struct kv_grant pages[LOOKUP_PAGES];
	static struct kv_seal_ret seals[LOOKUP_PAGES];
	static u32 crc[LOOKUP_PAGES];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = LOOKUP_PAGES,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = seals};
	int r;

	r = kvc_alloc(b->pool, LOOKUP_PAGES, KV_GFP_NOWAIT, pages);
	if (r)
		return fail(b, "kvc_alloc", r);
	r = kvc_seal(b->pool, &seal);
	return r ? fail(b, "kvc_seal", r) : 0;
}

/* @known: all @nr_pages must be hits, else none */
static int lookup_some(struct bench *b, const u32 *tokens, u32 nr_pages, bool known,
		       struct kvb_dist *ret)
{
	static struct kv_grant pages[LOOKUP_PAGES];
	static struct kv_hit hits[LOOKUP_PAGES];
	u32 nr = 4000 / b->scale, found;
	int r = 0;

	for (u32 i = 0; i < nr && !r; i++) {
		u64 start_ns = kv_now_ns();

		r = kvc_lookup(b->pool, tokens, nr_pages * KV_PAGE_TOKENS, nr_pages, hits,
			       &found);
		b->samples[i] = (double)(kv_now_ns() - start_ns);
		if (r != (known ? 0 : KV_MISS) || found != (known ? nr_pages : 0))
			return fail(b, "kvc_lookup", r);
		for (u32 k = 0; k < found; k++)
			pages[k] = hits[k].grant;
		r = known ? kvc_unpin(b->pool, pages, found) : 0;
	}
	if (!r)
		kvb_dist_of(ret, b->samples, nr);
	return r;
}

static int bench_lookup(struct bench *b, struct kvb_dist *d)
{
	static const u32 nr_pages[] = {16, 128, LOOKUP_PAGES};
	static u32 tokens[LOOKUP_PAGES * KV_PAGE_TOKENS];
	int r;

	fill_tokens(tokens, KV_ARRAY_SIZE(tokens));
	r = seal_prefix(b, tokens);
	for (u32 i = 0; i < KV_ARRAY_SIZE(nr_pages) && !r; i++)
		r = lookup_some(b, tokens, nr_pages[i], true, &d[ROW_LOOKUP_1K + i]);
	tokens[0]++;
	for (u32 i = 0; i < KV_ARRAY_SIZE(nr_pages) && !r; i++)
		r = lookup_some(b, tokens, nr_pages[i], false, &d[ROW_UNKNOWN_1K + i]);
	return r;
}

/* ------------------------------------------------------------------------------ output
 */

/* Return: did both get a CPU of their own? */
static bool pin(pid_t kvmd)
{
	cpu_set_t all, one;
	int cpus[2], nr = 0;

	if (sched_getaffinity(0, sizeof(all), &all))
		return false;
	for (int i = 0; i < CPU_SETSIZE && nr < 2; i++)
		if (CPU_ISSET(i, &all))
			cpus[nr++] = i;
	if (nr < 2)
		return false;
	CPU_ZERO(&one);
	CPU_SET(cpus[1], &one);
	if (sched_setaffinity(kvmd, sizeof(one), &one))
		return false;
	CPU_ZERO(&one);
	CPU_SET(cpus[0], &one);
	return !sched_setaffinity(0, sizeof(one), &one);
}

static int run_all(struct bench *b, struct kvb_dist *d)
{
	int r;

	/* Without Python its rows say so: they are no figure of ours. */
	if (kvb_mm_python(&d[ROW_PYTHON_POOL], &d[ROW_PYTHON_CHAIN]))
		fprintf(stderr, "kvbench mm: no python3 or no block_pool.py here\n");
	r = bench_seqpacket(b, &d[ROW_SEQPACKET]);
	if (!r)
		r = bench_jemalloc(b, &d[ROW_JEMALLOC], &d[ROW_JEMALLOC_1M]);
	if (!r)
		r = bench_hash(b, &d[ROW_HASH]);
	if (!r)
		r = kvb_mm_core_pair(CORE_PAGES / b->scale, 10000 / b->scale,
				     &d[ROW_CORE], &d[ROW_CORE_RANDOM]);
	if (!r)
		r = kvb_mm_core_lookup(CORE_PAGES / b->scale, 4000 / b->scale,
				       &d[ROW_LOOKUP_1M], &d[ROW_LOOKUP_1M_KEY]);
	b->pinned = !r && b->kvmd > 0 && pin(b->kvmd); /* the references are done */
	if (!r)
		r = bench_attach(b, &d[ROW_ATTACH]);
	if (!r)
		r = open_pool(b);
	if (!r)
		r = bench_ring(b, &d[ROW_RING]);
	if (!r)
		r = bench_magazine(b, &d[ROW_MAGAZINE]);
	if (!r)
		r = bench_alloc100(b, &d[ROW_ALLOC100], &d[ROW_ALLOC100_GET]);
	if (!r)
		r = bench_lookup(b, d);
	kvc_close(b->c);
	return r;
}

static void print_table(const struct kvb_dist *d)
{
	printf("%-41s %11s %11s  %-31s %s\n", "ns", "p50", "p99", "reference",
	       "ours to be");
	for (u32 i = 0; i < ROW_NR; i++)
		printf("%-41s %11.1f %11.1f  %-31s %s\n", rows[i].what, d[i].p50,
		       d[i].p99, rows[i].reference, rows[i].target);
	printf("lookup / its hashes: %.2f; in an index of 1 M pages: %.2f, %.2f with keys\n",
	       d[ROW_LOOKUP].p50 / d[ROW_HASH].p50,
	       d[ROW_LOOKUP_1M].p50 / d[ROW_HASH].p50,
	       d[ROW_LOOKUP_1M_KEY].p50 / d[ROW_HASH].p50);
}

static int print_json(const struct bench *b, const struct kvb_dist *d)
{
	cJSON *o = cJSON_CreateObject();

	if (!o)
		return -ENOMEM;
	cJSON_AddStringToObject(o, "schema", "kvbench-mm/1");
	cJSON_AddNumberToObject(o, "cpus", (double)sysconf(_SC_NPROCESSORS_ONLN));
	cJSON_AddBoolToObject(o, "pinned", b->pinned);
	for (u32 i = 0; i < ROW_NR; i++)
		kvb_json_dist(o, rows[i].name, &d[i]);
	return kvb_json_print(o);
}

static int measure(const char *socket_path, bool quick, bool json)
{
	static const char *const args[] = {"--spin", "--host-bytes", "512MiB", NULL};
	struct bench b = {
		.socket_path = socket_path, .kvmd = -1, .scale = quick ? 20 : 1};
	struct kvb_dist d[ROW_NR] = {{0}};
	struct eng_private_kvmd kvmd = {.pid = -1};
	char error[512];
	int r;

	b.samples = calloc(SAMPLES_MAX, sizeof(*b.samples));
	if (!b.samples || sodium_init() < 0)
		return -ENOMEM;
	if (!socket_path) {
		r = eng_private_kvmd_start(args, &kvmd, error, sizeof(error));
		if (r) {
			fprintf(stderr, "kvbench mm: %s\n", error);
			goto free_samples;
		}
		b.socket_path = kvmd.socket_path;
		b.kvmd = kvmd.pid;
	}
	r = run_all(&b, d);
	eng_private_kvmd_stop(&kvmd);
	if (!r && json)
		r = print_json(&b, d);
	else if (!r)
		print_table(d);
free_samples:
	free(b.samples);
	return r;
}

int kvb_mm(int argc, char **argv)
{
	static const struct option options[] = {{"json", 0, 0, 'j'},
						{"socket", 1, 0, 's'},
						{"quick", 0, 0, 'q'},
						{0, 0, 0, 0}};
	const char *socket_path = NULL;
	bool json = false, quick = false;
	int opt;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 'j':
			json = true;
			break;
		case 's':
			socket_path = optarg;
			break;
		case 'q':
			quick = true;
			break;
		default:
			fprintf(stderr,
				"Usage: kvbench mm [--json] [--quick] [--socket PATH]\n");
			return 2;
		}
	}
	return measure(socket_path, quick, json) ? 1 : 0;
}
