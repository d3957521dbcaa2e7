/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spill.c - kvbench spill: GB/s of pages through a whole kvmd to its DRAM tier and back.
 *
 * An engine fills a pool with sealed pages, lets them go, and asks for as many new ones:
 * each comes when reclaim has had an old one copied out by the mover. Then it frees them
 * and prefetches every sequence. Library, rings, reclaim, mover, digests and grace
 * periods are all in it; what the bus can do is one copy of the same size by the driver
 * (on host memory: memcpy), in the same run. Every page's bytes are compared at the end.
 * Threads prefetch, each with sequences of its own; kvmd is another process.
 *
 * A pass is reported whole, and its middle half apart: what a pass loses at its ends is the
 * same for any size, the middle is what a longer one would have. -v prints a line a pass.
 */
#include "tools/kvbench/spill.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/cuda_syms.h"
#include "kernels/ref.h"
#include "tools/kvbench/json.h"
#include "tools/kvbench/safety.h"

#define MIB	    (1ull << 20)
#define GIB	    (1ull << 30)
#define SEQ_PAGES   64u
#define BATCH	    16u
#define SEQS_MAX    256u
#define THREADS	    4u
#define PASSES	    3u
#define STEPS_MAX   (SEQS_MAX * SEQ_PAGES / BATCH)
#define WARM_PASSES 12u

/** struct steps - when so many pages of a pass were there; @pages is the sum so far */
struct steps {
	u32 nr;
	struct {
		u64 ns;
		u32 pages;
	} at[STEPS_MAX];
};

/** struct rates - of a pass, GB/s; the ends in ms: start to first step, last quarter */
struct rates {
	double whole, middle, first_ms, quarter_ms[4];
};

struct spill {
	enum kvb_backend backend;
	u64 bytes;
	bool json, verbose;
	struct kv_cuda_syms cu;
	struct eng_private_kvmd kvmd;
	char config[128];
	struct kvc *c;
	struct kvc_pool *pool;
	u64 page_bytes;
	u32 nr_seqs;
	u32 next_seq; /* of those to prefetch; atomic */
	u32 restored; /* pages; under @lock */
	u8 *page;     /* what is in every page */
	u8 *back;     /* what was in one that came back */
	u32 crc;
	struct kv_grant *pages;
	struct steps steps; /* of the pass under way; prefetches under @lock */
	pthread_mutex_t lock;
	double out[PASSES], in[PASSES], bus[2]; /* GB/s */
	double out_middle[PASSES], in_middle[PASSES];
};

static void seq_tokens(u32 pass, u32 seq, u32 *ret)
{
	for (u32 i = 0; i < SEQ_PAGES * KV_PAGE_TOKENS; i++)
		ret[i] = ((pass * SEQS_MAX + seq) * 65537u + i) * 2654435761u;
}

static double rate(u64 bytes, u64 start_ns)
{
	return (double)bytes / (double)(kv_now_ns() - start_ns);
}

static void step(struct spill *s, u32 pages)
{
	struct steps *st = &s->steps;
	u32 before = st->nr ? st->at[st->nr - 1].pages : 0;

	st->at[st->nr].ns = kv_now_ns();
	st->at[st->nr++].pages = before + pages;
}

/* When the @part-th quarter of all pages was there: the first step that says so. */
static u32 step_of(const struct steps *st, u32 part)
{
	u32 i = 0;

	while (st->at[i].pages * 4ull < st->at[st->nr - 1].pages * (u64)part)
		i++;
	return i;
}

/* @skipped pages needed no copy; @middle of them, at most, in the middle half: an evict
 * pass takes them first. */
static struct rates rates_of(const struct spill *s, u64 start_ns, u32 skipped, u32 middle)
{
	const struct steps *st = &s->steps;
	struct rates r = {0};
	u64 before = start_ns;
	u32 a, b;

	if (!st->nr || !st->at[st->nr - 1].pages)
		return r;
	a = step_of(st, 1);
	b = step_of(st, 3);
	r.whole = (double)((st->at[st->nr - 1].pages - skipped) * s->page_bytes) /
		  (double)(st->at[st->nr - 1].ns - start_ns);
	if (st->at[b].pages > st->at[a].pages + middle)
		r.middle = (double)((st->at[b].pages - st->at[a].pages - middle) *
				    s->page_bytes) /
			   (double)(st->at[b].ns - st->at[a].ns);
	r.first_ms = (double)(st->at[0].ns - start_ns) / 1e6;
	for (u32 k = 0; k < 4; k++) {
		u64 ns = st->at[step_of(st, k + 1)].ns;

		r.quarter_ms[k] = (double)(ns - before) / 1e6;
		before = ns;
	}
	return r;
}

