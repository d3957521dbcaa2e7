/* SPDX-License-Identifier: Apache-2.0 */
/**
 * DOC: kvclient - everything an inference engine needs to use kvmd
 *
 * kvmd is a privileged daemon that owns every KV-cache page of a host. An engine opens a
 * connection and a pool (one layout on one GPU), allocates pages, writes K/V into them, seals
 * full pages so that later requests of its domain find them by their tokens, and proves before
 * every step that each page it is about to read is still the one it was given.
 *
 * The life of a step::
 *
 *	kvc_step_begin(c, &step);              announce: pages named below stay as they are
 *	kvc_step_block(step, pool, buf, ...);  what changed in the tag table since the last step
 *	kvc_step_rows(step, pool, rows, n);    no page is written by two rows
 *	... launch: apply the block to the mirror, check the rows, run the layers ...
 *	kvc_step_launched(step);
 *	... wait for the work, read the verdicts; a failed request ends in KV_STALE ...
 *	kvc_step_retire(step);
 *
 * On the host backend kvc_step_check() applies the block and checks in one call. On a GPU the
 * kernel library's tag_check does the same in the step's stream. All work on page bytes (also
 * zeroing, copies, digests) happens between begin and retire.
 *
 * Answers are 0, -errno, or a positive enum kv_outcome; each function lists those it may give.
 * Who asks kvmd may also be told -EPROTO (the daemon broke the protocol), and who names a pool
 * -ESHUTDOWN (it did not come back when the library connected again: close it).
 * Nothing here prints, exits or starts a thread. Functions may be called from any thread unless
 * they say otherwise; one struct kvc_step belongs to one thread at a time. After fork() the
 * child's copy is poisoned: every call answers -EOWNERDEAD.
 *
 * A daemon restart is survived: calls wait up to the timeout while the library reconnects.
 */
#ifndef KVCLIENT_H
#define KVCLIENT_H

#include "kv/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVC_API __attribute__((visibility("default")))

struct kvc;	 /* a connection = one session of kvmd */
struct kvc_pool; /* an open pool */
struct kvc_step; /* an announced step */

/**
 * struct kvc_options - how to connect
 * @size_bytes: sizeof(struct kvc_options); later versions append fields
 * @flags: 0
 * @socket_path: NULL: $KVMD_SOCKET, else KVMD_SOCKET_DEFAULT
 * @client_name: shown by kvmctl; NULL: the process name
 * @timeout_ms: most that a call waits for kvmd; 0 = 5,000
 * @ring_depth: 0 = default
 * @log: called with one line per noteworthy event; NULL = silent. It must not call kvc_*
 * @log_arg: first argument of @log
 */
struct kvc_options {
	uint32_t size_bytes;
	uint32_t flags;
	const char *socket_path;
	const char *client_name;
	uint32_t timeout_ms;
	uint32_t ring_depth;
	void (*log)(void *log_arg, int level, const char *line);
	void *log_arg;
};

/**
 * struct kvc_info - what kvmd said at HELLO
 * @client_id: id of this session, never reused within a table_epoch
 * @table_epoch: instance of kvmd
 * @session: counts sessions of this connection from 1; while it stays, so do all leases, also when
 *	kvmd was restarted and @table_epoch is another
 * @check_mode: KV_CHECK_BATCH, KV_CHECK_OFF or KV_CHECK_STRICT
 * @tenant: tenant that kvmd derived from the socket's credentials
 */
struct kvc_info {
	uint64_t client_id;
	uint64_t table_epoch;
	uint64_t session;
	uint32_t check_mode;
	char tenant[KV_NAME_BYTES];
};

/**
 * kvc_open() - connect to kvmd and open a session
 * @opt: options; NULL = all defaults
 * @ret_c: the connection; kvc_close() it
 *
 * Context: may block up to the timeout.
 * Return: 0; -ENOENT or -ECONNREFUSED no daemon; -EACCES this uid has no tenant, or the socket
 *	is not for it; -EUSERS too many sessions, of this uid or in all; -ECONNRESET or -EPIPE
 *	kvmd hung up, as on a uid that connects too fast; -EPROTONOSUPPORT no common ABI version;
 *	-EINVAL an option (size_bytes, flags, name, depth); -ENAMETOOLONG the socket's path;
 *	-ETIMEDOUT; -EPROTO the daemon broke the protocol; -ENOMEM; -EMFILE.
 */
KVC_API int kvc_open(const struct kvc_options *opt, struct kvc **ret_c);

/**
 * kvc_close() - end the session
 * @c: connection, or NULL. All steps must be retired. Unsealed pages are freed, references to
 *	sealed ones dropped, all maps undone
 */
