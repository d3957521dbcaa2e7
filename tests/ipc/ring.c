/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a hostile or broken client can write into its ring and socket: it harms itself
 * only.
 *
 * Each case keeps a second, honest session open and uses it afterwards.
 */
#include "tests/ipc/common.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static struct eng_private_kvmd kvmd;
static struct ipc_raw raw;
static struct kvc *honest;
static struct kvc_pool *pool;

static void start(void)
{
	ipc_start(&kvmd, NULL);
	honest = ipc_connect(&kvmd);
	pool = ipc_pool(honest);
	raw_open(&raw, &kvmd);
}

static void expect_honest_works(void)
{
	struct kv_grant pages[64];

	KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_PREFILL, pages), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 64), 0);
}

static void stop(void)
{
	expect_honest_works();
	kvc_close(honest);
	ipc_stop(&kvmd);
}

static u32 nr_active(void)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s.nr_active;
}

/* The session must end: a message that says why may come, then end of file. */
static void expect_session_ends(void)
{
	int type;

	while ((type = raw_recv(&raw, 5000)) > 0)
		for (u32 i = 0; i < raw.nr_fds; i++)
			close(raw.fds[i]);
	KVT_EXPECT_EQ(type, 0);
	/* P8: no step of it may start any more */
	KVT_EXPECT_EQ(kv_load_acquire64(&raw.session->table_epoch.word), 0);
}

/* ------------------------------------------------------------------------- entries */

static void expect_result(struct kv_sqe sqe, int result)
{
	struct kv_cqe cqe = raw_call(&raw, sqe);

	if (cqe.result != result)
		KVT_FAIL("opcode %u answered %d, expected %d", sqe.opcode, cqe.result,
			 result);
}

KVT_TEST(bad_entries_are_refused_one_by_one)
{
	struct kv_sqe alloc, sqe;

	start();
	alloc = raw_sqe(&raw, KV_OP_ALLOC);
	alloc.nr = 4;
	alloc.ret_bytes = 4 * sizeof(struct kv_grant);
	sqe = alloc;
	sqe.opcode = KV_OP_NR;
	expect_result(sqe, -EOPNOTSUPP);
	sqe.opcode = 255;
	expect_result(sqe, -EOPNOTSUPP);
	sqe = alloc;
	sqe.flags = 0x80;
	expect_result(sqe, -EINVAL);
	for (u32 i = 0; i < 5; i++) {
		sqe = alloc;
		sqe.reserved[i] = 1;
		expect_result(sqe, -EINVAL);
	}
	sqe = alloc;
	sqe.gfp = KV_GFP_VALID + 1;
	expect_result(sqe, -EINVAL);
	sqe = alloc;
	sqe.nr = 0;
	expect_result(sqe, -EINVAL);
	sqe.nr = KV_BATCH_MAX + 1;
	expect_result(sqe, -EINVAL);
	sqe = alloc;
	sqe.pool_id = 77;
	expect_result(sqe, -ENOENT);
	sqe = alloc;
	sqe.magazine = 1; /* without its flag */
	expect_result(sqe, -EINVAL);
	sqe.flags = KV_SQE_MAGAZINE;
	sqe.magazine = KV_MAGAZINES;
	expect_result(sqe, -EINVAL);
	sqe = alloc;
	sqe.arg_bytes = 4; /* ALLOC has no input */
	expect_result(sqe, -EINVAL);
	KVT_EXPECT_EQ(nr_active(), 0); /* I10: nothing happened */
	expect_result(alloc, 0);
	KVT_EXPECT_EQ(nr_active(), 4);
	raw_close(&raw);
	stop();
}

