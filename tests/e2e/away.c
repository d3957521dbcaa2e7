/* SPDX-License-Identifier: Apache-2.0 */
/*
 * away.c - an engine's loop while there is no kvmd, and while another thread of its process (an
 * HTTP client's prefetch) is inside the library.
 *
 * The linker hands the calls named __wrap_ below to this file first (Makefile): so another
 * thread's act falls exactly between two of the loop's.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>

#define PROMPT	   150
#define SHORT	   60
#define NEW	   90
#define HOST_BYTES "134217728"

struct kvc_link;

int __real_kvc_step_begin(struct kvc *c, struct kvc_step **ret_step);
int __wrap_kvc_step_begin(struct kvc *c, struct kvc_step **ret_step);
int __real_kvc_seal(struct kvc_pool *pool, const struct kvc_seal *seal);
int __wrap_kvc_seal(struct kvc_pool *pool, const struct kvc_seal *seal);
int __real_kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		      uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr);
int __wrap_kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		      uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr);
int __real_kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
		     struct kv_grant *ret_pages);
int __wrap_kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
		     struct kv_grant *ret_pages);
int __real_kvc_flush(struct kvc *c);
int __wrap_kvc_flush(struct kvc *c);
int __real_kvc_pool_attach_locked(struct kvc_pool *pool, struct kvc_link *link,
				  u64 deadline_ns);
int __wrap_kvc_pool_attach_locked(struct kvc_pool *pool, struct kvc_link *link,
				  u64 deadline_ns);
int __real_pthread_mutex_trylock(pthread_mutex_t *m);
int __wrap_pthread_mutex_trylock(pthread_mutex_t *m);

static struct rig rig;
static struct trace alone[2], traces[2];
static u32 prompt[2][PROMPT];
static void (*on_begin)(void); /* once, when a step has begun */
static bool on_begin_early;    /* ... is about to begin */
static bool nobody;	       /* there is no kvmd: who asks would wait for the timeout */
static bool no_pages;	       /* nor is there one in the magazine */
static u32 nr_asked;	       /* calls that would have waited */
static u32 nr_locked;	       /* so many tries find the library's lock taken */
static bool stop_attach;
static bool
	cold; /* no keeper, so that the next kvmd knows nobody, and no check of steps */
static sem_t attaching, attach_on;

int __wrap_kvc_step_begin(struct kvc *c, struct kvc_step **ret_step)
{
	void (*act)(void) = on_begin;
	int rc;

	if (act && on_begin_early) {
		on_begin = NULL;
		act();
	}
	rc = __real_kvc_step_begin(c, ret_step);
	if (!rc && act && !on_begin_early) {
		on_begin = NULL;
		act();
	}
	return rc;
}

static int asked_in_vain(void)
{
	nr_asked++;
	return -ETIMEDOUT;
}

int __wrap_kvc_seal(struct kvc_pool *pool, const struct kvc_seal *seal)
{
	if (nobody)
		return asked_in_vain();
	return __real_kvc_seal(pool, seal);
}

int __wrap_kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		      uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr)
{
	if (nobody)
		return asked_in_vain();
	return __real_kvc_lookup(pool, tokens, nr_tokens, max_pages, ret_hits, ret_nr);
}

int __wrap_kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
		     struct kv_grant *ret_pages)
{
	if (no_pages)
		return asked_in_vain();
	return __real_kvc_alloc(pool, nr, gfp, ret_pages);
}

int __wrap_kvc_flush(struct kvc *c)
{
	if (nobody)
		return asked_in_vain();
	return __real_kvc_flush(c);
}

int __wrap_kvc_pool_attach_locked(struct kvc_pool *pool, struct kvc_link *link,
				  u64 deadline_ns)
{
	if (stop_attach) {
		stop_attach = false;
		sem_post(&attaching);
		sem_wait(&attach_on);
	}
	return __real_kvc_pool_attach_locked(pool, link, deadline_ns);
}

int __wrap_pthread_mutex_trylock(pthread_mutex_t *m)
{
	if (nr_locked) {
		nr_locked--;
		return EBUSY;
	}
	return __real_pthread_mutex_trylock(m);
}

