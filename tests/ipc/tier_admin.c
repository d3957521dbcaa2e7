/* SPDX-License-Identifier: Apache-2.0 */
/* Tiers as clients and operators meet them: PREFETCH, configuration, budgets, kvmctl. */
#include "tests/ipc/tier.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/* ---------------------------------------------------------------------- odd clients */

static struct kv_sqe prefetch_sqe(struct ipc_raw *r, u32 seq)
{
	struct kv_lookup_arg *arg = raw_arg(r, 0);
	struct kv_sqe sqe = raw_sqe(r, KV_OP_PREFETCH);

	memset(arg, 0, sizeof(*arg));
	tokens_of(seq, (u32 *)(arg + 1));
	sqe.nr = SEQ_PAGES * KV_PAGE_TOKENS;
	sqe.arg_off = 0;
	sqe.arg_bytes = (u32)(sizeof(*arg) + sqe.nr * sizeof(u32));
	return sqe;
}

KVT_TEST(prefetch_with_junk_is_refused)
{
	static struct ipc_raw r;
	struct kv_sqe sqe;

	begin(DRAM_ONLY);
	make_many(40);
	raw_open(&r, &kvmd);
	sqe = prefetch_sqe(&r, 1);
	((struct kv_lookup_arg *)raw_arg(&r, 0))->reserved[2] = 1;
	KVT_EXPECT_EQ(raw_call(&r, sqe).result, -EINVAL);
	sqe = prefetch_sqe(&r, 1);
	sqe.nr--;
	KVT_EXPECT_EQ(raw_call(&r, sqe).result, -EINVAL); /* arg_bytes does not fit */
	sqe = prefetch_sqe(&r, 1);
	sqe.gfp = KV_GFP_WAIT;
	KVT_EXPECT_EQ(raw_call(&r, sqe).result, -EINVAL);
	sqe = prefetch_sqe(&r, 1);
	((struct kv_lookup_arg *)raw_arg(&r, 0))->max_pages = 3;
	KVT_EXPECT_EQ(raw_call(&r, sqe).nr, 3);
	raw_close(&r);
	finish();
}

/* A client goes away, another one closes its pool, while what they asked for is on its way
 * and the mover stands still. */
KVT_TEST(clients_leave_while_pages_come_back)
{
	static struct ipc_raw r;
	struct kv_cqe cqe;
	pid_t mover;

	begin(DRAM_ONLY);
	make_many(40);
	raw_open(&r, &kvmd);
	mover = (pid_t)number("status", "mover.pid");
	KVT_EXPECT(mover > 1);
	kill(mover, SIGSTOP);
	raw_push(&r, prefetch_sqe(&r, 1));
	raw_push(&r, prefetch_sqe(&r, 2));
	raw_kick(&r);
	KVT_EXPECT_EQ(raw_pop(&r, &cqe, 200), -1); /* they wait */
	raw_close(&r);
	make(500); /* the others go on: its pages are free ones, or PENDING */
	kill(mover, SIGCONT);
	/* a copier that stands still makes misses, until a job ends */
	expect_within(fetch(1) == SEQ_PAGES, 5000);
	expect_within(number("tier", "tiers.busy") == 0, 3000);
	KVT_EXPECT_EQ(number("audit", "damage"), 0);
	finish();
}

/* A mover that stands still: whoever waits is let go after a second. */
KVT_TEST(prefetch_gives_up_in_time)
{
	u64 start;
	u32 nr;
	pid_t mover;
	int r;

	begin(DRAM_ONLY);
	make_many(40);
	mover = (pid_t)number("status", "mover.pid");
	kill(mover, SIGSTOP);
	start = kv_now_ns();
	r = prefetch(1, &nr);
	KVT_EXPECT(r == KV_PENDING || r == -ETIMEDOUT);
	KVT_EXPECT(kv_now_ns() - start < 3 * KV_NSEC_PER_SEC);
	kill(mover, SIGCONT);
	expect_within(fetch(1) == SEQ_PAGES, 5000);
	finish();
}

/* --------------------------------------------------------------------- configuration */

static void refused(const char *tiers, const char *tenant, const char *has,
		    const char *has_too)
{
	const char *args[] = {"--config", config, "--host-bytes", "8MiB", NULL};
	char error[512];
	int r;

	config_write(tiers, tenant);
	r = eng_private_kvmd_start(args, &kvmd, error, sizeof(error));
	if (!r)
		KVT_FAIL("kvmd started with %s", tiers);
	KVT_EXPECT_HAS(error, has);
	KVT_EXPECT_HAS(error, has_too);
}

