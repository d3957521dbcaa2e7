/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err.h - the text that goes with a refused model directory.
 *
 * A function that can refuse input takes a struct eng_err; it returns -errno and leaves
 * one line that names file, field or tensor, the value found and the reason.
 */
#ifndef ENG_MODEL_ERR_H
#define ENG_MODEL_ERR_H

#include <stdio.h>

/** struct eng_err - one line without newline; empty while nothing failed */
struct eng_err {
	char text[512];
};

/* Evaluates to @code, so that `return eng_refuse(err, -EINVAL, "...")` reads as one act.
 */
#define eng_refuse(err_, code_, ...) \
	(snprintf((err_)->text, sizeof((err_)->text), __VA_ARGS__), (code_))

#endif