static void rates_print(const struct spill *s, const char *what, const struct rates *r)
{
	if (!s->verbose)
		return;
	fprintf(stderr,
		"%-8s %5u pages: %6.2f GB/s, middle half %6.2f; ms: first pages %.2f, "
		"quarters %.2f %.2f %.2f %.2f\n",
		what, s->steps.nr ? s->steps.at[s->steps.nr - 1].pages : 0, r->whole,
		r->middle, r->first_ms, r->quarter_ms[0], r->quarter_ms[1],
		r->quarter_ms[2], r->quarter_ms[3]);
}

/* ---------------------------------------------------------------- set-up */

static int driver_open(struct spill *s)
{
	kv_cu_device dev;
	kv_cu_ctx ctx;

	if (s->backend == KVB_HOST)
		return 0;
	if (kv_cuda_load(&s->cu, NULL, 0) || s->cu.init(0) || s->cu.device_get(&dev, 0) ||
	    s->cu.ctx_retain(&ctx, dev) || s->cu.ctx_push(ctx)) {
		fprintf(stderr, "kvbench spill: no driver or no context\n");
		return -ENODEV;
	}
	return 0;
}

static int copy(struct spill *s, void *page, void *host, u64 bytes, bool in)
{
	if (s->backend == KVB_HOST) {
		memcpy(in ? page : host, in ? host : page, bytes);
		return 0;
	}
	return (in ? s->cu.copy_in((kv_cu_ptr)(uintptr_t)page, host, bytes)
		   : s->cu.copy_out(host, (kv_cu_ptr)(uintptr_t)page, bytes))
		       ? -EIO
		       : 0;
}

/* Filling and comparing a pool takes a third of the time from pinned memory. */
static u8 *page_buffer(struct spill *s)
{
	u64 bytes = kv_round_up(s->page_bytes, 4096);
	u8 *p = aligned_alloc(4096, bytes);

	if (p && s->backend != KVB_HOST)
		s->cu.host_register(p, bytes, 0); /* else it is slower, no more */
	return p;
}

static int kvmd_start(struct spill *s)
{
	const char *args[] = {"--config", s->config, NULL};
	FILE *f;
	int fd;

	snprintf(s->config, sizeof(s->config), "/tmp/kvbench-spill-XXXXXX");
	fd = mkstemp(s->config);
	f = fd < 0 ? NULL : fdopen(fd, "w");
	if (!f)
		return -errno;
	/* Room for all, in slots of a page and its header. */
	fprintf(f,
		"{\"tiers\": {\"dram\": {\"size\": \"%lluMiB\"}}, \"tenants\": [{\"name\": "
		"\"bench\", \"uids\": [%u], \"gpus\": [{\"gpu\": \"*\", \"max\": "
		"\"1TiB\"}]}]}",
		(unsigned long long)(s->bytes * 5 / 4 / MIB + 128), getuid());
	fclose(f);
	return kvb_kvmd_start(s->backend, s->bytes, args, &s->kvmd);
}

static struct kv_layout spill_layout(const struct spill *s)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_MLA,
				  .dtype = KV_DTYPE_E4M3,
				  .scale_kind = KV_SCALE_TOKEN,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = s->bytes >= GIB ? 61 : 4,
				  .latent_dim = 512,
				  .rope_dim = 64};
}

static int engine_open(struct spill *s)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = s->kvmd.socket_path,
				  .client_name = "kvbench-spill",
				  .timeout_ms = 30000};
	struct kv_layout layout = spill_layout(s);
	struct kvc_pool_info info;
	int r = kvc_open(&opt, &s->c);

	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(s->c, &layout, NULL, NULL, &s->pool);
	if (r)
		return kvb_said("kvc_pool_open", r);
	kvc_pool_get_info(s->pool, &info);
	s->page_bytes = kv_page_bytes(&layout);
	s->nr_seqs = KV_MIN(info.geometry.nr_pages / SEQ_PAGES, SEQS_MAX);
	s->page = page_buffer(s);
	s->back = page_buffer(s);
	s->pages = calloc((u64)s->nr_seqs * SEQ_PAGES, sizeof(*s->pages));
	if (!s->page || !s->back || !s->pages || !s->nr_seqs)
		return -ENOMEM;
	for (u64 i = 0; i < s->page_bytes; i++)
		s->page[i] = (u8)((i * 0x9e3779b97f4a7c15ull) >> 56);
	s->crc = kvk_crc32c(s->page, s->page_bytes);
	return 0;
}

