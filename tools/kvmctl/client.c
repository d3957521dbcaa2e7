/* SPDX-License-Identifier: Apache-2.0 */
/* client.c - one JSON line to the admin socket, one back. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "tools/kvmctl/kvmctl.h"

#define REPLY_BYTES_MAX (128u << 20)

cJSON *ctl_request(const char *op)
{
	cJSON *request = cJSON_CreateObject();

	cJSON_AddStringToObject(request, "op", op);
	return request;
}

/*
 * A keeper holds the socket while there is no kvmd, so that commands wait for the next one. One
 * that starts or hangs holds a lock beside it (kv/abi.h).
 */
static bool kvmd_is_gone(const struct ctl *ctl)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	char *real = realpath(ctl->args.socket, NULL); /* not beside a link */
	char path[PATH_MAX + sizeof(KVMD_ADMIN_LOCK_SUFFIX)];
	int fd, r;

	snprintf(path, sizeof(path), "%s" KVMD_ADMIN_LOCK_SUFFIX,
		 real ? real : ctl->args.socket);
	free(real);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0)
		return false; /* who knows */
	r = fcntl(fd, F_GETLK, &lock);
	close(fd);
	return !r && lock.l_type == F_UNLCK;
}

static int no_answer(struct ctl *ctl)
{
	if (kvmd_is_gone(ctl))
		return ctl_error(ctl, CTL_NO_DAEMON,
				 "%s: kvmd is not running there: no other came within "
				 "%g s, its keeper holds everything for one",
				 ctl->args.socket, ctl->args.timeout_s);
	return ctl_error(ctl, CTL_TIMEOUT, "no answer within %g s", ctl->args.timeout_s);
}

static int connect_error(struct ctl *ctl, int err)
{
	const char *path = ctl->args.socket;

	if (err == EAGAIN) /* nobody accepts */
		return no_answer(ctl);

	if (err == EACCES || err == EPERM)
		return ctl_error(ctl, CTL_DENIED,
				 "%s: permission denied (root and kvmd's user may)",
				 path);
	if (err == ENOENT || err == ECONNREFUSED)
		return ctl_error(ctl, CTL_NO_DAEMON, "%s: kvmd is not running there",
				 path);
	return ctl_error(ctl, CTL_FAILED, "%s: %s", path, strerror(err));
}

/*
 * A kvmd that hangs leaves its queue of connections to fill up, with those of all who gave
 * up: then connect() waits as well. Return: fd >= 0; -exit code
 */
static int connect_admin(struct ctl *ctl)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct timeval wait = {.tv_sec = (time_t)ctl->args.timeout_s};
	int fd;

	if (strlen(ctl->args.socket) >= sizeof(addr.sun_path))
		return -ctl_error(ctl, CTL_USAGE, "--socket: path longer than %zu bytes",
				  sizeof(addr.sun_path) - 1);
	strcpy(addr.sun_path, ctl->args.socket);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -ctl_error(ctl, CTL_FAILED, "socket: %s", strerror(errno));
	wait.tv_usec = (suseconds_t)((ctl->args.timeout_s - (double)wait.tv_sec) * 1e6);
	if (!wait.tv_sec && !wait.tv_usec)
		wait.tv_usec = 1; /* 0 would be for ever */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr))) {
		int err = errno;

		close(fd);
		return -connect_error(ctl, err);
	}
	return fd;
}

static int send_request(struct ctl *ctl, int fd, cJSON *request)
{
	char *text = cJSON_PrintUnformatted(request);
	size_t len, done = 0;
	ssize_t n = 0;

	cJSON_Delete(request);
	if (!text)
		return ctl_error(ctl, CTL_FAILED, "out of memory");
	len = strlen(text);
	text[len++] = '\n'; /* in place of the NUL */
	while (done < len && n >= 0) {
		n = send(fd, text + done, len - done, MSG_NOSIGNAL);
		done += n > 0 ? (size_t)n : 0;
	}
	cJSON_free(text);
	/* A peer that hung up may have said why: reading finds out. */
	return CTL_OK;
}

/* Waits for bytes. Return: CTL_OK; exit code */
static int wait_readable(struct ctl *ctl, int fd, u64 deadline_ns)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};
	u64 now;
	int r;

	do {
		now = kv_now_ns();
		if (now >= deadline_ns)
			return no_answer(ctl);
		r = poll(&p, 1, (int)((deadline_ns - now) / KV_NSEC_PER_MSEC) + 1);
	} while (r == 0 || (r < 0 && errno == EINTR));
	return r < 0 ? ctl_error(ctl, CTL_FAILED, "poll: %s", strerror(errno)) : CTL_OK;
}

