/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/tier/common.h - a scratch directory, and whole files in and out of it. */
#ifndef TESTS_UNIT_TIER_COMMON_H
#define TESTS_UNIT_TIER_COMMON_H

#include "base/util.h"
#include "tests/kvt.h"

/** scratch_begin(), scratch_end() - around kvt_main(): nothing stays behind. @base: where, if
 * that can be written; else /tmp */
void scratch_begin(const char *base);
void scratch_end(void);

#define TIER_MAIN(base)                   \
	int main(int argc, char **argv)   \
	{                                 \
		int r;                    \
                                          \
		scratch_begin(base);      \
		r = kvt_main(argc, argv); \
		scratch_end();            \
		return r;                 \
	}

/** scratch() - path of @name in this case's own directory */
const char *scratch(const char *name);

/** scratch_fd() - the directory */
int scratch_fd(void);

/** file_read() - a file's bytes, malloc'ed; NULL: there is none */
u8 *file_read(const char *name, size_t *ret_bytes);
void file_write(const char *name, const void *data, size_t bytes);

#endif
