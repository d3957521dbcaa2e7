/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.c - an HTTP thread's wait for its job: a client that goes away is noticed although
 * tokens come faster than anybody looks, as they do on a GPU.
 */
#include "engine/http/job.h"
#include "base/clock.h"
#include "tests/unit/model/modeldir.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOOK_NS	  (300 * KV_NSEC_PER_MSEC)
#define TICK_US	  500
#define NR_TICKS  8000 /* 4 s at least */
#define LONGEST_S 3

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

KVT_MAIN()
