/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/listen.c - see listen.h. */
#include "kvmd/ipc/listen.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"

#define ACCEPT_BATCH 16
#define RETRIES	     200
#define RETRY_NS     2000000

/*
 * No fd is left for the peer: give up the spare one to take it, close it, get the spare
 * back. Left in the queue it would keep the socket readable and the loop busy (cases
 * O58).
 */
static void refuse_one(struct kvd_listen *l)
{
	struct kvd *kvd = l->kvd;
	int fd;

	kvd_stats.fd_shortages++;
	kvd_stats.connections_refused++;
	kvd_warn("ipc/listen", "%s: no file descriptor left: a peer was refused",
		 l->path);
	if (KV_MUTANT(no_spare_fd))
		return;
	if (kvd->spare_fd >= 0)
		close(kvd->spare_fd);
	fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd >= 0)
		close(fd);
	else if (errno == EMFILE || errno == ENFILE)
		kvd_loop_del(kvd->loop,
			     &l->watch); /* not even so: leave them to the next tick */
	kvd->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* ------------------------------------------------------------------- paces */

static u32 nr_waiting_of(const struct kvd_listen *l, u32 uid)
{
	u32 i, nr = 0;

	for (i = 0; i < l->nr_waiting; i++)
		nr += l->waiting[i].uid == uid;
	return nr;
}

static bool uid_of(int fd, u32 *ret_uid)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len))
		return false;
	*ret_uid = cred.uid;
	return true;
}

/* Return: false: its uid is too fast, and the connection waits or is over. */
static bool admit(struct kvd_listen *l, int fd)
{
	u32 uid, nr;

	if (!l->paced || !uid_of(fd, &uid)) {
		l->accepted(l->kvd, fd);
		return true;
	}
	nr = nr_waiting_of(l, uid);
	/* not before those of its uid that came earlier */
	if (!nr && kvd_pace_take(&l->pace, uid, l->kvd->now_ns)) {
		l->accepted(l->kvd, fd);
		return true;
	}
	if (nr == KVD_WAITING_UID_MAX || l->nr_waiting == KVD_WAITING_MAX) {
		kvd_stats.connections_refused++;
		kvd_stats.connections_too_fast++;
		kvd_warn("ipc/listen", "uid %u connects too fast: refused", uid);
		close(fd);
		return false;
	}
	kvd_stats.connections_delayed++;
	l->waiting[l->nr_waiting].fd = fd;
	l->waiting[l->nr_waiting++].uid = uid;
	return false;
}

/* Those who may go now. A uid whose oldest one may not has spent all it had. */
static void waiting_release(struct kvd_listen *l)
{
	u32 i, kept = 0, nr = l->nr_waiting;

	for (i = 0; i < nr; i++) {
		if (kvd_pace_take(&l->pace, l->waiting[i].uid, l->kvd->now_ns))
			l->accepted(l->kvd, l->waiting[i].fd);
		else
			l->waiting[kept++] = l->waiting[i];
	}
	l->nr_waiting = kept;
}

/* Return: whether all who came were let in. */
static bool accept_some(struct kvd_listen *l, u32 nr_max)
{
	bool all = true;
	u32 i;
	int fd;

	for (i = 0; i < nr_max; i++) {
		errno = EMFILE; /* a sweep is steered through the admin socket: never
				   there */
		fd = l == &l->kvd->engine_listen && kvd_fault(KVD_FAULT_accept)
			     ? -1
			     : accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
			refuse_one(l);
			break;
		}
		if (fd < 0)
			break;
		kvd_stats.connections++;
		all &= admit(l, fd);
	}
	return all;
}

static void listen_ready(void *arg, u32 events)
{
	struct kvd_listen *l = arg;

	if (accept_some(l, ACCEPT_BATCH))
		return;
	kvd_loop_del(l->kvd->loop, &l->watch);
	l->again_ns = l->kvd->now_ns + KVD_PAUSE_NS;
}

void kvd_listen_turn(struct kvd_listen *l)
{
	bool all;

	if (!l->again_ns || l->kvd->now_ns < l->again_ns)
		return;
	waiting_release(l);
	all = accept_some(l, KVD_PAUSE_BATCH);
	if (!all || l->nr_waiting) {
		l->again_ns = l->kvd->now_ns + KVD_PAUSE_NS;
		return;
	}
	l->again_ns = 0;
	kvd_listen_tick(l);
}

/* ----------------------------------------------------------------- the path */

