/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - the scripted kvmd of common.h. */
#include "tests/unit/client/common.h"

#include <poll.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#define RING_DEPTH 64u
#define CLIENT_ID  7u

static int make_memfd(const char *name, size_t bytes, void **ret_map)
{
	int fd = memfd_create(name, MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		KVT_FAIL("memfd %s: %s", name, strerror(errno));
	*ret_map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (*ret_map == MAP_FAILED)
		KVT_FAIL("mmap %s: %s", name, strerror(errno));
	return fd;
}

static u32 ring_bytes(void)
{
	return 4096 + RING_DEPTH * 64 + RING_DEPTH * 32 + KV_ARG_BYTES;
}

static void make_ring(struct fake *f)
{
	void *map;

	f->ring_fd = make_memfd("fake-ring", ring_bytes(), &map);
	if (f->poison_ring)
		memset(map, 0xa5, ring_bytes());
	f->ring = map;
	memset(f->ring, 0, sizeof(*f->ring));
	f->ring->magic = KV_RING_MAGIC;
	f->ring->client_id = CLIENT_ID;
	f->ring->table_epoch = f->table_epoch;
	f->ring->nonce = 0x1234567;
	f->ring->sq_depth = RING_DEPTH;
	f->ring->cq_depth = RING_DEPTH;
	f->ring->sq_off = 4096;
	f->ring->cq_off = 4096 + RING_DEPTH * 64;
	f->ring->arg_off = f->ring->cq_off + RING_DEPTH * 32;
	f->ring->arg_bytes = KV_ARG_BYTES;
	f->sq_head = 0;
	f->cq_tail = 0;
}

struct kv_layout fake_layout(void)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_GQA,
				  .dtype = KV_DTYPE_E4M3,
				  .scale_kind = KV_SCALE_TOKEN,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = 1,
				  .nr_kv_heads = 1,
				  .head_dim = 64};
}

static void make_table(struct fake *f)
{
	const struct kv_table *old = f->resume ? f->table : NULL;
	void *map;

	f->layout = fake_layout();
	f->geometry = (struct kv_geometry){.stride_bytes = kv_page_stride(&f->layout),
					   .shift = FAKE_SHIFT,
					   .nr_pages = FAKE_PAGES};
	if (f->half_extents)
		f->geometry.shift--;
	f->geometry.extent_bytes = f->geometry.stride_bytes << f->geometry.shift;
	if (f->backend == KV_BACKEND_CUDA)
		f->geometry.extent_bytes =
			kv_round_up(f->geometry.extent_bytes, 2ull << 20);
	f->table_fd = make_memfd("fake-table", kv_table_bytes(FAKE_PAGES), &map);
	f->table = map;
	f->table->magic = KV_TABLE_MAGIC;
	f->table->abi = KV_ABI_VERSION;
	f->table->pool_id = 3;
	f->table->fingerprint = 0xf00d;
	f->table->table_epoch = f->table_epoch;
	f->table->nr_pages = FAKE_PAGES;
	f->table->tag_off = KV_TABLE_TAG_OFF;
	f->table->log_off = (u32)kv_table_log_off(FAKE_PAGES);
	f->table->grace_epoch.word = 5;
	if (!old) {
		memset(f->extent_serial, 0, sizeof(f->extent_serial));
		return;
	}
	f->table->used_pages = old->used_pages;
	memcpy((u8 *)f->table + KV_TABLE_TAG_OFF, (const u8 *)old + KV_TABLE_TAG_OFF,
	       FAKE_PAGES * sizeof(u64));
}

static void make_session(struct fake *f)
{
	void *map;

	if (f->resume) {
		kv_store_release64(&f->session->table_epoch.word, f->table_epoch);
		return;
	}
	f->session_fd = make_memfd("fake-session", KV_SESSION_BYTES, &map);
	f->session = map;
	f->session->magic = KV_SESSION_MAGIC;
	f->session->client_id = CLIENT_ID;
	f->session->table_epoch.word = f->table_epoch;
}

