/* SPDX-License-Identifier: Apache-2.0 */
/* dbg/log.c - see log.h. Lines carry no time stamp when a journal adds its own. */
#include "kvmd/dbg/log.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

#define LOG_LINE_BYTES 512

static struct {
	int fd;
	enum kvd_log_level level;
	u64 nr_written;
	u64 nr_suppressed;
} log_state = {.fd = 2, .level = KVD_LOG_INFO};

/* systemd reads the syslog level from "<N>" when stderr goes to its journal. */
static const char *const level_prefix[] = {"<3>", "<4>", "<6>", "<7>"};
static const char *const level_name[] = {"error", "warning", "info", "debug"};

void kvd_log_setup(int fd, enum kvd_log_level level)
{
	log_state.fd = fd;
	log_state.level = level;
}

void kvd_log_lines(u64 *ret_written, u64 *ret_suppressed)
{
	*ret_written = log_state.nr_written;
	*ret_suppressed = log_state.nr_suppressed;
}

/* Answers whether the line may be written. */
static int site_admit(struct kvd_log_site *site, u32 *ret_suppressed)
{
	u64 now = kv_now_ns();

	*ret_suppressed = 0;
	if (!site->window_start_ns || now - site->window_start_ns > KVD_LOG_WINDOW_NS) {
		*ret_suppressed = site->nr_suppressed;
		site->window_start_ns = now;
		site->nr_lines = 0;
		site->nr_suppressed = 0;
	}
	if (site->nr_lines >= KVD_LOG_BURST) {
		site->nr_suppressed++;
		log_state.nr_suppressed++;
		return 0;
	}
	site->nr_lines++;
	return 1;
}

void kvd_log_write(struct kvd_log_site *site, enum kvd_log_level level, const char *obj,
		   const char *fmt, ...)
{
	char line[LOG_LINE_BYTES];
	u32 suppressed;
	size_t n, i;
	va_list ap;
	ssize_t w;

	if (level > log_state.level || !site_admit(site, &suppressed))
		return;
	n = (size_t)snprintf(line, sizeof(line), "%skvmd: %s: %s: ",
			     getenv("JOURNAL_STREAM") ? level_prefix[level] : "",
			     level_name[level], obj);
	if (suppressed && n < sizeof(line))
		n += (size_t)snprintf(line + n, sizeof(line) - n,
				      "[%u like it left out] ", suppressed);
	if (n < sizeof(line)) {
		va_start(ap, fmt);
		n += (size_t)vsnprintf(line + n, sizeof(line) - n, fmt, ap);
		va_end(ap);
	}
	if (n > sizeof(line) - 2)
		n = sizeof(line) - 2;
	/* One line stays one line, whatever a client put into its name. */
	for (i = 0; i < n; i++)
		if (iscntrl((unsigned char)line[i]))
			line[i] = '?';
	line[n++] = '\n';
	log_state.nr_written++;
	/* A full pipe loses the line; it must not stop the daemon. */
	w = write(log_state.fd, line, n);
	(void)w;
}
