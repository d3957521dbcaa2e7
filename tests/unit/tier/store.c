/* SPDX-License-Identifier: Apache-2.0 */
/* kvmd/tier's store: file I/O, pages that prove themselves, restarts, files that are not ours. */
#include "kvmd/tier/store.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "kv/outcome.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/tier/crc.h"
#include "tests/unit/tier/common.h"

#define POOL_BYTES (8ull << 20)
#define SLOT_BYTES 20480ull

static struct kvd_slot_name name_of(u8 *key, u64 n)
{
	memset(key, 0, KV_KEY_BYTES);
	memcpy(key, &n, sizeof(n));
	return (struct kvd_slot_name){.key = key, .fingerprint = 7, .domain = 1};
}

static bool there(struct kvd_space *sp, u64 n)
{
	u8 key[KV_KEY_BYTES];
	struct kvd_slot_name name = name_of(key, n);

	return kvd_space_find(sp, &name) != KVD_SLOT_NONE;
}

/* --------------------------------------------------------------------- store */

static u8 *pool;
static int pool_fd;
static u8 mark = 1;
static u64 nvme_bytes = 8 << 20;

static void describe(void *arg, u16 tenant, struct kvd_ident *ret)
{
	memset(ret, 0, sizeof(*ret));
	ret->domain[0] = 0xd0;
	ret->tenant = 100 + tenant;
}

static bool identify(void *arg, const struct kvd_ident *ident, u32 *ret_domain,
		     u16 *ret_tenant)
{
	*ret_domain = 1;
	*ret_tenant = (u16)(ident->tenant - 100);
	return ident->domain[0] == 0xd0 && ident->tenant < 103;
}

static int store_try(bool threads, char *error, struct kvd_store **ret)
{
	struct kvd_store_params p = {.path = scratch("nvme"),
				     .size_bytes = nvme_bytes,
				     .depth = 32,
				     .pool_bytes = POOL_BYTES,
				     .force_threads = threads,
				     .identify = identify,
				     .describe = describe};

	if (!pool) {
		KVT_EXPECT(sodium_init() >= 0);
		KVT_EXPECT_EQ(kvd_memfd_create("pool", POOL_BYTES, KVD_MEMFD_PRIVATE,
					       (void **)&pool, &pool_fd),
			      0);
	}
	p.pool = pool;
	p.host_mark[0] = mark;
	return kvd_store_open(&p, error, ret);
}

static struct kvd_store *store_open(bool threads)
{
	char error[KVD_STORE_ERROR];
	struct kvd_store *st;
	int r = store_try(threads, error, &st);

	if (r)
		KVT_FAIL("%d: %s", r, error);
	for (u32 i = 0; i < 3; i++) {
		struct kvd_space_account *a = &st->space.acct[i];

		a->high_bytes = a->max_bytes = 1ull << 40;
		a->weight = 100;
	}
	return st;
}

static void io_done(struct kvd_io_op *op)
{
	op->io = NULL;
}

static void io_wait(struct kvd_store *st)
{
	kvd_io_flush(st->io);
	while (kvd_io_pending(st->io)) {
		kvd_io_reap(st->io);
	}
}

/* Store page @n of pattern @n; the buffer is at @buf */
static u32 page_store(struct kvd_store *st, u64 n, u8 *buf, s64 *ret_result)
{
	struct kvd_page_hdr *hdr = (void *)buf;
	u8 key[KV_KEY_BYTES];
	struct kvd_slot_name name = name_of(key, n);
	u32 id = kvd_space_take(&st->space, &name, (u16)(n % 3), SLOT_BYTES);
	struct kvd_io_op op = {.write = true,
			       .off = kvd_slot_off(&st->space, id),
			       .addr = buf,
			       .bytes = SLOT_BYTES,
			       .done = io_done};
	struct kvd_slot *s = kvd_slot_at(&st->space, id);

	memset(buf, (int)(n * 37 + 1), SLOT_BYTES);
	memset(hdr, 0, sizeof(*hdr));
	hdr->fingerprint = name.fingerprint;
	describe(NULL, (u16)(n % 3), &hdr->ident);
	memcpy(hdr->key, key, sizeof(key));
	s->generation = hdr->generation = 1000 + n;
	s->page_bytes = 16384;
	hdr->page_bytes = s->page_bytes;
	s->crc32c = hdr->page_crc = kvd_crc32c(buf + 4096, 16384);
	kvd_page_hdr_seal(hdr);
	KVT_EXPECT_EQ(kvd_io_submit(st->io, &op), 0);
	io_wait(st);
	*ret_result = op.result;
	if (op.result != (s64)SLOT_BYTES) {
		kvd_space_drop(&st->space, id);
		return KVD_SLOT_NONE;
	}
	kvd_space_ready(&st->space, id);
	kvd_store_put(st, id);
	return id;
}

