/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.c - options of kv-engine, and texts from files (see cli.h). Main thread only.
 */
#include "engine/cli.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "engine/run/inject.h"

static const char usage[] =
	"kv-engine: decode on KV pages of kvmd\n"
	"\n"
	"  kv-engine run   --model DIR --prompt TEXT [--max-tokens N] [--temperature T] ...\n"
	"  kv-engine serve --model DIR (--listen 127.0.0.1:PORT | --unix PATH)\n"
	"  kv-engine eval  --model DIR --text FILE [--tokens N]\n"
	"  kv-engine bench --model DIR [--batches 1,2,4,8]\n"
	"\n"
	"  --model DIR         Hugging Face directory: config.json, *.safetensors, tokenizer.json\n"
	"  --weights W         bf16 (as stored) | fp8 | int4-g32 | int4-g128 | f32\n"
	"  --kv F              page format: bf16 (default) | fp8 | fp8_s | f32 (tests)\n"
	"  --attention A       exact (default) | fast: attention of large decode steps on a GPU takes\n"
	"                      10 to 26 % less time and is less exact (docs/performance-attn.md),\n"
	"                      in MLA models with more than 16 heads; elsewhere no difference.\n"
	"                      Not for eval\n"
	"  --socket PATH       kvmd's socket. run, eval and bench start a private kvmd without it;\n"
	"                      serve takes $KVMD_SOCKET or the default\n"
	"  --device D          auto (default: a GPU if one can be used) | host | cuda\n"
	"  --gpu GPU-UUID      the GPU, where there are several\n"
	"  --batch N           most requests in a step (16)\n"
	"  --chunk N           most prompt tokens in a step (256)\n"
	"  --length N          most tokens of a sequence (the model's positions)\n"
	"  --scale-text FILE   fp8_s: text to compute static scales from, if the model has none\n"
	"  --no-prefix         look up no prefix\n"
	"  --no-seal           seal no page\n"
	"  --json              one JSON document on stdout\n"
	"  --check MODE        check mode of the private kvmd: batch (default) | off | strict\n"
	"  --host-bytes N      memory of the private kvmd, on the host\n"
	"run:\n"
	"  --prompt TEXT       may be repeated: all are decoded in one batch (needs --json)\n"
	"  --max-tokens N      (64)\n"
	"  --temperature T, --top-p P, --seed N, --ignore-eos\n"
	"  --inject NAME       tests only: damage the first prompt's request on purpose\n"
	"eval:\n"
	"  --text FILE         documents separated by NUL\n"
	"  --tokens N          the first N predictions only\n"
	"  --nll-out FILE      one line a prediction: its loss, for paired comparisons\n"
	"bench:\n"
	"  --batches LIST      batch sizes (1,2,4,8,16); --tokens N decoded per request (64)\n";

enum {
	OPT_MODEL = 256,
	OPT_WEIGHTS,
	OPT_KV,
	OPT_ATTENTION,
	OPT_SOCKET,
	OPT_BATCH,
	OPT_CHUNK,
	OPT_LENGTH,
	OPT_SCALE_TEXT,
	OPT_NO_PREFIX,
	OPT_NO_SEAL,
	OPT_JSON,
	OPT_CHECK,
	OPT_HOST_BYTES,
	OPT_PROMPT,
	OPT_MAX_TOKENS,
	OPT_TEMPERATURE,
	OPT_TOP_P,
	OPT_SEED,
	OPT_IGNORE_EOS,
	OPT_INJECT,
	OPT_TEXT,
	OPT_NLL_OUT,
	OPT_TOKENS,
	OPT_BATCHES,
	OPT_LISTEN,
	OPT_UNIX,
	OPT_DEVICE,
	OPT_GPU,
	OPT_HELP,
};

