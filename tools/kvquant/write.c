/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write.c - shards and index (kvquant.h).
 *
 * A shard's header is known before any byte of data, so the file gets its size at once
 * and tensors are written where the plan put them, in the plan's order: a matrix is
 * quantised once and its codes and scales go to their places. Files are created anew,
 * never opened.
 */
#include "tools/kvquant/kvquant.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "engine/model/quant.h"
#include "kernels/fp8.h"

#define HEADER_ALIGN 8u

static int write_all(int fd, const void *bytes, size_t nr, u64 at)
{
	const u8 *p = bytes;

	while (nr) {
		ssize_t n = pwrite(fd, p, nr, (off_t)at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n ? -errno : -EIO;
		p += n;
		nr -= (size_t)n;
		at += (u64)n;
	}
	return 0;
}

static int create_file(int dirfd, const char *name, struct eng_err *err)
{
	int fd = openat(dirfd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
			0644);
	int code = errno;

	return fd >= 0 ? fd
		       : eng_refuse(err, -code, "%s: create: %s", name, strerror(code));
}

/* Syncs and closes @fd; the first error counts. */
static int finish_file(int fd, int r, const char *name, struct eng_err *err)
{
	if (!r && fsync(fd))
		r = -errno;
	if (close(fd) && !r)
		r = -errno;
	if (r && !err->text[0])
		eng_refuse(err, r, "%s: write: %s", name, strerror(-r));
	return r;
}

int kvq_write_file(int dirfd, const char *name, const void *bytes, size_t nr,
		   struct eng_err *err)
{
	int fd = create_file(dirfd, name, err);

	return fd < 0 ? fd : finish_file(fd, write_all(fd, bytes, nr, 0), name, err);
}

/* ------------------------------------------------------------------- headers */

static const char *dtype_name(u32 dtype)
{
	return eng_st_dtype_name(dtype);
}

static bool add_entry(cJSON *root, const struct kvq_tensor *t)
{
	cJSON *e = cJSON_AddObjectToObject(root, t->name), *shape, *span;
	bool ok = e && cJSON_AddStringToObject(e, "dtype", dtype_name(t->dtype));

	shape = ok ? cJSON_AddArrayToObject(e, "shape") : NULL;
	for (u32 i = 0; shape && i < t->nr_dims; i++)
		ok = ok &&
		     cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[i]));
	span = ok ? cJSON_AddArrayToObject(e, "data_offsets") : NULL;
	return shape && span && ok &&
	       cJSON_AddItemToArray(span, cJSON_CreateNumber((double)t->offset)) &&
	       cJSON_AddItemToArray(span,
				    cJSON_CreateNumber((double)(t->offset + t->bytes)));
}

/* Length and header, padded with spaces; malloc'd. */
static char *shard_header(const struct kvq_plan *p, u32 shard, size_t *ret_bytes)
{
	cJSON *root = cJSON_CreateObject(), *meta = NULL;
	char *text = NULL, *header = NULL;
	size_t len, padded;
	bool ok;

	meta = root ? cJSON_AddObjectToObject(root, "__metadata__") : NULL;
	ok = meta && cJSON_AddStringToObject(meta, "format", "pt");
	for (size_t i = 0; ok && i < p->nr; i++)
		if (p->list[i].shard == shard)
			ok = add_entry(root, &p->list[i]);
	if (ok)
		text = cJSON_PrintUnformatted(root);
	if (!text)
		goto delete_root;
	len = strlen(text);
	padded = kv_round_up(len, HEADER_ALIGN);
	header = malloc(8 + padded);
	if (header) {
		for (u32 i = 0; i < 8; i++)
			header[i] = (char)(padded >> (8 * i));
		memset(header + 8, ' ', padded);
		memcpy(header + 8, text, len);
		*ret_bytes = 8 + padded;
	}
	cJSON_free(text);
delete_root:
	cJSON_Delete(root);
	return header;
}

static int write_index(const struct kvq_plan *p, int dirfd, struct eng_err *err)
{
	cJSON *root = cJSON_CreateObject(), *meta = NULL, *map = NULL;
	char name[64], *text = NULL;
	bool ok;
	int r;

	meta = root ? cJSON_AddObjectToObject(root, "metadata") : NULL;
	ok = meta && cJSON_AddNumberToObject(meta, "total_size", (double)p->bytes);
	map = ok ? cJSON_AddObjectToObject(root, "weight_map") : NULL;
	for (size_t i = 0; map && i < p->nr && ok; i++) {
		kvq_shard_name(p, p->list[i].shard, name, sizeof(name));
		ok = cJSON_AddStringToObject(map, p->list[i].name, name) != NULL;
	}
	if (map && ok)
		text = cJSON_Print(root);
	r = text ? kvq_write_file(dirfd, "model.safetensors.index.json", text,
				  strlen(text), err)
		 : eng_refuse(err, -ENOMEM, "index: out of memory");
	cJSON_free(text);
	cJSON_Delete(root);
	return r;
}

/* ------------------------------------------------------------------ matrices */

static struct eng_source source_of(const struct eng_tensor *t)
{
	return (struct eng_source){.name = t->name,
				   .file = t->file,
				   .dtype = t->dtype == ENG_ST_F32 ? KVK_F32 : KVK_BF16,
				   .rows = (u32)t->shape[0],
				   .cols = (u32)t->shape[1],
				   .data = t->data};
}

