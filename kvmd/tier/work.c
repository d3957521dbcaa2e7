/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/work.c - see work.h.
 *
 * Locks: `lock` protects both lists and `stop`; taken by workers and the loop thread, for
 * list operations only.
 */
#include "kvmd/tier/work.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"

struct list {
	struct kvd_work *first;
	struct kvd_work **last;
};

struct kvd_workers {
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct list queue; /* to be run */
	struct list ran;   /* to be finished */
	bool stop;
	u32 nr_threads;
	u32 nr_pending; /* loop thread only */
	int event_fd;
	pthread_t threads[KVD_WORKERS_MAX];
};

static void list_start(struct list *l)
{
	l->first = NULL;
	l->last = &l->first;
}

static void list_put(struct list *l, struct kvd_work *w)
{
	w->next = NULL;
	*l->last = w;
	l->last = &w->next;
}

static struct kvd_work *list_take(struct list *l)
{
	struct kvd_work *w = l->first;

	if (!w)
		return NULL;
	l->first = w->next;
	if (!l->first)
		l->last = &l->first;
	return w;
}

static void tell(struct kvd_workers *ws)
{
	const u64 one = 1;
	ssize_t n = write(ws->event_fd, &one, sizeof(one));

	(void)n; /* a full counter is a wake-up as well */
}

static void *worker(void *arg)
{
	struct kvd_workers *ws = arg;
	struct kvd_work *w;
	bool first;

	pthread_mutex_lock(&ws->lock);
	for (;;) {
		w = list_take(&ws->queue);
		if (!w && ws->stop)
			break;
		if (!w) {
			pthread_cond_wait(&ws->more, &ws->lock);
			continue;
		}
		pthread_mutex_unlock(&ws->lock);
		w->run(w);
		pthread_mutex_lock(&ws->lock);
		first = !ws->ran.first;
		list_put(&ws->ran, w);
		/* One wake-up for all that gather until the loop looks. */
		if (first)
			tell(ws);
	}
	pthread_mutex_unlock(&ws->lock);
	return NULL;
}

static void threads_end(struct kvd_workers *ws)
{
	pthread_mutex_lock(&ws->lock);
	ws->stop = true;
	pthread_cond_broadcast(&ws->more);
	pthread_mutex_unlock(&ws->lock);
	while (ws->nr_threads)
		pthread_join(ws->threads[--ws->nr_threads], NULL);
}

/* Workers take no signal: the daemon's come through a signalfd. */
static int threads_start(struct kvd_workers *ws, u32 nr)
{
	sigset_t all, old;
	int r = 0;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (ws->nr_threads < nr && !r) {
		r = -pthread_create(&ws->threads[ws->nr_threads], NULL, worker, ws);
		ws->nr_threads += !r;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r)
		threads_end(ws);
	return r;
}

int kvd_workers_create(u32 nr, struct kvd_workers **ret)
{
	struct kvd_workers *ws = calloc(1, sizeof(*ws));
	int r;

	kv_assert(nr && nr <= KVD_WORKERS_MAX);
	if (!ws)
		return -ENOMEM;
	list_start(&ws->queue);
	list_start(&ws->ran);
	pthread_mutex_init(&ws->lock, NULL);
	pthread_cond_init(&ws->more, NULL);
	ws->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = ws->event_fd < 0 ? -errno : threads_start(ws, nr);
	if (r)
		goto free_workers;
	*ret = ws;
	return 0;
free_workers:
	if (ws->event_fd >= 0)
		close(ws->event_fd);
	pthread_cond_destroy(&ws->more);
	pthread_mutex_destroy(&ws->lock);
	free(ws);
	return r;
}

void kvd_workers_destroy(struct kvd_workers *ws)
{
	if (!ws)
		return;
	threads_end(ws);
	kvd_workers_reap(ws);
	kv_assert(!ws->nr_pending);
	close(ws->event_fd);
	pthread_cond_destroy(&ws->more);
	pthread_mutex_destroy(&ws->lock);
	free(ws);
}

int kvd_workers_fd(const struct kvd_workers *ws)
{
	return ws->event_fd;
}

void kvd_work_submit(struct kvd_workers *ws, struct kvd_work *w)
{
	kv_assert(w->run && w->done);
	ws->nr_pending++;
	pthread_mutex_lock(&ws->lock);
	kv_assert(!ws->stop);
	list_put(&ws->queue, w);
	pthread_cond_signal(&ws->more);
	pthread_mutex_unlock(&ws->lock);
}

u32 kvd_workers_reap(struct kvd_workers *ws)
{
	struct kvd_work *w, *next;
	u64 count;
	u32 nr = 0;
	ssize_t n = read(ws->event_fd, &count, sizeof(count));

	(void)n;
	pthread_mutex_lock(&ws->lock);
	w = ws->ran.first;
	list_start(&ws->ran);
	pthread_mutex_unlock(&ws->lock);
	for (; w; w = next, nr++) {
		next = w->next;
		ws->nr_pending--;
		w->done(w);
	}
	return nr;
}

u32 kvd_workers_pending(const struct kvd_workers *ws)
{
	return ws->nr_pending;
}
