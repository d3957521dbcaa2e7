#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One table of every kernel out of several runs of `kvbench kernels FAMILY --json`.

usage: tests/bench/merge_kernels.py FILE.json... > docs/results/h200-kernels.json

A FILE is a run, or what this program wrote before. A row (name, shape) that several runs have is
taken from the newest. Each row says by "run" which entry of "runs" (commit, date, ceiling_tb_s) it was
measured in; "frac", "floor_us" and "target_here_us" are of that run's ceiling, but for targets that products
bind ("target_by"), which are the stored ones: in rows of programs before these knew, target and verdict are
made anew. commit, date and ceiling_tb_s of
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
       "target_us", "target_here_us", "target_by", "verdict")
ALWAYS = ("us", "us_min", "us_max", "bytes", "frac", "err", "peer_us", "target_us")


TARGETS_BYTES_S = 4.66e12  # for which the targets are stored
AT_LOADS = 1.03


def by_products(name, row):
    """Is the stored target that of a line whose floor is products? As gpu_bench.h's programs say it now."""
    byte, flops = row.get("bytes") or 0, row.get("flops") or 0
    if name == "moe_fp8":
        return flops / 900e12 > byte / (0.85 * TARGETS_BYTES_S)
    return name.startswith("attn_") and "fast" not in name and flops / 790e12 > byte / TARGETS_BYTES_S


def judged(name, row):
    if row.get("target_by") or "target_here_us" not in row or not by_products(name, row):
        return row
    here = row["target_us"]
    loads = row.get("loads_us")
    verdict = "reached" if row["us"] <= here else "at its loads" if loads and row["us"] <= AT_LOADS * loads else "open"
    made = {**row, "target_here_us": here, "target_by": "products", "verdict": verdict}
    return {k: made[k] for k in ("name", "shape", *ROW) if k in made}


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
        rows[name, shape] = run, judged(name, {"name": name, "shape": shape,
                                               **{k: r.get(k) for k in ROW if k in ALWAYS or k in r}})
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