static u64 deadline_of(const struct ctl *ctl)
{
	return kv_now_ns() + (u64)(ctl->args.timeout_s * 1e9);
}

/* Reads up to a newline. *ret_text is the caller's. */
static int read_line(struct ctl *ctl, int fd, u64 deadline, char **ret_text)
{
	size_t used = 0, room = 65536;
	char *text = malloc(room), *more;
	ssize_t n;
	int r = CTL_OK;

	while (text && r == CTL_OK) {
		if (used + 1 == room) {
			more = room < REPLY_BYTES_MAX ? realloc(text, room * 2) : NULL;
			if (!more) {
				r = ctl_error(ctl, CTL_FAILED, "the reply is too long");
				break;
			}
			text = more;
			room *= 2;
		}
		r = wait_readable(ctl, fd, deadline);
		if (r)
			break;
		n = recv(fd, text + used, room - 1 - used, 0);
		if (n <= 0) {
			r = ctl_error(ctl, CTL_NO_DAEMON, "kvmd hung up");
			break;
		}
		used += (size_t)n;
		if (text[used - 1] == '\n') {
			text[used - 1] = 0;
			*ret_text = text;
			return CTL_OK;
		}
	}
	free(text);
	return r;
}

static int exit_of(const struct ctl *ctl, int code)
{
	if (code > 0 || code == -EBUSY || code == -ESTALE)
		return CTL_REFUSED;
	switch (code) {
	case -EACCES:
	case -EPERM:
		return CTL_DENIED;
	case -ENOENT:
		return CTL_NO_OBJECT;
	case -EINVAL:
		return strcmp(ctl->verb->name, "reload") ? CTL_USAGE : CTL_FAILED;
	}
	return CTL_FAILED;
}

static int reply_check(struct ctl *ctl, cJSON *reply)
{
	const cJSON *ok = cJSON_GetObjectItemCaseSensitive(reply, "ok");

	if (!cJSON_IsObject(reply) || !cJSON_IsBool(ok))
		return ctl_error(ctl, CTL_FAILED,
				 "kvmd's reply is not what this kvmctl knows");
	if (cJSON_IsTrue(ok))
		return CTL_OK;
	return ctl_error(ctl, exit_of(ctl, (int)ctl_num(reply, "code")), "%s",
			 ctl_str(reply, "error"));
}

int ctl_ask(struct ctl *ctl, cJSON *request, cJSON **ret_reply)
{
	u64 deadline = deadline_of(ctl);
	char *text = NULL;
	cJSON *reply;
	int fd, r;

	fd = connect_admin(ctl);
	if (fd < 0) {
		cJSON_Delete(request);
		return -fd;
	}
	r = send_request(ctl, fd, request);
	if (!r)
		r = read_line(ctl, fd, deadline, &text);
	close(fd);
	if (r)
		return r;
	reply = cJSON_Parse(text);
	free(text);
	r = reply_check(ctl, reply);
	if (r) {
		cJSON_Delete(reply);
		return r;
	}
	*ret_reply = reply;
	return CTL_OK;
}

/* The first line says whether the stream has begun. Return: CTL_OK; exit code */
static int stream_begun(struct ctl *ctl, const char *text)
{
	cJSON *reply = cJSON_Parse(text);
	int r = reply_check(ctl, reply);

	cJSON_Delete(reply);
	return r;
}

int ctl_stream(struct ctl *ctl, cJSON *request,
	       void (*line)(struct ctl *ctl, const char *text))
{
	u64 deadline = deadline_of(ctl);
	bool begun = false;
	char *text = NULL;
	size_t room = 0;
	ssize_t n;
	FILE *f;
	int fd, r;

	fd = connect_admin(ctl);
	if (fd < 0) {
		cJSON_Delete(request);
		return -fd;
	}
	r = send_request(ctl, fd, request);
	if (!r)
		r = wait_readable(ctl, fd, deadline);
	f = r ? NULL : fdopen(fd, "r");
	if (!f) {
		close(fd);
		return r ? r : CTL_FAILED;
	}
	while (!r && (n = getline(&text, &room, f)) > 0) {
		if (text[n - 1] == '\n')
			text[n - 1] = 0;
		if (begun)
			line(ctl, text);
		else
			r = stream_begun(ctl, text);
		begun = true;
		fflush(stdout);
	}
	free(text);
	fclose(f);
	return r ? r : ctl_error(ctl, CTL_NO_DAEMON, "kvmd hung up");
}
