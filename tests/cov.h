/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tests/cov.h - included first in every file of a COV=1 build: a process that ends by
 * _exit(), as the cases of a test do, writes its branch counters before.
 */
#ifndef TESTS_COV_H
#define TESTS_COV_H

#include <unistd.h>

void __gcov_dump(void);

__attribute__((noreturn)) static inline void cov_exit(int status)
{
	__gcov_dump();
	_exit(status);
}

/* A call, so that a status that has yet to run something runs it before. */
#define _exit(status) cov_exit(status)

#endif
