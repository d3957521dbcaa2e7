/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/conn.h - one engine connection: socket, credentials, rings, session page, pidfd.
 *
 *	UNKNOWN -> OPEN -> CLOSED -> freed
 *	AWAY -> OPEN (of a new connection) | CLOSED
 *	OPEN -> AWAY (a peer that was taking its session up hung up before it had used it)
 *
 * UNKNOWN: connected, no HELLO. OPEN: has a session. CLOSED: socket and ring are gone and
 *	the session has ended; session page and pidfd stay until the core has reaped it (P8).
 *
 * Thread rules: the loop thread only. A conn is freed at the end of a turn, never inside
 *	one.
 */
#ifndef KVD_IPC_CONN_H
#define KVD_IPC_CONN_H

#include <sys/socket.h>

#include "base/list.h"
#include "kvmd/config.h"
#include "kvmd/ipc/loop.h"
#include "kvmd/ipc/msg.h"
#include "kvmd/ipc/proof.h"
#include "kvmd/ipc/ring.h"

struct kvd;
struct kvd_session;
struct kvd_pool;

enum kvd_conn_state {
	KVD_CONN_UNKNOWN,
	KVD_CONN_OPEN,
	KVD_CONN_CLOSED,
	KVD_CONN_AWAY, /* session of an earlier kvmd, not attached (whole) again yet */
};

/**
 * struct kvd_conn - one connection
 * @node: in kvd.conns, or kvd.dead
 * @awake_node: in kvd.awake, or alone
 * @cred: SO_PEERCRED, as of connect()
 * @fd, @watch: socket; owner
 * @pidfd, @pid_watch: the process; owner. @pidfd_raced: made from the pid, not by the
 * socket
 * @sq_event, @cq_event, @ring_watch: eventfds; owner
 * @ring: rings
 * @page, @page_fd: session page; owner until reaped
 * @session: borrowed; NULL before HELLO and after reaping
 * @client_id: kept after reaping
 * @name: client name; @tenant: index in the configuration's tenants at HELLO
 * @out: messages that wait
 * @added: EXTENT_ADDED being collected; @added_fds its fds
 * @kept: page and pidfd are in the keeper; @kept_tenant is part of their key
 * @resumed: took up a session with its cookie: POOL_REPLYs are followed by LEASES
 * @unchecked: was told check=off when it connected
 * @resuming: and its peer has asked for nothing yet: it may still give up and come again
 * @told: pools whose extents were sent on this connection, by entry of session->attach
 * @leases: LEASES being sent; @leases_pfn where it goes on
 * @opening: POOL_OPEN runs: its extents are sent after the reply
 * @proof: of the end of its GPU work
 * @closing: @held is a POOL_CLOSE that goes on in the next turn
 * @held, @held_bytes: a POOL_OPEN that waits for the GPU to start, or for LEASES to be sent;
 * nothing is read until then
 * @nr_requests: hashing or parked; @nr_parked: parked ones
 * @nr_ops: entries served
 * @last_event_ns: when an event was sent last; for "does not dispatch"
 * @slots: announce slots as seen last, for people
 * @undispatched_ns: since when events lie unread; 0 = none
 */
struct kvd_conn {
	struct list_node node;
	struct list_node awake_node;
	struct kvd *kvd;
	enum kvd_conn_state state;
	struct ucred cred;
	int fd;
	struct kvd_watch watch;
	int pidfd;
	struct kvd_watch pid_watch;
	bool pidfd_raced;
	int sq_event;
	int cq_event;
	struct kvd_watch ring_watch;
	struct kvd_ring ring;
	struct kv_session_page *page;
	int page_fd;
	struct kvd_session *session;
	u64 client_id;
	u32 role;
	u32 tenant;
	char name[KV_NAME_BYTES];
	u8 cookie[KV_COOKIE_BYTES];
	struct kvd_out out;
	struct kv_msg_extents added;
	int added_fds[KV_MSG_FDS_MAX];
	bool resumed;
	bool unchecked;
	bool resuming;
	bool kept;
	u32 kept_tenant;
	u32 told;
	struct kvd_pool *leases;
	u32 leases_pfn;
	bool opening;
	struct kvd_conn_proof proof;
	bool closing;
	struct kv_msg *held;
	u32 held_bytes;
	bool dead;
	u32 nr_requests;
	u32 nr_parked;
	u64 nr_ops;
	u64 opened_ns;
	u64 undispatched_ns;
	struct {
		u64 epoch;
		u64 since_ns;
	} slots[KV_ANNOUNCE_SLOTS];
	char end_why[64];
};

/**
 * kvd_conn_away() - a connection without a peer for a session of an earlier kvmd
 * @page_fd, @pidfd: mapped, watched; its own after kvd_conn_away_ready()
 *
 * Return: conn; NULL.
 */
struct kvd_conn *kvd_conn_away(struct kvd *kvd, u64 client_id, int page_fd, int pidfd);

