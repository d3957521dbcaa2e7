/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_wide.cu - next token of each row on Hopper: a cluster of up to eight CTAs per row. Logits
 * come from memory once and stay in shared memory; of many long rows, each of which has a pair of
 * SMs, two fifths stay in the L2 cache. Ids are those of sample.cu's kernel.
 *
 * A warp has a run of ids of its own, so that sums by warp are sums by id. Masses are whole numbers
 * (sample.cu), which may be added in any order. What the CTAs find they read out of each other's
 * shared memory behind a barrier of the cluster:
 *
 *	1. largest logit
 *	2. sum of all masses, and how many logits lie in each of 1,024 bins that get less likely
 *	   by 1 % or so a bin, up to where all that is left cannot be what top-p leaves out. The
 *	   counts tell in which few bins the logit most probably is at which top-p cuts: the
 *	   bracket
 *	3. the exact mass above the bracket, by warp, and in it, which says whether the cut is
 *	   there (if not, everything is the bracket); the logits inside are listed with their ids
 *	4. the cut itself, by each CTA of all lists: the bracket's range of keys in 256 parts, the
 *	   part with the cut in 256 again, at most four times. More keys than threads: by all CTAs,
 *	   each of its own logits
 *	5. kept mass and logits at the cut of every warp, by each CTA of all lists as well: the
 *	   draw's warp, and there its id
 *
 * What costs is instructions: 32 warps on an SM execute all of it, so what one warp or one lane can
 * do for all is done there.
 */
#include "kernels/moe_ptx.cuh"
#include "kernels/sample_cut.cuh"

/* ------------------------------------------------------------------------ 1. load; the largest */

/* The best of a thread's logits so far, its smallest id; NaN. */
struct wide_seen {
	float top;
	u32 id;
	int bad;
};

/* N steps from @first on, all on their way at once, to shared memory, and the best of them. */
template <u32 W, u32 N>
KVK_DEV void wide_load_steps(const struct wide_row &row, u32 first,
			     struct wide_seen &seen)
{
	float4 v[N];

#pragma unroll
	for (u32 k = 0; k < N; k++)
		v[k] = wide_step(row, first + k, W == WIDE_BIG && first + k >= row.here);
#pragma unroll
	for (u32 k = 0; k < N; k++) {
		const u32 s = first + k, at = row.id + s * WIDE_STEP;

		if (s >= row.steps)
			break;
		if (W < WIDE_BIG || s < row.here)
			*(float4 *)(row.logits + s * WIDE_STEP) = v[k];
		seen.bad |= v[k].x != v[k].x || v[k].y != v[k].y || v[k].z != v[k].z ||
			    v[k].w != v[k].w;
		/* ids ascend; behind the row's end lies -INFINITY */
		if (v[k].x > seen.top)
			seen.top = v[k].x, seen.id = at;
		if (v[k].y > seen.top)
			seen.top = v[k].y, seen.id = at + 1;
		if (v[k].z > seen.top)
			seen.top = v[k].z, seen.id = at + 2;
		if (v[k].w > seen.top)
			seen.top = v[k].w, seen.id = at + 3;
	}
}

/* The CTA's part of the row to shared memory, and the best of it. ret->bad: a NaN is there. */
template <u32 W>
KVK_DEV void wide_load(struct wide_shared<W> &sh, struct wide_row &row,
		       struct wide_best *ret)
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	struct wide_seen seen = {-INFINITY, ~0u, 0};

	if (W < WIDE_BIG && row.steps > WIDE_ILP)
		for (u32 first = 0; first < row.steps; first += 2 * WIDE_ILP)
			wide_load_steps<W, 2 * WIDE_ILP>(row, first, seen);
	else
		for (u32 first = 0; first < row.steps; first += WIDE_ILP)
			wide_load_steps<W, WIDE_ILP>(row, first, seen);

	float top = seen.top;
	u32 id = seen.id;

	row.top = top;
	wide_warp_best(top, id);
	if (lane == 0) {
		sh.w32[0][warp] = top;
		sh.wid[warp] = id;
	}
	ret->bad = __syncthreads_or(seen.bad) != 0;
	ret->top = lane < W ? sh.w32[0][lane] : -INFINITY;
	ret->id = lane < W ? sh.wid[lane] : ~0u;
	wide_warp_best(ret->top, ret->id);
}

/* Mass of what is the largest in each thread, in parts of the CTA's largest; in warp 0. */
template <u32 W>
KVK_DEV float wide_some_mass(struct wide_shared<W> &sh, const struct wide_row &row,
			     float top)
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	const float e = row.top < top ? arch_exp2((row.top - top) * row.scale) : 1.0f;
	const float sum = dev_warp_sum(e);

	if (lane == 0)
		sh.w32[1][warp] = sum;
	__syncthreads();
	return warp ? 0 : dev_warp_sum(lane < W ? sh.w32[1][lane] : 0.0f);
}

