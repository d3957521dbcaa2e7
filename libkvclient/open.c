/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - a connection's life: options, HELLO, the link to one instance of kvmd, close.
 *
 * kvc_link_open() does everything that a first connect and a reconnect have in common: it
 * returns a whole link or nothing. kvc.lock is not needed for it: nobody sees the link
 * yet.
 */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FD_RING, FD_SQ, FD_CQ, FD_SESSION, FD_NR };

/* --------------------------------------------------------------------------------- link
 */

static u64 pid_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) ? 0 : st.st_ino;
}

static int send_hello(struct kvc *c, int sock, u64 deadline_ns)
{
	struct kv_msg_hello hello = {
		.msg = {.magic = KV_MSG_MAGIC,
			.type = KV_MSG_HELLO,
			.size_bytes = sizeof(hello),
			.sequence = 1},
		.abi_min = KV_ABI_VERSION_MIN,
		.abi_max = KV_ABI_VERSION,
		.role = KV_ROLE_ENGINE,
		.ring_depth = c->ring_depth,
		.pidns_inode = pid_namespace(),
	};

	memcpy(hello.client_name, c->client_name, sizeof(hello.client_name));
	if (c->link) /* the session to take up, if kvmd still has it */
		memcpy(hello.cookie, c->link->cookie, sizeof(hello.cookie));
	return kvc_sock_send(sock, &hello, sizeof(hello), deadline_ns);
}

/* kvmd's words are a name and a sentence; make sure that they end. */
static int check_reply(const struct kvc_msg_in *in)
{
	const struct kv_msg_hello_reply *h = &in->hello;
	char error[sizeof(h->error) + 1] = "";

	if (h->msg.type == KV_MSG_ERROR && h->msg.size_bytes >= sizeof(in->error)) {
		memcpy(error, in->error.error, sizeof(in->error.error));
		return kvc_fail(in->error.result < 0 ? in->error.result : -EPROTO,
				"kvmd: %s", error);
	}
	if (h->msg.type != KV_MSG_HELLO_REPLY || h->msg.size_bytes < sizeof(*h))
		return kvc_fail(-EPROTO, "hello: reply of type %u, %u bytes", h->msg.type,
				h->msg.size_bytes);
	memcpy(error, h->error, sizeof(h->error));
	if (h->result)
		return kvc_fail(h->result < 0 ? h->result : -EPROTO, "kvmd: %s", error);
	if (h->abi < KV_ABI_VERSION_MIN || h->abi > KV_ABI_VERSION)
		return kvc_fail(-EPROTONOSUPPORT,
				"hello.abi=%u: this library speaks %u to %u", h->abi,
				KV_ABI_VERSION_MIN, KV_ABI_VERSION);
	if (in->nr_fds != FD_NR)
		return kvc_fail(-EPROTO, "hello: %u descriptors, expected %d", in->nr_fds,
				FD_NR);
	if (!h->table_epoch)
		return kvc_fail(-EPROTO, "hello.table_epoch=0");
	return 0;
}

