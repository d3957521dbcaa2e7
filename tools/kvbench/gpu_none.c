/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_none.c - gpu_work.h of a build without CUDA. */
#include "gpu_work.h"

#include <errno.h>

int kvb_gpu_share(void *host, size_t bytes, void **ret_dev)
{
	return -ENOSYS;
}

int kvb_gpu_store(struct eng_mem *m, u64 *page, u64 *counter, u64 ns)
{
	return -ENOSYS;
}

int kvb_gpu_copies(struct eng_mem *m, struct kvb_gpu_copies *c)
{
	return -ENOSYS;
}

int kvb_gpu_read(struct eng_mem *m, const void *from, size_t bytes, u64 *sink)
{
	return -ENOSYS;
}