static void send_fds(int sock, const void *msg, size_t bytes, const int *fds, u32 nr)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(8 * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = (void *)(uintptr_t)msg, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *cm;

	if (nr) {
		memset(&control, 0, sizeof(control));
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(nr * sizeof(int));
		cm = CMSG_FIRSTHDR(&mh);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(nr * sizeof(int));
		memcpy(CMSG_DATA(cm), fds, nr * sizeof(int));
	}
	if (sendmsg(sock, &mh, MSG_NOSIGNAL) < 0 && errno != EPIPE)
		KVT_FAIL("fake sendmsg: %s", strerror(errno));
}

static void reply_hello(struct fake *f)
{
	struct kv_msg_hello_reply r = {.msg = {.magic = KV_MSG_MAGIC,
					       .type = KV_MSG_HELLO_REPLY,
					       .nr_fds = f->hello_result ? 0 : 4,
					       .size_bytes = sizeof(r),
					       .sequence = 1},
				       .result = f->hello_result,
				       .abi = KV_ABI_VERSION,
				       .client_id = CLIENT_ID,
				       .table_epoch = f->table_epoch,
				       .ring_bytes = ring_bytes(),
				       .ring_nonce = 0x1234567,
				       .flags = f->check_mode |
						(f->resume ? KV_HELLO_RESUMED : 0),
				       .tenant = "fake"};
	int fds[4];

	if (f->silent)
		return;
	make_ring(f);
	make_session(f);
	f->sq_efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	f->cq_efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	fds[0] = f->ring_fd;
	fds[1] = f->sq_efd;
	fds[2] = f->cq_efd;
	fds[3] = f->session_fd;
	if (f->hello_result)
		snprintf(r.error, sizeof(r.error), "client_name: refused by the test");
	send_fds(f->sock, &r, sizeof(r), fds, f->hello_result ? 0 : 4);
}

static void send_extents(struct fake *f, u32 type, u32 index, u64 serial, int fd);

/* What a kvmd says of a session that it took up. */
static void send_kept(struct fake *f)
{
	struct {
		struct kv_msg_leases head;
		struct kv_lease leases[16];
	} m = {.head = {.msg = {.magic = KV_MSG_MAGIC, .type = KV_MSG_LEASES},
			.pool_id = 3,
			.nr = f->nr_leases,
			.flags = KV_LEASES_LAST}};

	for (u32 i = 0; i < FAKE_EXTENTS; i++) {
		int fd = f->extent_serial[i] ? memfd_create("fake-again", MFD_CLOEXEC)
					     : -1;

		if (fd < 0)
			continue;
		if (ftruncate(fd, (off_t)f->geometry.extent_bytes))
			KVT_FAIL("extent memfd: %s", strerror(errno));
		send_extents(f, KV_MSG_EXTENT_ADDED, i, f->extent_serial[i], fd);
		close(fd);
	}
	m.head.msg.size_bytes =
		(u32)(sizeof(m.head) + f->nr_leases * sizeof(m.leases[0]));
	memcpy(m.leases, f->leases, f->nr_leases * sizeof(m.leases[0]));
	send_fds(f->sock, &m, m.head.msg.size_bytes, NULL, 0);
}

static void reply_pool(struct fake *f, const struct kv_msg *m)
{
	struct kv_msg_pool_reply r = {.msg = {.magic = KV_MSG_MAGIC,
					      .type = KV_MSG_POOL_REPLY,
					      .nr_fds = 1,
					      .size_bytes = sizeof(r),
					      .sequence = m->sequence},
				      .pool_id = 3,
				      .fingerprint = 0xf00d,
				      .table_epoch = f->table_epoch,
				      .table_bytes = kv_table_bytes(FAKE_PAGES),
				      .backend = f->backend};

	make_table(f);
	r.geometry = f->geometry;
	if (f->backend == KV_BACKEND_CUDA) /* device 0 of the fake driver */
		memset(r.gpu_uuid, 0x10, sizeof(r.gpu_uuid));
	send_fds(f->sock, &r, sizeof(r), &f->table_fd, 1);
	if (f->resume)
		send_kept(f);
}

