/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/own/adopt, image: a core starts over what an earlier one left, as it was and with
 * each kind of damage. Damage costs the page, the lease or the session it is in, is
 * counted, and the whole audit is clean afterwards.
 */
#include "tests/unit/own/adopt.h"

KVT_TEST(nothing_changed_is_taken_over_whole)
{
	static const u32 states[] = {KVD_MAGAZINE, KVD_ACTIVE, KVD_SEALED, KVD_CACHED};
	struct kvd_adopted ad;
	u32 before[KV_ARRAY_SIZE(states)];

	begin();
	for (u32 i = 0; i < KV_ARRAY_SIZE(states); i++)
		before[i] = page_in(1, states[i]);
	ad = adopted();
	KVT_EXPECT_EQ(ad.damage, 0);
	KVT_EXPECT_EQ(ad.poisoned, 0);
	KVT_EXPECT_EQ(ad.pools, 2);
	KVT_EXPECT_EQ(ad.sessions, SESSIONS);
	KVT_EXPECT_EQ(ad.ended, 1);
	for (u32 i = 0; i < KV_ARRAY_SIZE(states); i++)
		KVT_EXPECT_EQ(state_now(1, before[i]), states[i]);
	KVT_EXPECT_EQ(core.mm.pools[1]->nr[KVD_QUARANTINE], 1);
	end();
}

/* Each bit of a record, in each state: its page is poisoned and nobody's, or, of a page that
 * had no record yet, the bit is what makes it one. */
KVT_TEST(flipped_bit_of_a_record_costs_its_page)
{
	for (u32 i = 0; i < 160; i++) {
		u32 pool = 1 + i % 2, pfn = kvt_rand_below(2 * PER_EXTENT);
		u32 bit = kvt_rand_below(64 * 8), was;
		struct kvd_adopted ad;
		bool backed;

		begin();
		was = frame(pool, pfn)->state;
		backed = frame(pool, pfn)->nr_events != 0;
		((u8 *)frame(pool, pfn))[bit / 8] ^= (u8)(1 << bit % 8);
		image->undo.valid = 0;
		ad = adopted();
		KVT_EXPECT(ad.damage >= 1);
		KVT_EXPECT_EQ(ad.poisoned, backed && was != KVD_ABSENT);
		KVT_EXPECT_EQ(state_now(pool, pfn),
			      backed && was != KVD_ABSENT ? KVD_POISONED : KVD_ABSENT);
		end();
	}
}

/* ... and of no tenant: not of the one that its damaged record names. */
KVT_TEST(poisoned_page_is_nobodys)
{
	static const u16 tenants[] = {1, KVD_TENANTS_MAX, 0xffff};
	u32 pfn;

	for (u32 i = 0; i < KV_ARRAY_SIZE(tenants); i++) {
		begin();
		pfn = page_in(1, KVD_CACHED);
		frame(1, pfn)->tenant ^= tenants[i];
		image->undo.valid = 0;
		KVT_EXPECT_EQ(adopted().poisoned, 1);
		KVT_EXPECT_EQ(core.mm.pools[0]->frames[pfn].tenant, 0);
		end();
	}
}

/* A change that was cut short goes back, whichever byte it had reached. */
KVT_TEST(record_under_change_goes_back)
{
	for (u32 bytes = 1; bytes <= 60; bytes++) {
		struct kvd_frame before;
		struct kvd_adopted ad;
		u32 pfn;

		begin();
		pfn = page_in(1, KVD_ACTIVE);
		before = *frame(1, pfn);
		image->undo = (struct kvd_undo){.pool_id = 1, .pfn = pfn, .valid = 1};
		memcpy(image->undo.image, &before, sizeof(image->undo.image));
		memset(frame(1, pfn), 0x3c, bytes);
		ad = adopted();
		KVT_EXPECT_EQ(ad.undone, 1);
		KVT_EXPECT_EQ(ad.damage, 0);
		KVT_EXPECT_EQ(state_now(1, pfn), KVD_ACTIVE);
		KVT_EXPECT_EQ(core.mm.pools[0]->frames[pfn].tag, before.tag);
		KVT_EXPECT_EQ(image->undo.valid, 0);
		end();
	}
}

