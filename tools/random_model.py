#!/usr/bin/env python3
"""Writes a GGUF file with random weights in the shape of a known model, for measuring speed where no real weights can be had.

  tools/random_model.py SHAPE OUT.gguf [--type BF16] [--layers N] [--vocab N | --tokenizer FILE.gguf] [--seed 1]

SHAPE: 1b, 3b (Llama 3.2), 400m, 135m (SmolLM2), tiny (for tests). --tokenizer: vocabulary and tokenizer of another model, so that it can
be the draft. --type: BF16, F16, F32, Q8_0, Q4_0, Q4_K, Q6_K. Norms are ones; the sizes of the
other weights keep activations and logits near 1. The text such a model produces means nothing. The same arguments give the same bytes. llama.cpp
reads the files, too. Weights are cut from one pool of random numbers at random places, so writing takes as long as the disk does."""
import argparse
import random
import struct
import sys

SHAPES = {  # layers, d, heads, kv heads, head size, ff, vocabulary, rope base
    "1b": (16, 2048, 32, 8, 64, 8192, 128256, 500000.0),
    "3b": (28, 3072, 24, 8, 128, 8192, 128256, 500000.0),
    "tiny": (2, 256, 4, 2, 64, 512, 512, 10000.0),
    "400m": (24, 1024, 16, 4, 64, 4096, 49152, 100000.0),
    "135m": (30, 576, 9, 3, 64, 1536, 49152, 100000.0),
}
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210),
         "BF16": (30, 1, 2)}  # id, block length, block bytes
U32, I32, F32, STR, ARR = 4, 5, 6, 8, 9


def text(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def pair(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STR) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", F32, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", U32, value)
    kind = STR if not value or isinstance(value[0], str) else I32
    items = b"".join(text(v) if kind == STR else struct.pack("<i", v) for v in value)
    return text(key) + struct.pack("<IIQ", ARR, kind, len(value)) + items


