#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One table of every kernel out of several runs of `kvbench kernels FAMILY --json`.

usage: tests/bench/merge_kernels.py FILE.json... > docs/results/h200-kernels.json

A FILE is a run, or what this program wrote before. A row (name, shape) that several runs have is
taken from the newest. Each row says by "run" which entry of "runs" (commit, date, ceiling_tb_s) it was
measured in; "frac", "floor_us" and "target_here_us" are of that run's ceiling. commit, date and ceiling_tb_s of
the document are those of the newest run. A run of all families (`kvbench kernels --json`) needs no
merging.
"""
import json
import sys

# names before they were family and page format
KINDS = ("int4 ", "loads ", "fp8 ")
RUN = ("family", "commit", "date", "ceiling_tb_s")
# "mhz": the SM clock right after a row's replays; "verdict": reached, at its loads, open; rows of older runs lack what their programs did not write
ROW = ("us", "us_min", "us_max", "bytes", "flops", "frac", "floor_us", "loads_us", "mhz", "rested_us", "err", "peer_us",
       "target_us", "target_here_us", "verdict")
ALWAYS = ("us", "us_min", "us_max", "bytes", "frac", "err", "peer_us", "target_us")


def public(row):
    name, shape = row["name"], row["shape"]
    if row.get("family") == "moe" and name.startswith(KINDS):
        kind, rest = name.split(" ", 1)
        name = "moe_int4 loads" if kind == "loads" else "moe_" + kind
        shape = f"{rest} {shape}"
    words = name.split()
    if words[0].startswith("attn_") and "prefill" in words:
        words.remove("prefill")
        name = " ".join(["attn_prefill", words[0][len("attn_"):], *words[1:]])
    return name, shape


def measured(doc):
    """(run, row) of every row of a run or of a merged document."""
    runs = doc.get("runs") or [doc]
    for r in doc["rows"]:
        yield {k: runs[r.get("run", 0)][k] for k in RUN}, r


def main():
    docs = [json.load(open(f, encoding="utf-8")) for f in sys.argv[1:]]
    if not docs:
        sys.exit(__doc__)
    if len({d["gpu"] for d in docs}) > 1:
        sys.exit("merge_kernels: runs on different GPUs")
    rows, runs = {}, []
    for run, r in sorted((m for d in docs for m in measured(d)), key=lambda m: m[0]["date"]):
        name, shape = public(r)
        rows[name, shape] = run, {"name": name, "shape": shape,
                                  **{k: r.get(k) for k in ROW if k in ALWAYS or k in r}}
    for run, row in sorted(rows.values(), key=lambda m: m[0]["date"]):
        if run not in runs:
            runs.append(run)
        row["run"] = runs.index(run)
    new = max(docs, key=lambda d: d["date"])
    head = {"schema": "kvbench-kernels-1", "commit": new["commit"], "gpu": new["gpu"],
            "driver": new["driver"], "date": new["date"], "ceiling_tb_s": new["ceiling_tb_s"]}
    print(json.dumps(head)[:-1] + ", \"runs\": [")
    print(",\n".join("  " + json.dumps(r) for r in runs))
    print("], \"rows\": [")
    print(",\n".join("  " + json.dumps(rows[k][1]) for k in sorted(rows)))
    print("]}")


main()
