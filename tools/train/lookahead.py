#!/usr/bin/env python3
"""Trains look-ahead embeddings (PaSS: Monea, Joulin, Grave 2023) for a frozen target, over text that the target wrote.

  lookahead.py --target T.gguf --data D.npz.xz [--data MORE.npz] --out DIR [--heads 4] [--vocab 16384] [--minutes 4] [--resume]

The target itself guesses: after the last token of a text, at position i, come --heads rows whose inputs are learned embeddings
instead of tokens, at positions i + 1, i + 2, …. Row k sees the text and the rows before it, and guesses token i + 1 + k. (Row i
itself decides token i + 1, as always.) Only the embeddings are trained: a few thousand numbers.

Each step takes --docs texts, computes the keys and values of their tokens once, and then the look-ahead rows at --points random
places of each answer. Loss and held-out split are those of heads.py. Writes DIR/heads.gguf. Needs torch, numpy, gguf, and one
large GPU or much time.
"""
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draft
import heads
import llama
from progress import log_line


class Places:
    """Texts padded to one length, the keys and values of their tokens, and the places where look-ahead rows are inserted."""

    @torch.no_grad()
    def __init__(self, data, model, docs, n_points, n_ahead, gen):
        d, dev = data.all, data.device
        lens = d.plen[docs] + d.rlen[docs]
        self.width, self.model, self.n_ahead = int(lens.max()) - 1, model, n_ahead
        at = np.minimum(d.start[docs][:, None] + np.arange(self.width + 1)[None], (d.start[docs] + lens)[:, None] - 1)
        ids = data.ids[torch.from_numpy(at).to(dev)].long()  # [B][width + 1]
        n = len(docs)
        # a place is the position of the text's last token: the one before the answer, or one of the answer's with n_ahead + 1 tokens after it
        last = torch.from_numpy(d.plen[docs] - 1).to(dev)
        room = torch.from_numpy(np.maximum(d.rlen[docs] - n_ahead, 1)).to(dev)
        self.point = last[:, None] + (torch.rand(n, n_points, generator=gen, device=dev) * room[:, None]).long()
        self.pos = self.point[:, :, None] + 1 + torch.arange(n_ahead, device=dev)  # [B][points][ahead]
        end = torch.from_numpy(lens).to(dev)[:, None, None]
        label_at = self.pos + 1
        self.token = torch.where(label_at < end, ids.gather(1, label_at.clamp(max=self.width).flatten(1)).view_as(label_at), -1)
        self.kv = []
        flat = ids[:, :-1].flatten()
        borders = torch.arange(n + 1, device=dev, dtype=torch.int32) * self.width
        model.hidden(flat, torch.arange(self.width, device=dev).repeat(n), llama.Docs(borders, self.width),
                     keep=lambda i, k, v: self.kv.append((k.unflatten(0, (n, -1)), v.unflatten(0, (n, -1)))))
        self.mask = self.visible(n, n_points)

    def visible(self, n, n_points):
        """[B][1][look-ahead rows][width + look-ahead rows]"""
        dev, rows = self.point.device, n_points * self.n_ahead
        text = torch.arange(self.width, device=dev)[None, None] <= self.point.repeat_interleave(self.n_ahead, 1)[:, :, None]
        i = torch.arange(rows, device=dev)
        own = (i[:, None] // self.n_ahead == i[None] // self.n_ahead) & (i[:, None] >= i[None])
        return torch.cat((text, own[None].expand(n, -1, -1)), -1)[:, None]

    def states(self, embd):
        """The hidden states of the look-ahead rows, [B · points · ahead][d]."""
        m, s, n = self.model, self.model.shape, len(self.point)
        rows = self.point.shape[1] * self.n_ahead
        x = embd.to(m.weights["blk.0.attn_q.weight"].dtype).repeat(n * self.point.shape[1], 1)
        cos, sin, group = m.cos[self.pos.flatten()], m.sin[self.pos.flatten()], s.n_heads // s.n_kv
        for i in range(s.n_layers):
            q, k, v = llama.qkv(x, cos, sin, *llama.layer(m.weights, i, llama.FIRST), s)
            q, k, v = (y.unflatten(0, (n, rows)) for y in (q, k, v))
            k, v = (torch.cat((old, new), 1).repeat_interleave(group, 2).transpose(1, 2) for old, new in zip(self.kv[i], (k, v)))
            a = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=self.mask)
            x = llama.attn_out_ffn(x, a.transpose(1, 2).flatten(0, 1), *llama.layer(m.weights, i, llama.SECOND), s)
        return llama.rms_norm(x.float(), m.weights["output_norm.weight"], s.eps)


