/* SPDX-License-Identifier: Apache-2.0 */
/*
 * heap.c - the core's heap and its two ways out: killed at a store, or an invariant of
 * its own broken. The program is linked with --wrap for the functions below.
 *
 * A killed core leaves its memory in the middle of anything; what it had allocated is on
 * one list and is freed. abort(), and signals that a broken core may raise, end the
 * schedule, not the program.
 */
#include "tests/sim/world/world.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvmd/dbg/fault.h"

/* In front of every block: 32 bytes keep the alignment of malloc(). */
struct block {
	struct list_node node;
	u64 tracked;
	u64 pad;
};

static struct list_node blocks = {&blocks, &blocks};
static u32 nr_blocks;
static sigjmp_buf out;
static bool guarded;
static char said[256];

void *__real_malloc(size_t n);
void *__real_calloc(size_t nr, size_t size);
void __real_free(void *p);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t nr, size_t size);
void __wrap_free(void *p);
void __wrap_abort(void) __attribute__((noreturn));
void __wrap_kvd_crash_now(void);

static void *block_note(struct block *b)
{
	if (!b)
		return NULL;
	b->tracked = sim.in_core;
	if (sim.in_core) {
		list_add_tail(&blocks, &b->node);
		nr_blocks++;
	}
	return b + 1;
}

void *__wrap_malloc(size_t n)
{
	if (sim.in_core && sim_hook_fails(SIM_HOOK_HEAP))
		return NULL;
	return block_note(__real_malloc(n + sizeof(struct block)));
}

void *__wrap_calloc(size_t nr, size_t size)
{
	if (sim.in_core && sim_hook_fails(SIM_HOOK_HEAP))
		return NULL;
	return block_note(__real_calloc(1, nr * size + sizeof(struct block)));
}

void __wrap_free(void *p)
{
	struct block *b;

	if (!p)
		return;
	b = (struct block *)p - 1;
	if (b->tracked) {
		list_del(&b->node);
		nr_blocks--;
	}
	__real_free(b);
}

void sim_heap_drop(void)
{
	struct block *b, *tmp;

	list_for_each_entry_safe (b, tmp, &blocks, node)
		__wrap_free(b + 1);
}

u32 sim_heap_blocks(void)
{
	return nr_blocks;
}

void sim_core_enter(void)
{
	SIM_EXPECT(sim.up && !sim.in_core);
	sim.in_core = true;
}

void sim_core_leave(void)
{
	sim.in_core = false;
}

void __wrap_kvd_crash_now(void)
{
	if (sim.peek.armed) {
		sim_peek_now();
		return;
	}
	sim.stats.store_kills++;
	siglongjmp(out, SIM_KILLED);
}

static void fail_now(void)
{
	if (!guarded) {
		fprintf(stderr, "%s\n", sim.failure);
		_exit(1);
	}
	siglongjmp(out, SIM_FAILED);
}

void __wrap_abort(void)
{
	char *end;

	fflush(stderr);
	end = strchr(said, '\n');
	if (end)
		*end = 0;
	snprintf(sim.failure, sizeof(sim.failure), "%s", said);
	fail_now();
	_exit(1);
}

void sim_fail(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(sim.failure, sizeof(sim.failure), fmt, ap);
	va_end(ap);
	fail_now();
	_exit(1);
}

static void on_signal(int sig)
{
	snprintf(sim.failure, sizeof(sim.failure), "signal %d: %s", sig, strsignal(sig));
	fail_now();
}

static void signals_catch(void)
{
	struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_NODEFER};
	static bool done;

	if (done)
		return;
	done = true;
	sigaction(SIGALRM, &sa, NULL);
#ifndef KV_SANITIZED
	sigaction(SIGSEGV, &sa, NULL);
	sigaction(SIGBUS, &sa, NULL);
	sigaction(SIGFPE, &sa, NULL);
#endif
}

/* What kv_assert() prints is what the schedule failed with. */
static FILE *hear(void)
{
	static FILE *f;
	FILE *was = stderr;

	if (!f) {
		f = fmemopen(said, sizeof(said), "w");
		setvbuf(f, NULL, _IONBF, 0);
	}
	if (f) {
		memset(said, 0, sizeof(said));
		rewind(f);
		stderr = f;
	}
	return was;
}

enum sim_end sim_guard(void (*fn)(const void *arg), const void *arg)
{
	FILE *was;
	int end;

	signals_catch();
	was = hear();
	guarded = true;
	end = sigsetjmp(out, 0);
	if (!end)
		fn(arg);
	guarded = false;
	sim.in_core = false;
	stderr = was;
	return (enum sim_end)end;
}
