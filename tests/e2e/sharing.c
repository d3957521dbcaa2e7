/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sharing.c - engines as separate processes: prefixes found in place, death without
 * damage.
 *
 * The other engine is a forked child that runs until it is told to stop, or is killed.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <poll.h>
#include <time.h>

#define PROMPT 200
#define NEW    16

static struct rig rig;
static u32 prompt[PROMPT];

static u64 now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (u64)ts.tv_sec * 1000 + (u64)ts.tv_nsec / 1000000;
}

/**
 * struct child - another engine process
 * @result: read end: its trace when done, or one byte when it decodes
 */
struct child {
	pid_t pid;
	int result;
};

static void write_all(int fd, const void *p, size_t n)
{
	const char *b = p;

	while (n) {
		ssize_t w = write(fd, b, n);

		KVT_EXPECT(w > 0);
		b += w;
		n -= (size_t)w;
	}
}

static void read_all(int fd, void *p, size_t n)
{
	char *b = p;

	while (n) {
		ssize_t r = read(fd, b, n);

		if (r <= 0)
			KVT_FAIL("the other engine ended");
		b += r;
		n -= (size_t)r;
	}
}

/* In the child: run the prompt once and send the trace. */
static void child_complete(int fd)
{
	static struct trace t;
	struct eng_engine *e;

	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, NULL);
	trace_submit(e, &t, prompt, PROMPT, NEW, false);
	rig_run(e);
	eng_engine_destroy(e);
	write_all(fd, &t, sizeof(t));
}

/* In the child: decode without end; a byte when pages are held, then until killed. */
static void child_decode(int fd)
{
	static struct trace t;
	struct eng_request *r;
	struct eng_engine *e;

	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, NULL);
	r = trace_submit(e, &t, prompt, PROMPT, 1000, false);
	rig_turns(e, r, 4);
	write_all(fd, "", 1);
	rig_turns(e, r, 1000); /* killed long before */
	pause();
}

static struct child spawn(void (*run)(int fd))
{
	struct child c;
	int fds[2];

	KVT_EXPECT_EQ(pipe(fds), 0);
	fflush(stdout);
	c.pid = fork();
	KVT_EXPECT(c.pid >= 0);
	if (c.pid == 0) {
		close(fds[0]);
		run(fds[1]);
		_exit(0);
	}
	close(fds[1]);
	c.result = fds[0];
	return c;
}

static double pool_number(const char *field)
{
	cJSON *reply = rig_admin(&rig, "{\"op\":\"pool\"}");
	const cJSON *pool = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "pools"), 0);
	const cJSON *v = cJSON_GetObjectItem(pool, field);
	double d;

	if (!v)
		v = cJSON_GetObjectItem(cJSON_GetObjectItem(pool, "states"), field);
	if (!v)
		KVT_FAIL("pools: no field %s in %s", field,
			 cJSON_PrintUnformatted(reply));
	d = v->valuedouble;
	cJSON_Delete(reply);
	return d;
}

static void expect_audit_clean(void)
{
	cJSON *reply = rig_admin(&rig, "{\"op\":\"audit\"}");

	KVT_EXPECT_EQ(cJSON_GetObjectItem(reply, "damage")->valuedouble, 0);
	cJSON_Delete(reply);
}

KVT_TEST(second_engine_finds_the_first_ones_prefix)
{
	static struct trace theirs, ours;
	struct eng_engine *e;
	struct child c;
	int status;

	rig_kvmd(&rig, NULL);
	rig_prompt(60, prompt, PROMPT);
	c = spawn(child_complete);
	read_all(c.result, &theirs, sizeof(theirs));
	KVT_EXPECT_EQ(waitpid(c.pid, &status, 0), c.pid);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT_EQ(theirs.res.nr_cached, 0);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, NULL);
	trace_submit(e, &ours, prompt, PROMPT, NEW, false);
	rig_run(e);
	KVT_EXPECT_EQ(ours.res.nr_cached, 192);
	KVT_EXPECT_EQ(ours.res.nr_computed, 8);
	trace_expect_equal(&theirs, &ours, "the other engine's pages");
	eng_engine_destroy(e);
	expect_audit_clean();
	rig_close(&rig);
}

/* Other weights make another model_id: no hit, no clash. */
KVT_TEST(other_weights_do_not_share)
{
	static struct trace theirs, ours;
	struct eng_engine *e;
	struct child c;

	rig_kvmd(&rig, NULL);
	rig_prompt(61, prompt, PROMPT);
	c = spawn(child_complete);
	read_all(c.result, &theirs, sizeof(theirs));
	waitpid(c.pid, NULL, 0);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_INT4_G32);
	e = rig_engine(&rig, NULL);
	trace_submit(e, &ours, prompt, PROMPT, NEW, false);
	rig_run(e);
	KVT_EXPECT_EQ(ours.res.nr_cached, 0);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* Is the session of @pid inside a step, as kvmd sees its announce slots? */
static bool inside_step(pid_t pid)
{
	cJSON *reply = rig_admin(&rig, "{\"op\":\"ps\"}");
	const cJSON *s, *step;
	bool inside = false;

	cJSON_ArrayForEach(s, cJSON_GetObjectItem(reply, "sessions"))
	{
		if ((pid_t)cJSON_GetObjectItem(s, "pid")->valuedouble != pid)
			continue;
		cJSON_ArrayForEach(step, cJSON_GetObjectItem(s, "steps")) inside |=
			cJSON_GetObjectItem(step, "epoch")->valuedouble != 0;
	}
	cJSON_Delete(reply);
	return inside;
}

static void stop_inside_step(pid_t pid)
{
	struct timespec ts = {0, 3000000};

	for (int i = 0; i < 1000; i++) {
		kill(pid, SIGSTOP);
		nanosleep(&ts, NULL);
		if (inside_step(pid))
			return;
		kill(pid, SIGCONT);
		nanosleep(&ts, NULL);
	}
	KVT_FAIL("the other engine was never seen inside a step");
}

/* kill -9 inside a step: its pages come back within a second, others see nothing. */
KVT_TEST(engine_killed_inside_a_step_gives_its_pages_back)
{
	static struct trace before, during;
	struct eng_request *r;
	struct eng_engine *e;
	struct child c;
	u64 start_ms, took_ms;
	char byte;

	rig_kvmd(&rig, NULL);
	rig_prompt(62, prompt, PROMPT);
	c = spawn(child_decode);
	read_all(c.result, &byte, 1);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	rig_prompt(63, prompt, PROMPT);
	e = rig_engine(&rig, NULL);
	trace_submit(e, &before, prompt, PROMPT, 40, true);
	rig_run(e);
	r = trace_submit(e, &during, prompt, PROMPT, 40, true);
	rig_turns(e, r, 5);
	stop_inside_step(c.pid);
	kill(c.pid, SIGKILL);
	start_ms = now_ms();
	waitpid(c.pid, NULL, 0);
	rig_run(e);
	trace_expect_equal(&before, &during, "while another engine died");
	eng_engine_destroy(e);
	while (pool_number("active") + pool_number("quarantine") > 0) {
		struct timespec ts = {0, 5000000};

		KVT_EXPECT(now_ms() - start_ms < 30000);
		nanosleep(&ts, NULL);
	}
	took_ms = now_ms() - start_ms;
	KVT_NOTE("pages back %llu ms after the kill", (unsigned long long)took_ms);
	expect_audit_clean();
	rig_close(&rig);
}

KVT_MAIN()
