/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scales.c - static KV scales: run texts through the model, note the largest values
 * (kvquant.h).
 *
 * The model is loaded with the weights the output will have, so that the scales fit them.
 * A text file holds documents separated by NUL; each is encoded alone and ended by the
 * model's end token, as training and evaluation do.
 */
#include "tools/kvquant/kvquant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "engine/model/json.h"
#include "engine/run/amax.h"

#define TEXT_MAX (256u << 20)

struct stream {
	u32 *ids;
	size_t nr, max;
};

/* Appends one document and the end token, up to the stream's limit. */
static int add_document(struct stream *s, const struct eng_model *m, const char *file,
			const char *text, size_t bytes, struct eng_err *err)
{
	u32 end = m->config.nr_eos ? m->config.eos[0] : 0, *ids = NULL;
	size_t nr = 0, take;
	int r;

	r = eng_tokenizer_encode(m->tok, text, bytes, ENG_ENCODE_PLAIN, &ids, &nr);
	if (r)
		return eng_refuse(err, r, "--text: %s: cannot be encoded: %s", file,
				  strerror(-r));
	take = KV_MIN(nr, s->max - s->nr);
	memcpy(s->ids + s->nr, ids, take * sizeof(*ids));
	s->nr += take;
	free(ids);
	if (m->config.nr_eos && s->nr < s->max)
		s->ids[s->nr++] = end;
	return 0;
}

static int add_text(struct stream *s, const struct eng_model *m, const char *file,
		    struct eng_err *err)
{
	size_t bytes = 0, at = 0;
	char *text = NULL;
	int r;

	r = eng_file_read(file, TEXT_MAX, &text, &bytes, err);
	if (r)
		return r;
	while (at < bytes && s->nr < s->max && !r) {
		size_t n = strnlen(text + at, bytes - at);

		r = add_document(s, m, file, text + at, n, err);
		at += n + 1;
	}
	free(text);
	return r;
}

int kvq_measure_scales(const struct kvq_options *o, float **ret_scales, u32 *ret_nr,
		       struct eng_err *err)
{
	struct eng_model_options mo = {.weights = o->weights};
	struct stream s = {.max = o->tokens};
	struct eng_model *m = NULL;
	float *scales = NULL;
	u32 nr = 0;
	int r;

	r = eng_model_load(o->model, &mo, &m, err);
	if (r)
		return r;
	nr = eng_kv_nr_scales(m);
	s.ids = malloc((s.max + 1) * sizeof(*s.ids));
	scales = calloc(nr, sizeof(*scales));
	r = s.ids && scales ? 0 : eng_refuse(err, -ENOMEM, "--kv-scales: out of memory");
	for (u32 i = 0; i < o->nr_texts && !r; i++)
		r = add_text(&s, m, o->texts[i], err);
	if (!r && !s.nr)
		r = eng_refuse(err, -EINVAL, "--text: %s holds no text", o->texts[0]);
	r = r ?: eng_kv_amax(m, NULL, s.ids, s.nr, scales, err);
	eng_model_free(m);
	free(s.ids);
	if (r) {
		free(scales);
		return r;
	}
	eng_kv_scales_from_amax(scales, nr);
	*ret_scales = scales;
	*ret_nr = nr;
	return 0;
}
