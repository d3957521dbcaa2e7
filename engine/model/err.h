/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err.h - the text that goes with a refused model directory.
 *
 * A function that can refuse input takes a struct eng_err; it returns -errno and leaves
 * one line that names file, field or tensor, the value found and the reason.
 */
#ifndef ENG_MODEL_ERR_H
#define ENG_MODEL_ERR_H

#include <stdarg.h>
#include <stdio.h>

/** struct eng_err - one line without newline; empty while nothing failed */
struct eng_err {
	char text[512];
};

/**
 * eng_refuse() - say why and hand the code on: `return eng_refuse(err, -EINVAL, "...")`
 * @code: returned as it is
 *
 * A longer text is cut at 511 bytes.
 */
__attribute__((format(printf, 3, 4))) static inline int
eng_refuse(struct eng_err *err, int code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	return code;
}

#endif
