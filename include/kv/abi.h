/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/abi.h - versions, limits, opcodes with their arguments, socket messages.
 *
 * Little endian, naturally aligned, every field pinned, reserved fields must be zero (a set
 * reserved bit is refused with -EINVAL: it may mean something to a later version).
 *
 * Socket: AF_UNIX SOCK_SEQPACKET. One message = struct kv_msg and a body. Fds travel by
 * SCM_RIGHTS only; the body says how many. MSG_CTRUNC and surplus fds close the connection.
 */
#ifndef KV_ABI_H
#define KV_ABI_H

#include "types.h"
#include "layout.h"
#include "ring.h"
#include "session.h"
#include "tag.h"
#include "gfp.h"
#include "outcome.h"

#define KV_ABI_VERSION	   1u
#define KV_ABI_VERSION_MIN 1u
#define KV_MSG_MAGIC	   0x4d56564bu /* "KVVM" */
#define KV_MSG_BYTES_MAX   (128u << 10)
#define KV_MSG_FDS_MAX	   250u
#define KV_NAME_BYTES	   64u
#define KV_KEY_BYTES	   16u
#define KV_COOKIE_BYTES	   16u
#define KV_BATCH_MAX	   4096u   /* pages in one ALLOC, FREE, SEAL, PIN, UNPIN, FORK */
#define KV_LOOKUP_MAX	   131072u /* tokens in one LOOKUP */
#define KV_POOLS_MAX	   16u	   /* pools a session may open */

#define KVMD_SOCKET_DEFAULT	  "/run/kvmd/kvmd.sock"
#define KVMD_ADMIN_SOCKET_DEFAULT "/run/kvmd/admin.sock"

/* Behind the admin socket's path: a file on which kvmd holds a lock (F_SETLK) as long as it lives. A
 * connection does not tell: the keeper holds the socket, too. */
#define KVMD_ADMIN_LOCK_SUFFIX	  ".lock"

/* ------------------------------------------------------------------- ring operations */

enum kv_opcode {
	KV_OP_NOP = 0,
	KV_OP_ALLOC = 1,    /* -> kv_grant[nr], or magazine stock: cqe.nr = pages stocked */
	KV_OP_FREE = 2,	    /* kv_page_ref[nr]; each on its own; cqe.nr freed; STALE: cqe.a = first */
	KV_OP_SEAL = 3,	    /* kv_seal_arg + kv_seal_page[nr] + tokens[nr][64] -> kv_seal_ret[nr] */
	KV_OP_LOOKUP = 4,   /* kv_lookup_arg + tokens[nr] -> kv_hit[]; cqe.nr = pages, pinned;
			     * cqe.a = pages behind them that are on their way from a tier */
	KV_OP_PIN = 5,	    /* kv_page_ref[nr], all or nothing; one more reference each */
	KV_OP_UNPIN = 6,    /* kv_page_ref[nr], each on its own as FREE */
	KV_OP_FORK = 7,	    /* kv_page_ref[nr] (held by the session) -> kv_grant[nr], all or nothing */
	KV_OP_REPORT = 8,   /* kv_incident */
	KV_OP_STAT = 9,	    /* -> kv_stat */
	KV_OP_UNMAPPED = 10, /* kv_extent_ref: acknowledges EXTENT_REMOVED */
	KV_OP_PREFETCH = 11, /* as LOOKUP, waits for what a tier has and pins nothing: cqe.nr =
			      * pages a LOOKUP would find; -EOPNOTSUPP without a tier */
	KV_OP_NR
};

/* A page the session was given. FREE, PIN, ... name it by (pfn, tag). */
struct kv_grant {
	uint32_t pfn;
	uint32_t flags; /* KV_GRANT_* */
	uint64_t tag;
};
KV_ABI_SIZE(kv_grant, 16);
KV_ABI_FIELD(kv_grant, pfn, 0, 4);
KV_ABI_FIELD(kv_grant, flags, 4, 4);
KV_ABI_FIELD(kv_grant, tag, 8, 8);

