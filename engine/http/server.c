/* SPDX-License-Identifier: Apache-2.0 */
/*
 * server.c - routes, bodies, streams, disconnects (see server.h for threads).
 *
 * A client that goes away is noticed by polling its socket while its job runs, streaming
 * or not; its job is cancelled, the loop aborts the request and the pages go back.
 */
#include "engine/http/server.h"

#include <errno.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/http/listen.h"
#include "engine/http/reply.h"

#define BODY_MAX	(4u << 20)
#define CONNECTIONS_MAX 256u
#define IDLE_TIMEOUT_S	120u
#define PEER_POLL_NS	(20 * KV_NSEC_PER_MSEC)
#define STOP_WAIT_NS	(2 * KV_NSEC_PER_SEC)
#define STREAM_BLOCK	4096u

struct eng_http {
	struct eng_http_options opt;
	struct MHD_Daemon *daemon;
	struct eng_listener listener;
	time_t created;
	u64 next_id;   /* atomic */
	u32 active;    /* atomic: completions */
	u32 in_flight; /* atomic: HTTP requests whose answer is not yet written */
	bool healthy;  /* atomic */
};

/* One HTTP request; belongs to its connection's thread. */
struct call {
	char *body;
	size_t nr_body;
	bool too_large;
};

/* A completion on its way out; belongs to its connection's thread. */
struct stream {
	struct eng_http *s;
	struct eng_job *job;
	struct eng_reply_head head;
	int fd;
	size_t nr_sent; /* of job.text */
	char *out;	/* event being sent; owner */
	size_t nr_out;
	size_t at;
	bool finished;
};

static enum MHD_Result respond(struct MHD_Connection *c, unsigned int status, char *body,
			       const char *type)
{
	struct MHD_Response *r;
	enum MHD_Result rc;

	if (!body)
		return MHD_NO;
	r = MHD_create_response_from_buffer(strlen(body), body, MHD_RESPMEM_MUST_FREE);
	if (!r) {
		free(body);
		return MHD_NO;
	}
	MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
	rc = MHD_queue_response(c, status, r);
	MHD_destroy_response(r);
	return rc;
}

static enum MHD_Result respond_error(struct MHD_Connection *c,
				     const struct eng_api_error *err)
{
	return respond(c, err->status, eng_reply_error(err), "application/json");
}

static enum MHD_Result respond_simple(struct MHD_Connection *c, unsigned int status,
				      const char *message)
{
	struct eng_api_error err = {.status = status, .type = "invalid_request_error"};

	snprintf(err.message, sizeof(err.message), "%s", message);
	return respond_error(c, &err);
}

static void end_of_locked(const struct eng_job *j, struct eng_reply_end *ret)
{
	*ret = (struct eng_reply_end){
		.finish = j->finish,
		.code = j->code,
		.nr_prompt = j->p.nr_ids,
		.nr_cached = j->nr_cached,
		.nr_tokens = j->nr_tokens,
		.bad_bits = j->bad_bits,
	};
	memcpy(ret->error, j->error, sizeof(ret->error));
}

static void stream_free(void *arg)
{
	struct stream *st = arg;

	if (!st->finished)
		eng_job_cancel(st->s->opt.jobs, st->job);
	eng_job_put(st->job);
	__atomic_sub_fetch(&st->s->active, 1, __ATOMIC_RELAXED);
	free(st->out);
	free(st);
}

/* Append a malloc'd event to what is sent next. */
static int stream_append(struct stream *st, char *event)
{
	size_t n = event ? strlen(event) : 0;
	char *out = event ? realloc(st->out, st->nr_out + n + 1) : NULL;

	if (!out) {
		free(event);
		return -ENOMEM;
	}
	memcpy(out + st->nr_out, event, n + 1);
	st->out = out;
	st->nr_out += n;
	free(event);
	return 0;
}

