/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/incident.h - failed checks that sessions reported, with the page's history copied
 * in.
 *
 * A bounded ring; the oldest is dropped. A row that REVOKE or the session's own FREE
 * killed is an outcome, not an incident, and the library does not report it. Loop thread
 * only.
 */
#ifndef KVD_INCIDENT_H
#define KVD_INCIDENT_H

#include "kvmd/own/session.h"

#define KVD_INCIDENTS 256u

/**
 * struct kvd_incident - one failed check
 * @id: 1, 2, 3, ...
 * @when_ns: core time of the report
 * @client_id, @client, @tenant: who reported; names are copied
 * @pool_id: pool
 * @report: as received
 * @state, @tag, @owner, @refs: the page's record at the time of the report
 * @nr_past, @past: its history, oldest first
 */
struct kvd_incident {
	u64 id;
	u64 when_ns;
	u64 client_id;
	char client[KV_NAME_BYTES];
	char tenant[KV_NAME_BYTES];
	u32 pool_id;
	struct kv_incident report;
	u32 state;
	u32 refs;
	u64 tag;
	u64 owner;
	u32 nr_past;
	struct kvd_page_past past[KVD_PAST_NR];
};

/**
 * struct kvd_incidents - the ring
 * @total: ever reported; incident i lies at (i - 1) % KVD_INCIDENTS
 */
struct kvd_incidents {
	u64 total;
	struct kvd_incident ring[KVD_INCIDENTS];
};

/** kvd_incident_report() - Return: 0; -EINVAL a reserved
 * field is set. A pfn out of range has no history and state KVD_FRAME_STATES */
int kvd_incident_report(struct kvd_session *s, struct kvd_attach *a,
			const struct kv_incident *in);

/** kvd_incident_get() - by id, or NULL if it is unknown or was dropped */
const struct kvd_incident *kvd_incident_get(const struct kvd_incidents *ring, u64 id);

#endif /* KVD_INCIDENT_H */
