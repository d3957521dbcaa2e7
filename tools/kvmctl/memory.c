/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c - the verbs that show memory as the kernel's files and vmstat(8) do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvmctl/kvmctl.h"

/* ------------------------------------------------------------------ meminfo */

static const struct {
	const char *field, *name;
} meminfo_rows[] = {
	{"total_bytes", "MemTotal"},	     {"unused_bytes", "MemFree"},
	{"available_bytes", "MemAvailable"}, {"promised_bytes", "Promised"},
	{"extent_bytes", "Extents"},	     {"draining_bytes", "Draining"},
	{"padding_bytes", "Padding"},	     {"free_bytes", "Free"},
	{"magazine_bytes", "Magazine"},	     {"active_bytes", "Active"},
	{"sealed_bytes", "Sealed"},	     {"cached_bytes", "Cached"},
	{"quarantine_bytes", "Quarantine"},  {"spilling_bytes", "Spilling"},
	{"restoring_bytes", "Restoring"},    {"poisoned_bytes", "Poisoned"},
};

static int meminfo_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *m = cJSON_GetObjectItemCaseSensitive(reply, "memory");
	char size[32];
	size_t i;

	for (i = 0; i < KV_ARRAY_SIZE(meminfo_rows); i++)
		printf("%-14s%12s\n", meminfo_rows[i].name,
		       ctl_size(ctl, ctl_num(m, meminfo_rows[i].field), size,
				sizeof(size)));
	return CTL_OK;
}

int ctl_meminfo(struct ctl *ctl)
{
	return ctl_show(ctl, ctl_request("meminfo"), "meminfo", meminfo_text);
}

/* ----------------------------------------------------------------- slabinfo */

static const struct ctl_column slab_columns[] = {
	{"pool", "POOL", CTL_COUNT, false},
	{"domain", "DOMAIN", CTL_TEXT, false},
	{"active_pages", "IN USE", CTL_COUNT, false},
	{"pages", "PAGES", CTL_COUNT, false},
	{"page_bytes", "PAGE", CTL_SIZE, false},
	{"pages_per_extent", "PER EXTENT", CTL_COUNT, false},
	{"extents", "EXTENTS", CTL_COUNT, false},
	{"full", "FULL", CTL_COUNT, false},
	{"partial", "PARTIAL", CTL_COUNT, false},
	{"empty", "EMPTY", CTL_COUNT, false},
	{"spread", "SPREAD", CTL_RATIO, false},
	{"low_pages", "LOW", CTL_COUNT, true},
	{"high_pages", "HIGH", CTL_COUNT, true},
	{"extent_bytes", "EXTENT", CTL_SIZE, true},
	{NULL, NULL, CTL_TEXT, false},
};

static int slab_text(struct ctl *ctl, const cJSON *reply)
{
	return ctl_list(ctl, cJSON_GetObjectItemCaseSensitive(reply, "pools"),
			slab_columns);
}

int ctl_slabinfo(struct ctl *ctl)
{
	return ctl_show(ctl, ctl_request("slabinfo"), "slabinfo", slab_text);
}

/* ------------------------------------------------------------------- vmstat */

/* The first row is since kvmd started, as vmstat(8) has it; each further one is what
 * changed since the row before. Levels are always as they are now. */
static const struct {
	const char *title, *field;
	bool counter;
} vmstat_columns[] = {
	{"wait", "stalled", false},
	{"steps", "steps", false},
	{"free", "free", false},
	{"mag", "magazine", false},
	{"active", "active", false},
	{"sealed", "sealed", false},
	{"cached", "cached", false},
	{"quar", "quarantine", false},
	{"alloc", "allocs", true},
	{"freed", "frees", true},
	{"seal", "seals", true},
	{"look", "lookups", true},
	{"hit", "hits", true},
	{"evict", "evictions", true},
	{"quota", "quota_refusals", true},
	{"full", "full_refusals", true},
};

#define VMSTAT_HEAD_EVERY 20u

static int vmstat_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *v = cJSON_GetObjectItemCaseSensitive(reply, "vmstat");
	const cJSON *last = cJSON_GetObjectItemCaseSensitive(ctl->last, "vmstat");
	size_t i;

	if (ctl->round % VMSTAT_HEAD_EVERY == 0 && !ctl->args.noheader) {
		for (i = 0; i < KV_ARRAY_SIZE(vmstat_columns); i++)
			printf("%s%8s", i ? " " : "", vmstat_columns[i].title);
		printf("\n");
	}
	for (i = 0; i < KV_ARRAY_SIZE(vmstat_columns); i++) {
		double now = ctl_num(v, vmstat_columns[i].field);

		if (last && vmstat_columns[i].counter)
			now -= ctl_num(last, vmstat_columns[i].field);
		printf("%s%8.0f", i ? " " : "", now);
	}
	printf("\n");
	return CTL_OK;
}

int ctl_vmstat(struct ctl *ctl)
{
	cJSON *reply = NULL;
	int r = ctl_ask(ctl, ctl_request("vmstat"), &reply);

	if (r)
		return r;
	r = ctl->args.json ? ctl_json(ctl, reply, "vmstat") : vmstat_text(ctl, reply);
	cJSON_Delete(ctl->last);
	ctl->last = reply;
	return r;
}

