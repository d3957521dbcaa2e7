/* SPDX-License-Identifier: Apache-2.0 */
/* fake/cuda_fake.h - shared by the parts of the fake driver. */
#ifndef FAKE_CUDA_FAKE_H
#define FAKE_CUDA_FAKE_H

#include <stdbool.h>

#include "base/cuda_syms.h"
#include "tests/fake/fake.h"

#define API	  __attribute__((visibility("default")))
#define OK	  0
#define INVALID	  1
#define NO_MEMORY 2
#define NOT_INIT  3
#define NO_DEVICE 100

/* May this call succeed? FAKE_CUDA_FAIL and cuInit decide */
kv_cu_result fake_cuda_may(const char *entry, int *calls);

/* Is a context current in this thread? */
bool fake_cuda_context(void);

#define MAYBE_FAIL(entry)                                        \
	do {                                                     \
		static int calls_;                               \
		kv_cu_result r_ = fake_cuda_may(entry, &calls_); \
		if (r_)                                          \
			return r_;                               \
	} while (0)

#define NEED_CONTEXT()                    \
	do {                              \
		if (!fake_cuda_context()) \
			return 201;       \
	} while (0)

#endif
