/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.c - open and check *.safetensors files and their index (safetensors.h).
 *
 * Order of checks matters: the header length is compared with the limit and the file
 * before anything is allocated or mapped, sizes are multiplied with overflow checks, and
 * spans are compared with shapes before a pointer is made. Any thread; a set belongs to
 * one.
 */
#include "engine/model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/mutant.h"
#include "engine/model/json.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define TENSORS_MAX (1u << 22)

struct eng_shard {
	char *path;
	u8 *map;
	size_t map_bytes;
	u64 data_off;
};

static const struct dtype_info {
	const char *name;
	u32 dtype;
	u32 bytes;
} dtypes[] = {
	{"F32", ENG_ST_F32, 4},	   {"F16", ENG_ST_F16, 2},
	{"BF16", ENG_ST_BF16, 2},  {"F8_E4M3", ENG_ST_E4M3, 1},
	{"I32", ENG_ST_I32, 4},	   {"I64", ENG_ST_I64, 8},
	{"F64", ENG_ST_OTHER, 8},  {"I16", ENG_ST_OTHER, 2},
	{"I8", ENG_ST_OTHER, 1},   {"U8", ENG_ST_OTHER, 1},
	{"BOOL", ENG_ST_OTHER, 1}, {"F8_E5M2", ENG_ST_OTHER, 1},
	{"U16", ENG_ST_OTHER, 2},  {"U32", ENG_ST_OTHER, 4},
	{"U64", ENG_ST_OTHER, 8},
};

const char *eng_st_dtype_name(u32 dtype)
{
	for (size_t i = 0; i < KV_ARRAY_SIZE(dtypes); i++)
		if (dtypes[i].dtype == dtype && dtype != ENG_ST_OTHER)
			return dtypes[i].name;
	return "other";
}

u32 eng_st_dtype_bytes(u32 dtype)
{
	for (size_t i = 0; i < KV_ARRAY_SIZE(dtypes); i++)
		if (dtypes[i].dtype == dtype && dtype != ENG_ST_OTHER)
			return dtypes[i].bytes;
	return 0;
}

bool eng_tensor_is(const struct eng_tensor *t, u32 dtype, u64 a, u64 b)
{
	return t->dtype == dtype && t->nr_dims == (b ? 2 : 1) && t->shape[0] == a &&
	       (!b || t->shape[1] == b);
}

const char *eng_tensor_describe(const struct eng_tensor *t, char *buf, size_t size)
{
	int n = snprintf(buf, size, "%s [", eng_st_dtype_name(t->dtype));

	for (u32 i = 0; i < t->nr_dims && (size_t)n < size; i++)
		n += snprintf(buf + n, size - (size_t)n, "%s%llu", i ? "," : "",
			      (unsigned long long)t->shape[i]);
	if ((size_t)n < size)
		snprintf(buf + n, size - (size_t)n, "]");
	return buf;
}

/* ---------------------------------------------------------- one header entry */

static const struct dtype_info *dtype_find(const cJSON *v)
{
	if (cJSON_IsString(v))
		for (size_t i = 0; i < KV_ARRAY_SIZE(dtypes); i++)
			if (!strcmp(v->valuestring, dtypes[i].name))
				return &dtypes[i];
	return NULL;
}

/* shape x dtype in bytes, or -EOVERFLOW */
static int parse_shape(const cJSON *shape, u32 elem_bytes, struct eng_tensor *t,
		       u64 *ret_bytes)
{
	u64 bytes = elem_bytes;
	const cJSON *d;

	if (!cJSON_IsArray(shape))
		return -EINVAL;
	t->nr_dims = 0;
	cJSON_ArrayForEach(d, shape)
	{
		if (t->nr_dims == ENG_ST_DIMS_MAX ||
		    !eng_json_int(d, &t->shape[t->nr_dims]))
			return -EINVAL;
		if (__builtin_mul_overflow(bytes, t->shape[t->nr_dims], &bytes) &&
		    !KV_MUTANT(st_overflow))
			return -EOVERFLOW;
		t->nr_dims++;
	}
	*ret_bytes = bytes;
	return 0;
}

static int parse_entry(const struct eng_shard *s, const cJSON *v, struct eng_tensor *t,
		       struct eng_err *err)
{
	const cJSON *shape = cJSON_GetObjectItemCaseSensitive(v, "shape");
	const cJSON *span = cJSON_GetObjectItemCaseSensitive(v, "data_offsets");
	const struct dtype_info *dt =
		dtype_find(cJSON_GetObjectItemCaseSensitive(v, "dtype"));
	u64 data_bytes = s->map_bytes - s->data_off, want = 0, begin = 0, end = 0;
	const char *name = v->string;
	int r;

