/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safety.h - what the commands about the safety protocol share: where they run, and how a
 * result says so.
 *
 * Each command starts a private kvmd and engine processes of its own. The command's own
 * process touches no CUDA before its children are there: a context does not survive fork.
 */
#ifndef KVB_SAFETY_H
#define KVB_SAFETY_H

#include <stdbool.h>
#include "base/util.h"
#include "engine/private.h"
#include "engine/run/mem.h"
#include "kvclient.h"

struct cJSON;

/**
 * enum kvb_backend - whose memory, and who computes
 * @KVB_HOST: host memory, the C kernels
 * @KVB_FAKE: the cuda backend over the driver named by KV_CUDA_LIB, the C kernels
 * @KVB_CUDA: a GPU and its kernels
 */
enum kvb_backend { KVB_HOST, KVB_FAKE, KVB_CUDA };

/**
 * kvb_backend_parse() - "auto", "host" or "cuda"
 *
 * auto: cuda where there is a GPU's device file or a driver named by KV_CUDA_LIB.
 * Return: enum kvb_backend; -EINVAL after a line on stderr.
 */
int kvb_backend_parse(const char *text);

const char *kvb_backend_str(enum kvb_backend b);

/**
 * kvb_kvmd_start() - a private kvmd of that backend
 * @bytes: most memory for pages
 * @args: more arguments, NULL-terminated (at most 6), or NULL
 *
 * Return: 0, or -errno after a line on stderr.
 */
int kvb_kvmd_start(enum kvb_backend b, u64 bytes, const char *const *args,
		   struct eng_private_kvmd *ret);

/**
 * kvb_device_open() - in an engine process: its memory and its context
 * @ret: owner; ret->ops->close()
 *
 * Return: 0, or -errno after a line on stderr.
 */
int kvb_device_open(enum kvb_backend b, struct eng_mem **ret);

/** kvb_layout() - small pages of 16 KiB that differ by @model */
struct kv_layout kvb_layout(u32 model);

/** kvb_said() - print what a kvc_* call that failed said. Return: @r */
int kvb_said(const char *call, int r);

/**
 * kvb_json_where() - add date, commit, backend, gpu and driver
 *
 * Calls cuInit on KVB_CUDA: no process may be forked afterwards.
 */
void kvb_json_where(struct cJSON *o, enum kvb_backend b);

/** kvb_number() - an option's value; suffixes k and M. Return: 0; 2 after a line on
 * stderr */
int kvb_number(const char *name, const char *text, u64 lo, u64 hi, u64 *ret);

/* The commands. Exit codes as main.c says. */
int kvb_race(int argc, char **argv);
int kvb_kill(int argc, char **argv);
int kvb_attach(int argc, char **argv);
int kvb_engines(int argc, char **argv);

#endif
