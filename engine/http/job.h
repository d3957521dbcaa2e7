/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.h - one completion, shared by the HTTP thread that asked and the engine's loop.
 *
 * The HTTP thread makes a job, puts it into the bounded queue and waits on it; the loop
 *	submits it, appends text and ends it. Everything below "guarded" is under job.lock. Each
 *	side holds a reference; the last eng_job_put() frees.
 *
 *	QUEUED -> ACTIVE -> ENDED        eng_job_cancel() at any time: the loop aborts the
 *	request
 *
 * Lock order: eng_jobs.lock, then eng_job.lock. Neither is held while calling the engine.
 */
#ifndef ENG_HTTP_JOB_H
#define ENG_HTTP_JOB_H

#include <pthread.h>
#include "base/list.h"
#include "engine/http/stop.h"
#include "engine/run/engine.h"

#define ENG_JOBS_QUEUE_MAX 256u

/**
 * struct eng_job_params - a checked request body
 * @ids: [nr_ids] prompt; owner
 * @stops: [nr_stops] owner
 */
struct eng_job_params {
	u32 *ids;
	u32 nr_ids;
	u32 max_tokens;
	float temperature;
	float top_p;
	u64 seed;
	char *stops[ENG_STOP_MAX];
	int nr_stops;
	bool ignore_eos;
	bool stream;
	bool include_usage;
};

void eng_job_params_free(struct eng_job_params *p);

struct eng_job {
	struct list_node
		node;	/* eng_jobs.queue (guarded by its lock) or .active (loop only) */
	u32 refs;	/* atomic */
	bool cancelled; /* atomic */
	struct eng_job_params p;
	struct eng_request *request; /* loop only */
	struct eng_engine *engine;   /* loop only */
	struct eng_detok detok;	     /* loop only */
	char *scratch;		     /* loop only; owner */

	pthread_mutex_t lock;
	pthread_cond_t changed;
	/* guarded */
	char *text; /* owner */
	size_t nr_text;
	size_t nr_shown; /* may be sent: no stop string, no half character */
	size_t cap;
	u32 nr_tokens;
	bool stopped;
	bool failed; /* no memory for more text */
	bool ended;
	enum eng_finish finish;
	int code;
	u32 nr_cached;
	u32 bad_bits;
	char error[256]; /* the engine refused the request: why */
};

/**
 * struct eng_jobs - the bounded queue between HTTP threads and the loop
 * @no_tier: the kvmd of this table_epoch said that it has no tier: prompts are not prefetched
 *	while it is the one; the next may have one. HTTP threads set it
 */
struct eng_jobs {
	pthread_mutex_t lock;
	struct list_node queue;
	u32 nr_queued;
	bool closed;
	u64 no_tier;
	struct list_node active; /* loop only */
	struct eng_engine *engine;
	const struct eng_tokenizer *tok;
};

void eng_jobs_init(struct eng_jobs *q, struct eng_engine *e,
		   const struct eng_tokenizer *tok);

/** eng_job_create() - take over @p. Return: NULL when out of memory (then @p is freed) */
struct eng_job *eng_job_create(const struct eng_tokenizer *tok, struct eng_job_params *p);
void eng_job_put(struct eng_job *j);

/** eng_jobs_push() - HTTP thread: bring back what a tier has of the prompt (for a second at
 * most), then queue it. Return: 0; -EAGAIN full; -ESHUTDOWN closed */
int eng_jobs_push(struct eng_jobs *q, struct eng_job *j);

/**
 * eng_job_wait_locked() - HTTP thread: wait until a job has more to show, or has ended
 * @nr_seen: bytes of text that the client has
 * @whole: only its end counts
 * @fd: the client's socket, looked at every @look_ns, however often tokens come meanwhile
 *
 * Context: under j->lock, which is given up while it waits.
 * Return: false: the client is gone.
 */
bool eng_job_wait_locked(struct eng_job *j, size_t nr_seen, bool whole, int fd,
			 u64 look_ns);

/** eng_job_cancel() - HTTP thread: the client is gone */
void eng_job_cancel(struct eng_jobs *q, struct eng_job *j);

/** eng_jobs_turn() - loop: submit what is queued, abort what was cancelled */
void eng_jobs_turn(struct eng_jobs *q);

/** eng_jobs_close() - loop: refuse new jobs, end all others with FINISH_ABORT */
void eng_jobs_close(struct eng_jobs *q);

#endif /* ENG_HTTP_JOB_H */
