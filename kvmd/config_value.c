/* SPDX-License-Identifier: Apache-2.0 */
/* config_value.c - see config_value.h: how an error is worded, what a scalar may be. */
#include "kvmd/config_value.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define VALUE_BYTES 48

/* ------------------------------------------------------------------- errors */

static void value_text(const cJSON *item, char *out)
{
	char *text = item ? cJSON_PrintUnformatted(item) : NULL;

	if (!text) {
		out[0] = 0;
		return;
	}
	if (strlen(text) >= VALUE_BYTES)
		strcpy(text + VALUE_BYTES - 4, "...");
	strcpy(out, text);
	cJSON_free(text);
}

/* "line N: path: value: why" at the parser's path. Always -EINVAL. */
int cfg_fail(struct cfg_parser *p, const cJSON *item, const char *fmt, ...)
{
	char path[80], value[VALUE_BYTES], why[100];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	json_path_text(&p->path, path, sizeof(path));
	value_text(item, value);
	snprintf(p->error, KVD_CONFIG_ERROR_BYTES, "line %u: %s%s%s: %s",
		 json_path_line(p->text, p->bytes, &p->path), path[0] ? path : "(root)",
		 value[0] ? ": " : "", value, why);
	return -EINVAL;
}

int cfg_fail_at(struct cfg_parser *p, const char *key, const cJSON *item, const char *why)
{
	json_path_push_key(&p->path, key);
	return cfg_fail(p, item, "%s", why);
}

/* Every field known and there once. @known: NULL-terminated */
int cfg_check_fields(struct cfg_parser *p, const cJSON *object, const char *const *known)
{
	const cJSON *item, *other;
	size_t i;

	if (!cJSON_IsObject(object))
		return cfg_fail(p, object, "must be an object");
	cJSON_ArrayForEach(item, object)
	{
		for (i = 0; known[i] && strcmp(known[i], item->string); i++)
			;
		if (!known[i])
			return cfg_fail_at(p, item->string, item, "unknown field");
		for (other = object->child; other != item; other = other->next) {
			if (strcmp(other->string, item->string))
				continue;
			p->path.last_occurrence = true;
			return cfg_fail_at(p, item->string, item, "field given twice");
		}
	}
	return 0;
}

int cfg_each_field(struct cfg_parser *p, const cJSON *object, const char *const *known,
		   int (*field)(struct cfg_parser *p, const cJSON *item))
{
	const cJSON *item;
	int r = cfg_check_fields(p, object, known);

	if (r)
		return r;
	cJSON_ArrayForEach(item, object)
	{
		json_path_push_key(&p->path, item->string);
		r = field(p, item);
		if (r)
			return r;
		json_path_pop(&p->path);
	}
	return 0;
}

/* ------------------------------------------------------------------ scalars */

int cfg_get_size(struct cfg_parser *p, const cJSON *item, u64 *ret)
{
	if (cJSON_IsNumber(item)) {
		double d = item->valuedouble;

		/* Above 2^53 a JSON number is no exact integer any more. */
		if (!(d >= 0) || d != floor(d) || d > 9007199254740992.0)
			return cfg_fail(p, item,
					"not a whole number of bytes up to 2^53");
		*ret = (u64)d;
		return 0;
	}
	if (!cJSON_IsString(item) || kvd_size_parse(item->valuestring, ret))
		return cfg_fail(p, item,
				"not a size (a number of bytes or like \"4GiB\")");
	return 0;
}

int cfg_get_uint(struct cfg_parser *p, const cJSON *item, u32 min, u32 max, u32 *ret)
{
	double d = item->valuedouble;

	if (!cJSON_IsNumber(item) || d != floor(d) || !(d >= min && d <= max))
		return cfg_fail(p, item, "must be a whole number from %u to %u", min,
				max);
	*ret = (u32)d;
	return 0;
}

int cfg_get_name(struct cfg_parser *p, const cJSON *item, char *ret)
{
	size_t i, n;

	if (!cJSON_IsString(item))
		return cfg_fail(p, item, "must be a string");
	n = strlen(item->valuestring);
	if (n == 0 || n >= KV_NAME_BYTES)
		return cfg_fail(p, item, "a name has 1 to %u characters",
				KV_NAME_BYTES - 1);
	for (i = 0; i < n; i++)
		if (!isalnum((unsigned char)item->valuestring[i]) &&
		    !strchr("._-", item->valuestring[i]))
			return cfg_fail(p, item,
					"a name is letters, digits, '.', '_', '-'");
	memcpy(ret, item->valuestring, n + 1);
	return 0;
}

int cfg_get_choice(struct cfg_parser *p, const cJSON *item, const char *const *names,
		   u32 nr, u32 *ret)
{
	u32 i;

	for (i = 0; i < nr; i++) {
		if (cJSON_IsString(item) && !strcmp(item->valuestring, names[i])) {
			*ret = i;
			return 0;
		}
	}
	if (nr == 3)
		return cfg_fail(p, item, "must be \"%s\", \"%s\" or \"%s\"", names[0],
				names[1], names[2]);
	return cfg_fail(p, item, "must be \"%s\" or \"%s\"", names[0], names[1]);
}