/* What all CTAs found: row.max, its id, whether the row has a NaN; row.some. */
template <u32 W>
KVK_DEV void wide_all_best(struct wide_shared<W> &sh, struct wide_row &row,
			   struct wide_best *b)
{
	const u32 c = threadIdx.x % WIDE_CTAS;
	const bool there = c < row.ctas;
	float top;

	if (threadIdx.x == 0)
		sh.part.best = *b;
	wide_share();
	b->id = there ? tile_cluster_get32(&sh.part.best.id, c) : ~0u;
	top = there ? kvk_bits_f32(tile_cluster_get32(&sh.part.best.top, c)) : -INFINITY;
	b->bad = __ballot_sync(~0u, wide_get_all32(&sh.part.best.bad, row.ctas));
	row.max = top;
	wide_warp_best(row.max, b->id);
	b->id = b->id < row.vocab ? b->id : 0;
	if (row.vocab < WIDE_LONG)
		return;
	row.some = kvk_bits_f32(wide_get_all32((const u32 *)&sh.part.best.sum, row.ctas));
	row.some *= top < row.max ? arch_exp2((top - row.max) * row.scale) : 1.0f;
#pragma unroll
	for (int o = WIDE_CTAS / 2; o; o >>= 1)
		row.some += __shfl_xor_sync(~0u, row.some, o);
}

/* Sum of exp(logit - max), always in the same order; thread 0's is whole. */
template <u32 W>
KVK_DEV double wide_exp_sum(struct wide_shared<W> &sh, const struct wide_row &row)
{
	float sum = 0;
	double all = 0;

	wide_each<W>(row, [&](float4 v) {
		sum += expf(v.x - row.max);
		sum += expf(v.y - row.max);
		sum += expf(v.z - row.max);
		sum += expf(v.w - row.max);
	});
	sum = dev_warp_sum(sum);
	if (threadIdx.x % 32 == 0)
		sh.w32[1][threadIdx.x / 32] = sum;
	__syncthreads();
	if (threadIdx.x == 0) {
		sum = 0;
		for (u32 w = 0; w < W; w++)
			sum += sh.w32[1][w];
		sh.part.sum = sum;
	}
	wide_share();
	for (u32 c = 0; c < row.ctas; c++)
		all += (double)kvk_bits_f32(tile_cluster_get32(&sh.part.sum, c));
	return all;
}

/* -------------------------------------------------------------------------------- 5. the draw */

/* Sum of @v over the lanes before this one. */
template <class T> KVK_DEV T wide_before(T v)
{
	T sum = v;

	for (u32 d = 1; d < 32; d <<= 1) {
		const T w = __shfl_up_sync(~0u, sum, d);

		if (threadIdx.x % 32 >= d)
			sum += w;
	}
	return sum - v;
}

/*
 * sh.place: the run in which the draw's target lies, of what sh.all_mass and all_cut say. @cut.want
 * 0: everything is kept, and nothing is at the cut.
 */
template <u32 W>
KVK_DEV void wide_find(struct wide_shared<W> &sh, const struct wide_cut &cut, u64 total,
		       u64 one, u64 seed)
{
	const u32 t = threadIdx.x;
	u64 mass[4], nr = 0, own = 0, before;
	u32 take[4], cuts = 0, at, over;

	__syncthreads();
	if (t < 32) {
		for (u32 i = 0; i < 4; i++)
			cuts += sh.all_cut[t * 4 + i];
		at = wide_before(cuts);
		nr = dev_warp_sum(cuts);
		if (one && cut.want <= cut.above)
			nr = 1;
		else if (one && nr > 1) /* seldom: a division of 64 bits is long */
			nr = min(nr, (cut.want - cut.above + one - 1) / one);
		if (cut.want)
			total = cut.above + one * nr;
		for (u32 i = 0; i < 4; i++) {
			take[i] = (u32)min(nr - min(nr, (u64)at),
					   (u64)sh.all_cut[t * 4 + i]);
			at += sh.all_cut[t * 4 + i];
			mass[i] = sh.all_mass[t * 4 + i] + one * take[i];
			own += mass[i];
		}
		before = wide_before(own);
		/* 53 bits of the seed, as a part of the whole */
		const u64 target = __umul64hi(seed >> 11 << 11, total);

		over = __ballot_sync(~0u, before + own > target);
		if (t == (over ? (u32)__ffs((int)over) - 1 : 0u)) {
			u32 i = 0;

			while (i < 3 && before + mass[i] <= target)
				before += mass[i++];
			sh.place.target = target - before;
			sh.place.quota = take[i];
			sh.place.run = t * 4 + i;
		}
	}
	__syncthreads();
}

