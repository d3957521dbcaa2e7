/* SPDX-License-Identifier: Apache-2.0 */
/*
 * machine.cc - runs kernels written for Hopper on the CPU, one thread at a time. x86-64.
 *
 * The blocks of a small grid run at the same time (a persistent kernel's blocks wait for each
 * other), as do those of a cluster; those of a larger one one after another. Each thread is a fiber with a stack; it
 * runs until it ends or gives way: at a barrier of its block or warp, at an mbarrier, at a
 * flag in global memory. Fibers take turns from a place that differs from round to round, and
 * some warp stays behind for a number of rounds.
 * Bulk copies complete after some rounds, in any order; products of a warpgroup at once, or not
 * before somebody waits for them.
 *
 * What it shows beside the arithmetic and the addresses: that rings and barriers do not hang,
 * and that nobody reads a slot before its copy has come or overwrites one that is still read,
 * whatever comes first. A kernel with which nothing happens any more ends the program.
 *
 * What it cannot show: memory order, bank conflicts, limits of registers, speed, and whether
 * a device's instruction does what ptx.h takes it for. Not for two threads.
 */
#include <cuda_runtime.h>
#include <deque>
#include <stdio.h>
#include <vector>
#include "machine.h"
#include "product.h"
#include "tensor.h"

hopper_index threadIdx, blockIdx;
dim3 blockDim, gridDim;

enum {
	NR_BARRIERS = 16,
	STACK_BYTES = 128 << 10,
	SHARED_BYTES = 288 << 10,
	STATIC_AT = 236 << 10, /* __shared__ variables, behind what a launch asks for */
	BLOCKS_AT_ONCE = 4,    /* or an SM's each, whichever is more */
	ROUND_CLOCKS = 100,    /* what a look at each thread takes */
	HOLD_ROUNDS = 64,
	IDLE_MAX = 20000, /* rounds in which nothing happened */
};

struct barrier {
	uint32_t arrived;
	uint64_t opened;
	bool vote, result; /* whether any thread said yes: now, the last time */
};

struct warp {
	struct barrier all;
	std::vector<struct product> open;
	std::deque<std::vector<struct product>> groups; /* committed */
	alignas(16) uint64_t lanes[WARP * 16];
};

struct block {
	hopper_index index;
	uint8_t *shared;
	struct barrier barriers[NR_BARRIERS];
	std::vector<struct warp> warps;
	uint32_t nr_live; /* threads that have not ended */
};

struct piece {
	uint32_t dst;
	const void *src; /* NULL: zeros */
};

struct fiber {
	void *sp;
	struct block *block;
	uint32_t thread;
	size_t static_bytes;
	uint64_t cluster_opened; /* when it arrived at the cluster's barrier */
	bool ended;
	uint32_t nr_groups;		  /* of its pieces, under way */
	std::vector<struct piece> pieces; /* not in a group yet */
};

struct copy {
	uint8_t *shared;
	uint32_t dst, bytes, bar;
	const void *src; /* @map: not used */
	const CUtensorMap *map;
	uint64_t at[5];	      /* the first: bytes */
	struct fiber *thread; /* whose pieces these are: instead of all that */
	std::vector<struct piece> pieces;
	uint32_t late; /* rounds to come */
};

static struct fiber *running;
static void *scheduler_sp;
static const std::function<void()> *body;
static std::vector<struct copy> copies;
static std::vector<uint8_t *> stacks;
static uint64_t random_state = 1, nr_events;
static long long clocks;
static struct block
	*together; /* the blocks that run now: a cluster, where there is one */
static uint32_t nr_together, nr_ended; /* the latter: threads */
static struct barrier cluster_all;

