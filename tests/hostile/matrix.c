/* SPDX-License-Identifier: Apache-2.0 */
/*
 * matrix.c - runs every attack against one kvmd and one victim, and prints what came of it.
 *
 * A real kvmd serves two tenants in two domains. The victim, a process of the first, works
 * without a pause: it gets pages, writes and checks them, gives them back, and reads pages
 * it has kept. Each attack runs as a process of the second tenant's uid. After each one
 * kvmd must be alive and clean, and the victim must have gone on, with every byte right.
 *
 *	matrix [NAME...]	TAP, for make check; a name has _ for all but a-z, 0-9
 *	matrix --table		the table of make check-hostile, ends "N passed, N failed"
 *	matrix --timing		and the victim's p99 beside attackers and beside a harmless
 *				client as busy as they are (victim and kvmd on one core, the
 *				other client on another)
 */
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/hostile/hostile.h"

static struct scene scene;
static u32 passed, failed;
static bool table;

void become(uid_t uid)
{
	if (setgid(uid) || setuid(uid))
		KVT_FAIL("uid %u: %s", uid, strerror(errno));
	prctl(PR_SET_DUMPABLE, 1);
}

void attacker_open(const struct scene *sc, struct ipc_raw *r, struct held *ret)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct kv_msg_pool_open m = {.msg = {.magic = KV_MSG_MAGIC,
					     .type = KV_MSG_POOL_OPEN,
					     .size_bytes = sizeof(m),
					     .sequence = 2},
				     .layout = ipc_layout()};

	become(ATTACKER_UID);
	r->sock = raw_connect(&sc->d);
	raw_send(r, &hello, sizeof(hello), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(r, 5000), KV_MSG_HELLO_REPLY);
	KVT_EXPECT_EQ(r->in.hello.result, 0);
	ret->ring_fd = r->fds[0];
	r->sq_efd = r->fds[1];
	r->cq_efd = r->fds[2];
	ret->session_fd = r->fds[3];
	r->ring = mmap(NULL, r->in.hello.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
		       ret->ring_fd, 0);
	r->session = mmap(NULL, KV_SESSION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
			  ret->session_fd, 0);
	KVT_EXPECT(r->ring != MAP_FAILED && r->session != MAP_FAILED);
	raw_send(r, &m, sizeof(m), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(r, 5000), KV_MSG_POOL_REPLY);
	KVT_EXPECT_EQ(r->in.pool.result, 0);
	ret->table_fd = r->fds[0];
	r->pool_id = r->in.pool.pool_id;
}

void raw_ends(struct ipc_raw *r)
{
	int type;

	while ((type = raw_recv(r, 5000)) > 0)
		for (u32 i = 0; i < r->nr_fds; i++)
			close(r->fds[i]);
	KVT_EXPECT_EQ(type, 0);
}

void refused(const struct scene *sc, const struct kv_msg_hello *hello, const char *word)
{
	static struct ipc_raw r;

	r.sock = raw_connect(&sc->d);
	raw_send(&r, hello, sizeof(*hello), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(&r, 5000), KV_MSG_HELLO_REPLY);
	KVT_EXPECT(r.in.hello.result < 0);
	KVT_EXPECT_EQ(r.nr_fds, 0);
	if (!strcasestr(r.in.hello.error, word))
		KVT_FAIL("\"%s\" does not name \"%s\"", r.in.hello.error, word);
}

void answers(struct ipc_raw *r, struct kv_sqe sqe, int result)
{
	struct kv_cqe cqe = raw_call(r, sqe);

	if (cqe.result != result)
		KVT_FAIL("opcode %u answered %d, expected %d", sqe.opcode, cqe.result,
			 result);
}

/* ------------------------------------------------------------------- victim */

#define KEPT 8u

static u64 pattern(u32 pfn, u64 round)
{
	return (pfn + 1) * 0x9e3779b97f4a7c15ull ^ round << 20;
}

static void write_page(struct kvc_pool *pool, u32 pfn, u64 word)
{
	volatile u64 *p = kvc_page_addr(pool, pfn);

	for (u32 i = 0; i < 64; i++)
		p[i * 32] = word + i;
}

