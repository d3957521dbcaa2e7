/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kill.c - kvbench kill: kill -9 of an engine in a step, many times, and when what ends.
 *
 * The watcher is an engine of the same domain. From the kill on it looks at: a pipe of the
 * victim (hang-up), its pidfd, NVML's list, the counter that the victim's work stores, and
 * the pages in quarantine. No page may leave quarantine before the last store, nor may a
 * store come afterwards.
 *
 * Threads: main looks at pipe, pidfd and counter; one asks NVML and one asks kvmd, since
 * either may wait. Each writes its own time in struct watch, once.
 */
#include "kill.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/cuda_syms.h"
#include "base/nvml_syms.h"
#include "json.h"

#define ROUNDS_MAX 200u
#define WATCH_NS   (8 * KV_NSEC_PER_SEC)
#define AFTER_NS   (50 * KV_NSEC_PER_MSEC)  /* stores are looked for behind the release */
#define HOLD_NS	   (400 * KV_NSEC_PER_MSEC) /* a child that keeps the GPU open lives on */
#define LISTED_MAX 256

extern char **environ;

static const char *const child_names[] = {"none", "handler", "bare"};
static const char *const work_names[] = {"kernel", "copies"};

/*
 * What is timed, in ms: hang-up and pidfd from the kill of the victim, the rest from the
 * kill that ends the work, which is that of the child where one holds on.
 */
enum end { END_HANGUP, END_PIDFD, END_NVML, END_STORE, END_RELEASE, END_NR };

static const char *const end_names[] = {"hang_up", "pidfd", "nvml", "last_store",
					"release"};

struct options {
	enum kvb_backend backend;
	u64 rounds;
	u32 children; /* bits by enum kill_child */
	enum kill_work work;
	bool json;
};

/**
 * struct watch - one round; times are kv_now_ns(), 0 = not yet
 * @kill_ns: the kill of the victim
 * @start_ns: the kill that ends the work
 * @held: stores seen while a child kept the work alive after the victim's end
 * @early: pages left quarantine while the child kept the work alive
 */
struct watch {
	u64 kill_ns;
	u64 start_ns;
	u64 end_ns[END_NR];
	u64 held;
	bool early;
	pid_t pid;
	bool stop;
	struct scene *scene;
};

/** struct scene - what all rounds share; the watcher's own engine among it */
struct scene {
	const struct options *opt;
	struct eng_private_kvmd kvmd;
	struct eng_mem *m;
	struct kvc *c;
	struct kvc_pool *pool;
	struct kv_nvml_syms nvml;
	kv_nv_device gpu;
	bool has_nvml;
	struct kill_shared *shared;
	int fd;
};

/** struct series - all rounds with one kind of child */
struct series {
	u32 rounds;
	double ms[END_NR][ROUNDS_MAX];
	u32 violations; /* released before the last store */
	u32 unheld; /* a bare child did not keep the kernel alive, or pages went early */
};

/* ------------------------------------------------------------------------- scene */

static int open_nvml(struct scene *s)
{
	char name[48], error[160];
	struct kv_cuda_syms cu;
	kv_cu_device dev;
	u8 id[16];
	int n;

	if (s->opt->backend == KVB_HOST)
		return 0;
	if (kv_cuda_load(&cu, error, sizeof(error)) || cu.init(0) ||
	    cu.device_get(&dev, 0) || cu.device_uuid(id, dev)) {
		fprintf(stderr, "kvbench: kill: no driver\n");
		return -ENODEV;
	}
	n = snprintf(name, sizeof(name), "GPU-");
	for (int i = 0; i < 16; i++)
		n += snprintf(name + n, sizeof(name) - (size_t)n, "%s%02x",
			      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id[i]);
	if (kv_nvml_load(&s->nvml, error, sizeof(error)) || s->nvml.init() ||
	    s->nvml.by_uuid(name, &s->gpu)) {
		fprintf(stderr, "kvbench: kill: NVML does not know %s\n", name);
		return -ENODEV;
	}
	s->has_nvml = true;
	return 0;
}

