/* SPDX-License-Identifier: Apache-2.0 */
/* A whole daemon and bare clients: HELLO, pools, rings, hostile entries, quotas, waiting.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define STATUS "{\"op\":\"status\"}"
#define PAGES  "{\"op\":\"pages\"}"

static struct daemon d;
static char config_path[96];

static void config_write(const char *text)
{
	FILE *f = fopen(config_path, "we");

	KVT_EXPECT(f);
	fputs(text, f);
	fclose(f);
}

static void with_config(struct kvd_options *opt)
{
	snprintf(config_path, sizeof(config_path), "%.80s/kvmd.json", opt->state_dir);
	opt->config_path = config_path;
}

/* ---------------------------------------------------------------- beginning */

static int hello_with(void (*change)(struct kv_msg_hello *h), char *error)
{
	struct kv_msg_hello hello;
	struct kv_msg_hello_reply reply;
	struct raw c;

	raw_connect(&c, &d);
	raw_hello_fill(&hello);
	change(&hello);
	raw_send(&c, &hello, sizeof(hello));
	KVT_EXPECT_EQ(raw_receive(&c, &reply, sizeof(reply)), sizeof(reply));
	KVT_EXPECT_EQ(c.nr_fds, 0);
	strcpy(error, reply.error);
	KVT_EXPECT(raw_hung_up(&c));
	raw_close(&c);
	return reply.result;
}

static void h_newer(struct kv_msg_hello *h)
{
	h->abi_min = 7;
	h->abi_max = 9;
}

static void h_swapped(struct kv_msg_hello *h)
{
	h->abi_min = 2;
	h->abi_max = 1;
}

static void h_role(struct kv_msg_hello *h)
{
	h->role = 5;
}

static void h_depth(struct kv_msg_hello *h)
{
	h->ring_depth = 48;
}

static void h_empty(struct kv_msg_hello *h)
{
	memset(h->client_name, 0, sizeof(h->client_name));
}

static void h_endless(struct kv_msg_hello *h)
{
	memset(h->client_name, 'a', sizeof(h->client_name));
}

static void h_control(struct kv_msg_hello *h)
{
	strcpy(h->client_name, "ab\ncd");
}

KVT_TEST(hello_names_what_it_refuses)
{
	char e[128];

	daemon_start(&d, NULL);
	KVT_EXPECT_EQ(hello_with(h_newer, e), -EPROTONOSUPPORT);
	KVT_EXPECT_HAS(e, "abi_min=7");
	KVT_EXPECT_EQ(hello_with(h_swapped, e), -EINVAL);
	KVT_EXPECT_HAS(e, "abi_min=2");
	KVT_EXPECT_EQ(hello_with(h_role, e), -EINVAL);
	KVT_EXPECT_HAS(e, "role=5");
	KVT_EXPECT_EQ(hello_with(h_depth, e), -EINVAL);
	KVT_EXPECT_HAS(e, "ring_depth=48");
	KVT_EXPECT_EQ(hello_with(h_empty, e), -EINVAL);
	KVT_EXPECT_HAS(e, "client_name");
	KVT_EXPECT_EQ(hello_with(h_endless, e), -EINVAL);
	KVT_EXPECT_HAS(e, "client_name");
	KVT_EXPECT_EQ(hello_with(h_control, e), -EINVAL);
	KVT_EXPECT_HAS(e, "0x0a");
	daemon_wait(&d, STATUS, "sessions", 0, 1000);
	daemon_stop(&d);
}

static void with_stranger(struct kvd_options *opt)
{
	with_config(opt);
	config_write("{\"tenants\":[{\"name\":\"red\",\"uids\":[64999]}]}");
}

/* R8: a name in the message does not make a tenant. */
KVT_TEST(unknown_uid_is_refused)
{
	struct raw c;

	daemon_start(&d, with_stranger);
	raw_connect(&c, &d);
	KVT_EXPECT_EQ(raw_hello(&c, "red"), -EACCES);
	KVT_EXPECT_HAS(c.hello.error, "uid");
	raw_close(&c);
	daemon_stop(&d);
}

