#!/usr/bin/env python3
"""Trains a small Llama-shaped draft on the target's distribution, over text that the target wrote.

  draft.py --target T.gguf --data D.npz.xz [--data MORE.npz] --out DIR [--minutes 9] [--resume] [--decay 0.4] [--qat]

The target runs once over all dialogues. Its hidden states after the last norm stay in memory (they take 1/170 of the size
of its logits), and each training step multiplies them by its output matrix again. Only positions that predict a response
token count; prompts are only input. Loss: KL + --tv · (1 − Σ min(p, q)), see loss.py. One prompt in 50, chosen by a hash,
is held out. The agreement on held-out text is printed during training: `agree` (same argmax) and `Σmin`, for greedy text
and for sampled text.

A run ends within --minutes (0: after --max-steps only) and writes DIR/checkpoint.pt (weights, optimiser, step),
DIR/log.tsv and DIR/draft.gguf (float32, for `sooth quantize`). The learning rate is constant until the last --decay of the
run, then falls to 0. A run with --decay 0 can be continued with --resume by a run that ends with a decay. --qat rounds all
matrices to Q4_0 in the forward pass from the start of the decay on; the file then holds rounded weights, which `sooth
quantize … Q4_0` keeps unchanged.

--boost DRAFT.gguf (repeatable): positions where an earlier draft already agrees with the target get the weight
--boost-rest, so that the new draft learns what the others miss. `union` is the fraction of held-out positions where at least
one of them agrees.
--vocab N: the draft has logits only for a vocabulary subset, the N most frequent ids of the responses it is trained on,
which makes its passes cheaper. The file lists them (vocab.py does the same to a finished draft).

--states: for each token of an answer the draft also reads the target's hidden state that the token was sampled from
(after the last norm; a matrix of the draft maps it to the width of its embedding, and it is added there). A hidden state
summarises the whole text, which a small model cannot compute by itself. Prompts and guesses are read without it, so
during training a fraction --forget of the positions goes without, and results are printed for both.

--from DRAFT.gguf: starts from the weights, shape and vocabulary of a finished draft instead of random weights and --layers,
--d and so on; --keep 0,2,4: only with these of its layers.

Interrupted runs resume from the last checkpoint (written every --save seconds). Needs torch, numpy, gguf, and one large
GPU or much time.
"""
import argparse
import dataclasses
import math
import os
import queue
import re
import sys
import threading
import time

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dialogues
import llama
import loss
import optim
from progress import START, log_line

NO_LIMIT = 1 << 60


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True)
    p.add_argument("--data", required=True, action="append")
    p.add_argument("--out", required=True)
    p.add_argument("--name", default="draft")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--minutes", type=float, default=9, help="0: only --max-steps limits the run")
    p.add_argument("--max-steps", type=int, default=NO_LIMIT)
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--d", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--ff", type=int, default=640)
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--batch", type=int, default=65536, help="tokens per step")
    p.add_argument("--chunk", type=int, default=16384, help="rows whose logits are in memory at once")
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=1.5e-3)
    p.add_argument("--tv", type=float, default=0.5)
    p.add_argument("--decay", type=float, default=0.4, help="final fraction of the run in which the rate falls")
    p.add_argument("--qat", action="store_true")
    p.add_argument("--vocab", type=int, default=0)
    p.add_argument("--from", dest="origin")
    p.add_argument("--keep", type=lambda s: [int(x) for x in s.split(",")])
    p.add_argument("--states", action="store_true")
    p.add_argument("--forget", type=float, default=0.25)
    p.add_argument("--boost", action="append", default=[])
    p.add_argument("--boost-rest", type=float, default=0.15)
    p.add_argument("--save", type=float, default=150)
    p.add_argument("--log", type=float, default=15)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true")
    args = p.parse_args()
    if not 0 <= args.minutes < math.inf:
        p.error(f"--minutes {args.minutes}: must be 0 (no limit) or more")
    if args.minutes == 0 and args.max_steps == NO_LIMIT:
        p.error("--minutes 0 needs --max-steps: the run would never end")
    if not 0 <= args.forget <= 1:
        p.error(f"--forget {args.forget}: must be from 0 to 1")
    if args.keep and not args.origin:
        p.error("--keep selects layers of a draft: name the draft with --from")
    if args.max_steps < 1:
        p.error(f"--max-steps {args.max_steps}: must be 1 or more")
    return args


