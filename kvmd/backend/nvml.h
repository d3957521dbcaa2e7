/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/nvml.h - which processes the driver knows on a GPU (design 5, P8).
 *
 * NVML takes milliseconds and may hang with a sick driver, so a thread of its own asks,
 * and only when there is something to ask. The loop asks, gets a number, and is told by an
 * eventfd; an answer with that number or a later one was begun after the question. All
 * calls here are the loop thread's.
 */
#ifndef KVD_BACKEND_NVML_H
#define KVD_BACKEND_NVML_H

#include <stdbool.h>

#include "base/util.h"

struct kvd_nvml;

/**
 * struct kvd_nvml_answer - the process list at one time
 * @number: of the question it answers
 * @result: 0; -errno, and nothing is known: neither that a pid is there nor that it is not
 * @error: why
 * @pids: [nr_pids], of compute processes; the first @nr_own are not clients of MPS
 */
struct kvd_nvml_answer {
	u64 number;
	int result;
	char error[160];
	u32 nr_pids;
	u32 nr_own;
	u32 *pids;
};

/**
 * kvd_nvml_create() - nothing is loaded before the first question
 * @gpu: "GPU-<uuid>"
 *
 * Return: 0; -ENOMEM; -EMFILE.
 */
int kvd_nvml_create(const char *gpu, struct kvd_nvml **ret_nvml);

/** kvd_nvml_destroy() - or NULL; waits for a question under way, 2 s at most: then the thread and
 * what it uses stay until the process ends */
void kvd_nvml_destroy(struct kvd_nvml *nvml);

/** kvd_nvml_event_fd() - readable when an answer is there; kvd_nvml_take() drains it */
int kvd_nvml_event_fd(const struct kvd_nvml *nvml);

/** kvd_nvml_ask() - Return: the question's number; 0: no thread could be started */
u64 kvd_nvml_ask(struct kvd_nvml *nvml);

/** kvd_nvml_take() - move the latest answer to @ret, whose old list is freed. Return:
 * false: nothing new */
bool kvd_nvml_take(struct kvd_nvml *nvml, struct kvd_nvml_answer *ret);

/** kvd_nvml_lists() - is @pid in the answer? @ret_mps: as a client of MPS */
bool kvd_nvml_lists(const struct kvd_nvml_answer *answer, u32 pid, bool *ret_mps);

#endif