/* ----------------------------------------------------------------- pressure */

static void pressure_row(const cJSON *t, const char *kind)
{
	const cJSON *one = cJSON_GetObjectItemCaseSensitive(t, kind);

	printf("%-16s %-5s %8.2f %8.2f %8.2f %14.0f\n", ctl_str(t, "name"), kind,
	       ctl_num(one, "avg10_ppm") / 1e4, ctl_num(one, "avg60_ppm") / 1e4,
	       ctl_num(one, "avg300_ppm") / 1e4, ctl_num(one, "total_us"));
}

static int pressure_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(reply, "tenants"), *t;

	if (!ctl->args.noheader && !ctl->args.quiet)
		printf("%-16s %-5s %8s %8s %8s %14s\n", "TENANT", "KIND", "AVG10 %",
		       "AVG60 %", "AVG300 %", "TOTAL US");
	cJSON_ArrayForEach(t, list)
	{
		if (ctl->args.quiet) {
			printf("%s\n", ctl_str(t, "name"));
			continue;
		}
		pressure_row(t, "some");
		pressure_row(t, "full");
	}
	return CTL_OK;
}

int ctl_pressure(struct ctl *ctl)
{
	return ctl_show(ctl, ctl_request("pressure"), "pressure", pressure_text);
}

/* ------------------------------------------------------------------ pagemap */

static const struct {
	const char *state;
	char letter;
} letters[] = {
	{"free", '.'},	   {"magazine", 'm'},	{"active", 'A'},   {"sealed", 'S'},
	{"cached", 'c'},   {"quarantine", 'q'}, {"spilling", '>'}, {"restoring", '<'},
	{"poisoned", 'X'}, {"absent", ' '},
};

#define MAP_WIDTH 64u
#define MAP_LINES 48u

/* Of several pages behind one letter the one that says most is shown: the further down
 * in this order, the more it weighs. */
static u32 weight(char letter)
{
	const char *p = strchr(" .cqmSA<>X", letter);

	return p ? (u32)(p - " .cqmSA<>X") : 0;
}

static char letter_of(const char *state)
{
	size_t i;

	for (i = 0; i < KV_ARRAY_SIZE(letters); i++)
		if (!strcmp(letters[i].state, state))
			return letters[i].letter;
	return '?';
}

/* Pages that one letter stands for: a power of two, so that a line begins an extent. */
static u32 map_scale(u32 nr_pages)
{
	u32 scale = 1;

	while (nr_pages / scale > MAP_WIDTH * MAP_LINES)
		scale *= 2;
	return scale;
}

/* The pages up to the last one that is there. */
static u32 map_end(const cJSON *runs)
{
	u32 pfn = 0, end = 0;
	const cJSON *run;

	cJSON_ArrayForEach(run, runs)
	{
		pfn += (u32)ctl_num(run, "pages");
		if (strcmp(ctl_str(run, "state"), "absent"))
			end = pfn;
	}
	return end;
}

static void map_fill(const cJSON *runs, char *map, u32 nr, u32 scale)
{
	const cJSON *run;
	u32 pfn = 0;

	memset(map, ' ', nr);
	cJSON_ArrayForEach(run, runs)
	{
		u32 pages = (u32)ctl_num(run, "pages"), i;
		char letter = letter_of(ctl_str(run, "state"));

		for (i = pfn / scale; pages && i <= (pfn + pages - 1) / scale && i < nr;
		     i++)
			if (weight(letter) > weight(map[i]))
				map[i] = letter;
		pfn += pages;
	}
}

static int pagemap_text(struct ctl *ctl, const cJSON *reply)
{
	const cJSON *runs = cJSON_GetObjectItemCaseSensitive(reply, "runs");
	u32 end = map_end(runs), scale = map_scale(end), nr, i;
	char map[MAP_WIDTH * (MAP_LINES + 1)];

	nr = kv_div_round_up(end, scale);
	map_fill(runs, map, nr, scale);
	printf("pool %.0f: %u of %.0f pages are there, %u page(s) a letter\n",
	       ctl_num(reply, "pool"), end, ctl_num(reply, "nr_pages"), scale);
	for (i = 0; i < nr; i += MAP_WIDTH)
		printf("%10u |%-*.*s|\n", i * scale, (int)MAP_WIDTH,
		       (int)KV_MIN(MAP_WIDTH, nr - i), map + i);
	printf("  . free  m magazine  A active  S sealed  c cached  q quarantine\n"
	       "  > spilling  < restoring  X poisoned  blank: no memory\n");
	if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "more")))
		printf("(cut after %d runs)\n", cJSON_GetArraySize(runs));
	return CTL_OK;
}

int ctl_pagemap(struct ctl *ctl)
{
	cJSON *request = ctl_request("pagemap");

	ctl_filter(ctl, request);
	return ctl_show(ctl, request, "pagemap", pagemap_text);
}
