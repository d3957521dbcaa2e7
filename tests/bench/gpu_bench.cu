/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_bench.cu - read ceiling, graph timing, random data and printing for
 * kvbench-kernels. Who may touch what: see gpu_bench.h. One thread.
 */
#include "gpu_bench.h"
#include "base/util.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CLOCK_NS     20000u
#define SETTLE_US    20000u
#define SETTLE_TURNS 25
#define SETTLED	     0.97 /* of the clock after the read ceiling */

#ifndef KVB_COMMIT
#define KVB_COMMIT "unknown"
#endif

void kvb_cuda_check(cudaError_t e, const char *expr, const char *file, int line)
{
	if (e == cudaSuccess)
		return;
	fprintf(stderr, "%s:%d: %s: %s\n", file, line, expr, cudaGetErrorString(e));
	exit(1);
}

/* ------------------------------------------------------------------------ random data */

__device__ __forceinline__ uint64_t mix(uint64_t z)
{
	z += 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* Sum of four uniforms (16 bits each), scaled to unit variance. */
__device__ __forceinline__ float normalish(uint64_t r)
{
	float s = (float)(r & 0xffff) + (float)((r >> 16) & 0xffff) +
		  (float)((r >> 32) & 0xffff) + (float)(r >> 48);

	return (s * (1.0f / 65536.0f) - 2.0f) * 1.7320508f;
}

/* kind: 0 bf16, 1 f32, 2 raw bytes, 3 e4m3 */
__global__ void fill_kernel(void *dst, size_t n, uint64_t seed, float stddev, int kind)
{
	size_t step = (size_t)gridDim.x * blockDim.x;
	size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;

	for (; i < n; i += step) {
		uint64_t r = mix(seed * 0x100000001b3ull + i);

		if (kind == 1) {
			((float *)dst)[i] = normalish(r) * stddev;
		} else if (kind == 2) {
			((uint64_t *)dst)[i] = r;
		} else if (kind == 0) {
			uint32_t u = __float_as_uint(normalish(r) * stddev);

			u += 0x7fff + ((u >> 16) & 1);
			((uint16_t *)dst)[i] = (uint16_t)(u >> 16);
		} else {
			/* eight e4m3 bytes per item; 0x7f and 0xff are the NaNs */
			uint64_t out = 0;

			for (int j = 0; j < 8; j++) {
				float v = normalish(mix(r + j)) * 112.0f;
				uint16_t q;

				asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
				    : "=h"(q)
				    : "f"(0.0f), "f"(v));
				out |= (uint64_t)(q & 0xff) << (8 * j);
			}
			((uint64_t *)dst)[i] = out;
		}
	}
}

static void fill(struct kvb_ctx *ctx, void *dst, size_t n, uint64_t seed, float stddev,
		 int kind)
{
	fill_kernel<<<1056, 256, 0, ctx->stream>>>(dst, n, seed, stddev, kind);
	KVB_CUDA(cudaGetLastError());
}

void kvb_fill_bf16(struct kvb_ctx *ctx, void *dst, size_t n, uint64_t seed, float stddev)
{
	fill(ctx, dst, n, seed, stddev, 0);
}

void kvb_fill_f32(struct kvb_ctx *ctx, float *dst, size_t n, uint64_t seed, float stddev)
{
	fill(ctx, dst, n, seed, stddev, 1);
}

void kvb_fill_bytes(struct kvb_ctx *ctx, void *dst, size_t bytes, uint64_t seed)
{
	fill(ctx, dst, bytes / 8, seed, 0.0f, 2);
}

void kvb_fill_e4m3(struct kvb_ctx *ctx, void *dst, size_t n, uint64_t seed)
{
	fill(ctx, dst, n / 8, seed, 0.0f, 3);
}

uint64_t kvb_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15ull;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

double kvb_rel_err(const float *a, const double *b, size_t n)
{
	double num = 0.0, den = 0.0;

	for (size_t i = 0; i < n; i++) {
		double d = (double)a[i] - b[i];

		if (!isfinite(d))
			return INFINITY;
		num += d * d;
		den += b[i] * b[i];
	}
	return den > 0.0 ? sqrt(num / den) : (num > 0.0 ? INFINITY : 0.0);
}

