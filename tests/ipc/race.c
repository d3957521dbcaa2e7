/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two engine processes race for the pages of one small pool (tools/kvbench/race.h): every
 * word that a request with a good verdict reads is its own. `kvbench race` is run as it
 * is, on the host backend and over the fake driver; cuda_safety.c runs it on the card.
 */
#include "tests/ipc/common.h"

#include <stdarg.h>

static char out[16384];

/* Return: exit status of kvbench race --json @args; its document is in out[]. */
__attribute__((format(printf, 1, 2))) static int race(const char *fmt, ...)
{
	char bench[1024], cmd[2048];
	size_t n, used;
	int status;
	va_list ap;
	FILE *in;

	ipc_build_path("kvbench", bench, sizeof(bench));
	if (access(bench, X_OK))
		KVT_FAIL("%s is not built", bench);
	used = (size_t)snprintf(cmd, sizeof(cmd),
				"%s race --json --seconds 50 --seed %u ", bench,
				(u32)kvt_rand64());
	va_start(ap, fmt);
	vsnprintf(cmd + used, sizeof(cmd) - used, fmt, ap);
	va_end(ap);
	KVT_NOTE("%s", cmd + strlen(bench) + 1);
	in = popen(cmd, "r");
	KVT_EXPECT(in);
	n = fread(out, 1, sizeof(out) - 1, in);
	out[n] = 0;
	status = pclose(in);
	KVT_EXPECT(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* Number @name of part @part of the document. */
static double number(const char *part, const char *name)
{
	const char *at = part ? strstr(out, part) : out;
	char text[64];

	snprintf(text, sizeof(text), "\"%s\":", name);
	at = at ? strstr(at, text) : NULL;
	if (!at)
		KVT_FAIL("no %s in %s", name, out);
	return strtod(at + strlen(text), NULL);
}

static void expect_clean(int status, double reissues)
{
	KVT_NOTE("%.0f re-issues, %.0f of the other engine's pages, %.0f freed before "
		 "launch, %.0f foreign bytes",
		 number(NULL, "reissues"), number(NULL, "of_the_other_engine"),
		 number(NULL, "freed_before_launch"), number(NULL, "foreign_bytes"));
	KVT_EXPECT_EQ(number(NULL, "foreign_bytes"), 0);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT(number(NULL, "reissues") >= reissues);
	KVT_EXPECT(number(NULL, "of_the_other_engine") > reissues / 100);
	KVT_EXPECT(number(NULL, "bytes_read") > 0);
}

/*
 * vllm PR#45357, vllm-ascend#14055: a request ends on the CPU while the step that writes
 * its slot is under way; the page goes to another engine, whose bytes must stay.
 */
KVT_TEST(o22_the_step_already_launched)
{
	int status = race("--backend host --only write,read --reissues 40000");

	expect_clean(status, 40000);
	KVT_EXPECT(number(NULL, "freed_before_launch") > 100);
	KVT_EXPECT(number("\"freed\"", "passed") > 100); /* announced before the kill */
	KVT_EXPECT(number("\"freed\"", "failed") > 10);	 /* and after it */
}

/* vllm#45704, #47282: what is loaded into a page does not come before its readers end. */
KVT_TEST(o25_wait_in_one_direction_only)
{
	int status = race("--backend host --only read --reissues 40000");

	expect_clean(status, 40000);
	KVT_EXPECT(number("\"freed\"", "passed") > 100);
}

/* LMCache#2181: told of before it was written. A seal waits for the step that writes. */
KVT_TEST(o37_copy_without_sync)
{
	int status = race("--backend host --only share --reissues 40000");

	expect_clean(status, 40000);
	KVT_EXPECT(number(NULL, "sealed_before_written") > 10);
	KVT_EXPECT(number(NULL, "pages_found") > 10);
	KVT_EXPECT(number("\"shared\"", "passed") > 10);
}

/* vllm#45357 again: rows of pages that are another engine's by now fire the check. */
KVT_TEST(r4_rows_of_a_page_issued_again)
{
	int status = race("--backend host --only late --reissues 40000");

	expect_clean(status, 40000);
	KVT_EXPECT(number("\"late\"", "failed") > 1000);
}

/* The race is real: what the check stops would have been read. */
KVT_TEST(without_the_check_foreign_bytes_are_read)
{
	int status = race("--backend host --check off --reissues 40000");

	KVT_EXPECT_EQ(status, 1);
	KVT_EXPECT(number(NULL, "foreign_bytes") > 0);
	KVT_EXPECT(number("\"late\"", "foreign_pages") > 0);
}

KVT_TEST(all_races_on_the_cuda_backend)
{
	ipc_use_fake_cuda();
	expect_clean(race("--backend cuda --reissues 40000"), 40000);
}

KVT_MAIN()
