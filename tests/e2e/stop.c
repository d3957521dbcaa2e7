/* SPDX-License-Identifier: Apache-2.0 */
/* stop.c - stop strings in a growing text (engine/http/stop.h). */
#include "tests/kvt.h"

#include "engine/http/stop.h"

/* However the text is cut, the same bytes are shown, and never one of a stop string. */
KVT_TEST(stop_scan_does_not_depend_on_the_cuts)
{
	char *stops[] = {(char *)"abc", (char *)"bb", (char *)"caa"};

	for (int round = 0; round < 2000; round++) {
		char text[40];
		size_t n = 1 + kvt_rand_below(30), shown = 0, at, expect;
		bool stopped = false;

		for (size_t i = 0; i < n; i++)
			text[i] = (char)('a' + kvt_rand_below(3));
		text[n] = 0;
		expect = n;
		for (int i = 0; i < 3; i++) {
			const char *p = strstr(text, stops[i]);

			if (p && (size_t)(p - text) < expect)
				expect = (size_t)(p - text);
		}
		for (at = 0; at < n && !stopped;) {
			size_t before = shown;

			at += 1 + kvt_rand_below((uint32_t)(n - at));
			shown = eng_stop_scan(text, at, shown, stops, 3, &stopped);
			KVT_EXPECT(shown >= before && shown <= expect);
		}
		if (stopped)
			KVT_EXPECT_EQ(shown, expect);
		else
			KVT_EXPECT_EQ(expect, n);
	}
}

/* What may become a stop string is held back, and shown when it does not. */
KVT_TEST(a_beginning_is_held_back)
{
	char *stops[] = {(char *)"END"};
	bool stopped;

	KVT_EXPECT_EQ(eng_stop_scan("text E", 6, 0, stops, 1, &stopped), 5);
	KVT_EXPECT(!stopped);
	KVT_EXPECT_EQ(eng_stop_scan("text EN", 7, 5, stops, 1, &stopped), 5);
	KVT_EXPECT(!stopped);
	KVT_EXPECT_EQ(eng_stop_scan("text ENd", 8, 5, stops, 1, &stopped), 8);
	KVT_EXPECT(!stopped);
	KVT_EXPECT_EQ(eng_stop_scan("text END.", 9, 5, stops, 1, &stopped), 5);
	KVT_EXPECT(stopped);
	KVT_EXPECT_EQ(eng_stop_scan("text", 4, 0, stops, 0, &stopped), 4);
	KVT_EXPECT(!stopped);
}

KVT_MAIN()
