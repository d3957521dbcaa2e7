/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.h - the tensors of a model directory, found and checked, not yet
 * interpreted.
 *
 * File format: u64 little endian header length, JSON header {name: {dtype, shape,
 * data_offsets}}, data. Spans must tile the data: no overlap, no hole, nothing left over.
 * Several files are joined by model.safetensors.index.json.
 */
#ifndef ENG_MODEL_SAFETENSORS_H
#define ENG_MODEL_SAFETENSORS_H

#include <stdbool.h>
#include "base/util.h"
#include "engine/model/err.h"

#define ENG_ST_HEADER_MAX 100000000ull /* bytes; the format's own limit */
#define ENG_ST_DIMS_MAX	  8u
#define ENG_ST_SHARDS_MAX 4096u

enum eng_st_dtype {
	ENG_ST_F32 = 1,
	ENG_ST_F16,
	ENG_ST_BF16,
	ENG_ST_E4M3,
	ENG_ST_I32,
	ENG_ST_I64,
	ENG_ST_OTHER, /* a dtype of the format that no weight of ours may have */
};

/**
 * struct eng_tensor - one tensor of a file
 * @name: owned by the file's set
 * @file: name of its file, for messages
 * @dtype: enum eng_st_dtype
 * @nr_dims, @shape: outermost first; nr_dims 0 = scalar
 * @data, @bytes: little endian, any alignment; mapped from the file
 */
struct eng_tensor {
	char *name;
	const char *file;
	u32 dtype;
	u32 nr_dims;
	u64 shape[ENG_ST_DIMS_MAX];
	const u8 *data;
	u64 bytes;
};

struct eng_shard;

/**
 * struct eng_tensors - all tensors of a directory, sorted by name
 * @path: the index or single file, for messages about what is not there
 * @shards, @nr_shards: owner of mappings and file names
 * @list, @nr: the tensors
 * @used: [nr] set by whoever takes a tensor; what stays clear was expected by nobody
 */
struct eng_tensors {
	char *path;
	struct eng_shard *shards;
	u32 nr_shards;
	struct eng_tensor *list;
	size_t nr;
	u8 *used;
};

/**
 * eng_tensors_open() - map every file of a directory and check all headers
 * @dir: model directory
 * @ret: filled on success; eng_tensors_close()
 *
 * Files must not be changed while open. Return: 0; -ENOENT; -EINVAL; -EFBIG a header over
 * the limit; -ENOMEM; -EIO.
 */
int eng_tensors_open(const char *dir, struct eng_tensors *ret, struct eng_err *err);

void eng_tensors_close(struct eng_tensors *ts);

/**
 * eng_tensors_find() - by exact name
 * Return: the tensor, or NULL.
 */
const struct eng_tensor *eng_tensors_find(const struct eng_tensors *ts, const char *name);

/** eng_tensors_use() - eng_tensors_find() that sets @used. Not from two threads. */
const struct eng_tensor *eng_tensors_use(struct eng_tensors *ts, const char *name);

/** eng_tensor_is() - has @t this dtype and the shape [a][b]? @b 0: one dimension */
bool eng_tensor_is(const struct eng_tensor *t, u32 dtype, u64 a, u64 b);

/** eng_tensor_describe() - "BF16 [4096,256]"; Return: @buf */
const char *eng_tensor_describe(const struct eng_tensor *t, char *buf, size_t size);

const char *eng_st_dtype_name(u32 dtype);
u32 eng_st_dtype_bytes(u32 dtype);

/**
 * eng_shard_open() - one file: for tests and for whoever has no index
 * @path: the file
 * @ret: filled as by eng_tensors_open()
 */
int eng_shard_open(const char *path, struct eng_tensors *ret, struct eng_err *err);

#endif
