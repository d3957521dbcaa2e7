/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier_rate.c - `kvbench tier`: GB/s of pages through kvmd's tiers to a disk and back,
 * beside the disk's own O_DIRECT rate in the same minute.
 *
 * The core, the tiers, the journal, digests and the disk are the real ones, in this
 * process; the copier is a memcpy. EVICT: pages are sealed, reclaimed, copied to DRAM,
 * digested and written; the time ends with the last write. RESTORE: a fresh kvmd's tiers
 * on the same directory; lookups miss, pages are read, checked and copied into frames.
 * The reference is a bare io_uring loop on the same file, with transfers of the same size
 * number under way, buffers registered: before EVICT, and before and after RESTORE, of which
 * the faster one counts; each in order and in no order.
 */
#include "tests/bench/tier_rate.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "base/clock.h"
#include "kvmd/config.h"
#include "kvmd/tier/crc.h"
#include "kvmd/tier/tier.h"
#include "tests/bench/core_rig.h"
#include "tests/bench/disk_rate.h"

#define MIB	    (1ull << 20)
#define POOL_PAGES  64u
#define SEQ_PAGES   16u
#define DRAM_BYTES  (512 * MIB)
#define REPEATS_MAX 9u
#define JOBS	    64u

struct job {
	enum kvd_tier_dir dir;
	u32 nr, cookie;
	struct kvd_tier_copy copies[KVD_TIER_BATCH];
};

struct bench {
	struct core_rig rig;
	struct kvd_tenant *tenant;
	struct core_client cl;
	struct kvd_tiers *tiers;
	u8 *dram, *frames;
	struct job jobs[JOBS];
	u32 nr_jobs;
	u32 crc;
	char dir[256];
	u64 bytes;
	u32 layers, depth, repeats, nr_seqs;
	u64 slot_bytes, nvme_bytes;
	bool json, threads;
};

/** what is measured; GB/s by repeat */
enum { RAW_WRITE, EVICT, RAW_READ, RESTORE, RATES };

/* ------------------------------------------------------------------ the copier */

static int submit(void *arg, enum kvd_tier_dir dir, const struct kvd_tier_copy *copies,
		  u32 nr, u64 deadline_ns, u32 cookie)
{
	struct bench *b = arg;

	if (b->nr_jobs == JOBS)
		return KV_BUSY;
	b->jobs[b->nr_jobs] = (struct job){.dir = dir, .nr = nr, .cookie = cookie};
	memcpy(b->jobs[b->nr_jobs++].copies, copies, nr * sizeof(*copies));
	return 0;
}

static void jobs_run(struct bench *b)
{
	while (b->nr_jobs) {
		struct job *j = &b->jobs[--b->nr_jobs];

		for (u32 i = 0; i < j->nr; i++) {
			u8 *f = b->frames + j->copies[i].pfn * b->rig.stride_bytes;
			u8 *d = b->dram + j->copies[i].off;

			memcpy(j->dir == KVD_TIER_OUT ? d : f,
			       j->dir == KVD_TIER_OUT ? f : d, j->copies[i].bytes);
		}
		kvd_tier_copied(b->tiers, j->cookie, 0);
	}
}