static int map_session(struct kvc_link *link, int fd)
{
	struct kv_session_page *page;
	struct stat st;

	if (fstat(fd, &st) || st.st_size < (off_t)KV_SESSION_BYTES)
		return kvc_fail(-EPROTO, "session page: %lld bytes",
				(long long)st.st_size);
	page = mmap(NULL, KV_SESSION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		return kvc_fail(-ENOMEM, "session page: mmap: %s", strerror(errno));
	madvise(page, KV_SESSION_BYTES, MADV_DONTFORK);
	if (page->magic != KV_SESSION_MAGIC || page->client_id != link->client_id) {
		munmap(page, KV_SESSION_BYTES);
		return kvc_fail(-EPROTO, "session page: not the page of this session");
	}
	link->session = page;
	return 0;
}

static int take_reply(struct kvc_link *link, struct kvc_msg_in *in)
{
	const struct kv_msg_hello_reply *h = &in->hello;
	int r;

	link->client_id = h->client_id;
	link->table_epoch = h->table_epoch;
	link->flags = h->flags;
	link->resumed = (h->flags & KV_HELLO_RESUMED) && link->c->link &&
			link->c->link->client_id == h->client_id;
	link->session_serial =
		link->resumed ? link->c->link->session_serial : link->serial;
	memcpy(link->tenant, h->tenant, sizeof(link->tenant));
	link->tenant[sizeof(link->tenant) - 1] = 0;
	memcpy(link->cookie, h->cookie, sizeof(link->cookie));
	r = map_session(link, in->fds[FD_SESSION]);
	if (r)
		return r;
	r = kvc_ring_init(&link->ring, h, in->fds);
	if (r) {
		munmap(link->session, KV_SESSION_BYTES);
		return r;
	}
	in->fds[FD_SQ] = -1;
	in->fds[FD_CQ] = -1;
	return 0;
}

/**
 * kvc_link_open() - connect, say HELLO, map what comes back
 * @ret_link: the link, not yet published; kvc_link_unmap() and kvc_link_destroy() it
 *
 * Context: uses c->msg: the caller has kvc.lock, or is kvc_open().
 * Return: as kvc_open().
 */
int kvc_link_open(struct kvc *c, u64 deadline_ns, struct kvc_link **ret_link)
{
	struct kvc_link *link = calloc(1, sizeof(*link));
	int r;

	if (!link)
		return kvc_fail(-ENOMEM, "out of memory");
	link->c = c;
	link->serial = ++c->next_serial;
	r = kvc_sock_connect(c->socket_path, deadline_ns, &link->sock);
	if (r) {
		kvc_fail(r, "%s: %s", c->socket_path, strerror(-r));
		goto free_link;
	}
	r = send_hello(c, link->sock, deadline_ns);
	if (!r)
		r = kvc_sock_recv_until(link->sock, c->msg, deadline_ns);
	if (r) {
		kvc_fail(r, "hello: %s", strerror(-r));
		goto close_sock;
	}
	r = check_reply(c->msg);
	if (!r)
		r = take_reply(link, c->msg);
	kvc_msg_close_fds(c->msg);
	if (r)
		goto close_sock;
	for (u32 i = 0; i < KV_MAGAZINES; i++)
		link->mags[i].refill_nr = KVC_REFILL_FIRST;
	*ret_link = link;
	return 0;
close_sock:
	shutdown(link->sock, SHUT_RDWR); /* a forked child may have it */
	close(link->sock);
free_link:
	free(link);
	return r;
}

/** kvc_link_unmap() - give up ring, tables and socket of a link that nobody uses */
void kvc_link_unmap(struct kvc_link *link)
{
	if (link->gone)
		return;
	link->gone = true;
	link->grace_table = NULL;
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (link->tables[i].map)
			munmap((void *)(uintptr_t)link->tables[i].map,
			       link->tables[i].bytes);
		link->tables[i].map = NULL;
	}
	kvc_ring_fini(&link->ring);
	shutdown(link->sock, SHUT_RDWR);
	close(link->sock);
}

/** kvc_link_destroy() - the rest: session page and memory */
void kvc_link_destroy(struct kvc_link *link)
{
	kvc_link_unmap(link);
	munmap(link->session, KV_SESSION_BYTES);
	free(link);
}

/* ----------------------------------------------------------------------------- kvc_open
 */

static int take_name(struct kvc *c, const char *name)
{
	char self[KV_NAME_BYTES] = "?";
	FILE *f;

	if (!name) {
		f = fopen("/proc/self/comm", "re");
		if (f && fgets(self, sizeof(self), f))
			self[strcspn(self, "\n")] = 0;
		if (f)
			fclose(f);
		for (char *p = self; *p; p++)
			if (*p < 0x20 || *p > 0x7e)
				*p = '?';
		name = self;
	}
	if (!*name || strlen(name) >= sizeof(c->client_name))
		return kvc_fail(-EINVAL, "client_name: %zu bytes, 1 to %u are possible",
				strlen(name), KV_NAME_BYTES - 1);
	for (const char *p = name; *p; p++)
		if (*p < 0x20 || *p > 0x7e)
			return kvc_fail(-EINVAL,
					"client_name: byte 0x%02x is not printable",
					(u8)*p);
	strcpy(c->client_name, name);
	return 0;
}

/**
 * kvc_struct_take() - what the application filled, as this version knows it (docs/abi.md)
 * @ret: [bytes] fields that an older application does not have are 0
 * @first: bytes that the first version had
 * @given: starts with size_bytes
 *
 * Return: 0; -EINVAL: too short, or something is set that a later version may mean.
 */
int kvc_struct_take(void *ret, size_t bytes, size_t first, const void *given,
		    const char *name)
{
	u32 size_bytes;

	memcpy(&size_bytes, given, sizeof(size_bytes));
	if (size_bytes < first || size_bytes > KVC_STRUCT_MAX)
		return kvc_fail(-EINVAL, "size_bytes=%u: struct %s has %zu", size_bytes,
				name, bytes);
	for (size_t i = bytes; i < size_bytes; i++)
		if (((const u8 *)given)[i])
			return kvc_fail(
				-EINVAL,
				"size_bytes=%u: byte %zu is set, struct %s has %zu",
				size_bytes, i, name, bytes);
	memset(ret, 0, bytes);
	memcpy(ret, given, KV_MIN(bytes, (size_t)size_bytes));
	return 0;
}

