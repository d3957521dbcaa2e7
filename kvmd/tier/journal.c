/* SPDX-License-Identifier: Apache-2.0 */
/* tier/journal.c - see journal.h. Loop thread only, but for run() of a batch. */
#include "kvmd/tier/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/tier/crc.h"

#define RECORD_BYTES sizeof(struct kvd_journal_record)
#define READ_RECORDS 8192u
/* Of a new file's buffer: for changes that come while live entries are written. */
#define SPARE_BYTES  (KVD_JOURNAL_BATCH_BYTES / 2)
#define NAME_BYTES   64u

/**
 * struct stream - one file being written
 * @number, @off: of the next record that is added; where the next batch goes
 * @buf: one fills while the other one is written
 * @used: bytes in @buf[fill]
 * @writing: a worker has @buf[!fill], @writing_bytes of it
 * @retry: it failed and must be written again: later records follow it
 * @held: but not before kvd_journal_tick(): a disk that is full fails at once, for long
 */
struct stream {
	struct kvd_journal *j;
	int fd;
	u64 number;
	u64 off;
	u8 *buf[2];
	u32 fill;
	u32 used;
	u32 writing_bytes;
	bool writing;
	bool retry;
	bool held;
	int result;
	struct kvd_work work;
};

struct kvd_journal {
	struct kvd_workers *workers;
	int dir_fd;
	char name[NAME_BYTES];
	char new_name[NAME_BYTES + 8];
	struct kvd_journal_record open;
	struct stream streams[2];
	u32 cur; /* the one that counts; the other one is the new file, or unused */
	bool compacting; /* the new file is being written */
	bool finishing;	 /* all live entries are in it */
	bool renaming;	 /* a worker puts it in place */
	bool held;	 /* none is begun before kvd_journal_tick() */
	u64 lost_before; /* records that were lost when it began */
	u64 repaired;	 /* of those lost, what a later compaction made good */
	int rename_result, sync_result;
	struct kvd_work rename_work;
	struct kvd_journal_stats stats;
};

static struct stream *now_of(struct kvd_journal *j)
{
	return &j->streams[j->cur];
}

static struct stream *next_of(struct kvd_journal *j)
{
	return &j->streams[!j->cur];
}

/* ------------------------------------------------------------------ records */

static u32 record_crc(const struct kvd_journal_record *rec)
{
	return kvd_crc32c(rec, offsetof(struct kvd_journal_record, crc));
}

static bool record_ok(const struct kvd_journal_record *rec, u64 number)
{
	if (KV_MUTANT(journal_crc_ignored))
		return rec->magic == KVD_JOURNAL_MAGIC;
	return rec->magic == KVD_JOURNAL_MAGIC && rec->number == number &&
	       rec->crc == record_crc(rec);
}

/* Everything that says which store it is. */
static bool same_store(const struct kvd_journal_record *a,
		       const struct kvd_journal_record *b)
{
	return a->type == KVD_JOURNAL_OPEN && a->off == b->off &&
	       a->slot_bytes == b->slot_bytes && a->fingerprint == b->fingerprint &&
	       a->generation == b->generation &&
	       (!memcmp(a->domain, b->domain, sizeof(a->domain)) ||
		KV_MUTANT(tier_any_host));
}

/* ------------------------------------------------------------------ writing */

