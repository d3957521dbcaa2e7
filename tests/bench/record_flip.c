/* SPDX-License-Identifier: Apache-2.0 */
/* record_flip.c - see record_flip.h. */
#include "tests/bench/record_flip.h"

#include <stddef.h>

#include "kvmd/mm/pool.h"

size_t kvb_record_at(u32 pfn, size_t *ret_checked)
{
	*ret_checked = offsetof(struct kvd_frame, check);
	return KVD_FRAMES_OFF + (size_t)pfn * sizeof(struct kvd_frame);
}
