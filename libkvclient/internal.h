/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h - what the files of libkvclient share.
 *
 * One struct kvc = one session. What belongs to one connection to one instance of kvmd
 *	(socket, ring, session page, published tables) is a struct kvc_link; a reconnect makes a
 *	new one and the old one goes when no call and no step uses it any more. Its session page
 *	stays mapped until kvc_close(): magazine pops and retires reach it without a lock.
 *
 * Locks, in the order they may be taken:
 *	1. registry (fork.c)	list of connections; fork handlers
 *	2. kvc.lock		socket, pools, extents, event queue, change of kvc.link
 *	3. kvc_pool.mirror_lock	host mirror
 *	4. kvc_ring.lock	submission, completions, request slots, argument area
 *	5. kvc_pool.lock	return list, stream positions (leaf)
 * No lock is held while a call waits for a completion. Steps take none but 5.
 *
 * The only file-scope state is the registry and the thread-local words of error.c and
 *	alloc.c.
 */
#ifndef KVC_INTERNAL_H
#define KVC_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include "kvclient.h"
#include "base/clock.h"
#include "base/list.h"
#include "base/mutant.h"
#include "base/util.h"

#define KVC_TIMEOUT_MS	   5000u
#define KVC_SPIN_NS	   (20 * KV_NSEC_PER_USEC)
#define KVC_ARG_CHUNK	   1024u
#define KVC_ARG_CHUNKS_MAX 65536u
#define KVC_STREAMS	   8u
#define KVC_STEP_BLOCKS	   16u
#define KVC_FREE_BATCH	   64u	/* a free call sends when that many may go */
#define KVC_FREE_SEND_MAX  512u /* most in one request */
#define KVC_EVENTS_MAX	   4096u
#define KVC_STRUCT_MAX	   4096u /* bytes of a struct that an application fills */

/* ------------------------------------------------------------------------------- ring.c
 */

enum kvc_slot_state {
	KVC_SLOT_FREE = 0,
	KVC_SLOT_RESERVED, /* the caller writes its arguments */
	KVC_SLOT_SENT,	   /* kvmd may write the result area */
	KVC_SLOT_DONE,	   /* the caller copies the result and frees the slot */
};

enum kvc_slot_kind {
	KVC_SYNC = 0,	/* a caller waits */
	KVC_ABANDONED,	/* its caller timed out: pages that arrive go back */
	KVC_REFILL,	/* magazine stock on its way */
	KVC_FREE_ASYNC, /* return list sent by a retire or a dispatch */
	KVC_FIRE,	/* REPORT, UNMAPPED: nobody looks at the answer */
};

/**
 * struct kvc_req - one request as a caller describes it
 * @opcode, @flags, @magazine, @nr, @gfp: as in struct kv_sqe
 * @pool: its id goes into the request; may be NULL
 * @arg_bytes: bytes that @fill writes
 * @ret_bytes: room for results in the argument area
 * @fill: writes the input; NULL: @src is copied
 * @src: what @fill reads
 * @ret: results are copied here on result 0; NULL: none wanted
 * @ret_unit: bytes of one result; @ret gets cqe.nr of them; 0 = all of @ret_bytes
 * @ret_nr, @ret_a: of the completion
 * @sent: kvmd may have seen it
 */
struct kvc_req {
	u8 opcode;
	u8 flags;
	u16 magazine;
	u32 nr;
	u32 gfp;
	u32 arg_bytes;
	u32 ret_bytes;
	u32 ret_unit;
	struct kvc_pool *pool;
	void (*fill)(void *arg, const struct kvc_req *req);
	const void *src;
	void *ret;
	bool again; /* sent before, to a kvmd that went */
	u32 ret_nr;
	u64 ret_a;
	bool sent;
};

struct kvc_slot {
	u64 user_data; /* of the request that has the slot now; 0 = none */
	u32 state;
	u32 kind;
	u32 serial;
	u32 chunk, nr_chunks; /* argument area */
	u32 arg_off, ret_off, ret_bytes;
	u32 next_free;
	u8 opcode;
	u8 flags;
	u16 magazine;
	u32 nr;
	struct kvc_pool *pool;
	struct kv_cqe cqe;
};

