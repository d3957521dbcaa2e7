/* SPDX-License-Identifier: Apache-2.0 */
/* reply.c - bodies of answers (see reply.h). No state; any thread. */
#include "engine/http/reply.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/json.h"

static char *print_and_delete(cJSON *o)
{
	char *text = cJSON_PrintUnformatted(o);

	cJSON_Delete(o);
	return text;
}

/* "data: ...\n\n" */
static char *as_event(char *json)
{
	char *event = NULL;

	if (json && asprintf(&event, "data: %s\n\n", json) < 0)
		event = NULL;
	free(json);
	return event;
}

static void add_text_or_null(cJSON *o, const char *name, const char *text)
{
	if (text[0])
		cJSON_AddStringToObject(o, name, text);
	else
		cJSON_AddNullToObject(o, name);
}

char *eng_reply_error(const struct eng_api_error *err)
{
	cJSON *o = cJSON_CreateObject(), *e = cJSON_AddObjectToObject(o, "error");

	cJSON_AddStringToObject(e, "message", err->message);
	cJSON_AddStringToObject(e, "type", err->type);
	add_text_or_null(e, "param", err->param);
	add_text_or_null(e, "code", err->code);
	return print_and_delete(o);
}

static void set_error(struct eng_api_error *e, unsigned int status, const char *type,
		      const char *code, const char *message)
{
	memset(e, 0, sizeof(*e));
	e->status = status;
	e->type = type;
	snprintf(e->code, sizeof(e->code), "%s", code);
	snprintf(e->message, sizeof(e->message), "%s", message);
}

/* The engine's refusals begin with the field's name. */
static void set_refused(struct eng_api_error *e, const struct eng_reply_end *end)
{
	size_t n = strspn(end->error, "abcdefghijklmnopqrstuvwxyz_");

	if (end->code == -EAGAIN) {
		set_error(e, 429, "overloaded_error", "queue_full", end->error);
		return;
	}
	set_error(e, 400, "invalid_request_error", "", end->error);
	if (n < sizeof(e->param))
		memcpy(e->param, end->error, n);
}

bool eng_reply_end_error(const struct eng_reply_end *end, struct eng_api_error *ret)
{
	char text[256];

	switch (end->finish) {
	case ENG_FINISH_STOP:
	case ENG_FINISH_LENGTH:
		return false;
	case ENG_FINISH_STALE:
		snprintf(
			text, sizeof(text),
			"a KV page was not the one this request was given (check bits 0x%x); "
			"send the request again",
			end->bad_bits);
		set_error(ret, 500, "server_error", "KV_STALE", text);
		return true;
	case ENG_FINISH_NO_PAGES:
		snprintf(text, sizeof(text), "no KV pages for this request: %s",
			 kv_outcome_str(end->code));
		set_error(ret, 503, "overloaded_error", kv_outcome_str(end->code), text);
		return true;
	case ENG_FINISH_ABORT:
		set_error(ret, 503, "server_error", "aborted", "the server is stopping");
		return true;
	default:
		if (end->error[0]) {
			set_refused(ret, end);
			return true;
		}
		set_error(ret, 500, "server_error", "engine_error", strerror(-end->code));
		return true;
	}
}

/* @text NULL: no choice. Return: NULL: out of memory. */
static cJSON *completion_object(const struct eng_reply_head *h, const char *text,
				size_t nr_bytes, const char *finish_reason)
{
	cJSON *o = cJSON_CreateObject(), *choices, *c;

	cJSON_AddStringToObject(o, "id", h->id);
	cJSON_AddStringToObject(o, "object", "text_completion");
	cJSON_AddNumberToObject(o, "created", (double)h->created);
	cJSON_AddStringToObject(o, "model", h->model);
	choices = cJSON_AddArrayToObject(o, "choices");
	if (!text)
		return o;
	c = cJSON_CreateObject();
	cJSON_AddNumberToObject(c, "index", 0);
	if (!eng_json_add_text(c, "text", text, nr_bytes)) {
		cJSON_Delete(c);
		cJSON_Delete(o);
		return NULL;
	}
	cJSON_AddNullToObject(c, "logprobs");
	add_text_or_null(c, "finish_reason", finish_reason);
	cJSON_AddItemToArray(choices, c);
	return o;
}

static void add_usage(cJSON *o, const struct eng_reply_end *end)
{
	cJSON *u = cJSON_AddObjectToObject(o, "usage"), *d;

	cJSON_AddNumberToObject(u, "prompt_tokens", end->nr_prompt);
	cJSON_AddNumberToObject(u, "completion_tokens", end->nr_tokens);
	cJSON_AddNumberToObject(u, "total_tokens", end->nr_prompt + end->nr_tokens);
	d = cJSON_AddObjectToObject(u, "prompt_tokens_details");
	cJSON_AddNumberToObject(d, "cached_tokens", end->nr_cached);
}

