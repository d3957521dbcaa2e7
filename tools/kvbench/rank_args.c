/* SPDX-License-Identifier: Apache-2.0 */
/* rank_args.c - the arguments of kvbench rank. One thread. */
#include "rank.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/run/internal.h"

static int usage(const char *what, const char *value)
{
	if (what)
		fprintf(stderr, "kvbench: rank: %s %s\n", what, value ? value : "");
	fprintf(stderr,
		"usage: kvbench rank --preset kimi-k2.6|glm-5.2|tiny [--tp 1|2|4|8] [--weights "
		"int4|fp8]\n"
		"       [--kv fp8|fp8_s|bf16] [--attention exact|fast] [--in N] [--out N]\n"
		"       [--requests N,N,...] [--kv-bytes N]\n"
		"       [--device auto|host|cuda] [--socket PATH] [--json]\n");
	return 2;
}

static int parse_u64(const char *text, u64 lo, u64 hi, u64 *ret)
{
	char *end;
	double v = strtod(text, &end); /* 48.2e9 as well */

	if (*end || end == text || !(v >= (double)lo) || v > (double)hi)
		return -EINVAL;
	*ret = (u64)v;
	return 0;
}

static int parse_batches(struct rank_options *o, const char *text)
{
	o->nr_batches = 0;
	while (*text) {
		char *end;
		unsigned long v = strtoul(text, &end, 10);

		if (end == text || v < 1 || v > RANK_REQUESTS_MAX ||
		    o->nr_batches == RANK_BATCHES_MAX)
			return -EINVAL;
		o->batches[o->nr_batches++] = (u32)v;
		text = *end == ',' ? end + 1 : end;
		if (*end && *end != ',')
			return -EINVAL;
	}
	return o->nr_batches ? 0 : -EINVAL;
}

static int parse_device(struct rank_options *o, const char *text)
{
	if (!strcmp(text, "host"))
		o->device = ENG_DEVICE_HOST;
	else if (!strcmp(text, "cuda"))
		o->device = ENG_DEVICE_CUDA;
	else if (!strcmp(text, "auto"))
		o->device = kvk_cuda_ops() ? ENG_DEVICE_CUDA : ENG_DEVICE_HOST;
	else
		return -EINVAL;
	return 0;
}

static int parse_weights(struct rank_options *o, const char *text)
{
	o->weights = !strcmp(text, "int4") ? KVK_INT4 : KVK_E4M3;
	return strcmp(text, "int4") && strcmp(text, "fp8") ? -EINVAL : 0;
}

static const struct option long_options[] = {
	{"preset", 1, 0, 'p'},
	{"tp", 1, 0, 't'},
	{"weights", 1, 0, 'w'},
	{"kv", 1, 0, 'k'},
	{"in", 1, 0, 'i'},
	{"out", 1, 0, 'o'},
	{"requests", 1, 0, 'r'},
	{"kv-bytes", 1, 0, 'b'},
	{"device", 1, 0, 'd'},
	{"socket", 1, 0, 's'},
	{"json", 0, 0, 'j'},
	{"attention", 1, 0, 'a'},
	{0, 0, 0, 0},
};

/* 0, or -EINVAL: the value is no good. */
static int parse_one(struct rank_options *o, int c, const char *arg)
{
	u64 v = 0;
	int rc = 0;

	switch (c) {
	case 'p':
		o->preset = arg;
		break;
	case 't':
		rc = parse_u64(arg, 1, 8, &v);
		o->tp = (u32)v;
		break;
	case 'w':
		return parse_weights(o, arg);
	case 'k':
		rc = eng_kv_parse(arg);
		o->kv = (u32)rc;
		return rc < 0 || rc == ENG_KV_F32 ? -EINVAL : 0;
	case 'a':
		rc = eng_attention_parse(arg);
		o->attention = (u32)rc;
		return rc < 0 ? rc : 0;
	case 'i':
		rc = parse_u64(arg, 2, 131072, &v);
		o->in = (u32)v;
		break;
	case 'o':
		rc = parse_u64(arg, 1, RANK_OUT_MAX, &v);
		o->out = (u32)v;
		break;
	case 'r':
		return parse_batches(o, arg);
	case 'b':
		return parse_u64(arg, 1 << 20, 1ull << 40, &o->kv_bytes);
	case 'd':
		return parse_device(o, arg);
	case 's':
		o->socket_path = arg;
		break;
	default:
		o->json = true;
	}
	return rc;
}

int rank_parse(struct rank_options *o, int argc, char **argv)
{
	int c, index = 0;

	*o = (struct rank_options){.tp = 8,
				   .weights = KVK_INT4,
				   .kv = ENG_KV_FP8,
				   .in = 8192,
				   .out = 64,
				   .batches = {1, 8, 32, 64},
				   .nr_batches = 4};
	parse_device(o, "auto");
	optind = 1;
	while ((c = getopt_long(argc, argv, "", long_options, &index)) >= 0) {
		if (c == '?')
			return usage(NULL, NULL);
		if (parse_one(o, c, optarg))
			return usage(long_options[index].name, optarg);
	}
	if (optind < argc)
		return usage("unknown argument", argv[optind]);
	if (!o->preset)
		return usage("--preset is needed", NULL);
	if (!o->kv_bytes)
		o->kv_bytes = strcmp(o->preset, "tiny") ? 48200000000ull : 64ull << 20;
	return 0;
}
