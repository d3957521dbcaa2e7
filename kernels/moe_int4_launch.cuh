/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_launch.cuh - launch one variant of the kernel; included once per group size.
 */
#ifndef KVK_MOE_INT4_LAUNCH_CUH
#define KVK_MOE_INT4_LAUNCH_CUH

#include <errno.h>
#include "moe_int4_use.cuh"

template <int NTMAX, int WK, int G>
static int i4_launch(struct moe_i4 *k, cudaStream_t stream)
{
	using S = moe_shape<NTMAX, WK, G>;
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};
	int dev, sms;

	if (cudaGetDevice(&dev) ||
	    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev) ||
	    cudaFuncSetAttribute(moe_i4_kernel<NTMAX, WK, G>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize, S::DYNAMIC))
		return -EIO;
	k->w13.rblocks = (k->w13.mtiles + S::WM - 1) / S::WM;
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = dim3(sms);
	cfg.blockDim = dim3(MOE_THREADS);
	cfg.dynamicSmemBytes = S::DYNAMIC;
	cfg.stream = stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	return cudaLaunchKernelEx(&cfg, moe_i4_kernel<NTMAX, WK, G>, *k) ? -EIO : 0;
}

template <int G>
static int i4_launch_group(struct moe_i4 *k, const struct i4_variant *v,
			   cudaStream_t stream)
{
	if (v->wk == 2)
		return i4_launch<1, 2, G>(k, stream);
	if (v->ntmax == 1)
		return i4_launch<1, 1, G>(k, stream);
	if (v->ntmax == 2)
		return i4_launch<2, 1, G>(k, stream);
	return i4_launch<4, 1, G>(k, stream);
}

#endif /* KVK_MOE_INT4_LAUNCH_CUH */