char *eng_reply_completion(const struct eng_reply_head *h, const char *text,
			   size_t nr_bytes, const struct eng_reply_end *end)
{
	cJSON *o = completion_object(h, text, nr_bytes, eng_finish_str(end->finish));

	if (!o)
		return NULL;
	add_usage(o, end);
	return print_and_delete(o);
}

char *eng_reply_chunk(const struct eng_reply_head *h, const char *text, size_t nr_bytes,
		      const struct eng_reply_end *end)
{
	cJSON *o = completion_object(h, text, nr_bytes,
				     end ? eng_finish_str(end->finish) : "");

	return o ? as_event(print_and_delete(o)) : NULL;
}

char *eng_reply_usage(const struct eng_reply_head *h, const struct eng_reply_end *end)
{
	cJSON *o = completion_object(h, NULL, 0, "");

	add_usage(o, end);
	return as_event(print_and_delete(o));
}

char *eng_reply_models(const char *model, time_t created)
{
	cJSON *o = cJSON_CreateObject(), *list, *m = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "object", "list");
	list = cJSON_AddArrayToObject(o, "data");
	cJSON_AddStringToObject(m, "id", model);
	cJSON_AddStringToObject(m, "object", "model");
	cJSON_AddNumberToObject(m, "created", (double)created);
	cJSON_AddStringToObject(m, "owned_by", "kvmd");
	cJSON_AddItemToArray(list, m);
	return print_and_delete(o);
}

static void counter(FILE *f, const char *name, const char *help, u64 value)
{
	fprintf(f,
		"# TYPE kv_engine_%s counter\n# HELP kv_engine_%s %s\nkv_engine_%s_total %llu\n",
		name, name, help, name, (unsigned long long)value);
}

static void gauge(FILE *f, const char *name, const char *help, u64 value)
{
	fprintf(f,
		"# TYPE kv_engine_%s gauge\n# HELP kv_engine_%s %s\nkv_engine_%s %llu\n",
		name, name, help, name, (unsigned long long)value);
}

char *eng_reply_metrics(const struct eng_stats *st, const char *model,
			const char *attention, u32 http_active)
{
	char *text = NULL;
	size_t bytes;
	FILE *f = open_memstream(&text, &bytes);

	if (!f)
		return NULL;
	fprintf(f,
		"# TYPE kv_engine info\n# HELP kv_engine The model served, and how.\n"
		"kv_engine_info{model=\"%s\",attention=\"%s\"} 1\n",
		model, attention);
	gauge(f, "requests_running", "Requests that hold pages.", st->running);
	gauge(f, "requests_waiting", "Requests in the queue.", st->waiting);
	gauge(f, "http_requests_active", "Completions being answered.", http_active);
	counter(f, "steps", "Steps announced and retired.", st->steps);
	fprintf(f,
		"# TYPE kv_engine_step_seconds counter\n# UNIT kv_engine_step_seconds seconds\n"
		"# HELP kv_engine_step_seconds Time inside steps.\n"
		"kv_engine_step_seconds_total %.6f\n",
		(double)st->step_ns * 1e-9);
	counter(f, "prompt_tokens", "Prompt tokens computed.", st->prompt_tokens);
	counter(f, "cached_tokens", "Tokens taken from sealed pages.", st->cached_tokens);
	counter(f, "generated_tokens", "Tokens generated.", st->generated_tokens);
	counter(f, "preemptions", "Times a request gave its pages back.",
		st->preemptions);
	counter(f, "stale_aborts", "Requests ended by the page check.", st->stale_aborts);
	counter(f, "revoked_requests", "Requests that lost a page to REVOKE.",
		st->revoked);
	counter(f, "sealed_pages", "Pages sealed.", st->sealed_pages);
	counter(f, "zeroed_pages", "Dirty pages zeroed before use.", st->zeroed_pages);
	counter(f, "forked_pages", "Pages forked.", st->forked_pages);
	counter(f, "nan_values", "NaN stored in pages.", st->nan_values);
	fprintf(f, "# TYPE kv_engine_requests_finished counter\n"
		   "# HELP kv_engine_requests_finished Requests ended, by reason.\n");
	for (u32 i = 1; i < KV_ARRAY_SIZE(st->finished); i++)
		fprintf(f, "kv_engine_requests_finished_total{reason=\"%s\"} %llu\n",
			eng_finish_str((enum eng_finish)i),
			(unsigned long long)st->finished[i]);
	fprintf(f, "# EOF\n");
	fclose(f);
	return text;
}
