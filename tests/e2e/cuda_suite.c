/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other programs of this directory a second time, on a GPU: KVT_BACKEND=cuda, which
 * common.c reads. One case each; its notes are the failing cases of that program.
 */
#include "tests/again.h"

static void on_gpu(const char *program)
{
	if (access("/dev/nvidiactl", F_OK))
		KVT_SKIP("no GPU");
	run_on_cuda(program);
}

KVT_TEST_T(abort_on_cuda, 120)
{
	on_gpu("abort");
}

KVT_TEST_T(cli_on_cuda, 120)
{
	on_gpu("cli");
}

KVT_TEST_T(faults_on_cuda, 120)
{
	on_gpu("faults");
}

KVT_TEST_T(http_on_cuda, 120)
{
	on_gpu("http");
}

KVT_TEST_T(invariance_on_cuda, 120)
{
	on_gpu("invariance");
}

KVT_TEST_T(pressure_on_cuda, 120)
{
	on_gpu("pressure");
}

KVT_TEST_T(restart_on_cuda, 120)
{
	on_gpu("restart");
}

KVT_TEST_T(review_restart_on_cuda, 120)
{
	on_gpu("review_restart");
}

KVT_TEST_T(sharing_on_cuda, 120)
{
	on_gpu("sharing");
}

KVT_MAIN()
