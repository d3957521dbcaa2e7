/* SPDX-License-Identifier: Apache-2.0 */
/*
 * charge.pml - What a tenant pays for, with a kvmd that may die between any two stores (design 4, 5).
 * A page is paid for from its grant until it leaves quarantine. Requests may be parked between
 * their admission and their grant. The next kvmd counts the records.
 * Asserted after every turn: the charge is the number of the tenant's pages, and at most its max.
 * Mutants: EARLY (paid until the free, not until the end of quarantine), CHECK_ONCE (a parked
 * request is not admitted again), KEEP_COUNTER (the next kvmd believes the counter), FREE_TWICE (a
 * second free gives a charge back again).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
#define PAGES 3
#define MAX   2
#define TURNS 7

#define FREE  0
#define USED  1
#define QUIET 2			/* in quarantine */

byte page[PAGES];		/* records: outlive kvmd */
byte charge = 0;		/* memory of kvmd */
byte parked = 0, turns = 0, deaths = 0;

inline count()
{
	n = 0;
	k = 0;
	do
	:: k < PAGES ->
		if
		:: page[k] != FREE -> n++
		:: else
		fi;
		k++
	:: else -> break
	od
}

/* Between two stores. */
inline may_die()
{
	if
	:: deaths < 2 -> deaths++; goto adopt
	:: skip
	fi
}

active proctype kvmd()
{
	byte k, n, p;

adopt:	parked = 0;
#ifndef KEEP_COUNTER
	atomic { count(); charge = n };
#endif
turn:	skip;
	d_step { count() };
	assert(n == charge);
	assert(n <= MAX);
	if
	:: turns == TURNS -> goto end
	:: else -> turns++
	fi;
	atomic { p = 0; do :: p < PAGES - 1 -> p++ :: break od };
	if
	:: charge < MAX -> parked++	/* admitted; the grant comes in a later turn */
	:: parked && page[p] == FREE ->
		parked--;
#ifndef CHECK_ONCE
		if
		:: charge == MAX -> goto turn
		:: else
		fi;
#endif
		charge++;
		may_die();
		page[p] = USED;
		may_die()
	:: page[p] == USED ->
		page[p] = QUIET;
		may_die();
#ifdef EARLY
		charge--
#endif
#ifdef FREE_TWICE
	:: page[p] == QUIET && charge -> charge--
#endif
	:: page[p] == QUIET ->
		page[p] = FREE;
		may_die();
#ifndef EARLY
		charge--
#endif
	:: else
	fi;
	goto turn;
end:	skip
}