void *fake_arg(struct fake *f, u32 off)
{
	return (u8 *)f->ring + f->ring->arg_off + off;
}

u64 *fake_tag(struct fake *f, u32 pfn)
{
	return (u64 *)((u8 *)f->table + KV_TABLE_TAG_OFF) + pfn;
}

/* P2: tag, log entry, log_head, each with release. */
void fake_log(struct fake *f, u32 pfn, u64 tag)
{
	struct kv_log_entry *log = (void *)((u8 *)f->table + f->table->log_off);
	u64 head;

	pthread_mutex_lock(&f->lock);
	head = f->table->log_head.word;
	if (f->table->used_pages.word <= pfn)
		kv_store_release64(&f->table->used_pages.word, pfn + 1);
	kv_store_release64(fake_tag(f, pfn), tag);
	log[head % KV_LOG_ENTRIES] =
		(struct kv_log_entry){.tag = tag, .pfn = pfn, .sequence = (u32)head};
	kv_store_release64(&f->table->log_head.word, head + 1);
	pthread_mutex_unlock(&f->lock);
}

u64 fake_give(struct fake *f, u32 pfn)
{
	u64 tag = kv_tag_make(__atomic_add_fetch(&f->generation, 1, __ATOMIC_RELAXED),
			      KV_TAG_LIVE);

	fake_log(f, pfn, tag);
	return tag;
}

void fake_kill(struct fake *f, u32 pfn)
{
	fake_log(f, pfn,
		 kv_tag_make(__atomic_add_fetch(&f->generation, 1, __ATOMIC_RELAXED), 0));
}

static void send_extents(struct fake *f, u32 type, u32 index, u64 serial, int fd)
{
	struct kv_msg_extents m = {.pool_id = 3, .nr = 1};

	m.msg.magic = KV_MSG_MAGIC;
	m.msg.type = (uint16_t)type;
	m.msg.nr_fds = fd >= 0 ? 1 : 0;
	m.msg.size_bytes =
		offsetof(struct kv_msg_extents, extents) + sizeof(m.extents[0]);
	m.extents[0].index = index;
	m.extents[0].serial = serial;
	send_fds(f->sock, &m, m.msg.size_bytes, &fd, fd >= 0 ? 1 : 0);
}

void fake_extent_add(struct fake *f, u32 index)
{
	int fd = memfd_create("fake-extent", MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)f->geometry.extent_bytes))
		KVT_FAIL("extent memfd: %s", strerror(errno));
	f->extent_serial[index] = ++f->next_serial;
	send_extents(f, KV_MSG_EXTENT_ADDED, index, f->extent_serial[index], fd);
	close(fd);
}

void fake_extent_remove(struct fake *f, u32 index)
{
	send_extents(f, KV_MSG_EXTENT_REMOVED, index, f->extent_serial[index], -1);
	f->extent_serial[index] = 0;
}

void fake_send_revoke(struct fake *f, const struct kv_page_ref *refs, u32 nr)
{
	struct {
		struct kv_msg_revoke head;
		struct kv_page_ref refs[64];
	} m = {.head = {.msg = {.magic = KV_MSG_MAGIC, .type = KV_MSG_REVOKE},
			.pool_id = 3,
			.nr = nr}};

	m.head.msg.size_bytes = (u32)(sizeof(m.head) + nr * sizeof(*refs));
	memcpy(m.refs, refs, nr * sizeof(*refs));
	send_fds(f->sock, &m, m.head.msg.size_bytes, NULL, 0);
}

static struct kv_grant give_page(struct fake *f)
{
	u32 pfn = f->next_pfn++;
	struct kv_grant g = {.pfn = pfn, .tag = fake_give(f, pfn)};

	if (!f->extent_serial[pfn >> FAKE_SHIFT] && !f->withhold_extents)
		fake_extent_add(f, pfn >> FAKE_SHIFT);
	return g;
}