	if (!cJSON_IsObject(v) || cJSON_GetArraySize(v) != 3 || !shape || !span)
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: entry is not {dtype, shape, data_offsets}",
			s->path, name);
	if (!dt)
		return eng_refuse(err, -EINVAL, "%s: tensor %.200s: unknown dtype",
				  s->path, name);
	r = parse_shape(shape, dt->bytes, t, &want);
	if (r)
		return eng_refuse(err, -EINVAL, "%s: tensor %.200s: %s", s->path, name,
				  r == -EOVERFLOW ? "shape's product overflows 64 bits"
						  : "shape is not up to 8 whole numbers");
	if (cJSON_GetArraySize(span) != 2 ||
	    !eng_json_int(cJSON_GetArrayItem(span, 0), &begin) ||
	    !eng_json_int(cJSON_GetArrayItem(span, 1), &end))
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: data_offsets is not two whole numbers",
			s->path, name);
	if (end < begin)
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: data ends at %llu before it begins at %llu",
			s->path, name, (unsigned long long)end,
			(unsigned long long)begin);
	if (end > data_bytes)
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: data ends at %llu, but the file has only %llu bytes "
			"of data (truncated?)",
			s->path, name, (unsigned long long)end,
			(unsigned long long)data_bytes);
	if (end - begin != want && !KV_MUTANT(st_span))
		return eng_refuse(
			err, -EINVAL,
			"%s: tensor %.200s: shape and dtype need %llu bytes, data_offsets "
			"span %llu",
			s->path, name, (unsigned long long)want,
			(unsigned long long)(end - begin));
	t->dtype = dt->dtype;
	t->file = s->path;
	t->data = s->map + s->data_off + begin;
	t->bytes = end - begin;
	t->name = strdup(name);
	return t->name ? 0 : eng_refuse(err, -ENOMEM, "%s: out of memory", s->path);
}

/* ------------------------------------------------------------------ one file */

static int by_place(const void *a, const void *b)
{
	const struct eng_tensor *x = a, *y = b;

	if (x->data != y->data)
		return x->data < y->data ? -1 : 1;
	return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
	const struct eng_tensor *x = a, *y = b;

	return strcmp(x->name, y->name);
}

/* The spans of @list, one file's tensors, tile its data. Sorts the list. */
static int check_tiling(const struct eng_shard *s, struct eng_tensor *list, size_t nr,
			struct eng_err *err)
{
	const u8 *at = s->map + s->data_off, *end = s->map + s->map_bytes;

	qsort(list, nr, sizeof(*list), by_place);
	for (size_t i = 0; i < nr; i++) {
		if (list[i].data < at && !KV_MUTANT(st_overlap))
			return eng_refuse(
				err, -EINVAL,
				"%s: tensor %.200s: data overlaps tensor %.150s", s->path,
				list[i].name, list[i - 1].name);
		if (list[i].data > at)
			return eng_refuse(
				err, -EINVAL,
				"%s: tensor %.200s: hole of %llu bytes before its data",
				s->path, list[i].name,
				(unsigned long long)(list[i].data - at));
		at = list[i].data + list[i].bytes;
	}
	if (at < end)
		return eng_refuse(err, -EINVAL,
				  "%s: %llu bytes after the last tensor belong to none",
				  s->path, (unsigned long long)(end - at));
	return 0;
}

/* Grows ts->list by the tensors of @s. */
static int parse_header(struct eng_tensors *ts, struct eng_shard *s, struct eng_err *err)
{
	const char *text = (const char *)s->map + 8;
	struct eng_tensor *list;
	size_t nr = ts->nr, nr_new;
	cJSON *root = NULL;
	const cJSON *v;
	int r;

	if (text[0] != '{')
		return eng_refuse(err, -EINVAL, "%s: header does not begin with '{'",
				  s->path);
	r = eng_json_parse(s->path, text, s->data_off - 8, &root, err);
	if (r)
		return r;
	r = -EINVAL;
	nr_new = (size_t)cJSON_GetArraySize(root);
	if (!cJSON_IsObject(root) || nr + nr_new > TENSORS_MAX) {
		eng_refuse(err, 0, "%s: header is not an object of at most %u tensors",
			   s->path, TENSORS_MAX);
		goto delete_root;
	}
	r = -ENOMEM;
	list = realloc(ts->list, (nr + nr_new + 1) * sizeof(*list));
	if (!list) {
		eng_refuse(err, 0, "%s: out of memory", s->path);
		goto delete_root;
	}
	ts->list = list;
	r = 0;
	cJSON_ArrayForEach(v, root)
	{
		if (!strcmp(v->string, "__metadata__"))
			continue;
		r = parse_entry(s, v, &ts->list[ts->nr], err);
		if (r)
			goto delete_root;
		ts->nr++;
	}
	r = check_tiling(s, ts->list + nr, ts->nr - nr, err);
delete_root:
	cJSON_Delete(root);
	return r;
}