struct kvc_ring {
	pthread_mutex_t lock;
	pthread_cond_t cond; /* a completion, a free slot, a poller that left */
	struct kv_ring_hdr *hdr;
	size_t bytes;
	/* private copies of the geometry; the header is not read again */
	struct kv_sqe *sq;
	const struct kv_cqe *cq;
	u8 *arg;
	u32 nonce;
	u32 sq_depth;
	u32 cq_depth;
	u32 nr_chunks;
	u32 sq_tail;
	u32 cq_head;
	int sq_efd;
	int cq_efd;
	bool spin;
	bool polling; /* one thread sleeps for all */
	int error;    /* 0, or why no completion will come: -ECONNRESET, -EPROTO */
	u32 nr_slots;
	u32 free_slot;	/* nr_slots = none */
	u32 nr_waiting; /* callers that wait for a slot or for argument room */
	u32 frees_in_flight;
	u32 stale_frees; /* pages that async frees found gone, since the last flush */
	struct kvc_slot *slots;
	u64 *arg_map;
};

struct kvc_link;
int kvc_ring_init(struct kvc_ring *ring, const struct kv_msg_hello_reply *reply,
		  const int *fds);
void kvc_ring_fini(struct kvc_ring *ring);
void kvc_ring_fail(struct kvc_ring *ring, int error);
int kvc_ring_call(struct kvc_link *link, struct kvc_req *req, u64 deadline_ns);
int kvc_ring_post(struct kvc_link *link, const struct kvc_req *req, u32 kind);
void kvc_ring_reap(struct kvc_link *link);
int kvc_ring_settle_frees(struct kvc_link *link, u64 deadline_ns);
void kvc_ring_kick(struct kvc_ring *ring);
void kvc_ring_forget_pool(struct kvc_ring *ring, const struct kvc_pool *pool);

/* ------------------------------------------------------------------------------- open.c
 */

/* Pages that a magazine asks for first. */
#define KVC_REFILL_FIRST 8u

/**
 * struct kvc_mag - the library's side of a magazine of the session page
 * @owner: thread that pops from it, 0 = nobody; claimed by compare-and-swap
 * @pool_serial: pool it is stocked for; 0 = none yet, ~0 = a closed pool's refill is on
 *	its way
 * @stocked, @popped: counters; their difference is a guess of what is left (recalls make
 *	it too high); the first is written by whoever takes the refill's completion
 * @refill_nr: pages to ask for; doubles while they are used up soon, halves when they last
 * @refilled_ns: when it was asked last; 0 = never
 * @cursor: where the next pop looks first
 * @refilling: a refill is on its way
 * @pause: allocations to pass before the next refill is tried, after one that failed
 */
struct kvc_mag {
	u64 owner;
	u64 pool_serial;
	u32 stocked;
	u32 popped;
	u32 refill_nr;
	u32 cursor;
	u32 refilling;
	u32 pause;
	u64 refilled_ns;
	u32 pad[2];
};

struct kvc_table {
	const struct kv_table *map;
	size_t bytes;
};

/**
 * struct kvc_link - one connection to one instance of kvmd
 * @users: calls that use the ring; atomic
 * @resumed: kvmd took the session up again: same client_id, session page, leases
 * @session_serial: @serial of the session's first link
 * @dead: the socket is gone; set once, under kvc.lock, read anywhere
 * @tables: by pool slot; a NULL map = pool not open on this link
 * @grace_table: a table whose grace_epoch steps announce; NULL = no pool open
 */
struct kvc_link {
	struct kvc *c;
	struct kvc_link *older;
	u64 serial;
	u64 client_id;
	u64 table_epoch;
	u32 flags;
	char tenant[KV_NAME_BYTES];
	u8 cookie[KV_COOKIE_BYTES];
	int sock;
	bool resumed;
	u64 session_serial;
	u32 users;
	u32 dead;
	bool gone; /* ring and tables are unmapped; only the session page is left */
	u32 next_sequence;
	struct kv_session_page *session;
	const struct kv_table *grace_table;
	struct kvc_table tables[KV_POOLS_MAX];
	struct kvc_mag mags[KV_MAGAZINES];
	struct kvc_ring ring;
};

/**
 * struct kvc_step - an announced step; element i of kvc.steps owns announce slot i
 * @number: 0 = not begun; unique in the session
 * @launch: position in the order of launches; 0 = not launched
 * @begun: set when begin has read all it needs; kvc_pool_close() and the link collector
 *	wait for a claimed slot that is not begun yet
 */
