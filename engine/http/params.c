/* SPDX-License-Identifier: Apache-2.0 */
/*
 * params.c - check the body of POST /v1/completions (see params.h). Pure; any thread.
 *
 * One table says which field goes to which function; a field that is not in it is refused
 * by name, one that is there twice as well.
 */
#include "engine/http/params.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define MAX_TOKENS_DEFAULT 16u
#define STOP_BYTES_MAX	   256u
#define FIELDS_MAX	   64u

struct parse {
	struct eng_job_params *p;
	const char *model_name;
	const struct eng_model *m;
	struct eng_api_error *err;
	bool has_prompt;
	bool has_seed;
};

/* What was cut may end inside a character, and goes into an answer that is JSON. */
static void make_utf8(char *text, size_t size)
{
	char out[3 * (sizeof(((struct eng_api_error *)0)->message) + 3)];
	struct eng_detok d = {0};
	size_t n = eng_utf8_push(&d, text, strlen(text), out);

	n += eng_detok_flush(&d, out + n);
	if (n >= size)
		n = eng_utf8_prefix(out, size - 1);
	memcpy(text, out, n);
	text[n] = 0;
}

__attribute__((format(printf, 3, 4))) static int
refuse(struct parse *ps, const char *param, const char *fmt, ...)
{
	va_list ap;

	ps->err->status = 400;
	ps->err->type = "invalid_request_error";
	snprintf(ps->err->param, sizeof(ps->err->param), "%s", param);
	va_start(ap, fmt);
	vsnprintf(ps->err->message, sizeof(ps->err->message), fmt, ap);
	va_end(ap);
	make_utf8(ps->err->param, sizeof(ps->err->param));
	make_utf8(ps->err->message, sizeof(ps->err->message));
	return -EINVAL;
}

static int take_model(struct parse *ps, const cJSON *v)
{
	if (!cJSON_IsString(v))
		return refuse(ps, "model", "model: a string is expected");
	if (!strcmp(v->valuestring, ps->model_name))
		return 0;
	refuse(ps, "model", "model \"%.100s\" is not served here; this is \"%.100s\"",
	       v->valuestring, ps->model_name);
	ps->err->status = 404;
	snprintf(ps->err->code, sizeof(ps->err->code), "model_not_found");
	return -EINVAL;
}

/* An integer in [min, max], stored in *ret. */
static int take_integer(struct parse *ps, const cJSON *v, double min, double max,
			double *ret)
{
	if (!cJSON_IsNumber(v))
		return refuse(ps, v->string, "%s: an integer is expected", v->string);
	if (v->valuedouble != floor(v->valuedouble) || v->valuedouble < min ||
	    v->valuedouble > max)
		return refuse(ps, v->string, "%s=%g: not an integer in %.0f..%.0f",
			      v->string, v->valuedouble, min, max);
	*ret = v->valuedouble;
	return 0;
}

static int take_real(struct parse *ps, const cJSON *v, double min, double max, float *ret)
{
	if (!cJSON_IsNumber(v))
		return refuse(ps, v->string, "%s: a number is expected", v->string);
	if (!(v->valuedouble >= min) || v->valuedouble > max)
		return refuse(ps, v->string, "%s=%g: not in %g..%g", v->string,
			      v->valuedouble, min, max);
	*ret = (float)v->valuedouble;
	return 0;
}

static int prompt_text(struct parse *ps, const char *text)
{
	size_t nr = 0;
	int rc = eng_tokenizer_encode(ps->m->tok, text, strlen(text), ENG_ENCODE_PLAIN,
				      &ps->p->ids, &nr);

	if (rc)
		return refuse(ps, "prompt", "prompt: cannot be encoded (%s)",
			      strerror(-rc));
	if (nr == 0)
		return refuse(ps, "prompt", "prompt: empty");
	if (nr > ps->m->config.max_positions)
		return refuse(ps, "prompt",
			      "prompt: %zu tokens, the model has %u positions", nr,
			      ps->m->config.max_positions);
	ps->p->nr_ids = (u32)nr;
	return 0;
}

static int prompt_ids(struct parse *ps, const cJSON *array)
{
	u32 vocab = ps->m->config.vocab, nr = 0;
	int size = cJSON_GetArraySize(array);
	const cJSON *v;

	if (size > (int)ps->m->config.max_positions)
		return refuse(ps, "prompt",
			      "prompt: %d tokens, the model has %u positions", size,
			      ps->m->config.max_positions);
	ps->p->ids = calloc((size_t)size, sizeof(u32));
	if (!ps->p->ids)
		return -ENOMEM;
	cJSON_ArrayForEach(v, array)
	{
		if (!cJSON_IsNumber(v) || v->valuedouble != floor(v->valuedouble) ||
		    v->valuedouble < 0 || v->valuedouble >= vocab)
			return refuse(ps, "prompt", "prompt[%u]: not a token id in 0..%u",
				      nr, vocab - 1);
		ps->p->ids[nr++] = (u32)v->valuedouble;
	}
	ps->p->nr_ids = nr;
	return 0;
}

