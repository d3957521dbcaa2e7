/* SPDX-License-Identifier: Apache-2.0 */
/*
 * noalloc.c - an allocator that aborts: preloaded into kvmd, it ends the process that is
 * named in a shared word at the first call of malloc and its kin.
 *
 * KV_NOALLOC names a file of one u32, the pid that may not allocate, 0 for nobody. Any
 * thread of it counts. Until then, and in all other processes, calls go on to glibc.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t nr, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *p);

#define PUBLIC __attribute__((visibility("default")))

static uint32_t *forbidden;

static __attribute__((constructor)) void map_word(void)
{
	const char *path = getenv("KV_NOALLOC");
	void *p;
	int fd;

	if (!path)
		return;
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return;
	p = mmap(NULL, sizeof(*forbidden), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p != MAP_FAILED)
		forbidden = p;
}

static void look(void)
{
	static const char text[] = "noalloc: an allocation on a request path\n";

	if (!forbidden ||
	    __atomic_load_n(forbidden, __ATOMIC_ACQUIRE) != (uint32_t)getpid())
		return;
	if (write(2, text, sizeof(text) - 1) < 0)
		_exit(97);
	abort();
}

PUBLIC void *malloc(size_t bytes)
{
	look();
	return __libc_malloc(bytes);
}

PUBLIC void *calloc(size_t nr, size_t bytes)
{
	look();
	return __libc_calloc(nr, bytes);
}

PUBLIC void *realloc(void *p, size_t bytes)
{
	look();
	return __libc_realloc(p, bytes);
}

PUBLIC void *aligned_alloc(size_t align, size_t bytes)
{
	look();
	return __libc_memalign(align, bytes);
}

PUBLIC int posix_memalign(void **ret, size_t align, size_t bytes)
{
	void *p;

	look();
	p = __libc_memalign(align, bytes);
	if (!p)
		return ENOMEM;
	*ret = p;
	return 0;
}

PUBLIC void free(void *p)
{
	__libc_free(p);
}
