/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - see common.h. */
#include "tests/unit/ipc/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "kvmd/dbg/log.h"
#include "tests/kvt.h"

/* --------------------------------------------------------------- the daemon */

struct kvd daemon_kvd;

static void daemon_child(const struct kvd_options *opt)
{
	char error[KVD_CONFIG_ERROR_BYTES];
	int r;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	kvd_log_setup(STDERR_FILENO, getenv("KVT_VERBOSE") ? KVD_LOG_DBG : KVD_LOG_ERR);
	r = kvd_init(&daemon_kvd, opt, error);
	if (r) {
		printf("# kvd_init: %s\n", error);
		fflush(stdout);
		_exit(1);
	}
	r = kvd_run(&daemon_kvd);
	kvd_fini(&daemon_kvd);
	_exit(r ? 1 : 0);
}

/* A directory of its own, and what lies in it. */
static void daemon_place(struct daemon *d, struct kvd_options *opt)
{
	strcpy(d->dir, "/tmp/kvt-ipc.XXXXXX");
	KVT_EXPECT(mkdtemp(d->dir));
	snprintf(d->socket_path, sizeof(d->socket_path), "%s/kvmd.sock", d->dir);
	snprintf(d->admin_path, sizeof(d->admin_path), "%s/admin.sock", d->dir);
	strcpy(opt->socket_path, d->socket_path);
	strcpy(opt->admin_path, d->admin_path);
	strcpy(opt->state_dir, d->dir);
}

void daemon_start(struct daemon *d, void (*tweak)(struct kvd_options *opt))
{
	struct kvd_options opt = {
		.check = -1, .socket_mode = 0600, .host_bytes = 256u << 20};
	char ready[8];
	int p[2];

	daemon_place(d, &opt);
	KVT_EXPECT(!pipe2(p, O_CLOEXEC));
	opt.ready_fd = p[1];
	if (tweak)
		tweak(&opt);
	fflush(stdout);
	d->pid = fork();
	KVT_EXPECT(d->pid >= 0);
	if (!d->pid)
		daemon_child(&opt);
	close(p[1]);
	KVT_EXPECT_EQ(read(p[0], ready, sizeof(ready)), 6);
	close(p[0]);
}

static void daemon_remove(const struct daemon *d)
{
	char path[400];
	struct dirent *e;
	DIR *dir = opendir(d->dir);

	while (dir && (e = readdir(dir))) {
		snprintf(path, sizeof(path), "%s/%s", d->dir, e->d_name);
		unlink(path);
	}
	if (dir)
		closedir(dir);
	rmdir(d->dir);
}

void daemon_stop(struct daemon *d)
{
	int status;

	kill(d->pid, SIGTERM);
	KVT_EXPECT_EQ(waitpid(d->pid, &status, 0), d->pid);
	daemon_remove(d);
	KVT_EXPECT_EQ(status, 0);
}

static pthread_t turner;
static bool turning;

static void *make_turns(void *arg)
{
	(void)arg;
	while (__atomic_load_n(&turning, __ATOMIC_ACQUIRE))
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	return NULL;
}

void daemon_here(struct daemon *d, u64 host_bytes)
{
	struct kvd_options opt = {.check = -1,
				  .socket_mode = 0600,
				  .host_bytes = host_bytes,
				  .ready_fd = -1};
	char error[KVD_CONFIG_ERROR_BYTES];

	daemon_place(d, &opt);
	if (kvd_init(&daemon_kvd, &opt, error))
		KVT_FAIL("kvd_init: %s", error);
}

void daemon_here_turns(bool on)
{
	__atomic_store_n(&turning, on, __ATOMIC_RELEASE);
	if (on)
		KVT_EXPECT(!pthread_create(&turner, NULL, make_turns, NULL));
	else
		pthread_join(turner, NULL);
}

void daemon_here_end(struct daemon *d)
{
	kvd_fini(&daemon_kvd);
	daemon_remove(d);
}

