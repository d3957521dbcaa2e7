/* SPDX-License-Identifier: Apache-2.0 */
/* Requests at their ends: parked ones beyond what may be parked, cancelled ones, results
 * without room, reports that somebody watches. */
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "kvmd/ipc/request.h"
#include "kvmd/ipc/ring.h"
#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define PAGES "{\"op\":\"pages\"}"

static struct daemon d;

static void with_one_extent(struct kvd_options *opt)
{
	opt->host_bytes = 2u << 20;
}

static u32 fill(struct raw *c, struct kv_grant *g, u32 max)
{
	u32 nr = 0;

	while (nr < max && raw_alloc(c, 1, KV_GFP_NOWAIT, &g[nr]) == 0)
		nr++;
	return nr;
}

/* Everything is in use, and eight pages wait for a step. */
static u32 choke(struct raw *c, struct kv_grant *g, u32 max)
{
	u32 nr;

	raw_open(c, &d);
	nr = fill(c, g, max);
	KVT_EXPECT(nr > 9);
	c->page->slots[0].word = 1;
	KVT_EXPECT_EQ(raw_free(c, g, 8), 0);
	return nr;
}

static struct kv_sqe waiting(const struct raw *c, u32 opcode, u64 id)
{
	struct kv_sqe s = {.opcode = (u8)opcode,
			   .pool_id = c->pool.pool_id,
			   .nr = 1,
			   .gfp = KV_GFP_PREFILL,
			   .ret_bytes = sizeof(struct kv_grant),
			   .ret_off = 8192 + (u32)id * 64,
			   .user_data = id};

	if (opcode == KV_OP_FORK) {
		s.arg_off = 4096;
		s.arg_bytes = sizeof(struct kv_page_ref);
	}
	return s;
}

/* One session parks a few; the next is told at once. ALLOC and FORK alike. */
KVT_TEST(parked_requests_are_few)
{
	static const u32 ops[] = {KV_OP_ALLOC, KV_OP_FORK};

	for (u32 i = 0; i < KV_ARRAY_SIZE(ops); i++) {
		struct kv_page_ref ref;
		struct kv_grant g[256];
		struct kv_cqe cqe;
		struct raw c;

		daemon_start(&d, with_one_extent);
		choke(&c, g, 256);
		ref = (struct kv_page_ref){.pfn = g[9].pfn, .tag = g[9].tag};
		memcpy(c.args + 4096, &ref, sizeof(ref));
		for (u32 n = 0; n <= KVD_PARKED_EACH; n++)
			raw_submit(&c, waiting(&c, ops[i], n));
		cqe = raw_wait(&c); /* the one too many is the first that is answered */
		KVT_EXPECT_EQ(cqe.user_data, KVD_PARKED_EACH);
		KVT_EXPECT_EQ(cqe.result, KV_PENDING);
		kv_store_release64(&c.page->slots[0].word, KV_SLOT_IDLE);
		for (u32 n = 0; n < KVD_PARKED_EACH; n++)
			KVT_EXPECT_EQ(raw_wait(&c).result, 0);
		/* and those that nothing frees a page for are told in the end */
		raw_submit(&c, waiting(&c, ops[i], 77));
		KVT_EXPECT(raw_wait(&c).result != 0);
		raw_close(&c);
		daemon_stop(&d);
	}
}

/* All sessions together park so many, too. */
KVT_TEST(parked_requests_of_all_are_bounded)
{
	enum { CLIENTS = KVD_PARKED_MAX / KVD_PARKED_EACH + 1 };
	static struct raw c[CLIENTS];
	struct kv_grant g[256];
	struct kv_cqe cqe;

	daemon_start(&d, with_one_extent);
	choke(&c[0], g, 256);
	for (u32 i = 1; i < CLIENTS; i++)
		raw_open(&c[i], &d);
	for (u32 i = 0; i < CLIENTS - 1; i++)
		for (u32 n = 0; n < KVD_PARKED_EACH; n++)
			raw_submit(&c[i], waiting(&c[i], KV_OP_ALLOC, n));
	usleep(50000);
	raw_submit(&c[CLIENTS - 1], waiting(&c[CLIENTS - 1], KV_OP_ALLOC, 5));
	cqe = raw_wait(&c[CLIENTS - 1]);
	KVT_EXPECT_EQ(cqe.result, KV_PENDING);
	KVT_EXPECT(raw_wait(&c[1]).result > 0); /* after its second */
	/* closed with its requests parked; another one hangs up */
	for (u32 i = 0; i < CLIENTS; i++)
		raw_close(&c[i]);
	daemon_stop(&d);
}

