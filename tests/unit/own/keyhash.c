/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keyhash.c - a key's hash, and with two rounds a word and four at the end the hash that
 * chooses chains, against libsodium's.
 */
#include "kvmd/own/keyhash.h"

#include <sodium.h>
#include <string.h>

#include "base/siphash.h"
#include "tests/kvt.h"

static void fill(u8 *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (u8)kvt_rand64();
}

static void key_by_halves(u8 *ret, const u8 *message, const u8 *salt, const u8 *personal)
{
	struct kvd_keyhash kh;

	kvd_keyhash_begin(&kh, message, salt, personal);
	kvd_keyhash_end(&kh, ret);
}

KVT_TEST(key_is_blake2b_of_libsodium)
{
	u8 message[KVD_KEYHASH_BYTES + 1], salt[KV_KEY_BYTES], personal[KV_KEY_BYTES];
	u8 mine[KV_KEY_BYTES], theirs[KV_KEY_BYTES];

	KVT_EXPECT(sodium_init() >= 0);
	KVT_NOTE("the fast one is %s here", kvd_keyhash_fast() ? "used" : "not used");
	for (u32 i = 0; i < 20000; i++) {
		u8 *m = message + (i & 1); /* at any address */

		fill(m, KVD_KEYHASH_BYTES);
		fill(salt, sizeof(salt));
		fill(personal, sizeof(personal));
		key_by_halves(mine, m, salt, personal);
		kvd_keyhash_plain(theirs, m, salt, personal);
		KVT_EXPECT(!memcmp(mine, theirs, sizeof(mine)));
	}
}

/* One bit, anywhere: a lane that is not looked at would show. */
KVT_TEST(each_bit_counts)
{
	u8 in[KVD_KEYHASH_BYTES + 2 * KV_KEY_BYTES] = {0};
	u8 mine[KV_KEY_BYTES], theirs[KV_KEY_BYTES];

	KVT_EXPECT(sodium_init() >= 0);
	for (u32 bit = 0; bit < sizeof(in) * 8; bit++) {
		const u8 *salt = in + KVD_KEYHASH_BYTES, *personal = salt + KV_KEY_BYTES;

		in[bit / 8] ^= (u8)(1u << bit % 8);
		key_by_halves(mine, in, salt, personal);
		kvd_keyhash_plain(theirs, in, salt, personal);
		KVT_EXPECT(!memcmp(mine, theirs, sizeof(mine)));
		in[bit / 8] ^= (u8)(1u << bit % 8);
	}
}

/* A chain writes each key over the one before. */
KVT_TEST(key_may_lie_on_its_salt)
{
	u8 message[KVD_KEYHASH_BYTES], personal[KV_KEY_BYTES];
	u8 mine[KV_KEY_BYTES] = {1}, theirs[KV_KEY_BYTES] = {1};

	KVT_EXPECT(sodium_init() >= 0);
	fill(personal, sizeof(personal));
	for (u32 i = 0; i < 1000; i++) {
		fill(message, sizeof(message));
		key_by_halves(mine, message, mine, personal);
		kvd_keyhash_plain(theirs, message, theirs, personal);
	}
	KVT_EXPECT(!memcmp(mine, theirs, sizeof(mine)));
}

KVT_TEST(siphash_2_4_is_libsodiums)
{
	u8 bytes[KV_KEY_BYTES], secret[KV_KEY_BYTES], hash[crypto_shorthash_BYTES];
	u64 theirs;

	KVT_EXPECT(sodium_init() >= 0);
	for (u32 i = 0; i < 2000; i++) {
		fill(bytes, sizeof(bytes));
		fill(secret, sizeof(secret));
		crypto_shorthash(hash, bytes, sizeof(bytes), secret);
		memcpy(&theirs, hash, sizeof(theirs));
		KVT_EXPECT_EQ(kv_siphash16(bytes, secret, 2, 4), theirs);
	}
}

KVT_MAIN()