KVT_TEST(argument_ranges_stay_in_the_area)
{
	const u32 bytes = 4 * sizeof(struct kv_grant);
	struct kv_sqe alloc, release, sqe;

	start();
	alloc = raw_sqe(&raw, KV_OP_ALLOC);
	alloc.nr = 4;
	alloc.ret_bytes = bytes;
	sqe = alloc;
	sqe.ret_off = KV_ARG_BYTES - bytes + 1;
	expect_result(sqe, -EFAULT);
	sqe.ret_off = ~0u - 3;
	expect_result(sqe, -EFAULT);
	sqe.ret_off = KV_ARG_BYTES + 4096;
	expect_result(sqe, -EFAULT);
	sqe = alloc;
	sqe.ret_bytes = bytes - 1;
	expect_result(sqe, -ENOSPC);
	sqe.ret_bytes = ~0u;
	expect_result(sqe, -EFAULT);
	release = raw_sqe(&raw, KV_OP_FREE);
	release.nr = 4;
	release.arg_bytes = bytes;
	sqe = release;
	sqe.arg_off = KV_ARG_BYTES - bytes + 8;
	expect_result(sqe, -EFAULT);
	sqe.arg_off = ~0u;
	expect_result(sqe, -EFAULT);
	sqe = release;
	sqe.nr = 5; /* five pages in the bytes of four */
	expect_result(sqe, -EINVAL);
	KVT_EXPECT_EQ(nr_active(), 0);
	sqe = alloc;
	sqe.ret_off = KV_ARG_BYTES - bytes; /* the last place that fits */
	expect_result(sqe, 0);
	raw_close(&raw);
	stop();
}

KVT_TEST(pages_of_others_cannot_be_named)
{
	struct kv_page_ref *refs;
	struct kv_grant mine;
	struct kv_sqe sqe;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &mine), 0);
	refs = raw_arg(&raw, 0);
	static const u8 ops[] = {KV_OP_FREE, KV_OP_UNPIN, KV_OP_PIN, KV_OP_FORK};
	for (u32 i = 0; i < KV_ARRAY_SIZE(ops); i++) {
		sqe = raw_sqe(&raw, ops[i]);
		refs[0] = (struct kv_page_ref){.pfn = mine.pfn, .tag = mine.tag};
		sqe.nr = 1;
		sqe.arg_bytes = sizeof(*refs);
		sqe.ret_off = 4096;
		sqe.ret_bytes = ops[i] == KV_OP_FORK ? sizeof(struct kv_grant) : 0;
		expect_result(sqe, KV_STALE);
		refs[0].pfn = 1u << 30; /* out of range: the same, or refused */
		KVT_EXPECT(raw_call(&raw, sqe).result != 0);
		refs[0] = (struct kv_page_ref){
			.pfn = mine.pfn, .reserved = 1, .tag = mine.tag};
		KVT_EXPECT(raw_call(&raw, sqe).result != 0);
	}
	KVT_EXPECT_EQ(kvc_free(pool, &mine, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(honest), 0); /* it was still ours */
	raw_close(&raw);
	stop();
}

KVT_TEST(double_free_in_one_batch_frees_once)
{
	struct kv_page_ref *refs;
	struct kv_grant *grant;
	struct kv_sqe sqe;
	struct kv_cqe cqe;

	start();
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 1;
	sqe.ret_bytes = sizeof(*grant);
	expect_result(sqe, 0);
	grant = raw_arg(&raw, 0);
	refs = raw_arg(&raw, 4096);
	for (u32 i = 0; i < 3; i++)
		refs[i] = (struct kv_page_ref){.pfn = grant->pfn, .tag = grant->tag};
	sqe = raw_sqe(&raw, KV_OP_FREE);
	sqe.nr = 3;
	sqe.arg_off = 4096;
	sqe.arg_bytes = 3 * sizeof(*refs);
	cqe = raw_call(&raw, sqe);
	KVT_EXPECT_EQ(cqe.result, KV_STALE);
	KVT_EXPECT_EQ(cqe.nr, 1);
	KVT_EXPECT_EQ(cqe.a, 1); /* the first stale one */
	KVT_EXPECT_EQ(nr_active(), 0);
	raw_close(&raw);
	stop();
}

