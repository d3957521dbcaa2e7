#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check - runs all GPU tests of this bundle on the GPU of this machine.
#
# usage: check [PROGRAM...]     e.g. check tests/kernels/cuda_pages
#
# KVT_MODELS=DIR   where the models are, if not in tests/models beside this script
# KVT_JOBS=N       programs at a time [4]
#
# Ends with a line "N passed, N failed, N skipped"; TAP files lie in tap/.
set -eu
cd "$(dirname "$0")"
top=$(pwd)
export REQUIRE_GPU=1 KV_BUILD="$top"
export KVT_MODELS="${KVT_MODELS:-$top/tests/models}"
if [ ! -f "$KVT_MODELS/tiny-k2/config.json" ]; then
	echo "check: $KVT_MODELS: no tiny-k2 there; set KVT_MODELS to a copy of tests/models" >&2
	exit 2
fi
[ $# -gt 0 ] || set -- $(cat gpu-tests)
rm -rf tap
exec tests/run -j "${KVT_JOBS:-4}" tap "$@"