/* One turn of a loop: waits a moment when nothing moves. */
static void turn(struct bench *b)
{
	struct pollfd p[KVD_TIER_FDS];
	int fds[KVD_TIER_FDS];
	bool more;
	u32 nr;

	kvd_core_now(&b->rig.core, kv_now_ns());
	more = kvd_tier_turn(b->tiers);
	more |= b->nr_jobs != 0;
	jobs_run(b);
	kvd_core_run(&b->rig.core);
	nr = kvd_tier_fds(b->tiers, fds);
	for (u32 i = 0; i < nr; i++)
		p[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
	if (poll(p, nr, more ? 0 : 1) > 0)
		kvd_tier_ready(b->tiers);
}

/* ----------------------------------------------------------------- surroundings */

static int rig_open(struct bench *b)
{
	struct core_rig *r = &b->rig;
	int e = core_rig_init(r, POOL_PAGES, 8);

	if (e)
		return e;
	r->layout.nr_layers = b->layers;
	r->stride_bytes = kv_page_stride(&r->layout);
	r->limits.extent_min_bytes = r->limits.extent_max_bytes = r->stride_bytes * 8;
	r->limits.capacity_bytes = r->stride_bytes * POOL_PAGES;
	r->core.mm.limits = r->limits;
	e = core_rig_tenant(r, "bench", 0, 0, &b->tenant);
	if (!e)
		e = core_rig_client(r, b->tenant, &b->cl);
	return e;
}

static int tiers_open(struct bench *b, char *error)
{
	static const struct kvd_tier_limits all = {
		.high_bytes = 1ull << 50, .max_bytes = 1ull << 50, .weight = 100};
	struct kvd_tier_params p = {
		.core = &b->rig.core,
		.copier = {b, submit},
		.pool = b->dram,
		.dram_bytes = DRAM_BYTES,
		.nvme_path = b->dir,
		.nvme_bytes = b->nvme_bytes,
		.nvme_depth = b->depth * 2, /* writes get half of it */
		.read_deadline_ns = 60 * KV_NSEC_PER_SEC,
		.force_threads = b->threads,
		.nr_workers = 2,
	};
	int r = kvd_tier_create(&p, error, &b->tiers);

	if (r)
		return r;
	kvd_tier_set_limits(b->tiers, KVD_TIER_DRAM, b->tenant->index, &all);
	kvd_tier_set_limits(b->tiers, KVD_TIER_NVME, b->tenant->index, &all);
	b->rig.core.cfg.spill = kvd_tier_ops();
	b->rig.core.cfg.spill_arg = b->tiers;
	return 0;
}

static void tiers_close(struct bench *b)
{
	b->rig.core.cfg.spill = NULL;
	while (b->nr_jobs)
		jobs_run(b);
	kvd_tier_drain(b->tiers);
	kvd_tier_destroy(b->tiers);
	b->tiers = NULL;
}

static void tokens_of(u32 seq, u32 *ret)
{
	for (u32 i = 0; i < SEQ_PAGES * KV_PAGE_TOKENS; i++)
		ret[i] = seq * 1000003u + i;
}

/* --------------------------------------------------------------------- the tiers */

/* A sequence is sealed and let go; its bytes are those that frames have anyway. */
static int seq_make(struct bench *b, u32 seq)
{
	static u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS];
	struct kv_grant g[SEQ_PAGES];
	struct kv_seal_ret rets[SEQ_PAGES];
	struct kv_seal_page pages[SEQ_PAGES];
	struct kv_page_ref refs[SEQ_PAGES];
	struct kvd_seal_op op = {.s = b->cl.session,
				 .a = b->cl.attach,
				 .arg = {.flags = KV_SEAL_ROOT},
				 .pages = pages,
				 .tokens = tokens,
				 .rets = rets,
				 .nr = SEQ_PAGES};
	u32 pending, nr, first;
	int r;

	for (;;) {
		r = kvd_lease_alloc(b->cl.session, b->cl.attach, SEQ_PAGES,
				    KV_GFP_WAIT | KV_GFP_RECLAIM | KV_GFP_GROW, g,
				    &pending);
		if (r != KV_PENDING && r != KV_FULL)
			break;
		turn(b);
	}
	if (r)
		return r;
	tokens_of(seq, tokens);
	for (u32 i = 0; i < SEQ_PAGES; i++) {
		pages[i] = (struct kv_seal_page){
			.pfn = g[i].pfn, .crc32c = b->crc, .tag = g[i].tag};
		refs[i] = (struct kv_page_ref){.pfn = g[i].pfn, .tag = g[i].tag};
	}
	r = kvd_seal_start(&op);
	while (!r && (r = kvd_seal_step(&op)) == -EAGAIN)
		r = 0;
	if (!r)
		r = kvd_lease_free(b->cl.session, b->cl.attach, refs, SEQ_PAGES, &nr,
				   &first);
	return r;
}

static const struct kvd_space *space(const struct bench *b, enum kvd_tier_id id)
{
	return kvd_tier_space(b->tiers, id);
}

/* DRAM must not drop what is not written: as an engine that is no faster than the disk. */
static void pace(struct bench *b)
{
	while (space(b, KVD_TIER_DRAM)->dirty.nr * b->slot_bytes > DRAM_BYTES / 2)
		turn(b);
}

