/* SPDX-License-Identifier: Apache-2.0 */
/*
 * server.h - libmicrohttpd in front of the job queue.
 *
 * One thread per connection (libmicrohttpd's); it parses, queues, waits and writes. The
 * engine stays with the loop: HTTP threads reach it only through struct eng_jobs.
 *
 * Routes: POST /v1/completions; GET /v1/models, /health, /metrics.
 */
#ifndef ENG_HTTP_SERVER_H
#define ENG_HTTP_SERVER_H

#include "engine/http/job.h"

struct eng_http;

/**
 * struct eng_http_options - where and what to serve
 * @listen: "127.0.0.1:PORT" or "[::1]:PORT" (loopback only), or NULL
 * @unix_path: path of a Unix socket to create, or NULL. Exactly one of both
 * @model_name: served under this name
 * @attention: "exact" or "fast", for /metrics
 * @m: borrowed
 * @jobs: borrowed
 */
struct eng_http_options {
	const char *listen;
	const char *unix_path;
	const char *model_name;
	const char *attention;
	const struct eng_model *m;
	struct eng_jobs *jobs;
};

/**
 * eng_http_start() - listen and serve
 * Return: 0; -EINVAL a bad address; -errno of bind and listen; @err says which.
 */
int eng_http_start(const struct eng_http_options *opt, struct eng_http **ret,
		   struct eng_err *err);

/** eng_http_port() - TCP port (useful with port 0), or 0 on a Unix socket */
u32 eng_http_port(const struct eng_http *s);

/** eng_http_set_healthy() - what GET /health answers. Context: any thread */
void eng_http_set_healthy(struct eng_http *s, bool healthy);

/** eng_http_stop() - stop listening, wait for all connections; eng_jobs_close() was
 * called */
void eng_http_stop(struct eng_http *s);

#endif /* ENG_HTTP_SERVER_H */