struct kvc_step {
	struct kvc *c;
	struct kvc_link *link;
	u64 number;
	u64 launch;
	u32 begun;
	u32 slot;
	u32 nr_blocks;
	u32 nr_walks, walks_max;
	struct {
		struct kvc_pool *pool;
		u32 stream;
		u64 position;
	} blocks[KVC_STEP_BLOCKS];
	u64 early_head[KV_POOLS_MAX]; /* mutant mirror_announced only */
	struct kvc_walk *walks;	      /* strict: what to look at again at retire */
};

struct kvc {
	struct list_node reg; /* registry, fork.c */
	int poisoned;	      /* set in a forked child; then nothing below is touched */
	/* options, constant */
	char *socket_path;
	char client_name[KV_NAME_BYTES];
	u32 timeout_ms;
	u32 ring_depth;
	void (*log)(void *log_arg, int level, const char *line);
	void *log_arg;
	/* connection */
	pthread_mutex_t lock;
	struct kvc_link *link; /* current; changed under @lock, read without */
	u64 next_serial;
	u64 told_session; /* kvc_link.session_serial of the last EPOCH event */
	int epoll_fd;	  /* socket and wake_fd: kvc_event_fd() */
	int wake_fd;	  /* readable while events are queued */
	struct kvc_pool *pools[KV_POOLS_MAX];
	u64 open_serials[KV_POOLS_MAX]; /* of @pools; 0 = none; read without @lock */
	struct list_node events;
	u32 nr_events;
	u32 deferred; /* something waits for a retire */
	struct kvc_pool *attaching;
	u32 known[KV_POOLS_MAX]; /* pools kvmd has open for a session it took up */
	u32 nr_known;
	struct kvc_msg_in *msg;
	/* steps; no lock */
	u32 slot_mask;
	u64 step_number;
	u64 launch_number;
	struct kvc_step steps[KV_ANNOUNCE_SLOTS];
};

static inline bool kvc_poisoned(const struct kvc *c)
{
	return __builtin_expect(c->poisoned, 0);
}

static inline u64 kvc_deadline(const struct kvc *c)
{
	return kv_now_ns() + c->timeout_ms * KV_NSEC_PER_MSEC;
}

/* Bytes of a struct whose first version ended with @last. */
#define KVC_FIRST_SIZE(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

int kvc_struct_take(void *ret, size_t bytes, size_t first, const void *given,
		    const char *name);
int kvc_link_open(struct kvc *c, u64 deadline_ns, struct kvc_link **ret_link);
int kvc_link_watch(struct kvc *c);
void kvc_link_unmap(struct kvc_link *link);
void kvc_link_destroy(struct kvc_link *link);
int kvc_lock_until(pthread_mutex_t *lock, u64 deadline_ns);
void kvc_sleep_ns(u64 ns);

/* ------------------------------------------------------------------------------- sock.c
 */

/**
 * struct kvc_msg_in - a received message
 * @fds: received; a handler that keeps one stores -1 in its place, the rest is closed
 */
struct kvc_msg_in {
	u32 nr_fds;
	int fds[KV_MSG_FDS_MAX];
	union {
		struct kv_msg msg;
		struct kv_msg_hello_reply hello;
		struct kv_msg_pool_reply pool;
		struct kv_msg_extents extents;
		struct kv_msg_revoke revoke;
		struct kv_msg_pressure pressure;
		struct kv_msg_epoch epoch;
		struct kv_msg_leases leases;
		struct kv_msg_error error;
		u64 words[KV_MSG_BYTES_MAX / 8];
	};
};

int kvc_sock_connect(const char *path, u64 deadline_ns, int *ret_sock);
int kvc_sock_send(int sock, const void *msg, size_t bytes, u64 deadline_ns);
int kvc_sock_recv(int sock, struct kvc_msg_in *in);
int kvc_sock_recv_until(int sock, struct kvc_msg_in *in, u64 deadline_ns);
void kvc_msg_close_fds(struct kvc_msg_in *in);

/* ------------------------------------------------------------------------------ event.c
 */

int kvc_sock_read_locked(struct kvc *c);
int kvc_event_queue_locked(struct kvc *c, u32 type, struct kvc_pool *pool, u32 nr,
			   const struct kv_page_ref *pages);
int kvc_msg_handle_locked(struct kvc *c, struct kvc_msg_in *in);
void kvc_events_drop_pool_locked(struct kvc *c, const struct kvc_pool *pool);
void kvc_link_dead_locked(struct kvc_link *link, int error);

/* -------------------------------------------------------------------------------- map.c
 */

