/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - see common.h. */
#include "tests/kvt.h"
#include "tests/e2e/common.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/cuda_syms.h"
#include "engine/openmp.h"
#include "kernels/fp8.h"

/* Tests, kvmd and engines share two cores: nobody spins. */
__attribute__((constructor)) static void omp_passive(int argc, char **argv, char **envp)
{
	eng_openmp_passive(argv);
}

const char *rig_models_dir(void)
{
	static char dir[PATH_MAX];
	char exe[PATH_MAX];
	ssize_t n;

	if (getenv("KVT_MODELS"))
		return getenv("KVT_MODELS");
	if (!access("tests/models/tiny-k2/config.json", R_OK))
		return "tests/models";
	n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
	exe[n < 0 ? 0 : n] = 0;
	for (int i = 0; i < 6; i++) {
		char *slash = strrchr(exe, '/');

		if (!slash)
			break;
		*slash = 0;
		if (snprintf(dir, sizeof(dir), "%.4000s/tests/models", exe) > 0 &&
		    !access(dir, R_OK))
			return dir;
	}
	KVT_FAIL("tests/models not found");
}

bool rig_on_cuda(void)
{
	const char *backend = getenv("KVT_BACKEND");

	return backend && !strcmp(backend, "cuda");
}

const char *rig_size_option(void)
{
	return rig_on_cuda() ? "--gpu-bytes" : "--host-bytes";
}

void rig_kvmd(struct rig *rig, const char *const *args)
{
	const char *all[16] = {"--test-extents", "--backend",
			       rig_on_cuda() ? "cuda" : "host"};
	char error[512];
	u32 n = 3;
	int rc;

	if (rig_on_cuda())
		setenv("CUDA_VISIBLE_DEVICES", "0", 0); /* one kvmd, one GPU */
	/* what is said later wins */
	for (; args && args[n - 3]; n++) {
		KVT_EXPECT(n < 15);
		all[n] = args[n - 3];
		if (!strcmp(all[n], "--host-bytes"))
			all[n] = rig_size_option();
	}
	memset(rig, 0, sizeof(*rig));
	rc = eng_private_kvmd_start(all, &rig->kvmd, error, sizeof(error));
	if (rc)
		KVT_FAIL("kvmd: %s", error);
}

void rig_model(struct rig *rig, const char *name, u32 weights)
{
	struct eng_model_options opt = {.weights = weights};
	struct eng_err err;

	snprintf(rig->dir, sizeof(rig->dir), "%s/%s", rig_models_dir(), name);
	if (eng_model_load(rig->dir, &opt, &rig->m, &err))
		KVT_FAIL("%s: %s", rig->dir, err.text);
}

/* @bytes of bf16, @copies times one behind the other */
static void copy_heads(struct kvk_weight *w, u64 bytes, u32 copies)
{
	char *to = malloc(copies * bytes);

	KVT_EXPECT(to && w->dtype == KVK_BF16);
	for (u32 i = 0; i < copies; i++)
		memcpy(to + i * bytes, w->data, bytes);
	w->data = to;
}

/* [hidden][heads * v]: every row @copies times, divided by as many */
static void share_heads(struct kvk_weight *o, u32 copies)
{
	u16 *to = malloc(copies * eng_weight_data_bytes(o));
	const u16 *from = o->data;
	size_t at = 0;

	KVT_EXPECT(to && o->dtype == KVK_BF16);
	for (u32 r = 0; r < o->rows; r++, from += o->cols) {
		for (u32 c = 0; c < copies * o->cols; c++)
			to[at++] = kvk_f32_to_bf16(kvk_bf16_to_f32(from[c % o->cols]) /
						   (float)copies);
	}
	o->cols *= copies;
	o->data = to;
}

void rig_more_heads(struct rig *rig, u32 copies)
{
	struct eng_config *c = &rig->m->config;
	u32 heads = c->nr_q_heads;

	KVT_EXPECT_EQ(c->arch, ENG_ARCH_MLA);
	for (u32 i = 0; i < c->nr_layers; i++) {
		struct eng_layer *l = &rig->m->layers[i];

		copy_heads(&l->q_b, eng_weight_data_bytes(&l->q_b), copies);
		l->q_b.rows *= copies;
		copy_heads(&l->w_uk_t, heads * eng_weight_data_bytes(&l->w_uk_t), copies);
		copy_heads(&l->w_uv, heads * eng_weight_data_bytes(&l->w_uv), copies);
		share_heads(&l->o, copies);
	}
	c->nr_q_heads *= copies;
}

