/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wait.pml - threads of one client that wait for completions and for room in the argument area
 * (libkvclient/ring.c): one polls and sleeps on the completion eventfd, the others on a condition.
 * No thread sleeps for ever, however late another copies its results out.
 * Mutants: ROOM_UNSAID (who makes room wakes the condition alone), TAKEN_UNSAID (who takes completions
 * does), LEFT_UNSAID (who stops polling tells nobody), NO_RECHECK (who polls sleeps without a last look).
 * Sequentially consistent. Run: tests/model/check.sh
 */
#ifndef N
#define N 3	/* threads */
#endif
#ifndef TURNS
#define TURNS 2	/* requests of each */
#endif
#ifndef ROOM
#define ROOM 2	/* requests that the argument area has room for */
#endif

bool lock = false;
byte room = ROOM, nr_waiting = 0, nr_ended = 0;
bool polling = false;
bool asleep[N];		/* on the condition, not told yet */
bool efd = false, need_wakeup = false;
bool sent[N], answered[N], done[N];

#define take	atomic { !lock -> lock = true }
#define leave	lock = false
#define there	(answered[0] || answered[1] || answered[2])

inline broadcast()
{
	d_step { asleep[0] = false; asleep[1] = false; asleep[2] = false }
}

/* Under the lock: take what is there. */
inline reap()
{
	any = false;
	k = 0;
	do
	:: k == N -> break
	:: k < N ->
		if
		:: answered[k] -> answered[k] = false; done[k] = true; any = true
		:: else
		fi;
		k++
	od;
	if
	:: any ->
#ifndef TAKEN_UNSAID
		if :: polling -> efd = true :: else fi;
#endif
		broadcast()
	:: else
	fi
}

/* Under the lock: wait until something changed. */
inline wait_change()
{
	if
	:: polling ->
		atomic { asleep[me] = true; lock = false };
		!asleep[me];
		take
	:: else ->
		polling = true;
		leave;
		need_wakeup = true;
#ifndef NO_RECHECK
		if
		:: there -> need_wakeup = false
		:: else ->
#endif
			efd;
			need_wakeup = false;
			efd = false
#ifndef NO_RECHECK
		fi
#endif
		;
		take;
		polling = false;
		reap();
#ifndef LEFT_UNSAID
		broadcast()
#endif
	fi
}

proctype thread(byte me)
{
	byte turn = 0, k;
	bool any;

	do
	:: turn == TURNS -> break
	:: turn < TURNS ->
		turn++;
		take;
		do
		:: room > 0 -> break
		:: room == 0 ->
			nr_waiting++;
			wait_change();
			nr_waiting--
		od;
		room--;
		sent[me] = true;
		leave;
		take;
		do
		:: true ->
			reap();
			if
			:: done[me] -> break
			:: else -> wait_change()
			fi
		od;
		leave;
		skip; /* copies its results out */
		take;
		done[me] = false;
		room++;
		if
		:: nr_waiting > 0 ->
#ifndef ROOM_UNSAID
			if :: polling -> efd = true :: else fi;
#endif
			broadcast()
		:: else
		fi;
		leave
	od;
	nr_ended++
}

/* kvmd: completions in any order; the store of one, a barrier, then the look at the word. */
proctype daemon()
{
	byte i;

end:	do
	:: atomic { sent[0] -> i = 0 }; goto answer
	:: atomic { sent[1] -> i = 1 }; goto answer
	:: atomic { sent[2] -> i = 2 }; goto answer
	od;
answer:
	sent[i] = false;
	answered[i] = true;
	if
	:: need_wakeup -> efd = true
	:: else
	fi;
	goto end
}

/* Nothing can go on: then everybody has ended. */
proctype watch()
{
	timeout;
	assert(nr_ended == N)
}

init {
	atomic {
		run daemon();
		run thread(0);
		run thread(1);
		run thread(2);
		run watch()
	}
}