static const struct option options[] = {
	{"model", required_argument, NULL, OPT_MODEL},
	{"weights", required_argument, NULL, OPT_WEIGHTS},
	{"kv", required_argument, NULL, OPT_KV},
	{"attention", required_argument, NULL, OPT_ATTENTION},
	{"socket", required_argument, NULL, OPT_SOCKET},
	{"batch", required_argument, NULL, OPT_BATCH},
	{"chunk", required_argument, NULL, OPT_CHUNK},
	{"length", required_argument, NULL, OPT_LENGTH},
	{"scale-text", required_argument, NULL, OPT_SCALE_TEXT},
	{"no-prefix", no_argument, NULL, OPT_NO_PREFIX},
	{"no-seal", no_argument, NULL, OPT_NO_SEAL},
	{"json", no_argument, NULL, OPT_JSON},
	{"check", required_argument, NULL, OPT_CHECK},
	{"host-bytes", required_argument, NULL, OPT_HOST_BYTES},
	{"prompt", required_argument, NULL, OPT_PROMPT},
	{"max-tokens", required_argument, NULL, OPT_MAX_TOKENS},
	{"temperature", required_argument, NULL, OPT_TEMPERATURE},
	{"top-p", required_argument, NULL, OPT_TOP_P},
	{"seed", required_argument, NULL, OPT_SEED},
	{"ignore-eos", no_argument, NULL, OPT_IGNORE_EOS},
	{"inject", required_argument, NULL, OPT_INJECT},
	{"text", required_argument, NULL, OPT_TEXT},
	{"nll-out", required_argument, NULL, OPT_NLL_OUT},
	{"tokens", required_argument, NULL, OPT_TOKENS},
	{"batches", required_argument, NULL, OPT_BATCHES},
	{"listen", required_argument, NULL, OPT_LISTEN},
	{"unix", required_argument, NULL, OPT_UNIX},
	{"device", required_argument, NULL, OPT_DEVICE},
	{"gpu", required_argument, NULL, OPT_GPU},
	{"help", no_argument, NULL, OPT_HELP},
	{NULL, 0, NULL, 0},
};

static int refuse(const char *option, const char *value, const char *why)
{
	fprintf(stderr, "kv-engine: --%s %s: %s\n", option, value, why);
	return -EINVAL;
}

static int take_u32(const char *option, const char *text, u32 max, u32 *ret)
{
	char *end;
	unsigned long long v;

	errno = 0;
	v = strtoull(text, &end, 10);
	if (errno || *end || end == text || text[0] == '-' || v > max)
		return refuse(option, text, "not a number in range");
	*ret = (u32)v;
	return 0;
}

static int take_float(const char *option, const char *text, float max, float *ret)
{
	char *end;
	float v;

	v = strtof(text, &end);
	if (*end || end == text || !(v >= 0) || v > max)
		return refuse(option, text, "not a number in range");
	*ret = v;
	return 0;
}

static int take_batches(struct eng_cli *c, const char *text)
{
	char copy[128], *save = NULL;

	if (strlen(text) >= sizeof(copy))
		return refuse("batches", text, "too long");
	strcpy(copy, text);
	c->nr_batches = 0;
	for (char *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
		if (c->nr_batches == ENG_BATCHES_MAX)
			return refuse("batches", text, "too many");
		if (take_u32("batches", p, 256, &c->batches[c->nr_batches]) ||
		    c->batches[c->nr_batches] == 0)
			return -EINVAL;
		c->nr_batches++;
	}
	return c->nr_batches ? 0 : refuse("batches", text, "empty");
}

static int take_number(struct eng_cli *c, int opt, const char *arg)
{
	char *end;

	switch (opt) {
	case OPT_BATCH:
		return take_u32("batch", arg, 256, &c->batch);
	case OPT_CHUNK:
		return take_u32("chunk", arg, 4096, &c->chunk);
	case OPT_LENGTH:
		return take_u32("length", arg, UINT32_MAX, &c->length);
	case OPT_MAX_TOKENS:
		return take_u32("max-tokens", arg, UINT32_MAX, &c->max_tokens);
	case OPT_TOKENS:
		return take_u32("tokens", arg, UINT32_MAX, &c->tokens);
	case OPT_TEMPERATURE:
		return take_float("temperature", arg, 100, &c->temperature);
	case OPT_TOP_P:
		return take_float("top-p", arg, 1, &c->top_p);
	case OPT_SEED:
		c->seed = strtoull(arg, &end, 0);
		return *end || end == arg ? refuse("seed", arg, "not a number") : 0;
	default:
		return take_batches(c, arg);
	}
}

