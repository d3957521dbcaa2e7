/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/proof.c - see proof.h. */
#include "kvmd/ipc/proof.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/own/image.h"

#define EXIT_POLL_NS (10 * KV_NSEC_PER_MSEC)
#define SEEN_POLL_NS KV_NSEC_PER_SEC
#define SEEN_MAX_NS  (64 * KV_NSEC_PER_SEC)

static void due(struct kvd *kvd, u64 when_ns)
{
	kvd->proof.next_ns = KV_MIN(kvd->proof.next_ns, when_ns);
}

static bool still_alive(const struct kvd_conn *conn)
{
	struct pollfd p = {.fd = conn->pidfd, .events = POLLIN};

	return conn->pidfd >= 0 && poll(&p, 1, 0) == 0;
}

/* Its absence is a proof only if the list is one that this process shows up in. */
static bool proves_end(const struct kvd_conn *conn, const struct kvd_nvml_answer *a)
{
	bool mps;

	if (a->result || a->number < conn->proof.after)
		return false;
	if (conn->proof.seen != KVD_SEEN_LISTED && !KV_MUTANT(nvml_unseen_ok))
		return false;
	return !kvd_nvml_lists(a, (u32)conn->cred.pid, &mps);
}

/* Kept: the process may end when another kvmd serves, or none. */
static void seen(struct kvd_conn *conn, enum kvd_seen what)
{
	conn->proof.seen = what;
	if (!conn->session || !conn->session->image || KV_MUTANT(seen_forgotten))
		return;
	conn->session->image->seen =
		what == KVD_SEEN_MPS ? KVD_IMAGE_MPS : KVD_IMAGE_LISTED;
	kvd_crash_point();
}

void kvd_proof_adopt(struct kvd_conn *conn)
{
	const struct kvd_image_session *is = conn->session->image;

	if (is && is->seen == KVD_IMAGE_LISTED)
		conn->proof.seen = KVD_SEEN_LISTED;
	if (is && is->seen == KVD_IMAGE_MPS)
		conn->proof.seen = KVD_SEEN_MPS;
}

static void look_at_conn(struct kvd_conn *conn, const struct kvd_nvml_answer *a)
{
	struct kvd_conn_proof *p = &conn->proof;
	bool mps;

	if (p->exited) {
		if (conn->session && proves_end(conn, a))
			kvd_session_work_ended(conn->session);
		return;
	}
	/*
	 * The pid is this process's for as long as the pidfd is not readable, and the
	 * answer was begun after we had the pidfd: so it is this process that is listed.
	 */
	if (a->result || !p->since || a->number < p->since ||
	    !kvd_nvml_lists(a, (u32)conn->cred.pid, &mps) || !still_alive(conn))
		return;
	if (mps)
		seen(conn, KVD_SEEN_MPS);
	else if (p->seen == KVD_SEEN_NOT)
		seen(conn, KVD_SEEN_LISTED);
}

static void answer_ready(void *arg, u32 events)
{
	struct kvd *kvd = arg;
	struct kvd_proof *proof = &kvd->proof;
	struct kvd_conn *conn, *tmp;
	int had = proof->last.result;

	if (!kvd_nvml_take(proof->nvml, &proof->last))
		return;
	if (proof->last.result && proof->last.result != had)
		kvd_warn("ipc/proof", "%s", proof->last.error);
	kvd_moving_answer(kvd, &proof->last);
	list_for_each_entry_safe (conn, tmp, &kvd->conns, node) {
		look_at_conn(conn, &proof->last);
		kvd_conn_unhold(conn); /* is held again if it waits for a later one */
	}
	list_for_each_entry (conn, &kvd->conns, node)
		if (conn->proof.exited && conn->session &&
		    conn->proof.seen == KVD_SEEN_LISTED)
			due(kvd, kvd->now_ns + (proof->last.result ? SEEN_POLL_NS
								   : EXIT_POLL_NS));
}

/* NVML is asked of one GPU, by its name, for as long as kvmd lives. */
static bool gpu_known(const struct kvd *kvd)
{
	static const u8 zero[16];
	u8 uuid[16];

	kvd_memory_uuid(kvd, uuid);
	return memcmp(uuid, zero, sizeof(uuid)) || KV_MUTANT(nvml_asked_early);
}

