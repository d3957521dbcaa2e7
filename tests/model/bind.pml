/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bind.pml - An extent index is reused while a client still maps the old extent (design 4).
 * One thread of the client hears of the removal, another is given a page of the new extent.
 * Asserted: a page that was given is read in the memory that the index names now.
 * Mutants: NOACK (reused before the unmap was acknowledged), ACK_FIRST (acknowledged before it was
 * unmapped), TAG_FIRST (the page is given before the index has its new memory).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
byte map = 1;			/* what the client maps there: 0 nothing, 1 old, 2 new */
byte cur = 1;			/* what kvmd has there */
bool removed = false, ack = false, given = false;

proctype dispatcher()
{
	removed;
#ifdef ACK_FIRST
	ack = true;
	map = 0
#else
	map = 0;
	ack = true
#endif
}

proctype user()
{
	given;
	if
	:: map == 0 -> map = cur
	:: else
	fi;
	assert(map == 2)
}

proctype kvmd()
{
	cur = 0;
	removed = true;
#ifndef NOACK
	ack;
#endif
#ifdef TAG_FIRST
	given = true;
	cur = 2
#else
	cur = 2;
	given = true
#endif
}

init { atomic { run dispatcher(); run user(); run kvmd() } }
