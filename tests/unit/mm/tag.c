/* SPDX-License-Identifier: Apache-2.0 */
/* Generations (P1) and the published table (P2). */
#include <sys/mman.h>
#include "tests/unit/own/common.h"

static u64 saved;
static int save_error;

static int save(void *arg, enum kvd_saved what, u64 value)
{
	KVT_EXPECT_EQ(what, KVD_SAVED_GENERATION);
	if (!save_error)
		saved = value;
	return save_error;
}

static const struct kvd_env env = {.save = save};

KVT_TEST(generations_are_saved_ahead_of_use)
{
	struct kvd_gen_source src;
	struct kvd_gens g, other;

	kvd_gen_source_init(&src, &env, 0);
	kvd_gens_init(&g, &src);
	kvd_gens_init(&other, &src);
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 1), 0);
	KVT_EXPECT_EQ(saved, 1 + KVD_GEN_BOUND_AHEAD);
	KVT_EXPECT_EQ(kvd_gens_live(&g), 1);
	KVT_EXPECT_EQ(kvd_gens_dead(&g), 2);
	/* another loop takes another block */
	KVT_EXPECT_EQ(kvd_gens_reserve(&other, 1), 0);
	KVT_EXPECT_EQ(kvd_gens_live(&other), 1 + KVD_GEN_BLOCK);
	for (u64 i = 0; i < 3 * KVD_GEN_BLOCK; i++) {
		u64 gen;

		KVT_EXPECT_EQ(kvd_gens_reserve(&g, 1), 0);
		gen = kvd_gens_live(&g);
		KVT_EXPECT(gen < saved);
		kvd_gens_dead(&g);
	}
	KVT_EXPECT(g.next > 6 * KVD_GEN_BLOCK);
	/* a new kvmd starts at the bound, whatever the old one had used */
	kvd_gen_source_init(&src, &env, saved);
	kvd_gens_init(&g, &src);
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 1), 0);
	KVT_EXPECT_EQ(kvd_gens_live(&g), 1 + KVD_GEN_BOUND_AHEAD);
}

KVT_TEST(no_generation_is_used_that_could_not_be_saved)
{
	struct kvd_gen_source src;
	struct kvd_gens g;

	kvd_gen_source_init(&src, &env, 0);
	kvd_gens_init(&g, &src);
	save_error = -EIO;
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 1), -EIO);
	save_error = 0;
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 1), 0);
	/* later, with some left below the bound, a failing save is no reason to refuse */
	src.next = src.bound - 100;
	save_error = -EIO;
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 50), 0);
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 51), -EIO);
}

/* At the end of the range alloc says -EOVERFLOW, and every live page can still die. */
KVT_TEST(the_range_ends_with_eoverflow)
{
	struct kvd_gen_source src;
	struct kvd_gens g;
	u64 last = 0, nr = 0;

	kvd_gen_source_init(&src, &env, KV_TAG_GEN_MAX - 999);
	kvd_gens_init(&g, &src);
	while (kvd_gens_reserve(&g, 3) == 0) {
		for (u32 i = 0; i < 3; i++, nr++) {
			u64 gen = kvd_gens_live(&g);

			KVT_EXPECT(gen > last);
			last = gen;
		}
	}
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 3), -EOVERFLOW);
	KVT_EXPECT_EQ(nr, 498); /* 1,000 generations: half to live, half to die */
	for (u64 i = 0; i < nr; i++) {
		last = kvd_gens_dead(&g);
		KVT_EXPECT(last <= KV_TAG_GEN_MAX);
	}
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 3), -EOVERFLOW);
	kvd_gen_source_init(&src, &env, KV_TAG_GEN_MAX + 1);
	kvd_gens_init(&g, &src);
	KVT_EXPECT_EQ(kvd_gens_reserve(&g, 1), -EOVERFLOW);
}

