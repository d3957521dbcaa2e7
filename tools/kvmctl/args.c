/* SPDX-License-Identifier: Apache-2.0 */
/*
 * args.c - the grammar: kvmctl [OPTION]... [VERB [ARGUMENT]...] [OPTION]...
 *
 * Options may stand anywhere. --bytes is a switch, except after `plan`, where it is the
 * memory to plan for.
 */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

int ctl_error(const struct ctl *ctl, int exit, const char *fmt, ...)
{
	char text[512], *json;
	cJSON *doc, *error;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (!ctl->args.json) {
		fprintf(stderr, "kvmctl: %s\n", text);
		return exit;
	}
	doc = cJSON_CreateObject();
	cJSON_AddStringToObject(doc, "schema", "kvmctl.error/1");
	error = cJSON_AddObjectToObject(doc, "error");
	cJSON_AddNumberToObject(error, "exit", exit);
	cJSON_AddStringToObject(error, "message", text);
	json = cJSON_PrintUnformatted(doc);
	fprintf(stderr, "%s\n", json ? json : "{}");
	cJSON_free(json);
	cJSON_Delete(doc);
	return exit;
}

int ctl_parse_size(const char *text, double *ret_bytes)
{
	static const struct {
		const char *name;
		double factor;
	} units[] = {
		{"", 1},
		{"B", 1},
		{"KB", 1e3},
		{"MB", 1e6},
		{"GB", 1e9},
		{"TB", 1e12},
		{"KiB", 1024.0},
		{"MiB", 1048576.0},
		{"GiB", 1073741824.0},
		{"TiB", 1099511627776.0},
	};
	char *end;
	double v;
	size_t i;

	if (!isdigit((unsigned char)*text))
		return -1;
	v = strtod(text, &end);
	while (*end == ' ')
		end++;
	for (i = 0; i < KV_ARRAY_SIZE(units); i++) {
		if (strcmp(units[i].name, end))
			continue;
		v *= units[i].factor;
		if (!isfinite(v) || v > 1e18)
			return -1;
		*ret_bytes = v;
		return 0;
	}
	return -1;
}

/* ------------------------------------------------------------------ options */

enum opt_kind { OPT_FLAG, OPT_TEXT, OPT_SECONDS, OPT_INTEGER, OPT_FIELDS, OPT_FORMAT };

struct opt {
	const char *name;
	char letter;
	enum opt_kind kind;
	size_t offset;
};

#define OPT(name, letter, kind, field)                               \
	{                                                            \
		name, letter, kind, offsetof(struct ctl_args, field) \
	}

static const struct opt opts[] = {
	OPT("json", 'j', OPT_FLAG, json),
	OPT("pretty", 'p', OPT_FLAG, pretty),
	OPT("quiet", 'q', OPT_FLAG, quiet),
	OPT("bytes", 0, OPT_FLAG, bytes),
	OPT("dry-run", 'n', OPT_FLAG, dry_run),
	OPT("yes", 'y', OPT_FLAG, yes),
	OPT("revoke", 0, OPT_FLAG, revoke),
	OPT("off", 0, OPT_FLAG, off),
	OPT("help", 'h', OPT_FLAG, help),
	OPT("version", 0, OPT_FLAG, version),
	OPT("socket", 0, OPT_TEXT, socket),
	OPT("state", 0, OPT_TEXT, state),
	OPT("model", 0, OPT_TEXT, model),
	OPT("min", 0, OPT_TEXT, min_size),
	OPT("high", 0, OPT_TEXT, high_size),
	OPT("max", 0, OPT_TEXT, max_size),
	OPT("preset", 0, OPT_TEXT, preset),
	OPT("bytes", 0, OPT_TEXT, kv_bytes), /* after plan */
	OPT("timeout", 0, OPT_SECONDS, timeout_s),
	OPT("watch", 'w', OPT_SECONDS, watch_s),
	OPT("pool", 0, OPT_INTEGER, pool),
	OPT("limit", 0, OPT_INTEGER, limit),
	OPT("tp", 0, OPT_INTEGER, tp),
	OPT("weight", 0, OPT_INTEGER, weight),
	OPT("revision", 0, OPT_INTEGER, revision),
	OPT("fields", 0, OPT_FIELDS, fields),
	OPT("format", 0, OPT_FORMAT, format),
};

