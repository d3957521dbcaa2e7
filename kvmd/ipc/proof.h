/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/proof.h - when is a dead process's work on pages over? (design 5, P8)
 *
 * On host memory a readable pidfd is the proof. On a GPU kernels may outlive the process
 * (a forked child keeps its channels open: facts F-fork-gpu), so NVML must have stopped
 * listing the pid as well, and that counts only if it was seen listing it while the
 * process lived: else NVML may not see this process at all (another pid namespace, MPS),
 * and the session's pages stay in quarantine unless its steps retire.
 *
 * Loop thread only.
 */
#ifndef KVD_IPC_PROOF_H
#define KVD_IPC_PROOF_H

#include "kvmd/backend/nvml.h"
#include "kvmd/ipc/loop.h"

struct kvd;
struct kvd_conn;

/**
 * struct kvd_proof - what the daemon knows of the GPU's processes
 * @nvml: made at the first question
 * @watch: its answers
 * @last: latest answer
 * @next_ns: when to ask again; ~0 = not
 */
struct kvd_proof {
	struct kvd_nvml *nvml;
	struct kvd_watch watch;
	struct kvd_nvml_answer last;
	u64 next_ns;
};

#define KVD_PROOF_WAIT_NS 200000000ull

/** enum kvd_seen - what NVML said of a connection's process while it lived */
enum kvd_seen {
	KVD_SEEN_NOT,
	KVD_SEEN_LISTED,
	KVD_SEEN_MPS, /* ever: then its absence from the list proves nothing */
};

/**
 * struct kvd_conn_proof - the same of one connection
 * @since: the first question that was asked after the process was identified
 * @exited: its pidfd was readable; @after: a question asked after that
 * @hold_ns: until when its first POOL_OPEN waits for an answer
 * @wait_ns, @due_ns: to ask again while it is not seen
 */
struct kvd_conn_proof {
	enum kvd_seen seen;
	u64 since;
	bool exited;
	u64 after;
	u64 hold_ns;
	u64 wait_ns;
	u64 due_ns;
};

/**
 * kvd_proof_wait() - see that NVML lists a process before it gets pages
 *
 * It has a context when it opens its first pool. Asked later, an engine that dies young
 * would never have been seen, and its pages would stay in quarantine.
 *
 * Return: true: hold the POOL_OPEN; it goes on when NVML has answered, at the latest after
 * KVD_PROOF_WAIT_NS, seen or not.
 */
bool kvd_proof_wait(struct kvd_conn *conn);

/** kvd_proof_adopt() - what an earlier kvmd saw of the process of @conn's session */
void kvd_proof_adopt(struct kvd_conn *conn);

/** kvd_proof_exited() - the pidfd of an ended session is readable. It may be reaped here */
void kvd_proof_exited(struct kvd_conn *conn);

/** kvd_proof_ask() - for the mover. Return: the question's number; 0: it cannot be asked,
 * or not yet: the driver is starting, and no --gpu says which GPU it is */
u64 kvd_proof_ask(struct kvd *kvd);

/** kvd_proof_turn() - ask what is due */
void kvd_proof_turn(struct kvd *kvd);

/** kvd_proof_fini() - stop asking */
void kvd_proof_fini(struct kvd *kvd);

/** kvd_proof_text() - why an exited session is not over yet, for status; NULL: it is not
 * waiting for a proof */
const char *kvd_proof_text(const struct kvd_conn *conn);

#endif