static void serve_stock(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	struct kv_magazine *m = &f->session->magazines[sqe->magazine];

	for (u32 i = 0; i < KV_MAGAZINE_SLOTS && cqe->nr < sqe->nr; i++) {
		struct kv_grant g;

		if (f->next_pfn == FAKE_PAGES)
			break;

		if (kv_load_relaxed64(&m->slots[i].word))
			continue;
		g = give_page(f);
		kv_store_relaxed64(&m->slots[i].tag, g.tag);
		kv_store_release64(&m->slots[i].word, KV_MAG_STOCKED | g.pfn);
		cqe->nr++;
	}
}

bool fake_serve(struct fake *f, const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	struct kv_grant *grants = fake_arg(f, sqe->ret_off);
	struct kv_page_ref *refs = fake_arg(f, sqe->arg_off);

	switch (sqe->opcode) {
	case KV_OP_ALLOC:
		if (sqe->flags & KV_SQE_MAGAZINE) {
			serve_stock(f, sqe, cqe);
			break;
		}
		cqe->result = f->next_pfn + sqe->nr > FAKE_PAGES ? KV_FULL : 0;
		if (cqe->result)
			break;
		for (u32 i = 0; i < sqe->nr; i++)
			grants[i] = give_page(f);
		cqe->nr = sqe->nr;
		break;
	case KV_OP_FREE:
		for (u32 i = 0; i < sqe->nr; i++) {
			if (kv_tag_gen(*fake_tag(f, refs[i].pfn)) !=
			    kv_tag_gen(refs[i].tag)) {
				cqe->result = KV_STALE;
				continue;
			}
			fake_kill(f, refs[i].pfn);
			cqe->nr++;
		}
		__atomic_add_fetch(&f->pages_freed, cqe->nr, __ATOMIC_RELAXED);
		__atomic_add_fetch(&f->free_batches, 1, __ATOMIC_RELAXED);
		break;
	case KV_OP_UNMAPPED:
		__atomic_add_fetch(&f->unmapped, 1, __ATOMIC_RELAXED);
		break;
	default:
		break;
	}
	return true;
}

void fake_post(struct fake *f, struct kv_cqe cqe)
{
	struct kv_cqe *cq = (void *)((u8 *)f->ring + f->ring->cq_off);
	u64 one = 1;

	cqe.ring_nonce = f->ring->nonce;
	cqe.sequence = f->cq_tail;
	cq[f->cq_tail % RING_DEPTH] = cqe;
	f->cq_tail++;
	kv_store_release32(&f->ring->cq_tail, f->cq_tail);
	kv_full_barrier();
	if (kv_load_relaxed32(&f->ring->cq_need_wakeup) &&
	    write(f->cq_efd, &one, sizeof(one)) < 0)
		KVT_FAIL("cq eventfd");
}

static void serve_ring(struct fake *f)
{
	const struct kv_sqe *sq = (void *)((u8 *)f->ring + f->ring->sq_off);
	u64 count;

	if (read(f->sq_efd, &count, sizeof(count)) < 0)
		count = 0;
	kv_store_relaxed32(&f->ring->sq_need_wakeup, 0);
	do {
		while (f->sq_head != kv_load_acquire32(&f->ring->sq_tail)) {
			struct kv_sqe sqe = sq[f->sq_head % RING_DEPTH];
			struct kv_cqe cqe = {.user_data = sqe.user_data};

			f->sq_head++;
			kv_store_release32(&f->ring->sq_head, f->sq_head);
			__atomic_add_fetch(&f->served[sqe.opcode], 1, __ATOMIC_RELAXED);
			if ((f->serve ? f->serve : fake_serve)(f, &sqe, &cqe))
				fake_post(f, cqe);
		}
		kv_store_relaxed32(&f->ring->sq_need_wakeup, 1);
		kv_full_barrier();
	} while (f->sq_head != kv_load_acquire32(&f->ring->sq_tail));
}

