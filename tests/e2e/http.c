/* SPDX-License-Identifier: Apache-2.0 */
/*
 * http.c - `kv-engine serve` as its users see it: answers, streams, errors, disconnects.
 *
 * The server is the real program on a Unix socket beside a private kvmd.
 */
#include "tests/e2e/http_rig.h"

static bool valid_utf8(const char *s)
{
	const u8 *p = (const u8 *)s;

	while (*p) {
		int n = *p < 0x80	? 0
			: *p >> 5 == 6	? 1
			: *p >> 4 == 14 ? 2
			: *p >> 3 == 30 ? 3
					: -1;

		if (n < 0)
			return false;
		for (p++; n > 0; n--, p++) {
			if ((*p & 0xc0) != 0x80)
				return false;
		}
	}
	return true;
}

/* All events of a stream: the text put together; the last finish_reason; usage if it
 * came. */
static u32 stream_text(const char *body, char *ret, size_t max, char *ret_finish,
		       double *ret_usage)
{
	u32 events = 0;
	bool done = false;
	char *copy, *save = NULL;
	size_t n = 0;

	http("POST", "/v1/completions", body);
	if (rep.status != 200)
		KVT_FAIL("status %d: %s", rep.status, rep.body);
	KVT_EXPECT_HAS(rep.head, "text/event-stream");
	copy = strdup(rep.body);
	*ret_finish = 0;
	*ret_usage = -1;
	for (char *line = strtok_r(copy, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save)) {
		cJSON *o;

		KVT_EXPECT(!strncmp(line, "data: ", 6) && !done);
		done = !strcmp(line + 6, "[DONE]");
		if (done)
			continue;
		o = cJSON_Parse(line + 6);
		if (!o)
			KVT_FAIL("not JSON: %s", line);
		events++;
		if (cJSON_GetObjectItem(o, "usage")) {
			*ret_usage = usage_of(o, "completion_tokens");
		} else {
			KVT_EXPECT(valid_utf8(text_of(o)));
			n += (size_t)snprintf(ret + n, max - n, "%s", text_of(o));
			KVT_EXPECT(n < max && !*ret_finish);
			if (finish_of(o))
				snprintf(ret_finish, 32, "%s", finish_of(o));
		}
		cJSON_Delete(o);
	}
	KVT_EXPECT(done);
	free(copy);
	return events;
}

/* A prompt of at least four pages, as JSON text. */
static void long_prompt(char *ret, size_t max)
{
	size_t n = 0;

	for (int i = 0; i < 60; i++)
		n += (size_t)snprintf(ret + n, max - n,
				      "The database has a table number %d. ", i);
}

KVT_TEST(completion_usage_and_cached_tokens)
{
	char prompt[4096], body[8192];
	cJSON *a, *b;

	start_server();
	long_prompt(prompt, sizeof(prompt));
	snprintf(
		body, sizeof(body),
		"{\"model\":\"tiny-k2\",\"prompt\":\"%s\",\"max_tokens\":12,\"temperature\":0}",
		prompt);
	a = complete(body);
	b = complete(body);
	KVT_EXPECT_STR(text_of(a), text_of(b));
	KVT_EXPECT_STR(finish_of(a), "length");
	KVT_EXPECT_EQ(usage_of(a, "completion_tokens"), 12);
	KVT_EXPECT(usage_of(a, "prompt_tokens") > 256);
	KVT_EXPECT_EQ(usage_of(a, "cached_tokens"), 0);
	KVT_EXPECT(usage_of(b, "cached_tokens") >= 256);
	KVT_EXPECT_EQ(usage_of(a, "total_tokens"), usage_of(a, "prompt_tokens") + 12);
	cJSON_Delete(a);
	cJSON_Delete(b);
	stop_server();
}

KVT_TEST(o54_stream_is_the_answer_in_pieces)
{
	static char text[65536];
	char finish[32];
	double usage;
	cJSON *a;

	start_server();
	/* hot enough for lone bytes of broken characters */
	for (int seed = 1; seed <= 3; seed++) {
		char body[512], stream[600];
		u32 events;

		snprintf(
			body, sizeof(body),
			"\"prompt\":[451,453,1268],\"max_tokens\":80,\"temperature\":2,\"seed\":%d",
			seed);
		snprintf(
			stream, sizeof(stream),
			"{%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
			body);
		events = stream_text(stream, text, sizeof(text), finish, &usage);
		snprintf(stream, sizeof(stream), "{%s}", body);
		a = complete(stream);
		KVT_EXPECT_STR(text, text_of(a));
		KVT_EXPECT_STR(finish, finish_of(a));
		KVT_EXPECT_EQ(usage, usage_of(a, "completion_tokens"));
		KVT_EXPECT(valid_utf8(text) && events > 3);
		cJSON_Delete(a);
	}
	stop_server();
}