/* The last events: rest of the text with finish_reason or an error, usage, [DONE]. */
static int stream_end(struct stream *st, const char *text, size_t nr,
		      const struct eng_reply_end *end)
{
	struct eng_api_error err;
	char *json, *event = NULL;
	int rc;

	if (eng_reply_end_error(end, &err)) {
		json = eng_reply_error(&err);
		if (json && asprintf(&event, "data: %s\n\n", json) < 0)
			event = NULL;
		free(json);
		rc = stream_append(st, event);
	} else {
		rc = stream_append(st, eng_reply_chunk(&st->head, text, nr, end));
		if (!rc && st->job->p.include_usage)
			rc = stream_append(st, eng_reply_usage(&st->head, end));
	}
	if (!rc)
		rc = stream_append(st, strdup("data: [DONE]\n\n"));
	st->finished = true;
	return rc;
}

/* What the client may see from @from on, as many bytes as *@ret_nr; NUL may be among them. */
static char *text_copy_locked(const struct eng_job *j, size_t from, size_t *ret_nr)
{
	size_t nr = j->nr_shown - from;
	char *text = malloc(nr + 1);

	if (!text)
		return NULL;
	if (nr)
		memcpy(text, j->text + from, nr);
	text[nr] = 0;
	*ret_nr = nr;
	return text;
}

/* Fill st->out with the next events. Return: 0; -EPIPE the client is gone; -ENOMEM. */
static int stream_next(struct stream *st)
{
	struct eng_job *j = st->job;
	struct eng_reply_end end;
	bool ended, here;
	size_t nr = 0;
	char *text;
	int rc;

	pthread_mutex_lock(&j->lock);
	here = eng_job_wait_locked(j, st->nr_sent, false, st->fd, PEER_POLL_NS);
	ended = j->ended;
	text = text_copy_locked(j, st->nr_sent, &nr);
	end_of_locked(j, &end);
	pthread_mutex_unlock(&j->lock);
	st->nr_out = 0;
	st->at = 0;
	if (!here || !text) {
		free(text);
		return here ? -ENOMEM : -EPIPE;
	}
	st->nr_sent += nr;
	rc = ended ? stream_end(st, text, nr, &end)
		   : stream_append(st, eng_reply_chunk(&st->head, text, nr, NULL));
	free(text);
	return rc;
}

static ssize_t stream_read(void *arg, uint64_t pos, char *buf, size_t max)
{
	struct stream *st = arg;
	size_t n;

	if (st->at == st->nr_out) {
		if (st->finished)
			return MHD_CONTENT_READER_END_OF_STREAM;
		if (stream_next(st))
			return MHD_CONTENT_READER_END_WITH_ERROR;
	}
	n = KV_MIN(max, st->nr_out - st->at);
	memcpy(buf, st->out + st->at, n);
	st->at += n;
	return (ssize_t)n;
}

static enum MHD_Result respond_stream(struct MHD_Connection *c, struct stream *st)
{
	struct MHD_Response *r = MHD_create_response_from_callback(
		MHD_SIZE_UNKNOWN, STREAM_BLOCK, stream_read, st, stream_free);
	enum MHD_Result rc;

	if (!r) {
		stream_free(st);
		return MHD_NO;
	}
	MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream");
	MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
	rc = MHD_queue_response(c, MHD_HTTP_OK, r);
	MHD_destroy_response(r);
	return rc;
}

static enum MHD_Result respond_whole(struct MHD_Connection *c, struct stream *st)
{
	struct eng_job *j = st->job;
	struct eng_api_error err;
	struct eng_reply_end end;
	enum MHD_Result rc = MHD_NO;
	size_t nr = 0;
	char *text;
	bool here;

	pthread_mutex_lock(&j->lock);
	here = eng_job_wait_locked(j, st->nr_sent, true, st->fd, PEER_POLL_NS);
	text = text_copy_locked(j, 0, &nr);
	end_of_locked(j, &end);
	pthread_mutex_unlock(&j->lock);
	st->finished = here;
	if (here && text && eng_reply_end_error(&end, &err))
		rc = respond_error(c, &err);
	else if (here && text)
		rc = respond(c, MHD_HTTP_OK,
			     eng_reply_completion(&st->head, text, nr, &end),
			     "application/json");
	free(text);
	stream_free(st);
	return rc;
}

