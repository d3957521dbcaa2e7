/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier/journal: what a restart finds, wherever the crash was. */
#include "kvmd/tier/journal.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvmd/dbg/fault.h"
#include "tests/unit/tier/common.h"

#define RECORD sizeof(struct kvd_journal_record)
#define SLOTS  64u

/* What a reader makes of the records: by slot, the page that lies there; 0 = none. */
struct model {
	u64 page[SLOTS];
	u64 nr;
};

static struct kvd_workers *workers;
static int fsync_error; /* in place of the library's fsync() */

int fsync(int fd)
{
	if (!fsync_error)
		return (int)syscall(SYS_fsync, fd);
	errno = fsync_error;
	return -1;
}

static void model_apply(struct model *m, const struct kvd_journal_record *rec)
{
	KVT_EXPECT(rec->off / 4096 < SLOTS);
	m->page[rec->off / 4096] = rec->type == KVD_JOURNAL_PUT ? rec->generation : 0;
	m->nr++;
}

static void replay(void *arg, const struct kvd_journal_record *rec)
{
	model_apply(arg, rec);
}

static struct kvd_journal *journal_open(struct model *m, struct kvd_journal_found *found,
					u8 mark)
{
	struct kvd_journal_params p = {
		.dir_fd = scratch_fd(),
		.name = "journal",
		.open = {.type = KVD_JOURNAL_OPEN, .off = 1 << 20, .domain = {mark}},
		.replay = replay,
		.arg = m};
	struct kvd_journal *j;

	if (!workers)
		KVT_EXPECT_EQ(kvd_workers_create(1, &workers), 0);
	p.workers = workers;
	memset(m, 0, sizeof(*m));
	KVT_EXPECT_EQ(kvd_journal_open(&p, found, &j), 0);
	return j;
}

static struct kvd_journal_record change(u64 n)
{
	return (struct kvd_journal_record){
		.type = n % 5 == 4 ? KVD_JOURNAL_DEL : KVD_JOURNAL_PUT,
		.off = n * 7 % SLOTS * 4096,
		.generation = 1000 + n,
	};
}

static void settle(struct kvd_journal *j)
{
	do {
		kvd_journal_flush(j);
		while (kvd_workers_pending(workers))
			kvd_workers_reap(workers);
		kvd_journal_flush(j);
	} while (kvd_workers_pending(workers));
}

/* The file that a fixed workload leaves; models[i] = after i changes. */
static u8 *workload(u64 nr, struct model *models, size_t *ret_bytes)
{
	struct kvd_journal_found found;
	struct model m;
	struct kvd_journal *j = journal_open(&m, &found, 1);

	KVT_EXPECT(!found.existed);
	memset(&models[0], 0, sizeof(m));
	for (u64 n = 0; n < nr; n++) {
		struct kvd_journal_record rec = change(n);

		kvd_journal_add(j, &rec);
		models[n + 1] = models[n];
		model_apply(&models[n + 1], &rec);
		if (n % 7 == 6)
			settle(j);
	}
	kvd_journal_close(j, true);
	return file_read("journal", ret_bytes);
}

#define CHANGES 16u

static void expect_model(const struct model *got, const struct model *want, size_t cut)
{
	if (memcmp(got->page, want->page, sizeof(got->page)))
		KVT_FAIL("cut at byte %zu: %llu changes of %llu, or other ones", cut,
			 (unsigned long long)got->nr, (unsigned long long)want->nr);
}

/* The journal of a fixed workload, cut at each of its bytes: exactly the whole records. */
KVT_TEST(cut_at_each_byte)
{
	struct model models[CHANGES + 1], m;
	struct kvd_journal_found found;
	size_t bytes;
	u8 *whole = workload(CHANGES, models, &bytes);

	KVT_EXPECT_EQ(bytes, (CHANGES + 2) * RECORD);
	for (size_t cut = 0; cut <= bytes; cut++) {
		u64 records = cut / RECORD, changes = records ? records - 1 : 0;
		struct kvd_journal *j;

		file_write("journal", whole, cut);
		j = journal_open(&m, &found, 1);
		KVT_EXPECT_EQ(found.records, records);
		KVT_EXPECT_EQ(found.lost_bytes, cut % RECORD);
		KVT_EXPECT_EQ(found.clean, cut == bytes);
		expect_model(&m, &models[KV_MIN(changes, CHANGES)], cut);
		kvd_journal_close(j, false);
	}
	free(whole);
}

