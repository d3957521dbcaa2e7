/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second kvmd behind one connection: sessions that are taken up, or are not, and what is
 * still under way of the first one.
 */
#include "libkvclient/internal.h"
#include "tests/unit/client/common.h"

#include <dirent.h>
#include <sys/socket.h>

static struct fake f;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(void)
{
	fake_start(&f);
	c = fake_connect(&f, 10000);
	pool = fake_pool(&f, c);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&f);
}

/* The next kvmd: with the session, or without. */
static void next_kvmd(bool resume)
{
	shutdown(f.sock, SHUT_RDWR);
	expect_within(f.sock < 0, 5000);
	f.resume = resume;
	f.table_epoch++;
}

static bool mapped(u32 extent)
{
	return kvc_page_addr(pool, extent << FAKE_SHIFT) != NULL;
}

static u64 session_of(struct kvc *conn)
{
	struct kvc_info info;

	kvc_info(conn, &info);
	return info.session;
}

/* ------------------------------------------------------------------------- extents */

/*
 * In a new session an extent comes where a step of the old one still reads, so it is not
 * mapped yet; then kvmd wants it back. That is no reason to lose the session.
 */
KVT_TEST(extent_that_waits_for_an_old_step_can_be_removed)
{
	struct kvc_step *step;
	struct kv_stat st;

	start();
	fake_extent_add(&f, 0);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	next_kvmd(false);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 2);
	fake_extent_add(&f, 0);
	fake_extent_remove(&f, 0);
	KVT_EXPECT(kvc_dispatch(c, NULL, NULL) >= 0);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 2);
	KVT_EXPECT(mapped(0)); /* the step's */
	KVT_EXPECT_EQ(f.unmapped, 0);
	kvc_step_retire(step);
	KVT_EXPECT(!mapped(0));
	expect_within(f.unmapped == 1, 5000);
	fake_extent_add(&f, 0); /* acknowledged: the index may come again */
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT(mapped(0));
	stop();
}

/*
 * kvmd added an extent and wanted it back, and both messages went down with it. The next
 * one only asks for it back, each time that we attach.
 */
KVT_TEST(extent_never_seen_can_be_removed_by_the_next_kvmd)
{
	struct kv_stat st;

	start();
	next_kvmd(true);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 1);
	f.extent_serial[5] = 77;
	fake_extent_remove(&f, 5);
	KVT_EXPECT(kvc_dispatch(c, NULL, NULL) >= 0);
	expect_within(f.unmapped == 1, 5000);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 1);
	stop();
}

/* Of one that was never given, in a session that nobody took up, nothing is believed. */
KVT_TEST(extent_never_given_cannot_be_removed)
{
	start();
	f.extent_serial[5] = 77;
	fake_extent_remove(&f, 5);
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), -ECONNRESET);
	stop();
}

static u64 alloc_waits;
static u32 alloc_ret_off;

static bool withhold_alloc(struct fake *fake, const struct kv_sqe *sqe,
			   struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_ALLOC)
		return fake_serve(fake, sqe, cqe);
	alloc_ret_off = sqe->ret_off;
	__atomic_store_n(&alloc_waits, sqe->user_data, __ATOMIC_RELEASE);
	return false;
}

static void *alloc_two(void *ret_pages)
{
	return (void *)(intptr_t)kvc_alloc(pool, 2, KV_GFP_NOWAIT, ret_pages);
}

/*
 * An allocation has its answer; before it has read of the new extent its pages lie in,
 * another thread finds kvmd gone and gives the connection up.
 */
static int alloc_over_a_restart(bool resume, struct kv_grant *ret_pages)
{
	struct kv_grant *grants;
	pthread_t thread;
	u32 head;
	void *ret;

	f.serve = withhold_alloc;
	fake_start(&f);
	c = fake_connect(&f, 10000);
	pool = fake_pool(&f, c);
	KVT_EXPECT(!pthread_create(&thread, NULL, alloc_two, ret_pages));
	expect_within(__atomic_load_n(&alloc_waits, __ATOMIC_ACQUIRE), 5000);
	pthread_mutex_lock(&c->lock);
	grants = fake_arg(&f, alloc_ret_off);
	for (u32 i = 0; i < 2; i++) {
		grants[i] =
			(struct kv_grant){.pfn = 32 + i, .tag = fake_give(&f, 32 + i)};
		f.leases[i] =
			(struct kv_lease){.pfn = 32 + i, .refs = 1, .tag = grants[i].tag};
	}
	f.nr_leases = 2;
	f.extent_serial[2] = ++f.next_serial; /* and nobody is told */
	head = f.ring->cq_head;
	fake_post(&f, (struct kv_cqe){.user_data = alloc_waits, .nr = 2});
	expect_within(kv_load_acquire32(&f.ring->cq_head) != head, 5000);
	next_kvmd(resume);
	kvc_link_dead_locked(c->link, -ECONNRESET); /* as kvc_attach_again() does */
	pthread_mutex_unlock(&c->lock);
	KVT_EXPECT(!pthread_join(thread, &ret));
	return (int)(intptr_t)ret;
}

