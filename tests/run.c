/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - runs test programs, keeps their TAP output, prints the total.
 *
 * usage: run [-j N] TAP_DIR PROGRAM...	N programs at a time [1]
 *
 * Writes TAP_DIR/<name>.tap for each program, shows failing cases with their notes when the
 * program ends and again at the end of all (who reads a log reads its end; they are in
 * TAP_DIR/failed too), and ends with "N passed, N failed, N skipped". A program that dies or runs
 * fewer cases than it planned counts as a failure for each missing case.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define JOBS_MAX 16

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

/* Now, and once more at the end; a line of text each, with its notes before it. */
static void say_failed(const char *dir, FILE *say, const char *fmt, ...)
{
	char path[512], text[24576];
	va_list args;
	FILE *kept;

	va_start(args, fmt);
	vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	fputs(text, say);
	snprintf(path, sizeof(path), "%s/failed", dir);
	kept = fopen(path, "a");
	if (!kept)
		return;
	fputs(text, kept);
	fclose(kept);
}

/* What say_failed() kept. */
static void show_failed(const char *dir)
{
	char path[512], line[4096];
	FILE *kept;

	snprintf(path, sizeof(path), "%s/failed", dir);
	kept = fopen(path, "r");
	if (!kept)
		return;
	printf("\nfailed (whole output: %s/*.tap):\n", dir);
	while (fgets(line, sizeof(line), kept))
		fputs(line, stdout);
	fclose(kept);
}

static void run_one(const char *dir, const char *prog, struct totals *t, FILE *say)
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
			say_failed(dir, say, "%.*s%s: %s", (int)nr_notes, notes, name,
				   line);
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

		say_failed(dir, say,
			   "%.*snot ok - %s: ended with status %d after %d of %d cases\n",
			   (int)nr_notes, notes, name, status, seen, planned);
		t->failed += missing;
	}
	clock_gettime(CLOCK_MONOTONIC, &t1);
	fprintf(say, "  %-40s %3d cases %6.1f s%s\n", name, seen,
		(double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec) / 1e9,
		t->failed != failed0 ? "  FAILED" : "");
	fflush(say);
}

/* One of several at a time: what it says comes in one piece, when it has ended. */
struct job {
	pid_t pid;
	FILE *said;
	struct totals *t; /* shared with the child */
};

static void job_run(struct job *job, const char *dir, const char *prog)
{
	struct totals t = {0};

	job->t->failed = 1; /* unless this comes to its end */
	run_one(dir, prog, &t, job->said);
	*job->t = t;
}

static void job_start(struct job *job, const char *dir, const char *prog)
{
	job->said = tmpfile();
	job->t = mmap(NULL, sizeof(*job->t), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!job->said || job->t == MAP_FAILED) {
		perror("run");
		exit(2);
	}
	job->pid = fork();
	if (job->pid < 0) {
		perror("run: fork");
		exit(2);
	}
	if (job->pid)
		return;
	job_run(job, dir, prog);
	fflush(job->said);
	_exit(0);
}

/* Wait for any; add it up, and let its place go to the next one. */
static void job_end(struct job *jobs, int nr, struct totals *t)
{
	pid_t pid = wait(NULL);
	char line[4096];

	for (int i = 0; i < nr; i++) {
		struct job *job = &jobs[i];

		if (!job->said || job->pid != pid)
			continue;
		rewind(job->said);
		while (fgets(line, sizeof(line), job->said))
			fputs(line, stdout);
		fflush(stdout);
		fclose(job->said);
		t->passed += job->t->passed;
		t->failed += job->t->failed;
		t->skipped += job->t->skipped;
		munmap(job->t, sizeof(*job->t));
		job->said = NULL;
	}
}

static void run_many(const char *dir, char **progs, int nr, int nr_jobs, struct totals *t)
{
	struct job jobs[JOBS_MAX] = {{0}};
	int running = 0, next = 0;

	while (next < nr || running) {
		for (int i = 0; i < nr_jobs && next < nr; i++) {
			if (jobs[i].said)
				continue;
			job_start(&jobs[i], dir, progs[next++]);
			running++;
		}
		job_end(jobs, nr_jobs, t);
		running--;
	}
}

int main(int argc, char **argv)
{
	struct totals t = {0};
	char failed[512];
	int jobs = 1;

	if (argc > 2 && !strcmp(argv[1], "-j")) {
		jobs = atoi(argv[2]);
		argv += 2;
		argc -= 2;
	}
	if (argc < 3 || jobs < 1 || jobs > JOBS_MAX) {
		fprintf(stderr, "usage: %s [-j N] TAP_DIR PROGRAM...  (N from 1 to %d)\n",
			argv[0], JOBS_MAX);
		return 2;
	}
	mkdir(argv[1], 0755);
	snprintf(failed, sizeof(failed), "%s/failed", argv[1]);
	remove(failed);
	if (jobs == 1)
		for (int i = 2; i < argc; i++)
			run_one(argv[1], argv[i], &t, stdout);
	else
		run_many(argv[1], argv + 2, argc - 2, jobs, &t);
	show_failed(argv[1]);
	printf("%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped);
	return t.failed ? 1 : 0;
}
