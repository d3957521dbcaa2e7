/* SPDX-License-Identifier: Apache-2.0 */
/* HELLO and POOL_OPEN against a real kvmd: versions, every field that can be wrong. */
#include "tests/ipc/common.h"

#include <stddef.h>

static struct eng_private_kvmd kvmd;

/* Send @hello on a fresh connection. Return: result of the reply; its text is in r->in.
 */
static int say_hello(struct ipc_raw *r, struct kv_msg_hello hello)
{
	int type;

	r->sock = raw_connect(&kvmd);
	raw_send(r, &hello, sizeof(hello), NULL, 0);
	type = raw_recv(r, 5000);
	KVT_EXPECT_EQ(type, KV_MSG_HELLO_REPLY);
	for (u32 i = 0; i < r->nr_fds; i++)
		close(r->fds[i]);
	if (r->in.hello.result)
		KVT_EXPECT_EQ(raw_recv(r, 5000),
			      0); /* a refused HELLO ends the connection */
	close(r->sock);
	return r->in.hello.result;
}

static struct ipc_raw raw;

KVT_TEST(hello_gives_a_session)
{
	struct kvc_info a, b;
	struct kvc *c, *d;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	d = ipc_connect(&kvmd);
	kvc_info(c, &a);
	kvc_info(d, &b);
	KVT_EXPECT(a.client_id != b.client_id);
	KVT_EXPECT(a.table_epoch && a.table_epoch == b.table_epoch);
	KVT_EXPECT_EQ(a.check_mode, KV_CHECK_BATCH);
	KVT_EXPECT_STR(a.tenant, "default");
	kvc_close(c);
	kvc_close(d);
	ipc_stop(&kvmd);
}

/* Every range that holds version 1 gets it; others are told what this kvmd speaks. */
KVT_TEST(version_ranges_are_negotiated)
{
	static const struct {
		u32 min, max;
		int result;
	} ranges[] = {
		{1, 1, 0},
		{0, 1, 0}, /* a client that is older than version 1 too */
		{1, 9, 0}, /* a newer client that still speaks it */
		{2, 9, -EPROTONOSUPPORT},
		{0, 0, -EPROTONOSUPPORT},
		{~0u, ~0u, -EPROTONOSUPPORT},
		{2, 1, -EINVAL},
	};

	ipc_start(&kvmd, NULL);
	for (u32 i = 0; i < KV_ARRAY_SIZE(ranges); i++) {
		struct kv_msg_hello hello = raw_hello_msg();

		hello.abi_min = ranges[i].min;
		hello.abi_max = ranges[i].max;
		KVT_EXPECT_EQ(say_hello(&raw, hello), ranges[i].result);
		if (!ranges[i].result)
			KVT_EXPECT_EQ(raw.in.hello.abi, 1);
		else
			KVT_EXPECT_HAS(raw.in.hello.error, "abi_min=");
	}
	ipc_stop(&kvmd);
}

KVT_TEST(each_bad_hello_field_is_named)
{
	struct kv_msg_hello hello;

	ipc_start(&kvmd, NULL);
	hello = raw_hello_msg();
	hello.role = 9;
	KVT_EXPECT_EQ(say_hello(&raw, hello), -EINVAL);
	KVT_EXPECT_HAS(raw.in.hello.error, "role=9");
	hello = raw_hello_msg();
	hello.ring_depth = 48;
	KVT_EXPECT_EQ(say_hello(&raw, hello), -EINVAL);
	KVT_EXPECT_HAS(raw.in.hello.error, "ring_depth=48");
	hello = raw_hello_msg();
	hello.ring_depth = 2 * KV_RING_DEPTH_MAX;
	KVT_EXPECT_EQ(say_hello(&raw, hello), -EINVAL);
	hello = raw_hello_msg();
	memset(hello.client_name, 'x', sizeof(hello.client_name));
	KVT_EXPECT_EQ(say_hello(&raw, hello), -EINVAL);
	KVT_EXPECT_HAS(raw.in.hello.error, "client_name");
	hello = raw_hello_msg();
	hello.client_name[1] = '\x1b';
	KVT_EXPECT_EQ(say_hello(&raw, hello), -EINVAL);
	KVT_EXPECT_HAS(raw.in.hello.error, "0x1b");
	hello = raw_hello_msg();
	hello.client_name[0] = 0;
	KVT_EXPECT_EQ(say_hello(&raw, hello), -EINVAL);
	ipc_stop(&kvmd);
}

/* Messages that are none end the connection and nothing else. */
static void expect_hang_up(const void *msg, size_t bytes)
{
	raw.sock = raw_connect(&kvmd);
	raw_send(&raw, msg, bytes, NULL, 0);
	for (int type = raw_recv(&raw, 5000); type; type = raw_recv(&raw, 5000))
		KVT_EXPECT_EQ(type, KV_MSG_ERROR);
	close(raw.sock);
}

