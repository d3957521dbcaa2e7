/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copies.h - copies to shared memory that are under way: part of machine.cc, which says when some of
 * them arrive, in any order.
 */
#ifndef HOPPER_COPIES_H
#define HOPPER_COPIES_H

struct copy {
	uint8_t *shared;
	uint32_t dst, bytes, bar;
	const void *src; /* @map: not used */
	const CUtensorMap *map;
	uint64_t at[5];	      /* the first: bytes */
	struct fiber *thread; /* whose pieces these are: instead of all that */
	std::vector<struct piece> pieces;
	uint32_t late; /* rounds to come */
};

static std::vector<struct copy> copies;

void hopper_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	HOPPER_CHECK(dst + bytes <= STATIC_AT);
	copies.push_back({hopper_shared(), dst, bytes, bar, src, NULL, {}, NULL, {}, 0});
}

void hopper_tensor_copy(uint32_t dst, const void *map, uint32_t bar, uint32_t nr_dims,
			const int (&at)[5])
{
	const CUtensorMap *m = (const CUtensorMap *)map;
	const uint32_t bytes = tensor_box_bytes(m);
	struct copy c = {hopper_shared(), dst, bytes, bar, NULL, m, {}, NULL, {}, 0};

	/* a copy of other dimensions than its map's is an illegal instruction */
	HOPPER_CHECK(nr_dims == m->nr_dims);
	HOPPER_CHECK(dst % (m->box[0] * 8) == 0 && dst + bytes <= STATIC_AT);
	for (int i = 0; i < 5; i++) {
		HOPPER_CHECK(at[i] >= 0);
		c.at[i] = (uint64_t)at[i] * (i ? 1 : m->value_bytes);
	}
	copies.push_back(c);
}

/* 16 bytes to @dst, some time before the thread's next group arrives. */
void hopper_piece(uint32_t dst, const void *src)
{
	HOPPER_CHECK(dst % 16 == 0 && (uintptr_t)src % 16 == 0 && dst + 16 <= STATIC_AT);
	running->pieces.push_back({dst, src});
}

void hopper_pieces_arrive(uint32_t bar)
{
	struct copy c = {hopper_shared(), 0, 0, bar, NULL, NULL, {}, running, {}, 0};

	c.pieces.swap(running->pieces);
	running->nr_groups++;
	copies.push_back(c);
}

void hopper_pieces_wait(void)
{
	while (running->nr_groups)
		hopper_yield();
}

static void copy_pieces(const struct copy *c)
{
	for (const struct piece &p : c->pieces)
		if (p.src)
			memcpy(c->shared + p.dst, p.src, 16);
		else
			memset(c->shared + p.dst, 0, 16);
	c->thread->nr_groups--;
}

/* Some of the copies that are under way arrive. */
static void copies_step(void)
{
	for (size_t i = 0; i < copies.size();) {
		struct copy &c = copies[i];

		if (late_rounds && !c.late)
			c.late = random_next() % 8 ? 1 : late_rounds;
		if (c.late > 1) { /* it will come */
			c.late--;
			nr_events++;
		}
		if (c.late > 1 || random_next() % 3) {
			i++;
			continue;
		}
		if (c.thread)
			copy_pieces(&c);
		else if (c.map)
			tensor_box(c.map, c.shared + c.dst, c.at);
		else
			memcpy(c.shared + c.dst, c.src, c.bytes);
		hopper_mbar_step((struct hopper_mbar *)(c.shared + c.bar),
				 c.thread ? 1 : 0, -(int32_t)c.bytes);
		copies[i] = copies.back();
		copies.pop_back();
		nr_events++;
	}
}

#endif /* HOPPER_COPIES_H */
