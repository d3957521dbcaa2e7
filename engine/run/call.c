/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.c - arguments for the kernels: the one place that knows dtypes and streams.
 *
 * Activations are of mem->act_dtype, dense unless a stride is given. Addresses are handed
 * on, never looked at.
 */
#include "engine/run/internal.h"

/** eng_act_at() - element @index of an array of activations */
void *eng_act_at(const struct eng_engine *e, const void *base, size_t index)
{
	return (char *)(uintptr_t)base + index * eng_act_bytes(e->mem->act_dtype);
}

/** eng_call_linear() - y = x W^T. Return: 0; -errno of the kernel */
int eng_call_linear(struct eng_engine *e, const struct eng_linear *l)
{
	struct kvk_linear_args a = {
		.w = *l->w,
		.x = l->x,
		.y = l->y,
		.bias = l->bias,
		.nr_tokens = l->nr_tokens ? l->nr_tokens : e->step.nr_tokens,
		.x_dtype = e->mem->act_dtype,
		.y_dtype = l->y_f32 ? KVK_F32 : e->mem->act_dtype,
		.nr_batch = l->nr_batch ? l->nr_batch : 1,
		.x_batch = l->x_batch,
		.y_batch = l->y_batch,
		.add = l->add,
	};

	return e->ops->linear(&a, e->mem->stream);
}

/** eng_norm_args() - as the kernels take it */
struct kvk_norm_args eng_norm_args(const struct eng_engine *e, const struct eng_norm *n)
{
	return (struct kvk_norm_args){
		.x = n->x,
		.residual = n->residual,
		.weight = n->weight,
		.y = n->y,
		.eps = n->eps,
		.nr_rows = n->nr_rows,
		.cols = n->cols,
		.x_stride = n->x_stride ? n->x_stride : n->cols,
		.y_stride = n->cols,
		.act_dtype = e->mem->act_dtype,
	};
}

/** eng_call_norm() - y = norm(x), or of residual += x. Return: 0; -errno of the kernel */
int eng_call_norm(struct eng_engine *e, const struct eng_norm *n)
{
	struct kvk_norm_args a = eng_norm_args(e, n);

	return e->ops->norm(&a, e->mem->stream);
}
