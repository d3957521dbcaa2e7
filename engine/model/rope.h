/* SPDX-License-Identifier: Apache-2.0 */
/* rope.h - YaRN's attention factor, needed by config.c too. */
#ifndef ENG_MODEL_ROPE_H
#define ENG_MODEL_ROPE_H

/**
 * eng_yarn_mscale() - 0.1 m ln(factor) + 1, or 1 when @factor does not stretch
 * @factor: context over original context
 * @m: mscale or mscale_all_dim
 */
double eng_yarn_mscale(double factor, double m);

#endif
