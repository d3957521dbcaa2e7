/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stop.h - stop strings in a growing text: what may be shown, and where the text ends.
 */
#ifndef ENG_HTTP_STOP_H
#define ENG_HTTP_STOP_H

#include <stdbool.h>
#include <stddef.h>

#define ENG_STOP_MAX 4

/**
 * eng_stop_scan() - after text has grown: how much of it may be shown
 * @text: nr_bytes so far
 * @shown: bytes already shown; never taken back
 * @stops: nr_stops strings, none empty
 * @ret_stopped: set if a stop string is there; the text then ends before it
 *
 * The end of @text is held back while it may be the beginning of a stop string.
 * Return: bytes from the start of @text that may be shown, at least @shown.
 */
size_t eng_stop_scan(const char *text, size_t nr_bytes, size_t shown, char *const *stops,
		     int nr_stops, bool *ret_stopped);

#endif /* ENG_HTTP_STOP_H */