KVT_TEST(pool_open_names_the_field)
{
	static const u8 uuid[16] = {1, 2, 3};
	struct kv_msg_pool_open msg;
	struct kv_layout layout;
	struct raw c;

	daemon_start(&d, NULL);
	raw_connect(&c, &d);
	KVT_EXPECT_EQ(raw_hello(&c, "raw"), 0);
	raw_layout(&layout);
	layout.dtype = 9;
	KVT_EXPECT_EQ(raw_pool_open(&c, &layout), -EINVAL);
	KVT_EXPECT_STR(c.pool.field, "dtype");
	KVT_EXPECT_HAS(c.pool.error, "9");
	raw_layout(&layout);
	layout.dtype = KV_DTYPE_F32; /* without --test-layouts */
	layout.scale_kind = KV_SCALE_NONE;
	KVT_EXPECT_EQ(raw_pool_open(&c, &layout), -EINVAL);
	KVT_EXPECT_STR(c.pool.field, "dtype");
	raw_layout(&layout);
	memset(&msg, 0, sizeof(msg));
	msg.msg = (struct kv_msg){KV_MSG_MAGIC, KV_MSG_POOL_OPEN, 0, sizeof(msg), 5};
	memcpy(msg.gpu_uuid, uuid, sizeof(uuid));
	msg.layout = layout;
	raw_send(&c, &msg, sizeof(msg));
	KVT_EXPECT_EQ(raw_receive(&c, &c.pool, sizeof(c.pool)), sizeof(c.pool));
	KVT_EXPECT_EQ(c.pool.result, -ENODEV);
	KVT_EXPECT_HAS(c.pool.error, "GPU-01020300-");
	KVT_EXPECT_EQ(raw_pool_open(&c, &layout), 0); /* the connection lives on */
	raw_close(&c);
	daemon_stop(&d);
}

KVT_TEST(messages_that_break_the_protocol_close_that_peer_only)
{
	struct kv_msg_pool_close close_msg;
	struct kv_msg m = {KV_MSG_MAGIC, KV_MSG_POOL_OPEN, 0, sizeof(m), 1};
	struct kv_grant g;
	struct raw good, c;
	int i;

	daemon_start(&d, NULL);
	raw_open(&good, &d);
	for (i = 0; i < 5; i++) {
		raw_connect(&c, &d);
		if (i > 0)
			KVT_EXPECT_EQ(raw_hello(&c, "bad"), 0);
		memset(&close_msg, 0, sizeof(close_msg));
		close_msg.msg = (struct kv_msg){KV_MSG_MAGIC, KV_MSG_POOL_CLOSE, 0,
						sizeof(close_msg), 1};
		close_msg.pool_id = 99;
		m.type = (u16[]){KV_MSG_POOL_OPEN, KV_MSG_POOL_OPEN, KV_MSG_REVOKE, 999,
				 0}[i];
		if (i < 4)
			raw_send(&c, &m, sizeof(m));
		else
			raw_send(&c, &close_msg, sizeof(close_msg));
		KVT_EXPECT(raw_hung_up(&c));
		raw_close(&c);
	}
	KVT_EXPECT_EQ(raw_alloc(&good, 1, KV_GFP_NOWAIT, &g), 0);
	raw_close(&good);
	daemon_stop(&d);
}

/* -------------------------------------------------------------------- rings */

