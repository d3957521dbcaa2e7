/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engines.h - several engine processes on one GPU at once, against one alone.
 */
#ifndef KVB_ENGINES_H
#define KVB_ENGINES_H

#include "safety.h"

#define ENGINES_MAX	8u
#define ENGINES_SAMPLES 65536u
#define ENGINES_READ	(2200ull << 20) /* bytes of a short step: half a millisecond */

/**
 * enum engines_kind - what the engines do
 * @ENGINES_DECODE: decode a model, all requests of the batch in each step
 * @ENGINES_SHORT: steps that read 2.2 GB of the GPU's memory, and nothing else
 * @ENGINES_LONG: twenty times as much a step
 */
enum engines_kind { ENGINES_DECODE, ENGINES_SHORT, ENGINES_LONG, ENGINES_KINDS };

/**
 * struct engines_shared - anonymous memory of parent and engines
 * @ready: engines that could start
 * @start_ns: 0 until all could; written by the parent
 * @engine: written by each engine for itself
 */
struct engines_shared {
	u32 ready;
	u64 start_ns;
	struct engines_result {
		u64 steps;
		u64 units; /* tokens, or bytes read */
		double seconds;
		u32 nr_samples;
		float step_us[ENGINES_SAMPLES];
	} engine[ENGINES_MAX];
};

struct engines_options {
	enum kvb_backend backend;
	const char *model;
	const char *weights;
	u64 batch;
	u64 seconds_ms;
};

/** engines_child() - engine number @i of a run. Return: its exit status */
int engines_child(const struct engines_options *opt, enum engines_kind kind,
		  const char *socket_path, u32 i, struct engines_shared *shared);

#endif
