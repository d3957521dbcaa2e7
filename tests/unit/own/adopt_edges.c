/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/own/adopt: entries that are whole, and say what no kvmd can have written.
 */
#include "tests/unit/own/adopt.h"

/* Whole entries that name what there is not. */
KVT_TEST(tenant_and_pool_of_no_domain)
{
	struct kvd_frames_hdr *hdr;
	struct kvd_adopted ad;

	begin();
	kvd_image_tenant_set(image, 0, KVD_DOMAINS_MAX + 9, "elsewhere");
	ad = adopted();
	KVT_EXPECT(ad.damage >= 1);
	KVT_EXPECT_EQ(ad.sessions, 1);
	KVT_EXPECT(!core.tenants[0] && core.tenants[1]);
	end();

	begin();
	hdr = region(KVD_REGION_FRAMES, 1, 0)->addr;
	hdr->domain_id = KVD_DOMAINS_MAX + 3;
	hdr->check = kvd_check_bytes(hdr, offsetof(struct kvd_frames_hdr, check));
	ad = adopted();
	KVT_EXPECT(ad.damage >= 1);
	KVT_EXPECT(!core.mm.pools[0] && core.mm.pools[1]);
	end();
}

KVT_TEST(keys_that_no_kvmd_has_made)
{
	static const struct kvd_adopt_session_params bad[] = {
		{.id = 0, .tenant = 0},
		{.id = 1, .tenant = 0}, /* it is there already */
		{.id = 77, .tenant = KVD_TENANTS_MAX},
		{.id = 77, .tenant = KVD_TENANTS_MAX - 1},
	};
	struct kvd_adopt_pool_params pool = {.id = 0};
	struct kvd_adopted ad;
	struct kvd_session *s;

	begin();
	ad = adopted();
	for (u32 i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		struct kvd_adopt_session_params p = bad[i];

		p.page = pages[0];
		KVT_EXPECT_EQ(kvd_adopt_session(&core, &p, &s, &ad), -ENODATA);
	}
	KVT_EXPECT_EQ(ad.sessions, SESSIONS);
	KVT_EXPECT_EQ(kvd_adopt_pool(&core, &pool, &ad), -EBADMSG);
	pool.id = KVD_POOLS_MAX + 1;
	KVT_EXPECT_EQ(kvd_adopt_pool(&core, &pool, &ad), -EBADMSG);
	KVT_EXPECT_EQ(ad.damage, 2);
	KVT_EXPECT(!audit(&core));
	end();
}

/*
 * A kvmd with less room than the one before, or with a GPU whose size is not known yet, takes
 * all there is. It grows no more; what waits for the size is not asked from caches.
 */
static void adopted_into(u64 capacity_bytes, int growth)
{
	struct kvd_adopted ad = {0};
	u32 cached[2], extents[2];
	u64 whole;

	begin();
	core_start(&core, &gens, image, 8);
	whole = core.mm.limits.capacity_bytes;
	core.mm.limits.capacity_bytes = capacity_bytes;
	adopt(&core, regions, sessions, &ad);
	KVT_EXPECT_EQ(ad.pools, 2);
	KVT_EXPECT_EQ(ad.damage, 0);
	KVT_EXPECT(!audit(&core));
	for (u32 i = 0; i < 2; i++) {
		struct kvd_pool *pool = core.mm.pools[i];

		pool->low_pages = 2; /* as a large pool has */
		pool->high_pages = pool->geo.nr_pages;
		cached[i] = pool->nr[KVD_CACHED];
		extents[i] = pool->nr_live_extents;
	}
	KVT_EXPECT(cached[0] + cached[1] > 0);
	for (u32 i = 0; i < 2; i++)
		KVT_EXPECT_EQ(kvd_extent_grow(core.mm.pools[i]), growth);
	for (u64 now = 10; now < 20; now++) {
		kvd_core_now(&core, now);
		kvd_core_run(&core);
	}
	for (u32 i = 0; i < 2 && !capacity_bytes; i++) {
		KVT_EXPECT_EQ(core.mm.pools[i]->nr[KVD_CACHED], cached[i]);
		KVT_EXPECT_EQ(core.mm.pools[i]->nr_live_extents, extents[i]);
	}
	KVT_EXPECT(!audit(&core));
	core.mm.limits.capacity_bytes = whole;
	end();
}

KVT_TEST(a_capacity_that_is_smaller_or_unknown_is_no_damage)
{
	adopted_into(4096, KV_FULL);
	adopted_into(0, KV_PENDING);
}

