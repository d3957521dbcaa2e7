/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failures of other systems as cases: descriptors (O13), short memory (O33), events that never
 * complete (R2), kills while others use shared slots (R10), peers that die in each state of their
 * ring (R11).
 */
#include "tests/ipc/common.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct eng_private_kvmd kvmd;

/* From now on and over exec, system call @nr answers @error. */
static int forbid(long nr, u32 error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (u32)nr, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = {.len = KV_ARRAY_SIZE(code), .filter = code};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -errno;
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog) ? -errno : 0;
}

static struct kv_stat stat_of(struct kvc_pool *pool)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s;
}

/* --------------------------------------------------------------------- O13: fds */

/* In a PID namespace of its own where that is allowed, dumpable by nobody, and unable to fetch a
 * descriptor or to look into a process. */
static int engine_in_a_corner(void *arg)
{
	struct kv_grant g[70];
	struct kvc_pool *p;
	struct kvc *c;

	prctl(PR_SET_DUMPABLE, 0);
	if (forbid(SYS_pidfd_getfd, EPERM) || forbid(SYS_ptrace, EPERM) ||
	    forbid(SYS_process_vm_readv, EPERM))
		return 3;
	c = ipc_connect(&kvmd);
	p = ipc_pool(c);
	if (kvc_alloc(p, 70, KV_GFP_NOWAIT, g) || !ipc_passes(c, p, g[69]))
		return 4;
	ipc_page_fill(p, g[69].pfn, 0x5a, 4096);
	if (ipc_page_byte(p, g[69].pfn, 4095) != 0x5a || kvc_free(p, g, 70))
		return 5;
	kvc_close(c);
	return 0;
}

static int namespace_first(void *arg)
{
	pid_t pid;

	if (unshare(CLONE_NEWPID))
		KVT_NOTE("no PID namespace: %s", strerror(errno));
	pid = ipc_fork(engine_in_a_corner, NULL);
	return ipc_wait(pid);
}

/* pytorch 165685, 179220: descriptors travel by SCM_RIGHTS alone; kvmd could not even fetch one. */
KVT_TEST(o13_descriptors_travel_by_message_only)
{
	char path[64], line[256], seccomp = '?';
	FILE *f;

	ipc_start(&kvmd, NULL);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(namespace_first, NULL)), 0);
	snprintf(path, sizeof(path), "/proc/%d/status", kvmd.pid);
	f = fopen(path, "r");
	while (f && fgets(line, sizeof(line), f))
		sscanf(line, "Seccomp: %c", &seccomp);
	if (f)
		fclose(f);
	KVT_EXPECT_EQ(seccomp, '2');
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------------ O33: short memory */

