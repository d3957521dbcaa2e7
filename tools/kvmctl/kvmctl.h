/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmctl.h - shared by the files of kvmctl.
 *
 * kvmctl knows nothing of the daemon's insides: it sends one JSON line to the admin
 * socket and shows the reply. JSON output is that reply with "schema" in place of "ok".
 */
#ifndef KVMCTL_H
#define KVMCTL_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "base/util.h"
#include "kv/abi.h"

#define CTL_VERSION "0.1.0"

/* Exit codes; scripts depend on them. */
enum ctl_exit {
	CTL_OK = 0,
	CTL_FAILED = 1,
	CTL_USAGE = 2,
	CTL_NO_DAEMON = 3,
	CTL_NO_OBJECT = 4,
	CTL_DENIED = 5,
	CTL_REFUSED = 6,
	CTL_WARNINGS = 7,
	CTL_DAMAGE = 8,
	CTL_TIMEOUT = 124,
};

#define CTL_WORDS_MAX  8
#define CTL_FIELDS_MAX 32

enum ctl_format { CTL_TABLE, CTL_CSV };

/**
 * struct ctl_args - the command line
 * @words: verb and its arguments, [nr_words]
 * @socket: admin socket
 * @timeout_s: most to wait for a reply
 * @watch_s: repeat every so many seconds; 0 = once
 * @json, @pretty, @quiet, @bytes: -j, -p, -q, --bytes
 * @format, @noheader, @nounits: --format
 * @fields: [nr_fields] of --fields; 0 = the usual ones
 * @dry_run, @yes, @revoke, @off: for what changes state
 * @min_size, @high_size, @max_size, @weight, @revision: for limit; NULL, -1 = not given
 * @pool, @limit, @state: filters; @pool and @limit -1 = not given
 * @model, @preset, @kv_bytes, @tp: for plan
 */
struct ctl_args {
	const char *words[CTL_WORDS_MAX];
	u32 nr_words;
	const char *socket;
	double timeout_s;
	double watch_s;
	bool json, pretty, quiet, bytes;
	enum ctl_format format;
	bool noheader, nounits;
	const char *fields[CTL_FIELDS_MAX];
	u32 nr_fields;
	char *fields_text;
	bool dry_run, yes, revoke, off, help, version;
	const char *min_size, *high_size, *max_size;
	long weight, revision;
	long pool, limit;
	const char *state;
	const char *model, *preset, *kv_bytes;
	long tp;
};

/**
 * struct ctl - one run
 * @args, @verb: what to do
 * @round: of --watch, from 0
 * @last: reply of the round before, of verbs that show differences; owned
 */
struct ctl {
	struct ctl_args args;
	const struct ctl_verb *verb;
	u32 round;
	cJSON *last;
};

/**
 * struct ctl_verb - one row of the verb table
 * @name: verb; @alias: another word for it, or NULL
 * @synopsis: arguments
 * @text: one line for help
 * @words_min, @words_max: arguments after the verb
 * @run: Return: enum ctl_exit
 */
struct ctl_verb {
	const char *name;
	const char *alias;
	const char *synopsis;
	const char *text;
	u32 words_min, words_max;
	int (*run)(struct ctl *ctl);
};

/* args.c */

/** ctl_args_parse() - read the command line. Return: 0; CTL_USAGE, said on stderr */
int ctl_args_parse(int argc, char **argv, struct ctl_args *args);

/** ctl_parse_size() - "48.2GB", "4GiB", "123". Return: 0; -1 */
int ctl_parse_size(const char *text, double *ret_bytes);