static int take_prompt(struct parse *ps, const cJSON *v)
{
	const cJSON *first = cJSON_IsArray(v) ? v->child : NULL;

	ps->has_prompt = true;
	if (cJSON_IsString(v))
		return prompt_text(ps, v->valuestring);
	if (first && cJSON_IsNumber(first))
		return prompt_ids(ps, v);
	if (first && cJSON_IsString(first) && !first->next)
		return prompt_text(ps, first->valuestring);
	return refuse(ps, "prompt",
		      "prompt: one string or one array of token ids is expected");
}

static int take_max_tokens(struct parse *ps, const cJSON *v)
{
	double d;
	int rc = take_integer(ps, v, 1, ps->m->config.max_positions, &d);

	if (!rc)
		ps->p->max_tokens = (u32)d;
	return rc;
}

static int take_temperature(struct parse *ps, const cJSON *v)
{
	return take_real(ps, v, 0, 2, &ps->p->temperature);
}

static int take_top_p(struct parse *ps, const cJSON *v)
{
	int rc = take_real(ps, v, 0, 1, &ps->p->top_p);

	if (!rc && ps->p->top_p == 0)
		return refuse(ps, "top_p", "top_p=0: not above 0");
	return rc;
}

static int take_seed(struct parse *ps, const cJSON *v)
{
	double d;
	int rc = take_integer(ps, v, -0x1p53, 0x1p53, &d);

	if (rc)
		return rc;
	ps->p->seed = (u64)(s64)d;
	ps->has_seed = true;
	return 0;
}

static int push_stop(struct parse *ps, const cJSON *v)
{
	if (!cJSON_IsString(v) || !v->valuestring[0] ||
	    strlen(v->valuestring) > STOP_BYTES_MAX)
		return refuse(ps, "stop", "stop: strings of 1..%u bytes are expected",
			      STOP_BYTES_MAX);
	if (ps->p->nr_stops == ENG_STOP_MAX)
		return refuse(ps, "stop", "stop: more than %d strings", ENG_STOP_MAX);
	ps->p->stops[ps->p->nr_stops] = strdup(v->valuestring);
	if (!ps->p->stops[ps->p->nr_stops])
		return -ENOMEM;
	ps->p->nr_stops++;
	return 0;
}

static int take_stop(struct parse *ps, const cJSON *v)
{
	const cJSON *one;
	int rc = 0;

	if (!cJSON_IsArray(v))
		return push_stop(ps, v);
	cJSON_ArrayForEach(one, v)
	{
		if (!rc)
			rc = push_stop(ps, one);
	}
	return rc;
}

static int take_n(struct parse *ps, const cJSON *v)
{
	double d;

	return take_integer(ps, v, 1, 1, &d);
}

static int take_ignore_eos(struct parse *ps, const cJSON *v)
{
	if (!cJSON_IsBool(v))
		return refuse(ps, "ignore_eos", "ignore_eos: true or false is expected");
	ps->p->ignore_eos = cJSON_IsTrue(v);
	return 0;
}

static int take_stream(struct parse *ps, const cJSON *v)
{
	if (!cJSON_IsBool(v))
		return refuse(ps, "stream", "stream: true or false is expected");
	ps->p->stream = cJSON_IsTrue(v);
	return 0;
}

static int take_stream_options(struct parse *ps, const cJSON *v)
{
	const cJSON *one;

	if (!cJSON_IsObject(v))
		return refuse(ps, "stream_options",
			      "stream_options: an object is expected");
	cJSON_ArrayForEach(one, v)
	{
		if (strcmp(one->string, "include_usage") || !cJSON_IsBool(one))
			return refuse(ps, "stream_options",
				      "stream_options.%.60s: not supported", one->string);
		ps->p->include_usage = cJSON_IsTrue(one);
	}
	return 0;
}

static int take_user(struct parse *ps, const cJSON *v)
{
	return cJSON_IsString(v) ? 0 : refuse(ps, "user", "user: a string is expected");
}

