"""Training of decoding heads: small networks that guess several tokens ahead from one hidden state of a frozen target.

medusa.py and blockwise.py define the network; this file has what they share: the target's hidden states, the labels, the
loss, the run, and the file that is written (docs/formats.md, "Heads").

Position. The target samples token i + 1 of a text from the hidden state h at position i (after the last norm). Head k reads
h and guesses token i + 1 + k: head 1 is the first one that guesses something the target has not decided yet. All heads
share the target's own output matrix, or its rows for a vocabulary subset, which is not trained and not written.

Loss: cross entropy with the tokens that follow in the text, each head for itself. Rows whose label is past the end of the
text or outside the subset do not count in the loss; in the printed accuracy a label outside the subset is a miss.

One prompt in 50, chosen by a hash, is held out (dialogues.py). Runs end by --minutes or --max-steps, write DIR/checkpoint.pt,
and continue with --resume.
"""
import argparse
import math
import os
import sys
import time

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dialogues
import draft
import llama
import optim
from progress import log_line

RANKS = 64  # guesses per head whose accuracy is measured and written: as many as a tree may use


def parser(doc):
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True)
    p.add_argument("--data", required=True, action="append")
    p.add_argument("--out", required=True)
    p.add_argument("--name", default="heads")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--minutes", type=float, default=4, help="0: only --max-steps limits the run")
    p.add_argument("--max-steps", type=int, default=draft.NO_LIMIT)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--vocab", type=int, default=0, help="logits for the N most frequent ids only; 0: for all")
    p.add_argument("--batch", type=int, default=65536, help="tokens per pass of the target")
    p.add_argument("--rows", type=int, default=32768, help="hidden states per step")
    p.add_argument("--chunk", type=int, default=16384, help="rows whose logits are in memory at once")
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=1e-3)
    p.add_argument("--decay", type=float, default=0.6, help="final fraction of the run in which the rate falls")
    p.add_argument("--save", type=float, default=150)
    p.add_argument("--log", type=float, default=15)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true")
    return p


def check(p, args):
    if not 0 <= args.minutes < math.inf:
        p.error(f"--minutes {args.minutes}: must be 0 (no limit) or more")
    if args.minutes == 0 and args.max_steps == draft.NO_LIMIT:
        p.error("--minutes 0 needs --max-steps: the run would never end")
    if not 1 <= args.heads <= 16:
        p.error(f"--heads {args.heads}: must be from 1 to 16")
    if args.max_steps < 1:
        p.error(f"--max-steps {args.max_steps}: must be 1 or more")
    return args


# --- data ---

class Rows:
    """Hidden states and the tokens that follow, one row per response token; see dialogues.Batches for their order."""

    def __init__(self, args, data, target, subset):
        d, dev = data.all, data.device
        if target.states is None:
            raise SystemExit(f"{data.n_rows} hidden states of {target.model.shape.d} numbers do not fit the device: give less --data")
        self.states, self.data, self.target = target.states, data, target
        text = torch.from_numpy(d.ids[dialogues.ranges(d.start[:-1] + d.plen, d.rlen)].astype(np.int64)).to(dev)
        left = torch.from_numpy(np.repeat(np.cumsum(d.rlen), d.rlen) - np.arange(data.n_rows)).to(dev)  # rows to the end of the text, this one included
        column = torch.full((target.model.shape.n_vocab,), -1, dtype=torch.int64, device=dev)
        ids = torch.arange(len(column), device=dev) if subset is None else subset
        column[ids] = torch.arange(len(ids), device=dev)
        # labels [heads][rows]: a column of the output, −1 outside the subset, −2 past the end
        self.labels = torch.stack([torch.where(left > k, column[text.roll(-k)], -2) for k in range(1, args.heads + 1)])

    def of(self, which):
        """The row numbers of these dialogues."""
        row0 = np.concatenate([[0], np.cumsum(self.data.all.rlen)])
        return torch.from_numpy(dialogues.ranges(row0[which], self.data.all.rlen[which])).to(self.data.device)

    def stream(self, n, seed):
        """Endless batches of n row numbers of the training part."""
        rows, gen = self.of(self.data.train), torch.Generator(device=self.data.device).manual_seed(seed)
        n = min(n, len(rows))
        while True:
            order = rows[torch.randperm(len(rows), generator=gen, device=self.data.device)]
            for i in range(0, len(order) - n + 1, n):
                yield order[i:i + n]


# --- loss ---