static u64 wrong_words(struct kvc_pool *pool, u32 pfn, u64 word)
{
	const volatile u64 *p = kvc_page_addr(pool, pfn);
	u64 nr = 0;

	for (u32 i = 0; i < 64; i++)
		nr += p[i * 32] != word + i;
	return nr;
}

static void victim_round(struct kvc *c, struct kvc_pool *pool, struct seen *seen)
{
	struct kv_row rows[4];
	struct kvc_check_request q = {
		.rows = rows, .nonce = 5, .nr_rows = 4, .length = 4 * KV_PAGE_TOKENS};
	struct kvc_step *step;
	struct kv_grant g[4];
	struct kv_verdict v;

	if (kvc_alloc(pool, 4, KV_GFP_NOWAIT, g)) {
		seen->refused++;
		return;
	}
	for (u32 i = 0; i < 4; i++)
		rows[i] = kv_row_make(g[i].pfn, g[i].tag, KV_ROW_WRITE, 5, i);
	if (kvc_step_begin(c, &step)) {
		seen->refused++;
		return;
	}
	if (kvc_step_rows(step, pool, rows, 4) || kvc_step_check(step, pool, &q, 1, &v) ||
	    !kv_verdict_ok(v, kvc_step_number(step), 4))
		seen->wrong++;
	for (u32 i = 0; i < 4; i++)
		write_page(pool, g[i].pfn, pattern(g[i].pfn, seen->rounds));
	for (u32 i = 0; i < 4; i++)
		seen->wrong +=
			wrong_words(pool, g[i].pfn, pattern(g[i].pfn, seen->rounds));
	kvc_step_retire(step);
	if (kvc_free(pool, g, 4))
		seen->refused++;
}

static void victim_seal(struct kvc_pool *pool, struct seen *seen)
{
	struct kv_seal_ret ret;
	struct kv_grant page;
	u32 crc = 0;
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = 1,
				.pages = &page,
				.crc32c = &crc,
				.tokens = seen->tokens,
				.ret_seals = &ret};

	for (u32 i = 0; i < KV_PAGE_TOKENS; i++)
		seen->tokens[i] = i;
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	write_page(pool, page.pfn, 1);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
}

static void victim_run(struct seen *seen)
{
	struct kv_grant kept[KEPT];
	struct kvc_pool *pool;
	struct kvc *c;

	become(VICTIM_UID);
	c = ipc_connect(&scene.d);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, KEPT, KV_GFP_NOWAIT, kept), 0);
	for (u32 i = 0; i < KEPT; i++)
		write_page(pool, kept[i].pfn, pattern(kept[i].pfn, 0));
	victim_seal(pool, seen);
	seen->page = kept[0];
	for (;;) {
		u64 start_ns = kv_now_ns();

		victim_round(c, pool, seen);
		for (u32 i = 0; i < KEPT; i++)
			seen->wrong +=
				wrong_words(pool, kept[i].pfn, pattern(kept[i].pfn, 0));
		kvc_dispatch(c, NULL, NULL);
		seen->ns[seen->rounds % SEEN_NS] =
			(u32)KV_MIN(kv_now_ns() - start_ns, (u64)~0u);
		__atomic_fetch_add(&seen->rounds, 1, __ATOMIC_RELEASE);
	}
}

/* -------------------------------------------------------------------- scene */

static void write_file(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");

	if (!f || fputs(text, f) < 0 || fclose(f))
		KVT_FAIL("%s: %s", path, strerror(errno));
}

