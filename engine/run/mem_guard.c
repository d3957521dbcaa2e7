/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem_guard.c - memory that only kernels may touch (tests; see mem.h).
 *
 * "Device" memory lies in one range that is PROT_NONE while the engine's own code runs:
 * a step that looks at it from the host dies at once. Each kernel of the table, and each
 * copy, opens the range, runs the C reference, and closes it. Graphs are lists of calls
 * with their arguments: what a CUDA graph bakes in is baked in here.
 *
 * Kernels run in the caller's thread (and its OpenMP team) while it waits, so that the
 * range is open for nobody else. One guarded engine in a process.
 */
#include "engine/run/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"

#define RANGE_BYTES (1ull << 30)
#define ALIGN	    256u
#define CALLS_MAX   4096u
#define ARGS_MAX    512u

struct call {
	int (*run)(const void *args);
	u8 args[ARGS_MAX];
};

struct graph {
	u32 nr;
	struct call calls[];
};

struct guard_mem {
	struct eng_mem base;
	char *range;
	size_t used;
	void *hosts; /* list of alloc_host(), linked by the first word */
	struct graph *recording;
	u32 fail_in; /* kernels until one fails; 0: never */
	u32 checks;  /* tag_check kernels that ran */
};

static struct guard_mem *the_mem;

static int open_range(struct guard_mem *g)
{
	return mprotect(g->range, g->used, PROT_READ | PROT_WRITE) ? -errno : 0;
}

static void close_range_(struct guard_mem *g)
{
	if (g->used)
		kv_assert(!mprotect(g->range, g->used, PROT_NONE));
}

static int run_open(int (*run)(const void *args), const void *args)
{
	int rc;

	if (the_mem->fail_in && --the_mem->fail_in == 0)
		return -EIO;
	rc = open_range(the_mem);
	if (rc)
		return rc;
	rc = run(args);
	close_range_(the_mem);
	return rc;
}

/** eng_mem_guard_fail() - the @nr-th kernel from now on fails */
void eng_mem_guard_fail(u32 nr)
{
	the_mem->fail_in = nr;
}

/* Run it, or put it into the graph that is being recorded. */
static int submit(int (*run)(const void *args), const void *args, size_t bytes)
{
	struct graph *r = the_mem->recording;

	kv_assert(bytes <= ARGS_MAX);
	if (!r)
		return run_open(run, args);
	if (r->nr == CALLS_MAX)
		return -ENOSPC;
	r->calls[r->nr].run = run;
	memcpy(r->calls[r->nr++].args, args, bytes);
	return 0;
}

/* ------------------------------------------------------------------------- kernels */

