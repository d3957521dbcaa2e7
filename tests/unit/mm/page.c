/* SPDX-License-Identifier: Apache-2.0 */
/* Page records: the legality table, the check word, the history. */
#include "tests/unit/own/common.h"

/* The table of page.h, written down a second time. */
static const char *const legal[] = {
	"ABSENT>FREE",	       "FREE>ACTIVE",	    "FREE>MAGAZINE",
	"FREE>ABSENT",	       "FREE>RESTORING",    "MAGAZINE>ACTIVE",
	"MAGAZINE>QUARANTINE", "ACTIVE>SEALED",	    "ACTIVE>QUARANTINE",
	"SEALED>CACHED",       "SEALED>QUARANTINE", "CACHED>SEALED",
	"CACHED>QUARANTINE",   "CACHED>SPILLING",   "QUARANTINE>FREE",
	"SPILLING>QUARANTINE", "RESTORING>CACHED",  "RESTORING>QUARANTINE",
	"POISONED>ABSENT",     "FREE>POISONED",	    "MAGAZINE>POISONED",
	"ACTIVE>POISONED",     "SEALED>POISONED",   "CACHED>POISONED",
	"QUARANTINE>POISONED", "SPILLING>POISONED", "RESTORING>POISONED",
};

KVT_TEST(only_the_drawn_transitions_are_legal)
{
	char name[64];
	u32 found = 0;

	for (u32 from = 0; from <= KVD_FRAME_STATES; from++) {
		for (u32 to = 0; to <= KVD_FRAME_STATES; to++) {
			bool want = false;

			snprintf(name, sizeof(name), "%s>%s", kvd_frame_state_str(from),
				 kvd_frame_state_str(to));
			for (u32 i = 0; i < KV_ARRAY_SIZE(legal); i++)
				want |= !strcmp(legal[i], name);
			found += want;
			if (kvd_frame_may(from, to) != want)
				KVT_FAIL("%s: %d", name, !want);
		}
	}
	KVT_EXPECT_EQ(found, KV_ARRAY_SIZE(legal));
}

KVT_TEST(an_illegal_transition_ends_the_process)
{
	static struct rig r;
	struct kvd_session *s;
	struct kvd_attach *a;
	int status;
	pid_t pid;

	rig_init(&r, 1, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	rig_alloc1(s, a);
	pid = fork();
	if (pid == 0) {
		freopen("/dev/null", "w", stderr);
		kvd_frame_set(a->pool, 7, KVD_SEALED, KVD_EV_SEAL,
			      0); /* FREE -> SEALED */
		_exit(0);
	}
	waitpid(pid, &status, 0);
	KVT_EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	rig_fini(&r);
}

KVT_TEST(check_word_sees_every_single_bit)
{
	struct kvd_frame f;
	u32 good;

	for (u32 round = 0; round < 100; round++) {
		for (u32 i = 0; i < sizeof(f); i++)
			((u8 *)&f)[i] = (u8)kvt_rand64();
		good = kvd_frame_check_word(&f);
		for (u32 bit = 0; bit < 60 * 8; bit++) {
			((u8 *)&f)[bit / 8] ^= (u8)(1u << (bit % 8));
			KVT_EXPECT(kvd_frame_check_word(&f) != good);
			((u8 *)&f)[bit / 8] ^= (u8)(1u << (bit % 8));
		}
		f.check++;
		f.past[0].when_ns++;
		KVT_EXPECT_EQ(kvd_frame_check_word(&f), good);
	}
}

KVT_TEST(history_keeps_the_last_four_events)
{
	static struct rig r;
	struct kvd_page_past past[KVD_PAST_NR];
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g;

	rig_init(&r, 1, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(kvd_frame_history(&a->pool->frames[g.pfn], past), 2);
	KVT_EXPECT_EQ(past[0].event, KVD_EV_EXTENT_ADDED);
	KVT_EXPECT_EQ(past[1].event, KVD_EV_ALLOC);
	kvd_core_now(&r.core, r.now = 1000);
	KVT_EXPECT_EQ(rig_free1(s, a, g), 0);
	rig_run(&r);
	rig_alloc1(s, a);
	KVT_EXPECT_EQ(kvd_frame_history(&a->pool->frames[g.pfn], past), 4);
	KVT_EXPECT_EQ(past[1].event, KVD_EV_FREE);
	KVT_EXPECT_EQ(past[1].when_ns, 1000);
	KVT_EXPECT_EQ(past[1].session, s->id);
	KVT_EXPECT_EQ(past[1].state, KVD_QUARANTINE);
	KVT_EXPECT_EQ(past[2].event, KVD_EV_RELEASE);
	KVT_EXPECT_EQ(past[3].event, KVD_EV_ALLOC);
	KVT_EXPECT_STR(kvd_page_event_str(past[2].event), "release");
	KVT_EXPECT_STR(kvd_page_event_str(KVD_EV_NR), "?");
	for (u32 i = 0; i < KVD_EV_NR; i++)
		KVT_EXPECT(strcmp(kvd_page_event_str(i), "?"));
	rig_fini(&r);
}

/* The form that recovery will read: a header that says what it is, records at fixed
 * places. */
KVT_TEST(records_describe_themselves)
{
	static struct rig r;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kvd_frames_hdr *hdr;

	rig_init(&r, 1, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	hdr = a->pool->frames_region.addr;
	KVT_EXPECT(hdr->magic == KVD_FRAMES_MAGIC && hdr->version == KVD_FRAMES_VERSION);
	KVT_EXPECT_EQ(hdr->record_bytes, 128);
	KVT_EXPECT_EQ(hdr->nr_pages, 8);
	KVT_EXPECT_EQ(hdr->fingerprint, a->pool->fingerprint);
	KVT_EXPECT_EQ(hdr->layout.latent_dim, 512);
	KVT_EXPECT_EQ((u8 *)a->pool->frames - (u8 *)hdr, hdr->record_off);
	KVT_EXPECT_EQ((uintptr_t)a->pool->frames % 128, 0);
	rig_fini(&r);
}

KVT_MAIN()