/* Keeps what a call keeps on the stack, leaves the stack in *@save and goes on with @load. */
extern "C" void hopper_switch(void **save, void *load);
asm(".text\n"
    ".globl hopper_switch\n"
    "hopper_switch:\n"
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

static uint32_t random_next(void)
{
	random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(random_state >> 33);
}

extern "C" void hopper_seed(uint64_t seed)
{
	random_state = seed;
}

int hopper_major = 9, hopper_nr_sms = HOPPER_SMS;
static uint32_t late_rounds;

extern "C" void hopper_copies_late(unsigned rounds)
{
	late_rounds = rounds;
}

extern "C" void hopper_is(int major)
{
	hopper_major = major;
}

extern "C" void hopper_has_sms(int nr)
{
	hopper_nr_sms = nr;
}

void hopper_fault(const char *what)
{
	fprintf(stderr, "block %u thread %u: %s does not hold\n", blockIdx.x, threadIdx.x,
		what);
	abort();
}

/* ------------------------------------------------------------------------------- threads
 */

void hopper_yield(void)
{
	hopper_switch(&running->sp, scheduler_sp);
}

long long hopper_clock(void)
{
	hopper_yield();
	return clocks;
}

static void barrier_open(struct barrier *b)
{
	b->arrived = 0;
	b->opened++;
	b->result = b->vote;
	b->vote = false;
	nr_events++;
}

static bool barrier_enter(struct barrier *b, uint32_t nr_threads)
{
	if (++b->arrived < nr_threads)
		return false;
	barrier_open(b);
	return true;
}

static void barrier_wait(struct barrier *b, uint32_t nr_threads)
{
	const uint64_t opened = b->opened;

	if (barrier_enter(b, nr_threads))
		return;
	while (b->opened == opened)
		hopper_yield();
}

void hopper_barrier(uint32_t id, uint32_t nr_threads)
{
	HOPPER_CHECK(id < NR_BARRIERS && nr_threads % WARP == 0);
	barrier_wait(&running->block->barriers[id], nr_threads);
}

bool hopper_barrier_or(uint32_t id, uint32_t nr_threads, bool yes)
{
	struct barrier *b = &running->block->barriers[id];

	b->vote |= yes;
	hopper_barrier(id, nr_threads);
	return b->result;
}

void hopper_arrive(uint32_t id, uint32_t nr_threads)
{
	HOPPER_CHECK(id < NR_BARRIERS && nr_threads % WARP == 0);
	barrier_enter(&running->block->barriers[id], nr_threads);
}

static struct warp *warp_of(const struct fiber *f)
{
	return &f->block->warps[f->thread / WARP];
}

void hopper_warp_barrier(void)
{
	barrier_wait(&warp_of(running)->all, WARP);
}

uint64_t *hopper_lanes(void)
{
	return warp_of(running)->lanes;
}

uint8_t *hopper_shared(void)
{
	return running->block->shared;
}

/* A thread that has ended counts as one that has come, in this phase and in all that follow. */
static void cluster_enter(void)
{
	if (++cluster_all.arrived < nr_together * blockDim.x)
		return;
	barrier_open(&cluster_all);
	cluster_all.arrived = nr_ended;
}

void hopper_cluster_barrier(void)
{
	hopper_cluster_arrive();
	hopper_cluster_wait();
}

void hopper_cluster_arrive(void)
{
	running->cluster_opened = cluster_all.opened;
	cluster_enter();
}

void hopper_cluster_wait(void)
{
	while (cluster_all.opened == running->cluster_opened)
		hopper_yield();
}

uint8_t *hopper_cluster_shared(uint32_t rank)
{
	/* a CTA's memory goes with it */
	HOPPER_CHECK(rank < nr_together && together[rank].nr_live);
	return together[rank].shared;
}

static void fiber_main(void)
{
	(*body)();
	running->ended = true;
	running->block->nr_live--;
	nr_events++;
	nr_ended++;
	if (running->cluster_opened != cluster_all.opened)
		cluster_enter();
	for (;;)
		hopper_yield();
}

/* All threads ask for the same variables in the same order. */
void *hopper_static(size_t bytes)
{
	void *p = running->block->shared + STATIC_AT + running->static_bytes;

	running->static_bytes += (bytes + 127) / 128 * 128;
	HOPPER_CHECK(STATIC_AT + running->static_bytes <= SHARED_BYTES);
	return p;
}

/* -------------------------------------------------------------------------------- copies
 */

void hopper_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	HOPPER_CHECK(dst + bytes <= STATIC_AT);
	copies.push_back({hopper_shared(), dst, bytes, bar, src, NULL, {}, NULL, {}, 0});
}

void hopper_tensor_copy(uint32_t dst, const void *map, uint32_t bar, uint32_t nr_dims,
			const int (&at)[5])
{
	const CUtensorMap *m = (const CUtensorMap *)map;
	const uint32_t bytes = tensor_box_bytes(m);
	struct copy c = {hopper_shared(), dst, bytes, bar, NULL, m, {}, NULL, {}, 0};

	/* a copy of other dimensions than its map's is an illegal instruction */
	HOPPER_CHECK(nr_dims == m->nr_dims);
	HOPPER_CHECK(dst % (m->box[0] * 8) == 0 && dst + bytes <= STATIC_AT);
	for (int i = 0; i < 5; i++) {
		HOPPER_CHECK(at[i] >= 0);
		c.at[i] = (uint64_t)at[i] * (i ? 1 : m->value_bytes);
	}
	copies.push_back(c);
}

/* 16 bytes to @dst, some time before the thread's next group arrives. */
void hopper_piece(uint32_t dst, const void *src)
{
	HOPPER_CHECK(dst % 16 == 0 && (uintptr_t)src % 16 == 0 && dst + 16 <= STATIC_AT);
	running->pieces.push_back({dst, src});
}

