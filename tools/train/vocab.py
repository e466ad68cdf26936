#!/usr/bin/env python3
"""Writes a draft anew that can only say the most frequent tokens of the text it was trained on.

  vocab.py --draft D.gguf --data DIALOGUES.npz.xz [--data MORE.npz] --vocab N --out OUT.gguf

Most of a small draft is its output matrix; the engine multiplies only the rows of the N ids that are named (docs/formats.md,
sooth.draft.output_mask). All tensors are copied byte for byte, and what the draft reads is not limited. Ids are counted in
the responses that are trained on; the share of held-out responses that the N ids cover is printed, which is what the draft may
lose at most. --vocab 0 takes such a list away again. Needs numpy and gguf.
"""
import argparse
import os
import sys

import gguf
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dialogues

MASK = "sooth.draft.output_mask"  # as llama.py has it, which needs torch


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
    """The ids, with what they cover of held-out responses."""
    if not 0 < n < n_vocab:
        raise SystemExit(f"--vocab {n}: the draft has {n_vocab} tokens; fewer are wanted, and at least one")
    if not paths:
        raise SystemExit("--data: the dialogues that the draft was trained on are wanted")
    d = dialogues.join([dialogues.read(p, n_vocab) for p in paths])
    held = d.held_out()
    ids = dialogues.frequent(d, np.flatnonzero(~held), n_vocab, n)
    said = np.zeros(n_vocab, bool)
    said[ids] = True
    for name, test in (("temperature 0", d.temp == 0), ("sampled", d.temp > 0)):
        which = np.flatnonzero(held & test)
        if len(which):
            text = d.ids[dialogues.ranges(d.start[which] + d.plen[which], d.rlen[which])]
            print(f"{n} ids cover {said[text].mean():.4f} of {len(text)} held-out tokens, {name}")
    return said


def copy_field(writer, f):
    kind = f.types[0]
    if kind == gguf.GGUFValueType.ARRAY and f.types[-1] == gguf.GGUFValueType.STRING:
        value = [bytes(f.parts[i]) for i in f.data]  # tokens are bytes, not always text
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
