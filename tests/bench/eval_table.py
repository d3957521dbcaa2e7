#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Held-out loss by weights and page format: the table of docs/performance.md.

usage: tests/bench/eval_table.py [--tokens N] [--model NAME]... [--json FILE]

Runs `kv-engine eval` for both models of tests/models, for BF16, FP8 and INT4 (group 32, 128) weights and
bf16, fp8 and fp8_s pages, and compares each with BF16 weights and BF16 pages prediction by prediction: the
difference's standard error is that of the paired differences, clustered by window of 1,024 tokens
(neighbouring predictions are not independent). fp8_s takes its static scales from the first 16,384
tokens of the same text. About 20 s a line on two cores for 16,384 predictions.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("KV_BUILD") or os.path.join(TOP, "build")
MODELS = os.path.join(TOP, "tests", "models")
WEIGHTS = ["bf16", "fp8", "int4-g32", "int4-g128"]
PAGES = ["bf16", "fp8", "fp8_s"]
WINDOW = 1024


def run(model, weights, kv, tokens, out):
    argv = [os.path.join(BUILD, "kv-engine"), "eval", "--model", os.path.join(MODELS, model),
            "--weights", weights, "--kv", kv, "--tokens", str(tokens),
            "--text", os.path.join(MODELS, "heldout.txt"), "--nll-out", out, "--json"]
    p = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if p.returncode:
        sys.exit(f"{' '.join(argv)}: exit {p.returncode}\n{p.stderr}")
    with open(out, encoding="ascii") as f:
        return json.loads(p.stdout), [float(x) for x in f]


def paired(nll, base):
    """Mean difference and its standard error, windows taken as independent."""
    diff = [a - b for a, b in zip(nll, base)]
    mean = sum(diff) / len(diff)
    sums = [sum(d - mean for d in diff[i:i + WINDOW]) for i in range(0, len(diff), WINDOW)]
    n = len(sums)
    se = math.sqrt(sum(s * s for s in sums) * n / max(n - 1, 1)) / len(diff)
    return mean, se


def main():
    ap = argparse.ArgumentParser(description="held-out loss by weights and page format")
    ap.add_argument("--tokens", type=int, default=16384)
    ap.add_argument("--model", action="append", choices=["tiny-k2", "tiny-glm"])
    ap.add_argument("--json")
    args = ap.parse_args()
    rows = []
    print("| model | weights | pages | loss | difference | its std. error | KV bytes a token | expert bytes | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as tmp:
        for model in args.model or ["tiny-k2", "tiny-glm"]:
            base = None
            for weights in WEIGHTS:
                for kv in PAGES:
                    doc, nll = run(model, weights, kv, args.tokens, os.path.join(tmp, "nll"))
                    base = base or nll
                    d, se = paired(nll, base)
                    doc.update(model=model, difference=d, difference_stderr=se)
                    rows.append(doc)
                    print(f"| {model} | {weights} | {kv} | {doc['nll_per_token']:.5f} | {d:+.5f} | {se:.5f} "
                          f"| {doc['kv_bytes_per_token']:,} | {doc['expert_bytes']:,} "
                          f"| {doc['seconds']:.0f} |", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
