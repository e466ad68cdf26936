#!/usr/bin/env python3
"""Trains the heads of blockwise parallel decoding (Stern et al. 2018) for a frozen target, over text that the target wrote.

  blockwise.py --target T.gguf --data D.npz.xz [--data MORE.npz] --out DIR [--heads 4] [--hidden 1152] [--vocab 16384] [--minutes 4] [--resume]

A head is one feed-forward block of its own width with a residual connection, x + W2 silu(W1 x + b1), on the target's hidden
state, then the target's own output matrix. W2 starts at zero. The engine takes the most likely token of each head, so the
guesses are a chain. See heads.py for positions, loss and files. Writes DIR/heads.gguf. Needs torch, numpy, gguf, and a GPU or
much time.
"""
import os
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import heads


def first_weights(n_heads, hidden, d, seed):
    gen, out = torch.Generator().manual_seed(seed), {}
    for k in range(n_heads):
        out[f"head.{k}.up.weight"] = torch.randn(hidden, d, generator=gen) * d ** -0.5
        out[f"head.{k}.up.bias"] = torch.zeros(hidden)
        out[f"head.{k}.down.weight"] = torch.zeros(d, hidden)
    return out


def forward(n_heads):
    def states(w, h):
        stack = lambda part: torch.stack([w[f"head.{k}.{part}"] for k in range(n_heads)])
        up, bias, down = stack("up.weight"), stack("up.bias"), stack("down.weight")
        x = h.float()[None].expand(n_heads, -1, -1)
        return x + torch.bmm(F.silu(torch.baddbmm(bias[:, None], x.to(up.dtype), up.mT)), down.mT).float()
    return states


def main():
    p = heads.parser(__doc__)
    p.add_argument("--hidden", type=int, default=1152, help="width of a head's block")
    args = heads.check(p, p.parse_args())
    if args.hidden < 32 or args.hidden % 32:
        p.error(f"--hidden {args.hidden}: must be a multiple of 32")
    heads.run(args, "blockwise", lambda d: first_weights(args.heads, args.hidden, d, args.seed), forward(args.heads), {"hidden": args.hidden})


if __name__ == "__main__":
    main()
