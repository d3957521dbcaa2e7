/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h - monotonic time. Code in kvmd/mm and kvmd/own gets its time injected instead. */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

#include <time.h>
#include "util.h"

#define KV_NSEC_PER_USEC 1000ull
#define KV_NSEC_PER_MSEC 1000000ull
#define KV_NSEC_PER_SEC	 1000000000ull

static inline u64 kv_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (u64)ts.tv_sec * KV_NSEC_PER_SEC + (u64)ts.tv_nsec;
}

#endif
