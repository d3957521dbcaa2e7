/* SPDX-License-Identifier: Apache-2.0 */
/* vector_types.h - in place of the toolkit's: all is in cuda_runtime.h. */
#ifndef HOPPER_VECTOR_TYPES_H
#define HOPPER_VECTOR_TYPES_H
#include <cuda_runtime.h>
#endif /* HOPPER_VECTOR_TYPES_H */