static int take_device(struct eng_cli *c, const char *arg)
{
	c->device_auto = !strcmp(arg, "auto");
	c->device = strcmp(arg, "cuda") ? ENG_DEVICE_HOST : ENG_DEVICE_CUDA;
	if (!c->device_auto && c->device == ENG_DEVICE_HOST && strcmp(arg, "host"))
		return refuse("device", arg, "not auto, host or cuda");
	return 0;
}

/* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, as nvidia-smi -L has it */
static int take_gpu(struct eng_cli *c, const char *arg)
{
	const char *p = arg + 4;
	u32 nr = 0;

	if (strncmp(arg, "GPU-", 4))
		return refuse("gpu", arg, "not GPU- and a UUID");
	while (*p && nr < 16) {
		char hex[3] = {p[0], p[1], 0}, *end;

		if (*p == '-') {
			p++;
			continue;
		}
		c->gpu_uuid[nr++] = (u8)strtoul(hex, &end, 16);
		if (end != hex + 2)
			return refuse("gpu", arg, "not GPU- and a UUID");
		p += 2;
	}
	if (*p || nr != 16)
		return refuse("gpu", arg, "not GPU- and a UUID");
	c->gpu = arg;
	c->has_gpu = true;
	return 0;
}

static int take_name(struct eng_cli *c, int opt, const char *arg)
{
	int v;

	switch (opt) {
	case OPT_WEIGHTS:
		v = eng_weights_parse(arg);
		if (v < 0)
			return refuse("weights", arg,
				      "not bf16, fp8, int4-g32, int4-g128 or f32");
		c->weights = (u32)v;
		return 0;
	case OPT_KV:
		v = eng_kv_parse(arg);
		if (v < 0)
			return refuse("kv", arg, "not bf16, fp8, fp8_s or f32");
		c->kv = (u32)v;
		return 0;
	case OPT_ATTENTION:
		v = eng_attention_parse(arg);
		if (v < 0)
			return refuse("attention", arg, "not exact or fast");
		c->attention = (u32)v;
		return 0;
	case OPT_CHECK:
		if (strcmp(arg, "batch") && strcmp(arg, "off") && strcmp(arg, "strict"))
			return refuse("check", arg, "not batch, off or strict");
		c->check = arg;
		return 0;
	case OPT_DEVICE:
		return take_device(c, arg);
	case OPT_GPU:
		return take_gpu(c, arg);
	case OPT_PROMPT:
		if (c->nr_prompts == ENG_PROMPTS_MAX)
			return refuse("prompt", arg, "too many prompts");
		c->prompts[c->nr_prompts++] = arg;
		return 0;
	default:
		c->inject = eng_inject_parse(arg);
		return c->inject < 0 ? refuse("inject", arg, "no such injection") : 0;
	}
}

static int take_option(struct eng_cli *c, int opt, const char *arg)
{
	switch (opt) {
	case OPT_MODEL:
		c->model = arg;
		return 0;
	case OPT_SOCKET:
		c->socket = arg;
		return 0;
	case OPT_SCALE_TEXT:
		c->scale_text = arg;
		return 0;
	case OPT_HOST_BYTES:
		c->host_bytes = arg;
		return 0;
	case OPT_TEXT:
		c->text = arg;
		return 0;
	case OPT_NLL_OUT:
		c->nll_out = arg;
		return 0;
	case OPT_LISTEN:
		c->listen = arg;
		return 0;
	case OPT_UNIX:
		c->unix_path = arg;
		return 0;
	case OPT_NO_PREFIX:
		c->no_prefix = true;
		return 0;
	case OPT_NO_SEAL:
		c->no_seal = true;
		return 0;
	case OPT_JSON:
		c->json = true;
		return 0;
	case OPT_IGNORE_EOS:
		c->ignore_eos = true;
		return 0;
	case OPT_WEIGHTS:
	case OPT_KV:
	case OPT_ATTENTION:
	case OPT_CHECK:
	case OPT_DEVICE:
	case OPT_GPU:
	case OPT_PROMPT:
	case OPT_INJECT:
		return take_name(c, opt, arg);
	default:
		return take_number(c, opt, arg);
	}
}

