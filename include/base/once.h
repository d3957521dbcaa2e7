/* SPDX-License-Identifier: Apache-2.0 */
/*
 * once.h - read and write shared memory exactly once.
 *
 * kv_read_once() is the only way kvmd looks at a field of client memory: the value goes into a
 * local, the local is checked, the local is used.
 */
#ifndef BASE_ONCE_H
#define BASE_ONCE_H

#define kv_read_once(x)	    (*(const volatile __typeof__(x) *)&(x))
#define kv_write_once(x, v) (*(volatile __typeof__(x) *)&(x) = (v))

#endif
