/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json_line.c - see json_line.h. A scanner that walks down a path and skips everything
 * else.
 */
#include "kvmd/json_line.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

struct scan {
	const char *text;
	size_t bytes;
	size_t at;
};

void json_path_push_key(struct json_path *path, const char *key)
{
	kv_assert(path->depth < JSON_PATH_MAX);
	path->parts[path->depth].key = key;
	path->parts[path->depth++].index = 0;
}

void json_path_push_index(struct json_path *path, int index)
{
	kv_assert(path->depth < JSON_PATH_MAX);
	path->parts[path->depth].key = NULL;
	path->parts[path->depth++].index = index;
}

void json_path_pop(struct json_path *path)
{
	kv_assert(path->depth > 0);
	path->depth--;
}

void json_path_text(const struct json_path *path, char *out, size_t out_bytes)
{
	size_t n = 0;
	u32 i;

	out[0] = 0;
	for (i = 0; i < path->depth && n < out_bytes; i++) {
		if (path->parts[i].key)
			n += (size_t)snprintf(out + n, out_bytes - n, "%s%.40s",
					      i ? "." : "", path->parts[i].key);
		else
			n += (size_t)snprintf(out + n, out_bytes - n, "[%d]",
					      path->parts[i].index);
	}
}

u32 json_offset_line(const char *text, size_t bytes, size_t offset)
{
	u32 line = 1;
	size_t i;

	for (i = 0; i < bytes && i < offset; i++)
		line += text[i] == '\n';
	return line;
}

static char peek(struct scan *s)
{
	while (s->at < s->bytes && isspace((unsigned char)s->text[s->at]))
		s->at++;
	return s->at < s->bytes ? s->text[s->at] : 0;
}

/* At a quote: skips the string; answers whether it is @want (keys have no escapes here).
 */
static bool skip_string(struct scan *s, const char *want)
{
	size_t start = ++s->at;
	bool same;

	while (s->at < s->bytes && s->text[s->at] != '"')
		s->at += s->text[s->at] == '\\' ? 2 : 1;
	if (s->at > s->bytes)
		s->at = s->bytes;
	same = want && strlen(want) == s->at - start &&
	       !memcmp(want, s->text + start, s->at - start);
	if (s->at < s->bytes)
		s->at++;
	return same;
}

/* Skips one value of any kind. */
static void skip_value(struct scan *s)
{
	u32 depth = 0;

	do {
		char c = peek(s);

		if (c == 0)
			return;
		if (c == '"') {
			skip_string(s, NULL);
			continue;
		}
		if (c == '{' || c == '[')
			depth++;
		if (c == '}' || c == ']')
			depth--;
		s->at++;
		if (depth == 0 && c != '}' && c != ']')
			while (s->at < s->bytes && !strchr(",]}", s->text[s->at]) &&
			       !isspace((unsigned char)s->text[s->at]))
				s->at++;
	} while (depth);
}

/* Inside an object: stands at the key's value afterwards. */
static bool enter_key(struct scan *s, const char *key, bool last)
{
	size_t found = 0;

	s->at++;
	while (peek(s) == '"') {
		size_t key_at = s->at;
		bool same = skip_string(s, key);

		if (peek(s) == ':')
			s->at++;
		if (same) {
			found = key_at + 1;
			if (!last)
				break;
		}
		skip_value(s);
		if (peek(s) == ',')
			s->at++;
	}
	if (!found)
		return false;
	if (last) {
		s->at = found - 1;
		skip_string(s, NULL);
		if (peek(s) == ':')
			s->at++;
	}
	peek(s);
	return true;
}

static bool enter_index(struct scan *s, int index)
{
	s->at++;
	for (; index > 0; index--) {
		skip_value(s);
		if (peek(s) != ',')
			return false;
		s->at++;
	}
	return peek(s) != ']' && peek(s) != 0;
}

u32 json_path_line(const char *text, size_t bytes, const struct json_path *path)
{
	struct scan s = {.text = text, .bytes = bytes};
	size_t known = 0;
	u32 i;

	peek(&s);
	known = s.at;
	for (i = 0; i < path->depth; i++) {
		const char *key = path->parts[i].key;
		bool last = path->last_occurrence && i == path->depth - 1;

		if (key && peek(&s) == '{') {
			if (!enter_key(&s, key, last))
				break;
		} else if (!key && peek(&s) == '[') {
			if (!enter_index(&s, path->parts[i].index))
				break;
		} else {
			break;
		}
		known = s.at;
	}
	return json_offset_line(text, bytes, known);
}
