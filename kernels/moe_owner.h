/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_owner.h - static device memory for workspaces: counters and packets that must be zero between
 * launches cannot lie in a workspace, which comes with any bytes. Two launches that share a workspace
 * cannot overlap, so each workspace may have a block of its own. C++, host only, any thread.
 */
#ifndef KVK_MOE_OWNER_H
#define KVK_MOE_OWNER_H

#include <stdint.h>
#include <mutex>

#include <cuda_runtime.h>

/* Workspaces that were seen, for each device. They are never forgotten: memory at the same address
 * takes up the same block. */
template <uint32_t N> struct moe_owners {
	std::mutex lock;
	struct {
		const void *workspace;
		int device;
	} known[N];
	uint32_t nr;
};

/*
 * Block of @workspace on the current device, 0 .. N - 1; -1: N others are known already, or no
 * device.
 */
template <uint32_t N> int moe_owner(struct moe_owners<N> *o, const void *workspace)
{
	const std::lock_guard<std::mutex> guard(o->lock);
	uint32_t i;
	int dev;

	if (cudaGetDevice(&dev))
		return -1;
	for (i = 0; i < o->nr; i++)
		if (o->known[i].workspace == workspace && o->known[i].device == dev)
			return (int)i;
	if (i == N)
		return -1;
	o->known[i].workspace = workspace;
	o->known[i].device = dev;
	o->nr++;
	return (int)i;
}

#endif /* KVK_MOE_OWNER_H */
