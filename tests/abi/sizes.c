/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ABI's sizes, printed and compared with what version 1 had: the asserts in the
 * headers would follow a change of both sides, this table does not. The bytes of a
 * message, too.
 */
#include "kvclient.h"
#include "tests/kvt.h"

#define ROW(type, bytes)                          \
	{                                         \
#type, sizeof(struct type), bytes \
	}

static const struct {
	const char *name;
	size_t is, was;
} sizes[] = {
	ROW(kv_grant, 16),
	ROW(kv_page_ref, 16),
	ROW(kv_seal_arg, 32),
	ROW(kv_seal_page, 16),
	ROW(kv_seal_ret, 32),
	ROW(kv_lookup_arg, 16),
	ROW(kv_hit, 32),
	ROW(kv_incident, 48),
	ROW(kv_stat, 64),
	ROW(kv_extent_ref, 16),
	ROW(kv_msg, 16),
	ROW(kv_msg_hello, 120),
	ROW(kv_msg_hello_reply, 264),
	ROW(kv_msg_pool_open, 120),
	ROW(kv_msg_pool_reply, 256),
	ROW(kv_legacy_extent, 128),
	ROW(kv_msg_pool_close, 24),
	ROW(kv_msg_extents, 4024),
	ROW(kv_msg_revoke, 24),
	ROW(kv_msg_pressure, 24),
	ROW(kv_msg_epoch, 24),
	ROW(kv_msg_error, 152),
	ROW(kv_layout, 88),
	ROW(kv_geometry, 24),
	ROW(kv_ring_hdr, 448),
	ROW(kv_sqe, 64),
	ROW(kv_cqe, 32),
	ROW(kv_mag_slot, 16),
	ROW(kv_magazine, 1088),
	ROW(kv_session_page, 12800),
	ROW(kv_table, 256),
	ROW(kv_row, 16),
	ROW(kv_verdict, 16),
	ROW(kv_log_entry, 16),
	ROW(kv_step_block, 40),
	ROW(kv_mirror, 16),
};

KVT_TEST(sizes_are_those_of_version_1)
{
	KVT_EXPECT_EQ(KV_ABI_VERSION, 1);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		KVT_NOTE("%-20s %5zu", sizes[i].name, sizes[i].is);
		if (sizes[i].is != sizes[i].was)
			KVT_FAIL("struct %s has %zu bytes, version 1 had %zu",
				 sizes[i].name, sizes[i].is, sizes[i].was);
	}
}

KVT_TEST(numbers_on_the_wire_are_those_of_version_1)
{
	KVT_EXPECT_EQ(KV_OP_ALLOC, 1);
	KVT_EXPECT_EQ(KV_OP_FREE, 2);
	KVT_EXPECT_EQ(KV_OP_SEAL, 3);
	KVT_EXPECT_EQ(KV_OP_LOOKUP, 4);
	KVT_EXPECT_EQ(KV_OP_PIN, 5);
	KVT_EXPECT_EQ(KV_OP_UNPIN, 6);
	KVT_EXPECT_EQ(KV_OP_FORK, 7);
	KVT_EXPECT_EQ(KV_OP_REPORT, 8);
	KVT_EXPECT_EQ(KV_OP_STAT, 9);
	KVT_EXPECT_EQ(KV_OP_UNMAPPED, 10);
	KVT_EXPECT_EQ(KV_OP_PREFETCH, 11);
	KVT_EXPECT_EQ(KV_FULL, 1);
	KVT_EXPECT_EQ(KV_QUOTA, 2);
	KVT_EXPECT_EQ(KV_PENDING, 3);
	KVT_EXPECT_EQ(KV_STALE, 4);
	KVT_EXPECT_EQ(KV_MISS, 5);
	KVT_EXPECT_EQ(KV_BUSY, 6);
	KVT_EXPECT_EQ(KV_REVOKED, 7);
	KVT_EXPECT_STR(kv_outcome_str(KV_STALE), "KV_STALE");
	KVT_EXPECT_STR(kv_outcome_str(99), "KV_?");
}

/* Little endian, no padding: the same bytes in every process of the host. */
KVT_TEST(message_bytes_are_as_documented)
{
	struct kv_msg m = {.magic = KV_MSG_MAGIC,
			   .type = KV_MSG_POOL_CLOSE,
			   .nr_fds = 2,
			   .size_bytes = 24,
			   .sequence = 0x01020304};
	static const uint8_t want[16] = {'K', 'V', 'V', 'M', 5, 0, 2, 0,
					 24,  0,   0,	0,   4, 3, 2, 1};

	KVT_EXPECT_EQ(memcmp(&m, want, sizeof(want)), 0);
}

KVT_MAIN()