/* ---------------------------------------------------------------- a pass */

static int seq_make(struct spill *s, u32 pass, u32 seq)
{
	static u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS], crc[SEQ_PAGES];
	static struct kv_seal_ret seals[SEQ_PAGES];
	struct kv_grant *pages = s->pages;
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = SEQ_PAGES,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = seals};
	int r = kvc_alloc(s->pool, SEQ_PAGES, KV_GFP_WAIT | KV_GFP_PREFILL, pages);

	if (r)
		return kvb_said("kvc_alloc", r);
	for (u32 i = 0; i < SEQ_PAGES && !r; i++) {
		crc[i] = s->crc;
		r = copy(s, kvc_page_addr(s->pool, pages[i].pfn), s->page, s->page_bytes,
			 true);
	}
	seq_tokens(pass, seq, tokens);
	r = r ? r : kvc_seal(s->pool, &seal);
	if (!r)
		r = kvc_free(s->pool, pages, SEQ_PAGES);
	return r ? kvb_said("seal", r) : 0;
}

/* Pages that need no copy: free ones and such as reclaim had evicted before. */
static int pages_free(struct spill *s, u32 *ret_nr)
{
	struct kv_stat st;
	int r = kvc_stat(s->pool, &st);

	*ret_nr = st.nr_free + st.nr_quarantine + st.nr_magazine;
	return r;
}

/* As many pages as there are, a batch at a time: each batch waits for reclaim. */
static int evict_all(struct spill *s, struct rates *ret)
{
	u32 nr = s->nr_seqs * SEQ_PAGES, have = 0, unused = 0;
	int r = pages_free(s, &unused);
	u64 start_ns = kv_now_ns();

	s->steps.nr = 0;
	while (have < nr && !r) {
		r = kvc_alloc(s->pool, BATCH, KV_GFP_WAIT | KV_GFP_PREFILL,
			      s->pages + have);
		if (!r) {
			have += BATCH;
			step(s, BATCH);
		}
		/* FULL: as much as may be under way is; the next try is in a moment. */
		if (r == KV_FULL && kv_now_ns() - start_ns < 30 * KV_NSEC_PER_SEC) {
			usleep(50);
			r = 0;
		}
		r = r == KV_PENDING ? 0 : r;
	}
	*ret = rates_of(s, start_ns, KV_MIN(nr, unused), 0);
	rates_print(s, "evict", ret);
	if (r)
		return kvb_said("kvc_alloc under pressure", r);
	for (u32 i = 0; i < nr && !r; i += SEQ_PAGES)
		r = kvc_free(s->pool, s->pages + i, SEQ_PAGES);
	return r ? kvb_said("kvc_free", r) : kvc_flush(s->c);
}

struct lane {
	struct spill *s;
	u32 pass;
	int error;
};

static void *lane_run(void *arg)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS], seq, nr;
	struct lane *l = arg;
	struct spill *s = l->s;
	int r;

	while ((seq = __atomic_fetch_add(&s->next_seq, 1, __ATOMIC_RELAXED)) <
	       s->nr_seqs) {
		seq_tokens(l->pass, seq, tokens);
		do {
			r = kvc_prefetch(s->pool, tokens, SEQ_PAGES * KV_PAGE_TOKENS,
					 SEQ_PAGES, &nr);
		} while (r == KV_PENDING);
		if (r < 0) {
			l->error = r;
			continue;
		}
		pthread_mutex_lock(&s->lock);
		s->restored += nr;
		step(s, nr);
		pthread_mutex_unlock(&s->lock);
	}
	return NULL;
}

static int restore_all(struct spill *s, u32 pass, struct rates *ret)
{
	struct lane lanes[THREADS];
	pthread_t threads[THREADS];
	struct kv_stat st;
	u32 cached;
	int r = kvc_stat(s->pool, &st); /* what is cached yet needs no copy */
	u64 start_ns = kv_now_ns();

	if (r)
		return kvb_said("kvc_stat", r);
	s->next_seq = s->restored = s->steps.nr = 0;
	for (u32 i = 0; i < THREADS; i++) {
		lanes[i] = (struct lane){.s = s, .pass = pass};
		if (pthread_create(&threads[i], NULL, lane_run, &lanes[i]))
			return -EAGAIN;
	}
	for (u32 i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		r = lanes[i].error ? lanes[i].error : r;
	}
	cached = KV_MIN(s->restored, st.nr_cached);
	*ret = rates_of(s, start_ns, cached, cached);
	rates_print(s, "restore", ret);
	return r ? kvb_said("kvc_prefetch", r) : 0;
}

