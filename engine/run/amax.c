/* SPDX-License-Identifier: Apache-2.0 */
/* amax.c - largest K/V values over a text (see amax.h). */
#include "engine/run/amax.h"

#include <errno.h>
#include <string.h>

#include "engine/private.h"
#include "engine/run/internal.h"

#define WINDOW	 1024u
#define E4M3_MAX 448.0f

u32 eng_kv_nr_scales(const struct eng_model *m)
{
	const struct eng_config *c = &m->config;

	return c->arch == ENG_ARCH_MLA ? c->nr_layers : c->nr_layers * c->nr_kv_heads * 2;
}

static int run_windows(struct eng_engine *e, const u32 *tokens, size_t nr_tokens,
		       struct eng_err *err)
{
	u32 window = KV_MIN(WINDOW, e->opt.length_max - 1);

	for (size_t at = 0; at < nr_tokens; at += window) {
		struct eng_params p = {
			.prompt = tokens + at,
			.nr_prompt = (u32)KV_MIN(nr_tokens - at, window),
			.max_tokens = 1,
			.ignore_eos = true,
			.no_prefix = true,
		};
		struct eng_request *r;
		struct eng_result res;
		int rc = eng_request_submit(e, &p, &r, err);

		if (rc)
			return rc;
		rc = eng_engine_run(e);
		if (rc)
			return eng_refuse(err, rc, "engine: %s", strerror(-rc));
		eng_request_result(r, &res);
		eng_request_free(r);
		if (res.finish != ENG_FINISH_LENGTH)
			return eng_refuse(err, -EIO, "calibration ended in %s (%d)",
					  eng_finish_str(res.finish), res.code);
	}
	return 0;
}

int eng_kv_amax(struct eng_model *m, const char *socket_path, const u32 *tokens,
		size_t nr_tokens, float *ret_amax, struct eng_err *err)
{
	static const char *const args[] = {"--backend", "host", NULL};
	struct eng_private_kvmd own = {.pid = -1};
	struct eng_options opt = {
		.size_bytes = sizeof(opt),
		.kv = ENG_KV_BF16,
		.socket_path = socket_path,
		.client_name = "kv-engine-scales",
		.no_prefix = true,
		.no_seal = true,
	};
	struct eng_engine *e;
	int rc;

	if (nr_tokens == 0)
		return eng_refuse(err, -EINVAL,
				  "scales need a text of at least one token");
	if (!socket_path) {
		rc = eng_private_kvmd_start(args, &own, err->text, sizeof(err->text));
		if (rc)
			return rc;
		opt.socket_path = own.socket_path;
	}
	rc = eng_engine_create(m, &opt, &e, err);
	if (rc)
		goto stop;
	memset(ret_amax, 0, eng_kv_nr_scales(m) * sizeof(*ret_amax));
	e->amax = ret_amax;
	rc = run_windows(e, tokens, nr_tokens, err);
	eng_engine_destroy(e);
stop:
	if (!socket_path)
		eng_private_kvmd_stop(&own);
	return rc;
}

void eng_kv_scales_from_amax(float *amax, u32 nr)
{
	for (u32 i = 0; i < nr; i++)
		amax[i] = amax[i] > 0 ? amax[i] / E4M3_MAX : 1.0f;
}
