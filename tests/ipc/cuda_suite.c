/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other programs of this directory a second time, on the cuda backend: outcomes and
 * semantics are those of the host backend. One case each; its notes are the failing cases
 * of that program. KVT_BACKEND is read by common.c, and KVT_DRIVER: over the fake driver, or
 * on a GPU.
 */
#include "tests/again.h"

KVT_TEST_T(hello_on_cuda, 120)
{
	run_on_cuda("hello");
}

KVT_TEST_T(ops_on_cuda, 120)
{
	run_on_cuda("ops");
}

KVT_TEST_T(ring_on_cuda, 120)
{
	run_on_cuda("ring");
}

KVT_TEST_T(share_on_cuda, 120)
{
	run_on_cuda("share");
}

KVT_TEST_T(death_on_cuda, 120)
{
	run_on_cuda("death");
}

KVT_TEST_T(restart_on_cuda, 120)
{
	run_on_cuda("restart");
}

KVT_TEST_T(restart_crash_on_cuda, 120)
{
	run_on_cuda("restart_crash");
}

KVT_MAIN()