/* The record under change goes back to a page with a writer: nobody else may hold it. */
KVT_TEST(undone_record_is_its_owners_alone)
{
	struct kvd_frame before;
	struct kvd_adopted ad;
	u32 pfn;

	begin();
	pfn = page_in(1, KVD_ACTIVE);
	before = *frame(1, pfn);
	image->undo = (struct kvd_undo){.pool_id = 1, .pfn = pfn, .valid = 1};
	memcpy(image->undo.image, &before, sizeof(image->undo.image));
	memset(frame(1, pfn), 0x3c, 20);
	((u16 *)region(KVD_REGION_LEASES, 1, 2)->addr)[pfn] = 1;
	ad = adopted();
	KVT_EXPECT_EQ(ad.undone, 1);
	KVT_EXPECT_EQ(ad.damage, 1);
	KVT_EXPECT_EQ(state_now(1, pfn), KVD_ACTIVE);
	KVT_EXPECT_EQ(core.mm.pools[0]->frames[pfn].refs, 1);
	KVT_EXPECT_EQ(sessions[1]->attach[0].refs[pfn], 0);
	end();
}

/* An extent from which a page was taken once is not being made: its zeros are damage. */
KVT_TEST(zeros_beside_a_page_that_was_used)
{
	struct kvd_adopted ad;
	struct kvd_frame *f;
	u32 first, last;

	begin();
	first = page_in(2, KVD_FREE) / PER_EXTENT * PER_EXTENT;
	last = first + PER_EXTENT - 1;
	for (u32 pfn = first; pfn <= last; pfn++) {
		memset(frame(2, pfn), 0, sizeof(*f));
		((u16 *)region(KVD_REGION_LEASES, 2, 3)->addr)[pfn] = 0;
	}
	f = frame(2, last);
	f->pfn = last;
	f->state = KVD_FREE;
	f->parent = KVD_PFN_NONE;
	f->nr_events = 2; /* made, and given back once */
	f->check = kvd_frame_check_word(f);
	core_start(&core, &gens, image, 8);
	memset(&ad, 0, sizeof(ad));
	adopt(&core, regions, sessions, &ad);
	KVT_EXPECT(!audit(&core));
	KVT_EXPECT_EQ(ad.poisoned, PER_EXTENT - 1);
	KVT_EXPECT_EQ(state_now(2, first), KVD_POISONED);
	KVT_EXPECT_EQ(state_now(2, last), KVD_FREE);
	end();
}

/* Where some leases are lost fewer than the record says are right, more are not. */
KVT_TEST(more_leases_than_references)
{
	struct kvd_region *lost;
	u32 pfn = 0;

	begin();
	while (frame(1, pfn)->state != KVD_SEALED || frame(1, pfn)->refs != 2)
		KVT_EXPECT(++pfn < EXTENTS * PER_EXTENT);
	lost = region(KVD_REGION_LEASES, 1, 1);
	region_free(NULL, lost);
	lost->addr = NULL;
	((u16 *)region(KVD_REGION_LEASES, 1, 2)->addr)[pfn] = 7;
	KVT_EXPECT(adopted().damage >= 2);
	KVT_EXPECT_EQ(core.mm.pools[0]->frames[pfn].refs, 0);
	KVT_EXPECT_EQ(state_now(1, pfn), KVD_CACHED); /* its bytes are what they were */
	KVT_EXPECT_EQ(sessions[1]->attach[0].refs[pfn], 0);
	end();
}

/* A stocked page is in one slot of its own session, whatever other slots say. */
KVT_TEST(slots_that_name_a_page_of_others)
{
	for (u32 thief = 0; thief < 2; thief++) {
		struct kv_mag_slot *from = NULL, *to;
		u32 stocked, nr = 0;

		begin();
		for (u32 i = 0; i < KV_MAGAZINES * KV_MAGAZINE_SLOTS; i++) {
			struct kv_mag_slot *slot =
				&pages[0]->magazines[i / KV_MAGAZINE_SLOTS]
					 .slots[i % KV_MAGAZINE_SLOTS];

			if (slot->word & KV_MAG_STOCKED)
				from = slot;
		}
		KVT_EXPECT(from);
		to = &pages[thief]->magazines[KV_MAGAZINES - 1].slots[2];
		KVT_EXPECT(!(to->word & KV_MAG_STOCKED));
		*to = *from;
		stocked = KV_MAG_PFN(from->word);
		KVT_EXPECT_EQ(adopted().damage, 0);
		KVT_EXPECT_EQ(state_now(1, stocked), KVD_MAGAZINE);
		KVT_EXPECT_EQ(core.mm.pools[0]->frames[stocked].owner, 1);
		for (u32 m = 0; m < KV_MAGAZINES; m++) {
			KVT_EXPECT_EQ(sessions[1]->mags[m].nr, 0);
			nr += sessions[0]->mags[m].nr;
		}
		KVT_EXPECT_EQ(nr, core.mm.pools[0]->nr[KVD_MAGAZINE]);
		KVT_EXPECT_EQ(sessions[0]->mags[KV_MAGAZINES - 1].nr, 0);
		end();
	}
}

KVT_MAIN()
