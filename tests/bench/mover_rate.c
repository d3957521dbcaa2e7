/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover_rate.c - `kvbench mover`: GB/s between extents and pinned host memory, through the
 * mover's process, ring and streams as kvmd uses them.
 *
 * Runs of a given length lie apart in the pool, so that none are merged; "whole" is the
 * same bytes in the longest runs there are, the path's own ceiling in the same minute.
 * Every byte is compared after a round trip. Extents come from the backend, without a
 * context in this process.
 */
#include "tests/bench/mover_rate.h"

#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "base/clock.h"
#include "base/util.h"
#include "kvmd/backend/cuda.h"
#include "kvmd/backend/host.h"
#include "kvmd/config.h"
#include "kvmd/mover/mover.h"

#define MIB	     (1ull << 20)
#define EXTENT_BYTES (256 * MIB)
#define REPEATS_MAX  25
#define PCIE_GB_S    55.5 /* measured on the target: cudaMemcpy of 1 GiB, pinned */

/**
 * struct bench - one run of the command
 * @half: bytes one way; the pool is twice that: IN reads the first half, OUT fills the
 * second
 */
struct bench {
	bool gpu;
	bool json;
	u64 half;
	u64 run_bytes;
	u32 repeats;
	char program[1024];
	struct kvd_backend *be;
	struct kvd_mover *m;
	struct kvd_extent_handle *handles;
	struct kvd_mover_extent *extents;
	u32 nr_extents;
	u8 *pool;
	u32 pending;
	int status;
	bool prove;
};

struct rate {
	double gb_s[REPEATS_MAX];
	double median, min, max;
};

static void given(void *arg, u32 pool_id, u32 index, u64 serial)
{
}

static int keep(void *arg, pid_t pid, int pidfd, enum kvd_mover_kept how)
{
	return 0;
}

static void started(void *arg)
{
	kvd_mover_listed(((struct bench *)arg)->m, true);
}

static void prove(void *arg)
{
	((struct bench *)arg)->prove = true;
}

static void died(void *arg, bool owned)
{
}

static void alloced(void *arg, u64 id, int result, const u8 *handle, const char *text)
{
}

static void done(void *arg, u64 id, int status)
{
	struct bench *b = arg;

	b->pending--;
	if (status)
		b->status = status;
}

/* ------------------------------------------------------------------------- the rig */

static int open_backend(struct bench *b, u8 *ret_uuid)
{
	struct kvd_cuda_params p = {.capacity_bytes = b->half + EXTENT_BYTES};
	struct pollfd pfd = {.events = POLLIN};
	int r;

	if (!b->gpu)
		return kvd_host_create(b->half + EXTENT_BYTES, 0, &b->be);
	r = kvd_cuda_create(&p, &b->be);
	if (r)
		return r;
	pfd.fd = kvd_cuda_event_fd(b->be);
	poll(&pfd, 1, 30000);
	if (kvd_cuda_state(b->be) != KVD_CUDA_READY) {
		fprintf(stderr, "kvbench mover: %s\n", kvd_cuda_error(b->be));
		return -ENODEV;
	}
	memcpy(ret_uuid, kvd_cuda_get_info(b->be)->uuid, 16);
	return 0;
}

static int make_extents(struct bench *b)
{
	b->nr_extents = (u32)(b->half / EXTENT_BYTES);
	b->handles = calloc(b->nr_extents, sizeof(*b->handles));
	b->extents = calloc(b->nr_extents, sizeof(*b->extents));
	if (!b->handles || !b->extents)
		return -ENOMEM;
	for (u32 i = 0; i < b->nr_extents; i++) {
		int r = b->be->ops->extent_alloc(b->be, EXTENT_BYTES, &b->handles[i]);

		if (r)
			return r;
		b->extents[i] = (struct kvd_mover_extent){.index = i,
							  .serial = 1,
							  .fd = b->handles[i].fd,
							  .bytes = EXTENT_BYTES};
	}
	return 0;
}

static int rig_open(struct bench *b)
{
	const struct kvd_mover_ops ops = {b,	   given, given, keep,
					  started, prove, died,	 alloced};
	struct kvd_mover_params p = {
		.backend = b->gpu ? KV_BACKEND_CUDA : KV_BACKEND_HOST,
		.program = b->program,
		.pool_bytes = 2 * b->half,
		.pool_fd = -1,
	};
	u64 bytes;
	int r;

	r = open_backend(b, p.gpu_uuid);
	if (!r)
		r = make_extents(b);
	if (!r)
		r = kvd_mover_create(&p, &ops, &b->m);
	if (!r)
		b->pool = kvd_mover_pool(b->m, &bytes, NULL);
	return r;
}