static enum kvd_page_bad page_load(struct kvd_store *st, u64 n, u8 *buf, s64 *ret_result)
{
	u8 key[KV_KEY_BYTES];
	struct kvd_slot_name name = name_of(key, n);
	u32 id = kvd_space_find(&st->space, &name);
	struct kvd_page_want want = {.fingerprint = 7};
	const struct kvd_slot *s;
	struct kvd_io_op op = {.addr = buf, .bytes = SLOT_BYTES, .done = io_done};

	KVT_EXPECT(id != KVD_SLOT_NONE);
	s = kvd_slot_at(&st->space, id);
	op.off = kvd_slot_off(&st->space, id);
	describe(NULL, s->tenant, &want.ident);
	memcpy(want.key, key, sizeof(key));
	want.generation = s->generation;
	want.page_bytes = s->page_bytes;
	want.page_crc = s->crc32c;
	memset(buf, 0, SLOT_BYTES);
	KVT_EXPECT_EQ(kvd_io_submit(st->io, &op), 0);
	io_wait(st);
	*ret_result = op.result;
	return op.result == (s64)SLOT_BYTES ? kvd_page_check((void *)buf, &want)
					    : KVD_PAGE_BAD_HEADER;
}

static void restart(bool threads)
{
	struct kvd_store *st = store_open(threads);
	s64 r;

	if (!threads && kvd_io_degraded(st->io))
		KVT_NOTE("engine: %s", kvd_io_engine(st->io));
	if (threads)
		KVT_EXPECT_HAS(kvd_io_engine(st->io), "threads (io_uring: switched off)");
	for (u64 n = 0; n < 60; n++)
		KVT_EXPECT(page_store(st, n, pool + n % 100 * SLOT_BYTES, &r) !=
			   KVD_SLOT_NONE);
	kvd_space_drop(&st->space, kvd_space_at(&st->space, kvd_slot_off(&st->space, 5)));
	for (u64 n = 0; n < 60; n++)
		if (n != 5)
			KVT_EXPECT_EQ(page_load(st, n, pool, &r), KVD_PAGE_OK);
	kvd_store_turn(st);
	kvd_store_close(st, true);

	st = store_open(threads);
	KVT_EXPECT(st->found.matched && st->found.clean);
	KVT_EXPECT_EQ(st->adopted, 59);
	KVT_EXPECT_EQ(st->space.acct[0].nr, 20);
	KVT_EXPECT(!kvd_space_check(&st->space));
	for (u64 n = 0; n < 60; n++) {
		if (n == 5) {
			KVT_EXPECT(!there(&st->space, 5));
			continue;
		}
		KVT_EXPECT_EQ(page_load(st, n, pool, &r), KVD_PAGE_OK);
		KVT_EXPECT_EQ(pool[4096 + 77], (u8)(n * 37 + 1));
	}
	kvd_store_close(st, true);

	mark = 2; /* the host's secret is another one: nothing is believed */
	st = store_open(threads);
	KVT_EXPECT(st->found.existed && !st->found.matched);
	KVT_EXPECT_EQ(st->adopted, 0);
	kvd_store_close(st, true);
}

KVT_TEST(store_survives_a_restart)
{
	restart(false);
}

KVT_TEST(store_survives_a_restart_on_threads)
{
	restart(true);
}

static void arm(enum kvd_fault_point point)
{
	static const struct kvd_fault_spec once = {.probability = 1000000, .times = 1};

	kvd_fault_arm(point, &once);
}

/* R6, O36: whatever the disk does to a read, the page is not taken for what it should be. */
KVT_TEST(every_bad_read_is_noticed)
{
	struct kvd_store *st = store_open(false);
	s64 r;

	for (u64 n = 0; n < 4; n++)
		page_store(st, n, pool, &r);
	arm(KVD_FAULT_tier_read_eio);
	KVT_EXPECT(page_load(st, 1, pool, &r) != KVD_PAGE_OK);
	KVT_EXPECT_EQ(r, -EIO);
	arm(KVD_FAULT_tier_read_short);
	KVT_EXPECT(page_load(st, 1, pool, &r) != KVD_PAGE_OK);
	KVT_EXPECT_EQ(r, (s64)SLOT_BYTES - 4096);
	arm(KVD_FAULT_tier_read_flip);
	KVT_EXPECT_EQ(page_load(st, 1, pool, &r), KVD_PAGE_BAD_DIGEST);
	KVT_EXPECT_EQ(page_load(st, 1, pool, &r), KVD_PAGE_OK);
	kvd_store_close(st, true);
}

