/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt.h - the test harness: TAP 13, one forked process and a timeout per case.
 *
 *	KVT_TEST(o29_second_free_is_stale)
 *	{
 *		KVT_EXPECT_EQ(free_page(p), KV_STALE);
 *	}
 *	KVT_MAIN()
 *
 * Cases register themselves in file order. `prog -l` lists them, `prog NAME...` runs some
 * (a trailing * matches a prefix), `prog -f NAME` runs one without fork (for gdb).
 * KVT_SKIP("why") ends a case as skipped; REQUIRE_GPU=1 turns skips that say "no GPU" into
 * failures. KVT_TIMEOUT_S overrides the default of 180 s a case: a limit for
 * what hangs, on the slowest machine.
 */
#ifndef KVT_H
#define KVT_H

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct kvt_case {
	const char *name;
	void (*run)(void);
	int timeout_s;
	struct kvt_case *next;
};

static struct kvt_case *kvt_first;
static struct kvt_case **kvt_last __attribute__((unused)) = &kvt_first;

#define KVT_EXIT_FAIL 1
#define KVT_EXIT_SKIP 77

#define KVT_TEST_T(name_, timeout_)                                               \
	static void kvt_run_##name_(void);                                        \
	static struct kvt_case kvt_case_##name_ = {                               \
		.name = #name_, .run = kvt_run_##name_, .timeout_s = (timeout_)}; \
	__attribute__((constructor)) static void kvt_reg_##name_(void)            \
	{                                                                         \
		*kvt_last = &kvt_case_##name_;                                    \
		kvt_last = &kvt_case_##name_.next;                                \
	}                                                                         \
	static void kvt_run_##name_(void)

#define KVT_TEST(name_) KVT_TEST_T(name_, 180)

#define KVT_FAIL(...)                                    \
	do {                                             \
		printf("# %s:%d: ", __FILE__, __LINE__); \
		printf(__VA_ARGS__);                     \
		printf("\n");                            \
		fflush(stdout);                          \
		_exit(KVT_EXIT_FAIL);                    \
	} while (0)

#define KVT_SKIP(...)                 \
	do {                          \
		printf("# SKIP ");    \
		printf(__VA_ARGS__);  \
		printf("\n");         \
		fflush(stdout);       \
		_exit(KVT_EXIT_SKIP); \
	} while (0)

#define KVT_NOTE(...)                \
	do {                         \
		printf("# ");        \
		printf(__VA_ARGS__); \
		printf("\n");        \
		fflush(stdout);      \
	} while (0)