/** kvd_conn_away_drop() - it came to nothing; the fds are the caller's */
void kvd_conn_away_drop(struct kvd_conn *conn);

/** kvd_conn_away_ready() - its session is there: watch its process */
void kvd_conn_away_ready(struct kvd_conn *conn);

/** kvd_conn_find_away() - the session that HELLO's cookie names, if the peer is the
 * process that had it (resume.c). Return: its conn; NULL: open a session of its own */
struct kvd_conn *kvd_conn_find_away(struct kvd_conn *conn,
				    const struct kv_msg_hello *hello);

/** kvd_conn_take_up() - @away's session is @conn's from now on; @away is over */
void kvd_conn_take_up(struct kvd_conn *conn, struct kvd_conn *away);

/** kvd_conn_tell_pools() - which pools a session that was taken up has open */
void kvd_conn_tell_pools(struct kvd_conn *conn);

/** kvd_conn_leases() - send more of the LEASES message that is under way (resume.c) */
void kvd_conn_leases(struct kvd_conn *conn);

/** kvd_conn_accepted() - a new connection; owns @fd */
void kvd_conn_accepted(struct kvd *kvd, int fd);

/**
 * kvd_conn_end() - hang-up, protocol fault or shutdown of one peer
 * @result: 0, or -errno told to the peer by KV_MSG_ERROR
 * @why: a few words
 *
 * Twice is a no-op. The conn stays valid until the end of the turn.
 */
void kvd_conn_end(struct kvd_conn *conn, int result, const char *why);

/**
 * kvd_conn_hung_up() - the peer is not there any more
 *
 * The end of its session, unless it was just taking it up: then the session waits for its
 * process as before (AWAY).
 */
void kvd_conn_hung_up(struct kvd_conn *conn, const char *why);

/** kvd_conn_reap_dead() - free the conns that died in this turn */
void kvd_conn_reap_dead(struct kvd *kvd);

/** kvd_conn_tick() - time-outs: peers without HELLO, undispatched events */
void kvd_conn_tick(struct kvd *kvd);

/** kvd_conn_send() - send a message; a peer that cannot take it is dropped. Return: 0;
 * -errno and the connection has ended */
int kvd_conn_send(struct kvd_conn *conn, const struct kv_msg *msg, const int *fds);

/** kvd_conn_watch() - watch the socket for what can be done: @held and @out have changed */
void kvd_conn_watch(struct kvd_conn *conn);

/** kvd_conn_refs_turn() - try again what waits for room for descriptors (kvd_out.refs) */
void kvd_conn_refs_turn(struct kvd *kvd);

/** kvd_conn_hold() - look at @msg again when the GPU has started. Return: 0; -ENOMEM */
int kvd_conn_hold(struct kvd_conn *conn, const struct kv_msg *msg, u32 bytes);

/** kvd_conn_closing_turn() - a slice more of each pool that is being closed */
void kvd_conn_closing_turn(struct kvd *kvd);

/** kvd_conn_unhold() - the GPU has started, or failed */
void kvd_conn_unhold(struct kvd_conn *conn);

/** kvd_conn_awake() - look at the conn's ring in every turn until it is empty */
void kvd_conn_awake(struct kvd_conn *conn);

/**
 * kvd_conn_tenant() - who pays for a peer: its credentials decide, no message can
 * @claimed_name: what HELLO said; only shown
 *
 * Return: index of the tenant in @config; -EACCES.
 */
int kvd_conn_tenant(const struct kvd_config *config, const struct ucred *cred,
		    const char *claimed_name);

/** kvd_conn_event() - tell those who stream admin events */
void kvd_conn_event(struct kvd_conn *conn, const char *type);

/**
 * kvd_conn_too_many() - are there more connections than may be, @conn among them? (hello.c)
 * @session: it is to have a session of its own
 *
 * Of its uid, or of all. One whose session waits for its process (AWAY) counts only against a
 * new session: its process comes back by a connection more.
 */
bool kvd_conn_too_many(const struct kvd_conn *conn, bool session);

/** kvd_hello() - handle HELLO: refuse, or open a session (hello.c) */
void kvd_hello(struct kvd_conn *conn, const struct kv_msg_hello *hello);

/** kvd_hello_check() - are HELLO's fields good? @error: [128] names field and value.
 * Return: 0; -EINVAL; -EPROTONOSUPPORT */
int kvd_hello_check(const struct kv_msg_hello *hello, char *error);

/** kvd_pool_message() - handle POOL_OPEN or POOL_CLOSE (hello.c); @msg has @bytes bytes.
 * Return: 0; -EPROTO with @ret_why */
int kvd_pool_message(struct kvd_conn *conn, const struct kv_msg *msg, u32 bytes,
		     const char **ret_why);

/** kvd_conn_look_slots() - note what the announce slots say and since when (ps, tick) */
void kvd_conn_look_slots(struct kvd_conn *conn);

#endif
