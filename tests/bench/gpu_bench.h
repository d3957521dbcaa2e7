/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_bench.h - timing of kernels on one GPU, the way docs/performance.md states it.
 *
 * A case is timed as a CUDA graph of nr_calls calls (at least 8) that rotate over data
 * sets of more than 600 MB together, replayed KVB_REPLAYS times; the row holds the median
 * replay divided by the calls. A read-ceiling line is measured first, in the same
 * process, and the row's fraction is useful bytes over time over that ceiling. Rows go to
 * one list that is printed as a table or as JSON. One thread, one GPU, everything on
 * ctx->stream.
 */
#ifndef KVB_GPU_BENCH_H
#define KVB_GPU_BENCH_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVB_REPLAYS	   15
#define KVB_ROTATE	   (640ull << 20) /* bytes that the calls of a graph touch at least */
#define KVB_ROWS_MAX	   512
#define KVB_NAME_MAX	   48
/* Read ceiling of the card that the stored targets are for, bytes per second. */
#define KVB_TARGET_CEILING 4.66e12
#define KVB_FLOPS	   790e12 /* 16-bit products, also of the targets */
#define KVB_AT_LOADS	   1.03
#define KVB_SLOW	   0.93

/**
 * struct kvb_row - one measured line
 * @family, @name, @shape: "attn", "gqa fp8 96/8", "64 x 9k"
 * @us: median time of a call
 * @us_min, @us_max: fastest and slowest replay, per call
 * @bytes: useful bytes of a call; 0 = no byte floor
 * @flops: useful floating-point operations; 0 = no arithmetic floor
 * @err: |out - ref| / |ref| against float64; < 0 = not checked in this run
 * @mhz: the SM clock right after the last replay
 * @rested_us: where that is less than KVB_SLOW of the clock after kvb_init(), which is the power
 *	limit's doing: the same, but each replay begins when the clock is back; 0 = not so
 * @loads_us: the same kernel in the same run without its arithmetic; 0 = not timed
 * @floor_us, @peer_us, @ours_us: stored figures (targets); 0 = none. A line is judged by
 *	ours_us * KVB_TARGET_CEILING over the run's own ceiling, never by less than ours_us:
 *	"reached", or "at its loads" (no more than KVB_AT_LOADS of loads_us), or "open"
 * @products: ours_us is bound by products, not by bytes, so a slower memory is no excuse: a line is
 *	judged by ours_us itself
 */
struct kvb_row {
	char family[16];
	char name[KVB_NAME_MAX];
	char shape[KVB_NAME_MAX];
	double us;
	double us_min;
	double us_max;
	double bytes;
	double flops;
	double err;
	double mhz;
	double rested_us;
	double loads_us;
	double floor_us;
	double peer_us;
	double ours_us;
	bool products;
};

/**
 * struct kvb_ctx - one run
 * @stream: everything runs here
 * @filter: substring of a row's name or shape that selects it; NULL = all
 * @quick: fewer replays and shapes (used while tuning)
 * @replays: of the next lines; 0 = KVB_REPLAYS, or 7 if @quick
 * @check: also compare with the float64 reference
 * @ceiling: measured read rate in bytes per second
 * @mhz: the SM clock after that
 * @rows, @nr_rows: results so far
 * @failed: a launch failed or an error was too large
 */
struct kvb_ctx {
	cudaStream_t stream;
	const char *filter;
	bool quick;
	bool check;
	bool failed;
	double ceiling;
	double flops_ceiling;
	double mhz;
	uint32_t replays;
	uint32_t nr_rows;
	struct kvb_row rows[KVB_ROWS_MAX];
};

/* One call of the thing that is timed; @set rotates 0 .. nr_sets - 1. Queues on
 * ctx->stream, returns 0 or -errno. */
typedef int (*kvb_call)(struct kvb_ctx *ctx, void *arg, uint32_t set);

#define KVB_CUDA(expr) \
	kvb_cuda_check((expr), #expr, __FILE__, __LINE__) /* exits on an error */

void kvb_cuda_check(cudaError_t e, const char *expr, const char *file, int line);

/** kvb_init() - choose device 0, make the stream, measure the read ceiling */
int kvb_init(struct kvb_ctx *ctx);

/** kvb_selected() - is this row wanted (ctx->filter)? */
bool kvb_selected(const struct kvb_ctx *ctx, const char *name, const char *shape);

/** kvb_calls() - calls for a graph whose call touches @bytes: >= 8, rotating over
 * KVB_ROTATE */
uint32_t kvb_calls(double bytes);

/**
 * kvb_time() - median time of a call
 * @nr_sets: data sets that exist; call i uses set i % nr_sets
 * @nr_calls: calls in the graph
 * @row: us, us_min, us_max, mhz and rested_us are filled
 *
 * Return: 0, or -errno of the call or of the capture.
 */
int kvb_time(struct kvb_ctx *ctx, kvb_call call, void *arg, uint32_t nr_sets,
	     uint32_t nr_calls, struct kvb_row *row);

/**
 * kvb_settle() - wait (half a second at most) until the clock is what it was at first: lines that
 * take the card to its power limit leave it at 1.4 GHz of 1.98 for those behind them
 */
void kvb_settle(struct kvb_ctx *ctx);

/** kvb_row_add() - keep a line and print it (stderr) as it comes */
void kvb_row_add(struct kvb_ctx *ctx, const struct kvb_row *row);

/* Random data on the device, a function of seed and index. */
void kvb_fill_bf16(struct kvb_ctx *ctx, void *dst, size_t n, uint64_t seed, float stddev);
void kvb_fill_f32(struct kvb_ctx *ctx, float *dst, size_t n, uint64_t seed, float stddev);
void kvb_fill_bytes(struct kvb_ctx *ctx, void *dst, size_t bytes, uint64_t seed);
/* e4m3 bytes of a normal variable whose 4-sigma point is 448; never NaN */
void kvb_fill_e4m3(struct kvb_ctx *ctx, void *dst, size_t n, uint64_t seed);

/** kvb_random() - host generator (splitmix64); *state is advanced */
uint64_t kvb_random(uint64_t *state);

/** kvb_rel_err() - |a - b| / |b| over n values on the host; infinite if a NaN is in a */
double kvb_rel_err(const float *a, const double *b, size_t n);

/* Families' entries: measure all lines, add rows. Return 0 or -errno. */
int kvb_kernels_attn(struct kvb_ctx *ctx);
int kvb_kernels_prefill(struct kvb_ctx *ctx);
int kvb_kernels_moe(struct kvb_ctx *ctx);
int kvb_kernels_pages(struct kvb_ctx *ctx);
int kvb_kernels_step(struct kvb_ctx *ctx);

/** kvb_print() - the table (targets beside ours) or the JSON document on stdout */
void kvb_print(const struct kvb_ctx *ctx, const char *family, bool json);

#endif /* KVB_GPU_BENCH_H */
