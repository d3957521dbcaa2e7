/* SPDX-License-Identifier: Apache-2.0 */
/* scene.c - see scene.h. One thread. */
#include "scene.h"

#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>

/* Whole file, NUL-terminated behind its end. */
static char *read_file(const char *path, size_t *ret_bytes)
{
	FILE *f = fopen(path, "rb");
	char *buf = NULL;
	long n;

	if (!f)
		return NULL;
	if (!fseek(f, 0, SEEK_END) && (n = ftell(f)) > 0 && !fseek(f, 0, SEEK_SET)) {
		buf = malloc((size_t)n + 1);
		if (buf && fread(buf, 1, (size_t)n, f) == (size_t)n) {
			buf[n] = 0;
			*ret_bytes = (size_t)n;
		} else {
			free(buf);
			buf = NULL;
		}
	}
	fclose(f);
	return buf;
}

/* Documents long enough for a prompt, spread over the file so that their topics differ.
 */
static int pick_prompts(struct kvb_scene *s, const char *text, size_t bytes)
{
	const char *end = text + bytes;
	u32 nr = 0;

	for (const char *p = text; p < end && nr < KVB_PROMPTS; p += strlen(p) + 1) {
		size_t len = strlen(p), nr_ids;
		u32 *ids;

		/* the next prompt starts no earlier than its share of the file */
		if (len < 2000 || (size_t)(p - text) < bytes / (KVB_PROMPTS + 1) * nr)
			continue;
		if (eng_tokenizer_encode(s->model->tok, p, KV_MIN(len, (size_t)4000),
					 ENG_ENCODE_PLAIN, &ids, &nr_ids))
			continue;
		if (nr_ids >= KVB_PROMPT_TOKENS) {
			memcpy(s->prompts[nr], ids, sizeof(s->prompts[nr]));
			nr++;
		}
		free(ids);
	}
	return nr == KVB_PROMPTS ? 0 : -ENODATA;
}

static int load_prompts(struct kvb_scene *s, const char *model_dir, const char *text_path)
{
	char path[4096], dir[4096], *text;
	size_t bytes = 0;
	int r;

	if (!text_path) {
		snprintf(dir, sizeof(dir), "%s", model_dir);
		snprintf(path, sizeof(path), "%.4000s/heldout.txt", dirname(dir));
		text_path = path;
	}
	text = read_file(text_path, &bytes);
	if (!text) {
		fprintf(stderr, "kvbench: %s: %s\n", text_path, strerror(errno));
		return -ENOENT;
	}
	r = pick_prompts(s, text, bytes);
	if (r)
		fprintf(stderr, "kvbench: %s: fewer than %u documents of %u tokens\n",
			text_path, KVB_PROMPTS, KVB_PROMPT_TOKENS);
	free(text);
	return r;
}

int kvb_scene_open(struct kvb_scene *s, const char *model_dir, const char *text_path,
		   const char *weights, const char *socket_path, const char *check)
{
	const char *args[] = {"--check",
			      check,
			      "--backend",
			      s->device == ENG_DEVICE_CUDA ? "cuda" : "host",
			      s->device == ENG_DEVICE_CUDA ? "--gpu-bytes" : NULL,
			      "2GiB",
			      NULL};
	struct eng_model_options opt = {0};
	struct eng_err err = {{0}};
	u32 device = s->device;
	char line[512] = "";
	int r;

	memset(s, 0, sizeof(*s));
	s->device = device;
	r = eng_weights_parse(weights);
	if (r < 0) {
		fprintf(stderr, "kvbench: --weights %s: unknown\n", weights);
		return r;
	}
	opt.weights = (u32)r;
	r = eng_model_load(model_dir, &opt, &s->model, &err);
	if (r) {
		fprintf(stderr, "kvbench: %s\n", err.text);
		return r;
	}
	r = load_prompts(s, model_dir, text_path);
	if (r)
		goto free_model;
	s->socket_path = socket_path;
	if (socket_path)
		return 0;
	r = eng_private_kvmd_start(args, &s->kvmd, line, sizeof(line));
	if (r) {
		fprintf(stderr, "kvbench: private kvmd: %s\n", line);
		goto free_model;
	}
	s->own_kvmd = true;
	s->socket_path = s->kvmd.socket_path;
	return 0;
free_model:
	eng_model_free(s->model);
	s->model = NULL;
	return r;
}

int kvb_scene_prompt(struct kvb_scene *s, u32 i, const char *text)
{
	size_t nr;
	u32 *ids;
	int r = eng_tokenizer_encode(s->model->tok, text, strlen(text), ENG_ENCODE_PLAIN,
				     &ids, &nr);

	if (r)
		return r;
	for (u32 n = 0; nr && n < KVB_PROMPT_TOKENS; n++)
		s->prompts[i][n] = ids[n % nr];
	free(ids);
	return nr ? 0 : -EINVAL;
}

void kvb_scene_close(struct kvb_scene *s)
{
	if (s->own_kvmd)
		eng_private_kvmd_stop(&s->kvmd);
	if (s->model)
		eng_model_free(s->model);
}