KVT_TEST(bad_configuration_is_refused_by_field)
{
	char path[128], to[128];

	dir_make();
	refused("{\"dram\": {\"size\": \"1KiB\"}}", NULL, "tiers.dram.size", "1KiB");
	refused("{\"dram\": {}}", NULL, "tiers.dram", "\"size\" is missing");
	refused("{\"nvme\": {\"path\": \"%s/nvme\", \"size\": \"16MiB\"}}", NULL, "tiers",
		"needs \"dram\"");
	refused("{\"dram\": {\"size\": \"8MiB\"}, \"nvme\": {\"path\": \"nvme\", "
		"\"size\": \"16MiB\"}}",
		NULL, "tiers.nvme.path", "absolute");
	refused("{\"dram\": {\"size\": \"8MiB\", \"colour\": 1}}", NULL,
		"tiers.dram.colour", "unknown field");
	refused(DRAM_ONLY, "[{\"tier\": \"tape\", \"max\": 5}]",
		"tenants[0].tiers[0].tier", "tape");
	refused(DRAM_ONLY, "[{\"tier\": \"dram\", \"min\": \"1GiB\"}]",
		"tenants[0].tiers", "min");
	refused("{\"dram\": {\"size\": \"8MiB\"}, \"nvme\": {\"path\": \"%s/nvme\", "
		"\"size\": \"8TiB\"}}",
		NULL, "tiers.nvme.size", "bytes are free there");
	refused("{\"dram\": {\"size\": \"8TiB\"}}", NULL, "tiers.dram.size",
		"of this host's memory");
	snprintf(path, sizeof(path), "%s/nvme/pages", dir);
	snprintf(to, sizeof(to), "%s/elsewhere", dir);
	unlink(path);
	KVT_EXPECT_EQ(symlink(to, path), 0);
	refused(BOTH, NULL, "tiers.nvme.path", "symbolic link");
	KVT_EXPECT(access(to, F_OK));
	unlink(path);
	dir_remove();
}

KVT_TEST(tenant_budget_of_a_tier_is_kept)
{
	dir_make();
	config_write(DRAM_ONLY, "[{\"tier\": \"dram\", \"max\": \"1500KiB\"}]");
	start();
	attach();
	make_many(40);
	expect_within(number("tier", "tiers.dram.pages") >= 15, 3000);
	KVT_EXPECT(number("tier", "tiers.dram.used_bytes") <= 1500 * 1024);
	KVT_EXPECT_EQ(fetch(40), SEQ_PAGES);
	finish();
}

/* O38: evict domain reaches the tiers. */
KVT_TEST(o38_evicted_domain_is_gone_in_the_tiers)
{
	char *text;

	begin(BOTH);
	make_many(40);
	expect_within(counter("writes") > 100, 5000);
	text = ipc_admin(
		&kvmd,
		"{\"op\":\"evict\",\"target\":\"domain\",\"name\":\"red\",\"dry_run\":true}");
	KVT_EXPECT_HAS(text, "\"stored\":");
	free(text);
	text = ipc_admin(&kvmd,
			 "{\"op\":\"evict\",\"target\":\"domain\",\"name\":\"red\"}");
	KVT_EXPECT_HAS(text, "\"ok\":true");
	free(text);
	KVT_EXPECT_EQ(number("tier", "tiers.nvme.pages"), 0);
	KVT_EXPECT_EQ(fetch_all(40), 0);
	finish();
}

/* Without io_uring: threads, and status says so. */
KVT_TEST(works_on_threads_and_says_so)
{
	const char *args[] = {"--config", config,	"--host-bytes",
			      "8MiB",	  "--no-uring", NULL};

	dir_make();
	config_write(BOTH, NULL);
	ipc_start(&kvmd, args);
	attach();
	make_many(60);
	expect_within(counter("writes") > 100, 5000);
	KVT_EXPECT(fetch_all(60) >= 10 * SEQ_PAGES);
	KVT_EXPECT(health_has("TIER_NVME_SLOW_IO"));
	KVT_EXPECT(health_has("threads (io_uring: switched off)"));
	finish();
}

/* From now on and over exec no file opens with O_DIRECT, as on file systems without it. */
static int forbid_direct(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_DIRECT, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = {.len = KV_ARRAY_SIZE(code), .filter = code};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -errno;
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog) ? -errno : 0;
}

/* dynamo#6032 (O36): where direct I/O is not to be had nothing hangs, and status says so. */
KVT_TEST(o36_without_direct_io_it_works_and_says_so)
{
	if (forbid_direct())
		KVT_SKIP("no system call filters here");
	begin(BOTH);
	make_many(60);
	expect_within(counter("writes") > 100, 5000);
	KVT_EXPECT(fetch_all(60) >= 10 * SEQ_PAGES);
	KVT_EXPECT(counter("reads") > 0);
	KVT_EXPECT(health_has("TIER_NVME_NO_DIRECT"));
	finish();
}

static void ctl(const char *verb, const char *has, int exit_code)
{
	char command[1600], path[1200], out[8192];
	size_t n;
	FILE *f;

	ipc_build_path("kvmctl", path, sizeof(path));
	snprintf(command, sizeof(command), "%s --socket %s %s 2>&1", path,
		 kvmd.admin_path, verb);
	f = popen(command, "r");
	n = fread(out, 1, sizeof(out) - 1, f);
	out[n] = 0;
	KVT_EXPECT_EQ(WEXITSTATUS(pclose(f)), exit_code);
	KVT_EXPECT_HAS(out, has);
}

KVT_TEST(kvmctl_shows_the_tiers)
{
	begin(BOTH);
	make_many(30);
	expect_within(counter("writes") > 50, 5000);
	ctl("tier", "NVMe tier", 0);
	ctl("tier", "restores_nvme", 0);
	ctl("tier --json", "\"schema\":\"kvmctl.tier/1\"", 0);
	ctl("tier --format csv --fields tenant,tier,used_bytes", "red,nvme,", 0);
	ctl("status", "DRAM tier", 7); /* --faults is a warning */
	finish();
}

KVT_MAIN()
