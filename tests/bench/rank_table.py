#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md, "One rank", from results of `kvbench rank --json`.

usage: rank_table.py FILE...              a line a file: tok/s, step, share of the floor
       rank_table.py --sites FILE N N     where the steps of N requests spend their time
       rank_table.py --keep DIR GPU DRIVER FILE...   write them to DIR as h200-rank-*.json
"""
import json
import os
import sys

GROUPS = [
    ("linear, " + "7,168 (6,144) columns in: q_a, kv_a, router, shared gate and up", None),
    ("linear, the rest: q_b, W_UK, W_UV, o, shared down, dense layers, head", None),
    ("attention", ("attn_",)),
    ("routed experts", ("moe_int4", "moe_fp8", "moe_bf16")),
    ("norms, ropes, append, route, silu, copies, sample",
     ("norm", "rope", "append", "moe_route", "silu", "copy", "sample")),
]


def group_of(name, hidden):
    if name.startswith("linear"):
        dims = name.split()[1].split("x")
        narrow = len(dims) == 2 and int(dims[1]) == hidden and int(dims[0]) <= 2048
        return 0 if narrow else 1
    for i, (_, prefixes) in enumerate(GROUPS):
        if prefixes and name.startswith(prefixes):
            return i
    raise SystemExit(f"rank_table: {name}: no group")


def table(files):
    print("| model | weights | KV | requests | step, us | tok/s | of the floor | check adds, us |")
    print("|---|---|---|---|---|---|---|---|")
    for path in files:
        d = json.load(open(path, encoding="utf-8"))
        for r in d["rows"]:
            check = r["graph_us"] - r["graph_no_check_us"]
            print(f"| {d['preset']} | {d['weights']} | {d['kv']} | {r['requests']} | "
                  f"{r['step_us']:,.0f} | {r['tok_s']:,.0f} | "
                  f"{100 * r['floor_us'] / r['step_us']:.0f} % | {check:+.0f} |")


def sites(path, counts):
    d = json.load(open(path, encoding="utf-8"))
    hidden = 7168 if d["preset"].startswith("kimi") else 6144
    rows = [r for r in d["rows"] if r["requests"] in counts]
    for i, (label, _) in enumerate(GROUPS):
        cells = []
        for r in rows:
            mine = [k for k in r["kernels"] if group_of(k["name"], hidden) == i]
            cells += [f"{sum(k['us'] for k in mine):,.0f}",
                      f"{sum(k['floor_us'] for k in mine):,.0f}"]
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("| graph | " + " | ".join(f"{r['graph_us']:,.0f} | {r['floor_us']:,.0f}"
                                    for r in rows) + " |")


def keep(folder, gpu, driver, files):
    for path in files:
        d = json.load(open(path, encoding="utf-8"))
        head = {"schema": d.pop("schema"), "commit": d.pop("commit"), "gpu": gpu, "driver": driver}
        model = d["preset"].replace("kimi-", "").replace("-5.2", "5.2")
        name = f"h200-rank-{model}-{d['weights']}-{d['kv'].replace('_', '')}.json"
        with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
            json.dump({**head, **d}, out, indent="\t")
            out.write("\n")
        print(name)


def main(argv):
    if len(argv) > 4 and argv[0] == "--keep":
        keep(argv[1], argv[2], argv[3], argv[4:])
    elif len(argv) > 2 and argv[0] == "--sites":
        sites(argv[1], [int(n) for n in argv[2:]])
    elif argv and not argv[0].startswith("-"):
        table(argv)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
