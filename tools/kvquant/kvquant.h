/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvquant.h - make an INT4 or FP8 checkpoint from a BF16 one: options, plan, stages.
 *
 * Stages: check the input as a loader would (nothing is written before that passed), plan
 * the output (names, shapes, shards, offsets), write into a temporary directory beside
 * the target, read the headers back, sync, rename. One thread; quantisation is parallel
 * inside.
 */
#ifndef KVQ_KVQUANT_H
#define KVQ_KVQUANT_H

#include "engine/model/model.h"
#include "engine/model/safetensors.h"
#include "engine/model/source.h"

/**
 * struct kvq_options - the command line
 * @model: input directory
 * @out: output directory, must not exist
 * @weights: enum eng_weights: AS_IS (scales only), FP8, INT4_G32, INT4_G128
 * @kv_scales: add static KV scales
 * @texts, @nr_texts: files to measure them on
 * @tokens: at most so many of their tokens
 * @shard_bytes: a shard is closed when it has this many
 * @progress: show progress on stderr
 */
struct kvq_options {
	const char *model;
	const char *out;
	u32 weights;
	bool kv_scales;
	const char *const *texts;
	u32 nr_texts;
	size_t tokens;
	u64 shard_bytes;
	bool progress;
};

/** enum kvq_kind - where an output tensor's bytes come from */
enum kvq_kind {
	KVQ_COPY,     /* the input tensor, unchanged */
	KVQ_DATA,     /* quantised codes of a matrix */
	KVQ_SCALE,    /* its scales */
	KVQ_SHAPE,    /* INT4: rows and cols */
	KVQ_KV_SCALE, /* measured K/V scales of a layer */
};

/**
 * struct kvq_tensor - one output tensor
 * @name: owned
 * @kind: enum kvq_kind
 * @dtype: enum eng_st_dtype
 * @nr_dims, @shape: outermost first
 * @bytes: size
 * @source: KVQ_COPY: input tensor; KVQ_DATA and its companions: the matrix's tensor
 * @values: KVQ_KV_SCALE: [shape[0]], owned by the plan
 * @shard: index of its file
 * @offset: in the file
 */
struct kvq_tensor {
	char *name;
	u32 kind;
	u32 dtype;
	u32 nr_dims;
	u64 shape[ENG_ST_DIMS_MAX];
	u64 bytes;
	const struct eng_tensor *source;
	const float *values;
	u32 shard;
	u64 offset;
};

/**
 * struct kvq_plan - the output
 * @list, @nr: tensors; a matrix's DATA, SCALE (and SHAPE) follow each other
 * @nr_shards: files
 * @bytes: of all tensors
 * @target, @group: KVK_E4M3 or KVK_INT4 for matrices that are quantised; 0 = none
 */
struct kvq_plan {
	struct kvq_tensor *list;
	size_t nr, room;
	u32 nr_shards;
	u64 bytes;
	u32 target;
	u32 group;
};

/**
 * struct kvq_report - what was done
 * @matrices: quantised matrices
 * @bytes_in, @bytes_out: tensor data
 * @error, @absmax_error, @energy: sums of squares: of the error, of what absmax scales
 *	would have given (INT4), of the values
 */
struct kvq_report {
	u64 matrices;
	u64 bytes_in;
	u64 bytes_out;
	double error;
	double absmax_error;
	double energy;
};

/**
 * kvq_plan_build() - what comes out of @ts
 * @scales: [nr_scales] in struct kv_layout's order, or NULL
 * Return: 0; -EINVAL (refused in @err); -ENOMEM. kvq_plan_free() in any case.
 */
int kvq_plan_build(const struct kvq_options *o, const struct eng_config *c,
		   const struct eng_tensors *ts, const float *scales,
		   struct kvq_plan *ret, struct eng_err *err);
void kvq_plan_free(struct kvq_plan *p);

/** kvq_shard_name() - "model-00001-of-00003.safetensors" */
void kvq_shard_name(const struct kvq_plan *p, u32 shard, char *buf, size_t size);

/**
 * kvq_write_tensors() - all shards and the index into directory @dirfd
 * @stop: checked between tensors; not 0 ends with -EINTR
 */
int kvq_write_tensors(const struct kvq_options *o, const struct kvq_plan *p, int dirfd,
		      const volatile int *stop, struct kvq_report *ret,
		      struct eng_err *err);

/** kvq_write_config() - config.json with quantization_config, and copies of small files
 */
int kvq_write_config(const struct kvq_options *o, const struct eng_config *c,
		     const struct eng_tensors *ts, int dirfd, struct eng_err *err);

/** kvq_write_file() - a new file with these bytes, synced */
int kvq_write_file(int dirfd, const char *name, const void *bytes, size_t nr,
		   struct eng_err *err);

/**
 * struct kvq_outdir - a temporary directory that becomes the target or vanishes
 * @path: its name
 * @fd: open on it
 */
struct kvq_outdir {
	char path[4096];
	int fd;
};

/**
 * kvq_outdir_create() - beside @o->out, after refusing a target that exists or lies in
 * the input Return: 0; -EEXIST; -EINVAL the target is or lies in the input; -errno.
 */
int kvq_outdir_create(const struct kvq_options *o, struct kvq_outdir *ret,
		      struct eng_err *err);

/** kvq_outdir_commit() - sync and rename to @o->out; never replaces anything */
int kvq_outdir_commit(const struct kvq_options *o, struct kvq_outdir *d,
		      struct eng_err *err);

/** kvq_outdir_remove() - delete it and the files in it */
void kvq_outdir_remove(struct kvq_outdir *d);

/**
 * kvq_measure_scales() - static KV scales over the texts
 * @ret_scales: malloc'd, in struct kv_layout's order
 */
int kvq_measure_scales(const struct kvq_options *o, float **ret_scales, u32 *ret_nr,
		       struct eng_err *err);

/**
 * kvq_run() - all stages
 * @stop: see kvq_write_tensors()
 * Return: 0 and the target is complete; or -errno, @err says why, and nothing is left.
 */
int kvq_run(const struct kvq_options *o, const volatile int *stop, struct kvq_report *ret,
	    struct eng_err *err);

#endif
