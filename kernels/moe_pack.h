/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_pack.h - KVK_ORDER_PACKED: the order in which moe_int4.cu streams expert weights.
 *
 * A matrix of rows x cols is cut into bricks of 32 rows x 128 columns. A brick holds its
 * nibbles and then its scales, so that one bulk copy brings both:
 *
 *	[4 blocks of 32 columns][32 lanes][4 words]	2048 bytes of nibbles
 *	[8 row octets' lane g][128 / group][4 rows]	16-bit scales, 64 * 128 / group
 *	bytes
 *
 * Lane 4 g + t of block b holds the words of rows g, g + 8, g + 16, g + 24 for columns
 * 32 b + 8 t .. + 7: exactly its share of the A operand of mma.m16n8k16, with x in its
 * natural order as B. Inside a word the even columns lie in the low half and the odd ones
 * in the high half, so that one and-or gives a pair of neighbours.
 *
 * Bricks follow each other along columns; where a matrix has many rows, eight bricks of
 * neighbouring row tiles are interleaved (wl = 8), which makes the eight warps' share of
 * a step one piece of 17 to 18 KB.
 *
 * w13 pairs gate and up: rows 0 .. 7 of a 16-row tile are gate rows, 8 .. 15 the up rows
 * of the same columns of the inner activation, so that SwiGLU needs one lane only.
 *
 * Packed bytes = standard nibbles + scales: the mapping is a bijection, no padding. Pure
 * functions, host and device.
 */
#ifndef KVK_MOE_PACK_H
#define KVK_MOE_PACK_H

#include "int4.h"

#define KVK_BRICK_ROWS	  32u
#define KVK_BRICK_COLS	  128u
#define KVK_BRICK_NIBBLES 2048u /* bytes */

/**
 * struct kvk_pack - geometry of one packed matrix
 * @mtiles: row tiles of 32
 * @kbricks: bricks along the columns
 * @wl: row tiles interleaved: 1 or 8
 * @brick: bytes of a brick
 */
struct kvk_pack {
	uint32_t mtiles;
	uint32_t kbricks;
	uint32_t wl;
	uint32_t brick;
	uint32_t group;
	uint32_t gate_up; /* rows are [2][rows / 2] and get paired */
};

KV_INLINE int kvk_pack_ok(uint32_t rows, uint32_t cols, uint32_t group)
{
	return kvk_int4_shape_ok(cols, group) && cols % KVK_BRICK_COLS == 0 && rows &&
	       rows % KVK_BRICK_ROWS == 0;
}

/* Few rows (one rank of a wide split): warps share a row tile and split the columns, so
 * its bricks lie one after the other. */
KV_INLINE struct kvk_pack kvk_pack_make(uint32_t rows, uint32_t cols, uint32_t group,
					uint32_t gate_up)
{
	struct kvk_pack p;

	p.mtiles = rows / KVK_BRICK_ROWS;
	p.kbricks = cols / KVK_BRICK_COLS;
	p.wl = p.mtiles >= 64 && p.mtiles % 8 == 0 ? 8 : 1;
	p.brick = KVK_BRICK_NIBBLES + 64u * (KVK_BRICK_COLS / group);
	p.group = group;
	p.gate_up = gate_up;
	return p;
}

KV_INLINE uint64_t kvk_pack_bytes(const struct kvk_pack *p)
{
	return (uint64_t)p->mtiles * p->kbricks * p->brick;
}

/* Byte offset of the brick of row tile @m and column brick @k. */
KV_INLINE uint64_t kvk_pack_brick(const struct kvk_pack *p, uint32_t m, uint32_t k)
{
	uint64_t first = (uint64_t)(m / p->wl) * p->wl * p->kbricks;

	return (first + (uint64_t)k * p->wl + m % p->wl) * p->brick;
}

/* The matrix row (as in the checkpoint) of row @r (0 .. 31) of row tile @m. */
KV_INLINE uint32_t kvk_pack_row(const struct kvk_pack *p, uint32_t m, uint32_t r)
{
	uint32_t half = p->mtiles * KVK_BRICK_ROWS / 2;

	if (!p->gate_up)
		return m * KVK_BRICK_ROWS + r;
	return (r / 8 % 2) * half + m * 16 + r / 16 * 8 + r % 8;
}

/* Inside a brick: word index of row @r, columns 8 @c8 .. + 7. */
KV_INLINE uint32_t kvk_brick_word(uint32_t r, uint32_t c8)
{
	return (c8 / 4 * 32 + r % 8 * 4 + c8 % 4) * 4 + r / 8;
}

/* Inside a brick: index of the scale of row @r, group @j, counted in 16-bit units from
 * the end of the nibbles. */
KV_INLINE uint32_t kvk_brick_scale(const struct kvk_pack *p, uint32_t r, uint32_t j)
{
	return (r % 8 * (KVK_BRICK_COLS / p->group) + j) * 4 + r / 8;
}

/* Nibbles of a standard word (column i at nibble i) to packed order and back. */
KV_INLINE uint32_t kvk_pack_word(uint32_t w)
{
	uint32_t out = 0;

	for (uint32_t i = 0; i < 8; i++)
		out |= (w >> (4 * i) & 0xfu) << (4 * (i / 2 + i % 2 * 4));
	return out;
}

KV_INLINE uint32_t kvk_unpack_word(uint32_t w)
{
	uint32_t out = 0;

	for (uint32_t i = 0; i < 8; i++)
		out |= (w >> (4 * (i / 2 + i % 2 * 4)) & 0xfu) << (4 * i);
	return out;
}

#endif /* KVK_MOE_PACK_H */