/* Each byte of the journal turned over: what is behind it does not count, nor itself. */
KVT_TEST(damage_ends_the_journal)
{
	struct model models[CHANGES + 1], m;
	struct kvd_journal_found found;
	size_t bytes;
	u8 *whole = workload(CHANGES, models, &bytes);

	for (size_t at = 0; at < bytes; at += 1 + kvt_rand_below(3)) {
		u64 records = at / RECORD, changes = records ? records - 1 : 0;
		u8 bit = (u8)(1 << kvt_rand_below(8));
		struct kvd_journal *j;

		whole[at] ^= bit;
		file_write("journal", whole, bytes);
		j = journal_open(&m, &found, 1);
		KVT_EXPECT_EQ(found.records, records);
		KVT_EXPECT(!found.clean);
		expect_model(&m, &models[KV_MIN(changes, CHANGES)], at);
		kvd_journal_close(j, false);
		whole[at] ^= bit;
	}
	free(whole);
}

/* After a crash it goes on behind what counted, and the rest never comes back. */
KVT_TEST(goes_on_after_a_cut)
{
	struct model models[CHANGES + 1], m, want;
	struct kvd_journal_found found;
	struct kvd_journal_record rec = change(3);
	size_t bytes;
	u8 *whole = workload(CHANGES, models, &bytes);

	for (u32 keep = 1; keep < CHANGES; keep += 3) {
		struct kvd_journal *j;

		file_write("journal", whole, keep * RECORD + 50);
		j = journal_open(&m, &found, 1);
		want = m;
		kvd_journal_add(j, &rec);
		model_apply(&want, &rec);
		kvd_journal_close(j, true);
		j = journal_open(&m, &found, 1);
		KVT_EXPECT(found.clean && found.records == keep + 2);
		expect_model(&m, &want, keep);
		kvd_journal_close(j, false);
	}
	free(whole);
}

KVT_TEST(another_store_is_not_believed)
{
	struct model models[CHANGES + 1], m;
	struct kvd_journal_found found;
	size_t bytes;
	struct kvd_journal *j;

	free(workload(CHANGES, models, &bytes));
	j = journal_open(&m, &found, 2);
	KVT_EXPECT(found.existed && !found.matched && !m.nr);
	kvd_journal_close(j, true);
	j = journal_open(&m, &found, 2);
	KVT_EXPECT(found.matched && !m.nr);
	kvd_journal_close(j, true);
}

static void compact_all(struct kvd_journal *j, const struct model *now, u64 *n,
			struct model *all)
{
	for (u32 slot = 0; slot < SLOTS; slot++) {
		struct kvd_journal_record rec = {.type = KVD_JOURNAL_PUT,
						 .off = slot * 4096,
						 .generation = all->page[slot]};

		if (all->page[slot])
			KVT_EXPECT(kvd_journal_live(j, &rec));
		if (slot % 3 == 0) { /* life goes on */
			rec = change((*n)++);
			kvd_journal_add(j, &rec);
			model_apply(all, &rec);
			settle(j);
		}
	}
}