/* A monitor may look, and nothing else. */
KVT_TEST(monitor_gets_no_pages)
{
	struct kv_msg_hello hello = raw_hello_msg();

	ipc_start(&kvmd, NULL);
	honest = ipc_connect(&kvmd);
	pool = ipc_pool(honest);
	hello.role = KV_ROLE_MONITOR;
	raw.sock = raw_connect(&kvmd);
	raw_send(&raw, &hello, sizeof(hello), NULL, 0);
	KVT_EXPECT_EQ(raw_recv(&raw, 5000), KV_MSG_HELLO_REPLY);
	KVT_EXPECT_EQ(raw.in.hello.result, 0);
	close(raw.sock);
	stop();
}

/* -------------------------------------------------------------------- ring indexes */

KVT_TEST(tail_beyond_the_ring_ends_the_session)
{
	start();
	kv_store_release32(&raw.ring->sq_tail, raw.sq_tail + raw.ring->sq_depth + 1);
	raw_kick(&raw);
	expect_session_ends();
	raw_close(&raw);
	stop();
}

KVT_TEST(tail_that_goes_back_ends_the_session)
{
	start();
	expect_result(raw_sqe(&raw, KV_OP_NOP), 0);
	kv_store_release32(&raw.ring->sq_tail, 0xffffff00u);
	raw_kick(&raw);
	expect_session_ends();
	raw_close(&raw);
	stop();
}

KVT_TEST(completion_head_beyond_the_ring_ends_the_session)
{
	start();
	kv_store_release32(&raw.ring->cq_head, 12345);
	raw_push(&raw, raw_sqe(&raw, KV_OP_NOP));
	raw_kick(&raw);
	expect_session_ends();
	raw_close(&raw);
	stop();
}

/* A client that takes no completions stops its own ring, and it goes on when it does. */
KVT_TEST(full_completion_ring_stops_only_its_client)
{
	u32 depth;

	start();
	depth = raw.ring->cq_depth;
	for (u32 i = 0; i < depth + 8; i++) {
		expect_within(i - kv_load_acquire32(&raw.ring->sq_head) <
				      raw.ring->sq_depth,
			      2000);
		raw_push(&raw, raw_sqe(&raw, KV_OP_NOP));
	}
	expect_within(kv_load_acquire32(&raw.ring->cq_tail) == depth, 2000);
	expect_honest_works();
	KVT_EXPECT_EQ(kv_load_acquire32(&raw.ring->cq_tail), depth);
	for (u32 i = 0; i < depth + 8; i++) {
		struct kv_cqe cqe;

		raw_kick(&raw);
		KVT_EXPECT_EQ(raw_pop(&raw, &cqe, 5000), 0);
		KVT_EXPECT_EQ(cqe.user_data, 0x1000 + i);
	}
	raw_close(&raw);
	stop();
}

/* kvmd keeps its own copy of the geometry: writing into the header changes nothing. */
KVT_TEST(header_written_by_the_client_is_not_believed)
{
	struct kv_sqe sqe;
	u64 epoch;

	start();
	epoch = raw.ring->table_epoch;
	raw.ring->sq_depth = 1u << 31;
	raw.ring->cq_off = 0x7fffffff;
	raw.ring->arg_bytes = ~0u;
	raw.ring->client_id = 1;
	raw.ring->table_epoch = 0;
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 1;
	sqe.ret_off = KV_ARG_BYTES;
	sqe.ret_bytes = sizeof(struct kv_grant);
	raw.ring->sq_depth = KV_RING_DEPTH; /* our own helper needs them */
	raw.ring->cq_off = 4096 + KV_RING_DEPTH * 64;
	raw.ring->table_epoch = epoch;
	expect_result(sqe, -EFAULT);
	raw_close(&raw);
	stop();
}

