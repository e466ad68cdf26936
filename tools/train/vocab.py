#!/usr/bin/env python3
"""Copies a draft and restricts its output to a vocabulary subset: the most frequent tokens of its training text.

  vocab.py --draft D.gguf --data DIALOGUES.npz.xz [--data MORE.npz] --vocab N --out OUT.gguf

Most of a small draft is its output matrix; with a subset the engine multiplies only the rows of N ids (docs/formats.md,
sooth.draft.output_mask). All tensors are copied byte for byte, and the draft's input is not restricted. Ids are counted in
the responses that are trained on. The fraction of held-out tokens that the N ids cover is printed: it bounds the loss of
acceptance. --vocab 0 removes a subset. Needs numpy and gguf.
"""
import argparse
import os
import sys

import gguf
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dialogues

MASK = "sooth.draft.output_mask"  # the same as in llama.py, which needs torch


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--draft", required=True)
    p.add_argument("--data", action="append", default=[])
    p.add_argument("--vocab", type=int, required=True)
    p.add_argument("--out", required=True)
    return p.parse_args()


def read(path):
    """(reader, vocabulary size)"""
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as e:
        raise SystemExit(f"{path}: {e}")
    embd = [t for t in reader.tensors if t.name == "token_embd.weight"]
    if not embd:
        raise SystemExit(f"{path}: token_embd.weight is missing")
    return reader, int(embd[0].shape[1])


def choose(paths, n_vocab, n):
    """The subset as bool [n_vocab]; prints how much of the held-out responses it covers."""
    if not 0 < n < n_vocab:
        raise SystemExit(f"--vocab {n}: must be from 1 to {n_vocab - 1}, as the draft has {n_vocab} tokens, or 0 to remove a subset")
    if not paths:
        raise SystemExit("--data is missing: name the dialogues that the draft was trained on")
    d = dialogues.join([dialogues.read(p, n_vocab) for p in paths])
    held = d.held_out()
    ids = dialogues.frequent(d, np.flatnonzero(~held), n_vocab, n)
    chosen = np.zeros(n_vocab, bool)
    chosen[ids] = True
    for name, test in (("temperature 0", d.temp == 0), ("sampled", d.temp > 0)):
        which = np.flatnonzero(held & test)
        if len(which):
            text = d.ids[dialogues.ranges(d.start[which] + d.plen[which], d.rlen[which])]
            print(f"{n} ids cover {chosen[text].mean():.4f} of {len(text)} held-out tokens, {name}")
    return chosen


def copy_field(writer, f):
    kind = f.types[0]
    if kind == gguf.GGUFValueType.ARRAY and f.types[-1] == gguf.GGUFValueType.STRING:
        value = [bytes(f.parts[i]) for i in f.data]  # tokens are bytes, not always valid text
    else:
        value = f.contents()
    writer.add_key_value(f.name, value, kind, f.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)


def write(path, reader, mask):
    arch = reader.get_field("general.architecture").contents()
    w = gguf.GGUFWriter(path + ".part", arch)
    for f in reader.fields.values():
        if not f.name.startswith("GGUF.") and f.name not in ("general.architecture", MASK):
            copy_field(w, f)
    if mask is not None:
        w.add_array(MASK, mask)
    for t in reader.tensors:
        w.add_tensor_info(t.name, t.data.shape, t.data.dtype, t.data.nbytes, t.tensor_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for t in reader.tensors:
        w.write_tensor_data(t.data)
    w.close()
    os.replace(path + ".part", path)


def main():
    args = options()
    reader, n_vocab = read(args.draft)
    mask = None
    if args.vocab != 0:
        mask = np.packbits(choose(args.data, n_vocab, args.vocab), bitorder="little").tobytes()
    write(args.out, reader, mask)
    print(f"{args.out}: {os.path.getsize(args.out)} bytes")


if __name__ == "__main__":
    main()
