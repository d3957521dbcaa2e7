/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - limits, duplicate names and getters around cJSON (json.h).
 *
 * Pure functions of their arguments; any thread.
 */
#include "engine/model/json.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/mutant.h"

static int read_all(int fd, char *buf, size_t bytes)
{
	size_t done = 0;

	while (done < bytes) {
		ssize_t n = read(fd, buf + done, bytes - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -EIO;
		done += (size_t)n;
	}
	return 0;
}

int eng_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes,
		  struct eng_err *err)
{
	struct stat st;
	char *text;
	int fd, r;

	/* O_NONBLOCK: a FIFO in the directory must not hang us before fstat() says so */
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		r = -errno;
		return eng_refuse(err, r, "%s: %s", path, strerror(-r));
	}
	r = -EINVAL;
	if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
		eng_refuse(err, 0, "%s: not a regular file", path);
		goto close_fd;
	}
	r = -EFBIG;
	if ((u64)st.st_size > max_bytes) {
		eng_refuse(err, 0, "%s: %lld bytes, more than the limit of %zu", path,
			   (long long)st.st_size, max_bytes);
		goto close_fd;
	}
	r = -ENOMEM;
	text = malloc((size_t)st.st_size + 1);
	if (!text) {
		eng_refuse(err, 0, "%s: out of memory", path);
		goto close_fd;
	}
	r = read_all(fd, text, (size_t)st.st_size);
	if (r) {
		eng_refuse(err, 0, "%s: read: %s", path, strerror(-r));
		free(text);
		goto close_fd;
	}
	text[st.st_size] = 0;
	*ret_text = text;
	*ret_bytes = (size_t)st.st_size;
close_fd:
	close(fd);
	return r;
}

/* Deepest nesting of brackets outside strings. cJSON recurses, so this comes first. */
static u32 json_depth(const char *text, size_t bytes)
{
	u32 depth = 0, deepest = 0;
	bool in_string = false;

	for (size_t i = 0; i < bytes; i++) {
		char c = text[i];

		if (in_string) {
			if (c == '\\')
				i++;
			else if (c == '"')
				in_string = false;
		} else if (c == '"') {
			in_string = true;
		} else if (c == '{' || c == '[') {
			depth++;
			deepest = KV_MAX(deepest, depth);
		} else if ((c == '}' || c == ']') && depth) {
			depth--;
		}
	}
	return deepest;
}