static void kvmd_start(void)
{
	char config[128], state[128], host[] = "128MiB";
	int ready[2];
	char byte;

	snprintf(config, sizeof(config), "%s/policy.json", scene.dir);
	snprintf(state, sizeof(state), "%s/state", scene.dir);
	write_file(
		config,
		"{\"tenants\": ["
		"{\"name\": \"victim\", \"uids\": [4201], \"gpus\": [{\"gpu\": \"*\", "
		"\"min\": \"32MiB\", \"max\": \"48MiB\"}]},"
		"{\"name\": \"attacker\", \"uids\": [4202], \"gpus\": [{\"gpu\": \"*\", "
		"\"max\": \"64MiB\"}]}]}");
	KVT_EXPECT(!pipe(ready));
	scene.d.pid = fork();
	if (!scene.d.pid) {
		char fd[16];
		int log = open(scene.d.log_path, O_CREAT | O_WRONLY | O_APPEND, 0600);

		dup2(log, 2);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		snprintf(fd, sizeof(fd), "%d", ready[1]);
		execl(scene.kvmd_path, "kvmd", "--config", config, "--socket",
		      scene.d.socket_path, "--admin-socket", scene.d.admin_path,
		      "--state-dir", state, "--backend", "host", "--host-bytes", host,
		      "--ready-fd", fd, NULL);
		_exit(127);
	}
	close(ready[1]);
	if (read(ready[0], &byte, 1) != 1)
		KVT_FAIL("kvmd does not start: see %s", scene.d.log_path);
	close(ready[0]);
}

static void scene_start(void)
{
	strcpy(scene.dir, "/tmp/kvt-hostile-XXXXXX");
	KVT_EXPECT(mkdtemp(scene.dir) && !chmod(scene.dir, 0755));
	ipc_build_path("kvmd", scene.kvmd_path, sizeof(scene.kvmd_path));
	snprintf(scene.d.socket_path, sizeof(scene.d.socket_path), "%s/kvmd.sock",
		 scene.dir);
	snprintf(scene.d.admin_path, sizeof(scene.d.admin_path), "%s/admin.sock",
		 scene.dir);
	snprintf(scene.d.log_path, sizeof(scene.d.log_path), "%s/log", scene.dir);
	scene.seen = mmap(NULL, sizeof(*scene.seen), PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	KVT_EXPECT(scene.seen != MAP_FAILED);
	kvmd_start();
	scene.victim = fork();
	if (!scene.victim) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		victim_run(scene.seen);
	}
	expect_within(scene.seen->rounds > 100, 5000);
}

static void scene_stop(void)
{
	char command[128];

	kill(scene.victim, SIGKILL);
	waitpid(scene.victim, NULL, 0);
	kill(scene.d.pid, SIGTERM);
	waitpid(scene.d.pid, NULL, 0);
	snprintf(command, sizeof(command), "rm -rf '%s'", scene.dir);
	KVT_EXPECT(!system(command));
}

/* ------------------------------------------------------------------ judging */

/* All but memory of pools, which stays when a session has made it. */
static u32 kvmd_fds(void)
{
	char path[64], to[128];
	struct dirent *e;
	ssize_t n;
	u32 nr = 0;
	DIR *d;

	snprintf(path, sizeof(path), "/proc/%d/fd", scene.d.pid);
	d = opendir(path);
	while (d && (e = readdir(d)) != NULL) {
		n = readlinkat(dirfd(d), e->d_name, to, sizeof(to) - 1);
		to[KV_MAX(n, (ssize_t)0)] = 0;
		nr += n > 0 && !strstr(to, "extent") && !strstr(to, "pool") &&
		      !strstr(to, "frames") && !strstr(to, "tokens") &&
		      !strstr(to, "table") && !strstr(to, "scratch");
	}
	if (d)
		closedir(d);
	return nr;
}

/* What is left of dead sessions goes within a second, or this says so. */
static bool fds_back(u32 before)
{
	for (u32 i = 0; i < 300; i++) {
		if (kvmd_fds() <= before)
			return true;
		usleep(10000);
	}
	return false;
}

