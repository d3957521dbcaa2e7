/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/gfp.h - allocation flags, in layers: bit, modifier, ready-made combination.
 *
 * DOC: An allocation is all or nothing for its batch. Bits say what kvmd may do to satisfy
 * it; a caller uses one of the combinations at the bottom and adds modifiers.
 */
#ifndef KV_GFP_H
#define KV_GFP_H

#include "types.h"

/* DOC: bits. What the daemon may do. */
#define KV_GFP_BIT_GROW    0 /* may create a new extent */
#define KV_GFP_BIT_RECLAIM 1 /* may wake background reclaim of CACHED pages */
#define KV_GFP_BIT_WAIT    2 /* may reclaim directly and wait for quarantine */
#define KV_GFP_BIT_ZERO    3 /* caller will zero DIRTY pages: prefer clean ones */

#define KV_GFP_GROW    (1u << KV_GFP_BIT_GROW)
#define KV_GFP_RECLAIM (1u << KV_GFP_BIT_RECLAIM)
#define KV_GFP_WAIT    (1u << KV_GFP_BIT_WAIT)
#define KV_GFP_ZERO    (1u << KV_GFP_BIT_ZERO)

/* DOC: combinations. */
#define KV_GFP_NOWAIT  (KV_GFP_GROW | KV_GFP_RECLAIM)               /* decode: the default */
#define KV_GFP_PREFILL (KV_GFP_GROW | KV_GFP_RECLAIM | KV_GFP_WAIT) /* may sleep */
#define KV_GFP_ATOMIC  0u /* only what is free right now */

#define KV_GFP_VALID (KV_GFP_GROW | KV_GFP_RECLAIM | KV_GFP_WAIT | KV_GFP_ZERO)

#endif /* KV_GFP_H */