static int evict_all(struct bench *b, double *ret_gb_s)
{
	const struct kvd_tier_stats *s = kvd_tier_stats(b->tiers);
	struct kvd_pool *pool = b->cl.attach->pool;
	u64 start = kv_now_ns();
	int r = 0;

	for (u32 seq = 0; seq < b->nr_seqs && !r; seq++) {
		r = seq_make(b, seq);
		pace(b);
		turn(b);
	}
	while (!r && pool->nr[KVD_CACHED]) {
		kvd_reclaim_pool(pool, KVD_TENANTS_MAX, pool->nr[KVD_CACHED], false);
		pace(b);
		turn(b);
	}
	while (!r && (kvd_tier_busy(b->tiers) || space(b, KVD_TIER_DRAM)->dirty.nr))
		turn(b);
	*ret_gb_s = (double)(s->writes * b->slot_bytes) / (double)(kv_now_ns() - start);
	if (!r && s->writes != (u64)b->nr_seqs * SEQ_PAGES) {
		fprintf(stderr, "kvbench tier: %llu of %u pages were written\n",
			(unsigned long long)s->writes, b->nr_seqs * SEQ_PAGES);
		r = -EIO;
	}
	return r;
}

/* Asks for a sequence without keeping it. Return: pages on their way */
static u32 seq_ask(struct bench *b, u32 seq)
{
	static u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS];
	struct kv_hit hits[SEQ_PAGES];
	struct kvd_lookup_op op = {.s = b->cl.session,
				   .a = b->cl.attach,
				   .tokens = tokens,
				   .nr_tokens = SEQ_PAGES * KV_PAGE_TOKENS,
				   .hits = hits,
				   .hits_max = SEQ_PAGES};
	struct kv_page_ref refs[SEQ_PAGES];
	u32 nr, first;

	tokens_of(seq, tokens);
	kvd_lookup_start(&op);
	while (kvd_lookup_step(&op) == -EAGAIN)
		;
	for (u32 i = 0; i < op.nr; i++)
		refs[i] = (struct kv_page_ref){.pfn = hits[i].grant.pfn,
					       .tag = hits[i].grant.tag};
	if (op.nr)
		kvd_lease_free(b->cl.session, b->cl.attach, refs, op.nr, &nr, &first);
	return op.nr_coming;
}

static int restore_all(struct bench *b, double *ret_gb_s)
{
	const struct kvd_tier_stats *s = kvd_tier_stats(b->tiers);
	struct kvd_pool *pool = b->cl.attach->pool;
	u64 start = kv_now_ns(), want = (u64)b->nr_seqs * SEQ_PAGES;

	for (u32 seq = 0; seq < b->nr_seqs; seq++) {
		u32 room = POOL_PAGES - SEQ_PAGES;

		/* What came back makes room for the next: a tier has it. */
		while (kvd_tier_busy(b->tiers) > b->depth)
			turn(b);
		while (kvd_pool_nr_used(pool) + kvd_tier_busy(b->tiers) > room) {
			kvd_reclaim_pool(pool, KVD_TENANTS_MAX, SEQ_PAGES, false);
			turn(b);
		}
		seq_ask(b, seq);
		turn(b);
	}
	while (kvd_tier_busy(b->tiers))
		turn(b);
	*ret_gb_s = (double)(s->reads * b->slot_bytes) / (double)(kv_now_ns() - start);
	if (s->restores_nvme != want) {
		fprintf(stderr,
			"kvbench tier: %llu of %llu pages came back (%llu no room, %llu read "
			"errors)\n",
			(unsigned long long)s->restores_nvme, (unsigned long long)want,
			(unsigned long long)s->restores_no_room,
			(unsigned long long)s->read_errors);
		return -EIO;
	}
	return 0;
}

/* --------------------------------------------------------------------- the disk */

/* As many transfers of a slot's size as the tiers make, at the slots' places. */
static int raw_rate(struct bench *b, bool write, double *ret_gb_s)
{
	struct disk_rate d = {
		.nr = b->nr_seqs * SEQ_PAGES,
		.depth = write ? b->depth : b->depth + SEQ_PAGES,
		.bytes = (u32)b->slot_bytes,
		.per_group = (u32)(kvd_segment_bytes(b->nvme_bytes) / b->slot_bytes),
		.group_bytes = kvd_segment_bytes(b->nvme_bytes),
		.write = write,
	};
	char path[300];

	snprintf(path, sizeof(path), "%s/pages", b->dir);
	return disk_rate(path, &d, ret_gb_s);
}

