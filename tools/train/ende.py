#!/usr/bin/env python3
"""Trains a translation model of T5's shape from scratch on pairs of sentences, then drafts for it.

  ende.py --tokenizer tokenizer.json --train TRAIN.tsv --dev DEV.tsv --out DIR [--minutes 4] [--draft-minutes 1.7] [--resume]

  1. data       each line of a .tsv file is a source and a translation with a tab between. Sentences are packed into rows of
                --length tokens, so that every batch has one shape
  2. target     cross entropy of the translations. Every --save seconds the loss on DEV and translations of its first lines
                go to DIR/curve.jsonl, for BLEU over time, and the state to DIR/target.pt
  3. texts      the target translates --texts sources greedily and as many at temperature 1: DIR/texts.pt
  4. drafts     all at once, on these texts: KL + --tv · (1 − Σ min(p, q)) to the target's distribution (loss.py). Agreement
                on 2 % of the texts, held out, is printed: same argmax, and Σ min(p, q)
  5. files      DIR/target.q4.pt, DIR/drafts.q4.pt: weights as Q4_0 codes (float32 vectors), which t5_gguf.py turns into GGUF;
                DIR/hyps.tsv: translations of TEST by target and drafts

In the last --decay of each run the learning rate falls to 0 and all matrices are rounded to Q4_0 in the forward pass; the
files hold the rounded weights. --resume continues an interrupted run: finished stages are read from DIR. Needs torch, numpy,
tokenizers, and for figures like those of docs/translation.md one large GPU.
"""
import argparse
import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import loss
import optim
import t5
from progress import log_line

EOS, START, PAD = 1, 0, 0
DRAFTS = {"fifth": (4, 2, 192, 3, 64, 512), "fifteenth": (3, 1, 96, 3, 32, 256), "fortieth": (3, 2, 32, 4, 32, 256)}


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--train", required=True)
    p.add_argument("--dev", required=True)
    p.add_argument("--test", help="sentences to translate at the end (default: DEV)")
    p.add_argument("--out", required=True)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--minutes", type=float, default=4)
    p.add_argument("--draft-minutes", type=float, default=1.7)
    p.add_argument("--pairs", type=int, default=1 << 30, help="use only the first N training pairs")
    p.add_argument("--shape", type=lambda s: tuple(map(int, s.split(","))), default=(6, 7, 384, 6, 64, 1024),
                   help="encoder layers, decoder layers, width, heads, head size, width of the MLP")
    p.add_argument("--drafts", type=lambda s: s.split(","), default=list(DRAFTS))
    p.add_argument("--length", type=int, default=128)
    p.add_argument("--rows", type=int, default=128, help="rows of --length tokens per step, on each side")
    p.add_argument("--texts", type=int, default=220000)
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=2e-3)
    p.add_argument("--drop", type=float, default=0.05)
    p.add_argument("--tv", type=float, default=0.5)
    p.add_argument("--decay", type=float, default=0.5)
    p.add_argument("--save", type=float, default=40)
    p.add_argument("--log", type=float, default=10)
    p.add_argument("--curve", type=int, default=400, help="sentences of DEV that are translated at each save")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true")
    return p.parse_args()


# --- data ---

def read_pairs(path, tok, limit=1 << 30):
    """[(source ids, translation ids)], both with the end token."""
    sides = [[], []]
    with open(path, encoding="utf-8") as f:
        for i, line in enumerate(f):
            if i >= limit:
                break
            for side, text in zip(sides, line.rstrip("\n").split("\t")):
                side.append(text)
    ids = lambda texts: [np.array(e.ids + [EOS], np.int16) for e in tok.encode_batch_fast(texts, add_special_tokens=False)]
    return ids(sides[0]), ids(sides[1])


def place(src_len, tgt_len, length):
    """(row, number in the row, place in the source row, place in the target row) of each pair: first fit among open rows."""
    out, open_rows, n_rows = np.zeros((len(src_len), 4), np.int32), [], 0
    for i, (s, t) in enumerate(zip(src_len.tolist(), tgt_len.tolist())):
        for r in open_rows:
            if r[2] + s <= length and r[3] + t <= length:
                break
        else:
            r = [n_rows, 0, 0, 0]
            n_rows += 1
            if len(open_rows) == 24:
                open_rows.remove(max(open_rows, key=lambda o: max(o[2], o[3])))
            open_rows.append(r)
        out[i] = r
        r[1], r[2], r[3] = r[1] + 1, r[2] + s, r[3] + t
    return out, n_rows


