/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: every bad field is named, fingerprints are typed, look-alikes stay apart. */
#include <sodium.h>
#include "tests/unit/own/common.h"

static struct rig r;
static float scales[KV_SCALES_MAX];

static struct kv_layout gqa(u32 heads, u32 dim, u32 dtype, u32 scale_kind)
{
	struct kv_layout l = {
		.format_version = 1,
		.kind = KV_LAYOUT_GQA,
		.dtype = dtype,
		.scale_kind = scale_kind,
		.page_tokens = 64,
		.nr_layers = 2,
		.nr_kv_heads = heads,
		.head_dim = dim,
	};

	if (scale_kind == KV_SCALE_STATIC)
		l.nr_scales = l.nr_layers * heads * 2;
	for (u32 i = 0; i < l.nr_scales; i++)
		scales[i] = 0.5f;
	return l;
}

#define EXPECT_REFUSED(l, name, text_)                                                \
	do {                                                                          \
		struct kvd_refusal why_ = {0};                                        \
		KVT_EXPECT_EQ(kvd_layout_check(&(l), scales, false, &why_), -EINVAL); \
		KVT_EXPECT_STR(why_.field, name);                                     \
		KVT_EXPECT_HAS(why_.text, text_);                                     \
	} while (0)

KVT_TEST(every_bad_field_is_named)
{
	struct kv_layout good = gqa(2, 64, KV_DTYPE_E4M3, KV_SCALE_STATIC), l;
	struct kv_layout mla = rig_layout(0);
	struct kvd_refusal why;

	KVT_EXPECT_EQ(kvd_layout_check(&good, scales, false, &why), 0);
	KVT_EXPECT_EQ(kvd_layout_check(&mla, NULL, false, &why), 0);
#define BAD(base, f, v, text)                \
	do {                                 \
		l = base;                    \
		l.f = v;                     \
		EXPECT_REFUSED(l, #f, text); \
	} while (0)
	BAD(good, format_version, 2, "format_version=2");
	BAD(good, kind, 0, "kind=0");
	BAD(good, kind, 3, "kind=3");
	BAD(good, dtype, 9, "dtype=9");
	BAD(mla, dtype, KV_DTYPE_F32, "tests only");
	BAD(good, scale_kind, 3, "scale_kind=3");
	BAD(good, scale_kind, KV_SCALE_NONE, "needs scales");
	BAD(mla, scale_kind, KV_SCALE_TOKEN, "no scales");
	BAD(good, page_tokens, 16, "page_tokens=16");
	BAD(good, nr_layers, 0, "nr_layers=0");
	BAD(good, nr_layers, 257, "nr_layers=257");
	BAD(good, nr_kv_heads, 0, "nr_kv_heads=0");
	BAD(good, nr_kv_heads, 129, "nr_kv_heads=129");
	BAD(good, head_dim, 96, "head_dim=96");
	BAD(good, latent_dim, 512, "latent_dim=512");
	BAD(good, rope_dim, 64, "rope_dim=64");
	BAD(mla, nr_kv_heads, 1, "nr_kv_heads=1");
	BAD(mla, head_dim, 64, "head_dim=64");
	BAD(mla, latent_dim, 256, "latent_dim=256");
	BAD(mla, rope_dim, 0, "rope_dim=0");
	BAD(good, plane_order, 1, "plane_order=1");
	BAD(good, nr_scales, 7, "nr_scales=7");
	BAD(mla, nr_scales, 1, "nr_scales=1");
	scales[5] = NAN;
	EXPECT_REFUSED(good, "scales", "scales=5");
	scales[5] = 0;
	EXPECT_REFUSED(good, "scales", "scales=5");
	l = mla;
	l.dtype = KV_DTYPE_F32;
	KVT_EXPECT_EQ(kvd_layout_check(&l, NULL, true, &why), 0);
}

/* The definition in kv/layout.h, written down a second time: bytes first, then the hash.
 */
static u64 fingerprint_by_hand(const struct kv_layout *l, const float *sc)
{
	static u8 buf[KV_SCALES_MAX * 4 + 256];
	const u8 *p = (const u8 *)l;
	u8 hash[16];
	u64 fp = 0;
	u32 n = 0;

	for (u32 i = 0; i < 12; i++) { /* twelve u32 fields */
		memcpy(buf + n, "\4\0\0\0", 4);
		memcpy(buf + n + 4, p + i * 4, 4);
		n += 8;
	}
	memcpy(buf + n, "\10\0\0\0", 4);
	memcpy(buf + n + 4, p + 48, 8);
	n += 12;
	memcpy(buf + n, "\40\0\0\0", 4);
	memcpy(buf + n + 4, p + 56, 32);
	n += 36;
	for (u32 i = 0, bytes = l->nr_scales * 4; i < 4; i++)
		buf[n++] = (u8)(bytes >> (8 * i));
	memcpy(buf + n, sc, l->nr_scales * 4);
	n += l->nr_scales * 4;
	crypto_generichash_blake2b(hash, 16, buf, n, NULL, 0);
	for (u32 i = 0; i < 8; i++)
		fp |= (u64)hash[i] << (8 * i);
	return fp;
}

/* vllm#44701: ("ab","c") and ("a","bc") made one byte string. */
KVT_TEST(o43_two_meanings_one_byte_string)
{
	static u64 seen[3000];
	struct kv_layout l = gqa(2, 64, KV_DTYPE_E4M3, KV_SCALE_STATIC);
	u8 k1[16], k2[16], root[16] = {0};
	u32 tokens[64], nr = 0;

	/* the same twelve bytes, cut in every way between LoRA id and model id */
	for (u32 cut = 0; cut <= 8; cut++) {
		l.lora_id = 0;
		memset(l.model_id, 0, sizeof(l.model_id));
		memcpy(&l.lora_id, "abcdefgh", cut);
		memcpy(l.model_id, &"abcdefghijkl"[cut], 12 - cut);
		seen[nr++] = kvd_layout_fingerprint(&l, scales);
		KVT_EXPECT_EQ(seen[nr - 1], fingerprint_by_hand(&l, scales));
	}
	for (u32 i = 0; i < 2900; i++) {
		u32 *field = (u32 *)&l + kvt_rand_below(11);

		*field ^= 1u << kvt_rand_below(32);
		seen[nr++] = kvd_layout_fingerprint(&l, scales);
		KVT_EXPECT_EQ(seen[nr - 1], fingerprint_by_hand(&l, scales));
	}
	for (u32 i = 0; i < 9; i++) {
		for (u32 j = 0; j < i; j++)
			KVT_EXPECT(seen[i] != seen[j]);
	}
	/* keys: same tokens, another layout, parent or domain secret: another key */
	rig_tokens(1, 0, tokens);
	kvd_prefix_key(seen[0], root, tokens, k1);
	kvd_prefix_key(seen[1], root, tokens, k2);
	KVT_EXPECT(memcmp(k1, k2, 16));
	kvd_prefix_key(seen[0], k1, tokens, k2);
	KVT_EXPECT(memcmp(k1, k2, 16));
	kvd_prefix_root_key((const u8 *)"red.............................", seen[0], k1);
	kvd_prefix_root_key((const u8 *)"blue............................", seen[0], k2);
	KVT_EXPECT(memcmp(k1, k2, 16));
	kvd_prefix_root_key((const u8 *)"red.............................", seen[1], k2);
	KVT_EXPECT(memcmp(k1, k2, 16));
}

/* LMCache#4463: [2, ...] meant "K and V" in one layout, "two heads" in the other. */
KVT_TEST(o49_two_layouts_that_look_the_same)
{
	struct kv_layout one = gqa(1, 128, KV_DTYPE_BF16, KV_SCALE_NONE);
	struct kv_layout two = gqa(2, 64, KV_DTYPE_BF16, KV_SCALE_NONE);
	struct kvd_session *s, *s2;
	struct kvd_attach *a, *b;
	struct kvd_refusal why;
	struct kvd_tenant *t;
	struct kv_hit hits[2];
	u32 nr;

	KVT_EXPECT_EQ(kv_page_stride(&one), kv_page_stride(&two));
	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	s = rig_session(&r, t);
	s2 = rig_session(&r, t);
	a = rig_open(s, &one);
	rig_cache(&r, s, a, 1, 2);
	/* of one model: refused, the field is named */
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &two, NULL, &b, &why), -EINVAL);
	KVT_EXPECT_STR(why.field, "nr_kv_heads");
	KVT_EXPECT_HAS(why.text, "nr_kv_heads=2");
	/* of another model: another pool, and a miss */
	two.model_id[0] = 1;
	b = rig_open(s2, &two);
	KVT_EXPECT(b->pool != a->pool);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), KV_MISS);
	b = rig_open(s2, &one);
	KVT_EXPECT_EQ(rig_lookup(s2, b, 1, 2, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 2);
	rig_fini(&r);
}