static int open_engine(struct scene *s)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = s->kvmd.socket_path,
				  .client_name = "kvbench-watcher"};
	struct kv_layout layout = kvb_layout(0);
	int r = kvb_device_open(s->opt->backend, &s->m);

	if (r)
		return r;
	r = kvc_open(&opt, &s->c);
	if (r)
		return kvb_said("kvc_open", r);
	r = kvc_pool_open(s->c, &layout, NULL, NULL, &s->pool);
	return r ? kvb_said("kvc_pool_open", r) : 0;
}

static int scene_open(struct scene *s, const struct options *opt)
{
	const char *args[] = {opt->backend == KVB_HOST ? NULL : "--test-extents", NULL};
	int r;

	s->opt = opt;
	s->fd = memfd_create("kvbench-kill", 0); /* the victim inherits it */
	if (s->fd < 0 || ftruncate(s->fd, sizeof(*s->shared)))
		return -errno;
	s->shared = mmap(NULL, sizeof(*s->shared), PROT_READ | PROT_WRITE, MAP_SHARED,
			 s->fd, 0);
	if (s->shared == MAP_FAILED)
		return -errno;
	r = kvb_kvmd_start(opt->backend, 8u << 20, args, &s->kvmd);
	if (r)
		return r;
	r = open_engine(s);
	if (!r)
		r = open_nvml(s);
	if (r)
		eng_private_kvmd_stop(&s->kvmd);
	return r;
}

/* ------------------------------------------------------------------------ watching */

static bool nvml_lists(struct scene *s, pid_t pid)
{
	struct kv_nv_process list[LISTED_MAX];
	unsigned nr = LISTED_MAX;

	if (s->nvml.processes(s->gpu, &nr, list))
		return true; /* not known is not absent */
	for (unsigned i = 0; i < nr && i < LISTED_MAX; i++)
		if (list[i].pid == (unsigned)pid)
			return true;
	return false;
}

static bool stopped(struct watch *w)
{
	return __atomic_load_n(&w->stop, __ATOMIC_ACQUIRE);
}

static void *watch_nvml(void *arg)
{
	struct watch *w = arg;

	while (!stopped(w)) {
		if (!nvml_lists(w->scene, w->pid)) {
			w->end_ns[END_NVML] = kv_now_ns();
			break;
		}
		usleep(200);
	}
	return NULL;
}

static bool pages_are_back(struct scene *s)
{
	struct kv_stat stat;

	return !kvc_stat(s->pool, &stat) && !stat.nr_quarantine && !stat.nr_active &&
	       !stat.nr_magazine;
}

static void *watch_release(void *arg)
{
	struct watch *w = arg;

	while (!stopped(w)) {
		if (pages_are_back(w->scene)) {
			w->end_ns[END_RELEASE] = kv_now_ns();
			break;
		}
		usleep(50);
	}
	return NULL;
}

static bool readable(int fd, short events)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};

	return poll(&p, 1, 0) > 0 && (p.revents & events);
}

static void look_at_process(struct watch *w, int pipe, int pidfd, u64 now)
{
	if (!w->end_ns[END_HANGUP] && readable(pipe, POLLHUP))
		w->end_ns[END_HANGUP] = now;
	if (!w->end_ns[END_PIDFD] && readable(pidfd, POLLIN))
		w->end_ns[END_PIDFD] = now;
}

/* Until all has ended and nothing was stored for a while. */
static void watch_work(struct watch *w, int pipe, int pidfd)
{
	u64 *counter = &w->scene->shared->counter;
	u64 last = __atomic_load_n(counter, __ATOMIC_ACQUIRE), now, done_ns = 0;

	w->end_ns[END_STORE] = w->start_ns;
	do {
		u64 count = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
		bool all;

		now = kv_now_ns();
		if (count != last)
			w->end_ns[END_STORE] = now;
		last = count;
		look_at_process(w, pipe, pidfd, now);
		all = w->end_ns[END_HANGUP] && w->end_ns[END_PIDFD] &&
		      __atomic_load_n(&w->end_ns[END_RELEASE], __ATOMIC_ACQUIRE) &&
		      (!w->scene->has_nvml ||
		       __atomic_load_n(&w->end_ns[END_NVML], __ATOMIC_ACQUIRE));
		if (!all)
			done_ns = now;
		usleep(10);
	} while (now < w->start_ns + WATCH_NS && now < done_ns + AFTER_NS);
}