KVT_TEST(damaged_undo_costs_nothing_more)
{
	static const struct kvd_undo bad[] = {
		{.pool_id = 1, .pfn = 0xffffff, .valid = 1},
		{.pool_id = 1, .pfn = KVD_PFN_NONE, .valid = 7},
		{.pool_id = 1, .pfn = EXTENTS * PER_EXTENT - 1, .valid = 1},
		{.pool_id = 1, .pfn = 0, .valid = 0x80},
		{.pool_id = 2, .pfn = 3, .valid = 1},
		{.pool_id = 9, .pfn = 3, .valid = 1},
		{.pool_id = 0xffffffff, .pfn = 3, .valid = 1},
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(bad); i++) {
		begin();
		image->undo = bad[i];
		KVT_EXPECT_EQ(adopted().poisoned, 0);
		end();
	}
	/* damaged, and so is its record */
	begin();
	image->undo = bad[3];
	frame(1, 0)->tag ^= 1;
	KVT_EXPECT_EQ(adopted().poisoned, 1);
	end();
}

/* Every page of it is gone, also the one that a magazine holds. */
KVT_TEST(extent_without_its_word_or_its_memory)
{
	for (u32 i = 0; i < 6; i++) {
		struct kvd_frames_hdr *hdr;
		struct kvd_adopted ad;
		u32 stocked;
		u64 *words;

		begin();
		stocked = page_in(1, KVD_MAGAZINE);
		hdr = region(KVD_REGION_FRAMES, 1, 0)->addr;
		words = (u64 *)((u8 *)hdr + hdr->extents_off);
		if (i == 0)
			words[stocked / PER_EXTENT] = 0;
		else if (i < 4)
			words[stocked / PER_EXTENT] ^= 1ull << kvt_rand_below(64);
		else if (i == 4)
			kept.extents[0].taken = kept.extents[1].taken = true;
		else
			no_memory = true; /* the backend does not know it */
		ad = adopted();
		no_memory = false;
		KVT_EXPECT(!i || ad.damage >= 1);
		KVT_EXPECT(state_now(1, stocked) == KVD_ABSENT || i == 4);
		end();
	}
}

/* Zeros are a page that nobody has used only while its extent is being added. */
KVT_TEST(record_of_zeros)
{
	static const u32 states[] = {KVD_MAGAZINE, KVD_ACTIVE,	   KVD_SEALED,
				     KVD_CACHED,   KVD_QUARANTINE, KVD_FREE};
	u32 first;

	for (u32 i = 0; i < KV_ARRAY_SIZE(states); i++) {
		u32 pool = states[i] == KVD_QUARANTINE || states[i] == KVD_FREE ? 2 : 1,
		    pfn;

		begin();
		pfn = page_in(pool, states[i]);
		memset(frame(pool, pfn), 0, 64);
		KVT_EXPECT_EQ(adopted().poisoned, 1);
		KVT_EXPECT_EQ(state_now(pool, pfn), KVD_POISONED);
		end();
	}
	/* kvmd died while it made the records of an extent, from its end */
	for (u32 made = 0; made <= PER_EXTENT; made++) {
		struct kvd_adopted ad;
		struct kvd_frame *f;

		begin();
		first = page_in(2, KVD_FREE) / PER_EXTENT * PER_EXTENT;
		for (u32 i = first; i < first + PER_EXTENT; i++) {
			f = frame(2, i);
			memset(f, 0, sizeof(*f));
			((u16 *)region(KVD_REGION_LEASES, 2, 3)->addr)[i] = 0;
			if (i < first + PER_EXTENT - made)
				continue;
			f->pfn = i;
			f->state = KVD_FREE;
			f->parent = KVD_PFN_NONE;
			f->nr_events = 1;
			f->check = kvd_frame_check_word(f);
		}
		core_start(&core, &gens, image, 8);
		memset(&ad, 0, sizeof(ad));
		adopt(&core, regions, sessions, &ad);
		KVT_EXPECT(!audit(&core));
		KVT_EXPECT_EQ(ad.damage, 0);
		KVT_EXPECT_EQ(ad.finished, PER_EXTENT - made);
		for (u32 i = first; i < first + PER_EXTENT; i++)
			KVT_EXPECT_EQ(state_now(2, i), KVD_FREE);
		end();
	}
}