static const char *judge(int status, u64 rounds, u32 fds)
{
	static char text[128];
	char *audit;

	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		snprintf(text, sizeof(text), "the attack was answered otherwise (%d)",
			 status);
		return text;
	}
	if (waitpid(scene.d.pid, NULL, WNOHANG))
		return "kvmd is gone";
	if (waitpid(scene.victim, NULL, WNOHANG))
		return "the victim is gone";
	if (scene.seen->wrong)
		return "the victim saw wrong bytes";
	if (scene.seen->refused)
		return "the victim was refused";
	for (u32 i = 0; __atomic_load_n(&scene.seen->rounds, __ATOMIC_ACQUIRE) == rounds;
	     i++) {
		if (i == 2000)
			return "the victim stands still";
		usleep(1000);
	}
	if (!fds_back(fds)) {
		snprintf(text, sizeof(text), "kvmd keeps descriptors: %u, had %u",
			 kvmd_fds(), fds);
		return text;
	}
	audit = ipc_admin(&scene.d, "{\"op\":\"audit\"}");
	if (!strstr(audit, "\"damage\":0"))
		snprintf(text, sizeof(text), "audit: %.100s", audit);
	else
		text[0] = 0;
	free(audit);
	return text[0] ? text : NULL;
}

static void run(const struct attack *a)
{
	u64 rounds = __atomic_load_n(&scene.seen->rounds, __ATOMIC_ACQUIRE);
	u64 start_ns = kv_now_ns();
	u32 fds = kvmd_fds();
	const char *wrong;
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm(20);
		if (table && freopen("/dev/null", "w", stdout) == NULL)
			_exit(98);
		a->fn(&scene);
		_exit(0);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	wrong = judge(status, rounds, fds);
	passed += !wrong;
	failed += wrong != NULL;
	scene.seen->wrong = scene.seen->refused = 0;
	if (table)
		printf("%-46s %-40s %6.0f ms  %s\n", a->name, a->expected,
		       (double)(kv_now_ns() - start_ns) / 1e6, wrong ? wrong : "ok");
	else
		printf("%sok %u - %s: %s\n%s%s%s", wrong ? "not " : "", passed + failed,
		       a->name, a->expected, wrong ? "# " : "", wrong ? wrong : "",
		       wrong ? "\n" : "");
	if (wrong && waitpid(scene.d.pid, NULL, WNOHANG))
		kvmd_start();
}

/* ------------------------------------------------------------------- timing */

static const struct attack *const all[] = {attacks_socket, attacks_ring, attacks_memory,
					   attacks_pages, attacks_host};

static int cmp(const void *a, const void *b)
{
	const u32 *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

/* p99 of the victim's rounds while @fn runs as the attacker's uid for @ms. */
static double p99_beside(void (*fn)(const struct scene *sc), u32 ms)
{
	static u32 sorted[SEEN_NS];
	u64 first, last, nr = 0;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		cpu_set_t cpus;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		CPU_ZERO(&cpus);
		CPU_SET(1, &cpus);
		sched_setaffinity(0, sizeof(cpus), &cpus);
		if (!freopen("/dev/null", "w", stdout))
			_exit(98);
		fn(&scene);
		_exit(0);
	}
	usleep(100000);
	first = __atomic_load_n(&scene.seen->rounds, __ATOMIC_ACQUIRE);
	usleep(ms * 1000);
	last = __atomic_load_n(&scene.seen->rounds, __ATOMIC_ACQUIRE);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	usleep(200000);
	for (u64 i = last - KV_MIN(last - first, (u64)SEEN_NS); i < last; i++)
		sorted[nr++] = scene.seen->ns[i % SEEN_NS];
	if (!nr)
		return 0;
	qsort(sorted, nr, sizeof(*sorted), cmp);
	return sorted[nr * 99 / 100] / 1e3;
}

static void pages_in_a_loop(const struct scene *sc, bool wrongly)
{
	static struct ipc_raw r;
	struct held held;
	struct kv_sqe sqe;

	attacker_open(sc, &r, &held);
	for (;;) {
		sqe = raw_sqe(&r, KV_OP_ALLOC);
		sqe.nr = 4;
		sqe.ret_bytes = 4 * sizeof(struct kv_grant);
		if (wrongly)
			sqe.gfp = 0xffff0000u;
		if (raw_call(&r, sqe).result == 0)
			memcpy(raw_arg(&r, 4096), raw_arg(&r, 0), 64);
		sqe = raw_sqe(&r, KV_OP_FREE);
		sqe.nr = 4;
		sqe.arg_off = 4096;
		sqe.arg_bytes = 4 * sizeof(struct kv_page_ref);
		for (u32 i = 0; i < 4; i++)
			((struct kv_page_ref *)raw_arg(&r, 4096))[i].reserved = wrongly;
		raw_call(&r, sqe);
	}
}

