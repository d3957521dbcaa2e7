/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier.h - a kvmd with tiers that is started, killed and started again, and an engine that
 * fills it. For tests/ipc/tier*.c.
 */
#ifndef TESTS_IPC_TIER_H
#define TESTS_IPC_TIER_H

#include "tests/ipc/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "kernels/ref.h"

#define SEQ_PAGES 8u

static struct eng_private_kvmd kvmd;
static char dir[64]; /* configuration and NVMe tier */
static char config[96];
static const char *faults = "crash=0";
static bool keeper;

/* ------------------------------------------------------------------- surroundings */

static inline void dir_make(void)
{
	strcpy(dir, "/tmp/kvmd-tier-XXXXXX");
	KVT_EXPECT(mkdtemp(dir));
	snprintf(config, sizeof(config), "%s/kvmd.json", dir);
}

static inline void dir_remove(void)
{
	static const char *const names[] = {"nvme/pages", "nvme/journal",
					    "nvme/journal.new", "nvme/lock", "kvmd.json"};
	char path[160];

	for (size_t i = 0; i < KV_ARRAY_SIZE(names); i++) {
		snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
		unlink(path);
	}
	snprintf(path, sizeof(path), "%s/nvme", dir);
	rmdir(path);
	rmdir(dir);
}

/* @tiers: the object's text; %s in it is the directory */
static inline void config_write(const char *tiers, const char *tenant_tiers)
{
	char text[1024], all[2048];
	FILE *f = fopen(config, "w");

	KVT_EXPECT(f);
	snprintf(text, sizeof(text), tiers, dir);
	snprintf(
		all, sizeof(all),
		"{\"tenants\": [{\"name\": \"red\", \"uids\": [%u], \"gpus\": [{\"gpu\": "
		"\"*\", \"max\": \"1GiB\"}]%s%s}], \"tiers\": %s}",
		getuid(), tenant_tiers ? ", \"tiers\": " : "",
		tenant_tiers ? tenant_tiers : "", text);
	fputs(all, f);
	fclose(f);
}

#define DRAM_ONLY "{\"dram\": {\"size\": \"64MiB\"}}"
#define BOTH                                                                            \
	"{\"dram\": {\"size\": \"8MiB\"}, \"nvme\": {\"path\": \"%s/nvme\", \"size\": " \
	"\"64MiB\", \"write_from\": 0}}"

static inline void start(void)
{
	const char *args[] = {"--config", config, "--host-bytes", "8MiB", "--faults",
			      faults,	  NULL};
	const char *kept[] = {"--config", config, "--host-bytes", "8MiB",
			      "--faults", faults, "--keeper",	  NULL};

	ipc_start(&kvmd, keeper ? kept : args);
}

/* The same daemon again: its directory, with the host's secret, is still there. */
static inline void again(void)
{
	const char *args[] = {"--config", config,	  "--backend",
			      "host",	  "--host-bytes", "8MiB",
			      "--faults", faults,	  keeper ? "--keeper" : NULL,
			      NULL};

	if (!ipc_start_again(&kvmd, args)) {
		ipc_show_log(&kvmd);
		KVT_FAIL("kvmd does not start again");
	}
}

static inline void end(int sig)
{
	int status;

	kill(kvmd.pid, sig);
	waitpid(kvmd.pid, &status, 0);
	if (sig == SIGTERM)
		KVT_EXPECT_EQ(status, 0);
}

/* A number of the admin socket's reply, by a path of field names: each is looked for behind
 * the one before. */
static inline double number(const char *op, const char *path)
{
	char request[64], words[128], want[64], *save = NULL, *text, *w;
	const char *at;
	double v;

	snprintf(request, sizeof(request), "{\"op\":\"%s\"}", op);
	at = text = ipc_admin(&kvmd, request);
	snprintf(words, sizeof(words), "%s", path);
	for (w = strtok_r(words, ".", &save); w && at; w = strtok_r(NULL, ".", &save)) {
		snprintf(want, sizeof(want), "\"%s\":", w);
		at = strstr(at, want);
		at += at ? strlen(want) : 0;
	}
	if (!at)
		KVT_FAIL("%s has no %s: %s", op, path, text);
	v = strtod(at, NULL);
	free(text);
	return v;
}