#define KV_GRANT_DIRTY	0x01u /* bytes of another session: zero it in a step before use */
#define KV_GRANT_SHARED 0x02u /* sealed, read-only: from LOOKUP */

struct kv_page_ref {
	uint32_t pfn;
	uint32_t reserved;
	uint64_t tag; /* generation is compared; LIVE and SEALED bits are ignored */
};
KV_ABI_SIZE(kv_page_ref, 16);
KV_ABI_FIELD(kv_page_ref, pfn, 0, 4);
KV_ABI_FIELD(kv_page_ref, reserved, 4, 4);
KV_ABI_FIELD(kv_page_ref, tag, 8, 8);

/* SEAL: a run of consecutive full pages of one sequence. */
struct kv_seal_arg {
	uint8_t parent_key[KV_KEY_BYTES]; /* key of the page before the run */
	uint32_t flags;			  /* KV_SEAL_ROOT: the run starts the sequence */
	uint32_t reserved[3];
};
KV_ABI_SIZE(kv_seal_arg, 32);
KV_ABI_FIELD(kv_seal_arg, parent_key, 0, 16);
KV_ABI_FIELD(kv_seal_arg, flags, 16, 4);
KV_ABI_FIELD(kv_seal_arg, reserved, 20, 12);

#define KV_SEAL_ROOT  0x01u
#define KV_SEAL_AGAIN 0x02u /* sent again after kvmd went: pages sealed already stay so */

struct kv_seal_page {
	uint32_t pfn;
	uint32_t crc32c; /* of the page's kv_page_bytes() bytes */
	uint64_t tag;
};
KV_ABI_SIZE(kv_seal_page, 16);
KV_ABI_FIELD(kv_seal_page, pfn, 0, 4);
KV_ABI_FIELD(kv_seal_page, crc32c, 4, 4);
KV_ABI_FIELD(kv_seal_page, tag, 8, 8);

struct kv_seal_ret {
	uint8_t key[KV_KEY_BYTES];
	uint32_t flags; /* KV_SEALED_DUP: the key was there already; this page is sealed, not found */
	uint32_t reserved[3];
};
KV_ABI_SIZE(kv_seal_ret, 32);
KV_ABI_FIELD(kv_seal_ret, key, 0, 16);
KV_ABI_FIELD(kv_seal_ret, flags, 16, 4);
KV_ABI_FIELD(kv_seal_ret, reserved, 20, 12);

#define KV_SEALED_DUP 0x01u

/* LOOKUP: the longest run of findable pages from the sequence's start. */
struct kv_lookup_arg {
	uint32_t max_pages; /* stop after this many; 0 = all */
	uint32_t reserved[3];
};
KV_ABI_SIZE(kv_lookup_arg, 16);
KV_ABI_FIELD(kv_lookup_arg, max_pages, 0, 4);
KV_ABI_FIELD(kv_lookup_arg, reserved, 4, 12);

struct kv_hit {
	uint8_t key[KV_KEY_BYTES];
	struct kv_grant grant;
};
KV_ABI_SIZE(kv_hit, 32);
KV_ABI_FIELD(kv_hit, key, 0, 16);
KV_ABI_FIELD(kv_hit, grant, 16, 16);

/* REPORT: a failed check, with what the client saw. kvmd adds the page's history. */
struct kv_incident {
	uint64_t request_id;
	uint64_t step;
	uint64_t expected;
	uint64_t found;
	uint32_t pfn;
	uint32_t row;
	uint32_t bits; /* KV_BAD_* */
	uint32_t reserved;
};
KV_ABI_SIZE(kv_incident, 48);
KV_ABI_FIELD(kv_incident, request_id, 0, 8);
KV_ABI_FIELD(kv_incident, step, 8, 8);
KV_ABI_FIELD(kv_incident, expected, 16, 8);
KV_ABI_FIELD(kv_incident, found, 24, 8);
KV_ABI_FIELD(kv_incident, pfn, 32, 4);
KV_ABI_FIELD(kv_incident, row, 36, 4);
KV_ABI_FIELD(kv_incident, bits, 40, 4);
KV_ABI_FIELD(kv_incident, reserved, 44, 4);

