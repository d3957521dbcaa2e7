/* SPDX-License-Identifier: Apache-2.0 */
/*
 * assert.h - kv_assert() guards our own invariants; it stays on in production.
 *
 * Never assert on client data: bad client data is an error code. A broken invariant of our own
 * means the state cannot be trusted, so the process ends and recovery audits what is left.
 */
#ifndef BASE_ASSERT_H
#define BASE_ASSERT_H

#include <stdio.h>
#include <stdlib.h>

#define kv_assert(cond)                                                                  \
	do {                                                                             \
		if (__builtin_expect(!(cond), 0))                                        \
			kv_assert_failed(#cond, __FILE__, __LINE__, __func__);           \
	} while (0)

static inline void __attribute__((noreturn, cold))
kv_assert_failed(const char *cond, const char *file, int line, const char *func)
{
	fprintf(stderr, "%s:%d: %s(): invariant broken: %s\n", file, line, func, cond);
	abort();
}

#endif
