/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emul.cc - runs CUDA kernels on the CPU, one thread at a time. x86-64.
 *
 * A launch runs its blocks one after another. The threads of a block are fibers: each has a
 * stack and runs until it ends or waits at a barrier of its block or warp; then the next one
 * runs, in the order of their numbers. A barrier opens when all fibers of the block (of the
 * warp) that have not ended are at it; a warp's exchange is a barrier before and one after.
 * When nobody can run and somebody has not ended, the program aborts: such a kernel would
 * hang, or its result be undefined, on a device.
 *
 * What it shows is the arithmetic, the addresses and the tests before them; deterministic.
 * What it cannot show: races between barriers, memory order, other orders of the blocks,
 * launches that overlap, limits of registers or shared memory, and speed.
 *
 * A launch has ended when emul_launch() returns, whatever its stream; while a stream is
 * captured a launch is noted down instead, and runs with the graph. Not for two threads.
 */
#include <stdio.h>
#include <sys/mman.h>
#include <vector>
#include "cuda_runtime.h"

emul_index threadIdx, blockIdx;
dim3 blockDim, gridDim;

enum { WARP = 32, THREADS_MAX = 1024, STACK_BYTES = 256 << 10 };

struct barrier {
	unsigned nr_live;    /* fibers that have not ended */
	unsigned nr_waiting; /* of them, at the barrier */
	unsigned opened;     /* how often */
};

struct fiber {
	void *sp;
	bool ended;
	const struct barrier *at; /* NULL: may run */
	unsigned opened;	  /* of @at, when it came there */
};

static struct fiber fibers[THREADS_MAX];
static struct barrier block_barrier, warp_barrier[THREADS_MAX / WARP];
static uint64_t lanes[THREADS_MAX / WARP][WARP]; /* values of an exchange */
static unsigned running;			 /* which fiber */
static void *scheduler_sp;
static char *stacks;
static const std::function<void()> *thread_body;

/* Keeps what a call keeps on the stack, leaves the stack in *@save and goes on with @load. */
extern "C" void emul_switch(void **save, void *load);
asm(".text\n"
    ".globl emul_switch\n"
    "emul_switch:\n"
    "	push %rbp\n"
    "	push %rbx\n"
    "	push %r12\n"
    "	push %r13\n"
    "	push %r14\n"
    "	push %r15\n"
    "	mov %rsp, (%rdi)\n"
    "	mov %rsi, %rsp\n"
    "	pop %r15\n"
    "	pop %r14\n"
    "	pop %r13\n"
    "	pop %r12\n"
    "	pop %rbx\n"
    "	pop %rbp\n"
    "	ret\n");

/* -------------------------------------------------------------------------------- barriers
 */

static void barrier_open_if_full(struct barrier *b)
{
	if (!b->nr_live || b->nr_waiting != b->nr_live)
		return;
	b->nr_waiting = 0;
	b->opened++;
}

static void barrier_wait(struct barrier *b)
{
	struct fiber *f = &fibers[running];

	f->at = b;
	f->opened = b->opened;
	b->nr_waiting++;
	barrier_open_if_full(b);
	if (b->opened == f->opened)
		emul_switch(&f->sp, scheduler_sp);
	f->at = NULL;
}

static void barrier_leave(struct barrier *b)
{
	b->nr_live--;
	barrier_open_if_full(b);
}

/** emul_block_barrier() - __syncthreads() */
void emul_block_barrier(void)
{
	barrier_wait(&block_barrier);
}

/**
 * emul_warp_exchange() - all lanes of a warp show a value and take one
 * @value: of this lane
 * @how: EMUL_XOR: that of lane (own ^ @arg); EMUL_LANE: that of lane @arg; EMUL_BALLOT: bit 0 of
 *	each lane
 * @arg: below 32
 */
uint64_t emul_warp_exchange(uint64_t value, enum emul_how how, unsigned arg)
{
	unsigned w = running / WARP, lane = running % WARP;
	uint64_t r = 0;

	lanes[w][lane] = value;
	barrier_wait(&warp_barrier[w]);
	if (how == EMUL_XOR)
		r = lanes[w][(lane ^ arg) % WARP];
	else if (how == EMUL_LANE)
		r = lanes[w][arg % WARP];
	else
		for (unsigned i = 0; i < WARP; i++)
			r |= (lanes[w][i] & 1) << i;
	barrier_wait(&warp_barrier[w]); /* nobody shows the next before all have this */
	return r;
}

/* ---------------------------------------------------------------------------------- fibers
 */

/* Where a fiber starts; it never returns from here. */
static void fiber_main(void)
{
	struct fiber *f = &fibers[running];

	(*thread_body)();
	f->ended = true;
	barrier_leave(&warp_barrier[running / WARP]);
	barrier_leave(&block_barrier);
	emul_switch(&f->sp, scheduler_sp);
	abort();
}

