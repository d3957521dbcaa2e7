/* SPDX-License-Identifier: Apache-2.0 */
/* record_flip.h - where kvbench soak flips a bit: it may not look into kvmd's headers itself. */
#ifndef TESTS_BENCH_RECORD_FLIP_H
#define TESTS_BENCH_RECORD_FLIP_H

#include "base/util.h"

/** kvb_record_at() - offset of a page's record in kvmd-frames; @ret_checked: bytes of it that
 * its check word covers */
size_t kvb_record_at(u32 pfn, size_t *ret_checked);

#endif
