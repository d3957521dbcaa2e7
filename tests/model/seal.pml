/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seal.pml - A writer's step is in flight when SEAL arrives; another session finds the page (P6).
 * Mutant: NOGRACE (findable at once).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* writer step in flight when SEAL arrives (overlapped scheduling / early seal); other session hits the page */
byte E=1; byte slot=0; bool sealed=false; bool findable=false; bool writing=false; bool fin=false;
proctype writer(){ byte n=0;
 do :: n<2 -> n++; slot=E; if :: !sealed -> writing=true; skip; writing=false :: else fi; slot=0 :: else -> break od }
proctype kvmd(){ byte e; sealed=true; E=E+1; e=E;
#ifndef NOGRACE
 (slot==0||slot>=e);
#endif
 findable=true; assert(!writing); skip; assert(!writing) }
init { atomic { run writer(); run kvmd() } }
