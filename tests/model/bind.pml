/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bind.pml - An extent index is reused while a client still maps the old extent (design 4).
 * Mutant: NOACK (reused before the unmap was acknowledged).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* extent index reuse: client A keeps old mapping of index 3; kvmd reuses index; valid tag, old memory */
byte mapA=1; byte cur=1; byte tag=1; bool ackA=false; byte hit=0;
proctype A(){ do :: mapA!=cur && !ackA -> mapA=0; ackA=true :: hit==3 -> if :: mapA==0 -> mapA=cur :: else fi; assert(mapA==2); break od }
proctype K(){ tag=2;
#ifndef NOACK
 ackA || (cur==2) -> 
#endif
 cur=2; tag=3; hit=3 }
init { atomic { cur=0; run A(); run K() } }
