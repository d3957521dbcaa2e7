/* SPDX-License-Identifier: Apache-2.0 */
/* chaos.c - see chaos.h: the daemon's side. The engines are in chaos_engine.c. */
#include "chaos.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"

int chaos_start(struct chaos_kvmd *c, const char *bytes, const char *const *args)
{
	const char *first[12];
	char error[512] = "", exe[64];
	u32 n = 0;
	ssize_t len;
	int r;

	first[n++] = "--keeper";
	first[n++] = "--host-bytes";
	first[n++] = bytes;
	for (u32 i = 0; args && args[i] && n < 11; i++)
		first[n++] = args[i];
	first[n] = NULL;
	r = eng_private_kvmd_start(first, &c->k, error, sizeof(error));
	if (r) {
		fprintf(stderr, "kvbench: private kvmd: %s\n", error);
		return r;
	}
	snprintf(exe, sizeof(exe), "/proc/%d/exe", c->k.pid);
	len = readlink(exe, c->path, sizeof(c->path) - 1);
	c->path[len > 0 ? len : 0] = 0;
	c->args[c->nr_args++] = c->path;
	c->args[c->nr_args++] = "--private";
	c->args[c->nr_args++] = c->k.dir;
	c->args[c->nr_args++] = "--die-with-parent";
	c->args[c->nr_args++] = "--backend";
	c->args[c->nr_args++] = "host";
	for (u32 i = 0; i < n; i++)
		c->args[c->nr_args++] = first[i];
	if (c->realtime) /* kvmd waits for it */
		sched_setscheduler(chaos_keeper(), SCHED_FIFO,
				   &(struct sched_param){.sched_priority = 1});
	return 0;
}

void chaos_kill(struct chaos_kvmd *c)
{
	kill(c->k.pid, SIGKILL);
	waitpid(c->k.pid, NULL, 0);
}

static void become_kvmd(struct chaos_kvmd *c, int ready)
{
	int log = open(c->k.log_path, O_WRONLY | O_APPEND | O_CREAT, 0600);
	const struct sched_param first = {.sched_priority = 1};
	char text[16];

	snprintf(text, sizeof(text), "%d", ready);
	fcntl(ready, F_SETFD, 0);
	if (c->realtime && sched_setscheduler(0, SCHED_FIFO, &first))
		_exit(125);
	dup2(log, 1);
	dup2(log, 2);
	c->args[c->nr_args] = "--ready-fd";
	c->args[c->nr_args + 1] = text;
	c->args[c->nr_args + 2] = NULL;
	execv(c->path, (char *const *)c->args);
	_exit(127);
}

int chaos_again(struct chaos_kvmd *c, double *ret_ms)
{
	u64 start_ns = kv_now_ns();
	int fds[2];
	char byte;

	if (pipe2(fds, O_CLOEXEC))
		return -errno;
	c->k.pid = vfork();
	if (c->k.pid == 0)
		become_kvmd(c, fds[1]);
	close(fds[1]);
	if (read(fds[0], &byte, 1) != 1) {
		fprintf(stderr, "kvbench: kvmd does not start again; %s\n",
			c->k.log_path);
		close(fds[0]);
		return -ECHILD;
	}
	close(fds[0]);
	*ret_ms = (double)(kv_now_ns() - start_ns) * 1e-6;
	return 0;
}

int chaos_stop(struct chaos_kvmd *c)
{
	return eng_private_kvmd_stop(&c->k);
}

/* --------------------------------------------------------------------------- asking */

char *chaos_admin(const struct chaos_kvmd *c, const char *request)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	const struct timeval patience = {.tv_sec = 20}; /* its socket outlives a kvmd */
	size_t used = 0, room = 1 << 20;
	char *ret = malloc(room);
	ssize_t n = -1;

	strcpy(addr.sun_path, c->k.admin_path);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	if (fd >= 0 && ret && !connect(fd, (struct sockaddr *)&addr, sizeof(addr)) &&
	    dprintf(fd, "%s\n", request) > 0) {
		do {
			n = read(fd, ret + used, room - used - 1);
			used += n > 0 ? (size_t)n : 0;
		} while (n > 0 && ret[used - 1] != '\n' && used < room - 1);
	}
	if (fd >= 0)
		close(fd);
	if (!used) {
		free(ret);
		return NULL;
	}
	ret[used] = 0;
	return ret;
}

