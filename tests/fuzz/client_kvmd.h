/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client_kvmd.h - the kvmd of tests/fuzz/client.c: a thread that acts only when it is asked
 * and answers what its half of the input says. Included once.
 */
#ifndef TESTS_FUZZ_CLIENT_KVMD_H
#define TESTS_FUZZ_CLIENT_KVMD_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "kv/abi.h"
#include "tests/fuzz/fuzz.h"

#define DEPTH	  16u
#define ARG_BYTES (64u << 10)
#define PAGES	  64u
#define SHIFT	  3u
#define NONCE	  0x1234567u
#define EPOCH	  42u
#define OPENS_MAX 3u

static struct {
	char path[64];
	int listen_fd, sock, quit;
	pthread_t thread;
	struct fuzz_in in;
	int sq_efd, cq_efd;
	struct kv_ring_hdr *ring;
	struct kv_session_page *session;
	struct kv_table *table;
	struct kv_geometry geo;
	u32 sq_head, cq_tail, opens;
	u64 generation, serial;
	u64 extents[PAGES >> SHIFT];
} k;

static struct kv_layout the_layout(void)
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

/* ------------------------------------------------------------------------- messages */

/* Most of the time nothing; else some bytes of it are others. */
static void spoil(void *data, u32 bytes)
{
	u8 how = fuzz_u8(&k.in), nr = 1 + (how & 7);
	u32 at;

	if (how < 0xe0)
		return;
	at = fuzz_u32(&k.in) % bytes;
	fuzz_take(&k.in, (u8 *)data + at, KV_MIN(nr, bytes - at));
}

static void say(void *msg, u32 bytes, const int *fds, u32 nr)
{
	union {
		struct cmsghdr align;
		u8 bytes[CMSG_SPACE(8 * sizeof(int))];
	} control = {0};
	struct iovec iov = {.iov_base = msg, .iov_len = bytes};
	struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *c;

	spoil(msg, bytes);
	if (nr) {
		mh.msg_control = &control;
		mh.msg_controllen = CMSG_SPACE(nr * sizeof(int));
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr * sizeof(int));
	}
	sendmsg(k.sock, &mh, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static struct kv_msg head(u32 type, u32 bytes, u32 nr_fds)
{
	return (struct kv_msg){.magic = KV_MSG_MAGIC,
			       .type = (u16)type,
			       .nr_fds = (u16)nr_fds,
			       .size_bytes = bytes};
}

static int memory(size_t bytes, void **ret)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC);

	FUZZ_CHECK(fd >= 0 && !ftruncate(fd, (off_t)bytes));
	*ret = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	FUZZ_CHECK(*ret != MAP_FAILED);
	return fd;
}

static void drop(void *map, size_t bytes)
{
	if (map)
		munmap(map, bytes);
}

static const u32 ring_bytes = 4096 + DEPTH * 64 + DEPTH * 32 + ARG_BYTES;

static void drop_link(void)
{
	drop(k.ring, ring_bytes);
	drop(k.session, KV_SESSION_BYTES);
	drop(k.table, kv_table_bytes(PAGES));
	if (k.sq_efd >= 0) {
		close(k.sq_efd);
		close(k.cq_efd);
	}
	k.ring = NULL;
	k.session = NULL;
	k.table = NULL;
	k.sq_efd = k.cq_efd = -1;
	memset(k.extents, 0, sizeof(k.extents));
}

static void reply_hello(void)
{
	struct kv_msg_hello_reply r = {.msg = head(KV_MSG_HELLO_REPLY, sizeof(r), 4),
				       .abi = KV_ABI_VERSION,
				       .client_id = 7,
				       .table_epoch = EPOCH,
				       .ring_bytes = ring_bytes,
				       .ring_nonce = NONCE,
				       .flags = k.opens > 1 ? KV_HELLO_RESUMED : 0,
				       .tenant = "fuzz"};
	void *map;
	int fds[4];

	drop_link();
	r.msg.sequence = 1;
	fds[0] = memory(ring_bytes, &map);
	k.ring = map;
	*k.ring = (struct kv_ring_hdr){.magic = KV_RING_MAGIC,
				       .client_id = 7,
				       .table_epoch = EPOCH,
				       .nonce = NONCE,
				       .sq_depth = DEPTH,
				       .cq_depth = DEPTH,
				       .sq_off = 4096,
				       .cq_off = 4096 + DEPTH * 64,
				       .arg_off = 4096 + DEPTH * 96,
				       .arg_bytes = ARG_BYTES};
	k.ring->sq_need_wakeup = 1;
	fds[1] = k.sq_efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	fds[2] = k.cq_efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	fds[3] = memory(KV_SESSION_BYTES, &map);
	k.session = map;
	k.session->magic = KV_SESSION_MAGIC;
	k.session->client_id = 7;
	k.session->table_epoch.word = EPOCH;
	k.sq_head = k.cq_tail = 0;
	spoil(k.ring, 64);
	spoil(k.session, 64);
	say(&r, sizeof(r), fds, 4);
	close(fds[0]);
	close(fds[3]);
}