/* kvmd where fallocate() finds no room. Return: its exit status; 0: it served */
static int kvmd_without_room(const char *config, char *ret_line, size_t room)
{
	char path[1200], dir[] = "/tmp/kvmd-o33-XXXXXX", ready[16], byte;
	int out[2], up[2], status;
	ssize_t n;
	pid_t pid;

	KVT_EXPECT(mkdtemp(dir) && !pipe(out) && !pipe2(up, O_CLOEXEC));
	ipc_build_path("kvmd", path, sizeof(path));
	snprintf(ready, sizeof(ready), "%d", up[1]);
	pid = fork();
	if (pid == 0) {
		dup2(out[1], 2);
		fcntl(up[1], F_SETFD, 0);
		if (forbid(SYS_fallocate, ENOSPC))
			_exit(126);
		execl(path, path, "--private", dir, "--die-with-parent", "--host-bytes",
		      "64MiB", "--ready-fd", ready, "--config", config, NULL);
		_exit(127);
	}
	close(out[1]);
	close(up[1]);
	if (read(up[0], &byte, 1) == 1) /* it serves */
		kill(pid, SIGTERM);
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	n = read(out[0], ret_line, room - 1);
	ret_line[n > 0 ? n : 0] = 0;
	close(out[0]);
	close(up[0]);
	snprintf(path, sizeof(path), "rm -r %s", dir);
	KVT_EXPECT_EQ(system(path), 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* sglang PR 28089, nccl 1518: what a size promises is there at the start, or the start says what
 * is short. No SIGBUS at the first touch. */
KVT_TEST(o33_short_memory_is_refused_at_the_start)
{
	char config[] = "/tmp/kvmd-o33-config-XXXXXX", line[4096];
	int fd = mkstemp(config), status;

	KVT_EXPECT(fd >= 0);
	dprintf(fd,
		"{\"tenants\": [{\"name\": \"red\", \"uids\": [%u], \"gpus\": [{\"gpu\": "
		"\"*\", \"max\": \"1GiB\"}]}], \"tiers\": {\"dram\": {\"size\": "
		"\"64MiB\"}}}",
		getuid());
	close(fd);
	status = kvmd_without_room(config, line, sizeof(line));
	unlink(config);
	KVT_NOTE("%.200s", line);
	KVT_EXPECT_EQ(status, 1);
	KVT_EXPECT_HAS(line, "67108864");
}

/* --------------------------------------------- R2: an event that never completes */

static int cmp_u64(const void *a, const void *b)
{
	const u64 *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

/* LMCache 4676: what was killed since waits as well, as that step may name it; nobody else does. */
KVT_TEST(r2_event_that_never_completes)
{
	struct kv_grant pages[4];
	struct kvc_pool *pool;
	struct ipc_raw raw;
	struct kv_sqe sqe;
	struct kvc *c;
	u64 ns[200];
	char *ps;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	raw_open(&raw, &kvmd);
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 16;
	sqe.ret_bytes = 16 * sizeof(struct kv_grant);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, 0);
	kv_slot_announce(raw.session, 5, 1); /* its work never ends; its process lives */
	raw_close(&raw);
	expect_within(stat_of(pool).nr_quarantine >= 16, 2000);
	for (u32 i = 0; i < KV_ARRAY_SIZE(ns); i++) {
		u64 start_ns = kv_now_ns();

		KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_PREFILL, pages), 0);
		KVT_EXPECT(ipc_passes(c, pool, pages[i % 4]));
		KVT_EXPECT_EQ(kvc_free(pool, pages, 4), 0);
		KVT_EXPECT_EQ(kvc_flush(c), 0);
		ns[i] = kv_now_ns() - start_ns;
	}
	qsort(ns, KV_ARRAY_SIZE(ns), sizeof(*ns), cmp_u64);
	KVT_NOTE("4 pages and back beside it: p50 %.3f ms, p99 %.3f ms",
		 (double)ns[100] * 1e-6, (double)ns[198] * 1e-6);
	KVT_EXPECT(stat_of(pool).nr_quarantine >= 16); /* still, and told */
	ps = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	KVT_EXPECT_HAS(ps, "\"sessions\":2");
	free(ps);
	kv_slot_retire(raw.session, 5);
	expect_within(stat_of(pool).nr_quarantine == 0, 2000);
	KVT_EXPECT_EQ(stat_of(pool).nr_active, 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* ----------------------------------------- R10: kills while others use shared slots */

struct slots_arg {
	u32 id;
	int ready;
};

/* Single pages, that is the slots of a shared magazine, until it is killed. */
static int pop_and_free(void *arg)
{
	const struct slots_arg *a = arg;
	struct kvc *mine;
	struct kvc_pool *p;
	struct kv_grant g[3];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mine = ipc_connect(&kvmd);
	p = ipc_pool(mine);
	for (u32 i = 0;; i++) {
		for (u32 k = 0; k < 3; k++)
			if (kvc_alloc(p, 1, KV_GFP_PREFILL, &g[k]))
				return 2;
		for (u32 k = 0; k < 3; k++)
			if (!ipc_passes(mine, p, g[k]))
				return 3;
		if (kvc_free(p, g, 3))
			return 4;
		if (i == 20 && write(a->ready, "x", 1) != 1)
			return 5;
	}
}

/* HAMi-core 241: engines are killed in random order while the others pop from their slots. */
KVT_TEST(r10_killed_while_others_use_shared_slots)
{
	enum { ENGINES = 4, ROUNDS = 5 };
	struct kv_stat before, now;
	struct kvc_pool *pool;
	struct kvc *c;
	int fds[2];

	KVT_EXPECT_EQ(pipe(fds), 0);
	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	before = stat_of(pool);
	for (u32 round = 0; round < ROUNDS; round++) {
		pid_t pids[ENGINES];
		char byte;

		for (u32 i = 0; i < ENGINES; i++) {
			struct slots_arg a = {.id = i, .ready = fds[1]};

			pids[i] = ipc_child_with(pop_and_free, &a, sizeof(a));
		}
		for (u32 i = 0; i < ENGINES; i++)
			KVT_EXPECT_EQ(read(fds[0], &byte, 1), 1);
		for (u32 left = ENGINES; left; left--) {
			u32 i = kvt_rand_below(left);

			usleep(kvt_rand_below(3000));
			kill(pids[i], SIGKILL);
			KVT_EXPECT_EQ(ipc_wait(pids[i]), 128 + SIGKILL);
			pids[i] = pids[left - 1];
		}
		expect_within((now = stat_of(pool),
			       !now.nr_quarantine && !now.nr_active && !now.nr_magazine),
			      2000);
		KVT_EXPECT_EQ(now.tenant_used_bytes, before.tenant_used_bytes);
		KVT_EXPECT_EQ(now.nr_free, now.nr_pages);
	}
	close(fds[0]);
	close(fds[1]);
	kvc_close(c);
	ipc_stop(&kvmd); /* audits: no counter is off */
}

/* ----------------------------------------------- R11: dead in each state of its ring */

enum ring_state { SAID_HELLO, POSTED, KICKED, HALF_TAKEN, CQ_FULL, RING_STATES };

static void die_at(struct ipc_raw *raw, enum ring_state at)
{
	struct kv_sqe sqe;

	raw_open(raw, &kvmd);
	if (at == SAID_HELLO)
		return;
	for (u32 i = 0; i < (at == CQ_FULL ? 200u : 8u); i++) {
		sqe = raw_sqe(raw, at == CQ_FULL ? KV_OP_STAT : KV_OP_ALLOC);
		sqe.nr = at == CQ_FULL ? 0 : 4;
		sqe.ret_bytes = at == CQ_FULL ? sizeof(struct kv_stat)
					      : 4 * sizeof(struct kv_grant);
		raw_push(raw, sqe);
		if (at == CQ_FULL && i % 16 == 15)
			raw_kick(raw);
	}
	if (at == KICKED || at == HALF_TAKEN)
		raw_kick(raw);
	if (at == HALF_TAKEN)
		usleep(200);
}

/* vllm 45644: whoever writes to a dead peer's ring returns at once; the next peer gets a fresh ring
 * without a restart. */
KVT_TEST(r11_peer_dies_in_each_state_of_its_ring)
{
	struct kvc_pool *pool;
	struct kv_grant g;
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	for (u32 round = 0; round < 4 * RING_STATES; round++) {
		struct ipc_raw raw = {0};
		u64 start_ns;

		die_at(&raw, (enum ring_state)(round % RING_STATES));
		raw_close(&raw);
		start_ns = kv_now_ns();
		KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_PREFILL, &g), 0);
		KVT_EXPECT_EQ(kvc_free(pool, &g, 1), 0);
		KVT_EXPECT_EQ(kvc_flush(c), 0);
		KVT_EXPECT_LE(kv_now_ns() - start_ns, KV_NSEC_PER_SEC);
		expect_within(!stat_of(pool).nr_active && !stat_of(pool).nr_quarantine,
			      2000);
	}
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_MAIN()
