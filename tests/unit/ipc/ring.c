/* SPDX-License-Identifier: Apache-2.0 */
/* The ring consumer against a client that writes anything at any time. */
#include "kvmd/ipc/ring.h"

#include <pthread.h>

#include "base/clock.h"

#include "tests/kvt.h"

#define DEPTH 8u

static struct kvd_ring ring;
static struct kv_sqe sqe;

static void setup(void)
{
	KVT_EXPECT_EQ(kvd_ring_create(&ring, 1, 2, DEPTH, 0xabcd), 0);
}

static void put(u32 nonce, u64 user_data)
{
	u32 tail = ring.hdr->sq_tail;

	ring.sq[tail & (DEPTH - 1)] = (struct kv_sqe){
		.opcode = KV_OP_NOP,
		.ring_nonce = nonce,
		.user_data = user_data,
	};
	kv_store_release32(&ring.hdr->sq_tail, tail + 1);
}

KVT_TEST(header_says_where_everything_is)
{
	setup();
	KVT_EXPECT_EQ(ring.hdr->magic, KV_RING_MAGIC);
	KVT_EXPECT_EQ(ring.hdr->client_id, 1);
	KVT_EXPECT_EQ(ring.hdr->table_epoch, 2);
	KVT_EXPECT_EQ(ring.hdr->sq_depth, DEPTH);
	KVT_EXPECT_EQ(ring.hdr->cq_depth, 2 * DEPTH);
	KVT_EXPECT_EQ(ring.hdr->arg_bytes, KV_ARG_BYTES);
	KVT_EXPECT(ring.hdr->arg_off + ring.hdr->arg_bytes <= ring.map_bytes);
	KVT_EXPECT(ring.hdr->cq_off >= ring.hdr->sq_off + DEPTH * sizeof(struct kv_sqe));
	KVT_EXPECT(ring.hdr->arg_off >=
		   ring.hdr->cq_off + 2 * DEPTH * sizeof(struct kv_cqe));
	KVT_EXPECT_EQ(ring.hdr->sq_need_wakeup, 1);
}

KVT_TEST(entries_come_in_order_also_past_the_wrap)
{
	u64 n, done = 0;

	setup();
	ring.sq_head = ring.hdr->sq_tail = 0xfffffffcu; /* u32 wraps on the way */
	ring.cq_tail = ring.cq_published = ring.hdr->cq_head = 0xfffffffeu;
	for (n = 0; n < 100; n++) {
		put(0xabcd, n);
		KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
		KVT_EXPECT_EQ(sqe.user_data, n);
		kvd_ring_complete(&ring, sqe.user_data, 0, 0, 0);
		kvd_ring_publish(&ring);
		KVT_EXPECT_EQ(ring.cq[ring.hdr->cq_head & (2 * DEPTH - 1)].user_data,
			      done++);
		ring.hdr->cq_head++;
	}
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 0);
}

KVT_TEST(tail_that_jumps_ends_the_session)
{
	static const u32 tails[] = {DEPTH + 1, 1000, 0x7fffffff, 0x80000000, 0xffffffff};
	size_t i;
	u32 k;

	for (i = 0; i < sizeof(tails) / sizeof(tails[0]); i++) {
		setup();
		for (k = 0; k < DEPTH; k++)
			ring.sq[k].ring_nonce =
				0xabcd; /* nothing else is wrong with them */
		ring.hdr->sq_tail = tails[i];
		KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), -EPROTO);
		KVT_EXPECT_EQ(ring.fault, KVD_RING_SQ_JUMP);
		KVT_EXPECT_EQ(ring.sq_head, 0);
		ring.hdr->sq_tail = 1; /* too late */
		KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), -EPROTO);
		kvd_ring_destroy(&ring);
	}
}

KVT_TEST(full_depth_is_no_jump)
{
	u32 i;

	setup();
	for (i = 0; i < DEPTH; i++)
		put(0xabcd, i);
	for (i = 0; i < DEPTH; i++)
		KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 0);
}

KVT_TEST(cq_head_that_jumps_ends_the_session)
{
	setup();
	put(0xabcd, 1);
	ring.hdr->cq_head = 1; /* nothing was completed yet */
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), -EPROTO);
	KVT_EXPECT_EQ(ring.fault, KVD_RING_CQ_JUMP);
}

KVT_TEST(o56_entry_of_another_ring_has_no_effect)
{
	setup();
	put(0xabcc, 1);
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), -EPROTO);
	KVT_EXPECT_EQ(ring.fault, KVD_RING_NONCE);
	KVT_EXPECT_EQ(ring.fault_value, 0xabcc);
}

KVT_TEST(geometry_is_never_read_back)
{
	setup();
	put(0xabcd, 5);
	memset(ring.hdr, 0xff, 64); /* the constant line: magic to reserved0 */
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
	KVT_EXPECT_EQ(sqe.user_data, 5);
	ring.hdr->sq_head = 77; /* kvmd's own indices are not believed either */
	ring.hdr->cq_tail = 77;
	put(0xabcd, 6);
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
	KVT_EXPECT_EQ(sqe.user_data, 6);
	kvd_ring_complete(&ring, 5, 0, 0, 0);
	kvd_ring_publish(&ring);
	KVT_EXPECT_EQ(ring.hdr->cq_tail, 1);
	KVT_EXPECT_EQ(ring.hdr->sq_head, 2);
}

static volatile int flip_stop;