class Data:
    """All dialogues, with their ids on the device, and the held-out split."""

    def __init__(self, args, n_vocab):
        self.all = dialogues.join([dialogues.read(p, n_vocab) for p in args.data])
        held = self.all.held_out()
        self.held, self.train = np.flatnonzero(held), np.flatnonzero(~held)
        if not len(self.train) or not len(self.held):
            raise SystemExit(f"{len(self.all)} dialogues, {len(self.held)} of them held out: too few, give more --data")
        self.device = torch.device(args.device)
        self.ids = torch.from_numpy(self.all.ids.astype(np.int32)).to(self.device)
        self.n_rows = int(self.all.rlen.sum())
        log_line(f"{len(self.all)} dialogues, {len(self.all.ids) / 1e6:.1f} M tokens, {self.n_rows / 1e6:.1f} M of them responses, "
                 f"{len(self.held)} dialogues held out")

    def to_device(self, batch, max_len):
        at, pos, borders, rows, states = (torch.from_numpy(x).to(self.device, non_blocking=True) for x in batch)
        return self.ids[at].long(), pos, llama.Docs(borders, max_len), rows, states

    def batches(self, which, n_tokens):
        b = dialogues.Batches(self.all, which, n_tokens)
        for batch in b(which[np.argsort(-b.lens[which], kind="stable")]):
            yield self.to_device(batch, b.max_len)

    def stream(self, n_tokens, seed):
        """Endless training batches, prepared ahead by a thread."""
        b, ready = dialogues.Batches(self.all, self.train, n_tokens), queue.Queue(4)

        def fill():
            for batch in b.epochs(seed):
                ready.put([torch.from_numpy(x).pin_memory().numpy() if self.device.type == "cuda" else x for x in batch])
        threading.Thread(target=fill, daemon=True).start()
        while True:
            yield self.to_device(ready.get(), b.max_len)


class Target:
    """The target's hidden states at the positions that predict a response token: stored if they fit, else recomputed."""

    def __init__(self, args, data, shape, weights):
        half = torch.float16 if data.device.type == "cuda" else torch.float32
        self.model = llama.Model(shape, weights, data.device, int((data.all.plen + data.all.rlen).max()), not args.no_compile)
        self.output, self.half = self.model.output().to(half), half
        need = data.n_rows * shape.d * torch.finfo(half).bits // 8
        self.states = None
        if data.device.type == "cpu" or need < 0.6 * torch.cuda.mem_get_info()[0]:
            self.states = torch.empty(data.n_rows, shape.d, dtype=half, device=data.device)
            self.fill(data, args.batch)

    @torch.no_grad()
    def fill(self, data, n_tokens):
        start = time.monotonic()
        for ids, pos, docs, rows, at in data.batches(np.arange(len(data.all)), n_tokens):
            self.states[at] = self.model.hidden(ids, pos, docs)[rows].to(self.half)
        total = float(self.states[:1000].float().abs().mean())
        log_line(f"target's hidden states: {self.states.numel() * self.states.element_size() / 1e9:.1f} GB in "
                 f"{time.monotonic() - start:.1f} s, mean magnitude {total:.3f}")

    @torch.no_grad()
    def get(self, ids, pos, docs, rows, at):
        if self.states is not None:
            return self.states[at]
        return self.model.hidden(ids, pos, docs)[rows].to(self.half)


# --- the draft ---

def first_weights(shape, target, data, seed):
    """Random layers; embedding and last norm from the target: the most important subspace of its logits.

    With hidden states h of second moment C and output matrix E, logits E h = (E C^½ V)(Vᵀ C^−½ h), where V are the eigenvectors of
    C^½ Eᵀ F E C^½ (F: how often each id occurs; E less its mean, which moves no probability). The first d of them make the
    draft's embedding, and a hidden state that predicts well has the unit moments that a norm gives. Each singular value is split evenly
    between embedding and norm, so that no direction dominates where the embedding is the input."""
    dev, n = data.device, target.model.shape.d
    pick = np.concatenate([x[4].cpu().numpy() for x in sample_batches(data, 8)])
    h = target.states[torch.from_numpy(pick).to(dev)].float() if target.states is not None else \
        torch.cat([target.get(*x).float() for x in sample_batches(data, 8)])
    values, vectors = torch.linalg.eigh((h.T @ h / len(h)).double())
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    often = torch.bincount(data.ids.long(), minlength=shape.n_vocab).double()
    often = often / often.sum() + 0.2 / shape.n_vocab
    e = target.model.output().double()
    e = e - (often[:, None] * e).sum(0) / often.sum()
    power, v = torch.linalg.eigh(root @ (e.T @ (often[:, None] * e)) @ root)
    k = min(shape.d, n)
    s = power[-k:].flip(0).clamp(min=1e-12).pow(0.25)  # square root of each singular value
    embd = torch.zeros(shape.n_vocab, shape.d, dtype=torch.float64, device=dev)
    embd[:, :k] = (e @ root @ v[:, -k:].flip(1)) / s
    size = embd.pow(2).mean().sqrt() / 0.2
    gen, weights = torch.Generator().manual_seed(seed), {}
    for name, dims in shape.tensors().items():
        zero = "attn_output" in name or "ffn_down" in name
        weights[name] = torch.ones(dims) if len(dims) == 1 else torch.randn(dims, generator=gen) * (0 if zero else dims[1] ** -0.5)
        weights[name] = weights[name].to(dev)
    weights["token_embd.weight"] = (embd / size).float()
    weights["output_norm.weight"][:k] = (s * size).float()
    log_line(f"embedding from the target: {k} directions contain {float(power[-k:].sum() / power.sum()):.3f} of its logits' power")
    return weights