KVT_TEST(alloc_free_and_free_again)
{
	struct kv_msg_extents added;
	struct kv_grant g[100], one;
	struct raw c;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(raw_alloc(&c, 100, KV_GFP_NOWAIT, g), 0);
	/* The extent's fd was sent before the completion showed its pages. */
	KVT_EXPECT(recv(c.fd, &added, sizeof(added), MSG_PEEK | MSG_DONTWAIT) > 0);
	raw_receive(&c, &added, sizeof(added));
	KVT_EXPECT_EQ(added.msg.type, KV_MSG_EXTENT_ADDED);
	KVT_EXPECT_EQ(added.nr, c.nr_fds);
	KVT_EXPECT_EQ(lseek(c.fds[0], 0, SEEK_END), c.pool.geometry.extent_bytes);
	KVT_EXPECT_EQ(daemon_number(&d, PAGES, "pools.0.active"), 100);
	KVT_EXPECT_EQ(raw_free(&c, g, 100), 0);
	KVT_EXPECT_EQ(raw_free(&c, g, 1), KV_STALE);
	one = g[0];
	KVT_EXPECT_EQ(raw_alloc(&c, 1, KV_GFP_NOWAIT, &one), 0);
	KVT_EXPECT_EQ(raw_free(&c, &g[0], 1),
		      KV_STALE); /* old generation, whoever has it */
	daemon_wait(&d, PAGES, "pools.0.active", 1, 1000);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"audit\"}", "damage"), 0);
	raw_close(&c);
	daemon_wait(&d, PAGES, "pools.0.active", 0, 1000);
	daemon_stop(&d);
}

KVT_TEST(bad_entries_are_answered_and_change_nothing)
{
	struct kv_sqe good = {.opcode = KV_OP_ALLOC, .nr = 4, .ret_bytes = 64}, s;
	struct raw c;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	good.pool_id = c.pool.pool_id;
	good.gfp = KV_GFP_NOWAIT;
	s = good;
	s.opcode = 200;
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -EOPNOTSUPP);
	s = good;
	s.reserved[4] = 1;
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -EINVAL);
	s = good;
	s.pool_id = 7;
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -ENOENT);
	s = good;
	s.ret_off = KV_ARG_BYTES - 8;
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -EFAULT);
	s = good;
	s.ret_bytes = 8;
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -ENOSPC);
	s = (struct kv_sqe){.opcode = KV_OP_FREE, .pool_id = c.pool.pool_id, .nr = 1};
	s.arg_bytes = sizeof(struct kv_page_ref);
	s.arg_off = 0xfffffff8;
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -EFAULT);
	s = (struct kv_sqe){
		.opcode = KV_OP_PREFETCH, .pool_id = c.pool.pool_id, .arg_bytes = 16};
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, -EOPNOTSUPP);
	KVT_EXPECT_EQ(daemon_number(&d, PAGES, "pools.0.active"), 0);
	raw_submit(&c, good);
	KVT_EXPECT_EQ(raw_wait(&c).result, 0);
	raw_close(&c);
	daemon_stop(&d);
}

KVT_TEST(hostile_rings_end_their_session_only)
{
	struct kv_grant g;
	struct raw good, c;
	u64 one = 1;
	int i, fds;

	daemon_start(&d, NULL);
	raw_open(&good, &d);
	KVT_EXPECT_EQ(raw_alloc(&good, 1, KV_GFP_NOWAIT, &g), 0);
	fds = daemon_nr_fds(&d);
	for (i = 0; i < 3; i++) {
		raw_open(&c, &d);
		KVT_EXPECT_EQ(raw_alloc(&c, 1, KV_GFP_NOWAIT, &g), 0);
		if (i == 0)
			c.ring->sq_tail += 100000;
		if (i == 1) {
			c.ring->cq_head -= 100000;
			c.ring->sq_tail++;
		}
		if (i == 2) /* yesterday's entry */
			c.sq[c.ring->sq_tail++ & (c.ring->sq_depth - 1)] =
				(struct kv_sqe){.ring_nonce = c.hello.ring_nonce + 1};
		KVT_EXPECT_EQ(write(c.sq_event, &one, sizeof(one)), sizeof(one));
		KVT_EXPECT(raw_hung_up(&c));
		/* P8: no new step can start. */
		KVT_EXPECT_EQ(kv_load_acquire64(&c.page->table_epoch.word), 0);
		raw_close(&c);
	}
	KVT_EXPECT_EQ(raw_alloc(&good, 1, KV_GFP_NOWAIT, &g), 0);
	daemon_wait(&d, PAGES, "pools.0.active", 2, 1000);
	for (i = 0; i < 100 && daemon_nr_fds(&d) != fds; i++)
		usleep(10000); /* the admin connection is on its way out */
	KVT_EXPECT_EQ(daemon_nr_fds(&d), fds);
	raw_close(&good);
	daemon_stop(&d);
}

