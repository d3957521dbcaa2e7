/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/mm/common.c - the same rig as tests/unit/own */
#include "tests/unit/own/common.c"
