#!/usr/bin/env python3
"""Writes tests/golden/beams.json: results of beam search as Hugging Face transformers defines it, on the tiny Llama of tests/golden/models.

usage: golden_beams.py tests/golden      (needs numpy)

This is an independent implementation: the model's forward pass in numpy, checked here against the logits that transformers computed
(expect.safetensors), and the loop of GenerationMixin._beam_search of transformers 5 (generation/utils.py) over its arrays, in float32:
log-softmax, scores of -1e9 for what does not exist, (1 + end tokens) * beams candidates, the three ways to stop. Cases in which two
candidates are closer than GAP at a decision are left out: there float32 and double may differ.
"""
import datetime
import json
import os
import sys

import numpy as np

GAP, N_CASES = 2e-4, 60


def load(path):
    data = open(path, "rb").read()
    n = int.from_bytes(data[:8], "little")
    kinds = {"F32": np.float32, "I32": np.int32, "I64": np.int64}
    return {k: np.frombuffer(data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]], kinds[v["dtype"]]).reshape(v["shape"])
            for k, v in json.loads(data[8:8 + n]).items() if k != "__metadata__"}


class Llama:
    def __init__(self, folder):
        self.c = json.load(open(os.path.join(folder, "config.json")))
        self.w = load(os.path.join(folder, "model.safetensors"))
        self.known = {}

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[name]

    def logits(self, ids):
        """Logits after the last token; [n][vocab] of all in self.all."""
        key = tuple(ids)
        if key in self.known:
            return self.known[key]
        c, w, n = self.c, self.w, len(ids)
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        d = c.get("head_dim") or c["hidden_size"] // heads
        freq = c.get("rope_theta", 10000.0) ** (-np.arange(0, d, 2) / d)
        angle = np.concatenate([np.outer(np.arange(n), freq)] * 2, -1)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        x = w["model.embed_tokens.weight"][ids].astype(np.float64)

        def rope(v):
            return v * cos + np.concatenate([-v[..., d // 2:], v[..., :d // 2]], -1) * sin
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            q, k, v = ((h @ w[p + f"self_attn.{m}_proj.weight"].T).reshape(n, -1, d) for m in "qkv")
            q, k = rope(q), np.repeat(rope(k), heads // kv, 1)
            s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d) + np.triu(np.full((n, n), -np.inf), 1)
            s = np.exp(s - s.max(-1, keepdims=True))
            a = np.einsum("hqk,khd->qhd", s / s.sum(-1, keepdims=True), np.repeat(v, heads // kv, 1)).reshape(n, -1)
            x = x + a @ w[p + "self_attn.o_proj.weight"].T
            h = self.norm(x, p + "post_attention_layernorm.weight")
            g = h @ w[p + "mlp.gate_proj.weight"].T
            x = x + (g / (1 + np.exp(-g)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        self.all = self.norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
        self.known[key] = self.all[-1]
        return self.all[-1]


class TooClose(Exception):
    pass


def top(scores, k, decided):
    """Indices of the k best. The border after `decided` of them, and the order before it, must be clear."""
    order = np.argsort(-scores, kind="stable")
    a = scores[order[:min(decided + 1, len(scores))]]
    real = a > -1e8
    if np.any(np.abs(np.diff(a))[real[1:]] < GAP):
        raise TooClose()
    return order[:k]


def generate(m, prompt, beams, eos, max_new, length_penalty, early_stopping):
    f32, vocab, n0 = np.float32, m.c["vocab_size"], len(prompt)
    keep = max(2, 1 + len(eos)) * beams
    running = [list(prompt) for _ in range(beams)]
    running_scores = np.full(beams, -1e9, f32)
    running_scores[0] = 0
    sequences, scores, finished = [list(prompt)] * beams, np.full(beams, -1e9, f32), np.zeros(beams, bool)
    unsatisfied, length = True, n0
    while True:
        x = np.stack([m.logits(r) for r in running]).astype(f32)
        x = x - x.max(-1, keepdims=True)
        logp = x - np.log(np.exp(x).sum(-1, keepdims=True, dtype=f32))
        total = (logp + running_scores[:, None]).astype(f32).reshape(-1)
        at = top(total, keep, 2 * beams)
        top_scores, top_seqs = total[at], [running[i // vocab] + [int(i % vocab)] for i in at]
        hits = np.array([s[-1] in eos or length + 1 >= n0 + max_new for s in top_seqs])
        nxt = top((top_scores + hits * f32(-1e9)).astype(f32), beams, 0)
        running, running_scores = [top_seqs[i] for i in nxt], (top_scores + hits * f32(-1e9))[nxt].astype(f32)
        did = hits & (np.arange(keep) < beams)
        final = (top_scores / f32((length + 1 - n0) ** length_penalty)).astype(f32)
        final = final + f32(-1e9) * (finished.all() and early_stopping is True) + f32(-1e9) * (not unsatisfied) + f32(-1e9) * ~did
        merged, ends = np.concatenate([scores, final]).astype(f32), np.concatenate([finished, did])
        best = top(merged, beams, beams)
        sequences, scores, finished = [(sequences + top_seqs)[i] for i in best], merged[best], ends[best]
        length += 1
        hypothetical = max_new if early_stopping == "never" and length_penalty > 0 else length - n0
        hope = running_scores[0] / hypothetical ** length_penalty
        worst = np.where(finished, scores.min(), -1e9)
        if finished.all() and abs(hope - scores.min()) < GAP:
            raise TooClose()
        unsatisfied = unsatisfied and bool((hope > worst).any())
        if not unsatisfied or (finished.all() and early_stopping is True) or hits.all():
            return [s[n0:] for s in sequences], [float(s) for s in scores]


def main(folder):
    name = "llama"
    m = Llama(os.path.join(folder, "models", name))
    expect = load(os.path.join(folder, "models", name, "expect.safetensors"))
    m.logits(expect["tokens"].tolist())
    error = np.abs(m.all - expect["logits"]).max() / np.abs(expect["logits"]).max()
    assert error < 1e-5, error
    rng, cases, n_close = np.random.default_rng(20261118), [], 0
    while len(cases) < N_CASES:
        m.known = {}
        prompt = rng.integers(3, m.c["vocab_size"], rng.integers(1, 40)).tolist()
        beams, max_new = int(rng.integers(2, 9)), int(rng.integers(2, 25))
        text = list(prompt)
        for _ in range(max_new):
            text.append(int(np.argmax(m.logits(text))))
        likely = text[len(prompt):]
        eos = sorted({likely[int(i)] for i in rng.integers(0, len(likely), rng.integers(0, 4))})
        case = dict(prompt=prompt, beams=beams, eos=eos, max_new=max_new, length_penalty=float(rng.choice([1, 1, 0, 2, -1, 0.5])),
                    early_stopping=[False, True, "never"][rng.integers(0, 3)])
        try:
            case["sequences"], case["scores"] = generate(m, **case)
        except TooClose:
            n_close += 1
            continue
        cases.append(case)
    ended = sum(s[-1] in c["eos"] for c in cases for s in c["sequences"])
    source = (f"tools/golden_beams.py on {datetime.date.today()}: transformers' beam search rendered in numpy float32 (not run in "
              f"transformers), logits within {error:.1e} of those that transformers 5.17.0 computed for this model")
    with open(os.path.join(folder, "beams.json"), "w") as out:
        json.dump(dict(source=source, model=name, cases=cases), out)
        out.write("\n")
    print(f"{len(cases)} cases, {n_close} left out, {ended} of {sum(len(c['sequences']) for c in cases)} answers ended by an end token")


if __name__ == "__main__":
    main(sys.argv[1])
