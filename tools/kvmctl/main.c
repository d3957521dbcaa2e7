/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - verb table, help, watching. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/kvmctl/kvmctl.h"

static int ctl_help(struct ctl *ctl);

static const struct ctl_verb verbs[] = {
	{"status", NULL, "", "health and totals on one screen (the default)", 0, 0,
	 ctl_status},
	{"ps", "sessions", "", "connected engines: pages, steps in flight", 0, 0, ctl_ps},
	{"pages", NULL, "[--pool ID] [--state S]",
	 "pages by state; with a filter each page", 0, 0, ctl_pages},
	{"page", NULL, "PFN [--pool ID]", "one page: tag, holders, history", 1, 1,
	 ctl_page},
	{"pool", "pools", "[ID]", "pools: layout, extents, hits", 0, 1, ctl_pool},
	{"tenant", "tenants", "[NAME]", "tenants: use and quotas", 0, 1, ctl_tenant},
	{"incidents", "incident", "[ID]", "failed checks with the page's history", 0, 1,
	 ctl_incidents},
	{"audit", NULL, "", "check every page record now; exit 8 on damage", 0, 0,
	 ctl_audit},
	{"evict", NULL, "domain|tenant|pool|page WHICH",
	 "drop cached pages (--dry-run, --yes)", 2, 2, ctl_evict},
	{"pin", NULL, "PFN [--pool ID]",
	 "keep a cached prefix up to this page (--dry-run)", 1, 1, ctl_pin},
	{"unpin", NULL, "PFN [--pool ID]", "let it go again (--dry-run)", 1, 1,
	 ctl_unpin},
	{"drain", NULL, "TENANT [--off]",
	 "no more memory for a tenant, its cache dropped (--dry-run, --yes)", 1, 1,
	 ctl_drain},
	{"limit", NULL,
	 "TENANT [--min S] [--high S] [--max S] [--weight N] [--revision R]",
	 "change a tenant's limits until the next reload (--dry-run)", 1, 1, ctl_limit},
	{"revoke", NULL, "page|session|tenant WHICH",
	 "take pages from those who hold them (--dry-run, --yes)", 2, 2, ctl_revoke},
	{"events", NULL, "", "follow incidents and stalls", 0, 0, ctl_events},
	{"stat", NULL, "", "operations, counters, heap", 0, 0, ctl_stat},
	{"trace", NULL, "[--limit N] [--state PATH]", "the last events inside kvmd", 0, 0,
	 ctl_trace},
	{"meminfo", NULL, "", "memory: what is used, for what, what could be had", 0, 0,
	 ctl_meminfo},
	{"slabinfo", "slabs", "", "pools and their extents: full, partial, empty", 0, 0,
	 ctl_slabinfo},
	{"vmstat", NULL, "[-w SEC]", "pages and events; with -w what changed", 0, 0,
	 ctl_vmstat},
	{"pressure", "psi", "", "share of time that tenants wait for memory", 0, 0,
	 ctl_pressure},
	{"pagemap", NULL, "[--pool ID]", "a pool's pages, one letter each", 0, 0,
	 ctl_pagemap},
	{"tier", "tiers", "", "DRAM and NVMe below the pools: use, budgets, counters", 0,
	 0, ctl_tier},
	{"reload", NULL, "", "read the configuration again (--dry-run)", 0, 0,
	 ctl_reload},
	{"upgrade", NULL, "",
	 "start the installed kvmd in place of the running one (--dry-run)", 0, 0,
	 ctl_upgrade},
	{"plan", NULL, "--model DIR|--preset P --bytes SIZE [--tp N]",
	 "how many tokens of KV fit; needs no daemon", 0, 0, ctl_plan},
	{"doctor", NULL, "", "try out this host: GPU memory, limits; needs no daemon", 0,
	 0, ctl_doctor},
	{"fault", NULL, "[SPEC]", "arm fault points (a kvmd started with --faults)", 0, 1,
	 ctl_fault},
	{"version", NULL, "", "versions", 0, 0, ctl_version},
	{"help", NULL, "[VERB]", "this", 0, 1, ctl_help},
};

static const struct ctl_verb *verb_find(const char *name)
{
	size_t i;

	for (i = 0; i < KV_ARRAY_SIZE(verbs); i++)
		if (!strcmp(verbs[i].name, name) ||
		    (verbs[i].alias && !strcmp(verbs[i].alias, name)))
			return &verbs[i];
	return NULL;
}

