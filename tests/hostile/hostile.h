/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hostile.h - the matrix of attacks: what one is, and what it finds around it.
 *
 * An attack is a function that runs in a process of its own, as a uid of its own whose
 * tenant and domain are not the victim's. It returns when kvmd has answered as expected
 * and fails the process (KVT_EXPECT, KVT_FAIL) when not. matrix.c looks at kvmd and at the
 * victim after each of them.
 */
#ifndef TESTS_HOSTILE_H
#define TESTS_HOSTILE_H

#include "tests/ipc/common.h"

#define VICTIM_UID   4201u
#define ATTACKER_UID 4202u
#define STRANGER_UID 4203u /* nobody's in the policy */

/**
 * struct scene - kvmd, its place, and what the victim shows of itself
 * @d: for the helpers of tests/ipc: socket and pid
 * @dir: sockets, state, policy
 * @victim: its process
 * @seen: shared with it
 */
struct scene {
	struct eng_private_kvmd d;
	char dir[64];
	char kvmd_path[512];
	pid_t victim;
	struct seen *seen;
};

/**
 * struct seen - written by the victim, read by everybody
 * @rounds: how often it has done its work
 * @wrong: words of its pages that were not as it had written them
 * @refused: requests that were not served
 * @page: one of its pages; @tokens: a prefix that it sealed (all equal to their index)
 * @ns: how long the last rounds took, a ring
 */
#define SEEN_NS 65536u
struct seen {
	u64 rounds, wrong, refused;
	struct kv_grant page;
	u32 tokens[KV_PAGE_TOKENS];
	u32 ns[SEEN_NS];
};

/**
 * struct attack - one row of the matrix
 * @name: a few words; @expected: what must come of it
 */
struct attack {
	const char *name, *expected;
	void (*fn)(const struct scene *sc);
};

extern const struct attack attacks_socket[], attacks_ring[], attacks_memory[],
	attacks_pages[], attacks_host[];

/** become() - this process is @uid from now on, for good */
void become(uid_t uid);

/** struct held - descriptors that raw_open() would have closed */
struct held {
	int ring_fd, session_fd, table_fd;
};

/** attacker_open() - become the attacker; HELLO, ring, session page, the small pool */
void attacker_open(const struct scene *sc, struct ipc_raw *r, struct held *ret);

/** raw_ends() - kvmd must hang up on @r within five seconds */
void raw_ends(struct ipc_raw *r);

/** refused() - send a HELLO that kvmd must refuse with a message that has @word */
void refused(const struct scene *sc, const struct kv_msg_hello *hello, const char *word);

/** answers() - the request must be answered with @result */
void answers(struct ipc_raw *r, struct kv_sqe sqe, int result);

#endif
