/* SPDX-License-Identifier: Apache-2.0 */
/* Options, refused and silent daemons, a lost connection, a forked child. */
#include "tests/unit/client/common.h"

#include <fcntl.h>
#include <sys/socket.h>
#include "base/clock.h"

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;

static int try_open(struct kvc_options opt)
{
	struct kvc *got = NULL;
	int r = kvc_open(&opt, &got);

	if (!r)
		kvc_close(got);
	return r;
}

KVT_TEST(each_bad_option_is_named)
{
	struct kvc_options good = {.size_bytes = sizeof(good),
				   .socket_path = "/nonexistent/s"};
	struct kvc_options opt = good;
	char name[80];

	opt.size_bytes = 8;
	KVT_EXPECT_EQ(try_open(opt), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "size_bytes=8");
	opt = good;
	opt.flags = 2;
	KVT_EXPECT_EQ(try_open(opt), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "flags=0x2");
	opt = good;
	opt.ring_depth = 100;
	KVT_EXPECT_EQ(try_open(opt), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "ring_depth=100");
	opt = good;
	memset(name, 'x', 79);
	name[79] = 0;
	opt.client_name = name;
	KVT_EXPECT_EQ(try_open(opt), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "client_name: 79 bytes");
	opt.client_name = "a\nb";
	KVT_EXPECT_EQ(try_open(opt), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "0x0a");
	KVT_EXPECT_EQ(try_open(good), -ENOENT);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "/nonexistent/s");
}

/* docs/abi.md: of an application that was built with a later header */
KVT_TEST(larger_options_are_taken_when_the_rest_is_zero)
{
	struct {
		struct kvc_options opt;
		u8 more[16];
	} later = {.opt = {.size_bytes = sizeof(later)}};
	struct kvc *got = NULL;

	fake_start(&fake);
	later.opt.socket_path = fake.path;
	KVT_EXPECT_EQ(kvc_open(&later.opt, &got), 0);
	kvc_close(got);
	fake_stop(&fake);
	later.more[15] = 1;
	KVT_EXPECT_EQ(kvc_open(&later.opt, &got), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "byte 63 is set");
	later.opt.size_bytes = 4097;
	KVT_EXPECT_EQ(kvc_open(&later.opt, &got), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "size_bytes=4097");
}

KVT_TEST(refused_hello_carries_the_reason)
{
	fake.hello_result = -EACCES;
	fake_start(&fake);
	KVT_EXPECT_EQ(
		try_open((struct kvc_options){.size_bytes = sizeof(struct kvc_options),
					      .socket_path = fake.path}),
		-EACCES);
	KVT_EXPECT_HAS(kvc_strerror(NULL), "refused by the test");
	fake_stop(&fake);
}

KVT_TEST(silent_daemon_times_out)
{
	u64 start_ns = kv_now_ns();

	fake.silent = true;
	fake_start(&fake);
	KVT_EXPECT_EQ(
		try_open((struct kvc_options){.size_bytes = sizeof(struct kvc_options),
					      .socket_path = fake.path,
					      .timeout_ms = 80}),
		-ETIMEDOUT);
	KVT_EXPECT_LE((double)(kv_now_ns() - start_ns) * 1e-6, 1000);
	fake_stop(&fake);
}

/* Each thread has its own last error. */
static void *other_thread(void *arg)
{
	return (void *)(uintptr_t)strcmp(kvc_strerror(NULL), "no error");
}

KVT_TEST(last_error_is_per_thread)
{
	pthread_t thread;
	void *ret;

	KVT_EXPECT_EQ(try_open((struct kvc_options){.size_bytes = 1}), -EINVAL);
	pthread_create(&thread, NULL, other_thread, NULL);
	pthread_join(thread, &ret);
	KVT_EXPECT(!ret);
}

/* ----------------------------------------------------------------------- reconnect */

static u32 epochs;

static void on_event(void *arg, const struct kvc_event *event)
{
	epochs += event->type == KV_MSG_EPOCH;
}

static void lose_connection(void)
{
	shutdown(fake.sock, SHUT_RDWR);
	expect_within(fake.sock < 0, 1000);
	fake.table_epoch++;
	fake.next_pfn = 32;
}

