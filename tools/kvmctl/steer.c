/* SPDX-License-Identifier: Apache-2.0 */
/* steer.c - the verbs by which an operator steers: pin, unpin, drain, limit, revoke. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

/* Sends @request; prints it as JSON or by @text. Consumes @request. */
static int act(struct ctl *ctl, cJSON *request, const char *name,
	       void (*text)(struct ctl *ctl, const cJSON *reply))
{
	cJSON *reply = NULL;
	int r;

	cJSON_AddBoolToObject(request, "dry_run", ctl->args.dry_run);
	r = ctl_ask(ctl, request, &reply);
	if (r)
		return r;
	if (ctl->args.json)
		r = ctl_json(ctl, reply, name);
	else
		text(ctl, reply);
	cJSON_Delete(reply);
	return r;
}

int ctl_takes(struct ctl *ctl, u32 takes)
{
	const struct ctl_args *a = &ctl->args;
	const struct {
		const char *name;
		bool given;
		u32 bit;
	} options[] = {
		{"pool", a->pool >= 0, CTL_TAKES_POOL},
		{"revoke", a->revoke, CTL_TAKES_REVOKE},
		{"off", a->off, CTL_TAKES_OFF},
		{"min", a->min_size != NULL, CTL_TAKES_LIMITS},
		{"high", a->high_size != NULL, CTL_TAKES_LIMITS},
		{"max", a->max_size != NULL, CTL_TAKES_LIMITS},
		{"weight", a->weight >= 0, CTL_TAKES_LIMITS},
		{"revision", a->revision >= 0, CTL_TAKES_LIMITS},
		{"limit", a->limit >= 0, 0},
		{"state", a->state != NULL, 0},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(options); i++)
		if (options[i].given && !(takes & options[i].bit))
			return ctl_error(ctl, CTL_USAGE,
					 "--%s: not for %s%s%s; nothing was done",
					 options[i].name, ctl->verb->name,
					 a->nr_words > 2 ? " " : "",
					 a->nr_words > 2 ? a->words[1] : "");
	return CTL_OK;
}

/* What is broad asks for --yes, unless it is a dry run. */
static int unsure(struct ctl *ctl, const char *what)
{
	if (ctl->args.yes || ctl->args.dry_run)
		return CTL_OK;
	return ctl_error(ctl, CTL_USAGE, "%s: try it with --dry-run, say --yes to do it",
			 what);
}

static int number(struct ctl *ctl, const char *what, const char *text, double *ret)
{
	char *end;

	*ret = (double)strtoul(text, &end, 10);
	if (end == text || *end || *text == '-')
		return ctl_error(ctl, CTL_USAGE, "%s \"%s\": not a whole number", what,
				 text);
	return CTL_OK;
}

/* ---------------------------------------------------------------- pin, unpin */

static void pin_text(struct ctl *ctl, const cJSON *reply)
{
	printf("%s %.0f pages\n", ctl->args.dry_run ? "would pin" : "pinned",
	       ctl_num(reply, "pages"));
}

static void unpin_text(struct ctl *ctl, const cJSON *reply)
{
	printf("%s %.0f pages\n", ctl->args.dry_run ? "would let go" : "let go",
	       ctl_num(reply, "pages"));
}

static int pin(struct ctl *ctl, const char *verb,
	       void (*text)(struct ctl *ctl, const cJSON *reply))
{
	cJSON *request;
	double pfn;
	int r;

	r = ctl_takes(ctl, CTL_TAKES_POOL);
	if (!r)
		r = number(ctl, "page", ctl->args.words[1], &pfn);
	if (r)
		return r;
	request = ctl_request(verb);
	cJSON_AddNumberToObject(request, "pfn", pfn);
	ctl_filter(ctl, request);
	return act(ctl, request, verb, text);
}

int ctl_pin(struct ctl *ctl)
{
	return pin(ctl, "pin", pin_text);
}

int ctl_unpin(struct ctl *ctl)
{
	return pin(ctl, "unpin", unpin_text);
}

/* -------------------------------------------------------------------- drain */

static void drain_text(struct ctl *ctl, const cJSON *reply)
{
	if (ctl->args.off) {
		printf("%s: it %s memory again\n", ctl->args.words[1],
		       ctl->args.dry_run ? "would be given" : "may have");
		return;
	}
	printf("%s %.0f cached pages; %.0f in use or on their way back, %.0f sessions\n",
	       ctl->args.dry_run ? "would evict" : "evicted", ctl_num(reply, "evicted"),
	       ctl_num(reply, "left_pages"), ctl_num(reply, "sessions"));
}

