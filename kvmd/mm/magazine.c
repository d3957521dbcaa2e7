/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/magazine.c - stocked pages in a session page. See magazine.h.
 *
 * Loop thread only; the slots are written by the client at the same time. Our barrier
 * partner is kv_mag_pop(): it reads the tag before the compare-and-swap, we store it
 * before the word.
 */
#include "kvmd/mm/magazine.h"
#include "base/mutant.h"

void kvd_mag_put(struct kvd_magazine *m, struct kv_magazine *shared, u32 slot, u32 pfn,
		 u64 tag, bool dirty)
{
	u64 word = KV_MAG_STOCKED | (dirty ? KV_MAG_DIRTY : 0) |
		   ((u64)(m->sequence & KV_MAG_SEQ_MASK) << KV_MAG_SEQ_SHIFT) | pfn;

	kv_assert(slot < KV_MAGAZINE_SLOTS && !m->slots[slot].word);
	m->sequence++;
	m->slots[slot].word = word;
	m->nr++;
	kv_store_relaxed64(&shared->slots[slot].tag, tag);
	kv_store_release64(&shared->slots[slot].word, word);
}

bool kvd_mag_popped(const struct kvd_magazine *m, struct kv_magazine *shared, u32 slot)
{
	return kv_load_acquire64(&shared->slots[slot].word) != m->slots[slot].word;
}

bool kvd_mag_recall(struct kvd_magazine *m, struct kv_magazine *shared, u32 slot)
{
	u64 word = m->slots[slot].word;

	kv_assert(word);
	if (!kv_cas64(&shared->slots[slot].word, word, 0) && !KV_MUTANT(mag_private))
		return false;
	kvd_mag_clear(m, slot);
	return true;
}

void kvd_mag_clear(struct kvd_magazine *m, u32 slot)
{
	kv_assert(m->slots[slot].word && m->nr > 0);
	m->slots[slot].word = 0;
	m->nr--;
}
