/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/keyhash.c - see keyhash.h. RFC 7693 says what is computed.
 *
 * The state's four rows lie in four registers of four words. For the diagonal half of a
 * round a, c and d turn, not b: b is what comes last, so the turns are done when it is
 * there. A message's words are picked by a permutation of two registers; none of that
 * waits for the state. Any thread.
 */
#include "kvmd/own/keyhash.h"

#include <sodium.h>
#include <string.h>

#include "base/assert.h"
#include "base/util.h"

void kvd_keyhash_plain(u8 *ret_key, const void *message, const u8 *salt,
		       const u8 *personal)
{
	kv_assert(!crypto_generichash_blake2b_salt_personal(ret_key, KV_KEY_BYTES,
							    message, KVD_KEYHASH_BYTES,
							    NULL, 0, salt, personal));
}

#ifdef __x86_64__

#include <immintrin.h>

#define ROUNDS	    12u
#define BLOCK_BYTES 128u
#define FAST	    __attribute__((target("avx512f,avx512vl")))
#define FAST_INLINE \
	static inline __attribute__((target("avx512f,avx512vl"), always_inline))
#define PARAMS 0x01010010ull /* 16 bytes out, no key, fanout 1, depth 1 */

static const u64 iv[8] __attribute__((aligned(32))) = {
	0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull,
	0xa54ff53a5f1d36f1ull, 0x510e527fade682d1ull, 0x9b05688c2b3e6c1full,
	0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull,
};

/* By round: the words that the first additions take, four columns, then the second ones;
 * the same of the diagonals, in the order in which b has them. */
#define PICK(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)   \
	{                                                                            \
		s0, s2, s4, s6, s1, s3, s5, s7, s14, s8, s10, s12, s15, s9, s11, s13 \
	}
static const u64 picks[ROUNDS][16] __attribute__((aligned(64))) = {
	PICK(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
	PICK(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
	PICK(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
	PICK(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
	PICK(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
	PICK(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
	PICK(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
	PICK(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
	PICK(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
	PICK(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
	PICK(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
	PICK(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
};

struct rows {
	__m256i a, b, c, d;
};

/* a + m + b, and b comes last: compilers like to add m and b first, and all would wait for
 * that. */
FAST_INLINE __m256i add3(__m256i a, __m256i m, __m256i b)
{
	a = _mm256_add_epi64(a, m);
	__asm__("" : "+v"(a));
	return _mm256_add_epi64(a, b);
}

/* Four mixings at once; @m: the four first words, and the four second ones. */
FAST_INLINE void mix(struct rows *r, __m512i m)
{
	r->a = add3(r->a, _mm512_castsi512_si256(m), r->b);
	r->d = _mm256_ror_epi64(_mm256_xor_si256(r->d, r->a), 32);
	r->c = _mm256_add_epi64(r->c, r->d);
	r->b = _mm256_ror_epi64(_mm256_xor_si256(r->b, r->c), 24);
	r->a = add3(r->a, _mm512_extracti64x4_epi64(m, 1), r->b);
	r->d = _mm256_ror_epi64(_mm256_xor_si256(r->d, r->a), 16);
	r->c = _mm256_add_epi64(r->c, r->d);
	r->b = _mm256_ror_epi64(_mm256_xor_si256(r->b, r->c), 63);
}

FAST_INLINE void compress(__m256i *h, const u8 *block, u64 count, u64 last)
{
	__m512i lo = _mm512_loadu_si512(block), hi = _mm512_loadu_si512(block + 64);
	struct rows r = {h[0], h[1], _mm256_load_si256((const __m256i *)iv),
			 _mm256_load_si256((const __m256i *)(iv + 4))};

	r.d = _mm256_xor_si256(r.d, _mm256_set_epi64x(0, (s64)last, 0, (s64)count));
#pragma GCC unroll 12
	for (u32 i = 0; i < ROUNDS; i++) {
		mix(&r, _mm512_permutex2var_epi64(lo, _mm512_load_si512(picks[i]), hi));
		r.a = _mm256_permute4x64_epi64(r.a, _MM_SHUFFLE(2, 1, 0, 3));
		r.d = _mm256_permute4x64_epi64(r.d, _MM_SHUFFLE(1, 0, 3, 2));
		r.c = _mm256_permute4x64_epi64(r.c, _MM_SHUFFLE(0, 3, 2, 1));
		mix(&r,
		    _mm512_permutex2var_epi64(lo, _mm512_load_si512(picks[i] + 8), hi));
		r.a = _mm256_permute4x64_epi64(r.a, _MM_SHUFFLE(0, 3, 2, 1));
		r.d = _mm256_permute4x64_epi64(r.d, _MM_SHUFFLE(1, 0, 3, 2));
		r.c = _mm256_permute4x64_epi64(r.c, _MM_SHUFFLE(2, 1, 0, 3));
	}
	h[0] = _mm256_xor_si256(h[0], _mm256_xor_si256(r.a, r.c));
	h[1] = _mm256_xor_si256(h[1], _mm256_xor_si256(r.b, r.d));
}

FAST static void first_block(struct kvd_keyhash *kh)
{
	u64 s[2], p[2];
	__m256i h[2];

	_Static_assert(KVD_KEYHASH_BYTES == 2 * BLOCK_BYTES, "two blocks");
	memcpy(s, kh->salt, sizeof(s));
	memcpy(p, kh->personal, sizeof(p));
	h[0] = _mm256_xor_si256(_mm256_load_si256((const __m256i *)iv),
				_mm256_set_epi64x(0, 0, 0, PARAMS));
	h[1] = _mm256_xor_si256(
		_mm256_load_si256((const __m256i *)(iv + 4)),
		_mm256_set_epi64x((s64)p[1], (s64)p[0], (s64)s[1], (s64)s[0]));
	compress(h, kh->message, BLOCK_BYTES, 0);
	_mm256_store_si256((__m256i *)kh->rows, h[0]);
	_mm256_store_si256((__m256i *)(kh->rows + 4), h[1]);
}

FAST static void last_block(const struct kvd_keyhash *kh, u8 *ret_key)
{
	__m256i h[2] = {_mm256_load_si256((const __m256i *)kh->rows),
			_mm256_load_si256((const __m256i *)(kh->rows + 4))};

	compress(h, (const u8 *)kh->message + BLOCK_BYTES, 2ull * BLOCK_BYTES, ~0ull);
	_mm_storeu_si128((__m128i *)ret_key, _mm256_castsi256_si128(h[0]));
}

bool kvd_keyhash_fast(void)
{
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
}

#else

static void first_block(struct kvd_keyhash *kh)
{
}

static void last_block(const struct kvd_keyhash *kh, u8 *ret_key)
{
}

bool kvd_keyhash_fast(void)
{
	return false;
}

#endif

void kvd_keyhash_begin(struct kvd_keyhash *kh, const void *message, const u8 *salt,
		       const u8 *personal)
{
	kh->message = message;
	kh->salt = salt;
	kh->personal = personal;
	if (kvd_keyhash_fast())
		first_block(kh);
}

void kvd_keyhash_end(struct kvd_keyhash *kh, u8 *ret_key)
{
	if (kvd_keyhash_fast())
		last_block(kh, ret_key);
	else
		kvd_keyhash_plain(ret_key, kh->message, kh->salt, kh->personal);
}
