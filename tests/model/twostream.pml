/* SPDX-License-Identifier: Apache-2.0 */
/*
 * twostream.pml - Two streams of one session share a tag mirror (P1, P3): words only grow, applied by max.
 * Mutants: PLAIN (plain stores: a late stream brings an old word back), POSITION_FIRST (the mirror's
 * position moves before its words do), LATE (the target is read before the announce).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* two streams of one session share a mirror; each applies what it read after its own announce.
   words grow: 1 live(A), kill. PLAIN: plain store of log value / re-read value; else atomicMax with words that only grow (kill = larger word) */
byte T=1; byte E=1; byte slot[2]; byte mir=1; byte mpos=1; byte bytes=1;
proctype stream(byte i) { byte v; byte tgt; byte n=0;
 do :: n<2 -> n++;
#ifdef LATE
   tgt=E; slot[i]=E;
#else
   slot[i]=E; tgt=E;
#endif
   if :: mpos<tgt ->
#ifdef POSITION_FIRST
        atomic { if :: tgt>mpos -> mpos=tgt :: else fi };
#endif
        v=T;                               /* read authority (or log) */
#ifdef PLAIN
        mir=v; 
#else
        atomic { if :: v>mir -> mir=v :: else fi };
#endif
        atomic { if :: tgt>mpos -> mpos=tgt :: else fi }
      :: else fi;
   if :: mir==1 -> assert(bytes==1); skip; assert(bytes==1) :: else fi;
   slot[i]=0
 :: else -> break od }
proctype kvmd(){ byte e;
   E=2;                                    /* another page changed */
   T=2; E=3; e=3;
   (slot[0]==0 || slot[0]>=e); (slot[1]==0 || slot[1]>=e);
   bytes=3 }
init { atomic { run stream(0); run stream(1); run kvmd() } }
