#!/usr/bin/env python3
"""Turns what ende.py trained into GGUF files (float32, for `sooth quantize`): the weights are those that Q4_0 can hold.

  t5_gguf.py --tokenizer tokenizer.json --target DIR/target.q4.pt --drafts DIR/drafts.q4.pt --out DIR [--vocab 4096 --count PAIRS.tsv]

Writes DIR/target.gguf and DIR/draft-NAME.gguf. A draft's file states the target that it belongs to. --vocab N: drafts have logits only
for a vocabulary subset, the N most frequent tokens of the translations in the first --lines of PAIRS.tsv, which makes their passes cheaper.
Needs torch, numpy, gguf; with --vocab tokenizers.
"""
import argparse
import base64
import hashlib
import json
import os

import numpy as np
import torch


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--target", required=True)
    p.add_argument("--drafts")
    p.add_argument("--out", required=True)
    p.add_argument("--name", default="sooth translate")
    p.add_argument("--license", default="apache-2.0")
    p.add_argument("--ctx", type=int, default=512)
    p.add_argument("--vocab", type=int, default=0)
    p.add_argument("--count", help="pairs whose translations are counted")
    p.add_argument("--lines", type=int, default=120000)
    args = p.parse_args()
    if args.vocab and not args.count:
        p.error("--vocab needs --count: the texts that decide which tokens are frequent")
    return args


def frequent(args, n_vocab):
    """The vocabulary subset as bits, one per id; the lowest bit of the first byte is id 0."""
    from tokenizers import Tokenizer
    tok, counts = Tokenizer.from_file(args.tokenizer), np.zeros(n_vocab, np.int64)
    with open(args.count, encoding="utf-8") as f:
        texts = [line.rstrip("\n").split("\t")[1] for _, line in zip(range(args.lines), f)]
    for e in tok.encode_batch_fast(texts):
        np.add.at(counts, e.ids, 1)
    ids = np.argsort(-counts, kind="stable")[:args.vocab]
    print(f"{args.vocab} tokens are {counts[ids].sum() / counts.sum():.4f} of the translations")
    mask = np.zeros(n_vocab, bool)
    mask[ids] = True
    return np.packbits(mask, bitorder="little").tobytes()


def unpacked(size, codes, steps):
    codes, steps = codes.numpy(), steps.numpy().astype(np.float32)
    x = np.concatenate((codes & 15, codes >> 4), 1).astype(np.float32) - 8
    return (x * steps[:, None]).reshape(size)


def weights_of(saved):
    return {n: unpacked(*w) if isinstance(w, tuple) else w.numpy() for n, w in saved["weights"].items()}


def charsmap(normalizer):
    """The bytes of the Precompiled normalizer, which may be in a Sequence."""
    for part in [normalizer] + (normalizer or {}).get("normalizers", []):
        if part and part["type"] == "Precompiled":
            return base64.b64decode(part["precompiled_charsmap"])
    return None


def token_type(piece, i, tok):
    if i == tok["model"]["unk_id"]:
        return 2
    if any(a["id"] == i and a["special"] for a in tok["added_tokens"]):
        return 3
    return 6 if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") else 1


def add_tokenizer(w, tok):
    vocab = tok["model"]["vocab"]
    w.add_tokenizer_model("t5")
    w.add_tokenizer_pre("default")
    w.add_token_list([p for p, _ in vocab])
    w.add_token_scores([s for _, s in vocab])
    w.add_token_types([token_type(p, i, tok) for i, (p, _) in enumerate(vocab)])
    w.add_add_space_prefix(True)
    w.add_remove_extra_whitespaces(True)
    if charsmap(tok["normalizer"]):
        w.add_precompiled_charsmap(charsmap(tok["normalizer"]))
    ids = {p: i for i, (p, _) in enumerate(vocab)}
    w.add_eos_token_id(ids["</s>"])
    w.add_unk_token_id(tok["model"]["unk_id"])
    w.add_pad_token_id(ids["<pad>"])
    w.add_add_bos_token(False)
    w.add_add_eos_token(True)


def add_shape(w, s, ctx):
    w.add_context_length(ctx)
    w.add_embedding_length(s["d"])
    w.add_feed_forward_length(s["ff"])
    w.add_block_count(s["n_enc"])
    w.add_decoder_block_count(s["n_dec"])
    w.add_head_count(s["n_heads"])
    w.add_key_length(s["head_dim"])
    w.add_value_length(s["head_dim"])
    w.add_layer_norm_rms_eps(s["eps"])
    w.add_layer_norm_eps(s["eps"])
    w.add_relative_attn_buckets_count(s["buckets"])
    w.add_decoder_start_token_id(0)
    w.add_vocab_size(s["n_vocab"])


def write(path, saved, tok, name, args, target=None):
    import gguf
    w = gguf.GGUFWriter(path + ".part", "t5")
    w.add_name(name)
    w.add_license(args.license)
    add_shape(w, saved["shape"], args.ctx)
    add_tokenizer(w, tok)
    if target:
        tokens = [p.encode() for p, _ in tok["model"]["vocab"]]
        w.add_string("sooth.draft.target.name", args.name)
        w.add_string("sooth.draft.target.vocab_sha256", hashlib.sha256(b"\0".join(tokens)).hexdigest())
        w.add_uint32("sooth.draft.target.embedding_length", target["shape"]["d"])
        w.add_uint32("sooth.draft.target.block_count", target["shape"]["n_dec"])
        w.add_float32("sooth.draft.agreement", saved["agreement"][0])
        if args.vocab:
            w.add_array("sooth.draft.output_mask", frequent(args, saved["shape"]["n_vocab"]))
    for tensor, x in weights_of(saved).items():
        w.add_tensor(tensor, np.ascontiguousarray(x, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(path + ".part", path)
    print(f"{path}: {sum(x.size for x in weights_of(saved).values()) / 1e6:.2f} M parameters")


def main():
    args = options()
    os.makedirs(args.out, exist_ok=True)
    tok = json.load(open(args.tokenizer, encoding="utf-8"))
    load = lambda path: torch.load(path, map_location="cpu")
    target = load(args.target)
    write(os.path.join(args.out, "target.gguf"), target, tok, args.name, args)
    for name, saved in (load(args.drafts) if args.drafts else {}).items():
        write(os.path.join(args.out, f"draft-{name}.gguf"), saved, tok, f"{args.name}, draft {name}", args, target)


if __name__ == "__main__":
    main()
