/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_serve.c - `kv-engine serve`: the engine's loop with HTTP in front (engine/http).
 *
 * The main thread is the loop; HTTP threads only queue jobs and wake it. SIGTERM and
 * SIGINT end it: running requests are aborted and answered, pages go back, the session
 * ends.
 */
#include "engine/cli.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/http/server.h"

#define IDLE_MS 1000

static int loop(struct eng_host *h, struct eng_jobs *jobs, struct eng_http *http)
{
	while (!eng_stop_signal) {
		int rc;

		eng_jobs_turn(jobs);
		rc = eng_engine_turn(h->e);
		if (rc < 0) {
			fprintf(stderr, "kv-engine: %s\n", strerror(-rc));
			eng_http_set_healthy(http, false);
			return ENG_EXIT_FAIL;
		}
		if (rc == 0)
			eng_engine_wait(h->e, IDLE_MS);
	}
	return ENG_EXIT_OK;
}

/* The last part of the directory's name. */
static const char *served_name(const char *dir, char *buf, size_t bytes)
{
	size_t n = strlen(dir);
	const char *slash;

	while (n > 1 && dir[n - 1] == '/')
		n--;
	snprintf(buf, bytes, "%.*s", (int)KV_MIN(n, bytes - 1), dir);
	slash = strrchr(buf, '/');
	return slash && slash[1] ? slash + 1 : buf;
}

static int serve(const struct eng_cli *cli, struct eng_host *h)
{
	char buf[PATH_MAX];
	struct eng_jobs jobs;
	struct eng_http_options opt = {
		.listen = cli->listen,
		.unix_path = cli->unix_path,
		.model_name = served_name(cli->model, buf, sizeof(buf)),
		.attention = eng_attention_str(cli->attention),
		.m = h->m,
		.jobs = &jobs,
	};
	struct eng_err err = {{0}};
	struct eng_http *http;
	int rc;

	eng_jobs_init(&jobs, h->e, h->m->tok);
	if (eng_http_start(&opt, &http, &err)) {
		fprintf(stderr, "kv-engine: %s\n", err.text);
		return ENG_EXIT_FAIL;
	}
	if (cli->unix_path)
		fprintf(stderr, "kv-engine: serving %s on %s\n", opt.model_name,
			cli->unix_path);
	else
		fprintf(stderr, "kv-engine: serving %s on port %u\n", opt.model_name,
			eng_http_port(http));
	rc = loop(h, &jobs, http);
	eng_jobs_close(&jobs);
	eng_http_stop(http);
	return rc;
}

int eng_cmd_serve(const struct eng_cli *cli)
{
	struct eng_host h;
	int rc;

	if (!cli->listen == !cli->unix_path) {
		fprintf(stderr, "kv-engine serve: give one of --listen and --unix\n");
		return ENG_EXIT_USAGE;
	}
	if (cli->inject || cli->check || cli->host_bytes) {
		fprintf(stderr,
			"kv-engine serve: --inject, --check and --host-bytes are for run, "
			"eval and bench\n");
		return ENG_EXIT_USAGE;
	}
	rc = eng_host_open(cli, &h);
	if (rc)
		return rc;
	rc = serve(cli, &h);
	eng_host_close(&h);
	return rc;
}
