/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/turn.c - who goes first when nobody in a domain gets on. See turn.h.
 *
 * Loop thread only. Sessions are looked at only when a refusal finds that nothing has come
 * to an end for a while.
 */
#include "kvmd/own/turn.h"

#include <stdio.h>

#include "kvmd/own/core.h"

/* It was refused and tries again and again. */
static bool insists(const struct kvd_session *s, u64 now_ns)
{
	return s->stalled && now_ns - s->asked_ns < KVD_TURN_STUCK_NS;
}

/* NULL: somebody may be getting on. A session that holds pages and was not refused may be
 * at work on them. One alone that insists competes with nobody. */
static struct kvd_session *choose(struct kvd_core *core, const struct kvd_domain *d)
{
	struct kvd_session *s, *first = NULL;
	u32 most = 0, nr, insisting = 0;

	list_for_each_entry (s, &core->sessions, node) {
		if (s->tenant->domain != d)
			continue;
		nr = kvd_session_nr_held(s);
		if (!s->stalled) {
			if (nr)
				return NULL;
			continue;
		}
		if (!insists(s, core->mm.now_ns))
			continue;
		insisting++;
		if (first &&
		    (nr < most || (nr == most && s->stalled_ns >= first->stalled_ns)))
			continue;
		first = s;
		most = nr;
	}
	return insisting > 1 || KV_MUTANT(turn_alone) ? first : NULL;
}

static void turn_give(struct kvd_core *core, struct kvd_domain *d, struct kvd_session *s)
{
	char line[160];

	d->turn = s;
	core->nr_turns++;
	/* it is refused for KVD_TURN_MAX_NS from here on */
	s->stalled_ns = core->mm.now_ns;
	if (d->turns++)
		return;
	snprintf(line, sizeof(line),
		 "domain %.40s: nobody gets on; session %llu (%.60s) goes first", d->name,
		 (unsigned long long)s->id, s->name);
	core->mm.env->log(core->mm.env->arg, 6, line);
}

void kvd_turn_refused(struct kvd_session *s)
{
	struct kvd_domain *d = s->tenant->domain;
	struct kvd_core *core = s->core;
	u64 now_ns = core->mm.now_ns;
	struct kvd_session *first;

	bool recent = now_ns - d->served_ns < KVD_TURN_STUCK_NS;

	/* A refusal in a domain that has been idle says nothing yet: it must last. */
	if (now_ns - s->stalled_ns < KVD_TURN_STUCK_NS)
		recent = true;
	if ((recent && d->steps_back < KVD_TURN_BACKS) || KV_MUTANT(no_turn))
		return;
	if (d->turn) {
		if (!d->turn->stalled || (insists(d->turn, now_ns) &&
					  now_ns - d->turn->stalled_ns < KVD_TURN_MAX_NS))
			return;
		/* It cannot be helped, or has given up; behind the others. */
		d->turn->stalled_ns = now_ns;
		d->turn = NULL;
	}
	first = choose(core, d);
	if (first)
		turn_give(core, d, first);
}

void kvd_turn_end(struct kvd_session *s)
{
	struct kvd_domain *d = s->tenant->domain;

	if (d->turn == s)
		d->turn = NULL;
}
