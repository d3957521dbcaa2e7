#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance-attn.md out of h200-attn.json.

usage: tests/bench/attn_table.py docs/results/h200-attn.json [NAME...]

A table for each name ("attn_gqa fp8") and first word of its shapes ("96/8", "h8"), by batch and context;
with NAMEs only those ("attn_mla fp8 h8"). Targets are scaled to the ceiling of a row's own run, never below the
stored one, but where products bind them ("target_by").
"""
import json
import sys

HEAD = ("| batch x context | ours, us | min .. max | fraction of floor | floor | loads only | best peer | target | |\n"
        "|---|---|---|---|---|---|---|---|---|")
TARGETS_TB_S = 4.66


def us(value):
    return "" if value is None else f"{value:.1f}"


def verdict(row, here):
    if row["us"] <= here:
        words = "reached"
    elif row.get("loads_us") and row["us"] <= 1.03 * row["loads_us"]:
        words = "at its loads"
    else:
        words = "open"
    ahead = row.get("peer_us") and row["us"] < row["peer_us"]
    if words == "reached":
        return words if ahead else words + ", behind the peer"
    return f"{words}, {'ahead of peer' if ahead else 'behind the peer'}"


def size(row):
    batch, context = row["shape"].split()[-1].split("x")
    return int(batch), int(context.rstrip("k"))


def line(row, ceiling):
    here = row["target_us"] * (1 if row.get("target_by") == "products" else max(1, TARGETS_TB_S / ceiling))
    floor = row.get("floor_us") or row["us"] * row["frac"]
    shape = row["shape"].split()[-1].replace("x", " x ")
    return (f"| {shape} | **{us(row['us'])}** | {us(row['us_min'])} .. {us(row['us_max'])} | {100 * row['frac']:.0f} % | "
            f"{us(floor)} | {us(row.get('loads_us'))} | {us(row['peer_us'])} | {us(here)} | {verdict(row, here)} |")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as f:
        doc = json.load(f)
    tables = {}
    for row in doc["rows"]:
        if row.get("target_us") and row.get("peer_us"):
            tables.setdefault(f"{row['name']} {row['shape'].split()[0]}", []).append(row)
    for name, rows in tables.items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        print(f"**{name}**\n\n{HEAD}")
        for row in sorted(rows, key=size):
            print(line(row, doc["runs"][row["run"]]["ceiling_tb_s"]))
        print()


main()