class CrossEntropy(torch.autograd.Function):
    """(states [n][d], output matrix [columns][d], labels [n], negative: none) -> mean loss. The matrix is a constant."""

    @staticmethod
    def forward(ctx, x, e, label, chunk):
        grad_dtype = torch.bfloat16 if x.is_cuda else torch.float32
        half, e_grad = e.dtype, e.to(grad_dtype)
        dx, total, count = torch.empty_like(x, dtype=torch.float32), x.new_zeros((), dtype=torch.float32), (label >= 0).sum().clamp(min=1)
        for i in range(0, len(x), chunk):
            y = label[i:i + chunk]
            known, at = (y >= 0).float(), y.clamp(min=0)[:, None]
            z = (x[i:i + chunk].to(half) @ e.T).float()
            z -= z.logsumexp(-1, keepdim=True)
            total -= (z.gather(1, at)[:, 0] * known).sum()
            g = z.exp_()
            g.scatter_add_(1, at, torch.full_like(at, -1, dtype=g.dtype))
            g *= (known / count)[:, None]
            dx[i:i + chunk] = g.to(grad_dtype) @ e_grad
        ctx.save_for_backward(dx)
        return total / count

    @staticmethod
    def backward(ctx, up):
        return ctx.saved_tensors[0] * up, None, None, None


# --- the heads ---

class Heads:
    """Weights by the names of the file, and forward(weights, h) -> [heads][n][d], the states that the output matrix reads."""

    def __init__(self, args, weights, forward, rows, subset):
        self.args, self.forward, self.rows, self.subset = args, forward, rows, subset
        self.weights = {n: w.clone().requires_grad_() for n, w in weights.items()}
        self.dtype = torch.bfloat16 if rows.data.device.type == "cuda" else torch.float32
        out = rows.target.output
        self.output = out if subset is None else out[subset]

    def loss(self, which):
        x = self.forward({n: w.to(self.dtype) for n, w in self.weights.items()}, self.rows.states[which])
        labels = self.rows.labels[:, which]
        # one mean per head: their rows differ in number by those past the end of a text
        return torch.stack([CrossEntropy.apply(x[k], self.output, labels[k], self.args.chunk) for k in range(len(labels))])

    @torch.no_grad()
    def accuracy(self, which, rounded=None):
        """[heads][RANKS]: how often the i-th guess of each head is the text's token."""
        weights = {n: (rounded(w) if rounded and w.ndim == 2 else w).to(self.dtype) for n, w in self.weights.items()}
        n, k = len(self.rows.labels), min(RANKS, len(self.output))
        hits, count = torch.zeros(n, RANKS, device=which.device), torch.zeros(n, device=which.device)
        for part in which.split(self.args.chunk):
            x, labels = self.forward(weights, self.rows.states[part]), self.rows.labels[:, part]
            for i in range(n):
                known = labels[i] != -2
                top = (x[i].to(self.output.dtype) @ self.output.T).float().topk(k, -1)[1]
                hits[i, :k] += ((top == labels[i][:, None]) & known[:, None]).sum(0)
                count[i] += known.sum()
        return (hits / count.clamp(min=1)[:, None]).cpu()


def show(acc):
    return "  ".join(f"{k + 1}: " + "/".join(f"{float(a[:n].sum()):.3f}" for n in (1, 3, 5, 10)) for k, a in enumerate(acc))


def report(heads, rounded=None):
    """Prints the accuracy on held-out text and returns that on greedy text, or on all if there is none."""
    d, out = heads.rows.data, None
    for name, test in (("temp 0", d.all.temp == 0), ("sampled", d.all.temp > 0)):
        which = d.held[test[d.held]]
        if len(which):
            acc = heads.accuracy(heads.rows.of(which), rounded)
            log_line(f"held out, {name}{', Q8_0' if rounded else ''}, top 1/3/5/10 of head  {show(acc)}")
            out = acc if out is None else out
    return out


# --- the file ---

