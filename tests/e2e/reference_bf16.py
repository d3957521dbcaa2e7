#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What rounding K/V to BF16 does by itself, in float64: the source of reference_bf16.json.

Usage: reference_bf16.py REFERENCE_NUMPY_PY MODELS_DIR > reference_bf16.json

Takes the executable specification of both architectures (reference_numpy.py, NumPy, float64) and
changes one thing: what a page would hold (MLA: latent and rotated rope key; GQA: rotated K, and V)
is rounded to BF16, to nearest even. For the prompts of reference_exact.json it writes the
log-probabilities of the same 16 tokens and the mean prompt loss. Where a router margin is smaller
than the rounding, another expert is chosen and a log-probability moves by up to 0.25: that is a
property of the page format and the model, and a test of an engine must not mistake it for an error.
"""
import importlib.util
import json
import os
import sys

import numpy as np


def bf16(x):
    u = x.astype(np.float32).view(np.uint32)
    u = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) << 16
    return u.view(np.float32).astype(x.dtype)


def make(ref):
    class Rounded(ref.Model):
        def attn_mla(self, x, p, pos):
            c = self.cfg
            n, h = len(x), c["num_attention_heads"]
            dn, dr, dv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
            rank, r = c["kv_lora_rank"], self.rope
            q = self.rms(self.lin(x, p + ".q_a_proj"), self.t[p + ".q_a_layernorm.weight"], 1e-6)
            q = self.lin(q, p + ".q_b_proj").reshape(n, h, dn + dr)
            kv = self.lin(x, p + ".kv_a_proj_with_mqa")
            latent = bf16(self.rms(kv[:, :rank], self.t[p + ".kv_a_layernorm.weight"], 1e-6))
            up = self.lin(latent, p + ".kv_b_proj").reshape(n, h, dn + dv)
            att = self.mscale(r["factor"], r["mscale"]) / self.mscale(r["factor"], r["mscale_all_dim"])
            ang = pos[:, None] * self.yarn(dr)
            cs, sn = np.cos(ang) * att, np.sin(ang) * att

            def rot(z):
                a, b = z[..., 0::2], z[..., 1::2]
                cc, ss = (cs, sn) if z.ndim == 2 else (cs[:, None], sn[:, None])
                return np.concatenate([a * cc - b * ss, b * cc + a * ss], -1)
            qr, kr = rot(q[..., dn:]), bf16(rot(kv[:, rank:]))
            scale = (dn + dr) ** -0.5 * self.mscale(r["factor"], r["mscale_all_dim"]) ** 2
            s = np.einsum("qhd,khd->hqk", q[..., :dn], up[..., :dn], optimize=True)
            s = (s + np.einsum("qhd,kd->hqk", qr, kr, optimize=True)) * scale
            s = np.where(np.tril(np.ones((n, n), bool)), s, -1e30)
            o = np.einsum("hqk,khd->qhd", self.softmax(s), up[..., dn:], optimize=True)
            return self.lin(o.reshape(n, -1), p + ".o_proj")

        def attn_gqa(self, x, p, pos):
            c = self.cfg
            n, h, g, d = len(x), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
            q, k, v = (self.lin(x, f"{p}.{m}_proj").reshape(n, -1, d) for m in "qkv")
            if c.get("use_qk_norm"):
                q = self.rms(q, self.t[p + ".q_norm.weight"], self.eps)
                k = self.rms(k, self.t[p + ".k_norm.weight"], self.eps)
            rd = int(d * self.rope["partial_rotary_factor"])
            ang = pos[:, None] / self.rope["rope_theta"] ** (np.arange(0, rd, 2) / rd)
            cs, sn = np.cos(ang)[:, None], np.sin(ang)[:, None]

            def rot(z):
                a, b = z[..., :rd // 2], z[..., rd // 2:rd]
                return np.concatenate([a * cs - b * sn, b * cs + a * sn, z[..., rd:]], -1)
            q = rot(q)
            k, v = np.repeat(bf16(rot(k)), h // g, 1), np.repeat(bf16(v), h // g, 1)
            s = np.einsum("qhd,khd->hqk", q, k, optimize=True) * d ** -0.5
            s = np.where(np.tril(np.ones((n, n), bool)), s, -1e30)
            o = np.einsum("hqk,khd->qhd", self.softmax(s), v, optimize=True)
            return self.lin(o.reshape(n, -1), p + ".o_proj")
    return Rounded


def main():
    spec = importlib.util.spec_from_file_location("reference_numpy", sys.argv[1])
    ref = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ref)
    out = {"source": "reference_bf16.py: float64, K/V rounded to BF16"}
    for name in ("tiny-k2", "tiny-glm"):
        d = os.path.join(sys.argv[2], name)
        model = make(ref)(d, np.float64)
        with open(os.path.join(d, "reference_exact.json"), encoding="utf-8") as f:
            cases = json.load(f)["cases"]
        rows = []
        for c in cases:
            ids = c["prompt_ids"]
            lp = model.logprobs(ids)
            nll = float(-lp[:-1][np.arange(len(ids) - 1), ids[1:]].mean())
            rows.append({"top16_logprob": [round(float(lp[-1][t]), 7) for t in c["top16_ids"]],
                         "prompt_nll_mean": round(nll, 7)})
        out[name] = rows
    json.dump(out, sys.stdout)
    print()


main()
