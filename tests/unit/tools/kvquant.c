/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvquant.c - quantised directories: read back by the loader and by a second reader,
 * complete or absent, never over or into the input.
 */
#include <sys/resource.h>
#include "tests/unit/model/modeldir.h"
#include "tools/kvquant/kvquant.h"

static const volatile int running;

static const struct {
	const char *model;
	u32 weights;
} forms[] = {
	{"tiny-k2", ENG_WEIGHTS_INT4_G32},   {"tiny-k2", ENG_WEIGHTS_INT4_G128},
	{"tiny-k2", ENG_WEIGHTS_FP8},	     {"tiny-glm", ENG_WEIGHTS_INT4_G32},
	{"tiny-glm", ENG_WEIGHTS_INT4_G128}, {"tiny-glm", ENG_WEIGHTS_FP8},
};

static int quantise(const char *model, const char *out, u32 weights, u64 shard_bytes,
		    struct eng_err *err)
{
	struct kvq_options o = {.model = model,
				.out = out,
				.weights = weights,
				.shard_bytes = shard_bytes};
	struct kvq_report report;

	return kvq_run(&o, &running, &report, err);
}

static void quantise_ok(const char *model, const char *out, u32 weights, u64 shard_bytes)
{
	struct eng_err err = {{0}};

	if (quantise(model, out, weights, shard_bytes, &err))
		KVT_FAIL("%s", err.text);
}

static struct eng_model *load(const char *dir, u32 weights)
{
	struct eng_model_options opt = {.weights = weights};
	struct eng_model *m = NULL;
	struct eng_err err = {{0}};

	if (eng_model_load(dir, &opt, &m, &err))
		KVT_FAIL("%s", err.text);
	return m;
}

static u32 nr_entries(const char *dir)
{
	DIR *d = opendir(dir);
	u32 nr = 0;

	while (d && readdir(d))
		nr++;
	if (d)
		closedir(d);
	return nr - 2;
}

/* ------------------------------------------------------------- what is written */

/* The directory and quantising on load give the same bits, hence the same id. */
KVT_TEST_T(directories_equal_quantisation_on_load, 180)
{
	char *dir = md_temp();

	for (size_t i = 0; i < KV_ARRAY_SIZE(forms); i++) {
		const char *out = md_path("%s/%zu", dir, i);
		char *model = strdup(md_model(forms[i].model)), *path = strdup(out);
		struct eng_model *a, *b;

		quantise_ok(model, path, forms[i].weights, 4ull << 20);
		a = load(path, ENG_WEIGHTS_AS_IS);
		b = load(model, forms[i].weights);
		KVT_EXPECT(!memcmp(a->model_id, b->model_id, sizeof(a->model_id)));
		KVT_EXPECT_EQ(a->expert_bytes, b->expert_bytes);
		KVT_EXPECT_EQ(a->layers[2].experts.dtype, b->layers[2].experts.dtype);
		eng_model_free(b);
		b = load(path,
			 forms[i].weights); /* asking for what is stored is the same */
		KVT_EXPECT(!memcmp(a->model_id, b->model_id, sizeof(a->model_id)));
		eng_model_free(b);
		eng_model_free(a);
		a = load(path, ENG_WEIGHTS_F32); /* and it can be dequantised */
		KVT_EXPECT_EQ(a->layers[2].experts.dtype, KVK_F32);
		eng_model_free(a);
		free(model);
		free(path);
	}
	md_remove(dir);
}

