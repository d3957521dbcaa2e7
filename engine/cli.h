/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.h - command line of kv-engine: options shared by its commands, and what they open.
 *
 * Exit codes: 0 ok, 1 failed, 2 usage, 3 kvmd not running, 6 refused (quota, full,
 * stale).
 */
#ifndef ENG_CLI_H
#define ENG_CLI_H

#include <signal.h>
#include "engine/private.h"
#include "engine/run/engine.h"

#define ENG_PROMPTS_MAX 64u
#define ENG_BATCHES_MAX 16u

enum eng_exit {
	ENG_EXIT_OK = 0,
	ENG_EXIT_FAIL = 1,
	ENG_EXIT_USAGE = 2,
	ENG_EXIT_NO_KVMD = 3,
	ENG_EXIT_REFUSED = 6
};

/**
 * struct eng_cli - parsed options; strings belong to argv
 * @command: "run", "serve", "eval" or "bench"
 * @check: check mode of the private kvmd ("batch", "off", "strict"), or NULL
 * @kvmd_args: more arguments of the private kvmd
 */
struct eng_cli {
	const char *command;
	const char *model;
	const char *socket;
	const char *check;
	const char *host_bytes;
	const char *listen;
	const char *unix_path;
	const char *text;
	const char *scale_text;
	const char *nll_out;
	const char *prompts[ENG_PROMPTS_MAX];
	u32 nr_prompts;
	u32 max_tokens;
	u32 weights;
	u32 kv;
	u32 attention; /* enum eng_attention */
	u32 batch;
	u32 chunk;
	u32 length;
	u32 tokens;
	u32 batches[ENG_BATCHES_MAX];
	u32 nr_batches;
	u32 device; /* enum eng_device; valid unless device_auto */
	bool device_auto;
	bool has_gpu;
	const char *gpu; /* as given */
	u8 gpu_uuid[16];
	float temperature;
	float top_p;
	u64 seed;
	int inject; /* enum eng_inject_kind; 0 = none */
	bool json;
	bool ignore_eos;
	bool no_prefix;
	bool no_seal;
};

/**
 * struct eng_host - a loaded model, its engine, and the private kvmd if there is one
 */
struct eng_host {
	struct eng_model *m;
	struct eng_engine *e;
	struct eng_private_kvmd own;
	bool has_own;
	u32 device;		 /* enum eng_device the engine runs on */
	float *scales;		 /* owner; computed static KV scales, or NULL */
	const char *scales_from; /* "none", "model" or "text" */
};

/** eng_cli_parse() - 0, or -EINVAL after one line on stderr; 1: help was printed */
int eng_cli_parse(int argc, char **argv, struct eng_cli *ret);

/** eng_host_open() - load the model, find or start kvmd, create the engine; one line on
 * stderr when it fails. Return: enum eng_exit */
int eng_host_open(const struct eng_cli *cli, struct eng_host *ret);
void eng_host_close(struct eng_host *h);

/** eng_host_weights() - how the loaded matrices are stored: "bf16", "int4-g32", ... */
const char *eng_host_weights(const struct eng_host *h, char *buf, size_t bytes);

/** eng_read_file() - a whole file, malloc'd and NUL-terminated; -errno after a line on
 * stderr */
int eng_read_file(const char *path, char **ret_text, size_t *ret_bytes);

/**
 * eng_stream_ids() - NUL-separated documents, each encoded alone, an end token after each
 * @nr_max: stop when there are this many; 0 = all
 * @ret_ids: malloc'd
 */
int eng_stream_ids(const struct eng_model *m, const char *text, size_t nr_bytes,
		   size_t nr_max, u32 **ret_ids, size_t *ret_nr);

/* Set by SIGINT and SIGTERM; the handler also wakes the engine of eng_host_open(). */
extern volatile sig_atomic_t eng_stop_signal;

int eng_cmd_run(const struct eng_cli *cli);
int eng_cmd_serve(const struct eng_cli *cli);
int eng_cmd_eval(const struct eng_cli *cli);
int eng_cmd_bench(const struct eng_cli *cli);

#endif /* ENG_CLI_H */