void hopper_pieces_arrive(uint32_t bar)
{
	struct copy c = {hopper_shared(), 0, 0, bar, NULL, NULL, {}, running, {}, 0};

	c.pieces.swap(running->pieces);
	running->nr_groups++;
	copies.push_back(c);
}

void hopper_pieces_wait(void)
{
	while (running->nr_groups)
		hopper_yield();
}

static void copy_pieces(const struct copy *c)
{
	for (const struct piece &p : c->pieces)
		if (p.src)
			memcpy(c->shared + p.dst, p.src, 16);
		else
			memset(c->shared + p.dst, 0, 16);
	c->thread->nr_groups--;
}

/* Some of the copies that are under way arrive. */
static void copies_step(void)
{
	for (size_t i = 0; i < copies.size();) {
		struct copy &c = copies[i];

		if (late_rounds && !c.late)
			c.late = random_next() % 8 ? 1 : late_rounds;
		if (c.late > 1) { /* it will come */
			c.late--;
			nr_events++;
		}
		if (c.late > 1 || random_next() % 3) {
			i++;
			continue;
		}
		if (c.thread)
			copy_pieces(&c);
		else if (c.map)
			tensor_box(c.map, c.shared + c.dst, c.at);
		else
			memcpy(c.shared + c.dst, c.src, c.bytes);
		hopper_mbar_step((struct hopper_mbar *)(c.shared + c.bar),
				 c.thread ? 1 : 0, -(int32_t)c.bytes);
		copies[i] = copies.back();
		copies.pop_back();
		nr_events++;
	}
}

/* ------------------------------------------------------------------- warpgroup products
 */

/* All that a warp has asked for. */
static void products_run(struct warp *w)
{
	for (const std::vector<struct product> &group : w->groups)
		for (const struct product &p : group)
			product_run(&p);
	for (const struct product &p : w->open)
		product_run(&p);
	for (std::vector<struct product> &group : w->groups)
		group.clear();
	w->open.clear();
}

/* A warp's lanes agree on what is multiplied. @rows, @b: shared addresses, as lanes have them */
static void product_open(float *d, const uint32_t (&a)[4], const struct product &how)
{
	struct warp *w = warp_of(running);
	const uint32_t lane = running->thread % WARP;
	uint64_t *mine = &w->lanes[lane * 16];

	mine[0] = (uint64_t)d;
	memcpy(&mine[1], a, sizeof(a));
	mine[3] = how.b | (uint64_t)how.rows << 32;
	hopper_warp_barrier();
	if (lane == 0) {
		struct product p = how;

		for (uint32_t i = 0; i < WARP; i++) {
			p.d[i] = (float *)w->lanes[i * 16];
			memcpy(p.a[i], &w->lanes[i * 16 + 1], sizeof(p.a[i]));
			HOPPER_CHECK(w->lanes[i * 16 + 3] == mine[3]);
		}
		w->open.push_back(p);
		if (random_next() % 4 == 0) /* a device may be as quick as that */
			products_run(w);
	}
	hopper_warp_barrier();
}

void hopper_product(float *d, uint32_t n, const uint32_t (&a)[4], uint32_t b, int use_d)
{
	struct product p = {};

	p.n = n;
	p.b = b;
	p.use_d = use_d;
	product_open(d, a, p);
}

void hopper_product_e4m3(float *d, uint32_t n, uint32_t a, uint32_t b, int use_d,
			 bool narrow)
{
	const uint32_t none[4] = {};
	struct product p = {};

	p.type = E4M3;
	p.rows = a + running->thread % (4 * WARP) / WARP * 16 * 128;
	p.n = n;
	p.b = b;
	p.narrow = narrow;
	p.use_d = use_d;
	product_open(d, none, p);
}

/* a in registers */
void hopper_product_e4m3(float *d, uint32_t n, const uint32_t (&a)[4], uint32_t b,
			 int use_d)
{
	struct product p = {};

	p.type = E4M3;
	p.n = n;
	p.b = b;
	p.use_d = use_d;
	product_open(d, a, p);
}

void hopper_product_bf16(float *d, uint32_t n, uint32_t a, uint32_t b, int use_d)
{
	const uint32_t none[4] = {};
	struct product p = {};

	p.rows = a + running->thread % (4 * WARP) / WARP * 16 * 128;
	p.type = BF16;
	p.n = n;
	p.b = b;
	p.use_d = use_d;
	product_open(d, none, p);
}

