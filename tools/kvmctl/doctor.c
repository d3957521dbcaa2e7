/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.c - `kvmctl doctor`: what this host can do for kvmd, found out by doing it, and
 * what to do where it cannot. Needs no daemon; with one, its limits are looked at.
 */
#include "tools/kvmctl/doctor.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MEMLOCK_BYTES_MIN (8ull << 20)
#define EXTENT_BYTES	  (64ull << 20)
#define FDS_PER_SESSION	  8u
#define SESSIONS	  64u

static const char *const state_names[] = {"ok", "skip", "warn", "fail"};

void doc_say(struct doctor *doc, enum doc_state state, const char *check,
	     const char *todo, const char *fmt, ...)
{
	cJSON *f = cJSON_CreateObject();
	char text[400];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	cJSON_AddStringToObject(f, "check", check);
	cJSON_AddStringToObject(f, "state", state_names[state]);
	cJSON_AddStringToObject(f, "text", text);
	cJSON_AddStringToObject(f, "todo", state >= DOC_WARN ? todo : "");
	cJSON_AddItemToArray(doc->findings, f);
	doc->nr_bad += state >= DOC_WARN;
}

/* ------------------------------------------------------------------------- host */

static bool read_line(const char *path, char *line, int bytes)
{
	FILE *f = fopen(path, "re");
	bool ok = f && fgets(line, bytes, f);

	if (f)
		fclose(f);
	if (ok)
		line[strcspn(line, "\n")] = 0;
	return ok;
}

static void check_uring(struct doctor *doc)
{
	struct io_uring_params params = {0};
	char line[32] = "?";
	int fd = (int)syscall(SYS_io_uring_setup, 4, &params);

	if (fd >= 0) {
		close(fd);
		doc_say(doc, DOC_OK, "io_uring", "", "works");
		return;
	}
	if (errno == ENOSYS)
		strcpy(line, "not in this kernel");
	else
		read_line("/proc/sys/kernel/io_uring_disabled", line, sizeof(line));
	doc_say(doc, DOC_WARN, "io_uring",
		"sysctl kernel.io_uring_disabled=0; in a container allow it in the seccomp "
		"profile",
		"%s (io_uring_disabled: %s): kvmd falls back to epoll", strerror(errno),
		line);
}

static const char *limit_text(rlim_t v, char *text, size_t bytes)
{
	if (v == RLIM_INFINITY)
		return "unlimited";
	snprintf(text, bytes, "%llu", (unsigned long long)v);
	return text;
}

static void check_limits(struct doctor *doc)
{
	u64 need = doc->gpu_bytes / EXTENT_BYTES + SESSIONS * FDS_PER_SESSION + 64;
	const char *whose = doc->pid ? "kvmd's" : "this shell's";
	struct rlimit lim;
	char a[32];

	if (prlimit(doc->pid, RLIMIT_MEMLOCK, NULL, &lim))
		doc_say(doc, DOC_SKIP, "memlock", "", "%s: %s", whose, strerror(errno));
	else if (lim.rlim_cur < MEMLOCK_BYTES_MIN)
		doc_say(doc, DOC_WARN, "memlock",
			"LimitMEMLOCK=infinity in kvmd's unit, or ulimit -l unlimited",
			"%s limit is %s bytes: rings and pinned memory need more", whose,
			limit_text(lim.rlim_cur, a, sizeof(a)));
	else
		doc_say(doc, DOC_OK, "memlock", "", "%s limit is %s", whose,
			limit_text(lim.rlim_cur, a, sizeof(a)));
	if (prlimit(doc->pid, RLIMIT_NOFILE, NULL, &lim))
		doc_say(doc, DOC_SKIP, "nofile", "", "%s: %s", whose, strerror(errno));
	else if (lim.rlim_max < need) /* kvmd raises the soft limit to the hard one */
		doc_say(doc, DOC_WARN, "nofile",
			"LimitNOFILE=524288 in kvmd's unit, or ulimit -n 524288",
			"%s limit is %s; %llu are needed: one an extent, %u a session",
			whose, limit_text(lim.rlim_max, a, sizeof(a)),
			(unsigned long long)need, FDS_PER_SESSION);
	else
		doc_say(doc, DOC_OK, "nofile", "", "%s limit is %s, %llu are needed",
			whose, limit_text(lim.rlim_max, a, sizeof(a)),
			(unsigned long long)need);
}