static void harmless(const struct scene *sc)
{
	pages_in_a_loop(sc, false);
}

static void refused_requests(const struct scene *sc)
{
	pages_in_a_loop(sc, true);
}

static void connecting(const struct scene *sc)
{
	struct kv_msg_hello hello = raw_hello_msg();

	become(ATTACKER_UID);
	for (;;) {
		static struct ipc_raw r;

		r.sock = raw_connect(&sc->d);
		raw_send(&r, &hello, 40, NULL, 0);
		close(r.sock);
	}
}

/* Whole sessions, which cost kvmd most of all that one connection can ask for. */
static void sessions(const struct scene *sc)
{
	struct kv_msg_hello hello = raw_hello_msg();

	become(ATTACKER_UID);
	for (;;) {
		static struct ipc_raw r;

		r.sock = raw_connect(&sc->d);
		raw_send(&r, &hello, sizeof(hello), NULL, 0);
		raw_recv(&r, 5000);
		for (u32 i = 0; i < r.nr_fds; i++)
			close(r.fds[i]);
		close(r.sock);
	}
}

#define TURNS 5u

static int cmp_double(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

/* The rows take turns, so that what else happens on the machine meets all of them; the
 * median of their p99s counts. */
static void timing(void)
{
	static const struct {
		const char *name;
		void (*fn)(const struct scene *sc);
	} rows[] = {{"harmless client (alloc, free)", harmless},
		    {"refused requests", refused_requests},
		    {"half messages in new connections", connecting},
		    {"new sessions without end", sessions}};
	double p99[KV_ARRAY_SIZE(rows)][TURNS], base = 0;
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(0, &cpus);
	sched_setaffinity(scene.d.pid, sizeof(cpus), &cpus);
	sched_setaffinity(scene.victim, sizeof(cpus), &cpus);
	for (u32 t = 0; t < TURNS; t++)
		for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++)
			p99[i][t] = p99_beside(rows[i].fn, 1000);
	printf("\n%-46s %12s %18s %8s\n", "victim's p99 beside", "us, median",
	       "least to most", "x");
	for (u32 i = 0; i < KV_ARRAY_SIZE(rows); i++) {
		qsort(p99[i], TURNS, sizeof(*p99[i]), cmp_double);
		base = i ? base : p99[i][TURNS / 2];
		printf("%-46s %12.1f %8.1f to %6.1f %8.2f\n", rows[i].name,
		       p99[i][TURNS / 2], p99[i][0], p99[i][TURNS - 1],
		       base > 0 ? p99[i][TURNS / 2] / base : 0);
	}
}

/* "an empty message" by its name with underscores: an_empty_message */
static bool wanted(const struct attack *a, int argc, char **argv)
{
	char slug[64];
	size_t i;

	for (i = 0; a->name[i] && i + 1 < sizeof(slug); i++)
		slug[i] = strchr("abcdefghijklmnopqrstuvwxyz0123456789", a->name[i] | 32)
				  ? a->name[i]
				  : '_';
	slug[i] = 0;
	for (int k = 1; k < argc; k++)
		if (!strcmp(argv[k], slug))
			return true;
	return argc == 1 || argv[1][0] == '-';
}

int main(int argc, char **argv)
{
	bool timed = argc > 1 && !strcmp(argv[1], "--timing");

	table = timed || (argc > 1 && !strcmp(argv[1], "--table"));
	if (!table)
		printf("TAP version 13\n");
	if (geteuid()) {
		printf("ok 1 - attacks # SKIP needs root: attackers have uids of their own\n"
		       "1..1\n");
		return 0;
	}
	scene_start();
	for (u32 k = 0; k < KV_ARRAY_SIZE(all); k++)
		for (const struct attack *a = all[k]; a->name; a++)
			if (wanted(a, argc, argv))
				run(a);
	if (timed)
		timing();
	scene_stop();
	if (table)
		printf("%u passed, %u failed\n", passed, failed);
	else
		printf("1..%u\n", passed + failed);
	return failed != 0;
}
