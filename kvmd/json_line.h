/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json_line.h - where in a JSON text does a field stand?
 *
 * Used only to word an error, on text that cJSON has already accepted.
 */
#ifndef KVD_JSON_LINE_H
#define KVD_JSON_LINE_H

#include <stdbool.h>

#include "base/util.h"

#define JSON_PATH_MAX 8

/**
 * struct json_path - a field's place below the root
 * @last_occurrence: the last component is given more than once: the last one is meant
 */
struct json_path {
	u32 depth;
	bool last_occurrence;
	struct {
		const char *key; /* borrowed; NULL: an array index */
		int index;
	} parts[JSON_PATH_MAX];
};

/** json_path_push_key() - go down into a field */
void json_path_push_key(struct json_path *path, const char *key);

/** json_path_push_index() - go down into an array element */
void json_path_push_index(struct json_path *path, int index);

/** json_path_pop() - go up */
void json_path_pop(struct json_path *path);

/** json_path_text() - "tenants[1].gpus[0].max" */
void json_path_text(const struct json_path *path, char *out, size_t out_bytes);

/** json_path_line() - line, from 1, where the path's value (or its deepest known part)
 * starts */
u32 json_path_line(const char *text, size_t bytes, const struct json_path *path);

/** json_offset_line() - line, from 1, of a byte offset */
u32 json_offset_line(const char *text, size_t bytes, size_t offset);

#endif