/* Whole records that say what cannot be. */
KVT_TEST(records_that_make_no_sense)
{
	for (u32 i = 0; i < 9; i++) {
		u32 pool = i == 6 ? 2 : 1, pfn;
		struct kvd_frame *f;

		begin();
		pfn = page_in(pool, i == 6 ? KVD_FREE : i == 7 ? KVD_SEALED : KVD_ACTIVE);
		f = frame(pool, pfn);
		switch (i) {
		case 0:
			f->tenant = 1; /* of the other domain */
			break;
		case 1:
			f->tenant = 77; /* nobody */
			break;
		case 2:
			f->tenant = KVD_TENANTS_MAX + 5;
			break;
		case 3:
			f->parent = EXTENTS * PER_EXTENT;
			break;
		case 4:
			f->tag = kv_tag_make(1ull << 50, KV_TAG_LIVE);
			break;
		case 5:
			f->tag = kv_tag_make(kv_tag_gen(f->tag), 0);
			break;
		case 6:
			f->tag = kv_tag_make(kv_tag_gen(f->tag), KV_TAG_LIVE);
			break;
		case 7:
			f->tag = kv_tag_make(kv_tag_gen(f->tag), KV_TAG_LIVE);
			break;
		default:
			f->state = KVD_SEALED;
		}
		f->check = kvd_frame_check_word(f);
		KVT_EXPECT_EQ(adopted().poisoned, 1);
		KVT_EXPECT_EQ(state_now(pool, pfn), KVD_POISONED);
		end();
	}
}

/* What a session holds does not fit the record: nobody holds the page. */
KVT_TEST(damaged_leases)
{
	for (u32 i = 0; i < 200; i++) {
		u64 session = 1 + kvt_rand_below(SESSIONS);
		struct kvd_region *r;
		u32 at;

		begin();
		r = region(KVD_REGION_LEASES, session == 3 ? 2 : 1, session);
		at = kvt_rand_below((u32)KV_MIN(r->size_bytes, 256));
		for (u32 n = 0; n < 1 + i % 3; n++)
			((u8 *)r->addr)[(at + n) % 256] ^= (u8)(1 << kvt_rand_below(8));
		adopted();
		end();
	}
}

KVT_TEST(leases_of_another_session)
{
	u16 *mine, *others;
	u32 pfn;

	begin();
	pfn = page_in(1, KVD_ACTIVE);
	mine = region(KVD_REGION_LEASES, 1, 1)->addr;
	others = region(KVD_REGION_LEASES, 1, 2)->addr;
	KVT_EXPECT_EQ(mine[pfn], 1);
	mine[pfn] = 0; /* the sum is right, its holder is not */
	others[pfn] = 1;
	KVT_EXPECT(adopted().damage >= 1);
	KVT_EXPECT_EQ(state_now(1, pfn), KVD_QUARANTINE);
	end();
}

KVT_TEST(leases_gone_or_cut)
{
	for (u32 cut = 0; cut < 2; cut++) {
		struct kvd_region *r;

		begin();
		r = region(KVD_REGION_LEASES, 1, 1);
		if (cut) {
			r->size_bytes = 8;
		} else {
			region_free(NULL, r);
			r->addr = NULL;
		}
		KVT_EXPECT(adopted().damage >= 1);
		KVT_EXPECT_EQ(core.mm.pools[0]->nr[KVD_MAGAZINE], 0);
		end();
	}
}

KVT_TEST(damaged_head_leaves_the_pool_out)
{
	for (u32 i = 0; i < sizeof(struct kvd_frames_hdr); i++) {
		struct kvd_adopted ad;

		begin();
		((u8 *)region(KVD_REGION_FRAMES, 1, 0)->addr)[i] ^=
			(u8)(1 << kvt_rand_below(8));
		ad = adopted();
		KVT_EXPECT(ad.damage >= 1);
		KVT_EXPECT_EQ(ad.pools, 1);
		KVT_EXPECT(!core.mm.pools[0] && core.mm.pools[1]);
		end();
	}
}