/* STAT: the caller's own pool and tenant; nothing of another domain shows. */
struct kv_stat {
	uint32_t nr_pages_max; /* pool */
	uint32_t nr_pages;
	uint32_t nr_free;
	uint32_t nr_active;   /* of the domain */
	uint32_t nr_sealed;
	uint32_t nr_cached;
	uint32_t nr_quarantine;
	uint32_t nr_magazine;
	uint64_t tenant_used_bytes;
	uint64_t tenant_max_bytes;
	uint64_t lookups;
	uint64_t hits;
};
KV_ABI_SIZE(kv_stat, 64);
KV_ABI_FIELD(kv_stat, nr_pages_max, 0, 4);
KV_ABI_FIELD(kv_stat, nr_pages, 4, 4);
KV_ABI_FIELD(kv_stat, nr_free, 8, 4);
KV_ABI_FIELD(kv_stat, nr_active, 12, 4);
KV_ABI_FIELD(kv_stat, nr_sealed, 16, 4);
KV_ABI_FIELD(kv_stat, nr_cached, 20, 4);
KV_ABI_FIELD(kv_stat, nr_quarantine, 24, 4);
KV_ABI_FIELD(kv_stat, nr_magazine, 28, 4);
KV_ABI_FIELD(kv_stat, tenant_used_bytes, 32, 8);
KV_ABI_FIELD(kv_stat, tenant_max_bytes, 40, 8);
KV_ABI_FIELD(kv_stat, lookups, 48, 8);
KV_ABI_FIELD(kv_stat, hits, 56, 8);

struct kv_extent_ref {
	uint32_t index;
	uint32_t reserved;
	uint64_t serial;
};
KV_ABI_SIZE(kv_extent_ref, 16);
KV_ABI_FIELD(kv_extent_ref, index, 0, 4);
KV_ABI_FIELD(kv_extent_ref, reserved, 4, 4);
KV_ABI_FIELD(kv_extent_ref, serial, 8, 8);

/* ------------------------------------------------------------------- socket messages */

enum kv_msg_type {
	KV_MSG_HELLO = 1,	  /* client -> kvmd: kv_msg_hello */
	KV_MSG_HELLO_REPLY = 2,	  /* kv_msg_hello_reply + 4 fds: ring, sq eventfd, cq eventfd, session */
	KV_MSG_POOL_OPEN = 3,	  /* client -> kvmd: kv_msg_pool_open + scales */
	KV_MSG_POOL_REPLY = 4,	  /* kv_msg_pool_reply + 1 fd: table */
	KV_MSG_POOL_CLOSE = 5,	  /* client -> kvmd: kv_msg_pool_close; all leases of it are freed */
	KV_MSG_EXTENT_ADDED = 6,  /* event: kv_msg_extents + nr fds */
	KV_MSG_EXTENT_REMOVED = 7, /* event: kv_msg_extents, no fd; answer with KV_OP_UNMAPPED */
	KV_MSG_REVOKE = 8,	  /* event: kv_msg_revoke + kv_page_ref[nr] */
	KV_MSG_PRESSURE = 9,	  /* event: kv_msg_pressure */
	KV_MSG_EPOCH = 10,	  /* event: kv_msg_epoch: attach again */
	KV_MSG_ERROR = 11,	  /* kv_msg_error, then the connection closes */
	KV_MSG_LEASES = 12,	  /* kv_msg_leases + kv_lease[nr]: what a resumed session holds */
	KV_MSG_NR
};

