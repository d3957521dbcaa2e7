/* SPDX-License-Identifier: Apache-2.0 */
/*
 * restart.c - an engine decodes across a kill -9 of kvmd: with a keeper nothing is lost,
 * nothing is computed again, and the text is the same (design 1, G4; design 9).
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <signal.h>

#define PROMPT	   150
#define NEW	   90
#define HOST_BYTES "134217728"

static struct rig rig;
static struct trace alone[2], traces[2];
static u32 prompt[2][PROMPT];

static void kvmd_again(void)
{
	char exe[64], path[1024], fd_text[16], byte;
	ssize_t n;
	int fds[2];

	/* the dead one's program */
	snprintf(exe, sizeof(exe), "/proc/%d/exe", rig.kvmd.pid);
	n = readlink(exe, path, sizeof(path) - 1);
	KVT_EXPECT(n > 0 && !pipe(fds));
	path[n] = 0;
	kill(rig.kvmd.pid, SIGKILL);
	waitpid(rig.kvmd.pid, NULL, 0);
	snprintf(fd_text, sizeof(fd_text), "%d", fds[1]);
	rig.kvmd.pid = fork();
	if (rig.kvmd.pid == 0) {
		int log = open(rig.kvmd.log_path, O_WRONLY | O_APPEND);

		dup2(log, 1);
		dup2(log, 2);
		execl(path, path, "--private", rig.kvmd.dir, "--die-with-parent",
		      "--keeper", "--test-extents", "--backend",
		      rig_on_cuda() ? "cuda" : "host", rig_size_option(), HOST_BYTES,
		      "--ready-fd", fd_text, NULL);
		_exit(127);
	}
	close(fds[1]);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	close(fds[0]);
}

/* @nr_tokens: how far the first request is when kvmd is killed. */
static void killed_at(u32 nr_tokens)
{
	const char *const args[] = {"--host-bytes", HOST_BYTES, "--keeper", NULL};
	struct eng_options opt = {
		.kv = ENG_KV_FP8, .batch_max = 4, .chunk_tokens = 64, .no_prefix = true};
	struct kvc_info was, is;
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
	kvc_info(eng_engine_kvc(e), &was);
	kill(rig.kvmd.pid, SIGSTOP);	   /* away, as far as anyone can tell */
	rig_turns(e, r[0], nr_tokens + 3); /* on pages that the engine holds */
	kvmd_again();
	rig_run(e);
	kvc_info(eng_engine_kvc(e), &is);
	KVT_EXPECT_EQ(is.session, was.session);
	KVT_EXPECT(is.table_epoch != was.table_epoch);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_STR(eng_finish_str(traces[i].res.finish), "length");
		KVT_EXPECT_EQ(traces[i].res.nr_computed, PROMPT); /* once */
		trace_expect_equal(&traces[i], &alone[i], "after the restart");
	}
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_TEST(same_text_across_a_kill_of_kvmd)
{
	for (u32 nr = 2; nr < 70; nr += 22)
		killed_at(nr);
}

KVT_MAIN()
