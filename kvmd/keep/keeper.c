/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep/keeper.c - the keeper's own process: a table of fds and one loop. See keep.h.
 *
 * Started by kvmd as `kvmd --keeper-process`. Anything unexpected on a connection ends
 * that connection, never what is held. It ends when kvmd says so, or with its last connection
 * when its place was taken by another keeper: one that was slow may not have been told.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kvmd/keep/keep.h"
#include "kvmd/keep/talk.h"

struct entry {
	struct kvd_keep_key key;
	int fd;
};

struct keeper {
	struct entry *all;
	u32 nr, room;
	int conn;
	bool quit;
};

static struct entry *find(struct keeper *k, const struct kvd_keep_key *key)
{
	for (u32 i = 0; i < k->nr; i++)
		if (!memcmp(&k->all[i].key, key, sizeof(*key)) ||
		    (KV_MUTANT(keeper_key_short) && k->all[i].key.kind == key->kind &&
		     k->all[i].key.index == key->index))
			return &k->all[i];
	return NULL;
}

static int put(struct keeper *k, const struct kvd_keep_key *key, int fd)
{
	struct entry *e = find(k, key);

	if (e) { /* the same thing again: the new one is right */
		close(e->fd);
		e->fd = fd;
		return 0;
	}
	if (k->nr == k->room) {
		u32 room = k->room ? k->room * 2 : 256;
		struct entry *all;

		if (room > KVD_KEEP_MAX)
			return -ENFILE;
		all = realloc(k->all, room * sizeof(*all));
		if (!all)
			return -ENOMEM;
		k->all = all;
		k->room = room;
	}
	k->all[k->nr++] = (struct entry){.key = *key, .fd = fd};
	return 0;
}

static void del(struct keeper *k, const struct kvd_keep_key *key)
{
	struct entry *e = find(k, key);

	if (!e)
		return;
	close(e->fd);
	*e = k->all[--k->nr];
}

/* As many in a message as the asker takes. */
static int list_many(struct keeper *k, u32 most)
{
	struct kvd_keep_many many = {.m = {.magic = KVD_KEEP_MAGIC,
					   .op = KVD_KEEP_ENTRIES,
					   .key = {.index = k->nr}}};
	int fds[KVD_KEEP_BATCH];

	for (u32 i = 0, nr; i < k->nr; i += nr) {
		nr = KV_MIN(k->nr - i, most);
		for (u32 n = 0; n < nr; n++) {
			many.keys[n] = k->all[i + n].key;
			fds[n] = k->all[i + n].fd;
		}
		many.m.result = (s32)nr;
		if (kvd_keep_say_many(k->conn, &many, fds))
			return -EPIPE;
	}
	return 0;
}

static int list(struct keeper *k, u32 most)
{
	struct kvd_keep_msg m = {.magic = KVD_KEEP_MAGIC, .op = KVD_KEEP_ENTRY};

	if (most && list_many(k, KV_MIN(most, KVD_KEEP_BATCH)))
		return -EPIPE;
	for (u32 i = 0; i < k->nr && !most; i++) {
		m.key = k->all[i].key;
		if (kvd_keep_say(k->conn, &m, k->all[i].fd))
			return -EPIPE;
	}
	m.op = KVD_KEEP_END;
	m.result = (s32)k->nr;
	return kvd_keep_say(k->conn, &m, -1);
}

/* Return: 0; -EAGAIN nothing more is there; -EPIPE; -ECONNRESET the peer does not hear its
 * answer, but what it sent after is good. @dead: the peer gets no answer. */
