/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lies on the disk of the NVMe tier is anything: the journal, and the head of a slot
 * with its page. A record that is not whole ends the journal, an entry lies inside the file
 * and its segment, no two overlap, and a page is taken only if it is the one that was
 * stored.
 *
 * The input is a list of acts on a journal that a store wrote itself: bytes changed, records
 * made with a right digest, records moved, the file cut.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvmd/tier/crc.h"
#include "kvmd/tier/store.h"
#include "tests/fuzz/fuzz.h"

#define STORE_BYTES (4u << 20)
#define PAGE_BYTES  12288u
#define SLOT_BYTES  (PAGE_BYTES + KVD_PAGE_HDR_BYTES)
#define RECORD	    sizeof(struct kvd_journal_record)
#define ENTRIES	    8u
#define JOURNAL_MAX (64u * RECORD)
#define POOL_BYTES  (1u << 20)
#define NR_TENANTS  3u

static char dir[64];
static u8 *pool;
static u8 first[JOURNAL_MAX]; /* what a store wrote */
static u32 first_bytes;

static bool identify(void *arg, const struct kvd_ident *ident, u32 *ret_domain,
		     u16 *ret_tenant)
{
	if (ident->domain[0] >= 2 || ident->tenant >= NR_TENANTS)
		return false;
	*ret_domain = ident->domain[0];
	*ret_tenant = (u16)ident->tenant;
	return true;
}

static void describe(void *arg, u16 tenant, struct kvd_ident *ret)
{
	*ret = (struct kvd_ident){.domain = {tenant == 2}, .tenant = tenant};
}

static struct kvd_store *store_open(void)
{
	struct kvd_store_params p = {.path = dir,
				     .size_bytes = STORE_BYTES,
				     .depth = 1,
				     .pool = pool,
				     .pool_bytes = POOL_BYTES,
				     .host_mark = {7},
				     .force_threads = true,
				     .identify = identify,
				     .describe = describe};
	char error[KVD_STORE_ERROR];
	struct kvd_store *st;

	FUZZ_CHECK(!kvd_store_open(&p, error, &st));
	return st;
}