/* ------------------------------------------------------------------------------ timing
 */

__global__ void __launch_bounds__(512)
	read_kernel(const uint4 *src, size_t n, uint32_t *sink)
{
	size_t step = (size_t)gridDim.x * blockDim.x;
	size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
	uint4 acc = {0, 0, 0, 0};

	for (; i + 3 * step < n; i += 4 * step) {
		uint4 v[4];

		for (int j = 0; j < 4; j++)
			v[j] = __ldcs(src + i + j * step);
		for (int j = 0; j < 4; j++) {
			acc.x ^= v[j].x;
			acc.y ^= v[j].y;
			acc.z ^= v[j].z;
			acc.w ^= v[j].w;
		}
	}
	if ((acc.x ^ acc.y ^ acc.z ^ acc.w) == 0x12345678u)
		*sink = 1; /* keeps the loads alive */
}

static int cmp_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

/* The SM clock, by counting for a while. globaltimer's steps are small against CLOCK_NS. */
__global__ void clock_kernel(uint64_t *ret_cycles_ns)
{
	const uint64_t from = clock64();
	uint64_t begin, now;

	asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
	do
		asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
	while (now - begin < CLOCK_NS);
	ret_cycles_ns[0] = clock64() - from;
	ret_cycles_ns[1] = now - begin;
}

static double clock_mhz(struct kvb_ctx *ctx)
{
	uint64_t v[2], *dev;

	KVB_CUDA(cudaMallocAsync((void **)&dev, sizeof(v), ctx->stream));
	clock_kernel<<<1, 1, 0, ctx->stream>>>(dev);
	KVB_CUDA(cudaGetLastError());
	KVB_CUDA(cudaMemcpyAsync(v, dev, sizeof(v), cudaMemcpyDeviceToHost, ctx->stream));
	KVB_CUDA(cudaFreeAsync(dev, ctx->stream));
	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	return 1e3 * (double)v[0] / (double)v[1];
}

void kvb_settle(struct kvb_ctx *ctx)
{
	for (int i = 0; i < SETTLE_TURNS && clock_mhz(ctx) < SETTLED * ctx->mhz; i++)
		usleep(SETTLE_US);
}

/* One replay, in us of a call. */
static double replay_once(struct kvb_ctx *ctx, cudaGraphExec_t exec, uint32_t nr_calls)
{
	cudaEvent_t e0, e1;
	float ms;

	KVB_CUDA(cudaEventCreate(&e0));
	KVB_CUDA(cudaEventCreate(&e1));
	KVB_CUDA(cudaEventRecord(e0, ctx->stream));
	KVB_CUDA(cudaGraphLaunch(exec, ctx->stream));
	KVB_CUDA(cudaEventRecord(e1, ctx->stream));
	KVB_CUDA(cudaEventSynchronize(e1));
	KVB_CUDA(cudaEventElapsedTime(&ms, e0, e1));
	KVB_CUDA(cudaEventDestroy(e0));
	KVB_CUDA(cudaEventDestroy(e1));
	return (double)ms * 1e3 / nr_calls;
}

/* Replay and fill the row's times. */
static void replay(struct kvb_ctx *ctx, cudaGraphExec_t exec, uint32_t nr_calls,
		   struct kvb_row *row)
{
	int n = ctx->replays ? (int)ctx->replays : ctx->quick ? 7 : KVB_REPLAYS;
	double us[KVB_REPLAYS], rested[3];

	for (int i = 0; i < 2; i++)
		KVB_CUDA(cudaGraphLaunch(exec, ctx->stream));
	for (int i = 0; i < n; i++)
		us[i] = replay_once(ctx, exec, nr_calls);
	row->mhz = clock_mhz(ctx);
	qsort(us, n, sizeof(us[0]), cmp_double);
	row->us = us[n / 2];
	row->us_min = us[0];
	row->us_max = us[n - 1];
	row->rested_us = 0.0;
	if (row->mhz >= KVB_SLOW * ctx->mhz)
		return;
	for (size_t i = 0; i < KV_ARRAY_SIZE(rested); i++) {
		kvb_settle(ctx);
		rested[i] = replay_once(ctx, exec, nr_calls);
	}
	qsort(rested, KV_ARRAY_SIZE(rested), sizeof(rested[0]), cmp_double);
	row->rested_us = rested[KV_ARRAY_SIZE(rested) / 2];
}