KVT_TEST(answer_of_a_kvmd_that_went_is_good_with_the_next)
{
	struct kv_grant g[2];

	KVT_EXPECT_EQ(alloc_over_a_restart(true, g), 0);
	KVT_EXPECT_EQ(g[0].pfn, 32);
	KVT_EXPECT(mapped(2));
	KVT_EXPECT_EQ(session_of(c), 1);
	stop();
}

KVT_TEST(answer_that_went_with_its_session_is_none)
{
	struct kv_grant g[2];

	KVT_EXPECT_EQ(alloc_over_a_restart(false, g), -ETIMEDOUT);
	KVT_EXPECT_EQ(session_of(c), 2);
	stop();
}

/* -------------------------------------------------------------------------- events */

static u32 nr_epochs, kept;

static void on_event(void *arg, const struct kvc_event *event)
{
	if (event->type != KV_MSG_EPOCH)
		return;
	nr_epochs++;
	kept = event->nr;
}

/* A kvmd without the session comes and goes before the pool is open, the one after it takes
 * up what that one had begun: all leases are gone, whatever the last one says. */
KVT_TEST(session_lost_half_way_is_told_as_lost)
{
	struct kv_grant g[4];
	struct kv_stat st;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, g), 0);
	f.hang_up_pools = 1;
	next_kvmd(false);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT(f.resume && !f.hang_up_pools);
	KVT_EXPECT_EQ(session_of(c), 2);
	KVT_EXPECT(kvc_dispatch(c, on_event, NULL) > 0);
	KVT_EXPECT_EQ(nr_epochs, 1);
	KVT_EXPECT_EQ(kept, 0);
	next_kvmd(true);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT(kvc_dispatch(c, on_event, NULL) > 0);
	KVT_EXPECT_EQ(nr_epochs, 2);
	KVT_EXPECT_EQ(kept, 1);
	KVT_EXPECT_EQ(session_of(c), 2);
	stop();
}

/* --------------------------------------------------------------------------- pools */

/*
 * kvmd was started anew with extents of another size: the pool is lost, its addresses are
 * those of before. What comes of its extents must not end the connection, which has others.
 */
KVT_TEST(pool_of_another_geometry_is_given_up)
{
	struct kv_stat st;

	start();
	f.half_extents = true;
	next_kvmd(false);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), -ESHUTDOWN);
	expect_within(__atomic_load_n(&f.pools_closed, __ATOMIC_ACQUIRE) == 1, 5000);
	fake_extent_add(&f, 0);			       /* sent before it was read */
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), 1); /* EPOCH */
	KVT_EXPECT_EQ(kvc_stat(pool, &st), -ESHUTDOWN);
	KVT_EXPECT_EQ(session_of(c), 2);
	kvc_pool_close(pool);
	pool = fake_pool(&f, c);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	kvc_pool_close(pool);
	expect_within(__atomic_load_n(&f.pools_closed, __ATOMIC_ACQUIRE) == 2, 5000);
	stop();
}

static u32 nr_sockets(void)
{
	char path[300], target[64];
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *d;
	u32 nr = 0;

	while (dir && (d = readdir(dir))) {
		ssize_t n;

		snprintf(path, sizeof(path), "/proc/self/fd/%s", d->d_name);
		n = readlink(path, target, sizeof(target) - 1);
		target[n > 0 ? n : 0] = 0;
		nr += !strncmp(target, "socket:", 7);
	}
	closedir(dir);
	return nr;
}

/* kvmd answers HELLO and dies at each POOL_OPEN: what each try opened is closed again. */
KVT_TEST(tries_that_fail_half_way_leave_no_descriptors)
{
	struct kv_stat st;
	u32 before;

	fake_start(&f);
	c = fake_connect(&f, 300);
	pool = fake_pool(&f, c);
	before = nr_sockets();
	__atomic_store_n(&f.hang_up_pools, 100000, __ATOMIC_RELEASE);
	next_kvmd(false);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), -ETIMEDOUT);
	KVT_NOTE("%u tries", 100000 - f.hang_up_pools);
	KVT_EXPECT(nr_sockets() <= before + 2);
	__atomic_store_n(&f.hang_up_pools, 0, __ATOMIC_RELEASE);
	expect_within(!kvc_stat(pool, &st), 100);
	stop();
}

/* -------------------------------------------------------------------------- ledger */

/*
 * Page 7 is held as its second generation. Something late of its first one is entered: a pop
 * that a recall has beaten, or an answer whose thread was held up until the page had been
 * revoked and given anew. The page must not seem to be nobody's: the next kvmd would be told
 * to free it.
 */