/* The header length against limit and file size; reads eight bytes, allocates nothing. */
static int check_header_length(struct eng_shard *s, int fd, struct eng_err *err)
{
	struct stat st;
	u8 raw[8];
	u64 n = 0;

	if (fstat(fd, &st) || !S_ISREG(st.st_mode))
		return eng_refuse(err, -EINVAL, "%s: not a regular file", s->path);
	if (st.st_size < 8 || pread(fd, raw, 8, 0) != 8)
		return eng_refuse(err, -EINVAL,
				  "%s: %lld bytes, too short for a header length",
				  s->path, (long long)st.st_size);
	for (u32 i = 0; i < 8; i++)
		n |= (u64)raw[i] << (8 * i);
	if (n > ENG_ST_HEADER_MAX && !KV_MUTANT(st_header_limit))
		return eng_refuse(
			err, -EFBIG,
			"%s: header length %llu is over the limit of %llu bytes", s->path,
			(unsigned long long)n, ENG_ST_HEADER_MAX);
	if (n < 2 || n > (u64)st.st_size - 8)
		return eng_refuse(
			err, -EINVAL,
			"%s: header length %llu, but %llu bytes follow (truncated?)",
			s->path, (unsigned long long)n,
			(unsigned long long)st.st_size - 8);
	s->map_bytes = (size_t)st.st_size;
	s->data_off = 8 + n;
	return 0;
}

/* On failure the shard's path stays with @ts, which the caller closes. */
static int shard_add(struct eng_tensors *ts, const char *path, struct eng_err *err)
{
	struct eng_shard *s = &ts->shards[ts->nr_shards];
	int fd, r;

	*s = (struct eng_shard){.path = strdup(path)};
	if (!s->path)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", path);
	ts->nr_shards++;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		r = -errno;
		return eng_refuse(err, r, "%s: shard: %s", path, strerror(-r));
	}
	r = check_header_length(s, fd, err);
	if (r)
		goto close_fd;
	s->map = mmap(NULL, s->map_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
	if (s->map == MAP_FAILED) {
		r = -errno;
		s->map = NULL;
		eng_refuse(err, 0, "%s: map: %s", path, strerror(-r));
		goto close_fd;
	}
	r = parse_header(ts, s, err);
close_fd:
	close(fd);
	return r;
}

/* After all files: sort by name, a name in two files is refused. */
static int finish(struct eng_tensors *ts, const char *path, struct eng_err *err)
{
	qsort(ts->list, ts->nr, sizeof(*ts->list), by_name);
	for (size_t i = 1; i < ts->nr; i++)
		if (!strcmp(ts->list[i - 1].name, ts->list[i].name))
			return eng_refuse(
				err, -EINVAL, "%s: tensor %.200s is also in %.150s",
				ts->list[i].file, ts->list[i].name, ts->list[i - 1].file);
	ts->used = calloc(ts->nr + 1, 1);
	ts->path = strdup(path);
	return ts->used && ts->path ? 0 : eng_refuse(err, -ENOMEM, "out of memory");
}

int eng_shard_open(const char *path, struct eng_tensors *ret, struct eng_err *err)
{
	struct eng_tensors ts = {0};
	int r;

	ts.shards = calloc(1, sizeof(*ts.shards));
	if (!ts.shards)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", path);
	r = shard_add(&ts, path, err);
	r = r ?: finish(&ts, path, err);
	if (r)
		eng_tensors_close(&ts);
	else
		*ret = ts;
	return r;
}

/* ----------------------------------------------------------------- the index */