uint32_t kvb_calls(double bytes)
{
	double n = ceil((double)KVB_ROTATE / (bytes > 1.0 ? bytes : 1.0));

	return n < 8.0 ? 8u : n > 96.0 ? 96u : (uint32_t)n;
}

int kvb_time(struct kvb_ctx *ctx, kvb_call call, void *arg, uint32_t nr_sets,
	     uint32_t nr_calls, struct kvb_row *row)
{
	cudaGraphExec_t exec;
	cudaGraph_t graph;
	int r = 0;

	KVB_CUDA(cudaStreamSynchronize(ctx->stream));
	KVB_CUDA(cudaStreamBeginCapture(ctx->stream, cudaStreamCaptureModeThreadLocal));
	for (uint32_t i = 0; i < nr_calls && !r; i++)
		r = call(ctx, arg, i % nr_sets);
	KVB_CUDA(cudaStreamEndCapture(ctx->stream, &graph));
	if (!r) {
		KVB_CUDA(cudaGraphInstantiate(&exec, graph, 0));
		replay(ctx, exec, nr_calls, row);
		KVB_CUDA(cudaGraphExecDestroy(exec));
	}
	KVB_CUDA(cudaGraphDestroy(graph));
	return r;
}

struct ceiling_arg {
	uint4 *buf;
	size_t n;
	uint32_t *sink;
};

static int ceiling_call(struct kvb_ctx *ctx, void *arg, uint32_t set)
{
	struct ceiling_arg *c = (struct ceiling_arg *)arg;

	(void)set;
	read_kernel<<<132 * 4, 512, 0, ctx->stream>>>(c->buf, c->n, c->sink);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

/* 4 GiB, far more than the L2, by plain 16-byte loads. */
static int measure_ceiling(struct kvb_ctx *ctx)
{
	struct kvb_row row = {};
	struct ceiling_arg c;
	size_t bytes = 4ull << 30;
	int r;

	KVB_CUDA(cudaMalloc((void **)&c.buf, bytes));
	KVB_CUDA(cudaMalloc((void **)&c.sink, 4));
	c.n = bytes / 16;
	kvb_fill_bytes(ctx, c.buf, bytes, 1);
	r = kvb_time(ctx, ceiling_call, &c, 1, 2, &row);
	ctx->ceiling = (double)bytes / row.us * 1e6;
	ctx->flops_ceiling = KVB_FLOPS;
	ctx->mhz = row.mhz;
	KVB_CUDA(cudaFree(c.buf));
	KVB_CUDA(cudaFree(c.sink));
	return r;
}

int kvb_init(struct kvb_ctx *ctx)
{
	int nr = 0;

	if (cudaGetDeviceCount(&nr) != cudaSuccess || nr == 0)
		return -ENODEV;
	KVB_CUDA(cudaSetDevice(0));
	KVB_CUDA(cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking));
	return measure_ceiling(ctx);
}

/* ---------------------------------------------------------------------------- printing
 */

bool kvb_selected(const struct kvb_ctx *ctx, const char *name, const char *shape)
{
	char both[2 * KVB_NAME_MAX + 2], want[256], *at = want, *one;

	if (!ctx->filter)
		return true;
	snprintf(both, sizeof(both), "%s %s", name, shape);
	snprintf(want, sizeof(want), "%s", ctx->filter);
	while ((one = strsep(&at, "|"))) /* alternatives */
		if (strstr(both, one))
			return true;
	return false;
}

static double row_floor(const struct kvb_ctx *ctx, const struct kvb_row *r)
{
	double b = r->bytes / ctx->ceiling * 1e6, f = r->flops / ctx->flops_ceiling * 1e6;

	return b > f ? b : f;
}

/* The target on this card: as far below its ceiling as the stored one was below its own. */
static double row_target(const struct kvb_ctx *ctx, const struct kvb_row *r)
{
	if (r->products)
		return r->ours_us;
	return r->ours_us * KVB_TARGET_CEILING / fmin(ctx->ceiling, KVB_TARGET_CEILING);
}

