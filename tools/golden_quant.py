#!/usr/bin/env python3
"""Writes tests/golden/quant/TYPE.bin: blocks of random bits and their decoded values.

The decoder is gguf.quants.dequantize of the `gguf` Python package, by the authors of the format. Each file
holds the raw blocks, then their elements as float32. Half-precision fields are made finite (of any sign,
also subnormal); all other bits are random. Usage: tools/golden_quant.py [OUTDIR]
"""
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

# type: (elements, bytes, offsets of half fields, blocks)
TYPES = {
    "F32": (1, 4, [], 64), "F16": (1, 2, [0], 256), "BF16": (1, 2, [], 256),
    "Q4_0": (32, 18, [0], 8), "Q4_1": (32, 20, [0, 2], 8),
    "Q5_0": (32, 22, [0], 8), "Q5_1": (32, 24, [0, 2], 8), "Q8_0": (32, 34, [0], 8),
    "Q2_K": (256, 84, [80, 82], 3), "Q3_K": (256, 110, [108], 3), "Q4_K": (256, 144, [0, 2], 3),
    "Q5_K": (256, 176, [0, 2], 3), "Q6_K": (256, 210, [208], 3),
}


def blocks_of(rng, name, size, halves, n):
    raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for off in halves:
        h = rng.integers(0, 1 << 16, n, dtype=np.uint16)
        h[(h & 0x7C00) == 0x7C00] ^= 0x4000
        raw[:, off:off + 2] = h.view(np.uint8).reshape(n, 2)
    if name == "F32":
        raw = rng.standard_normal(n).astype(np.float32).view(np.uint8).reshape(n, 4)
    if name == "BF16":
        raw = (rng.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        raw = raw.view(np.uint8).reshape(n, 2)
    return np.ascontiguousarray(raw)


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/quant")
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20251115)
    for name, (_, size, halves, n) in TYPES.items():
        raw = blocks_of(rng, name, size, halves, n)
        y = gguf.quants.dequantize(raw.reshape(1, -1).copy() if name not in ("F32", "F16") else
                                   raw.reshape(-1).view(np.float32 if name == "F32" else np.float16),
                                   gguf.GGMLQuantizationType[name])
        (out / f"{name}.bin").write_bytes(raw.tobytes() + np.asarray(y, np.float32).tobytes())
    print(f"{len(TYPES)} files in {out}, gguf {version('gguf')}")


main()
