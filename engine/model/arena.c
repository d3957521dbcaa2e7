/* SPDX-License-Identifier: Apache-2.0 */
/* arena.c - a chain of blocks, one per array (arena.h). One thread at a time. */
#include "engine/model/arena.h"

#include <stdlib.h>
#include <string.h>

/* In front of each array; padded so that the array behind it is aligned. */
struct block {
	struct block *next;
	u64 bytes;
	u8 pad[ENG_ARENA_ALIGN - 16];
};
_Static_assert(sizeof(struct block) == ENG_ARENA_ALIGN, "array alignment");

struct eng_arena {
	struct block *first;
	u64 bytes;
};

struct eng_arena *eng_arena_create(void)
{
	return calloc(1, sizeof(struct eng_arena));
}

void *eng_arena_alloc(struct eng_arena *a, u64 bytes)
{
	u64 rounded = kv_round_up(bytes, ENG_ARENA_ALIGN);
	struct block *b;

	if (rounded < bytes || rounded > SIZE_MAX - sizeof(*b))
		return NULL;
	b = aligned_alloc(ENG_ARENA_ALIGN, sizeof(*b) + rounded);
	if (!b)
		return NULL;
	memset(b, 0, sizeof(*b) + rounded);
	b->next = a->first;
	b->bytes = bytes;
	a->first = b;
	a->bytes += bytes;
	return b + 1;
}

u64 eng_arena_bytes(const struct eng_arena *a)
{
	return a->bytes;
}

void eng_arena_destroy(struct eng_arena *a)
{
	if (!a)
		return;
	while (a->first) {
		struct block *b = a->first;

		a->first = b->next;
		free(b);
	}
	free(a);
}
