/* SPDX-License-Identifier: Apache-2.0 */
/*
 * int4.h - INT4 weights as compressed-tensors stores them ("pack-quantized"), host and
 * device.
 *
 * A row of cols values lies in cols / 8 words of 32 bits, value i in bits 4 (i % 8) .. +
 * 3 of word i / 8: lowest nibble first. A nibble is q + 8 with q in -8 .. 7: symmetric,
 * zero point 8, never stored. w = q * scale[row][i / group], scales in bf16 or fp16. Rows
 * do not share words: a row whose length is not a multiple of 8 or of the group is
 * refused, never padded.
 */
#ifndef KVK_INT4_H
#define KVK_INT4_H

#include "fp8.h"

#define KVK_INT4_PER_WORD 8u
#define KVK_INT4_ZERO	  8
#define KVK_INT4_MIN	  (-8)
#define KVK_INT4_MAX	  7

/* Value @i (0 .. 7) of a word. */
KV_INLINE int32_t kvk_int4_get(uint32_t word, uint32_t i)
{
	return (int32_t)((word >> (4u * i)) & 0xfu) - KVK_INT4_ZERO;
}

KV_INLINE void kvk_int4_unpack8(uint32_t word, int8_t q[8])
{
	for (uint32_t i = 0; i < KVK_INT4_PER_WORD; i++)
		q[i] = (int8_t)kvk_int4_get(word, i);
}

/* Values outside -8 .. 7 are clamped: a nibble can hold nothing else. */
KV_INLINE uint32_t kvk_int4_pack8(const int8_t q[8])
{
	uint32_t word = 0;

	for (uint32_t i = 0; i < KVK_INT4_PER_WORD; i++) {
		int32_t v = q[i] < KVK_INT4_MIN	  ? KVK_INT4_MIN
			    : q[i] > KVK_INT4_MAX ? KVK_INT4_MAX
						  : q[i];

		word |= (uint32_t)(v + KVK_INT4_ZERO) << (4u * i);
	}
	return word;
}

/**
 * kvk_int4_shape_ok() - can a row of @cols values be packed with scales per @group?
 * @cols: values in a row
 * @group: 32, 64 or 128
 *
 * Return: 1 if the group is built and divides the row; 0 for odd tails and anything else.
 */
KV_INLINE int kvk_int4_shape_ok(uint32_t cols, uint32_t group)
{
	return (group == 32 || group == 64 || group == 128) && cols && cols % group == 0;
}

/* Words and scales in a row. */
KV_INLINE uint32_t kvk_int4_row_words(uint32_t cols)
{
	return cols / KVK_INT4_PER_WORD;
}

KV_INLINE uint32_t kvk_int4_row_scales(uint32_t cols, uint32_t group)
{
	return cols / group;
}

/* A 16-bit scale: fp16 or bf16. */
KV_INLINE float kvk_scale16_to_f32(uint16_t bits, int is_f16)
{
	return is_f16 ? kvk_f16_to_f32(bits) : kvk_bf16_to_f32(bits);
}

KV_INLINE uint16_t kvk_f32_to_scale16(float x, int is_f16)
{
	return is_f16 ? kvk_f32_to_f16(x) : kvk_f32_to_bf16(x);
}

#endif /* KVK_INT4_H */
