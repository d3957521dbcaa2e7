/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/turn.h - who goes first when nobody in a domain gets on.
 *
 * Engines that share a pool can each hold a part of it and want more: each is refused, each
 * gives back and takes again, and none ever has enough. The signs: every session of the
 * domain that holds pages is refused, and either nobody was served for KVD_TURN_STUCK_NS,
 * in which the session that asks was refused all the time, or
 * KVD_TURN_BACKS refused ones have given back since a session last gave pages back without
 * having been refused - since a request came to its end. Then one of them has the turn: who
 * holds most, among these who is refused longest. What comes back is its alone, the others
 * are told KV_FULL, until it comes to an end of something, ends itself, stops asking, or is
 * refused for KVD_TURN_MAX_NS. So as long as those that are refused give back, one request
 * in a domain always gets to its end. One session alone that is refused has nobody to
 * compete with and gets no turn. A tenant below its min is served in anybody's turn.
 * Loop thread only.
 */
#ifndef KVD_TURN_H
#define KVD_TURN_H

#include "base/mutant.h"
#include "kvmd/own/domain.h"
#include "kvmd/own/session.h"
#include "kvmd/own/tenant.h"

#define KVD_TURN_STUCK_NS 100000000ull
#define KVD_TURN_MAX_NS	  500000000ull
#define KVD_TURN_BACKS	  8u

/** kvd_turn_waits() - must @s wait for the session that has its domain's turn? */
static inline bool kvd_turn_waits(const struct kvd_session *s, u64 bytes)
{
	const struct kvd_account *acct = &s->tenant->account;
	const struct kvd_session *first = s->tenant->domain->turn;

	return first && first != s &&
	       (acct->used_bytes + bytes > acct->min_bytes || KV_MUTANT(turn_over_min));
}

/** kvd_turn_served() - @s got what it asked for */
static inline void kvd_turn_served(struct kvd_session *s, u64 now_ns)
{
	s->stepped_back = false;
	s->tenant->domain->served_ns = now_ns;
}

/** kvd_turn_refused() - @s was refused: perhaps nobody gets on */
void kvd_turn_refused(struct kvd_session *s);

/** kvd_turn_end() - @s has the turn no more, if it had */
void kvd_turn_end(struct kvd_session *s);

/** kvd_turn_gave() - @s gave pages back: after a refusal it only steps back, else
 * something of its has come to an end */
static inline void kvd_turn_gave(struct kvd_session *s)
{
	struct kvd_domain *d = s->tenant->domain;

	if (s->stalled) {
		d->steps_back += !s->stepped_back;
		s->stepped_back = true;
		return;
	}
	d->steps_back = 0;
	d->turns = 0;
	if (d->turn == s)
		d->turn = NULL;
}

#endif /* KVD_TURN_H */
