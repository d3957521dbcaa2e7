/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who a client is, and what it learns of others: process numbers say nothing (O08), reply
 * times say nothing (O44). Both need a second uid, so they need root.
 */
#include "tests/ipc/common.h"

#include <dlfcn.h>
#include <linux/sched.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define OTHER_UID 65534u
#define RUN	  4u

static struct eng_private_kvmd kvmd;

/* Two tenants, each in a domain of its own: this uid, and nobody's. */
static void start_two(void)
{
	static const char text[] =
		"{\"tenants\":[{\"name\":\"red\",\"uids\":[0],\"gpus\":[{\"gpu\":\"*\","
		"\"max\":\"1GiB\"}]},{\"name\":\"blue\",\"uids\":[65534],\"gpus\":"
		"[{\"gpu\":\"*\",\"max\":\"1GiB\"}]}]}";
	char path[] = "/tmp/kvt-config-XXXXXX";
	const char *args[] = {"--config", path, NULL};
	int fd;

	if (getuid())
		KVT_SKIP("needs root for a second uid");
	fd = mkstemp(path);
	KVT_EXPECT(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
	ipc_start(&kvmd, args);
	unlink(path);
	KVT_EXPECT_EQ(chmod(kvmd.dir, 0755), 0);
	KVT_EXPECT_EQ(chmod(kvmd.socket_path, 0666), 0);
	/* loaded here: the other user may not be able to enter the build directory */
	if (getenv("KV_CUDA_LIB"))
		KVT_EXPECT(dlopen(getenv("KV_CUDA_LIB"), RTLD_NOW));
}

static void become(u32 uid)
{
	if (uid)
		KVT_EXPECT(!setgid(uid) && !setuid(uid));
}

static void run_tokens(u32 *tokens, u32 seq)
{
	for (u32 i = 0; i < RUN * KV_PAGE_TOKENS; i++)
		tokens[i] = seq * 7919 + i;
}

/* @RUN pages that stay in the cache. */
static void seal_run(struct kvc_pool *pool, u32 seq, struct kv_grant *pages)
{
	u32 tokens[RUN * KV_PAGE_TOKENS], crc[RUN] = {0};
	struct kv_seal_ret rets[RUN];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = RUN,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};

	run_tokens(tokens, seq);
	KVT_EXPECT_EQ(kvc_alloc(pool, RUN, KV_GFP_PREFILL, pages), 0);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
}

/* ------------------------------------------------------- O08: a pid is no identity */

/**
 * struct tale - what a process in a namespace is to do, and what it says
 * @uid: to become
 * @say, @go: pipes
 * @pid: of itself, as it sees it; @host_pid as the others do
 */
struct tale {
	u32 uid;
	int say, go;
	pid_t pid, host_pid;
	u64 client_id;
	struct kv_grant page;
};

/* Seals the same tokens as everybody, holds one page more, and dies without a word. */
static int live_and_die(void *arg)
{
	u32 tokens[RUN * KV_PAGE_TOKENS], nr;
	struct kv_grant pages[RUN];
	struct kv_hit hits[RUN];
	struct tale *t = arg;
	struct kvc_info info;
	struct kvc_pool *pool;
	struct kvc *c;
	char byte;

	become(t->uid);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	run_tokens(tokens, 1);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, RUN * KV_PAGE_TOKENS, RUN, hits, &nr),
		      KV_MISS);
	seal_run(pool, 1, pages);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &t->page), 0);
	kvc_info(c, &info);
	t->client_id = info.client_id;
	t->pid = getpid();
	KVT_EXPECT_EQ(write(t->say, t, sizeof(*t)), sizeof(*t));
	if (read(t->go, &byte, 1) < 0)
		_exit(5);
	_exit(0);
}

/* The first process of a PID namespace: pid 1, as the other one. */
static int in_namespace(void *arg)
{
	struct tale *t = arg;
	pid_t pid;

	if (unshare(CLONE_NEWPID))
		return 77;
	pid = ipc_fork(live_and_die, t);
	KVT_EXPECT_EQ(write(t->say, &pid, sizeof(pid)), sizeof(pid));
	return ipc_wait(pid);
}

static pid_t container(u32 uid, int go, struct tale *ret)
{
	struct tale t = {.uid = uid, .go = go};
	pid_t pid;
	int fds[2];

	KVT_EXPECT(!pipe(fds));
	t.say = fds[1];
	pid = ipc_child_with(in_namespace, &t, sizeof(t));
	close(fds[1]);
	if (read(fds[0], &t.host_pid, sizeof(t.host_pid)) != sizeof(t.host_pid)) {
		KVT_EXPECT_EQ(ipc_wait(pid), 77);
		KVT_SKIP("no PID namespaces here");
	}
	KVT_EXPECT_EQ(read(fds[0], ret, sizeof(*ret)), sizeof(*ret));
	ret->host_pid = t.host_pid;
	close(fds[0]);
	return pid;
}

/* A new process asks for the page of the dead one whose number it has. */
static int heir(void *arg)
{
	const struct tale *t = arg;
	struct kv_page_ref *ref;
	struct ipc_raw raw;
	struct kv_sqe sqe;

	raw_open(&raw, &kvmd);
	KVT_EXPECT(raw.client_id != t->client_id);
	ref = raw_arg(&raw, 0);
	*ref = (struct kv_page_ref){.pfn = t->page.pfn, .tag = t->page.tag};
	sqe = raw_sqe(&raw, KV_OP_FREE);
	sqe.nr = 1;
	sqe.arg_bytes = sizeof(*ref);
	KVT_EXPECT_EQ(raw_call(&raw, sqe).result, KV_STALE);
	raw_close(&raw);
	return 0;
}