static void kvmd_gone(void)
{
	kill(rig.kvmd.pid, SIGKILL);
	waitpid(rig.kvmd.pid, NULL, 0);
}

/* Its loop in the kernel may live a moment longer, with our connection. */
static void wait_hangup(struct eng_engine *e)
{
	struct pollfd p = {.fd = kvc_event_fd(eng_engine_kvc(e)), .events = POLLIN};

	kvmd_gone();
	KVT_EXPECT_EQ(poll(&p, 1, 10000), 1);
}

/* The one at @path takes up what the keeper has. */
static void kvmd_again(const char *path)
{
	char fd_text[16], byte;
	int fds[2];

	KVT_EXPECT(!pipe(fds));
	snprintf(fd_text, sizeof(fd_text), "%d", fds[1]);
	rig.kvmd.pid = fork();
	if (rig.kvmd.pid == 0) {
		int log = open(rig.kvmd.log_path, O_WRONLY | O_APPEND);

		dup2(log, 1);
		dup2(log, 2);
		execl(path, path, "--private", rig.kvmd.dir, "--die-with-parent",
		      "--keeper", "--test-extents", "--check", cold ? "off" : "batch",
		      "--backend", rig_on_cuda() ? "cuda" : "host", rig_size_option(),
		      HOST_BYTES, "--ready-fd", fd_text, NULL);
		_exit(127);
	}
	close(fds[1]);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	close(fds[0]);
}

static const char *kvmd_path(void)
{
	static char path[1024];
	char exe[64];
	ssize_t n;

	snprintf(exe, sizeof(exe), "/proc/%d/exe", rig.kvmd.pid);
	n = readlink(exe, path, sizeof(path) - 1);
	KVT_EXPECT(n > 0);
	path[n] = 0;
	return path;
}

/* What both requests say when nothing happens. */
static struct eng_engine *open_engine(u32 timeout_ms)
{
	const char *const kept[] = {"--host-bytes", HOST_BYTES, "--keeper", NULL};
	const char *const lost[] = {"--host-bytes", HOST_BYTES, "--check", "off", NULL};
	struct eng_options opt = {.kv = ENG_KV_FP8,
				  .batch_max = 4,
				  .chunk_tokens = 64,
				  .timeout_ms = timeout_ms};
	struct eng_engine *e;

	rig_kvmd(&rig, cold ? lost : kept);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	for (u32 i = 0; i < 2; i++) {
		rig_prompt(80 + i, prompt[i], PROMPT);
		trace_submit(e, &alone[i], prompt[i], i ? PROMPT : SHORT, NEW, true);
		rig_run(e);
	}
	return e;
}

static void expect_both(u32 nr_computed)
{
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_STR(eng_finish_str(traces[i].res.finish), "length");
		trace_expect_equal(&traces[i], &alone[i], "in spite of it");
		KVT_EXPECT_EQ(traces[i].res.nr_preempted, 0);
	}
	KVT_EXPECT_EQ(traces[0].res.nr_computed + traces[1].res.nr_computed, nr_computed);
}

static u32 held(const char *field)
{
	cJSON *reply = rig_admin(&rig, "{\"op\":\"ps\"}"), *s;
	u32 n;

	s = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "sessions"), 0);
	KVT_EXPECT(s);
	n = (u32)cJSON_GetObjectItem(s, field)->valuedouble;
	cJSON_Delete(reply);
	return n;
}

static double incidents(void)
{
	cJSON *status = rig_admin(&rig, "{\"op\":\"status\"}");
	double n = cJSON_GetObjectItem(status, "incidents")->valuedouble;

	cJSON_Delete(status);
	return n;
}

/*
 * G4: what runs goes on without kvmd. A page that became full is not sealed then, and who waits
 * for admission waits on: each such call would stop every running request for a timeout.
 */