static void *flip(void *arg)
{
	struct kv_sqe *shared = arg;

	volatile u32 *nonce = &shared->ring_nonce;
	u32 i = 0;

	while (!flip_stop) {
		if (i++ & 8)
			*nonce = 0xabcd;
		else
			*nonce = 0x1234;
	}
	return NULL;
}

/* What was checked is what is acted on, whatever the client writes meanwhile. */
KVT_TEST(entry_is_copied_once)
{
	u64 end = kv_now_ns() + 5 * KV_NSEC_PER_SEC;
	u32 good = 0, bad = 0;
	pthread_t thread;
	int r;

	setup();
	KVT_EXPECT(!pthread_create(&thread, NULL, flip, &ring.sq[0]));
	while ((good < 300000 || bad < 300000) && kv_now_ns() < end) {
		ring.hdr->sq_tail = 1;
		ring.sq_head = 0;
		ring.nr_parked = 0;
		ring.fault = KVD_RING_OK;
		r = kvd_ring_fetch(&ring, &sqe);
		if (r == 1) {
			KVT_EXPECT_EQ(sqe.ring_nonce, 0xabcd);
			good++;
		} else {
			KVT_EXPECT_EQ(r, -EPROTO);
			bad++;
		}
	}
	flip_stop = 1;
	pthread_join(thread, NULL);
	KVT_NOTE("%u good, %u bad", good, bad);
	KVT_EXPECT(good > 0 && bad > 0);
}

KVT_TEST(full_cq_stops_the_sq)
{
	u32 taken = 0, i;

	setup();
	for (i = 0; i < 10 * DEPTH; i++) {
		if (ring.hdr->sq_tail - ring.sq_head < DEPTH)
			put(0xabcd, i);
		if (kvd_ring_fetch(&ring, &sqe) == 1) {
			taken++;
			kvd_ring_complete(&ring, sqe.user_data, 0, 0, 0);
			kvd_ring_publish(&ring);
		}
	}
	KVT_EXPECT_EQ(taken, 2 * DEPTH);
	KVT_EXPECT(kvd_ring_choked(&ring));
	ring.hdr->cq_head += 3; /* the client reads three */
	KVT_EXPECT(!kvd_ring_choked(&ring));
	for (i = 0; i < 10 && kvd_ring_fetch(&ring, &sqe) == 1; i++)
		kvd_ring_complete(&ring, sqe.user_data, 0, 0, 0);
	KVT_EXPECT_EQ(i, 3);
}

KVT_TEST(parked_entries_keep_their_room)
{
	u32 i;

	setup();
	for (i = 0; i < 2 * DEPTH; i++) {
		put(0xabcd, i);
		KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
	}
	put(0xabcd, i);
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 0); /* all room is promised */
	KVT_EXPECT(kvd_ring_choked(&ring));
	for (i = 0; i < 2 * DEPTH; i++)
		kvd_ring_complete(&ring, i, 0, 0, 0);
	KVT_EXPECT_EQ(ring.nr_parked, 0);
	kvd_ring_publish(&ring);
	KVT_EXPECT_EQ(ring.hdr->cq_tail - ring.hdr->cq_head, 2 * DEPTH);
}

KVT_TEST(arguments_and_results_stay_inside)
{
	static u8 buf[KV_ARG_BYTES];

	setup();
	KVT_EXPECT_EQ(kvd_ring_args(&ring, 0, KV_ARG_BYTES, buf), 0);
	KVT_EXPECT_EQ(kvd_ring_args(&ring, KV_ARG_BYTES, 0, buf), 0);
	KVT_EXPECT_EQ(kvd_ring_args(&ring, KV_ARG_BYTES, 1, buf), -EFAULT);
	KVT_EXPECT_EQ(kvd_ring_args(&ring, 1, KV_ARG_BYTES, buf), -EFAULT);
	KVT_EXPECT_EQ(kvd_ring_args(&ring, 0xffffffff, 2, buf), -EFAULT);
	KVT_EXPECT_EQ(kvd_ring_args(&ring, 16, 0xfffffff8, buf), -EFAULT);
	KVT_EXPECT_EQ(kvd_ring_room(&ring, KV_ARG_BYTES - 16, 16, 16), 0);
	KVT_EXPECT_EQ(kvd_ring_room(&ring, KV_ARG_BYTES - 15, 16, 16), -EFAULT);
	KVT_EXPECT_EQ(kvd_ring_room(&ring, 0xfffffff0, 32, 16), -EFAULT);
	KVT_EXPECT_EQ(kvd_ring_room(&ring, 0, 15, 16), -ENOSPC);
}

KVT_TEST(o57_fresh_ring_has_no_completion)
{
	u32 i;

	setup();
	for (i = 0; i < 2 * DEPTH; i++)
		KVT_EXPECT(ring.cq[i].ring_nonce != ring.nonce);
	KVT_EXPECT_EQ(ring.hdr->cq_tail, 0);
}

KVT_TEST(kick_is_asked_for_only_when_the_client_sleeps)
{
	setup();
	put(0xabcd, 1);
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
	KVT_EXPECT(!kvd_ring_publish(&ring)); /* nothing to show */
	kvd_ring_complete(&ring, 1, 0, 0, 0);
	KVT_EXPECT(!kvd_ring_publish(&ring));
	put(0xabcd, 2);
	KVT_EXPECT_EQ(kvd_ring_fetch(&ring, &sqe), 1);
	kvd_ring_complete(&ring, 2, 0, 0, 0);
	ring.hdr->cq_need_wakeup = 1;
	KVT_EXPECT(kvd_ring_publish(&ring));
}

KVT_MAIN()