KVC_API void kvc_close(struct kvc *c);

/** kvc_info() - what kvmd said at HELLO */
KVC_API void kvc_info(struct kvc *c, struct kvc_info *ret_info);

/**
 * kvc_strerror() - last error of the calling thread's last failing call, in words
 *
 * Names the field and value where the call had one ("layout.dtype=9: unknown dtype").
 * Return: a string valid until the thread's next kvc_* call; never NULL.
 */
KVC_API const char *kvc_strerror(struct kvc *c);

/**
 * struct kvc_pool_info - an open pool
 * @pool_id: id on this host
 * @backend: KV_BACKEND_*
 * @fingerprint: of the layout
 * @geometry: where a page lies: kv_page_offset(&geometry, pfn) from @base
 * @base: start of the reserved address range (host: CPU address; cuda: device address). Only
 *	pages the session was given are mapped for sure
 * @layout: the pool's layout
 * @scales: layout.nr_scales static scales
 */
struct kvc_pool_info {
	uint32_t pool_id;
	uint32_t backend;
	uint64_t fingerprint;
	struct kv_geometry geometry;
	void *base;
	struct kv_layout layout;
	const float *scales;
};

/**
 * kvc_pool_open() - open the pool of a layout in the caller's domain, creating it if needed
 * @c: connection
 * @layout: all fields set
 * @scales: layout->nr_scales values, or NULL when 0
 * @gpu_uuid: 16 bytes, or NULL for the host backend or a host with one GPU
 * @ret_pool: the pool; kvc_pool_close() it, or kvc_close() does
 *
 * On a GPU the calling thread must have a CUDA context of that GPU current (after cudaSetDevice()
 * and any runtime call it has). The library makes no context of its own: it borrows this one for
 * mapping and unmapping, on whichever thread that happens, so keep it until kvc_pool_close().
 * GPUs are matched by UUID: ordinals differ under CUDA_VISIBLE_DEVICES.
 *
 * Return: 0; -EINVAL a layout field is bad or differs from the pool of the same model
 *	(kvc_strerror() names it), or no context of the pool's GPU is current; -ENODEV no such GPU,
 *	or this process does not see it; -EMFILE KV_POOLS_MAX reached, or no
 *	descriptor is free; -ENOSPC kvmd has no pool left for this domain; -ENOMEM; -ETIMEDOUT;
 *	-EPROTO.
 */
KVC_API int kvc_pool_open(struct kvc *c, const struct kv_layout *layout, const float *scales,
			  const uint8_t *gpu_uuid, struct kvc_pool **ret_pool);

/** kvc_pool_close() - free all pages held in the pool and unmap it; no step may name it */
KVC_API void kvc_pool_close(struct kvc_pool *pool);

/** kvc_pool_get_info() - describe an open pool; @ret_info->scales lives as long as the pool */
KVC_API void kvc_pool_get_info(struct kvc_pool *pool, struct kvc_pool_info *ret_info);

/**
 * kvc_page_addr() - address of a page's bytes
 * @pfn: a page the session was given
 *
 * Return: host: a CPU pointer; cuda: a device pointer, only for kernels and copies (zeroing is
 *	theirs as well); NULL if its extent is not mapped.
 */
KVC_API void *kvc_page_addr(struct kvc_pool *pool, uint32_t pfn);

/**
 * kvc_alloc() - get pages, all or nothing
 * @pool: pool
 * @nr: 1..KV_BATCH_MAX pages
 * @gfp: KV_GFP_*
 * @ret_pages: nr grants. KV_GRANT_DIRTY: zero it inside a step before first use
 *
 * One page usually comes from the calling thread's magazine without talking to kvmd.
 *
 * Return: 0; KV_FULL; KV_QUOTA; KV_PENDING (pages are in quarantine: retry);
 *	-EINVAL nr or gfp; -ETIMEDOUT; -EOVERFLOW generations are used up; -ENOMEM mapping failed.
 */
KVC_API int kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
		      struct kv_grant *ret_pages);

/**
 * kvc_free() - give pages back: unsealed pages are freed, shared ones lose one reference
 * @pages: grants of kvc_alloc(), kvc_lookup() or kvc_fork()
 * @nr: how many
 *
 * Sent to kvmd in batches, and not before every step that was launched before this call has
 * retired. A page is never handed out again from here. A call with fewer than 64 pages sends the
 * batch that it completes without waiting; what kvmd finds gone is then told by kvc_flush().
 *
 * Return: 0; -EINVAL a pfn out of range; KV_STALE a page was found already gone when its batch
 *	was sent by this call (the others are freed); -ENOMEM.
 */
KVC_API int kvc_free(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr);

