#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sanitize - the kernel tests of this bundle under compute-sanitizer, on a machine with a GPU.
#
# usage: sanitize [TOOL...]     memcheck, racecheck, initcheck [all three]
#
# racecheck.known has names of inlined functions, which only a bundle of `make LINEINFO=1 bundle`
# has in its kernels: in others racecheck is refused, and not among all.
#
# Each program in one process (-f) on memory of the very size (KVT_SANITIZER). A control shows
# that errors are seen: what kernels write to is too small, and memcheck must say so. Prints a
# line per tool and program; logs lie in sanitize.log/. Ends with "N clean, N with findings".
set -u
cd "$(dirname "$0")" || exit 2
command -v compute-sanitizer >/dev/null || { echo "sanitize: no compute-sanitizer" >&2; exit 2; }
export REQUIRE_GPU=1
if [ $# -eq 0 ]; then
	set -- memcheck initcheck
	[ ! -e lineinfo ] || set -- "$@" racecheck
fi
case " $* " in
*" racecheck "*)
	[ -e lineinfo ] || { echo "sanitize: racecheck needs make LINEINFO=1 bundle" >&2; exit 2; }
	;;
esac
mkdir -p sanitize.log
rm -f sanitize.log/*

pairs() { # LOG: a line for each two places that race
	awk '/Race reported/ { a = $0; next } / and (Read|Write) access/ { print a, $0 }' "$1"
}

one() { # TOOL PROGRAM CASES LABEL
	log=sanitize.log/$1-$4
	set -f
	# shellcheck disable=SC2086
	KVT_SANITIZER=$1 timeout 420 compute-sanitizer --tool "$1" --error-exitcode 99 --print-limit 5000 \
		"$2" -f $3 >"$log" 2>&1
	rc=$?
	n=$(grep -c '^ok ' "$log")
	said=$(grep 'SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
	state=FINDINGS
	[ $rc -ne 0 ] || state=clean
	if [ "$1" = racecheck ] && [ $rc -eq 99 ] && [ -n "$(pairs "$log")" ] &&
		! pairs "$log" | grep -qvF "$known"; then
		state=unjudged
	fi
	echo "$state $1 $4: $n cases, $said, exit $rc" | tee "$log.line"
}

# A process a case where one for all would take minutes: moe_cuda always (its references are
# large), and racecheck, which is slow, and slower with each hazard. Of three programs racecheck
# sees the cases that have every kernel in them, or every way of merging parts of MLA.
check() { # TOOL PROGRAM
	name=${2##*/}
	case $1-$name in
	racecheck-attn_cuda)
		one "$1" "$2" 'shared_* failed_*' "$name"
		one "$1" "$2" 'mla_fast_*' "$name-fast"
		;;
	racecheck-attn_split_cuda) one "$1" "$2" '*_merge_in_place' "$name" ;;
	racecheck-prefill_cuda | *-moe_cuda)
		cases=$("$2" -l)
		[ "$name" != prefill_cuda ] ||
			cases=$(echo "$cases" | grep -E '^(small|odd|fp8_pages|mla)_')
		for c in $cases; do
			one "$1" "$2" "$c" "$name-$c" &
		done
		wait
		;;
	*) one "$1" "$2" '' "$name" ;;
	esac
}

known=$(grep -v '^#' racecheck.known)
for tool in "$@"; do
	for prog in $(grep '^tests/kernels/' gpu-tests); do
		check "$tool" "$prog" &
	done
	wait
done
KVT_SANITIZER=short timeout 60 compute-sanitizer --tool memcheck tests/kernels/cuda_pages \
	-f cuda_tag_check_is_the_reference >sanitize.log/control 2>&1
if grep -q 'Invalid __global__ write' sanitize.log/control; then
	echo "control: a store past the end is seen"
else
	echo "FINDINGS control: a store past the end is NOT seen" | tee sanitize.log/control.line
fi
good=$(cat sanitize.log/*.line | grep -c ^clean)
unjudged=$(cat sanitize.log/*.line | grep -c ^unjudged)
bad=$(cat sanitize.log/*.line | grep -c ^FINDINGS)
echo "$good clean, $unjudged unjudged, $bad with findings"
[ "$bad" -eq 0 ]
