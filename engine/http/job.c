/* SPDX-License-Identifier: Apache-2.0 */
/* job.c - jobs and their queue (see job.h for threads and locks). */
#include "engine/http/job.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mutant.h"

void eng_job_params_free(struct eng_job_params *p)
{
	free(p->ids);
	for (int i = 0; i < p->nr_stops; i++)
		free(p->stops[i]);
	memset(p, 0, sizeof(*p));
}

void eng_jobs_init(struct eng_jobs *q, struct eng_engine *e,
		   const struct eng_tokenizer *tok)
{
	memset(q, 0, sizeof(*q));
	pthread_mutex_init(&q->lock, NULL);
	list_init(&q->queue);
	list_init(&q->active);
	q->engine = e;
	q->tok = tok;
}

struct eng_job *eng_job_create(const struct eng_tokenizer *tok, struct eng_job_params *p)
{
	struct eng_job *j = calloc(1, sizeof(*j));

	if (j)
		j->scratch = malloc(eng_detok_room(tok));
	if (!j || !j->scratch) {
		free(j);
		eng_job_params_free(p);
		return NULL;
	}
	list_init(&j->node);
	j->refs = 1;
	j->p = *p;
	memset(p, 0, sizeof(*p));
	eng_detok_init(&j->detok, tok, true);
	pthread_mutex_init(&j->lock, NULL);
	pthread_cond_init(&j->changed, NULL);
	return j;
}

void eng_job_put(struct eng_job *j)
{
	if (__atomic_sub_fetch(&j->refs, 1, __ATOMIC_ACQ_REL))
		return;
	eng_job_params_free(&j->p);
	pthread_cond_destroy(&j->changed);
	pthread_mutex_destroy(&j->lock);
	free(j->scratch);
	free(j->text);
	free(j);
}

/* What a tier holds of the prompt is on its way before the scheduler looks it up. */
static void job_prefetch(struct eng_jobs *q, const struct eng_job *j)
{
	u32 nr = 0, nr_ids = KV_MIN(j->p.nr_ids, KV_LOOKUP_MAX);
	struct kvc_info now;

	if (nr_ids < KV_PAGE_TOKENS)
		return;
	kvc_info(eng_engine_kvc(q->engine), &now);
	if (__atomic_load_n(&q->no_tier, __ATOMIC_RELAXED) == now.table_epoch)
		return;
	/* A miss, a full pool, a daemon that is away: the request computes what it lacks. */
	if (kvc_prefetch(eng_engine_pool(q->engine), j->p.ids, nr_ids,
			 nr_ids / KV_PAGE_TOKENS, &nr) == -EOPNOTSUPP)
		__atomic_store_n(&q->no_tier, now.table_epoch, __ATOMIC_RELAXED);
}

int eng_jobs_push(struct eng_jobs *q, struct eng_job *j)
{
	int rc = 0;

	job_prefetch(q, j);
	pthread_mutex_lock(&q->lock);
	if (q->closed) {
		rc = -ESHUTDOWN;
	} else if (q->nr_queued == ENG_JOBS_QUEUE_MAX) {
		rc = -EAGAIN;
	} else {
		__atomic_add_fetch(&j->refs, 1, __ATOMIC_RELAXED);
		list_add_tail(&q->queue, &j->node);
		q->nr_queued++;
	}
	pthread_mutex_unlock(&q->lock);
	if (!rc)
		eng_engine_wake(q->engine);
	return rc;
}

