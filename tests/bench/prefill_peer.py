#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peers of the prefill lines of kvbench-kernels: torch's scaled_dot_product_attention.

    python3 tests/bench/prefill_peer.py [--json] [--replays N] [--filter S]

Needs torch with CUDA; same shapes, same way of timing (a CUDA graph of 8 calls, the median
replay), dense K and V instead of pages. Error: the last 8 tokens against float64.
"""
import argparse
import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

CALLS = 8
# name, query heads, kv heads, head_dim of Q and K, of V, chunk, length
LINES = [
    ("gqa bf16 96/8 prefill", 96, 8, 128, 128, 1024, 1024),
    ("gqa bf16 96/8 prefill", 96, 8, 128, 128, 2048, 2048),
    ("gqa bf16 96/8 prefill", 96, 8, 128, 128, 8192, 8192),
    ("gqa bf16 96/8 prefill", 96, 8, 128, 128, 1024, 32768),
    ("gqa bf16 64/8 prefill", 64, 8, 128, 128, 8192, 8192),
    ("gqa bf16 32/4 prefill", 32, 4, 64, 64, 8192, 8192),
    ("mla bf16 64 prefill-expanded", 64, 64, 192, 128, 2048, 2048),
    ("mla bf16 64 prefill-expanded", 64, 64, 192, 128, 8192, 8192),
    ("mla bf16 64 prefill-expanded", 64, 64, 192, 128, 1024, 32768),
]
BACKENDS = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]


def tensors(heads, kv_heads, dk, dv, q_len, length):
    g = torch.Generator(device="cuda").manual_seed(1)

    def make(h, s, d):  # [tokens][heads][dim] in memory
        x = torch.randn(1, s, h, d, device="cuda", dtype=torch.float32, generator=g)
        return x.to(torch.bfloat16).transpose(1, 2)

    return make(heads, q_len, dk), make(kv_heads, length, dk), make(kv_heads, length, dv)


def call(q, k, v):
    square = q.shape[2] == k.shape[2]
    bias = None if square else causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=square,
                                          enable_gqa=q.shape[1] != k.shape[1])


def time_graph(fn, replays):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS):
            fn()
    graph.replay()
    us = []
    for _ in range(replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        us.append(a.elapsed_time(b) * 1e3 / CALLS)
    return sorted(us)


def error(q, k, v, out):
    rows, length, worst = 8, k.shape[2], 0.0
    group = q.shape[1] // k.shape[1]
    mask = torch.ones(rows, length, dtype=torch.bool, device="cuda").tril(length - rows)
    num = den = 0.0
    for h in range(q.shape[1]):
        s = q[0, h, -rows:].double() @ k[0, h // group].double().T / q.shape[3] ** 0.5
        p = s.masked_fill(~mask, float("-inf")).softmax(-1)
        ref = p @ v[0, h // group].double()
        num += (out[0, h, -rows:].double() - ref).square().sum().item()
        den += ref.square().sum().item()
    return (num / den) ** 0.5


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--json", action="store_true")
    ap.add_argument("--replays", type=int, default=15)
    ap.add_argument("--filter", default="", help="substring of name or shape; a,b = either")
    args = ap.parse_args()
    rows = []
    for name, heads, kv_heads, dk, dv, q_len, length in LINES:
        shape = f"{q_len // 1024}k x {length // 1024}k"
        if not any(part in f"{name} {shape}" for part in args.filter.split(",")):
            continue
        q, k, v = tensors(heads, kv_heads, dk, dv, q_len, length)
        seen = q_len * (length - q_len) + q_len * (q_len + 1) / 2
        flops = 2.0 * seen * heads * (dk + dv)
        for backend, which in BACKENDS:
            row = {"name": name, "shape": shape,
                   "peer": f"torch {torch.__version__} {backend}"}
            try:
                with sdpa_kernel(which):
                    err = error(q, k, v, call(q, k, v))
                    us = time_graph(lambda: call(q, k, v), args.replays)
                row.update(us=us[len(us) // 2], us_min=us[0], us_max=us[-1], err=err,
                           tflops=flops / us[len(us) // 2] * 1e-6)
            except RuntimeError as e:
                row["refused"] = str(e).splitlines()[0][:120]
            rows.append(row)
            print(row["name"], row["shape"], backend,
                  f"{row['us']:.1f} us {row['tflops']:.1f} TFLOP/s err {row['err']:.2e}"
                  if "us" in row else "refused: " + row["refused"], file=sys.stderr)
        del q, k, v
    if args.json:
        json.dump({"schema": "prefill-peer-1", "gpu": torch.cuda.get_device_name(0),
                   "rows": rows}, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
