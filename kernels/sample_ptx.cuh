/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_ptx.cuh - the halves of a cluster's barrier as sample_wide.cu has them: what is handed over
 * is fenced by one thread. Device code only.
 */
#ifndef KVK_SAMPLE_PTX_CUH
#define KVK_SAMPLE_PTX_CUH

#include "kernels/tile_ptx.cuh"

/* Hands nothing over but behind sample_cluster_fence(). */
KVK_DEV void sample_cluster_arrive(void)
{
	SM90_ASM("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/* This thread's stores, and those it knows of, before its next arrival. */
KVK_DEV void sample_cluster_fence(void)
{
	SM90_ASM("fence.acq_rel.cluster;" ::: "memory");
}

#endif /* KVK_SAMPLE_PTX_CUH */