static inline double counter(const char *name)
{
	char path[80];

	snprintf(path, sizeof(path), "tiers.counters.%s", name);
	return number("tier", path);
}

static inline bool health_has(const char *code)
{
	char *text = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	bool has = strstr(text, code) != NULL;

	free(text);
	return has;
}

/* ------------------------------------------------------------------------ engines */

static struct kvc *c;
static struct kvc_pool *pool;
static u32 bytes;

static inline void attach(void)
{
	struct kv_layout l = ipc_layout();

	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	bytes = (u32)kv_page_bytes(&l);
}

static inline void pattern(u8 *p, u32 seq, u32 page)
{
	u32 z = seq * 2654435761u + page * 40503u + 1;

	for (u32 i = 0; i < bytes; i += 4) {
		z = z * 1664525u + 1013904223u;
		memcpy(p + i, &z, 4);
	}
}

static inline void tokens_of(u32 seq, u32 *ret)
{
	for (u32 i = 0; i < SEQ_PAGES * KV_PAGE_TOKENS; i++)
		ret[i] = seq * 1000003u + i;
}

/* Write, seal and let go a sequence. */
static inline void make(u32 seq)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS], crc[SEQ_PAGES];
	struct kv_seal_ret rets[SEQ_PAGES];
	struct kv_grant g[SEQ_PAGES];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = SEQ_PAGES,
				.pages = g,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};
	struct kvc_step *step;
	u8 *p = malloc(bytes);
	int r;

	for (u32 i = 0; i < 5000; i++) {
		r = kvc_alloc(pool, SEQ_PAGES, KV_GFP_WAIT | KV_GFP_PREFILL, g);
		if (r != KV_PENDING)
			break;
		usleep(1000);
	}
	KVT_EXPECT_EQ(r, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	for (u32 i = 0; i < SEQ_PAGES; i++) {
		pattern(p, seq, i);
		ipc_page_put(pool, g[i].pfn, 0, p, bytes);
		crc[i] = kvk_crc32c(p, bytes);
	}
	kvc_step_retire(step);
	free(p);
	tokens_of(seq, tokens);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
	KVT_EXPECT_EQ(kvc_free(pool, g, SEQ_PAGES), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
}

/* Look up; each hit must have its bytes. Return: hits */
static inline u32 look(u32 seq)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS], nr;
	struct kv_hit hits[SEQ_PAGES];
	struct kvc_step *step;
	u8 *want = malloc(bytes), *got = malloc(bytes);
	int r;

	tokens_of(seq, tokens);
	r = kvc_lookup(pool, tokens, KV_ARRAY_SIZE(tokens), SEQ_PAGES, hits, &nr);
	KVT_EXPECT(r == 0 || r == KV_MISS);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	for (u32 i = 0; i < nr; i++) {
		pattern(want, seq, i);
		ipc_page_get(pool, hits[i].grant.pfn, 0, got, bytes);
		if (memcmp(want, got, bytes))
			KVT_FAIL("wrong bytes: sequence %u page %u", seq, i);
	}
	kvc_step_retire(step);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(kvc_unpin(pool, &hits[i].grant, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	free(want);
	free(got);
	return nr;
}

static inline int prefetch(u32 seq, u32 *ret_nr)
{
	u32 tokens[SEQ_PAGES * KV_PAGE_TOKENS];

	tokens_of(seq, tokens);
	return kvc_prefetch(pool, tokens, KV_ARRAY_SIZE(tokens), SEQ_PAGES, ret_nr);
}

static inline u32 fetch(u32 seq)
{
	u32 nr;

	prefetch(seq, &nr);
	return look(seq);
}

/* So many sequences that the first ones are in the pool no more; 8 MiB hold about 14. */
static inline void make_many(u32 nr)
{
	for (u32 seq = 1; seq <= nr; seq++)
		make(seq);
}

static inline u32 fetch_all(u32 nr)
{
	u32 all = 0;

	for (u32 seq = 1; seq <= nr; seq++)
		all += fetch(seq);
	return all;
}

static inline void begin(const char *tiers)
{
	dir_make();
	config_write(tiers, NULL);
	start();
	attach();
}

static inline void finish(void)
{
	kvc_close(c);
	ipc_stop(&kvmd);
	dir_remove();
}

#endif