/* Mass above the cut and the number at the cut of four logits from @id on. */
KVK_DEV u64 wide_four(const struct wide_row &row, float4 four, u32 id, u32 cut, bool all,
		      u64 (&mass)[4], bool (&at_cut)[4])
{
	const float v[4] = {four.x, four.y, four.z, four.w};
	u64 sum = 0;

#pragma unroll
	for (u32 e = 0; e < 4; e++) {
		const u32 key = sample_key(v[e]);

		at_cut[e] = !all && id + e < row.vocab && key == cut;
		mass[e] = id + e < row.vocab && (all || key > cut) ? wide_mass(row, v[e])
								   : 0;
		sum += mass[e];
	}
	return sum;
}

/* The id, by the CTA that has the run: a warp for each of its steps. @src: the row */
template <u32 W>
KVK_DEV u32 wide_walk(struct wide_shared<W> &sh, const struct wide_row &row,
		      struct wide_place at, const float *slice, const float *src, u32 cut,
		      u64 one, bool all)
{
	const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	const u32 id0 = at.run * row.steps * WIDE_STEP;
	const u32 id = id0 + warp * WIDE_STEP + lane * 4;
	const u32 near = (at.run % W * row.here + warp) * WIDE_STEP + lane * 4;
	u64 mass[4], sum = 0, target = at.target;
	bool at_cut[4] = {};
	u32 cuts = 0, quota = at.quota, s = 0;

	if (warp < row.steps) {
		const float4 four = W < WIDE_BIG || warp < row.here
					    ? *(const float4 *)(slice + near)
					    : wide_fetch(row, src + id, id, true);

		sum = wide_four(row, four, id, cut, all, mass, at_cut);
		for (u32 e = 0; e < 4; e++)
			cuts += at_cut[e];
		const u64 step_mass = dev_warp_sum(sum);
		const u32 step_cut = dev_warp_sum(cuts);

		if (lane == 0) {
			sh.step_mass[warp] = step_mass;
			sh.step_cut[warp] = step_cut;
		}
	}
	if (threadIdx.x == 0)
		sh.chosen = 0;
	__syncthreads();
	for (; s + 1 < row.steps; s++) {
		const u32 take = min(quota, sh.step_cut[s]);
		const u64 here = sh.step_mass[s] + one * take;

		if (target < here)
			break;
		target -= here;
		quota -= take;
	}
	if (warp == s) {
		u32 used = wide_before(cuts);
		u64 before = wide_before(sum) + one * min(quota, used);
		u32 found = 0;

		/* the last one kept, should rounding have left nothing behind the target */
		for (u32 e = 0; e < 4; e++) {
			const bool keep = at_cut[e] && used < quota;
			const u64 v = keep ? one : mass[e];

			used += at_cut[e];
			if (v && before <= target)
				found = id + e + 1;
			before += v;
		}
		found = dev_warp_max(found);
		if (lane == 0)
			sh.chosen = found ? found - 1 : id0;
	}
	__syncthreads();
	return sh.chosen;
}

/* Finds cut and draw. Return: the id, in the CTA that has it; ~0u. Behind sample_cluster_arrive(). */
template <u32 W>
KVK_DEV u32 wide_draw(struct wide_shared<W> &sh, const struct wide_row &row, float top_p,
		      u64 seed, const float *slice, const float *src)
{
	const u32 rank = blockIdx.x % row.ctas;
	const bool all = !(top_p < 1.0f);
	struct wide_cut cut = {};
	struct wide_entries<W> mine = {
	};
	u64 total = wide_total(sh, row, top_p), one = 0;
	u32 first, last;

	if (!all) {
		cut.want = (u64)ceil((double)top_p * (double)total);
		wide_bracket(sh, row, cut.want);
		first = sh.first;
		last = sh.last;
#pragma unroll 1
		while (!wide_enter(sh, row, cut, first, last) && (first || ~last)) {
			wide_share(); /* the first try's words have been read */
			first = 0;
			last = ~0u; /* everything */
		}
	}
	wide_get_runs(sh, row, false);
	if (!all) {
		const bool listed = wide_narrow_list(sh, row, cut, mine);

		if (!listed)
			wide_narrow(sh, row, cut);
		one = wide_mass(row, sample_logit(cut.lo));
		if (listed)
			wide_add_listed(sh, row, cut, mine);
		else
			wide_recount(sh, row, cut);
	}
	wide_find(sh, cut, total, one, seed);
	sample_cluster_arrive();
	if (sh.place.run / W != rank)
		return ~0u;
	return wide_walk(sh, row, sh.place, slice, src, cut.lo, one, all);
}