KVT_TEST(closed_pool_answers_what_was_parked)
{
	struct kv_msg_pool_close m = {.msg = {.magic = KV_MSG_MAGIC,
					      .type = KV_MSG_POOL_CLOSE,
					      .size_bytes = sizeof(m)}};
	struct kv_grant g[256];
	struct raw c, other;

	daemon_start(&d, with_one_extent);
	choke(&c, g, 256);
	raw_open(&other, &d);
	for (u32 n = 0; n < 3; n++) {
		raw_submit(&c, waiting(&c, KV_OP_ALLOC, n));
		raw_submit(&other, waiting(&other, KV_OP_ALLOC, n));
	}
	usleep(50000);
	m.pool_id = other.pool.pool_id;
	raw_send(&other, &m, sizeof(m));
	for (u32 n = 0; n < 3; n++)
		KVT_EXPECT_EQ(raw_wait(&other).result, -ECANCELED);
	kv_store_release64(&c.page->slots[0].word, KV_SLOT_IDLE);
	for (u32 n = 0; n < 3; n++)
		KVT_EXPECT_EQ(raw_wait(&c).result, 0);
	raw_close(&other);
	raw_close(&c);
	daemon_stop(&d);
}

KVT_TEST(lookup_needs_room_for_what_it_may_find)
{
	struct kv_sqe s = {.opcode = KV_OP_LOOKUP};
	struct raw c;
	int r;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	s.pool_id = c.pool.pool_id;
	memset(c.args, 0, 4096);
	for (u32 nr = 0; nr <= 128; nr += 32) {
		s.nr = nr;
		s.arg_bytes = (u32)sizeof(struct kv_lookup_arg) + nr * 4;
		s.ret_bytes = 0;
		raw_submit(&c, s);
		r = raw_wait(&c).result;
		KVT_EXPECT(nr >= KV_PAGE_TOKENS ? r == -ENOSPC : r >= 0);
	}
	s.ret_bytes = 64;
	s.ret_off = 8192;
	raw_submit(&c, s);
	KVT_EXPECT(raw_wait(&c).result >= 0);
	raw_close(&c);
	daemon_stop(&d);
}

/* ------------------------------------------------------- requests of several turns */

#define LONG_RUN 1200u /* pages: 75 slices, about a millisecond */

static void with_room(struct kvd_options *opt)
{
	opt->host_bytes = 512u << 20;
}

/* LONG_RUN pages, and a SEAL of them as one run that nobody has waited for yet. */
static void long_seal(struct raw *c, u64 id)
{
	static struct kv_grant g[LONG_RUN];
	struct kv_seal_arg *arg = (struct kv_seal_arg *)c->args;
	struct kv_seal_page *pages = (struct kv_seal_page *)(arg + 1);
	u32 *tokens = (u32 *)(pages + LONG_RUN);
	struct kv_sqe s = {.opcode = KV_OP_SEAL,
			   .pool_id = c->pool.pool_id,
			   .nr = LONG_RUN,
			   .ret_off = 1u << 20,
			   .ret_bytes = LONG_RUN * sizeof(struct kv_seal_ret),
			   .user_data = id};

	if (raw_alloc(c, LONG_RUN, KV_GFP_PREFILL, g))
		KVT_FAIL("%u pages were not to be had", LONG_RUN);
	memset(arg, 0, sizeof(*arg));
	arg->flags = KV_SEAL_ROOT;
	for (u32 i = 0; i < LONG_RUN; i++)
		pages[i] = (struct kv_seal_page){.pfn = g[i].pfn, .tag = g[i].tag};
	for (u32 i = 0; i < LONG_RUN * KV_PAGE_TOKENS; i++)
		tokens[i] = i;
	s.arg_bytes = (u32)((u8 *)(tokens + LONG_RUN * KV_PAGE_TOKENS) - c->args);
	raw_submit(c, s);
}

/* How many pages of that run are found. */
static u32 long_lookup(struct raw *c)
{
	struct kv_lookup_arg *arg = (struct kv_lookup_arg *)c->args;
	u32 *tokens = (u32 *)(arg + 1);
	struct kv_sqe s = {.opcode = KV_OP_LOOKUP,
			   .pool_id = c->pool.pool_id,
			   .nr = LONG_RUN * KV_PAGE_TOKENS,
			   .arg_bytes = (u32)(sizeof(*arg) +
					      LONG_RUN * KV_PAGE_TOKENS * sizeof(u32)),
			   .ret_off = 1u << 20,
			   .ret_bytes = LONG_RUN * sizeof(struct kv_hit)};
	struct kv_cqe cqe;

	memset(arg, 0, sizeof(*arg));
	for (u32 i = 0; i < LONG_RUN * KV_PAGE_TOKENS; i++)
		tokens[i] = i;
	raw_submit(c, s);
	cqe = raw_wait(c);
	KVT_EXPECT(cqe.result == 0 || cqe.result == KV_MISS);
	return cqe.result ? 0 : cqe.nr;
}

