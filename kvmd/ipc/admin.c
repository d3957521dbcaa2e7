/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/admin.c - see admin.h: connections, lines, dispatch. */
#include "kvmd/ipc/admin.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/admin_priv.h"

struct admin_conn {
	struct list_node node;
	struct kvd *kvd;
	int fd;
	struct kvd_watch watch;
	bool stream;
	bool closing; /* after what waits was sent */
	bool asked;   /* for an audit; what it asked after that waits */
	bool audited; /* the audit under way is for it */
	size_t in_used;
	char *out;
	size_t out_used, out_done;
	char in[KVD_ADMIN_REQUEST_BYTES];
};

static const struct {
	const char *name;
	int (*handle)(struct kvd_admin_call *call);
} verbs[] = {
	{"status", kvd_admin_status},
	{"ps", kvd_admin_ps},
	{"pages", kvd_admin_pages},
	{"page", kvd_admin_page},
	{"pool", kvd_admin_pool},
	{"tenant", kvd_admin_tenant},
	{"incidents", kvd_admin_incidents},
	{"audit", kvd_admin_audit},
	{"evict", kvd_admin_evict},
	{"version", kvd_admin_version},
	{"reload", kvd_admin_reload},
	{"stat", kvd_admin_stat},
	{"trace", kvd_admin_trace},
	{"fault", kvd_admin_fault},
	{"upgrade", kvd_admin_upgrade},
	{"meminfo", kvd_admin_meminfo},
	{"slabinfo", kvd_admin_slabinfo},
	{"vmstat", kvd_admin_vmstat},
	{"pin", kvd_admin_pin},
	{"unpin", kvd_admin_unpin},
	{"drain", kvd_admin_drain},
	{"limit", kvd_admin_limit},
	{"revoke", kvd_admin_revoke},
	{"pressure", kvd_admin_pressure},
	{"pagemap", kvd_admin_pagemap},
	{"tier", kvd_admin_tier},
};

/* ------------------------------------------------------------------ helpers */

void kvd_admin_u64(cJSON *object, const char *name, u64 value)
{
	char text[24];

	/* JSON readers use doubles: above 2^53 a number would lose bits. */
	snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
	if (value <= 1ull << 53)
		cJSON_AddRawToObject(object, name, text);
	else
		cJSON_AddStringToObject(object, name, text);
}

void kvd_admin_hex(cJSON *object, const char *name, u64 value)
{
	char text[24];

	snprintf(text, sizeof(text), "0x%llx", (unsigned long long)value);
	cJSON_AddStringToObject(object, name, text);
}

int kvd_admin_fail(struct kvd_admin_call *call, int r, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(call->error, sizeof(call->error), fmt, ap);
	va_end(ap);
	return r;
}

int kvd_admin_get_u32(struct kvd_admin_call *call, const char *name, u32 *ret)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(call->in, name);
	double d;

	if (!item)
		return 0;
	d = item->valuedouble;
	if (!cJSON_IsNumber(item) || !(d >= 0 && d <= 0xffffffffu) || d != (double)(u32)d)
		return kvd_admin_fail(call, -EINVAL, "%s: must be a whole number", name);
	*ret = (u32)d;
	return 1;
}

int kvd_admin_get_pool(struct kvd_admin_call *call, struct kvd_pool **ret_pool)
{
	struct kvd_mm *mm = &call->kvd->core.mm;
	struct kvd_pool *only = NULL;
	u32 id = 0, i, nr = 0;
	int r;

	r = kvd_admin_get_u32(call, "pool", &id);
	if (r < 0)
		return r;
	if (r) {
		if (!id || id > KVD_POOLS_MAX || !mm->pools[id - 1])
			return kvd_admin_fail(call, -ENOENT, "pool %u: no such pool", id);
		*ret_pool = mm->pools[id - 1];
		return 0;
	}
	for (i = 0; i < KVD_POOLS_MAX; i++) {
		if (!mm->pools[i])
			continue;
		only = mm->pools[i];
		nr++;
	}
	if (nr != 1)
		return kvd_admin_fail(
			call, nr ? -EINVAL : -ENOENT,
			nr ? "there are %u pools: name one" : "there is no pool", nr);
	*ret_pool = only;
	return 0;
}

cJSON *kvd_admin_handle(struct kvd *kvd, const cJSON *request, bool *ret_stream)
{
	const cJSON *op = cJSON_GetObjectItemCaseSensitive(request, "op");
	struct kvd_admin_call call = {.kvd = kvd, .in = request};
	size_t i;
	int r = -EOPNOTSUPP;

	call.out = cJSON_CreateObject();
	if (!call.out)
		return NULL;
	kvd_stats.admin_requests++;
	*ret_stream = cJSON_IsString(op) && !strcmp(op->valuestring, "events");
	if (*ret_stream)
		r = 0;
	for (i = 0; cJSON_IsString(op) && i < KV_ARRAY_SIZE(verbs); i++)
		if (!strcmp(op->valuestring, verbs[i].name))
			r = verbs[i].handle(&call);
	if (r) {
		cJSON_Delete(call.out);
		call.out = cJSON_CreateObject();
		if (!call.out)
			return NULL;
		if (!call.error[0])
			kvd_admin_fail(&call, r, "%s",
				       r == -EOPNOTSUPP ? "op: unknown operation"
				       : r < 0		? strerror(-r)
							: kv_outcome_str(r));
		cJSON_AddNumberToObject(call.out, "code", r);
		cJSON_AddStringToObject(call.out, "error", call.error);
	}
	cJSON_AddBoolToObject(call.out, "ok", r == 0);
	return call.out;
}

