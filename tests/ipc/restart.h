/* SPDX-License-Identifier: Apache-2.0 */
/*
 * restart.h - a kvmd with a keeper that is killed and started again, and what its clients
 * do. For tests/ipc/restart*.c.
 */
#ifndef TESTS_IPC_RESTART_H
#define TESTS_IPC_RESTART_H

#include "tests/ipc/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "kvmd/own/image.h"

static struct eng_private_kvmd kvmd;
static const char *host_bytes = "256MiB";

/* ------------------------------------------------------------------- kill and start */

static inline void again_with(const char *faults)
{
	const char *args[] = {"--keeper",
			      "--backend",
			      ipc_on_cuda() ? "cuda" : "host",
			      ipc_on_cuda() ? "--gpu-bytes" : "--host-bytes",
			      host_bytes,
			      "--test-extents",
			      "--faults",
			      faults,
			      NULL};

	if (!ipc_start_again(&kvmd, args) && !strcmp(faults, "crash=0")) {
		ipc_show_log(&kvmd);
		KVT_FAIL("kvmd does not start again");
	}
}

static inline void again(void)
{
	again_with("crash=0");
}

static inline void kill_kvmd(void)
{
	kill(kvmd.pid, SIGKILL);
	waitpid(kvmd.pid, NULL, 0);
}

static inline void start(void)
{
	const char *args[] = {"--keeper",     "--faults", "crash=0",
			      "--host-bytes", host_bytes, NULL};

	ipc_start(&kvmd, args);
}

static inline bool log_has(const char *text)
{
	char line[512];
	FILE *f = fopen(kvmd.log_path, "r");
	bool found = false;

	while (f && !found && fgets(line, sizeof(line), f))
		found = strstr(line, text) != NULL;
	if (f)
		fclose(f);
	return found;
}

static inline struct kv_stat stat_of(struct kvc_pool *pool)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s;
}

/* ------------------------------------------------------------------------- helpers */

static inline void tokens_of(u32 seed, u32 *ret, u32 pages)
{
	for (u32 i = 0; i < pages * KV_PAGE_TOKENS; i++)
		ret[i] = seed * 1000003u + i;
}

static inline void fill(struct kvc_pool *pool, u32 pfn, u32 seed)
{
	u32 p[1024];

	for (u32 i = 0; i < 1024; i++)
		p[i] = seed * 2654435761u + i;
	ipc_page_put(pool, pfn, 0, p, sizeof(p));
}

static inline bool filled(struct kvc_pool *pool, u32 pfn, u32 seed)
{
	u32 p[1024];

	if (!kvc_page_addr(pool, pfn))
		return false;
	ipc_page_get(pool, pfn, 0, p, sizeof(p));
	for (u32 i = 0; i < 1024; i++)
		if (p[i] != seed * 2654435761u + i)
			return false;
	return true;
}

static inline int seal(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr,
		       u32 seed)
{
	u32 tokens[8 * KV_PAGE_TOKENS], crc[8] = {0};
	struct kv_seal_ret rets[8];
	struct kvc_seal s = {.size_bytes = sizeof(s),
			     .nr_pages = nr,
			     .pages = pages,
			     .crc32c = crc,
			     .tokens = tokens,
			     .ret_seals = rets};

	tokens_of(seed, tokens, nr);
	return kvc_seal(pool, &s);
}

static inline u32 lookup(struct kvc_pool *pool, u32 nr, u32 seed, struct kv_hit *hits)
{
	u32 tokens[8 * KV_PAGE_TOKENS], found = 0;
	int r;

	tokens_of(seed, tokens, nr);
	r = kvc_lookup(pool, tokens, nr * KV_PAGE_TOKENS, nr, hits, &found);
	if (r && r != KV_MISS)
		KVT_FAIL("kvc_lookup: %d %s", r, kvc_strerror(NULL));
	return r ? 0 : found;
}

/* Wait until @nr pages are found, and let them go again. */
static inline void wait_findable(struct kvc_pool *pool, u32 nr, u32 seed)
{
	struct kv_hit hits[8];
	u32 got = 0;

	for (u32 i = 0; i < 1000 && got != nr; i++) {
		got = lookup(pool, nr, seed, hits);
		for (u32 k = 0; k < got; k++)
			KVT_EXPECT_EQ(kvc_unpin(pool, &hits[k].grant, 1), 0);
		if (got != nr)
			usleep(1000);
	}
	KVT_EXPECT_EQ(got, nr);
}

/* Map kvmd's page records, as somebody who can flip bits in them. */
static inline u8 *records_map(const char *name, size_t *ret_bytes)
{
	char path[64], link[128];
	u8 *map = NULL;

	for (int i = 0; i < 256 && !map; i++) {
		struct stat st;
		ssize_t n;
		int fd;

		snprintf(path, sizeof(path), "/proc/%d/fd/%d", kvmd.pid, i);
		n = readlink(path, link, sizeof(link) - 1);
		if (n < 0)
			continue;
		link[n] = 0;
		if (!strstr(link, name))
			continue;
		fd = open(path, O_RDWR);
		KVT_EXPECT(fd >= 0 && !fstat(fd, &st));
		map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			   fd, 0);
		*ret_bytes = (size_t)st.st_size;
		close(fd);
	}
	KVT_EXPECT(map && map != MAP_FAILED);
	return map;
}

#endif