/**
 * kvc_flush() - send every free whose steps have retired, and wait for kvmd
 *
 * Return: 0; KV_BUSY: some still wait for a step; KV_STALE as kvc_free(); -ETIMEDOUT.
 */
KVC_API int kvc_flush(struct kvc *c);

/**
 * struct kvc_seal - a run of full pages to make immutable and findable
 * @size_bytes: sizeof(struct kvc_seal)
 * @flags: 0
 * @nr_pages: consecutive pages of one sequence
 * @pages: their grants, written completely by steps that have retired
 * @crc32c: of each page's kv_page_bytes() bytes
 * @tokens: nr_pages * 64 token ids
 * @parent_key: key of the page before the run; NULL: the run starts the sequence
 * @ret_seals: nr_pages results: the pages' keys, KV_SEALED_DUP
 */
struct kvc_seal {
	uint32_t size_bytes;
	uint32_t flags;
	uint32_t nr_pages;
	uint32_t reserved;
	const struct kv_grant *pages;
	const uint32_t *crc32c;
	const uint32_t *tokens;
	const uint8_t *parent_key;
	struct kv_seal_ret *ret_seals;
};

/**
 * kvc_seal() - make pages immutable, and findable by their tokens inside the domain
 *
 * The caller keeps its leases, now read-only. A page whose key is already known is sealed but
 * not entered (KV_SEALED_DUP).
 *
 * Return: 0; KV_BUSY: a step launched before this call has not retired, call again after;
 *	KV_STALE: a page is not the caller's any more, nothing was sealed; -EINVAL; -ETIMEDOUT.
 */
KVC_API int kvc_seal(struct kvc_pool *pool, const struct kvc_seal *seal);

/**
 * kvc_lookup() - the longest run of sealed pages that holds these tokens, pinned for the caller
 * @tokens: nr_tokens ids; only whole pages can hit
 * @nr_tokens: 0..KV_LOOKUP_MAX
 * @max_pages: room in @ret_hits
 * @ret_hits: the pages in order, with keys; free each with kvc_free()
 * @ret_nr: pages found
 *
 * Return: 0 (ret_nr >= 1); KV_MISS (ret_nr = 0); -EINVAL; -ETIMEDOUT; -ENOMEM mapping failed.
 */
KVC_API int kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		       uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr);

/**
 * kvc_prefetch() - bring pages of a sequence back from the tiers, and wait for them
 * @tokens, @nr_tokens, @max_pages: as kvc_lookup()
 * @ret_nr: pages of the run that a lookup would find now
 *
 * kvc_lookup() also starts to bring back what follows its hits, and does not wait: whoever looks
 * up once when a request arrives and again when it is scheduled needs this call for nothing. It
 * waits for about a second at most, so call it from a thread that runs no steps.
 *
 * Return: 0; KV_MISS (ret_nr = 0); KV_PENDING: more is on its way, or there is no room for it;
 *	-EOPNOTSUPP: no tier is configured; -EINVAL; -ETIMEDOUT.
 */
KVC_API int kvc_prefetch(struct kvc_pool *pool, const uint32_t *tokens,
			 uint32_t nr_tokens, uint32_t max_pages, uint32_t *ret_nr);

/** kvc_pin() - one more reference to sealed pages the caller holds. Return: 0; KV_STALE: none
 * was pinned; -EINVAL; -ETIMEDOUT */
KVC_API int kvc_pin(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr);

/** kvc_unpin() - drop references; exactly kvc_free() of a shared page */
KVC_API int kvc_unpin(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr);

/**
 * kvc_fork() - private pages that will hold copies of pages the caller holds
 * @sources: pages to copy; the caller copies the bytes in a step, under both leases
 * @ret_pages: nr new grants
 *
 * Return: as kvc_alloc(), and KV_STALE: a source is not the caller's any more.
 */
KVC_API int kvc_fork(struct kvc_pool *pool, const struct kv_grant *sources, uint32_t nr,
		     uint32_t gfp, struct kv_grant *ret_pages);

/** kvc_report() - tell kvmd about a failed check; it keeps it with the page's history.
 * Return: 0; -ETIMEDOUT */
KVC_API int kvc_report(struct kvc_pool *pool, const struct kv_incident *incident);

/** kvc_stat() - figures of the pool and the caller's tenant. Return: 0; -ETIMEDOUT */
KVC_API int kvc_stat(struct kvc_pool *pool, struct kv_stat *ret_stat);

/* ------------------------------------------------------------------------------- events */

