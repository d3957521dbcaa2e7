/* SPDX-License-Identifier: Apache-2.0 */
/* act_ref.c - activations between their dtype and f32. No state; any thread. */
#include <string.h>
#include "ref.h"

void kvk_act_load(u32 dtype, const void *src, size_t index, float *dst, u32 n)
{
	if (dtype == KVK_F32) {
		memcpy(dst, (const float *)src + index, n * sizeof(float));
	} else {
		const u16 *s = (const u16 *)src + index;

		for (u32 i = 0; i < n; i++)
			dst[i] = kvk_bf16_to_f32(s[i]);
	}
}

void kvk_act_store(u32 dtype, const float *src, void *dst, size_t index, u32 n)
{
	if (dtype == KVK_F32) {
		memcpy((float *)dst + index, src, n * sizeof(float));
	} else {
		u16 *d = (u16 *)dst + index;

		for (u32 i = 0; i < n; i++)
			d[i] = kvk_f32_to_bf16(src[i]);
	}
}

void kvk_act_nan(u32 dtype, void *dst, size_t index, size_t n)
{
	for (size_t i = index; i < index + n; i++) {
		if (dtype == KVK_F32)
			((float *)dst)[i] = kvk_bits_f32(0x7fc00000u);
		else
			((u16 *)dst)[i] = 0x7fc0u;
	}
}

void kvk_act_fp8(float *x, u32 n)
{
	for (u32 b = 0; b < n; b += KVK_FP8_BLOCK) {
		u32 len = KV_MIN(n - b, KVK_FP8_BLOCK), top = 0;
		float scale;

		for (u32 i = 0; i < len; i++) {
			u32 a = kvk_f32_bits(x[b + i]) & 0x7fffffffu;

			a = a > 0x7f800000u ? 0 : a;
			top = a > top ? a : top;
		}
		scale = kvk_fp8_act_scale(kvk_bits_f32(top));
		for (u32 i = 0; i < len; i++) {
			u8 c = kvk_e4m3_encode(kvk_div_rn(x[b + i], scale));

			x[b + i] = kvk_e4m3_decode(c) * scale;
		}
	}
}