KVT_TEST(calls_reconnect_and_open_the_pools_again)
{
	struct kvc_pool_info before, after;
	struct kv_grant old[4], g[4];
	struct kvc_step *step, *next;
	struct kvc_info info;
	u8 *addr;

	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, old), 0);
	kvc_pool_get_info(pool, &before);
	addr = kvc_page_addr(pool, old[0].pfn);
	*addr = 1;
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	lose_connection();
	KVT_EXPECT_EQ(kvc_step_begin(c, &next), 0); /* steps go on while kvmd is away */
	kvc_step_retire(next);
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, g), 0);
	kvc_info(c, &info);
	KVT_EXPECT_EQ(info.table_epoch, fake.table_epoch);
	kvc_pool_get_info(pool, &after);
	KVT_EXPECT(after.base == before.base);
	*addr = 2; /* the old step's memory stays until it retires */
	KVT_EXPECT_EQ(kvc_step_begin(c, &next), 0);
	KVT_EXPECT_EQ(fake.session->slots[1].word, 5);
	kvc_step_retire(next);
	kvc_step_retire(step);
	KVT_EXPECT(kvc_page_addr(pool, old[0].pfn) == NULL);
	kvc_dispatch(c, on_event, NULL);
	KVT_EXPECT_EQ(epochs, 1);
	KVT_EXPECT_EQ(kvc_free(pool, old, 4), 0);
	KVT_EXPECT_EQ(kvc_flush(c), KV_STALE);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_TEST(call_without_a_daemon_waits_to_its_deadline)
{
	struct kv_stat stat;
	u64 start_ns;

	fake_start(&fake);
	c = fake_connect(&fake, 200);
	pool = fake_pool(&fake, c);
	fake_stop(&fake);
	shutdown(fake.sock, SHUT_RDWR);
	close(fake.sock);
	start_ns = kv_now_ns();
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), -ETIMEDOUT);
	KVT_EXPECT(kv_now_ns() - start_ns >= 190 * KV_NSEC_PER_MSEC);
	KVT_EXPECT_LE((double)(kv_now_ns() - start_ns) * 1e-6, 1000);
	KVT_EXPECT_HAS(kvc_strerror(c), fake.path);
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), -ECONNRESET);
	kvc_close(c);
}

/* The session page names another kvmd: a step attaches again before it starts. */
KVT_TEST(foreign_table_epoch_attaches_again)
{
	struct kvc_step *step;
	struct kvc_info info;

	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	fake.table_epoch++;
	kv_store_release64(&fake.session->table_epoch.word, fake.table_epoch);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_info(c, &info);
	KVT_EXPECT_EQ(info.table_epoch, fake.table_epoch);
	kvc_step_retire(step);
	kvc_close(c);
	fake_stop(&fake);
}

/* ---------------------------------------------------------------------------- fork */

static int in_child(int (*fn)(void))
{
	pid_t pid = fork();
	int status;

	if (pid == 0)
		_exit(fn());
	waitpid(pid, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 200;
}

static struct kvc_step *inherited;

/* A step of the parent's: its tables and its slot are not there. */
static int step_calls_answer_ownerdead(void)
{
	struct kvc_check_request q = {.nr_rows = 0};
	struct kv_row row = {0};
	struct kv_verdict v;
	static u8 block[65536];

	if (kvc_step_block(inherited, pool, 0, block, sizeof(block)) != -EOWNERDEAD)
		return 11;
	if (kvc_step_rows(inherited, pool, &row, 1) != -EOWNERDEAD)
		return 12;
	if (kvc_step_check(inherited, pool, &q, 1, &v) != -EOWNERDEAD)
		return 13;
	kvc_step_launched(inherited);
	kvc_step_retire(inherited);
	return 0;
}

static int all_calls_answer_ownerdead(void)
{
	struct kv_incident incident = {0};
	struct kv_grant g = {0};
	struct kvc_step *step;
	struct kv_stat stat;
	struct kv_hit hit;
	struct kvc_pool *p;
	struct kv_layout layout = fake_layout();
	u32 tokens[64] = {0}, nr;

	if (kvc_alloc(pool, 1, 0, &g) != -EOWNERDEAD)
		return 1;
	if (kvc_free(pool, &g, 1) != -EOWNERDEAD)
		return 2;
	if (kvc_step_begin(c, &step) != -EOWNERDEAD)
		return 3;
	if (kvc_stat(pool, &stat) != -EOWNERDEAD)
		return 4;
	if (kvc_lookup(pool, tokens, 64, 1, &hit, &nr) != -EOWNERDEAD)
		return 5;
	if (kvc_flush(c) != -EOWNERDEAD || kvc_dispatch(c, NULL, NULL) != -EOWNERDEAD)
		return 6;
	if (kvc_pool_open(c, &layout, NULL, NULL, &p) != -EOWNERDEAD)
		return 7;
	if (kvc_pin(pool, &g, 1) != -EOWNERDEAD ||
	    kvc_fork(pool, &g, 1, 0, &g) != -EOWNERDEAD)
		return 8;
	if (kvc_page_addr(pool, 0) || kvc_event_fd(c) != -EOWNERDEAD)
		return 9;
	if (strcmp(kvc_strerror(c), "the process forked"))
		return 10;
	if (kvc_report(pool, &incident) != -EOWNERDEAD ||
	    kvc_prefetch(pool, tokens, 64, 1, &nr) != -EOWNERDEAD)
		return 14;
	nr = (u32)step_calls_answer_ownerdead();
	kvc_close(c);
	return (int)nr;
}

KVT_TEST(forked_child_is_poisoned)
{
	struct kv_grant g;

	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	KVT_EXPECT_EQ(kvc_step_begin(c, &inherited), 0);
	KVT_EXPECT_EQ(in_child(all_calls_answer_ownerdead), 0);
	kvc_step_retire(inherited);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0); /* the parent goes on */
	kvc_close(c);
	fake_stop(&fake);
}