static void late_entry_of_page_7(void (*enter)(u64 older))
{
	struct kv_grant g[8];
	struct kv_stat st;
	u64 older;

	start();
	older = kv_tag_make(50, KV_TAG_LIVE);
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 8; i++)
		f.leases[i] =
			(struct kv_lease){.pfn = g[i].pfn, .refs = 1, .tag = g[i].tag};
	f.nr_leases = 8;
	enter(older);
	next_kvmd(true);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(session_of(c), 1);
	KVT_EXPECT_EQ(f.pages_freed, 0);
	KVT_EXPECT_EQ(kvc_free(pool, g, 8), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(f.pages_freed, 8);
	stop();
}

static void beaten_pop(u64 older)
{
	kvc_hold(pool, 7, older);
	kvc_unhold(pool, 7, older);
}

static void late_answer(u64 older)
{
	struct kv_grant g = {.pfn = 7, .tag = older};

	kvc_ledger_answered(&(struct kvc_req){
		.opcode = KV_OP_ALLOC, .pool = pool, .nr = 1, .ret = &g});
}

KVT_TEST(beaten_pop_does_not_hide_who_holds_the_page)
{
	late_entry_of_page_7(beaten_pop);
}

KVT_TEST(late_answer_does_not_hide_who_holds_the_page)
{
	late_entry_of_page_7(late_answer);
}

/* The ledger's generations are 48 bits: one that comes after the last is newer. */
KVT_TEST(ledger_generations_wrap)
{
	u64 last = kv_tag_make((1ull << 48) - 1, KV_TAG_LIVE), next;

	start();
	next = kv_tag_make(1ull << 48, KV_TAG_LIVE);
	kvc_hold(pool, 7, last);
	kvc_hold(pool, 7, next);
	KVT_EXPECT_EQ(pool->ledger[7], 1); /* generation 0, one reference */
	kvc_hold(pool, 7, last);
	KVT_EXPECT_EQ(pool->ledger[7], 1);
	KVT_EXPECT_EQ(pool->ledger_tags[7], next);
	kvc_unhold(pool, 7, next);
	stop();
}

/* ----------------------------------------------------------------------- magazines */

/*
 * A thread that empties the magazines of its pool was held up while the session was taken
 * up and one of them became another pool's: it looks at the old link still. The pages there
 * are not its pool's.
 */
KVT_TEST(drain_takes_no_page_of_another_pool)
{
	struct kv_grant g, stock[KV_MAGAZINE_SLOTS];
	struct kvc_link *old;
	struct kv_stat st;
	u32 i = 0;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0); /* the refill has come */
	old = c->link;
	while (i < KV_MAGAZINES && old->mags[i].pool_serial != pool->serial)
		i++;
	KVT_EXPECT(i < KV_MAGAZINES);
	next_kvmd(true);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT(old != c->link && old->mags[i].pool_serial == pool->serial);
	/* what mag_rededicate() and kvmd do */
	c->link->mags[i].pool_serial = pool->serial + 1;
	kv_store_relaxed32(&f.session->magazines[i].pool_id, 4);
	KVT_EXPECT(f.session->magazines[i].slots[0].word |
		   f.session->magazines[i].slots[1].word);
	KVT_EXPECT_EQ(kvc_mag_drain(pool, old, stock, KV_MAGAZINE_SLOTS), 0);
	kv_store_relaxed32(&f.session->magazines[i].pool_id, pool->pool_id);
	KVT_EXPECT(kvc_mag_drain(pool, old, stock, KV_MAGAZINE_SLOTS) > 0);
	stop();
}

static u64 refill_waits;
static u32 refill_magazine;

static bool withhold_refill(struct fake *fake, const struct kv_sqe *sqe,
			    struct kv_cqe *cqe)
{
	if (sqe->opcode != KV_OP_ALLOC || !(sqe->flags & KV_SQE_MAGAZINE))
		return fake_serve(fake, sqe, cqe);
	refill_magazine = sqe->magazine;
	__atomic_store_n(&refill_waits, sqe->user_data, __ATOMIC_RELEASE);
	return false;
}

/*
 * A pool closes while its magazine is being refilled; kvmd brings the pages, and dies before
 * it says so or hears of the close. They are not the next pool's, whose magazine that becomes.
 */
KVT_TEST(stock_of_a_pool_that_closed_is_not_the_next_ones)
{
	const u32 stale = 900;
	struct kv_mag_slot *slot;
	struct kv_grant g;

	f.serve = withhold_refill;
	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0);
	expect_within(__atomic_load_n(&refill_waits, __ATOMIC_ACQUIRE), 5000);
	kvc_pool_close(pool);
	slot = &f.session->magazines[refill_magazine].slots[0];
	slot->tag = fake_give(&f, stale);
	kv_store_release64(&slot->word, KV_MAG_STOCKED | stale);
	next_kvmd(true);
	pool = fake_pool(&f, c);
	for (u32 i = 0; i < 2 * KV_MAGAZINES; i++) {
		KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &g), 0);
		KVT_EXPECT(g.pfn != stale);
	}
	KVT_EXPECT_EQ(slot->word, 0);
	stop();
}

KVT_MAIN()
