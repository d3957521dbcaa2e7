/* SPDX-License-Identifier: Apache-2.0 */
/*
 * review_restart.c - kvmd ends under running requests and another one takes its place.
 *
 * The leases of the old daemon are gone, its pages' addresses are used anew. Requests are
 * computed again and give the same numbers; none reads a page that is not its own.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>

#define PROMPT	   150
#define NEW	   90
/* the pool comes back with the geometry it had */
#define HOST_BYTES "134217728"

extern char **environ;

static struct rig rig;
static struct trace alone[2], traces[2], third;
static u32 prompt[2][PROMPT];

/* The same directory, so the same sockets and the same saved counters. */
static void kvmd_again(const char *check)
{
	const char *build = getenv("KV_BUILD");
	char exe[4096], path[4200], byte, *slash;
	char *argv[] = {path,
			"--private",
			rig.kvmd.dir,
			"--die-with-parent",
			"--ready-fd",
			"3",
			"--backend",
			rig_on_cuda() ? "cuda" : "host",
			"--test-extents",
			(char *)rig_size_option(),
			HOST_BYTES,
			"--check",
			(char *)check,
			NULL};
	posix_spawn_file_actions_t actions;
	ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	int fds[2];

	KVT_EXPECT(n > 0 && !pipe2(fds, O_CLOEXEC));
	exe[n] = 0;
	for (int i = 0; i < 3 && (slash = strrchr(exe, '/')); i++)
		*slash = 0;
	snprintf(path, sizeof(path), "%s/kvmd", build ? build : exe);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 1, rig.kvmd.log_path,
					 O_WRONLY | O_CREAT | O_APPEND, 0600);
	posix_spawn_file_actions_adddup2(&actions, 1, 2);
	posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
	KVT_EXPECT_EQ(posix_spawn(&rig.kvmd.pid, path, &actions, NULL, argv, environ), 0);
	posix_spawn_file_actions_destroy(&actions);
	close(fds[1]);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	close(fds[0]);
}

static void kvmd_end(int sig)
{
	int status;

	kill(rig.kvmd.pid, sig);
	KVT_EXPECT_EQ(waitpid(rig.kvmd.pid, &status, 0), rig.kvmd.pid);
}

static double incidents(void)
{
	cJSON *status = rig_admin(&rig, "{\"op\":\"status\"}");
	double n = cJSON_GetObjectItem(status, "incidents")->valuedouble;

	cJSON_Delete(status);
	return n;
}

/* @nr_tokens: how far the first request is when the daemon ends */
static void restart_under_load(const char *check, int sig, u32 nr_tokens)
{
	const char *const args[] = {"--host-bytes", HOST_BYTES, "--check", check, NULL};
	struct eng_options opt = {
		.kv = ENG_KV_FP8, .batch_max = 4, .chunk_tokens = 64, .no_seal = true};
	struct eng_request *r[2];
	struct eng_engine *e;

	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	for (u32 i = 0; i < 2; i++) {
		rig_prompt(80 + i, prompt[i], PROMPT);
		trace_submit(e, &alone[i], prompt[i], PROMPT, NEW, true);
		rig_run(e);
	}
	for (u32 i = 0; i < 2; i++)
		r[i] = trace_submit(e, &traces[i], prompt[i], PROMPT, NEW, true);
	rig_turns(e, r[0], nr_tokens);
	kvmd_end(sig);
	kvmd_again(check);
	/* its lookup connects again, in the turn in which the others go on */
	trace_submit(e, &third, prompt[0], PROMPT, 2, false);
	rig_run(e);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_STR(eng_finish_str(traces[i].res.finish), "length");
		trace_expect_equal(&traces[i], &alone[i], "after the restart");
	}
	KVT_EXPECT_EQ(incidents(), 0);
	eng_engine_destroy(e);
	rig_close(&rig);
}

/* At distances from the next page: the reconnect happens in another call each time. */
KVT_TEST(requests_outlive_a_killed_daemon)
{
	for (u32 nr = 1; nr < 70; nr += 34)
		restart_under_load("batch", SIGKILL, nr);
}

KVT_TEST(requests_outlive_a_daemon_that_was_stopped)
{
	restart_under_load("batch", SIGTERM, 41);
}

/* What check=off gives up is the proof, not the engine. */
KVT_TEST(requests_outlive_a_killed_daemon_without_the_check)
{
	restart_under_load("off", SIGKILL, 20);
}

/* A daemon that stays away ends requests, it does not leave them hanging. */
static void stays_away(int sig)
{
	const char *const args[] = {"--host-bytes", HOST_BYTES, NULL};
	struct eng_options opt = {.kv = ENG_KV_FP8,
				  .batch_max = 4,
				  .chunk_tokens = 64,
				  .no_prefix = true,
				  .timeout_ms = 50,
				  .admit_ms = 400};
	struct eng_request *r[2];
	struct eng_engine *e;

	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	for (u32 i = 0; i < 2; i++) {
		rig_prompt(80 + i, prompt[i], PROMPT);
		r[i] = trace_submit(e, &traces[i], prompt[i], PROMPT, NEW, true);
	}
	rig_turns(e, r[1], 3);
	kvmd_end(sig);
	rig_run(e);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT(traces[i].done && traces[i].nr < NEW);
		KVT_EXPECT_STR(eng_finish_str(traces[i].res.finish), "error");
	}
	eng_engine_destroy(e);
	kvmd_again("batch");
	rig_close(&rig);
}

KVT_TEST(requests_end_when_the_daemon_stays_away)
{
	stays_away(SIGTERM);
	stays_away(SIGKILL);
}

KVT_MAIN()
