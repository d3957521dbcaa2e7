/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mutant.h - safety rules that a test build can take out, one at a time.
 *
 * Every safety rule (docs/safety.md) has a place in the code of the form
 *
 *	if (!KV_MUTANT(no_quarantine))
 *		... the rule ...
 *
 * In a normal build the macro is the constant false and leaves no code. A build with MUTANTS=1
 * asks the environment variable KV_MUTANT for a name: `make check-mutants` runs, for each line
 * of tests/mutants.txt, the tests that must fail when the rule is gone.
 */
#ifndef BASE_MUTANT_H
#define BASE_MUTANT_H

#ifdef KV_MUTANTS
#include <stdlib.h>
#include <string.h>

static inline int kv_mutant_is(const char *name)
{
	const char *env = getenv("KV_MUTANT");

	return env && !strcmp(env, name);
}

/* Asked once per place, then a plain load. */
#define KV_MUTANT(name)                                                                  \
	__extension__({                                                                  \
		static int state_ = -1;                                                  \
		if (state_ < 0)                                                          \
			state_ = kv_mutant_is(#name);                                    \
		state_;                                                                  \
	})
#else
#define KV_MUTANT(name) 0
#endif

#endif
