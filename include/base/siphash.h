/* SPDX-License-Identifier: Apache-2.0 */
/*
 * siphash.h - SipHash of 16 bytes, inline: which chain of a hash table a key lies on.
 *
 * One round a word and three at the end (SipHash-1-3, as Linux' hsiphash and Rust's tables):
 * nobody who does not know the secret can choose chains, and that is all it is for.
 * libsodium has only 2-4, behind a call, which costs a lookup of 512 pages 6 us more.
 */
#ifndef BASE_SIPHASH_H
#define BASE_SIPHASH_H

#include <string.h>

#include "base/util.h"

static inline u64 kv_sip_rotl(u64 x, u32 n)
{
	return x << n | x >> (64 - n);
}

static inline void kv_sip_round(u64 *v)
{
	v[0] += v[1];
	v[1] = kv_sip_rotl(v[1], 13) ^ v[0];
	v[0] = kv_sip_rotl(v[0], 32);
	v[2] += v[3];
	v[3] = kv_sip_rotl(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = kv_sip_rotl(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = kv_sip_rotl(v[1], 17) ^ v[2];
	v[2] = kv_sip_rotl(v[2], 32);
}

/**
 * kv_siphash16() - SipHash-@rounds-@last of @bytes[16] under @secret[16]
 * @rounds, @last: 1, 3; tests also ask for 2, 4, which libsodium has
 */
static inline u64 kv_siphash16(const u8 *bytes, const u8 *secret, u32 rounds, u32 last)
{
	u64 key[2], words[3], v[4];

	memcpy(key, secret, sizeof(key));
	memcpy(words, bytes, 16);
	words[2] = 16ull << 56; /* the length */
	v[0] = key[0] ^ 0x736f6d6570736575ull;
	v[1] = key[1] ^ 0x646f72616e646f6dull;
	v[2] = key[0] ^ 0x6c7967656e657261ull;
	v[3] = key[1] ^ 0x7465646279746573ull;
	for (u32 i = 0; i < 3; i++) {
		v[3] ^= words[i];
		for (u32 k = 0; k < rounds; k++)
			kv_sip_round(v);
		v[0] ^= words[i];
	}
	v[2] ^= 0xff;
	for (u32 k = 0; k < last; k++)
		kv_sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

#endif