int daemon_nr_fds(const struct daemon *d)
{
	char path[64];
	int nr = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", d->pid);
	dir = opendir(path);
	KVT_EXPECT(dir);
	while (readdir(dir))
		nr++;
	closedir(dir);
	return nr - 2;
}

int daemon_free_fd(const struct daemon *d)
{
	char path[64];
	int fd = 0;

	do {
		snprintf(path, sizeof(path), "/proc/%d/fd/%d", d->pid, fd++);
	} while (!access(path, F_OK));
	return fd - 1;
}

cJSON *daemon_ask(const struct daemon *d, const char *request)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	size_t used = 0, room = 4u << 20;
	char *text = malloc(room);
	ssize_t n;
	cJSON *doc;
	int fd;

	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	strcpy(addr.sun_path, d->admin_path);
	KVT_EXPECT(!connect(fd, (struct sockaddr *)&addr, sizeof(addr)));
	KVT_EXPECT_EQ(write(fd, request, strlen(request)), strlen(request));
	KVT_EXPECT_EQ(write(fd, "\n", 1), 1);
	do {
		n = read(fd, text + used, room - 1 - used);
		used += n > 0 ? (size_t)n : 0;
	} while (n > 0 && text[used - 1] != '\n');
	close(fd);
	text[used] = 0;
	doc = cJSON_Parse(text);
	KVT_EXPECT(doc);
	free(text);
	return doc;
}

double daemon_number(const struct daemon *d, const char *request, const char *path)
{
	cJSON *doc = daemon_ask(d, request), *item = doc;
	char copy[128], *save = NULL, *word;
	double v;

	snprintf(copy, sizeof(copy), "%s", path);
	for (word = strtok_r(copy, ".", &save); word && item;
	     word = strtok_r(NULL, ".", &save))
		item = cJSON_IsArray(item) ? cJSON_GetArrayItem(item, atoi(word))
					   : cJSON_GetObjectItemCaseSensitive(item, word);
	if (!cJSON_IsNumber(item))
		KVT_FAIL("%s: no number \"%s\"", request, path);
	v = item->valuedouble;
	cJSON_Delete(doc);
	return v;
}

void daemon_wait(const struct daemon *d, const char *request, const char *path,
		 double want, int ms)
{
	double v;

	do {
		v = daemon_number(d, request, path);
		if (v == want)
			return;
		usleep(2000);
		ms -= 2;
	} while (ms > 0);
	KVT_FAIL("%s: %s is %g, expected %g", request, path, v, want);
}

/* --------------------------------------------------------------- the client */

void raw_connect(struct raw *c, const struct daemon *d)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	memset(c, 0, sizeof(*c));
	c->sq_event = c->cq_event = -1;
	c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	strcpy(addr.sun_path, d->socket_path);
	if (connect(c->fd, (struct sockaddr *)&addr, sizeof(addr)))
		KVT_FAIL("connect %s: %s", addr.sun_path, strerror(errno));
}

void raw_hello_fill(struct kv_msg_hello *hello)
{
	memset(hello, 0, sizeof(*hello));
	hello->msg.magic = KV_MSG_MAGIC;
	hello->msg.type = KV_MSG_HELLO;
	hello->msg.size_bytes = sizeof(*hello);
	hello->msg.sequence = 77;
	hello->abi_min = KV_ABI_VERSION_MIN;
	hello->abi_max = KV_ABI_VERSION;
	strcpy(hello->client_name, "raw");
}

