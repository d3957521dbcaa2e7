/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/state.c - see state.h. */
#include "kvmd/ipc/state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kv/abi.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "kvmd/mm/tag.h"

#define LOCK_TRIES     200u
#define LOCK_PAUSE_NS  10000000
#define COUNTERS_MAGIC 0x72746e636d766bull /* "kvmcntr" */

struct counters {
	u64 magic;
	u64 saved[2];
	u64 check;
};

static u64 counters_check(const struct counters *c)
{
	u64 z = c->magic;
	int i;

	for (i = 0; i < 2; i++) {
		z ^= c->saved[i];
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
		z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
		z ^= z >> 31;
	}
	return z;
}

static int counters_write(struct kvd_state *state, const u64 *saved)
{
	struct counters c = {.magic = COUNTERS_MAGIC, .saved = {saved[0], saved[1]}};
	int fd, r = 0;

	if (kvd_fault(KVD_FAULT_state_write))
		return -EIO;
	kvd_crash_point();
	c.check = counters_check(&c);
	fd = openat(state->dir_fd, "counters.new",
		    O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	if (write(fd, &c, sizeof(c)) != (ssize_t)sizeof(c) || fsync(fd))
		r = errno ? -errno : -EIO;
	close(fd);
	if (r)
		return r;
	kvd_crash_point();
	if (renameat(state->dir_fd, "counters.new", state->dir_fd, "counters") ||
	    fsync(state->dir_fd))
		return -errno;
	state->nr_saves++;
	return 0;
}

static int counters_read(struct kvd_state *state, char *error, size_t error_bytes)
{
	struct counters c;
	ssize_t n;
	int fd;

	state->saved[0] = state->saved[1] = 0;
	fd = openat(state->dir_fd, "counters", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	if (fd < 0 && errno == ENOENT)
		return 0;
	if (fd < 0) {
		snprintf(error, error_bytes, "counters: %s", strerror(errno));
		return -errno;
	}
	memset(&c, 0, sizeof(c));
	n = read(fd, &c, sizeof(c));
	close(fd);
	if (n != (ssize_t)sizeof(c) || c.magic != COUNTERS_MAGIC ||
	    c.check != counters_check(&c)) {
		snprintf(
			error, error_bytes,
			"counters: damaged (%zd bytes): generations could repeat. Restore "
			"it, or remove it after every engine of this host has ended",
			n);
		return -EBADMSG;
	}
	memcpy(state->saved, c.saved, sizeof(state->saved));
	return 0;
}

static int dir_open(const char *path, char *error, size_t error_bytes)
{
	struct stat st;
	int fd;

	if (mkdir(path, 0700) && errno != EEXIST) {
		snprintf(error, error_bytes, "%s: %s", path, strerror(errno));
		return -errno;
	}
	fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st)) {
		int r = -errno;

		snprintf(error, error_bytes, "%s: %s", path, strerror(errno));
		if (fd >= 0)
			close(fd);
		return r;
	}
	if (st.st_uid != geteuid() || (st.st_mode & 022)) {
		snprintf(
			error, error_bytes,
			"%s: uid %u, mode %04o: must be ours (uid %u) and not writable by "
			"group or others",
			path, st.st_uid, st.st_mode & 07777, geteuid());
		close(fd);
		return -EPERM;
	}
	return fd;
}

/* A kvmd that was killed while it started its keeper or mover leaves a child that has the
 * lock until its exec: under load that takes a while, and it is no kvmd. */
static int lock_take(int fd)
{
	const struct timespec pause = {0, LOCK_PAUSE_NS};
	u32 i;

	for (i = 0; flock(fd, LOCK_EX | LOCK_NB); i++) {
		if (errno != EWOULDBLOCK)
			return -errno;
		if (i == LOCK_TRIES || KV_MUTANT(lock_at_once))
			return -EBUSY;
		nanosleep(&pause, NULL);
	}
	return 0;
}

int kvd_state_open(const char *path, struct kvd_state *state, char *error,
		   size_t error_bytes)
{
	int r;

	memset(state, 0, sizeof(*state));
	state->lock_fd = state->alive_fd = -1;
	state->dir_fd = dir_open(path, error, error_bytes);
	if (state->dir_fd < 0)
		return state->dir_fd;
	state->lock_fd = openat(state->dir_fd, "lock",
				O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	r = state->lock_fd < 0 ? -errno : lock_take(state->lock_fd);
	if (r) {
		snprintf(error, error_bytes, "%s/lock: %s", path,
			 r == -EBUSY ? "another kvmd uses this directory" : strerror(-r));
		goto close_state;
	}
	r = counters_read(state, error, error_bytes);
	if (r)
		goto close_state;
	return 0;
close_state:
	kvd_state_close(state);
	return r;
}

int kvd_state_alive(struct kvd_state *state, const char *admin_path, char *error,
		    size_t error_bytes)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	char path[160];
	int r = 0;

	if ((size_t)snprintf(path, sizeof(path), "%s" KVMD_ADMIN_LOCK_SUFFIX,
			     admin_path) >= sizeof(path))
		r = -ENAMETOOLONG;
	if (!r)
		state->alive_fd =
			open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (!r && (state->alive_fd < 0 || fcntl(state->alive_fd, F_SETLK, &lock)))
		r = errno == EAGAIN ? -EADDRINUSE : -errno;
	if (r)
		snprintf(error, error_bytes, "%s: %s", path,
			 r == -EADDRINUSE ? "another daemon answers there"
					  : strerror(-r));
	return r;
}

