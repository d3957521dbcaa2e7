/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client that writes anything into its ring, at any time: also between two loads of one
 * entry. The input is a list of acts; where kvmd loads a word of an entry, a hook counts
 * the load and may change what lies there.
 */
#include "tests/fuzz/fuzz.h"
#include "kvmd/ipc/ring.h"

#define DEPTH 8u
#define NONCE 0x1234567u

static struct kvd_ring ring;
static struct fuzz_in schedule;
static u32 loads[sizeof(struct kv_sqe) / sizeof(u64)];

#ifdef KV_FUZZ
/* Called by kvmd after it loaded a word of an entry. */
void kv_fuzz_loaded(const volatile void *addr)
{
	u64 off = (u64)((const volatile u8 *)addr - (const volatile u8 *)ring.sq);
	u8 mutation = fuzz_u8(&schedule);

	FUZZ_CHECK(off < DEPTH * sizeof(struct kv_sqe));
	loads[off % sizeof(struct kv_sqe) / sizeof(u64)]++;
	/* any word of the entry, this one too, changes right behind the load */
	if (mutation)
		((volatile u8 *)
			 ring.sq)[off / sizeof(struct kv_sqe) * sizeof(struct kv_sqe) +
				  mutation % sizeof(struct kv_sqe)] ^= mutation;
}
#endif

static void fetch(void)
{
	struct kv_sqe sqe;
	u32 before = ring.sq_head, used = ring.cq_published - ring.hdr->cq_head;
	int r;

	memset(loads, 0, sizeof(loads));
	r = kvd_ring_fetch(&ring, &sqe);
	FUZZ_CHECK(r == 0 || r == 1 || (r < 0 && ring.fault != KVD_RING_OK));
	FUZZ_CHECK(ring.sq_head == before + (r == 1));
	for (u32 i = 0; i < KV_ARRAY_SIZE(loads); i++)
		FUZZ_CHECK(loads[i] <= 1);
	if (r != 1)
		return;
	/* what was checked is what is acted on */
	FUZZ_CHECK(sqe.ring_nonce == NONCE);
	/* every parked entry has its place in the CQ */
	FUZZ_CHECK(used + (ring.cq_tail - ring.cq_published) + ring.nr_parked <=
		   ring.cq_depth);
}

static void args(struct fuzz_in *in)
{
	static u8 copy[1 << 16];
	u32 off = fuzz_u32(in), bytes = fuzz_u32(in);
	int r;

	if (bytes > sizeof(copy))
		return;
	r = kvd_ring_args(&ring, off, bytes, copy);
	FUZZ_CHECK(r == ((u64)off + bytes > ring.arg_bytes ? -14 /* EFAULT */ : 0));
	if (!kvd_ring_room(&ring, off, bytes, bytes))
		kvd_ring_results(&ring, off, copy, bytes);
}

static void act(struct fuzz_in *in)
{
	switch (fuzz_u8(in) % 9) {
	case 0:
		ring.hdr->sq_tail += fuzz_u8(in) % (DEPTH + 1);
		break;
	case 1:
		ring.hdr->sq_tail = fuzz_u32(in);
		break;
	case 2:
		ring.hdr->cq_head = fuzz_u32(in);
		break;
	case 3: {
		struct kv_sqe *sqe = &ring.sq[fuzz_u8(in) % DEPTH];

		fuzz_take(in, sqe, sizeof(*sqe));
		sqe->ring_nonce = fuzz_u8(in) ? NONCE : fuzz_u32(in);
		break;
	}
	case 4:
		fetch();
		break;
	case 5:
		if (ring.nr_parked)
			kvd_ring_complete(&ring, 1, 0, 0, 0);
		break;
	case 6:
		kvd_ring_publish(&ring);
		FUZZ_CHECK(ring.cq_tail - ring.cq_published == 0);
		break;
	case 7:
		ring.hdr->cq_head = ring.cq_published;
		break;
	default:
		args(in);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};

	if (kvd_ring_create(&ring, 1, 1, DEPTH, NONCE))
		return 0;
	for (u32 i = 0; i < DEPTH; i++)
		ring.sq[i].ring_nonce = NONCE;
	schedule = (struct fuzz_in){data + bytes / 2, bytes - bytes / 2};
	while (in.left)
		act(&in);
	kvd_ring_destroy(&ring);
	return 0;
}