/* ---------------------------------------------------------------------------------- greedy rows */

/* Sum of exp(logit - @top) over the CTA's logits, in warp 0. */
template <u32 W>
KVK_DEV float wide_cta_sum(struct wide_shared<W> &sh, const struct wide_row &row,
			   float top)
{
	float sum = 0;

	/* where nothing is finite there is nothing to add */
	wide_each<W>(row, [&](float4 v) {
		sum += expf(v.x - top);
		sum += expf(v.y - top);
		sum += expf(v.z - top);
		sum += expf(v.w - top);
	});
	sum = dev_warp_sum(sum);
	if (threadIdx.x % 32 == 0)
		sh.w32[1][threadIdx.x / 32] = sum;
	__syncthreads();
	return dev_warp_sum(threadIdx.x < W ? sh.w32[1][threadIdx.x] : 0.0f);
}

/*
 * The largest logit's id, in one exchange: each CTA puts what it found into the first one's shared
 * memory and leaves. Behind sample_cluster_arrive() of all threads.
 */
template <u32 W>
KVK_DEV void wide_greedy(const struct wide_params &p, struct wide_shared<W> &sh,
			 struct wide_row &row, struct wide_best b)
{
	const struct kvk_sample_args &a = p.s.a;
	const u32 r = blockIdx.x / p.ctas, rank = blockIdx.x % p.ctas;
	const u32 lane = threadIdx.x;

	b.sum = 0;
	if (a.ret_logprob && b.top > -INFINITY)
		b.sum = wide_cta_sum(sh, row, b.top);
	tile_cluster_wait(); /* the first CTA has begun */
	if (threadIdx.x == 0) {
		tile_cluster_put(&sh.best[rank], 0,
				 make_uint4(kvk_f32_bits(b.top), b.id, b.bad,
					    kvk_f32_bits(b.sum)));
		sample_cluster_fence();
	}
	__syncwarp();
	sample_cluster_arrive();
	if (rank)
		return;
	tile_cluster_wait();
	if (threadIdx.x >= 32)
		return;
	b.top = lane < p.ctas ? sh.best[lane].top : -INFINITY;
	b.id = lane < p.ctas ? sh.best[lane].id : ~0u;
	b.bad = __ballot_sync(~0u, lane < p.ctas && sh.best[lane].bad);
	row.max = b.top;
	wide_warp_best(row.max, b.id);
	b.sum = lane < p.ctas && b.top > -INFINITY
			? sh.best[lane].sum * expf(b.top - row.max)
			: 0.0f;
	b.sum = dev_warp_sum(b.sum);
	if (lane)
		return;
	a.ret_ids[r] =
		(b.bad && !(p.s.off & SAMPLE_NO_NAN)) || b.id >= row.vocab ? 0 : b.id;
	if (a.ret_logprob)
		a.ret_logprob[r] = b.bad ? kvk_bits_f32(0x7fc00000u)
					 : row.max - row.max - logf(b.sum);
}

/* ------------------------------------------------------------------------------------ kernel */

/* What this thread has of which row; the row itself may not be there yet. */
template <u32 W>
KVK_DEV struct wide_row wide_row_make(const struct wide_params &p, float *slice)
{
	const u32 warp = threadIdx.x / 32, at = threadIdx.x % 32 * 4;
	struct wide_row row = {};

	row.vocab = p.s.a.vocab;
	row.ctas = p.ctas;
	row.steps = p.steps;
	row.here = p.here;
	row.vec = p.s.vec;
	row.logits = slice + warp * p.here * WIDE_STEP + at;
	row.id = (blockIdx.x % p.ctas * W + warp) * p.steps * WIDE_STEP + at;
	row.far = p.s.a.logits + (size_t)(blockIdx.x / p.ctas) * row.vocab + row.id;
	return row;
}