static void reply_pool(const struct kv_msg *m)
{
	struct kv_layout l = the_layout();
	struct kv_msg_pool_reply r = {.msg = head(KV_MSG_POOL_REPLY, sizeof(r), 1),
				      .pool_id = 3,
				      .fingerprint = 0xf00d,
				      .table_epoch = EPOCH,
				      .table_bytes = kv_table_bytes(PAGES)};
	void *map;
	int fd;

	drop(k.table, kv_table_bytes(PAGES));
	fd = memory(kv_table_bytes(PAGES), &map);
	k.table = map;
	*k.table = (struct kv_table){.magic = KV_TABLE_MAGIC,
				     .abi = KV_ABI_VERSION,
				     .pool_id = 3,
				     .fingerprint = 0xf00d,
				     .table_epoch = EPOCH,
				     .nr_pages = PAGES,
				     .tag_off = KV_TABLE_TAG_OFF,
				     .log_off = (u32)kv_table_log_off(PAGES)};
	k.table->grace_epoch.word = 5;
	k.geo = (struct kv_geometry){
		.stride_bytes = kv_page_stride(&l), .shift = SHIFT, .nr_pages = PAGES};
	k.geo.extent_bytes = k.geo.stride_bytes << SHIFT;
	r.geometry = k.geo;
	r.msg.sequence = m->sequence;
	spoil(k.table, 128);
	say(&r, sizeof(r), &fd, 1);
	close(fd);
}

/* --------------------------------------------------------------------------- events */

/* An extent of the right size, or of another. */
static void extent(u32 type, u32 index)
{
	struct kv_msg_extents m = {.pool_id = 3, .nr = 1};
	u32 bytes = offsetof(struct kv_msg_extents, extents) + sizeof(m.extents[0]);
	bool added = type == KV_MSG_EXTENT_ADDED;
	int fd = added ? memfd_create("fuzz", MFD_CLOEXEC) : -1;
	u64 size = k.geo.extent_bytes;

	if (added && fuzz_u8(&k.in) >= 0xf0)
		size = size / 256 * fuzz_u8(&k.in);
	m.msg = head(type, bytes, added);
	m.extents[0].index = index;
	m.extents[0].serial = added ? ++k.serial : k.extents[index % (PAGES >> SHIFT)];
	if (added)
		FUZZ_CHECK(fd >= 0 && !ftruncate(fd, (off_t)size));
	k.extents[index % (PAGES >> SHIFT)] = added ? k.serial : 0;
	say(&m, bytes, &fd, added);
	if (added)
		close(fd);
}

static void leases(bool last)
{
	struct {
		struct kv_msg_leases head;
		struct kv_lease list[4];
	} m = {.head = {.pool_id = 3, .nr = fuzz_u8(&k.in) % 5}};

	m.head.msg = head(KV_MSG_LEASES,
			  (u32)(sizeof(m.head) + m.head.nr * sizeof(m.list[0])), 0);
	m.head.flags = last ? KV_LEASES_LAST : KV_LEASES_OPEN;
	fuzz_take(&k.in, m.list, m.head.nr * sizeof(m.list[0]));
	for (u32 i = 0; i < m.head.nr; i++)
		m.list[i].pfn %= PAGES + 2;
	say(&m, m.head.msg.size_bytes, NULL, 0);
}

static void say_revoke(void)
{
	struct {
		struct kv_msg_revoke head;
		struct kv_page_ref refs[4];
	} m = {.head = {.pool_id = 3, .nr = fuzz_u8(&k.in) % 5}};

	m.head.msg = head(KV_MSG_REVOKE,
			  (u32)(sizeof(m.head) + m.head.nr * sizeof(m.refs[0])), 0);
	for (u32 i = 0; i < m.head.nr; i++) {
		m.refs[i].pfn = fuzz_u8(&k.in) % (PAGES + 2);
		m.refs[i].tag = kv_tag_make(100 + fuzz_u8(&k.in), KV_TAG_LIVE);
	}
	say(&m, m.head.msg.size_bytes, NULL, 0);
}