/* -------------------------------------------------------------- connections */

static void conn_close(struct admin_conn *c)
{
	struct kvd *kvd = c->kvd;

	kvd_loop_del(kvd->loop, &c->watch);
	close(c->fd);
	list_del(&c->node);
	kvd->admin.nr_conns--;
	kvd->admin.nr_streams -= c->stream;
	free(c->out);
	free(c);
}

/* Return: 0; -errno: close it */
static int conn_flush(struct admin_conn *c)
{
	ssize_t n;

	while (c->out_done < c->out_used) {
		n = send(c->fd, c->out + c->out_done, c->out_used - c->out_done,
			 MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno != EAGAIN)
			return -errno;
		if (n < 0)
			break;
		c->out_done += (size_t)n;
	}
	if (c->out_done == c->out_used) {
		c->out_done = c->out_used = 0;
		if (c->closing)
			return -ESHUTDOWN;
	}
	kvd_loop_modify(c->kvd->loop, &c->watch,
			c->out_used ? KVD_LOOP_IN | KVD_LOOP_OUT : KVD_LOOP_IN);
	return 0;
}

/* Queues one line; a reader that lets 64 MiB pile up is dropped. Consumes @doc. */
static int conn_say(struct admin_conn *c, cJSON *doc)
{
	char *text = doc ? cJSON_PrintUnformatted(doc) : NULL, *out;
	size_t len;

	cJSON_Delete(doc);
	if (!text)
		return -ENOMEM;
	len = strlen(text);
	out = c->out_used + len + 1 > KVD_ADMIN_OUT_BYTES_MAX
		      ? NULL
		      : realloc(c->out, c->out_used + len + 1);
	if (out) {
		memcpy(out + c->out_used, text, len);
		out[c->out_used + len] = '\n';
		c->out = out;
		c->out_used += len + 1;
	}
	cJSON_free(text);
	return out ? conn_flush(c) : -ENOBUFS;
}

static cJSON *refusal(int code, const char *text)
{
	cJSON *doc = cJSON_CreateObject();

	cJSON_AddBoolToObject(doc, "ok", false);
	cJSON_AddNumberToObject(doc, "code", code);
	cJSON_AddStringToObject(doc, "error", text);
	return doc;
}

/* It takes many turns: kvd_admin_turn() answers. */
static bool is_audit(const cJSON *request)
{
	const cJSON *op = cJSON_GetObjectItemCaseSensitive(request, "op");

	return cJSON_IsString(op) && !strcmp(op->valuestring, "audit") &&
	       !KV_MUTANT(audit_in_one_turn);
}

/* Its command may have waited for this kvmd to start, or to go on. Who gave up was told, or will
 * believe, that nothing was done. Who only sends no more still reads. */
static bool peer_gone(const struct admin_conn *c)
{
	struct pollfd p = {.fd = c->fd};

	return poll(&p, 1, 0) == 1 && (p.revents & POLLHUP) &&
	       !KV_MUTANT(given_up_is_done);
}

static int conn_line(struct admin_conn *c, const char *line, size_t len)
{
	cJSON *request = cJSON_ParseWithLength(line, len), *reply;
	bool stream = false;

	if (!cJSON_IsObject(request)) {
		cJSON_Delete(request);
		return conn_say(c, refusal(-EINVAL, "request: not a JSON object"));
	}
	if (is_audit(request)) {
		cJSON_Delete(request);
		c->asked = true;
		return 0;
	}
	reply = kvd_admin_handle(c->kvd, request, &stream);
	cJSON_Delete(request);
	if (stream && !c->stream) {
		c->stream = true;
		c->kvd->admin.nr_streams++;
	}
	return conn_say(c, reply);
}

/* What has come, line by line, as long as nothing has to be waited for. Return: 0;
 * -errno: close it */
static int conn_lines(struct admin_conn *c)
{
	char *end;
	size_t len;
	int r;

	while (!c->asked && (end = memchr(c->in, '\n', c->in_used))) {
		if (peer_gone(c))
			return -ESHUTDOWN;
		len = (size_t)(end - c->in);
		r = conn_line(c, c->in, len);
		if (r)
			return r;
		c->in_used -= len + 1;
		memmove(c->in, end + 1, c->in_used);
	}
	return !c->asked && c->in_used == sizeof(c->in) ? -EMSGSIZE : 0;
}