template <u32 W>
__global__ void __launch_bounds__(W * 32, 32 / W)
	sample_wide_kernel(const __grid_constant__ struct wide_params p)
{
	DEV_DYNAMIC_SHARED(wide_smem);
	struct wide_shared<W> &sh = *(struct wide_shared<W> *)wide_smem;
	float *slice = (float *)(wide_smem + sizeof(struct wide_shared<W>));
	const struct kvk_sample_args &a = p.s.a;
	const u32 r = blockIdx.x / p.ctas;
	const float *src = a.logits + (size_t)r * a.vocab;
	struct wide_row row = wide_row_make<W>(p, slice);
	struct wide_best best = {};
	bool mine_to_tell = blockIdx.x % p.ctas == 0, draws = false;
	float top_p;
	double sum = 0;
	u32 id;

	sample_cluster_arrive();
	ptx_grid_launch();
	ptx_grid_wait();
	row.temperature = a.temperature[r];
	top_p = a.top_p[r];
	wide_load(sh, row, &best);
	if (!(row.temperature > 0 && top_p > 0)) {
		wide_greedy(p, sh, row, best);
		return;
	}
	row.scale = sample_scale(row.temperature);
	if (row.vocab >= WIDE_LONG)
		best.sum = wide_some_mass(sh, row, best.top);
	tile_cluster_wait();
	wide_all_best(sh, row, &best);
	row.unit = (float)(1ull << p.s.mass_bits);
	row.small = (float)(1u << 23) / row.unit;
	row.shift = p.s.mass_bits - 22;
	wide_bins(row, top_p);
	id = best.id;
	/* an infinite maximum leaves nothing to draw from */
	if (best.bad && !(p.s.off & SAMPLE_NO_NAN)) {
		id = 0;
	} else if (kvk_absf(row.max) < INFINITY) {
		draws = true;
	}
	if (draws) {
		id = wide_draw(sh, row, top_p, a.seeds[r], slice, src);
		mine_to_tell = id != ~0u;
	} else {
		sample_cluster_arrive();
	}
	if (a.ret_logprob) {
		tile_cluster_wait(); /* sh.w32 and the words before have been read */
		sum = wide_exp_sum(sh, row);
		sample_cluster_arrive();
	}
	if (threadIdx.x == 0 && mine_to_tell) {
		a.ret_ids[r] = id;
		if (a.ret_logprob)
			a.ret_logprob[r] = best.bad ? kvk_bits_f32(0x7fc00000u)
						    : (float)((double)src[id] -
							      (double)row.max - log(sum));
	}
	tile_cluster_wait(); /* nobody leaves while its memory is read */
}

template <u32 W> static int wide_launch(const struct wide_params &p, kvk_stream stream)
{
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};

	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	attr[1].id = cudaLaunchAttributeClusterDimension;
	attr[1].val.clusterDim.x = p.ctas;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg.gridDim = dim3(p.s.a.nr_rows * p.ctas);
	cfg.blockDim = dim3(W * 32);
	cfg.dynamicSmemBytes =
		sizeof(struct wide_shared<W>) + (size_t)p.here * W * WIDE_STEP * 4;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 2;
	if (cudaFuncSetAttribute((const void *)sample_wide_kernel<W>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)cfg.dynamicSmemBytes) != cudaSuccess) {
		(void)cudaGetLastError();
		return -ENOSPC;
	}
	return cudaLaunchKernelEx(&cfg, sample_wide_kernel<W>, p) ? -EIO : 0;
}

/* Steps of a warp. */
static u32 wide_steps(u32 vocab, u32 warps)
{
	return (vocab - 1) / (warps * WIDE_STEP) + 1;
}

int kvk_sample_wide(const struct sample_params *s, kvk_stream stream)
{
	struct wide_params p = {*s, 1, 0, 0};
	int dev, major;
	u32 big;

	if (cudaGetDevice(&dev) != cudaSuccess ||
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev) !=
		    cudaSuccess)
		return -EIO;
	/* as many as the SMs hold at once, but for rows that need more memory than that */
	while (p.ctas < WIDE_CTAS && (s->a.vocab > p.ctas * WIDE_MOST ||
				      (s->a.vocab > p.ctas * WIDE_FEW &&
				       s->a.nr_rows * p.ctas * 2 <= WIDE_AT_ONCE)))
		p.ctas *= 2;
	p.steps = p.here = wide_steps(s->a.vocab, p.ctas * 16);
	big = wide_steps(s->a.vocab, 2 * 32);
	if (major != 9 || p.steps > WIDE_STEPS || s->a.nr_rows > INT32_MAX / WIDE_CTAS)
		return -ENOSPC;
	/* many long rows: pairs of whole SMs, all of which find room at once */
	if (s->a.nr_rows * p.ctas <= WIDE_AT_ONCE || p.ctas < WIDE_CTAS ||
	    big > WIDE_BIG_STEPS)
		return wide_launch<16>(p, stream);
	p.ctas = 2;
	p.steps = big;
	p.here = big <= WIDE_BIG_HERE ? big : WIDE_BIG_PART;
	return wide_launch<32>(p, stream);
}
