/* SPDX-License-Identifier: Apache-2.0 */
/* fp8_table.c - the value of each e4m3 code. Constant data; any thread. */
#include "fp8.h"

/* code = sign, 4 bits of exponent e, 3 bits of mantissa m */
#define MAG(e, m) ((e) ? (8 + (m)) * (float)(1u << (e)) * 0x1p-10f : (float)(m)*0x1p-9f)
#define OCTET(s, e)                                                                   \
	s MAG(e, 0), s MAG(e, 1), s MAG(e, 2), s MAG(e, 3), s MAG(e, 4), s MAG(e, 5), \
		s MAG(e, 6)
#define HALF(s)                                                                       \
	OCTET(s, 0), s MAG(0, 7), OCTET(s, 1), s MAG(1, 7), OCTET(s, 2), s MAG(2, 7), \
		OCTET(s, 3), s MAG(3, 7), OCTET(s, 4), s MAG(4, 7), OCTET(s, 5),      \
		s MAG(5, 7), OCTET(s, 6), s MAG(6, 7), OCTET(s, 7), s MAG(7, 7),      \
		OCTET(s, 8), s MAG(8, 7), OCTET(s, 9), s MAG(9, 7), OCTET(s, 10),     \
		s MAG(10, 7), OCTET(s, 11), s MAG(11, 7), OCTET(s, 12), s MAG(12, 7), \
		OCTET(s, 13), s MAG(13, 7), OCTET(s, 14), s MAG(14, 7), OCTET(s, 15), \
		s __builtin_nanf("")

const float kvk_e4m3_table[256] = {HALF(+), HALF(-)};