int ctl_drain(struct ctl *ctl)
{
	cJSON *request;
	int r = ctl_takes(ctl, CTL_TAKES_OFF);

	if (!r && !ctl->args.off)
		r = unsure(ctl, "drain");
	if (r)
		return r;
	request = ctl_request("drain");
	cJSON_AddStringToObject(request, "tenant", ctl->args.words[1]);
	cJSON_AddBoolToObject(request, "off", ctl->args.off);
	return act(ctl, request, "drain", drain_text);
}

/* -------------------------------------------------------------------- limit */

static void limit_text(struct ctl *ctl, const cJSON *reply)
{
	const char *result = ctl_str(reply, "result");
	char size[32];

	printf("%s%s, revision %.0f", ctl->args.dry_run ? "would be " : "", result,
	       ctl_num(reply, "revision"));
	if (!strcmp(result, "deferred"))
		printf(": holds %s, no grants until that is below the new max",
		       ctl_size(ctl, ctl_num(reply, "used_bytes"), size, sizeof(size)));
	printf("\n");
}

static int add_size(struct ctl *ctl, cJSON *request, const char *option,
		    const char *field, const char *text)
{
	double bytes;

	if (!text)
		return CTL_OK;
	if (ctl_parse_size(text, &bytes))
		return ctl_error(ctl, CTL_USAGE, "--%s: \"%s\": a size, as 4GiB", option,
				 text);
	cJSON_AddNumberToObject(request, field, bytes);
	return CTL_OK;
}

/* Without --revision the change is made from the limits as they are now. */
static int add_revision(struct ctl *ctl, cJSON *request)
{
	cJSON *reply = NULL, *ask;
	const cJSON *list, *t;
	int r;

	if (ctl->args.revision >= 0) {
		cJSON_AddNumberToObject(request, "revision", (double)ctl->args.revision);
		return CTL_OK;
	}
	ask = ctl_request("tenant");
	cJSON_AddStringToObject(ask, "name", ctl->args.words[1]);
	r = ctl_ask(ctl, ask, &reply);
	if (r)
		return r;
	list = cJSON_GetObjectItemCaseSensitive(reply, "tenants");
	t = cJSON_GetArrayItem(list, 0);
	cJSON_AddNumberToObject(request, "revision", ctl_num(t, "revision"));
	cJSON_Delete(reply);
	return CTL_OK;
}

int ctl_limit(struct ctl *ctl)
{
	const struct ctl_args *args = &ctl->args;
	int r = ctl_takes(ctl, CTL_TAKES_LIMITS);
	cJSON *request;

	if (r)
		return r;
	request = ctl_request("limit");
	cJSON_AddStringToObject(request, "tenant", args->words[1]);
	if (!args->min_size && !args->high_size && !args->max_size && args->weight < 0)
		r = ctl_error(
			ctl, CTL_USAGE,
			"limit: say at least one of --min, --high, --max, --weight");
	else
		r = add_size(ctl, request, "min", "min_bytes", args->min_size);
	if (!r)
		r = add_size(ctl, request, "high", "high_bytes", args->high_size);
	if (!r)
		r = add_size(ctl, request, "max", "max_bytes", args->max_size);
	if (!r && args->weight >= 0)
		cJSON_AddNumberToObject(request, "weight", (double)args->weight);
	if (!r)
		r = add_revision(ctl, request);
	if (r) {
		cJSON_Delete(request);
		return r;
	}
	return act(ctl, request, "limit", limit_text);
}

/* ------------------------------------------------------------------- revoke */

static void revoke_text(struct ctl *ctl, const cJSON *reply)
{
	printf("%s %.0f sessions with %.0f pages\n",
	       ctl->args.dry_run ? "would end" : "ended", ctl_num(reply, "sessions"),
	       ctl_num(reply, "pages"));
}

int ctl_revoke(struct ctl *ctl)
{
	const char *what = ctl->args.words[1], *which = ctl->args.words[2];
	cJSON *request;
	double id;
	int r;

	if (!strcmp(what, "page")) {
		ctl->args.revoke = true;
		return ctl_evict(ctl);
	}
	r = ctl_takes(ctl, 0);
	if (!r)
		r = unsure(ctl, "revoke");
	if (r)
		return r;
	if (!strcmp(what, "tenant")) {
		request = ctl_request("revoke");
		cJSON_AddStringToObject(request, "tenant", which);
		return act(ctl, request, "revoke", revoke_text);
	}
	if (strcmp(what, "session"))
		return ctl_error(ctl, CTL_USAGE, "revoke \"%s\": page, session or tenant",
				 what);
	r = number(ctl, "session", which, &id);
	if (r)
		return r;
	request = ctl_request("revoke");
	cJSON_AddNumberToObject(request, "session", id);
	return act(ctl, request, "revoke", revoke_text);
}
