/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/tier: pages that are forgotten, more at once than the journal takes, are not back after
 * a restart.
 */
#include "kvmd/tier/store.h"

#include <sodium.h>
#include <sys/mman.h>

#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/fault.h"
#include "tests/unit/tier/common.h"

#define POOL_BYTES (1ull << 20)
#define NVME_BYTES (128ull << 20)
#define SLOT	   8192u
#define NR	   16000u

static u8 *pool;
static int pool_fd;

static void describe(void *arg, u16 tenant, struct kvd_ident *ret)
{
	memset(ret, 0, sizeof(*ret));
	ret->tenant = 1 + tenant;
}

static bool identify(void *arg, const struct kvd_ident *ident, u32 *ret_domain,
		     u16 *ret_tenant)
{
	*ret_domain = 1;
	*ret_tenant = (u16)(ident->tenant - 1);
	return true;
}

static struct kvd_store *store_open(void)
{
	struct kvd_store_params p = {.path = scratch("nvme"),
				     .size_bytes = NVME_BYTES,
				     .depth = 8,
				     .pool_bytes = POOL_BYTES,
				     .force_threads = true,
				     .identify = identify,
				     .describe = describe};
	char error[KVD_STORE_ERROR];
	struct kvd_store *st;
	int r;

	if (!pool) {
		KVT_EXPECT(sodium_init() >= 0);
		KVT_EXPECT_EQ(kvd_memfd_create("pool", POOL_BYTES, KVD_MEMFD_PRIVATE,
					       (void **)&pool, &pool_fd),
			      0);
	}
	p.pool = pool;
	r = kvd_store_open(&p, error, &st);
	if (r)
		KVT_FAIL("%d: %s", r, error);
	st->space.acct[0].high_bytes = st->space.acct[0].max_bytes = 1ull << 40;
	st->space.acct[0].weight = 100;
	return st;
}

/* The daemon's turns, until the journal has nothing more to do. */
static void settle(struct kvd_store *st)
{
	for (u32 quiet = 0; quiet < 2; quiet++) {
		kvd_store_reap(st);
		if (kvd_store_turn(st) || kvd_store_pending(st))
			quiet = 0;
	}
}

/* Their bytes are of no concern here. */
static void fill(struct kvd_store *st)
{
	for (u64 n = 0; n < NR; n++) {
		u8 key[KV_KEY_BYTES] = {0};
		struct kvd_slot_name name = {key, 7, 1};
		u32 id;

		memcpy(key, &n, sizeof(n));
		id = kvd_space_take(&st->space, &name, 0, SLOT);
		KVT_EXPECT(id != KVD_SLOT_NONE);
		kvd_slot_at(&st->space, id)->page_bytes = 4096;
		kvd_space_ready(&st->space, id);
		kvd_store_put(st, id);
		if (n % 1000 == 0)
			settle(st);
	}
	settle(st);
	KVT_EXPECT_EQ(kvd_journal_stats(st->journal)->missing, 0);
}

/* One in @part, in one turn of the loop. Return: how many are left */
static u32 forget(struct kvd_store *st, u32 part)
{
	u32 left = 0;

	for (u32 id = 0; id < st->space.nr_segments * st->space.slots_per_segment; id++) {
		if (st->space.slots[id].state != KVD_SLOT_READY)
			continue;
		if (id % part)
			left++;
		else
			kvd_space_drop(&st->space, id);
	}
	KVT_EXPECT(kvd_journal_stats(st->journal)->lost > 0);
	return left;
}

static void expect_left(u32 left)
{
	struct kvd_store *st = store_open();

	KVT_EXPECT_EQ(st->adopted, left);
	KVT_EXPECT(!kvd_space_check(&st->space));
	kvd_store_close(st, false);
}

KVT_TEST(o38_forgotten_at_once_and_not_back_after_a_crash)
{
	struct kvd_store *st = store_open();
	u32 left;

	fill(st);
	left = forget(st, 3); /* so few of all that no record is too many */
	KVT_EXPECT(kvd_journal_stats(st->journal)->missing > 0);
	settle(st);
	KVT_EXPECT_EQ(kvd_journal_stats(st->journal)->missing, 0);
	KVT_EXPECT_EQ(kvd_journal_stats(st->journal)->compactions, 1);
	kvd_store_close(st, false); /* as kill -9 leaves it */
	expect_left(left);
}

KVT_TEST(o38_forgotten_just_before_the_end)
{
	struct kvd_store *st = store_open();
	u32 left;

	fill(st);
	left = forget(st, 3);
	kvd_store_close(st, true);
	expect_left(left);
}

/* The disk takes no more, at the end either: then nothing is found again. */
KVT_TEST(o38_forgotten_where_the_disk_is_full)
{
	static const struct kvd_fault_spec always = {.probability = 1000000};
	struct kvd_store *st = store_open();

	fill(st);
	kvd_fault_arm(KVD_FAULT_tier_journal, &always);
	forget(st, 2);
	kvd_store_close(st, true);
	kvd_fault_arm(KVD_FAULT_tier_journal, NULL);
	expect_left(0);
}

/* Losses go on while it is made good: once a tick is enough, and the last one counts. */
KVT_TEST(losses_that_go_on_are_made_good_in_the_end)
{
	struct kvd_store *st = store_open();
	const struct kvd_journal_stats *js = kvd_journal_stats(st->journal);
	u32 left = 0;

	for (u32 round = 1; round <= 3; round++) {
		fill(st);
		left = forget(st, 3);
		settle(st);
		for (u32 id = 0; id < st->space.nr_segments * st->space.slots_per_segment;
		     id++)
			if (st->space.slots[id].state == KVD_SLOT_READY && round < 3)
				kvd_space_drop(&st->space, id);
		settle(st);
		KVT_EXPECT(js->compactions <= round);
		kvd_store_tick(st);
	}
	settle(st);
	KVT_EXPECT_EQ(js->missing, 0);
	kvd_store_close(st, false);
	expect_left(left);
}

TIER_MAIN("/tmp")