KVT_TEST(stop_strings_end_the_text_before_them)
{
	static char text[65536];
	char finish[32];
	double usage;
	cJSON *a, *b;

	start_server();
	a = complete("{\"prompt\":\"The database\",\"max_tokens\":32,\"temperature\":0}");
	KVT_EXPECT_HAS(text_of(a), "same as");
	b = complete("{\"prompt\":\"The database\",\"max_tokens\":32,\"temperature\":0,"
		     "\"stop\":[\"zzz\",\"me as\"]}");
	KVT_EXPECT_STR(finish_of(b), "stop");
	KVT_EXPECT(strlen(text_of(b)) ==
		   (size_t)(strstr(text_of(a), "me as") - text_of(a)));
	stream_text("{\"prompt\":\"The database\",\"max_tokens\":32,\"temperature\":0,"
		    "\"stop\":\"me as\",\"stream\":true}",
		    text, sizeof(text), finish, &usage);
	KVT_EXPECT_STR(text, text_of(b));
	KVT_EXPECT_STR(finish, "stop");
	cJSON_Delete(a);
	cJSON_Delete(b);
	stop_server();
}

/* The last 24 tokens of a text that the model has never seen, and at whose end it says so. */
KVT_TEST(ignore_eos_goes_on_behind_an_end_token)
{
	static const char ids[] =
		"607,340,464,1618,81,1215,28,355,66,270,402,358,1678,334,"
		"3968,746,355,66,270,402,358,820,2076,3";
	char body[300];
	cJSON *o;

	start_server();
	snprintf(body, sizeof(body),
		 "{\"prompt\":[%s],\"max_tokens\":12,\"temperature\":0}", ids);
	o = complete(body);
	KVT_EXPECT_STR(finish_of(o), "stop");
	KVT_EXPECT_EQ(usage_of(o, "completion_tokens"), 1);
	cJSON_Delete(o);
	strcpy(body + strlen(body) - 1, ",\"ignore_eos\":true}");
	o = complete(body);
	KVT_EXPECT_STR(finish_of(o), "length");
	KVT_EXPECT_EQ(usage_of(o, "completion_tokens"), 12);
	cJSON_Delete(o);
	stop_server();
}

KVT_TEST(text_and_ids_are_the_same_prompt)
{
	cJSON *a, *b;

	start_server();
	a = complete("{\"prompt\":\"The database\",\"max_tokens\":8,\"temperature\":0}");
	b = complete(
		"{\"prompt\":[\"The database\"],\"max_tokens\":8,\"temperature\":0,\"n\":1,"
		"\"echo\":false,\"logprobs\":null,\"user\":\"me\"}");
	KVT_EXPECT_STR(text_of(a), text_of(b));
	cJSON_Delete(a);
	cJSON_Delete(b);
	stop_server();
}

