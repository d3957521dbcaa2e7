/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kill -9 of kvmd while two engine processes decode on the card: they go on without it on
 * the pages they hold, and with the next kvmd to the same text (design 1, G4; design 9).
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "kernels/kernels.h"

#define PROMPT	  150
#define NEW	  400
#define GPU_BYTES "1073741824"

struct shared {
	u32 nr_tokens[2]; /* written by each engine */
	u32 go;		  /* engines that have their text of an undisturbed run */
};

static struct shared *shared;
static struct rig rig;

/* Without cuInit in this process: its children could not call it any more. */
static void need_gpu(void)
{
	pid_t pid = fork();
	int status;

	if (!pid)
		_exit(kvk_cuda_ops() != NULL);
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status) || !WEXITSTATUS(status))
		KVT_SKIP("no GPU");
}

static pid_t kvmd_spawn(const char *path, int ready)
{
	char fd_text[16];
	pid_t pid;

	snprintf(fd_text, sizeof(fd_text), "%d", ready);
	pid = fork();
	if (pid == 0) {
		int log = open(rig.kvmd.log_path, O_WRONLY | O_APPEND);

		dup2(log, 1);
		dup2(log, 2);
		execl(path, path, "--private", rig.kvmd.dir, "--die-with-parent",
		      "--keeper", "--backend", "cuda", "--gpu-bytes", GPU_BYTES,
		      "--ready-fd", fd_text, NULL);
		_exit(127);
	}
	return pid;
}

static void kvmd_kill(char *ret_path, size_t bytes)
{
	char exe[64];
	ssize_t n;

	snprintf(exe, sizeof(exe), "/proc/%d/exe", rig.kvmd.pid);
	n = readlink(exe, ret_path, bytes - 1);
	KVT_EXPECT(n > 0);
	ret_path[n] = 0;
	kill(rig.kvmd.pid, SIGKILL);
	waitpid(rig.kvmd.pid, NULL, 0);
}

static int engine(u32 i)
{
	struct eng_options opt = {.kv = ENG_KV_FP8,
				  .batch_max = 4,
				  .chunk_tokens = 64,
				  .no_prefix = true,
				  .device = ENG_DEVICE_CUDA};
	static struct trace alone, trace;
	struct kvc_info was, is;
	struct eng_request *r;
	struct eng_engine *e;
	u32 prompt[PROMPT];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	rig_prompt(80 + i, prompt, PROMPT);
	trace_submit(e, &alone, prompt, PROMPT, NEW, true);
	rig_run(e);
	kvc_info(eng_engine_kvc(e), &was);
	__atomic_fetch_add(&shared->go, 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&shared->go, __ATOMIC_SEQ_CST) < 2)
		usleep(1000);
	r = trace_submit(e, &trace, prompt, PROMPT, NEW, true);
	while (!trace.done) {
		rig_turns(e, r, trace.nr + 1);
		__atomic_store_n(&shared->nr_tokens[i], trace.nr, __ATOMIC_SEQ_CST);
		usleep(2000); /* long enough for what is to happen in between */
	}
	kvc_info(eng_engine_kvc(e), &is);
	KVT_EXPECT_EQ(is.session, was.session);
	KVT_EXPECT(is.table_epoch != was.table_epoch);
	KVT_EXPECT_STR(eng_finish_str(trace.res.finish), "length");
	KVT_EXPECT_EQ(trace.res.nr_computed, PROMPT); /* once */
	KVT_EXPECT_EQ(trace.nr, alone.nr);
	for (u32 t = 0; t < trace.nr; t++)
		KVT_EXPECT_EQ(trace.tokens[t], alone.tokens[t]);
	eng_engine_destroy(e);
	return 0;
}

static void wait_tokens(u32 nr)
{
	for (u32 i = 0; i < 2; i++) {
		for (u32 ms = 0; ms < 40000; ms++) {
			if (__atomic_load_n(&shared->nr_tokens[i], __ATOMIC_SEQ_CST) >=
			    nr)
				break;
			usleep(1000);
		}
		if (__atomic_load_n(&shared->nr_tokens[i], __ATOMIC_SEQ_CST) < nr)
			KVT_FAIL("engine %u stands at %u tokens of %u", i,
				 shared->nr_tokens[i], nr);
	}
}

KVT_TEST_T(kvmd_killed_while_two_engines_decode, 120)
{
	const char *const args[] = {"--backend", "cuda",     "--gpu-bytes",
				    GPU_BYTES,	 "--keeper", NULL};
	char path[1024], byte;
	int fds[2], status;
	pid_t pids[2];
	u32 at;

	need_gpu();
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	KVT_EXPECT(shared != MAP_FAILED && !pipe(fds));
	rig_kvmd(&rig, args);
	for (u32 i = 0; i < 2; i++) {
		fflush(stdout);
		pids[i] = fork();
		if (!pids[i])
			_exit(engine(i));
	}
	wait_tokens(20);
	kvmd_kill(path, sizeof(path));
	at = KV_MAX(shared->nr_tokens[0], shared->nr_tokens[1]);
	wait_tokens(at + 20); /* nobody is there but the pages they hold */
	KVT_NOTE("killed at token %u; both are at %u and %u without a kvmd", at,
		 shared->nr_tokens[0], shared->nr_tokens[1]);
	rig.kvmd.pid = kvmd_spawn(path, fds[1]);
	close(fds[1]);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
	for (u32 i = 0; i < 2; i++) {
		KVT_EXPECT_EQ(waitpid(pids[i], &status, 0), pids[i]);
		KVT_EXPECT_EQ(status, 0);
	}
	rig_close(&rig);
}

KVT_MAIN()
