/* SPDX-License-Identifier: Apache-2.0 */
/* keep/keep.c - kvmd's side of the keeper. See keep.h. */
#include "kvmd/keep/keep.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "kvmd/keep/talk.h"

#define DYING_MS       500
#define ANSWER_S       2
#define ANSWER_START_S 20

/* ----------------------------------------------------------------- starting one */

/* Becomes the keeper: not a child of ours, so that nobody has to wait for it. */
static void become_keeper(int listen_fd, int die_with)
{
	char fd_text[16], die_text[16];
	sigset_t none;

	if (setsid() < 0 || fork())
		_exit(0);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (dup2(listen_fd, 3) < 0)
		_exit(1);
	snprintf(fd_text, sizeof(fd_text), "%d", 3);
	snprintf(die_text, sizeof(die_text), "%d", die_with);
	execl("/proc/self/exe", "kvmd-keeper", "--keeper-process", fd_text, die_text,
	      NULL);
	_exit(1);
}

static int start(struct kvd_keep *k)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd, r = 0, status;
	mode_t mask;
	pid_t pid;

	strcpy(addr.sun_path, k->path);
	unlink(k->path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	mask = umask(0177);
	if (bind(fd, (struct sockaddr *)&addr, sizeof(addr)) || listen(fd, 8))
		r = -errno;
	umask(mask);
	pid = r ? -1 : fork();
	if (pid == 0)
		become_keeper(fd, k->die_with);
	if (pid < 0)
		r = r ? r : -errno;
	else if (waitpid(pid, &status, 0) == pid && status)
		r = -ECHILD;
	close(fd);
	if (!r)
		k->nr_started++;
	return r;
}

static void set_patience(const struct kvd_keep *k, int fd)
{
	struct timeval tv = {.tv_sec = k->answer_s};

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
}

static int connect_to(struct kvd_keep *k)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), r;

	if (fd < 0)
		return -errno;
	set_patience(k, fd); /* connect() waits, too, where many do */
	strcpy(addr.sun_path, k->path);
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr))) {
		r = -errno;
		close(fd);
		return r;
	}
	k->fd = fd;
	k->silent = false;
	return 0;
}

void kvd_keep_serving(struct kvd_keep *k)
{
	k->answer_s = ANSWER_S;
	if (k->fd >= 0)
		set_patience(k, k->fd);
}

int kvd_keep_open(struct kvd_keep *k, const char *state_dir, int die_with,
		  bool *ret_found)
{
	int r;

	k->fd = -1;
	k->die_with = die_with;
	k->nr_started = 0;
	k->silent = false;
	k->answer_s = KV_MUTANT(hasty_start) ? ANSWER_S : ANSWER_START_S;
	if ((size_t)snprintf(k->path, sizeof(k->path), "%s/keeper.sock", state_dir) >=
	    sizeof(k->path))
		return -ENAMETOOLONG;
	*ret_found = true;
	r = connect_to(k);
	if (r != -ENOENT && r != -ECONNREFUSED)
		return r;
	*ret_found = false;
	return kvd_keep_restart(k);
}

bool kvd_keep_lives(const struct kvd_keep *k)
{
	struct kvd_keep other = *k;
	struct pollfd p = {.events = POLLIN};
	int r = connect_to(&other);
	bool gone = false;

	if (!r) {
		/* One that is dying lets us in for a moment yet, and one that lives says
		 * nothing unasked. */
		p.fd = other.fd;
		gone = poll(&p, 1, DYING_MS) > 0;
		close(other.fd);
	}
	return !gone && r != -ENOENT && r != -ECONNREFUSED;
}

int kvd_keep_restart(struct kvd_keep *k)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_QUIT};
	int old = k->fd, r;

	/* It may only be slow: what it holds nobody would ever reach again. */
	if (old >= 0 && !KV_MUTANT(slow_keeper_stays))
		send(old, &m, sizeof(m), MSG_NOSIGNAL | MSG_DONTWAIT);
	k->fd = -1;
	r = start(k);
	/* Only now, when its place is taken: where its queue was full, that is how it knows. */
	if (old >= 0)
		close(old);
	return r ? r : connect_to(k);
}

void kvd_keep_close(struct kvd_keep *k, bool quit)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_QUIT};

	if (k->fd < 0)
		return;
	if (quit) {
		send(k->fd, &m, sizeof(m), MSG_NOSIGNAL);
		unlink(k->path);
	}
	close(k->fd);
	k->fd = -1;
}

/* ----------------------------------------------------------------------- messages */

int kvd_keep_put(struct kvd_keep *k, const struct kvd_keep_key *key, int fd)
{
	struct kvd_keep_msg m = {
		.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_PUT, .key = *key};
	int none = -1, r;

	if (k->fd < 0 || k->silent)
		return -EPIPE;
	kvd_crash_point();
	r = kvd_keep_say(k->fd, &m, fd);
	kvd_crash_point();
	if (r == -ENFILE)
		return r;
	if (!r)
		r = kvd_keep_hear(k->fd, &m, 0, &none);
	if (none >= 0)
		close(none);
	if (r || m.op != KVD_KEEP_PUT)
		return -EPIPE;
	return m.result;
}

void kvd_keep_del(struct kvd_keep *k, const struct kvd_keep_key *key)
{
	struct kvd_keep_msg m = {
		.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_DEL, .key = *key};

	kvd_crash_point();
	/* One that does not take it holds on to it: it is a matter of the host's memory. */
	if (k->fd >= 0 && !k->silent)
		k->silent = kvd_keep_say(k->fd, &m, -1) != 0;
	kvd_crash_point();
}

int kvd_keep_list(struct kvd_keep *k,
		  void (*fn)(void *arg, const struct kvd_keep_key *key, int fd),
		  void *arg)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC,
				 .op = KVD_KEEP_LIST,
				 .key = {.index = KVD_KEEP_BATCH}};
	struct kvd_keep_many many;
	int fds[KVD_KEEP_BATCH], r, nr = 0;
	u32 came;

	r = kvd_keep_say(k->fd, &m, -1);
	while (!r) {
		r = kvd_keep_hear_many(k->fd, &many, fds, &came);
		if ((!r || r == -EMFILE) && many.m.op == KVD_KEEP_ENTRIES)
			k->nr_held = many.m.key.index;
		if (r)
			break;
		if (many.m.op == KVD_KEEP_END && !came)
			return many.m.result == nr ? nr : -EPIPE;
		if (many.m.op == KVD_KEEP_ENTRY && came == 1) {
			many.keys[0] = many.m.key;
		} else if (many.m.op != KVD_KEEP_ENTRIES) {
			while (came)
				close(fds[--came]);
			return -EPIPE;
		}
		for (u32 i = 0; i < came; i++)
			fn(arg, &many.keys[i], fds[i]);
		nr += (int)came;
	}
	return r;
}