/* Others are served between its slices, and all of it is sealed, in order. */
KVT_TEST(a_long_run_is_sealed_over_several_turns)
{
	struct kv_grant one;
	struct raw c, other;

	daemon_start(&d, with_room);
	raw_open(&c, &d);
	raw_open(&other, &d);
	long_seal(&c, 5);
	for (u32 i = 0; i < 4; i++)
		KVT_EXPECT_EQ(raw_alloc(&other, 1, KV_GFP_PREFILL, &one), 0);
	KVT_EXPECT_EQ(raw_wait(&c).result, 0);
	KVT_EXPECT_EQ(long_lookup(&c), LONG_RUN);
	raw_close(&other);
	raw_close(&c);
	daemon_stop(&d);
}

/* Extents that came with the pages. */
static void events_read(struct raw *c)
{
	struct pollfd p = {.fd = c->fd, .events = POLLIN};
	static u8 buf[4096];

	while (poll(&p, 1, 20) == 1 && raw_receive(c, buf, sizeof(buf)) > 0)
		for (int i = 0; i < c->nr_fds; i++)
			close(c->fds[i]);
}

/* Closing one pool cancels nothing that runs in another, whenever it comes. */
KVT_TEST(closed_pool_cancels_only_its_own)
{
	struct kv_msg_pool_close m = {.msg = {.magic = KV_MSG_MAGIC,
					      .type = KV_MSG_POOL_CLOSE,
					      .size_bytes = sizeof(m)}};
	struct kv_layout layout;
	struct raw c;
	u32 first;

	daemon_start(&d, with_room);
	raw_open(&c, &d);
	first = c.pool.pool_id;
	for (u32 i = 0; i < 4; i++) {
		events_read(&c);
		raw_layout(&layout);
		layout.lora_id = 9;
		KVT_EXPECT_EQ(raw_pool_open(&c, &layout), 0);
		m.pool_id = c.pool.pool_id;
		KVT_EXPECT(m.pool_id != first);
		c.pool.pool_id = first;
		long_seal(&c, 5);
		usleep(i * 200);
		raw_send(&c, &m, sizeof(m));
		KVT_EXPECT_EQ(raw_wait(&c).result, 0);
	}
	KVT_EXPECT_EQ(long_lookup(&c), LONG_RUN);
	raw_close(&c);
	daemon_stop(&d);
}

/* Who goes while its run is hashed leaves nothing that could be found, and holds nothing. */
KVT_TEST(a_session_ends_while_it_seals)
{
	struct raw c, other;

	daemon_start(&d, with_room);
	raw_open(&other, &d);
	for (u32 i = 0; i < 8; i++) {
		raw_open(&c, &d);
		long_seal(&c, 5);
		usleep(i * 100);
		shutdown(c.fd, SHUT_RDWR);
		raw_close(&c);
		daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 1, 2000);
	}
	/* whole or not at all: a run that was over in time may be there */
	KVT_EXPECT(long_lookup(&other) % LONG_RUN == 0);
	raw_close(&other);
	daemon_stop(&d);
}

/* A report reaches who streams events. */
KVT_TEST(report_is_an_event)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct kv_sqe s = {.opcode = KV_OP_REPORT, .nr = 1};
	struct kv_incident incident = {.pfn = 0, .step = 5};
	char text[65536];
	size_t used = 0;
	struct kv_grant g;
	struct raw c;
	ssize_t n;
	int fd;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(raw_alloc(&c, 1, KV_GFP_NOWAIT, &g), 0);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	strcpy(addr.sun_path, d.admin_path);
	KVT_EXPECT(!connect(fd, (struct sockaddr *)&addr, sizeof(addr)));
	KVT_EXPECT_EQ(write(fd, "{\"op\":\"events\"}\n", 16), 16);
	KVT_EXPECT(read(fd, text, sizeof(text)) > 0);
	incident.pfn = g.pfn;
	s.pool_id = c.pool.pool_id;
	s.arg_bytes = sizeof(incident);
	memcpy(c.args, &incident, sizeof(incident));
	raw_submit(&c, s);
	KVT_EXPECT_EQ(raw_wait(&c).result, 0);
	do {
		n = read(fd, text + used, sizeof(text) - 1 - used);
		used += n > 0 ? (size_t)n : 0;
		text[used] = 0;
	} while (n > 0 && !strstr(text, "incident"));
	KVT_EXPECT(n > 0);
	close(fd);
	raw_close(&c);
	daemon_stop(&d);
}

KVT_TEST(faults_have_names_and_nothing_ends_twice)
{
	struct kvd_requests none;

	for (u32 i = 0; i < 32; i++)
		KVT_EXPECT(kvd_ring_fault_str((enum kvd_ring_fault)i)[0]);
	memset(&none, 0, sizeof(none));
	kvd_requests_fini(&none);
	KVT_EXPECT_EQ(kvd_requests_init(&none), 0);
	kvd_requests_fini(&none);
	kvd_requests_fini(&none);
}

KVT_MAIN()
