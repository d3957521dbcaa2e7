/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier/crc.h - CRC-32C as kernels/page_move computes it when a page is sealed.
 *
 * Pure; any thread. Pages are only ever digested by worker threads (work.h), headers and
 * journal records of some hundred bytes also by the loop thread.
 */
#ifndef KVD_TIER_CRC_H
#define KVD_TIER_CRC_H

#include <stddef.h>

#include "base/util.h"

/** kvd_crc32c() - CRC-32C (Castagnoli, reflected, all ones before and after) of @n bytes */
u32 kvd_crc32c(const void *data, size_t n);

/** kvd_crc32c_portable() - the same without the CPU's instruction: its reference */
u32 kvd_crc32c_portable(const void *data, size_t n);

#endif