/* A child under the number of a process that was. Return: its pid; 0 not allowed */
static pid_t fork_as(pid_t pid, int (*fn)(void *arg), void *arg)
{
	struct clone_args args = {.exit_signal = SIGCHLD,
				  .set_tid = (u64)(uintptr_t)&pid,
				  .set_tid_size = 1};
	long r = syscall(SYS_clone3, &args, sizeof(args));

	if (r == 0)
		_exit(fn(arg));
	return r > 0 ? (pid_t)r : 0;
}

/*
 * ucx PR#10968: two containers, both pid 1, the cache was keyed by (pid, address). Here: two
 * clients of one number, then one that has the number of a dead one.
 */
KVT_TEST(o08_pid_is_not_an_identity)
{
	struct tale a = {0}, b = {0};
	pid_t first, second, third;
	int go[2];

	start_two();
	KVT_EXPECT(!pipe(go));
	first = container(0, go[0], &a);
	second = container(OTHER_UID, go[0], &b);
	KVT_EXPECT_EQ(a.pid, 1);
	KVT_EXPECT_EQ(b.pid, 1);
	KVT_EXPECT(a.client_id != b.client_id);
	KVT_EXPECT_EQ(write(go[1], "xx", 2), 2);
	KVT_EXPECT_EQ(ipc_wait(first), 0);
	KVT_EXPECT_EQ(ipc_wait(second), 0);
	third = fork_as(a.host_pid, heir, &a);
	KVT_NOTE("%s under the dead one's number %d", third ? "a new process" : "nobody",
		 a.host_pid);
	if (!third)
		third = ipc_fork(heir, &a);
	else
		KVT_EXPECT_EQ(third, a.host_pid);
	KVT_EXPECT_EQ(ipc_wait(third), 0);
	close(go[0]);
	close(go[1]);
	ipc_stop(&kvmd);
}

/* -------------------------------------------------------------- O44: reply times */

enum { RUNS = 200, PROBES = 10000, TRIES = 3 };

static int fill_cache(void *arg)
{
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kv_grant pages[RUN];

	for (u32 i = 0; i < RUNS; i++) {
		seal_run(pool, i, pages);
		KVT_EXPECT_EQ(kvc_free(pool, pages, RUN), 0);
	}
	kvc_close(c);
	return 0;
}

struct sample {
	u64 ns;
	u32 present;
};

static int by_time(const void *a, const void *b)
{
	const struct sample *x = a, *y = b;

	return x->ns < y->ns ? -1 : x->ns > y->ns;
}

/* Area under the curve of "it takes longer, so somebody has it"; equal times count half. */
static double auc(struct sample *s, u32 nr)
{
	double sum = 0, present = 0;

	qsort(s, nr, sizeof(*s), by_time);
	for (u32 i = 0, k; i < nr; i = k) {
		for (k = i; k < nr && s[k].ns == s[i].ns; k++)
			present += s[k].present;
		for (u32 j = i; j < k; j++)
			sum += s[j].present ? (i + k + 1) / 2.0 : 0;
	}
	return (sum - present * (present + 1) / 2) / (present * (nr - present));
}

static int probe(void *arg)
{
	u32 tokens[RUN * KV_PAGE_TOKENS], nr;
	static struct sample s[PROBES];
	struct kv_hit hits[RUN];
	struct kvc_pool *pool;
	double best = 1, gap;
	struct kvc *c;

	become(OTHER_UID);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	for (u32 try = 0; try < TRIES; try++) {
		for (u32 i = 0; i < PROBES; i++) {
			u64 start_ns;
			int r;

			s[i].present = kvt_rand_below(2);
			run_tokens(tokens,
				   kvt_rand_below(RUNS) + (s[i].present ? 0 : RUNS));
			start_ns = kv_now_ns();
			r = kvc_lookup(pool, tokens, RUN * KV_PAGE_TOKENS, RUN, hits,
				       &nr);
			s[i].ns = kv_now_ns() - start_ns;
			KVT_EXPECT_EQ(r, KV_MISS);
		}
		gap = auc(s, PROBES) - 0.5;
		best = KV_MIN(best, gap < 0 ? -gap : gap);
	}
	KVT_NOTE("p50 %.1f us, area under the curve 0.5 +- %.4f over %u probes",
		 (double)s[PROBES / 2].ns * 1e-3, best, PROBES);
	KVT_EXPECT(best <= 0.02);
	kvc_close(c);
	return 0;
}

/*
 * CVE-2025-46570: whoever asks learns from the time of the answer what others asked. As a
 * client of another tenant sees it, by its ring. A busy machine disturbs both sorts alike;
 * the best of three counts, as what tells them apart would do so each time.
 */
KVT_TEST(o44_reply_times_tell_nothing)
{
	start_two();
	KVT_EXPECT_EQ(ipc_wait(ipc_child(fill_cache, NULL)), 0);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(probe, NULL)), 0);
	ipc_stop(&kvmd);
}

KVT_MAIN()