struct kv_msg {
	uint32_t magic; /* KV_MSG_MAGIC */
	uint16_t type;
	uint16_t nr_fds;
	uint32_t size_bytes; /* header and body */
	uint32_t sequence;   /* a reply repeats the request's */
};
KV_ABI_SIZE(kv_msg, 16);
KV_ABI_FIELD(kv_msg, magic, 0, 4);
KV_ABI_FIELD(kv_msg, type, 4, 2);
KV_ABI_FIELD(kv_msg, nr_fds, 6, 2);
KV_ABI_FIELD(kv_msg, size_bytes, 8, 4);
KV_ABI_FIELD(kv_msg, sequence, 12, 4);

struct kv_msg_hello {
	struct kv_msg msg;
	uint32_t abi_min;
	uint32_t abi_max;
	uint32_t role; /* KV_ROLE_* */
	uint32_t ring_depth; /* 0 = default; power of two <= KV_RING_DEPTH_MAX */
	uint64_t pidns_inode; /* hint for messages; identity comes from the socket */
	uint8_t cookie[KV_COOKIE_BYTES]; /* zero, or the session to take up again */
	char client_name[KV_NAME_BYTES]; /* NUL-terminated, printable ASCII */
};
KV_ABI_SIZE(kv_msg_hello, 120);
KV_ABI_FIELD(kv_msg_hello, abi_min, 16, 4);
KV_ABI_FIELD(kv_msg_hello, abi_max, 20, 4);
KV_ABI_FIELD(kv_msg_hello, role, 24, 4);
KV_ABI_FIELD(kv_msg_hello, ring_depth, 28, 4);
KV_ABI_FIELD(kv_msg_hello, pidns_inode, 32, 8);
KV_ABI_FIELD(kv_msg_hello, cookie, 40, 16);
KV_ABI_FIELD(kv_msg_hello, client_name, 56, 64);

#define KV_ROLE_ENGINE	0u
#define KV_ROLE_MONITOR 1u /* no pages: STAT only */

struct kv_msg_hello_reply {
	struct kv_msg msg;
	int32_t result; /* 0 or -errno; then error says why and no fd comes */
	uint32_t abi;
	uint64_t client_id;
	uint64_t table_epoch;
	uint8_t cookie[KV_COOKIE_BYTES];
	uint32_t ring_bytes;
	uint32_t ring_nonce;
	uint32_t flags; /* KV_HELLO_* */
	uint32_t reserved;
	char tenant[KV_NAME_BYTES];
	char error[128]; /* names field and value */
};
KV_ABI_SIZE(kv_msg_hello_reply, 264);
KV_ABI_FIELD(kv_msg_hello_reply, result, 16, 4);
KV_ABI_FIELD(kv_msg_hello_reply, abi, 20, 4);
KV_ABI_FIELD(kv_msg_hello_reply, client_id, 24, 8);
KV_ABI_FIELD(kv_msg_hello_reply, table_epoch, 32, 8);
KV_ABI_FIELD(kv_msg_hello_reply, cookie, 40, 16);
KV_ABI_FIELD(kv_msg_hello_reply, ring_bytes, 56, 4);
KV_ABI_FIELD(kv_msg_hello_reply, ring_nonce, 60, 4);
KV_ABI_FIELD(kv_msg_hello_reply, flags, 64, 4);
KV_ABI_FIELD(kv_msg_hello_reply, reserved, 68, 4);
KV_ABI_FIELD(kv_msg_hello_reply, tenant, 72, 64);
KV_ABI_FIELD(kv_msg_hello_reply, error, 136, 128);

#define KV_HELLO_CHECK_MASK 0x03u /* 0 batch, 1 off, 2 strict */
#define KV_CHECK_BATCH	    0u
#define KV_CHECK_OFF	    1u
#define KV_CHECK_STRICT	    2u
#define KV_HELLO_SPIN	    0x04u /* kvmd spins after work: the client may spin too */
#define KV_HELLO_RESUMED    0x08u /* HELLO's session was taken up: same client_id and page */