/* A stack as emul_switch() leaves it, with fiber_main() to return to. */
static void fiber_make(unsigned i)
{
	void **sp = (void **)(void *)(stacks + (size_t)(i + 1) * STACK_BYTES);

	*--sp = NULL; /* fiber_main()'s return address: the stack is as after a call */
	*--sp = (void *)fiber_main;
	for (unsigned k = 0; k < 6; k++)
		*--sp = NULL;
	fibers[i] = {sp, false, NULL, 0};
	warp_barrier[i / WARP].nr_live++;
	block_barrier.nr_live++;
}

static bool fiber_can_run(const struct fiber *f)
{
	return !f->ended && (!f->at || f->at->opened != f->opened);
}

static void block_run(unsigned nr_threads)
{
	bool ran = true;

	memset(&block_barrier, 0, sizeof(block_barrier));
	memset(warp_barrier, 0, sizeof(warp_barrier));
	memset(lanes, 0, sizeof(lanes));
	for (unsigned i = 0; i < nr_threads; i++)
		fiber_make(i);
	while (ran) {
		ran = false;
		for (unsigned i = 0; i < nr_threads; i++) {
			if (!fiber_can_run(&fibers[i]))
				continue;
			running = i;
			threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y,
				     i / blockDim.x / blockDim.y};
			emul_switch(&scheduler_sp, fibers[i].sp);
			ran = true;
		}
	}
	if (block_barrier.nr_live) {
		fprintf(stderr, "emul: %u threads wait for ever\n",
			block_barrier.nr_live);
		abort();
	}
}

/* -------------------------------------------------------------------------------- launches
 */

/* @block.x 0: a call on the host, on the caller's stack */
struct launch {
	dim3 grid, block;
	std::function<void()> thread;
};

struct emul_graph {
	std::vector<struct launch> launches;
};

static struct emul_graph *captured; /* NULL: launches run */

static void launch_run(const struct launch &l)
{
	unsigned nr_threads = l.block.x * l.block.y * l.block.z;
	void *p;

	if (!l.block.x) {
		l.thread();
		return;
	}
	if (!nr_threads || nr_threads > THREADS_MAX) {
		fprintf(stderr, "emul: a block of %u threads\n", nr_threads);
		abort();
	}
	if (!stacks) {
		p = mmap(NULL, (size_t)THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED) {
			perror("emul: stacks");
			abort();
		}
		stacks = (char *)p;
	}
	gridDim = l.grid;
	blockDim = l.block;
	thread_body = &l.thread;
	for (unsigned z = 0; z < l.grid.z; z++)
		for (unsigned y = 0; y < l.grid.y; y++)
			for (unsigned x = 0; x < l.grid.x; x++) {
				blockIdx = {x, y, z};
				block_run(nr_threads);
			}
}

static void launch_queue(struct launch l)
{
	if (captured)
		captured->launches.push_back(std::move(l));
	else
		launch_run(l);
}

/**
 * emul_launch() - run a kernel now, or note it down for the graph
 * @grid: blocks of the launch
 * @block: threads of a block, 1 to 1024
 * @thread: what each thread runs; holds the arguments
 */
void emul_launch(dim3 grid, dim3 block, std::function<void()> thread)
{
	if (!block.x) {
		fprintf(stderr, "emul: a block of no threads\n");
		abort();
	}
	launch_queue({grid, block, std::move(thread)});
}

/**
 * emul_launch_host() - the same for a function of the host
 * @call: what runs, once
 */
void emul_launch_host(std::function<void()> call)
{
	launch_queue({0, 0, std::move(call)});
}

/* ------------------------------------------------------------- CUDA's names, cuda_runtime_api.h
 */

cudaError_t cudaGetLastError(void)
{
	return cudaSuccess; /* a launch that cannot run aborts */
}

const char *cudaGetErrorString(cudaError_t error)
{
	return error == cudaErrorMemoryAllocation ? "out of memory"
	       : error				  ? "invalid value"
						  : "no error";
}

cudaError_t cudaGetDeviceCount(int *ret_nr)
{
	*ret_nr = 1;
	return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
	return cudaSuccess;
}

/* Aligned as CUDA's; no rounding up, so that a sanitizer sees what is written behind it. */
cudaError_t cudaMalloc(void **ret_p, size_t bytes)
{
	return posix_memalign(ret_p, 256, bytes) ? cudaErrorMemoryAllocation
						 : cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind)
{
	memcpy(dst, src, bytes);
	return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
	memset(p, value, bytes);
	return cudaSuccess;
}

/* No code for Hopper here: the table takes what runs everywhere. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret_attr, const void *)
{
	ret_attr->sharedSizeBytes = 0;
	return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *ret_stream)
{
	*ret_stream = NULL;
	return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
	return captured ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, enum cudaStreamCaptureMode)
{
	if (captured)
		return cudaErrorInvalidValue;
	captured = new emul_graph;
	return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *ret_graph)
{
	if (!captured)
		return cudaErrorInvalidValue;
	*ret_graph = captured;
	captured = NULL;
	return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret_exec, cudaGraph_t graph,
				 unsigned long long)
{
	*ret_exec = graph;
	return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t)
{
	for (const struct launch &l : exec->launches)
		launch_run(l);
	return cudaSuccess;
}
