/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/crc.c - CRC-32C by SSE4.2's instruction, three streams at a time. See crc.h.
 *
 * The instruction takes a new word each clock but answers after three: three independent
 * streams fill the gaps. Their remainders are joined by advancing one over the bytes of
 * the next: a multiplication by x^(8 * STREAM) modulo the polynomial, as four look-ups.
 * A page is not in a cache, and a CPU's own prefetchers begin anew every 4 KiB, where
 * each of the three streams ends: so memory is asked for here.
 */
#include "kvmd/tier/crc.h"

#include <pthread.h>
#include <string.h>

#define POLY   0x82f63b78u
#define STREAM 4096u /* bytes of each of the three */
#define LINE   64u
#define AHEAD  1024u /* and how far ahead of it memory is asked for */

u32 kvd_crc32c_portable(const void *data, size_t n)
{
	const u8 *p = data;
	u32 crc = ~0u;

	for (size_t i = 0; i < n; i++) {
		crc ^= p[i];
		for (u32 bit = 0; bit < 8; bit++)
			crc = (crc >> 1) ^ (crc & 1 ? POLY : 0);
	}
	return ~crc;
}

#ifdef __x86_64__

static u32 advance[4][256];
static pthread_once_t advance_once = PTHREAD_ONCE_INIT;

static void advance_fill(void)
{
	for (u32 byte = 0; byte < 4; byte++) {
		for (u32 v = 0; v < 256; v++) {
			u32 crc = v << (8 * byte);

			for (u32 bit = 0; bit < STREAM * 8; bit++)
				crc = (crc >> 1) ^ (crc & 1 ? POLY : 0);
			advance[byte][v] = crc;
		}
	}
}

static inline u32 advanced(u32 crc)
{
	return advance[0][crc & 255] ^ advance[1][crc >> 8 & 255] ^
	       advance[2][crc >> 16 & 255] ^ advance[3][crc >> 24];
}

static inline u64 word_at(const u8 *p)
{
	u64 v;

	memcpy(&v, p, sizeof(v));
	return v;
}

/* What is AHEAD of byte @i in each stream, or by so much in the next three. Behind the data
 * it fetches for nothing, which is no fault. */
static inline void line_fetch(const u8 *p, u32 i)
{
	const u8 *at = p + i + AHEAD + (i + AHEAD < STREAM ? 0 : 2 * STREAM);

	__builtin_prefetch(at);
	__builtin_prefetch(at + STREAM);
	__builtin_prefetch(at + 2 * STREAM);
}

__attribute__((target("sse4.2"))) static u32 crc32c_sse42(const void *data, size_t n)
{
	const u8 *p = data;
	u64 crc = 0xffffffffu;

	for (; n >= 3 * STREAM; n -= 3 * STREAM, p += 3 * STREAM) {
		u64 b = 0, c = 0;

		for (u32 i = 0; i < STREAM; i += LINE) {
			line_fetch(p, i);
			for (u32 k = i; k < i + LINE; k += 8) {
				crc = __builtin_ia32_crc32di(crc, word_at(p + k));
				b = __builtin_ia32_crc32di(b, word_at(p + STREAM + k));
				c = __builtin_ia32_crc32di(c,
							   word_at(p + 2 * STREAM + k));
			}
		}
		crc = advanced(advanced((u32)crc) ^ (u32)b) ^ (u32)c;
	}
	for (; n >= 8; n -= 8, p += 8)
		crc = __builtin_ia32_crc32di(crc, word_at(p));
	for (; n; n--, p++)
		crc = __builtin_ia32_crc32qi((u32)crc, *p);
	return ~(u32)crc;
}
#endif

u32 kvd_crc32c(const void *data, size_t n)
{
#ifdef __x86_64__
	if (__builtin_cpu_supports("sse4.2")) {
		pthread_once(&advance_once, advance_fill);
		return crc32c_sse42(data, n);
	}
#endif
	return kvd_crc32c_portable(data, n);
}
