/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend/memfd.h - sealed anonymous files: the one way kvmd makes memory that others
 * map.
 *
 * A memfd's inode is mode 0777 and any holder could reopen, shrink or seal it: every one
 * made here is close-on-exec, mode 0600 and sealed before its fd leaves the process.
 */
#ifndef KVD_BACKEND_MEMFD_H
#define KVD_BACKEND_MEMFD_H

#include "base/util.h"

/**
 * enum kvd_memfd_seals - what nobody can do any more
 * @KVD_MEMFD_SIZE: change the size or the seals. Ring, session page, extent
 * @KVD_MEMFD_TABLE: also write: the mapping made here stays the only writable one, also
 *	against the owner of the fd
 * @KVD_MEMFD_PRIVATE: as SIZE; the fd stays in the daemon (and its keeper)
 */
enum kvd_memfd_seals { KVD_MEMFD_SIZE, KVD_MEMFD_TABLE, KVD_MEMFD_PRIVATE };

/**
 * kvd_memfd_create() - zeroed memory behind a sealed fd
 * @name: shown in /proc/PID/maps
 * @size_bytes: rounded up to whole memory pages
 * @ret_addr: writable mapping, not inherited by children; NULL: do not map
 * @ret_fd: close-on-exec
 *
 * Return: 0; -ENOMEM; -EMFILE; -errno.
 */
int kvd_memfd_create(const char *name, u64 size_bytes, enum kvd_memfd_seals seals,
		     void **ret_addr, int *ret_fd);

/** kvd_memfd_destroy() - unmap (if @addr) and close */
void kvd_memfd_destroy(void *addr, u64 size_bytes, int fd);

#endif
