/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/keyhash.h - the hash of one page's key: BLAKE2b-128 of 256 bytes with salt and
 *	personal (design 8).
 *
 * Keys of a prefix are a chain, so a lookup of 32 k tokens waits for 512 of these, one
 * after the other: what counts is one hash's latency, and what else the CPU can do
 * meanwhile. This one is for the fixed shape and CPUs with AVX-512VL. It is a little
 * faster than libsodium's (245 to 261 ns on a Zen 4; 24 steps a round that wait for each
 * other allow no less than 220), has half as many instructions, and comes in two halves:
 * what a lookup has to do for other pages, put between and behind them, costs next to
 * nothing. Elsewhere libsodium is called. Tests compare the two. Any thread.
 */
#ifndef KVD_KEYHASH_H
#define KVD_KEYHASH_H

#include <stdbool.h>

#include "kv/abi.h"

#define KVD_KEYHASH_BYTES (KV_PAGE_TOKENS * sizeof(uint32_t))

/** kvd_keyhash_fast() - does this CPU have what the fast one needs? */
bool kvd_keyhash_fast(void);

/**
 * struct kvd_keyhash - a hash that is under way
 * @rows: between the two blocks
 * @message, @salt, @personal: as given
 */
struct kvd_keyhash {
	uint64_t rows[8] __attribute__((aligned(32)));
	const void *message;
	const uint8_t *salt, *personal;
};

/**
 * kvd_keyhash_begin() - first half of a key's hash
 * @message: KVD_KEYHASH_BYTES; it stays until kvd_keyhash_end()
 * @salt, @personal: KV_KEY_BYTES each; they stay, too
 */
void kvd_keyhash_begin(struct kvd_keyhash *kh, const void *message, const uint8_t *salt,
		       const uint8_t *personal);

/** kvd_keyhash_end() - second half; @ret_key: KV_KEY_BYTES, may be the salt */
void kvd_keyhash_end(struct kvd_keyhash *kh, uint8_t *ret_key);

/** kvd_keyhash_plain() - the same by libsodium */
void kvd_keyhash_plain(uint8_t *ret_key, const void *message, const uint8_t *salt,
		       const uint8_t *personal);

#endif /* KVD_KEYHASH_H */
