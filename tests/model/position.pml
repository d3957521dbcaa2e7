/* SPDX-License-Identifier: Apache-2.0 */
/*
 * position.pml - a launch may be refused after its argument block was built (P3).
 *
 * Each block carries the log from the stream's position to log_head. If the position moves when
 * the block is built and the launch then fails, the mirror misses those entries for ever.
 * Asserted: a step that passes its check reads a page that is still its own.
 * Mutants: EARLY (the position moves when the block is built), LATE (log_head is read before the
 * announce), PAST (the position moves to what is logged by now, not to what the block held).
 */
byte head = 0;          /* entries logged: entry 1 kills the page */
byte tag = 1;           /* 1 live, 2 killed */
byte mirror = 1;
byte position = 0;
byte slot = 0;
byte epoch = 1;
byte bytes = 1;

proctype stream()
{
	byte n = 0;
	byte to;
	byte word;
	do
	:: n < 3 ->
		n++;
#ifdef LATE
		to = head;
		slot = epoch;
#else
		slot = epoch;
		to = head;
#endif
		word = 0;
		if
		:: to > position -> word = tag  /* block holds the entry */
		:: else -> skip
		fi;
#ifdef EARLY
		position = to;
#endif
		if
		:: skip ->                      /* launched */
			if
			:: word > mirror -> mirror = word
			:: else -> skip
			fi;
#ifdef PAST
			position = head;
#else
			position = to;
#endif
			if
			:: mirror == 1 -> assert(bytes == 1); skip; assert(bytes == 1)
			:: else -> skip
			fi
		:: skip                         /* refused by the driver */
		fi;
		slot = 0
	:: else -> break
	od
}

proctype kvmd()
{
	byte e;
	tag = 2;
	head = 1;
	epoch = epoch + 1;
	e = epoch;
	(slot == 0 || slot >= e);
	bytes = 2
}

init { atomic { run stream(); run kvmd() } }
