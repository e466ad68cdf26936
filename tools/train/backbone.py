"""The second stage of Medusa-2 (Cai et al. 2024): heads and their target are trained together, and the result is a new target.

  loss = KL(old target's distribution, new target's) + weight · Σ_k 0.8^k · cross entropy of head k with the text

The first term holds the target where it was: its distributions on its own text are the labels, so nothing but the hidden
states' usefulness to the heads should change. The heads come from medusa.py's first stage, because untrained heads would
damage the target. Adam for the target, with a small rate; the heads keep their optimiser.

Writes DIR/target.gguf (float32, for `sooth quantize`) and the heads for it. The new target has the old one's vocabulary and
shape, so its heads would be found for the old target, too: keep the files in a folder of their own.
"""
import argparse
import os
import time

import torch

import draft
import heads
import llama
import loss
import optim
from progress import log_line

DISCOUNT = 0.8  # of a head's loss, per position ahead


class Joint:
    """The target's weights in float32, trained together with `heads`."""

    def __init__(self, args, heads, data, target):
        self.args, self.heads, self.data, self.target = args, heads, data, target
        self.weights = {n: w.detach().float().clone().requires_grad_() for n, w in target.model.weights.items()}
        longest = int((data.all.plen + data.all.rlen).max())
        self.model = llama.Model(target.model.shape, self.weights, data.device, longest, not args.no_compile)
        self.opt = optim.Optimizer(self.weights, 0, args.backbone_lr, is_matrix=lambda name: False)

    def ready(self):
        """Layers in the device's fast precision, as in draft.py."""
        return {n: w.to(self.heads.dtype) if w.ndim == 2 and n.startswith("blk.") else w for n, w in self.weights.items()}

    def step(self, batch):
        """Gradients of one batch; (KL and agreement with the old target, cross entropy of each head)"""
        ids, pos, docs, rows, at = batch
        ready, subset = self.ready(), self.heads.subset
        h, e = self.model.hidden(ids, pos, docs, ready)[rows], self.model.output(ready)
        keep, stats = loss.Head.apply(h, e, self.target.states[at], self.target.output, torch.ones(len(at), device=h.device), 0.0, self.args.chunk)
        x = self.heads.forward({n: w.to(self.heads.dtype) for n, w in self.heads.weights.items()}, h)
        out = e.detach().to(self.heads.output.dtype)
        out = out if subset is None else out[subset]
        labels = self.heads.rows.labels[:, at]
        each = torch.stack([heads.CrossEntropy.apply(x[k], out, labels[k], self.args.chunk) for k in range(len(labels))])
        scale = DISCOUNT ** torch.arange(1, len(labels) + 1, device=h.device)
        (keep + self.args.backbone_weight * (scale * each).sum()).backward()
        return stats.mean(0)[[0, 2]], each.detach()

    @torch.no_grad()
    def agreement(self):
        """(KL, agreement) of old and new target on held-out text."""
        ready, stats = self.ready(), []
        for ids, pos, docs, rows, at in self.data.batches(self.data.held, self.args.batch):
            h = self.model.hidden(ids, pos, docs, ready)[rows]
            stats.append(loss.measure(h, self.model.output(ready), self.target.states[at], self.target.output))
        return torch.cat(stats).mean(0)[[0, 2]].tolist()

    def finish(self):
        """The heads' rows get the new target's hidden states and output matrix."""
        self.target.model.weights = {n: w.detach().to(self.target.model.weights[n].dtype) for n, w in self.weights.items()}
        self.target.fill(self.data, self.args.batch)
        out = self.target.model.output().to(self.target.half)
        self.heads.output = out if self.heads.subset is None else out[self.heads.subset]


def train(joint, opt):
    """`--backbone` minutes, or --max-steps."""
    args = joint.args
    clock = draft.Clock(argparse.Namespace(minutes=args.backbone, max_steps=args.max_steps, decay=args.decay), 0, time.monotonic())
    stream, step, since = joint.data.stream(args.batch, args.seed), 0, time.monotonic()
    sums, count = torch.zeros(2 + args.heads, device=joint.data.device), 0
    while (fraction := clock.fraction(step)) < 1:
        kept, each = joint.step(next(stream))
        rate = max(0.0, clock.rate(step, fraction))
        joint.opt.step(rate)
        opt.step(rate)
        sums += torch.cat([kept, each])
        step, count = step + 1, count + 1
        if time.monotonic() - since > args.log:
            kl, same, *ce = (sums / count).tolist()
            log_line(f"step {step}  KL {kl:.4f} agree {same:.4f}  cross entropy of head  " + "  ".join(f"{k + 1}: {x:.4f}" for k, x in enumerate(ce)))
            sums.zero_()
            count, since = 0, time.monotonic()
    return step


def run(args, h, opt, data, target, reader):
    """Trains, reports and writes the new target; `h` then belongs to it."""
    joint = Joint(args, h, data, target)
    steps = train(joint, opt)
    kl, same = joint.agreement()
    log_line(f"held out, new and old target: KL {kl:.4f} agree {same:.4f}")
    joint.finish()
    path = os.path.join(args.out, "target.gguf")
    text = lambda key: reader.get_field(key).contents() if reader.get_field(key) else None
    llama.write(path, target.model.shape, joint.weights, llama.Vocab.of(reader), args.name, lambda w: w.add_license(text("general.license") or "unknown"))
    log_line(f"{path}: {steps} steps together")