/* kvcached#424 (R12): other scales, dtype, stride or page size at attach. */
KVT_TEST(r12_attach_with_another_layout_is_refused)
{
	struct kv_layout have = gqa(2, 64, KV_DTYPE_E4M3, KV_SCALE_STATIC), l = have;
	struct kvd_session *s, *s2;
	struct kvd_refusal why;
	struct kvd_attach *a;
	struct kvd_tenant *t;

	rig_init(&r, 4, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	s = rig_session(&r, t);
	s2 = rig_session(&r, t);
	KVT_EXPECT_EQ(kvd_session_open_pool(s, &have, scales, &a, &why), 0);
	scales[3] = 0.25f;
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &have, scales, &a, &why), -EINVAL);
	KVT_EXPECT_STR(why.field, "scales");
	KVT_EXPECT_HAS(why.text, "scales=3");
	scales[3] = 0.5f;
	l.nr_layers = 3;
	l.nr_scales = 12;
	for (u32 i = 0; i < 12; i++)
		scales[i] = 0.5f;
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &l, scales, &a, &why), -EINVAL);
	KVT_EXPECT_STR(why.field, "nr_layers");
	l = have;
	l.page_tokens = 32;
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &l, scales, &a, &why), -EINVAL);
	KVT_EXPECT_STR(why.field, "page_tokens");
	/* another dtype or scale placement of the model is another cache, not a conflict
	 */
	l = gqa(2, 64, KV_DTYPE_E4M3, KV_SCALE_TOKEN);
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &l, NULL, &a, &why), 0);
	l = gqa(2, 64, KV_DTYPE_BF16, KV_SCALE_NONE);
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &l, NULL, &a, &why), 0);
	KVT_EXPECT_EQ(r.allocs, 0); /* nothing was made for any of it */
	/* once nobody uses the old one, new scales may come */
	kvd_session_work_ended(s);
	rig_run(&r);
	l = gqa(2, 64, KV_DTYPE_E4M3, KV_SCALE_STATIC);
	scales[3] = 0.25f;
	KVT_EXPECT_EQ(kvd_session_open_pool(s2, &l, scales, &a, &why), 0);
	rig_fini(&r);
}

KVT_MAIN()
