/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tests/sim/sim.c - the simulator: schedules drawn from seeds, until one fails.
 *
 *	sim				the cases, as in make check
 *	sim --seeds FROM NR [SECONDS]	NR schedules, or as many as fit
 *	sim --seed N			one of them, with its options and acts
 *	sim --replay FILE		one written as text
 *	sim --shrink N			the fewest acts of seed N that fail, as text
 *	sim --long NR [PROCESSES]	NR schedules on all CPUs: make check-long
 *
 * A failure prints what broke, the seed, and the shortest schedule that still breaks it.
 */
#include "tests/kvt.h"
#include "tests/sim/world/world.h"

#include <dirent.h>

/* Every mutant of tests/mutants.txt that names this program is found in fewer. */
#define LEAST 3000u

static struct sim_schedule schedule;

static double seconds(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void failed(u64 seed, u64 nr)
{
	char why[sizeof(sim.failure) + 64];
	u32 runs;

	printf("# seed %llu, schedule %llu, act %u: %s\n", (unsigned long long)seed,
	       (unsigned long long)nr, sim.act_at, sim.failure);
	runs = sim_shrink(&schedule);
	snprintf(why, sizeof(why), "seed %llu: %s", (unsigned long long)seed,
		 sim.failure);
	printf("# shrunk to %u acts in %u runs: %s\n", schedule.nr, runs, sim.failure);
	sim_write(&schedule, stdout, why);
	fflush(stdout);
}

static void stats_print(u64 nr, double s)
{
	const struct sim_stats *t = &sim.stats;

	printf("# %llu schedules, %llu acts in %.1f s\n", (unsigned long long)nr,
	       (unsigned long long)t->acts, s);
	printf("# kvmd killed %llu times, %llu of them at a store; %llu adoptions, %llu cold "
	       "starts, %llu damages, %llu failed hooks\n",
	       (unsigned long long)(t->kills + t->store_kills),
	       (unsigned long long)t->store_kills, (unsigned long long)t->adoptions,
	       (unsigned long long)t->cold, (unsigned long long)t->damages,
	       (unsigned long long)t->faults);
	printf("# %llu pages granted, %llu popped, %llu sealed, %llu hits, %llu spilled, %llu "
	       "restored; %llu clients died, %llu rows failed the check, %llu times no "
	       "generation was left\n",
	       (unsigned long long)t->grants, (unsigned long long)t->popped,
	       (unsigned long long)t->seals, (unsigned long long)t->hits,
	       (unsigned long long)t->spills, (unsigned long long)t->restores,
	       (unsigned long long)t->deaths, (unsigned long long)t->stale_found,
	       (unsigned long long)t->overflows);
	printf("# %llu reads and %llu writes compared\n", (unsigned long long)t->reads,
	       (unsigned long long)t->writes);
	fflush(stdout);
}

/* At least @least schedules, then to @nr or @limit_s, whatever comes first. Return: those
 * that held; *ret_failed: the next one did not. */
static u64 seeds_run(u64 from, u64 least, u64 nr, double limit_s, bool *ret_failed)
{
	double start = seconds();
	u64 i;

	*ret_failed = false;
	for (i = 0; i < nr; i++) {
		if (i % 64 == 0 && i >= least && seconds() - start > limit_s)
			break;
		sim_draw(&schedule, from + i);
		if (sim_run(&schedule))
			continue;
		failed(from + i, i);
		*ret_failed = true;
		break;
	}
	stats_print(i, seconds() - start);
	return i;
}

static bool replay(const char *path)
{
	FILE *f = fopen(path, "r");
	u32 bad;

	if (!f) {
		printf("# %s: %s\n", path, strerror(errno));
		return false;
	}
	bad = sim_read(&schedule, f);
	fclose(f);
	if (bad) {
		printf("# %s:%u: not a line of a schedule\n", path, bad);
		return false;
	}
	if (sim_run(&schedule))
		return true;
	printf("# %s: act %u: %s\n", path, sim.act_at, sim.failure);
	return false;
}

/* About five seconds of them; a failure of any is printed with its text. */
KVT_TEST_T(random_schedules, 120)
{
	bool bad;
	u64 nr;

	nr = seeds_run(1, LEAST, 1000000, 5, &bad);
	KVT_EXPECT(!bad && nr >= LEAST);
	KVT_EXPECT(sim.stats.store_kills && sim.stats.damages && sim.stats.hits);
	KVT_EXPECT(sim.stats.stale_found && sim.stats.overflows && sim.stats.restores);
}

/* Other schedules every time; the seed is printed. */
KVT_TEST(new_schedules)
{
	u64 from = kvt_rand64() >> 8;
	bool bad;

	KVT_NOTE("from seed %llu", (unsigned long long)from);
	KVT_EXPECT(seeds_run(from, 0, 1000000, 2, &bad) > 0 && !bad);
}

static int is_case(const struct dirent *e)
{
	const char *dot = strrchr(e->d_name, '.');

	return dot && !strcmp(dot, ".sim");
}

/* What once failed. */
KVT_TEST(cases_hold)
{
	static const char dir[] = "tests/sim/cases";
	struct dirent *e;
	DIR *d = opendir(dir);
	u32 bad = 0, nr = 0;
	char path[512];

	if (!d)
		KVT_FAIL("%s: %s", dir, strerror(errno));
	while ((e = readdir(d))) {
		if (!is_case(e))
			continue;
		snprintf(path, sizeof(path), "%s/%.200s", dir, e->d_name);
		bad += !replay(path);
		nr++;
	}
	closedir(d);
	KVT_NOTE("%u cases", nr);
	KVT_EXPECT_EQ(bad, 0);
	KVT_EXPECT(nr > 0);
}

/* A schedule is the same after it was written and read. */
KVT_TEST(text_says_it_all)
{
	static struct sim_schedule again;

	for (u64 seed = 1; seed < 50; seed++) {
		FILE *f = tmpfile();

		KVT_EXPECT(f);
		sim_draw(&schedule, seed);
		sim_write(&schedule, f, "a test");
		rewind(f);
		KVT_EXPECT_EQ(sim_read(&again, f), 0);
		fclose(f);
		KVT_EXPECT(!memcmp(&again.o, &schedule.o, sizeof(again.o)));
		KVT_EXPECT_EQ(again.nr, schedule.nr);
		KVT_EXPECT(!memcmp(again.acts, schedule.acts,
				   again.nr * sizeof(again.acts[0])));
	}
}

static int run_long(u64 nr, long cpus)
{
	int status, failures = 0;
	u64 each = (nr + (u64)cpus - 1) / (u64)cpus;
	double start = seconds();

	for (long i = 0; i < cpus; i++) {
		if (fork() == 0) {
			bool bad;

			seeds_run(1 + (u64)i * each, each, each, 1e9, &bad);
			_exit(bad);
		}
	}
	while (wait(&status) > 0)
		failures += status != 0;
	printf("%llu schedules in %ld processes in %.0f s, %d failed\n",
	       (unsigned long long)(each * (u64)cpus), cpus, seconds() - start, failures);
	return failures != 0;
}

static int one(u64 seed, bool shrink)
{
	bool held;

	sim_draw(&schedule, seed);
	held = sim_run(&schedule);
	if (!shrink || held)
		sim_write(&schedule, stdout, held ? "holds" : sim.failure);
	if (!held && shrink)
		failed(seed, 0);
	else if (!held)
		printf("# act %u: %s\n", sim.act_at, sim.failure);
	return !held;
}

int main(int argc, char **argv)
{
	const char *what = argc > 2 ? argv[1] : "";
	u64 n = argc > 2 ? strtoull(argv[2], NULL, 0) : 0;
	bool bad;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "--seed") || !strcmp(what, "--shrink"))
		return one(n, !strcmp(what, "--shrink"));
	if (!strcmp(what, "--replay"))
		return !replay(argv[2]);
	if (!strcmp(what, "--long"))
		return run_long(n,
				argc > 3 ? atol(argv[3]) : sysconf(_SC_NPROCESSORS_ONLN));
	if (!strcmp(what, "--seeds") && argc > 3) {
		seeds_run(n, 0, strtoull(argv[3], NULL, 0),
			  argc > 4 ? atof(argv[4]) : 1e9, &bad);
		return bad;
	}
	return kvt_main(argc, argv);
}