static int str_cmp(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct file names of a weight_map; *ret_files is malloc'd and borrows the
 * strings. */
static int index_files(const char *path, const cJSON *map, const char ***ret_files,
		       size_t *ret_nr, struct eng_err *err)
{
	size_t nr = 0, nr_files = 0, nr_all = (size_t)cJSON_GetArraySize(map);
	const char **files;
	const cJSON *v;

	if (!cJSON_IsObject(map) || !nr_all)
		return eng_refuse(err, -EINVAL,
				  "%s: weight_map is missing, empty or not an object",
				  path);
	files = malloc(nr_all * sizeof(*files));
	if (!files)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", path);
	cJSON_ArrayForEach(v, map)
	{
		/* a name, not a way out of the directory */
		if (!cJSON_IsString(v) || !v->valuestring[0] ||
		    strchr(v->valuestring, '/') || v->valuestring[0] == '.') {
			eng_refuse(err, 0,
				   "%s: tensor %.200s: shard is not a plain file name",
				   path, v->string);
			free(files);
			return -EINVAL;
		}
		files[nr++] = v->valuestring;
	}
	qsort(files, nr, sizeof(*files), str_cmp);
	for (size_t i = 0; i < nr; i++)
		if (!nr_files || strcmp(files[nr_files - 1], files[i]))
			files[nr_files++] = files[i];
	*ret_files = files;
	*ret_nr = nr_files;
	return 0;
}

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

/* Index and files name the same tensors in the same places. */
static int index_compare(const char *path, const cJSON *map, const struct eng_tensors *ts,
			 struct eng_err *err)
{
	size_t nr_map = (size_t)cJSON_GetArraySize(map);
	u8 *seen = calloc(ts->nr + 1, 1);
	const cJSON *v;
	int r = 0;

	if (!seen)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", path);
	cJSON_ArrayForEach(v, map)
	{
		const struct eng_tensor *t = eng_tensors_find(ts, v->string);

		if (!t || strcmp(base_name(t->file), v->valuestring)) {
			r = eng_refuse(
				err, -EINVAL,
				"%s: tensor %.200s: index says it is in %.100s, which lacks it",
				path, v->string, v->valuestring);
			goto free_seen;
		}
		seen[t - ts->list] = 1;
	}
	for (size_t i = 0; i < ts->nr && nr_map != ts->nr; i++) {
		if (!seen[i]) {
			r = eng_refuse(err, -EINVAL, "%s: tensor %.200s: not in %s",
				       ts->list[i].file, ts->list[i].name, INDEX_NAME);
			goto free_seen;
		}
	}
free_seen:
	free(seen);
	return r;
}

static int open_index(const char *dir, const char *path, struct eng_tensors *ts,
		      struct eng_err *err)
{
	const char **files = NULL;
	size_t nr_files = 0;
	cJSON *root = NULL;
	const cJSON *map;
	char shard[4096];
	int r;

	r = eng_json_load(path, &root, err);
	if (r)
		return r;
	map = cJSON_GetObjectItemCaseSensitive(root, "weight_map");
	r = index_files(path, map, &files, &nr_files, err);
	if (r)
		goto delete_root;
	r = -EINVAL;
	if (nr_files > ENG_ST_SHARDS_MAX) {
		eng_refuse(err, 0, "%s: %zu shards, the limit is %u", path, nr_files,
			   ENG_ST_SHARDS_MAX);
		goto free_files;
	}
	r = -ENOMEM;
	ts->shards = calloc(nr_files, sizeof(*ts->shards));
	if (!ts->shards) {
		eng_refuse(err, 0, "%s: out of memory", path);
		goto free_files;
	}
	r = 0;
	for (size_t i = 0; i < nr_files && !r; i++) {
		if ((size_t)snprintf(shard, sizeof(shard), "%s/%s", dir, files[i]) >=
		    sizeof(shard))
			r = eng_refuse(err, -ENAMETOOLONG, "%s: path too long", path);
		r = r ?: shard_add(ts, shard, err);
	}
	r = r ?: finish(ts, path, err);
	r = r ?: index_compare(path, map, ts, err);
free_files:
	free(files);
delete_root:
	cJSON_Delete(root);
	return r;
}

int eng_tensors_open(const char *dir, struct eng_tensors *ret, struct eng_err *err)
{
	struct eng_tensors ts = {0};
	char path[4096];
	int r;

	if ((size_t)snprintf(path, sizeof(path), "%s/%s", dir, INDEX_NAME) >=
	    sizeof(path))
		return eng_refuse(err, -ENAMETOOLONG, "model directory: path too long");
	if (access(path, F_OK)) {
		snprintf(path, sizeof(path), "%s/%s", dir, SINGLE_NAME);
		if (access(path, F_OK))
			return eng_refuse(err, -ENOENT, "%s: neither %s nor %s", dir,
					  INDEX_NAME, SINGLE_NAME);
		return eng_shard_open(path, ret, err);
	}
	r = open_index(dir, path, &ts, err);
	if (r)
		eng_tensors_close(&ts);
	else
		*ret = ts;
	return r;
}

void eng_tensors_close(struct eng_tensors *ts)
{
	for (size_t i = 0; i < ts->nr; i++)
		free(ts->list[i].name);
	for (u32 i = 0; i < ts->nr_shards; i++) {
		if (ts->shards[i].map)
			munmap(ts->shards[i].map, ts->shards[i].map_bytes);
		free(ts->shards[i].path);
	}
	free(ts->list);
	free(ts->shards);
	free(ts->used);
	free(ts->path);
	*ts = (struct eng_tensors){0};
}

const struct eng_tensor *eng_tensors_find(const struct eng_tensors *ts, const char *name)
{
	struct eng_tensor key = {.name = (char *)(uintptr_t)name};

	return ts->nr ? bsearch(&key, ts->list, ts->nr, sizeof(*ts->list), by_name)
		      : NULL;
}

const struct eng_tensor *eng_tensors_use(struct eng_tensors *ts, const char *name)
{
	const struct eng_tensor *t = eng_tensors_find(ts, name);

	if (t)
		ts->used[t - ts->list] = 1;
	return t;
}
