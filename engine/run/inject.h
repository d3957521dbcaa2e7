/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inject.h - faults that a broken engine could have, on purpose (tests only).
 *
 * Each injection damages what one request (@victim) hands to the check or to kvmd,
 * between two steps or inside the next one. They show that the check catches them, that
 * only the victim ends, and (with check off) what would have happened. Reachable only
 * through eng_options.inject: `kv-engine run --inject NAME`, kvbench inject and the
 * tests.
 */
#ifndef ENG_RUN_INJECT_H
#define ENG_RUN_INJECT_H

#include "engine/run/engine.h"

/**
 * enum eng_inject_kind - what goes wrong, and the verdict that must name it
 * @ENG_INJECT_SWAP_ROWS: rows of @victim and @other change places: KV_BAD_HASH for both
 * @ENG_INJECT_REUSE: rows stay in @victim's table though their pages were freed; the next
 *	request that needs pages gets the same pfns: KV_BAD_GEN
 * @ENG_INJECT_LATE_WRITER: as REUSE, for the page @victim appends to
 * @ENG_INJECT_OLD_GEN: @victim's page was freed, given out again and overwritten, and its
 *	row still carries the old generation: KV_BAD_GEN
 * @ENG_INJECT_BAD_PFN: a pfn behind the end of the pool: KV_BAD_PFN
 * @ENG_INJECT_WRITE_SEALED: WRITE on a sealed page: KV_BAD_SEALED
 * @ENG_INJECT_TRUNCATED: the last row is left out: KV_BAD_LENGTH
 * @ENG_INJECT_NO_CHECK: @victim's verdict is not written: KV_BAD_NOCHECK
 * @ENG_INJECT_MIRROR_BEHIND: @victim's step runs on a mirror that lacks part of the log:
 *	KV_BAD_MIRROR
 * @ENG_INJECT_FOREIGN: a row that names @foreign, a page of another domain: KV_BAD_GEN
 *	(and whatever else does not match)
 */
enum eng_inject_kind {
	ENG_INJECT_NONE = 0,
	ENG_INJECT_SWAP_ROWS,
	ENG_INJECT_REUSE,
	ENG_INJECT_LATE_WRITER,
	ENG_INJECT_OLD_GEN,
	ENG_INJECT_BAD_PFN,
	ENG_INJECT_WRITE_SEALED,
	ENG_INJECT_TRUNCATED,
	ENG_INJECT_NO_CHECK,
	ENG_INJECT_MIRROR_BEHIND,
	ENG_INJECT_FOREIGN,
	ENG_INJECT_NR
};

#define ENG_INJECT_ROWS_MAX 64u

/**
 * struct eng_inject - one injection
 * @kind: enum eng_inject_kind
 * @victim: an admitted request (PREFILL or DECODE)
 * @other: SWAP_ROWS: another admitted request; else NULL
 * @row, @nr_rows: rows of @victim that are damaged; nr_rows 0 = 1. REUSE and OLD_GEN need
 *	rows that are full and not sealed (engine option no_seal)
 * @foreign: FOREIGN: a grant of another pool
 */
struct eng_inject {
	enum eng_inject_kind kind;
	struct eng_request *victim;
	struct eng_request *other;
	u32 row;
	u32 nr_rows;
	struct kv_grant foreign;
};

/**
 * eng_inject_arm() - damage now, or in @victim's next step
 *
 * Return: 0; -EPERM the engine was created without options.inject; -EINVAL the request
 *	has no such row or is not admitted; -EBUSY another injection waits for its step;
 *	-ETIMEDOUT the freed page did not come back; the errors of kvc_free() and kvc_alloc().
 */
int eng_inject_arm(struct eng_engine *e, const struct eng_inject *inject);

/** eng_inject_parse() - kind by name ("swap-rows", "reuse", ...); -EINVAL for another
 * text */
int eng_inject_parse(const char *text);
const char *eng_inject_str(enum eng_inject_kind kind);

#endif /* ENG_RUN_INJECT_H */