/* --------------------------------------------------------------------- the command */

static void dir_clean(const struct bench *b)
{
	static const char *const names[] = {"pages", "journal", "journal.new", "lock"};
	char path[300];

	for (u32 i = 0; i < KV_ARRAY_SIZE(names); i++) {
		snprintf(path, sizeof(path), "%s/%s", b->dir, names[i]);
		unlink(path);
	}
}

/* The file as it is after its first use: all blocks written once. */
static int file_make(struct bench *b, char *error)
{
	double ignored;
	int r = tiers_open(b, error);

	if (r)
		return r;
	tiers_close(b);
	return raw_rate(b, true, &ignored);
}

static int pass(struct bench *b, double *ret, char *error)
{
	char path[300];
	double again = 0;
	int r = raw_rate(b, true, &ret[RAW_WRITE]);

	snprintf(path, sizeof(path), "%s/journal", b->dir);
	unlink(path);
	if (!r)
		r = tiers_open(b, error);
	if (r)
		return r;
	r = evict_all(b, &ret[EVICT]);
	tiers_close(b);
	if (!r)
		r = raw_rate(b, false, &ret[RAW_READ]);
	if (!r)
		r = tiers_open(b, error);
	if (r)
		return r;
	r = restore_all(b, &ret[RESTORE]);
	while (b->cl.attach->pool->nr[KVD_CACHED]) {
		kvd_reclaim_pool(b->cl.attach->pool, KVD_TENANTS_MAX, POOL_PAGES, false);
		turn(b);
	}
	tiers_close(b);
	/* Once more behind it: a disk, or what it stands on, may have a cache. */
	if (!r)
		r = raw_rate(b, false, &again);
	ret[RAW_READ] = KV_MAX(ret[RAW_READ], again);
	return r;
}