u64 kvd_proof_ask(struct kvd *kvd)
{
	struct kvd_proof *proof = &kvd->proof;
	char text[KVD_UUID_TEXT];

	if (!proof->nvml) {
		if (!gpu_known(kvd))
			return 0;
		if (kvd_nvml_create(kvd_memory_quota_name(kvd, text), &proof->nvml))
			return 0;
		proof->watch.fd = kvd_nvml_event_fd(proof->nvml);
		proof->watch.events = KVD_LOOP_IN;
		proof->watch.ready = answer_ready;
		proof->watch.arg = kvd;
		if (kvd_loop_add(kvd->loop, &proof->watch)) {
			kvd_nvml_destroy(proof->nvml);
			proof->nvml = NULL;
			return 0;
		}
	}
	return kvd_nvml_ask(proof->nvml);
}

bool kvd_proof_wait(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;
	struct kvd_conn_proof *p = &conn->proof;

	if (kvd->memory.kind == KV_BACKEND_HOST)
		return false;
	if (!p->wait_ns) {
		p->since = kvd_proof_ask(kvd);
		p->hold_ns = kvd->now_ns + KVD_PROOF_WAIT_NS;
		p->wait_ns = SEEN_POLL_NS;
		p->due_ns = kvd->now_ns + SEEN_POLL_NS;
	}
	if (!p->since || kvd->proof.last.number >= p->since ||
	    kvd->now_ns >= p->hold_ns) {
		due(kvd, p->due_ns);
		return false;
	}
	due(kvd, p->hold_ns);
	return true;
}

void kvd_proof_exited(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;

	if (!conn->session)
		return;
	if (kvd->memory.kind == KV_BACKEND_HOST || KV_MUTANT(trust_pidfd)) {
		kvd_session_work_ended(conn->session);
		return;
	}
	conn->proof.exited = true;
	conn->proof.after = kvd_proof_ask(kvd);
	if (!conn->proof.after) {
		conn->proof.after = ~0ull; /* no proof yet; the next turn asks again */
		due(kvd, kvd->now_ns + SEEN_POLL_NS);
	}
}

void kvd_proof_turn(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;
	bool wanted = false;
	u64 number;

	if (kvd->now_ns < kvd->proof.next_ns)
		return;
	kvd->proof.next_ns = ~0ull;
	list_for_each_entry_safe (conn, tmp, &kvd->conns, node) {
		struct kvd_conn_proof *p = &conn->proof;

		kvd_conn_unhold(conn);
		if (p->exited && conn->session) {
			wanted |= p->seen == KVD_SEEN_LISTED;
		} else if (conn->state == KVD_CONN_OPEN && p->wait_ns &&
			   p->seen == KVD_SEEN_NOT) {
			if (kvd->now_ns >= p->due_ns) {
				wanted = true;
				p->wait_ns = KV_MIN(p->wait_ns * 2, SEEN_MAX_NS);
				p->due_ns = kvd->now_ns + p->wait_ns;
			}
			due(kvd, p->due_ns);
		}
	}
	if (!wanted)
		return;
	number = kvd_proof_ask(kvd);
	list_for_each_entry (conn, &kvd->conns, node) {
		if (number && conn->proof.exited && conn->proof.after == ~0ull)
			conn->proof.after = number;
		if (number && conn->proof.wait_ns && !conn->proof.since)
			conn->proof.since = number;
	}
	if (!number)
		due(kvd, kvd->now_ns + SEEN_POLL_NS);
}

void kvd_proof_fini(struct kvd *kvd)
{
	kvd_loop_del(kvd->loop, &kvd->proof.watch);
	kvd_nvml_destroy(kvd->proof.nvml);
	free(kvd->proof.last.pids);
	memset(&kvd->proof, 0, sizeof(kvd->proof));
}

const char *kvd_proof_text(const struct kvd_conn *conn)
{
	const struct kvd_nvml_answer *last = &conn->kvd->proof.last;

	if (!conn->proof.exited || !conn->session)
		return NULL;
	if (last->result)
		return "NVML cannot say whether its GPU work has ended";
	switch (conn->proof.seen) {
	case KVD_SEEN_LISTED:
		return "NVML still lists it: a forked child keeps its GPU work alive";
	case KVD_SEEN_MPS:
		return "it was a client of MPS: end it there (terminate_client)";
	case KVD_SEEN_NOT:
		break;
	}
	return "NVML never listed it: nothing proves that its GPU work has ended";
}
