/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.h - from checked tensors to struct eng_layer: private to engine/model.
 */
#ifndef ENG_MODEL_WEIGHTS_H
#define ENG_MODEL_WEIGHTS_H

#include "engine/model/arena.h"
#include "engine/model/model.h"
#include "engine/model/source.h"

#define ENG_NAME_BYTES 200u

/** struct eng_wname - a tensor's name, without ".weight" for matrices */
struct eng_wname {
	char text[ENG_NAME_BYTES];
};

/** enum eng_weight_class - what a scheme may do to a matrix */
enum eng_weight_class {
	ENG_CLASS_PLAIN,  /* embeddings, head, router: as stored */
	ENG_CLASS_MATRIX, /* attention projections, dense and shared MLPs: FP8 */
	ENG_CLASS_EXPERT, /* routed experts: INT4 or FP8 */
};

/**
 * struct eng_loader - state of one eng_model_load()
 * @m: being filled
 * @ts: open tensors
 * @prefix: "" or "language_model." before every name
 * @scheme: enum eng_weights after comparison with the directory: AS_IS for what is stored
 * @check_only: look every matrix up, but read none
 * @err: where refusals go
 *
 * The functions below return 0 or -errno with a refusal in @err.
 */
struct eng_loader {
	struct eng_model *m;
	struct eng_tensors ts;
	const char *prefix;
	u32 scheme;
	bool check_only;
	struct eng_err *err;
};

/** eng_wname() - the prefix, then printf */
__attribute__((format(printf, 2, 3))) struct eng_wname
eng_wname(const struct eng_loader *l, const char *fmt, ...);

int eng_load_no_memory(struct eng_loader *l, const char *name);

/** eng_load_put_failed() - refuses @s because eng_source_put() gave @code */
int eng_load_put_failed(struct eng_loader *l, const struct eng_source *s, int code);

/** eng_load_find() - the matrix @name with this shape */
int eng_load_find(struct eng_loader *l, const char *name, u32 rows, u32 cols,
		  struct eng_source *ret);

/** eng_load_dtype() - what the kernels get for @s under the scheme; *ret_group for INT4
 */
int eng_load_dtype(const struct eng_loader *l, enum eng_weight_class cls,
		   const struct eng_source *s, u32 *ret_dtype, u32 *ret_group);

/** eng_writable() - arrays are const for all but the loader; NULL stays NULL */
void *eng_writable(const void *p, u64 offset);

/** eng_load_matrix() - find, allocate and fill one matrix */
int eng_load_matrix(struct eng_loader *l, enum eng_weight_class cls,
		    struct eng_wname name, u32 rows, u32 cols, struct kvk_weight *ret);

/** eng_load_gate_up() - two matrices [inter][hidden] as one [2 * inter][hidden] */
int eng_load_gate_up(struct eng_loader *l, struct eng_wname gate, struct eng_wname up,
		     u32 inter, struct kvk_weight *ret);

/** eng_load_vector() - a BF16 or F32 tensor [n] (n 1: or a scalar) as f32 */
int eng_load_vector(struct eng_loader *l, struct eng_wname name, u32 n,
		    const float **ret);

/** eng_load_layer() - all weights of layer @i */
int eng_load_layer(struct eng_loader *l, u32 i);

/** eng_weights_load() - fill l->m's layers, embed, lm_head, final_norm, kv_scales */
int eng_weights_load(struct eng_loader *l);

/** eng_model_hash() - fill m->model_id from configuration and weights */
int eng_model_hash(struct eng_model *m, struct eng_err *err);

#endif