static void rig_close(struct bench *b)
{
	kvd_mover_destroy(b->m);
	for (u32 i = 0; b->handles && i < b->nr_extents; i++)
		if (b->extents[i].bytes)
			b->be->ops->extent_free(b->be, &b->handles[i], EXTENT_BYTES);
	if (b->be && b->gpu)
		kvd_cuda_destroy(b->be);
	else
		kvd_host_destroy(b->be);
	free(b->handles);
	free(b->extents);
}

static void turn(struct bench *b)
{
	struct pollfd p = {.fd = kvd_mover_fd(b->m), .events = POLLIN};

	if (poll(&p, 1, 20) == 1)
		kvd_mover_event(b->m);
	if (b->prove) {
		b->prove = false;
		kvd_mover_ended(b->m);
	}
	kvd_mover_run(b->m, kv_now_ns());
}

/* ------------------------------------------------------------------------ one pass */

/* Run @i of a half lies at a place that is not behind its neighbour's. */
static u64 place(u64 i, u64 nr)
{
	return nr % 2 ? i : (i % 2) * (nr / 2) + i / 2;
}

/* All bytes of one half, one way; @whole: neighbours stay neighbours. */
static int submit_half(struct bench *b, enum kvd_mover_dir dir, u64 run, bool whole)
{
	u64 nr = b->half / run, i = 0;

	while (i < nr) {
		struct kvd_mover_copy copies[64];
		struct kvd_mover_job job = {
			.dir = dir, .copies = copies, .done = done, .arg = b};
		u64 id;
		int r;

		for (; i < nr && job.nr < KV_ARRAY_SIZE(copies); i++, job.nr++)
			copies[job.nr] = (struct kvd_mover_copy){
				.extent = &b->extents[i * run / EXTENT_BYTES],
				.extent_off = i * run % EXTENT_BYTES,
				.pool_off = (dir == KVD_MOVER_OUT ? b->half : 0) +
					    (whole ? i : place(i, nr)) * run,
				.bytes = run,
			};
		while ((r = kvd_mover_submit(b->m, &job, &id)) > 0)
			turn(b); /* KV_BUSY */
		if (r)
			return r;
		b->pending++;
	}
	return 0;
}

/* Return: GB/s of everything that moved; 0 on failure */
static double pass(struct bench *b, bool in, bool out, u64 run, bool whole)
{
	u64 bytes = (in + out) * b->half, start_ns = kv_now_ns();
	int r = 0;

	if (in)
		r = submit_half(b, KVD_MOVER_IN, run, whole);
	if (!r && out)
		r = submit_half(b, KVD_MOVER_OUT, run, whole);
	kvd_mover_run(b->m, kv_now_ns());
	while (b->pending)
		turn(b);
	if (r || b->status) {
		fprintf(stderr, "kvbench mover: %s %s\n", strerror(-(r ? r : b->status)),
			kvd_mover_error(b->m));
		return 0;
	}
	return (double)bytes / (double)(kv_now_ns() - start_ns);
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static int measure(struct bench *b, bool in, bool out, u64 run, bool whole,
		   struct rate *ret)
{
	for (u32 i = 0; i < b->repeats; i++) {
		ret->gb_s[i] = pass(b, in, out, run, whole);
		if (ret->gb_s[i] == 0)
			return -EIO;
	}
	qsort(ret->gb_s, b->repeats, sizeof(double), compare);
	ret->median = ret->gb_s[b->repeats / 2];
	ret->min = ret->gb_s[0];
	ret->max = ret->gb_s[b->repeats - 1];
	return 0;
}

/* There and back: the second half of the pool is the first. */
static int verify(struct bench *b)
{
	u64 x = 88172645463325252ull, *at = (u64 *)b->pool;

	for (u64 i = 0; i < b->half / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		at[i] = x;
	}
	memset(b->pool + b->half, 0, b->half);
	if (pass(b, true, false, b->run_bytes, false) == 0 ||
	    pass(b, false, true, b->run_bytes, false) == 0)
		return -EIO;
	if (!memcmp(b->pool, b->pool + b->half, b->half))
		return 0;
	fprintf(stderr, "kvbench mover: bytes differ after a round trip\n");
	return -EBADMSG;
}

/* -------------------------------------------------------------------------- output */

static void show(struct bench *b, cJSON *rows, const char *name, const struct rate *r,
		 double ceiling)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "name", name);
	cJSON_AddNumberToObject(o, "gb_s", r->median);
	cJSON_AddNumberToObject(o, "min", r->min);
	cJSON_AddNumberToObject(o, "max", r->max);
	if (ceiling > 0)
		cJSON_AddNumberToObject(o, "frac", r->median / ceiling);
	cJSON_AddItemToArray(rows, o);
	if (b->json)
		return;
	printf("  %-22s %7.2f GB/s  (%.2f .. %.2f)", name, r->median, r->min, r->max);
	if (ceiling > 0)
		printf("  %5.1f %% of %.1f", 100 * r->median / ceiling, ceiling);
	printf("\n");
}

