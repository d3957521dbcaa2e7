/* SPDX-License-Identifier: Apache-2.0 */
/* tier/store.c - see store.h. Loop thread only, but for kvd_page_check(). */
#include "kvmd/tier/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kvmd/tier/crc.h"

#define COMPACT_SLICE 1024u

/* ------------------------------------------------------------------- headers */

void kvd_page_hdr_seal(struct kvd_page_hdr *hdr)
{
	hdr->magic = KVD_PAGE_HDR_MAGIC;
	hdr->version = KVD_PAGE_HDR_VERSION;
	hdr->header_bytes = KVD_PAGE_HDR_BYTES;
	hdr->nr_tokens = KV_PAGE_TOKENS;
	memset(hdr->reserved, 0, sizeof(hdr->reserved));
	hdr->crc = kvd_crc32c(hdr, offsetof(struct kvd_page_hdr, crc));
}

enum kvd_page_bad kvd_page_check(const struct kvd_page_hdr *hdr,
				 const struct kvd_page_want *want)
{
	if ((hdr->magic != KVD_PAGE_HDR_MAGIC || hdr->version != KVD_PAGE_HDR_VERSION ||
	     hdr->header_bytes != KVD_PAGE_HDR_BYTES ||
	     hdr->nr_tokens != KV_PAGE_TOKENS ||
	     hdr->crc != kvd_crc32c(hdr, offsetof(struct kvd_page_hdr, crc))) &&
	    !KV_MUTANT(tier_header_not_checked))
		return KVD_PAGE_BAD_HEADER;
	if ((memcmp(hdr->key, want->key, sizeof(hdr->key)) ||
	     memcmp(&hdr->ident, &want->ident, sizeof(hdr->ident)) ||
	     hdr->fingerprint != want->fingerprint) &&
	    !KV_MUTANT(tier_name_not_checked))
		return KVD_PAGE_BAD_NAME;
	if ((hdr->generation != want->generation || hdr->page_bytes != want->page_bytes ||
	     hdr->page_crc != want->page_crc) &&
	    !KV_MUTANT(tier_name_not_checked))
		return KVD_PAGE_OLD;
	if (kvd_crc32c((const u8 *)hdr + KVD_PAGE_HDR_BYTES, want->page_bytes) !=
		    hdr->page_crc &&
	    !KV_MUTANT(tier_page_not_checked))
		return KVD_PAGE_BAD_DIGEST;
	return KVD_PAGE_OK;
}

/* ------------------------------------------------------------------- journal */

static void record_of(struct kvd_store *st, u32 id, enum kvd_journal_type type,
		      struct kvd_journal_record *rec)
{
	const struct kvd_slot *s = kvd_slot_at(&st->space, id);
	struct kvd_ident ident;

	st->p.describe(st->p.arg, s->tenant, &ident);
	*rec = (struct kvd_journal_record){
		.type = type,
		.off = kvd_slot_off(&st->space, id),
		.slot_bytes = kvd_slot_bytes(&st->space, id),
		.fingerprint = s->fingerprint,
		.generation = s->generation,
		.tenant = ident.tenant,
		.page_bytes = s->page_bytes,
		.page_crc = s->crc32c,
	};
	memcpy(rec->domain, ident.domain, sizeof(rec->domain));
	memcpy(rec->key, s->key, sizeof(rec->key));
}

void kvd_store_put(struct kvd_store *st, u32 id)
{
	struct kvd_journal_record rec;

	record_of(st, id, KVD_JOURNAL_PUT, &rec);
	kvd_journal_add(st->journal, &rec);
}

static void slot_dropped(void *arg, u32 id)
{
	struct kvd_store *st = arg;
	struct kvd_journal_record rec;

	record_of(st, id, KVD_JOURNAL_DEL, &rec);
	kvd_journal_add(st->journal, &rec);
}