/* Every page that is back has the bytes that were written. */
static int compare_all(struct spill *s, u32 pass)
{
	static u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS];
	static struct kv_hit hits[SEQ_PAGES];
	static struct kv_grant pages[SEQ_PAGES];
	u32 nr = 0;
	int r = 0;

	for (u32 seq = 0; seq < s->nr_seqs && !r; seq++) {
		seq_tokens(pass, seq, tokens);
		r = kvc_lookup(s->pool, tokens, SEQ_PAGES * KV_PAGE_TOKENS, SEQ_PAGES,
			       hits, &nr);
		r = r == KV_MISS ? 0 : r;
		for (u32 i = 0; i < nr && !r; i++) {
			pages[i] = hits[i].grant;
			r = copy(s, kvc_page_addr(s->pool, pages[i].pfn), s->back,
				 s->page_bytes, false);
			if (!r && memcmp(s->back, s->page, s->page_bytes)) {
				fprintf(stderr, "kvbench spill: wrong bytes\n");
				r = -EBADMSG;
			}
		}
		if (nr && !r)
			r = kvc_unpin(s->pool, pages, nr);
	}
	return r;
}

/* A whole extent each way, from and to pinned memory: what there is to have. */
static int bus_rate(struct spill *s)
{
	struct kvc_pool_info info;
	struct kv_grant g;
	void *host = NULL, *there;
	int r = kvc_alloc(s->pool, 1, KV_GFP_PREFILL, &g);
	u64 bytes;

	if (r)
		return kvb_said("kvc_alloc", r);
	kvc_pool_get_info(s->pool, &info);
	bytes = info.geometry.extent_bytes;
	there = kvc_page_addr(s->pool,
			      g.pfn >> info.geometry.shift << info.geometry.shift);
	if (posix_memalign(&host, 4096, bytes))
		return -ENOMEM;
	memset(host, 0, bytes);
	if (s->backend != KVB_HOST && s->cu.host_register(host, bytes, 0)) {
		free(host);
		return -ENOMEM;
	}
	for (u32 k = 0; k < 12 && !r; k++) {
		u64 start_ns = kv_now_ns();

		r = copy(s, there, host, bytes, k & 1);
		if (k > 1)
			s->bus[k & 1] = KV_MAX(s->bus[k & 1], rate(bytes, start_ns));
	}
	if (s->backend != KVB_HOST)
		s->cu.host_unregister(host);
	free(host);
	if (!r)
		r = kvc_free(s->pool, &g, 1);
	return r ? r : kvc_flush(s->c);
}

static int one_pass(struct spill *s, u32 pass, struct rates *ret_out,
		    struct rates *ret_in)
{
	int r = 0;

	for (u32 seq = 0; seq < s->nr_seqs && !r; seq++)
		r = seq_make(s, pass, seq);
	if (!r)
		r = evict_all(s, ret_out);
	/* What reclaim copies out ahead of need, and its digests, are not restore's. */
	usleep(20000);
	if (!r)
		r = restore_all(s, pass, ret_in);
	return r ? r : compare_all(s, pass);
}

static bool all_back(const struct spill *s)
{
	return s->restored * 10 >= s->nr_seqs * SEQ_PAGES * 9;
}

/* The mover starts with the first job and pins the tier's memory, which takes seconds;
 * meanwhile pages are dropped. */
static int measure(struct spill *s)
{
	int r = bus_rate(s);
	struct rates out, in;
	u32 pass = 0;

	do {
		if (pass)
			usleep(500000);
		r = r ? r : one_pass(s, pass, &out, &in);
	} while (!r && !all_back(s) && ++pass < WARM_PASSES);
	for (u32 i = 0; i < PASSES && !r; i++) {
		r = one_pass(s, ++pass, &out, &in);
		s->out[i] = out.whole;
		s->in[i] = in.whole;
		s->out_middle[i] = out.middle;
		s->in_middle[i] = in.middle;
		if (!r && !all_back(s)) {
			fprintf(stderr, "kvbench spill: only %u of %u pages came back\n",
				s->restored, s->nr_seqs * SEQ_PAGES);
			r = -ENODATA;
		}
	}
	return r;
}