static int serve_one(struct keeper *k, bool dead)
{
	struct kvd_keep_msg m;
	int fd, r;

	r = kvd_keep_hear(k->conn, &m, MSG_DONTWAIT, &fd);
	if (r == -EMFILE && m.op == KVD_KEEP_PUT) {
		m.result = -ENFILE;
		return dead || !kvd_keep_say(k->conn, &m, -1) ? 0 : -ECONNRESET;
	}
	if (r)
		return r == -EAGAIN ? r : -EPIPE;
	if (fd >= 0 && m.op != KVD_KEEP_PUT) {
		close(fd);
		return -EPIPE;
	}
	switch (m.op) {
	case KVD_KEEP_PUT:
		m.result = fd < 0 ? -EBADF : put(k, &m.key, fd);
		if (m.result && fd >= 0)
			close(fd);
		return dead || !kvd_keep_say(k->conn, &m, -1) ? 0 : -ECONNRESET;
	case KVD_KEEP_DEL:
		del(k, &m.key);
		return 0;
	case KVD_KEEP_LIST:
		return dead || !list(k, m.key.index) ? 0 : -ECONNRESET;
	case KVD_KEEP_QUIT:
		k->quit = true;
		return 0;
	}
	return -EPIPE;
}

static void conn_close(struct keeper *k)
{
	if (k->conn >= 0)
		close(k->conn);
	k->conn = -1;
}

/* Its last words count: among them may be that we are to end. */
static void conn_drain(struct keeper *k)
{
	while (k->conn >= 0 && !serve_one(k, true))
		;
	conn_close(k);
}

static void conn_ready(struct keeper *k)
{
	int r = serve_one(k, false);

	if (r == -ECONNRESET)
		conn_drain(k);
	else if (r == -EPIPE)
		conn_close(k);
}

/* A new kvmd. What the old one had still sent is taken first. */
static void take_over(struct keeper *k, int listen_fd)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);
	int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		return;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) ||
	    cred.uid != geteuid()) {
		close(fd);
		return;
	}
	conn_drain(k);
	k->conn = fd;
}

/**
 * struct place - where kvmd finds us
 * @addr: of our socket; its path "" where it has none
 * @dev, @ino: what lay there when we began
 */
struct place {
	struct sockaddr_un addr;
	dev_t dev;
	ino_t ino;
};

static void place_note(struct place *p, int listen_fd)
{
	socklen_t len = sizeof(p->addr) - 1;
	struct stat st;

	memset(p, 0, sizeof(*p));
	if (getsockname(listen_fd, (struct sockaddr *)&p->addr, &len) ||
	    stat(p->addr.sun_path, &st)) {
		p->addr.sun_path[0] = 0;
		return;
	}
	p->dev = st.st_dev;
	p->ino = st.st_ino;
}

/* Another one has it, or nobody: no kvmd will ever ask for what is held here. */
static bool place_lost(const struct place *p)
{
	struct stat st;

	if (!p->addr.sun_path[0] || KV_MUTANT(slow_keeper_stays))
		return false;
	if (stat(p->addr.sun_path, &st))
		return errno == ENOENT || errno == ENOTDIR;
	return st.st_dev != p->dev || st.st_ino != p->ino;
}

static void all_fds(void)
{
	struct rlimit lim;

	if (getrlimit(RLIMIT_NOFILE, &lim))
		return;
	lim.rlim_cur = lim.rlim_max;
	setrlimit(RLIMIT_NOFILE, &lim);
}

int kvd_keeper_main(int listen_fd, int die_with)
{
	struct keeper k = {.conn = -1};
	struct place place;
	int pidfd = die_with ? (int)syscall(SYS_pidfd_open, die_with, 0) : -1;

	if (die_with && pidfd < 0)
		return 1;
	prctl(PR_SET_NAME, "kvmd-keeper");
	all_fds();
	place_note(&place, listen_fd);
	while (!k.quit) {
		struct pollfd p[3] = {{.fd = k.conn, .events = POLLIN},
				      {.fd = listen_fd, .events = POLLIN},
				      {.fd = pidfd, .events = POLLIN}};

		if (poll(p, 3, -1) < 0 && errno != EINTR)
			return 1;
		if (p[2].revents)
			break;
		if (p[0].revents)
			conn_ready(&k);
		if (p[1].revents)
			take_over(&k, listen_fd);
		else if (p[0].revents && k.conn < 0 && place_lost(&place))
			break;
	}
	return 0; /* the kernel closes what is held */
}
