/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.h - struct kvd: the whole daemon in one object.
 *
 * Built by main.c through kvd_init(). Only main.c, daemon.c and ipc/ may see it;
 * everything below gets the object it needs. All of it belongs to the loop thread.
 */
#ifndef KVD_DAEMON_H
#define KVD_DAEMON_H

#include <signal.h>
#include <stdbool.h>

#include "kvmd/config.h"
#include "kvmd/dbg/stats.h"
#include "kvmd/ipc/admin.h"
#include "kvmd/ipc/kept.h"
#include "kvmd/ipc/listen.h"
#include "kvmd/ipc/loop.h"
#include "kvmd/ipc/moving.h"
#include "kvmd/ipc/optable.h"
#include "kvmd/ipc/proof.h"
#include "kvmd/ipc/request.h"
#include "kvmd/ipc/state.h"
#include "kvmd/ipc/tiering.h"
#include "kvmd/memory.h"
#include "kvmd/own/core.h"

#define KVD_VERSION		   "0.1.0"
#define KVD_CONNS_MAX		   1024u
#define KVD_CONNS_UNKNOWN_MAX	   256u /* connected, no HELLO yet */

/* No uid takes more than half of either: the others still get in. */
#define KVD_CONNS_EACH_MAX	   (KVD_CONNS_MAX / 2)
#define KVD_CONNS_UNKNOWN_EACH_MAX (KVD_CONNS_UNKNOWN_MAX / 2)
#define KVD_HELLO_NS		   5000000000ull
#define KVD_TICK_NS		   1000000000ull
#define KVD_SPIN_NS		   20000ull
#define KVD_REFS_NS		   10000000ull
#define KVD_PATH_BYTES		   108u

/**
 * struct kvd_options - the command line
 * @config_path: NULL: one domain and tenant "default" for the caller's uid
 * @socket_path, @admin_path, @state_dir: where
 * @socket_mode: of the engine socket
 * @host_bytes: 0: from the configuration, else half of the memory
 * @backend: which memory
 * @gpu_named, @gpu_uuid: --gpu
 * @gpu_bytes: 0: from the configuration, else KVD_CUDA_SHARE percent of the device
 * @test_extents: cuda extents from 2 MiB on
 * @check: KV_CHECK_*, or -1: from the configuration
 * @spin: also with fewer than 4 CPUs
 * @test_layouts: KV_DTYPE_F32 is allowed
 * @force_epoll: do not use io_uring
 * @ready_fd: gets "ready\n" when serving; -1 none
 * @keeper: keep state in a keeper; @keeper_die_with: pid it ends with, 0 none
 * @as_root: it serves the host and has not given up root
 * @seccomp_error: why system calls are not filtered; 0: they are
 * @mover_program: started as the mover; NULL: this program
 * @program: what an upgrade executes; NULL: it is not tried before
 * @argv: with which arguments
 * @faults: fault points to arm; NULL none, and the admin socket may not arm any
 */
struct kvd_options {
	const char *config_path;
	char socket_path[KVD_PATH_BYTES];
	char admin_path[KVD_PATH_BYTES];
	char state_dir[512];
	u32 socket_mode;
	u64 host_bytes;
	enum kvd_backend_choice backend;
	bool gpu_named;
	u8 gpu_uuid[16];
	u64 gpu_bytes;
	bool test_extents;
	int check;
	bool spin;
	bool test_layouts;
	bool force_epoll;
	int ready_fd;
	bool keeper;
	int keeper_die_with;
	const char *faults;
	bool as_root;
	int seccomp_error;
	const char *mover_program;
	const char *program;
	char *const *argv;
};