static const char *path_of(const char *name)
{
	static char path[96];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static void clean_up(void)
{
	unlink(path_of("journal"));
	unlink(path_of("pages"));
	unlink(path_of("lock"));
	rmdir(dir);
}

/* A store with a few pages of each tenant. */
static void make_first(void)
{
	struct kvd_store *st;
	ssize_t n;
	int fd;

	snprintf(dir, sizeof(dir), "%s/kvt-fuzz-XXXXXX", fuzz_tmp());
	pool = aligned_alloc(4096, POOL_BYTES);
	FUZZ_CHECK(mkdtemp(dir) && pool);
	atexit(clean_up);
	st = store_open();
	for (u32 i = 0; i < NR_TENANTS; i++)
		st->space.acct[i].max_bytes = STORE_BYTES;
	for (u32 i = 0; i < ENTRIES; i++) {
		struct kvd_slot_name name = {.key = (u8[KV_KEY_BYTES]){(u8)i},
					     .fingerprint = 5,
					     .domain = i % 3 == 2};
		u32 id = kvd_space_take(&st->space, &name, (u16)(i % 3), SLOT_BYTES);

		FUZZ_CHECK(id != KVD_SLOT_NONE);
		kvd_slot_at(&st->space, id)->page_bytes = PAGE_BYTES;
		kvd_slot_at(&st->space, id)->generation = 100 + i;
		kvd_space_ready(&st->space, id);
		kvd_store_put(st, id);
	}
	kvd_store_close(st, true);
	fd = open(path_of("journal"), O_RDONLY | O_CLOEXEC);
	n = read(fd, first, sizeof(first));
	close(fd);
	FUZZ_CHECK(n == (ENTRIES + 2) * (ssize_t)RECORD);
	first_bytes = (u32)n;
}

/* ------------------------------------------------------------------------- journal */

static void seal_record(u8 *file, u32 i)
{
	struct kvd_journal_record rec;

	memcpy(&rec, file + i * RECORD, sizeof(rec));
	rec.magic = KVD_JOURNAL_MAGIC;
	rec.number = i + 1;
	rec.crc = kvd_crc32c(&rec, offsetof(struct kvd_journal_record, crc));
	memcpy(file + i * RECORD, &rec, sizeof(rec));
}

static void act(struct fuzz_in *in, u8 *file, u32 *bytes)
{
	u8 what = fuzz_u8(in), nr = 1 + fuzz_u8(in) % 8;
	u32 at = fuzz_u32(in) % *bytes, i = at / RECORD, records = *bytes / RECORD;

	switch (what % 6) {
	case 0: /* damage */
		fuzz_take(in, file + at, KV_MIN(nr, *bytes - at));
		break;
	case 1: /* a field of a record that is whole afterwards */
		if (i >= records)
			break;
		fuzz_take(in, file + at, KV_MIN(nr, (i + 1) * RECORD - at));
		seal_record(file, i);
		break;
	case 2: /* cut */
		*bytes = KV_MAX(at, 1u);
		break;
	case 3: /* one more, whole */
		if ((records + 1) * RECORD > JOURNAL_MAX || i >= records)
			break;
		memmove(file + records * RECORD, file + i * RECORD, RECORD);
		seal_record(file, records);
		*bytes = (records + 1) * RECORD;
		break;
	case 4: /* PUT becomes DEL, and so on */
		if (i >= records)
			break;
		file[i * RECORD + offsetof(struct kvd_journal_record, type)] = nr;
		seal_record(file, i);
		break;
	default: /* a record of before in another's place */
		if (i < records)
			memmove(file + fuzz_u8(in) % records * RECORD, file + i * RECORD,
				RECORD);
	}
}

/* What a reader that knows only the rules makes of it. */
static u64 whole_records(const u8 *file, u32 bytes)
{
	struct kvd_journal_record rec;
	u64 nr = 0;

	for (; (nr + 1) * RECORD <= bytes; nr++) {
		memcpy(&rec, file + nr * RECORD, sizeof(rec));
		if (rec.magic != KVD_JOURNAL_MAGIC || rec.number != nr + 1 ||
		    rec.crc != kvd_crc32c(&rec, offsetof(struct kvd_journal_record, crc)))
			break;
	}
	return nr;
}

static void check_space(struct kvd_space *sp)
{
	u64 used = 0, end = 0;
	u32 nr = 0;

	for (u32 id = 0; id < sp->nr_segments * sp->slots_per_segment; id++) {
		const struct kvd_slot *s = &sp->slots[id];
		u64 off, bytes;
		struct kvd_slot_name name = {.key = s->key,
					     .fingerprint = s->fingerprint,
					     .domain = s->domain};

		if (s->state == KVD_SLOT_FREE)
			continue;
		off = kvd_slot_off(sp, id);
		bytes = kvd_slot_bytes(sp, id);
		FUZZ_CHECK(s->state == KVD_SLOT_READY && s->tenant < NR_TENANTS);
		FUZZ_CHECK(off >= end && off + bytes <= sp->size_bytes);
		FUZZ_CHECK(off / sp->segment_bytes ==
			   (off + bytes - 1) / sp->segment_bytes);
		FUZZ_CHECK(s->page_bytes &&
			   (u64)s->page_bytes + KVD_PAGE_HDR_BYTES <= bytes);
		FUZZ_CHECK(kvd_space_find(sp, &name) == id);
		FUZZ_CHECK(kvd_space_at(sp, off) == id);
		end = off + bytes;
		used += bytes;
		nr++;
	}
	FUZZ_CHECK(nr == sp->nr_ready && nr == sp->nr_used && used == sp->used_bytes);
}

static void journal(struct fuzz_in *in)
{
	u32 bytes = first_bytes;
	u8 file[JOURNAL_MAX];
	struct kvd_store *st;
	struct stat s;
	u64 nr;
	int fd;

	memcpy(file, first, bytes);
	for (u32 i = 0; i < 32 && in->left; i++)
		act(in, file, &bytes);
	fd = open(path_of("journal"), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	FUZZ_CHECK(fd >= 0 && write(fd, file, bytes) == (ssize_t)bytes);
	st = store_open();
	nr = whole_records(file, bytes);
	FUZZ_CHECK(st->found.existed && st->found.records <= nr);
	FUZZ_CHECK(st->found.records == nr || !st->found.records);
	FUZZ_CHECK(st->found.records * RECORD + st->found.lost_bytes == bytes);
	FUZZ_CHECK(!st->found.matched == !st->found.records);
	FUZZ_CHECK(!fstat(fd, &s) && (u64)s.st_size == st->found.records * RECORD);
	close(fd);
	check_space(&st->space);
	kvd_store_close(st, false);
}

/* ---------------------------------------------------------------------- page header */

static void page(struct fuzz_in *in)
{
	static u8 slot[KVD_PAGE_HDR_BYTES + 256] __attribute__((aligned(64))),
		right[sizeof(slot)];
	struct kvd_page_hdr *hdr = (void *)slot;
	struct kvd_page_want want = {.ident = {{1}, 2},
				     .key = {3},
				     .fingerprint = 5,
				     .generation = 9,
				     .page_bytes = 256};
	bool same;

	memset(slot, 0x5a, sizeof(slot));
	memset(hdr, 0, sizeof(*hdr));
	want.page_crc = kvd_crc32c(slot + KVD_PAGE_HDR_BYTES, 256);
	hdr->ident = want.ident;
	memcpy(hdr->key, want.key, sizeof(hdr->key));
	hdr->fingerprint = want.fingerprint;
	hdr->generation = want.generation;
	hdr->page_bytes = want.page_bytes;
	hdr->page_crc = want.page_crc;
	kvd_page_hdr_seal(hdr);
	memcpy(right, slot, sizeof(slot));
	while (in->left) {
		u32 how = fuzz_u32(in), at = how % sizeof(*hdr), nr = 1 + (how >> 16) % 8;

		if (how >> 24 & 1) /* of the page */
			at = KVD_PAGE_HDR_BYTES + how % 248;
		fuzz_take(in, slot + at, KV_MIN(nr, sizeof(*hdr) - how % sizeof(*hdr)));
		if (how >> 25 & 1) /* what another store, or another page, has there */
			kvd_page_hdr_seal(hdr);
	}
	/* where it lies and its tokens are not asked for here */
	same = !memcmp(hdr->key, want.key, sizeof(want.key)) &&
	       !memcmp(&hdr->ident, &want.ident, sizeof(want.ident)) &&
	       hdr->fingerprint == 5 && hdr->generation == 9 && hdr->page_bytes == 256 &&
	       !memcmp(slot + KVD_PAGE_HDR_BYTES, right + KVD_PAGE_HDR_BYTES, 256);
	if (kvd_page_check(hdr, &want) == KVD_PAGE_OK)
		FUZZ_CHECK(same);
	if (!memcmp(slot, right, sizeof(slot)))
		FUZZ_CHECK(kvd_page_check(hdr, &want) == KVD_PAGE_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};

	if (!first_bytes)
		make_first();
	if (fuzz_u8(&in) % 4)
		journal(&in);
	else
		page(&in);
	return 0;
}