static int run(struct bench *b, cJSON *rows)
{
	double ceiling = b->gpu ? PCIE_GB_S : 0;
	const struct {
		const char *name;
		bool in, out, whole;
		u64 run;
		double ceiling;
	} table[] = {
		{"out, whole", false, true, true, b->run_bytes, ceiling},
		{"in, whole", true, false, true, b->run_bytes, ceiling},
		{"out, runs", false, true, false, b->run_bytes, ceiling},
		{"in, runs", true, false, false, b->run_bytes, ceiling},
		{"both ways, runs", true, true, false, b->run_bytes, 0},
		{"out, runs of 64 KiB", false, true, false, 65536, 0},
	};
	struct rate r;
	int err = verify(b);

	for (u32 i = 0; !err && i < KV_ARRAY_SIZE(table); i++) {
		err = measure(b, table[i].in, table[i].out, table[i].run, table[i].whole,
			      &r);
		if (!err)
			show(b, rows, table[i].name, &r, table[i].ceiling);
	}
	return err;
}

static void default_program(struct bench *b)
{
	ssize_t n = readlink("/proc/self/exe", b->program, sizeof(b->program) - 8);
	char *slash;

	b->program[n > 0 ? n : 0] = 0;
	slash = strrchr(b->program, '/');
	if (slash)
		strcpy(slash + 1, "kvmd");
}

static int usage(int status)
{
	fprintf(status ? stderr : stdout,
		"Usage: kvbench mover [--json] [--backend host|cuda] [--bytes SIZE]\n"
		"                     [--run SIZE] [--repeats N] [--kvmd PROGRAM]\n"
		"GB/s between extents and pinned host memory through kvmd's mover.\n"
		"  --bytes    one way, a multiple of 256 MiB [1GiB]\n"
		"  --run      length of a run [2MiB]\n");
	return status;
}

static int parse(struct bench *b, int argc, char **argv)
{
	static const struct option options[] = {
		{"json", no_argument, NULL, 'j'},
		{"backend", required_argument, NULL, 'b'},
		{"bytes", required_argument, NULL, 'n'},
		{"run", required_argument, NULL, 'r'},
		{"repeats", required_argument, NULL, 'x'},
		{"kvmd", required_argument, NULL, 'k'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	int id;

	while ((id = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		if (id == 'j')
			b->json = true;
		else if (id == 'b' && !strcmp(optarg, "cuda"))
			b->gpu = true;
		else if (id == 'b' && !strcmp(optarg, "host"))
			b->gpu = false;
		else if (id == 'n' && !kvd_size_parse(optarg, &b->half) && b->half &&
			 b->half % EXTENT_BYTES == 0 && b->half <= 64ull << 30)
			continue;
		else if (id == 'r' && !kvd_size_parse(optarg, &b->run_bytes) &&
			 b->run_bytes >= 4096 && EXTENT_BYTES % b->run_bytes == 0)
			continue;
		else if (id == 'x' && atoi(optarg) > 0 && atoi(optarg) <= REPEATS_MAX)
			b->repeats = (u32)atoi(optarg);
		else if (id == 'k')
			snprintf(b->program, sizeof(b->program), "%s", optarg);
		else if (id == 'h')
			return usage(0) - 1;
		else
			return usage(2);
	}
	return optind < argc ? usage(2) : 0;
}

int kvb_mover(int argc, char **argv)
{
	struct bench b = {.half = 1024 * MIB, .run_bytes = 2 * MIB, .repeats = 7};
	cJSON *out = cJSON_CreateObject(), *rows = cJSON_AddArrayToObject(out, "rows");
	int r;

	default_program(&b);
	r = parse(&b, argc, argv);
	if (r) {
		cJSON_Delete(out);
		return r < 0 ? 0 : r;
	}
	if (!b.json)
		printf("mover, %s: %llu MiB one way, runs of %llu KiB, %u passes, median "
		       "(min .. max)\n",
		       b.gpu ? "GPU" : "host memory", (unsigned long long)(b.half >> 20),
		       (unsigned long long)(b.run_bytes >> 10), b.repeats);
	r = rig_open(&b);
	if (r)
		fprintf(stderr, "kvbench mover: %s\n", strerror(-r));
	else
		r = run(&b, rows);
	cJSON_AddStringToObject(out, "bench", "mover");
	cJSON_AddStringToObject(out, "backend", b.gpu ? "cuda" : "host");
	cJSON_AddNumberToObject(out, "bytes", (double)b.half);
	cJSON_AddNumberToObject(out, "run_bytes", (double)b.run_bytes);
	if (!r && b.json) {
		char *text = cJSON_Print(out);

		puts(text);
		free(text);
	}
	cJSON_Delete(out);
	rig_close(&b);
	return r ? 1 : 0;
}
