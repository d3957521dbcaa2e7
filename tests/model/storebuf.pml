/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storebuf.pml - announce against kill on a machine with store buffers (x86-TSO).
 *
 * The session stores its slot and then loads log_head; kvmd stores log_head and grace_epoch and
 * then loads the slot. Without a full barrier on both sides each may miss the other's store, as
 * in Dekker's algorithm. A store waits in a one-entry buffer until it drains or a fence empties
 * it; a process sees its own buffered store.
 * Asserted: the page is not reused while a step that saw the old word reads it.
 * Mutants: NO_CLIENT_FENCE (P3's barrier), NO_KVMD_FENCE (P6's barrier), RETIRE_EARLY (IDLE is stored
 * before the step's last access).
 */
byte slot = 0;  bool slot_buf = false; byte slot_val;   /* session's store buffer */
byte kill = 0;  bool kill_buf = false;                  /* kvmd's store buffer */
byte bytes = 1;

proctype drain_session()
{
end:	do
	:: atomic { slot_buf -> slot = slot_val; slot_buf = false }
	od
}

proctype drain_kvmd()
{
end:	do
	:: atomic { kill_buf -> kill = 1; kill_buf = false }
	od
}

proctype session()
{
	atomic { slot_val = 1; slot_buf = true };       /* announce */
#ifndef NO_CLIENT_FENCE
	(!slot_buf);
#endif
	if
	:: kill == 0 -> assert(bytes == 1);
#ifdef RETIRE_EARLY
		(!slot_buf);
		atomic { slot_val = 0; slot_buf = true };
#endif
		skip; assert(bytes == 1)
	:: else -> skip
	fi;
	(!slot_buf);                                    /* stores drain in order */
	atomic { slot_val = 0; slot_buf = true };       /* retire */
}

proctype kvmd()
{
	kill_buf = true;                                /* tag, log, epoch */
#ifndef NO_KVMD_FENCE
	(!kill_buf);
#endif
	(slot == 0);
	bytes = 2
}

init { atomic { run drain_session(); run drain_kvmd(); run session(); run kvmd() } }
