#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the spin models of tests/model/models.txt and prints TAP.
#   check.sh         the models marked "check"
#   check.sh long    all of them
# A correct model must have no error in its whole state space; a mutant must have one.
set -u
here=$(cd "$(dirname "$0")" && pwd)
long=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

grep -v '^#' "$here/models.txt" | tr -d ' ' | grep '|' |
	awk -F'|' -v long="$long" '$4 == "check" || long != ""' >list
echo "TAP version 13"
echo "1..$(wc -l <list)"
n=0
models=0
mutants=0
while IFS='|' read -r model defs expect _; do
	n=$((n + 1))
	name="model_${model}_${expect}$(echo "$defs" | sed 's/-D/_/g; s/=/_/g')"
	if ! command -v spin >/dev/null; then
		echo "ok $n - $name # SKIP spin is not installed"
		continue
	fi
	rm -f pan pan.* ./*.trail
	defs=$(echo "$defs" | sed 's/-D/ -D/g')
	# shellcheck disable=SC2086
	spin -a $defs "$here/$model.pml" >spin.log 2>&1 &&
		cc -O2 -DSAFETY -w -o pan pan.c &&
		timeout 900 ./pan -m2000000 >pan.log 2>&1
	errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.log)
	if grep -qE 'max search depth too small|out of memory|Search not completed' pan.log &&
		[ "$expect" = ok ]; then
		errors=incomplete
	fi
	# A mutant must break what the model asserts, not merely get stuck.
	[ "$expect" = fail ] && ! grep -q 'assertion violated' pan.log && errors=0
	case "$expect:$errors" in
	ok:0)
		models=$((models + 1))
		echo "ok $n - $name" ;;
	fail:[1-9]*)
		mutants=$((mutants + 1))
		echo "ok $n - $name" ;;
	*)
		echo "# errors: ${errors:-none reported}"
		sed 's/^/# /' pan.log | head -20
		echo "not ok $n - $name" ;;
	esac
done <list
echo "# $models models passed, $mutants mutants refuted"
