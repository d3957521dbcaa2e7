/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/pressure.c - stall times of tenants and their averages. See pressure.h.
 *
 * Loop thread only. The cost on the way of a request is two comparisons; only a change
 * from served to stalled or back adds up times.
 */
#include "kvmd/own/pressure.h"
#include "base/assert.h"
#include "kvmd/own/core.h"
#include "kvmd/own/turn.h"

/* exp(-2/10), exp(-2/60), exp(-2/300) in units of 2^-20 */
static const u32 decay[KVD_PRESSURE_AVGS] = {858501, 1014200, 1041609};

#define DECAY_SHIFT 20

/* More periods than these leave nothing of what was before in any average. */
#define PERIODS_MAX 4096u

void kvd_pressure_init(struct kvd_pressure *p, u64 now_ns)
{
	*p = (struct kvd_pressure){.since_ns = now_ns, .avg_ns = now_ns};
}

static void add_up(struct kvd_pressure *p, u64 now_ns)
{
	u64 delta = now_ns - KV_MIN(p->since_ns, now_ns);

	if (p->nr_stalled)
		p->total_ns[KVD_PRESSURE_SOME] += delta;
	if (p->nr_stalled && p->nr_stalled == p->nr_asking)
		p->total_ns[KVD_PRESSURE_FULL] += delta;
	p->since_ns = KV_MAX(p->since_ns, now_ns);
}

static u32 average(u32 avg, u32 share, u32 e)
{
	u64 sum = (u64)avg * e + (u64)share * ((1u << DECAY_SHIFT) - e);

	/* Rounded towards the share, or the average would never reach it. */
	if (share >= avg)
		sum += (1u << DECAY_SHIFT) - 1;
	return (u32)(sum >> DECAY_SHIFT);
}

void kvd_pressure_update(struct kvd_pressure *p, u64 now_ns)
{
	u64 elapsed, periods;

	add_up(p, now_ns);
	elapsed = now_ns - KV_MIN(p->avg_ns, now_ns);
	periods = elapsed / KVD_PRESSURE_PERIOD_NS;
	if (!periods)
		return;
	for (u32 k = 0; k < KVD_PRESSURE_KINDS; k++) {
		u64 stalled = p->total_ns[k] - p->avg_total_ns[k];
		u32 share = (u32)KV_MIN(stalled / (elapsed / KVD_PRESSURE_ONE),
					(u64)KVD_PRESSURE_ONE);

		for (u32 a = 0; a < KVD_PRESSURE_AVGS; a++) {
			for (u64 n = KV_MIN(periods, (u64)PERIODS_MAX); n; n--)
				p->avg[k][a] = average(p->avg[k][a], share, decay[a]);
		}
		p->avg_total_ns[k] = p->total_ns[k];
	}
	p->avg_ns = now_ns;
}

void kvd_pressure_asked(struct kvd_session *s, bool served)
{
	struct kvd_pressure *p = &s->tenant->pressure;
	u64 now_ns = s->core->mm.now_ns;

	s->asked_ns = now_ns;
	if (s->asking && s->stalled == !served)
		return;
	add_up(p, now_ns);
	if (!s->asking)
		p->nr_asking++;
	s->asking = true;
	p->nr_stalled -= s->stalled;
	s->stalled = !served;
	s->stalled_ns = now_ns;
	p->nr_stalled += s->stalled;
	kv_assert(p->nr_stalled <= p->nr_asking);
}

void kvd_pressure_leave(struct kvd_session *s)
{
	struct kvd_pressure *p = &s->tenant->pressure;

	if (!s->asking)
		return;
	kv_assert(p->nr_asking && p->nr_stalled >= s->stalled);
	add_up(p, s->core->mm.now_ns);
	p->nr_asking--;
	p->nr_stalled -= s->stalled;
	s->asking = false;
	s->stalled = false;
	kvd_turn_end(s);
}

void kvd_pressure_turn(struct kvd_core *core)
{
	u64 now_ns = core->mm.now_ns;
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		if (s->asking && now_ns - s->asked_ns >= KVD_PRESSURE_QUIET_NS)
			kvd_pressure_leave(s);
	}
	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		if (core->tenants[i])
			kvd_pressure_update(&core->tenants[i]->pressure, now_ns);
	}
}
