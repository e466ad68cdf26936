#!/usr/bin/env python3
"""Trains Medusa heads (Cai et al. 2024) for a frozen target, over text that the target wrote.

  medusa.py --target T.gguf --data D.npz.xz [--data MORE.npz] --out DIR [--heads 4] [--layers 4] [--vocab 16384] [--minutes 4] [--resume]
            [--backbone MINUTES]

A head is a list of residual blocks x + silu(W x + b) on the target's hidden state, then the target's own output matrix. W and
b start at zero, so an untrained head equals the target's own output and training only moves it to its later position. See
heads.py for positions, loss and files. Writes DIR/heads.gguf. With --backbone the target is trained, too, for so many minutes after the
heads alone (Medusa-2, backbone.py); then the heads belong to the new target in DIR/target.gguf. Needs torch, numpy, gguf, and a GPU
or much time.
"""
import math
import os
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import backbone
import heads


def first_weights(n_heads, n_layers, d):
    out = {}
    for k in range(n_heads):
        for j in range(n_layers):
            out[f"head.{k}.blk.{j}.weight"] = torch.zeros(d, d)
            out[f"head.{k}.blk.{j}.bias"] = torch.zeros(d)
    return out


def forward(n_heads, n_layers):
    def states(w, h):
        x = h.float()[None].expand(n_heads, -1, -1)
        for j in range(n_layers):
            m = torch.stack([w[f"head.{k}.blk.{j}.weight"] for k in range(n_heads)])
            b = torch.stack([w[f"head.{k}.blk.{j}.bias"] for k in range(n_heads)])
            x = x + F.silu(torch.baddbmm(b[:, None], x.to(m.dtype), m.mT)).float()
        return x
    return states


def main():
    p = heads.parser(__doc__)
    p.add_argument("--layers", type=int, default=4, help="residual blocks of a head")
    p.add_argument("--backbone", type=float, default=0, metavar="MINUTES", help="then train the target together with the heads; 0: not")
    p.add_argument("--backbone-lr", type=float, default=2e-5)
    p.add_argument("--backbone-weight", type=float, default=0.2, help="of the heads' losses beside the distance to the old target")
    args = heads.check(p, p.parse_args())
    if not 0 <= args.backbone < math.inf:
        p.error(f"--backbone {args.backbone}: must be 0 (the target stays as it is) or more minutes")
    if not 1 <= args.layers <= 8:
        p.error(f"--layers {args.layers}: must be from 1 to 8")
    heads.run(args, "medusa", lambda d: first_weights(args.heads, args.layers, d), forward(args.heads, args.layers), {"layers": args.layers},
              backbone.run if args.backbone else None)


if __name__ == "__main__":
    main()
