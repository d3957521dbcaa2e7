/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.c - what every command of kv-engine opens: model, device, kvmd, engine (see cli.h).
 * Main thread only; the signal handler sets a flag and wakes the engine's loop.
 */
#include "engine/cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/run/amax.h"

#define SCALE_TOKENS_MAX 16384u

volatile sig_atomic_t eng_stop_signal;
static struct eng_engine *signal_engine;

static void on_signal(int sig)
{
	eng_stop_signal = sig;
	if (signal_engine)
		eng_engine_wake(signal_engine);
}

static int start_own_kvmd(const struct eng_cli *cli, struct eng_host *h)
{
	bool cuda = h->device == ENG_DEVICE_CUDA;
	const char *args[12];
	char error[512];
	int n = 0, rc;

	args[n++] = "--backend";
	args[n++] = cuda ? "cuda" : "host";
	if (cuda && cli->has_gpu) {
		args[n++] = "--gpu";
		args[n++] = cli->gpu;
	}
	if (cli->check) {
		args[n++] = "--check";
		args[n++] = cli->check;
	}
	if (cli->host_bytes) {
		args[n++] = "--host-bytes";
		args[n++] = cli->host_bytes;
	}
	if (cli->kv == ENG_KV_F32)
		args[n++] = "--test-layouts";
	args[n] = NULL;
	rc = eng_private_kvmd_start(args, &h->own, error, sizeof(error));
	if (rc) {
		fprintf(stderr, "kv-engine: private kvmd: %s\n", error);
		return ENG_EXIT_NO_KVMD;
	}
	h->has_own = true;
	return ENG_EXIT_OK;
}

/* fp8_s without scales in the model: compute them from a text first. */
static int compute_scales(const struct eng_cli *cli, struct eng_host *h,
			  const char *socket)
{
	const char *path = cli->scale_text ? cli->scale_text : cli->text;
	u32 nr = eng_kv_nr_scales(h->m), *ids = NULL;
	/* not more text than is evaluated */
	size_t nr_max =
		cli->tokens ? KV_MIN(cli->tokens, SCALE_TOKENS_MAX) : SCALE_TOKENS_MAX;
	struct eng_err err = {{0}};
	size_t bytes, nr_ids;
	char *text;
	int rc;

	if (!path) {
		fprintf(stderr,
			"kv-engine: --kv fp8_s: the model has no KV scales; give "
			"--scale-text FILE, or write them with kvquant --kv-scales\n");
		return ENG_EXIT_FAIL;
	}
	if (eng_read_file(path, &text, &bytes))
		return ENG_EXIT_FAIL;
	h->scales = calloc(nr, sizeof(*h->scales));
	rc = h->scales ? eng_stream_ids(h->m, text, bytes, nr_max, &ids, &nr_ids)
		       : -ENOMEM;
	if (!rc)
		/* values are looked at on the host, on pages of a host kvmd */
		rc = eng_kv_amax(h->m, h->device == ENG_DEVICE_HOST ? socket : NULL, ids,
				 KV_MIN(nr_ids, nr_max), h->scales, &err);
	if (!rc)
		eng_kv_scales_from_amax(h->scales, nr);
	else
		fprintf(stderr, "kv-engine: KV scales from %s: %s\n", path,
			err.text[0] ? err.text : strerror(-rc));
	free(ids);
	free(text);
	h->scales_from = "text";
	return rc ? ENG_EXIT_FAIL : ENG_EXIT_OK;
}

/* A bar on a terminal while weights go to the GPU. */
static void show_progress(void *arg, u64 done, u64 total)
{
	static const char bar[] = "########################################";
	int *percent = arg, now = (int)(done * 100 / KV_MAX(total, 1ull));

	if (now == *percent)
		return;
	*percent = now;
	fprintf(stderr, "\rweights to the GPU [%-40.*s] %3d %%", now * 40 / 100, bar,
		now);
}