/**
 * struct kvd - the daemon
 * @opt: as started
 * @config: the policy in force; @config_revision counts reloads that applied
 * @state, @env, @gens: what must survive
 * @kept: what outlives this process
 * @backend: owner
 * @memory: how @backend was chosen, and its start
 * @proof: of the end of dead processes' GPU work
 * @moving: the mover
 * @tiering: the tiers below the pools
 * @core: page state
 * @loop: owner
 * @engine_listen, @admin_listen: sockets
 * @signal_fd, @signal_watch: TERM, INT, HUP
 * @spare_fd: given up to accept and refuse a peer when fds have run out
 * @conns: struct kvd_conn.node; @nr_conns all, @nr_unknown before HELLO
 * @dead: conns to be freed at the end of the turn
 * @awake: conns whose ring kvmd looks at by itself
 * @requests: preallocated
 * @next_client_id: of the next session
 * @table_epoch: random, of this instance
 * @started_ns, @now_ns, @tick_ns, @core_next_ns: times
 * @last_entry_ns: when the last ring entry was served
 * @spins: spinning is allowed
 * @upgrade: stop, and leave everything to a new program
 * @failed: the loop did
 * @again: stop, and start anew with nothing: the memory is lost
 * @draining_ns: since when extents have waited for sessions to unmap them; 0 = none does
 * @pages_freed: a parked ALLOC may succeed now
 * @refs_ns: when to try again to send what waits for room for descriptors; 0: none does
 * @nr_closing: connections whose POOL_CLOSE goes on in the next turn
 * @msg_buf: KV_MSG_BYTES_MAX bytes for receiving
 * @audit_left: records that the background sweep looks at in this second yet
 * @audit_run: the audit that an operator waits for; NULL: none. @admin_more: see
 *	kvd_admin_turn()
 * @audit_errors, @audit_sweeps, @audit_last: of the background sweep
 * @op_stats: by opcode
 */
struct kvd {
	struct kvd_options opt;
	struct kvd_config config;
	u64 config_revision;
	struct kvd_state state;
	struct kvd_env env;
	struct kvd_gen_source gens;
	struct kvd_kept kept;
	struct kvd_backend *backend;
	struct kvd_memory memory;
	struct kvd_proof proof;
	struct kvd_moving moving;
	struct kvd_tiering tiering;
	struct kvd_core core;
	struct kvd_loop *loop;
	struct kvd_listen engine_listen;
	struct kvd_listen admin_listen;
	struct kvd_admin admin;
	int signal_fd;
	struct kvd_watch signal_watch;
	int spare_fd;
	struct list_node conns;
	struct list_node dead;
	struct list_node awake;
	u32 nr_conns;
	u32 nr_unknown;
	struct kvd_requests requests;
	u64 next_client_id;
	u64 table_epoch;
	u64 started_ns;
	u64 now_ns;
	u64 tick_ns;
	u64 core_next_ns;
	u64 last_entry_ns;
	bool spins;
	u64 draining_ns;
	bool pages_freed;
	u64 refs_ns;
	u32 nr_closing;
	bool stop;
	bool upgrade;
	bool failed;
	bool again;
	u8 *msg_buf;
	u32 audit_left;
	struct kvd_audit_run *audit_run;
	bool admin_more;
	u64 audit_errors;
	u64 audit_sweeps;
	struct kvd_finding audit_last;
	struct kvd_op_stats op_stats[KV_OP_NR];
};

/**
 * kvd_init() - build the daemon up to serving
 * @error: KVD_CONFIG_ERROR_BYTES; says what was wrong
 *
 * Return: 0; -errno, and nothing is left behind.
 */
int kvd_init(struct kvd *kvd, const struct kvd_options *opt, char *error);

/** kvd_run() - serve until SIGTERM, SIGINT or kvd->stop. Return: 0; -errno of the loop */
int kvd_run(struct kvd *kvd);

/** kvd_turn() - one turn of the loop; used by kvd_run() and tests. Return: 0; -errno */
int kvd_turn(struct kvd *kvd);

/** kvd_fini() - end all sessions, remove the sockets, free everything. Where the loop failed and
 * there is a keeper: leave all that to the next kvmd */
void kvd_fini(struct kvd *kvd);

/**
 * kvd_reload() - read the configuration again
 * @dry_run: check it and say what would be deferred, and leave all as it is
 * @error: as kvd_init()
 * @ret_deferred: tenants whose new limits are below what they use
 *
 * Return: 0; -errno, and nothing changed.
 */
int kvd_reload(struct kvd *kvd, bool dry_run, char *error, u32 *ret_deferred);

/** kvd_config_start() - the policy that a start with kvd->opt has. Return: as kvd_config_load() */
int kvd_config_start(const struct kvd *kvd, struct kvd_config *config, char *error);

/**
 * kvd_try() - would a kvmd of this program take these options and their policy?
 * @kvd: zeroed; nothing of it is left
 * @error: as kvd_init()
 *
 * Nothing is opened but the policy. What depends on a kvmd that serves: kvd_try_next().
 * Return: 0; -errno.
 */
int kvd_try(struct kvd *kvd, const struct kvd_options *opt, char *error);

/**
 * kvd_try_next() - would a kvmd in place of this one take the policy file as it is now?
 * @error: as kvd_init()
 *
 * What the file alone cannot tell: this host's memory, tenants that exist. Return: 0; -errno.
 */
int kvd_try_next(struct kvd *kvd, char *error);

#endif
