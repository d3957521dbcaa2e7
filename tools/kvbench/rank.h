/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank.h - kvbench rank: one tensor-parallel rank's decode step, in four parts: the model with
 * random weights (rank_model.c), the look into a step (rank_probe.c), the arguments
 * (rank_args.c), the command (rank.c).
 */
#ifndef KVB_RANK_H
#define KVB_RANK_H

#include "engine/model/model.h"
#include "engine/run/mem.h"

struct cJSON;
struct eng_engine;

/**
 * struct rank_model - a rank's share of a model
 * @m: as the engine takes it; its arrays lie in the kernels' memory
 * @mem: owner of the arrays
 */
struct rank_model {
	struct eng_model m;
	struct eng_mem *mem;
};

/**
 * rank_model_open() - random weights of a rank's shapes
 * @preset: "kimi-k2.6", "glm-5.2" or "tiny"
 * @tp: ranks that share heads, inner sizes and the vocabulary: 1, 2, 4 or 8
 * @weights: KVK_INT4: routed experts in INT4, the rest in BF16; KVK_E4M3: all matrices but
 *	embedding, router, head and W_UK, W_UV
 * @mem: open; borrowed
 *
 * Return: 0; -EINVAL an argument (@err names it); -ENOMEM; -EIO.
 */
int rank_model_open(struct rank_model *r, const char *preset, u32 tp, u32 weights,
		    struct eng_mem *mem, struct eng_err *err);
void rank_model_close(struct rank_model *r);

/** rank_model_left_out() - what a whole model has beside this, for the report; never NULL */
const char *rank_model_left_out(const char *preset);

/* Kinds of kernel calls that are told apart. */
#define RANK_SITES_MAX 64u

/**
 * struct rank_site - calls of one family and shape
 * @calls: in a step
 * @us: of all of them, one after the other and nothing else
 * @bytes: that they have to read and write
 */
struct rank_site {
	char name[48];
	u32 calls;
	double us;
	double bytes;
};

/**
 * struct rank_look - what rank_probe() saw
 * @graph_us: a step's work, mirror update and check on their branch
 * @no_check_us: the same without them
 * @experts: distinct routed experts of a layer, mean
 */
struct rank_look {
	struct rank_site sites[RANK_SITES_MAX];
	u32 nr_sites;
	double graph_us;
	double no_check_us;
	double experts;
};

/**
 * rank_probe() - take a step apart
 * @e: its probe: inside an announced step, behind the step's own work
 * @arg: struct rank_look
 *
 * Work is queued again and again on the same rows and pages; append stores the same bytes.
 * Return: 0; -errno of a kernel; -ENOMEM.
 */
int rank_probe(struct eng_engine *e, void *arg);

#define RANK_BATCHES_MAX  16u
#define RANK_REQUESTS_MAX 256u
#define RANK_OUT_MAX	  4096u

/**
 * struct rank_options - what the command line asks for
 * @weights: KVK_INT4 or KVK_E4M3; @kv: enum eng_kv;
 * @attention: enum eng_attention; @device: enum eng_device
 * @in, @out: tokens of a prompt that lie in the pages, and of the decode
 * @batches: [nr_batches] numbers of requests, one run each
 */
struct rank_options {
	const char *preset;
	const char *socket_path;
	u32 tp;
	u32 weights;
	u32 kv;
	u32 attention;
	u32 in;
	u32 out;
	u32 device; /* enum eng_device */
	u64 kv_bytes;
	u32 batches[RANK_BATCHES_MAX];
	u32 nr_batches;
	bool json;
};

/** rank_parse() - arguments to @o; 0, or 2 after telling why not */
int rank_parse(struct rank_options *o, int argc, char **argv);

/**
 * kvb_rank() - kvbench rank: see rank.c
 *
 * Exit code 0, 1 on failure, 2 usage, 3 no GPU.
 */
int kvb_rank(int argc, char **argv);

#endif /* KVB_RANK_H */
