/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant.c - the stages in order (kvquant.h). One thread. */
#include "tools/kvquant/kvquant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What a loader would refuse is refused before anything is written. */
static int check_input(const struct kvq_options *o, struct eng_config *ret,
		       struct eng_err *err)
{
	struct eng_model_options mo = {.weights = o->weights};
	int r;

	r = eng_config_load(o->model, ret, err);
	if (r)
		return r;
	if (ret->quant != ENG_QUANT_NONE && o->weights != ENG_WEIGHTS_AS_IS)
		return eng_refuse(
			err, -EINVAL,
			"%s/config.json: has a quantization_config; the input must be BF16",
			o->model);
	return eng_model_check(o->model, &mo, err);
}

/* The output must open: headers, index and shapes, as any reader sees them. */
static int check_output(const struct kvq_outdir *d, struct eng_err *err)
{
	struct eng_err why = {{0}};
	int r = eng_model_check(d->path, NULL, &why);

	return r ? eng_refuse(err, r, "output does not read back: %.400s", why.text) : 0;
}

static int write_output(const struct kvq_options *o, const struct eng_config *c,
			const struct eng_tensors *ts, const float *scales,
			const volatile int *stop, struct kvq_report *report,
			struct eng_err *err)
{
	struct kvq_outdir dir = {.fd = -1};
	struct kvq_plan plan = {0};
	int r;

	r = kvq_plan_build(o, c, ts, scales, &plan, err);
	if (r)
		goto free_plan;
	r = kvq_outdir_create(o, &dir, err);
	if (r)
		goto free_plan;
	r = kvq_write_tensors(o, &plan, dir.fd, stop, report, err);
	r = r ?: kvq_write_config(o, c, ts, dir.fd, err);
	r = r ?: check_output(&dir, err);
	r = r ?: kvq_outdir_commit(o, &dir, err);
	if (r)
		kvq_outdir_remove(&dir);
free_plan:
	kvq_plan_free(&plan);
	return r;
}

int kvq_run(const struct kvq_options *o, const volatile int *stop, struct kvq_report *ret,
	    struct eng_err *err)
{
	struct kvq_report report = {0};
	struct eng_config c = {0};
	struct eng_tensors ts = {0};
	struct kvq_outdir probe = {.fd = -1};
	float *scales = NULL;
	u32 nr_scales = 0;
	int r;

	err->text[0] = 0;
	r = check_input(o, &c, err);
	if (r)
		return r;
	/* a bad target should not cost an hour of measuring first */
	r = kvq_outdir_create(o, &probe, err);
	if (r)
		return r;
	kvq_outdir_remove(&probe);
	r = eng_tensors_open(o->model, &ts, err);
	if (r)
		return r;
	for (size_t i = 0; i < ts.nr; i++)
		report.bytes_in += ts.list[i].bytes;
	r = -EINVAL;
	if (o->kv_scales &&
	    (eng_tensors_find(&ts, "model.layers.0.self_attn.k_scale") ||
	     eng_tensors_find(&ts, "language_model.model.layers.0.self_attn."
				   "k_scale"))) {
		eng_refuse(err, 0, "%s: has static KV scales already", o->model);
		goto close_ts;
	}
	r = o->kv_scales ? kvq_measure_scales(o, &scales, &nr_scales, err) : 0;
	r = r ?: write_output(o, &c, &ts, scales, stop, &report, err);
	if (!r)
		*ret = report;
	free(scales);
close_ts:
	eng_tensors_close(&ts);
	return r;
}
