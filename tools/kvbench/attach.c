/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attach.c - kvbench attach: from process start to first usable page, by pool size.
 *
 * For each size a private kvmd and an owner that fills the pool, so that every extent is
 * there; then processes attach, one at a time, by the library and by hand in turn. This
 * process touches no CUDA before the last of them has ended.
 */
#include "attach.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "json.h"

#define SIZES_MAX 8u
#define RUNS_MAX  50u

extern char **environ;

struct options {
	enum kvb_backend backend;
	double gib[SIZES_MAX];
	u32 nr_sizes;
	u64 runs;
	bool json;
	/* of a process that we start */
	const char *role;
	const char *socket_path;
	u64 fd;
	u64 start_ns;
};

static int usage(void)
{
	fprintf(stderr, "usage: kvbench attach [--gib 1,10,100] [--runs 1..50] "
			"[--backend auto|host|cuda] [--json]\n");
	return 2;
}

static int parse_sizes(const char *text, struct options *opt)
{
	char *end;

	opt->nr_sizes = 0;
	for (;;) {
		double v = strtod(text, &end);

		if (end == text || (*end && *end != ',') || !(v >= 0.01 && v <= 1024) ||
		    opt->nr_sizes == SIZES_MAX) {
			fprintf(stderr,
				"kvbench: --gib %s: up to %u sizes of 0.01 to 1024\n",
				text, SIZES_MAX);
			return 2;
		}
		opt->gib[opt->nr_sizes++] = v;
		if (!*end)
			return 0;
		text = end + 1;
	}
}

static int parse_one(struct options *opt, int c)
{
	int r;

	switch (c) {
	case 'g':
		return parse_sizes(optarg, opt);
	case 'r':
		return kvb_number("runs", optarg, 1, RUNS_MAX, &opt->runs);
	case 'b':
		r = kvb_backend_parse(optarg);
		opt->backend = (enum kvb_backend)r;
		return r < 0 ? 2 : 0;
	case 'R':
		opt->role = optarg;
		return 0;
	case 'S':
		opt->socket_path = optarg;
		return 0;
	case 'F':
		return kvb_number("fd", optarg, 0, 1 << 20, &opt->fd);
	case 'T':
		return kvb_number("start", optarg, 0, ~0ull, &opt->start_ns);
	case 'j':
		opt->json = true;
		return 0;
	default:
		return usage();
	}
}

static int parse(int argc, char **argv, struct options *opt)
{
	static const struct option longs[] = {
		{"gib", 1, 0, 'g'},   {"runs", 1, 0, 'r'},   {"backend", 1, 0, 'b'},
		{"role", 1, 0, 'R'},  {"socket", 1, 0, 'S'}, {"fd", 1, 0, 'F'},
		{"start", 1, 0, 'T'}, {"json", 0, 0, 'j'},   {0, 0, 0, 0},
	};
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0)
		r = parse_one(opt, c);
	return r;
}

/* --------------------------------------------------------------------------- processes */

static int start(const struct options *opt, const char *role, const char *socket_path,
		 pid_t *ret_pid, int *ret_fd)
{
	char fd[16], start_ns[32];
	const char *argv[] = {
		"kvbench", "attach",	"--role",
		role,	   "--socket",	socket_path,
		"--fd",	   fd,		"--start",
		start_ns,  "--backend", opt->backend == KVB_HOST ? "host" : "cuda",
		NULL};
	int fds[2], r;

	if (pipe(fds))
		return -errno;
	snprintf(fd, sizeof(fd), "%d", fds[1]);
	fcntl(fds[0], F_SETFD, FD_CLOEXEC);
	snprintf(start_ns, sizeof(start_ns), "%llu", (unsigned long long)kv_now_ns());
	r = posix_spawn(ret_pid, "/proc/self/exe", NULL, NULL, (char *const *)argv,
			environ);
	close(fds[1]);
	*ret_fd = fds[0];
	return -r;
}

static int measure(const struct options *opt, const char *role, const char *socket_path,
		   struct attach_times *ret)
{
	pid_t pid;
	int fd, r = start(opt, role, socket_path, &pid, &fd), status = 0;
	ssize_t n;

	if (r)
		return r;
	n = read(fd, ret, sizeof(*ret));
	waitpid(pid, &status, 0);
	close(fd);
	if (n == sizeof(*ret) && !status && !ret->failed)
		return 0;
	fprintf(stderr, "kvbench: attach: the %s process failed (status %#x)\n", role,
		status);
	return -ECHILD;
}

/* ------------------------------------------------------------------------------ report */

static const struct column {
	const char *name;
	size_t from, to; /* of struct attach_times; @from 0: from the start */
	bool raw;
	bool gpu;
} columns[] = {
#define AT(member) offsetof(struct attach_times, member)
	{"exec_ms", SIZE_MAX, AT(main), false, false},
	{"cu_init_ms", AT(main), AT(init), false, true},
	{"context_ms", AT(init), AT(context), false, true},
	{"hello_ms", AT(context), AT(open), false, false},
	{"pool_open_ms", AT(open), AT(pool), false, false},
	{"first_page_ms", AT(pool), AT(first), false, false},
	{"first_use_ms", AT(first), AT(used), false, false},
	{"start_to_first_page_ms", SIZE_MAX, AT(first), false, false},
	{"start_to_all_mapped_ms", SIZE_MAX, AT(all), false, false},
	{"import_ms", SIZE_MAX, AT(import), true, true},
	{"map_ms", SIZE_MAX, AT(map), true, true},
	{"set_access_ms", SIZE_MAX, AT(access), true, true},
#undef AT
};

