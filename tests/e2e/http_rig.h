/* SPDX-License-Identifier: Apache-2.0 */
/*
 * http_rig.h - `kv-engine serve` on a Unix socket beside a private kvmd, and a client for it:
 * one request a connection, answers whole or as they came in chunks. Included by http.c alone.
 */
#ifndef TESTS_E2E_HTTP_RIG_H
#define TESTS_E2E_HTTP_RIG_H

#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>

extern char **environ;

#define REPLY_MAX (1u << 20)

static struct rig rig;
static char http_path[200];
static pid_t server;

struct reply {
	int status;
	char head[4096];
	char body[REPLY_MAX];
	size_t nr_body;
};

static struct reply rep;

/* kv-engine lies beside the private kvmd: $KV_BUILD, or above this program. */
static const char *engine_path(void)
{
	static char path[PATH_MAX + 16];
	const char *env = getenv("KV_BUILD");
	char exe[PATH_MAX];
	ssize_t n;

	if (env) {
		snprintf(path, sizeof(path), "%.4000s/kv-engine", env);
		return path;
	}
	n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	exe[n < 0 ? 0 : n] = 0;
	for (int i = 0; i < 4; i++) {
		char *slash = strrchr(exe, '/');

		if (!slash)
			break;
		*slash = 0;
		snprintf(path, sizeof(path), "%.4000s/kv-engine", exe);
		if (!access(path, X_OK))
			return path;
	}
	KVT_FAIL("kv-engine not found");
}

static int dial(void)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(a.sun_path, sizeof(a.sun_path), "%.100s", http_path);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a))) {
		close(fd);
		return -1;
	}
	return fd;
}

static void start_server(void)
{
	posix_spawn_file_actions_t actions;
	char model[PATH_MAX];
	const char *argv[] = {engine_path(), "serve", "--model", model,
			      "--socket",    NULL,    "--unix",	 http_path,
			      "--kv",	     "fp8",   NULL};

	rig_kvmd(&rig, NULL);
	argv[5] = rig.kvmd.socket_path;
	snprintf(model, sizeof(model), "%.3000s/tiny-k2", rig_models_dir());
	snprintf(http_path, sizeof(http_path), "%s/http.sock", rig.kvmd.dir);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
	KVT_EXPECT_EQ(posix_spawn(&server, argv[0], &actions, NULL, (char *const *)argv,
				  environ),
		      0);
	posix_spawn_file_actions_destroy(&actions);
	for (int i = 0; i < 1000; i++) {
		struct timespec ts = {0, 10000000};
		int fd = dial();

		if (fd >= 0) {
			close(fd);
			return;
		}
		KVT_EXPECT_EQ(waitpid(server, NULL, WNOHANG), 0);
		nanosleep(&ts, NULL);
	}
	KVT_FAIL("the server does not listen");
}

static void stop_server(void)
{
	int status;

	kill(server, SIGTERM);
	KVT_EXPECT_EQ(waitpid(server, &status, 0), server);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT(access(http_path, F_OK) != 0);
	rig_close(&rig);
}

static int send_request(const char *method, const char *path, const char *body)
{
	int fd = dial();

	KVT_EXPECT(fd >= 0);
	KVT_EXPECT(dprintf(fd,
			   "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
			   "Content-Length: %zu\r\n\r\n%s",
			   method, path, strlen(body), body) > 0);
	return fd;
}

static void decode_chunks(char *body, size_t *nr)
{
	char *from = body, *to = body;

	for (;;) {
		char *end;
		size_t n = strtoul(from, &end, 16);

		if (n == 0)
			break;
		memmove(to, end + 2, n);
		to += n;
		from = end + 2 + n + 2;
	}
	*nr = (size_t)(to - body);
	*to = 0;
}

static void read_reply(int fd)
{
	static char buf[REPLY_MAX];
	size_t n = 0;
	char *body;
	ssize_t r;

	while ((r = read(fd, buf + n, sizeof(buf) - 1 - n)) > 0)
		n += (size_t)r;
	close(fd);
	buf[n] = 0;
	body = strstr(buf, "\r\n\r\n");
	if (!body || sscanf(buf, "HTTP/1.1 %d", &rep.status) != 1)
		KVT_FAIL("no HTTP answer: %.200s", buf);
	*body = 0;
	body += 4;
	snprintf(rep.head, sizeof(rep.head), "%.4000s", buf);
	rep.nr_body = n - (size_t)(body - buf);
	memcpy(rep.body, body, rep.nr_body + 1);
	if (strstr(rep.head, "chunked"))
		decode_chunks(rep.body, &rep.nr_body);
}

static void http(const char *method, const char *path, const char *body)
{
	read_reply(send_request(method, path, body));
}

static cJSON *complete(const char *body)
{
	cJSON *o;

	http("POST", "/v1/completions", body);
	if (rep.status != 200)
		KVT_FAIL("status %d: %s", rep.status, rep.body);
	o = cJSON_Parse(rep.body);
	KVT_EXPECT(o);
	return o;
}

static const cJSON *choice(const cJSON *o)
{
	return cJSON_GetArrayItem(cJSON_GetObjectItem(o, "choices"), 0);
}

static const char *text_of(const cJSON *o)
{
	return cJSON_GetStringValue(cJSON_GetObjectItem(choice(o), "text"));
}

static const char *finish_of(const cJSON *o)
{
	return cJSON_GetStringValue(cJSON_GetObjectItem(choice(o), "finish_reason"));
}

static double usage_of(const cJSON *o, const char *field)
{
	const cJSON *u = cJSON_GetObjectItem(o, "usage");

	if (!strcmp(field, "cached_tokens"))
		u = cJSON_GetObjectItem(u, "prompt_tokens_details");
	KVT_EXPECT(cJSON_GetObjectItem(u, field));
	return cJSON_GetObjectItem(u, field)->valuedouble;
}

#endif /* TESTS_E2E_HTTP_RIG_H */