/* Compaction beside changes; a crash before and after the new file is in place. */
KVT_TEST(compaction_keeps_what_lives)
{
	static struct model m, all;
	struct kvd_journal_found found;
	struct kvd_journal *j = journal_open(&m, &found, 1);
	struct stat before, after;
	u8 *old, *new_file;
	size_t old_bytes, new_bytes;
	u64 n = 0;

	memset(&all, 0, sizeof(all));
	while (!kvd_journal_wants(j, SLOTS)) {
		struct kvd_journal_record rec = change(n++);

		kvd_journal_add(j, &rec);
		model_apply(&all, &rec);
		if (n % 500 == 0)
			settle(j);
	}
	settle(j);
	KVT_EXPECT(!stat(scratch("journal"), &before));
	KVT_EXPECT_EQ(kvd_journal_compact(j), 0);
	compact_all(j, &m, &n, &all);
	settle(j);
	old = file_read("journal", &old_bytes); /* crash here: the old one counts */
	new_file = file_read("journal.new", &new_bytes);
	KVT_EXPECT(old && new_file);
	kvd_journal_compacted(j);
	settle(j);
	KVT_EXPECT(!kvd_journal_compacting(j));
	KVT_EXPECT_EQ(kvd_journal_stats(j)->compactions, 1);
	KVT_EXPECT(!stat(scratch("journal"), &after) &&
		   after.st_size < before.st_size / 8);
	for (u32 i = 0; i < 10; i++) {
		struct kvd_journal_record rec = change(n++);

		kvd_journal_add(j, &rec);
		model_apply(&all, &rec);
	}
	kvd_journal_close(j, true);
	j = journal_open(&m, &found, 1);
	KVT_EXPECT(found.clean);
	expect_model(&m, &all, 0);
	kvd_journal_close(j, false);

	file_write("journal", old, old_bytes);
	file_write("journal.new", new_file, new_bytes);
	memset(&all, 0, sizeof(all));
	for (u64 i = 0; i < n - 10; i++) {
		struct kvd_journal_record rec = change(i);

		model_apply(&all, &rec);
	}
	j = journal_open(&m, &found, 1);
	expect_model(&m, &all, 1);
	KVT_EXPECT(access(scratch("journal.new"), F_OK));
	kvd_journal_close(j, false);
	free(old);
	free(new_file);
}

/* A write that fails is written again: no hole that would end the journal early. */
KVT_TEST(failed_batch_is_written_again)
{
	static const struct kvd_fault_spec twice = {.probability = 1000000, .times = 2};
	struct kvd_journal_found found;
	struct model m, want;
	struct kvd_journal *j = journal_open(&m, &found, 1);

	memset(&want, 0, sizeof(want));
	for (u64 n = 0; n < 30; n++) {
		struct kvd_journal_record rec = change(n);

		if (n == 10)
			kvd_fault_arm(KVD_FAULT_tier_journal, &twice);
		kvd_journal_add(j, &rec);
		model_apply(&want, &rec);
		kvd_journal_tick(j);
		kvd_journal_flush(j);
		while (kvd_workers_pending(workers))
			kvd_workers_reap(workers);
	}
	KVT_EXPECT_EQ(kvd_journal_stats(j)->errors, 2);
	KVT_EXPECT_EQ(kvd_journal_stats(j)->last_error, -EIO);
	kvd_journal_close(j, true);
	j = journal_open(&m, &found, 1);
	KVT_EXPECT(found.clean && found.records == 32);
	expect_model(&m, &want, 0);
	kvd_journal_close(j, false);
}

/* The daemon's loop: it flushes in every turn, and the end of a batch makes a turn. */
static void turns(struct kvd_journal *j, u32 nr)
{
	for (u32 i = 0; i < nr; i++) {
		kvd_journal_flush(j);
		while (kvd_workers_pending(workers))
			kvd_workers_reap(workers);
	}
}

/* A full disk fails at once: it is asked once a second, not as fast as the loop goes. */
KVT_TEST(full_disk_is_asked_once_a_tick)
{
	static const struct kvd_fault_spec always = {.probability = 1000000};
	struct kvd_journal_record rec = change(0);
	struct kvd_journal_found found;
	struct model m, want;
	struct kvd_journal *j = journal_open(&m, &found, 1);

	memset(&want, 0, sizeof(want));
	settle(j);
	kvd_fault_arm(KVD_FAULT_tier_journal, &always);
	kvd_journal_add(j, &rec);
	model_apply(&want, &rec);
	for (u64 tick = 1; tick <= 4; tick++) {
		turns(j, 50);
		KVT_EXPECT_EQ(kvd_journal_stats(j)->errors, tick);
		rec = change(tick);
		kvd_journal_add(j, &rec);
		model_apply(&want, &rec);
		kvd_journal_tick(j);
	}
	kvd_fault_arm(KVD_FAULT_tier_journal, NULL);
	turns(j, 3);
	KVT_EXPECT_EQ(kvd_journal_stats(j)->lost, 0);
	kvd_journal_close(j, true);
	j = journal_open(&m, &found, 1);
	KVT_EXPECT(found.clean);
	expect_model(&m, &want, 0);
	kvd_journal_close(j, false);
}