/* Dequantised experts are the codes times the scales, close to the BF16 values. */
KVT_TEST_T(dequantised_values_are_near, 180)
{
	char *dir = md_temp(), *out = strdup(md_path("%s/q", dir));
	struct eng_model *q, *f;
	double err = 0, energy = 0;

	quantise_ok(md_model("tiny-k2"), out, ENG_WEIGHTS_INT4_G32, 1ull << 30);
	q = load(out, ENG_WEIGHTS_F32);
	f = load(md_model("tiny-k2"), ENG_WEIGHTS_F32);
	for (u32 i = 1; i < 5; i++) {
		const float *a = q->layers[i].experts.w2, *b = f->layers[i].experts.w2;

		for (u32 k = 0; k < 16 * 256 * 128; k++) {
			err += (double)(a[k] - b[k]) * (double)(a[k] - b[k]);
			energy += (double)b[k] * (double)b[k];
		}
		/* what is not quantised is the same */
		KVT_EXPECT(!memcmp(q->layers[i].q_b.data, f->layers[i].q_b.data,
				   1024 * 192 * 4));
		KVT_EXPECT(!memcmp(q->layers[i].w_uv.data, f->layers[i].w_uv.data,
				   8 * 64 * 512 * 4));
	}
	KVT_EXPECT_LE(sqrt(err / energy), 0.1);
	eng_model_free(q);
	eng_model_free(f);
	free(out);
	md_remove(dir);
}

KVT_TEST(shard_sizes_do_not_matter)
{
	char *dir = md_temp(), *one = strdup(md_path("%s/one", dir)),
	     *many = strdup(md_path("%s/many", dir));
	struct eng_model *a, *b;

	quantise_ok(md_model("tiny-glm"), one, ENG_WEIGHTS_FP8, 1ull << 30);
	quantise_ok(md_model("tiny-glm"), many, ENG_WEIGHTS_FP8, 1ull << 20);
	KVT_EXPECT(!access(md_path("%s/model-00001-of-00001.safetensors", one), F_OK));
	KVT_EXPECT(nr_entries(many) > nr_entries(one) + 5);
	a = load(one, ENG_WEIGHTS_AS_IS);
	b = load(many, ENG_WEIGHTS_AS_IS);
	KVT_EXPECT(!memcmp(a->model_id, b->model_id, sizeof(a->model_id)));
	eng_model_free(a);
	eng_model_free(b);
	free(one);
	free(many);
	md_remove(dir);
}