/* The first item of that name, depth first. */
static const cJSON *find(const cJSON *o, const char *name, size_t len)
{
	const cJSON *item, *found;

	cJSON_ArrayForEach(item, o)
	{
		if (item->string && strlen(item->string) == len &&
		    !memcmp(item->string, name, len))
			return item;
		found = item->child ? find(item, name, len) : NULL;
		if (found)
			return found;
	}
	return NULL;
}

double chaos_admin_number(const struct chaos_kvmd *c, const char *request,
			  const char *name)
{
	char *text = chaos_admin(c, request);
	cJSON *o = text ? cJSON_Parse(text) : NULL;
	const char *dot = strchr(name, '.');
	const cJSON *item = o;
	double ret;

	if (dot)
		item = find(o, name, (size_t)(dot - name));
	if (item)
		item = find(item, dot ? dot + 1 : name, strlen(dot ? dot + 1 : name));
	ret = item && cJSON_IsNumber(item) ? item->valuedouble : -1;
	cJSON_Delete(o);
	free(text);
	return ret;
}

static bool file_has(const char *pid, const char *file, const char *text, size_t len)
{
	char path[300], buf[400];
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "/proc/%.20s/%s", pid, file);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = read(fd, buf, sizeof(buf) - 1);
	close(fd);
	return n > 0 && memmem(buf, (size_t)n, text, len);
}

/* The keeper's command line ends with our pid. */
pid_t chaos_keeper(void)
{
	DIR *dir = opendir("/proc");
	struct dirent *d;
	char mine[32];
	pid_t pid = 0;

	/* an argument of its own: 12 is not found in 4123 */
	mine[0] = 0;
	snprintf(mine + 1, sizeof(mine) - 1, "%d", getpid());
	while (dir && !pid && (d = readdir(dir))) {
		if (atoi(d->d_name) > 0 &&
		    file_has(d->d_name, "comm", "kvmd-keeper", 11) &&
		    file_has(d->d_name, "cmdline", mine, strlen(mine + 1) + 2))
			pid = atoi(d->d_name);
	}
	if (dir)
		closedir(dir);
	return pid;
}

u32 chaos_fds(pid_t pid)
{
	char path[64];
	DIR *dir;
	u32 n = 0;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	dir = opendir(path);
	while (dir && readdir(dir))
		n++;
	if (dir)
		closedir(dir);
	return n > 2 ? n - 2 : 0;
}

u64 chaos_anon_kib(pid_t pid)
{
	char path[64], line[256];
	unsigned long long kib = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/status", pid);
	f = fopen(path, "r");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "RssAnon: %llu", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib;
}

/* -------------------------------------------------------------------------- counting */

struct chaos_count *chaos_counts(u32 nr)
{
	void *p = mmap(NULL, nr * sizeof(struct chaos_count), PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

struct chaos_count chaos_sum(const struct chaos_count *counts, u32 nr)
{
	struct chaos_count sum = {0};

	for (u32 i = 0; i < nr; i++) {
		const struct chaos_count *c = &counts[i];

		sum.rounds += c->rounds;
		sum.pages += c->pages;
		sum.bytes += c->bytes;
		sum.wrong += c->wrong;
		sum.refused += c->refused;
		sum.sessions += c->sessions;
		sum.hits += c->hits;
		sum.misses += c->misses;
		sum.full += c->full;
		sum.away += c->away;
		sum.stale += c->stale;
		sum.errors += c->errors;
		sum.gap_ns = KV_MAX(sum.gap_ns, c->gap_ns);
	}
	return sum;
}
