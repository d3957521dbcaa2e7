/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - kvquant's command line. Exit: 0 done, 1 failed or refused, 2 usage. */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tools/kvquant/kvquant.h"
#include "engine/openmp.h"

#define TEXTS_MAX      16u
#define DEFAULT_TOKENS 16384u
#define DEFAULT_SHARD  (4ull << 30)

static volatile int stopped;

static void on_signal(int sig)
{
	(void)sig;
	stopped = 1;
}

static int usage(FILE *to)
{
	fprintf(to,
		"usage: kvquant --model DIR --out DIR --weights int4-g32|int4-g128|fp8|bf16\n"
		"               [--kv-scales --text FILE... [--tokens N]] [--shard-mib N]\n"
		"\n"
		"Makes a quantised checkpoint in the standard layout: routed experts INT4\n"
		"(compressed-tensors pack-quantized), or all projections FP8 in blocks of\n"
		"128 x 128. --kv-scales adds static KV scales measured on the texts (documents\n"
		"separated by NUL). --out must not exist; it appears complete or not at all.\n");
	return to == stdout ? 0 : 2;
}

static int bad(const char *option, const char *value, const char *want)
{
	fprintf(stderr, "kvquant: %s: \"%s\", expected %s\n", option, value, want);
	return 2;
}

static int parse_count(const char *option, const char *text, u64 max, u64 *ret)
{
	char *end;

	errno = 0;
	*ret = strtoull(text, &end, 10);
	if (errno || *end || text[0] < '0' || text[0] > '9' || !*ret || *ret > max)
		return bad(option, text, "a whole number, at least 1");
	return 0;
}

static int set_option(struct kvq_options *o, const char **texts, int c, const char *value)
{
	u64 n = 0;
	int r = 0;

	switch (c) {
	case 'm':
		o->model = value;
		return 0;
	case 'o':
		o->out = value;
		return 0;
	case 'w':
		r = eng_weights_parse(value);
		if (r < 0 || r == ENG_WEIGHTS_F32)
			return bad("--weights", value,
				   "int4-g32, int4-g128, fp8 or bf16");
		o->weights = (u32)r;
		return 0;
	case 'k':
		o->kv_scales = true;
		return 0;
	case 't':
		if (o->nr_texts == TEXTS_MAX)
			return bad("--text", value, "at most 16 files");
		texts[o->nr_texts++] = value;
		return 0;
	case 'n':
		r = parse_count("--tokens", value, 1u << 30, &n);
		o->tokens = n;
		return r;
	case 's':
		r = parse_count("--shard-mib", value, 1u << 20, &n);
		o->shard_bytes = n << 20;
		return r;
	default:
		return usage(stderr);
	}
}

static int check_options(const struct kvq_options *o)
{
	if (!o->model || !o->out) {
		fprintf(stderr, "kvquant: %s is missing\n",
			o->model ? "--out" : "--model");
		return usage(stderr);
	}
	if (o->kv_scales != (o->nr_texts > 0)) {
		fprintf(stderr, "kvquant: --kv-scales and --text go together\n");
		return 2;
	}
	if (o->weights == UINT32_MAX) {
		fprintf(stderr, "kvquant: --weights is missing\n");
		return usage(stderr);
	}
	if (o->weights == ENG_WEIGHTS_AS_IS && !o->kv_scales) {
		fprintf(stderr,
			"kvquant: --weights bf16 without --kv-scales changes nothing\n");
		return 2;
	}
	return 0;
}

static void print_report(const struct kvq_options *o, const struct kvq_report *r)
{
	printf("%s: %s, %.1f MB of tensors (from %.1f MB)\n", o->out,
	       eng_weights_name(o->weights), (double)r->bytes_out / 1e6,
	       (double)r->bytes_in / 1e6);
	if (!r->matrices)
		return;
	printf("%llu matrices, relative error %.4f", (unsigned long long)r->matrices,
	       sqrt(r->error / r->energy));
	if (o->weights != ENG_WEIGHTS_FP8)
		printf(" (absmax scales: %.4f)", sqrt(r->absmax_error / r->energy));
	printf("\n");
}

int main(int argc, char **argv)
{
	static const struct option longs[] = {
		{"model", required_argument, NULL, 'm'},
		{"out", required_argument, NULL, 'o'},
		{"weights", required_argument, NULL, 'w'},
		{"kv-scales", no_argument, NULL, 'k'},
		{"text", required_argument, NULL, 't'},
		{"tokens", required_argument, NULL, 'n'},
		{"shard-mib", required_argument, NULL, 's'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	const char *texts[TEXTS_MAX];
	struct kvq_options o = {.weights = UINT32_MAX,
				.texts = texts,
				.tokens = DEFAULT_TOKENS,
				.shard_bytes = DEFAULT_SHARD,
				.progress = isatty(STDERR_FILENO)};
	/* a second Ctrl-C ends at once and may leave the temporary directory */
	struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_RESETHAND};
	struct kvq_report report;
	struct eng_err err = {{0}};
	int c, r;

	eng_openmp_passive(argv);
	while ((c = getopt_long(argc, argv, "h", longs, NULL)) >= 0) {
		r = c == 'h' ? usage(stdout) : set_option(&o, texts, c, optarg);
		if (r || c == 'h')
			return r;
	}
	if (optind < argc)
		return bad("argument", argv[optind], "options only");
	r = check_options(&o);
	if (r)
		return r;
	sigaction(SIGINT, &sa, NULL);
	sigaction(SIGTERM, &sa, NULL);
	r = kvq_run(&o, &stopped, &report, &err);
	if (r) {
		fprintf(stderr, "kvquant: %s\n", err.text[0] ? err.text : strerror(-r));
		return 1;
	}
	print_report(&o, &report);
	return 0;
}