static int check_device(const struct eng_cli *c)
{
	if (c->device_auto || c->device == ENG_DEVICE_HOST) {
		if (!c->device_auto && c->has_gpu)
			return refuse("gpu", c->gpu, "does not go with --device host");
		return 0;
	}
	if (c->host_bytes)
		return refuse("host-bytes", c->host_bytes,
			      "does not go with --device cuda");
	return c->kv == ENG_KV_F32 ? refuse("kv", "f32", "for --device host only") : 0;
}

int eng_cli_parse(int argc, char **argv, struct eng_cli *ret)
{
	struct eng_cli c = {.max_tokens = 64, .top_p = 1, .device_auto = true};
	int opt, rc;

	if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "help")) {
		fputs(usage, argc < 2 ? stderr : stdout);
		return argc < 2 ? -EINVAL : 1;
	}
	c.command = argv[1];
	optind = 2;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (opt == OPT_HELP) {
			fputs(usage, stdout);
			return 1;
		}
		if (opt == '?')
			return -EINVAL; /* getopt has said why */
		rc = take_option(&c, opt, optarg);
		if (rc)
			return rc;
	}
	if (optind < argc) {
		fprintf(stderr, "kv-engine: %s: unexpected argument\n", argv[optind]);
		return -EINVAL;
	}
	if (!c.model) {
		fprintf(stderr, "kv-engine %s: --model is missing\n", c.command);
		return -EINVAL;
	}
	if (check_device(&c))
		return -EINVAL;
	*ret = c;
	return 0;
}

int eng_read_file(const char *path, char **ret_text, size_t *ret_bytes)
{
	FILE *f = fopen(path, "rb");
	char *text = NULL;
	long size;
	int rc = 0;

	if (!f)
		goto fail;
	if (fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET))
		goto fail;
	text = malloc((size_t)size + 1);
	if (!text)
		goto fail;
	if (fread(text, 1, (size_t)size, f) != (size_t)size) {
		errno = EIO;
		goto fail;
	}
	text[size] = 0;
	fclose(f);
	*ret_text = text;
	*ret_bytes = (size_t)size;
	return 0;
fail:
	rc = errno ? -errno : -EIO;
	fprintf(stderr, "kv-engine: %s: %s\n", path, strerror(-rc));
	free(text);
	if (f)
		fclose(f);
	return rc;
}

static int push_ids(u32 **ids, size_t *nr, size_t *cap, const u32 *more, size_t nr_more)
{
	u32 *grown;

	while (*nr + nr_more > *cap) {
		grown = realloc(*ids, (*cap * 2 + 4096) * sizeof(**ids));
		if (!grown)
			return -ENOMEM;
		*ids = grown;
		*cap = *cap * 2 + 4096;
	}
	memcpy(*ids + *nr, more, nr_more * sizeof(**ids));
	*nr += nr_more;
	return 0;
}

int eng_stream_ids(const struct eng_model *m, const char *text, size_t nr_bytes,
		   size_t nr_max, u32 **ret_ids, size_t *ret_nr)
{
	u32 end_id = m->config.nr_eos ? m->config.eos[0] : 0, *ids = NULL;
	size_t nr = 0, cap = 0, at = 0;
	int rc = 0;

	while (at < nr_bytes && !rc && (nr_max == 0 || nr < nr_max)) {
		const char *nul = memchr(text + at, 0, nr_bytes - at);
		size_t n = nul ? (size_t)(nul - text) - at : nr_bytes - at;
		u32 *doc = NULL;
		size_t nr_doc;

		rc = eng_tokenizer_encode(m->tok, text + at, n, ENG_ENCODE_PLAIN, &doc,
					  &nr_doc);
		if (!rc)
			rc = push_ids(&ids, &nr, &cap, doc, nr_doc);
		if (!rc)
			rc = push_ids(&ids, &nr, &cap, &end_id, 1);
		free(doc);
		at += n + 1;
	}
	if (rc) {
		free(ids);
		return rc;
	}
	*ret_ids = ids;
	*ret_nr = nr;
	return 0;
}
