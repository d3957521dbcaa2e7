/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.h - a copy of what the history of history.h left, to be damaged, and a core that
 * starts over it. For tests/unit/own/adopt*.c, included once by each.
 */
#ifndef TESTS_OWN_ADOPT_H
#define TESTS_OWN_ADOPT_H

#include "tests/unit/own/common.h"

#define HISTORY_CHECK KVT_EXPECT
#include "tests/unit/own/history.h"

static struct kvd_region regions[REGIONS_MAX];
static struct kvd_image *image;
static struct kvd_session *sessions[SESSIONS];
static struct kvd_gen_source gens;
static struct kvd_core core;

static void begin(void)
{
	copies_make(regions, &image);
}

/* Adopt, audit, serve on, end. */
static struct kvd_adopted adopted(void)
{
	struct kvd_adopted ad = {0};

	core_start(&core, &gens, image, 8);
	adopt(&core, regions, sessions, &ad);
	expect_waiting(&core);
	if (audit(&core))
		KVT_FAIL("the audit has findings");
	return ad;
}

static inline void end(void)
{
	serve(&core);
	kvd_core_fini(&core);
	copies_drop(regions, image);
}

static struct kvd_region *region(enum kvd_region_kind kind, u32 pool, u64 session)
{
	for (u32 i = 0; i < kept.nr_regions; i++)
		if (regions[i].kind == kind && regions[i].pool_id == pool &&
		    regions[i].session_id == session)
			return &regions[i];
	KVT_FAIL("no region %u of pool %u, session %llu", kind, pool,
		 (unsigned long long)session);
}

static struct kvd_frame *frame(u32 pool, u32 pfn)
{
	u8 *head = region(KVD_REGION_FRAMES, pool, 0)->addr;

	return (struct kvd_frame *)(head + KVD_FRAMES_OFF) + pfn;
}

/* A page of pool 1 in that state. */
static inline u32 page_in(u32 pool, u32 state)
{
	for (u32 pfn = 0; pfn < EXTENTS * PER_EXTENT; pfn++)
		if (frame(pool, pfn)->state == state && frame(pool, pfn)->nr_events)
			return pfn;
	KVT_FAIL("no %s page", kvd_frame_state_str(state));
}

static inline u32 state_now(u32 pool, u32 pfn)
{
	return core.mm.pools[pool - 1]->frames[pfn].state;
}

#endif
