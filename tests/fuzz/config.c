/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any text as the policy: refused with a line and a field, or every rule holds. An input that
 * begins with a byte above 0x7f is numbers and names for a policy of a right form.
 */
#include <errno.h>

#include "tests/fuzz/fuzz.h"
#include "kvmd/config.h"

static void check_tenant(const struct kvd_config *c, const struct kvd_config_tenant *t)
{
	FUZZ_CHECK(t->domain < c->nr_domains);
	FUZZ_CHECK(t->name[0] && memchr(t->name, 0, sizeof(t->name)));
	FUZZ_CHECK(t->nr_uids <= KVD_CONFIG_IDS_MAX && t->nr_gids <= KVD_CONFIG_IDS_MAX);
	FUZZ_CHECK(t->nr_gpus <= KVD_CONFIG_GPUS_MAX);
	for (u32 i = 0; i < t->nr_gpus; i++) {
		const struct kvd_config_gpu *g = &t->gpus[i];

		FUZZ_CHECK(g->min_bytes <= g->high_bytes &&
			   g->high_bytes <= g->max_bytes);
		FUZZ_CHECK(g->weight >= 1 && g->weight <= 1000);
		FUZZ_CHECK(memchr(g->gpu, 0, sizeof(g->gpu)));
	}
	/* one uid pays for one tenant */
	for (u32 i = 0; i < t->nr_uids; i++)
		FUZZ_CHECK(kvd_config_tenant_of(c, t->uids[i], (gid_t)-2) ==
			   (int)(t - c->tenants));
}

static size_t make_policy(struct fuzz_in *in, char *text, size_t room)
{
	static const char *const gpus[] = {"*", "host", "host", "x"};
	u32 nr = 1 + fuzz_u8(in) % 3, used = 0;

	used += (u32)snprintf(text, room, "{\"tenants\":[");
	for (u32 i = 0; i < nr; i++) {
		u32 uid = fuzz_u8(in) % 4, min = fuzz_u8(in) % 8, high = fuzz_u8(in) % 8;
		u32 max = fuzz_u8(in) % 8, weight = fuzz_u8(in) * 8u;
		u32 name = fuzz_u8(in) % 4, gpu = fuzz_u8(in) % KV_ARRAY_SIZE(gpus);

		used += (u32)snprintf(text + used, room - used,
				      "%s{\"name\":\"t%u\",\"uids\":[%u],\"gpus\":["
				      "{\"gpu\":\"%s\",\"min\":%u,\"high\":%u,\"max\":%u,"
				      "\"weight\":%u}]}",
				      i ? "," : "", name, uid, gpus[gpu], min, high, max,
				      weight);
	}
	used += (u32)snprintf(text + used, room - used, "],\"domains\":[");
	for (u32 i = 0; i < nr; i++)
		used += (u32)snprintf(text + used, room - used,
				      "%s{\"name\":\"d%u\",\"tenants\":[\"t%u\"]}",
				      i ? "," : "", i, fuzz_u8(in) % 4);
	return used + (size_t)snprintf(text + used, room - used, "]}");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in in = {data, bytes};
	static char text[4096];

	static struct kvd_config config, untouched;
	char error[KVD_CONFIG_ERROR_BYTES] = "";
	int r;

	if (bytes && data[0] >= 0x80) {
		bytes = make_policy(&in, text, sizeof(text));
		data = (const uint8_t *)text;
	}
	memset(&config, 0x5a, sizeof(config));
	untouched = config;
	r = kvd_config_parse((const char *)data, bytes, &config, error);
	FUZZ_CHECK(r == 0 || r == -EINVAL || r == -ENOMEM || r == -EFBIG);
	FUZZ_CHECK(memchr(error, 0, sizeof(error)));
	if (r) {
		FUZZ_CHECK(error[0] || r == -ENOMEM);
		FUZZ_CHECK(!memcmp(&config, &untouched, sizeof(config)));
		return 0;
	}
	FUZZ_CHECK(config.nr_tenants <= KVD_CONFIG_TENANTS_MAX);
	FUZZ_CHECK(config.nr_domains <= KVD_CONFIG_DOMAINS_MAX);
	for (u32 i = 0; i < config.nr_tenants; i++)
		check_tenant(&config, &config.tenants[i]);
	return 0;
}
