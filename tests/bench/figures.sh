#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# figures - takes the figures of docs/performance*.md anew, on the GPU of this machine.
#
# usage: figures OUT [PART...]     attn moe linear step pages counters rank [all]
#
# Writes OUT/PART-N.json for each run, OUT/rank-PRESET-WEIGHTS-KV.json, OUT/counters.json, and
# OUT/machine (GPU, driver, clocks, power limit before and after). A run whose error against the
# reference is too large, or that cannot start, says so and does not stop the others. Ends with
# "N runs, N failed"; exits with 1 if any failed, with 2 if there is no GPU to measure.
#
# KVB_DIR=DIR      where kvbench-kernels, kvbench and kvmd are [beside this script, or build/]
# RANK_OUT=N       tokens of a rank's run [12]
#
# Nothing else may use the GPU meanwhile. What OUT becomes in docs/results:
#   tests/bench/merge_kernels.py OUT/attn-*.json >docs/results/h200-attn.json
#   tests/bench/merge_kernels.py docs/results/h200-moe.json OUT/moe-*.json OUT/linear-*.json >NEW
#   tests/bench/rank_table.py --keep docs/results GPU DRIVER OUT/rank-*.json
set -u

parts='attn moe linear step pages counters rank'
die() { echo "figures: $1" >&2; exit 2; }

[ $# -ge 1 ] || { sed -n '4,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1
shift
for part in "$@"; do
	case " $parts all " in
	*" $part "*) ;;
	*) die "PART $part: none of $parts all" ;;
	esac
done
# shellcheck disable=SC2086
case " $* " in '  ' | *' all '*) set -- $parts ;; esac

here=$(cd "$(dirname "$0")" && pwd)
dir=${KVB_DIR:-$here}
[ -x "$dir/kvbench-kernels" ] || dir=${KVB_DIR:-$here/../../build}
[ -x "$dir/kvbench-kernels" ] || die "$dir: no kvbench-kernels there; make build/kvbench-kernels, or set KVB_DIR"
mkdir -p "$out" || die "OUT $out: cannot be made"

machine() {
	nvidia-smi --query-gpu=timestamp,name,uuid,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,utilization.gpu \
		--format=csv
}
machine >"$out/machine" 2>/dev/null || die "nvidia-smi finds no GPU"

runs=0 failed=0
run() { # FILE COMMAND...
	file=$out/$1
	shift
	runs=$((runs + 1))
	begun=$(date +%s)
	if "$@" >"$file" 2>"$file.err"; then
		state=ok
	else
		state="FAILED, exit $?: $(tail -n 1 "$file.err")"
		failed=$((failed + 1))
	fi
	[ -s "$file.err" ] || rm -f "$file.err"
	echo "${file##*/}: $(($(date +%s) - begun)) s, $state"
}

# FAMILY FILTER...: a run for each filter; one run is one read ceiling and one state of the card
family() {
	part=$1 bench=$2 n=0
	shift 2
	for filter in "$@"; do
		n=$((n + 1))
		run "$part-$n.json" "$dir/kvbench-kernels" "$bench" --quick --json --filter "$filter"
	done
}

for part in "$@"; do
	case $part in
	attn) family attn attn gqa 'mla fp8' 'mla bf16' ;;
	moe)
		family moe moe 'int4 k2 full uniform|int4 tiny' 'int4 k2 tp8 uniform' fp8 \
			'int4 glm5 full uniform|int4 glm46 full uniform' layer
		;;
	linear) family linear moe 'linear|route' ;;
	step | pages) run "$part-1.json" "$dir/kvbench-kernels" "$part" --quick --json ;;
	counters)
		counters=$here/counters
		[ -e "$counters" ] || counters=$here/counters.py
		run counters.md "$counters" --bench "$dir/kvbench-kernels" --json "$out/counters.json"
		;;
	rank)
		for what in kimi-k2.6-int4 glm-5.2-int4 glm-5.2-fp8; do
			for kv in fp8 fp8_s bf16; do
				run "rank-$what-$kv.json" env KV_BUILD="$dir" "$dir/kvbench" rank \
					--preset "${what%-*}" --tp 8 --weights "${what##*-}" --kv "$kv" --in 8192 \
					--out "${RANK_OUT:-12}" --requests 1,8,32,64 --json
			done
		done
		;;
	esac
done
machine | tail -n +2 >>"$out/machine"
echo "$runs runs, $failed failed"
[ "$failed" -eq 0 ]
