#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A second reader of quantised directories, written from the formats alone.

Usage: read_quant.py BF16_DIR QUANTISED_DIR

Reads safetensors, compressed-tensors pack-quantized INT4 and FP8 128x128 blocks with NumPy and
compares with the BF16 directory: every code is what rounding value / scale gives (bit for bit,
packed by this file's own code), every dequantised value is within half a step, FP8 scales are
amax / 448, everything that is not quantised is byte-equal. Prints what it saw; exits 0, or 1
with the first difference. Exits 77 without NumPy.
"""
import json
import os
import re
import struct
import sys

try:
    import numpy as np
except ImportError:
    print("no numpy")
    sys.exit(77)

ITEM = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "F8_E4M3": 1}


def check(ok, text):
    if not ok:
        print("differs:", text)
        sys.exit(1)


def read_dir(d):
    """name -> (dtype, shape, bytes); the index must name exactly what is there."""
    index = json.load(open(os.path.join(d, "model.safetensors.index.json")))
    out = {}
    for name in sorted(set(index["weight_map"].values())):
        raw = open(os.path.join(d, name), "rb").read()
        n, = struct.unpack("<Q", raw[:8])
        end = 0
        spans = []
        for k, v in json.loads(raw[8:8 + n]).items():
            if k == "__metadata__":
                continue
            a, b = v["data_offsets"]
            size = ITEM[v["dtype"]]
            check(index["weight_map"].get(k) == name, f"{k}: index")
            check(b - a == size * int(np.prod(v["shape"])), f"{k}: span")
            check((8 + n + a) % size == 0, f"{k}: alignment")
            spans.append((a, b))
            out[k] = (v["dtype"], v["shape"], raw[8 + n + a:8 + n + b])
        for a, b in sorted(spans):
            check(a == end, f"{name}: hole or overlap at {a}")
            end = b
        check(8 + n + end == len(raw), f"{name}: length")
    check(set(out) == set(index["weight_map"]), "index and shards differ")
    check(index["metadata"]["total_size"] == sum(len(v[2]) for v in out.values()), "total_size")
    return out


def floats(t):
    dtype, shape, raw = t
    if dtype == "F32":
        return np.frombuffer(raw, "<f4").reshape(shape)
    check(dtype == "BF16", f"dtype {dtype}")
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def pack(q):
    """Eight nibbles an int32, lowest first, nibble = q + 8."""
    n = (q + 8).astype(np.uint32).reshape(q.shape[0], -1, 8)
    return (n << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)


def compare_int4(base, src, out, group):
    w = floats(src[base + ".weight"]).astype(np.float64)
    scale = floats(out[base + ".weight_scale"]).astype(np.float64)
    dtype, shape, raw = out[base + ".weight_packed"]
    check(dtype == "I32" and shape == [w.shape[0], w.shape[1] // 8], f"{base}: packed shape")
    check(list(scale.shape) == [w.shape[0], w.shape[1] // group], f"{base}: scale shape")
    dtype, shape, said = out[base + ".weight_shape"]
    check(dtype == "I64" and list(np.frombuffer(said, "<i8")) == list(w.shape), f"{base}: shape")
    check((scale > 0).all() and np.isfinite(scale).all(), f"{base}: scales")
    words = np.frombuffer(raw, "<u4").reshape(w.shape[0], -1)
    q = ((words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.int64) - 8
    q = q.reshape(w.shape)
    s = np.repeat(scale, group, 1)
    own = np.clip(np.rint(w / s), -8, 7).astype(np.int64)
    check((pack(own) == words).all(), f"{base}: codes are not round(w / scale)")
    inside = (w / s >= -8.5) & (w / s <= 7.5)
    err = np.abs(q * s - w)
    check((err[inside] <= s[inside] * 0.5000001).all(), f"{base}: more than half a step")
    check(inside.mean() > 0.97, f"{base}: {inside.mean():.3f} of the values are clipped")
    amax = np.abs(w).reshape(w.shape[0], -1, group).max(-1)
    plain = np.repeat(np.where(amax > 0, amax, 7) / 7, group, 1)
    plain_err = np.clip(np.rint(w / plain), -8, 7) * plain - w
    return (err ** 2).sum(), (plain_err ** 2).sum(), (w ** 2).sum()


def e4m3_table():
    """All finite non-negative values by code: 4 bits of exponent (bias 7), 3 of mantissa."""
    code = np.arange(127)
    e, m = code >> 3, code & 7
    return np.where(e == 0, m * 2.0 ** -9, (8 + m) * 2.0 ** (e - 10.0))


def e4m3_encode(x, table):
    """Nearest, ties to the even code, saturating."""
    a = np.minimum(np.abs(x), 448.0)
    hi = np.clip(np.searchsorted(table, a), 0, 126)
    lo = np.maximum(hi - 1, 0)
    down, up = a - table[lo], table[hi] - a
    pick = np.where(down < up, lo, np.where(up < down, hi, np.where(lo % 2 == 0, lo, hi)))
    return (pick | (np.signbit(x) << 7)).astype(np.uint8)


def compare_fp8(base, src, out, table):
    w = floats(src[base + ".weight"])
    rows, cols = w.shape
    scale = floats(out[base + ".weight_scale_inv"])
    br, bc = -(-rows // 128), -(-cols // 128)
    check(list(scale.shape) == [br, bc], f"{base}: scale shape")
    padded = np.zeros((br * 128, bc * 128), np.float32)
    padded[:rows, :cols] = np.abs(w)
    amax = padded.reshape(br, 128, bc, 128).max((1, 3))
    want = np.where(amax > 0, amax / np.float32(448), np.float32(1)).astype(np.float32)
    check((want == scale).all(), f"{base}: scales are not amax / 448")
    s = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :cols]
    codes = np.frombuffer(out[base + ".weight"][2], np.uint8).reshape(rows, cols)
    own = e4m3_encode((w / s).astype(np.float32).astype(np.float64), table)
    check((own == codes).all(), f"{base}: codes are not e4m3(w / scale)")
    back = table[codes & 127] * np.where(codes & 128, -1.0, 1.0) * s
    err = np.abs(back - w.astype(np.float64))
    check((err <= np.maximum(np.abs(w) / 16, s * 2.0 ** -10) * 1.00001).all(), f"{base}: error")
    return (err ** 2).sum(), 0.0, (w.astype(np.float64) ** 2).sum()


def classes(config, method):
    """Which matrices must be quantised: the routed experts, or every projection but kv_b_proj."""
    n = config["num_hidden_layers"]
    layer = r"model\.layers\.(%s)\." % "|".join(str(i) for i in range(n))
    expert = layer + r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$"
    if method == "compressed-tensors":
        return re.compile(expert)
    return re.compile(layer + r"(self_attn\.(q|k|v|o|q_a|q_b)_proj|self_attn\.kv_a_proj_with_mqa|"
                      r"mlp\.(shared_experts\.|experts\.\d+\.)?(gate|up|down)_proj)\.weight$")


def main():
    src, out = read_dir(sys.argv[1]), read_dir(sys.argv[2])
    config = json.load(open(os.path.join(sys.argv[2], "config.json")))
    before = json.load(open(os.path.join(sys.argv[1], "config.json")))
    quant = config.pop("quantization_config")
    check(config == before, "config.json changed beyond quantization_config")
    int4 = quant["quant_method"] == "compressed-tensors"
    group = 0
    if int4:
        check(quant["format"] == "pack-quantized", "format")
        scheme = quant["config_groups"]["group_0"]["weights"]
        check(scheme["num_bits"] == 4 and scheme["symmetric"] is True, "scheme")
        group = scheme["group_size"]
    else:
        check(quant["fmt"] == "e4m3" and quant["weight_block_size"] == [128, 128], "fp8 scheme")
        kept = [k[:-7] for k in src if k.endswith("kv_b_proj.weight") or k.endswith("mlp.gate.weight")]
        check(set(kept) <= set(quant["modules_to_not_convert"]), "modules_to_not_convert")
    pattern, table = classes(config, quant["quant_method"]), e4m3_table()
    error = absmax = energy = 0.0
    seen, matrices = set(), 0
    for name in src:
        base = name[:-len(".weight")]
        if not pattern.match(name):
            check(out.get(name) == src[name], f"{name}: should be unchanged")
            seen.add(name)
            continue
        e, a, w = compare_int4(base, src, out, group) if int4 else compare_fp8(base, src, out, table)
        error, absmax, energy, matrices = error + e, absmax + a, energy + w, matrices + 1
        parts = ("weight_packed", "weight_scale", "weight_shape") if int4 else ("weight", "weight_scale_inv")
        seen.update(f"{base}.{p}" for p in parts)
    extra = {k for k in set(out) - seen if not re.search(r"self_attn\.[kv]_scale$", k)}
    check(not extra, f"unexpected tensors {sorted(extra)[:3]}")
    check(matrices > 0, "nothing is quantised")
    relative = (error / energy) ** 0.5
    check(relative < (0.11 if int4 else 0.03), f"relative error {relative:.4f}")
    check(not int4 or error < 0.9 * absmax, f"error {error} against absmax {absmax}")
    print(f"{matrices} matrices, {len(seen)} tensors, relative error {relative:.4f}")


main()
