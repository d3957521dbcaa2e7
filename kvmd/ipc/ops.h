/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/ops.h - handlers of the ring operations, for the table.
 *
 * A handler finds a checked entry in req->sqe, its arguments in req->args, the session in
 * req->conn->session, and, with KVD_OP_POOL, an open pool (kvd_op_attach()). It answers
 * 0, -errno, an enum kv_outcome, KVD_REQUEST_AGAIN or KVD_REQUEST_PARK. Loop thread only.
 */
#ifndef KVD_IPC_OPS_H
#define KVD_IPC_OPS_H

#include "kvmd/ipc/request.h"

/** kvd_op_attach() - the session's part of the request's pool; never NULL under
 * KVD_OP_POOL */
struct kvd_attach *kvd_op_attach(const struct kvd_request *req);

int kvd_op_nop(struct kvd_request *req);
int kvd_op_alloc(struct kvd_request *req);
int kvd_op_alloc_again(struct kvd_request *req);
int kvd_op_free(struct kvd_request *req);
int kvd_op_seal(struct kvd_request *req);
int kvd_op_seal_again(struct kvd_request *req);
int kvd_op_lookup(struct kvd_request *req);
int kvd_op_lookup_again(struct kvd_request *req);
int kvd_op_pin(struct kvd_request *req);
int kvd_op_fork(struct kvd_request *req);
int kvd_op_fork_again(struct kvd_request *req);
int kvd_op_report(struct kvd_request *req);
int kvd_op_stat(struct kvd_request *req);
int kvd_op_unmapped(struct kvd_request *req);
int kvd_op_prefetch(struct kvd_request *req);
int kvd_op_prefetch_again(struct kvd_request *req);

#endif
