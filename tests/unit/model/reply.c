/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reply.c - bodies of the HTTP server, in and out: text is not lost at a NUL, all is UTF-8, and
 * the number of fields has a bound.
 */
#include "engine/http/reply.h"
#include "tests/unit/model/modeldir.h"

#include <cjson/cJSON.h>
#include <stdlib.h>

/* a literal with its length, NUL among it */
#define BODY(text_)                      \
	{                                \
		text_, sizeof(text_) - 1 \
	}

static struct eng_model model = {.config = {.vocab = 4096, .max_positions = 8192}};
static const struct eng_reply_head head = {.id = "cmpl-1", .created = 1, .model = "m"};
static const struct eng_reply_end end = {.finish = ENG_FINISH_LENGTH, .nr_tokens = 2};

/* The value of "text" in JSON, as it is written there. */
static void expect_text(char *json, const char *want)
{
	char field[200];
	cJSON *o;

	KVT_EXPECT(json);
	snprintf(field, sizeof(field), "\"text\":\"%s\",", want);
	KVT_EXPECT_HAS(json, field);
	o = cJSON_Parse(strncmp(json, "data: ", 6) ? json : json + 6);
	KVT_EXPECT(o);
	cJSON_Delete(o);
	free(json);
}

/* A model may write the byte 0 like any other. */
KVT_TEST(text_goes_on_behind_a_nul)
{
	static const struct {
		const char *text;
		size_t bytes;
		const char *json;
	} texts[] = {
		{"", 0, ""},
		{"plain", 5, "plain"},
		{"only the first", 4, "only"},
		{"a\0b", 3, "a\\u0000b"},
		{"\0", 1, "\\u0000"},
		{"\0\0", 2, "\\u0000\\u0000"},
		{"\0b", 2, "\\u0000b"},
		{"a\0", 2, "a\\u0000"},
		{"a\"\0\n\\\0\xc3\xa9", 8, "a\\\"\\u0000\\n\\\\\\u0000\xc3\xa9"},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(texts); i++) {
		expect_text(
			eng_reply_completion(&head, texts[i].text, texts[i].bytes, &end),
			texts[i].json);
		expect_text(eng_reply_chunk(&head, texts[i].text, texts[i].bytes, NULL),
			    texts[i].json);
		expect_text(eng_reply_chunk(&head, texts[i].text, texts[i].bytes, &end),
			    texts[i].json);
	}
}

static int parse(const char *body, size_t nr, struct eng_job_params *p,
		 struct eng_api_error *err)
{
	return eng_params_parse(body, nr, "m", &model, p, err);
}

/* What cJSON would leave out without a word is refused. */
KVT_TEST(nul_in_a_body_is_refused)
{
	static const struct {
		const char *body;
		size_t bytes;
	} bad[] = {
		BODY("{\"prompt\":[1]}\0"),
		BODY("{\"prompt\":[1]}\0,\"stop\":7"),
		BODY("{\"prompt\":[1],\"stop\":\"ab\0cd\"}"),
		BODY("{\"prompt\":[1],\"us\0er\":\"x\"}"),
		BODY("{\"prompt\":[1],\"stop\":\"ab\\u0000cd\"}"),
	};
	struct eng_job_params p;
	struct eng_api_error err;

	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		KVT_EXPECT_EQ(parse(bad[i].body, bad[i].bytes, &p, &err), -EINVAL);
		KVT_EXPECT_EQ(err.status, 400);
		KVT_EXPECT_HAS(err.message, "NUL");
	}
	KVT_EXPECT_EQ(parse("{\"prompt\":[1]}", 14, &p, &err), 0);
	eng_job_params_free(&p);
}

/* Each field is compared with all before it: 4 MiB of them would be minutes of a CPU. */
KVT_TEST(many_fields_are_refused)
{
	struct eng_job_params p;
	struct eng_api_error err;
	char body[2000];

	for (u32 nr = 64; nr <= 65; nr++) {
		char *at = body + sprintf(body, "{\"prompt\":[1]");

		for (u32 i = 1; i < nr; i++)
			at += sprintf(at, ",\"f%u\":null", i);
		at += sprintf(at, "}");
		KVT_EXPECT_EQ(parse(body, (size_t)(at - body), &p, &err),
			      nr == 64 ? 0 : -EINVAL);
		if (nr == 64)
			eng_job_params_free(&p);
		else
			KVT_EXPECT_HAS(err.message, "64 fields");
	}
}

/* JSON is UTF-8: a stop string of half a character would cut others in two. */
KVT_TEST(body_that_is_not_utf8_is_refused)
{
	static const struct {
		const char *body;
		size_t bytes;
	} bad[] = {
		BODY("{\"prompt\":[1],\"stop\":\"\xa9\"}"),
		BODY("{\"prompt\":[1],\"stop\":\"\xc3\"}"),
		BODY("{\"prompt\":\"\xff\"}"),
		BODY("{\"prompt\":[1],\"\xed\xa0\x80\":null}"),
		BODY("{\"prompt\":[1]}\xe2\x82"),
	};
	static const char good[] = "{\"prompt\":[1],\"stop\":\"\xc3\xa9\"}";
	struct eng_job_params p;
	struct eng_api_error err;

	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		KVT_EXPECT_EQ(parse(bad[i].body, bad[i].bytes, &p, &err), -EINVAL);
		KVT_EXPECT_EQ(err.status, 400);
		KVT_EXPECT_HAS(err.message, "not UTF-8 at byte");
	}
	KVT_EXPECT_EQ(parse(good, strlen(good), &p, &err), 0);
	eng_job_params_free(&p);
}

static void expect_utf8(const char *text)
{
	KVT_EXPECT_EQ(eng_utf8_prefix(text, strlen(text)), strlen(text));
}

/* What a message repeats of a request is cut somewhere, but not inside a character. */
KVT_TEST(refusals_are_utf8)
{
	static const char *const chars[] = {"\xc3\xa9", "\xe2\x82\xac",
					    "\xf0\x9f\x98\x80"};
	static const char *const forms[] = {
		"{\"prompt\":[1],\"%s\":1}",
		"{\"prompt\":[1],\"%s\":null,\"%s\":null}",
		"{\"prompt\":[1],\"stream_options\":{\"%s\":1}}",
		"{\"prompt\":[1],\"model\":\"%s\"}",
	};
	struct eng_job_params p;
	struct eng_api_error err;
	char name[400], body[1000];

	for (u32 i = 0; i < KV_ARRAY_SIZE(chars) * KV_ARRAY_SIZE(forms) * 4; i++) {
		const char *form = forms[i / 4 % KV_ARRAY_SIZE(forms)];
		char *at = name + sprintf(name, "%.*s", (int)(i % 4), "xyz");

		while (at < name + 200)
			at += sprintf(at, "%s", chars[i / 4 / KV_ARRAY_SIZE(forms)]);
		snprintf(body, sizeof(body), form, name, name);
		KVT_EXPECT_EQ(parse(body, strlen(body), &p, &err), -EINVAL);
		KVT_EXPECT(err.status && err.message[0]);
		expect_utf8(err.message);
		expect_utf8(err.param);
	}
}

KVT_MAIN()
