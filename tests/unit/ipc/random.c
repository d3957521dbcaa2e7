/* SPDX-License-Identifier: Apache-2.0 */
/* Random entries and random memory from three clients: kvmd answers, lives, and audits
 * clean. */
#include <sys/socket.h>

#include "base/clock.h"
#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define CLIENTS 3

static struct daemon d;
static struct raw c[CLIENTS];
static struct kv_grant held[CLIENTS][512];
static u32 nr_held[CLIENTS];

static void with_small_memory(struct kvd_options *opt)
{
	opt->host_bytes = 32u << 20;
}

/* Something a careless client would send: mostly the right shape, often one thing wrong.
 */
static struct kv_sqe careless(struct raw *r, u32 who)
{
	struct kv_sqe s;
	u32 i;

	memset(&s, 0, sizeof(s));
	s.opcode = (u8)kvt_rand_below(KV_OP_NR);
	s.pool_id = r->pool.pool_id;
	s.nr = 1 + kvt_rand_below(20);
	s.user_data = kvt_rand64();
	s.arg_off = 64 * kvt_rand_below(1000);
	s.ret_off = 65536 + 64 * kvt_rand_below(1000);
	s.ret_bytes = 4096;
	if (s.opcode == KV_OP_ALLOC || s.opcode == KV_OP_FORK)
		s.gfp = kvt_rand_below(16) & ~(u32)KV_GFP_WAIT;
	if (s.opcode == KV_OP_ALLOC && kvt_rand_below(3) == 0) {
		s.flags = KV_SQE_MAGAZINE;
		s.magazine = (u16)kvt_rand_below(KV_MAGAZINES);
	}
	if (s.opcode == KV_OP_LOOKUP)
		s.nr = 64 * kvt_rand_below(20);
	if (kvd_op_row(s.opcode)->nr_max <= 1)
		s.nr = 0;
	s.arg_bytes =
		kvd_op_row(s.opcode)->arg_fixed + s.nr * kvd_op_row(s.opcode)->arg_each;
	/* Page references that are sometimes right. */
	for (i = 0; i < s.nr && i < 20; i++) {
		struct kv_page_ref *ref = (struct kv_page_ref *)(r->args + s.arg_off) + i;

		*ref = (struct kv_page_ref){.pfn = kvt_rand_below(200),
					    .tag = kvt_rand64()};
		if (nr_held[who] && kvt_rand_below(4)) {
			struct kv_grant g = held[who][kvt_rand_below(nr_held[who])];

			*ref = (struct kv_page_ref){.pfn = g.pfn, .tag = g.tag};
		}
	}
	return s;
}

static void hurt(struct kv_sqe *s)
{
	u8 *bytes = (u8 *)s;
	u32 i, at;

	for (i = 1 + kvt_rand_below(3); i; i--) {
		at = kvt_rand_below(sizeof(*s));
		if (at >= 4 && at < 8)
			continue; /* the nonce is somebody else's test */
		bytes[at] = (u8)kvt_rand64();
	}
}

static void remember(u32 who, const struct kv_sqe *s, struct kv_cqe cqe)
{
	const u8 *rets = c[who].args + s->ret_off; /* at any byte */
	u32 i;

	if (cqe.result || s->opcode != KV_OP_ALLOC || (s->flags & KV_SQE_MAGAZINE))
		return;
	for (i = 0; i < cqe.nr && i < 20; i++)
		memcpy(&held[who]
			    [nr_held[who] < 512 ? nr_held[who]++ : kvt_rand_below(512)],
		       rets + i * sizeof(struct kv_grant), sizeof(struct kv_grant));
}

static bool answered(int result)
{
	switch (result) {
	case -EINVAL:
	case -EOPNOTSUPP:
	case -ENOENT:
	case -EFAULT:
	case -ENOSPC:
	case -EOVERFLOW:
		return true;
	}
	return result >= 0 && result < KV_OUTCOME_NR;
}

KVT_TEST(random_entries_are_answered)
{
	u64 end = kv_now_ns() + 2 * KV_NSEC_PER_SEC;
	u32 i, who, nr = 0, good = 0;
	struct kv_cqe cqe;
	struct kv_sqe s;
	char drop[8192];

	daemon_start(&d, with_small_memory);
	for (i = 0; i < CLIENTS; i++)
		raw_open(&c[i], &d);
	while (kv_now_ns() < end) {
		who = kvt_rand_below(CLIENTS);
		s = careless(&c[who], who);
		if (kvt_rand_below(3) == 0)
			hurt(&s);
		/* Random steps and random magazine words as well. */
		if (kvt_rand_below(8) == 0)
			kv_store_release64(&c[who].page->slots[kvt_rand_below(8)].word,
					   kvt_rand_below(2) ? kvt_rand64() : 0);
		if (kvt_rand_below(8) == 0)
			c[who].page->magazines[kvt_rand_below(KV_MAGAZINES)]
				.slots[kvt_rand_below(KV_MAGAZINE_SLOTS)]
				.word = kvt_rand_below(2) ? kvt_rand64() : 0;
		raw_submit(&c[who], s);
		cqe = raw_wait(&c[who]);
		KVT_EXPECT_EQ(cqe.user_data, s.user_data);
		if (!answered(cqe.result))
			KVT_FAIL("opcode %u: result %d", s.opcode, cqe.result);
		remember(who, &s, cqe);
		nr++;
		good += cqe.result == 0;
		while (recv(c[who].fd, drop, sizeof(drop), MSG_DONTWAIT) > 0)
			;
	}
	KVT_NOTE("%u entries, %u done", nr, good);
	KVT_EXPECT(good > 100);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"audit\"}", "damage"), 0);
	for (i = 0; i < CLIENTS; i++) {
		for (who = 0; who < KV_ANNOUNCE_SLOTS; who++)
			kv_slot_retire(c[i].page, who);
		raw_close(&c[i]);
	}
	daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 2000);
	daemon_wait(&d, "{\"op\":\"pages\"}", "pools.0.active", 0, 2000);
	daemon_wait(&d, "{\"op\":\"pages\"}", "pools.0.quarantine", 0, 2000);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"audit\"}", "damage"), 0);
	daemon_stop(&d);
}

KVT_MAIN()