/* A child holds the GPU open: the work goes on, so the pages must stay where they are. */
static void watch_held(struct watch *w, int pipe, int pidfd)
{
	u64 from = __atomic_load_n(&w->scene->shared->counter, __ATOMIC_ACQUIRE);
	u64 end_ns = kv_now_ns() + HOLD_NS, middle = from;

	while (kv_now_ns() < end_ns) {
		look_at_process(w, pipe, pidfd, kv_now_ns());
		w->early |= pages_are_back(w->scene);
		if (kv_now_ns() < end_ns - HOLD_NS / 2)
			middle = __atomic_load_n(&w->scene->shared->counter,
						 __ATOMIC_ACQUIRE);
		usleep(50);
	}
	/* in the second half as well: it did not just take a while to end */
	w->held = __atomic_load_n(&w->scene->shared->counter, __ATOMIC_ACQUIRE) - middle;
}

/* -------------------------------------------------------------------------- a round */

/* Does this child keep the work alive? The fake driver's context has no device file. */
static bool child_holds(const struct scene *s, enum kill_child child)
{
	if (s->opt->backend == KVB_FAKE)
		return child != KILL_NONE;
	return s->opt->backend == KVB_CUDA && child == KILL_BARE;
}

static int victim_spawn(struct scene *s, enum kill_child child, pid_t *ret_pid,
			int *ret_pipe)
{
	char fd[16], pipe_fd[16];
	const char *argv[] = {"kvbench",    "kill",
			      "--victim",   s->kvmd.socket_path,
			      "--fd",	    fd,
			      "--pipe",	    pipe_fd,
			      "--children", child_names[child],
			      "--work",	    work_names[s->opt->work],
			      "--backend",  s->opt->backend == KVB_HOST ? "host" : "cuda",
			      NULL};
	int fds[2], r;

	if (pipe(fds))
		return -errno;
	snprintf(fd, sizeof(fd), "%d", s->fd);
	snprintf(pipe_fd, sizeof(pipe_fd), "%d", fds[1]);
	fcntl(fds[0], F_SETFD, FD_CLOEXEC);
	r = posix_spawn(ret_pid, "/proc/self/exe", NULL, NULL, (char *const *)argv,
			environ);
	close(fds[1]);
	*ret_pipe = fds[0];
	return -r;
}

static void end_child(pid_t pid)
{
	if (pid > 0)
		kill(pid, SIGKILL);
}

/* The victim is dead, or about to be; everything about it is watched. */
static int watch_round(struct watch *w, enum kill_child child, pid_t child_pid, int pipe,
		       int pidfd)
{
	pthread_t nvml = 0, release = 0;
	int r = 0;

	kill(w->pid, SIGKILL);
	w->kill_ns = w->start_ns = kv_now_ns();
	if (child_holds(w->scene, child)) {
		watch_held(w, pipe, pidfd);
		end_child(child_pid);
		w->start_ns = kv_now_ns();
	}
	if (w->scene->has_nvml)
		r = pthread_create(&nvml, NULL, watch_nvml, w);
	if (!r)
		r = pthread_create(&release, NULL, watch_release, w);
	if (!r)
		watch_work(w, pipe, pidfd);
	__atomic_store_n(&w->stop, true, __ATOMIC_RELEASE);
	if (nvml)
		pthread_join(nvml, NULL);
	if (release)
		pthread_join(release, NULL);
	end_child(child_pid);
	return -r;
}