static void check_memcg(struct doctor *doc)
{
	char path[400], line[300], max[40] = "", used[40] = "";
	unsigned long long limit, now;
	FILE *f;

	if (doc->pid)
		snprintf(path, sizeof(path), "/proc/%d/cgroup", doc->pid);
	else
		snprintf(path, sizeof(path), "/proc/self/cgroup");
	f = fopen(path, "re");
	path[0] = 0;
	while (f && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "0::", 3))
			snprintf(path, sizeof(path), "/sys/fs/cgroup%s", line + 3);
	}
	if (f)
		fclose(f);
	snprintf(line, sizeof(line), "%.250s/memory.max", path);
	if (!path[0] || !read_line(line, max, sizeof(max))) {
		doc_say(doc, DOC_OK, "memcg", "", "no memory.max here");
		return;
	}
	snprintf(line, sizeof(line), "%.250s/memory.current", path);
	read_line(line, used, sizeof(used));
	if (!strncmp(max, "max", 3)) {
		doc_say(doc, DOC_OK, "memcg", "", "no limit (%s bytes in use)", used);
		return;
	}
	limit = strtoull(max, NULL, 10);
	now = strtoull(used, NULL, 10);
	if (now > limit / 10 * 9)
		doc_say(doc, DOC_WARN, "memcg", "raise memory.max, or lower --host-bytes",
			"%llu of %llu bytes in use", now, limit);
	else
		doc_say(doc, DOC_OK, "memcg", "", "%llu of %llu bytes in use", now,
			limit);
}

void doc_host(struct doctor *doc)
{
	check_uring(doc);
	check_limits(doc);
	check_memcg(doc);
}

/* ----------------------------------------------------------------------- daemon */

static void check_daemon(struct ctl *ctl, struct doctor *doc)
{
	const cJSON *health, *r;
	cJSON *reply = NULL;

	if (access(ctl->args.socket, F_OK)) {
		doc_say(doc, DOC_SKIP, "kvmd", "", "not running (%s)", ctl->args.socket);
		return;
	}
	if (ctl_ask(ctl, ctl_request("status"), &reply)) {
		doc_say(doc, DOC_WARN, "kvmd", "start it, or run this as its user",
			"%s: no answer", ctl->args.socket);
		return;
	}
	doc->pid = (pid_t)ctl_num(reply, "pid");
	health = cJSON_GetObjectItemCaseSensitive(reply, "health");
	doc_say(doc, DOC_OK, "kvmd", "", "%s, %s backend, health: %s",
		ctl_str(reply, "version"), ctl_str(reply, "backend"),
		ctl_str(health, "state"));
	cJSON_ArrayForEach(r, cJSON_GetObjectItemCaseSensitive(health, "reasons"))
		doc_say(doc, DOC_WARN, "kvmd", ctl_health_todo(ctl_str(r, "code")),
			"%s: %s", ctl_str(r, "code"), ctl_str(r, "text"));
	cJSON_Delete(reply);
}

static void print(const struct doctor *doc)
{
	const cJSON *f;

	cJSON_ArrayForEach(f, doc->findings)
	{
		printf("%-5s %-13s %s\n", ctl_str(f, "state"), ctl_str(f, "check"),
		       ctl_str(f, "text"));
		if (*ctl_str(f, "todo"))
			printf("%-5s %-13s do: %s\n", "", "", ctl_str(f, "todo"));
	}
	if (doc->nr_bad)
		printf("%d of %d findings need attention\n", doc->nr_bad,
		       cJSON_GetArraySize(doc->findings));
	else
		printf("all is well\n");
}

int ctl_doctor(struct ctl *ctl)
{
	struct doctor doc = {.spawner = -1};
	cJSON *out = cJSON_CreateObject();
	int r = CTL_OK;

	doc.findings = cJSON_AddArrayToObject(out, "findings");
	doc.devices = cJSON_AddArrayToObject(out, "devices");
	check_daemon(ctl, &doc);
	doc_gpu(&doc);
	doc_host(&doc);
	cJSON_AddNumberToObject(out, "bad", doc.nr_bad);
	if (ctl->args.json)
		r = ctl_json(ctl, out, "doctor");
	else
		print(&doc);
	cJSON_Delete(out);
	return r ? r : doc.nr_bad ? CTL_WARNINGS : CTL_OK;
}