/**
 * struct kvc_event - something kvmd did without being asked
 * @type: KV_MSG_REVOKE, KV_MSG_PRESSURE, KV_MSG_EXTENT_REMOVED or KV_MSG_EPOCH
 * @pool: pool, or NULL
 * @nr: REVOKE: pages at @pages; they are gone, do not free them. PRESSURE: the level. EPOCH:
 *	1 = kvmd was restarted and kept all leases, 0 = they are gone
 * @pages: valid during the callback
 */
struct kvc_event {
	uint32_t type;
	uint32_t nr;
	struct kvc_pool *pool;
	const struct kv_page_ref *pages;
};

/** kvc_event_fd() - becomes readable when kvc_dispatch() has work; watch it with poll() */
KVC_API int kvc_event_fd(struct kvc *c);

/**
 * kvc_dispatch() - handle waiting events: extents are mapped and unmapped, then @fn is called
 * @fn: may be NULL
 *
 * Call it at least every 100 ms; engines do between steps. Never blocks.
 * Return: number of events handled; -EAGAIN another thread is inside the library: nothing was read,
 *	call again; -ECONNRESET the daemon is away (the library reconnects).
 */
KVC_API int kvc_dispatch(struct kvc *c, void (*fn)(void *arg, const struct kvc_event *event),
			 void *arg);

/* -------------------------------------------------------------------------------- steps */

/**
 * kvc_step_begin() - announce a step (P3)
 * @ret_step: retire it with kvc_step_retire()
 *
 * Return: 0; KV_BUSY: KV_ANNOUNCE_SLOTS steps are in flight; -ETIMEDOUT: kvmd is away and the
 *	session has to attach first; -ESHUTDOWN: the session was ended by kvmd.
 */
KVC_API int kvc_step_begin(struct kvc *c, struct kvc_step **ret_step);

/** kvc_step_number() - number of the step, unique in the session; verdicts carry it */
KVC_API uint64_t kvc_step_number(const struct kvc_step *step);

/** kvc_step_block_bytes() - most bytes that kvc_step_block() writes for this pool */
KVC_API size_t kvc_step_block_bytes(const struct kvc_pool *pool);

/**
 * kvc_step_block() - what the step's mirror needs before rows of this pool are checked
 * @step: announced, not launched
 * @pool: a pool that the step's rows name; call once for each
 * @stream: 0..7: the mirror copy this block is for (one position is kept per stream)
 * @buf: struct kv_step_block and its entries are written here (pinned memory on a GPU)
 * @buf_bytes: room
 *
 * Return: 0; -ENOSPC; -EINVAL; -ESHUTDOWN the pool is not open in the step's session: another
 *	thread is opening it there after a reconnect, or it did not come back.
 */
KVC_API int kvc_step_block(struct kvc_step *step, struct kvc_pool *pool, uint32_t stream,
			   void *buf, size_t buf_bytes);

/**
 * kvc_step_rows() - declare rows of a request; refuse a page that two WRITE rows name
 * Return: 0; -EEXIST: a page has a second WRITE row in this step; -EINVAL: a pfn out of range;
 *	-ENOMEM.
 */
KVC_API int kvc_step_rows(struct kvc_step *step, struct kvc_pool *pool, const struct kv_row *rows,
			  uint32_t nr_rows);

/**
 * struct kvc_check_request - one request of kvc_step_check()
 * @rows: nr_rows rows
 * @nonce: the request's nonce, as in kv_row_make()
 * @nr_rows: rows
 * @length: tokens that will be read, appended ones included
 */
struct kvc_check_request {
	const struct kv_row *rows;
	uint64_t nonce;
	uint32_t nr_rows;
	uint32_t length;
};

/**
 * kvc_step_check() - host backend: bring the library's mirror up and check every row
 * @ret_verdicts: one per request; test with kv_verdict_ok()
 *
 * Marks the step launched. With check mode off it answers "good" and looks at nothing.
 * Return: 0 (also when requests failed: see their verdicts); -EINVAL the pool is not open in the
 *	step's session; -ENOMEM.
 */
KVC_API int kvc_step_check(struct kvc_step *step, struct kvc_pool *pool,
			   const struct kvc_check_request *requests, uint32_t nr_requests,
			   struct kv_verdict *ret_verdicts);

/** kvc_step_launched() - the launch was accepted: stream positions move. Call it after the last
 * kvc_step_block() of the step; without it the next block starts where this one did */
KVC_API void kvc_step_launched(struct kvc_step *step);

/** kvc_step_retire() - all work of the step on pages is complete; deferred frees may go. @step
 * is gone. After a CUDA error do not retire: the work may still run; end the process */
KVC_API void kvc_step_retire(struct kvc_step *step);

#ifdef __cplusplus
}
#endif
#endif /* KVCLIENT_H */