/* Queue the job. On failure @params is gone and an error was answered. */
static struct stream *stream_create(struct eng_http *s, struct MHD_Connection *c,
				    struct eng_job_params *params,
				    enum MHD_Result *ret_rc)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
	struct stream *st = calloc(1, sizeof(*st));
	int rc;

	*ret_rc = MHD_NO;
	if (!st || !info) {
		eng_job_params_free(params);
		free(st);
		return NULL;
	}
	st->s = s;
	st->fd = info->connect_fd;
	st->head.model = s->opt.model_name;
	st->head.created = time(NULL);
	snprintf(
		st->head.id, sizeof(st->head.id), "cmpl-%llx-%llu",
		(unsigned long long)s->created,
		(unsigned long long)__atomic_add_fetch(&s->next_id, 1, __ATOMIC_RELAXED));
	st->job = eng_job_create(s->opt.m->tok, params);
	rc = st->job ? eng_jobs_push(s->opt.jobs, st->job) : -ENOMEM;
	if (!rc) {
		__atomic_add_fetch(&s->active, 1, __ATOMIC_RELAXED);
		return st;
	}
	if (st->job)
		eng_job_put(st->job);
	free(st);
	*ret_rc = respond_simple(c, rc == -EAGAIN ? 429 : 503,
				 rc == -EAGAIN ? "the queue is full"
					       : "the server is stopping");
	return NULL;
}

