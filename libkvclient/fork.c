/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork.c - what becomes of a connection when its process forks, or one of its threads
 * ends.
 *
 * A forked child must not speak for its parent: its connections are poisoned (every call
 * answers -EOWNERDEAD) and their descriptors closed. Inherited /dev/nvidia* descriptors
 * are closed too: with them open, a dead parent's kernels go on writing for as long as
 * the child lives (design 5, P8). Rings, session pages and extents are not even mapped in
 * the child (MADV_DONTFORK).
 *
 * The child handler runs between fork() and return in a process that may have had many
 * threads: system calls only, no allocation.
 */
#include "internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct list_node registry = {&registry, &registry};
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t thread_key;
static int once_result;
static bool key_made;
static u64 next_thread_serial;
static __thread u64 thread_serial;

struct linux_dirent64 {
	u64 ino;
	s64 off;
	u16 reclen;
	u8 type;
	char name[];
};

/* Return: the number in @name, or -1. */
static int fd_number(const char *name)
{
	int n = 0;

	if (!*name)
		return -1;
	for (; *name; name++) {
		if (*name < '0' || *name > '9' || n > 1 << 24)
			return -1;
		n = n * 10 + (*name - '0');
	}
	return n;
}

static void close_gpu_fds(void)
{
	static const char prefix[] = "/dev/nvidia";
	int dir = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	char buf[2048] __attribute__((aligned(8))), target[64];
	long n;

	if (dir < 0)
		return;
	while ((n = syscall(SYS_getdents64, dir, buf, sizeof(buf))) > 0) {
		for (long at = 0; at < n;) {
			struct linux_dirent64 *d = (struct linux_dirent64 *)(buf + at);
			ssize_t len =
				readlinkat(dir, d->name, target, sizeof(target) - 1);
			int fd = fd_number(d->name);

			at += d->reclen;
			if (len < (ssize_t)sizeof(prefix) - 1 || fd < 0)
				continue;
			if (!memcmp(target, prefix, sizeof(prefix) - 1))
				close(fd);
		}
	}
	close(dir);
}

/* Extents that came and are not mapped yet: in the child they would hold the memory. */
static void close_extents(const struct kvc_pool *pool)
{
	for (u32 i = 0; pool->extents && i < pool->nr_extents; i++)
		if (pool->extents[i].fd >= 0)
			close(pool->extents[i].fd);
}

static void poison(struct kvc *c)
{
	/* A child's child: the numbers closed then may be other descriptors by now. */
	if (kvc_poisoned(c) && !KV_MUTANT(poison_twice))
		return;
	c->poisoned = 1;
	for (struct kvc_link *l = c->link; l; l = l->older) {
		if (l->gone)
			continue;
		close(l->sock);
		close(l->ring.sq_efd);
		close(l->ring.cq_efd);
	}
	for (u32 i = 0; i < KV_POOLS_MAX; i++)
		if (c->pools[i])
			close_extents(c->pools[i]);
	close(c->epoll_fd);
	close(c->wake_fd);
}

static void before_fork(void)
{
	pthread_mutex_lock(&registry_lock);
}

static void after_fork_parent(void)
{
	pthread_mutex_unlock(&registry_lock);
}

static void after_fork_child(void)
{
	struct kvc *c;

	if (!KV_MUTANT(fork_not_poisoned) && !list_empty(&registry)) {
		list_for_each_entry (c, &registry, reg)
			poison(c);
		close_gpu_fds();
	}
	pthread_mutex_unlock(&registry_lock);
}

static void init_once(void)
{
	once_result = -pthread_atfork(before_fork, after_fork_parent, after_fork_child);
	if (once_result)
		return;
	once_result = -pthread_key_create(&thread_key, kvc_thread_exit);
	key_made = !once_result;
}

/* An unloaded library must leave no destructor behind that threads would call. */
__attribute__((destructor)) static void library_unload(void)
{
	if (key_made)
		pthread_key_delete(thread_key);
}

/**
 * kvc_register() - make fork and thread exit known to a new connection
 *
 * Return: 0; -ENOMEM or -EAGAIN no handler could be installed.
 */
int kvc_register(struct kvc *c)
{
	pthread_once(&once, init_once);
	if (once_result)
		return once_result;
	pthread_mutex_lock(&registry_lock);
	list_add_tail(&registry, &c->reg);
	pthread_mutex_unlock(&registry_lock);
	return 0;
}

/** kvc_unregister() - the connection is about to go */
void kvc_unregister(struct kvc *c)
{
	pthread_mutex_lock(&registry_lock);
	list_del(&c->reg);
	pthread_mutex_unlock(&registry_lock);
}

/** kvc_for_each() - call @fn for every connection of the process, under the registry's
 * lock */
void kvc_for_each(void (*fn)(struct kvc *c, void *arg), void *arg)
{
	struct kvc *c;

	pthread_mutex_lock(&registry_lock);
	list_for_each_entry (c, &registry, reg)
		fn(c, arg);
	pthread_mutex_unlock(&registry_lock);
}

/**
 * kvc_thread_serial() - number of the calling thread, never reused in this process
 *
 * Thread ids come back after a thread's end; a magazine's owner must not.
 */
u64 kvc_thread_serial(void)
{
	if (!thread_serial) {
		thread_serial =
			__atomic_add_fetch(&next_thread_serial, 1, __ATOMIC_RELAXED);
		pthread_setspecific(thread_key, (void *)(uintptr_t)thread_serial);
	}
	return thread_serial;
}
