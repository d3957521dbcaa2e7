/* SPDX-License-Identifier: Apache-2.0 */
/* crc32c.c - CRC-32C by SSE4.2's instruction where the CPU has it, else by a table. Pure.
 */
#include <string.h>
#include "ref.h"

u32 kvk_crc32c_portable(const void *data, size_t n)
{
	/* remainders of the 16 nibbles; reflected polynomial 0x82f63b78 */
	static const u32 table[16] = {0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1,
				      0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
				      0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
				      0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75};
	const u8 *p = data;
	u32 crc = ~0u;

	for (size_t i = 0; i < n; i++) {
		crc ^= p[i];
		crc = (crc >> 4) ^ table[crc & 15];
		crc = (crc >> 4) ^ table[crc & 15];
	}
	return ~crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static u32 crc32c_sse42(const void *data, size_t n)
{
	const u8 *p = data;
	u64 crc = 0xffffffffu;

	for (; n >= 8; n -= 8, p += 8) {
		u64 v;

		memcpy(&v, p, sizeof(v));
		crc = __builtin_ia32_crc32di(crc, v);
	}
	for (; n; n--, p++)
		crc = __builtin_ia32_crc32qi((u32)crc, *p);
	return ~(u32)crc;
}
#endif

u32 kvk_crc32c(const void *data, size_t n)
{
#ifdef __x86_64__
	if (__builtin_cpu_supports("sse4.2"))
		return crc32c_sse42(data, n);
#endif
	return kvk_crc32c_portable(data, n);
}
