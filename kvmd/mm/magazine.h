/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/magazine.h - stocked pages in a session page: stock, recall, recognise (design
 * section 4).
 *
 * kvmd keeps a private shadow of every word it stored. The shared word is hostile: it is
 * compared with the shadow and swapped, never believed. Word gone = the session has the
 * page. Pop (client, kv_mag_pop()) and recall (kvmd) are one compare-and-swap: whoever
 * wins has the page.
 */
#ifndef KVD_MAGAZINE_H
#define KVD_MAGAZINE_H

#include "kvmd/mm/page.h"

/**
 * struct kvd_mag_shadow - what kvmd put into a slot
 * @word: as stored; 0 = kvmd put nothing there, or the pop was recognised
 */
struct kvd_mag_shadow {
	u64 word;
};

/**
 * struct kvd_magazine - one magazine of a session, kvmd's side
 * @pool: pool its pages are of; NULL = never stocked
 * @sequence: of the next word
 * @nr: slots with a shadow word
 * @slots: shadows
 */
struct kvd_magazine {
	struct kvd_pool *pool;
	u32 sequence;
	u32 nr;
	struct kvd_mag_shadow slots[KV_MAGAZINE_SLOTS];
};

/**
 * kvd_mag_put() - store a page into an empty slot
 * @slot: its shadow is 0 and its shared word was read as 0
 * @tag: the page's tag word, stored before the word that hands the page out
 */
void kvd_mag_put(struct kvd_magazine *m, struct kv_magazine *shared, u32 slot, u32 pfn,
		 u64 tag, bool dirty);

/** kvd_mag_popped() - is the page of this shadow in the session's hands? */
bool kvd_mag_popped(const struct kvd_magazine *m, struct kv_magazine *shared, u32 slot);

/**
 * kvd_mag_recall() - take the page of a slot back
 *
 * Return: true: kvmd has the page and the shadow is cleared; false: the session popped
 * it.
 */
bool kvd_mag_recall(struct kvd_magazine *m, struct kv_magazine *shared, u32 slot);

/** kvd_mag_clear() - forget a slot: its page was popped */
void kvd_mag_clear(struct kvd_magazine *m, u32 slot);

#endif /* KVD_MAGAZINE_H */