static int run_python(const char *python, const char *a, const char *b)
{
	char *script = md_path("%s/../unit/tools/read_quant.py", md_model(""));
	int status = 0;
	pid_t pid = fork();

	if (pid == 0) {
		dup2(STDOUT_FILENO, STDERR_FILENO);
		execlp(python, python, script, a, b, (char *)NULL);
		_exit(77);
	}
	waitpid(pid, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

KVT_TEST_T(second_reader_agrees_bit_for_bit, 180)
{
	static const char *const pythons[] = {"/usr/bin/python3", "python3"};
	char *dir = md_temp();

	for (size_t i = 0; i < KV_ARRAY_SIZE(forms); i++) {
		char *model = strdup(md_model(forms[i].model));
		char *out = strdup(md_path("%s/%zu", dir, i));
		int code = 77;

		quantise_ok(model, out, forms[i].weights, 6ull << 20);
		printf("# %s %s: ", forms[i].model, eng_weights_name(forms[i].weights));
		fflush(stdout);
		for (size_t p = 0; p < KV_ARRAY_SIZE(pythons) && code == 77; p++)
			code = run_python(pythons[p], model, out);
		if (code == 77) {
			md_remove(dir);
			KVT_SKIP("no python3 with numpy");
		}
		KVT_EXPECT_EQ(code, 0);
		free(model);
		free(out);
	}
	md_remove(dir);
}

/* Scales given by hand go into the layout's order and come back. */
static void kv_scales_round_trip(const char *model, u32 nr)
{
	char *dir = md_temp(), *out = strdup(md_path("%s/q", dir)),
	     *from = strdup(md_model(model));
	struct kvq_options o = {.model = from,
				.out = out,
				.weights = ENG_WEIGHTS_INT4_G32,
				.shard_bytes = 8 << 20};
	struct kvq_report report = {0};
	struct eng_config c;
	struct eng_tensors ts;
	struct kvq_plan plan;
	struct kvq_outdir d;
	struct kv_layout layout;
	struct eng_model *m;
	struct eng_err err = {{0}};
	float scales[64];

	for (u32 i = 0; i < nr; i++)
		scales[i] = 0.01f * (float)(i + 1);
	KVT_EXPECT_EQ(eng_config_load(from, &c, &err), 0);
	KVT_EXPECT_EQ(eng_tensors_open(from, &ts, &err), 0);
	KVT_EXPECT_EQ(kvq_plan_build(&o, &c, &ts, scales, &plan, &err), 0);
	KVT_EXPECT_EQ(kvq_outdir_create(&o, &d, &err), 0);
	KVT_EXPECT_EQ(kvq_write_tensors(&o, &plan, d.fd, &running, &report, &err), 0);
	KVT_EXPECT_EQ(kvq_write_config(&o, &c, &ts, d.fd, &err), 0);
	KVT_EXPECT_EQ(kvq_outdir_commit(&o, &d, &err), 0);
	kvq_plan_free(&plan);
	eng_tensors_close(&ts);
	m = load(out, ENG_WEIGHTS_AS_IS);
	KVT_EXPECT_EQ(m->nr_kv_scales, nr);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT(m->kv_scales[i] == scales[i]);
	KVT_EXPECT_EQ(eng_model_layout(m, KV_DTYPE_E4M3, KV_SCALE_STATIC, &layout), 0);
	KVT_EXPECT_EQ(layout.nr_scales, nr);
	eng_model_free(m);
	free(from);
	free(out);
	md_remove(dir);
}

KVT_TEST_T(kv_scales_are_stored_in_layout_order, 180)
{
	kv_scales_round_trip("tiny-k2", 5);
	kv_scales_round_trip("tiny-glm", 4 * 2 * 2);
}

/* Scales over the first @tokens of the held-out text; [16] of tiny-glm. */
static void measure(const char *model, const char *out, size_t tokens, float *ret)
{
	const char *text = strdup(md_model("heldout.txt"));
	struct kvq_options o = {.model = model,
				.out = out,
				.weights = ENG_WEIGHTS_INT4_G128,
				.shard_bytes = 1 << 30,
				.kv_scales = true,
				.texts = &text,
				.nr_texts = 1,
				.tokens = tokens};
	struct kvq_report report;
	struct eng_err err = {{0}};
	struct eng_model *m;

	if (kvq_run(&o, &running, &report, &err))
		KVT_FAIL("%s", err.text);
	m = load(out, ENG_WEIGHTS_AS_IS);
	KVT_EXPECT_EQ(m->nr_kv_scales, 16);
	memcpy(ret, m->kv_scales, 16 * sizeof(*ret));
	eng_model_free(m);
}

/* --kv-scales end to end, through a private kvmd: largest values only grow with the text.
 */
KVT_TEST_T(kv_scales_are_measured, 180)
{
	char *dir = md_temp(), *model = strdup(md_model("tiny-glm"));
	char *a = strdup(md_path("%s/a", dir)), *b = strdup(md_path("%s/b", dir)),
	     *c = strdup(md_path("%s/c", dir)), *d = strdup(md_path("%s/d", dir));
	float few[16], again[16], many[16];
	struct kvq_options o = {
		.model = a, .out = d, .kv_scales = true, .shard_bytes = 1 << 30};
	struct kvq_report report;
	struct eng_err err = {{0}};
	int grown = 0;

	measure(model, a, 256, few);
	measure(model, b, 256, again);
	measure(model, c, 1024, many);
	KVT_EXPECT(!memcmp(few, again, sizeof(few)));
	for (int i = 0; i < 16; i++) {
		/* K is normed per head, V is not: both are of the order of 1 here */
		KVT_EXPECT(few[i] * 448 > 0.05f && few[i] * 448 < 500);
		KVT_EXPECT(many[i] >= few[i]);
		grown += many[i] > few[i];
	}
	KVT_EXPECT(grown > 0);
	/* a directory that has scales is not measured again */
	KVT_EXPECT_EQ(kvq_run(&o, &running, &report, &err), -EINVAL);
	KVT_EXPECT_HAS(err.text, "has static KV scales already");
	free(a);
	free(b);
	free(c);
	free(d);
	free(model);
	md_remove(dir);
}

/* ------------------------------------------------------------- what is refused */

struct snapshot {
	u64 sum;
	u32 nr;
};

/* Contents, inodes and times of all files of a directory. */
static struct snapshot look(const char *dir)
{
	struct snapshot s = {0};
	DIR *d = opendir(dir);
	struct dirent *e;

	KVT_EXPECT(d);
	while ((e = readdir(d))) {
		char *path = md_path("%s/%s", dir, e->d_name), *text;
		struct stat st;
		size_t bytes;
		u64 h = 1469598103934665603ull;

		if (stat(path, &st) || !S_ISREG(st.st_mode))
			continue;
		text = md_read(path, &bytes);
		for (size_t i = 0; i < bytes; i++)
			h = (h ^ (u8)text[i]) * 1099511628211ull;
		s.sum += h ^ (u64)st.st_ino ^ (u64)st.st_mtim.tv_nsec ^ (u64)st.st_size;
		s.nr++;
		free(text);
	}
	closedir(d);
	return s;
}

static void target_refused(const char *from, const char *to, const char *has)
{
	char *model = strdup(from), *out = strdup(to); /* md_path()'s buffers are few */
	struct snapshot before = look(model), after;
	struct eng_err err = {{0}};

	KVT_EXPECT(quantise(model, out, ENG_WEIGHTS_FP8, 1ull << 30, &err) < 0);
	KVT_NOTE("%s", err.text);
	KVT_EXPECT_HAS(err.text, has);
	after = look(model);
	KVT_EXPECT(before.sum == after.sum && before.nr == after.nr);
	free(model);
	free(out);
}

KVT_TEST(never_over_or_into_the_input)
{
	char *model = md_clone("tiny-glm"), *dir = md_temp(), *file,
	     *cwd = realpath(".", NULL);

	KVT_EXPECT(!symlink(model, md_path("%s/link", dir)));
	KVT_EXPECT(!symlink("/nonexistent", md_path("%s/dangling", dir)));
	KVT_EXPECT(!mkdir(md_path("%s/empty", dir), 0755));
	file = strdup(md_path("%s/file", dir));
	md_write(file, "x", 1);
	target_refused(model, model, "is the input directory");
	target_refused(model, md_path("%s/", model), "is the input directory");
	target_refused(model, md_path("%s/.", model), "is the input directory");
	target_refused(model, md_path("%s/link", dir), "is the input directory");
	target_refused(md_path("%s/link", dir), model, "is the input directory");
	target_refused(model, md_path("%s/q", model), "lies inside the input directory");
	target_refused(model, md_path("%s/link/q", dir),
		       "lies inside the input directory");
	target_refused(md_path("%s/link", dir), md_path("%s/q", model),
		       "lies inside the input");
	target_refused(model, md_path("%s/empty", dir), "nothing is ever written over");
	target_refused(model, md_path("%s/dangling", dir),
		       "nothing is ever written over");
	target_refused(model, file, "nothing is ever written over");
	target_refused(model, md_path("%s/no/such/parent", dir), "No such file");
	target_refused(model, "", "empty");
	KVT_EXPECT(!chdir(model));
	target_refused(".", "q", "lies inside the input directory");
	target_refused(".", ".", "is the input directory");
	KVT_EXPECT(!chdir(cwd));
	KVT_EXPECT_EQ(nr_entries(dir), 4); /* link, dangling, empty, file: no leftovers */
	KVT_EXPECT_EQ(nr_entries(md_path("%s/empty", dir)), 0);
	free(cwd);
	free(file);
	md_remove(dir);
	md_remove(model);
}

/* A neighbour whose name begins like the input's is not inside it. */
KVT_TEST(a_similar_name_beside_the_input_is_fine)
{
	char *model = md_clone("tiny-glm"), *out = strdup(md_path("%s-fp8", model));

	quantise_ok(model, out, ENG_WEIGHTS_FP8, 1ull << 30);
	md_remove(model);
	md_remove(out);
}

KVT_TEST(interruption_leaves_nothing)
{
	static const volatile int stop = 1;
	char *dir = md_temp(), *out = strdup(md_path("%s/q", dir));
	struct kvq_options o = {.model = md_model("tiny-glm"),
				.out = out,
				.weights = ENG_WEIGHTS_FP8,
				.shard_bytes = 1 << 30};
	struct kvq_report report;
	struct eng_err err;

	KVT_EXPECT_EQ(kvq_run(&o, &stop, &report, &err), -EINTR);
	KVT_EXPECT_HAS(err.text, "interrupted");
	KVT_EXPECT_EQ(nr_entries(dir), 0);
	free(out);
	md_remove(dir);
}

/* A disk that is full after 5 MB: an error that names the file, and nothing left. */
KVT_TEST(write_errors_leave_nothing)
{
	struct rlimit small = {.rlim_cur = 5 << 20, .rlim_max = 5 << 20};
	char *dir = md_temp();
	struct eng_err err;

	signal(SIGXFSZ, SIG_IGN);
	KVT_EXPECT(!setrlimit(RLIMIT_FSIZE, &small));
	KVT_EXPECT_EQ(quantise(md_model("tiny-glm"), md_path("%s/q", dir),
			       ENG_WEIGHTS_FP8, 1ull << 30, &err),
		      -EFBIG);
	KVT_EXPECT_HAS(err.text,
		       "model-00001-of-00001.safetensors: write: File too large");
	KVT_EXPECT_EQ(nr_entries(dir), 0);
	md_remove(dir);
}

KVT_TEST_T(inputs_that_cannot_be_quantised, 180)
{
	char *dir = md_temp(), *q = strdup(md_path("%s/q", dir)),
	     *model = md_clone("tiny-glm"), *path, *bytes;
	struct eng_err err;
	unsigned long long n;
	size_t size;

	/* already done */
	quantise_ok(model, q, ENG_WEIGHTS_FP8, 1ull << 30);
	KVT_EXPECT_EQ(
		quantise(q, md_path("%s/again", dir), ENG_WEIGHTS_FP8, 1ull << 30, &err),
		-EINVAL);
	KVT_EXPECT_HAS(err.text, "config.json: has a quantization_config");
	/* a value that has no code */
	path = strdup(md_path("%s/model-00001-of-00002.safetensors", model));
	bytes = md_read(path, &size);
	memcpy(&n, bytes, 8);
	memcpy(bytes + 8 + n + 10962464 + 100, (u16[]){0x7fc0}, 2);
	md_write(path, bytes, size);
	KVT_EXPECT_EQ(quantise(model, md_path("%s/nan", dir), ENG_WEIGHTS_INT4_G32,
			       1ull << 30, &err),
		      -EINVAL);
	KVT_EXPECT_HAS(
		err.text,
		"model.layers.2.mlp.experts.0.down_proj.weight has values that are");
	/* what a loader would refuse */
	md_write(path, bytes, size - 7);
	KVT_EXPECT_EQ(quantise(model, md_path("%s/cut", dir), ENG_WEIGHTS_INT4_G32,
			       1ull << 30, &err),
		      -EINVAL);
	KVT_EXPECT_HAS(err.text, "truncated");
	md_edit(model, "tokenizer.json", "model.merges", NULL);
	KVT_EXPECT_EQ(quantise(model, md_path("%s/tok", dir), ENG_WEIGHTS_INT4_G32,
			       1ull << 30, &err),
		      -EINVAL);
	KVT_EXPECT_HAS(err.text, "model.merges is missing");
	KVT_EXPECT_EQ(nr_entries(dir), 1);
	free(bytes);
	free(path);
	free(q);
	md_remove(dir);
	md_remove(model);
}

/* ------------------------------------------------------------ the command itself */

/* Runs build/kvquant; what it says comes back in @ret. Return: its exit status. */
static int command(char *ret, size_t size, char *const argv[])
{
	char exe[PATH_MAX] = "";
	size_t n = 0;
	ssize_t got;
	int p[2], status = 0;
	pid_t pid;

	/* BUILD/tests/unit/tools/kvquant -> BUILD/kvquant */
	KVT_EXPECT(readlink("/proc/self/exe", exe, sizeof(exe) - 1) > 0);
	for (int i = 0; i < 4; i++)
		*strrchr(exe, '/') = 0;
	strcat(exe, "/kvquant");
	if (access(exe, X_OK))
		KVT_FAIL("%s is not built", exe);
	KVT_EXPECT(!pipe(p));
	pid = fork();
	if (pid == 0) {
		dup2(p[1], 1);
		dup2(p[1], 2);
		close(p[0]);
		close(p[1]);
		execv(exe, argv);
		_exit(127);
	}
	close(p[1]);
	while (n < size - 1 && (got = read(p[0], ret + n, size - 1 - n)) > 0)
		n += (size_t)got;
	ret[n] = 0;
	close(p[0]);
	waitpid(pid, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#define COMMAND(...) \
	command(says, sizeof(says), (char *const[]){"kvquant", __VA_ARGS__, NULL})

KVT_TEST_T(command_line, 120)
{
	char *dir = md_temp(), *out = strdup(md_path("%s/q", dir)),
	     *model = strdup(md_model("tiny-glm"));
	char says[4096];

	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out, "--weights", "fp8"), 0);
	KVT_EXPECT_HAS(says, "172 matrices, relative error 0.02");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out, "--weights", "fp8"), 1);
	KVT_EXPECT_HAS(says, "kvquant: --out: ");
	KVT_EXPECT_HAS(says, "nothing is ever written over");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out), 2);
	KVT_EXPECT_HAS(says, "--weights is missing");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--weights", "fp8"), 2);
	KVT_EXPECT_HAS(says, "--out is missing");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out, "--weights", "int3"), 2);
	KVT_EXPECT_HAS(says, "--weights: \"int3\", expected");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out, "--weights", "bf16"), 2);
	KVT_EXPECT_HAS(says, "changes nothing");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out, "--weights", "fp8",
			      "--kv-scales"),
		      2);
	KVT_EXPECT_HAS(says, "--kv-scales and --text go together");
	KVT_EXPECT_EQ(COMMAND("--model", model, "--out", out, "--weights", "fp8",
			      "--shard-mib", "0"),
		      2);
	KVT_EXPECT_HAS(says, "--shard-mib: \"0\"");
	KVT_EXPECT_EQ(
		COMMAND("--model", model, "--out", out, "--weights", "fp8", "extra"), 2);
	KVT_EXPECT_HAS(says, "\"extra\"");
	KVT_EXPECT_EQ(COMMAND("--frobnicate"), 2);
	KVT_EXPECT_EQ(COMMAND("--help"), 0);
	KVT_EXPECT_HAS(says, "usage: kvquant");
	KVT_EXPECT_EQ(
		COMMAND("--model", "/nonexistent", "--out", out, "--weights", "fp8"), 1);
	KVT_EXPECT_HAS(says, "/nonexistent/config.json: No such file");
	KVT_EXPECT_EQ(nr_entries(dir), 1);
	free(model);
	free(out);
	md_remove(dir);
}

KVT_MAIN()
