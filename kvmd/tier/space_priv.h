/* SPDX-License-Identifier: Apache-2.0 */
/* tier/space_priv.h - shared by space.c and room.c only. Loop thread. */
#ifndef KVD_TIER_SPACE_PRIV_H
#define KVD_TIER_SPACE_PRIV_H

#include "kvmd/tier/space.h"

#define KVD_SLOT_LIST_EMPTY ((struct kvd_slot_list){KVD_SLOT_NONE, KVD_SLOT_NONE, 0})

/** kvd_space_list_push(), kvd_space_list_pull() - LRU and free lists */
void kvd_space_list_push(struct kvd_space *sp, struct kvd_slot_list *l, u32 id,
			 bool tail);
void kvd_space_list_pull(struct kvd_space *sp, struct kvd_slot_list *l, u32 id);

struct kvd_space_class *kvd_space_class_of(const struct kvd_space *sp, u32 id);
struct kvd_segment *kvd_space_segment_of(const struct kvd_space *sp, u32 id);

/** kvd_space_index_add() - the slot is found by @name from now on */
void kvd_space_index_add(struct kvd_space *sp, u32 id, const struct kvd_slot_name *name);

/** kvd_space_slot_busy() - it keeps its segment from being given to another size */
void kvd_space_slot_busy(struct kvd_space *sp, u32 id, bool busy);

#endif