/* A word of what both sides map. */
static void scribble(u32 what)
{
	u32 at = fuzz_u32(&k.in), bytes = 8;
	u8 *to = (u8 *)k.session;

	if (what == 0 && k.table) {
		to = (u8 *)k.table;
		at %= KV_TABLE_TAG_OFF + PAGES * 8;
	} else if (what == 1 && k.table) {
		to = (u8 *)k.table + kv_table_log_off(PAGES);
		at %= 64 * sizeof(struct kv_log_entry);
	} else if (what == 2) {
		to = (u8 *)k.ring;
		at %= 4096;
	} else {
		at %= KV_SESSION_BYTES;
	}
	fuzz_take(&k.in, to + at / 8 * 8, bytes);
}

static void event(void)
{
	struct kv_msg_pressure pressure = {
		.msg = head(KV_MSG_PRESSURE, sizeof(pressure), 0), .pool_id = 3};
	u8 what = fuzz_u8(&k.in), raw[64];

	switch (what & 0x0f) {
	case 0:
		extent(KV_MSG_EXTENT_ADDED, fuzz_u8(&k.in) % ((PAGES >> SHIFT) + 1));
		break;
	case 1:
		extent(KV_MSG_EXTENT_REMOVED, fuzz_u8(&k.in) % ((PAGES >> SHIFT) + 1));
		break;
	case 2:
		say_revoke();
		break;
	case 3:
		pressure.level = fuzz_u8(&k.in);
		say(&pressure, sizeof(pressure), NULL, 0);
		break;
	case 4:
	case 5:
		leases(what & 1);
		break;
	case 6:
		fuzz_take(&k.in, raw, sizeof(raw));
		*(struct kv_msg *)raw = head(what >> 4, sizeof(raw), 0);
		say(raw, sizeof(raw), NULL, 0);
		break;
	case 7:
	case 8:
	case 9:
	case 10:
		scribble((what & 0x0f) - 7);
		break;
	default:
		break; /* nothing */
	}
}

/* --------------------------------------------------------------------------- answers */

static void post(struct kv_cqe cqe)
{
	struct kv_cqe *cq = (void *)((u8 *)k.ring + 4096 + DEPTH * 64);
	u64 one = 1;

	cqe.ring_nonce = NONCE;
	cqe.sequence = k.cq_tail;
	spoil(&cqe, sizeof(cqe));
	cq[k.cq_tail % DEPTH] = cqe;
	k.cq_tail++;
	kv_store_release32(&k.ring->cq_tail, k.cq_tail);
	FUZZ_CHECK(write(k.cq_efd, &one, sizeof(one)) > 0 || errno == EAGAIN);
}

static struct kv_grant give(void)
{
	u8 what = fuzz_u8(&k.in);
	u32 pfn = what % (what >= 0xf8 ? PAGES + 8 : PAGES);
	struct kv_grant g = {.pfn = pfn,
			     .tag = kv_tag_make(100 + ++k.generation, KV_TAG_LIVE)};
	u64 *tags = (u64 *)((u8 *)k.table + KV_TABLE_TAG_OFF);
	struct kv_log_entry *log = (void *)((u8 *)k.table + kv_table_log_off(PAGES));
	u64 at = kv_load_relaxed64(&k.table->log_head.word);

	if (pfn >= PAGES)
		return g;
	if (k.table->used_pages.word <= pfn)
		kv_store_release64(&k.table->used_pages.word, pfn + 1);
	kv_store_release64(&tags[pfn], g.tag);
	log[at % KV_LOG_ENTRIES] =
		(struct kv_log_entry){.tag = g.tag, .pfn = pfn, .sequence = (u32)at};
	kv_store_release64(&k.table->log_head.word, at + 1);
	if (!k.extents[pfn >> SHIFT])
		extent(KV_MSG_EXTENT_ADDED, pfn >> SHIFT);
	return g;
}

static void stock(const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	struct kv_magazine *m = &k.session->magazines[sqe->magazine % KV_MAGAZINES];

	for (u32 i = 0; i < KV_MAGAZINE_SLOTS && cqe->nr < sqe->nr; i++) {
		struct kv_grant g;

		if (kv_load_relaxed64(&m->slots[i].word))
			continue;
		g = give();
		kv_store_relaxed64(&m->slots[i].tag, g.tag);
		kv_store_release64(&m->slots[i].word, KV_MAG_STOCKED | g.pfn);
		cqe->nr++;
	}
}

