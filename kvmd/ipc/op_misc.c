/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/op_misc.c - NOP, REPORT, STAT, UNMAPPED. */
#include <cjson/cJSON.h>
#include <errno.h>

#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/ops.h"

int kvd_op_nop(struct kvd_request *req)
{
	return 0;
}

int kvd_op_report(struct kvd_request *req)
{
	const struct kv_incident *in = (const struct kv_incident *)req->args;
	struct kvd_conn *conn = req->conn;
	cJSON *fields;
	int r;

	r = kvd_incident_report(conn->session, kvd_op_attach(req), in);
	if (r)
		return r;
	kvd_stats.incidents++;
	kvd_trace_incident(conn->client_id, in->pfn, in->bits);
	kvd_warn(
		"ipc/report",
		"client %llu (%s): request %llu row %u pfn %u: check failed, bits 0x%02x, "
		"expected %#llx, found %#llx",
		(unsigned long long)conn->client_id, conn->name,
		(unsigned long long)in->request_id, in->row, in->pfn, in->bits,
		(unsigned long long)in->expected, (unsigned long long)in->found);
	if (conn->kvd->admin.nr_streams) {
		fields = cJSON_CreateObject();
		cJSON_AddNumberToObject(fields, "id",
					(double)conn->kvd->core.incidents.total);
		cJSON_AddNumberToObject(fields, "session", (double)conn->client_id);
		cJSON_AddNumberToObject(fields, "pool", req->sqe.pool_id);
		cJSON_AddNumberToObject(fields, "pfn", in->pfn);
		cJSON_AddNumberToObject(fields, "bits", in->bits);
		kvd_admin_event(conn->kvd, "incident", fields);
	}
	return 0;
}

int kvd_op_stat(struct kvd_request *req)
{
	kvd_stat(req->conn->session, kvd_op_attach(req), (struct kv_stat *)req->rets);
	req->ret_bytes = sizeof(struct kv_stat);
	return 0;
}

int kvd_op_unmapped(struct kvd_request *req)
{
	const struct kv_extent_ref *ref = (const struct kv_extent_ref *)req->args;

	if (ref->reserved)
		return -EINVAL;
	if (kvd_out_has_extent(&req->conn->out, req->sqe.pool_id, ref->index))
		return -ENOENT; /* it was not given yet */
	return kvd_session_unmapped(req->conn->session, req->sqe.pool_id, ref);
}