enum kvc_extent_state {
	KVC_EXTENT_NONE = 0,
	KVC_EXTENT_MAPPED,
	KVC_EXTENT_REMOVING, /* to be unmapped when steps up to @fence have retired */
	KVC_EXTENT_UNACKED,  /* unmapped; UNMAPPED not yet sent */
};

/**
 * struct kvc_extent - one extent of a pool; changed under kvc.lock
 * @state: enum kvc_extent_state; read without lock (acquire)
 * @ack: removal was asked for by kvmd, which waits for UNMAPPED; else its link is gone
 * @seen: named by a kvmd that took the session up again
 * @serial: of what is mapped
 * @fence: last step that had begun when removal was asked for
 * @fd: received, not mapped yet (mapping failed, or an older extent is still in use); -1
 * @fd_serial: of @fd
 */
struct kvc_extent {
	u32 state;
	bool ack;
	bool seen;
	int fd;
	u64 serial;
	u64 fence;
	u64 fd_serial;
};

struct kvc_ret {
	struct kv_page_ref ref;
	u64 fence; /* kvc.launch_number at the call */
};

struct kvc_position {
	u64 link_serial; /* 0 = the stream has no mirror yet */
	u64 position;
};

struct kvc_pool {
	struct kvc *c;
	u64 serial; /* never reused in this process */
	u32 slot;   /* index in kvc.pools and kvc_link.tables */
	u32 refs;
	u32 users;    /* calls that name no pool and are at this one; atomic */
	bool closing; /* its last close waits for them */
	u32 pool_id;
	u32 backend;
	u64 fingerprint;
	bool opened; /* kvmd has it open on the current link */
	int broken;  /* could not be opened again after a reconnect: -errno */
	struct kv_geometry geometry;
	struct kv_layout layout;
	float *scales;
	u8 gpu_uuid[16];
	struct kvc_gpu *gpu; /* NULL on host memory */
	u8 *base;	     /* a device pointer on a GPU: not to be read here */
	size_t va_bytes;
	u32 nr_extents;
	struct kvc_extent *extents;
	/* what the application holds: ledger.c */
	u64 *ledger, *ledger_tags;
	struct kv_lease *leases; /* kvmd's side, while it arrives */
	bool leases_due;
	/* return list: a ring of ret_max entries, oldest first */
	pthread_mutex_t lock;
	struct kvc_ret *ret;
	u32 ret_head, ret_nr, ret_max;
	struct kvc_position positions[KVC_STREAMS];
	u32 *stamps[KV_ANNOUNCE_SLOTS]; /* [nr_pages]: low half of the step that writes it
					 */
	/* host mirror */
	pthread_mutex_t mirror_lock;
	u64 mirror_link_serial;
	struct kv_mirror *mirror;
	struct kv_step_block *mirror_block;
};

void kvc_pool_destroy_locked(struct kvc_pool *pool);
void kvc_pool_send_close_locked(struct kvc_pool *pool, struct kvc_link *link);
int kvc_pool_attach_locked(struct kvc_pool *pool, struct kvc_link *link, u64 deadline_ns);
int kvc_extents_added_locked(struct kvc_pool *pool, struct kvc_msg_in *in);
int kvc_extents_removed_locked(struct kvc_pool *pool, const struct kv_msg_extents *m);
void kvc_extents_sweep_locked(struct kvc_pool *pool);
void kvc_extents_orphan_locked(struct kvc_pool *pool);
void kvc_extents_run_locked(struct kvc_pool *pool);

/* ------------------------------------------------------------------------------- pool.c
 */

void kvc_pool_free_memory(struct kvc_pool *pool);
int kvc_pool_use(struct kvc *c, u32 slot, u64 deadline_ns, struct kvc_pool **ret_pool);
void kvc_pool_unuse(struct kvc_pool *pool);

/* @pool is in its slot now, or nobody is. Context: kvc.lock */
static inline void kvc_pool_place_locked(struct kvc *c, u32 slot, struct kvc_pool *pool)
{
	c->pools[slot] = pool;
	__atomic_store_n(&c->open_serials[slot], pool ? pool->serial : 0,
			 __ATOMIC_RELAXED);
}

/* -------------------------------------------------------------------------------- gpu.c
 */