struct eng_engine *rig_engine(struct rig *rig, const struct eng_options *opt)
{
	struct eng_options o = {.size_bytes = sizeof(o), .kv = ENG_KV_FP8};
	struct eng_engine *e = NULL;
	struct eng_err err;

	if (opt)
		o = *opt;
	o.size_bytes = sizeof(o);
	if (rig_on_cuda())
		o.device = ENG_DEVICE_CUDA;
	o.socket_path = rig->kvmd.socket_path;
	if (eng_engine_create(rig->m, &o, &e, &err))
		KVT_FAIL("engine: %s", err.text);
	return e;
}

void rig_close(struct rig *rig)
{
	if (rig->m)
		eng_model_free(rig->m);
	KVT_EXPECT_EQ(eng_private_kvmd_stop(&rig->kvmd), 0);
}

struct cJSON *rig_json(const char *name)
{
	char path[PATH_MAX], *text;
	cJSON *o;
	long size;
	FILE *f;

	snprintf(path, sizeof(path), "%.3000s/%s", rig_models_dir(), name);
	f = fopen(path, "rb");
	if (!f)
		KVT_FAIL("%s: %s", path, strerror(errno));
	fseek(f, 0, SEEK_END);
	size = ftell(f);
	rewind(f);
	text = malloc((size_t)size + 1);
	KVT_EXPECT(text && fread(text, 1, (size_t)size, f) == (size_t)size);
	text[size] = 0;
	fclose(f);
	o = cJSON_Parse(text);
	free(text);
	if (!o)
		KVT_FAIL("%s: not JSON", path);
	return o;
}

void rig_prompt(u32 seed, u32 *ret_ids, u32 nr)
{
	static u32 *ids;
	static u32 nr_ids;

	if (!ids) {
		cJSON *all = rig_json("heldout_ids.json"), *v;

		ids = calloc((size_t)cJSON_GetArraySize(all), sizeof(*ids));
		KVT_EXPECT(ids);
		cJSON_ArrayForEach(v, all) ids[nr_ids++] = (u32)v->valuedouble;
		cJSON_Delete(all);
	}
	KVT_EXPECT(nr < 1700 && (seed + 1) * 1700 < nr_ids);
	for (u32 i = 0; i < nr; i++)
		ret_ids[i] = ids[seed * 1700 + i];
}

static u64 hash_bytes(const void *p, size_t n)
{
	const u8 *b = p;
	u64 h = 14695981039346656037ull;

	for (size_t i = 0; i < n; i++)
		h = (h ^ b[i]) * 1099511628211ull;
	return h;
}

static float lead_of(const float *logits, u32 n)
{
	float best = -INFINITY, second = -INFINITY;

	for (u32 i = 0; i < n; i++) {
		if (logits[i] > best) {
			second = best;
			best = logits[i];
		} else if (logits[i] > second) {
			second = logits[i];
		}
	}
	return best - second;
}

static void trace_token(void *arg, struct eng_request *r, u32 token, float logprob)
{
	struct trace *t = arg;
	struct eng_result res;

	eng_request_result(r, &res);
	KVT_EXPECT(t->nr < RIG_TOKENS_MAX && res.logits);
	t->tokens[t->nr] = token;
	t->leads[t->nr] = lead_of(res.logits, t->vocab);
	t->hashes[t->nr++] = hash_bytes(res.logits, t->vocab * sizeof(float));
}

static void trace_done(void *arg, struct eng_request *r)
{
	struct trace *t = arg;

	KVT_EXPECT(!t->done);
	eng_request_result(r, &t->res);
	t->done = true;
}

struct eng_request *trace_submit(struct eng_engine *e, struct trace *t, const u32 *prompt,
				 u32 nr_prompt, u32 max_tokens, bool no_prefix)
{
	struct eng_params p = {
		.prompt = prompt,
		.nr_prompt = nr_prompt,
		.max_tokens = max_tokens,
		.ignore_eos = true,
		.no_prefix = no_prefix,
		.keep_logits = true,
		.on_token = trace_token,
		.on_done = trace_done,
		.arg = t,
	};
	struct eng_request *r = NULL;
	struct eng_err err;

	memset(t, 0, sizeof(*t));
	t->vocab = 4096;
	if (eng_request_submit(e, &p, &r, &err))
		KVT_FAIL("submit: %s", err.text);
	return r;
}