static int name_cmp(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Recursion is bounded by ENG_JSON_DEPTH_MAX. */
static int check_names(const char *file, const cJSON *v, struct eng_err *err)
{
	const char **names;
	size_t nr = 0, i = 0;
	const cJSON *c;
	int r = 0;

	cJSON_ArrayForEach(c, v)
	{
		if (cJSON_IsObject(c) || cJSON_IsArray(c))
			r = check_names(file, c, err);
		if (r)
			return r;
		nr++;
	}
	if (!cJSON_IsObject(v) || nr < 2)
		return 0;
	names = malloc(nr * sizeof(*names));
	if (!names)
		return eng_refuse(err, -ENOMEM, "%s: out of memory", file);
	cJSON_ArrayForEach(c, v) names[i++] = c->string;
	qsort(names, nr, sizeof(*names), name_cmp);
	for (i = 1; i < nr && !r; i++)
		if (!strcmp(names[i - 1], names[i]) && !KV_MUTANT(json_duplicate))
			r = eng_refuse(err, -EINVAL,
				       "%s: the name \"%.200s\" appears twice", file,
				       names[i]);
	free(names);
	return r;
}

int eng_json_parse(const char *file, const char *text, size_t bytes, cJSON **ret,
		   struct eng_err *err)
{
	const char *end = text;
	u32 depth = json_depth(text, bytes);
	cJSON *v;
	int r;

	if (depth > ENG_JSON_DEPTH_MAX)
		return eng_refuse(err, -EINVAL,
				  "%s: JSON nested %u deep, the limit is %u", file, depth,
				  ENG_JSON_DEPTH_MAX);
	v = cJSON_ParseWithLengthOpts(text, bytes, &end, false);
	if (!v)
		return eng_refuse(err, -EINVAL, "%s: not JSON at byte %zu", file,
				  end ? (size_t)(end - text) : 0);
	while (end < text + bytes &&
	       (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t'))
		end++;
	r = -EINVAL;
	if (end != text + bytes) {
		eng_refuse(err, 0, "%s: text after the JSON value at byte %zu", file,
			   (size_t)(end - text));
		goto delete_v;
	}
	r = check_names(file, v, err);
	if (r)
		goto delete_v;
	*ret = v;
	return 0;
delete_v:
	cJSON_Delete(v);
	return r;
}

int eng_json_load(const char *path, cJSON **ret, struct eng_err *err)
{
	size_t bytes = 0;
	char *text = NULL;
	cJSON *v = NULL;
	int r;

	r = eng_file_read(path, ENG_JSON_FILE_MAX, &text, &bytes, err);
	if (r)
		return r;
	r = eng_json_parse(path, text, bytes, &v, err);
	free(text);
	if (r)
		return r;
	if (!cJSON_IsObject(v)) {
		cJSON_Delete(v);
		return eng_refuse(err, -EINVAL, "%s: not a JSON object", path);
	}
	*ret = v;
	return 0;
}

bool eng_json_int(const cJSON *v, u64 *ret)
{
	double d;

	if (!cJSON_IsNumber(v))
		return false;
	d = v->valuedouble;
	if (!(d >= 0 && d <= (double)ENG_JSON_INT_MAX) || d != floor(d))
		return false;
	*ret = (u64)d;
	return true;
}

const cJSON *eng_json_field(const struct eng_json *j, const char *field)
{
	return cJSON_GetObjectItemCaseSensitive(j->obj, field);
}

bool eng_json_absent(const struct eng_json *j, const char *field)
{
	const cJSON *v = eng_json_field(j, field);

	return !v || cJSON_IsNull(v);
}

int eng_json_refuse(const struct eng_json *j, const char *field, int code,
		    const char *want)
{
	const cJSON *v = eng_json_field(j, field);
	char *text;

	if (!v)
		return eng_refuse(j->err, code, "%s: %s%s is missing, expected %s",
				  j->file, j->path, field, want);
	text = cJSON_PrintUnformatted(v);
	eng_refuse(j->err, code, "%s: %s%s is %.80s, expected %s", j->file, j->path,
		   field, text ? text : "?", want);
	cJSON_free(text);
	return code;
}

int eng_json_u32(const struct eng_json *j, const char *field, u32 min, u32 max, u32 *ret)
{
	char want[64];
	u64 n;

	if (!eng_json_int(eng_json_field(j, field), &n) || n < min || n > max) {
		if (min == max)
			snprintf(want, sizeof(want), "%u (nothing else is built)", min);
		else
			snprintf(want, sizeof(want), "an integer in %u..%u", min, max);
		return eng_json_refuse(j, field, -EINVAL, want);
	}
	*ret = (u32)n;
	return 0;
}

int eng_json_double(const struct eng_json *j, const char *field, double min, double max,
		    double *ret)
{
	const cJSON *v = eng_json_field(j, field);
	char want[64];

	if (!cJSON_IsNumber(v) || !(v->valuedouble >= min && v->valuedouble <= max)) {
		snprintf(want, sizeof(want), "a number in %g..%g", min, max);
		return eng_json_refuse(j, field, -EINVAL, want);
	}
	*ret = v->valuedouble;
	return 0;
}

int eng_json_bool(const struct eng_json *j, const char *field, bool *ret)
{
	const cJSON *v = eng_json_field(j, field);

	if (!cJSON_IsBool(v))
		return eng_json_refuse(j, field, -EINVAL, "true or false");
	*ret = cJSON_IsTrue(v);
	return 0;
}

int eng_json_str(const struct eng_json *j, const char *field, const char **ret)
{
	const cJSON *v = eng_json_field(j, field);

	if (!cJSON_IsString(v))
		return eng_json_refuse(j, field, -EINVAL, "a string");
	*ret = v->valuestring;
	return 0;
}

int eng_json_u32_or(const struct eng_json *j, const char *field, u32 min, u32 max,
		    u32 dflt, u32 *ret)
{
	if (!eng_json_absent(j, field))
		return eng_json_u32(j, field, min, max, ret);
	*ret = dflt;
	return 0;
}

int eng_json_double_or(const struct eng_json *j, const char *field, double min,
		       double max, double dflt, double *ret)
{
	if (!eng_json_absent(j, field))
		return eng_json_double(j, field, min, max, ret);
	*ret = dflt;
	return 0;
}

int eng_json_bool_or(const struct eng_json *j, const char *field, bool dflt, bool *ret)
{
	if (!eng_json_absent(j, field))
		return eng_json_bool(j, field, ret);
	*ret = dflt;
	return 0;
}

/* @text up to its first NUL as cJSON writes it, without the quotes. Return: 0; -ENOMEM. */
static int put_quoted(FILE *f, const char *text)
{
	cJSON *v = cJSON_CreateStringReference(text);
	char *quoted = v ? cJSON_PrintUnformatted(v) : NULL;

	cJSON_Delete(v);
	if (!quoted)
		return -ENOMEM;
	fwrite(quoted + 1, 1, strlen(quoted) - 2, f);
	cJSON_free(quoted);
	return 0;
}

/* @copy: @bytes of text and a NUL behind them. Return: a malloc'd JSON string, or NULL. */
static char *quote(const char *copy, size_t bytes)
{
	char *raw = NULL;
	size_t size, at = 0;
	FILE *f = open_memstream(&raw, &size);
	int r = f ? 0 : -ENOMEM;

	if (f)
		fputc('"', f);
	while (!r) {
		r = put_quoted(f, copy + at);
		at += strlen(copy + at);
		if (r || at == bytes)
			break;
		fputs("\\u0000", f);
		at++;
	}
	if (f && !r)
		fputc('"', f);
	if (f && (ferror(f) | fclose(f)))
		r = -ENOMEM;
	if (!r)
		return raw;
	free(raw);
	return NULL;
}

bool eng_json_add_text(cJSON *obj, const char *field, const char *text, size_t bytes)
{
	char *copy = malloc(bytes + 1), *raw = NULL;
	bool ok = false;

	if (!copy)
		return false;
	memcpy(copy, text, bytes);
	copy[bytes] = 0;
	if (!memchr(copy, 0, bytes)) {
		ok = cJSON_AddStringToObject(obj, field, copy);
	} else {
		raw = quote(copy, bytes);
		ok = raw && cJSON_AddRawToObject(obj, field, raw);
	}
	free(raw);
	free(copy);
	return ok;
}

int eng_json_only_str(const struct eng_json *j, const char *field, const char *only)
{
	const cJSON *v = eng_json_field(j, field);
	char want[64];

	if (eng_json_absent(j, field) ||
	    (cJSON_IsString(v) && !strcmp(v->valuestring, only)))
		return 0;
	snprintf(want, sizeof(want), "\"%s\" (nothing else is built)", only);
	return eng_json_refuse(j, field, -ENOTSUP, want);
}