/* What becomes of a line that has a target; "" of another one. */
static const char *row_verdict(const struct kvb_ctx *ctx, const struct kvb_row *r)
{
	if (r->ours_us <= 0.0)
		return "";
	if (r->us <= row_target(ctx, r))
		return "reached";
	if (r->loads_us > 0.0 && r->us <= KVB_AT_LOADS * r->loads_us)
		return "at its loads";
	return "open";
}

/* Like a column of the table; "-" for a figure that is not there. */
static void print_figure(FILE *f, double v)
{
	if (v > 0.0)
		fprintf(f, " %8.1f", v);
	else
		fprintf(f, " %8s", "-");
}

static void print_row(const struct kvb_ctx *ctx, FILE *f, const struct kvb_row *r)
{
	fprintf(f, "%-26s %-12s %9.2f %9.2f %9.2f %8.1f %6.1f%%", r->name, r->shape,
		r->us, r->us_min, r->us_max, row_floor(ctx, r),
		100.0 * row_floor(ctx, r) / r->us);
	print_figure(f, r->loads_us);
	print_figure(f, r->peer_us);
	print_figure(f, r->ours_us > 0.0 ? row_target(ctx, r) : 0.0);
	fprintf(f, " %-12s", row_verdict(ctx, r));
	if (r->err >= 0.0)
		fprintf(f, " %8.1e", r->err);
	else
		fprintf(f, " %8s", "-");
	fprintf(f, " %5.0f", r->mhz);
	if (r->rested_us > 0.0)
		fprintf(f, " (%.1f with the clock back)", r->rested_us);
	fputc('\n', f);
}

void kvb_row_add(struct kvb_ctx *ctx, const struct kvb_row *row)
{
	print_row(ctx, stderr, row);
	if (ctx->nr_rows < KVB_ROWS_MAX)
		ctx->rows[ctx->nr_rows++] = *row;
}

/*
 * The name and shape that are published: family and page format, then heads or the model
 * and the batch. "gqa fp8 96/8 loads", "64 x 9k" is "attn_gqa loads fp8", "96/8 64x9k".
 */
static void row_public(const struct kvb_row *r, char *name, char *shape)
{
	char kind[16] = "", format[16] = "", heads[16] = "", more[16] = "";
	size_t n = 0;

	snprintf(name, KVB_NAME_MAX, "%s", r->name);
	snprintf(shape, 2 * KVB_NAME_MAX, "%s", r->shape);
	if (!strcmp(r->family, "moe") && sscanf(r->name, "%15s", kind) == 1 &&
	    (!strcmp(kind, "int4") || !strcmp(kind, "fp8") || !strcmp(kind, "loads"))) {
		snprintf(name, KVB_NAME_MAX,
			 !strcmp(kind, "loads") ? "moe_int4 %s" : "moe_%s", kind);
		snprintf(shape, 2 * KVB_NAME_MAX, "%s %s", r->name + strlen(kind) + 1,
			 r->shape);
	} else if (!strcmp(r->family, "attn") && sscanf(r->name, "%15s %15s %15s %15s",
							kind, format, heads, more) >= 3) {
		if (!strcmp(more, "prefill"))
			snprintf(name, KVB_NAME_MAX, "attn_prefill %s %s", kind, format);
		else
			snprintf(name, KVB_NAME_MAX, "attn_%s%s%s %s", kind,
				 *more ? " " : "", more, format);
		snprintf(shape, 2 * KVB_NAME_MAX, "%s%s ", strchr(heads, '/') ? "" : "h",
			 heads);
		n = strlen(shape);
		for (const char *p = r->shape; *p; p++)
			if (*p != ' ')
				shape[n++] = *p;
		shape[n] = 0;
	}
}

