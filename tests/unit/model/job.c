/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.c - an HTTP thread's wait for its job: a client that goes away is noticed although
 * tokens come faster than anybody looks, as they do on a GPU. And a job's life beside the
 * engine, whose part is played here (--wrap in the Makefile).
 */
#include "engine/http/job.h"
#include "engine/run/internal.h"
#include "base/clock.h"
#include "tests/unit/model/modeldir.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOOK_NS	  (300 * KV_NSEC_PER_MSEC)
#define TICK_US	  500
#define NR_TICKS  8000 /* 4 s at least */
#define LONGEST_S 3

int __wrap_eng_request_submit(struct eng_engine *e, const struct eng_params *p,
			      struct eng_request **ret, struct eng_err *err);
void __wrap_eng_request_result(const struct eng_request *r, struct eng_result *ret);
void __wrap_eng_request_free(struct eng_request *r);
void __wrap_eng_request_abort(struct eng_request *r);
void __wrap_eng_request_stop(struct eng_request *r);
int __wrap_kvc_prefetch(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
			uint32_t max_pages, uint32_t *ret_nr);
void __wrap_kvc_info(struct kvc *c, struct kvc_info *ret_info);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
int __real_clock_gettime(clockid_t id, struct timespec *ts);
int __wrap_clock_gettime(clockid_t id, struct timespec *ts);

static struct eng_params asked; /* what the job asked the engine for */
static struct eng_result result;
static u32 nr_aborts, nr_prefetches;
static int prefetch_rc;
static u64 epoch = 1;
static bool no_memory, clock_set_back;

int __wrap_eng_request_submit(struct eng_engine *e, const struct eng_params *p,
			      struct eng_request **ret, struct eng_err *err)
{
	static struct eng_request r;

	asked = *p;
	*ret = &r;
	return 0;
}

void __wrap_eng_request_result(const struct eng_request *r, struct eng_result *ret)
{
	*ret = result;
}

void __wrap_eng_request_free(struct eng_request *r)
{
}

void __wrap_eng_request_abort(struct eng_request *r)
{
	nr_aborts++;
}

void __wrap_eng_request_stop(struct eng_request *r)
{
}

int __wrap_kvc_prefetch(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
			uint32_t max_pages, uint32_t *ret_nr)
{
	nr_prefetches++;
	return prefetch_rc;
}

void __wrap_kvc_info(struct kvc *c, struct kvc_info *ret_info)
{
	*ret_info = (struct kvc_info){.table_epoch = epoch};
}

void *__wrap_realloc(void *p, size_t bytes)
{
	return no_memory ? NULL : __real_realloc(p, bytes);
}

/* The wall's clock was an hour ahead when it was asked; it is right again at once. */
int __wrap_clock_gettime(clockid_t id, struct timespec *ts)
{
	int rc = __real_clock_gettime(id, ts);

	if (clock_set_back && id == CLOCK_REALTIME)
		ts->tv_sec += 3600;
	return rc;
}

/* A token every TICK_US, as the engine's loop gives them, and then the end. */
static void *ticker(void *arg)
{
	struct eng_job *j = arg;

	for (int i = 0; i < NR_TICKS; i++) {
		usleep(TICK_US);
		pthread_mutex_lock(&j->lock);
		j->nr_tokens++;
		pthread_cond_signal(&j->changed);
		pthread_mutex_unlock(&j->lock);
	}
	pthread_mutex_lock(&j->lock);
	j->ended = true;
	pthread_cond_signal(&j->changed);
	pthread_mutex_unlock(&j->lock);
	return NULL;
}

/* Return: is the client still there at the end of the wait? */
static bool wait_beside_tokens(bool whole, bool gone, u64 *ret_ns, u32 *ret_tokens)
{
	struct eng_job_params p = {.max_tokens = 1};
	struct eng_tokenizer *tok = NULL;
	struct eng_err err = {{0}};
	struct eng_job *j;
	pthread_t thread;
	int fds[2];
	bool here;
	u64 start;

	if (eng_tokenizer_load(md_model("tiny-k2/tokenizer.json"), &tok, &err))
		KVT_FAIL("%s", err.text);
	j = eng_job_create(tok, &p);
	KVT_EXPECT(j);
	KVT_EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
	if (gone)
		close(fds[1]);
	KVT_EXPECT_EQ(pthread_create(&thread, NULL, ticker, j), 0);
	start = kv_now_ns();
	pthread_mutex_lock(&j->lock);
	here = eng_job_wait_locked(j, 0, whole, fds[0], LOOK_NS);
	*ret_ns = kv_now_ns() - start;
	*ret_tokens = j->nr_tokens;
	pthread_mutex_unlock(&j->lock);
	pthread_join(thread, NULL);
	close(fds[0]);
	if (!gone)
		close(fds[1]);
	eng_job_put(j);
	eng_tokenizer_free(tok);
	return here;
}