void trace_expect_begins(const struct trace *a, const struct trace *b, u32 nr,
			 const char *what)
{
	KVT_EXPECT(a->nr >= nr && b->nr >= nr);
	for (u32 i = 0; i < nr; i++) {
		float lead = KV_MIN(a->leads[i], b->leads[i]);

		if (a->tokens[i] == b->tokens[i] &&
		    (rig_on_cuda() || a->hashes[i] == b->hashes[i]))
			continue;
		if (rig_on_cuda() && lead < RIG_LEAD_MIN) {
			KVT_NOTE("%s: parts at token %u of %u, where the lead is %.3f",
				 what, i, nr, (double)lead);
			return;
		}
		KVT_FAIL("%s: token %u differs: %u (%016llx) against %u (%016llx), leads "
			 "%.3f and %.3f",
			 what, i, a->tokens[i], (unsigned long long)a->hashes[i],
			 b->tokens[i], (unsigned long long)b->hashes[i],
			 (double)a->leads[i], (double)b->leads[i]);
	}
}

void trace_expect_equal(const struct trace *a, const struct trace *b, const char *what)
{
	if (a->nr != b->nr)
		KVT_FAIL("%s: %u tokens against %u", what, a->nr, b->nr);
	trace_expect_begins(a, b, a->nr, what);
}

/* The driver's copies where the host has no address for the page. */
static const struct kv_cuda_syms *copies(void)
{
	static struct kv_cuda_syms cu;

	if (!rig_on_cuda())
		return NULL;
	if (!cu.lib)
		KVT_EXPECT_EQ(kv_cuda_load(&cu, NULL, 0), 0);
	KVT_EXPECT_EQ(cu.ctx_sync(), 0);
	return &cu;
}

void rig_page_get(struct eng_engine *e, u32 pfn, u64 off, void *dst, u64 bytes)
{
	u8 *at = kvc_page_addr(eng_engine_pool(e), pfn);
	const struct kv_cuda_syms *cu = copies();

	KVT_EXPECT(at);
	if (!cu)
		memcpy(dst, at + off, bytes);
	else
		KVT_EXPECT_EQ(cu->copy_out(dst, (kv_cu_ptr)(uintptr_t)(at + off), bytes),
			      0);
}

void rig_page_put(struct eng_engine *e, u32 pfn, u64 off, const void *src, u64 bytes)
{
	u8 *at = kvc_page_addr(eng_engine_pool(e), pfn);
	const struct kv_cuda_syms *cu = copies();

	KVT_EXPECT(at);
	if (!cu)
		memcpy(at + off, src, bytes);
	else /* a copy from ordinary memory may return before its bytes are there */
		KVT_EXPECT(!cu->copy_in((kv_cu_ptr)(uintptr_t)(at + off), src, bytes) &&
			   !cu->ctx_sync());
}

static void turn(struct eng_engine *e)
{
	int rc = eng_engine_turn(e);

	if (rc < 0)
		KVT_FAIL("engine: %s", strerror(-rc));
	if (rc == 0)
		eng_engine_wait(e, 10);
}

void rig_turns(struct eng_engine *e, struct eng_request *r, u32 nr_tokens)
{
	struct eng_result res;

	for (;;) {
		eng_request_result(r, &res);
		if (res.state == ENG_DONE || res.nr_tokens >= nr_tokens)
			return;
		turn(e);
	}
}

void rig_run(struct eng_engine *e)
{
	int rc = eng_engine_run(e);

	if (rc)
		KVT_FAIL("engine: %s", strerror(-rc));
}

struct cJSON *rig_admin(struct rig *rig, const char *request)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	size_t n = 0, cap = 1u << 20;
	char *buf = malloc(cap);
	cJSON *o;
	int fd;

	KVT_EXPECT(buf);
	snprintf(a.sun_path, sizeof(a.sun_path), "%s", rig->kvmd.admin_path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)))
		KVT_FAIL("admin socket: %s", strerror(errno));
	KVT_EXPECT(dprintf(fd, "%s\n", request) > 0);
	while (n < cap - 1 && (n == 0 || buf[n - 1] != '\n')) {
		ssize_t r = read(fd, buf + n, cap - 1 - n);

		if (r <= 0)
			break;
		n += (size_t)r;
	}
	buf[n] = 0;
	close(fd);
	o = cJSON_Parse(buf);
	if (!o || !cJSON_IsTrue(cJSON_GetObjectItem(o, "ok")))
		KVT_FAIL("admin %s: %.500s", request, buf);
	free(buf);
	return o;
}
