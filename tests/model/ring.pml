/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring.pml - A hostile producer rewrites entries and lies about the tail (design 6, cases O57).
 * Asserted: what was checked is what is used; the consumer stays inside the ring.
 * Mutants: DOUBLE_FETCH (the entry is read again after its check), TRUST_TAIL (the tail is not
 * compared with the ring's size), TRUST_HEAD (the consumer takes its own position from the ring).
 * Sequentially consistent; weak memory is argued in docs/safety.md. Run: tests/model/check.sh
 */
/* ring.pml: hostile producer; -DDOUBLE_FETCH is the mutant */
#define N 4
#define MAXPG 2
byte ent[N]; byte tail=0; byte head_pub=0; byte executed=0;
active proctype hostile() { byte i;
  do :: executed<6 -> i=0; do :: i<N-1 -> i++ :: break od;
        if :: ent[i]=0 :: ent[i]=1 :: ent[i]=2 :: ent[i]=3 fi
     :: tail<6 -> tail++
     :: tail<6 -> tail = tail + 3           /* lies */
     :: tail<6 -> head_pub = 9              /* not its word to store */
     :: executed>=6 -> break
     :: break od }
active proctype daemon() { byte head=0; byte t; byte v; byte avail; byte mine=0;
  do ::
#ifdef TRUST_HEAD
        head = head_pub;
#endif
        assert(head == mine);
        atomic { t = tail } avail = t - head;
        if
#ifndef TRUST_TAIL
           :: avail > N -> break            /* quarantine */
#endif
           :: avail == 0 -> if :: executed>=6 -> break :: timeout -> break :: skip fi
           :: else ->
              assert(avail <= N);
#ifdef DOUBLE_FETCH
              if :: ent[head % N] < MAXPG -> v = ent[head % N]; assert(v < MAXPG); executed++
                 :: else -> skip fi;
#else
              v = ent[head % N];
              if :: v < MAXPG -> assert(v < MAXPG); executed++ :: else -> skip fi;
#endif
              head++; mine++; head_pub = head
        fi
     :: executed>=6 -> break od;
  assert(head <= 12) }
