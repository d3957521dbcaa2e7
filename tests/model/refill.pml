/* SPDX-License-Identifier: Apache-2.0 */
/*
 * refill.pml - the keeper died, kvmd gives everything to a new one and may die at any moment of it;
 * the next kvmd believes a keeper that has the image (design 5, P7). The client runs steps all the
 * time, on the old table until table_epoch changes.
 * Mutants: IMAGE_FIRST (the image is the first thing given), SESSION_LAST (sessions come after it),
 * SILENT (a session that is known is not told of the new table).
 * Sequentially consistent. Run: tests/model/check.sh
 */
#define IDLE 0

byte table_epoch = 1;		/* session page */
byte slot = IDLE;
byte grace = 3;			/* bounds what any step has announced */
bool live1 = true;		/* the page's tag in the old table: nobody changes that any more */
bool ours = true;		/* whose bytes lie in the page */
bool has_pool = false, has_session = false, has_image = false; /* the new keeper */
bool dead = false, serving = false;

proctype client()
{
	byte n = 0;

	do
	:: n == 3 -> break
	:: n < 3 ->
		n++;
		slot = grace;
		if
		:: table_epoch != 1 -> slot = IDLE; break /* attaches anew */
		:: else ->
			if
			:: live1 -> assert(ours); assert(ours)
			:: else
			fi;
			slot = IDLE
		fi
	od
}

proctype first()
{
#ifdef IMAGE_FIRST
	has_image = true;
	if :: goto die :: skip fi;
#endif
	has_pool = true;
	if :: goto die :: skip fi;
#ifdef SESSION_LAST
	has_image = true;
	if :: goto die :: skip fi;
#endif
	has_session = true;
	if :: goto die :: skip fi;
	has_image = true;
die:	dead = true
}

/* A page that no session is known to hold goes to others as soon as no known step may touch it. */
proctype second()
{
	dead;
	if
	:: !has_image -> goto cold /* other memory: the old is its holders' until they go */
	:: else
	fi;
	if
	:: has_session ->
#ifndef SILENT
		table_epoch = 2;
#endif
		(slot == IDLE || slot > grace)
	:: else
	fi;
	if
	:: has_pool -> ours = false
	:: else
	fi;
cold:	serving = true
}

init { atomic { run client(); run first(); run second() } }