void kvd_state_close(struct kvd_state *state)
{
	if (state->alive_fd >= 0)
		close(state->alive_fd);
	if (state->lock_fd >= 0)
		close(state->lock_fd);
	if (state->dir_fd >= 0)
		close(state->dir_fd);
	state->lock_fd = state->dir_fd = state->alive_fd = -1;
}

void kvd_state_foresee(struct kvd_state *state)
{
	state->foreseen_gen = state->saved[KVD_SAVED_GENERATION] + KVD_GEN_BOUND_AHEAD;
}

static int env_save(void *arg, enum kvd_saved what, u64 value)
{
	struct kvd_state *state = arg;
	u64 saved[2] = {state->saved[0], state->saved[1]};
	int r;

	if (value <= saved[what])
		return 0; /* foreseen */
	saved[what] = value;
	saved[KVD_SAVED_GENERATION] =
		KV_MAX(saved[KVD_SAVED_GENERATION], state->foreseen_gen);
	r = counters_write(state, saved);
	if (r) {
		kvd_err("ipc/state", "counters: %s: value %llu is not used", strerror(-r),
			(unsigned long long)value);
		return r;
	}
	memcpy(state->saved, saved, sizeof(state->saved));
	return 0;
}

/* Nobody else ever sees it: no file. In 4 KiB pages of a memfd its faults were a quarter of
 * a restart. */
static int scratch_alloc(struct kvd_region *r)
{
	void *addr = mmap(NULL, r->size_bytes, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (addr == MAP_FAILED)
		return -errno;
	madvise(addr, r->size_bytes, MADV_DONTFORK);
	madvise(addr, r->size_bytes, MADV_DONTDUMP);
	if (r->size_bytes >= KVD_REGION_HUGE)
		madvise(addr, r->size_bytes, MADV_HUGEPAGE);
	r->addr = addr;
	r->fd = -1;
	return 0;
}

static int env_region_alloc(void *arg, struct kvd_region *r)
{
	static const char *const names[] = {
		[KVD_REGION_TABLE] = "kvmd-table",
		[KVD_REGION_FRAMES] = "kvmd-frames",
		[KVD_REGION_TOKENS] = "kvmd-tokens",
		[KVD_REGION_LEASES] = "kvmd-leases",
	};
	struct kvd_state *state = arg;
	enum kvd_memfd_seals seals =
		r->kind == KVD_REGION_TABLE ? KVD_MEMFD_TABLE : KVD_MEMFD_PRIVATE;
	int e;

	if (kvd_fault(r->kind == KVD_REGION_TABLE ? KVD_FAULT_table_alloc
						  : KVD_FAULT_record_alloc))
		return -ENOMEM;
	if (r->kind == KVD_REGION_SCRATCH)
		return scratch_alloc(r);
	e = kvd_memfd_create(names[r->kind], r->size_bytes, seals, &r->addr, &r->fd);
	if (e)
		return e;
	/* Where the host's shmem_enabled says advise; elsewhere it does nothing. */
	if (r->kind != KVD_REGION_LEASES && r->size_bytes >= KVD_REGION_HUGE)
		madvise(r->addr, r->size_bytes, MADV_HUGEPAGE);
	e = state->put ? state->put(state->keep_arg, r) : 0;
	if (e) {
		kvd_memfd_destroy(r->addr, r->size_bytes, r->fd);
		r->addr = NULL;
		r->fd = -1;
	}
	return e;
}

static void env_region_free(void *arg, struct kvd_region *r)
{
	struct kvd_state *state = arg;

	if (state->del)
		state->del(state->keep_arg, r);
	kvd_memfd_destroy(r->addr, r->size_bytes, r->fd);
	r->addr = NULL;
	r->fd = -1;
}

static void env_log(void *arg, int level, const char *line)
{
	if (level <= 3)
		kvd_err("core", "%s", line);
	else if (level == 4)
		kvd_warn("core", "%s", line);
	else
		kvd_info("core", "%s", line);
}

struct kvd_env kvd_state_env(struct kvd_state *state)
{
	return (struct kvd_env){
		.arg = state,
		.region_alloc = env_region_alloc,
		.region_free = env_region_free,
		.save = env_save,
		.log = env_log,
	};
}