KVT_TEST(alloc_at_the_end_of_the_range)
{
	static struct rig r;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[8];

	rig_init(&r, 1, 8);
	r.gens.next = r.gens.bound = KV_TAG_GEN_MAX - 9; /* nearly all were used */
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	KVT_EXPECT_EQ(rig_alloc(s, a, 6, KV_GFP_NOWAIT, g), -EOVERFLOW);
	KVT_EXPECT_EQ(rig_alloc(s, a, 5, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, g + 5), -EOVERFLOW);
	KVT_EXPECT_EQ(s->tenant->account.used_bytes, 5 * RIG_STRIDE);
	for (u32 i = 0; i < 5; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, g), -EOVERFLOW);
	rig_fini(&r);
}

static struct kvd_table table;
static void *mem;
static u64 trap_head, trap_tag;
static u32 traps;

static void on_store(int sig, siginfo_t *info, void *uc)
{
	trap_head = table.shared->log_head.word;
	trap_tag = table.tags[3];
	traps++;
	mprotect((u8 *)mem + kv_table_log_off(1024), KV_LOG_ENTRIES * 16,
		 PROT_READ | PROT_WRITE);
}

static void table_make(void)
{
	mem = mmap(NULL, kv_table_bytes(1024), PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	KVT_EXPECT(mem != MAP_FAILED);
	kvd_table_init(&table, mem, 1, 2, 3, 1024, 4);
}

/* P2: tag, log entry, log_head in this order. A trap on the log's memory sees what is
 * there. */
KVT_TEST(a_log_entry_is_there_before_log_head_covers_it)
{
	struct sigaction sa = {.sa_sigaction = on_store, .sa_flags = SA_SIGINFO};

	table_make();
	kvd_table_use(&table, 64);
	sigaction(SIGSEGV, &sa, NULL);
	mprotect((u8 *)mem + kv_table_log_off(1024), KV_LOG_ENTRIES * 16, PROT_READ);
	kvd_table_set(&table, 3, 0x501);
	KVT_EXPECT_EQ(traps, 1);
	KVT_EXPECT_EQ(trap_tag, 0x501); /* the tag came first */
	KVT_EXPECT_EQ(trap_head, 0);	/* log_head comes last */
	KVT_EXPECT_EQ(table.shared->log_head.word, 0);
	kvd_table_publish(&table);
	KVT_EXPECT_EQ(table.shared->log_head.word, 1);
	KVT_EXPECT_EQ(table.log[0].pfn, 3);
	KVT_EXPECT_EQ(table.log[0].sequence, 0);
	KVT_EXPECT_EQ(table.log[0].tag, 0x501);
}

KVT_TEST(log_head_moves_by_4096_at_most)
{
	u64 head = 0, tag = 0x101;

	table_make();
	kvd_table_use(&table, 1024);
	for (u32 i = 0; i < 3 * KV_LOG_ENTRIES; i++, tag += 0x100) {
		kvd_table_set(&table, i % 1024, tag);
		KVT_EXPECT_LE(table.shared->log_head.word - head, KV_LOG_BATCH_MAX);
		KVT_EXPECT_LE(table.head - table.shared->log_head.word,
			      KV_LOG_BATCH_MAX - 1);
		head = table.shared->log_head.word;
	}
	kvd_table_publish(&table);
	KVT_EXPECT_EQ(table.shared->log_head.word, 3 * KV_LOG_ENTRIES);
	for (u32 i = 0; i < KV_LOG_ENTRIES; i++)
		KVT_EXPECT_EQ(table.log[i].sequence, 2 * KV_LOG_ENTRIES + i);
}

KVT_TEST(table_head_says_what_it_is)
{
	table_make();
	KVT_EXPECT(table.shared->magic == KV_TABLE_MAGIC &&
		   table.shared->abi == KV_ABI_VERSION);
	KVT_EXPECT_EQ(table.shared->pool_id, 1);
	KVT_EXPECT_EQ(table.shared->fingerprint, 2);
	KVT_EXPECT_EQ(table.shared->table_epoch, 3);
	KVT_EXPECT_EQ(table.shared->grace_epoch.word, 4);
	KVT_EXPECT_EQ(table.shared->log_off, kv_table_log_off(1024));
	kvd_table_use(&table, 64);
	kvd_table_use(&table, 32);
	KVT_EXPECT_EQ(table.shared->used_pages.word, 64);
}

KVT_MAIN()