KVT_TEST(bad_requests_name_the_field)
{
	static const struct {
		const char *body;
		int status;
		const char *param;
		const char *text;
	} bad[] = {
		{"", 400, "", "body"},
		{"{", 400, "", "not JSON"},
		{"{\"prompt\":\"a\\u0000b\"}", 400, "", "u0000"},
		{"{\"prompt\":\"a\\\\u0000b\",\"max_tokens\":1}", 200, "", ""},
		{"[1]", 400, "", "object"},
		{"{\"prompt\":\"x\"} x", 400, "", "not JSON"},
		{"{}", 400, "prompt", "missing"},
		{"{\"prompt\":7}", 400, "prompt", "prompt"},
		{"{\"prompt\":\"\"}", 400, "prompt", "empty"},
		{"{\"prompt\":[]}", 400, "prompt", "prompt"},
		{"{\"prompt\":[1,4096]}", 400, "prompt", "prompt[1]"},
		{"{\"prompt\":[1,-1]}", 400, "prompt", "prompt[1]"},
		{"{\"prompt\":[1,1.5]}", 400, "prompt", "prompt[1]"},
		{"{\"prompt\":[\"a\",\"b\"]}", 400, "prompt", "one string"},
		{"{\"prompt\":\"x\",\"prompt\":\"y\"}", 400, "prompt", "twice"},
		{"{\"prompt\":\"x\",\"max_tokens\":0}", 400, "max_tokens",
		 "max_tokens=0"},
		{"{\"prompt\":\"x\",\"max_tokens\":1.5}", 400, "max_tokens", "1.5"},
		{"{\"prompt\":\"x\",\"max_tokens\":1e99}", 400, "max_tokens",
		 "max_tokens"},
		{"{\"prompt\":\"x\",\"max_tokens\":8192}", 400, "prompt", "more than"},
		{"{\"prompt\":\"x\",\"temperature\":-1}", 400, "temperature", "-1"},
		{"{\"prompt\":\"x\",\"temperature\":\"hot\"}", 400, "temperature",
		 "number"},
		{"{\"prompt\":\"x\",\"top_p\":0}", 400, "top_p", "top_p"},
		{"{\"prompt\":\"x\",\"n\":2}", 400, "n", "n=2"},
		{"{\"prompt\":\"x\",\"stop\":[]}", 200, "", ""},
		{"{\"prompt\":\"x\",\"stop\":[\"\"]}", 400, "stop", "stop"},
		{"{\"prompt\":\"x\",\"stop\":[1]}", 400, "stop", "stop"},
		{"{\"prompt\":\"x\",\"stream\":1}", 400, "stream", "stream"},
		{"{\"prompt\":\"x\",\"ignore_eos\":1}", 400, "ignore_eos", "ignore_eos"},
		{"{\"prompt\":\"x\",\"echo\":true}", 400, "echo", "not supported"},
		{"{\"prompt\":\"x\",\"logprobs\":5}", 400, "logprobs", "not supported"},
		{"{\"prompt\":\"x\",\"tools\":[]}", 400, "tools", "not supported"},
		{"{\"prompt\":\"x\",\"model\":\"gpt\"}", 404, "model", "gpt"},
	};

	start_server();
	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		const cJSON *e, *param;
		cJSON *o;

		http("POST", "/v1/completions", bad[i].body);
		if (rep.status != bad[i].status)
			KVT_FAIL("%s: status %d, expected %d: %s", bad[i].body,
				 rep.status, bad[i].status, rep.body);
		if (rep.status == 200)
			continue;
		o = cJSON_Parse(rep.body);
		e = cJSON_GetObjectItem(o, "error");
		if (!e)
			KVT_FAIL("%s: no error object: %s", bad[i].body, rep.body);
		param = cJSON_GetObjectItem(e, "param");
		if (strcmp(cJSON_IsString(param) ? param->valuestring : "", bad[i].param))
			KVT_FAIL("%s: param is not \"%s\": %s", bad[i].body, bad[i].param,
				 rep.body);
		KVT_EXPECT_HAS(cJSON_GetStringValue(cJSON_GetObjectItem(e, "message")),
			       bad[i].text);
		KVT_EXPECT_STR(cJSON_GetStringValue(cJSON_GetObjectItem(e, "type")),
			       "invalid_request_error");
		cJSON_Delete(o);
	}
	stop_server();
}

KVT_TEST(other_routes)
{
	start_server();
	http("GET", "/health", "");
	KVT_EXPECT_EQ(rep.status, 200);
	http("GET", "/v1/models", "");
	KVT_EXPECT_HAS(rep.body, "\"id\":\"tiny-k2\"");
	http("GET", "/metrics", "");
	KVT_EXPECT_HAS(rep.head, "application/openmetrics-text");
	KVT_EXPECT_HAS(rep.body, "kv_engine_steps_total");
	KVT_EXPECT_HAS(rep.body,
		       "\nkv_engine_info{model=\"tiny-k2\",attention=\"exact\"} 1\n");
	KVT_EXPECT_STR(rep.body + rep.nr_body - 6, "# EOF\n");
	http("GET", "/v1/completions", "");
	KVT_EXPECT_EQ(rep.status, 405);
	http("GET", "/v2", "");
	KVT_EXPECT_EQ(rep.status, 404);
	stop_server();
}