KVT_TEST(malformed_messages_end_their_connection_only)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct kv_msg_pool_close early = {.msg = {.magic = KV_MSG_MAGIC,
						  .type = KV_MSG_POOL_CLOSE,
						  .size_bytes = sizeof(early)}};
	static u8 big[KV_MSG_BYTES_MAX + 64];
	struct kvc_pool *pool;
	struct kv_stat stat;
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	hello.msg.magic ^= 1;
	expect_hang_up(&hello, sizeof(hello));
	hello = raw_hello_msg();
	hello.msg.size_bytes++;
	expect_hang_up(&hello, sizeof(hello));
	hello = raw_hello_msg();
	expect_hang_up(&hello, 7);
	expect_hang_up(&hello, sizeof(hello) - 4);
	hello.msg.nr_fds = 1;
	expect_hang_up(&hello, sizeof(hello));
	expect_hang_up(&early, sizeof(early));
	expect_hang_up(big, sizeof(big));
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------------------------- layouts */

static int try_layout(struct kvc *c, struct kv_layout layout, const float *scales)
{
	struct kvc_pool *pool = NULL;
	int r = kvc_pool_open(c, &layout, scales, NULL, &pool);

	if (!r)
		kvc_pool_close(pool);
	else
		KVT_EXPECT(pool == NULL);
	return r;
}

static void expect_refused(struct kvc *c, struct kv_layout layout, const char *field)
{
	char want[64];

	KVT_EXPECT_EQ(try_layout(c, layout, NULL), -EINVAL);
	snprintf(want, sizeof(want), "layout.%s=", field);
	KVT_EXPECT_HAS(kvc_strerror(c), want);
}

#define BAD(field_, value_)                         \
	do {                                        \
		struct kv_layout l_ = ipc_layout(); \
		l_.field_ = (value_);               \
		expect_refused(c, l_, #field_);     \
	} while (0)

KVT_TEST(each_bad_layout_field_is_named)
{
	struct kvc_pool *pool;
	struct kv_stat stat;
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	BAD(format_version, 2);
	BAD(kind, 3);
	BAD(dtype, 9);
	BAD(dtype, KV_DTYPE_F32); /* tests only, and this kvmd was not told so */
	BAD(scale_kind, 7);
	BAD(scale_kind, KV_SCALE_NONE); /* e4m3 without any scale */
	BAD(page_tokens, 32);
	BAD(nr_layers, 0);
	BAD(nr_layers, KV_LAYERS_MAX + 1);
	BAD(nr_kv_heads, 0);
	BAD(nr_kv_heads, KV_KV_HEADS_MAX + 1);
	BAD(head_dim, 96);
	BAD(latent_dim, 512);
	BAD(rope_dim, 64);
	BAD(plane_order, 1);
	pool = ipc_pool(c); /* the connection survived all of it */
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_TEST(static_scales_are_counted_and_checked)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool_info info;
	struct kvc_pool *pool;
	float scales[16];
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	for (u32 i = 0; i < 16; i++)
		scales[i] = 0.5f + (float)i;
	l.scale_kind = KV_SCALE_STATIC;
	l.nr_scales = 15;
	KVT_EXPECT_EQ(try_layout(c, l, scales), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "layout.nr_scales=15");
	l.nr_scales = 16; /* 4 layers, 2 heads, K and V */
	scales[7] = -1;
	KVT_EXPECT_EQ(try_layout(c, l, scales), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "scales");
	scales[7] = 3;
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, scales, NULL, &pool), 0);
	kvc_pool_get_info(pool, &info);
	KVT_EXPECT_EQ(memcmp(info.scales, scales, sizeof(scales)), 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* The same fields give the same pool in any process; another scale is another pool. */
KVT_TEST(fingerprint_tells_layouts_apart)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool_info a, b, other;
	struct kvc_pool *pa, *pb, *po;
	struct kvc *c, *d;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	d = ipc_connect(&kvmd);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pa), 0);
	KVT_EXPECT_EQ(kvc_pool_open(d, &l, NULL, NULL, &pb), 0);
	l.model_id[31] = 1;
	KVT_EXPECT_EQ(kvc_pool_open(d, &l, NULL, NULL, &po), 0);
	kvc_pool_get_info(pa, &a);
	kvc_pool_get_info(pb, &b);
	kvc_pool_get_info(po, &other);
	KVT_EXPECT_EQ(a.pool_id, b.pool_id);
	KVT_EXPECT_EQ(a.fingerprint, b.fingerprint);
	KVT_EXPECT(a.pool_id != other.pool_id && a.fingerprint != other.fingerprint);
	KVT_EXPECT_EQ(a.geometry.stride_bytes % KV_STRIDE_ALIGN, 0);
	kvc_close(c);
	kvc_close(d);
	ipc_stop(&kvmd);
}

KVT_TEST(named_gpu_is_not_on_this_host)
{
	struct kv_layout l = ipc_layout();
	u8 uuid[16] = {0xab, 0xcd};
	struct kvc_pool *pool;
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, uuid, &pool), -ENODEV);
	KVT_EXPECT_HAS(kvc_strerror(c), "GPU-abcd");
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_TEST(pools_of_a_session_are_limited)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool *pools[KV_POOLS_MAX], *extra;
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		l.lora_id = i;
		KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pools[i]), 0);
	}
	l.lora_id = 99;
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &extra), -EMFILE);
	kvc_pool_close(pools[3]);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &extra), 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_MAIN()
