/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.h - many arrays, one owner: a model's memory is freed at once.
 *
 * One thread at a time.
 */
#ifndef ENG_MODEL_ARENA_H
#define ENG_MODEL_ARENA_H

#include "base/util.h"

#define ENG_ARENA_ALIGN 64u

struct eng_arena;

/** eng_arena_create() - Return: an empty arena, or NULL */
struct eng_arena *eng_arena_create(void);

/** eng_arena_alloc() - @bytes zeroed bytes, 64-byte aligned. Return: NULL when out of
 * memory */
void *eng_arena_alloc(struct eng_arena *a, u64 bytes);

/** eng_arena_bytes() - sum of all requests */
u64 eng_arena_bytes(const struct eng_arena *a);

void eng_arena_destroy(struct eng_arena *a);

#endif