#define HOOK(hook_, args_)                                                 \
	static int run_##hook_(const void *args)                           \
	{                                                                  \
		return kvk_host_ops()->hook_(args, NULL);                  \
	}                                                                  \
	static int guard_##hook_(const struct args_ *a, kvk_stream stream) \
	{                                                                  \
		return submit(run_##hook_, a, sizeof(*a));                 \
	}

static int run_tag_check(const void *args)
{
	the_mem->checks++;
	return kvk_host_ops()->tag_check(args, NULL);
}

static int guard_tag_check(const struct kvk_tag_check_args *a, kvk_stream stream)
{
	return submit(run_tag_check, a, sizeof(*a));
}

/** eng_mem_guard_checks() - tag_check kernels until now */
u32 eng_mem_guard_checks(void)
{
	return the_mem->checks;
}

HOOK(append, kvk_append_args)
HOOK(attn_mla, kvk_attn_args)
HOOK(attn_gqa, kvk_attn_args)
HOOK(attn_prefill, kvk_attn_args)
HOOK(moe_route, kvk_moe_route_args)
HOOK(moe_int4, kvk_moe_args)
HOOK(moe_fp8, kvk_moe_args)
HOOK(moe_bf16, kvk_moe_args)
HOOK(linear, kvk_linear_args)
HOOK(norm, kvk_norm_args)
HOOK(rope, kvk_rope_args)
HOOK(norm_rope_append, kvk_norm_rope_append_args)
HOOK(silu, kvk_silu_args)
HOOK(sample, kvk_sample_args)
HOOK(page_move, kvk_move_args)

static size_t guard_attn_workspace(const struct kvk_attn_args *a)
{
	return kvk_host_ops()->attn_workspace(a);
}

static size_t guard_moe_workspace(const struct kvk_moe_args *a)
{
	return kvk_host_ops()->moe_workspace(a);
}

static const struct kvk_ops guard_kernels = {
	.name = "guarded",
	.tag_check = guard_tag_check,
	.append = guard_append,
	.attn_mla = guard_attn_mla,
	.attn_gqa = guard_attn_gqa,
	.attn_prefill = guard_attn_prefill,
	.moe_route = guard_moe_route,
	.moe_int4 = guard_moe_int4,
	.moe_fp8 = guard_moe_fp8,
	.moe_bf16 = guard_moe_bf16,
	.linear = guard_linear,
	.norm = guard_norm,
	.rope = guard_rope,
	.norm_rope_append = guard_norm_rope_append,
	.silu = guard_silu,
	.sample = guard_sample,
	.page_move = guard_page_move,
	.attn_workspace = guard_attn_workspace,
	.moe_workspace = guard_moe_workspace,
};

/* -------------------------------------------------------------------------- memory */

static bool in_range(const struct guard_mem *g, const void *p, size_t bytes)
{
	const char *at = p;

	return at >= g->range && at + bytes <= g->range + g->used;
}

static int guard_alloc(struct eng_mem *m, size_t bytes, void **ret)
{
	struct guard_mem *g = (struct guard_mem *)m;

	bytes = kv_round_up(bytes + ALIGN, 4096);
	if (bytes > RANGE_BYTES - g->used)
		return -ENOMEM;
	*ret = g->range + g->used;
	g->used += bytes; /* fresh pages are zero */
	return 0;
}

static int guard_alloc_host(struct eng_mem *m, size_t bytes, void **ret)
{
	struct guard_mem *g = (struct guard_mem *)m;
	void *p = aligned_alloc(ALIGN, kv_round_up(bytes + ALIGN, ALIGN));

	if (!p)
		return -ENOMEM;
	memset(p, 0, bytes + ALIGN);
	*(void **)p = g->hosts;
	g->hosts = p;
	*ret = (char *)p + ALIGN;
	return 0;
}

static void guard_close(struct eng_mem *m)
{
	struct guard_mem *g = (struct guard_mem *)m;

	while (g->hosts) {
		void *next = *(void **)g->hosts;

		free(g->hosts);
		g->hosts = next;
	}
	munmap(g->range, RANGE_BYTES);
	the_mem = NULL;
	free(g);
}

static int move_bytes(struct guard_mem *g, void *dst, const void *src, size_t bytes)
{
	int rc = open_range(g);

	if (rc)
		return rc;
	memcpy(dst, src, bytes);
	close_range_(g);
	return 0;
}

static int guard_upload(struct eng_mem *m, void *dst, const void *src, size_t bytes)
{
	struct guard_mem *g = (struct guard_mem *)m;

	kv_assert(in_range(g, dst, bytes) && !in_range(g, src, 1) && !g->recording);
	return move_bytes(g, dst, src, bytes);
}

static int guard_download(struct eng_mem *m, void *dst, const void *src, size_t bytes)
{
	struct guard_mem *g = (struct guard_mem *)m;

	kv_assert(in_range(g, src, bytes) && !in_range(g, dst, 1) && !g->recording);
	return move_bytes(g, dst, src, bytes);
}

static int guard_zero(struct eng_mem *m, void *dst, size_t bytes)
{
	struct guard_mem *g = (struct guard_mem *)m;
	int rc;

	kv_assert(in_range(g, dst, bytes) && !g->recording);
	rc = open_range(g);
	if (rc)
		return rc;
	memset(dst, 0, bytes);
	close_range_(g);
	return 0;
}

static int guard_nothing(struct eng_mem *m)
{
	return 0;
}

static int run_copy(const void *args)
{
	return eng_copy_ref(NULL, args);
}

static int guard_copy(struct eng_mem *m, const struct eng_copy_args *a)
{
	return submit(run_copy, a, sizeof(*a));
}

static int run_score(const void *args)
{
	return eng_score_ref(NULL, args);
}

static int guard_score(struct eng_mem *m, const struct eng_score_args *a)
{
	return submit(run_score, a, sizeof(*a));
}

static int run_fetch(const void *args)
{
	return eng_fetch_ref(NULL, args);
}

static int guard_fetch(struct eng_mem *m, const struct eng_fetch_args *a)
{
	return submit(run_fetch, a, sizeof(*a));
}

static int guard_repack(struct eng_mem *m, const struct kvk_repack *r)
{
	return -ENOTSUP; /* .packs_int4 is false */
}

static size_t guard_packed_bytes(const struct kvk_experts *e, int second)
{
	return 0;
}

/* -------------------------------------------------------------------------- graphs */

static int guard_graph_begin(struct eng_mem *m)
{
	struct guard_mem *g = (struct guard_mem *)m;

	kv_assert(!g->recording);
	g->recording = calloc(1, sizeof(struct graph) + CALLS_MAX * sizeof(struct call));
	return g->recording ? 0 : -ENOMEM;
}

static int guard_graph_end(struct eng_mem *m, void **ret_graph)
{
	struct guard_mem *g = (struct guard_mem *)m;

	*ret_graph = g->recording;
	g->recording = NULL;
	return 0;
}

static int guard_graph_launch(struct eng_mem *m, void *graph)
{
	struct graph *r = graph;
	int rc = 0;

	for (u32 i = 0; i < r->nr && !rc; i++)
		rc = run_open(r->calls[i].run, r->calls[i].args);
	return rc;
}

static void guard_graph_free(struct eng_mem *m, void *graph)
{
	free(graph);
}

static const struct eng_mem_ops guard_ops = {
	.name = "guarded",
	.close = guard_close,
	.alloc = guard_alloc,
	.alloc_host = guard_alloc_host,
	.upload = guard_upload,
	.download = guard_download,
	.zero = guard_zero,
	.load = guard_upload,
	.sync = guard_nothing,
	.fork = guard_nothing,
	.join = guard_nothing,
	.copy = guard_copy,
	.score = guard_score,
	.fetch = guard_fetch,
	.repack = guard_repack,
	.packed_bytes = guard_packed_bytes,
	.graph_begin = guard_graph_begin,
	.graph_end = guard_graph_end,
	.graph_launch = guard_graph_launch,
	.graph_free = guard_graph_free,
};

int eng_mem_open_guarded(struct eng_mem **ret)
{
	struct guard_mem *g;

	if (the_mem)
		return -EBUSY;
	g = calloc(1, sizeof(*g));
	if (!g)
		return -ENOMEM;
	g->range = mmap(NULL, RANGE_BYTES, PROT_NONE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (g->range == MAP_FAILED) {
		free(g);
		return -ENOMEM;
	}
	madvise(g->range, RANGE_BYTES, MADV_HUGEPAGE);
	g->base = (struct eng_mem){
		.ops = &guard_ops,
		.kernels = &guard_kernels,
		.act_dtype = KVK_BF16,
		.separate = true,
		.has_graphs = true,
	};
	the_mem = g;
	*ret = &g->base;
	return 0;
}
