/* SPDX-License-Identifier: Apache-2.0 */
/* act.c - the verbs that do something: audit, evict, events, reload, fault, version. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvmctl/kvmctl.h"

static const struct ctl_column finding_columns[] = {
	{"invariant", "INVARIANT", CTL_COUNT, false},
	{"pool", "POOL", CTL_COUNT, false},
	{"pfn", "PFN", CTL_COUNT, false},
	{"text", "FINDING", CTL_TEXT, false},
	{NULL, NULL, CTL_TEXT, false},
};

int ctl_audit(struct ctl *ctl)
{
	cJSON *reply = NULL;
	double damage;
	int r;

	r = ctl_ask(ctl, ctl_request("audit"), &reply);
	if (r)
		return r;
	damage = ctl_num(reply, "damage");
	if (ctl->args.json) {
		r = ctl_json(ctl, reply, "audit");
	} else if (damage > 0) {
		r = ctl_list(ctl, cJSON_GetObjectItemCaseSensitive(reply, "findings"),
			     finding_columns);
		printf("%.0f page records checked, %.0f findings\n",
		       ctl_num(reply, "checked"), damage);
	} else {
		printf("%.0f page records checked, clean\n", ctl_num(reply, "checked"));
	}
	cJSON_Delete(reply);
	return r ? r : damage > 0 ? CTL_DAMAGE : CTL_OK;
}

/* -------------------------------------------------------------------- evict */

/* Return: a request, or NULL after an error was said */
static cJSON *evict_request(struct ctl *ctl)
{
	const char *what = ctl->args.words[1], *which = ctl->args.words[2];
	cJSON *request = ctl_request("evict");
	char *end;

	cJSON_AddStringToObject(request, "target", what);
	if (!strcmp(what, "domain") || !strcmp(what, "tenant")) {
		cJSON_AddStringToObject(request, "name", which);
		return request;
	}
	if (strcmp(what, "pool") && strcmp(what, "page")) {
		ctl_error(ctl, CTL_USAGE, "evict \"%s\": domain, tenant, pool or page",
			  what);
		goto free_request;
	}
	cJSON_AddNumberToObject(request, what[1] == 'o' ? "pool" : "pfn",
				(double)strtoul(which, &end, 10));
	if (end == which || *end || *which == '-') {
		ctl_error(ctl, CTL_USAGE, "evict %s \"%s\": not a number", what, which);
		goto free_request;
	}
	if (what[1] == 'a' && ctl->args.pool >= 0)
		cJSON_AddNumberToObject(request, "pool", (double)ctl->args.pool);
	cJSON_AddBoolToObject(request, "revoke", ctl->args.revoke);
	return request;
free_request:
	cJSON_Delete(request);
	return NULL;
}

int ctl_evict(struct ctl *ctl)
{
	bool broad = strcmp(ctl->args.words[1], "page") != 0;
	bool dry_run = ctl->args.dry_run || (broad && !ctl->args.yes);
	cJSON *request, *reply = NULL;
	int r;

	r = ctl_takes(ctl, broad ? 0 : CTL_TAKES_POOL | CTL_TAKES_REVOKE);
	if (r)
		return r;
	request = evict_request(ctl);
	if (!request)
		return CTL_USAGE;
	cJSON_AddBoolToObject(request, "dry_run", dry_run);
	r = ctl_ask(ctl, request, &reply);
	if (r)
		return r;
	if (dry_run && !ctl->args.dry_run) {
		r = ctl_error(
			ctl, CTL_USAGE,
			"evict %s %s: would evict %.0f cached pages and unlist %.0f in use; "
			"say --yes to do it",
			ctl->args.words[1], ctl->args.words[2], ctl_num(reply, "evicted"),
			ctl_num(reply, "unindexed"));
	} else if (ctl->args.json) {
		r = ctl_json(ctl, reply, "evict");
	} else {
		printf("%s %.0f pages, %s %.0f in use from the index\n",
		       dry_run ? "would evict" : "evicted", ctl_num(reply, "evicted"),
		       dry_run ? "would take" : "took", ctl_num(reply, "unindexed"));
	}
	cJSON_Delete(reply);
	return r;
}

/* ------------------------------------------------------------------- events */

