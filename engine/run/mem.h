/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem.h - where a step's data lies: host memory, a GPU, or guarded memory (tests).
 *
 * The forward pass is written once. It hands addresses to the kernels and looks at none
 * of them; what it needs beside the families of kernels.h (gather rows, copy columns,
 * score a prompt) is here as well. With .separate false device memory is host memory, and
 * uploads of a thing onto itself are nothing.
 *
 * One engine, one struct eng_mem, one thread. Everything is queued in order unless it
 * says otherwise; eng_mem_ops.sync() is the only wait.
 */
#ifndef ENG_RUN_MEM_H
#define ENG_RUN_MEM_H

#include <stdbool.h>
#include "base/util.h"
#include "engine/model/err.h"
#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * enum eng_device - who computes
 * @ENG_DEVICE_HOST: the C references, F32 activations
 * @ENG_DEVICE_CUDA: the CUDA kernels, BF16 activations
 * @ENG_DEVICE_GUARDED: tests only: the C references with BF16 activations, on memory that
 *	cannot be touched but by a kernel, with graphs that are recorded and played
 */
enum eng_device {
	ENG_DEVICE_HOST = 0,
	ENG_DEVICE_CUDA = 1,
	ENG_DEVICE_GUARDED = 2,
};

/**
 * struct eng_copy_args - rows of values, also from one dtype to another
 * @dst: [nr_rows] rows of @cols values, @dst_stride apart (all in elements)
 * @src: row @i is number rows[i], or i without @rows; @src_stride apart
 * @dst_dtype, @src_dtype: KVK_F32 or KVK_BF16
 */
struct eng_copy_args {
	void *dst;
	const void *src;
	const u32 *rows;
	u32 dst_stride;
	u32 src_stride;
	u32 dst_dtype;
	u32 src_dtype;
	u32 nr_rows;
	u32 cols;
};

#define ENG_NO_TARGET UINT32_MAX

/**
 * struct eng_score_args - log-probability of one token per row
 * @logits: [nr_rows][vocab] f32
 * @targets: [nr_rows]; ENG_NO_TARGET: leave ret[i] alone
 * @ret: [nr_rows]; NaN rows give NaN
 */
struct eng_score_args {
	const float *logits;
	const u32 *targets;
	float *ret;
	u32 nr_rows;
	u32 vocab;
};

/**
 * struct eng_piece - bytes between host memory and the device
 * @dst, @src: one of them in memory of alloc_host(); both aligned to 16 bytes, and what is
 *	copied may be rounded up to 16
 * @count: NULL: all @bytes; else in host memory, read when the copy runs: @head + *count *
 *	@unit bytes, at most @bytes
 */
struct eng_piece {
	void *dst;
	const void *src;
	const u32 *count;
	size_t bytes;
	u32 head;
	u32 unit;
};

#define ENG_PIECES_MAX 3u

/**
 * struct eng_fetch_args - pieces that a kernel copies, so that a graph can hold it
 * @side: on the side stream
 *
 * The addresses stay, how much there is may change from launch to launch.
 */
struct eng_fetch_args {
	struct eng_piece piece[ENG_PIECES_MAX];
	u32 nr;
	bool side;
};

struct eng_mem;
struct kvk_repack;

/**
 * struct eng_mem_ops - one kind of memory; all hooks are there
 *
 * Common results: 0; -EIO the device failed: nothing that was queued can be believed, or
 * be believed to have ended; -ENOMEM.
 */
struct eng_mem_ops {
	const char *name;
	/* frees everything that was allocated; waits for nothing */
	void (*close)(struct eng_mem *m);
	/* device memory, zeroed, 256-byte aligned; freed by close() */
	int (*alloc)(struct eng_mem *m, size_t bytes, void **ret);
	/* host memory that copies may run from, zeroed; freed by close() */
	int (*alloc_host)(struct eng_mem *m, size_t bytes, void **ret);
	/* host memory of alloc_host() only; it must stay as it is until sync() */
	int (*upload)(struct eng_mem *m, void *dst, const void *src, size_t bytes);
	int (*download)(struct eng_mem *m, void *dst, const void *src, size_t bytes);
	int (*zero)(struct eng_mem *m, void *dst, size_t bytes);
	/* from any host memory, which is free again on return */
	int (*load)(struct eng_mem *m, void *dst, const void *src, size_t bytes);
	int (*sync)(struct eng_mem *m);
	/* work on m->side from now on runs beside m->stream, until join() */
	int (*fork)(struct eng_mem *m);
	int (*join)(struct eng_mem *m);
	int (*copy)(struct eng_mem *m, const struct eng_copy_args *a);
	int (*score)(struct eng_mem *m, const struct eng_score_args *a);
	/* only with .separate */
	int (*fetch)(struct eng_mem *m, const struct eng_fetch_args *a);
	/* INT4 experts into the kernel's order; only with .packs_int4 */
	int (*repack)(struct eng_mem *m, const struct kvk_repack *r);
	size_t (*packed_bytes)(const struct kvk_experts *e, int second);
	/* only with .has_graphs: what is queued in between is kept, not run */
	int (*graph_begin)(struct eng_mem *m);
	int (*graph_end)(struct eng_mem *m, void **ret_graph);
	int (*graph_launch)(struct eng_mem *m, void *graph);
	void (*graph_free)(struct eng_mem *m, void *graph);
};

/**
 * struct eng_mem - an open memory
 * @kernels: the table that computes on it
 * @act_dtype: of activations
 * @separate: host code must not touch what alloc() returned
 * @gpu_uuid: of the GPU; zero without
 */
struct eng_mem {
	const struct eng_mem_ops *ops;
	const struct kvk_ops *kernels;
	kvk_stream stream;
	kvk_stream side;
	u32 act_dtype;
	bool separate;
	bool has_graphs;
	bool packs_int4;
	u8 gpu_uuid[16];
};

/**
 * eng_mem_open() - open a device
 * @device: enum eng_device
 * @gpu_uuid: 16 bytes, or NULL: the first GPU that this process sees
 * @ret: owner; ret->ops->close()
 *
 * With a GPU its context is current on the calling thread afterwards.
 * Return: 0; -ENODEV no such device, or built without it; -ENOMEM.
 */
int eng_mem_open(u32 device, const u8 *gpu_uuid, struct eng_mem **ret,
		 struct eng_err *err);

/* mem_host.c, mem_guard.c, mem_cuda.cu */
int eng_mem_open_host(struct eng_mem **ret);
int eng_mem_open_guarded(struct eng_mem **ret);
void eng_mem_guard_fail(u32 nr); /* tests: the nr-th kernel from now on fails */
u32 eng_mem_guard_checks(void);	 /* tests: tag_check kernels until now */
int eng_mem_open_cuda(const u8 *gpu_uuid, struct eng_mem **ret, struct eng_err *err);

/* mem_host.c: the truth about copy() and score() */
int eng_copy_ref(struct eng_mem *m, const struct eng_copy_args *a);
int eng_score_ref(struct eng_mem *m, const struct eng_score_args *a);
int eng_fetch_ref(struct eng_mem *m, const struct eng_fetch_args *a);

static inline size_t eng_act_bytes(u32 dtype)
{
	return dtype == KVK_F32 ? 4 : 2;
}

#ifdef __cplusplus
}
#endif
#endif /* ENG_RUN_MEM_H */
