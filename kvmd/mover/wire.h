/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mover/wire.h - what kvmd and its mover say to each other.
 *
 * Socket (SOCK_SEQPACKET): struct kvd_mv_msg, with descriptors where it says so. Ring: a
 * sealed memfd with entries from kvmd (one a run, a job's are consecutive, the last one
 * marked) and completions from the mover (one a job). Each side copies an entry once,
 * checks it, then acts; a mover that breaks a rule is killed, a kvmd that does is left.
 *
 * Order: kvmd sends MAP before it stores the sq_tail of the first entry that names the
 * slot, and the mover reads its socket empty after it has loaded sq_tail and before it
 * looks at the entries. kvmd sends UNMAP only when no job names the slot.
 */
#ifndef KVD_MOVER_WIRE_H
#define KVD_MOVER_WIRE_H

#include "base/util.h"
#include "kv/abi.h"

#define KVD_MV_MAGIC   0x72766f6du /* "movr" */
#define KVD_MV_SQ      4096u	   /* entries; a power of two */
#define KVD_MV_CQ      512u	   /* > KVD_MOVER_JOBS_MAX, so that it never fills */
#define KVD_MV_EXTENTS 4096u	   /* slots */

enum kvd_mv_type {
	KVD_MV_HELLO = 1, /* + 4 fds: ring, pool (or /dev/null), sq eventfd, cq eventfd */
	KVD_MV_READY,	  /* from the mover; result, text */
	KVD_MV_MAP,	  /* slot, bytes + fd. Not answered: jobs that name it may fail */
	KVD_MV_UNMAP,	  /* slot */
	KVD_MV_UNMAPPED,  /* from the mover; slot */
	KVD_MV_CANCEL,	  /* id of a job */
	KVD_MV_ALLOC,	  /* cuda-legacy: id, bytes */
	KVD_MV_ALLOCED,	  /* from the mover; id, result, text, handle */
	KVD_MV_FREE,	  /* id */
	KVD_MV_TYPES
};

struct kvd_mv_msg {
	u32 magic;
	u32 type;
	u32 slot;
	s32 result;
	u64 id;
	u64 bytes;
	u32 backend;
	u32 reserved;
	u8 gpu_uuid[16];
	u8 handle[64];
	char text[128];
};

#define KVD_MV_LAST 1u /* of its job */

struct kvd_mv_entry {
	u64 job;
	u64 extent_off;
	u64 pool_off;
	u64 deadline_ns; /* not begun by then: -ETIMEDOUT; 0 none */
	u32 bytes;
	u32 slot;
	u16 dir; /* enum kvd_mover_dir */
	u16 flags;
	u32 reserved;
};

struct kvd_mv_done {
	u64 job;
	s32 status;
	u32 reserved;
};

struct kvd_mv_ring {
	u32 sq_tail __attribute__((aligned(64))); /* written by kvmd */
	u32 sq_head __attribute__((aligned(64))); /* written by the mover */
	u32 cq_tail __attribute__((aligned(64))); /* written by the mover */
	u32 cq_head __attribute__((aligned(64))); /* written by kvmd */
	struct kvd_mv_entry sq[KVD_MV_SQ] __attribute__((aligned(64)));
	struct kvd_mv_done cq[KVD_MV_CQ];
};

/** kvd_mover_main() - be the mover; @sock: kvmd's socket. Return: exit status */
int kvd_mover_main(int sock, const char *faults);

/** kvd_mv_send() - one message and up to 4 fds. Return: 0; -errno */
int kvd_mv_send(int sock, const struct kvd_mv_msg *msg, const int *fds, u32 nr_fds);

/**
 * kvd_mv_receive() - one message, not waiting
 * @fds: [4]; @ret_nr of them are the caller's
 *
 * Return: 1; 0 hang-up; -EAGAIN; -EPROTO not one of ours; -errno.
 */
int kvd_mv_receive(int sock, struct kvd_mv_msg *ret_msg, int *fds, u32 *ret_nr);

#endif
