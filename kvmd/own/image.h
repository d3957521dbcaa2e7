/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/image.h - what of a core outlives its process, beside page records and leases:
 * names of domains and tenants, sessions with their cookies, the record being changed.
 *
 * One region of fixed size whose fd is in the keeper. Each entry has a check word
 * over what never changes; what changes is one word, stored once, whose values are far
 * apart, so that neither a torn store nor a flipped bit makes another valid value of it.
 * A damaged entry is left out: its pages go the way of a dead session's (P8), its pool
 * starts empty. Loop thread only; adopt.c reads it, everybody else stores only.
 */
#ifndef KVD_IMAGE_H
#define KVD_IMAGE_H

#include "kvmd/mm/pool.h"
#include "kvmd/own/domain.h"

#define KVD_IMAGE_MAGIC	   0x6567616d69766bull /* "kvimage" */
#define KVD_IMAGE_VERSION  1u
#define KVD_IMAGE_SESSIONS 1024u

/* Values of kvd_image_session.state; anything else counts as ENDED. */
#define KVD_IMAGE_FREE	   0u
#define KVD_IMAGE_LIVE	   0x4c495645u
#define KVD_IMAGE_ENDED	   0x9a11eb0au

/* Values of kvd_image_session.seen; anything else counts as 0: not seen. */
#define KVD_IMAGE_LISTED   0x6c697374u
#define KVD_IMAGE_MPS	   0x9dcf8a3bu

/* Values of kvd_image.memory: what the extents are made of; anything else: not known. */
#define KVD_IMAGE_HOST	   0x686f7374u
#define KVD_IMAGE_CUDA	   0x97d3a1e5u

struct kvd_image_domain {
	char name[KV_NAME_BYTES];
	u64 check; /* 0 = unused */
};

struct kvd_image_tenant {
	char name[KV_NAME_BYTES];
	u64 domain;
	u64 check; /* 0 = unused */
};

/**
 * struct kvd_image_session - one session
 * @id .. @name: constant, covered by @check
 * @state: KVD_IMAGE_*
 * @pools: kvd_image_pool() of each open pool, by entry of kvd_session.attach
 * @seen: KVD_IMAGE_*: what NVML said of the process while it lived (ipc/proof.h)
 */
struct kvd_image_session {
	u64 id;
	u8 cookie[KV_COOKIE_BYTES];
	s32 pid;
	u32 uid;
	u32 tenant;
	u32 role;
	char name[KV_NAME_BYTES];
	u64 check;
	u32 state;
	u32 pools[KV_POOLS_MAX];
	u32 seen;
};

/**
 * struct kvd_image - the region
 * @memory: KVD_IMAGE_*
 * @next_client_id: no session ever had this id or a larger one
 */
struct kvd_image {
	u64 magic;
	u32 version;
	u32 memory;
	u64 next_client_id;
	struct kvd_undo undo;
	struct kvd_image_domain domains[KVD_DOMAINS_MAX];
	struct kvd_image_tenant tenants[KVD_TENANTS_MAX];
	struct kvd_image_session sessions[KVD_IMAGE_SESSIONS];
};

/** kvd_image_format() - zeroed memory becomes an empty image */
void kvd_image_format(struct kvd_image *image);

/** kvd_image_whole() - is it one of ours? */
bool kvd_image_whole(const struct kvd_image *image, u64 bytes);

/** kvd_image_pool() - a pool id and its complement in one word; 0 = none */
static inline u32 kvd_image_pool(u32 pool_id)
{
	return pool_id ? pool_id << 16 | (~pool_id & 0xffff) : 0;
}

/** kvd_image_pool_id() - Return: the id; 0 none, or damaged */
static inline u32 kvd_image_pool_id(u32 word)
{
	u32 id = word >> 16;

	return id && kvd_image_pool(id) == word ? id : 0;
}

/** kvd_image_domain_set(), kvd_image_tenant_set() - note one; @name NULL: it is gone.
 * @image may be NULL: nothing is kept */
void kvd_image_domain_set(struct kvd_image *image, u32 id, const char *name);
void kvd_image_tenant_set(struct kvd_image *image, u32 index, u32 domain,
			  const char *name);

bool kvd_image_domain_ok(const struct kvd_image_domain *d);
bool kvd_image_tenant_ok(const struct kvd_image_tenant *t);
bool kvd_image_session_ok(const struct kvd_image_session *s);

/**
 * kvd_image_session_get() - an entry for a new session, filled and LIVE
 * @from: id .. name
 *
 * Return: the entry; NULL all are in use.
 */
struct kvd_image_session *kvd_image_session_get(struct kvd_image *image,
						const struct kvd_image_session *from);

#endif /* KVD_IMAGE_H */