/* ---------------------------------------------------------------- output */

static void print_way(const char *what, const struct kvb_dist *whole,
		      const struct kvb_dist *middle, double bus)
{
	printf("%-26s   %6.2f   %.1f %% of %.2f; middle half %6.2f   %.1f %%\n", what,
	       whole->p50, 100 * whole->p50 / bus, bus, middle->p50,
	       100 * middle->p50 / bus);
}

static int print(const struct spill *s)
{
	struct kvb_dist out, in, out_middle, in_middle;
	cJSON *o;

	kvb_dist_of(&out, (double *)s->out, PASSES);
	kvb_dist_of(&in, (double *)s->in, PASSES);
	kvb_dist_of(&out_middle, (double *)s->out_middle, PASSES);
	kvb_dist_of(&in_middle, (double *)s->in_middle, PASSES);
	if (!s->json) {
		printf("spill, %s: %u pages of %llu KiB, %u passes, GB/s, median\n",
		       kvb_backend_str(s->backend), s->nr_seqs * SEQ_PAGES,
		       (unsigned long long)(s->page_bytes / 1024), PASSES);
		print_way("evict: page to DRAM tier", &out, &out_middle, s->bus[0]);
		print_way("restore: DRAM tier to page", &in, &in_middle, s->bus[1]);
		return 0;
	}
	o = cJSON_CreateObject();
	if (!o)
		return -ENOMEM;
	cJSON_AddStringToObject(o, "schema", "kvbench-spill/2");
	cJSON_AddStringToObject(o, "backend", kvb_backend_str(s->backend));
	cJSON_AddNumberToObject(o, "pages", s->nr_seqs * SEQ_PAGES);
	cJSON_AddNumberToObject(o, "page_bytes", (double)s->page_bytes);
	cJSON_AddNumberToObject(o, "bus_out_gbps", s->bus[0]);
	cJSON_AddNumberToObject(o, "bus_in_gbps", s->bus[1]);
	kvb_json_dist(o, "evict_gbps", &out);
	kvb_json_dist(o, "restore_gbps", &in);
	kvb_json_dist(o, "evict_middle_gbps", &out_middle);
	kvb_json_dist(o, "restore_middle_gbps", &in_middle);
	return kvb_json_print(o);
}

static int parse(int argc, char **argv, struct spill *s)
{
	static const struct option options[] = {{"backend", 1, 0, 'b'},
						{"mib", 1, 0, 'm'},
						{"json", 0, 0, 'j'},
						{"verbose", 0, 0, 'v'},
						{0, 0, 0, 0}};
	int opt, b;

	s->backend = KVB_HOST;
	s->bytes = 256 * MIB;
	while ((opt = getopt_long(argc, argv, "v", options, NULL)) != -1) {
		if (opt == 'b') {
			b = kvb_backend_parse(optarg);
			if (b < 0)
				return 2;
			s->backend = (enum kvb_backend)b;
		} else if (opt == 'm' && strtoul(optarg, NULL, 10) >= 64 &&
			   strtoul(optarg, NULL, 10) <= 65536) {
			s->bytes = strtoul(optarg, NULL, 10) * MIB;
		} else if (opt == 'j') {
			s->json = true;
		} else if (opt == 'v') {
			s->verbose = true;
		} else {
			fprintf(stderr, "usage: kvbench spill [--backend auto|host|cuda] "
					"[--mib 64..65536] [--json] [-v]\n");
			return 2;
		}
	}
	return 0;
}

int kvb_spill(int argc, char **argv)
{
	struct spill *s = calloc(1, sizeof(*s));
	int r = s ? parse(argc, argv, s) : 1;

	if (r) {
		free(s);
		return r;
	}
	pthread_mutex_init(&s->lock, NULL);
	s->kvmd.pid = -1;
	r = kvmd_start(s);
	if (!r)
		r = driver_open(s);
	if (!r)
		r = engine_open(s);
	if (!r)
		r = measure(s);
	if (!r)
		r = print(s);
	kvc_close(s->c);
	eng_private_kvmd_stop(&s->kvmd);
	unlink(s->config);
	free(s->page);
	free(s->back);
	free(s->pages);
	free(s);
	return r ? 1 : 0;
}