static void event_line(struct ctl *ctl, const char *text)
{
	cJSON *doc = cJSON_Parse(text), *item;

	if (!doc)
		return;
	if (ctl->args.json) {
		ctl_json(ctl, doc, "event");
		cJSON_Delete(doc);
		return;
	}
	printf("%12.6f  %-14s", ctl_num(doc, "time_ns") / 1e9, ctl_str(doc, "event"));
	cJSON_ArrayForEach(item, doc)
	{
		if (!strcmp(item->string, "event") || !strcmp(item->string, "time_ns"))
			continue;
		if (cJSON_IsString(item))
			printf(" %s=%s", item->string, item->valuestring);
		else if (cJSON_IsBool(item))
			printf(" %s=%s", item->string, cJSON_IsTrue(item) ? "yes" : "no");
		else
			printf(" %s=%.0f", item->string, item->valuedouble);
	}
	printf("\n");
	cJSON_Delete(doc);
}

int ctl_events(struct ctl *ctl)
{
	return ctl_stream(ctl, ctl_request("events"), event_line);
}

/* ----------------------------------------------------------------- the rest */

static cJSON *dry_request(struct ctl *ctl, const char *op)
{
	cJSON *request = ctl_request(op);

	cJSON_AddBoolToObject(request, "dry_run", ctl->args.dry_run);
	return request;
}

int ctl_reload(struct ctl *ctl)
{
	cJSON *reply = NULL;
	int r;

	r = ctl_takes(ctl, 0);
	if (r)
		return r;
	r = ctl_ask(ctl, dry_request(ctl, "reload"), &reply);
	if (r)
		return r;
	if (ctl->args.json)
		r = ctl_json(ctl, reply, "reload");
	else if (ctl->args.dry_run)
		printf("the file is good: would replace revision %.0f, %.0f deferred\n",
		       ctl_num(reply, "revision"), ctl_num(reply, "deferred"));
	else
		printf("revision %.0f applied, %.0f deferred\n",
		       ctl_num(reply, "revision"), ctl_num(reply, "deferred"));
	cJSON_Delete(reply);
	return r;
}

int ctl_upgrade(struct ctl *ctl)
{
	cJSON *reply = NULL;
	int r;

	r = ctl_takes(ctl, 0);
	if (r)
		return r;
	r = ctl_ask(ctl, dry_request(ctl, "upgrade"), &reply);
	if (r)
		return r;
	if (ctl->args.json)
		r = ctl_json(ctl, reply, "upgrade");
	else
		printf("the program %s over from the keeper; engines %s on\n",
		       ctl->args.dry_run ? "would take" : "takes",
		       ctl->args.dry_run ? "would go" : "go");
	cJSON_Delete(reply);
	return r;
}

int ctl_fault(struct ctl *ctl)
{
	cJSON *request = ctl_request("fault"), *reply = NULL;
	int r;

	if (ctl->args.dry_run) {
		cJSON_Delete(request);
		return ctl_error(ctl, CTL_USAGE, "fault: there is no --dry-run of it");
	}
	if (ctl->args.nr_words > 1)
		cJSON_AddStringToObject(request, "spec", ctl->args.words[1]);
	r = ctl_ask(ctl, request, &reply);
	if (r)
		return r;
	if (ctl->args.json)
		r = ctl_json(ctl, reply, "fault");
	else
		printf("%.0f failures injected\n", ctl_num(reply, "fired"));
	cJSON_Delete(reply);
	return r;
}

int ctl_version(struct ctl *ctl)
{
	cJSON *reply = NULL, *doc;
	int r = 0;

	/* Without a daemon it is still the version of kvmctl. */
	if (!access(ctl->args.socket, F_OK))
		ctl_ask(ctl, ctl_request("version"), &reply);
	if (!ctl->args.json) {
		printf("kvmctl %s (ABI %u to %u)\n", CTL_VERSION, KV_ABI_VERSION_MIN,
		       KV_ABI_VERSION);
		if (reply)
			printf("kvmd   %s (ABI %.0f to %.0f)\n",
			       ctl_str(reply, "version"), ctl_num(reply, "abi_min"),
			       ctl_num(reply, "abi"));
		cJSON_Delete(reply);
		return CTL_OK;
	}
	doc = cJSON_CreateObject();
	if (reply)
		cJSON_AddStringToObject(doc, "kvmd", ctl_str(reply, "version"));
	else
		cJSON_AddNullToObject(doc, "kvmd");
	cJSON_AddStringToObject(doc, "kvmctl", CTL_VERSION);
	cJSON_AddNumberToObject(doc, "abi_min", KV_ABI_VERSION_MIN);
	cJSON_AddNumberToObject(doc, "abi_max", KV_ABI_VERSION);
	r = ctl_json(ctl, doc, "version");
	cJSON_Delete(doc);
	cJSON_Delete(reply);
	return r;
}