/* Results as the operation has them; what they say is the input's. */
static void results(const struct kv_sqe *sqe, struct kv_cqe *cqe)
{
	u8 *to = (u8 *)k.ring + 4096 + DEPTH * 96 + sqe->ret_off;
	struct kv_grant g;
	struct kv_hit hit;

	if (!k.table || (u64)sqe->ret_off + sqe->ret_bytes > ARG_BYTES)
		return;
	if (sqe->opcode == KV_OP_ALLOC && (sqe->flags & KV_SQE_MAGAZINE)) {
		stock(sqe, cqe);
		return;
	}
	cqe->nr = sqe->nr;
	if (sqe->opcode == KV_OP_LOOKUP)
		cqe->nr = sqe->ret_bytes / sizeof(hit);
	for (u32 i = 0; i < cqe->nr; i++) {
		if (sqe->opcode == KV_OP_ALLOC || sqe->opcode == KV_OP_FORK) {
			g = give();
			if ((i + 1) * sizeof(g) <= sqe->ret_bytes)
				memcpy(to + i * sizeof(g), &g, sizeof(g));
		} else if (sqe->opcode == KV_OP_LOOKUP) {
			g = give();
			memset(&hit, 0, sizeof(hit));
			hit.grant = g;
			memcpy(to + i * sizeof(hit), &hit, sizeof(hit));
		}
	}
}

/* Return: false: it hangs up. */
static bool serve_one(void)
{
	const struct kv_sqe *sq = (void *)((u8 *)k.ring + 4096);
	struct kv_sqe sqe = sq[k.sq_head % DEPTH];
	struct kv_cqe cqe = {.user_data = sqe.user_data};
	u8 how = fuzz_u8(&k.in);

	k.sq_head++;
	kv_store_release32(&k.ring->sq_head, k.sq_head);
	if (how & 1)
		event();
	results(&sqe, &cqe);
	if ((how & 0xf0) == 0xf0)
		return false;
	if ((how & 0xf0) == 0xe0)
		cqe.nr = fuzz_u32(&k.in);
	if ((how & 0xf0) == 0xd0)
		cqe.result = fuzz_u8(&k.in) % (KV_OUTCOME_NR + 1);
	post(cqe);
	if ((how & 0xf0) == 0xc0)
		post(cqe);
	return true;
}

static bool serve_socket(void)
{
	u64 buf[KV_MSG_BYTES_MAX / 8];
	const struct kv_msg *m = (const void *)buf;
	ssize_t n = recv(k.sock, buf, sizeof(buf), MSG_DONTWAIT);

	if (n <= 0)
		return n < 0 && errno == EAGAIN;
	if (m->type == KV_MSG_HELLO)
		reply_hello();
	else if (m->type == KV_MSG_POOL_OPEN && k.ring)
		reply_pool(m);
	if (fuzz_u8(&k.in) & 1 && k.ring)
		event();
	return true;
}

static void hang_up(void)
{
	if (k.sock >= 0)
		close(k.sock);
	k.sock = -1;
	if (k.opens == OPENS_MAX && k.listen_fd >= 0) {
		close(k.listen_fd);
		k.listen_fd = -1;
	}
}

static void *kvmd_main(void *arg)
{
	u64 count;

	for (;;) {
		struct pollfd p[4] = {
			{.fd = k.quit, .events = POLLIN},
			{.fd = k.sock < 0 ? k.listen_fd : -1, .events = POLLIN},
			{.fd = k.sock, .events = POLLIN},
			{.fd = k.sock < 0 ? -1 : k.sq_efd, .events = POLLIN}};
		bool on = true;

		poll(p, 4, -1);
		if (p[0].revents)
			return NULL;
		if (p[1].revents) {
			k.sock = accept4(k.listen_fd, NULL, NULL, SOCK_CLOEXEC);
			k.opens++;
		}
		if (p[2].revents)
			on = serve_socket();
		if (on && p[3].revents) {
			if (read(k.sq_efd, &count, sizeof(count)) < 0)
				continue;
			while (on && k.sq_head != kv_load_acquire32(&k.ring->sq_tail))
				on = serve_one();
		}
		if (!on)
			hang_up();
	}
}

static void kvmd_start(const struct fuzz_in *in)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	memset(&k, 0, sizeof(k));
	k.in = *in;
	k.sock = k.sq_efd = k.cq_efd = -1;
	snprintf(k.path, sizeof(k.path), "%.40s/kvt-fuzz-%d", fuzz_tmp(), getpid());
	memcpy(addr.sun_path, k.path, sizeof(k.path));
	k.quit = eventfd(0, EFD_CLOEXEC);
	k.listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	unlink(k.path);
	FUZZ_CHECK(!bind(k.listen_fd, (struct sockaddr *)&addr, sizeof(addr)) &&
		   !listen(k.listen_fd, 8));
	FUZZ_CHECK(!pthread_create(&k.thread, NULL, kvmd_main, NULL));
}

static void kvmd_stop(void)
{
	u64 one = 1;

	FUZZ_CHECK(write(k.quit, &one, sizeof(one)) == sizeof(one));
	pthread_join(k.thread, NULL);
	drop_link();
	hang_up();
	if (k.listen_fd >= 0)
		close(k.listen_fd);
	close(k.quit);
	unlink(k.path);
}

#endif