static int create_engine(const struct eng_cli *cli, struct eng_host *h,
			 const char *socket)
{
	int percent = -1;
	struct eng_options opt = {
		.size_bytes = sizeof(opt),
		.kv = cli->kv,
		.attention = cli->attention,
		.socket_path = socket,
		.batch_max = cli->batch,
		.chunk_tokens = cli->chunk,
		.length_max = cli->length,
		.kv_scales = h->scales,
		.no_prefix = cli->no_prefix,
		.no_seal = cli->no_seal,
		.inject = cli->inject != 0,
		.device = h->device,
		.gpu_uuid = cli->has_gpu ? cli->gpu_uuid : NULL,
		.progress = isatty(2) ? show_progress : NULL,
		.progress_arg = &percent,
	};
	struct eng_err err = {{0}};
	int rc = eng_engine_create(h->m, &opt, &h->e, &err);

	if (rc == -ENODEV && cli->device_auto && h->device == ENG_DEVICE_CUDA) {
		/* kvmd serves the host's memory, or another GPU than we see */
		opt.device = h->device = ENG_DEVICE_HOST;
		rc = eng_engine_create(h->m, &opt, &h->e, &err);
	}

	if (percent >= 0)
		fputc('\n', stderr);
	if (!rc)
		return ENG_EXIT_OK;
	fprintf(stderr, "kv-engine: %s\n", err.text);
	if (rc == -ENOENT || rc == -ECONNREFUSED)
		return ENG_EXIT_NO_KVMD;
	return ENG_EXIT_FAIL;
}

/* auto: a GPU if there is one and nothing asks for the host. */
static u32 pick_device(const struct eng_cli *cli)
{
	if (!cli->device_auto)
		return cli->device;
	if (cli->host_bytes || cli->kv == ENG_KV_F32)
		return ENG_DEVICE_HOST;
	return kvk_cuda_ops() ? ENG_DEVICE_CUDA : ENG_DEVICE_HOST;
}

int eng_host_open(const struct eng_cli *cli, struct eng_host *ret)
{
	struct eng_model_options mo = {.weights = cli->weights};
	struct eng_host h = {.own = {.pid = -1}, .scales_from = "none"};
	struct sigaction sa = {.sa_handler = on_signal};
	struct eng_err err = {{0}};
	const char *socket = cli->socket;
	int rc;

	sigaction(SIGINT, &sa, NULL);
	sigaction(SIGTERM, &sa, NULL);
	if (eng_model_load(cli->model, &mo, &h.m, &err)) {
		fprintf(stderr, "kv-engine: %s\n", err.text);
		return ENG_EXIT_FAIL;
	}
	h.device = pick_device(cli);
	if (!socket && strcmp(cli->command, "serve")) {
		rc = start_own_kvmd(cli, &h);
		if (rc)
			goto close;
		socket = h.own.socket_path;
	}
	if (cli->kv == ENG_KV_FP8_S) {
		h.scales_from = "model";
		rc = h.m->kv_scales ? ENG_EXIT_OK : compute_scales(cli, &h, socket);
		if (rc)
			goto close;
	}
	rc = create_engine(cli, &h, socket);
	if (rc)
		goto close;
	signal_engine = h.e;
	*ret = h;
	return ENG_EXIT_OK;
close:
	eng_host_close(&h);
	return rc;
}

const char *eng_host_weights(const struct eng_host *h, char *buf, size_t bytes)
{
	const struct eng_config *c = &h->m->config;

	if (h->m->weights != ENG_WEIGHTS_AS_IS || c->quant == ENG_QUANT_NONE)
		snprintf(buf, bytes, "%s", eng_weights_name(h->m->weights));
	else if (c->quant == ENG_QUANT_INT4)
		snprintf(buf, bytes, "int4-g%u", c->quant_group);
	else
		snprintf(buf, bytes, "fp8");
	return buf;
}

void eng_host_close(struct eng_host *h)
{
	signal_engine = NULL;
	eng_engine_destroy(h->e);
	if (h->has_own)
		eng_private_kvmd_stop(&h->own);
	eng_model_free(h->m);
	free(h->scales);
}