/* Fields we do not build, with the number or bool that asks for nothing. */
static int take_inert(struct parse *ps, const cJSON *v)
{
	static const struct {
		const char *name;
		double inert;
	} fields[] = {{"best_of", 1}, {"presence_penalty", 0}, {"frequency_penalty", 0}};

	if (!strcmp(v->string, "echo") && cJSON_IsFalse(v))
		return 0;
	for (size_t i = 0; i < KV_ARRAY_SIZE(fields); i++) {
		if (!strcmp(v->string, fields[i].name) && cJSON_IsNumber(v) &&
		    v->valuedouble == fields[i].inert)
			return 0;
	}
	return refuse(ps, v->string, "%.60s: not supported", v->string);
}

static const struct {
	const char *name;
	int (*take)(struct parse *ps, const cJSON *v);
} fields[] = {
	{"model", take_model},
	{"prompt", take_prompt},
	{"max_tokens", take_max_tokens},
	{"temperature", take_temperature},
	{"top_p", take_top_p},
	{"seed", take_seed},
	{"stop", take_stop},
	{"ignore_eos", take_ignore_eos},
	{"n", take_n},
	{"stream", take_stream},
	{"stream_options", take_stream_options},
	{"user", take_user},
	{"best_of", take_inert},
	{"echo", take_inert},
	{"presence_penalty", take_inert},
	{"frequency_penalty", take_inert},
};

static int take_field(struct parse *ps, const cJSON *v)
{
	for (const cJSON *prev = v->prev; prev && prev->next; prev = prev->prev) {
		if (!strcmp(prev->string, v->string))
			return refuse(ps, v->string, "%.60s: given twice", v->string);
	}
	for (size_t i = 0; i < KV_ARRAY_SIZE(fields); i++) {
		if (!strcmp(v->string, fields[i].name))
			return cJSON_IsNull(v) ? 0 : fields[i].take(ps, v);
	}
	return cJSON_IsNull(v) ? 0
			       : refuse(ps, v->string, "%.60s: not supported", v->string);
}

static int take_all(struct parse *ps, const cJSON *root)
{
	const cJSON *v;
	u32 nr = 0;
	int rc;

	if (!cJSON_IsObject(root))
		return refuse(ps, "", "body: a JSON object is expected");
	cJSON_ArrayForEach(v, root)
	{
		/* each is compared with all before it */
		if (++nr > FIELDS_MAX)
			return refuse(ps, "", "body: more than %u fields", FIELDS_MAX);
		rc = take_field(ps, v);
		if (rc)
			return rc;
	}
	if (!ps->has_prompt)
		return refuse(ps, "prompt", "prompt: missing");
	if (ps->p->include_usage && !ps->p->stream)
		return refuse(ps, "stream_options",
			      "stream_options: only with stream=true");
	return 0;
}

/* cJSON ends a string at a NUL, as it is or escaped: the rest would be lost without a word. */
static bool has_nul(const char *body, size_t nr_bytes)
{
	if (memchr(body, 0, nr_bytes))
		return true;
	for (size_t i = 0; i + 6 <= nr_bytes; i++) {
		if (body[i] != '\\')
			continue;
		if (!memcmp(body + i, "\\u0000", 6))
			return true;
		i++; /* what is escaped is no backslash of its own */
	}
	return false;
}

int eng_params_parse(const char *body, size_t nr_bytes, const char *model_name,
		     const struct eng_model *m, struct eng_job_params *ret,
		     struct eng_api_error *err)
{
	struct eng_job_params p = {
		.max_tokens = MAX_TOKENS_DEFAULT, .temperature = 1, .top_p = 1};
	struct parse ps = {.p = &p, .model_name = model_name, .m = m, .err = err};
	const char *end = body;
	size_t nr_utf8;
	cJSON *root;
	int rc;

	memset(err, 0, sizeof(*err));
	/* cJSON does not look: a stop string could end a text inside a character */
	nr_utf8 = eng_utf8_prefix(body, nr_bytes);
	if (nr_utf8 < nr_bytes)
		return refuse(&ps, "", "body: not UTF-8 at byte %zu of %zu", nr_utf8,
			      nr_bytes);
	if (has_nul(body, nr_bytes))
		return refuse(&ps, "", "body: NUL (\\u0000) is not supported");
	root = cJSON_ParseWithLengthOpts(body, nr_bytes + 1, &end, true);
	if (!root)
		return refuse(&ps, "", "body: not JSON at byte %zu of %zu",
			      (size_t)(end - body), nr_bytes);
	rc = take_all(&ps, root);
	cJSON_Delete(root);
	if (rc) {
		eng_job_params_free(&p);
		return rc;
	}
	if (!ps.has_seed)
		p.seed = kv_now_ns();
	*ret = p;
	return 0;
}
