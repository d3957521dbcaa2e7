/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shrink.c - delta debugging: leave acts out, half of them first, then fewer, then one;
 * then make arguments small. What is left still fails, and nothing of it can be missed.
 */
#include "tests/sim/world/world.h"

#include <stdlib.h>
#include <string.h>

#define RUNS_MAX 20000u

static u32 runs;
static char kind[40];

/* What broke, without the numbers. */
static void kind_of(char *ret)
{
	u32 n = 0;

	for (const char *p = sim.failure; *p && n < sizeof(kind) - 1; p++)
		if (!strchr("0123456789abcdefx,", *p))
			ret[n++] = *p;
	ret[n] = 0;
}

/* In the same way: or the shortest way to break anything is found, whatever it was. */
static bool fails(const struct sim_schedule *s)
{
	char now[sizeof(kind)];

	runs++;
	if (sim_run(s))
		return false;
	kind_of(now);
	return !strcmp(now, kind);
}

static bool without(struct sim_schedule *s, struct sim_schedule *tmp, u32 at, u32 nr)
{
	*tmp = *s;
	memmove(&tmp->acts[at], &tmp->acts[at + nr],
		(tmp->nr - at - nr) * sizeof(tmp->acts[0]));
	tmp->nr -= nr;
	if (!fails(tmp))
		return false;
	*s = *tmp;
	return true;
}

static bool acts_drop(struct sim_schedule *s, struct sim_schedule *tmp)
{
	bool any = false;

	for (u32 nr = KV_MAX(s->nr / 2, 1u); nr && runs < RUNS_MAX; nr /= 2) {
		for (u32 at = 0; at + nr <= s->nr && runs < RUNS_MAX;) {
			if (without(s, tmp, at, nr))
				any = true;
			else
				at += nr;
		}
	}
	return any;
}

static bool args_lower(struct sim_schedule *s, struct sim_schedule *tmp)
{
	bool any = false;

	for (u32 i = 0; i < s->nr; i++) {
		for (u32 k = 0; k < SIM_ARGS && runs < RUNS_MAX; k++) {
			if (!s->acts[i].a[k])
				continue;
			*tmp = *s;
			tmp->acts[i].a[k] = 0;
			if (!fails(tmp)) {
				tmp->acts[i].a[k] = s->acts[i].a[k] / 2;
				if (!fails(tmp))
					continue;
			}
			*s = *tmp;
			any = true;
		}
	}
	return any;
}

static bool opt_try(struct sim_schedule *s, struct sim_schedule *tmp, u64 *opt, u64 value)
{
	u64 was = *opt;

	if (was == value)
		return false;
	*opt = value;
	*tmp = *s;
	if (fails(tmp))
		return true;
	*opt = was;
	return false;
}

static void opts_lower(struct sim_schedule *s, struct sim_schedule *tmp)
{
	opt_try(s, tmp, &s->o.hostile, 0);
	opt_try(s, tmp, &s->o.tier, 0);
	opt_try(s, tmp, &s->o.gen_left, 0);
	opt_try(s, tmp, &s->o.key_bits, 128);
	for (u64 n = 1; n < s->o.clients; n++)
		if (opt_try(s, tmp, &s->o.clients, n))
			break;
	if (opt_try(s, tmp, &s->o.domains, 1))
		opt_try(s, tmp, &s->o.tenants, 1);
}

u32 sim_shrink(struct sim_schedule *s)
{
	struct sim_schedule *tmp = malloc(sizeof(*tmp));
	bool more = true;

	runs = 0;
	kind_of(kind);
	SIM_EXPECT(tmp);
	for (u32 i = 0; i < 8 && more && runs < RUNS_MAX; i++) {
		more = acts_drop(s, tmp);
		opts_lower(s, tmp);
		more |= args_lower(s, tmp);
	}
	free(tmp);
	s->o.seed = 0;
	fails(s); /* so that sim.failure is of this one */
	return runs;
}