KVT_TEST(a_client_that_left_is_noticed_between_fast_tokens)
{
	for (int whole = 0; whole < 2; whole++) {
		u32 tokens;
		u64 ns;

		KVT_EXPECT(!wait_beside_tokens(whole, true, &ns, &tokens));
		KVT_NOTE("%s: after %.1f ms and %u tokens", whole ? "whole" : "stream",
			 (double)ns * 1e-6, tokens);
		KVT_EXPECT_LE(ns, LONGEST_S * KV_NSEC_PER_SEC);
	}
}

KVT_TEST(a_client_that_waits_gets_the_end)
{
	u32 tokens;
	u64 ns;

	KVT_EXPECT(wait_beside_tokens(true, false, &ns, &tokens));
	KVT_EXPECT_EQ(tokens, NR_TICKS);
}

/* A job in the hands of the loop; its other reference is the caller's. */
static struct eng_job *job_open(struct eng_jobs *q, struct eng_engine *e, u32 nr_ids)
{
	static struct eng_tokenizer *tok;
	struct eng_job_params p = {.max_tokens = 1000, .nr_ids = nr_ids};
	struct eng_err err = {{0}};
	struct eng_job *j;

	if (!tok && eng_tokenizer_load(md_model("tiny-k2/tokenizer.json"), &tok, &err))
		KVT_FAIL("%s", err.text);
	if (!q->engine) {
		e->wake_fd = -1;
		eng_jobs_init(q, e, tok);
	}
	p.ids = calloc(nr_ids, sizeof(*p.ids));
	j = eng_job_create(tok, &p);
	KVT_EXPECT(j);
	KVT_EXPECT_EQ(eng_jobs_push(q, j), 0);
	eng_jobs_turn(q);
	return j;
}

/* An answer whose text has a hole is no answer. */
KVT_TEST(text_that_finds_no_memory_ends_the_job)
{
	static struct eng_engine e;
	static struct eng_jobs q;
	static const u32 word = 451;
	struct eng_job *j = job_open(&q, &e, 1);
	size_t shown;

	for (int i = 0; i < 3; i++)
		asked.on_token(asked.arg, j->request, word, 0);
	shown = j->nr_shown;
	KVT_EXPECT(shown > 0 && nr_aborts == 0);
	no_memory = true;
	for (int i = 0; i < 1000 && nr_aborts == 0; i++)
		asked.on_token(asked.arg, j->request, word, 0);
	no_memory = false;
	KVT_EXPECT_EQ(nr_aborts, 1);
	result.finish = ENG_FINISH_ABORT;
	asked.on_done(asked.arg, j->request);
	KVT_EXPECT(j->ended && j->nr_shown >= shown && j->nr_shown == strlen(j->text));
	KVT_EXPECT_EQ(j->finish, ENG_FINISH_ERROR);
	KVT_EXPECT_EQ(j->code, -ENOMEM);
	eng_job_put(j);
}

/* The next kvmd may have a tier where the last had none. */
KVT_TEST(each_kvmd_is_asked_for_its_tiers)
{
	static const struct {
		u64 epoch;
		int rc;
		u32 asked; /* of two jobs */
	} times[] = {{7, -EOPNOTSUPP, 1}, {7, 0, 0},	       {8, 0, 2},
		     {8, KV_MISS, 2},	  {9, -EOPNOTSUPP, 1}, {7, 0, 2}};
	static struct eng_engine e;
	static struct eng_jobs q;

	for (size_t i = 0; i < KV_ARRAY_SIZE(times); i++) {
		epoch = times[i].epoch;
		prefetch_rc = times[i].rc;
		nr_prefetches = 0;
		for (int k = 0; k < 2; k++) {
			struct eng_job *j = job_open(&q, &e, KV_PAGE_TOKENS);

			asked.on_done(asked.arg, j->request);
			eng_job_put(j);
		}
		KVT_EXPECT_EQ(nr_prefetches, times[i].asked);
	}
}

/* Nothing comes, and the wall's clock is set back by an hour: the wait is not. */
KVT_TEST_T(a_client_that_left_is_noticed_whatever_the_clock, 30)
{
	static struct eng_engine e;
	static struct eng_jobs q;
	struct eng_job *j = job_open(&q, &e, 1);
	int fds[2];

	KVT_EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
	close(fds[1]);
	clock_set_back = true;
	pthread_mutex_lock(&j->lock);
	KVT_EXPECT(!eng_job_wait_locked(j, 0, true, fds[0], LOOK_NS));
	pthread_mutex_unlock(&j->lock);
}

KVT_MAIN()
