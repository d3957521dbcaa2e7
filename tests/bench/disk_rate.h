/* SPDX-License-Identifier: Apache-2.0 */
/* disk_rate.h - what a disk does alone: O_DIRECT transfers of one size, io_uring. */
#ifndef TESTS_BENCH_DISK_RATE_H
#define TESTS_BENCH_DISK_RATE_H

#include <stdbool.h>

#include "base/util.h"

/**
 * struct disk_rate - a pass over a file
 * @nr: transfers; @depth: of them under way
 * @bytes: of each, a multiple of 4 KiB
 * @per_group, @group_bytes: @per_group lie side by side, groups @group_bytes apart
 */
struct disk_rate {
	u32 nr;
	u32 depth;
	u32 bytes;
	u32 per_group;
	u64 group_bytes;
	bool write;
};

/** disk_rate() - GB/s, the better of a pass in order and one in no order. Return: 0; -errno */
int disk_rate(const char *path, const struct disk_rate *d, double *ret_gb_s);

#endif