struct kv_msg_pool_open {
	struct kv_msg msg;
	uint8_t gpu_uuid[16]; /* zero: host backend, or the host's only GPU */
	struct kv_layout layout;
	/* float scales[layout.nr_scales] */
};
KV_ABI_SIZE(kv_msg_pool_open, 120);
KV_ABI_FIELD(kv_msg_pool_open, gpu_uuid, 16, 16);
KV_ABI_FIELD(kv_msg_pool_open, layout, 32, 88);

struct kv_msg_pool_reply {
	struct kv_msg msg;
	int32_t result;
	uint32_t pool_id;
	uint64_t fingerprint;
	uint64_t table_epoch;
	uint64_t table_bytes;
	struct kv_geometry geometry;
	uint32_t backend; /* KV_BACKEND_* */
	uint32_t nr_extents; /* EXTENT_ADDED follows for these */
	char field[32]; /* on -EINVAL: the layout field that is refused or differs */
	char error[128];
	uint8_t gpu_uuid[16]; /* GPU of the memory: ordinals differ between processes; host: 0 */
};
KV_ABI_SIZE(kv_msg_pool_reply, 256);
KV_ABI_FIELD(kv_msg_pool_reply, result, 16, 4);
KV_ABI_FIELD(kv_msg_pool_reply, pool_id, 20, 4);
KV_ABI_FIELD(kv_msg_pool_reply, fingerprint, 24, 8);
KV_ABI_FIELD(kv_msg_pool_reply, table_epoch, 32, 8);
KV_ABI_FIELD(kv_msg_pool_reply, table_bytes, 40, 8);
KV_ABI_FIELD(kv_msg_pool_reply, geometry, 48, 24);
KV_ABI_FIELD(kv_msg_pool_reply, backend, 72, 4);
KV_ABI_FIELD(kv_msg_pool_reply, nr_extents, 76, 4);
KV_ABI_FIELD(kv_msg_pool_reply, field, 80, 32);
KV_ABI_FIELD(kv_msg_pool_reply, error, 112, 128);
KV_ABI_FIELD(kv_msg_pool_reply, gpu_uuid, 240, 16);

#define KV_BACKEND_HOST	       0u
#define KV_BACKEND_CUDA	       1u
#define KV_BACKEND_CUDA_LEGACY 2u

/*
 * KV_BACKEND_CUDA_LEGACY: an extent's descriptor is a sealed file with this at its start. The
 * pool has one extent, at the address that cuIpcOpenMemHandle gives: the page addresses begin
 * there. EXTENT_ADDED follows the POOL_REPLY, and the extent stays as long as the pool is open.
 */
struct kv_legacy_extent {
	uint32_t magic; /* KV_LEGACY_MAGIC */
	uint32_t reserved;
	uint64_t id; /* kvmd's own */
	uint64_t size_bytes;
	uint8_t gpu_uuid[16];
	uint8_t handle[64]; /* CUipcMemHandle */
	uint8_t reserved2[24];
};
KV_ABI_SIZE(kv_legacy_extent, 128);
KV_ABI_FIELD(kv_legacy_extent, magic, 0, 4);
KV_ABI_FIELD(kv_legacy_extent, reserved, 4, 4);
KV_ABI_FIELD(kv_legacy_extent, id, 8, 8);
KV_ABI_FIELD(kv_legacy_extent, size_bytes, 16, 8);
KV_ABI_FIELD(kv_legacy_extent, gpu_uuid, 24, 16);
KV_ABI_FIELD(kv_legacy_extent, handle, 40, 64);
KV_ABI_FIELD(kv_legacy_extent, reserved2, 104, 24);

#define KV_LEGACY_MAGIC 0x4c43564bu /* "KVCL" */

struct kv_msg_pool_close {
	struct kv_msg msg;
	uint32_t pool_id;
	uint32_t reserved;
};
KV_ABI_SIZE(kv_msg_pool_close, 24);
KV_ABI_FIELD(kv_msg_pool_close, pool_id, 16, 4);
KV_ABI_FIELD(kv_msg_pool_close, reserved, 20, 4);