static int usage(const struct ctl_args *args, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

static int usage(const struct ctl_args *args, const char *fmt, ...)
{
	struct ctl ctl = {.args = *args};
	char text[256];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	return ctl_error(&ctl, CTL_USAGE, "%s (see kvmctl help)", text);
}

static int set_format(struct ctl_args *args, const char *value)
{
	char copy[64], *save = NULL, *word;

	snprintf(copy, sizeof(copy), "%s", value);
	for (word = strtok_r(copy, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
		if (!strcmp(word, "table"))
			args->format = CTL_TABLE;
		else if (!strcmp(word, "csv"))
			args->format = CTL_CSV;
		else if (!strcmp(word, "noheader"))
			args->noheader = true;
		else if (!strcmp(word, "nounits"))
			args->nounits = true;
		else
			return usage(args,
				     "--format: \"%s\": table, csv, noheader, nounits",
				     word);
	}
	return 0;
}

static int set_fields(struct ctl_args *args, const char *value)
{
	char *save = NULL, *word;

	free(args->fields_text);
	args->nr_fields = 0;
	args->fields_text = strdup(value);
	for (word = strtok_r(args->fields_text, ",", &save); word;
	     word = strtok_r(NULL, ",", &save)) {
		if (args->nr_fields == CTL_FIELDS_MAX)
			return usage(args, "--fields: more than %d", CTL_FIELDS_MAX);
		args->fields[args->nr_fields++] = word;
	}
	return args->nr_fields ? 0 : usage(args, "--fields: names none");
}

static int set_value(struct ctl_args *args, const struct opt *o, const char *value)
{
	void *field = (char *)args + o->offset;
	char *end;

	switch (o->kind) {
	case OPT_TEXT:
		*(const char **)field = value;
		return 0;
	case OPT_SECONDS:
		*(double *)field = strtod(value, &end);
		if (end == value || *end || !(*(double *)field > 0) ||
		    *(double *)field > 86400)
			return usage(args, "--%s: \"%s\": seconds, more than 0", o->name,
				     value);
		return 0;
	case OPT_INTEGER:
		errno = 0;
		*(long *)field = strtol(value, &end, 10);
		if (end == value || *end || errno || *(long *)field < 0 ||
		    *(long *)field > 0xffffffffl)
			return usage(args, "--%s: \"%s\": not a whole number", o->name,
				     value);
		return 0;
	case OPT_FIELDS:
		return set_fields(args, value);
	case OPT_FORMAT:
		return set_format(args, value);
	case OPT_FLAG:
		break;
	}
	return usage(args, "--%s: takes no value", o->name);
}

static const struct opt *opt_find(const struct ctl_args *args, const char *name,
				  size_t len, char letter)
{
	bool plan = args->nr_words && !strcmp(args->words[0], "plan");
	size_t i;

	for (i = 0; i < KV_ARRAY_SIZE(opts); i++) {
		const struct opt *o = &opts[i];

		if (letter ? o->letter != letter
			   : strlen(o->name) != len || strncmp(o->name, name, len))
			continue;
		if (!strcmp(o->name, "bytes") && plan != (o->kind == OPT_TEXT))
			continue;
		return o;
	}
	return NULL;
}

/* One option at argv[*i]; steps over a value of its own. */
static int parse_option(struct ctl_args *args, char **argv, int argc, int *i)
{
	const char *arg = argv[*i], *value = NULL;
	const struct opt *o;
	size_t len;

	if (arg[1] == '-') {
		value = strchr(arg, '=');
		len = value ? (size_t)(value - arg - 2) : strlen(arg + 2);
		o = opt_find(args, arg + 2, len, 0);
		value = value ? value + 1 : NULL;
	} else {
		o = opt_find(args, NULL, 0, arg[1]);
		if (o && arg[2]) {
			if (o->kind == OPT_FLAG)
				return usage(args, "\"%s\": write switches one by one",
					     arg);
			value = arg + 2;
		}
	}
	if (!o)
		return usage(args, "\"%s\": unknown option", arg);
	if (o->kind == OPT_FLAG) {
		if (value)
			return usage(args, "--%s: takes no value", o->name);
		*((bool *)((char *)args + o->offset)) = true;
		return 0;
	}
	if (!value) {
		if (*i + 1 >= argc)
			return usage(args, "--%s: needs a value", o->name);
		value = argv[++*i];
	}
	return set_value(args, o, value);
}

int ctl_args_parse(int argc, char **argv, struct ctl_args *args)
{
	const char *env = getenv("KVMD_ADMIN_SOCKET");
	int i, r;

	memset(args, 0, sizeof(*args));
	args->socket = env && *env ? env : KVMD_ADMIN_SOCKET_DEFAULT;
	args->timeout_s = 5;
	args->pool = args->limit = args->weight = args->revision = -1;
	args->tp = 1;
	/* First of all: errors of the others are already said the way it asks for. */
	for (i = 1; i < argc; i++)
		args->json |= !strcmp(argv[i], "-j") || !strcmp(argv[i], "--json");
	for (i = 1; i < argc; i++) {
		if (argv[i][0] == '-' && argv[i][1]) {
			r = parse_option(args, argv, argc, &i);
			if (r)
				return r;
			continue;
		}
		if (args->nr_words == CTL_WORDS_MAX)
			return usage(args, "\"%s\": too many arguments", argv[i]);
		args->words[args->nr_words++] = argv[i];
	}
	return 0;
}