/* Return: 0; -errno: close it */
static int conn_read(struct admin_conn *c)
{
	size_t room = sizeof(c->in) - c->in_used;
	ssize_t n;

	if (!room)
		return -EMSGSIZE; /* more than it may ask before it has its answer */
	n = recv(c->fd, c->in + c->in_used, room, MSG_DONTWAIT);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	if (n == 0)
		return -ESHUTDOWN;
	c->in_used += (size_t)n;
	return conn_lines(c);
}

static void admin_ready(void *arg, u32 events)
{
	struct admin_conn *c = arg;
	int r = 0;

	if (events & KVD_LOOP_OUT)
		r = conn_flush(c);
	if (!r && (events & (KVD_LOOP_IN | KVD_LOOP_HUP)))
		r = conn_read(c);
	if (r)
		conn_close(c);
}

/* Who asks while an audit is under way gets one that begins after it. */
static u32 audits_take(struct kvd *kvd)
{
	struct admin_conn *c;
	u32 nr = 0;

	list_for_each_entry (c, &kvd->admin.conns, node) {
		c->audited = c->asked;
		nr += c->asked;
	}
	return nr;
}

static bool audits_wanted(const struct kvd *kvd)
{
	struct admin_conn *c;

	list_for_each_entry (c, &kvd->admin.conns, node) {
		if (c->audited)
			return true;
	}
	return false;
}

static cJSON *audit_said(int r, const cJSON *out)
{
	cJSON *doc = r ? refusal(r, strerror(-r)) : cJSON_Duplicate(out, true);

	if (doc && !r)
		cJSON_AddBoolToObject(doc, "ok", true);
	return doc;
}

bool kvd_admin_turn(struct kvd *kvd)
{
	struct admin_conn *c, *tmp;
	cJSON *out;
	int r = 0;

	if (!kvd->audit_run) {
		if (!audits_take(kvd))
			return false;
		kvd_stats.admin_requests++;
		r = kvd_admin_audit_begin(kvd);
	} else if (!audits_wanted(kvd)) {
		kvd_admin_audit_end(kvd);
		return true;
	}
	out = cJSON_CreateObject();
	if (!r)
		r = out ? kvd_admin_audit_step(kvd, out) : -ENOMEM;
	if (r == -EAGAIN) {
		cJSON_Delete(out);
		return true;
	}
	list_for_each_entry_safe (c, tmp, &kvd->admin.conns, node) {
		if (!c->audited)
			continue;
		c->audited = c->asked = false;
		if (conn_say(c, audit_said(r, out)) || conn_lines(c))
			conn_close(c);
	}
	cJSON_Delete(out);
	return true;
}

void kvd_admin_accepted(struct kvd *kvd, int fd)
{
	struct admin_conn *c = NULL;
	struct ucred cred;
	socklen_t len = sizeof(cred);

	if (kvd->admin.nr_conns < KVD_ADMIN_CONNS_MAX &&
	    !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len))
		c = calloc(1, sizeof(*c));
	if (!c) {
		close(fd);
		return;
	}
	c->kvd = kvd;
	c->fd = fd;
	c->watch.fd = fd;
	c->watch.events = KVD_LOOP_IN;
	c->watch.ready = admin_ready;
	c->watch.arg = c;
	list_add_tail(&kvd->admin.conns, &c->node);
	kvd->admin.nr_conns++;
	if (kvd_loop_add(kvd->loop, &c->watch)) {
		conn_close(c);
		return;
	}
	if (cred.uid != 0 && cred.uid != geteuid()) {
		kvd_warn("ipc/admin", "uid %u pid %d: refused", cred.uid, cred.pid);
		c->closing = true;
		if (conn_say(c, refusal(-EACCES,
					"only root and the daemon's user may do this")))
			conn_close(c);
	}
}

void kvd_admin_event(struct kvd *kvd, const char *type, cJSON *fields)
{
	struct admin_conn *c, *tmp;

	if (!fields)
		fields = cJSON_CreateObject();
	if (kvd->admin.nr_streams && fields) {
		cJSON_AddStringToObject(fields, "event", type);
		kvd_admin_u64(fields, "time_ns", kvd->now_ns - kvd->started_ns);
		list_for_each_entry_safe (c, tmp, &kvd->admin.conns, node) {
			if (c->stream && conn_say(c, cJSON_Duplicate(fields, true)))
				shutdown(c->fd, SHUT_RDWR);
		}
	}
	cJSON_Delete(fields);
}

void kvd_admin_init(struct kvd_admin *admin)
{
	memset(admin, 0, sizeof(*admin));
	list_init(&admin->conns);
}

void kvd_admin_fini(struct kvd *kvd)
{
	struct admin_conn *c, *tmp;

	list_for_each_entry_safe (c, tmp, &kvd->admin.conns, node)
		conn_close(c);
	kvd_admin_audit_end(kvd);
}
