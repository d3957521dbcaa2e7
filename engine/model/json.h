/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.h - JSON files of a model directory, read with suspicion.
 *
 * cJSON parses; this adds what it does not do: limits on size and depth before parsing,
 * duplicate names refused (cJSON keeps both and finds the first), nothing after the
 * value, and getters whose refusals name file, field and value.
 */
#ifndef ENG_MODEL_JSON_H
#define ENG_MODEL_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include "base/util.h"
#include "engine/model/err.h"

#define ENG_JSON_DEPTH_MAX 64u
#define ENG_JSON_FILE_MAX  (256u << 20)
/* Integers above this are not exact in a double, which is what cJSON keeps. */
#define ENG_JSON_INT_MAX   (1ull << 53)

/**
 * struct eng_json - one object and where it came from, for getters
 * @file: file name in messages
 * @path: "" or "rope_parameters." and the like
 * @obj: the object
 * @err: where refusals go
 */
struct eng_json {
	const char *file;
	const char *path;
	const cJSON *obj;
	struct eng_err *err;
};

/**
 * eng_file_read() - a whole regular file
 * @max_bytes: larger files are refused before anything is allocated
 * @ret_text: malloc'd, NUL-terminated
 *
 * Return: 0; -errno of open or read; -EFBIG; -EINVAL not a regular file.
 */
int eng_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes,
		  struct eng_err *err);

/**
 * eng_json_parse() - text to a tree
 * @file: name for messages
 * @ret: owner; cJSON_Delete()
 *
 * Return: 0; -EINVAL.
 */
int eng_json_parse(const char *file, const char *text, size_t bytes, cJSON **ret,
		   struct eng_err *err);

/** eng_json_load() - eng_file_read() and eng_json_parse(), refusing what is not an object
 */
int eng_json_load(const char *path, cJSON **ret, struct eng_err *err);

/** eng_json_int() - is @v an exact integer in 0 .. 2^53? */
bool eng_json_int(const cJSON *v, u64 *ret);

/* A field that is absent or null */
bool eng_json_absent(const struct eng_json *j, const char *field);
const cJSON *eng_json_field(const struct eng_json *j, const char *field);

/* Refuses @field with its value: "config.json: hidden_size is -1, expected <want>" */
int eng_json_refuse(const struct eng_json *j, const char *field, int code,
		    const char *want);

/* Required fields. Return: 0 or -EINVAL. */
int eng_json_u32(const struct eng_json *j, const char *field, u32 min, u32 max, u32 *ret);
int eng_json_double(const struct eng_json *j, const char *field, double min, double max,
		    double *ret);
int eng_json_bool(const struct eng_json *j, const char *field, bool *ret);
int eng_json_str(const struct eng_json *j, const char *field, const char **ret);

/* The same with a value for absent (or null) fields. */
int eng_json_u32_or(const struct eng_json *j, const char *field, u32 min, u32 max,
		    u32 dflt, u32 *ret);
int eng_json_double_or(const struct eng_json *j, const char *field, double min,
		       double max, double dflt, double *ret);
int eng_json_bool_or(const struct eng_json *j, const char *field, bool dflt, bool *ret);

/**
 * eng_json_add_text() - add a string field of text that a model wrote
 * @text, @bytes: UTF-8; may hold NUL, at which cJSON would end the string
 *
 * Return: false: out of memory.
 */
bool eng_json_add_text(cJSON *obj, const char *field, const char *text, size_t bytes);

/* The field must be absent, null or the string @only. Return: 0 or -ENOTSUP. */
int eng_json_only_str(const struct eng_json *j, const char *field, const char *only);

#endif
