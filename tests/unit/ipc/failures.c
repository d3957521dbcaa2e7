/* SPDX-License-Identifier: Apache-2.0 */
/* What fails around the daemon: file descriptors, memory, peers that do not read. */
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define STATUS "{\"op\":\"status\"}"
#define PAGES  "{\"op\":\"pages\"}"

static struct daemon d;

KVT_TEST_T(o58_running_out_of_fds_drops_one_peer_at_a_time, 60)
{
	struct kv_msg bad = {.magic = 1, .type = 9, .size_bytes = sizeof(bad)};
	int i, before, fds[3] = {0, 1, 2};
	struct rlimit lim, low;
	struct raw good, c[50];
	struct kv_grant g;

	daemon_start(&d, NULL);
	raw_open(&good, &d);
	KVT_EXPECT_EQ(raw_alloc(&good, 1, KV_GFP_NOWAIT, &g), 0);
	before = daemon_nr_fds(&d);
	KVT_EXPECT(!prlimit(d.pid, RLIMIT_NOFILE, NULL, &lim));
	low = lim;
	low.rlim_cur = (rlim_t)daemon_free_fd(&d); /* "current + 0": the next one fails */
	KVT_EXPECT(!prlimit(d.pid, RLIMIT_NOFILE, &low, NULL));
	for (i = 0; i < 50; i++) {
		raw_connect(&c[i], &d);
		raw_send_fds(&c[i], &bad, sizeof(bad), fds, 3);
	}
	for (i = 0; i < 50; i++) {
		KVT_EXPECT(raw_hung_up(&c[i]));
		raw_close(&c[i]);
	}
	KVT_EXPECT_EQ(raw_free(&good, &g, 1), 0); /* alive, and the old peer is served */
	KVT_EXPECT(!prlimit(d.pid, RLIMIT_NOFILE, &lim, NULL));
	raw_open(&c[0], &d);
	KVT_EXPECT_EQ(raw_alloc(&c[0], 1, KV_GFP_NOWAIT, &g), 0);
	raw_close(&c[0]);
	for (i = 0; i < 50 && daemon_nr_fds(&d) != before; i++)
		usleep(20000);
	KVT_EXPECT_EQ(daemon_nr_fds(&d), before);
	raw_close(&good);
	daemon_stop(&d);
}

KVT_TEST_T(a_peer_that_never_reads_is_dropped, 60)
{
	static struct kv_grant g[1500];
	char ask[96];
	struct raw c, other;
	u32 i;

	daemon_start(&d, NULL);
	raw_open(&other, &d);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(raw_alloc(&c, 1500, KV_GFP_NOWAIT, g), 0);
	for (i = 0; i < 1500; i++) { /* each is a REVOKE that nobody reads */
		snprintf(
			ask, sizeof(ask),
			"{\"op\":\"evict\",\"target\":\"page\",\"pfn\":%u,\"revoke\":true}",
			g[i].pfn);
		cJSON_Delete(daemon_ask(&d, ask));
		if (daemon_number(&d, STATUS, "sessions") == 1)
			break;
	}
	KVT_EXPECT(i < 1500);
	KVT_EXPECT_EQ(raw_alloc(&other, 1, KV_GFP_NOWAIT, g), 0);
	raw_close(&c);
	raw_close(&other);
	daemon_stop(&d);
}

static void with_faults(struct kvd_options *opt)
{
	opt->faults = "memfd:probability=0"; /* allowed, none armed */
}

/* The extent's fd may fail to go out: then the session ends instead of answering. */
static int alloc_try(struct raw *c)
{
	struct kv_sqe sqe = {.opcode = KV_OP_ALLOC, .nr = 4, .ret_bytes = 64};
	int ms;

	sqe.pool_id = c->pool.pool_id;
	sqe.gfp = KV_GFP_NOWAIT;
	raw_submit(c, sqe);
	for (ms = 5000; ms; ms--) {
		if (kv_load_acquire32(&c->ring->cq_tail) != c->cq_head)
			return raw_wait(c).result;
		if (!kv_load_acquire64(&c->page->table_epoch.word))
			return -ECONNRESET;
		usleep(1000);
	}
	KVT_FAIL("neither an answer nor an end");
}

/* HELLO, POOL_OPEN, ALLOC, with what may fail failing once. Return: everything went well
 */
static bool whole_attempt(void)
{
	struct kv_layout layout;
	bool good = false;
	struct raw c;
	int r;

	raw_connect(&c, &d);
	r = raw_hello_try(&c, "sweep");
	if (r == -ECONNRESET) /* refused before it could say anything */
		goto close_it;
	if (r) {
		KVT_EXPECT(r == -ENOMEM || r == -EMFILE);
		KVT_EXPECT(strlen(c.hello.error) > 3);
		goto close_it;
	}
	raw_layout(&layout);
	r = raw_pool_open(&c, &layout);
	if (r == -ECONNRESET)
		goto close_it;
	if (r) {
		KVT_EXPECT(r == -ENOMEM || r == -EMFILE);
		KVT_EXPECT(strlen(c.pool.error) > 3);
		goto close_it;
	}
	r = alloc_try(&c);
	KVT_EXPECT(r == 0 || r == KV_FULL || r == -EIO || r == -EMFILE || r == -ENOMEM ||
		   r == -ECONNRESET);
	good = r == 0;
close_it:
	raw_close(&c);
	daemon_wait(&d, STATUS, "sessions", 0, 2000);
	return good;
}

