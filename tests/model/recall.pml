/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recall.pml - kvmd recalls a stocked page while a thread pops it (design 4).
 * Mutants: PRIV (no compare-and-swap by either), KVMD_PLAIN (kvmd looks, then stores), TAG_FIRST (the
 * tag dies before the slot is won).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* magazine: kvmd recalls a stocked page while a thread pops it from private memory (mutant PRIV: pop without compare-and-swap) */
byte mag=1; bool live=true; bool used=false;
proctype cli(){
#ifdef PRIV
 if :: mag==1 -> mag=0; used=true :: else fi;
#else
 atomic{ if :: mag==1 -> mag=0; used=true :: else fi };
#endif
 if :: used -> assert(live) :: else fi }
proctype kvmd(){
#if defined(PRIV)
 live=false
#elif defined(KVMD_PLAIN)
 if :: mag==1 -> mag=2; live=false :: else fi
#elif defined(TAG_FIRST)
 bool was=live; live=false;
 atomic{ if :: mag==1 -> mag=2 :: else -> live=was fi }
#else
 atomic{ if :: mag==1 -> mag=2; live=false :: else fi }
#endif
}
init { atomic { run cli(); run kvmd() } }