def sample_batches(data, n):
    which = data.train[:: max(1, len(data.train) // 2000)]
    limit = max(16384, int((data.all.plen + data.all.rlen).max()))
    return [b for b, _ in zip(data.batches(which, limit), range(n))]


class Draft:
    """The draft, and the target's output matrix in the order that the loss expects. subset: its vocabulary subset, None: all ids."""

    def __init__(self, args, shape, weights, data, target, subset=None):
        self.args, self.shape, self.data = args, shape, data
        self.weights = {n: w.clone().requires_grad_() for n, w in weights.items()}
        longest = int((data.all.plen + data.all.rlen).max())
        self.model = llama.Model(shape, self.weights, data.device, longest, not args.no_compile)
        self.dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32
        self.subset, self.target_output = subset, loss.arrange(target.output, subset)
        self.rounded = False

    def ready(self):
        """Weights for the forward pass: rounded if enabled, layers in the device's fast precision."""
        out = {}
        for n, w in self.weights.items():
            x = optim.straight_through(w) if self.rounded and w.ndim == 2 else w
            out[n] = x.to(self.dtype) if w.ndim == 2 and n.startswith("blk.") else x
        return out

    def states(self, batch, ready, target_h, forget):
        ids, pos, docs, rows, _ = batch
        return self.model.hidden(ids, pos, docs, ready, read=self.reads(pos, rows, target_h, forget))[rows]

    def reads(self, pos, rows, target_h, forget):
        """Each row's hidden state goes to the next position, whose token was sampled from it. The last one of a text is not used."""
        if not self.shape.d_state or forget >= 1:
            return None
        known = (rows[1:] == rows[:-1] + 1) & (pos[rows[1:]] > 0)
        # positions without a hidden state get zeros, so that shapes do not change between steps
        known &= torch.rand(len(known), device=known.device) >= forget
        return rows[1:], target_h[:-1] * known[:, None]

    def output(self, ready):
        e = ready["token_embd.weight"]
        return e if self.subset is None else e[self.subset]

    def train_step(self, batch, target_h, weight, tv):
        ready = self.ready()
        value, stats = loss.Head.apply(self.states(batch, ready, target_h, self.args.forget), self.output(ready), target_h, self.target_output, weight, tv,
                                       self.args.chunk)
        value.backward()
        return value.detach(), stats

    @torch.no_grad()
    def agreement(self, batch, target, forget=0.0):
        ready, target_h = self.ready(), target.get(*batch)
        return loss.measure(self.states(batch, ready, target_h, forget), self.output(ready), target_h, self.target_output)


GROUPS = (("temp 0", lambda d, i: (d.temp[i] == 0) & (d.kind[i] < 4)), ("sampled", lambda d, i: (d.temp[i] > 0) & (d.kind[i] < 4)),
          ("context 0", lambda d, i: (d.temp[i] == 0) & (d.kind[i] >= 4)), ("context", lambda d, i: (d.temp[i] > 0) & (d.kind[i] >= 4)))


def evaluate(draft, target, data, covered=None, forget=0.0):
    """{group: (agree, Σmin, union)} for the held-out dialogues."""
    out = {}
    for name, test in GROUPS:
        which = data.held[test(data.all, data.held)]
        if not len(which):
            continue
        stats, union = [], []
        for batch in data.batches(which, draft.args.batch):
            s = draft.agreement(batch, target, forget)
            stats.append(s)
            union.append(s[:, 2] if covered is None else torch.maximum(s[:, 2], covered[batch[4]].float()))
        m = torch.cat(stats).mean(0).tolist()
        out[name] = (m[2], m[1], float(torch.cat(union).mean()))
    return out


def format_result(result, boosted):
    return "; ".join(f"{n}: agree {a:.4f} Σmin {m:.4f}" + (f" union {u:.4f}" if boosted else "") for n, (a, m, u) in result.items())


def earlier_drafts(args, data, target):
    """uint8 [rows]: 1 where a draft of --boost has the target's argmax; None without --boost."""
    if not args.boost:
        return None
    covered = torch.zeros(data.n_rows, dtype=torch.uint8, device=data.device)
    for path in args.boost:
        shape, weights, reader = llama.load(path, data.device)
        if shape.n_vocab != target.model.shape.n_vocab:
            raise SystemExit(f"{path}: {shape.n_vocab} tokens, the target has {target.model.shape.n_vocab}")
        other = Draft(args, shape, weights, data, target, llama.vocab_subset(reader, shape.n_vocab, data.device))
        for batch in data.batches(np.arange(len(data.all)), args.batch):
            covered[batch[4]] |= other.agreement(batch, target)[:, 2].to(torch.uint8)
        log_line(f"{path}: together with earlier drafts it agrees at {float(covered.float().mean()):.3f} of all positions")
    return covered


# --- the run ---

def save(path, draft, opt, step, n_rows):
    torch.save({"shape": draft.shape, "weights": {n: w.detach() for n, w in draft.weights.items()}, "optimizer": opt.dump(),
                "step": step, "rows": n_rows, "subset": draft.subset}, path + ".part")
    os.replace(path + ".part", path)


def restore(path, device):
    try:
        with torch.serialization.safe_globals([llama.Shape]):
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # torch raises many kinds of exceptions for a damaged file
        raise SystemExit(f"{path}: {e}: cannot be resumed; start without --resume")


def finished(path, target, device, keep):
    """(shape, weights, vocabulary subset) of a draft whose embedding is its output matrix. keep: layers to keep, None: all."""
    shape, weights, reader = llama.load(path, device)
    if shape.n_vocab != target.n_vocab:
        raise SystemExit(f"{path}: {shape.n_vocab} tokens, the target has {target.n_vocab}")
    if "output.weight" in weights:
        raise SystemExit(f"{path}: has a separate output matrix; only drafts that use their embedding are supported")
    if shape.d_state not in (0, target.d):
        raise SystemExit(f"{path}: reads hidden states of {shape.d_state} numbers; the target's have {target.d}")
    if keep:
        if min(keep) < 0 or max(keep) >= shape.n_layers:
            raise SystemExit(f"--keep {keep}: {path} has layers 0 to {shape.n_layers - 1}")
        fewer = dataclasses.replace(shape, n_layers=len(keep))
        moved = {n: re.sub(r"(?<=^blk\.)\d+", lambda m: str(keep[int(m[0])]), n) for n in fewer.tensors()}
        shape, weights = fewer, {n: weights[old] for n, old in moved.items()}
    return shape, weights, llama.vocab_subset(reader, shape.n_vocab, device)


def with_states(shape, weights, d_state):
    if shape.d_state:
        return shape, weights
    zero = torch.zeros(shape.d, d_state, device=weights["token_embd.weight"].device)
    return dataclasses.replace(shape, d_state=d_state).check(), {**weights, llama.STATE: zero}


def begin(args, data, target):
    """(draft, optimiser, step, rows seen)"""
    path = os.path.join(args.out, "checkpoint.pt")
    if args.resume:
        c = restore(path, data.device)
        if c["shape"].n_vocab != target.model.shape.n_vocab:
            raise SystemExit(f"{path}: was trained for {c['shape'].n_vocab} tokens, the target has {target.model.shape.n_vocab}")
        if "subset" not in c:
            raise SystemExit(f"{path}: was written by an older version: use --from DIR/draft.gguf instead of --resume")
        draft = Draft(args, c["shape"], c["weights"], data, target, c["subset"])
        opt = optim.Optimizer(draft.weights, args.muon_lr, args.adam_lr)
        opt.restore(c["optimizer"])
        log_line(f"{path}: resuming at step {c['step']}, {c['rows'] / 1e6:.0f} M rows seen")
        return draft, opt, c["step"], c["rows"]
    t, subset = target.model.shape, None
    if args.origin:
        shape, weights, subset = finished(args.origin, t, data.device, args.keep)
    else:
        shape = llama.Shape(args.layers, args.d, args.heads, args.kv_heads, args.d // args.heads, args.ff, t.n_vocab, t.rope_base,
                            t.eps, args.ctx).check()
        weights = first_weights(shape, target, data, args.seed)
    if args.states:
        shape, weights = with_states(shape, weights, t.d)
    if args.vocab:
        subset = torch.from_numpy(dialogues.frequent(data.all, data.train, t.n_vocab, args.vocab)).to(data.device)
    draft = Draft(args, shape, weights, data, target, subset)
    return draft, optim.Optimizer(draft.weights, args.muon_lr, args.adam_lr), 0, 0


class Clock:
    """Progress of the run as a fraction, by time or by steps, and the learning rate."""

    def __init__(self, args, first, start=START):
        self.args, self.first, self.begin = args, first, time.monotonic()
        self.end = start + args.minutes * 60 - min(25, args.minutes * 6) if args.minutes else math.inf

    def fraction(self, step):
        by_time = (time.monotonic() - self.begin) / max(1e-3, self.end - self.begin)
        return max(by_time, (step - self.first) / self.args.max_steps)

    def rate(self, step, fraction):
        warm = min(1.0, (step + 1) / 100)
        return warm * (min(1.0, (1 - fraction) / self.args.decay) if self.args.decay else 1.0)


def train(args, draft, opt, target, data, covered, step, n_rows):
    clock, log = Clock(args, step), open(os.path.join(args.out, "log.tsv"), "a")
    since, saved, sums, count = time.monotonic(), time.monotonic(), torch.zeros(4, device=data.device), 0
    stream = data.stream(args.batch, args.seed + step)
    logged_rows = n_rows
    while (fraction := clock.fraction(step)) < 1:
        batch = next(stream)
        if args.qat and not draft.rounded and fraction >= 1 - args.decay:
            draft.rounded = True
            log_line("rounding weights to Q4_0 from this step on")
        weight = torch.ones(len(batch[3]), device=data.device)
        if covered is not None:
            weight -= (1 - args.boost_rest) * covered[batch[4]]
        value, stats = draft.train_step(batch, target.get(*batch), weight, args.tv)
        opt.step(max(0.0, clock.rate(step, fraction)))
        sums += stats.mean(0)
        step, n_rows, count = step + 1, n_rows + len(batch[3]), count + 1
        if time.monotonic() - since > args.log:
            kl, both, same, _ = (sums / count).tolist()
            took = time.monotonic() - since
            log_line(f"step {step}  KL {kl:.4f}  Σmin {both:.4f}  agree {same:.4f}  {n_rows / 1e6:.0f} M rows, "
                     f"{(n_rows - logged_rows) / took / 1e6:.2f} M/s  {1e3 * took / count:.0f} ms")
            log.write(f"{step}\t{n_rows}\t{kl:.5f}\t{both:.5f}\t{same:.5f}\n")
            log.flush()
            logged_rows, count, since = n_rows, 0, time.monotonic()
            sums.zero_()
        if time.monotonic() - saved > args.save:
            log_line("held out  " + format_result(evaluate(draft, target, data, covered), args.boost))
            save(os.path.join(args.out, "checkpoint.pt"), draft, opt, step, n_rows)
            saved = time.monotonic()
    return step, n_rows


def finish(args, draft, opt, target, data, covered, reader, step, n_rows):
    held = evaluate(draft, target, data, covered)
    log_line("held out  " + format_result(held, args.boost))
    if draft.shape.d_state:
        log_line("held out, no states  " + format_result(evaluate(draft, target, data, covered, 1.0), args.boost))
    save(os.path.join(args.out, "checkpoint.pt"), draft, opt, step, n_rows)
    if args.qat and not draft.rounded:
        draft.rounded = True
    weights = {n: optim.round_q4_0(w) if draft.rounded and w.ndim == 2 else w for n, w in draft.weights.items()}
    ids = None if draft.subset is None else draft.subset.cpu().numpy()
    agreement = next(iter(held.values()))[0]  # the first group is greedy text, if there is any
    llama.export(os.path.join(args.out, "draft.gguf"), draft.shape, weights, reader, args.name, ids, agreement)
    if not draft.rounded:
        draft.rounded = True
        log_line("held out, rounded to Q4_0  " + format_result(evaluate(draft, target, data, covered), args.boost))
    log_line(f"{args.out}/draft.gguf: {sum(w.numel() for w in weights.values()) / 1e6:.2f} M parameters, {n_rows / 1e6:.0f} M rows seen")


def main():
    args = options()
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.out, exist_ok=True)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    shape, weights, reader = llama.load(args.target, args.device, dtype)
    data = Data(args, shape.n_vocab)
    target = Target(args, data, shape, weights)
    covered = earlier_drafts(args, data, target)
    draft, opt, step, n_rows = begin(args, data, target)
    step, n_rows = train(args, draft, opt, target, data, covered, step, n_rows)
    finish(args, draft, opt, target, data, covered, reader, step, n_rows)


if __name__ == "__main__":
    main()
