/* SPDX-License-Identifier: Apache-2.0 */
/* tier.c - what lies below the pools: two lines of status, and the verb `tier`. */
#include <stdio.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

static void space_line(struct ctl *ctl, const char *name, const cJSON *o)
{
	char a[32], b[32];

	if (!cJSON_IsObject(o))
		return;
	printf("%-10s %s of %s, %.0f pages", name,
	       ctl_size(ctl, ctl_num(o, "used_bytes"), a, sizeof(a)),
	       ctl_size(ctl, ctl_num(o, "size_bytes"), b, sizeof(b)),
	       ctl_num(o, "pages"));
	if (ctl_num(o, "moving") > 0)
		printf(", %.0f on their way", ctl_num(o, "moving"));
	if (cJSON_HasObjectItem(o, "engine"))
		printf(", %s%s", ctl_str(o, "engine"),
		       cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "direct"))
			       ? ""
			       : ", no O_DIRECT");
	printf("\n");
}

void ctl_tier_lines(struct ctl *ctl, const cJSON *tiers)
{
	const cJSON *c = cJSON_GetObjectItemCaseSensitive(tiers, "counters");

	if (!cJSON_IsObject(tiers))
		return;
	if (!strcmp(ctl_str(tiers, "state"), "filling")) {
		printf("tiers      none yet: the DRAM tier's memory is being allocated\n");
		return;
	}
	space_line(ctl, "DRAM tier", cJSON_GetObjectItemCaseSensitive(tiers, "dram"));
	space_line(ctl, "NVMe tier", cJSON_GetObjectItemCaseSensitive(tiers, "nvme"));
	printf("tiers      %.0f pages stored, %.0f written, %.0f came back, %.0f dropped\n",
	       ctl_num(c, "spills"), ctl_num(c, "writes"), ctl_num(c, "restores"),
	       ctl_num(c, "dropped"));
}

static const struct ctl_column tier_columns[] = {
	{"tenant", "TENANT", CTL_TEXT, false}, {"tier", "TIER", CTL_TEXT, false},
	{"pages", "PAGES", CTL_COUNT, false},  {"used_bytes", "USED", CTL_SIZE, false},
	{"min_bytes", "MIN", CTL_SIZE, false}, {"high_bytes", "HIGH", CTL_SIZE, false},
	{"max_bytes", "MAX", CTL_SIZE, false}, {"weight", "WEIGHT", CTL_COUNT, true},
	{NULL, NULL, CTL_TEXT, false},
};

static void counter_lines(const cJSON *counters)
{
	const cJSON *c;
	u32 nr = 0;

	cJSON_ArrayForEach(c, counters) printf("%s%-17s %-12.0f", nr++ % 3 ? "" : "\n",
					       c->string, ctl_num(counters, c->string));
	printf("\n");
}

static int tier_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *tiers = cJSON_GetObjectItemCaseSensitive(reply, "tiers");
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(reply, "tenants");
	const cJSON *nvme = cJSON_GetObjectItemCaseSensitive(tiers, "nvme");
	bool plain =
		ctl->args.format == CTL_TABLE && !ctl->args.quiet && !ctl->args.nr_fields;

	if (!cJSON_IsObject(tiers)) {
		if (plain)
			printf("no tiers: the configuration has no \"tiers\"\n");
		return CTL_OK;
	}
	if (!plain)
		return ctl_list(ctl, list, tier_columns);
	ctl_tier_lines(ctl, tiers);
	if (!cJSON_HasObjectItem(tiers, "counters"))
		return CTL_OK;
	if (cJSON_IsObject(nvme))
		printf("journal    %.0f records, %.0f errors, %.0f compactions; %s, %.0f "
		       "pages taken up%s%s\n",
		       ctl_num(cJSON_GetObjectItemCaseSensitive(nvme, "journal"),
			       "records"),
		       ctl_num(cJSON_GetObjectItemCaseSensitive(nvme, "journal"),
			       "errors"),
		       ctl_num(cJSON_GetObjectItemCaseSensitive(nvme, "journal"),
			       "compactions"),
		       ctl_str(nvme, "path"), ctl_num(nvme, "adopted"),
		       *ctl_str(nvme, "fault") ? "; " : "", ctl_str(nvme, "fault"));
	counter_lines(cJSON_GetObjectItemCaseSensitive(tiers, "counters"));
	printf("\n");
	return ctl_list(ctl, list, tier_columns);
}

int ctl_tier(struct ctl *ctl)
{
	return ctl_show(ctl, ctl_request("tier"), "tier", tier_text);
}