KVT_TEST(bad_writes_are_noticed)
{
	struct kvd_store *st = store_open(false);
	s64 r;

	arm(KVD_FAULT_tier_write_full);
	KVT_EXPECT_EQ(page_store(st, 0, pool, &r), KVD_SLOT_NONE);
	KVT_EXPECT_EQ(r, -ENOSPC);
	arm(KVD_FAULT_tier_write_eio);
	KVT_EXPECT_EQ(page_store(st, 0, pool, &r), KVD_SLOT_NONE);
	KVT_EXPECT_EQ(r, -EIO);
	/* A torn write says that it went well; the digest does not. */
	arm(KVD_FAULT_tier_write_torn);
	KVT_EXPECT(page_store(st, 1, pool, &r) != KVD_SLOT_NONE);
	KVT_EXPECT_EQ(r, SLOT_BYTES);
	KVT_EXPECT_EQ(page_load(st, 1, pool, &r), KVD_PAGE_BAD_DIGEST);
	KVT_EXPECT(!kvd_space_check(&st->space));
	kvd_store_close(st, true);
}

/* Any bit of a header, its token ids above all: they are what a hit is compared with. */
KVT_TEST(damaged_header_is_noticed)
{
	struct kvd_store *st = store_open(false);
	u8 block[4096];
	s64 r;
	int fd;

	page_store(st, 1, pool, &r);
	fd = open(scratch("nvme/pages"), O_RDWR);
	KVT_EXPECT(pread(fd, block, sizeof(block), 0) == (ssize_t)sizeof(block));
	for (u32 at = 0; at < sizeof(struct kvd_page_hdr); at += 3) {
		block[at] ^= 1;
		KVT_EXPECT(pwrite(fd, block, sizeof(block), 0) == (ssize_t)sizeof(block));
		KVT_EXPECT(page_load(st, 1, pool, &r) != KVD_PAGE_OK);
		block[at] ^= 1;
	}
	KVT_EXPECT(pwrite(fd, block, sizeof(block), 0) == (ssize_t)sizeof(block));
	KVT_EXPECT_EQ(page_load(st, 1, pool, &r), KVD_PAGE_OK);
	close(fd);
	kvd_store_close(st, true);
}

/* R7: the bytes of two slots are exchanged on the disk. */
KVT_TEST(r7_swapped_slots_are_noticed)
{
	struct kvd_store *st = store_open(false);
	u8 a[SLOT_BYTES], b[SLOT_BYTES];
	u64 off[2];
	s64 r;
	int fd;

	for (u64 n = 0; n < 8; n++)
		page_store(st, n, pool, &r);
	off[0] = kvd_slot_off(&st->space, 2);
	off[1] = kvd_slot_off(&st->space, 6);
	fd = open(scratch("nvme/pages"), O_RDWR);
	KVT_EXPECT(pread(fd, a, sizeof(a), (off_t)off[0]) == (ssize_t)sizeof(a));
	KVT_EXPECT(pread(fd, b, sizeof(b), (off_t)off[1]) == (ssize_t)sizeof(b));
	KVT_EXPECT(pwrite(fd, b, sizeof(b), (off_t)off[0]) == (ssize_t)sizeof(b));
	KVT_EXPECT(pwrite(fd, a, sizeof(a), (off_t)off[1]) == (ssize_t)sizeof(a));
	fsync(fd);
	close(fd);
	for (u64 n = 0; n < 8; n++)
		KVT_EXPECT_EQ(page_load(st, n, pool, &r),
			      n == 2 || n == 6 ? KVD_PAGE_BAD_NAME : KVD_PAGE_OK);
	kvd_store_close(st, true);
}

/* A slot that was used again after the journal's last record: an older page is expected. */
KVT_TEST(overwritten_slot_behind_a_lost_record_is_noticed)
{
	struct kvd_store *st = store_open(false);
	size_t bytes;
	u8 *journal;
	s64 r;

	page_store(st, 1, pool, &r);
	kvd_store_close(st, false);
	st = store_open(
		false); /* its record was in the buffer only: lost, as in a crash */
	KVT_EXPECT_EQ(st->adopted, 0);
	page_store(st, 1, pool, &r);
	kvd_store_close(st, true);
	journal = file_read("nvme/journal", &bytes);
	st = store_open(false);
	kvd_space_drop(&st->space, 0);
	page_store(st, 2, pool, &r);
	kvd_store_close(st, true);
	file_write("nvme/journal", journal, bytes);
	free(journal);
	st = store_open(false);
	KVT_EXPECT_EQ(st->adopted, 1);
	KVT_EXPECT_EQ(page_load(st, 1, pool, &r), KVD_PAGE_BAD_NAME);
	kvd_store_close(st, true);
}