static int keep(struct series *all, const struct watch *w, enum kill_child child)
{
	u64 last = w->end_ns[END_STORE];
	u32 at = all->rounds++;

	for (u32 i = 0; i < END_NR; i++) {
		u64 from = i <= END_PIDFD ? w->kill_ns : w->start_ns;

		if (!w->end_ns[i] && (i != END_NVML || w->scene->has_nvml)) {
			fprintf(stderr, "kvbench: kill: no %s within %llu s\n",
				end_names[i], WATCH_NS / KV_NSEC_PER_SEC);
			return -ETIMEDOUT;
		}
		all->ms[i][at] =
			w->end_ns[i] > from ? (double)(w->end_ns[i] - from) * 1e-6 : 0;
	}
	all->violations += w->end_ns[END_RELEASE] < last;
	/* queued copies run out while the child lives; a kernel does not */
	if (child_holds(w->scene, child))
		all->unheld +=
			w->early || (w->scene->opt->backend == KVB_CUDA &&
				     w->scene->opt->work == KILL_KERNEL && !w->held);
	return 0;
}

static int one_round(struct scene *s, enum kill_child child, struct series *all)
{
	struct watch w = {.scene = s};
	struct timespec pause = {0, (long)(all->rounds * 7919 % 50) * 1000000};
	pid_t child_pid = 0;
	int pipe = -1, pidfd, r;

	s->shared->counter = 0;
	r = victim_spawn(s, child, &w.pid, &pipe);
	if (r)
		return r;
	pidfd = (int)syscall(SYS_pidfd_open, w.pid, 0);
	if (read(pipe, &child_pid, sizeof(child_pid)) != sizeof(child_pid) || pidfd < 0) {
		fprintf(stderr, "kvbench: kill: the victim did not start its work\n");
		kill(w.pid, SIGKILL);
		r = -ECHILD;
	} else {
		nanosleep(&pause, NULL);
		r = watch_round(&w, child, child_pid, pipe, pidfd);
	}
	waitpid(w.pid, NULL, 0);
	close(pidfd);
	close(pipe);
	return r ? r : keep(all, &w, child);
}

/* -------------------------------------------------------------------------- report */

static void series_text(enum kill_child child, struct series *all, bool nvml)
{
	printf("child %-8s %3u rounds:", child_names[child], all->rounds);
	for (u32 i = 0; i < END_NR; i++) {
		struct kvb_dist d;

		kvb_dist_of(&d, all->ms[i], all->rounds);
		if (i != END_NVML || nvml)
			printf("  %s %.1f (%.1f)", end_names[i], d.p50,
			       all->ms[i][all->rounds - 1]);
	}
	printf("  ms p50 (max); %u released before the last store%s\n", all->violations,
	       all->unheld ? "; THE CHILD DID NOT HOLD" : "");
}

static void series_json(cJSON *list, enum kill_child child, struct series *all, bool nvml)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "child", child_names[child]);
	cJSON_AddNumberToObject(o, "rounds", all->rounds);
	for (u32 i = 0; i < END_NR; i++) {
		struct kvb_dist d;
		char name[32];

		if (i == END_NVML && !nvml)
			continue;
		kvb_dist_of(&d, all->ms[i], all->rounds); /* sorts */
		snprintf(name, sizeof(name), "%s_ms", end_names[i]);
		kvb_json_dist(o, name, &d);
		cJSON_AddNumberToObject(cJSON_GetObjectItem(o, name), "min",
					all->ms[i][0]);
		cJSON_AddNumberToObject(cJSON_GetObjectItem(o, name), "max",
					all->ms[i][all->rounds - 1]);
	}
	cJSON_AddNumberToObject(o, "released_before_the_last_store", all->violations);
	cJSON_AddNumberToObject(o, "child_did_not_hold", all->unheld);
	cJSON_AddItemToArray(list, o);
}

