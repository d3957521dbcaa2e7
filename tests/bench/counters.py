#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""counters.py - how busy each unit of the GPU is in lines of kvbench-kernels, by Nsight Compute.

usage: counters.py [--bench PROGRAM] [--ncu PROGRAM] [--json FILE] [LINE...]

LINE is FAMILY/KERNEL/FILTER, as in "attn/attn_gqa_kernel/gqa fp8 96/8 64 x 9k"; without any, LINES
below. One launch of each is looked at (the second one: the first has cold code), with the clock as it
is (--clock-control none). Prints a Markdown table; percentages are of the unit's peak over the time
of the kernel, DRAM's of 4.8 TB/s. Needs a GPU whose counters the user may read.
"""
import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile

LINES = [
    "attn/attn_gqa_kernel/gqa fp8 96/8 64 x 9k",
    "attn/attn_gqa_kernel/gqa fp8 12/1 64 x 32k",
    "attn/attn_gqa_kernel/gqa fp8 12/1 256 x 2k",
    "attn/attn_mla_kernel/mla fp8 8 64 x 9k",
    "attn/attn_mla_reg_kernel/mla fp8 64 128 x 8k",
    "attn/attn_mla_fast_kernel/mla fp8 64 fast 128 x 8k",
    "attn/attn_mla_tile_kernel/mla bf16 64 128 x 8k",
    "attn/attn_mla_tile_kernel/mla bf16 64 fast 128 x 8k",
    "moe/moe_i4_kernel/int4 k2 full uniform 128",
    "moe/moe_i4_kernel/int4 k2 full uniform 256",
    "moe/moe_i4_kernel/int4 k2 tp8 uniform 256",
    "moe/wide_kernel/int4 k2 full uniform 1024",
    "moe/wide_kernel/int4 k2 tp8 uniform 1024",
    "moe/fc_kernel/fp8 k2 full uniform 16384",
]

# column: metric
METRICS = {
    "us": "gpu__time_duration.sum",
    "GHz": "sm__cycles_elapsed.avg.per_second",
    "DRAM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "ALU": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "FMA": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "XU": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
}

# to us and to GHz, by ncu's names of units, which differ between versions
SCALE = {"second": 1e6, "msecond": 1e3, "usecond": 1, "nsecond": 1e-3, "s": 1e6, "ms": 1e3, "us": 1, "ns": 1e-3,
         "cycle/second": 1e-9, "1/s": 1e-9, "hz": 1e-9, "cycle/usecond": 1e-3, "mhz": 1e-3, "cycle/nsecond": 1, "ghz": 1}


def rows_of(text):
    """The last launch in ncu's raw CSV: {metric: value in the column's unit}."""
    lines = [r for r in csv.reader(text.splitlines()) if len(r) > 10]
    if len(lines) < 3:
        return None
    head, units, values = lines[0], lines[1], lines[-1]
    got = {}
    for name, unit, value in zip(head, units, values):
        try:
            got[name] = float(value.replace(",", "")) * SCALE.get(unit.lower(), 1)
        except ValueError:
            continue
    if got.get(METRICS["GHz"], 0) > 1e3:
        got[METRICS["GHz"]] *= 1e-9
    return got


def count(ncu, bench, line):
    family, kernel, what = line.split("/", 2)
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as log:
        run = subprocess.run(
            [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--log-file", log.name, "--force-overwrite", "--kill", "yes",
             "-k", "regex:" + kernel, "--launch-skip", "1", "--launch-count", "1", "--metrics", ",".join(METRICS.values()),
             bench, family, "--quick", "--no-check", "--filter", what],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        text = log.read()
    got = rows_of(text)
    if got is None:
        sys.stderr.write("counters: %s: nothing was counted\n%s\n" % (line, (text + run.stdout)[-600:]))
    return got


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bench", default="./kvbench-kernels")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--json")
    parser.add_argument("line", nargs="*", default=LINES)
    args = parser.parse_args()
    table, failed = {}, 0

    for option, program in ("--ncu", args.ncu), ("--bench", args.bench):
        if not shutil.which(program):
            parser.error("%s %s: no such program" % (option, program))
    print("| line | " + " | ".join(METRICS) + " |\n|---|" + "---|" * len(METRICS))
    for line in args.line:
        got = count(args.ncu, args.bench, line)
        if got is None:
            failed += 1
            continue
        table[line] = {c: got.get(m) for c, m in METRICS.items()}
        print("| %s | %s |" % (line.split("/", 2)[2], " | ".join(
            "-" if v is None else "%.1f" % v if c == "us" else "%.2f" % v if c == "GHz" else "%.0f %%" % v for c, v in table[line].items())), flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(table, f, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
