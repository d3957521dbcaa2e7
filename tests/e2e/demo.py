#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo is a test: it must pass, its figures must be right, and docs/demo.txt must be true.

Prints TAP. The build directory is $KV_BUILD. What differs from run to run (numbers, generated
text, ids, paths) is masked before docs/demo.txt is compared, so the comparison is of what the
demo shows and in which order. `demo.py update` writes docs/demo.txt anew.
"""
import json
import os
import re
import subprocess
import sys

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("KV_BUILD") or os.path.join(TOP, "build")
TEXT = os.path.join(TOP, "docs", "demo.txt")


def mask(text):
    """The demo's structure: one line per kind of thing shown."""
    out = []
    for line in text.splitlines():
        line = line.rstrip()
        if line.startswith("   | "):
            line = "   | <text>"
        line = re.sub(r"words of the other request in it: .*", "words: <words>", line)
        line = re.sub(r"\d+(\.\d+)?", "#", line)
        line = re.sub(r"#( ?(KiB|MiB|GiB|B|ns|us|ms|s|%))+", "#", line)
        line = re.sub(r"[ -]+", " ", line)
        if out and line == out[-1]:
            continue
        out.append(line)
    return out


def headings(text):
    return [l for l in mask(text) if l.startswith("==") or l.startswith(" $ ")]


def main():
    demo = subprocess.run([os.path.join(TOP, "tools", "demo")], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True,
                          env=dict(os.environ, KV_BUILD=BUILD), check=False)
    if sys.argv[1:] == ["update"]:
        with open(TEXT, "w", encoding="utf-8") as f:
            f.write(demo.stdout)
        return demo.returncode
    with open(os.path.join(BUILD, "demo.json"), encoding="utf-8") as f:
        result = json.load(f)
    root = os.geteuid() == 0
    cases = [
        ("demo_passes", demo.returncode == 0 and result.get("ok") is True),
        ("demo_stale_aborted", result.get("stale_aborted") is True),
        ("demo_neighbours_equal", result.get("neighbours_equal") is True),
        ("demo_hit_red", (result.get("hit_tokens_red") or 0) >= 64),
        ("demo_miss_blue", result.get("hit_tokens_blue") == 0 if root else None),
        ("demo_reclaim_under_a_second", 0 < result.get("reclaim_ms", 1e9) < 1000),
        ("demo_audit_clean", result.get("audit_errors") == 0),
        ("demo_wrong_words_with_check_off", result.get("wrong_words_with_check_off", 0) > 0),
        ("demo_txt_is_true", headings(demo.stdout) == headings(open(TEXT, encoding="utf-8").read())
         if root else None),
    ]
    print(f"TAP version 13\n1..{len(cases)}")
    bad = 0
    for i, (name, good) in enumerate(cases, 1):
        if good is None:
            print(f"ok {i} - {name} # SKIP needs root")
            continue
        bad += not good
        print(f"{'' if good else 'not '}ok {i} - {name}")
    if bad:
        for line in demo.stdout.splitlines()[-40:]:
            print("#", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