/* A whole record that says more bytes than its slot has: nothing is read past the slot. */
KVT_TEST(page_larger_than_its_slot_is_not_adopted)
{
	static const u64 sizes[] = {16385, 1ull << 32, ~0ull, ~0ull - 4095, 0};

	for (size_t i = 0; i < KV_ARRAY_SIZE(sizes); i++) {
		struct kvd_store *st = store_open(false);
		struct kvd_journal_record rec;
		size_t bytes;
		u8 *journal;
		s64 r;

		KVT_EXPECT(page_store(st, 1, pool, &r) != KVD_SLOT_NONE);
		kvd_store_close(st, true);
		journal = file_read("nvme/journal", &bytes);
		memcpy(&rec, journal + sizeof(rec), sizeof(rec));
		KVT_EXPECT_EQ(rec.type, KVD_JOURNAL_PUT);
		rec.page_bytes = sizes[i];
		rec.crc = kvd_crc32c(&rec, offsetof(struct kvd_journal_record, crc));
		memcpy(journal + sizeof(rec), &rec, sizeof(rec));
		file_write("nvme/journal", journal, bytes);
		free(journal);
		st = store_open(false);
		KVT_EXPECT_EQ(st->adopted, 0);
		KVT_EXPECT_EQ(st->orphans, 1);
		kvd_store_close(st, true);
		KVT_EXPECT(!unlink(scratch("nvme/journal")));
	}
}

KVT_TEST(unsafe_files_are_refused_by_name)
{
	char error[KVD_STORE_ERROR];
	struct kvd_store *st;

	mkdir(scratch("nvme"), 0700);
	KVT_EXPECT(!symlink("/etc/hostname", scratch("nvme/pages")));
	KVT_EXPECT_EQ(store_try(false, error, &st), -ELOOP);
	KVT_EXPECT_HAS(error, "tiers.nvme.path");
	KVT_EXPECT_HAS(error, "nvme/pages\": is a symbolic link");
	unlink(scratch("nvme/pages"));
	KVT_EXPECT(!symlink("/etc/hostname", scratch("nvme/journal")));
	KVT_EXPECT_EQ(store_try(false, error, &st), -ELOOP);
	KVT_EXPECT_HAS(error, "nvme/journal\": is a symbolic link");
	unlink(scratch("nvme/journal"));
	chmod(scratch("nvme/pages"), 0644);
	KVT_EXPECT_EQ(store_try(false, error, &st), -EPERM);
	KVT_EXPECT_HAS(error, "mode 100644");
	chmod(scratch("nvme/pages"), 0600);
	chmod(scratch("nvme"), 0777);
	KVT_EXPECT_EQ(store_try(false, error, &st), -EPERM);
	chmod(scratch("nvme"), 0700);
	KVT_EXPECT_EQ(store_try(false, error, &st), 0);
	KVT_EXPECT(st->fd >= 0);
	kvd_store_close(st, true);
	KVT_EXPECT(!rename(scratch("nvme"), scratch("other")));
	KVT_EXPECT(!symlink(scratch("other"), scratch("nvme")));
	KVT_EXPECT_EQ(store_try(false, error, &st), -ELOOP);
	KVT_EXPECT_HAS(error, "symbolic link");
}

/* A size that the disk has no room for is refused before a block of it is taken. */
KVT_TEST(size_beyond_the_disk_takes_nothing)
{
	char error[KVD_STORE_ERROR];
	struct kvd_store *st;
	struct stat s;

	kvd_store_close(store_open(false), true);
	nvme_bytes = 8ull << 40;
	KVT_EXPECT_EQ(store_try(false, error, &st), -ENOSPC);
	KVT_EXPECT_HAS(error, "tiers.nvme.size: 8796093022208");
	KVT_EXPECT_HAS(error, "bytes are free there");
	KVT_EXPECT(!stat(scratch("nvme/pages"), &s) && s.st_size == 8 << 20);
	KVT_EXPECT(s.st_blocks * 512 < 10 << 20);
}

KVT_TEST(two_daemons_do_not_share_a_store)
{
	char error[KVD_STORE_ERROR];
	struct kvd_store *st = store_open(false), *other;

	KVT_EXPECT_EQ(store_try(false, error, &other), -EBUSY);
	KVT_EXPECT_HAS(error, "another kvmd uses this directory");
	kvd_store_close(st, true);
}

KVT_TEST(files_are_ours_alone)
{
	struct kvd_store *st = store_open(false);
	struct stat s;

	KVT_EXPECT(!stat(scratch("nvme/pages"), &s) && (s.st_mode & 07777) == 0600);
	KVT_EXPECT_EQ(s.st_size, 8 << 20);
	KVT_EXPECT(s.st_blocks * 512 >= 8 << 20); /* a full disk is met now, not later */
	KVT_EXPECT(!stat(scratch("nvme/journal"), &s) && (s.st_mode & 07777) == 0600);
	KVT_EXPECT(!stat(scratch("nvme"), &s) && (s.st_mode & 07777) == 0700);
	kvd_store_close(st, true);
}

TIER_MAIN("/tmp")
