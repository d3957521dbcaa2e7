/* SPDX-License-Identifier: Apache-2.0 */
/* dbg/fault.c - see fault.h. */
#include "kvmd/dbg/fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAULT_TEXT_BYTES 512

bool kvd_fault_active;
u64 kvd_crash_left;

void kvd_crash_now(void)
{
	kill(getpid(), SIGKILL);
}

#define FAULT_ROW(name, benign) {#name, benign},
static const struct {
	const char *name;
	bool benign;
} points[] = {KVD_FAULT_POINTS(FAULT_ROW)};

struct armed {
	bool on;
	struct kvd_fault_spec spec;
	u64 nr_checks;
};

static struct armed armed[KVD_FAULT_NR];
static u64 nth_left, nr_fired;
static u64 seed_state = 1;

static u64 rand_next(void)
{
	u64 z = (seed_state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static void active_update(void)
{
	size_t i;

	kvd_fault_active = nth_left != 0;
	for (i = 0; i < KVD_FAULT_NR; i++)
		kvd_fault_active |= armed[i].on;
}

static bool armed_fires(struct armed *a)
{
	if (!a->on)
		return false;
	a->nr_checks++;
	if (a->spec.space) {
		a->spec.space--;
		return false;
	}
	if (a->spec.interval > 1 && a->nr_checks % a->spec.interval)
		return false;
	if (rand_next() % 1000000 >= a->spec.probability)
		return false;
	if (a->spec.times && --a->spec.times == 0) {
		a->on = false;
		active_update();
	}
	return true;
}

bool kvd_fault_check(enum kvd_fault_point point)
{
	bool fires = armed_fires(&armed[point]);

	if (nth_left && !points[point].benign && --nth_left == 0) {
		active_update();
		fires = true;
	}
	nr_fired += fires;
	return fires;
}

void kvd_fault_arm(enum kvd_fault_point point, const struct kvd_fault_spec *spec)
{
	memset(&armed[point], 0, sizeof(armed[point]));
	if (spec) {
		armed[point].on = true;
		armed[point].spec = *spec;
	}
	active_update();
}

static int parse_key(char *word, struct kvd_fault_spec *spec)
{
	char *eq = strchr(word, '='), *end;
	unsigned long v;

	if (!eq || !eq[1])
		return -EINVAL;
	*eq = 0;
	errno = 0;
	v = strtoul(eq + 1, &end, 10);
	if (*end || errno || v > 0xffffffffu)
		return -EINVAL;
	if (!strcmp(word, "probability") && v <= 1000000)
		spec->probability = (u32)v;
	else if (!strcmp(word, "interval"))
		spec->interval = (u32)v;
	else if (!strcmp(word, "times"))
		spec->times = (u32)v;
	else if (!strcmp(word, "space"))
		spec->space = (u32)v;
	else
		return -EINVAL;
	return 0;
}

/* One "point:key=value,..." */
static int parse_point(char *text, size_t *ret_point, struct kvd_fault_spec *spec,
		       char *error, size_t error_bytes)
{
	char *colon = strchr(text, ':'), *save = NULL, *word;
	size_t i;

	*spec = (struct kvd_fault_spec){.probability = 1000000};
	if (colon)
		*colon = 0;
	for (i = 0; i < KVD_FAULT_NR && strcmp(points[i].name, text); i++)
		;
	if (i == KVD_FAULT_NR) {
		snprintf(error, error_bytes, "faults: unknown point \"%s\"", text);
		return -EINVAL;
	}
	*ret_point = i;
	if (!colon)
		return 0;
	for (word = strtok_r(colon + 1, ",", &save); word;
	     word = strtok_r(NULL, ",", &save)) {
		char copy[64];

		snprintf(copy, sizeof(copy), "%s", word);
		if (parse_key(word, spec)) {
			snprintf(error, error_bytes, "faults: %s: bad setting \"%s\"",
				 text, copy);
			return -EINVAL;
		}
	}
	return 0;
}

int kvd_fault_arm_text(const char *text, char *error, size_t error_bytes)
{
	struct kvd_fault_spec specs[KVD_FAULT_NR];
	bool set[KVD_FAULT_NR] = {false};
	char copy[FAULT_TEXT_BYTES], *save = NULL, *word;
	unsigned long long crash = 0;
	bool crash_set = false;
	size_t i;

	if ((size_t)snprintf(copy, sizeof(copy), "%s", text) >= sizeof(copy)) {
		snprintf(error, error_bytes, "faults: longer than %d bytes",
			 FAULT_TEXT_BYTES - 1);
		return -EINVAL;
	}
	for (word = strtok_r(copy, ";", &save); word; word = strtok_r(NULL, ";", &save)) {
		struct kvd_fault_spec spec;
		int end = 0;

		if (sscanf(word, "crash=%llu%n", &crash, &end) == 1 && !word[end]) {
			crash_set = true;
			continue;
		}
		if (parse_point(word, &i, &spec, error, error_bytes))
			return -EINVAL;
		specs[i] = spec;
		set[i] = true;
	}
	for (i = 0; i < KVD_FAULT_NR; i++)
		if (set[i])
			kvd_fault_arm((enum kvd_fault_point)i, &specs[i]);
	if (crash_set)
		kvd_crash_left = crash;
	return 0;
}

void kvd_fault_fail_nth(u64 nth)
{
	nth_left = nth;
	nr_fired = 0;
	active_update();
}

u64 kvd_fault_fired(void)
{
	return nr_fired;
}

void kvd_fault_seed(u64 seed)
{
	seed_state = seed;
}