/* --------------------------------------------------------------------------- cases */

/* cases O56: attached to yesterday's ring (vllm 54259) */
KVT_TEST(o56_entry_with_another_nonce_ends_the_session)
{
	struct kv_sqe sqe;

	start();
	sqe = raw_sqe(&raw, KV_OP_ALLOC);
	sqe.nr = 8;
	sqe.ret_bytes = 8 * sizeof(struct kv_grant);
	sqe.ring_nonce ^= 1;
	raw_push(&raw, sqe);
	raw_kick(&raw);
	expect_session_ends();
	KVT_EXPECT_EQ(nr_active(), 0); /* the entry had no effect */
	raw_close(&raw);
	stop();
}

/* The old ring's memory stays mapped and written by a thread that forgot to end. */
KVT_TEST(o56_yesterdays_ring_has_no_effect)
{
	struct ipc_raw zombie;
	struct kv_sqe sqe;

	start();
	zombie = raw;
	close(raw.sock);
	raw_open(&raw, &kvmd);
	KVT_EXPECT(raw.ring->nonce != zombie.ring->nonce ||
		   raw.client_id != zombie.client_id);
	KVT_EXPECT(raw.client_id != zombie.client_id);
	for (u32 i = 0; i < 20; i++) {
		sqe = raw_sqe(&zombie, KV_OP_ALLOC);
		sqe.nr = 8;
		sqe.ret_bytes = 8 * sizeof(struct kv_grant);
		raw_push(&zombie, sqe);
		raw_kick(&zombie);
		expect_result(raw_sqe(&raw, KV_OP_NOP), 0);
	}
	KVT_EXPECT_EQ(nr_active(), 0);
	close(zombie.sq_efd);
	close(zombie.cq_efd);
	raw_close(&raw);
	stop();
}

/* cases O57: a fresh ring holds no completion, whatever its memory held before */
KVT_TEST(o57_fresh_ring_has_no_completion)
{
	struct kv_cqe cqe;

	start();
	KVT_EXPECT_EQ(raw.ring->cq_tail, 0);
	KVT_EXPECT_EQ(raw_pop(&raw, &cqe, 50), -1);
	raw_close(&raw);
	stop();
}

/* cases O14, shortened from 10^5: grants that nobody reads (pytorch 149187) */
KVT_TEST(o14_replies_that_nobody_reads_leave_nothing)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct kv_msg_pool_open open_msg = {.msg = {.magic = KV_MSG_MAGIC,
						    .type = KV_MSG_POOL_OPEN,
						    .size_bytes = sizeof(open_msg),
						    .sequence = 2},
					    .layout = ipc_layout()};
	u32 before;

	start();
	raw_close(&raw);
	expect_honest_works();
	usleep(50000);
	before = ipc_nr_fds(kvmd.pid);
	for (u32 i = 0; i < 1000; i++) {
		struct ipc_raw r = {.sock = raw_connect(&kvmd)};

		raw_send(&r, &hello, sizeof(hello), NULL, 0);
		raw_send(&r, &open_msg, sizeof(open_msg), NULL, 0);
		close(r.sock);
	}
	expect_within(ipc_nr_fds(kvmd.pid) <= before, 5000);
	stop();
}

/* cases O58: no fds left (dbus-broker 435). Shortage refuses peers, it does not kill
 * kvmd. */
