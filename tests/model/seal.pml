/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seal.pml - A writer's step is in flight when SEAL arrives; another session finds the page (P6).
 * Mutants: NOGRACE (findable at once), EPOCH_FIRST (the epoch advances before the tag says sealed),
 * LATE (the writer announces after its check).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* writer step in flight when SEAL arrives (overlapped scheduling / early seal); other session hits the page */
byte E=1; byte slot=0; bool sealed=false; bool findable=false; bool writing=false; bool fin=false;
proctype writer(){ byte n=0;
 do :: n<2 -> n++; 
#ifndef LATE
 slot=E;
#endif
 if :: !sealed ->
#ifdef LATE
 slot=E;
#endif
 writing=true; skip; writing=false :: else fi; slot=0 :: else -> break od }
proctype kvmd(){ byte e;
#ifdef EPOCH_FIRST
 E=E+1; e=E; sealed=true;
#else
 sealed=true; E=E+1; e=E;
#endif
#ifndef NOGRACE
 (slot==0||slot>=e);
#endif
 findable=true; assert(!writing); skip; assert(!writing) }
init { atomic { run writer(); run kvmd() } }
