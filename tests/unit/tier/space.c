/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier's parts that know no disk: digests, workers, slots. */
#include "kvmd/tier/space.h"

#include <sodium.h>

#include "kvmd/tier/crc.h"
#include "kvmd/tier/work.h"
#include "tests/unit/tier/common.h"

/* ------------------------------------------------------------------- digests */

KVT_TEST(crc_agrees_with_its_reference)
{
	u8 *data = malloc(1 << 16);

	for (u32 i = 0; i < 1 << 16; i++)
		data[i] = (u8)kvt_rand64();
	KVT_EXPECT_EQ(kvd_crc32c("123456789", 9), 0xe3069283u);
	for (u32 i = 0; i < 300; i++) {
		u32 off = kvt_rand_below(64), n = kvt_rand_below((1 << 16) - 64);

		if (i < 8)
			n = 3 * 4096 * (i % 5) + kvt_rand_below(2);
		KVT_EXPECT_EQ(kvd_crc32c(data + off, n),
			      kvd_crc32c_portable(data + off, n));
	}
	free(data);
}

/* ------------------------------------------------------------------- workers */

struct job {
	struct kvd_work work;
	u32 in, out;
	bool done;
};

static void job_run(struct kvd_work *w)
{
	struct job *j = kv_container_of(w, struct job, work);

	j->out = j->in * 3;
}

static void job_done(struct kvd_work *w)
{
	kv_container_of(w, struct job, work)->done = true;
}

KVT_TEST(work_is_run_once_and_finished_on_the_loop)
{
	struct kvd_workers *ws;
	struct job jobs[500];
	u32 done = 0;

	KVT_EXPECT_EQ(kvd_workers_create(3, &ws), 0);
	for (u32 i = 0; i < 500; i++) {
		jobs[i] =
			(struct job){.work = {.run = job_run, .done = job_done}, .in = i};
		kvd_work_submit(ws, &jobs[i].work);
		KVT_EXPECT(!jobs[i].done);
	}
	while (done < 500)
		done += kvd_workers_reap(ws);
	for (u32 i = 0; i < 500; i++)
		KVT_EXPECT(jobs[i].done && jobs[i].out == 3 * i);
	KVT_EXPECT_EQ(kvd_workers_pending(ws), 0);
	kvd_workers_destroy(ws);
}

/* --------------------------------------------------------------------- slots */

static struct kvd_slot_name name_of(u8 *key, u64 n)
{
	memset(key, 0, KV_KEY_BYTES);
	memcpy(key, &n, sizeof(n));
	return (struct kvd_slot_name){.key = key, .fingerprint = 7, .domain = 1};
}

static u32 fill(struct kvd_space *sp, u64 n, u16 tenant, u64 bytes)
{
	u8 key[KV_KEY_BYTES];
	struct kvd_slot_name name = name_of(key, n);
	u32 id = kvd_space_take(sp, &name, tenant, bytes);

	if (id != KVD_SLOT_NONE)
		kvd_space_ready(sp, id);
	return id;
}

static bool there(struct kvd_space *sp, u64 n)
{
	u8 key[KV_KEY_BYTES];
	struct kvd_slot_name name = name_of(key, n);

	return kvd_space_find(sp, &name) != KVD_SLOT_NONE;
}

static void space_make(struct kvd_space *sp, u64 bytes, u32 tenants)
{
	KVT_EXPECT(sodium_init() >= 0);
	KVT_EXPECT_EQ(kvd_space_init(sp, bytes, KVD_SEGMENT_MIN), 0);
	for (u32 i = 0; i < tenants; i++)
		sp->acct[i] = (struct kvd_space_account){
			.high_bytes = ~0ull >> 1, .max_bytes = ~0ull >> 1, .weight = 100};
}

