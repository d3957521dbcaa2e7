#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One table of every kernel out of several runs of `kvbench kernels FAMILY --json`.

usage: tests/bench/merge_kernels.py RUN.json... > docs/results/h200-kernels.json

A row (name, shape) that several runs have is taken from the newest. Each row says by "run" which
entry of "runs" (commit, date, ceiling_tb_s) it was measured in; fractions are of that run's ceiling. commit,
date and ceiling_tb_s of the document are those of the newest run. A run of all families
(`kvbench kernels --json`) needs no merging.
"""
import json
import sys

# names before they were family and page format
KINDS = ("int4 ", "loads ", "fp8 ")


def public(row):
    name, shape = row["name"], row["shape"]
    if row["family"] == "moe" and name.startswith(KINDS):
        kind, rest = name.split(" ", 1)
        name = "moe_int4 loads" if kind == "loads" else "moe_" + kind
        shape = f"{rest} {shape}"
    words = name.split()
    if words[0].startswith("attn_") and "prefill" in words:
        words.remove("prefill")
        name = " ".join(["attn_prefill", words[0][len("attn_"):], *words[1:]])
    return name, shape


def main():
    docs = sorted((json.load(open(f, encoding="utf-8")) for f in sys.argv[1:]),
                  key=lambda d: d["date"])
    if not docs:
        sys.exit(__doc__)
    if len({(d["gpu"]) for d in docs}) > 1:
        sys.exit("merge_kernels: runs on different GPUs")
    rows = {}
    for i, d in enumerate(docs):
        for r in d["rows"]:
            name, shape = public(r)
            rows[name, shape] = {"name": name, "shape": shape, "us": r["us"], "us_min": r["us_min"],
                                 "us_max": r["us_max"], "bytes": r["bytes"], "frac": r["frac"],
                                 "err": r.get("err"), "peer_us": r.get("peer_us"),
                                 "target_us": r.get("target_us"), "run": i}
    new = docs[-1]
    head = {"schema": "kvbench-kernels-1", "commit": new["commit"], "gpu": new["gpu"],
            "driver": new["driver"], "date": new["date"], "ceiling_tb_s": new["ceiling_tb_s"]}
    print(json.dumps(head)[:-1] + ", \"runs\": [")
    print(",\n".join("  " + json.dumps({k: d[k] for k in ("family", "commit", "date", "ceiling_tb_s")})
                     for d in docs))
    print("], \"rows\": [")
    print(",\n".join("  " + json.dumps(rows[k]) for k in sorted(rows)))
    print("]}")


main()