int raw_send_fds(struct raw *c, const void *msg, size_t bytes, const int *fds, int nr_fds)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(sizeof(int) * RAW_FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = (void *)msg, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *h;

	if (nr_fds) {
		memset(&control, 0, sizeof(control));
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nr_fds);
		h = CMSG_FIRSTHDR(&mh);
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nr_fds);
		memcpy(CMSG_DATA(h), fds, sizeof(int) * (size_t)nr_fds);
	}
	return sendmsg(c->fd, &mh, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

void raw_send(struct raw *c, const void *msg, size_t bytes)
{
	KVT_EXPECT_EQ(raw_send_fds(c, msg, bytes, NULL, 0), 0);
}

int raw_receive(struct raw *c, void *buf, size_t room)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(sizeof(int) * RAW_FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = buf, .iov_len = room};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct pollfd p = {.fd = c->fd, .events = POLLIN};
	struct cmsghdr *h;
	ssize_t n;

	mh.msg_control = &control;
	mh.msg_controllen = sizeof(control);
	c->nr_fds = 0;
	if (poll(&p, 1, 5000) != 1)
		KVT_FAIL("no message within 5 s");
	n = recvmsg(c->fd, &mh, MSG_CMSG_CLOEXEC);
	if (n < 0)
		return 0; /* ECONNRESET: hung up with something unread */
	for (h = CMSG_FIRSTHDR(&mh); h; h = CMSG_NXTHDR(&mh, h)) {
		c->nr_fds = (int)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(c->fds, CMSG_DATA(h), sizeof(int) * (size_t)c->nr_fds);
	}
	return (int)n;
}

static void hello_map(struct raw *c)
{
	KVT_EXPECT_EQ(c->nr_fds, 4);
	c->ring = mmap(NULL, c->hello.ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
		       c->fds[0], 0);
	KVT_EXPECT(c->ring != MAP_FAILED);
	c->page = mmap(NULL, KV_SESSION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		       c->fds[3], 0);
	KVT_EXPECT(c->page != MAP_FAILED);
	close(c->fds[0]);
	close(c->fds[3]);
	c->sq_event = c->fds[1];
	c->cq_event = c->fds[2];
	c->sq = (void *)((u8 *)c->ring + c->ring->sq_off);
	c->cq = (void *)((u8 *)c->ring + c->ring->cq_off);
	c->args = (u8 *)c->ring + c->ring->arg_off;
}

int raw_hello_try(struct raw *c, const char *name)
{
	struct kv_msg_hello hello;
	int n;

	raw_hello_fill(&hello);
	snprintf(hello.client_name, sizeof(hello.client_name), "%s", name);
	if (raw_send_fds(c, &hello, sizeof(hello), NULL, 0))
		return -ECONNRESET;
	n = raw_receive(c, &c->hello, sizeof(c->hello));
	if (!n || c->hello.msg.type == KV_MSG_ERROR)
		return -ECONNRESET;
	KVT_EXPECT_EQ(n, sizeof(c->hello));
	KVT_EXPECT_EQ(c->hello.msg.type, KV_MSG_HELLO_REPLY);
	KVT_EXPECT_EQ(c->hello.msg.sequence, 77);
	if (!c->hello.result)
		hello_map(c);
	return c->hello.result;
}

int raw_hello(struct raw *c, const char *name)
{
	int r = raw_hello_try(c, name);

	KVT_EXPECT(r != -ECONNRESET);
	return r;
}

void raw_layout(struct kv_layout *layout)
{
	memset(layout, 0, sizeof(*layout));
	layout->format_version = KV_LAYOUT_VERSION;
	layout->kind = KV_LAYOUT_MLA;
	layout->dtype = KV_DTYPE_E4M3;
	layout->scale_kind = KV_SCALE_TOKEN;
	layout->page_tokens = KV_PAGE_TOKENS;
	layout->nr_layers = 2;
	layout->latent_dim = 512;
	layout->rope_dim = 64;
}

int raw_pool_open(struct raw *c, const struct kv_layout *layout)
{
	struct kv_msg_pool_open msg;
	int n;

	memset(&msg, 0, sizeof(msg));
	msg.msg.magic = KV_MSG_MAGIC;
	msg.msg.type = KV_MSG_POOL_OPEN;
	msg.msg.size_bytes = sizeof(msg);
	msg.msg.sequence = 78;
	msg.layout = *layout;
	raw_send(c, &msg, sizeof(msg));
	n = raw_receive(c, &c->pool, sizeof(c->pool));
	if (!n || c->pool.msg.type == KV_MSG_ERROR)
		return -ECONNRESET;
	KVT_EXPECT_EQ(n, sizeof(c->pool));
	KVT_EXPECT_EQ(c->pool.msg.type, KV_MSG_POOL_REPLY);
	KVT_EXPECT_EQ(c->pool.msg.sequence, 78);
	return c->pool.result;
}