KVT_TEST(running_requests_do_not_wait_for_a_kvmd_that_is_away)
{
	struct eng_engine *e = open_engine(5000);
	struct eng_stats before, after;
	struct eng_request *r;
	const char *path = kvmd_path();

	r = trace_submit(e, &traces[0], prompt[0], SHORT, NEW, false);
	rig_turns(e, r, 2);
	for (int i = 0; held("magazine") == 0; i++) {
		KVT_EXPECT(i < 1000);
		usleep(1000);
	}
	wait_hangup(e);
	trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, false);
	eng_engine_stats(e, &before);
	nobody = true;
	rig_turns(e, r, 40); /* over a page's end */
	nobody = false;
	KVT_EXPECT_EQ(nr_asked, 0);
	KVT_EXPECT(traces[0].nr >= 40 && !traces[0].done);
	kvmd_again(path);
	rig_run(e);
	expect_both(SHORT + PROMPT);
	eng_engine_stats(e, &after);
	KVT_EXPECT(after.sealed_pages > before.sealed_pages + 1); /* late, but sealed */
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* G4: who needs a page that only kvmd has waits with what it holds, and nobody waits for it. */
KVT_TEST(request_without_a_page_keeps_the_others_going)
{
	struct eng_engine *e = open_engine(5000);
	struct eng_request *r[2];
	const char *path = kvmd_path();

	r[1] = trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, true);
	rig_turns(e, r[1], 1);
	r[0] = trace_submit(e, &traces[0], prompt[0], SHORT, NEW, true);
	rig_turns(e, r[0], 1);
	KVT_EXPECT(traces[0].nr <= 64 - SHORT); /* the other has room for 40 tokens */
	wait_hangup(e);
	nobody = no_pages = true;
	rig_turns(e, r[1], 35);
	KVT_EXPECT_EQ(traces[0].nr, 64 - SHORT + 1);
	KVT_EXPECT_LE(nr_asked, 1); /* to learn that there is none */
	nobody = no_pages = false;
	kvmd_again(path);
	rig_run(e);
	expect_both(SHORT + PROMPT);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* An engine with nothing to do is there for the next kvmd, with all that it owes. */
KVT_TEST(idle_engine_gives_its_pages_to_the_next_kvmd)
{
	struct eng_engine *e = open_engine(1000);
	struct kvc_info was, is;
	struct eng_request *r;
	const char *path = kvmd_path();

	kvc_info(eng_engine_kvc(e), &was);
	r = trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, true);
	rig_turns(e, r, 3);
	KVT_EXPECT(held("pages") >= 3);
	kvmd_gone();
	eng_request_abort(r);
	for (int i = 0; i < 3; i++)
		KVT_EXPECT_EQ(eng_engine_turn(e), 0);
	kvmd_again(path);
	for (int i = 0; held("pages") > 0; i++) {
		KVT_EXPECT(i < 2000);
		KVT_EXPECT_EQ(eng_engine_turn(e), 0);
		eng_engine_wait(e, 10);
	}
	kvc_info(eng_engine_kvc(e), &is);
	KVT_EXPECT_EQ(is.session, was.session);
	KVT_EXPECT(is.table_epoch != was.table_epoch);
	/* and again with nothing that it owes */
	kvmd_gone();
	KVT_EXPECT_EQ(eng_engine_turn(e), 0);
	kvmd_again(path);
	kvc_info(eng_engine_kvc(e), &was);
	for (int i = 0; is.table_epoch == was.table_epoch; i++) {
		KVT_EXPECT(i < 2000);
		KVT_EXPECT_EQ(eng_engine_turn(e), 0);
		eng_engine_wait(e, 10);
		kvc_info(eng_engine_kvc(e), &is);
	}
	KVT_EXPECT_EQ(is.session, was.session);
	eng_engine_destroy(e);
	rig_close(&rig);
}

static struct eng_engine *the_engine;
static const char *the_path;

static void *ask_kvmd(void *arg)
{
	struct kv_stat st;

	for (int i = 0; kvc_stat(eng_engine_pool(the_engine), &st); i++)
		KVT_EXPECT(i < 100);
	return NULL;
}

static void connect_again(void)
{
	kvmd_gone();
	kvmd_again(the_path);
	ask_kvmd(NULL); /* as another thread would */
}

/*
 * G4: a step is announced to the old table, then another thread connects to the next kvmd. The
 * mirror starts anew, so the old table's block must not be applied to it.
 */