#define KVT_EXPECT(cond)                                 \
	do {                                             \
		if (!(cond))                             \
			KVT_FAIL("expected: %s", #cond); \
	} while (0)

/* Look once a ms until somebody else has made @cond true. They may make it false again: what
 * counts is the look that found it true. */
#define expect_within(cond, ms)                                             \
	do {                                                                \
		bool is_ = (cond);                                          \
		for (int i_ = 0; !is_ && i_ < (ms); i_++) {                 \
			usleep(1000);                                       \
			is_ = (cond);                                       \
		}                                                           \
		if (!is_)                                                   \
			KVT_FAIL("expected within %d ms: %s", (ms), #cond); \
	} while (0)

#define KVT_EXPECT_EQ(a, b)                                                         \
	do {                                                                        \
		long long a_ = (long long)(a), b_ = (long long)(b);                 \
		if (a_ != b_)                                                       \
			KVT_FAIL("%s is %lld, expected %s = %lld", #a, a_, #b, b_); \
	} while (0)

#define KVT_EXPECT_LE(a, b)                                                    \
	do {                                                                   \
		double a_ = (double)(a), b_ = (double)(b);                     \
		if (!(a_ <= b_))                                               \
			KVT_FAIL("%s is %g, expected at most %g", #a, a_, b_); \
	} while (0)

#define KVT_EXPECT_STR(a, b)                                                   \
	do {                                                                   \
		const char *a_ = (a), *b_ = (b);                               \
		if (strcmp(a_, b_))                                            \
			KVT_FAIL("%s is \"%s\", expected \"%s\"", #a, a_, b_); \
	} while (0)

/* @b is a part of @a: for error messages that must name a field and a value. */
#define KVT_EXPECT_HAS(a, b)                                                \
	do {                                                                \
		const char *a_ = (a), *b_ = (b);                            \
		if (!strstr(a_, b_))                                        \
			KVT_FAIL("%s is \"%s\", lacks \"%s\"", #a, a_, b_); \
	} while (0)

/* Seeded by KVT_SEED or the clock; printed, so that a failure can be repeated. */
static uint64_t kvt_seed_state;

static inline uint64_t kvt_rand64(void)
{
	uint64_t z = (kvt_seed_state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static inline uint32_t kvt_rand_below(uint32_t n)
{
	return (uint32_t)((kvt_rand64() >> 32) * n >> 32);
}

/* uniform in [-1, 1) */
static inline float kvt_randf(void)
{
	return (float)((double)(kvt_rand64() >> 11) * 0x1p-52 - 1.0);
}

/* standard normal (Box-Muller) */
static inline float kvt_randn(void)
{
	double u = ((double)(kvt_rand64() >> 11) + 1.0) * 0x1p-53;
	double v = (double)(kvt_rand64() >> 11) * 0x1p-53;

	return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static inline void kvt_seed_init(void)
{
	const char *env = getenv("KVT_SEED");

	kvt_seed_state =
		env ? strtoull(env, NULL, 0) : (uint64_t)time(NULL) * 2654435761u;
	printf("# seed %llu\n", (unsigned long long)kvt_seed_state);
}

static int kvt_match(const struct kvt_case *c, int argc, char **argv)
{
	for (int i = 0; i < argc; i++) {
		size_t n = strlen(argv[i]);

		if (!strcmp(argv[i], c->name))
			return 1;
		if (n && argv[i][n - 1] == '*' && !strncmp(argv[i], c->name, n - 1))
			return 1;
	}
	return argc == 0;
}

/* The child leads its own process group: a timeout takes its children along. */
static int kvt_run_forked(const struct kvt_case *c, int *ret_signal)
{
	const char *env = getenv("KVT_TIMEOUT_S");
	int timeout_s = env ? atoi(env) : c->timeout_s;
	int status, waited_ms = 0;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0)
		return KVT_EXIT_FAIL;
	if (pid == 0) {
		setpgid(0, 0);
		c->run();
		fflush(stdout);
		_exit(0);
	}
	setpgid(pid, pid);
	*ret_signal = 0;
	while (waitpid(pid, &status, WNOHANG) == 0) {
		struct timespec ts = {0, waited_ms < 50 ? 1000000 : 10000000};

		nanosleep(&ts, NULL);
		waited_ms += waited_ms < 50 ? 1 : 10;
		if (waited_ms > timeout_s * 1000) {
			kill(-pid, SIGKILL);
			waitpid(pid, &status, 0);
			printf("# timeout after %d s\n", timeout_s);
			return KVT_EXIT_FAIL;
		}
	}
	kill(-pid, SIGKILL);
	if (WIFSIGNALED(status)) {
		*ret_signal = WTERMSIG(status);
		return KVT_EXIT_FAIL;
	}
	return WEXITSTATUS(status);
}

/* unused in a common.c, which takes the rest of this header */
static int __attribute__((unused)) kvt_main(int argc, char **argv)
{
	int nr = 0, i = 0, failed = 0, no_fork = 0, require_gpu;
	struct kvt_case *c;

	require_gpu = getenv("REQUIRE_GPU") && !strcmp(getenv("REQUIRE_GPU"), "1");
	if (argc > 1 && !strcmp(argv[1], "-l")) {
		for (c = kvt_first; c; c = c->next)
			printf("%s\n", c->name);
		return 0;
	}
	if (argc > 1 && !strcmp(argv[1], "-f"))
		no_fork = 1;
	argc -= 1 + no_fork;
	argv += 1 + no_fork;
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (c = kvt_first; c; c = c->next)
		nr += kvt_match(c, argc, argv);
	printf("TAP version 13\n1..%d\n", nr);
	kvt_seed_init();
	for (c = kvt_first; c; c = c->next) {
		int rc, sig = 0;

		if (!kvt_match(c, argc, argv))
			continue;
		i++;
		if (no_fork) {
			c->run();
			rc = 0;
		} else {
			rc = kvt_run_forked(c, &sig);
		}
		if (sig)
			printf("# killed by signal %d (%s)\n", sig, strsignal(sig));
		if (rc == KVT_EXIT_SKIP && require_gpu) {
			printf("not ok %d - %s # skipped under REQUIRE_GPU=1\n", i,
			       c->name);
			failed++;
		} else if (rc == KVT_EXIT_SKIP) {
			printf("ok %d - %s # SKIP\n", i, c->name);
		} else {
			printf("%sok %d - %s\n", rc ? "not " : "", i, c->name);
			failed += rc != 0;
		}
	}
	return failed ? 1 : 0;
}

#define KVT_MAIN()                           \
	int main(int argc, char **argv)      \
	{                                    \
		return kvt_main(argc, argv); \
	}

#endif /* KVT_H */