static void replay_put(struct kvd_store *st, const struct kvd_journal_record *rec)
{
	struct kvd_slot_name name = {.key = rec->key, .fingerprint = rec->fingerprint};
	struct kvd_ident ident = {.tenant = rec->tenant};
	struct kvd_slot *s;
	u16 tenant;
	u32 id;

	memcpy(ident.domain, rec->domain, sizeof(ident.domain));
	if (!st->p.identify(st->p.arg, &ident, &name.domain, &tenant) ||
	    !rec->page_bytes || rec->slot_bytes < KVD_PAGE_HDR_BYTES ||
	    (rec->page_bytes > rec->slot_bytes - KVD_PAGE_HDR_BYTES &&
	     !KV_MUTANT(stored_page_of_any_size))) {
		st->orphans++;
		return;
	}
	/* The record of its end was lost: the younger place counts. */
	id = kvd_space_find(&st->space, &name);
	if (id != KVD_SLOT_NONE)
		kvd_space_drop(&st->space, id);
	id = kvd_space_place(&st->space, &name, tenant, rec->slot_bytes, rec->off);
	if (id == KVD_SLOT_NONE) {
		st->orphans++;
		return;
	}
	s = kvd_slot_at(&st->space, id);
	s->generation = rec->generation;
	s->page_bytes = (u32)rec->page_bytes;
	s->crc32c = rec->page_crc;
	kvd_space_ready(&st->space, id);
}

static void replay(void *arg, const struct kvd_journal_record *rec)
{
	struct kvd_store *st = arg;
	u32 id;

	if (rec->type == KVD_JOURNAL_PUT) {
		replay_put(st, rec);
		return;
	}
	id = kvd_space_at(&st->space, rec->off);
	if (id != KVD_SLOT_NONE &&
	    !memcmp(kvd_slot_at(&st->space, id)->key, rec->key, KV_KEY_BYTES))
		kvd_space_drop(&st->space, id);
}

/* ------------------------------------------------------------------- opening */