static int take_options(struct kvc *c, const struct kvc_options *given)
{
	struct kvc_options options = {0};
	const struct kvc_options *opt = &options;
	const char *path;
	int r;

	r = given ? kvc_struct_take(&options, sizeof(options),
				    KVC_FIRST_SIZE(struct kvc_options, log_arg), given,
				    "kvc_options")
		  : 0;
	if (r)
		return r;
	if (opt->flags)
		return kvc_fail(-EINVAL, "flags=0x%x: must be 0", opt->flags);
	if (opt->ring_depth &&
	    (!kv_is_pow2(opt->ring_depth) || opt->ring_depth > KV_RING_DEPTH_MAX))
		return kvc_fail(-EINVAL, "ring_depth=%u: not a power of two up to %u",
				opt->ring_depth, KV_RING_DEPTH_MAX);
	path = opt->socket_path ? opt->socket_path : getenv("KVMD_SOCKET");
	if (!path || !*path)
		path = KVMD_SOCKET_DEFAULT;
	c->timeout_ms = opt->timeout_ms ? opt->timeout_ms : KVC_TIMEOUT_MS;
	c->ring_depth = opt->ring_depth;
	c->log = opt->log;
	c->log_arg = opt->log_arg;
	c->socket_path = strdup(path);
	if (!c->socket_path)
		return kvc_fail(-ENOMEM, "out of memory");
	return take_name(c, opt->client_name);
}

/* The event descriptor is an epoll set, so that it outlives the socket of one link. */
static int open_event_fd(struct kvc *c)
{
	struct epoll_event ev = {.events = EPOLLIN};

	c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (c->epoll_fd < 0)
		return kvc_fail(-errno, "epoll: %s", strerror(errno));
	c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (c->wake_fd < 0)
		return kvc_fail(-errno, "eventfd: %s", strerror(errno));
	if (epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->wake_fd, &ev))
		return kvc_fail(-errno, "epoll: %s", strerror(errno));
	return 0;
}

static void kvc_free_memory(struct kvc *c)
{
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		free(c->steps[i].walks);
	free(c->socket_path);
	free(c->msg);
	free(c);
}

static void close_event_fd(struct kvc *c)
{
	if (c->epoll_fd >= 0)
		close(c->epoll_fd);
	if (c->wake_fd >= 0)
		close(c->wake_fd);
}

int kvc_open(const struct kvc_options *opt, struct kvc **ret_c)
{
	struct kvc *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return kvc_fail(-ENOMEM, "out of memory");
	c->epoll_fd = -1;
	c->wake_fd = -1;
	pthread_mutex_init(&c->lock, NULL);
	list_init(&c->reg);
	list_init(&c->events);
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++) {
		c->steps[i].c = c;
		c->steps[i].slot = i;
	}
	r = take_options(c, opt);
	if (r)
		goto free_c;
	c->msg = malloc(sizeof(*c->msg));
	r = c->msg ? open_event_fd(c) : kvc_fail(-ENOMEM, "out of memory");
	if (r)
		goto free_c;
	r = kvc_link_open(c, kvc_deadline(c), &c->link);
	if (r)
		goto free_c;
	c->told_session = c->link->session_serial;
	r = kvc_link_watch(c);
	if (r)
		goto destroy_link;
	r = kvc_register(c);
	if (r) {
		kvc_fail(r, "fork handlers: %s", strerror(-r));
		goto destroy_link;
	}
	*ret_c = c;
	return 0;
destroy_link:
	kvc_link_destroy(c->link);
free_c:
	close_event_fd(c);
	kvc_free_memory(c);
	return r;
}

/** kvc_link_watch() - events of the current link make kvc_event_fd() readable. Return: 0;
 * -errno */
int kvc_link_watch(struct kvc *c)
{
	struct epoll_event ev = {.events = EPOLLIN};

	if (epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->link->sock, &ev))
		return kvc_fail(-errno, "epoll: %s", strerror(errno));
	return 0;
}

void kvc_close(struct kvc *c)
{
	if (!c)
		return;
	kvc_unregister(c);
	if (kvc_poisoned(c)) { /* maps and descriptors are not there in this process */
		for (u32 i = 0; i < KV_POOLS_MAX; i++)
			kvc_pool_free_memory(c->pools[i]);
		while (c->link) {
			struct kvc_link *link = c->link;

			c->link = link->older;
			free(link->ring.slots);
			free(link->ring.arg_map);
			free(link);
		}
	} else {
		pthread_mutex_lock(&c->lock);
		kv_store_release64(&c->link->session->closed, 1);
		for (u32 i = 0; i < KV_POOLS_MAX; i++)
			if (c->pools[i])
				kvc_pool_destroy_locked(c->pools[i]);
		kvc_events_drop_pool_locked(c, NULL);
		kvc_links_collect_locked(c, true);
		pthread_mutex_unlock(&c->lock);
		close_event_fd(c);
	}
	pthread_mutex_destroy(&c->lock);
	kvc_free_memory(c);
}

void kvc_info(struct kvc *c, struct kvc_info *ret_info)
{
	struct kvc_link *link = __atomic_load_n(&c->link, __ATOMIC_ACQUIRE);

	memset(ret_info, 0, sizeof(*ret_info));
	ret_info->client_id = link->client_id;
	ret_info->table_epoch = link->table_epoch;
	ret_info->session = link->session_serial;
	ret_info->check_mode = link->flags & KV_HELLO_CHECK_MASK;
	memcpy(ret_info->tenant, link->tenant, sizeof(ret_info->tenant));
}