KVT_TEST(step_that_began_before_another_thread_connected)
{
	struct eng_engine *e = open_engine(2000);
	struct eng_request *r;

	the_engine = e;
	the_path = kvmd_path();
	r = trace_submit(e, &traces[0], prompt[0], SHORT, NEW, true);
	trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, true);
	rig_turns(e, r, 10);
	on_begin = connect_again;
	rig_run(e);
	KVT_EXPECT(!on_begin);
	expect_both(SHORT + PROMPT);
	KVT_EXPECT_EQ(incidents(), 0);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/*
 * Another thread connects before the step begins, to a kvmd that knows nothing of the session: the
 * step is of leases that are no more, and with check=off nothing else tells.
 */
KVT_TEST(step_of_leases_that_another_thread_found_gone)
{
	struct eng_engine *e;
	struct eng_request *r;

	cold = true;
	e = open_engine(2000);
	the_engine = e;
	the_path = kvmd_path();
	r = trace_submit(e, &traces[0], prompt[0], SHORT, NEW, true);
	trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, true);
	rig_turns(e, r, 10);
	on_begin_early = true;
	on_begin = connect_again;
	rig_run(e);
	KVT_EXPECT(!on_begin);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_STR(eng_finish_str(traces[i].res.finish), "length");
		trace_expect_equal(&traces[i], &alone[i], "computed anew");
		KVT_EXPECT_EQ(traces[i].res.nr_preempted, 1);
	}
	KVT_EXPECT_EQ(incidents(), 0);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/*
 * G4: another thread is connecting again: there is a session already, its pools are not open yet.
 * A step that begins now has to wait, the engine is not at its end.
 */
KVT_TEST(step_that_begins_while_another_thread_connects)
{
	struct eng_engine *e = open_engine(1500);
	struct eng_request *r;
	pthread_t thread;

	the_engine = e;
	the_path = kvmd_path();
	sem_init(&attaching, 0, 0);
	sem_init(&attach_on, 0, 0);
	r = trace_submit(e, &traces[0], prompt[0], SHORT, NEW, true);
	trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, true);
	rig_turns(e, r, 10);
	kvmd_gone();
	kvmd_again(the_path);
	stop_attach = true;
	KVT_EXPECT_EQ(pthread_create(&thread, NULL, ask_kvmd, NULL), 0);
	sem_wait(&attaching);
	for (int i = 0; i < 3; i++) {
		int rc = eng_engine_turn(e);

		if (rc < 0)
			KVT_FAIL("turn %d: %s", i, strerror(-rc));
	}
	sem_post(&attach_on);
	pthread_join(thread, NULL);
	rig_run(e);
	expect_both(SHORT + PROMPT);
	KVT_EXPECT_EQ(incidents(), 0);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/*
 * P5: a row killed by REVOKE is an outcome, also when another thread is inside the library while
 * the loop wants to read the news.
 */
KVT_TEST(revoke_is_no_incident_when_another_thread_has_the_lock)
{
	struct eng_engine *e = open_engine(2000);
	struct kv_grant pages[8];
	struct kvc_pool_info info;
	struct eng_request *r;
	char request[128];

	trace_submit(e, &traces[0], prompt[0], SHORT, NEW, true);
	r = trace_submit(e, &traces[1], prompt[1], PROMPT, NEW, true);
	rig_turns(e, r, 5);
	KVT_EXPECT_EQ(eng_request_pages(r, pages, 8), 3);
	kvc_pool_get_info(eng_engine_pool(e), &info);
	snprintf(request, sizeof(request),
		 "{\"op\":\"evict\",\"target\":\"page\",\"pool\":%u,\"pfn\":%u,"
		 "\"revoke\":true}",
		 info.pool_id, pages[1].pfn);
	cJSON_Delete(rig_admin(&rig, request));
	nr_locked = 20;
	rig_run(e);
	KVT_EXPECT_EQ(nr_locked, 0);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_STR(eng_finish_str(traces[i].res.finish), "length");
		trace_expect_equal(&traces[i], &alone[i], "after REVOKE");
	}
	KVT_EXPECT_EQ(incidents(), 0);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_MAIN()
