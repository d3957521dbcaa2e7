/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - runs test programs, keeps their TAP output, prints the total.
 *
 * usage: run TAP_DIR PROGRAM...
 *
 * Writes TAP_DIR/<name>.tap for each program, shows failing cases with their notes, and ends
 * with "N passed, N failed, N skipped". A program that dies or runs fewer cases than it planned
 * counts as a failure for each missing case.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct totals {
	int passed, failed, skipped;
};

/* build/tests/unit/mm/grace -> unit-mm-grace */
static void tap_name(const char *prog, char *ret, size_t size)
{
	const char *p = strstr(prog, "tests/");

	snprintf(ret, size, "%s", p ? p + strlen("tests/") : prog);
	for (; *ret; ret++)
		if (*ret == '/')
			*ret = '-';
}

static void run_one(const char *dir, const char *prog, struct totals *t)
{
	char name[256], path[512], line[4096], notes[16384];
	int planned = -1, seen = 0, failed0 = t->failed, status;
	size_t nr_notes = 0;
	struct timespec t0, t1;
	FILE *in, *out;

	clock_gettime(CLOCK_MONOTONIC, &t0);
	tap_name(prog, name, sizeof(name));
	snprintf(path, sizeof(path), "%s/%s.tap", dir, name);
	out = fopen(path, "w");
	in = popen(prog, "r");
	if (!out || !in) {
		fprintf(stderr, "run: %s: %s\n", out ? prog : path, strerror(errno));
		t->failed++;
		return;
	}
	while (fgets(line, sizeof(line), in)) {
		fputs(line, out);
		if (sscanf(line, "1..%d", &planned) == 1)
			continue;
		if (line[0] == '#') {
			size_t n = strlen(line);

			if (nr_notes + n < sizeof(notes)) {
				memcpy(notes + nr_notes, line, n);
				nr_notes += n;
			}
			continue;
		}
		if (!strncmp(line, "not ok ", 7)) {
			printf("%.*s%s: %s", (int)nr_notes, notes, name, line);
			t->failed++;
			seen++;
		} else if (!strncmp(line, "ok ", 3)) {
			if (strstr(line, "# SKIP"))
				t->skipped++;
			else
				t->passed++;
			seen++;
		} else {
			continue;
		}
		nr_notes = 0;
	}
	status = pclose(in);
	fclose(out);
	if (planned < 0 || seen < planned || (status && t->failed == failed0)) {
		int missing = planned > seen ? planned - seen : 1;

		printf("%.*snot ok - %s: ended with status %d after %d of %d cases\n",
		       (int)nr_notes, notes, name, status, seen, planned);
		t->failed += missing;
	}
	clock_gettime(CLOCK_MONOTONIC, &t1);
	printf("  %-40s %3d cases %6.1f s%s\n", name, seen,
	       (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec) / 1e9,
	       t->failed != failed0 ? "  FAILED" : "");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct totals t = {0};

	if (argc < 3) {
		fprintf(stderr, "usage: %s TAP_DIR PROGRAM...\n", argv[0]);
		return 2;
	}
	mkdir(argv[1], 0755);
	for (int i = 2; i < argc; i++)
		run_one(argv[1], argv[i], &t);
	printf("%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped);
	return t.failed ? 1 : 0;
}
