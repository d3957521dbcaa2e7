/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grace.pml - One page, readers whose GPU work outlives them, a daemon that may crash twice (P6, P8).
 * A reader announces, loads the tag, launches; it may be killed: its socket closes at once, its
 * GPU work stops later. The daemon kills the tag, waits, reuses the page.
 * Asserted: the page is never reused while a launched step may touch it.
 * Mutants: TRUST_HUP (hang-up taken for the end of GPU work), FORGET (a crash loses the
 * quarantine), LATE (announce after the check).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* grace.pml: one physical page; reader may die with GPU work in flight; daemon may crash twice */
#ifndef R
#define R 2
#endif
#define LIVE 0
#define RETIRED 1
#define FREE 2
byte gen=1; byte st=LIVE; byte epoch=1;     /* survive a daemon crash */
byte ann[R]; bool alive[R]; bool gpu[R]; bool hup[R];
bool recycled=false; byte crashes=0; byte done=0;
proctype reader(byte i) { byte g;
  do :: done -> break
     :: !done ->
#ifndef LATE
       ann[i] = epoch;                       /* announce first: store + full barrier */
#endif
       g = gen;
       if :: st==LIVE && g==gen ->
#ifdef LATE
            ann[i] = epoch;
#endif
            gpu[i] = true;                   /* launch */
            if :: skip -> assert(!recycled); gpu[i]=false
               :: alive[i]=false; hup[i]=true;   /* killed: socket closes now, GPU stops later */
                  assert(!recycled); gpu[i]=false; break
            fi
          :: else -> skip
       fi;
       ann[i] = 0
  od }
inline waitall() { k=0;
  do :: k<R ->
#ifdef TRUST_HUP
       (ann[k]==0 || ann[k]>e || hup[k]);
#else
       (ann[k]==0 || ann[k]>e || (!alive[k] && !gpu[k]));
#endif
       k++
     :: else -> break od }
proctype daemon() { byte k; byte e;
start:
  if :: st==LIVE -> gen++; st=RETIRED
     :: st==RETIRED ->
#ifdef FORGET
        st=FREE
#else
        skip
#endif
     :: st==FREE -> skip
  fi;
  if :: crashes<2 -> crashes++; goto start :: skip fi;
  if :: st==RETIRED -> e=epoch; epoch=epoch+1; waitall(); st=FREE :: else -> skip fi;
  if :: crashes<2 -> crashes++; goto start :: skip fi;
  recycled=true; k=0;
  do :: k<R -> assert(!gpu[k]); k++ :: else -> break od;
  done=1 }
init { byte i=0; do :: i<R -> alive[i]=true; i++ :: else -> break od;
  atomic { i=0; do :: i<R -> run reader(i); i++ :: else -> break od; run daemon() } }
