/* SPDX-License-Identifier: Apache-2.0 */
/* What kvbench says of its samples: percentiles by nearest rank. */
#include "tests/kvt.h"
#include "tools/kvbench/json.c"

static struct kvb_dist of(uint32_t nr)
{
	static double samples[1000];
	struct kvb_dist d;

	for (uint32_t i = 0; i < nr; i++)
		samples[(i * 7919u) % nr] = i + 1;
	kvb_dist_of(&d, samples, nr);
	return d;
}

/* Of n samples the p-th percentile is the least that p % of them do not exceed. */
KVT_TEST(percentiles_are_by_nearest_rank)
{
	static const uint32_t sizes[] = {1, 2, 3, 10, 20, 99, 100, 101, 199, 200, 1000};

	for (uint32_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		uint32_t n = sizes[i];
		struct kvb_dist d = of(n);

		KVT_EXPECT_EQ(d.p50, (n + 1) / 2);
		KVT_EXPECT_EQ(d.p99, (n * 99 + 99) / 100);
		KVT_EXPECT_EQ(d.mean, (n + 1) / 2.0);
		KVT_EXPECT_EQ(d.nr, n);
	}
}

/* A run so short that nothing was measured is told as such, not as a crash. */
KVT_TEST(no_samples_are_no_distribution)
{
	struct kvb_dist d = {.p50 = 1, .nr = 1};

	kvb_dist_of(&d, NULL, 0);
	KVT_EXPECT_EQ(d.nr, 0);
	KVT_EXPECT_EQ(d.p50, 0);
	KVT_EXPECT_EQ(d.p99, 0);
}

KVT_MAIN()