/* What the codes mean, against what was there. */
static void measure(const struct kvq_plan *p, const struct eng_source *s,
		    const void *data, const void *scales, struct kvq_report *report)
{
	double error = 0, absmax = 0, energy = 0;
	u32 cols = s->cols;

#pragma omp parallel for reduction(+ : error, absmax, energy)
	for (u32 row = 0; row < s->rows; row++) {
		float *x = malloc((size_t)cols * 2 * sizeof(*x)),
		      *y = x ? x + cols : NULL;

		if (!x)
			continue; /* the report alone suffers */
		eng_source_rows(s, row, 1, x);
		if (p->target == KVK_INT4) {
			eng_dequant_int4_row((const u32 *)data + (size_t)row * cols / 8,
					     (const u16 *)scales +
						     (size_t)row * cols / p->group,
					     false, cols, p->group, y);
			absmax += eng_quant_int4_absmax(x, cols, p->group);
		} else {
			eng_dequant_fp8_row((const u8 *)data + (size_t)row * cols,
					    (const float *)scales +
						    kvk_fp8_scale_index(row, 0, cols),
					    cols, y);
		}
		for (u32 i = 0; i < cols; i++) {
			error += (double)(x[i] - y[i]) * (double)(x[i] - y[i]);
			energy += (double)x[i] * (double)x[i];
		}
		free(x);
	}
	report->error += error;
	report->absmax_error += absmax;
	report->energy += energy;
	report->matrices++;
}

/* The DATA tensor at @t; SCALE follows it, for INT4 SHAPE too. @base: start of the data.
 */
static int write_matrix(const struct kvq_plan *p, const struct kvq_tensor *t, int fd,
			u64 base, struct kvq_report *report, struct eng_err *err)
{
	struct eng_source s = source_of(t->source);
	s64 shape[2] = {s.rows, s.cols};
	void *data = malloc(t->bytes), *scales = malloc(t[1].bytes);
	int r = -ENOMEM;

	if (!data || !scales) {
		eng_refuse(err, 0, "%s: out of memory", t->name);
		goto free_both;
	}
	r = eng_source_put(&s, p->target, p->group, data, scales);
	if (r) {
		r = r == -EDOM ? -EINVAL : r;
		eng_refuse(err, 0, "%s: tensor %.200s %s", s.file, s.name,
			   r == -EINVAL ? "has values that are infinite or NaN"
					: "out of memory");
		goto free_both;
	}
	measure(p, &s, data, scales, report);
	r = write_all(fd, data, t->bytes, base + t->offset);
	r = r ?: write_all(fd, scales, t[1].bytes, base + t[1].offset);
	if (!r && p->target == KVK_INT4)
		r = write_all(fd, shape, sizeof(shape), base + t[2].offset);
free_both:
	free(data);
	free(scales);
	return r;
}

static void show_progress(const struct kvq_options *o, const struct kvq_plan *p, u64 done,
			  const char *name)
{
	if (o->progress)
		fprintf(stderr, "\r\033[K%3.0f %%  %.60s",
			100.0 * (double)done / (double)p->bytes, name);
}

static int write_tensor(const struct kvq_plan *p, const struct kvq_tensor *t, int fd,
			u64 base, struct kvq_report *report, struct eng_err *err)
{
	switch (t->kind) {
	case KVQ_COPY:
		return write_all(fd, t->source->data, t->bytes, base + t->offset);
	case KVQ_DATA:
		return write_matrix(p, t, fd, base, report, err);
	case KVQ_KV_SCALE:
		return write_all(fd, t->values, t->bytes, base + t->offset);
	default: /* written with its DATA */
		return 0;
	}
}

static int write_shard(const struct kvq_options *o, const struct kvq_plan *p, u32 shard,
		       int dirfd, const volatile int *stop, struct kvq_report *report,
		       struct eng_err *err)
{
	size_t header_bytes = 0;
	char *header = shard_header(p, shard, &header_bytes), name[64];
	int fd, r;

	kvq_shard_name(p, shard, name, sizeof(name));
	if (!header)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", name);
	fd = create_file(dirfd, name, err);
	if (fd < 0) {
		free(header);
		return fd;
	}
	r = write_all(fd, header, header_bytes, 0);
	for (size_t i = 0; i < p->nr && !r; i++) {
		if (p->list[i].shard != shard)
			continue;
		if (*stop)
			r = eng_refuse(err, -EINTR, "interrupted");
		r = r ?: write_tensor(p, &p->list[i], fd, header_bytes, report, err);
		report->bytes_out += p->list[i].bytes;
		show_progress(o, p, report->bytes_out, p->list[i].name);
	}
	free(header);
	return finish_file(fd, r, name, err);
}

int kvq_write_tensors(const struct kvq_options *o, const struct kvq_plan *p, int dirfd,
		      const volatile int *stop, struct kvq_report *ret,
		      struct eng_err *err)
{
	int r = 0;

	for (u32 i = 0; i < p->nr_shards && !r; i++)
		r = write_shard(o, p, i, dirfd, stop, ret, err);
	r = r ?: write_index(p, dirfd, err);
	if (o->progress)
		fprintf(stderr, "\r\033[K");
	return r;
}