static int run(struct scene *s, cJSON *list)
{
	static struct series series[KILL_CHILDREN];
	int r = 0;

	for (u32 child = 0; child < KILL_CHILDREN && !r; child++) {
		struct series *all = &series[child];

		if (!(s->opt->children >> child & 1))
			continue;
		for (u32 i = 0; i < s->opt->rounds && !r; i++)
			r = one_round(s, (enum kill_child)child, all);
		if (r)
			break;
		if (s->opt->json)
			series_json(list, (enum kill_child)child, all, s->has_nvml);
		else
			series_text((enum kill_child)child, all, s->has_nvml);
		if (all->violations || all->unheld)
			r = -EPROTO;
	}
	return r;
}

/* ------------------------------------------------------------------------- command */

static int usage(void)
{
	fprintf(stderr, "usage: kvbench kill [--rounds 1..200] [--backend "
			"auto|host|cuda] [--children none,handler,bare]\n"
			"                    [--work kernel|copies] [--json]\n");
	return 2;
}

static int parse_children(const char *text, u32 *ret)
{
	u32 set = 0;

	for (u32 i = 0; i < KILL_CHILDREN; i++)
		if (strstr(text, child_names[i]))
			set |= 1u << i;
	*ret = set;
	return set ? 0 : usage();
}

static int parse_work(const char *text, enum kill_work *ret)
{
	for (u32 i = 0; i < KV_ARRAY_SIZE(work_names); i++) {
		if (strcmp(text, work_names[i]))
			continue;
		*ret = (enum kill_work)i;
		return 0;
	}
	return usage();
}

struct victim_args {
	const char *socket_path;
	u64 fd, pipe;
};

static int parse(int argc, char **argv, struct options *opt, struct victim_args *v)
{
	static const struct option longs[] = {
		{"rounds", 1, 0, 'r'}, {"backend", 1, 0, 'b'}, {"children", 1, 0, 'c'},
		{"victim", 1, 0, 'v'}, {"fd", 1, 0, 'f'},      {"pipe", 1, 0, 'p'},
		{"work", 1, 0, 'w'},   {"json", 0, 0, 'j'},    {0, 0, 0, 0},
	};
	int c, r = 0;

	optind = 1;
	while (!r && (c = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		if (c == 'r')
			r = kvb_number("rounds", optarg, 1, ROUNDS_MAX, &opt->rounds);
		else if (c == 'b')
			r = kvb_backend_parse(optarg);
		else if (c == 'c')
			r = parse_children(optarg, &opt->children);
		else if (c == 'w')
			r = parse_work(optarg, &opt->work);
		else if (c == 'f' || c == 'p')
			r = kvb_number("fd", optarg, 0, 1 << 20,
				       c == 'f' ? &v->fd : &v->pipe);
		else if (c == 'v')
			v->socket_path = optarg;
		else if (c == 'j')
			opt->json = true;
		else
			r = usage();
		if (c == 'b' && r >= 0) {
			opt->backend = (enum kvb_backend)r;
			r = 0;
		}
	}
	return r < 0 ? 2 : r;
}

int kvb_kill(int argc, char **argv)
{
	struct options opt = {.rounds = 20, .children = (1u << KILL_CHILDREN) - 1};
	struct victim_args v = {NULL, 0, 0};
	struct scene s = {.fd = -1};
	cJSON *o, *list;
	int r;

	opt.backend = (enum kvb_backend)kvb_backend_parse("auto");
	r = parse(argc, argv, &opt, &v);
	if (r)
		return r;
	if (v.socket_path)
		return kill_victim(opt.backend, v.socket_path,
				   (enum kill_child)__builtin_ctz(opt.children), opt.work,
				   (int)v.fd, (int)v.pipe);
	if (scene_open(&s, &opt))
		return 1;
	o = cJSON_CreateObject();
	cJSON_AddStringToObject(o, "schema", "kvbench-kill/1");
	kvb_json_where(o, opt.backend);
	cJSON_AddStringToObject(o, "work", work_names[opt.work]);
	list = cJSON_AddArrayToObject(o, "rows");
	r = run(&s, list);
	kvc_close(s.c);
	s.m->ops->close(s.m);
	eng_private_kvmd_stop(&s.kvmd);
	if (opt.json)
		kvb_json_print(o);
	else
		cJSON_Delete(o);
	return r ? 1 : 0;
}
