/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_work.h - work that the safety commands give a GPU: stores that go on for seconds, and
 * steps that do nothing but read.
 *
 * Without CUDA all of it answers -ENOSYS. Common results: 0; -EIO the device failed.
 */
#ifndef KVB_GPU_WORK_H
#define KVB_GPU_WORK_H

#include "base/util.h"
#include "engine/run/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

/** kvb_gpu_share() - let the GPU write to host memory that other processes map as well */
int kvb_gpu_share(void *host, size_t bytes, void **ret_dev);

/**
 * kvb_gpu_store() - a kernel that stores until @ns have passed
 * @page: device address; counts up
 * @counter: of kvb_gpu_share(); counts up behind @page
 */
int kvb_gpu_store(struct eng_mem *m, u64 *page, u64 *counter, u64 ns);

/** struct kvb_gpu_copies - where kvb_gpu_copies() copies to, again and again */
struct kvb_gpu_copies {
	void *const *pages; /* device addresses */
	u32 nr_pages;
	size_t page_bytes;
	u64 *counter; /* host memory of kvb_gpu_share(), by its host address */
	u64 step;
};

/**
 * kvb_gpu_copies() - one round queued on m->stream: all pages from pinned host memory, then the
 * counter from device memory, by the copy engines alone
 *
 * Waits while a hundred rounds and more are on their way. A process calls it from one thread.
 */
int kvb_gpu_copies(struct eng_mem *m, struct kvb_gpu_copies *c);

/**
 * kvb_gpu_read() - read @bytes once, as fast as the memory gives them
 * @sink: device address, one u64; its value is meaningless
 */
int kvb_gpu_read(struct eng_mem *m, const void *from, size_t bytes, u64 *sink);

#ifdef __cplusplus
}
#endif
#endif
