/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scene.h - a model, its prompts and a kvmd: what inject and check-cost play on.
 */
#ifndef KVB_SCENE_H
#define KVB_SCENE_H

#include "engine/private.h"
#include "engine/run/engine.h"

#define KVB_PROMPTS	  8u
#define KVB_PROMPT_TOKENS 210u /* three full pages and a tail */

/**
 * struct kvb_scene - owner of all it holds; kvb_scene_close()
 * @model: loaded model
 * @prompts: [KVB_PROMPTS][KVB_PROMPT_TOKENS] ids, each from another document
 * @kvmd: private daemon, if @own_kvmd
 * @socket_path: where engines connect
 * @device: enum eng_device of engines and private kvmd; set before kvb_scene_open()
 */
struct kvb_scene {
	struct eng_model *model;
	u32 prompts[KVB_PROMPTS][KVB_PROMPT_TOKENS];
	struct eng_private_kvmd kvmd;
	bool own_kvmd;
	const char *socket_path;
	u32 device;
};

/**
 * kvb_scene_open() - load a model and prompts, start a private kvmd if no socket is given
 * @model_dir: model directory
 * @text_path: NUL-separated documents; NULL: heldout.txt beside @model_dir
 * @weights: "bf16", "fp8", "int4-g32", ...
 * @socket_path: kvmd to use, or NULL
 * @check: check mode of the private kvmd
 *
 * Return: 0, or -errno after a line on stderr.
 */
int kvb_scene_open(struct kvb_scene *s, const char *model_dir, const char *text_path,
		   const char *weights, const char *socket_path, const char *check);

/**
 * kvb_scene_prompt() - make prompt @i of a text of one's own, repeated until it is long
 * enough
 *
 * Return: 0; -EINVAL the text has no token.
 */
int kvb_scene_prompt(struct kvb_scene *s, u32 i, const char *text);

void kvb_scene_close(struct kvb_scene *s);

#endif