static void batch_run(struct kvd_work *w)
{
	struct stream *s = kv_container_of(w, struct stream, work);
	const u8 *p = s->buf[!s->fill];
	u32 done = 0;

	s->result = 0;
	while (done < s->writing_bytes) {
		ssize_t n = pwrite(s->fd, p + done, s->writing_bytes - done,
				   (off_t)(s->off + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			s->result = n ? -errno : -EIO;
			return;
		}
		done += (u32)n;
	}
	if (fdatasync(s->fd))
		s->result = -errno;
}

static void next_finish(struct kvd_journal *j);

static void failed(struct kvd_journal *j, int error)
{
	j->stats.errors++;
	j->stats.last_error = error;
}

static void stream_fini(struct stream *s)
{
	if (s->fd < 0)
		return;
	kv_assert(!s->writing);
	close(s->fd);
	free(s->buf[0]);
	free(s->buf[1]);
	s->fd = -1;
}

static void batch_done(struct kvd_work *w)
{
	struct stream *s = kv_container_of(w, struct stream, work);
	struct kvd_journal *j = s->j;

	s->writing = false;
	if (s != now_of(j) && !j->compacting) { /* the old file's last batch */
		stream_fini(s);
		return;
	}
	if (!s->result && kvd_fault(KVD_FAULT_tier_journal))
		s->result = -EIO;
	s->retry = s->held = s->result != 0;
	if (s->result) {
		failed(j, s->result);
		return;
	}
	s->off += s->writing_bytes;
	j->stats.written += s->writing_bytes / RECORD_BYTES;
	if (s == next_of(j) && j->finishing)
		next_finish(j);
}

static void stream_flush(struct stream *s)
{
	if (s->writing || s->held || s->fd < 0)
		return;
	if (!s->retry) {
		if (!s->used)
			return;
		s->fill = !s->fill;
		s->writing_bytes = s->used;
		s->used = 0;
	}
	s->writing = true;
	s->work.run = batch_run;
	s->work.done = batch_done;
	kvd_work_submit(s->j->workers, &s->work);
}

static bool stream_add(struct stream *s, const struct kvd_journal_record *rec, u32 spare)
{
	struct kvd_journal_record r = *rec;

	if (s->used + RECORD_BYTES + spare > KVD_JOURNAL_BATCH_BYTES) {
		stream_flush(s);
		if (s->used + RECORD_BYTES + spare > KVD_JOURNAL_BATCH_BYTES)
			return false;
	}
	r.magic = KVD_JOURNAL_MAGIC;
	r.number = s->number++;
	memset(r.reserved, 0, sizeof(r.reserved));
	r.crc = record_crc(&r);
	memcpy(s->buf[s->fill] + s->used, &r, sizeof(r));
	s->used += RECORD_BYTES;
	return true;
}

static int stream_init(struct stream *s, struct kvd_journal *j, int fd, u64 number)
{
	memset(s, 0, sizeof(*s));
	s->j = j;
	s->fd = fd;
	s->number = number;
	s->off = (number - 1) * RECORD_BYTES;
	s->buf[0] = malloc(KVD_JOURNAL_BATCH_BYTES);
	s->buf[1] = malloc(KVD_JOURNAL_BATCH_BYTES);
	if (s->buf[0] && s->buf[1])
		return 0;
	free(s->buf[0]);
	free(s->buf[1]);
	s->fd = -1;
	return -ENOMEM;
}

/* ------------------------------------------------------------------ opening */

/* Return: records that count; *ret_clean: the last one was CLOSE */
static u64 replay(int fd, const struct kvd_journal_params *p, bool *ret_matched,
		  bool *ret_clean)
{
	struct kvd_journal_record *recs = malloc(READ_RECORDS * RECORD_BYTES);
	u64 nr = 0;
	ssize_t n = 0;
	u32 i = 0, have = 0;

	*ret_matched = *ret_clean = false;
	while (recs) {
		if (i == have) {
			n = pread(fd, recs, READ_RECORDS * RECORD_BYTES,
				  (off_t)(nr * RECORD_BYTES));
			have = n > 0 ? (u32)((u64)n / RECORD_BYTES) : 0;
			i = 0;
		}
		if (i == have || !record_ok(&recs[i], nr + 1))
			break;
		if (!nr && !same_store(&recs[i], &p->open))
			break;
		*ret_matched = true;
		*ret_clean = recs[i].type == KVD_JOURNAL_CLOSE;
		if (recs[i].type == KVD_JOURNAL_PUT || recs[i].type == KVD_JOURNAL_DEL)
			p->replay(p->arg, &recs[i]);
		nr++;
		i++;
	}
	free(recs);
	return nr;
}

static int file_take(struct kvd_journal *j, const struct kvd_journal_params *p,
		     struct kvd_journal_found *found)
{
	off_t end;
	u64 nr;
	int fd, r;

	unlinkat(p->dir_fd, j->new_name, 0); /* a compaction that was cut short */
	fd = openat(p->dir_fd, p->name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	end = lseek(fd, 0, SEEK_END);
	found->existed = end > 0;
	nr = replay(fd, p, &found->matched, &found->clean);
	found->records = nr;
	found->lost_bytes = (u64)end - nr * RECORD_BYTES;
	/* What does not count must not follow what will be written. */
	if (ftruncate(fd, (off_t)(nr * RECORD_BYTES))) {
		r = -errno;
		close(fd);
		return r;
	}
	r = stream_init(now_of(j), j, fd, nr + 1);
	if (r) {
		close(fd);
		return r;
	}
	if (!nr)
		stream_add(now_of(j), &p->open, 0);
	return 0;
}

int kvd_journal_open(const struct kvd_journal_params *p, struct kvd_journal_found *found,
		     struct kvd_journal **ret)
{
	struct kvd_journal *j = calloc(1, sizeof(*j));
	int r;

	kv_assert(p->open.type == KVD_JOURNAL_OPEN && p->replay);
	memset(found, 0, sizeof(*found));
	if (!j)
		return -ENOMEM;
	j->workers = p->workers;
	j->dir_fd = p->dir_fd;
	j->open = p->open;
	j->streams[0].fd = j->streams[1].fd = -1;
	snprintf(j->name, sizeof(j->name), "%s", p->name);
	snprintf(j->new_name, sizeof(j->new_name), "%s.new", p->name);
	r = file_take(j, p, found);
	if (r) {
		free(j);
		return r;
	}
	j->stats.records = now_of(j)->number - 1;
	*ret = j;
	return 0;
}

/* At the daemon's end only. */
static void wait_idle(struct kvd_journal *j)
{
	while (now_of(j)->writing || next_of(j)->writing || j->renaming) {
		if (!kvd_workers_reap(j->workers))
			usleep(200);
	}
}

void kvd_journal_close(struct kvd_journal *j, bool clean)
{
	struct kvd_journal_record rec = {.type = KVD_JOURNAL_CLOSE};

	if (!j)
		return;
	wait_idle(j);
	kvd_journal_tick(j);
	if (clean) {
		stream_flush(now_of(j));
		wait_idle(j);
		if (stream_add(now_of(j), &rec, 0))
			stream_flush(now_of(j));
		wait_idle(j);
	}
	if (next_of(j)->fd >= 0)
		unlinkat(j->dir_fd, j->new_name, 0);
	stream_fini(next_of(j));
	stream_fini(now_of(j));
	free(j);
}

/* ------------------------------------------------------------------ changes */

void kvd_journal_add(struct kvd_journal *j, const struct kvd_journal_record *rec)
{
	bool ok = stream_add(now_of(j), rec, 0);

	if (j->compacting)
		ok &= stream_add(next_of(j), rec, 0);
	j->stats.lost += !ok;
	j->stats.missing = j->stats.lost - j->repaired;
	j->stats.records = now_of(j)->number - 1;
}

void kvd_journal_flush(struct kvd_journal *j)
{
	stream_flush(now_of(j));
	if (j->compacting)
		stream_flush(next_of(j));
}

void kvd_journal_tick(struct kvd_journal *j)
{
	now_of(j)->held = next_of(j)->held = j->held = false;
}

const struct kvd_journal_stats *kvd_journal_stats(const struct kvd_journal *j)
{
	return &j->stats;
}

/* --------------------------------------------------------------- compaction */

bool kvd_journal_wants(const struct kvd_journal *j, u64 live)
{
	return !j->compacting && !j->held && j->streams[!j->cur].fd < 0 &&
	       (j->streams[j->cur].number > 2 * live + KVD_JOURNAL_SLACK ||
		(j->stats.missing && !KV_MUTANT(journal_loss_stays)));
}

int kvd_journal_compact(struct kvd_journal *j)
{
	int fd, r;

	kv_assert(!j->compacting);
	fd = openat(j->dir_fd, j->new_name,
		    O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	r = fd < 0 ? -errno : stream_init(next_of(j), j, fd, 1);
	if (r) {
		if (fd >= 0)
			close(fd);
		failed(j, r);
		j->held = true;
		return r;
	}
	stream_add(next_of(j), &j->open, 0);
	j->compacting = true;
	j->lost_before = j->stats.lost;
	return 0;
}

bool kvd_journal_compacting(const struct kvd_journal *j)
{
	return j->compacting;
}

bool kvd_journal_live(struct kvd_journal *j, const struct kvd_journal_record *rec)
{
	kv_assert(j->compacting && !j->finishing);
	return stream_add(next_of(j), rec, SPARE_BYTES);
}

static void rename_run(struct kvd_work *w)
{
	struct kvd_journal *j = kv_container_of(w, struct kvd_journal, rename_work);

	j->sync_result = 0;
	j->rename_result =
		renameat(j->dir_fd, j->new_name, j->dir_fd, j->name) ? -errno : 0;
	if (!j->rename_result && fsync(j->dir_fd))
		j->sync_result = -errno;
}

static void rename_done(struct kvd_work *w)
{
	struct kvd_journal *j = kv_container_of(w, struct kvd_journal, rename_work);
	struct stream *other = next_of(j);

	j->renaming = j->compacting = j->finishing = false;
	/* The name is the new file's also where a power cut may yet undo that. */
	if (j->sync_result)
		failed(j, j->sync_result);
	j->held = true; /* once a second, also where changes go on to be lost */
	if (j->rename_result) {
		failed(j, j->rename_result);
	} else {
		j->cur = !j->cur;
		other = next_of(j);
		j->stats.compactions++;
		j->repaired = j->lost_before;
		j->stats.missing = j->stats.lost - j->repaired;
		j->stats.records = now_of(j)->number - 1;
	}
	/* A batch that a worker still has ends it: batch_done(). */
	if (!other->writing)
		stream_fini(other);
}

/* Changes go to both files until the new one is in place. */
static void next_finish(struct kvd_journal *j)
{
	if (j->renaming || next_of(j)->writing)
		return;
	if (next_of(j)->used) {
		stream_flush(next_of(j));
		return;
	}
	j->renaming = true;
	j->rename_work.run = rename_run;
	j->rename_work.done = rename_done;
	kvd_work_submit(j->workers, &j->rename_work);
}

void kvd_journal_compacted(struct kvd_journal *j)
{
	kv_assert(j->compacting && !j->finishing);
	j->finishing = true;
	next_finish(j);
}
