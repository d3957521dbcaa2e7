/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.c - kv-engine's commands as a shell sees them: output, exit codes, words of
 * refusal.
 */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>

extern char **environ;

static char out[1u << 16];

static void kv_engine_path(char *ret, size_t bytes)
{
	const char *build = getenv("KV_BUILD");
	char exe[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);

	exe[n < 0 ? 0 : n] = 0;
	for (int i = 0; i < 3; i++)
		*strrchr(exe, '/') = 0; /* build/tests/e2e/cli */
	snprintf(ret, bytes, "%.3000s/kv-engine", build ? build : exe);
}

/* Run kv-engine with @args (a shell fragment) and keep what it said. Return: exit code.
 */
static int engine(const char *args)
{
	char cmd[3 * PATH_MAX], path[PATH_MAX];
	size_t used = 0, r;
	FILE *f;
	int status;

	kv_engine_path(path, sizeof(path));
	snprintf(cmd, sizeof(cmd), "M=%.3000s; %.3000s %.3000s 2>&1", rig_models_dir(),
		 path, args);
	f = popen(cmd, "r");
	KVT_EXPECT(f);
	while ((r = fread(out + used, 1, sizeof(out) - 1 - used, f)) > 0)
		used += r;
	out[used] = 0;
	status = pclose(f);
	KVT_EXPECT(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static cJSON *engine_json(const char *args)
{
	int code = engine(args);
	cJSON *o = cJSON_Parse(out);

	if (code || !o)
		KVT_FAIL("exit %d: %s", code, out);
	return o;
}

static double number(const cJSON *o, const char *name)
{
	KVT_EXPECT(cJSON_IsNumber(cJSON_GetObjectItem(o, name)));
	return cJSON_GetObjectItem(o, name)->valuedouble;
}

KVT_TEST(run_streams_what_json_holds)
{
	cJSON *o;

	o = engine_json("run --model $M/tiny-k2 --prompt 'The database' --max-tokens 12 "
			"--temperature 0 --json");
	KVT_EXPECT_EQ(number(cJSON_GetObjectItem(o, "usage"), "completion_tokens"), 12);
	KVT_EXPECT_EQ(cJSON_GetArraySize(cJSON_GetObjectItem(o, "token_ids")), 12);
	KVT_EXPECT_EQ(
		engine("run --model $M/tiny-k2 --prompt 'The database' --max-tokens 12"),
		0);
	out[strlen(out) - 1] = 0; /* newline */
	KVT_EXPECT_STR(out, cJSON_GetStringValue(cJSON_GetObjectItem(o, "text")));
	cJSON_Delete(o);
}

static void bench_says(const char *more, const char *attention)
{
	char args[300];
	cJSON *o;

	snprintf(args, sizeof(args),
		 "bench --model $M/tiny-k2 --batches 2 --tokens 4 --json %s", more);
	o = engine_json(args);
	KVT_EXPECT_STR(cJSON_GetStringValue(cJSON_GetObjectItem(o, "attention")),
		       attention);
	cJSON_Delete(o);
}

/* tiny-k2 has 8 heads: the same tokens everywhere. */
KVT_TEST(attention_is_exact_if_nothing_is_said)
{
	static const char *const args[] = {"", " --attention exact", " --attention fast"};
	char line[300], *ids[3];

	for (u32 i = 0; i < 3; i++) {
		cJSON *o;

		snprintf(line, sizeof(line),
			 "run --model $M/tiny-k2 --kv fp8 --prompt 'The database' "
			 "--max-tokens 12 --ignore-eos --json%s",
			 args[i]);
		o = engine_json(line);
		ids[i] = cJSON_PrintUnformatted(cJSON_GetObjectItem(o, "token_ids"));
		cJSON_Delete(o);
		KVT_EXPECT_STR(ids[i], ids[0]);
	}
	bench_says("", "exact");
	bench_says("--attention fast", "fast");
	for (u32 i = 0; i < 3; i++)
		free(ids[i]);
}

KVT_TEST(eval_prints_the_promised_fields)
{
	cJSON *o = engine_json(
		"eval --model $M/tiny-glm --weights int4-g32 --kv fp8 --tokens 1500 "
		"--text $M/heldout.txt --json");

	KVT_EXPECT_EQ(number(o, "tokens"), 1500);
	KVT_EXPECT(number(o, "nll_per_token") > 2 && number(o, "nll_per_token") < 4);
	KVT_EXPECT(number(o, "stderr") > 0.01 && number(o, "stderr") < 0.2);
	/* 4 layers, 2 kv heads: K and V of 128 values and a scale of 2 bytes each */
	KVT_EXPECT_EQ(number(o, "kv_bytes_per_token"), 4 * 2 * 2 * (128 + 2));
	/* 3 layers of 16 experts, 3 matrices of 128 x 256: 4 bits and a bf16 scale per 32
	 */
	KVT_EXPECT_EQ(number(o, "expert_bytes"),
		      3 * 16 * 3 * 128 * 256 * (0.5 + 2.0 / 32));
	cJSON_Delete(o);
}

KVT_TEST(eval_computes_static_scales_when_the_model_has_none)
{
	cJSON *o = engine_json("eval --model $M/tiny-k2 --kv fp8_s --tokens 1024 "
			       "--text $M/heldout.txt --json");

	KVT_EXPECT_STR(cJSON_GetStringValue(cJSON_GetObjectItem(o, "kv_scales")), "text");
	KVT_EXPECT_EQ(number(o, "kv_bytes_per_token"), 5 * 576);
	KVT_EXPECT(number(o, "nll_per_token") > 2 && number(o, "nll_per_token") < 4);
	cJSON_Delete(o);
}

KVT_TEST(injected_fault_ends_in_stale)
{
	cJSON *o, *list;
	int code;

	code = engine(
		"run --model $M/tiny-k2 --no-seal --kv fp8 --json --max-tokens 16 --ignore-eos "
		"--inject swap-rows --prompt 'The first' --prompt 'A second' --prompt 'Third'");
	KVT_EXPECT_EQ(code, 6);
	o = cJSON_Parse(strchr(out, '{'));
	if (!o) /* stderr came first */
		KVT_FAIL("%s", out);
	list = cJSON_GetObjectItem(o, "results");
	for (int i = 0; i < 3; i++)
		KVT_EXPECT_STR(cJSON_GetStringValue(cJSON_GetObjectItem(
				       cJSON_GetArrayItem(list, i), "finish_reason")),
			       i < 2 ? "KV_STALE" : "length");
	cJSON_Delete(o);
}

KVT_TEST(refusals_name_what_is_wrong)
{
	static struct {
		const char *args;
		int code;
		const char *text;
	} bad[] = {
		{"", 2, "kv-engine run"},
		{"dance", 2, "dance"},
		{"run --prompt x", 2, "--model"},
		{"run --model $M/tiny-k2", 2, "--prompt"},
		{"run --model $M/tiny-k2 --prompt x --kv int3", 2, "--kv int3"},
		{"run --model $M/tiny-k2 --prompt x --attention quick", 2,
		 "--attention quick: not exact or fast"},
		{"eval --model $M/tiny-k2 --text x --attention fast", 2,
		 "--attention fast"},
		{"run --model $M/tiny-k2 --prompt x --max-tokens -1", 2,
		 "--max-tokens -1"},
		{"run --model $M/tiny-k2 --prompt x --weights bf17", 2, "--weights bf17"},
		{"run --model $M/tiny-k2 --prompt x --tenant red", 2, "tenant"},
		{"run --model $M/tiny-k2 --prompt x --device gpu", 2, "--device gpu"},
		{"run --model $M/tiny-k2 --prompt x --gpu GPU-12", 2, "--gpu GPU-12"},
		{"run --model $M/tiny-k2 --prompt x --device host --gpu "
		 "GPU-00000000-0000-0000-0000-000000000000",
		 2, "--device host"},
		{"run --model $M/tiny-k2 --prompt x --device cuda --host-bytes 1GiB", 2,
		 "--host-bytes 1GiB"},
		{"run --model $M/tiny-k2 --prompt x --device cuda --kv f32", 2,
		 "--kv f32"},
		{"run --model $M/tiny-k2 --prompt x --device cuda --gpu "
		 "GPU-00000000-0000-0000-0000-000000000000",
		 3, "private kvmd"},
		{"run --model /nonexistent --prompt x", 1, "/nonexistent"},
		{"run --model $M/tiny-k2 --prompt x --socket /nonexistent/s", 3,
		 "/nonexistent/s"},
		{"run --model $M/tiny-k2 --prompt x --max-tokens 9000", 1,
		 "max_tokens=9000"},
		{"run --model $M/tiny-k2 --prompt x --kv fp8_s", 1, "--scale-text"},
		{"serve --model $M/tiny-k2", 2, "--listen"},
		{"serve --model $M/tiny-k2 --unix /tmp/x --inject reuse", 2, "--inject"},
		{"serve --model $M/tiny-k2 --listen 0.0.0.0:80 --socket /x", 3, "/x"},
		{"eval --model $M/tiny-k2", 2, "--text"},
		{"eval --model $M/tiny-k2 --text /nonexistent", 1, "/nonexistent"},
	};

	for (size_t i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		int code;

		/* Where there is a GPU it is the engine that does not find this one. */
		if (!strcmp(bad[i].text, "private kvmd") &&
		    !access("/dev/nvidiactl", F_OK)) {
			bad[i].code = 1;
			bad[i].text = "device=cuda";
		}
		code = engine(bad[i].args);
		if (code != bad[i].code)
			KVT_FAIL("%s: exit %d, expected %d: %s", bad[i].args, code,
				 bad[i].code, out);
		KVT_EXPECT_HAS(out, bad[i].text);
	}
}

/* A full disk takes nothing: that is no success. */
KVT_TEST(output_that_gets_lost_is_a_failure)
{
	static const char *const args[] = {
		"version",
		"--help",
		"run --help",
		"run --model $M/tiny-k2 --prompt x --max-tokens 2",
		"run --model $M/tiny-k2 --prompt x --max-tokens 2 --json",
	};
	char line[300];

	for (size_t i = 0; i < KV_ARRAY_SIZE(args); i++) {
		KVT_EXPECT_EQ(engine(args[i]), 0);
		snprintf(line, sizeof(line), "%s >/dev/full", args[i]);
		if (engine(line) != 1)
			KVT_FAIL("%s: a full disk went unnoticed", args[i]);
	}
}

/* kv-engine run beside an engine that has all pages. Return: its pid. */
static pid_t start_run(const struct rig *rig, char *path, const char *log)
{
	char model[PATH_MAX];
	const char *argv[] = {
		path,	"run", "--model",  model,	"--socket", rig->kvmd.socket_path,
		"--kv", "fp8", "--prompt", "The table", NULL};
	posix_spawn_file_actions_t actions;
	pid_t pid;

	snprintf(model, sizeof(model), "%.3000s/tiny-k2", rig_models_dir());
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 2, log, O_WRONLY | O_CREAT, 0600);
	KVT_EXPECT_EQ(
		posix_spawn(&pid, path, &actions, NULL, (char *const *)argv, environ), 0);
	posix_spawn_file_actions_destroy(&actions);
	return pid;
}

static double refusals(struct rig *rig)
{
	cJSON *reply = rig_admin(rig, "{\"op\":\"vmstat\"}");
	double n = number(cJSON_GetObjectItem(reply, "vmstat"), "full_refusals");

	cJSON_Delete(reply);
	return n;
}

/* Its request has no token yet and may not have one for long. */
KVT_TEST(signal_ends_a_run_that_waits_for_pages)
{
	const char *args[] = {"--host-bytes", "4MiB", NULL};
	char path[PATH_MAX], log[200], said[500] = "";
	struct kv_grant page;
	struct eng_engine *e;
	struct rig rig;
	double before;
	int status;
	pid_t pid;
	FILE *f;

	kv_engine_path(path, sizeof(path));
	rig_kvmd(&rig, args);
	rig_model(&rig, "tiny-k2", ENG_WEIGHTS_AS_IS);
	e = rig_engine(&rig, NULL);
	while (kvc_alloc(eng_engine_pool(e), 1, KV_GFP_NOWAIT, &page) == 0)
		continue;
	before = refusals(&rig);
	snprintf(log, sizeof(log), "%s/run.log", rig.kvmd.dir);
	pid = start_run(&rig, path, log);
	while (refusals(&rig) <= before) {
		KVT_EXPECT_EQ(waitpid(pid, &status, WNOHANG), 0);
		kvc_dispatch(eng_engine_kvc(e), NULL, NULL);
		usleep(5000);
	}
	kill(pid, SIGTERM);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	f = fopen(log, "r");
	KVT_EXPECT(f && fgets(said, sizeof(said), f));
	fclose(f);
	KVT_EXPECT_HAS(said, "prompt 0 ended in abort");
	KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1);
	eng_engine_destroy(e);
	rig_close(&rig);
}

KVT_MAIN()
