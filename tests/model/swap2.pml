/* SPDX-License-Identifier: Apache-2.0 */
/*
 * swap2.pml - Announce, tag mirror fed by a change log, kvmd crash with a fresh table (P3, P6, P7).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* announce + tag mirror (change log) + kvmd crash with table swap. One page, one slot per reader.
 * words: 1 = gen A live (readers were given 1), 2 = killed, 3 = gen B live (other owner, other bytes).
 * Variants: MIRROR_ANNOUNCED (mutant: mirror goes up to the announced epoch) or else up to head read after barrier
 *  SWAP_SLOTS  (mutant: session idle or announced >= e counts as quiet, whatever table it uses)
 *  SWAP_ACK    (session counts as reader until its library said re-attached; re-attach runs on another thread)
 *  else        table word in session page, stored by new kvmd before any tag change, re-read by the session after its barrier
 *  EPOCH_RESET (grace epoch starts again at 1 in the new instance)   OFF_NOANN (check off does not announce)
 *  NEWPAGE (new kvmd starts with fresh session pages: slots of steps in flight not seen)
 */
#ifndef R
#define R 2
#endif
#ifndef D
#define D 3      /* kvmd instances */
#endif
#define MAXE 8
byte A=1; byte bytes=1;                 /* authoritative word (keeper), page bytes */
byte PE=1;                              /* persistent epoch */
byte T[D]; byte E[D]; byte H[D*MAXE];   /* published table d, its epoch word, word as of epoch (log) */
byte inst=0; bool up=false;
byte tab[R]; byte att[R]; byte tword[R];
byte slot[R];
byte mir[R]; byte mpos[R]; byte mtab[R];
bool gpu[R];
bool fin=false; byte bumps=0;

proctype reader(byte i) { byte t; byte e; byte tgt; byte n=0;
  do
  :: n<2 -> n++;
    t = tab[i];
    e = E[t];
    #ifndef OFF_NOANN
    slot[i] = e;                        /* store + full barrier (spin is SC) */
#endif
#if !defined(SWAP_SLOTS) && !defined(SWAP_ACK)
    if :: tword[i] != t -> slot[i]=0; atomic { (up || fin) -> tab[i]=inst }; goto next   /* attach, again */
       :: else -> skip fi;
#endif
#ifdef MIRROR_ANNOUNCED
    tgt = e;
#else
    tgt = E[t];
#endif
    atomic { if :: mtab[i]!=t || mpos[i]<tgt -> mir[i]=H[t*MAXE+tgt]; mpos[i]=tgt; mtab[i]=t :: else -> skip fi }
    if :: mir[i]==1 -> gpu[i]=true; assert(bytes==1); skip; assert(bytes==1); gpu[i]=false
       :: else -> skip fi;
    slot[i] = 0;
next: skip
  :: n>=2 -> break
  od }

proctype reattach(byte i) {             /* another thread of the session */
  do :: up && tab[i]!=inst -> tab[i]=inst; att[i]=inst
     :: fin -> break
  od }

inline maycrash() { if :: inst<D-1 -> up=false; inst++; goto start :: skip fi }

proctype kvmd() { byte k; byte e;
start:
  /* adopt: fresh table from the authoritative copy */
#ifdef EPOCH_RESET
  e = 1;
#else
  e = PE;
#endif
  atomic { T[inst]=A; E[inst]=e; H[inst*MAXE+e]=A };
#if !defined(SWAP_SLOTS) && !defined(SWAP_ACK)
  k=0; do :: k<R -> tword[k]=inst; if :: inst<D-1 -> inst++; goto start :: skip fi; k++ :: else -> break od;
#endif
#ifdef NEWPAGE
  if :: inst>0 -> k=0; do :: k<R -> slot[k]=0; k++ :: else -> break od :: else -> skip fi;
#endif
  up=true;
  if :: bumps<2 -> bumps++; e=E[inst]+1; PE=e; H[inst*MAXE+e]=A; E[inst]=e :: skip fi;
  maycrash();
  if :: A==1 -> A=2; :: else -> skip fi;
  maycrash();
  if :: A==2 ->
     T[inst]=2; e=E[inst]+1; PE=e; H[inst*MAXE+e]=2;
     maycrash();
     E[inst]=e;
     maycrash();
     k=0;
     do :: k<R ->
#ifdef SWAP_ACK
        (att[k]==inst || inst==0);
#endif
        (slot[k]==0 || slot[k]>=e);
        k++
     :: else -> break od;
     bytes=3; A=3; T[inst]=3
     :: else -> skip fi;
  fin=true }

init { byte i=0; atomic {
  T[0]=1; E[0]=1; H[1]=1; 
  do :: i<R -> mir[i]=1; mpos[i]=1; mtab[i]=0; i++ :: else -> break od;
  i=0; do :: i<R -> run reader(i);
#if defined(SWAP_SLOTS) || defined(SWAP_ACK)
   run reattach(i);
#endif
   i++ :: else -> break od; run kvmd() } }
