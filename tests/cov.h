/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tests/cov.h - included first in every file of a COV=1 build: a process that ends by
 * _exit(), as the cases of a test do, writes its branch counters before.
 */
#ifndef TESTS_COV_H
#define TESTS_COV_H

#include <unistd.h>

void __gcov_dump(void);

#define _exit(status) (__gcov_dump(), (_exit)(status))

#endif