static enum MHD_Result completions(struct eng_http *s, struct MHD_Connection *c,
				   const struct call *call)
{
	struct eng_job_params params;
	struct eng_api_error err;
	enum MHD_Result rc;
	struct stream *st;
	bool streams;

	/* the timeout is for idle clients; this one waits for us. on_completed() sets it again */
	MHD_set_connection_option(c, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
	if (call->too_large)
		return respond_simple(c, MHD_HTTP_CONTENT_TOO_LARGE,
				      "body: more than 4 MiB");
	if (eng_params_parse(call->body ? call->body : "", call->nr_body,
			     s->opt.model_name, s->opt.m, &params, &err)) {
		if (!err.status)
			return MHD_NO;
		return respond_error(c, &err);
	}
	streams = params.stream;
	st = stream_create(s, c, &params, &rc);
	if (!st)
		return rc;
	return streams ? respond_stream(c, st) : respond_whole(c, st);
}

static enum MHD_Result get_models(struct eng_http *s, struct MHD_Connection *c,
				  const struct call *call)
{
	return respond(c, MHD_HTTP_OK, eng_reply_models(s->opt.model_name, s->created),
		       "application/json");
}

static enum MHD_Result get_health(struct eng_http *s, struct MHD_Connection *c,
				  const struct call *call)
{
	bool ok = __atomic_load_n(&s->healthy, __ATOMIC_RELAXED);

	return respond(c, ok ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE,
		       strdup(ok ? "{\"status\":\"ok\"}" : "{\"status\":\"failed\"}"),
		       "application/json");
}

static enum MHD_Result get_metrics(struct eng_http *s, struct MHD_Connection *c,
				   const struct call *call)
{
	struct eng_stats st;

	eng_engine_stats(s->opt.jobs->engine, &st);
	return respond(c, MHD_HTTP_OK,
		       eng_reply_metrics(&st, s->opt.model_name, s->opt.attention,
					 __atomic_load_n(&s->active, __ATOMIC_RELAXED)),
		       "application/openmetrics-text; version=1.0.0; charset=utf-8");
}

static const struct {
	const char *method;
	const char *path;
	enum MHD_Result (*answer)(struct eng_http *s, struct MHD_Connection *c,
				  const struct call *call);
} routes[] = {
	{"POST", "/v1/completions", completions},
	{"GET", "/v1/models", get_models},
	{"GET", "/health", get_health},
	{"GET", "/metrics", get_metrics},
};

static enum MHD_Result dispatch(struct eng_http *s, struct MHD_Connection *c,
				const char *method, const char *path,
				const struct call *call)
{
	bool known = false;

	for (size_t i = 0; i < KV_ARRAY_SIZE(routes); i++) {
		if (strcmp(path, routes[i].path))
			continue;
		known = true;
		if (!strcmp(method, routes[i].method))
			return routes[i].answer(s, c, call);
	}
	return known ? respond_simple(c, MHD_HTTP_METHOD_NOT_ALLOWED,
				      "method not allowed here")
		     : respond_simple(c, MHD_HTTP_NOT_FOUND, "no such path");
}

static void take_body(struct call *call, const char *data, size_t nr)
{
	char *body;

	if (call->too_large || call->nr_body + nr > BODY_MAX) {
		call->too_large = true;
		return;
	}
	body = realloc(call->body, call->nr_body + nr + 1);
	if (!body) {
		call->too_large = true;
		return;
	}
	memcpy(body + call->nr_body, data, nr);
	call->body = body;
	call->nr_body += nr;
	body[call->nr_body] = 0;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *c, const char *path,
				  const char *method, const char *version,
				  const char *data, size_t *nr_data, void **call_ptr)
{
	struct call *call = *call_ptr;

	if (!call) {
		call = *call_ptr = calloc(1, sizeof(*call));
		if (!call)
			return MHD_NO;
		__atomic_add_fetch(&((struct eng_http *)arg)->in_flight, 1,
				   __ATOMIC_RELAXED);
		return MHD_YES;
	}
	if (*nr_data) {
		take_body(call, data, *nr_data);
		*nr_data = 0;
		return MHD_YES;
	}
	return dispatch(arg, c, method, path, call);
}

static void on_completed(void *arg, struct MHD_Connection *c, void **call_ptr,
			 enum MHD_RequestTerminationCode code)
{
	struct eng_http *s = arg;
	struct call *call = *call_ptr;

	if (!call)
		return;
	__atomic_sub_fetch(&s->in_flight, 1, __ATOMIC_RELAXED);
	MHD_set_connection_option(c, MHD_CONNECTION_OPTION_TIMEOUT, IDLE_TIMEOUT_S);
	free(call->body);
	free(call);
	*call_ptr = NULL;
}

int eng_http_start(const struct eng_http_options *opt, struct eng_http **ret,
		   struct eng_err *err)
{
	struct eng_http *s = calloc(1, sizeof(*s));
	int rc;

	if (!s)
		return eng_refuse(err, -ENOMEM, "out of memory");
	s->opt = *opt;
	s->created = time(NULL);
	s->healthy = true;
	rc = eng_listen(opt->listen, opt->unix_path, &s->listener, err);
	if (rc)
		goto free_server;
	s->daemon = MHD_start_daemon(
		MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD |
			MHD_USE_POLL | MHD_USE_ITC,
		0, NULL, NULL, on_request, s, MHD_OPTION_LISTEN_SOCKET, s->listener.fd,
		MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX,
		MHD_OPTION_CONNECTION_TIMEOUT, IDLE_TIMEOUT_S,
		MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_END);
	if (!s->daemon) {
		rc = eng_refuse(err, -EIO, "libmicrohttpd did not start");
		goto close_listener;
	}
	*ret = s;
	return 0;
close_listener:
	eng_listener_close(&s->listener, true);
free_server:
	free(s);
	return rc;
}

u32 eng_http_port(const struct eng_http *s)
{
	return s->listener.port;
}

void eng_http_set_healthy(struct eng_http *s, bool healthy)
{
	__atomic_store_n(&s->healthy, healthy, __ATOMIC_RELAXED);
}

void eng_http_stop(struct eng_http *s)
{
	u64 end_ns = kv_now_ns() + STOP_WAIT_NS;

	MHD_quiesce_daemon(s->daemon); /* the listening socket is ours again */
	while (__atomic_load_n(&s->in_flight, __ATOMIC_RELAXED) && kv_now_ns() < end_ns) {
		struct timespec ts = {0, 1000000};

		nanosleep(&ts, NULL);
	}
	MHD_stop_daemon(s->daemon); /* would cut off answers still being written */
	eng_listener_close(&s->listener, true);
	free(s);
}