static int path_connect(const struct sockaddr_un *addr, int type)
{
	int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), r;

	if (fd < 0)
		return -errno;
	r = connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) ? -errno : 0;
	close(fd);
	return r;
}

/*
 * Is somebody behind this path? The kernel takes an io_uring apart after its process has
 * ended, and until then a killed daemon's socket still answers.
 */
static int path_clear(const struct sockaddr_un *addr, int type, char *error)
{
	struct timespec ts = {0, RETRY_NS};
	struct stat st;
	int i, r;

	if (lstat(addr->sun_path, &st))
		return errno == ENOENT ? 0 : -errno;
	if (!S_ISSOCK(st.st_mode) && !KV_MUTANT(foreign_file_removed)) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s: exists and is no socket",
			 addr->sun_path);
		return -EEXIST;
	}
	r = path_connect(addr, type);
	for (i = 0; i < RETRIES && (r == 0 || r == -EAGAIN); i++) {
		nanosleep(&ts, NULL);
		r = path_connect(addr, type);
	}
	if (r == 0 || r == -EAGAIN) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES,
			 "%s: another daemon answers there", addr->sun_path);
		return -EADDRINUSE;
	}
	return unlink(addr->sun_path) ? -errno : 0;
}

/* A socket that was kept serves the path it was bound to, with those who wait in it. */
static bool is_at(int fd, const char *path)
{
	struct sockaddr_un addr = {.sun_family = AF_UNSPEC};
	socklen_t len = sizeof(addr);

	return !getsockname(fd, (struct sockaddr *)&addr, &len) &&
	       addr.sun_family == AF_UNIX && !strcmp(addr.sun_path, path);
}

int kvd_listen_open(struct kvd *kvd, struct kvd_listen *l, const char *path, int type,
		    u32 mode, void (*accepted)(struct kvd *kvd, int fd), int kept_fd,
		    char *error)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct stat st;
	mode_t mask;
	int r;

	*l = (struct kvd_listen){
		.fd = -1, .path = path, .kvd = kvd, .accepted = accepted};
	if (strlen(path) >= sizeof(addr.sun_path)) {
		snprintf(error, KVD_CONFIG_ERROR_BYTES,
			 "%.100s...: longer than %zu bytes", path,
			 sizeof(addr.sun_path) - 1);
		return -ENAMETOOLONG;
	}
	strcpy(addr.sun_path, path);
	error[0] = 0;
	if (kept_fd >= 0 && !lstat(path, &st) && S_ISSOCK(st.st_mode) &&
	    is_at(kept_fd, path)) {
		l->fd = kept_fd;
		goto serve;
	}
	if (kept_fd >= 0)
		close(kept_fd);
	r = path_clear(&addr, type, error);
	if (r)
		goto out;
	l->fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (l->fd < 0) {
		r = -errno;
		goto out;
	}
	mask = umask(0177);
	r = bind(l->fd, (struct sockaddr *)&addr, sizeof(addr)) ? -errno : 0;
	umask(mask);
	if (r)
		goto close_fd;
	if (chmod(path, mode) || listen(l->fd, 128) || lstat(path, &st)) {
		r = -errno;
		goto unlink_path;
	}
serve:
	l->inode = st.st_ino;
	l->watch.fd = l->fd;
	l->watch.events = KVD_LOOP_IN;
	l->watch.ready = listen_ready;
	l->watch.arg = l;
	l->paced = l == &kvd->engine_listen;
	r = kvd_loop_add(kvd->loop, &l->watch);
	if (!r)
		return 0;
unlink_path:
	unlink(path);
close_fd:
	close(l->fd);
	l->fd = -1;
out:
	if (!error[0])
		snprintf(error, KVD_CONFIG_ERROR_BYTES, "%s: %s", path, strerror(-r));
	return r;
}

void kvd_listen_tick(struct kvd_listen *l)
{
	if (l->fd >= 0 && !l->watch.id && !l->again_ns)
		kvd_loop_add(l->kvd->loop, &l->watch);
}

void kvd_listen_close(struct kvd_listen *l)
{
	struct stat st;

	if (l->fd < 0)
		return;
	kvd_loop_del(l->kvd->loop, &l->watch);
	close(l->fd);
	l->fd = -1;
	while (l->nr_waiting)
		close(l->waiting[--l->nr_waiting].fd);
	l->again_ns = 0;
	if (!lstat(l->path, &st) && st.st_ino == l->inode)
		unlink(l->path);
}