KVT_TEST(shared_memory_is_sealed)
{
	struct kv_layout layout;
	void *table;
	struct raw c;

	daemon_start(&d, NULL);
	raw_connect(&c, &d);
	KVT_EXPECT_EQ(raw_hello(&c, "raw"), 0);
	raw_layout(&layout);
	KVT_EXPECT_EQ(raw_pool_open(&c, &layout), 0);
	KVT_EXPECT_EQ(c.nr_fds, 1);
	table = mmap(NULL, c.pool.table_bytes, PROT_READ, MAP_SHARED, c.fds[0], 0);
	KVT_EXPECT(table != MAP_FAILED);
	KVT_EXPECT_EQ(((struct kv_table *)table)->magic, KV_TABLE_MAGIC);
	KVT_EXPECT_EQ(((struct kv_table *)table)->fingerprint, c.pool.fingerprint);
	KVT_EXPECT(mmap(NULL, c.pool.table_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			c.fds[0], 0) == MAP_FAILED);
	KVT_EXPECT(mprotect(table, 4096, PROT_READ | PROT_WRITE) == -1);
	KVT_EXPECT(ftruncate(c.fds[0], 0) == -1);
	raw_close(&c);
	daemon_stop(&d);
}

/* A full CQ pauses that session; another one is served meanwhile. */
KVT_TEST(a_session_that_reads_no_completions_is_paused)
{
	struct kv_sqe nop = {.opcode = KV_OP_NOP};
	struct raw c, other;
	u32 i, depth;
	u64 one = 1;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	raw_open(&other, &d);
	depth = c.ring->sq_depth;
	nop.ring_nonce = c.hello.ring_nonce;
	for (i = 0; i < 3 * depth; i++) {
		int ms = 1000;

		while (c.ring->sq_tail - kv_load_acquire32(&c.ring->sq_head) == depth &&
		       ms--)
			usleep(1000);
		if (ms < 0)
			break;
		c.sq[c.ring->sq_tail & (depth - 1)] = nop;
		kv_store_release32(&c.ring->sq_tail, c.ring->sq_tail + 1);
		KVT_EXPECT_EQ(write(c.sq_event, &one, sizeof(one)), sizeof(one));
		if (i >= 2 * depth + depth - 1)
			break;
	}
	usleep(50000);
	KVT_EXPECT_EQ(c.ring->cq_tail, 2 * depth); /* as many as fit, no more */
	nop.ring_nonce = 0;
	raw_submit(&other, nop);
	KVT_EXPECT_EQ(raw_wait(&other).result, 0);
	for (i = 0; i < 2 * depth; i++)
		KVT_EXPECT_EQ(raw_wait(&c).result, 0);
	KVT_EXPECT_EQ(raw_wait(&c).result, 0); /* goes on by itself */
	raw_close(&c);
	raw_close(&other);
	daemon_stop(&d);
}

KVT_TEST(magazine_is_stocked)
{
	struct kv_sqe s = {.opcode = KV_OP_ALLOC, .flags = KV_SQE_MAGAZINE, .nr = 16};
	u32 pfn, i, got = 0;
	struct kv_cqe cqe;
	int dirty;
	u64 tag;
	struct raw c;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	s.pool_id = c.pool.pool_id;
	s.gfp = KV_GFP_NOWAIT;
	s.magazine = 3;
	c.page->magazines[3].pool_id = c.pool.pool_id;
	raw_submit(&c, s);
	cqe = raw_wait(&c);
	KVT_EXPECT_EQ(cqe.result, 0);
	KVT_EXPECT_EQ(cqe.nr, 16);
	for (i = 0; i < KV_MAGAZINE_SLOTS; i++)
		got += (u32)kv_mag_pop(&c.page->magazines[3].slots[i], &pfn, &tag,
				       &dirty);
	KVT_EXPECT_EQ(got, 16);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"ps\"}", "sessions.0.pages"), 16);
	raw_close(&c);
	daemon_wait(&d, PAGES, "pools.0.active", 0, 1000);
	daemon_stop(&d);
}

/* ------------------------------------------------------- quotas and waiting */

