/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_ref.cc - the float64 reference of kvbench-kernels' lines of experts, on the CPU for moe.c.
 */
#include "ptx.h"
#include "tests/bench/kernels_moe_ref.cuh"
#include <vector>

/* y of all tokens, [token][hidden]; no id is out of range */
extern "C" void hopper_bench_ref(const struct kvk_moe_args *a, double *y)
{
	const size_t slots = (size_t)a->nr_tokens * a->top_k;
	std::vector<double> h(slots * a->experts.inter);
	std::vector<uint32_t> all(a->nr_tokens);
	struct kvb_moe d = {};

	for (uint32_t i = 0; i < a->nr_tokens; i++)
		all[i] = i;
	d.e = a->experts;
	d.w13 = (uint8_t *)a->experts.w13;
	d.w2 = (uint8_t *)a->experts.w2;
	d.x = (uint16_t *)a->x;
	d.ids = (uint32_t *)a->ids;
	d.weights = (float *)a->weights;
	d.nr_tokens = a->nr_tokens;
	d.top_k = a->top_k;
	d.sample = all.data();
	d.h = h.data();
	d.ref = y;
	hopper_launch(dim3(d.e.inter / 8, (unsigned)slots), 256, [d] { ref_first(d); });
	hopper_launch(dim3(d.e.hidden / 8, d.nr_tokens), 256, [d] { ref_second(d); });
}