/* The numbers that the first fork closed are other descriptors when it forks again. */
static int fds_of_child[64];

static int they_are_open(void)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(fds_of_child); i++)
		if (fcntl(fds_of_child[i], F_GETFD) < 0)
			return 2;
	return 0;
}

static int opens_and_forks(void)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(fds_of_child); i++)
		fds_of_child[i] = open("/dev/null", O_RDONLY);
	return in_child(they_are_open);
}

KVT_TEST(childs_child_keeps_its_descriptors)
{
	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	KVT_EXPECT_EQ(in_child(opens_and_forks), 0);
	kvc_close(c);
	fake_stop(&fake);
}

/* The child holds nothing of the session: no descriptor, no mapping. */
static int nothing_is_left(void)
{
	char line[512];
	FILE *f = fopen("/proc/self/maps", "r");
	int found = 0;

	while (f && fgets(line, sizeof(line), f))
		found += strstr(line, "fake-extent") != NULL;
	for (int fd = 0; fd < 64; fd++) {
		char path[64], target[128] = "";

		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		if (readlink(path, target, sizeof(target) - 1) > 0)
			found +=
				strstr(target, "nvidia") || strstr(target, "fake-extent");
	}
	return found;
}

KVT_TEST(forked_child_keeps_no_pages)
{
	struct kv_grant g[20];

	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 20, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(nothing_is_left() > 0, 1); /* the test would see them */
	KVT_EXPECT_EQ(in_child(nothing_is_left), 0);
	kvc_close(c);
	fake_stop(&fake);
}

/* An extent that waits for a step of before a reconnect is a descriptor only. */
KVT_TEST(forked_child_keeps_no_extent_that_waits)
{
	struct kvc_step *step;
	struct kv_stat st;

	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	fake_extent_add(&fake, 0);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	lose_connection();
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	fake_extent_add(&fake, 0);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(in_child(nothing_is_left), 0);
	kvc_step_retire(step);
	KVT_EXPECT(kvc_page_addr(pool, 0) != NULL);
	kvc_close(c);
	fake_stop(&fake);
}

/* facts F-fork-gpu: an inherited device descriptor keeps a dead parent's kernels running.
 */
KVT_TEST(forked_child_closes_gpu_descriptors)
{
	const char *path = "/dev/nvidia-kvt-test";
	int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);

	if (fd < 0)
		KVT_SKIP("cannot make %s: %s", path, strerror(errno));
	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	KVT_EXPECT_EQ(nothing_is_left(), 1);
	KVT_EXPECT_EQ(in_child(nothing_is_left), 0);
	KVT_EXPECT_EQ(nothing_is_left(), 1); /* the parent's stays open */
	unlink(path);
	kvc_close(c);
	fake_stop(&fake);
}

KVT_MAIN()