static int cmp(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void print(struct bench *b, double rates[REPEATS_MAX][RATES], cJSON *rows)
{
	static const char *const names[RATES] = {
		"disk, O_DIRECT writes", "evict: seal to disk", "disk, O_DIRECT reads",
		"restore: disk to frame"};
	double median[RATES];

	for (u32 k = 0; k < RATES; k++) {
		double v[REPEATS_MAX];
		bool ours = k == EVICT || k == RESTORE;
		cJSON *o = cJSON_CreateObject();

		for (u32 i = 0; i < b->repeats; i++)
			v[i] = rates[i][k];
		qsort(v, b->repeats, sizeof(v[0]), cmp);
		median[k] = v[b->repeats / 2];
		cJSON_AddStringToObject(o, "what", names[k]);
		cJSON_AddNumberToObject(o, "gb_s", median[k]);
		cJSON_AddNumberToObject(o, "min", v[0]);
		cJSON_AddNumberToObject(o, "max", v[b->repeats - 1]);
		if (ours)
			cJSON_AddNumberToObject(o, "of_disk", median[k] / median[k - 1]);
		cJSON_AddItemToArray(rows, o);
		if (b->json)
			continue;
		printf("%-24s %6.2f (%.2f .. %.2f)", names[k], median[k], v[0],
		       v[b->repeats - 1]);
		if (ours)
			printf("  %5.1f %% of the disk", 100 * median[k] / median[k - 1]);
		printf("\n");
	}
}

static int run(struct bench *b, cJSON *rows, char *error)
{
	static double rates[REPEATS_MAX][RATES];
	u8 *page;
	int r;

	if (sodium_init() < 0)
		return -ENOMEM;
	r = rig_open(b);
	if (r)
		return r;
	b->slot_bytes = b->rig.stride_bytes + KVD_PAGE_HDR_BYTES;
	b->nr_seqs = (u32)KV_MAX(b->bytes / b->slot_bytes / SEQ_PAGES, 1ull);
	b->nvme_bytes = b->bytes + b->bytes / 8 + 256 * MIB;
	b->dram = mmap(NULL, DRAM_BYTES, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	b->frames = mmap(NULL, POOL_PAGES * b->rig.stride_bytes, PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (b->dram == MAP_FAILED || b->frames == MAP_FAILED)
		return -ENOMEM;
	page = b->frames;
	randombytes_buf(page, b->rig.stride_bytes);
	for (u32 i = 1; i < POOL_PAGES; i++)
		memcpy(page + i * b->rig.stride_bytes, page, b->rig.stride_bytes);
	b->crc = kvd_crc32c(page, kv_page_bytes(&b->rig.layout));
	if (!b->json)
		printf("tier, %s: %u pages of %llu KiB, %u transfers under way, %u passes, "
		       "GB/s, median (min .. max)\n",
		       b->threads ? "threads" : "io_uring", b->nr_seqs * SEQ_PAGES,
		       (unsigned long long)(b->slot_bytes >> 10), b->depth, b->repeats);
	r = file_make(b, error);
	for (u32 i = 0; i < b->repeats && !r; i++)
		r = pass(b, rates[i], error);
	if (!r)
		print(b, rates, rows);
	return r;
}

static int usage(int status)
{
	fprintf(status ? stderr : stdout,
		"Usage: kvbench tier [--dir DIR] [--bytes SIZE] [--layers N] [--depth N]\n"
		"                    [--repeats N] [--threads] [--json]\n"
		"  --dir      on the disk that is meant [a new directory in /var/tmp]\n"
		"  --bytes    of pages [1GiB]\n"
		"  --layers   of MLA BF16 in a page, 72 KiB each [30: as Kimi K2 in FP8]\n");
	return status;
}

static int parse(struct bench *b, int argc, char **argv)
{
	static const struct option options[] = {
		{"dir", required_argument, NULL, 'd'},
		{"bytes", required_argument, NULL, 'n'},
		{"layers", required_argument, NULL, 'l'},
		{"depth", required_argument, NULL, 'q'},
		{"repeats", required_argument, NULL, 'x'},
		{"threads", no_argument, NULL, 't'},
		{"json", no_argument, NULL, 'j'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	int id;

	while ((id = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (id == 'd')
			snprintf(b->dir, sizeof(b->dir), "%s", optarg);
		else if (id == 'n' && !kvd_size_parse(optarg, &b->bytes) &&
			 b->bytes >= 64 * MIB)
			continue;
		else if (id == 'l' && atoi(optarg) > 0 && atoi(optarg) <= 80)
			b->layers = (u32)atoi(optarg);
		else if (id == 'q' && atoi(optarg) > 0 && atoi(optarg) <= 64)
			b->depth = (u32)atoi(optarg);
		else if (id == 'x' && atoi(optarg) > 0 &&
			 atoi(optarg) <= (int)REPEATS_MAX)
			b->repeats = (u32)atoi(optarg);
		else if (id == 't')
			b->threads = true;
		else if (id == 'j')
			b->json = true;
		else
			return id == 'h' ? usage(0) - 1 : usage(2);
	}
	return optind < argc ? usage(2) : 0;
}

int kvb_tier(int argc, char **argv)
{
	static struct bench b = {
		.bytes = 1024 * MIB, .layers = 30, .depth = 32, .repeats = 5};
	char error[KVD_STORE_ERROR] = "", made[] = "/var/tmp/kvbench-tier-XXXXXX";
	cJSON *out, *rows;
	bool own;
	int r = parse(&b, argc, argv);

	if (r)
		return r < 0 ? 0 : r;
	own = !b.dir[0];
	if (own && !mkdtemp(made)) {
		fprintf(stderr, "kvbench tier: %s: %s\n", made, strerror(errno));
		return 1;
	}
	if (own)
		strcpy(b.dir, made);
	out = cJSON_CreateObject();
	cJSON_AddStringToObject(out, "bench", "tier");
	cJSON_AddNumberToObject(out, "bytes", (double)b.bytes);
	cJSON_AddNumberToObject(out, "depth", b.depth);
	rows = cJSON_AddArrayToObject(out, "rows");
	r = run(&b, rows, error);
	if (r)
		fprintf(stderr, "kvbench tier: %s\n",
			error[0] ? error : strerror(r < 0 ? -r : EIO));
	if (!r && b.json) {
		char *text = cJSON_Print(out);

		puts(text);
		free(text);
	}
	cJSON_Delete(out);
	dir_clean(&b);
	if (own)
		rmdir(b.dir);
	return r ? 1 : 0;
}
