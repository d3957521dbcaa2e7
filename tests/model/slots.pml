/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.pml - a session with two steps in flight: the epoch belongs to the slot (P3, P6).
 *
 * Two overlapping steps of one session. kvmd must see each slot IDLE or at or past the kill's
 * epoch. With one epoch for the whole session, a new step's announce hides the older step that
 * still runs on the old word.
 * Asserted: the page is not reused while either step reads it.
 * Mutants: PER_SESSION (one epoch word, overwritten by each step, IDLE when the last one ends),
 * FIRST_ONLY (kvmd looks at the first slot), LATE (a step announces after its check).
 */
byte epoch = 1;
byte slot[2];
byte session_epoch = 0;
byte running = 0;
byte tag = 1;
byte bytes = 1;

proctype step(byte i)
{
	byte n = 0;
	do
	:: n < 2 ->
		n++;
#ifdef PER_SESSION
		atomic { running++; session_epoch = epoch };
#elif !defined(LATE)
		slot[i] = epoch;
#endif
		if
		:: tag == 1 ->
#ifdef LATE
			slot[i] = epoch;
#endif
			assert(bytes == 1); skip; assert(bytes == 1)
		:: else -> skip
		fi;
#ifdef PER_SESSION
		atomic {
			running--;
			if
			:: running == 0 -> session_epoch = 0
			:: else -> skip
			fi
		}
#else
		slot[i] = 0
#endif
	:: else -> break
	od
}

proctype kvmd()
{
	byte e;
	tag = 2;
	epoch = epoch + 1;
	e = epoch;
#ifdef PER_SESSION
	(session_epoch == 0 || session_epoch >= e);
#else
	(slot[0] == 0 || slot[0] >= e);
#ifndef FIRST_ONLY
	(slot[1] == 0 || slot[1] >= e);
#endif
#endif
	bytes = 2
}

init { atomic { run step(0); run step(1); run kvmd() } }
