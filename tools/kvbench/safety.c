/* SPDX-License-Identifier: Apache-2.0 */
/* safety.c - see safety.h. One thread. */
#include "safety.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/cuda_syms.h"
#include "base/nvml_syms.h"

int kvb_backend_parse(const char *text)
{
	bool fake = getenv("KV_CUDA_LIB") != NULL;

	if (!strcmp(text, "host"))
		return KVB_HOST;
	if (!strcmp(text, "cuda"))
		return fake ? KVB_FAKE : KVB_CUDA;
	if (!strcmp(text, "auto")) {
		if (fake)
			return KVB_FAKE;
		return access("/dev/nvidiactl", F_OK) ? KVB_HOST : KVB_CUDA;
	}
	fprintf(stderr, "kvbench: --backend %s: auto, host or cuda\n", text);
	return -EINVAL;
}

const char *kvb_backend_str(enum kvb_backend b)
{
	return b == KVB_HOST ? "host" : b == KVB_FAKE ? "cuda, named driver" : "cuda";
}

int kvb_kvmd_start(enum kvb_backend b, u64 bytes, const char *const *args,
		   struct eng_private_kvmd *ret)
{
	const char *all[16] = {"--backend", b == KVB_HOST ? "host" : "cuda",
			       b == KVB_HOST ? "--host-bytes" : "--gpu-bytes"};
	char size[32], error[512] = "";
	u32 n = 3;
	int r;

	snprintf(size, sizeof(size), "%llu", (unsigned long long)bytes);
	all[n++] = size;
	for (u32 i = 0; args && args[i] && n < 15; i++)
		all[n++] = args[i];
	r = eng_private_kvmd_start(all, ret, error, sizeof(error));
	if (r)
		fprintf(stderr, "kvbench: private kvmd: %s\n", error);
	return r;
}

/* What an engine has done before it opens a pool, without a CUDA runtime. */
static int plain_context(void)
{
	struct kv_cuda_syms cu;
	char error[200] = "";
	kv_cu_device dev = 0;
	kv_cu_ctx ctx = NULL;
	kv_cu_result cr;

	if (kv_cuda_load(&cu, error, sizeof(error))) {
		fprintf(stderr, "kvbench: %s\n", error);
		return -ENODEV;
	}
	cr = cu.init(0);
	if (!cr)
		cr = cu.device_get(&dev, 0);
	if (!cr)
		cr = cu.ctx_retain(&ctx, dev);
	if (!cr)
		cr = cu.ctx_push(ctx);
	if (cr)
		fprintf(stderr, "kvbench: context: %s\n", kv_cuda_reason(cr));
	return kv_cuda_errno(cr);
}

int kvb_device_open(enum kvb_backend b, struct eng_mem **ret)
{
	struct eng_err err = {{0}};
	int r = b == KVB_FAKE ? plain_context() : 0;

	if (r)
		return r;
	r = eng_mem_open(b == KVB_CUDA ? ENG_DEVICE_CUDA : ENG_DEVICE_HOST, NULL, ret,
			 &err);
	if (r)
		fprintf(stderr, "kvbench: %s\n", err.text);
	return r;
}

struct kv_layout kvb_layout(u32 model)
{
	struct kv_layout l = {.format_version = KV_LAYOUT_VERSION,
			      .kind = KV_LAYOUT_GQA,
			      .dtype = KV_DTYPE_BF16,
			      .scale_kind = KV_SCALE_NONE,
			      .page_tokens = KV_PAGE_TOKENS,
			      .nr_layers = 1,
			      .nr_kv_heads = 1,
			      .head_dim = 64};

	memcpy(l.model_id, &model, sizeof(model));
	return l;
}

int kvb_said(const char *call, int r)
{
	fprintf(stderr, "kvbench: %s: %d: %s\n", call, r, kvc_strerror(NULL));
	return r;
}

static void add_gpu(struct cJSON *o)
{
	struct kv_cuda_syms cu;
	struct kv_nvml_syms nv;
	char text[128];
	kv_cu_device dev;

	if (!kv_cuda_load(&cu, NULL, 0) && !cu.init(0) && !cu.device_get(&dev, 0) &&
	    !cu.device_name(text, sizeof(text), dev))
		cJSON_AddStringToObject(o, "gpu", text);
	if (!kv_nvml_load(&nv, NULL, 0) && !nv.init() &&
	    !nv.driver_version(text, sizeof(text)))
		cJSON_AddStringToObject(o, "driver", text);
}

void kvb_json_where(struct cJSON *o, enum kvb_backend b)
{
	char date[32];
	time_t now = time(NULL);
	struct tm tm;

	gmtime_r(&now, &tm);
	strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &tm);
	cJSON_AddStringToObject(o, "date", date);
#ifdef KVB_COMMIT
	cJSON_AddStringToObject(o, "commit", KVB_COMMIT);
#endif
	cJSON_AddStringToObject(o, "backend", kvb_backend_str(b));
	if (b == KVB_CUDA)
		add_gpu(o);
}

int kvb_number(const char *name, const char *text, u64 lo, u64 hi, u64 *ret)
{
	unsigned long long v;
	char *end;

	errno = 0;
	v = strtoull(text, &end, 10);
	if (*end == 'k' || *end == 'M')
		v *= *end++ == 'k' ? 1000 : 1000000;
	if (errno || end == text || *end || *text == '-' || v < lo || v > hi) {
		fprintf(stderr, "kvbench: --%s %s: %llu to %llu\n", name, text,
			(unsigned long long)lo, (unsigned long long)hi);
		return 2;
	}
	*ret = v;
	return 0;
}
