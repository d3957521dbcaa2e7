/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - the engine on guarded memory: what a GPU needs of it, without one.
 *
 * Its code dies when it looks at device memory, its decode steps are recorded and played
 * (a call that should change with the step, but is baked in, gives wrong tokens), and its
 * activations are BF16.
 */
#define DEV_KVMD    "--host-bytes", "256MiB"
#define DEV_DEVICE  ENG_DEVICE_GUARDED
#define DEV_IDS_MAX 400
#include "tests/e2e/device_cases.h"
#include "tests/e2e/layer_cases.h"
#include "tests/e2e/attention_cases.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

KVT_TEST(mla_bf16_activations_within_2e3)
{
	dev_reference("tiny-k2", ENG_KV_BF16, 16);
}

KVT_TEST(gqa_bf16_activations_within_2e3)
{
	dev_reference("tiny-glm", ENG_KV_BF16, 16);
}

KVT_TEST(a_layer_is_rounded_once)
{
	dev_layers_rounded_once("tiny-k2");
	dev_layers_rounded_once("tiny-glm");
}

KVT_TEST(fast_attention_is_for_decode_steps)
{
	attention_flags("tiny-k2", ENG_DEVICE_HOST);
	attention_flags("tiny-k2", ENG_DEVICE_GUARDED);
	attention_flags("tiny-glm", ENG_DEVICE_GUARDED);
}

KVT_TEST(fast_attention_with_32_heads_is_nothing_to_a_host)
{
	attention_errors(ENG_KV_BF16, 2, 0);
}

KVT_TEST(attention_is_exact_or_fast)
{
	struct eng_options opt = {.size_bytes = sizeof(opt), .attention = 2};
	struct eng_engine *e;
	struct eng_err err;
	struct rig rig;

	rig_kvmd(&rig, NULL);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	opt.socket_path = rig.kvmd.socket_path;
	KVT_EXPECT_EQ(eng_engine_create(rig.m, &opt, &e, &err), -EINVAL);
	KVT_EXPECT_STR(err.text, "attention=2: unknown");
	rig_close(&rig);
}

KVT_TEST(prefix_hit_gives_the_same_tokens)
{
	dev_prefix("tiny-k2", ENG_KV_FP8);
}

KVT_TEST(stale_page_ends_its_request_only)
{
	dev_stale("tiny-glm", ENG_INJECT_BAD_PFN);
	dev_stale("tiny-glm", ENG_INJECT_MIRROR_BEHIND);
	dev_stale("tiny-k2", ENG_INJECT_OLD_GEN);
}

/* P8: a device that fails has not finished: the step's slot stays, so that nothing it may
 * still touch is given to others. */
KVT_TEST(a_device_error_is_no_completion)
{
	static const char *const args[] = {DEV_KVMD, NULL};
	struct eng_options opt = {DEV_SIZES, .no_prefix = true, .no_seal = true};
	static struct trace t;
	struct eng_request *r;
	struct kv_stat st;
	struct eng_engine *e;
	u32 prompt[100];
	struct rig rig;

	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	rig_prompt(5, prompt, 100);
	r = trace_submit(e, &t, prompt, 100, 24, true);
	rig_turns(e, r, 4);
	eng_mem_guard_fail(7);
	KVT_EXPECT_EQ(eng_engine_turn(e), -EIO);
	KVT_EXPECT_EQ(t.nr, 4);
	KVT_EXPECT_EQ(eng_engine_turn(e), -EIO);
	eng_request_abort(r);
	KVT_EXPECT_EQ(kvc_flush(eng_engine_kvc(e)), 0);
	nanosleep(&(struct timespec){0, 200000000}, NULL);
	KVT_EXPECT_EQ(kvc_stat(eng_engine_pool(e), &st), 0);
	KVT_EXPECT_EQ(st.nr_quarantine, 2); /* its two pages, for as long as we live */
	eng_engine_destroy(e);		    /* leaves all to the end of this process */
	rig_close(&rig);
}

/* Tokens of a request under @check. Return: how many tag_check kernels ran */
static u32 checks_under(const char *check, struct trace *t)
{
	struct eng_options opt = {DEV_SIZES, .no_prefix = true, .no_seal = true};
	char path[] = "/tmp/kvt-config-XXXXXX";
	const char *args[] = {DEV_KVMD, "--config", path, NULL};
	struct eng_request *r;
	struct eng_engine *e;
	u32 prompt[100], nr;
	struct rig rig;
	int fd = mkstemp(path);

	KVT_EXPECT(fd >= 0);
	dprintf(fd,
		"{\"check\":\"%s\",\"tenants\":[{\"name\":\"t\",\"uids\":[%u],\"gpus\":"
		"[{\"gpu\":\"*\",\"max\":\"1GiB\"}]}]}",
		check, getuid());
	close(fd);
	rig_kvmd(&rig, args);
	unlink(path);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, &opt);
	rig_prompt(5, prompt, 100);
	r = trace_submit(e, t, prompt, 100, 24, true);
	rig_turns(e, r, 24);
	KVT_EXPECT_EQ(t->nr, 24);
	nr = eng_mem_guard_checks();
	eng_engine_destroy(e);
	rig_close(&rig);
	return nr;
}

/* G6: with check=off no kernel is launched for it, prompt and decode alike; the text is the
 * same. */
KVT_TEST(check_off_launches_no_kernel)
{
	static struct trace off, batch;

	KVT_EXPECT_EQ(checks_under("off", &off), 0);
	KVT_EXPECT(checks_under("batch", &batch) >= 24);
	trace_expect_equal(&off, &batch, "text");
}

/* The guard is a guard: a look at device memory ends the process. */
KVT_TEST(guarded_memory_cannot_be_read_by_the_host)
{
	struct eng_mem *m;
	struct eng_err err;
	int status;
	pid_t pid;
	void *p;

	KVT_EXPECT_EQ(eng_mem_open(ENG_DEVICE_GUARDED, NULL, &m, &err), 0);
	KVT_EXPECT_EQ(m->ops->alloc(m, 4096, &p), 0);
	KVT_EXPECT_EQ(m->ops->zero(m, p, 4096), 0);
	pid = fork();
	KVT_EXPECT(pid >= 0);
	if (pid == 0) {
		signal(SIGSEGV, SIG_DFL);
		_exit(*(volatile char *)p);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
	m->ops->close(m);
}

KVT_MAIN()
