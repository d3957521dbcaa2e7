/* SPDX-License-Identifier: Apache-2.0 */
/* mm.h - kvbench mm: the memory manager and its ways to the client, in nanoseconds. */
#ifndef KVB_MM_H
#define KVB_MM_H

#include "base/util.h"
#include "tools/kvbench/json.h"

/**
 * kvb_mm() - kvbench mm [--json] [--socket PATH] [--quick]
 *
 * Exit code 0, 1 on failure, 2 usage.
 */
int kvb_mm(int argc, char **argv);

/**
 * kvb_scale() - kvbench scale [--clients LIST] [--ms N] [--socket PATH] [--json]: engines
 *	side by side against one kvmd
 *
 * Exit code 0, 1 on failure, 2 usage.
 */
int kvb_scale(int argc, char **argv);

/**
 * kvb_admission() - kvbench admission [--samples N] [--json]: a small request beside reclaim
 *	of 90 % of the pool
 *
 * Exit code 0, 1 on failure, 2 usage.
 */
int kvb_admission(int argc, char **argv);

/**
 * kvb_replay() - kvbench replay [--pages N] [--events N] [--noise PCT] [--seed N] [--json]:
 *	hit rates of an agent trace with a noisy neighbour (tests/bench/mm_replay.c)
 *
 * Exit code 0, 1 on failure, 2 usage.
 */
int kvb_replay(int argc, char **argv);

/**
 * kvb_mm_core_pair() - alloc + free of one page in kvmd's core, in this process
 * @nr_pages: pages of the pool; nearly all are live
 * @samples: blocks timed
 * @ret: ns of a pair, closing of turns (grace periods) included
 * @ret_random: the same when each pair frees a random live page
 *
 * Return: 0; -errno of the core.
 */
int kvb_mm_core_pair(u32 nr_pages, u32 samples, struct kvb_dist *ret,
		     struct kvb_dist *ret_random);

/**
 * kvb_mm_python() - the usual block pool in Python (tests/bench/block_pool.py)
 * @ret_pool: 100 blocks got and freed
 * @ret_chain: hashes of 32,768 tokens in blocks of 16, chained SHA-256
 *
 * Return: 0; -errno, both are NaN: no python3 or no script here.
 */
int kvb_mm_python(struct kvb_dist *ret_pool, struct kvb_dist *ret_chain);

/**
 * kvb_mm_core_lookup() - lookup of 32,768 known tokens in kvmd's core, in this process
 * @nr_pages: pages in the index, in prefixes of 512 pages; each lookup asks for a random
 *	one, so that records and tokens are cold
 * @ret: ns of a lookup, its pages walked
 * @ret_by_key: ns when none of its entries is known to the walk: each page is hashed
 *
 * Return: 0; -errno of the core.
 */
int kvb_mm_core_lookup(u32 nr_pages, u32 samples, struct kvb_dist *ret,
		       struct kvb_dist *ret_by_key);

#endif