KVT_TEST(slots_go_in_order_of_their_last_use)
{
	struct kvd_space sp;
	u32 first;

	space_make(&sp, 2 << 20, 1);
	for (u32 i = 0; i < 100; i++)
		fill(&sp, i, 0, 20480);
	KVT_EXPECT(there(&sp, 0) && there(&sp, 99));
	first = fill(&sp, 100, 0, 20480); /* 102 fit */
	KVT_EXPECT(first != KVD_SLOT_NONE);
	fill(&sp, 101, 0, 20480);
	fill(&sp, 102, 0, 20480);
	KVT_EXPECT(!there(&sp, 0) && there(&sp, 1));
	kvd_space_get(&sp, kvd_space_at(&sp, kvd_slot_off(&sp, 1)));
	kvd_space_put(&sp, 1);
	fill(&sp, 103, 0, 20480);
	KVT_EXPECT(there(&sp, 1) && !there(&sp, 2));
	KVT_EXPECT_EQ(sp.evictions, 2);
	KVT_EXPECT(!kvd_space_check(&sp));
	kvd_space_fini(&sp);
}

/* O35: a slot that a copy reads is not chosen, however old it is. */
KVT_TEST(o35_slot_with_a_reader_is_not_evicted)
{
	struct kvd_space sp;
	u32 id;

	space_make(&sp, 1 << 20, 1);
	id = fill(&sp, 0, 0, 20480);
	kvd_space_get(&sp, id);
	for (u32 i = 1; i < 500; i++)
		KVT_EXPECT(fill(&sp, i, 0, 20480) != id);
	KVT_EXPECT(there(&sp, 0));
	/* Dropped while it is read: gone for finders, the bytes stay. */
	kvd_space_drop(&sp, id);
	KVT_EXPECT(!there(&sp, 0));
	for (u32 i = 500; i < 1000; i++)
		KVT_EXPECT(fill(&sp, i, 0, 20480) != id);
	KVT_EXPECT(!kvd_space_check(&sp));
	kvd_space_put(&sp, id);
	KVT_EXPECT_EQ(kvd_slot_at(&sp, id)->state, KVD_SLOT_FREE);
	KVT_EXPECT(!kvd_space_check(&sp));
	kvd_space_fini(&sp);
}

KVT_TEST(budgets_are_kept)
{
	struct kvd_space sp;

	space_make(&sp, 2 << 20, 3);
	sp.acct[0].max_bytes = 10 * 20480;
	sp.acct[1].min_bytes = sp.acct[1].high_bytes = 30 * 20480;
	for (u32 i = 0; i < 40; i++)
		fill(&sp, 1000 + i, 1, 20480);
	for (u32 i = 0; i < 200; i++) {
		fill(&sp, i, 0, 20480);
		KVT_EXPECT(sp.acct[0].used_bytes <= sp.acct[0].max_bytes);
	}
	KVT_EXPECT_EQ(sp.acct[0].nr, 10);
	KVT_EXPECT(there(&sp, 199) && !there(&sp, 189));
	KVT_EXPECT_EQ(sp.acct[1].nr, 40);
	/* A third one takes what is free, then what is above min, and no more. */
	for (u32 i = 0; i < 400; i++)
		fill(&sp, 5000 + i, 2, 20480);
	KVT_EXPECT_EQ(sp.acct[1].nr, 30);
	KVT_EXPECT(!kvd_space_check(&sp));
	sp.acct[2].max_bytes = 0;
	KVT_EXPECT_EQ(fill(&sp, 9999, 2, 20480), KVD_SLOT_NONE);
	kvd_space_fini(&sp);

	/* All of it is promised to one: nobody else gets a slot, of whatever size. */
	space_make(&sp, 2 << 20, 3);
	sp.acct[1].min_bytes = 2 << 20;
	for (u32 i = 0; i < 102; i++)
		KVT_EXPECT(fill(&sp, i, 1, 20480) != KVD_SLOT_NONE);
	KVT_EXPECT_EQ(fill(&sp, 9999, 2, 20480), KVD_SLOT_NONE);
	KVT_EXPECT_EQ(fill(&sp, 9999, 2, 400 << 10), KVD_SLOT_NONE);
	KVT_EXPECT_EQ(sp.acct[1].nr, 102);
	kvd_space_fini(&sp);
}

/* Who has to give first cannot, because all of its slots are being written below: the next one
 * does, and a tenant at its max gives of another size. */