static void with_quota(struct kvd_options *opt)
{
	char text[256];

	with_config(opt);
	snprintf(
		text, sizeof(text),
		"{\"tenants\":[{\"name\":\"red\",\"uids\":[%u],\"gpus\":[{\"gpu\":\"host\","
		"\"max\":%u}]}]}",
		geteuid(), 50 * 77824);
	config_write(text);
}

KVT_TEST(quota_is_hard_and_reload_is_all_or_nothing)
{
	struct kv_grant g[60];
	char text[256];
	struct raw c;
	cJSON *doc;

	daemon_start(&d, with_quota);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(c.pool.geometry.stride_bytes, 77824);
	KVT_EXPECT_EQ(raw_alloc(&c, 51, KV_GFP_NOWAIT, g), KV_QUOTA);
	KVT_EXPECT_EQ(raw_alloc(&c, 50, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(raw_alloc(&c, 1, KV_GFP_NOWAIT, g), KV_QUOTA);
	config_write("{\"tenants\":[\n{\"name\":\"red\",\"uids\":[0],\n\"gpuz\":[]}]}");
	doc = daemon_ask(&d, "{\"op\":\"reload\"}");
	KVT_EXPECT(cJSON_IsFalse(cJSON_GetObjectItem(doc, "ok")));
	KVT_EXPECT_HAS(cJSON_GetObjectItem(doc, "error")->valuestring, "line 3");
	cJSON_Delete(doc);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"tenant\"}", "tenants.0.max_bytes"),
		      50 * 77824);
	snprintf(text, sizeof(text),
		 "{\"tenants\":[{\"name\":\"red\",\"uids\":[%u]}],"
		 "\"pool\":{\"extent\":\"4MiB\"}}",
		 geteuid());
	config_write(text);
	doc = daemon_ask(&d, "{\"op\":\"reload\"}");
	KVT_EXPECT_HAS(cJSON_GetObjectItem(doc, "error")->valuestring,
		       "pool.extent: 4194304");
	cJSON_Delete(doc);
	KVT_EXPECT_EQ(daemon_number(&d, STATUS, "config_revision"), 1);
	snprintf(
		text, sizeof(text),
		"{\"tenants\":[{\"name\":\"red\",\"uids\":[%u],\"gpus\":[{\"gpu\":\"host\","
		"\"max\":4096}]}]}",
		geteuid());
	config_write(text);
	/* a dry run says the same and changes nothing */
	KVT_EXPECT_EQ(
		daemon_number(&d, "{\"op\":\"reload\",\"dry_run\":true}", "deferred"), 1);
	KVT_EXPECT_EQ(daemon_number(&d, STATUS, "config_revision"), 1);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"tenant\"}", "tenants.0.max_bytes"),
		      50 * 77824);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"reload\"}", "deferred"), 1);
	KVT_EXPECT_EQ(daemon_number(&d, STATUS, "config_revision"), 2);
	raw_close(&c);
	daemon_wait(&d, PAGES, "pools.0.active", 0, 1000);
	daemon_stop(&d);
}

static void policy_check(const char *mode)
{
	char text[128];

	snprintf(text, sizeof(text),
		 "{\"check\":\"%s\",\"tenants\":[{\"name\":\"red\",\"uids\":[%u]}]}",
		 mode, geteuid());
	config_write(text);
}

static void with_check_off(struct kvd_options *opt)
{
	with_config(opt);
	policy_check("off");
}

static bool says_check_off(void)
{
	cJSON *doc = daemon_ask(&d, STATUS);
	char *text = cJSON_PrintUnformatted(doc);
	const bool found = strstr(text, "CHECK_OFF");

	cJSON_free(text);
	cJSON_Delete(doc);
	return found;
}

/* Who was told to read without the check does so until it connects again. */
KVT_TEST(check_off_lasts_as_long_as_its_sessions)
{
	struct raw old, young;

	daemon_start(&d, with_check_off);
	raw_open(&old, &d);
	KVT_EXPECT(says_check_off());
	policy_check("batch");
	cJSON_Delete(daemon_ask(&d, "{\"op\":\"reload\"}"));
	raw_open(&young, &d);
	KVT_EXPECT(says_check_off());
	raw_close(&old);
	daemon_wait(&d, STATUS, "sessions", 1, 1000);
	KVT_EXPECT(!says_check_off());
	raw_close(&young);
	daemon_stop(&d);
}

