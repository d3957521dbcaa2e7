/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem_host.c - ordinary memory and the C references; opening any memory (see mem.h).
 */
#include "engine/run/mem.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "kernels/fp8.h"

#define ALIGN 256u

struct chunk {
	struct chunk *next;
};

struct host_mem {
	struct eng_mem base;
	struct chunk *chunks;
};

static void host_close(struct eng_mem *m)
{
	struct host_mem *h = (struct host_mem *)m;
	struct chunk *c = h->chunks;

	while (c) {
		struct chunk *next = c->next;

		free(c);
		c = next;
	}
	free(h);
}

static int host_alloc(struct eng_mem *m, size_t bytes, void **ret)
{
	struct host_mem *h = (struct host_mem *)m;
	struct chunk *c;

	if (bytes > SIZE_MAX - 2 * ALIGN)
		return -ENOMEM;
	bytes = kv_round_up(bytes + ALIGN, ALIGN);
	c = aligned_alloc(ALIGN, bytes);
	if (!c)
		return -ENOMEM;
	memset(c, 0, bytes);
	c->next = h->chunks;
	h->chunks = c;
	*ret = (char *)c + ALIGN;
	return 0;
}

static int host_copy_bytes(struct eng_mem *m, void *dst, const void *src, size_t bytes)
{
	if (dst != src)
		memmove(dst, src, bytes);
	return 0;
}

static int host_zero(struct eng_mem *m, void *dst, size_t bytes)
{
	memset(dst, 0, bytes);
	return 0;
}

static int host_nothing(struct eng_mem *m)
{
	return 0;
}

static void copy_row(const struct eng_copy_args *a, u32 i)
{
	size_t to = (size_t)i * a->dst_stride;
	size_t from = (size_t)(a->rows ? a->rows[i] : i) * a->src_stride;
	size_t elem = eng_act_bytes(a->src_dtype);

	if (a->dst_dtype == a->src_dtype) {
		memcpy((char *)a->dst + to * elem, (const char *)a->src + from * elem,
		       a->cols * elem);
		return;
	}
	for (u32 c = 0; c < a->cols; c++) {
		if (a->dst_dtype == KVK_F32)
			((float *)a->dst)[to + c] =
				kvk_bf16_to_f32(((const u16 *)a->src)[from + c]);
		else
			((u16 *)a->dst)[to + c] =
				kvk_f32_to_bf16(((const float *)a->src)[from + c]);
	}
}

int eng_copy_ref(struct eng_mem *m, const struct eng_copy_args *a)
{
	for (u32 i = 0; i < a->nr_rows; i++)
		copy_row(a, i);
	return 0;
}

static float logprob(const float *logits, u32 vocab, u32 target)
{
	float max = logits[0];
	double sum = 0;

	for (u32 i = 1; i < vocab; i++)
		max = logits[i] > max ? logits[i] : max;
	for (u32 i = 0; i < vocab; i++)
		sum += (double)expf(logits[i] - max);
	return (float)((double)logits[target] - (double)max - log(sum));
}

int eng_score_ref(struct eng_mem *m, const struct eng_score_args *a)
{
#pragma omp parallel for schedule(static)
	for (u32 i = 0; i < a->nr_rows; i++) {
		if (a->targets[i] != ENG_NO_TARGET)
			a->ret[i] = logprob(a->logits + (size_t)i * a->vocab, a->vocab,
					    a->targets[i]);
	}
	return 0;
}

int eng_fetch_ref(struct eng_mem *m, const struct eng_fetch_args *a)
{
	for (u32 i = 0; i < a->nr; i++) {
		const struct eng_piece *p = &a->piece[i];
		size_t n = p->count ? p->head + (size_t)*p->count * p->unit : p->bytes;

		memcpy(p->dst, p->src, KV_MIN(n, p->bytes));
	}
	return 0;
}

/* Not reached: .packs_int4 and .has_graphs are false. */
static int host_repack(struct eng_mem *m, const struct kvk_repack *r)
{
	return -ENOTSUP;
}

static size_t host_packed_bytes(const struct kvk_experts *e, int second)
{
	return 0;
}

static int host_graph_end(struct eng_mem *m, void **ret_graph)
{
	return -ENOTSUP;
}

static int host_graph_launch(struct eng_mem *m, void *graph)
{
	return -ENOTSUP;
}

static void host_graph_free(struct eng_mem *m, void *graph)
{
}

static const struct eng_mem_ops host_ops = {
	.name = "host",
	.close = host_close,
	.alloc = host_alloc,
	.alloc_host = host_alloc,
	.upload = host_copy_bytes,
	.download = host_copy_bytes,
	.zero = host_zero,
	.load = host_copy_bytes,
	.sync = host_nothing,
	.fork = host_nothing,
	.join = host_nothing,
	.copy = eng_copy_ref,
	.score = eng_score_ref,
	.fetch = eng_fetch_ref,
	.repack = host_repack,
	.packed_bytes = host_packed_bytes,
	.graph_begin = host_nothing,
	.graph_end = host_graph_end,
	.graph_launch = host_graph_launch,
	.graph_free = host_graph_free,
};

int eng_mem_open_host(struct eng_mem **ret)
{
	struct host_mem *h = calloc(1, sizeof(*h));

	if (!h)
		return -ENOMEM;
	h->base = (struct eng_mem){
		.ops = &host_ops, .kernels = kvk_host_ops(), .act_dtype = KVK_F32};
	*ret = &h->base;
	return 0;
}

int eng_mem_open(u32 device, const u8 *gpu_uuid, struct eng_mem **ret,
		 struct eng_err *err)
{
	int rc;

	switch (device) {
	case ENG_DEVICE_HOST:
		rc = eng_mem_open_host(ret);
		break;
	case ENG_DEVICE_GUARDED:
		rc = eng_mem_open_guarded(ret);
		break;
	case ENG_DEVICE_CUDA:
#ifdef CONFIG_CUDA
		return eng_mem_open_cuda(gpu_uuid, ret, err);
#else
		return eng_refuse(err, -ENODEV, "device=cuda: built without CUDA");
#endif
	default:
		return eng_refuse(err, -EINVAL, "device=%u: unknown", device);
	}
	return rc ? eng_refuse(err, rc, "device: %s", strerror(-rc)) : 0;
}