KVT_TEST(slots_that_are_written_are_not_all_there_is)
{
	struct kvd_space sp;

	space_make(&sp, 2 << 20, 3);
	sp.acct[0].high_bytes = 0; /* above it */
	for (u32 i = 0; i < 2; i++)
		kvd_space_hold(&sp, fill(&sp, i, 0, 20480));
	for (u32 i = 0; i < 100; i++)
		KVT_EXPECT(fill(&sp, 100 + i, 1, 20480) != KVD_SLOT_NONE);
	for (u32 i = 0; i < 20; i++)
		KVT_EXPECT(fill(&sp, 500 + i, 1, 20480) != KVD_SLOT_NONE);
	KVT_EXPECT(fill(&sp, 600, 2, 20480) != KVD_SLOT_NONE);
	KVT_EXPECT(there(&sp, 0) && there(&sp, 1));
	KVT_EXPECT(!kvd_space_check(&sp));
	kvd_space_fini(&sp);

	space_make(&sp, 4 << 20, 1);
	for (u32 i = 0; i < 3; i++)
		fill(&sp, i, 0, 8192);
	kvd_space_hold(&sp, fill(&sp, 10, 0, 20480));
	sp.acct[0].max_bytes = sp.acct[0].used_bytes;
	KVT_EXPECT(fill(&sp, 11, 0, 20480) != KVD_SLOT_NONE);
	KVT_EXPECT(there(&sp, 10) && !there(&sp, 0));
	KVT_EXPECT(sp.acct[0].used_bytes <= sp.acct[0].max_bytes);
	KVT_EXPECT(!kvd_space_check(&sp));
	kvd_space_fini(&sp);
}

KVT_TEST(another_size_takes_a_whole_segment)
{
	struct kvd_space sp;

	space_make(&sp, 4 << 20, 1);
	for (u32 i = 0; i < 1000; i++)
		fill(&sp, i, 0, 20480);
	KVT_EXPECT_EQ(sp.nr_free_segments, 0);
	for (u32 i = 0; i < 10; i++)
		KVT_EXPECT(fill(&sp, 5000 + i, 0, 400 << 10) != KVD_SLOT_NONE);
	KVT_EXPECT(there(&sp, 5009) && there(&sp, 999));
	KVT_EXPECT(!kvd_space_check(&sp));
	KVT_EXPECT_EQ(fill(&sp, 7000, 0, 2 << 20), KVD_SLOT_NONE);
	kvd_space_fini(&sp);
}

KVT_TEST(random_slots_keep_their_sums)
{
	static const u64 sizes[] = {8192, 20480, 69632, 262144};
	struct kvd_space sp;
	u32 held[64], nr_held = 0;

	space_make(&sp, 6 << 20, 4);
	sp.acct[0].min_bytes = 1 << 20;
	sp.acct[1].max_bytes = 1 << 20;
	sp.acct[2].high_bytes = 1 << 19;
	for (u32 i = 0; i < 20000; i++) {
		u32 what = kvt_rand_below(16), id;

		if (what < 12) {
			if (there(&sp, i))
				continue;
			id = fill(&sp, i, (u16)kvt_rand_below(4),
				  sizes[kvt_rand_below(4)]);
			if (id != KVD_SLOT_NONE && what < 2 && nr_held < 64) {
				if (what)
					kvd_space_get(&sp, id);
				else
					kvd_space_hold(&sp, id);
				held[nr_held++] = id;
			} else if (id != KVD_SLOT_NONE && what < 4) {
				kvd_space_drop(&sp, id);
			}
		} else if (nr_held) {
			id = held[--nr_held];
			if (what == 15)
				kvd_space_drop(&sp, id);
			kvd_space_put(&sp, id);
		}
		if (i % 1000 == 0 && kvd_space_check(&sp))
			KVT_FAIL("after %u: %s", i, kvd_space_check(&sp));
	}
	if (kvd_space_check(&sp))
		KVT_FAIL("%s", kvd_space_check(&sp));
	kvd_space_fini(&sp);
}

TIER_MAIN("/tmp")