struct kv_msg_extents {
	struct kv_msg msg;
	uint32_t pool_id;
	uint32_t nr;
	struct kv_extent_ref extents[KV_MSG_FDS_MAX]; /* nr are sent */
};
KV_ABI_SIZE(kv_msg_extents, 24 + 16 * 250);
KV_ABI_FIELD(kv_msg_extents, pool_id, 16, 4);
KV_ABI_FIELD(kv_msg_extents, nr, 20, 4);
KV_ABI_FIELD(kv_msg_extents, extents, 24, 4000);

struct kv_msg_revoke {
	struct kv_msg msg;
	uint32_t pool_id;
	uint32_t nr; /* kv_page_ref[nr] follow; <= KV_BATCH_MAX */
};
KV_ABI_SIZE(kv_msg_revoke, 24);
KV_ABI_FIELD(kv_msg_revoke, pool_id, 16, 4);
KV_ABI_FIELD(kv_msg_revoke, nr, 20, 4);

struct kv_msg_pressure {
	struct kv_msg msg;
	uint32_t pool_id;
	uint32_t level; /* 0 none, 1 some, 2 full */
};
KV_ABI_SIZE(kv_msg_pressure, 24);
KV_ABI_FIELD(kv_msg_pressure, pool_id, 16, 4);
KV_ABI_FIELD(kv_msg_pressure, level, 20, 4);

/*
 * LEASES: sent on a resumed session only. After HELLO_REPLY once per pool that the session has
 * open (KV_LEASES_OPEN, nr 0; one that the client does not open again it closes); after each
 * POOL_REPLY and its EXTENT_ADDED all that kvmd knows, up to the one with KV_LEASES_LAST.
 */
struct kv_msg_leases {
	struct kv_msg msg;
	uint32_t pool_id;
	uint32_t nr; /* kv_lease[nr] follow; <= KV_BATCH_MAX */
	uint32_t flags; /* KV_LEASES_* */
	uint32_t reserved;
};
KV_ABI_SIZE(kv_msg_leases, 32);
KV_ABI_FIELD(kv_msg_leases, pool_id, 16, 4);
KV_ABI_FIELD(kv_msg_leases, nr, 20, 4);
KV_ABI_FIELD(kv_msg_leases, flags, 24, 4);
KV_ABI_FIELD(kv_msg_leases, reserved, 28, 4);

#define KV_LEASES_OPEN 0x01u
#define KV_LEASES_LAST 0x02u

struct kv_lease {
	uint32_t pfn;
	uint16_t refs;
	uint16_t flags; /* KV_LEASE_* */
	uint64_t tag;
};
KV_ABI_SIZE(kv_lease, 16);
KV_ABI_FIELD(kv_lease, pfn, 0, 4);
KV_ABI_FIELD(kv_lease, refs, 4, 2);
KV_ABI_FIELD(kv_lease, flags, 6, 2);
KV_ABI_FIELD(kv_lease, tag, 8, 8);

#define KV_LEASE_STOCKED 0x01u /* in a magazine of the session page, or just popped */

struct kv_msg_epoch {
	struct kv_msg msg;
	uint64_t table_epoch;
};
KV_ABI_SIZE(kv_msg_epoch, 24);
KV_ABI_FIELD(kv_msg_epoch, table_epoch, 16, 8);

struct kv_msg_error {
	struct kv_msg msg;
	int32_t result;
	uint32_t reserved;
	char error[128];
};
KV_ABI_SIZE(kv_msg_error, 152);
KV_ABI_FIELD(kv_msg_error, result, 16, 4);
KV_ABI_FIELD(kv_msg_error, reserved, 20, 4);
KV_ABI_FIELD(kv_msg_error, error, 24, 128);

#endif /* KV_ABI_H */