static void with_one_extent(struct kvd_options *opt)
{
	opt->host_bytes = 2u << 20;
}

static u32 fill(struct raw *c, struct kv_grant *g, u32 max)
{
	u32 nr = 0;

	while (nr < max && raw_alloc(c, 1, KV_GFP_NOWAIT, &g[nr]) == 0)
		nr++;
	return nr;
}

KVT_TEST(gfp_wait_parks_until_quarantine_drains)
{
	struct kv_sqe s = {
		.opcode = KV_OP_ALLOC, .nr = 3, .ret_bytes = 48, .ret_off = 8192};
	struct kv_grant g[256], more[4];
	struct kv_cqe cqe;
	u32 nr;
	struct raw c;

	daemon_start(&d, with_one_extent);
	raw_open(&c, &d);
	nr = fill(&c, g, 256);
	KVT_EXPECT(nr > 8 && nr < 256);
	KVT_EXPECT_EQ(raw_alloc(&c, 1, KV_GFP_PREFILL, more), KV_FULL);
	/* A step that was announced before the free keeps the pages in quarantine. */
	c.page->slots[0].word = 1;
	KVT_EXPECT_EQ(raw_free(&c, g, 8), 0);
	KVT_EXPECT_EQ(raw_alloc(&c, 3, KV_GFP_NOWAIT, more), KV_PENDING);
	s.pool_id = c.pool.pool_id;
	s.gfp = KV_GFP_PREFILL;
	raw_submit(&c, s);
	usleep(100000);
	KVT_EXPECT_EQ(kv_load_acquire32(&c.ring->cq_tail), c.cq_head); /* still waiting */
	KVT_EXPECT_EQ(raw_free(&c, &g[8], 1), 0); /* and holds nobody up */
	KVT_EXPECT_EQ(daemon_number(&d, PAGES, "pools.0.quarantine"), 9);
	kv_store_release64(&c.page->slots[0].word,
			   KV_SLOT_IDLE); /* retires; the kick is lost */
	cqe = raw_wait(&c);
	KVT_EXPECT_EQ(cqe.result, 0);
	KVT_EXPECT_EQ(cqe.nr, 3);
	raw_close(&c);
	daemon_stop(&d);
}

KVT_TEST(gfp_wait_is_bounded)
{
	struct kv_grant g[256], more[4];
	struct raw c;
	u32 nr;

	daemon_start(&d, with_one_extent);
	raw_open(&c, &d);
	nr = fill(&c, g, 256);
	KVT_EXPECT(nr > 8);
	c.page->slots[0].word = 1;
	KVT_EXPECT_EQ(raw_free(&c, g, 8), 0);
	KVT_EXPECT_EQ(raw_alloc(&c, 3, KV_GFP_PREFILL, more), KV_PENDING);
	raw_close(&c);
	daemon_stop(&d);
}

/* -------------------------------------------------------------------- admin */

KVT_TEST(admin_answers_bad_requests)
{
	static const char *const bad[] = {
		"7",	      "{}",
		"nonsense",   "{\"op\":\"frobnicate\"}",
		"{\"op\":5}", "{\"op\":\"page\",\"pfn\":1}",
		"[]",	      "{\"op\":\"evict\",\"target\":\"world\"}",
	};
	cJSON *doc;
	size_t i;

	daemon_start(&d, NULL);
	for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		doc = daemon_ask(&d, bad[i]);
		KVT_EXPECT(cJSON_IsFalse(cJSON_GetObjectItem(doc, "ok")));
		KVT_EXPECT(cJSON_GetObjectItem(doc, "code")->valuedouble < 0);
		KVT_EXPECT(strlen(cJSON_GetObjectItem(doc, "error")->valuestring) > 3);
		cJSON_Delete(doc);
	}
	daemon_stop(&d);
}

KVT_MAIN()
