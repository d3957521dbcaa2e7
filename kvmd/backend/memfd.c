/* SPDX-License-Identifier: Apache-2.0 */
/* backend/memfd.c - see memfd.h. */
#include "kvmd/backend/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mutant.h"
#include "kvmd/dbg/fault.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define MEMFD_PAGE 4096ull

static int memfd_open(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);

	/* Kernels before 6.3 do not know NOEXEC_SEAL; mode 0600 below does the same. */
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return fd < 0 ? -errno : fd;
}

int kvd_memfd_create(const char *name, u64 size_bytes, enum kvd_memfd_seals seals,
		     void **ret_addr, int *ret_fd)
{
	int flags = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	void *addr = NULL;
	int fd, r;

	if (kvd_fault(KVD_FAULT_memfd))
		return -EMFILE;
	size_bytes = kv_round_up(size_bytes, MEMFD_PAGE);
	fd = memfd_open(name);
	if (fd < 0)
		return fd;
	if (fchmod(fd, 0600) || ftruncate(fd, (off_t)size_bytes)) {
		r = -errno;
		goto close_fd;
	}
	if (ret_addr) {
		addr = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (addr == MAP_FAILED) {
			r = -errno;
			goto close_fd;
		}
		madvise(addr, size_bytes, MADV_DONTFORK);
		madvise(addr, size_bytes, MADV_DONTDUMP);
	}
	/* After the mapping: FUTURE_WRITE lets that one go on and refuses every other. */
	if (seals == KVD_MEMFD_TABLE && !KV_MUTANT(table_unsealed))
		flags |= F_SEAL_FUTURE_WRITE;
	if (fcntl(fd, F_ADD_SEALS, flags)) {
		r = -errno;
		goto unmap;
	}
	if (ret_addr)
		*ret_addr = addr;
	*ret_fd = fd;
	return 0;
unmap:
	if (addr)
		munmap(addr, size_bytes);
close_fd:
	close(fd);
	return r;
}

void kvd_memfd_destroy(void *addr, u64 size_bytes, int fd)
{
	if (addr)
		munmap(addr, kv_round_up(size_bytes, MEMFD_PAGE));
	if (fd >= 0)
		close(fd);
}
