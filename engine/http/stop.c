/* SPDX-License-Identifier: Apache-2.0 */
/* stop.c - stop strings (see stop.h). No state. */
#include "engine/http/stop.h"

#include <string.h>

/* Where the earliest stop string begins, or nr_bytes. Nothing before @shown can be part
 * of one: it would have been held back. */
static size_t first_stop(const char *text, size_t nr_bytes, size_t shown,
			 char *const *stops, int nr_stops)
{
	size_t first = nr_bytes;

	for (int i = 0; i < nr_stops; i++) {
		const char *at = memmem(text + shown, nr_bytes - shown, stops[i],
					strlen(stops[i]));

		if (at && (size_t)(at - text) < first)
			first = (size_t)(at - text);
	}
	return first;
}

/* Is text[at ..] a true beginning of @stop? */
static bool may_become(const char *text, size_t nr_bytes, size_t at, const char *stop)
{
	size_t n = nr_bytes - at;

	return n < strlen(stop) && !memcmp(text + at, stop, n);
}

size_t eng_stop_scan(const char *text, size_t nr_bytes, size_t shown, char *const *stops,
		     int nr_stops, bool *ret_stopped)
{
	size_t stop_at = first_stop(text, nr_bytes, shown, stops, nr_stops);

	*ret_stopped = stop_at < nr_bytes;
	if (*ret_stopped)
		return stop_at;
	for (size_t at = shown; at < nr_bytes; at++) {
		for (int i = 0; i < nr_stops; i++) {
			if (may_become(text, nr_bytes, at, stops[i]))
				return at;
		}
	}
	return nr_bytes;
}
