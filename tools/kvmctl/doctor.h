/* SPDX-License-Identifier: Apache-2.0 */
/* doctor.h - shared by doctor.c and doctor_*.c: findings, and probes in other processes. */
#ifndef KVMCTL_DOCTOR_H
#define KVMCTL_DOCTOR_H

#include <sys/types.h>

#include "base/cuda_syms.h"
#include "tools/kvmctl/kvmctl.h"

enum doc_state { DOC_OK, DOC_SKIP, DOC_WARN, DOC_FAIL };

/**
 * struct doctor - one examination
 * @findings: JSON array, in order
 * @devices: JSON array of GPUs
 * @nr_bad: warn and fail
 * @pid: the daemon's, or 0: limits are then this process's own
 * @gpu_bytes: of the largest GPU
 * @spawner: socket of the process that starts probes; -1 = none
 */
struct doctor {
	cJSON *findings;
	cJSON *devices;
	int nr_bad;
	pid_t pid;
	u64 gpu_bytes;
	int spawner;
	pid_t spawner_pid;
};

/**
 * doc_say() - one finding
 * @check: its name, stable
 * @todo: what to do about it; "" when there is nothing to do
 */
void doc_say(struct doctor *doc, enum doc_state state, const char *check,
	     const char *todo, const char *fmt, ...)
	__attribute__((format(printf, 5, 6)));

/** doc_host() - io_uring, memlock, nofile, memcg */
void doc_host(struct doctor *doc);

/** doc_gpu() - driver, devices, NVML, and what each device does */
void doc_gpu(struct doctor *doc);

/* doctor_probe.c: each probe runs in a process of its own, because a CUDA process must
 * not fork and kvmd itself has no context. */

#define DOC_PROBE_BYTES (64ull << 20)

enum doc_probe { DOC_WRITE, DOC_READ, DOC_ZERO, DOC_LEGACY };

/**
 * struct doc_answer - what a probe found
 * @result: 0 as it should be; 1 bytes differ; -errno
 * @listed: NVML lists the probe's own process: 1 yes, 0 no, -1 cannot say
 */
struct doc_answer {
	int result;
	int listed;
	u64 nr_bad;
	char text[160];
};

/** doc_spawner_start() - before cuInit in this process. Return: 0; -errno */
int doc_spawner_start(struct doctor *doc);
void doc_spawner_stop(struct doctor *doc);

/**
 * doc_probe_run() - run one probe on device @ordinal
 * @fd: exported extent of DOC_PROBE_BYTES; DOC_LEGACY: -1
 *
 * Return: 0 and the answer, -ETIMEDOUT or -EIO with a text in it.
 */
int doc_probe_run(struct doctor *doc, enum doc_probe kind, int ordinal, int fd,
		  struct doc_answer *ret);

#endif
