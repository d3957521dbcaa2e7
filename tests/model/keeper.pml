/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keeper.pml - kvmd dies anywhere in a kill, the next one adopts its records (design 5, P6, P7).
 * The client runs steps all the time: on the old table until table_epoch changes.
 * Mutants: FORGET (adopted quarantine is free at once), TAG_FIRST (tags change before table_epoch
 * is stored), EPOCH_RESET (grace epochs start anew).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
#define IDLE	0
#define LIVE	1
#define WAITING 2
#define REUSED	3
#ifdef EPOCH_RESET
#define NEXT_EPOCH 1
#else
#define NEXT_EPOCH 6	/* the bound that was saved before epochs below it were used */
#endif

byte table_epoch = 1;		/* session page */
byte slot = IDLE;
byte grace1 = 3, grace2 = 0;	/* as published in the first and second table */
bool live1 = true, live2 = false; /* the page's tag in either table */
byte record = LIVE;		/* in the keeper */
bool ours = true;		/* whose bytes lie in the page */
bool dead = false, serving = false;

proctype client()
{
	byte attached = 1, n = 0, e;
	bool ok;

	do
	:: n == 3 -> break
	:: n < 3 ->
		n++;
		if
		:: attached == 1 -> e = grace1
		:: else -> e = grace2
		fi;
		slot = e;
		if
		:: table_epoch != attached -> slot = IDLE; serving; attached = 2
		:: else ->
			if
			:: attached == 1 -> ok = live1
			:: else -> ok = live2
			fi;
			if
			:: ok -> assert(ours); assert(ours)
			:: else
			fi;
			slot = IDLE
		fi
	od
}

proctype first()
{
	if :: goto die :: skip fi;
	record = WAITING;
	if :: goto die :: skip fi;
	live1 = false;
	if :: goto die :: skip fi;
	grace1++;
	if :: goto die :: skip fi;
	(slot == IDLE || slot >= grace1);
	if :: goto die :: skip fi;
	record = REUSED;
	ours = false;
die:	dead = true
}

/* A live page may be killed by the second kvmd as well, before anybody attaches. */
proctype second()
{
	dead;
#ifndef TAG_FIRST
	table_epoch = 2;
#endif
	grace2 = NEXT_EPOCH;
	if
	:: record == LIVE -> live2 = true
	:: record == LIVE -> record = WAITING
	:: else
	fi;
	if
	:: record == WAITING ->
		grace2++;
#ifndef FORGET
		(slot == IDLE || slot >= grace2);
#endif
		record = REUSED;
		ours = false
	:: else
	fi;
#ifdef TAG_FIRST
	table_epoch = 2;
#endif
	serving = true
}

init { atomic { run client(); run first(); run second() } }
