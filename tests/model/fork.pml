/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork.pml - One page is copied, freed, looked up and evicted at the same time (P3, P6, FORK).
 * The forker holds a lease and copies in a step; another session gives its own lease back, once
 * too often; a third finds the page; kvmd evicts it when nobody holds it, and an operator may
 * revoke it. kvmd's turns are atomic but for the grace period.
 * Asserted: a copy that is used has the source's bytes; who holds a lease loses it by a revoke only.
 * Mutants: NO_GRACE (reused at once), NO_STEP (copied without an announce), NO_CHECK (copied
 * without a check), DOUBLE_FREE (a second free takes somebody else's reference), EVICT_HELD
 * (evicted without a look at the references).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
byte refs = 2;			/* forker, giver */
byte tag = 1;			/* 1 live, 2 dead */
byte epoch = 1;
byte slot[2];
byte bytes = 1;			/* 1 the source's, 2 the next owner's */
bool revoked = false;

inline copy(i)
{
#ifndef NO_STEP
	slot[i] = epoch;
#endif
#ifdef NO_CHECK
	ok = true;
#else
	ok = (tag == 1);
#endif
	if
	:: ok -> assert(bytes == 1); skip; assert(bytes == 1)
	:: else -> assert(revoked)
	fi;
	slot[i] = 0;
	atomic {
		if
		:: tag == 1 -> refs--
		:: else
		fi
	}
}

proctype forker()
{
	bool ok;

	copy(0)
}

proctype giver()
{
	bool holds = true;

	atomic {
		if
		:: tag == 1 && holds -> refs--; holds = false
		:: else
		fi
	};
	atomic {
		if
#ifdef DOUBLE_FREE
		:: tag == 1 && refs > 0 -> refs--
#else
		:: tag == 1 && holds -> refs--
#endif
		:: else
		fi
	}
}

/* LOOKUP: the page is found while its tag lives, and pinned in the same turn. */
proctype finder()
{
	bool found, ok;

	atomic {
		found = (tag == 1);
		if
		:: found -> refs++
		:: else
		fi
	};
	if
	:: found -> copy(1)
	:: else
	fi
}

proctype kvmd()
{
	byte e;

	if
	:: atomic {
#ifndef EVICT_HELD
		refs == 0 ->
#endif
		tag = 2; epoch++; e = epoch }
	:: atomic { revoked = true; tag = 2; refs = 0; epoch++; e = epoch }
	fi;
#ifndef NO_GRACE
	(slot[0] == 0 || slot[0] >= e);
	(slot[1] == 0 || slot[1] >= e);
#endif
	bytes = 2
}

init { atomic { run forker(); run giver(); run finder(); run kvmd() } }
