/* SPDX-License-Identifier: Apache-2.0 */
/* base/join.h - the end of a thread that calls somebody else's code, which may never return. */
#ifndef BASE_JOIN_H
#define BASE_JOIN_H

#include <errno.h>
#include <pthread.h>
#include <time.h>

/**
 * kv_join_within() - wait for a thread's end for @seconds
 *
 * Return: 0; -ETIMEDOUT: it runs on. What it uses must stay, for as long as the process does.
 */
static inline int kv_join_within(pthread_t thread, unsigned seconds)
{
	struct timespec until;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += seconds;
	return -pthread_clockjoin_np(thread, NULL, CLOCK_MONOTONIC, &until);
}

#endif
