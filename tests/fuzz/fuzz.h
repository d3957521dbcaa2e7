/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - what a fuzz target is, and how it reads its input.
 *
 * Each tests/fuzz/NAME.c is one target. Built as usual it is a test that replays
 * tests/fuzz/corpus/NAME (common.c has the main); built with FUZZ=1 (clang) it is a
 * libFuzzer program. A target aborts by FUZZ_CHECK() when a promise is broken.
 */
#ifndef TESTS_FUZZ_H
#define TESTS_FUZZ_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"

/** LLVMFuzzerTestOneInput() - one run; everything it makes is gone when it returns */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#define FUZZ_CHECK(cond)                                                           \
	do {                                                                       \
		if (!(cond)) {                                                     \
			fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, \
				#cond);                                            \
			abort();                                                   \
		}                                                                  \
	} while (0)

/** struct fuzz_in - the input, read from the front; zeros when it is used up */
struct fuzz_in {
	const uint8_t *p;
	size_t left;
};

static inline void fuzz_take(struct fuzz_in *in, void *ret, size_t bytes)
{
	size_t n = KV_MIN(bytes, in->left);

	memset(ret, 0, bytes);
	memcpy(ret, in->p, n);
	in->p += n;
	in->left -= n;
}

static inline u8 fuzz_u8(struct fuzz_in *in)
{
	u8 v;

	fuzz_take(in, &v, sizeof(v));
	return v;
}

static inline u32 fuzz_u32(struct fuzz_in *in)
{
	u32 v;

	fuzz_take(in, &v, sizeof(v));
	return v;
}

/** fuzz_tmp() - where a target may make files; a run that crashes leaves them, so that
 * tools/check-fuzz says where */
static inline const char *fuzz_tmp(void)
{
	const char *dir = getenv("FUZZ_TMP");

	if (dir)
		return dir;
	return access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
}

/** fuzz_file() - the bytes as a file without a name; Return: its path, valid until the
 * next call */
const char *fuzz_file(const uint8_t *data, size_t bytes);

#endif