def write(path, kind, weights, reader, name, keys, subset=None, accuracy=None):
    """Writes heads with the registration for their target (a reader): matrices as Q8_0, the rest as float32. keys: {name: whole
    number}; accuracy [heads][ranks]."""
    import gguf
    tokens, _ = llama.vocabulary(reader)
    get = lambda key: reader.get_field(key).contents() if reader.get_field(key) else None
    w = gguf.GGUFWriter(path + ".part", "sooth-heads")
    w.add_name(name)
    if get("general.license"):
        w.add_license(get("general.license"))
    w.add_string("sooth.heads.kind", kind)
    for key, n in keys.items():
        w.add_uint32("sooth.heads." + key, n)
    if accuracy is not None:
        w.add_uint32("sooth.heads.ranks", accuracy.shape[1])
        w.add_array("sooth.heads.accuracy", [float(x) for x in accuracy.flatten()])
    w.add_string("sooth.draft.target.name", str(get("general.name")))
    w.add_string("sooth.draft.target.vocab_sha256", llama.vocabulary_sha256(tokens))
    w.add_uint32("sooth.draft.target.embedding_length", get("llama.embedding_length"))
    w.add_uint32("sooth.draft.target.block_count", get("llama.block_count"))
    if subset is not None:
        w.add_array(llama.MASK, llama.output_mask(subset.cpu().numpy(), len(tokens)))
    for tensor, x in weights.items():
        x, q8 = x.detach().float().cpu().numpy(), gguf.GGMLQuantizationType.Q8_0
        if tensor.endswith(".weight") and x.shape[-1] % 32 == 0:
            w.add_tensor(tensor, gguf.quants.quantize(x, q8), raw_dtype=q8)
        else:
            w.add_tensor(tensor, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(path + ".part", path)


# --- the run ---

def round_q8_0(w):
    x = w.detach().float().unflatten(-1, (-1, 32))
    d = (x.abs().amax(-1, keepdim=True) / 127).half().float()
    return (torch.where(d > 0, x / d, 0).round().clamp(-127, 127) * d).flatten(-2)


def open_model(args):
    """(data, the target as a llama.Model, reader of its file, vocabulary subset as ascending ids or None)"""
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.out, exist_ok=True)
    shape, weights, reader = llama.load(args.target, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    if not 0 <= args.vocab <= shape.n_vocab:
        raise SystemExit(f"--vocab {args.vocab}: the target has {shape.n_vocab} tokens")
    data, subset = draft.Data(args, shape.n_vocab), None
    if 0 < args.vocab < shape.n_vocab:
        subset = torch.from_numpy(dialogues.frequent(data.all, data.train, shape.n_vocab, args.vocab)).to(data.device)
    longest = int((data.all.plen + data.all.rlen).max()) + args.heads
    return data, llama.Model(shape, weights, data.device, longest, False), reader, subset


def save(path, heads, opt, step):
    torch.save({"weights": {n: w.detach() for n, w in heads.weights.items()}, "optimizer": opt.dump(), "step": step,
                "subset": heads.subset}, path + ".part")
    os.replace(path + ".part", path)


def restore(args, heads, opt):
    path = os.path.join(args.out, "checkpoint.pt")
    c = draft.restore(path, args.device)
    if {n: w.shape for n, w in c["weights"].items()} != {n: w.shape for n, w in heads.weights.items()}:
        raise SystemExit(f"{path}: has heads of another shape: give the options of the run that wrote it")
    same = (c["subset"] is None) == (heads.subset is None) and (heads.subset is None or torch.equal(c["subset"], heads.subset))
    if not same:
        raise SystemExit(f"{path}: was trained with another vocabulary subset: give the same --vocab and --data")
    with torch.no_grad():
        for n, w in heads.weights.items():
            w.copy_(c["weights"][n])
    opt.restore(c["optimizer"])
    log_line(f"{path}: resuming at step {c['step']}")
    return c["step"]


def run(args, kind, first_weights, forward, keys, after=None):
    """Trains and writes DIR/heads.gguf. first_weights(d) -> {name: tensor}; forward: see Heads; keys: for the file; after: a second
    stage, which may change the target."""
    data, model, reader, subset = open_model(args)
    target = draft.Target(args, data, model.shape, model.weights)
    heads = Heads(args, {n: w.to(data.device) for n, w in first_weights(target.model.shape.d).items()}, forward,
                  Rows(args, data, target, subset), subset)
    opt, step = optim.Optimizer(heads.weights, args.muon_lr, args.adam_lr), 0
    if args.resume:
        step = restore(args, heads, opt)
    else:
        report(heads)
    step = train(args, heads, opt, step)
    save(os.path.join(args.out, "checkpoint.pt"), heads, opt, step)
    if after:
        report(heads)
        after(args, heads, opt, data, target, reader)
    accuracy = report(heads)
    report(heads, round_q8_0)
    path = os.path.join(args.out, "heads.gguf")
    write(path, kind, heads.weights, reader, args.name, {"count": args.heads, **keys}, subset, accuracy)
    log_line(f"{path}: {sum(w.numel() for w in heads.weights.values()) / 1e6:.2f} M parameters, {step} steps of {args.rows} rows")


def train(args, heads, opt, step):
    clock = draft.Clock(args, step)
    since = saved = time.monotonic()
    sums, count = torch.zeros(args.heads, device=heads.rows.data.device), 0
    stream = heads.rows.stream(args.rows, args.seed + step)
    while (fraction := clock.fraction(step)) < 1:
        loss = heads.loss(next(stream))
        loss.sum().backward()
        opt.step(max(0.0, clock.rate(step, fraction)))
        sums += loss.detach()
        step, count = step + 1, count + 1
        if time.monotonic() - since > args.log:
            took = time.monotonic() - since
            log_line(f"step {step}  cross entropy of head  " + "  ".join(f"{k + 1}: {x:.4f}" for k, x in enumerate((sums / count).tolist())) +
                     f"  {count * args.rows / took / 1e6:.2f} M rows/s")
            sums.zero_()
            count, since = 0, time.monotonic()
        if time.monotonic() - saved > args.save:
            report(heads)
            save(os.path.join(args.out, "checkpoint.pt"), heads, opt, step)
            saved = time.monotonic()
    return step