/* Return: false when the client has gone. */
static bool serve_socket(struct fake *f)
{
	static _Thread_local u64 buf[KV_MSG_BYTES_MAX / 8];
	const struct kv_msg *m = (const void *)buf;
	ssize_t n = recv(f->sock, buf, sizeof(buf), MSG_DONTWAIT);

	if (n < 0 && errno == EAGAIN)
		return true;
	if (n <= 0)
		return false;
	if (m->type == KV_MSG_HELLO)
		reply_hello(f);
	else if (m->type == KV_MSG_POOL_OPEN && f->silent_pools)
		__atomic_sub_fetch(&f->silent_pools, 1, __ATOMIC_RELEASE);
	else if (m->type == KV_MSG_POOL_OPEN && f->hang_up_pools) {
		__atomic_sub_fetch(&f->hang_up_pools, 1, __ATOMIC_RELEASE);
		f->resume = true;
		f->table_epoch++;
		return false;
	} else if (m->type == KV_MSG_POOL_OPEN)
		reply_pool(f, m);
	else if (m->type == KV_MSG_POOL_CLOSE)
		__atomic_add_fetch(&f->pools_closed, 1, __ATOMIC_RELEASE);
	return true;
}

static void *fake_main(void *arg)
{
	struct fake *f = arg;

	while (!__atomic_load_n(&f->stop, __ATOMIC_ACQUIRE)) {
		struct pollfd p[3] = {{.fd = f->listen_fd, .events = POLLIN},
				      {.fd = f->sock, .events = POLLIN},
				      {.fd = f->sq_efd, .events = POLLIN}};

		poll(p, 3, 5);
		if (f->sock < 0 && (p[0].revents & POLLIN)) {
			f->sock = accept4(f->listen_fd, NULL, NULL, SOCK_CLOEXEC);
			f->sq_efd = -1;
		}
		if (f->sock >= 0 && (p[1].revents & (POLLIN | POLLHUP)) &&
		    !serve_socket(f)) {
			close(f->sock);
			f->sock = -1;
			continue;
		}
		if (f->sock >= 0 && f->sq_efd >= 0)
			serve_ring(f);
	}
	return NULL;
}

void fake_start(struct fake *f)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	snprintf(f->dir, sizeof(f->dir), "/tmp/kvt-XXXXXX");
	if (!mkdtemp(f->dir))
		KVT_FAIL("mkdtemp: %s", strerror(errno));
	snprintf(f->path, sizeof(f->path), "%s/s", f->dir);
	strcpy(addr.sun_path, f->path);
	f->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (bind(f->listen_fd, (void *)&addr, sizeof(addr)) || listen(f->listen_fd, 8))
		KVT_FAIL("fake listen: %s", strerror(errno));
	f->sock = -1;
	f->sq_efd = -1;
	f->generation = 100;
	if (!f->table_epoch)
		f->table_epoch = 42;
	pthread_mutex_init(&f->lock, NULL);
	if (pthread_create(&f->thread, NULL, fake_main, f))
		KVT_FAIL("pthread_create");
}

void fake_stop(struct fake *f)
{
	__atomic_store_n(&f->stop, true, __ATOMIC_RELEASE);
	pthread_join(f->thread, NULL);
	close(f->listen_fd);
	unlink(f->path);
	rmdir(f->dir);
}

struct kvc *fake_connect(struct fake *f, u32 timeout_ms)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = f->path,
				  .timeout_ms = timeout_ms};
	struct kvc *c;
	int r = kvc_open(&opt, &c);

	if (r)
		KVT_FAIL("kvc_open: %d %s", r, kvc_strerror(NULL));
	return c;
}

struct kvc_pool *fake_pool(struct fake *f, struct kvc *c)
{
	struct kv_layout layout = fake_layout();
	struct kvc_pool *pool;
	int r = kvc_pool_open(c, &layout, NULL, NULL, &pool);

	if (r)
		KVT_FAIL("kvc_pool_open: %d %s", r, kvc_strerror(c));
	return pool;
}