/*
 * The 1st, 2nd, 3rd ... thing that may fail fails, until none is left: each time the peer
 * gets an answer, the daemon lives, and no descriptor, page or extent stays behind.
 */
KVT_TEST(each_failure_on_the_way_leaves_nothing_behind)
{
	int nth, fds = 0, failed = 0, fired;
	char ask[64];

	daemon_start(&d, with_faults);
	for (nth = 1; nth < 100; nth++) {
		snprintf(ask, sizeof(ask), "{\"op\":\"fault\",\"fail_nth\":%d}", nth);
		cJSON_Delete(daemon_ask(&d, ask));
		failed += !whole_attempt();
		fired = (int)daemon_number(&d, "{\"op\":\"fault\"}", "fired");
		KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"audit\"}", "damage"), 0);
		if (!fired)
			break;
	}
	KVT_NOTE("%d points, %d attempts failed", nth - 1, failed);
	KVT_EXPECT(nth > 5 && nth < 100 && failed >= 4);
	cJSON_Delete(daemon_ask(&d, "{\"op\":\"fault\",\"fail_nth\":0}"));
	KVT_EXPECT(whole_attempt());
	usleep(50000);
	fds = daemon_nr_fds(&d);
	for (nth = 0; nth < 5; nth++)
		KVT_EXPECT(whole_attempt());
	usleep(50000);
	KVT_EXPECT_EQ(daemon_nr_fds(&d), fds);
	daemon_stop(&d);
}

static char config_path[96];

static void policy_write(const char *text)
{
	int fd = open(config_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

	KVT_EXPECT(fd >= 0);
	KVT_EXPECT_EQ(write(fd, text, strlen(text)), strlen(text));
	close(fd);
}

static void with_policy(struct kvd_options *opt)
{
	with_faults(opt);
	snprintf(config_path, sizeof(config_path), "%.80s/kvmd.json", opt->state_dir);
	policy_write("{\"tenants\":[{\"name\":\"red\",\"uids\":[0],\"gpus\":[{\"gpu\":"
		     "\"*\",\"min\":\"1MiB\",\"max\":\"9MiB\"}]}]}");
	opt->config_path = config_path;
}

/* A reload that fails in its middle has changed no limit and made no tenant. */
KVT_TEST(reload_that_fails_changes_nothing)
{
	static const char two[] =
		"{\"tenants\":[{\"name\":\"new\",\"uids\":[64997]},{\"name\":\"red\","
		"\"uids\":[0],\"gpus\":[{\"gpu\":\"*\",\"max\":\"5MiB\"}]},{\"name\":"
		"\"newer\",\"uids\":[64998]}]}";
	cJSON *doc;

	daemon_start(&d, with_policy);
	policy_write(two);
	for (u32 nth = 0; nth < 2; nth++) {
		char ask[96];

		snprintf(ask, sizeof(ask),
			 "{\"op\":\"fault\",\"spec\":\"tenant_alloc:space=%u,times=1\"}",
			 nth);
		cJSON_Delete(daemon_ask(&d, ask));
		doc = daemon_ask(&d, "{\"op\":\"reload\"}");
		KVT_EXPECT(cJSON_IsFalse(cJSON_GetObjectItem(doc, "ok")));
		KVT_EXPECT_HAS(cJSON_GetObjectItem(doc, "error")->valuestring,
			       nth ? "tenants[2]" : "tenants[0]");
		cJSON_Delete(doc);
		KVT_EXPECT_EQ(daemon_number(&d, STATUS, "config_revision"), 1);
		doc = daemon_ask(&d, "{\"op\":\"tenant\"}");
		KVT_EXPECT_EQ(cJSON_GetArraySize(cJSON_GetObjectItem(doc, "tenants")), 1);
		cJSON_Delete(doc);
		KVT_EXPECT_EQ(
			daemon_number(&d, "{\"op\":\"tenant\"}", "tenants.0.max_bytes"),
			9 << 20);
		KVT_EXPECT_EQ(
			daemon_number(&d, "{\"op\":\"tenant\"}", "tenants.0.min_bytes"),
			1 << 20);
	}
	doc = daemon_ask(&d, "{\"op\":\"reload\"}");
	KVT_EXPECT(cJSON_IsTrue(cJSON_GetObjectItem(doc, "ok")));
	cJSON_Delete(doc);
	daemon_stop(&d);
}

KVT_TEST(faults_need_the_command_line)
{
	cJSON *doc;

	daemon_start(&d, NULL);
	doc = daemon_ask(&d, "{\"op\":\"fault\",\"spec\":\"memfd\"}");
	KVT_EXPECT_EQ(cJSON_GetObjectItem(doc, "code")->valueint, -EPERM);
	cJSON_Delete(doc);
	daemon_stop(&d);
}

KVT_MAIN()