static int dir_take(struct kvd_store *st, char *error)
{
	const char *path = st->p.path;
	struct stat s;

	if (mkdir(path, 0700) && errno != EEXIST)
		goto failed;
	st->dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (st->dir_fd < 0 || fstat(st->dir_fd, &s))
		goto failed;
	if (s.st_uid != geteuid() || (s.st_mode & 022)) {
		snprintf(
			error, KVD_STORE_ERROR,
			"tiers.nvme.path: \"%s\": uid %u, mode %04o: must be ours (uid %u) "
			"and not writable by group or others",
			path, s.st_uid, s.st_mode & 07777, geteuid());
		return -EPERM;
	}
	st->lock_fd = openat(st->dir_fd, "lock",
			     O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (st->lock_fd < 0 || flock(st->lock_fd, LOCK_EX | LOCK_NB)) {
		int r = errno == EWOULDBLOCK ? -EBUSY : -errno;

		snprintf(error, KVD_STORE_ERROR, "tiers.nvme.path: \"%s/lock\": %s", path,
			 r == -EBUSY ? "another kvmd uses this directory" : strerror(-r));
		return r;
	}
	return 0;
failed:
	/* O_DIRECTORY answers first where the last part is a link */
	snprintf(error, KVD_STORE_ERROR, "tiers.nvme.path: \"%s\": %s", path,
		 errno == ELOOP || errno == ENOTDIR ? "is a symbolic link or no directory"
						    : strerror(errno));
	return errno == ENOTDIR ? -ELOOP : -errno;
}

static int pages_open(struct kvd_store *st)
{
	int flags = O_RDWR | O_CREAT | O_CLOEXEC |
		    (KV_MUTANT(tier_follows_links) ? 0 : O_NOFOLLOW);

	st->fd = openat(st->dir_fd, "pages", flags | O_DIRECT, 0600);
	st->direct = st->fd >= 0;
	if (st->fd < 0 && errno == EINVAL)
		st->fd = openat(st->dir_fd, "pages", flags, 0600);
	return st->fd < 0 ? -errno : 0;
}

static int size_fail(const struct kvd_store *st, const struct statvfs *fs, int r,
		     char *error)
{
	snprintf(error, KVD_STORE_ERROR,
		 "tiers.nvme.size: %llu: \"%s/pages\": %s (%llu bytes are free there)",
		 (unsigned long long)st->p.size_bytes, st->p.path, strerror(-r),
		 (unsigned long long)fs->f_bavail * fs->f_frsize);
	return r;
}

/* All of it or nothing: an attempt that fills the disk and fails would hurt others. */
static int pages_size(struct kvd_store *st, const struct stat *have, char *error)
{
	u64 want = st->space.size_bytes, held = (u64)have->st_blocks * 512;
	struct statvfs fs;
	int r;

	if (fstatvfs(st->fd, &fs))
		memset(&fs, 0, sizeof(fs));
	if (want > held && fs.f_frsize && want - held > (u64)fs.f_bavail * fs.f_frsize)
		return size_fail(st, &fs, -ENOSPC, error);
	do {
		r = fallocate(st->fd, 0, 0, (off_t)want) ? -errno : 0;
	} while (r == -EINTR);
	if (r == -EOPNOTSUPP)
		r = 0;
	if (!r && ftruncate(st->fd, (off_t)want))
		r = -errno;
	if (!r)
		return 0;
	if (ftruncate(st->fd, have->st_size))
		r = -errno;
	return size_fail(st, &fs, r, error);
}

static int pages_take(struct kvd_store *st, struct stat *ret_stat, char *error)
{
	int r = pages_open(st);

	if (r) {
		snprintf(error, KVD_STORE_ERROR, "tiers.nvme.path: \"%s/pages\": %s",
			 st->p.path, r == -ELOOP ? "is a symbolic link" : strerror(-r));
		return r;
	}
	if (fstat(st->fd, ret_stat))
		return -errno;
	if (!S_ISREG(ret_stat->st_mode) || ret_stat->st_uid != geteuid() ||
	    (ret_stat->st_mode & 077) || ret_stat->st_nlink != 1) {
		snprintf(
			error, KVD_STORE_ERROR,
			"tiers.nvme.path: \"%s/pages\": uid %u, mode %06o, %u links: must "
			"be a regular file of ours with mode 0600 and one name",
			st->p.path, ret_stat->st_uid, ret_stat->st_mode,
			(u32)ret_stat->st_nlink);
		return -EPERM;
	}
	return pages_size(st, ret_stat, error);
}

static int journal_take(struct kvd_store *st, const struct stat *s, char *error)
{
	struct kvd_journal_params jp = {
		.dir_fd = st->dir_fd,
		.name = "journal",
		.open = {.type = KVD_JOURNAL_OPEN,
			 .off = st->space.size_bytes,
			 .slot_bytes = st->space.segment_bytes,
			 .fingerprint = s->st_dev,
			 .generation = s->st_ino},
		.replay = replay,
		.arg = st,
		.workers = st->writer,
	};
	int r;

	memcpy(jp.open.domain, st->p.host_mark, sizeof(jp.open.domain));
	r = kvd_journal_open(&jp, &st->found, &st->journal);
	if (r)
		snprintf(error, KVD_STORE_ERROR, "tiers.nvme.path: \"%s/journal\": %s",
			 st->p.path, r == -ELOOP ? "is a symbolic link" : strerror(-r));
	return r;
}

static int io_take(struct kvd_store *st, char *error)
{
	struct kvd_io_params ip = {
		.fd = st->fd,
		.pool = st->p.pool,
		.pool_bytes = st->p.pool_bytes,
		.depth = st->p.depth,
		.force_threads = st->p.force_threads,
	};
	int r = kvd_io_create(&ip, &st->io);

	if (r)
		snprintf(error, KVD_STORE_ERROR, "tiers.nvme: %s", strerror(-r));
	return r;
}

static void store_free(struct kvd_store *st)
{
	kvd_io_destroy(st->io);
	kvd_workers_destroy(st->writer);
	kvd_space_fini(&st->space);
	if (st->fd >= 0)
		close(st->fd);
	if (st->lock_fd >= 0)
		close(st->lock_fd);
	if (st->dir_fd >= 0)
		close(st->dir_fd);
	free(st);
}

int kvd_store_open(const struct kvd_store_params *p, char *error, struct kvd_store **ret)
{
	struct kvd_store *st = calloc(1, sizeof(*st));
	struct stat s;
	int r;

	if (!st)
		return -ENOMEM;
	st->p = *p;
	st->dir_fd = st->fd = st->lock_fd = -1;
	error[0] = 0;
	r = kvd_space_init(&st->space, p->size_bytes, kvd_segment_bytes(p->size_bytes));
	if (r)
		snprintf(error, KVD_STORE_ERROR, "tiers.nvme.size: %llu: %s",
			 (unsigned long long)p->size_bytes, strerror(-r));
	if (!r)
		r = dir_take(st, error);
	if (!r)
		r = pages_take(st, &s, error);
	if (!r)
		r = io_take(st, error);
	if (!r)
		r = kvd_workers_create(1, &st->writer);
	if (!r)
		r = journal_take(st, &s, error);
	if (r) {
		store_free(st);
		return r;
	}
	st->adopted = st->space.nr_ready;
	st->space.dropped = slot_dropped;
	st->space.arg = st;
	*ret = st;
	return 0;
}

/* Pages whose ends were not noted would be back with the next start: an operator may have meant
 * them to be gone for good. No journal is better than that. */
static void journal_repair(struct kvd_store *st)
{
	const struct kvd_journal_stats *js = kvd_journal_stats(st->journal);
	u64 errors = js->errors;

	while (js->missing && js->errors == errors) {
		kvd_journal_tick(st->journal);
		kvd_store_turn(st);
		if (!kvd_workers_reap(st->writer))
			usleep(200);
	}
	if (js->missing)
		unlinkat(st->dir_fd, "journal", 0);
}

void kvd_store_close(struct kvd_store *st, bool clean)
{
	if (!st)
		return;
	st->space.dropped = NULL;
	if (clean && !KV_MUTANT(journal_loss_stays))
		journal_repair(st);
	kvd_journal_close(st->journal, clean);
	store_free(st);
}

/* ---------------------------------------------------------------------- turn */

void kvd_store_reap(struct kvd_store *st)
{
	kvd_workers_reap(st->writer);
	kvd_io_reap(st->io);
}

u32 kvd_store_pending(const struct kvd_store *st)
{
	return kvd_workers_pending(st->writer) + kvd_io_pending(st->io);
}

void kvd_store_tick(struct kvd_store *st)
{
	kvd_journal_tick(st->journal);
}

/* A slice of live entries; what has none is passed over whole. */
static bool compact_slice(struct kvd_store *st)
{
	struct kvd_space *sp = &st->space;
	u32 end = sp->nr_segments * sp->slots_per_segment;
	struct kvd_journal_record rec;

	for (u32 i = 0; i < COMPACT_SLICE && st->compact_id < end; i++) {
		const struct kvd_segment *seg =
			&sp->segments[st->compact_id / sp->slots_per_segment];
		u32 in = st->compact_id % sp->slots_per_segment;

		/* Few of the places have a slot where slots are large. */
		if (!seg->nr_used || in >= sp->classes[seg->class - 1].per_segment) {
			st->compact_id += sp->slots_per_segment - in;
			continue;
		}
		if (sp->slots[st->compact_id].state == KVD_SLOT_READY) {
			record_of(st, st->compact_id, KVD_JOURNAL_PUT, &rec);
			if (!kvd_journal_live(st->journal, &rec))
				return false; /* when its buffer was written */
		}
		st->compact_id++;
	}
	if (st->compact_id < end)
		return true;
	st->compact_id = KVD_SLOT_NONE;
	kvd_journal_compacted(st->journal);
	return false;
}

bool kvd_store_turn(struct kvd_store *st)
{
	bool more = false;

	if (kvd_journal_wants(st->journal, st->space.nr_ready) &&
	    !kvd_journal_compact(st->journal))
		st->compact_id = 0;
	if (kvd_journal_compacting(st->journal) && st->compact_id != KVD_SLOT_NONE)
		more = compact_slice(st);
	kvd_journal_flush(st->journal);
	return more;
}