static double metric(const char *name)
{
	char line[128];
	const char *at;

	http("GET", "/metrics", "");
	snprintf(line, sizeof(line), "\n%s ", name);
	at = strstr(rep.body, line);
	if (!at)
		KVT_FAIL("no metric %s", name);
	return strtod(at + strlen(line), NULL);
}

static u32 finished(const char *reason)
{
	char name[80];

	snprintf(name, sizeof(name), "kv_engine_requests_finished_total{reason=\"%s\"}",
		 reason);
	return (u32)metric(name);
}

static u32 pages_held(void)
{
	cJSON *reply = rig_admin(&rig, "{\"op\":\"pool\"}");
	const cJSON *pool = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "pools"), 0);
	const cJSON *states = cJSON_GetObjectItem(pool, "states");
	u32 n;

	if (!states)
		states = pool;
	n = (u32)cJSON_GetObjectItem(states, "active")->valuedouble +
	    (u32)cJSON_GetObjectItem(states, "sealed")->valuedouble;
	cJSON_Delete(reply);
	return n;
}

static void check_disconnect(const char *body)
{
	char byte[64];
	int fd = send_request("POST", "/v1/completions", body);

	while (metric("kv_engine_requests_running") < 1)
		usleep(5000);
	if (strstr(body, "stream"))
		KVT_EXPECT(read(fd, byte, sizeof(byte)) > 0);
	KVT_EXPECT(pages_held() > 0);
	close(fd);
	for (int i = 0; metric("kv_engine_requests_running") > 0 || pages_held() > 0;
	     i++) {
		KVT_EXPECT(i < 1000); /* a GPU that many tests share is slow to answer */
		usleep(10000);
	}
}

KVT_TEST(disconnect_aborts_the_request_and_frees_its_pages)
{
	char prompt[4096], body[8192];

	start_server();
	long_prompt(prompt, sizeof(prompt)); /* several pages: not from a magazine */
	snprintf(
		body, sizeof(body),
		"{\"prompt\":\"%s\",\"max_tokens\":7000,\"ignore_eos\":true,\"stream\":true}",
		prompt);
	check_disconnect(body);
	snprintf(body, sizeof(body),
		 "{\"prompt\":\"A%s\",\"max_tokens\":7000,\"ignore_eos\":true}", prompt);
	check_disconnect(body);
	KVT_EXPECT_EQ(finished("length"), 0);
	KVT_EXPECT_EQ(finished("stop"), 0);
	KVT_EXPECT_EQ(finished("abort"), 2);
	stop_server();
}

KVT_TEST(many_clients_get_what_one_gets)
{
	enum { CLIENTS = 24 };
	char body[CLIENTS][200];
	char alone[CLIENTS][2048];
	int fd[CLIENTS];

	start_server();
	for (int i = 0; i < CLIENTS; i++) {
		cJSON *o;

		snprintf(
			body[i], sizeof(body[i]),
			"{\"prompt\":[%d,%d,%d],\"max_tokens\":20,\"temperature\":1,\"seed\":%d}",
			300 + i, 400 + 7 * i, 500 + 3 * i, i);
		if (i % 6)
			continue;
		o = complete(body[i]);
		snprintf(alone[i], sizeof(alone[i]), "%s", text_of(o));
		cJSON_Delete(o);
	}
	for (int i = 0; i < CLIENTS; i++)
		fd[i] = send_request("POST", "/v1/completions", body[i]);
	for (int i = 0; i < CLIENTS; i++) {
		cJSON *o;

		read_reply(fd[i]);
		KVT_EXPECT_EQ(rep.status, 200);
		o = cJSON_Parse(rep.body);
		if (i % 6 == 0 &&
		    !rig_on_cuda()) /* order of sums: trace_expect_equal() */
			KVT_EXPECT_STR(text_of(o), alone[i]);
		cJSON_Delete(o);
	}
	stop_server();
}

KVT_TEST(sigterm_answers_what_is_running)
{
	int fd, status;

	start_server();
	fd = send_request(
		"POST", "/v1/completions",
		"{\"prompt\":\"The database\",\"max_tokens\":8000,\"temperature\":0}");
	while (metric("kv_engine_requests_running") < 1)
		usleep(5000);
	kill(server, SIGTERM);
	read_reply(fd);
	KVT_EXPECT_EQ(rep.status, 503);
	KVT_EXPECT_EQ(waitpid(server, &status, 0), server);
	KVT_EXPECT_EQ(status, 0);
	rig_close(&rig);
}

KVT_MAIN()
