#!/usr/bin/env python3
"""Writes the seed corpus of the format fuzz targets: one small valid file of each kind.

Usage: tools/fuzz_seeds_format.py [OUTDIR]   (tests/fuzz/corpus)
"""
import json
import struct
import sys
from pathlib import Path

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
          11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 30: (1, 2)}


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def gguf(kv, tensors, version=3, align=32):
    """kv: encoded entries; tensors: (name, type), each of one block."""
    head, data = b"", b""
    for name, kind in tensors:
        elems, size = BLOCKS[kind]
        head += text(name) + struct.pack("<IQQIQ", 2, elems, 1, kind, len(data))
        data += bytes(range(1, 256))[:size].ljust(-(-size // align) * align, b"\0")
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kv)) + b"".join(kv) + head
    return out + b"\0" * (-len(out) % align) + data


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/fuzz/corpus")
    for kind in ("gguf", "safetensors"):
        (out / kind).mkdir(parents=True, exist_ok=True)
    kv = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    kv += [text(f"s{t}") + struct.pack("<I", t) + struct.pack(f, 1) for t, f in SCALARS.items()]
    kv += [text(f"a{t}") + struct.pack("<IIQ", 9, t, 2) + struct.pack(f, 1) * 2 for t, f in SCALARS.items()]
    kv += [text("words") + struct.pack("<IIQ", 9, 8, 2) + text("ab") + text("")]
    kv += [text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQI", 5, 1, 7)]
    aligned = [text("general.alignment") + struct.pack("<II", 4, 64)]
    (out / "gguf/metadata.gguf").write_bytes(gguf(kv, []))
    (out / "gguf/tensors.gguf").write_bytes(gguf([], [(f"t{t}", t) for t in BLOCKS]))
    (out / "gguf/aligned_v2.gguf").write_bytes(gguf(aligned, [("w", 0), ("v", 8)], version=2, align=64))
    table = {"__metadata__": {"format": "pt"},
             "w": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]},
             "ids": {"dtype": "I64", "shape": [1], "data_offsets": [12, 20]},
             "s": {"dtype": "F32", "shape": [], "data_offsets": [20, 24]},
             "h": {"dtype": "F16", "shape": [1, 1, 1, 1], "data_offsets": [24, 26]}}
    head = json.dumps(table, separators=(",", ":")).encode()
    (out / "safetensors/mixed.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(range(26)))


main()