class Rows:
    """Packed pairs on the device: src, src_seg, tgt (decoder input), tgt_seg, want (−1: none), each [rows][length]."""

    def __init__(self, src, tgt, length, device):
        src_len, tgt_len = (np.array([len(x) for x in side], np.int64) for side in (src, tgt))
        keep = np.flatnonzero((src_len <= length) & (tgt_len <= length) & (tgt_len > 0))
        src, tgt = [src[i] for i in keep], [tgt[i] for i in keep]
        src_len, tgt_len = src_len[keep], tgt_len[keep]
        at, self.n = place(src_len, tgt_len, length)
        self.n_tokens, self.n_pairs = int(tgt_len.sum()), len(keep)
        made = {name: np.zeros(self.n * length, np.int16) for name in ("src", "src_seg", "tgt", "tgt_seg")}
        made["want"] = np.full(self.n * length, -1, np.int16)
        for name, side, lens, col in (("src", src, src_len, 2), ("want", tgt, tgt_len, 3)):
            first = at[:, 0].astype(np.int64) * length + at[:, col]
            within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
            flat = np.repeat(first, lens) + within
            made[name][flat] = np.concatenate(side)
            made["src_seg" if name == "src" else "tgt_seg"][flat] = np.repeat(at[:, 1] + 1, lens)
            if name == "want":
                follows = flat[within > 0]
                made["tgt"][follows] = made["want"][follows - 1]  # the first one is the start token, 0
        self.all = {k: torch.from_numpy(v.reshape(self.n, length)).to(device) for k, v in made.items()}

    def batch(self, rows):
        return {k: v[rows].long() for k, v in self.all.items()}

    def stream(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(self.n, generator=gen).to(self.all["src"].device)
            for i in range(0, max(self.n - n, 0) + 1, n):
                rows = order[i:i + n]
                if len(rows) < n:  # fewer rows than a batch: repeated
                    rows = order[torch.arange(n, device=order.device) % self.n]
                yield self.batch(rows)

    def each(self, n):
        """All rows once; the last batch repeats row 0 and marks it as not wanted."""
        for i in range(0, self.n, n):
            rows = torch.arange(i, i + n, device=self.all["src"].device)
            b = self.batch(rows.clamp(max=self.n - 1))
            b["want"][rows >= self.n] = -1
            yield b


# --- a model in training ---

class Trained:
    """Float32 weights, and their half-precision copies for one step, rounded to Q4_0 if asked."""

    def __init__(self, shape, weights, args):
        self.shape, self.device = shape.check(), torch.device(args.device)
        self.half = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.matrices = [n for n in weights if t5.is_matrix(n)]
        self.flat = torch.cat([weights[n].flatten() for n in self.matrices]).float().to(self.device)
        self.weights, at = {}, 0
        for n in self.matrices:
            self.weights[n] = self.flat[at:at + weights[n].numel()].view(weights[n].shape)
            at += weights[n].numel()
        for n in weights:
            if n not in self.weights:
                self.weights[n] = weights[n].float().to(self.device).requires_grad_()
        self.opt = optim.Optimizer(self.weights, args.muon_lr, args.adam_lr, t5.is_matrix)
        self.model = t5.Model(shape, args.length, self.device, not args.no_compile)

    def n_params(self):
        return sum(w.numel() for w in self.weights.values())

    def ready(self, rounded, grad=True):
        flat = (optim.round_q4_0(self.flat) if rounded else self.flat).to(self.half)
        out, at = {}, 0
        for n in self.matrices:
            out[n] = flat[at:at + self.weights[n].numel()].view(self.weights[n].shape)
            at += self.weights[n].numel()
            if grad:
                out[n] = out[n].detach().requires_grad_()
        for n in self.weights:
            if n not in out:
                out[n] = self.weights[n] if grad else self.weights[n].detach()
        if rounded:
            out["token_embd.weight"] = optim.straight_through(out["token_embd.weight"])
        return out

    def step(self, ready, rate):
        for n in self.matrices:
            self.weights[n].grad = ready[n].grad.float()
        self.opt.step(rate)

    def hidden(self, ready, b, drop=0.0, plain=False):
        return self.model.hidden(ready, b["src"], b["src_seg"], b["tgt"], b["tgt_seg"], drop, plain)

    def dump(self):
        return {"shape": self.shape, "weights": {n: w.detach() for n, w in self.weights.items()}, "optimizer": self.opt.dump()}

    def restore(self, saved):
        for n, w in self.weights.items():
            w.data.copy_(saved["weights"][n])
        self.opt.restore(saved["optimizer"])


def entropy(h, e, want):
    """Sum of the cross entropies of the wanted tokens."""
    return F.cross_entropy((h.to(e.dtype) @ e.T).float(), want, ignore_index=-1, reduction="sum")


class Clock:
    """Fraction of a run that is over; `before` seconds were spent by an interrupted run."""

    def __init__(self, minutes, decay, before=0.0):
        self.start, self.limit, self.decay = time.monotonic() - before, minutes * 60, decay

    def spent(self):
        return time.monotonic() - self.start

    def fraction(self):
        return self.spent() / self.limit

    def rate(self, fraction):
        return min(1.0, fraction / 0.01 + 0.02) * min(1.0, max(0.0, (1 - fraction) / self.decay))


def save(path, what):
    torch.save(what, path + ".part")
    os.replace(path + ".part", path)


# --- the target ---

@torch.no_grad()
def translate(trained, ready, sources, temp, length, batch=2048):
    """[ids] in the order of the sources."""
    sources = [s[:length] for s in sources]
    order, out = sorted(range(len(sources)), key=lambda i: len(sources[i])), [None] * len(sources)
    for at in range(0, len(order), batch):
        part = order[at:at + batch]
        n = max(len(sources[i]) for i in part)
        src = torch.zeros(len(part), n, dtype=torch.long)
        for row, i in enumerate(part):
            src[row, :len(sources[i])] = torch.from_numpy(sources[i].astype(np.int64))
        lens = torch.tensor([len(sources[i]) for i in part])
        seg = (torch.arange(n)[None] < lens[:, None]).long()
        ids = trained.model.generate(ready, src.to(trained.device), seg.to(trained.device), temp, min(length, n * 2 + 8), EOS, START).cpu().numpy()
        for row, i in enumerate(part):
            end = np.flatnonzero(ids[row] == EOS)
            out[i] = ids[row, :end[0] + 1 if len(end) else ids.shape[1]].astype(np.int16)
    return out


@torch.no_grad()
def dev_loss(trained, ready, rows, n):
    total, count = 0.0, 0
    for b in rows.each(n):
        total += float(entropy(trained.hidden(ready, b, plain=True).flatten(0, 1), ready["token_embd.weight"].to(trained.half), b["want"].flatten()))
        count += int((b["want"] >= 0).sum())
    return total / count


def note_curve(args, trained, clock, step, seen, dev_rows, dev_src, tok, rounded):
    start, ready = time.monotonic(), trained.ready(rounded, grad=False)
    hyps = translate(trained, ready, dev_src[:args.curve], 0, args.length)
    value = dev_loss(trained, ready, dev_rows, args.rows)
    with open(os.path.join(args.out, "curve.jsonl"), "a", encoding="utf-8") as f:
        f.write(json.dumps({"seconds": clock.spent(), "step": step, "tokens": seen, "loss": value,
                            "hyps": tok.decode_batch([h.tolist() for h in hyps])}, ensure_ascii=False) + "\n")
    log_line(f"dev loss {value:.4f}  ({time.monotonic() - start:.1f} s)")
    clock.start += time.monotonic() - start  # measuring is not training


def train_target(args, target, rows, dev_rows, dev_src, tok):
    path = os.path.join(args.out, "target.pt")
    saved = torch.load(path, map_location=target.device, weights_only=False) if args.resume and os.path.exists(path) else None
    step, seen, before = 0, 0, 0.0
    if saved:
        target.restore(saved)
        step, seen, before = saved["step"], saved["seen"], saved["spent"]
    clock, stream = Clock(args.minutes, args.decay, before), rows.stream(args.rows, args.seed + step)
    compute = entropy if args.no_compile else torch.compile(entropy, dynamic=False)
    logged, saved_at, total, count, since = time.monotonic(), time.monotonic(), torch.zeros((), device=target.device), 0, 0
    while (fraction := clock.fraction()) < 1:
        rounded = fraction > 1 - args.decay
        ready, b = target.ready(rounded), next(stream)
        h = target.hidden(ready, b, args.drop).flatten(0, 1)
        n = int(rows.n_tokens / rows.n * args.rows)  # the mean: counting would wait for the device
        value = compute(h, ready["token_embd.weight"].to(target.half), b["want"].flatten()) / n
        value.backward()
        target.step(ready, clock.rate(fraction))
        total += value.detach()
        step, seen, count, since = step + 1, seen + n, count + 1, since + n
        if step == 3:  # compiled
            torch.cuda.synchronize() if target.device.type == "cuda" else None
            log_line("first steps done")
            clock.start = time.monotonic() - before
        if time.monotonic() - logged > args.log:
            log_line(f"step {step}  loss {float(total) / count:.4f}  {seen / 1e6:.1f} M tokens, {since / (time.monotonic() - logged) / 1e6:.3f} M/s")
            total.zero_()
            count, since, logged = 0, 0, time.monotonic()
        if time.monotonic() - saved_at > args.save:
            note_curve(args, target, clock, step, seen, dev_rows, dev_src, tok, rounded)
            save(path, target.dump() | {"step": step, "seen": seen, "spent": clock.spent()})
            saved_at = time.monotonic()
    note_curve(args, target, clock, step, seen, dev_rows, dev_src, tok, True)
    save(path, target.dump() | {"step": step, "seen": seen, "spent": clock.spent()})
    log_line(f"target: {step} steps, {seen / 1e6:.1f} M tokens of translations, {rows.n_tokens / 1e6:.1f} M per epoch")


def own_texts(args, target, src):
    path = os.path.join(args.out, "texts.pt")
    if args.resume and os.path.exists(path):
        return torch.load(path, weights_only=False)
    ready, n = target.ready(True, grad=False), min(args.texts, len(src) // 2)
    sources, out = src[-2 * n:], []
    for part, temp in ((sources[:n], 0.0), (sources[n:], 1.0)):
        out += translate(target, ready, part, temp, args.length, 4096)
        log_line(f"{n} translations at temperature {temp:g}")
    mixed = np.random.default_rng(args.seed).permutation(2 * n)
    both = ([sources[i] for i in mixed], [out[i] for i in mixed])
    save(path, both)
    return both


# --- drafts ---

@torch.no_grad()
def agreement(draft, target, ready, fixed, rows, n):
    totals, count = torch.zeros(2, device=target.device), 0
    for b in rows.each(n):
        at = torch.nonzero(b["want"].flatten() >= 0)[:, 0]
        h, ht = (m.hidden(r, b, plain=True).flatten(0, 1)[at] for m, r in ((draft, ready), (target, fixed)))
        stats = loss.measure(h, ready["token_embd.weight"], ht, fixed["token_embd.weight"])
        totals += stats[:, [2, 1]].sum(0)
        count += len(at)
    return (totals / count).tolist()


def train_drafts(args, drafts, target, rows, held):
    fixed = target.ready(True, grad=False)
    output = fixed["token_embd.weight"]
    clock, stream, step, logged = Clock(args.draft_minutes, args.decay), rows.stream(args.rows, args.seed), 0, time.monotonic()
    means = {name: torch.zeros(3, device=target.device) for name in drafts}
    while (fraction := clock.fraction()) < 1:
        b = next(stream)
        weight = (b["want"].flatten() >= 0).float()
        with torch.no_grad():
            ht = target.hidden(fixed, b).flatten(0, 1)
        for name, d in drafts.items():
            ready = d.ready(fraction > 1 - args.decay)
            value, stats = loss.Head.apply(d.hidden(ready, b).flatten(0, 1), ready["token_embd.weight"], ht, output, weight, args.tv, 16384)
            value.backward()
            d.step(ready, clock.rate(fraction))
            means[name] += (stats[:, [0, 1, 2]] * weight[:, None]).sum(0) / weight.sum()
        step += 1
        if step == 3:
            torch.cuda.synchronize() if target.device.type == "cuda" else None
            log_line("first steps of drafts done")
            clock.start = time.monotonic()
        if time.monotonic() - logged > args.log:
            for name, m in means.items():
                kl, both, same = (m / max(step, 1)).tolist()
                log_line(f"step {step}  {name}: KL {kl:.3f}  Σmin {both:.4f}  same {same:.4f} (mean so far)")
            logged = time.monotonic()
    return {name: agreement(d, target, d.ready(True, grad=False), fixed, held, args.rows) for name, d in drafts.items()}


# --- files ---

def q4_0(w):
    """(codes packed as in GGUF [n][16] uint8, steps [n] float16) of a matrix's blocks of 32."""
    x = w.float().reshape(-1, 32)
    top = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    d = top / -8
    code = torch.where(top == 0, torch.full_like(x, 8.0), (x / torch.where(top == 0, torch.ones_like(d), d) + 8.5).clamp(0, 15).floor()).to(torch.uint8)
    return code[:, :16] | code[:, 16:] << 4, d[:, 0].half()


def packed(trained):
    out = {"shape": vars(trained.shape), "weights": {}}
    for name, w in t5.exported(trained.shape, trained.weights).items():
        big = t5.is_matrix(name) or name == "token_embd.weight"
        out["weights"][name] = (tuple(w.shape), *q4_0(w)) if big else w
    return out


def main():
    args = options()
    from tokenizers import Tokenizer
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(args.seed)
    tok = Tokenizer.from_file(args.tokenizer)
    src, tgt = read_pairs(args.train, tok, args.pairs)
    dev_src, dev_tgt = read_pairs(args.dev, tok)
    log_line(f"{len(src)} pairs read")
    rows, dev_rows = Rows(src, tgt, args.length, args.device), Rows(dev_src, dev_tgt, args.length, args.device)
    log_line(f"{rows.n_pairs} pairs in {rows.n} rows, {rows.n_tokens / 1e6:.1f} M tokens of translations, {rows.n_tokens / rows.n / args.length:.2f} of a row used")
    shape = t5.Shape(*args.shape, tok.get_vocab_size())
    target = Trained(shape, t5.first_weights(shape, args.seed), args)
    log_line(f"target: {target.n_params() / 1e6:.2f} M parameters")
    train_target(args, target, rows, dev_rows, dev_src, tok)
    save(os.path.join(args.out, "target.q4.pt"), packed(target))

    own_src, own_tgt = own_texts(args, target, src)
    n_held = max(len(own_src) // 50, 1)
    held = Rows(own_src[:n_held], own_tgt[:n_held], args.length, args.device)
    own = Rows(own_src[n_held:], own_tgt[n_held:], args.length, args.device)
    log_line(f"own texts: {own.n_pairs} in {own.n} rows")
    drafts = {}
    for name in args.drafts:
        s = t5.Shape(*DRAFTS[name], shape.n_vocab)
        drafts[name] = Trained(s, t5.first_weights(s, args.seed + 1), args)
        log_line(f"draft {name}: {drafts[name].n_params() / 1e6:.2f} M parameters")
    result = train_drafts(args, drafts, target, own, held)
    for name, (same, both) in result.items():
        log_line(f"{name}: held out  same {same:.4f}  Σmin {both:.4f}")
    save(os.path.join(args.out, "drafts.q4.pt"), {n: packed(d) | {"agreement": result[n]} for n, d in drafts.items()})
    test_src = read_pairs(args.test, tok)[0] if args.test else dev_src
    with open(os.path.join(args.out, "hyps.tsv"), "w", encoding="utf-8") as f:
        models = {"target": (target, True), "target without rounding": (target, False)} | {n: (d, True) for n, d in drafts.items()}
        for name, (m, rounded) in models.items():
            for line in tok.decode_batch([h.tolist() for h in translate(m, m.ready(rounded, grad=False), test_src, 0, args.length)]):
                f.write(f"{name}\t{line}\n")
    log_line("done")


if __name__ == "__main__":
    main()
