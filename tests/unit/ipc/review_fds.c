/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A message that waits names its descriptors by number. A client that does not read must
 * not get what has the number by the time it reads: memory of somebody else.
 */
#include <poll.h>
#include <sys/stat.h>

#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define INODES_MAX 1024

static struct daemon d;
static ino_t inodes[INODES_MAX];
static u32 nr_inodes;

static u32 queued(void)
{
	cJSON *doc = daemon_ask(&d, "{\"op\":\"trace\",\"state\":\"sessions/rings\"}");
	const cJSON *text = cJSON_GetObjectItemCaseSensitive(doc, "text");
	const char *at = text ? strstr(text->valuestring, "session 1 ") : NULL;
	u32 nr = 0;

	at = at ? strstr(at, " out ") : NULL;
	KVT_EXPECT(at && sscanf(at, " out %u", &nr) == 1);
	cJSON_Delete(doc);
	return nr;
}

static void reopen(struct raw *c, u64 lora_id)
{
	struct kv_msg_pool_open msg;

	memset(&msg, 0, sizeof(msg));
	msg.msg.magic = KV_MSG_MAGIC;
	msg.msg.type = KV_MSG_POOL_OPEN;
	msg.msg.size_bytes = sizeof(msg);
	raw_layout(&msg.layout);
	msg.layout.lora_id = lora_id;
	raw_send(c, &msg, sizeof(msg));
}

/* Until the socket is full and what the daemon says waits in the daemon. */
static void stop_reading(struct raw *c)
{
	for (u32 i = 0; i < 2000 && !queued(); i++)
		reopen(c, 0);
	KVT_EXPECT(queued() > 0);
}

static void alloc_without_waiting(struct raw *c, u32 nr)
{
	struct kv_sqe sqe = {
		.opcode = KV_OP_ALLOC,
		.pool_id = c->pool.pool_id,
		.nr = nr,
		.gfp = KV_GFP_NOWAIT,
		.ret_bytes = nr * (u32)sizeof(struct kv_grant),
	};

	raw_submit(c, sqe);
}

static u32 extents(u32 pool_id)
{
	char ask[64];

	snprintf(ask, sizeof(ask), "{\"op\":\"pool\",\"pool\":%u}", pool_id);
	return (u32)daemon_number(&d, ask, "pools.0.extents");
}

/* Reads what is there. Return: descriptors that came; @note remembers their inodes. */
static u32 read_all(struct raw *c, bool note)
{
	static u8 buf[KV_MSG_BYTES_MAX];
	struct pollfd p = {.fd = c->fd, .events = POLLIN};
	u32 nr = 0, foreign = 0;
	struct stat st;

	while (poll(&p, 1, 50) == 1 && raw_receive(c, buf, sizeof(buf))) {
		for (int i = 0; i < c->nr_fds; i++, nr++) {
			KVT_EXPECT(!fstat(c->fds[i], &st));
			close(c->fds[i]);
			if (note && nr_inodes < INODES_MAX)
				inodes[nr_inodes++] = st.st_ino;
			for (u32 k = 0; !note && k < nr_inodes; k++)
				foreign += inodes[k] == st.st_ino;
		}
	}
	KVT_EXPECT_EQ(foreign, 0);
	return nr;
}

/* Takes what there is; what other pools do not use comes from there. */
static void take_more(struct raw *c)
{
	static struct kv_grant g[512];

	for (u32 i = 0; i < 100; i++) {
		int r = raw_alloc(c, 512, KV_GFP_NOWAIT, g);

		read_all(c, true);
		if (r)
			return;
	}
	KVT_FAIL("the host has no end");
}

/* Return: extents that the other client got. */
static u32 take_all(struct raw *c)
{
	struct kv_layout layout;

	raw_connect(c, &d);
	KVT_EXPECT_EQ(raw_hello(c, "other"), 0);
	raw_layout(&layout);
	layout.lora_id = 5;
	KVT_EXPECT_EQ(raw_pool_open(c, &layout), 0);
	take_more(c);
	return nr_inodes;
}

/* A holds an extent whose EXTENT_ADDED waits in the daemon. */
static void scene(struct raw *a)
{
	u32 before;

	nr_inodes = 0;
	daemon_start(&d, NULL);
	raw_open(a, &d);
	before = extents(a->pool.pool_id);
	stop_reading(a);
	alloc_without_waiting(a, 512);
	for (u32 i = 0; i < 1000 && extents(a->pool.pool_id) <= before; i++)
		usleep(1000);
	KVT_EXPECT(extents(a->pool.pool_id) > before);
}

KVT_TEST(a_closed_pool_leaves_no_descriptor_in_the_queue)
{
	struct kv_msg_pool_close bye = {.msg = {.magic = KV_MSG_MAGIC,
						.type = KV_MSG_POOL_CLOSE,
						.size_bytes = sizeof(bye)}};
	struct raw a, b;

	scene(&a);
	bye.pool_id = a.pool.pool_id;
	raw_send(&a, &bye, sizeof(bye));
	daemon_wait(&d, "{\"op\":\"status\"}", "memory.pages.active", 0, 2000);
	KVT_EXPECT_EQ(take_all(&b), 6); /* the extent went at once */
	KVT_EXPECT(read_all(&a, false) > 0);
	raw_close(&a);
	raw_close(&b);
	daemon_stop(&d);
}

/* Who was not given an extent yet has not unmapped it. */
KVT_TEST(an_extent_that_was_not_delivered_cannot_be_acknowledged)
{
	struct kv_page_ref refs[512];
	struct kv_sqe free_sqe = {
		.opcode = KV_OP_FREE, .nr = 512, .arg_bytes = sizeof(refs)};
	struct kv_sqe unmapped = {.opcode = KV_OP_UNMAPPED,
				  .arg_bytes = sizeof(struct kv_extent_ref),
				  .arg_off = sizeof(refs)};
	struct kv_extent_ref ref = {.index = 0, .serial = 1};
	const struct kv_grant *g;
	struct kv_cqe cqe;
	struct raw a, b;

	scene(&a);
	g = (const void *)a.args; /* written, though the completion waits */
	for (u32 i = 0; i < 512; i++)
		refs[i] = (struct kv_page_ref){.pfn = g[i].pfn, .tag = g[i].tag};
	memcpy(a.args, refs, sizeof(refs));
	memcpy(a.args + sizeof(refs), &ref, sizeof(ref));
	free_sqe.pool_id = unmapped.pool_id = a.pool.pool_id;
	raw_submit(&a, free_sqe);
	daemon_wait(&d, "{\"op\":\"status\"}", "memory.pages.active", 0, 2000);
	KVT_EXPECT_EQ(take_all(&b), 5); /* the sixth is asked back from its holder */
	raw_submit(&a, unmapped);
	usleep(50000);
	take_more(&b);
	KVT_EXPECT(read_all(&a, false) > 0);
	raw_wait(&a);
	raw_wait(&a);
	cqe = raw_wait(&a);
	KVT_EXPECT_EQ(cqe.result, -ENOENT);
	raw_submit(&a, unmapped); /* now it was */
	KVT_EXPECT_EQ(raw_wait(&a).result, 0);
	take_more(&b);
	KVT_EXPECT_EQ(nr_inodes, 6);
	raw_close(&a);
	raw_close(&b);
	daemon_stop(&d);
}

KVT_MAIN()