class Trainer:
    def __init__(self, args, data, model, subset):
        self.args, self.data, self.model, dev = args, data, model, data.device
        half = torch.float16 if dev.type == "cuda" else torch.float32
        out = model.output().to(half)
        self.output = out if subset is None else out[subset]
        self.column = torch.full((model.shape.n_vocab + 1,), -1, dtype=torch.int64, device=dev)
        ids = torch.arange(model.shape.n_vocab, device=dev) if subset is None else subset
        self.column[ids] = torch.arange(len(ids), device=dev)
        self.gen = torch.Generator(device=dev).manual_seed(args.seed)
        mean = model.weights["token_embd.weight"].float().mean(0)
        noise = torch.randn(args.heads, model.shape.d, generator=self.gen, device=dev) * model.weights["token_embd.weight"].float().std()
        self.embd = (mean + 0.5 * noise).requires_grad_()
        self.opt = torch.optim.Adam([self.embd], lr=args.embd_lr, betas=(0.9, 0.98))

    def places(self, docs):
        return Places(self.data, self.model, docs, self.args.points, self.args.heads, self.gen)

    def loss(self, docs):
        p = self.places(docs)
        x, label = p.states(self.embd), self.column[p.token.flatten()]
        n = self.args.heads
        return torch.stack([heads.CrossEntropy.apply(x[k::n], self.output, label[k::n], self.args.chunk) for k in range(n)])

    @torch.no_grad()
    def accuracy(self, which):
        n, k = self.args.heads, min(heads.RANKS, len(self.output))
        hits, count = torch.zeros(n, heads.RANKS, device=self.data.device), torch.zeros(n, device=self.data.device)
        for i in range(0, len(which), self.args.docs):
            p = self.places(which[i:i + self.args.docs])
            known, label = p.token.flatten() >= 0, self.column[p.token.flatten()]
            top = (p.states(self.embd).to(self.output.dtype) @ self.output.T).float().topk(k, -1)[1]
            right = (top == label[:, None]) & known[:, None]
            for j in range(n):
                hits[j, :k] += right[j::n].sum(0)
                count[j] += known[j::n].sum()
        return (hits / count.clamp(min=1)[:, None]).cpu()

    def report(self):
        d, out = self.data, None
        for name, test in (("temp 0", d.all.temp == 0), ("sampled", d.all.temp > 0)):
            which = d.held[test[d.held]]
            if len(which):
                acc = self.accuracy(which)
                log_line(f"held out, {name}, top 1/3/5/10 of row  {heads.show(acc)}")
                out = acc if out is None else out
        return out


def batches(args, data):
    """Endless lists of texts of similar length; the order depends on the seed alone."""
    rng, d = np.random.default_rng(args.seed), data.all
    long = data.train[d.rlen[data.train] > args.heads + 1]
    if not len(long):
        raise SystemExit(f"no answer has more than {args.heads + 1} tokens: give --heads less, or more --data")
    order = long[np.argsort(d.plen[long] + d.rlen[long], kind="stable")]
    groups = [order[i:i + args.docs] for i in range(0, len(order), args.docs)]
    while True:
        for i in rng.permutation(len(groups)):
            yield groups[i]


def save(path, t, step):
    torch.save({"embd": t.embd.detach(), "optimizer": t.opt.state_dict(), "step": step}, path + ".part")
    os.replace(path + ".part", path)


def restore(path, t):
    c = draft.restore(path, t.data.device)
    if c["embd"].shape != t.embd.shape:
        raise SystemExit(f"{path}: has {list(c['embd'].shape)} embeddings, this run {list(t.embd.shape)}: give the options of the run that wrote it")
    with torch.no_grad():
        t.embd.copy_(c["embd"])
    t.opt.load_state_dict(c["optimizer"])
    log_line(f"{path}: resuming at step {c['step']}")
    return c["step"]


def train(args, t, step):
    clock, path = draft.Clock(args, step), os.path.join(args.out, "checkpoint.pt")
    since = saved = time.monotonic()
    sums, count = torch.zeros(args.heads, device=t.data.device), 0
    stream = batches(args, t.data)
    while (fraction := clock.fraction(step)) < 1:
        loss = t.loss(next(stream))
        t.opt.param_groups[0]["lr"] = args.embd_lr * max(0.0, clock.rate(step, fraction))
        loss.sum().backward()
        t.opt.step()
        t.opt.zero_grad()
        sums += loss.detach()
        step, count = step + 1, count + 1
        if time.monotonic() - since > args.log:
            took = time.monotonic() - since
            log_line(f"step {step}  cross entropy of row  " + "  ".join(f"{k + 1}: {x:.4f}" for k, x in enumerate((sums / count).tolist())) +
                     f"  {1e3 * took / count:.0f} ms")
            sums.zero_()
            count, since = 0, time.monotonic()
        if time.monotonic() - saved > args.save:
            t.report()
            save(path, t, step)
            saved = time.monotonic()
    return step


def main():
    p = heads.parser(__doc__)
    p.add_argument("--docs", type=int, default=64, help="texts of a step")
    p.add_argument("--points", type=int, default=24, help="places in each text")
    p.add_argument("--embd-lr", type=float, default=5e-3)
    args = heads.check(p, p.parse_args())
    data, model, reader, subset = heads.open_model(args)
    t = Trainer(args, data, model, subset)
    step = restore(os.path.join(args.out, "checkpoint.pt"), t) if args.resume else 0
    step = train(args, t, step)
    accuracy = t.report()
    save(os.path.join(args.out, "checkpoint.pt"), t, step)
    path = os.path.join(args.out, "heads.gguf")
    heads.write(path, "lookahead", {"look_ahead": t.embd}, reader, args.name, {"count": args.heads}, subset, accuracy)
    log_line(f"{path}: {t.embd.numel()} numbers, {step} steps of {args.docs} texts")


if __name__ == "__main__":
    main()
