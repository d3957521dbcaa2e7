/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.h - from checked tensors to struct eng_layer: private to engine/model.
 */
#ifndef ENG_MODEL_WEIGHTS_H
#define ENG_MODEL_WEIGHTS_H

#include "engine/model/arena.h"
#include "engine/model/model.h"
#include "engine/model/safetensors.h"

/**
 * struct eng_loader - state of one eng_model_load()
 * @m: being filled
 * @ts: open tensors
 * @prefix: "" or "language_model." before every name
 * @scheme: enum eng_weights after comparison with the directory: AS_IS for what is stored
 * @err: where refusals go
 */
struct eng_loader {
	struct eng_model *m;
	struct eng_tensors ts;
	const char *prefix;
	u32 scheme;
	struct eng_err *err;
};

/** eng_weights_load() - fill l->m's layers, embed, lm_head, final_norm, kv_scales */
int eng_weights_load(struct eng_loader *l);

/** eng_model_hash() - fill m->model_id from configuration and weights */
int eng_model_hash(struct eng_model *m, struct eng_err *err);

#endif
