/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kvmd that starts again over memory in which anything may have changed: image, page
 * records, extent words, leases, token ids, session pages. It never ends by an assertion,
 * what it takes over passes the whole audit and serves on, and a page that was waiting for
 * steps is not handed out.
 *
 * The input is a list of changes to what a fixed history left.
 */
#include "tests/fuzz/fuzz.h"

#define HISTORY_CHECK FUZZ_CHECK
#include "tests/unit/own/history.h"

#define CHANGES_MAX 64u

/* ------------------------------------------------------------------------ changes */

static void change(struct fuzz_in *in, struct kvd_region *regions,
		   struct kvd_image *image)
{
	u8 what = fuzz_u8(in), how = fuzz_u8(in), bytes[8];
	u32 nr = 1 + how % sizeof(bytes), off = fuzz_u32(in) & 0xffffff, room, clear;
	u8 *to;

	fuzz_take(in, bytes, nr);
	if (what >= 0xf0) {
		to = (u8 *)image;
		room = (u32)(what == 0xff ? offsetof(struct kvd_image, sessions) +
						    8 * sizeof(image->sessions[0])
					  : sizeof(*image));
	} else if (what >= 0xe0) {
		to = (u8 *)pages[what % SESSIONS];
		room = KV_SESSION_BYTES;
	} else {
		to = regions[what % kept.nr_regions].addr;
		room = (u32)regions[what % kept.nr_regions].size_bytes;
	}
	off %= room;
	nr = KV_MIN(nr, room - off);
	if ((how & 0x30) == 0x30) { /* a line is gone */
		clear = KV_MIN(room - off / 64 * 64, 64u);
		memset(to + off / 64 * 64, 0, clear);
	} else if (how & 0x20) {
		for (u32 i = 0; i < nr; i++)
			to[off + i] ^= bytes[i];
	} else {
		memcpy(to + off, bytes, nr);
	}
}

static void run(struct kvd_region *r, struct kvd_image *image)
{
	struct kvd_session *s[SESSIONS];
	struct kvd_adopted ad = {0};
	struct kvd_gen_source gens;
	static struct kvd_core core;

	core_start(&core, &gens, image, 8);
	adopt(&core, r, s, &ad);
	expect_waiting(&core);
	FUZZ_CHECK(!audit(&core));
	serve(&core);
	kvd_core_fini(&core);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};
	struct kvd_region r[REGIONS_MAX];
	struct kvd_image *image;

	copies_make(r, &image);
	for (u32 i = 0; i < CHANGES_MAX && in.left; i++)
		change(&in, r, image);
	if (kvd_image_whole(image, sizeof(*image)))
		run(r, image);
	copies_drop(r, image);
	return 0;
}
