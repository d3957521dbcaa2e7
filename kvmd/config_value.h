/* SPDX-License-Identifier: Apache-2.0 */
/* config_value.h - shared by config_parse.c and config_value.c only: errors and scalars.
 */
#ifndef KVD_CONFIG_VALUE_H
#define KVD_CONFIG_VALUE_H

#include <cjson/cJSON.h>

#include "kvmd/config.h"
#include "kvmd/json_line.h"

/**
 * struct cfg_parser - a policy being read
 * @text, @bytes: the file
 * @config: filled as far as it goes
 * @error: KVD_CONFIG_ERROR_BYTES
 * @path: of the field being read
 */
struct cfg_parser {
	const char *text;
	size_t bytes;
	struct kvd_config *config;
	char *error;
	struct json_path path;
};

/** cfg_fail() - "line N: path: value: why" at the parser's path. Return: -EINVAL */
int cfg_fail(struct cfg_parser *p, const cJSON *item, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/** cfg_fail_at() - the same at field @key below the path */
int cfg_fail_at(struct cfg_parser *p, const char *key, const cJSON *item,
		const char *why);

/** cfg_check_fields() - an object whose fields are all in @known (NULL-terminated), each
 * once */
int cfg_check_fields(struct cfg_parser *p, const cJSON *object, const char *const *known);

/** cfg_each_field() - cfg_check_fields(), then @field for each with the path at it. Return:
 * 0; what the first @field that fails answers */
int cfg_each_field(struct cfg_parser *p, const cJSON *object, const char *const *known,
		   int (*field)(struct cfg_parser *p, const cJSON *item));

/** cfg_get_size() - bytes: a whole number or text like "4GiB" */
int cfg_get_size(struct cfg_parser *p, const cJSON *item, u64 *ret);

/** cfg_get_uint() - a whole number in [@min, @max] */
int cfg_get_uint(struct cfg_parser *p, const cJSON *item, u32 min, u32 max, u32 *ret);

/** cfg_get_name() - 1..63 of letters, digits, '.', '_', '-'; @ret: [KV_NAME_BYTES] */
int cfg_get_name(struct cfg_parser *p, const cJSON *item, char *ret);

/** cfg_get_choice() - index of a string in @names[@nr], nr 2 or 3 */
int cfg_get_choice(struct cfg_parser *p, const cJSON *item, const char *const *names,
		   u32 nr, u32 *ret);

/* config_tiers.c: "tiers", a tenant's "tiers", and sums over both. Return: 0; -EINVAL */
int cfg_parse_tiers(struct cfg_parser *p, const cJSON *object);
int cfg_parse_tenant_tiers(struct cfg_parser *p, const cJSON *array,
			   struct kvd_config_tenant *tenant);
int cfg_tiers_sums(struct cfg_parser *p);

#endif
