/* SPDX-License-Identifier: Apache-2.0 */
/*
 * amax.h - largest K/V values over a text: static scales for the fp8_s layouts.
 */
#ifndef ENG_RUN_AMAX_H
#define ENG_RUN_AMAX_H

#include "engine/run/engine.h"

/** eng_kv_nr_scales() - static scales of a model: MLA nr_layers, GQA nr_layers * kv_heads
 * * 2 */
u32 eng_kv_nr_scales(const struct eng_model *m);

/**
 * eng_kv_amax() - run a text through the model and note the largest |K|, |V| per layer
 * @m: model
 * @socket_path: kvmd; NULL: a private one is started and stopped
 * @tokens: nr_tokens ids, run in windows of 1,024, each alone
 * @nr_tokens: 1 and up
 * @ret_amax: [eng_kv_nr_scales(m)] in struct kv_layout's order: MLA one per layer (latent
 *	and rope); GQA [layers][kv_heads][2] (K, V)
 * @err: one line when it failed
 *
 * K/V goes through BF16 pages while this runs; values are looked at before they are
 *	rounded. Return: 0 or -errno.
 */
int eng_kv_amax(struct eng_model *m, const char *socket_path, const u32 *tokens,
		size_t nr_tokens, float *ret_amax, struct eng_err *err);

/** eng_kv_scales_from_amax() - scale = amax / 448, 1 where amax is 0; in place */
void eng_kv_scales_from_amax(float *amax, u32 nr);

#endif /* ENG_RUN_AMAX_H */