void raw_open(struct raw *c, const struct daemon *d)
{
	struct kv_layout layout;

	raw_connect(c, d);
	KVT_EXPECT_EQ(raw_hello(c, "raw"), 0);
	raw_layout(&layout);
	KVT_EXPECT_EQ(raw_pool_open(c, &layout), 0);
}

void raw_submit(struct raw *c, struct kv_sqe sqe)
{
	u32 tail = c->ring->sq_tail;
	u64 one = 1;

	sqe.ring_nonce = c->hello.ring_nonce;
	c->sq[tail & (c->ring->sq_depth - 1)] = sqe;
	kv_store_release32(&c->ring->sq_tail, tail + 1);
	kv_full_barrier();
	if (kv_load_relaxed32(&c->ring->sq_need_wakeup))
		KVT_EXPECT_EQ(write(c->sq_event, &one, sizeof(one)), sizeof(one));
}

struct kv_cqe raw_wait(struct raw *c)
{
	struct kv_cqe cqe;
	int ms = 5000;

	while (kv_load_acquire32(&c->ring->cq_tail) == c->cq_head) {
		usleep(500);
		if (ms-- == 0)
			KVT_FAIL("no completion within 5 s");
	}
	cqe = c->cq[c->cq_head & (c->ring->cq_depth - 1)];
	KVT_EXPECT_EQ(cqe.ring_nonce, c->hello.ring_nonce);
	KVT_EXPECT_EQ(cqe.sequence, c->cq_head);
	kv_store_release32(&c->ring->cq_head, ++c->cq_head);
	return cqe;
}

int raw_alloc(struct raw *c, u32 nr, u32 gfp, struct kv_grant *grants)
{
	struct kv_sqe sqe = {
		.opcode = KV_OP_ALLOC,
		.pool_id = c->pool.pool_id,
		.nr = nr,
		.gfp = gfp,
		.ret_bytes = nr * (u32)sizeof(*grants),
	};
	struct kv_cqe cqe;

	raw_submit(c, sqe);
	cqe = raw_wait(c);
	if (!cqe.result)
		memcpy(grants, c->args, nr * sizeof(*grants));
	return cqe.result;
}

int raw_free(struct raw *c, const struct kv_grant *grants, u32 nr)
{
	struct kv_page_ref *refs = (struct kv_page_ref *)c->args;
	struct kv_sqe sqe = {
		.opcode = KV_OP_FREE,
		.pool_id = c->pool.pool_id,
		.nr = nr,
		.arg_bytes = nr * (u32)sizeof(*refs),
	};
	u32 i;

	for (i = 0; i < nr; i++)
		refs[i] =
			(struct kv_page_ref){.pfn = grants[i].pfn, .tag = grants[i].tag};
	raw_submit(c, sqe);
	return raw_wait(c).result;
}

bool raw_hung_up(struct raw *c)
{
	static u8 buf[KV_MSG_BYTES_MAX];
	int i, n;

	for (i = 0; i < 1000; i++) {
		n = raw_receive(c, buf, sizeof(buf));
		while (c->nr_fds)
			close(c->fds[--c->nr_fds]);
		if (n == 0)
			return true;
	}
	return false;
}

void raw_close(struct raw *c)
{
	if (c->ring)
		munmap(c->ring, c->hello.ring_bytes);
	if (c->page)
		munmap(c->page, KV_SESSION_BYTES);
	if (c->sq_event >= 0)
		close(c->sq_event);
	if (c->cq_event >= 0)
		close(c->cq_event);
	close(c->fd);
}
