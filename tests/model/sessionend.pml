/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sessionend.pml - a session ends while one of its threads is about to start a step (P3, P8).
 *
 * The page is pinned by the session alone. kvmd stores table_epoch 0 in the session page, full
 * barrier, and only then drops the pin; an IDLE slot seen after that is quiet for good, because
 * a step announces before it loads table_epoch. Another owner then writes the page.
 * Asserted: no step of the ended session reads the new owner's bytes.
 * Mutants: PIN_FIRST (the pin drops before table_epoch is 0), NO_RECHECK (the step does not load
 * table_epoch after its announce), NO_SLOT (kvmd does not look at the slot).
 */
byte table_epoch = 1;
byte slot = 0;          /* 0 = IDLE */
byte tag = 1;           /* 1 = the session's generation, 2 = killed */
byte bytes = 1;         /* 1 = what the session wrote, 2 = the next owner's */
bool pinned = true;
bool reuse_ok = false;

proctype session()
{
	byte n = 0;
	byte seen;
	do
	:: n < 2 ->
		n++;
		slot = 1;
#ifndef NO_RECHECK
		if
		:: table_epoch == 0 -> slot = 0; break
		:: else -> skip
		fi;
#endif
		seen = tag;     /* check of the mirror brought up after the announce */
		if
		:: seen == 1 -> assert(bytes == 1); skip; assert(bytes == 1)
		:: else -> skip
		fi;
		slot = 0
	:: else -> break
	od
}

proctype kvmd()
{
#ifdef PIN_FIRST
	pinned = false;
	reuse_ok = true;
	table_epoch = 0;
#else
	table_epoch = 0;
	pinned = false;
#ifndef NO_SLOT
	(slot == 0);            /* retired; proof of death is grace.pml's */
#endif
	reuse_ok = true;
#endif
}

/* The session is quiet for kvmd: its pages need no grace period of their own. */
proctype next_owner()
{
	(reuse_ok && !pinned);
	bytes = 2;
	tag = 2
}

init { atomic { run session(); run kvmd(); run next_owner() } }