class Reader:
    """Reads the keys of a GGUF file; refuses what is cut off."""

    SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def __init__(self, path):
        self.path, self.at = path, 0
        try:
            with open(path, "rb") as f:
                self.b = f.read(64 << 20)  # the keys come first
        except OSError as e:
            sys.exit(f"--tokenizer {path}: {e.strerror}")

    def take(self, n):
        if n > len(self.b) - self.at:
            sys.exit(f"--tokenizer {self.path}: ends in the middle of its keys")
        self.at += n
        return self.b[self.at - n:self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def skip(self, kind):
        """A value of this type; returns the length of an array."""
        if kind == ARR:
            item, n = self.number("I"), self.number("Q")
            if item in self.SIZES:
                self.take(n * self.SIZES[item])
            else:
                for _ in range(n):
                    self.skip(item)
            return n
        if kind != STR and kind not in self.SIZES:
            sys.exit(f"--tokenizer {self.path}: a key has the unknown type {kind}")
        self.take(self.number("Q") if kind == STR else self.SIZES[kind])
        return 1


def tokenizer_of(path):
    """The keys tokenizer.* of a GGUF file as they are, and the number of tokens."""
    r, pairs, n_tokens = Reader(path), [], 0
    if r.take(4) != b"GGUF" or r.number("I") not in (2, 3):
        sys.exit(f"--tokenizer {path}: not a GGUF file of version 2 or 3")
    r.number("Q")
    for _ in range(r.number("Q")):
        start = r.at
        key = r.take(r.number("Q"))
        n = r.skip(r.number("I"))
        if key.startswith(b"tokenizer."):
            pairs.append(r.b[start:r.at])
        if key == b"tokenizer.ggml.tokens":
            n_tokens = n
    if n_tokens == 0:
        sys.exit(f"--tokenizer {path}: the file has no tokenizer.ggml.tokens")
    return pairs, n_tokens


def byte_tokens():
    """The 256 characters with which byte-level BPE writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) if b in plain else chr(256 + [x for x in range(256) if x not in plain].index(b)) for b in range(256)]


def floats(kind, b, wide):
    """Turns random bytes into floats of both signs: from 2^-7 to 2^-5 (root mean square 0.019), or four times that."""
    shift = 0 if wide else 1
    if kind == "F16":  # sign, 5 bits of exponent, 10 of mantissa
        b[1::2] = b[1::2].translate(bytes(i & 0x80 | 8 + 2 * shift + (i >> 2 & 1) << 2 | i & 3 for i in range(256)))
    else:  # sign, 8 bits of exponent, the lowest one in the next byte
        size = TYPES[kind][2]
        b[size - 1::size] = b[size - 1::size].translate(bytes(i & 0x80 | 60 + shift for i in range(256)))


def pool(kind, rng, n_blocks, wide):
    """n_blocks random blocks of a type. A product with a row of 1024 values or more (wide), or of a few hundred, keeps the size of its input."""
    size = TYPES[kind][2]
    b = bytearray(rng.randbytes(n_blocks * size))

    def scale(at, value):  # fp16
        b[at::size], b[at + 1::size] = (bytes([x]) * n_blocks for x in struct.pack("<e", value * (1 if wide else 4)))

    if kind in ("F32", "F16", "BF16"):
        floats(kind, b, wide)
    elif kind == "Q8_0":
        scale(0, 0.0003)
    elif kind == "Q4_0":
        scale(0, 0.004)
    elif kind == "Q4_K":
        scale(0, 0.0001)
        scale(2, 0.0007)
    else:  # Q6_K: 8-bit scales are signed
        for at in range(192, 208):
            b[at::size] = b[at::size].translate(bytes(i % 32 for i in range(256)))
        scale(208, 0.00006)
    return memoryview(b)


def write_tensors(f, args, tensors, sizes):
    rng = random.Random(args.seed)
    block = TYPES[args.type][2]
    n_pool = max(1, min(64 << 20, sum(sizes)) // block)
    weights = pool(args.type, rng, n_pool, tensors[0][1] >= 1024)
    for i, ((_, k, _, kind), n) in enumerate(zip(tensors, sizes)):
        left = n
        if kind is None:
            f.write(struct.pack("<f", 1) * k)
        while kind and left:
            first = rng.randrange(n_pool) * block
            left -= f.write(weights[first:first + left])
        f.write(bytes(-n % 32))
        if sys.stderr.isatty():
            end = "\n" if i + 1 == len(tensors) else ""
            print(f"\r{args.out}: {i + 1} of {len(tensors)} tensors", end=end, file=sys.stderr, flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("out")
    p.add_argument("--type", default="BF16", choices=TYPES)
    p.add_argument("--layers", type=int)
    size = p.add_mutually_exclusive_group()
    size.add_argument("--vocab", type=int)
    size.add_argument("--tokenizer", metavar="FILE.gguf")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    layers, d, heads, kv, hd, ff, vocab, base = SHAPES[args.shape]
    copied, n_tokens = tokenizer_of(args.tokenizer) if args.tokenizer else ([], None)
    layers, vocab = args.layers or layers, n_tokens or args.vocab or vocab
    if vocab < 258:
        sys.exit(f"--vocab {vocab}: at least 258 are needed, 256 bytes and two control tokens")
    tensors = [("token_embd.weight", d, vocab, args.type), ("output_norm.weight", d, 1, None)]
    for i in range(layers):
        b = f"blk.{i}."
        tensors += [(b + "attn_norm.weight", d, 1, None), (b + "attn_q.weight", d, heads * hd, args.type),
                    (b + "attn_k.weight", d, kv * hd, args.type), (b + "attn_v.weight", d, kv * hd, args.type),
                    (b + "attn_output.weight", heads * hd, d, args.type), (b + "ffn_norm.weight", d, 1, None),
                    (b + "ffn_gate.weight", d, ff, args.type), (b + "ffn_up.weight", d, ff, args.type),
                    (b + "ffn_down.weight", ff, d, args.type)]
    tokens = byte_tokens() + [f"<|unused_{i}|>" for i in range(vocab - 258)] + ["<|begin|>", "<|end|>"]
    meta = {"general.architecture": "llama", "general.name": f"random {args.shape}", "llama.block_count": layers, "llama.context_length": 131072,
            "llama.embedding_length": d, "llama.feed_forward_length": ff, "llama.attention.head_count": heads,
            "llama.attention.head_count_kv": kv, "llama.attention.key_length": hd, "llama.attention.value_length": hd,
            "llama.rope.dimension_count": hd, "llama.rope.freq_base": base, "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.vocab_size": vocab}
    if not copied:
        meta |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
                 "tokenizer.ggml.token_type": [1] * 256 + [4] * (vocab - 258) + [3, 3], "tokenizer.ggml.merges": [],
                 "tokenizer.ggml.bos_token_id": vocab - 2, "tokenizer.ggml.eos_token_id": vocab - 1}
    keys = [pair(k, v) for k, v in meta.items()] + copied
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)) + b"".join(keys)
    at, sizes = 0, []
    for name, k, m, kind in tensors:
        tid, block, size = TYPES[kind or "F32"]
        if k % block:
            sys.exit(f"--type {kind}: rows of {name} have {k} values, not a multiple of {block}; use Q8_0 or another shape")
        n = k * m // block * size
        dims = struct.pack("<IQQ", 2, k, m) if kind else struct.pack("<IQ", 1, k)
        head += text(name) + dims + struct.pack("<IQ", tid, at)
        sizes.append(n)
        at += (n + 31) // 32 * 32
    try:
        with open(args.out, "wb") as f:
            f.write(head + bytes(-len(head) % 32))
            write_tensors(f, args, tensors, sizes)
    except OSError as e:
        sys.exit(f"{args.out}: {e.strerror}; {at / 1e9:.2f} GB are needed")
    print(f"{args.out}: {args.shape}, {args.type}, {at / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