static int help_verb(struct ctl *ctl, const char *name)
{
	const struct ctl_verb *v = verb_find(name);

	if (!v)
		return ctl_error(ctl, CTL_USAGE, "\"%s\": unknown verb (see kvmctl help)",
				 name);
	printf("Usage: kvmctl [OPTION]... %s%s%s\n\n  %s\n", v->name,
	       *v->synopsis ? " " : "", v->synopsis, v->text);
	return CTL_OK;
}

static int ctl_help(struct ctl *ctl)
{
	size_t i;

	if (ctl->args.nr_words > 1)
		return help_verb(ctl, ctl->args.words[1]);
	printf("Usage: kvmctl [OPTION]... [VERB [ARGUMENT]...]\n\n");
	for (i = 0; i < KV_ARRAY_SIZE(verbs); i++)
		printf("  %-10s %s%s%s\n", verbs[i].name, verbs[i].synopsis,
		       *verbs[i].synopsis ? "\n             " : "", verbs[i].text);
	printf("\n"
	       "  -j, --json           one JSON document; errors as JSON on stderr\n"
	       "  -p, --pretty         JSON for people\n"
	       "  -q, --quiet          ids only\n"
	       "      --format F       table or csv[,noheader,nounits]\n"
	       "      --fields A,B     these fields\n"
	       "      --bytes          sizes as integers\n"
	       "  -w, --watch SEC      again every SEC seconds\n"
	       "      --limit N        at most N\n"
	       "  -n, --dry-run        say what would be done\n"
	       "  -y, --yes            do it although it is broad\n"
	       "      --socket PATH    admin socket [$KVMD_ADMIN_SOCKET or\n"
	       "                       " KVMD_ADMIN_SOCKET_DEFAULT "]\n"
	       "      --timeout SEC    wait for an answer [5]\n"
	       "\n"
	       "Exit: 0 ok, 1 failed, 2 usage, 3 no daemon, 4 no such object, 5 denied,\n"
	       "      6 refused (quota, busy), 7 warnings, 8 damage, 124 timed out\n");
	return CTL_OK;
}

static int run_once(struct ctl *ctl)
{
	int r = ctl->verb->run(ctl);

	if (fflush(stdout) || ferror(stdout))
		return CTL_FAILED;
	return r;
}

static int run_watch(struct ctl *ctl)
{
	struct timespec ts;
	int r;

	ts.tv_sec = (time_t)ctl->args.watch_s;
	ts.tv_nsec = (long)((ctl->args.watch_s - (double)ts.tv_sec) * 1e9);
	for (;;) {
		/* vmstat adds a row each time, as vmstat(8) does */
		if (isatty(STDOUT_FILENO) && !ctl->args.json &&
		    ctl->verb->run != ctl_vmstat)
			printf("\033[H\033[2J");
		r = run_once(ctl);
		if (r && r != CTL_WARNINGS && r != CTL_DAMAGE)
			return r;
		nanosleep(&ts, NULL);
		ctl->round++;
	}
}

static int check_words(struct ctl *ctl)
{
	u32 nr = ctl->args.nr_words ? ctl->args.nr_words - 1 : 0;

	/* "pool list", "tenant show red": the words add nothing. */
	if (nr &&
	    (!strcmp(ctl->args.words[1], "list") ||
	     !strcmp(ctl->args.words[1], "show")) &&
	    ctl->verb->run != ctl_evict) {
		memmove(&ctl->args.words[1], &ctl->args.words[2],
			(CTL_WORDS_MAX - 2) * sizeof(ctl->args.words[0]));
		ctl->args.nr_words--;
		nr--;
	}
	if (nr < ctl->verb->words_min || nr > ctl->verb->words_max)
		return ctl_error(ctl, CTL_USAGE, "usage: kvmctl %s%s%s", ctl->verb->name,
				 *ctl->verb->synopsis ? " " : "", ctl->verb->synopsis);
	return CTL_OK;
}

int main(int argc, char **argv)
{
	struct ctl ctl = {0};
	int r;

	r = ctl_args_parse(argc, argv, &ctl.args);
	if (r)
		return r;
	if (ctl.args.help)
		ctl.verb = verb_find("help");
	else if (ctl.args.version)
		ctl.verb = verb_find("version");
	else
		ctl.verb = verb_find(ctl.args.nr_words ? ctl.args.words[0] : "status");
	if (!ctl.verb)
		return ctl_error(&ctl, CTL_USAGE,
				 "\"%s\": unknown verb (see kvmctl help)",
				 ctl.args.words[0]);
	if (!ctl.args.help && !ctl.args.version)
		r = check_words(&ctl);
	if (!r)
		r = ctl.args.watch_s > 0 ? run_watch(&ctl) : run_once(&ctl);
	cJSON_Delete(ctl.last);
	free(ctl.args.fields_text);
	return r;
}