static struct kvd_journal *journal_for_compaction(struct model *all, u64 *ret_n)
{
	static struct model m;
	struct kvd_journal_found found;
	struct kvd_journal *j = journal_open(&m, &found, 1);
	u64 n = 0;

	memset(all, 0, sizeof(*all));
	while (!kvd_journal_wants(j, SLOTS)) {
		struct kvd_journal_record rec = change(n++);

		kvd_journal_add(j, &rec);
		model_apply(all, &rec);
		if (n % 500 == 0)
			settle(j);
	}
	settle(j);
	*ret_n = n;
	return j;
}

/* So is a compaction that cannot begin, or not end: the whole of it would be written again. */
KVT_TEST(failed_compaction_is_begun_again_at_a_tick)
{
	static struct model all, none;
	u64 n;
	struct kvd_journal *j = journal_for_compaction(&all, &n);

	KVT_EXPECT(!mkdir(scratch("journal.new"), 0700));
	KVT_EXPECT_EQ(kvd_journal_compact(j), -EISDIR);
	KVT_EXPECT(!kvd_journal_wants(j, SLOTS));
	KVT_EXPECT_EQ(kvd_journal_stats(j)->errors, 1);
	KVT_EXPECT(!rmdir(scratch("journal.new")));
	kvd_journal_tick(j);
	KVT_EXPECT(kvd_journal_wants(j, SLOTS));

	KVT_EXPECT_EQ(kvd_journal_compact(j), 0);
	compact_all(j, &none, &n, &all);
	settle(j);
	KVT_EXPECT(!unlink(scratch("journal")) && !mkdir(scratch("journal"), 0700));
	kvd_journal_compacted(j);
	settle(j);
	KVT_EXPECT_EQ(kvd_journal_stats(j)->compactions, 0);
	KVT_EXPECT_EQ(kvd_journal_stats(j)->errors, 2);
	KVT_EXPECT(!kvd_journal_compacting(j) && !kvd_journal_wants(j, SLOTS));
	KVT_EXPECT(!rmdir(scratch("journal")));
	kvd_journal_tick(j);
	KVT_EXPECT(kvd_journal_wants(j, SLOTS));
	kvd_journal_close(j, true);
}

/* The new file has the name, whatever the directory says of its own safety: what comes
 * after goes there, not into a file without a name. */
KVT_TEST(changes_go_to_the_file_that_has_the_name)
{
	static struct model all, m;
	struct kvd_journal_found found;
	struct kvd_journal_record rec;
	u64 n;
	struct kvd_journal *j = journal_for_compaction(&all, &n);

	KVT_EXPECT_EQ(kvd_journal_compact(j), 0);
	compact_all(j, &m, &n, &all);
	settle(j);
	fsync_error = EIO;
	kvd_journal_compacted(j);
	settle(j);
	fsync_error = 0;
	KVT_EXPECT_EQ(kvd_journal_stats(j)->errors, 1);
	KVT_EXPECT_EQ(kvd_journal_stats(j)->last_error, -EIO);
	for (u32 i = 0; i < 20; i++) {
		rec = change(n++);
		kvd_journal_add(j, &rec);
		model_apply(&all, &rec);
	}
	kvd_journal_close(j, true);
	j = journal_open(&m, &found, 1);
	KVT_EXPECT(found.clean);
	expect_model(&m, &all, 0);
	kvd_journal_close(j, false);
}

TIER_MAIN("/dev/shm") /* thousands of small files that are cut and synced */
