/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.c - the last error of each thread in words, and the caller's log.
 *
 * The text is thread-local, so that two threads that fail at once do not mix their
 * reasons.
 */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>

static __thread char last_error[256];

/**
 * kvc_fail() - keep a failure's reason for kvc_strerror()
 * @r: -errno
 *
 * Return: @r, so that a caller can return it at once.
 */
int kvc_fail(int r, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(last_error, sizeof(last_error), fmt, ap);
	va_end(ap);
	return r;
}

const char *kvc_strerror(struct kvc *c)
{
	return last_error[0] ? last_error : "no error";
}

/**
 * kvc_log() - one line for the application's log callback, if it set one
 * @level: KVC_LOG_*
 */
void kvc_log(struct kvc *c, int level, const char *fmt, ...)
{
	char line[256];
	va_list ap;

	if (!c->log)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	c->log(c->log_arg, level, line);
}
