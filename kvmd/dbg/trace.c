/* SPDX-License-Identifier: Apache-2.0 */
/* dbg/trace.c - the in-memory event ring of trace.h. */
#include "kvmd/dbg/trace.h"

#include "base/clock.h"

static struct kvd_trace_entry ring[KVD_TRACE_ENTRIES];
static u64 ring_head;

#define TRACE_NAMES(name, a, b, c) {#name, {#a, #b, #c}},
static const struct {
	const char *name;
	const char *args[3];
} events[] = {KVD_TRACE_EVENTS(TRACE_NAMES)};

void kvd_trace_store(enum kvd_trace_event event, u64 a, u64 b, u64 c)
{
	struct kvd_trace_entry *e = &ring[ring_head++ % KVD_TRACE_ENTRIES];

	e->time_ns = kv_now_ns();
	e->event = event;
	e->args[0] = a;
	e->args[1] = b;
	e->args[2] = c;
}

const char *kvd_trace_name(u32 event)
{
	return event < KVD_TRACE_NR ? events[event].name : "?";
}

const char *kvd_trace_arg_name(u32 event, u32 arg)
{
	return event < KVD_TRACE_NR && arg < 3 ? events[event].args[arg] : "?";
}

u32 kvd_trace_read(struct kvd_trace_entry *entries, u32 nr)
{
	u64 have = KV_MIN(ring_head, (u64)KVD_TRACE_ENTRIES);
	u32 n = (u32)KV_MIN((u64)nr, have);
	u32 i;

	for (i = 0; i < n; i++)
		entries[i] = ring[(ring_head - n + i) % KVD_TRACE_ENTRIES];
	return n;
}