KVT_TEST(o58_descriptor_shortage_refuses_peers_only)
{
	struct kv_msg_hello hello = raw_hello_msg();
	struct rlimit low, old;
	struct kvc_options opt = {.size_bytes = sizeof(opt), .timeout_ms = 300};
	struct kvc *c;
	int fds[3], socks[50];
	u32 before;

	start();
	raw_close(&raw);
	expect_honest_works(); /* its extents exist from here on */
	usleep(50000);
	before = ipc_nr_fds(kvmd.pid);
	opt.socket_path = kvmd.socket_path;
	KVT_EXPECT_EQ(prlimit(kvmd.pid, RLIMIT_NOFILE, NULL, &old), 0);
	low = (struct rlimit){.rlim_cur = before + 2, .rlim_max = old.rlim_max};
	KVT_EXPECT_EQ(prlimit(kvmd.pid, RLIMIT_NOFILE, &low, NULL), 0);
	for (u32 i = 0; i < 3; i++)
		fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	hello.msg.magic = 1; /* a bad header, with descriptors */
	hello.msg.nr_fds = 3;
	for (u32 i = 0; i < 50; i++) {
		struct ipc_raw r = {.sock = raw_connect(&kvmd)};

		raw_send(&r, &hello, sizeof(hello), fds, 3);
		socks[i] = r.sock;
	}
	KVT_EXPECT(kvc_open(&opt, &c) < 0); /* no room for a session */
	expect_honest_works();
	for (u32 i = 0; i < 50; i++)
		close(socks[i]);
	KVT_EXPECT_EQ(prlimit(kvmd.pid, RLIMIT_NOFILE, &old, NULL), 0);
	usleep(300000);
	opt.timeout_ms = 5000;
	KVT_EXPECT_EQ(kvc_open(&opt, &c), 0);
	kvc_close(c);
	for (u32 i = 0; i < 3; i++)
		close(fds[i]);
	expect_within(ipc_nr_fds(kvmd.pid) <= before, 5000);
	stop();
}

/* Descriptors that came with a message nobody asked for are closed, the peer is dropped.
 */
KVT_TEST(surplus_descriptors_are_closed)
{
	struct kv_msg_hello hello = raw_hello_msg();
	u32 before;
	int fds[3];

	start();
	raw_close(&raw);
	usleep(50000);
	before = ipc_nr_fds(kvmd.pid);
	for (u32 i = 0; i < 3; i++)
		fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	for (u32 i = 0; i < 100; i++) {
		struct ipc_raw r = {.sock = raw_connect(&kvmd)};
		int type;

		raw_send(&r, &hello, sizeof(hello), fds, 3);
		while ((type = raw_recv(&r, 5000)) > 0)
			KVT_EXPECT_EQ(type, KV_MSG_ERROR);
		KVT_EXPECT_EQ(type, 0);
		close(r.sock);
	}
	expect_within(ipc_nr_fds(kvmd.pid) <= before, 2000);
	stop();
}

/* ----------------------------------------------------------------------------- O55 */

#define O55_ROUNDS 20000

/*
 * cases O55: a flag visible before its data (vllm 29389). Each request's bytes say what
 * its answer must be; with index and entry in the wrong order some would be answered from
 * the place's previous content. (x86 keeps stores in order; on ARM this is where it would
 * show.)
 */
KVT_TEST(o55_entries_are_complete_when_they_are_seen)
{
	u32 in_flight = 0, sent = 0, got = 0;

	start();
	while (got < O55_ROUNDS) {
		struct kv_cqe cqe;

		while (sent < O55_ROUNDS && in_flight < raw.ring->sq_depth) {
			struct kv_sqe sqe = raw_sqe(&raw, KV_OP_NOP);

			sqe.user_data = ((u64)sent << 32) | (sent * 2654435761u);
			if (sent % 3 == 0)
				sqe.reserved[4] = 1; /* the last word of the entry */
			raw_push(&raw, sqe);
			sent++;
			in_flight++;
		}
		KVT_EXPECT_EQ(raw_pop(&raw, &cqe, 5000), 0);
		KVT_EXPECT_EQ(cqe.user_data, ((u64)got << 32) | (got * 2654435761u));
		KVT_EXPECT_EQ(cqe.result, got % 3 == 0 ? -EINVAL : 0);
		got++;
		in_flight--;
	}
	raw_close(&raw);
	stop();
}

KVT_MAIN()