static bool peer_gone(int fd)
{
	struct pollfd p = {.fd = fd, .events = POLLRDHUP};

	if (KV_MUTANT(disconnect_ignored))
		return false;
	return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

bool eng_job_wait_locked(struct eng_job *j, size_t nr_seen, bool whole, int fd,
			 u64 look_ns)
{
	u64 look = kv_now_ns() + look_ns;

	while (!j->ended && (whole || j->nr_shown <= nr_seen)) {
		struct timespec ts;
		u64 now = kv_now_ns();

		/* by the clock: tokens may come too fast for a wait to ever end by itself */
		if (now >= look) {
			if (peer_gone(fd))
				return false;
			look = now + look_ns;
		}
		/* not by the wall's clock, which may be set back */
		ts.tv_sec = (time_t)((now + look_ns) / KV_NSEC_PER_SEC);
		ts.tv_nsec = (long)((now + look_ns) % KV_NSEC_PER_SEC);
		if (pthread_cond_clockwait(&j->changed, &j->lock, CLOCK_MONOTONIC, &ts) !=
			    ETIMEDOUT &&
		    KV_MUTANT(disconnect_seen_only_when_idle))
			look = kv_now_ns() + look_ns;
	}
	return true;
}

void eng_job_cancel(struct eng_jobs *q, struct eng_job *j)
{
	__atomic_store_n(&j->cancelled, true, __ATOMIC_RELEASE);
	eng_engine_wake(q->engine);
}

/* Room for more text and its NUL. */
static int text_reserve(struct eng_job *j, size_t nr)
{
	size_t cap = (j->cap + nr) * 2 + 256;
	char *text;

	if (j->nr_text + nr + 1 <= j->cap)
		return 0;
	text = realloc(j->text, cap);
	if (!text)
		return -ENOMEM;
	j->text = text;
	j->cap = cap;
	return 0;
}

static void job_text(struct eng_job *j, const char *bytes, size_t nr, bool last)
{
	bool stopped;

	if (j->stopped || j->failed)
		return;
	if (text_reserve(j, nr)) {
		j->failed = true; /* an answer without a part of its text is none */
		return;
	}
	memcpy(j->text + j->nr_text, bytes, nr);
	j->nr_text += nr;
	j->text[j->nr_text] = 0;
	j->nr_shown = eng_stop_scan(j->text, j->nr_text, j->nr_shown, j->p.stops,
				    j->p.nr_stops, &stopped);
	if (last && !stopped)
		j->nr_shown = j->nr_text; /* what was held back is no stop string */
	j->stopped = stopped;
}

static void on_token(void *arg, struct eng_request *r, u32 token, float logprob)
{
	struct eng_job *j = arg;
	size_t nr = eng_detok_push(&j->detok, token, j->scratch);
	bool stopped, failed;

	pthread_mutex_lock(&j->lock);
	j->nr_tokens++;
	job_text(j, j->scratch, nr, false);
	stopped = j->stopped;
	failed = j->failed;
	pthread_cond_signal(&j->changed);
	pthread_mutex_unlock(&j->lock);
	if (failed)
		eng_request_abort(r);
	else if (stopped)
		eng_request_stop(r);
}

static void job_end(struct eng_job *j, enum eng_finish finish, int code)
{
	pthread_mutex_lock(&j->lock);
	j->finish = finish;
	j->code = code;
	j->ended = true;
	pthread_cond_signal(&j->changed);
	pthread_mutex_unlock(&j->lock);
	list_del(&j->node);
	eng_job_put(j);
}

static void on_done(void *arg, struct eng_request *r)
{
	struct eng_job *j = arg;
	size_t nr = eng_detok_flush(&j->detok, j->scratch);
	struct eng_result res;
	bool failed;

	eng_request_result(r, &res);
	pthread_mutex_lock(&j->lock);
	job_text(j, j->scratch, nr, true);
	j->nr_cached = res.nr_cached;
	j->bad_bits = res.bad_bits;
	failed = j->failed;
	pthread_mutex_unlock(&j->lock);
	eng_request_free(r);
	if (failed)
		job_end(j, ENG_FINISH_ERROR, -ENOMEM);
	else
		job_end(j, res.finish, res.code);
}

static void job_submit(struct eng_jobs *q, struct eng_job *j)
{
	struct eng_params p = {
		.prompt = j->p.ids,
		.nr_prompt = j->p.nr_ids,
		.max_tokens = j->p.max_tokens,
		.temperature = j->p.temperature,
		.top_p = j->p.top_p,
		.seed = j->p.seed,
		.ignore_eos = j->p.ignore_eos,
		.on_token = on_token,
		.on_done = on_done,
		.arg = j,
	};
	struct eng_err err = {{0}};
	int rc = eng_request_submit(q->engine, &p, &j->request, &err);

	if (!rc)
		return;
	pthread_mutex_lock(&j->lock);
	snprintf(j->error, sizeof(j->error), "%.255s", err.text);
	pthread_mutex_unlock(&j->lock);
	job_end(j, ENG_FINISH_ERROR, rc);
}

void eng_jobs_turn(struct eng_jobs *q)
{
	struct eng_job *j, *tmp;

	for (;;) {
		pthread_mutex_lock(&q->lock);
		j = list_first(&q->queue, struct eng_job, node);
		if (j) {
			list_del(&j->node);
			q->nr_queued--;
		}
		pthread_mutex_unlock(&q->lock);
		if (!j)
			break;
		list_add_tail(&q->active, &j->node);
		job_submit(q, j);
	}
	list_for_each_entry_safe (j, tmp, &q->active, node) {
		if (__atomic_load_n(&j->cancelled, __ATOMIC_ACQUIRE))
			eng_request_abort(j->request);
	}
}

void eng_jobs_close(struct eng_jobs *q)
{
	struct eng_job *j, *tmp;

	pthread_mutex_lock(&q->lock);
	q->closed = true;
	list_for_each_entry_safe (j, tmp, &q->queue, node) {
		list_del(&j->node);
		list_add_tail(&q->active, &j->node);
	}
	q->nr_queued = 0;
	pthread_mutex_unlock(&q->lock);
	list_for_each_entry_safe (j, tmp, &q->active, node) {
		if (j->request)
			eng_request_abort(j->request);
		else
			job_end(j, ENG_FINISH_ABORT, 0);
	}
}