struct kvc_gpu;
int kvc_gpu_visible(const u8 *uuid);
int kvc_gpu_open(const u8 *uuid, struct kvc_gpu **ret_gpu);
int kvc_gpu_reserve(struct kvc_gpu *gpu, size_t bytes, u8 **ret_base);
int kvc_gpu_unreserve(struct kvc_gpu *gpu, u8 *base, size_t bytes);
int kvc_gpu_map(struct kvc_gpu *gpu, int fd, u8 *addr, size_t bytes);
int kvc_gpu_unmap(struct kvc_gpu *gpu, u8 *addr, size_t bytes);
int kvc_gpu_open_handle(struct kvc_gpu *gpu, const u8 *handle, u8 **ret_addr);
int kvc_gpu_close_handle(struct kvc_gpu *gpu, u8 *addr);

/* ---------------------------------------------------------------------------- legacy.c
 */

int kvc_legacy_wait_locked(struct kvc_pool *pool, struct kvc_link *link, u64 deadline_ns);
int kvc_legacy_check(const struct kv_geometry *g);
int kvc_legacy_map(struct kvc_gpu *gpu, const u8 *uuid, int fd, size_t bytes,
		   u8 **ret_base);

/* ----------------------------------------------------------------------------- ledger.c
 */

int kvc_ledger_init(struct kvc_pool *pool);
void kvc_hold(struct kvc_pool *pool, u32 pfn, u64 tag);
void kvc_unhold(struct kvc_pool *pool, u32 pfn, u64 tag);
void kvc_ledger_revoked(struct kvc_pool *pool, u32 pfn, u64 tag);
void kvc_ledger_clear(struct kvc_pool *pool);
void kvc_ledger_answered(const struct kvc_req *req);
void kvc_ledger_freeing(const struct kvc_req *req);
int kvc_ledger_leases(struct kvc *c, struct kvc_pool *pool,
		      const struct kv_msg_leases *m);

int kvc_leases_wait_locked(struct kvc_pool *pool, struct kvc_link *link, u64 deadline_ns);

/* ------------------------------------------------------------------------------ alloc.c
 */

void kvc_thread_exit(void *thread_serial);
void kvc_mags_resume(struct kvc_link *link, const struct kvc_link *old);
void kvc_mag_forget_pool_locked(struct kvc_pool *pool);
int kvc_mag_drain(struct kvc_pool *pool, struct kvc_link *link, struct kv_grant *ret,
		  u32 max);
int kvc_fork_call(struct kvc_pool *pool, struct kvc_req *req, u32 gfp);
int kvc_pages_mapped(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr,
		     size_t stride);

/* ------------------------------------------------------------------------------- free.c
 */

int kvc_ret_add(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr);
int kvc_ret_send(struct kvc_pool *pool, u32 at_least, u64 deadline_ns);
void kvc_ret_post(struct kvc_pool *pool, struct kvc_link *link);
void kvc_ret_clear(struct kvc_pool *pool);

/* ------------------------------------------------------------------------------- step.c
 */

bool kvc_fence_passed(struct kvc *c, u64 launch);
bool kvc_begin_fence_passed(struct kvc *c, u64 number);
void kvc_wait_begun(struct kvc *c);
int kvc_block_fill(const struct kv_table *table, u64 step, bool has_position, u64 from,
		   u64 head, struct kv_step_block *ret_block, size_t bytes);
void kvc_deferred_run(struct kvc *c);
void kvc_deferred_run_locked(struct kvc *c);

/* ------------------------------------------------------------------------------ check.c
 */

int kvc_walk_add(struct kvc_step *step, struct kvc_pool *pool,
		 const struct kvc_check_request *request, u32 bits);
void kvc_walk_again(struct kvc_step *step);

/* -------------------------------------------------------------------------- reattach.c
 */

int kvc_link_alive_locked(struct kvc *c, u64 deadline_ns);
int kvc_link_get(struct kvc *c, u64 deadline_ns, struct kvc_link **ret_link);
void kvc_link_put(struct kvc_link *link);
int kvc_call(struct kvc *c, struct kvc_req *req, u64 deadline_ns);
int kvc_attach_again(struct kvc *c, struct kvc_link *old, u64 deadline_ns);
void kvc_links_collect_locked(struct kvc *c, bool all);

/* ------------------------------------------------------------------------------- fork.c
 */

int kvc_register(struct kvc *c);
void kvc_unregister(struct kvc *c);
u64 kvc_thread_serial(void);
void kvc_for_each(void (*fn)(struct kvc *c, void *arg), void *arg);

/* ------------------------------------------------------------------------------ error.c
 */

int kvc_fail(int r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void kvc_log(struct kvc *c, int level, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

#define KVC_LOG_ERR  3
#define KVC_LOG_WARN 4
#define KVC_LOG_INFO 6

#endif /* KVC_INTERNAL_H */
