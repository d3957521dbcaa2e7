/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dbg/trace.h - the one list of events.
 *
 * KVD_TRACE_EVENTS makes the enum, the names, a typed function for each event
 * (kvd_trace_page_alloc(pool, pfn, tag)), and, where <sys/sdt.h> exists, a USDT probe
 * kvmd:page_alloc with the same arguments. Events go into a ring in memory of the last
 * KVD_TRACE_ENTRIES; `kvmctl trace` reads it.
 *
 * Cost: one clock read and a 40-byte store. Thread rules: the loop thread only.
 */
#ifndef KVD_DBG_TRACE_H
#define KVD_DBG_TRACE_H

#include "base/util.h"

#ifdef CONFIG_SDT
#include <sys/sdt.h>
#define KVD_PROBE3(name, a, b, c) DTRACE_PROBE3(kvmd, name, a, b, c)
#else
/* Still type-checks the arguments. */
#define KVD_PROBE3(name, a, b, c) ((void)(a), (void)(b), (void)(c))
#endif

#define KVD_TRACE_ENTRIES 4096u

/* X(event, argument, argument, argument) */
#define KVD_TRACE_EVENTS(X)                    \
	X(page_alloc, pool, pfn, tag)          \
	X(page_free, pool, pfn, tag)           \
	X(page_seal, pool, pfn, tag)           \
	X(page_revoke, pool, pfn, tag)         \
	X(page_evict, pool, pfn, tag)          \
	X(page_ready, pool, pfn, generation)   \
	X(magazine_stock, session, pool, nr)   \
	X(magazine_recall, session, pool, nr)  \
	X(extent_add, pool, index, serial)     \
	X(extent_remove, pool, index, serial)  \
	X(extent_release, pool, index, serial) \
	X(grace_advance, epoch, pool, nr)      \
	X(grace_wait, session, slot, epoch)    \
	X(quota_refuse, tenant, pool, nr)      \
	X(reclaim_run, pool, wanted, got)      \
	X(session_open, session, pid, uid)     \
	X(session_end, session, pid, why)      \
	X(session_reaped, session, pid, pages) \
	X(session_stall, session, slot, epoch) \
	X(op_start, session, opcode, nr)       \
	X(op_done, session, opcode, result)    \
	X(ring_fault, session, what, value)    \
	X(incident, session, pfn, bits)        \
	X(config_reload, revision, result, nr_tenants)

#define KVD_TRACE_ENUM(name, a, b, c) KVD_TRACE_##name,
enum kvd_trace_event { KVD_TRACE_EVENTS(KVD_TRACE_ENUM) KVD_TRACE_NR };
#undef KVD_TRACE_ENUM

struct kvd_trace_entry {
	u64 time_ns;
	u64 args[3];
	u32 event;
	u32 reserved;
};

/** kvd_trace_store() - used by the typed functions */
void kvd_trace_store(enum kvd_trace_event event, u64 a, u64 b, u64 c);

/** kvd_trace_name() - name of an event; "?" for an unknown number */
const char *kvd_trace_name(u32 event);

/** kvd_trace_arg_name() - name of argument 0..2 of an event */
const char *kvd_trace_arg_name(u32 event, u32 arg);

/**
 * kvd_trace_read() - copy the newest entries, oldest first
 * @entries: room for @nr
 *
 * Return: entries copied.
 */
u32 kvd_trace_read(struct kvd_trace_entry *entries, u32 nr);

#define KVD_TRACE_FN(name, a, b, c)                              \
	static inline void kvd_trace_##name(u64 a, u64 b, u64 c) \
	{                                                        \
		KVD_PROBE3(name, a, b, c);                       \
		kvd_trace_store(KVD_TRACE_##name, a, b, c);      \
	}
KVD_TRACE_EVENTS(KVD_TRACE_FN)
#undef KVD_TRACE_FN

#endif
