/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/outcome.h - the one set of answers (design section 6).
 *
 * An int answer is 0 (done), negative errno (a failure: the caller's or ours) or a positive
 * enum kv_outcome (a normal answer that the caller must handle). The same number travels on
 * the wire, through the client library and into kvmctl's JSON.
 */
#ifndef KV_OUTCOME_H
#define KV_OUTCOME_H

#include "types.h"

enum kv_outcome {
	KV_OK = 0,
	KV_FULL = 1,    /* no free page, and nothing that may be reclaimed */
	KV_QUOTA = 2,   /* the tenant's hard limit */
	KV_PENDING = 3, /* pages are in quarantine: wait for nr of them, or ask again */
	KV_STALE = 4,   /* (pfn, tag) is not the live generation any more */
	KV_MISS = 5,    /* no such prefix in this domain */
	KV_BUSY = 6,    /* too much in flight: a ninth step, a full ring */
	KV_REVOKED = 7, /* the page was taken back by REVOKE or by the session's own FREE */
	KV_OUTCOME_NR
};

/**
 * kv_outcome_str() - the name of an outcome, as kvmctl prints it
 * @outcome: value of enum kv_outcome
 *
 * Return: a static string; "KV_?" for a number this version does not know.
 */
static inline const char *kv_outcome_str(int outcome)
{
	static const char *const names[] = {
		"KV_OK",    "KV_FULL", "KV_QUOTA", "KV_PENDING",
		"KV_STALE", "KV_MISS", "KV_BUSY",  "KV_REVOKED",
	};

	if (outcome < 0 || outcome >= KV_OUTCOME_NR)
		return "KV_?";
	return names[outcome];
}

#endif /* KV_OUTCOME_H */