/* a in registers; b's memory is rows of k, in blocks of 64 columns, @block bytes apart */
void hopper_product_turned(float *d, uint32_t n, const uint32_t (&a)[4], uint32_t b,
			   uint32_t block, bool bf16, uint32_t apart)
{
	struct product p = {};

	p.apart = apart;

	p.type = bf16 ? BF16 : F16;
	p.n = n;
	p.b = b;
	p.turned = block;
	p.use_d = 1;
	product_open(d, a, p);
}

void hopper_product_commit(void)
{
	struct warp *w = warp_of(running);

	hopper_warp_barrier();
	if (running->thread % WARP == 0) {
		w->groups.push_back(w->open);
		w->open.clear();
	}
	hopper_warp_barrier();
}

void hopper_product_wait(uint32_t but_latest)
{
	struct warp *w = warp_of(running);

	hopper_warp_barrier();
	while (running->thread % WARP == 0 && w->groups.size() > but_latest) {
		for (const struct product &p : w->groups.front())
			product_run(&p);
		w->groups.pop_front();
	}
	hopper_warp_barrier();
}

/* ------------------------------------------------------------------------------- launches
 */

static void fiber_make(struct fiber *f, struct block *b, uint32_t thread, uint8_t *stack)
{
	uint64_t *sp = (uint64_t *)(stack + STACK_BYTES - 64);

	*--sp = 0; /* fiber_main() does not return; keeps its stack aligned */
	*--sp = (uint64_t)fiber_main;
	for (int i = 0; i < 6; i++)
		*--sp = 0;
	*f = {sp, b, thread, 0, ~0ull, false, 0, {}};
}

static void fibers_run(std::vector<struct fiber> &fibers)
{
	size_t left = fibers.size(), held = 0;
	uint32_t idle = 0, hold = 0;

	while (left) {
		const uint64_t before = nr_events;
		const size_t first = random_next() % fibers.size();

		if (!hold--) { /* a warp stays behind for a while, then none, or another one */
			hold = random_next() % HOLD_ROUNDS;
			held = random_next() % 4 ? ~0ul
						 : random_next() % fibers.size() / WARP;
		}
		for (size_t i = 0; i < fibers.size(); i++) {
			const size_t nr = (first + i) % fibers.size();
			struct fiber *f = &fibers[nr];

			if (f->ended || nr / WARP == held)
				continue;
			running = f;
			threadIdx = {f->thread, 0, 0};
			blockIdx = f->block->index;
			hopper_switch(&scheduler_sp, f->sp);
			left -= f->ended;
		}
		copies_step();
		clocks += ROUND_CLOCKS;
		idle = nr_events == before ? idle + 1 : 0;
		if (idle > IDLE_MAX) {
			fprintf(stderr, "nothing happens any more; %zu threads left\n",
				left);
			abort();
		}
	}
	HOPPER_CHECK(copies.empty());
}

static void blocks_run(dim3 grid, uint32_t first, uint32_t nr, uint32_t nr_threads)
{
	std::vector<struct block> blocks(nr);
	std::vector<struct fiber> fibers((size_t)nr * nr_threads);

	together = blocks.data();
	nr_together = nr;
	cluster_all = {};
	nr_ended = 0;
	while (stacks.size() < fibers.size())
		stacks.push_back((uint8_t *)aligned_alloc(4096, STACK_BYTES));
	for (uint32_t i = 0; i < nr; i++) {
		const uint32_t n = first + i;
		struct block *b = &blocks[i];

		b->index = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
		b->shared = (uint8_t *)aligned_alloc(4096, SHARED_BYTES);
		/* NaN, or numbers that are large and finite */
		memset(b->shared, random_next() % 2 ? 0xff : 0x4b, SHARED_BYTES);
		b->nr_live = nr_threads;
		b->warps.resize((nr_threads + WARP - 1) / WARP);
		for (uint32_t t = 0; t < nr_threads; t++) {
			const size_t at = (size_t)i * nr_threads + t;

			fiber_make(&fibers[at], b, t, stacks[at]);
		}
	}
	fibers_run(fibers);
	for (struct block &b : blocks)
		free(b.shared);
}

void hopper_launch(dim3 grid, dim3 block, std::function<void()> thread, unsigned cluster)
{
	const uint32_t nr = grid.x * grid.y * grid.z;
	const uint32_t room = max((int)BLOCKS_AT_ONCE, hopper_nr_sms);
	const uint32_t at_once = nr <= room && cluster == 1 ? nr : cluster;

	HOPPER_CHECK(cluster && cluster <= 8 && grid.x % cluster == 0);

	body = &thread;
	gridDim = grid;
	blockDim = block;
	for (uint32_t i = 0; i < nr; i += at_once)
		blocks_run(grid, i, min(at_once, nr - i), block.x);
}
