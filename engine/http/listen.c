/* SPDX-License-Identifier: Apache-2.0 */
/* listen.c - listening sockets (see listen.h). */
#include "engine/http/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG 128

static int parse_port(const char *address, const char *colon, struct eng_err *err)
{
	char *end;
	unsigned long port = strtoul(colon + 1, &end, 10);

	if (*end || end == colon + 1 || port > 65535)
		return eng_refuse(err, -EINVAL, "listen=%s: bad port", address);
	return (int)port;
}

static int listen_tcp(const char *address, struct eng_listener *ret, struct eng_err *err)
{
	const char *colon = strrchr(address, ':');
	size_t n = colon ? (size_t)(colon - address) : 0;
	bool v6 = n == 5 && !memcmp(address, "[::1]", 5);
	bool v4 = (n == 9 && !memcmp(address, "127.0.0.1", 9)) ||
		  (n == 9 && !memcmp(address, "localhost", 9));
	struct sockaddr_in a4 = {.sin_family = AF_INET};
	struct sockaddr_in6 a6 = {.sin6_family = AF_INET6,
				  .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	socklen_t size = v6 ? sizeof(a6) : sizeof(a4);
	struct sockaddr *a = v6 ? (struct sockaddr *)&a6 : (struct sockaddr *)&a4;
	int port, one = 1, rc;

	if (!v4 && !v6)
		return eng_refuse(
			err, -EINVAL,
			"listen=%s: not 127.0.0.1:PORT, localhost:PORT or [::1]:PORT",
			address);
	port = parse_port(address, colon, err);
	if (port < 0)
		return port;
	a4.sin_port = htons((u16)port);
	a4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	a6.sin6_port = htons((u16)port);
	ret->fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (ret->fd < 0)
		return eng_refuse(err, -errno, "socket: %s", strerror(errno));
	setsockopt(ret->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(ret->fd, a, size) || listen(ret->fd, BACKLOG) ||
	    getsockname(ret->fd, a, &size)) {
		rc = eng_refuse(err, -errno, "listen=%s: %s", address, strerror(errno));
		close(ret->fd);
		return rc;
	}
	ret->port = ntohs(v6 ? a6.sin6_port : a4.sin_port);
	return 0;
}

/* A socket that nobody listens on is left from a crash. */
static void remove_dead_socket(const struct sockaddr_un *a)
{
	struct stat st;
	int fd;

	if (lstat(a->sun_path, &st) || !S_ISSOCK(st.st_mode))
		return;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	if (connect(fd, (const struct sockaddr *)a, sizeof(*a)) && errno == ECONNREFUSED)
		unlink(a->sun_path);
	close(fd);
}

static int listen_unix(const char *path, struct eng_listener *ret, struct eng_err *err)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	int rc;

	if (strlen(path) >= sizeof(a.sun_path))
		return eng_refuse(err, -EINVAL, "unix=%s: longer than %zu bytes", path,
				  sizeof(a.sun_path) - 1);
	strcpy(a.sun_path, path);
	remove_dead_socket(&a);
	ret->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (ret->fd < 0)
		return eng_refuse(err, -errno, "socket: %s", strerror(errno));
	if (bind(ret->fd, (struct sockaddr *)&a, sizeof(a)) || listen(ret->fd, BACKLOG)) {
		rc = eng_refuse(err, -errno, "unix=%s: %s", path, strerror(errno));
		close(ret->fd);
		return rc;
	}
	strcpy(ret->path, path);
	return 0;
}

int eng_listen(const char *address, const char *path, struct eng_listener *ret,
	       struct eng_err *err)
{
	memset(ret, 0, sizeof(*ret));
	ret->fd = -1;
	if (!address == !path)
		return eng_refuse(err, -EINVAL, "give one of --listen and --unix");
	return address ? listen_tcp(address, ret, err) : listen_unix(path, ret, err);
}

void eng_listener_close(struct eng_listener *l, bool close_fd)
{
	if (close_fd && l->fd >= 0)
		close(l->fd);
	if (l->path[0])
		unlink(l->path);
	l->fd = -1;
}