/** ctl_error() - say an error, as JSON under --json. Return: @exit */
int ctl_error(const struct ctl *ctl, int exit, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* client.c */

/**
 * ctl_ask() - send a request, wait for the reply
 * @request: consumed
 * @ret_reply: a reply with ok = true; the caller frees it
 *
 * Return: CTL_OK, or an exit code after an error was said.
 */
int ctl_ask(struct ctl *ctl, cJSON *request, cJSON **ret_reply);

/** ctl_request() - {"op": @op} */
cJSON *ctl_request(const char *op);

/** ctl_stream() - show every line that comes until the daemon ends. Return: exit code */
int ctl_stream(struct ctl *ctl, cJSON *request,
	       void (*line)(struct ctl *ctl, const char *text));

/* table.c */

enum ctl_kind { CTL_TEXT, CTL_COUNT, CTL_SIZE, CTL_AGE, CTL_STEPS, CTL_LIST, CTL_RATIO };

/**
 * struct ctl_column - a column of a list
 * @field: field of the JSON objects
 * @title: heading
 * @kind: how it is written
 * @more: shown only when --fields asks for it
 */
struct ctl_column {
	const char *field;
	const char *title;
	enum ctl_kind kind;
	bool more;
};

/**
 * ctl_list() - print an array of objects as table, CSV or ids
 * @columns: the first one is the id; ends with a NULL field
 *
 * Return: CTL_OK; CTL_USAGE: --fields names an unknown one.
 */
int ctl_list(struct ctl *ctl, const cJSON *array, const struct ctl_column *columns);

/** ctl_json() - print a reply as the --json document "kvmctl.NAME/1" */
int ctl_json(struct ctl *ctl, cJSON *reply, const char *name);

/** ctl_size() - "96.0 MiB", or the integer under --bytes. Return: @out */
const char *ctl_size(const struct ctl *ctl, double bytes, char *out, size_t room);

/** ctl_health_todo() - what to do about a health reason. Return: a line, never NULL */
const char *ctl_health_todo(const char *code);

/** ctl_age() - "3 ms", "12 s", "5 min", "3 h", "2 d". Return: @out */
const char *ctl_age(double ms, char *out, size_t room);

/** ctl_num(), ctl_str() - a field, or 0 / "-" */
double ctl_num(const cJSON *object, const char *field);
const char *ctl_str(const cJSON *object, const char *field);

/** ctl_show() - ask, then print as JSON or by @text. Return: exit code */
int ctl_show(struct ctl *ctl, cJSON *request, const char *name,
	     int (*text)(struct ctl *ctl, const cJSON *reply));

/** ctl_filter() - --pool, --limit and --state into a request */
void ctl_filter(struct ctl *ctl, cJSON *request);

/** ctl_tier_lines() - tiers in `status`; nothing where there are none */
void ctl_tier_lines(struct ctl *ctl, const cJSON *tiers);

#define CTL_TAKES_POOL	 0x1u
#define CTL_TAKES_REVOKE 0x2u
#define CTL_TAKES_OFF	 0x4u
#define CTL_TAKES_LIMITS 0x8u

/**
 * ctl_takes() - refuse options that a verb which changes something would pass over: it would
 * do more, or other things, than was said
 * @takes: CTL_TAKES_*
 *
 * Return: CTL_OK; CTL_USAGE, said.
 */
int ctl_takes(struct ctl *ctl, u32 takes);

/* Verbs: show.c, memory.c, tier.c, steer.c, act.c, plan.c, doctor.c */
int ctl_status(struct ctl *ctl);
int ctl_ps(struct ctl *ctl);
int ctl_pages(struct ctl *ctl);
int ctl_page(struct ctl *ctl);
int ctl_pool(struct ctl *ctl);
int ctl_tenant(struct ctl *ctl);
int ctl_incidents(struct ctl *ctl);
int ctl_stat(struct ctl *ctl);
int ctl_trace(struct ctl *ctl);
int ctl_meminfo(struct ctl *ctl);
int ctl_slabinfo(struct ctl *ctl);
int ctl_vmstat(struct ctl *ctl);
int ctl_pressure(struct ctl *ctl);
int ctl_pagemap(struct ctl *ctl);
int ctl_tier(struct ctl *ctl);
int ctl_audit(struct ctl *ctl);
int ctl_evict(struct ctl *ctl);
int ctl_pin(struct ctl *ctl);
int ctl_unpin(struct ctl *ctl);
int ctl_drain(struct ctl *ctl);
int ctl_limit(struct ctl *ctl);
int ctl_revoke(struct ctl *ctl);
int ctl_events(struct ctl *ctl);
int ctl_reload(struct ctl *ctl);
int ctl_upgrade(struct ctl *ctl);
int ctl_fault(struct ctl *ctl);
int ctl_version(struct ctl *ctl);
int ctl_plan(struct ctl *ctl);
int ctl_doctor(struct ctl *ctl);

#endif
