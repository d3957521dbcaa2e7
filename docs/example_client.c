/* SPDX-License-Identifier: Apache-2.0 */
/* A page's life: allocate, write in a checked step, seal, find it again by its tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kvclient.h"

static void must(int r, const char *what) /* 0, -errno, or enum kv_outcome */
{
	if (r && fprintf(stderr, "%s: %d %s\n", what, r, r < 0 ? kvc_strerror(NULL) : ""))
		exit(1);
}

int main(void)
{
	static struct kv_layout layout;		/* zeroed */
	static uint32_t tokens[KV_PAGE_TOKENS]; /* 64 times token 0 */
	uint32_t nr, crc = ~0u;
	struct kvc_pool *pool;
	struct kvc *c;
	layout.format_version = KV_LAYOUT_VERSION;
	layout.kind = KV_LAYOUT_GQA;
	layout.dtype = KV_DTYPE_E4M3;
	layout.scale_kind = KV_SCALE_TOKEN;
	layout.nr_layers = layout.nr_kv_heads = 4;
	layout.page_tokens = layout.head_dim = 64;
	must(kvc_open(NULL, &c), "open"); /* $KVMD_SOCKET */
	must(kvc_pool_open(c, &layout, NULL, NULL, &pool), "pool_open");
	struct kv_grant page;
	must(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), "alloc");
	struct kv_row row = kv_row_make(page.pfn, page.tag, KV_ROW_WRITE, 42, 0);
	struct kvc_check_request request = {&row, 42, 1, KV_PAGE_TOKENS};
	struct kv_verdict verdict;
	struct kvc_step *step;
	must(kvc_step_begin(c, &step), "step_begin"); /* pages stay as they are */
	must(kvc_step_rows(step, pool, &row, 1), "step_rows");
	must(kvc_step_check(step, pool, &request, 1, &verdict), "step_check");
	must(!kv_verdict_ok(verdict, kvc_step_number(step), 1), "verdict");
	uint8_t *bytes = (uint8_t *)kvc_page_addr(pool, page.pfn);
	memset(bytes, 1, kv_page_bytes(&layout)); /* ... the layers write K and V ... */
	for (uint64_t i = 0; i < kv_page_bytes(&layout) * 8; i++) { /* CRC-32C */
		crc ^= i % 8 ? 0 : bytes[i / 8];
		crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
	}
	crc = ~crc;
	kvc_step_retire(step);
	struct kv_seal_ret sealed;
	static struct kvc_seal seal;
	seal.size_bytes = sizeof(seal);
	seal.nr_pages = 1;
	seal.pages = &page;
	seal.crc32c = &crc;
	seal.tokens = tokens;
	seal.ret_seals = &sealed;
	must(kvc_seal(pool, &seal), "seal");
	struct kv_hit hit;
	must(kvc_lookup(pool, tokens, KV_PAGE_TOKENS, 1, &hit, &nr), "lookup");
	printf("%u page found: pfn %u, written as pfn %u\n", nr, hit.grant.pfn, page.pfn);
	kvc_close(c);
}