/* As the kernel module tells it; "CUDA x.y" where it does not. */
static void driver_version(char *ret, size_t bytes)
{
	FILE *f = fopen("/proc/driver/nvidia/version", "r");
	int driver = 0, major, minor, patch;
	char text[256] = "", *p;

	KVB_CUDA(cudaDriverGetVersion(&driver));
	snprintf(ret, bytes, "CUDA %d.%d", driver / 1000, driver % 1000 / 10);
	if (!f)
		return;
	for (p = fgets(text, sizeof(text), f); p && *p; p++)
		if (sscanf(p, " %d.%d.%d", &major, &minor, &patch) == 3) {
			snprintf(ret, bytes, "%d.%d.%02d", major, minor, patch);
			break;
		}
	fclose(f);
}

static void print_json(const struct kvb_ctx *ctx, const char *family,
		       const struct cudaDeviceProp *p, const char *date)
{
	char name[KVB_NAME_MAX], shape[2 * KVB_NAME_MAX], driver[64];
	const char *sep = "";

	driver_version(driver, sizeof(driver));
	printf("{\"schema\": \"kvbench-kernels-1\", \"family\": \"%s\", \"commit\": \"%s\", "
	       "\"gpu\": \"%s\", \"driver\": \"%s\", \"date\": \"%s\", "
	       "\"ceiling_tb_s\": %.3f, \"rows\": [",
	       family, KVB_COMMIT, p->name, driver, date, ctx->ceiling * 1e-12);
	for (uint32_t i = 0; i < ctx->nr_rows; i++) {
		const struct kvb_row *r = &ctx->rows[i];

		row_public(r, name, shape);
		printf("%s\n  {\"family\": \"%s\", \"name\": \"%s\", \"shape\": \"%s\", "
		       "\"us\": %.2f, \"us_min\": %.2f, \"us_max\": %.2f, \"bytes\": %.0f, "
		       "\"flops\": %.0f, \"frac\": %.3f, \"floor_us\": %.2f",
		       sep, r->family, name, shape, r->us, r->us_min, r->us_max, r->bytes,
		       r->flops, row_floor(ctx, r) / r->us, row_floor(ctx, r));
		printf(", \"mhz\": %.0f", r->mhz);
		if (r->rested_us > 0.0)
			printf(", \"rested_us\": %.2f", r->rested_us);
		if (r->err >= 0.0 && isfinite(r->err))
			printf(", \"err\": %.2e", r->err);
		else
			printf(", \"err\": %s", r->err >= 0.0 ? "\"wrong\"" : "null");
		if (r->peer_us > 0.0)
			printf(", \"peer_us\": %.1f", r->peer_us);
		else
			printf(", \"peer_us\": null");
		if (r->loads_us > 0.0)
			printf(", \"loads_us\": %.2f", r->loads_us);
		if (r->ours_us > 0.0)
			printf(", \"target_us\": %.1f, \"target_here_us\": %.1f, "
			       "\"verdict\": \"%s\"",
			       r->ours_us, row_target(ctx, r), row_verdict(ctx, r));
		if (r->ours_us > 0.0 && r->products)
			printf(", \"target_by\": \"products\"");
		printf("}");
		sep = ",";
	}
	printf("\n]}\n");
}

void kvb_print(const struct kvb_ctx *ctx, const char *family, bool json)
{
	struct cudaDeviceProp p;
	time_t now = time(NULL);
	char date[32];

	KVB_CUDA(cudaGetDeviceProperties(&p, 0));
	strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
	if (json) {
		print_json(ctx, family, &p, date);
		return;
	}
	printf("# %s, %s, commit %s, read ceiling %.2f TB/s\n", p.name, date, KVB_COMMIT,
	       ctx->ceiling * 1e-12);
	printf("# target: stored for a ceiling of %.2f TB/s, times that over this run's (never "
	       "less than stored; as stored where products are its bound)\n",
	       KVB_TARGET_CEILING * 1e-12);
	printf("# verdict: reached, at its loads (within %.0f %% of the same kernel without "
	       "arithmetic), open\n",
	       100.0 * (KVB_AT_LOADS - 1.0));
	printf("%-26s %-12s %9s %9s %9s %8s %7s %8s %8s %8s %-12s %8s %5s\n", "name",
	       "shape", "us", "min", "max", "floor", "frac", "loads", "peer", "target",
	       "verdict", "error", "MHz");
	for (uint32_t i = 0; i < ctx->nr_rows; i++)
		print_row(ctx, stdout, &ctx->rows[i]);
}