KVT_TEST(regions_cut_leave_the_pool_out)
{
	for (u32 i = 0; i < 3; i++) {
		struct kvd_region *r;

		begin();
		r = region(i == 2 ? KVD_REGION_TOKENS : KVD_REGION_FRAMES, 1, 0);
		r->size_bytes = i ? r->size_bytes - 4096 : 100;
		KVT_EXPECT(adopted().damage >= 1);
		KVT_EXPECT(!core.mm.pools[0]);
		end();
	}
	/* never finished: no damage, and nothing of it is taken */
	begin();
	((struct kvd_frames_hdr *)region(KVD_REGION_FRAMES, 1, 0)->addr)->magic = 0;
	KVT_EXPECT(adopted().pools == 1);
	end();
}

/* Entries of the image: a domain, a tenant, a session; each byte of what is checked. */
KVT_TEST(damaged_image_entries)
{
	for (u32 i = 0; i < 96; i++) {
		struct kvd_adopted ad;
		u32 bit = 1u << kvt_rand_below(8);

		begin();
		if (i % 3 == 0)
			((u8 *)&image->domains[0])[kvt_rand_below(64)] ^= (u8)bit;
		else if (i % 3 == 1)
			((u8 *)&image->tenants[0])[kvt_rand_below(72)] ^= (u8)bit;
		else
			((u8 *)&image->sessions[0])[kvt_rand_below(
				offsetof(struct kvd_image_session, state))] ^= (u8)bit;
		ad = adopted();
		KVT_EXPECT(ad.damage >= 1 || i % 3 == 2);
		if (i % 3 == 0)
			KVT_EXPECT(!core.domains[0] && !core.mm.pools[0] &&
				   ad.sessions == 1);
		else if (i % 3 == 2)
			KVT_EXPECT_EQ(ad.ended, 2);
		end();
	}
}

KVT_TEST(damaged_words_of_a_session)
{
	for (u32 i = 0; i < 40; i++) {
		bool state = i % 2;

		begin();
		if (state)
			image->sessions[0].state ^= 1u << kvt_rand_below(32);
		else
			image->sessions[0].pools[0] ^= 1u << kvt_rand_below(32);
		KVT_EXPECT(adopted().damage >= 1);
		KVT_EXPECT_EQ(sessions[0]->state,
			      state ? KVD_SESSION_ENDED : KVD_SESSION_LIVE);
		KVT_EXPECT(state || !sessions[0]->attach[0].pool);
		end();
	}
	/* an entry of nobody */
	begin();
	image->sessions[7] = image->sessions[0];
	image->sessions[7].id = 99;
	adopted();
	KVT_EXPECT_EQ(image->sessions[7].state, KVD_IMAGE_FREE);
	end();
}

KVT_TEST(session_page_of_a_hostile_client)
{
	for (u32 i = 0; i < 60; i++) {
		u64 *words;

		begin();
		words = (u64 *)pages[0];
		for (u32 n = 0; n < KV_SESSION_BYTES / 8; n++)
			words[n] = i % 2 ? kvt_rand64() : KV_MAG_STOCKED | n % 50;
		if (i % 3 == 0) /* a right tag under a wrong word */
			for (u32 m = 0; m < KV_MAGAZINES; m++)
				pages[0]->magazines[m].slots[i % KV_MAGAZINE_SLOTS].tag =
					frame(1, i % PER_EXTENT)->tag;
		adopted();
		end();
	}
}

KVT_TEST(image_of_another_kind_is_not_ours)
{
	begin();
	KVT_EXPECT(kvd_image_whole(image, sizeof(*image)));
	KVT_EXPECT(!kvd_image_whole(image, sizeof(*image) - 1));
	image->version++;
	KVT_EXPECT(!kvd_image_whole(image, sizeof(*image)));
	image->version--;
	image->magic ^= 1;
	KVT_EXPECT(!kvd_image_whole(image, sizeof(*image)));
	copies_drop(regions, image);
}

KVT_MAIN()
