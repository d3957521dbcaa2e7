/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c - attacks on published tables, the session page, and other memory of kvmd. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/hostile/hostile.h"

static struct ipc_raw r;
static struct held held;

static void open_table(const struct scene *sc)
{
	attacker_open(sc, &r, &held);
}

static void map_writable(const struct scene *sc)
{
	open_table(sc);
	KVT_EXPECT(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, held.table_fd,
			0) == MAP_FAILED);
}

static void make_writable(const struct scene *sc)
{
	void *p;

	open_table(sc);
	p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, held.table_fd, 0);
	KVT_EXPECT(p != MAP_FAILED);
	KVT_EXPECT(mprotect(p, 4096, PROT_READ | PROT_WRITE) == -1);
}

static void write_call(const struct scene *sc)
{
	u64 word = ~0ull;

	open_table(sc);
	KVT_EXPECT(pwrite(held.table_fd, &word, sizeof(word), 4096) == -1);
}

static void reopen(const struct scene *sc)
{
	char path[64];
	int fd;

	open_table(sc);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", held.table_fd);
	fd = open(path, O_RDWR);
	KVT_EXPECT(fd < 0 || mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
				  0) == MAP_FAILED);
}

static void change_mode(const struct scene *sc)
{
	open_table(sc);
	KVT_EXPECT(fchmod(held.table_fd, 0777) == -1 && errno == EPERM);
	KVT_EXPECT(fchown(held.table_fd, ATTACKER_UID, ATTACKER_UID) == -1);
}

static void resize(const struct scene *sc)
{
	open_table(sc);
	KVT_EXPECT(ftruncate(held.table_fd, 0) == -1);
	KVT_EXPECT(fallocate(held.table_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
			     4096) == -1);
	KVT_EXPECT(fcntl(held.table_fd, F_ADD_SEALS, F_SEAL_WRITE) == -1);
}

static void through_proc(const struct scene *sc)
{
	char path[64];

	become(ATTACKER_UID);
	snprintf(path, sizeof(path), "/proc/%d/mem", sc->d.pid);
	KVT_EXPECT(open(path, O_RDWR) == -1);
	snprintf(path, sizeof(path), "/proc/%d/fd", sc->d.pid);
	KVT_EXPECT(open(path, O_RDONLY | O_DIRECTORY) == -1);
	snprintf(path, sizeof(path), "/proc/%d/map_files", sc->d.pid);
	KVT_EXPECT(open(path, O_RDONLY | O_DIRECTORY) == -1 || errno);
	snprintf(path, sizeof(path), "/proc/%d/environ", sc->d.pid);
	KVT_EXPECT(open(path, O_RDONLY) == -1);
}

/* Epochs that were never: they hold back the liar's own domain at most. */
static void future_epochs(const struct scene *sc)
{
	open_table(sc);
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		r.session->slots[i].word = ~0ull - i;
	usleep(100000);
}

static void never_retires(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_table(sc);
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		r.session->slots[i].word = 1;
	sqe = raw_sqe(&r, KV_OP_ALLOC);
	sqe.nr = 16;
	sqe.ret_bytes = 16 * sizeof(struct kv_grant);
	answers(&r, sqe, 0);
	usleep(200000); /* its pages wait when it is gone; the victim's do not */
}

/* Any words as magazine stock, the victim's page among them. */
static void forged_magazines(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_table(sc);
	for (u32 m = 0; m < KV_MAGAZINES; m++)
		for (u32 i = 0; i < KV_MAGAZINE_SLOTS; i++)
			r.session->magazines[m].slots[i].word =
				(u64)sc->seen->page.pfn << 32 | (m * 64 + i);
	for (u32 i = 0; i < 50; i++) {
		sqe = raw_sqe(&r, KV_OP_ALLOC);
		sqe.flags = KV_SQE_MAGAZINE;
		sqe.magazine = (u16)(i % KV_MAGAZINES);
		sqe.nr = 8;
		raw_call(&r, sqe);
	}
}

static void own_epoch(const struct scene *sc)
{
	struct kv_sqe sqe;

	open_table(sc);
	r.session->table_epoch.word = 0x1234;
	r.session->wake.word = ~0ull;
	r.session->closed = 1;
	sqe = raw_sqe(&r, KV_OP_STAT);
	sqe.ret_bytes = sizeof(struct kv_stat);
	raw_push(&r, sqe);
	usleep(50000);
}

static void session_page_junk(const struct scene *sc)
{
	open_table(sc);
	for (u32 round = 0; round < 50; round++) {
		for (u32 i = 0; i < sizeof(*r.session) / 8; i++)
			((volatile u64 *)r.session)[i] =
				(u64)(i + round) * 0x9e3779b97f4a7c15ull;
		raw_push(&r, raw_sqe(&r, KV_OP_STAT));
		usleep(1000);
	}
}

const struct attack attacks_memory[] = {
	{"mmap of the table for writing", "refused: sealed", map_writable},
	{"mprotect of the table", "refused", make_writable},
	{"pwrite into the table", "refused", write_call},
	{"the table opened again through /proc", "refused, or not mappable", reopen},
	{"fchmod, fchown of the table", "EPERM", change_mode},
	{"ftruncate, holes, seals on the table", "refused", resize},
	{"kvmd's memory and fds through /proc", "EACCES", through_proc},
	{"announce slots with epochs to come", "own domain only", future_epochs},
	{"steps that never retire", "own domain only", never_retires},
	{"forged magazine words", "ignored", forged_magazines},
	{"table_epoch and wake words forged", "no effect on others", own_epoch},
	{"the session page filled with junk", "no effect on others", session_page_junk},
	{NULL, NULL, NULL},
};