static double column_ms(const struct column *c, const struct attach_times *t)
{
	u64 to = *(const u64 *)((const char *)t + c->to), from = 0;

	if (c->from != SIZE_MAX)
		from = *(const u64 *)((const char *)t + c->from);
	if (!from && c->from == offsetof(struct attach_times, context))
		from = t->main; /* the host has no context */
	return ((double)to - (double)from) * 1e-6;
}

static void report(const struct options *opt, double gib, const struct attach_times *lib,
		   const struct attach_times *raw, cJSON *rows)
{
	cJSON *o = cJSON_CreateObject();
	double ms[RUNS_MAX];

	cJSON_AddNumberToObject(o, "gib", gib);
	cJSON_AddNumberToObject(o, "extents", lib->nr_extents);
	cJSON_AddNumberToObject(o, "extent_mib", (double)lib->extent_bytes / (1 << 20));
	if (!opt->json)
		printf("%.2f GiB: %u extents of %.0f MiB\n", gib, lib->nr_extents,
		       (double)lib->extent_bytes / (1 << 20));
	for (u32 i = 0; i < KV_ARRAY_SIZE(columns); i++) {
		const struct column *c = &columns[i];
		struct kvb_dist d;
		cJSON *one;

		if (c->gpu && opt->backend == KVB_HOST)
			continue;
		for (u32 k = 0; k < opt->runs; k++)
			ms[k] = column_ms(c, c->raw ? &raw[k] : &lib[k]);
		kvb_dist_of(&d, ms, (u32)opt->runs);
		if (!opt->json)
			printf("  %-24s %8.2f  (%.2f to %.2f)\n", c->name, d.p50, ms[0],
			       ms[opt->runs - 1]);
		one = cJSON_AddObjectToObject(o, c->name);
		cJSON_AddNumberToObject(one, "p50", d.p50);
		cJSON_AddNumberToObject(one, "min", ms[0]);
		cJSON_AddNumberToObject(one, "max", ms[opt->runs - 1]);
	}
	cJSON_AddItemToArray(rows, o);
}

static int one_size(const struct options *opt, double gib, cJSON *rows)
{
	static struct attach_times lib[RUNS_MAX], raw[RUNS_MAX];
	struct eng_private_kvmd kvmd;
	pid_t owner = 0;
	char byte;
	int fd, r;

	r = kvb_kvmd_start(opt->backend, (u64)(gib * (1 << 30)), NULL, &kvmd);
	if (r)
		return r;
	r = start(opt, "owner", kvmd.socket_path, &owner, &fd);
	if (r)
		goto stop_kvmd;
	r = read(fd, &byte, 1) == 1 ? 0 : -ECHILD;
	if (r)
		fprintf(stderr, "kvbench: attach: the owner could not fill the pool\n");
	for (u32 i = 0; i < opt->runs && !r; i++) {
		r = measure(opt, "engine", kvmd.socket_path, &lib[i]);
		if (!r && opt->backend != KVB_HOST)
			r = measure(opt, "raw", kvmd.socket_path, &raw[i]);
	}
	if (!r)
		report(opt, gib, lib, raw, rows);
	kill(owner, SIGKILL);
	waitpid(owner, NULL, 0);
	close(fd);
stop_kvmd:
	eng_private_kvmd_stop(&kvmd);
	return r;
}

static int run_role(const struct options *opt)
{
	if (!strcmp(opt->role, "owner"))
		return attach_owner(opt->backend, opt->socket_path, (int)opt->fd);
	if (!strcmp(opt->role, "engine"))
		return attach_engine(opt->backend, opt->socket_path, (int)opt->fd,
				     opt->start_ns);
	return attach_raw(opt->backend, opt->socket_path, (int)opt->fd, opt->start_ns);
}

int kvb_attach(int argc, char **argv)
{
	struct options opt = {.gib = {1, 10, 100}, .nr_sizes = 3, .runs = 5};
	cJSON *o, *rows;
	int r;

	opt.backend = (enum kvb_backend)kvb_backend_parse("auto");
	r = parse(argc, argv, &opt);
	if (r)
		return r;
	if (opt.role)
		return opt.socket_path ? run_role(&opt) : usage();
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kvbench-attach/1");
	rows = cJSON_AddArrayToObject(o, "rows");
	for (u32 i = 0; i < opt.nr_sizes && !r; i++)
		r = one_size(&opt, opt.gib[i], rows);
	kvb_json_where(o, opt.backend);
	if (opt.json && !r)
		kvb_json_print(o);
	else
		cJSON_Delete(o);
	return r ? 1 : 0;
}
