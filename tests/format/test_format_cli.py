#!/usr/bin/env python3
"""`sooth inspect` and `sooth quantize` on the command line: JSON, budget, fallbacks, exit status, nothing left behind."""
import json
import os
import signal
import struct
import subprocess
import tempfile
import time

SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", "build/sooth"))
RUNNER = os.environ.get("SOOTH_RUNNER", "").split()


def sooth(*args):
    return subprocess.run([*RUNNER, SOOTH, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=120)


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def write_gguf(path, rows=4, bad=None):
    """One matrix with rows of 256 (none if rows is 0), one with rows of 96, one norm; all F32. `bad` replaces element 3."""
    tensors = [("blk.0.attn_q.weight", (256, rows)), ("blk.0.odd.weight", (96, 2)), ("output_norm.weight", (256,))]
    tensors = tensors if rows else tensors[1:]
    head, data = b"", b""
    for name, dims in tensors:
        n = dims[0] * (dims[1] if len(dims) > 1 else 1)
        head += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
        head += struct.pack("<IQ", 0, len(data))
        values = [((i * 37) % 101 - 50) / 50 for i in range(n)]
        if bad is not None:
            values[3] = bad
        data += struct.pack(f"<{n}f", *values)
    kv = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    kv += text("a.list") + struct.pack("<IIQ", 9, 4, 100) + struct.pack("<100I", *range(100))
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2) + kv + head
    with open(path, "wb") as f:
        f.write(out + b"\0" * (-len(out) % 32) + data)


def inspect(tmp):
    path = os.path.join(tmp, "m.gguf")
    write_gguf(path)
    o = json.loads(sooth("inspect", path, "--json").stdout)
    assert o["path"] == path and o["arch"] == "llama" and o["parameters"] == 256 * 4 + 192 + 256
    assert o["tensors"][1] == {"name": "blk.0.odd.weight", "dtype": "F32", "shape": [96, 2], "bytes": 768}
    assert o["metadata"]["a.list"] == {"type": "u32", "length": 100, "first": list(range(8))}
    p = sooth("inspect", path)
    assert p.returncode == 0 and "blk.0.odd.weight" in p.stdout and "96 x 2" in p.stdout and p.stderr == ""


def bad_files(tmp):
    empty, junk = os.path.join(tmp, "empty.gguf"), os.path.join(tmp, "junk.gguf")
    open(empty, "wb").close()
    with open(junk, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, 2 ** 63, 1) + b"x" * 40)
    for path, word in ((empty, "empty"), (junk, "metadata key"), (tmp, "config.json"), (tmp + "/none", "none")):
        p = sooth("inspect", path)
        assert p.returncode == 1 and p.stdout == "" and word in p.stderr and path in p.stderr, p.stderr
    assert sooth("inspect").returncode == 2 and sooth("inspect", "--nonsense").returncode == 2


def budget(tmp):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 8192,
              "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
              "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    sizes = {"1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
             "3b": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}}
    for name, size in sizes.items():
        os.mkdir(os.path.join(tmp, name))
        with open(os.path.join(tmp, name, "config.json"), "w") as f:
            json.dump(config | size, f)
    args = ("inspect", "-m", tmp + "/3b", "-md", tmp + "/1b", "--ctx", "4096", "--parallel", "8")
    o = json.loads(sooth(*args, "--json").stdout)
    assert o["target"]["kv_bytes_per_token"] == 114688 and o["draft"]["kv_bytes_per_token"] == 32768
    assert o["target"]["kv_bytes"] == 8 * 448 << 20 and o["draft"]["kv_bytes"] == 1 << 30
    assert o["target"]["estimated"] is True and o["parallel"] == 8 and o["ctx"] == 4096
    assert o["total_bytes"] == sum(o[m][k] for m in ("target", "draft") for k in ("weight_bytes", "kv_bytes"))
    out = sooth(*args).stdout
    assert "114688" in out and "32768" in out and str(o["total_bytes"]) in out


def quantize(tmp):
    src, dst = os.path.join(tmp, "in.gguf"), os.path.join(tmp, "out.gguf")
    write_gguf(src)
    o = json.loads(sooth("quantize", src, dst, "q4_k", "--json").stdout)
    assert o["type"] == "Q4_K" and o["tensors"] == {"F32": 1, "Q4_K": 1, "Q4_0": 1}
    assert o["fallbacks"] == [{"tensor": "blk.0.odd.weight", "row": 96, "wanted": "Q4_K", "dtype": "Q4_0"}]
    got = json.loads(sooth("inspect", dst, "--json").stdout)
    assert [t["dtype"] for t in got["tensors"]] == ["Q4_K", "Q4_0", "F32"]
    assert got["metadata"]["general.quantization_version"] == 2 and got["metadata"]["a.list"]["length"] == 100
    assert got["metadata"]["general.file_type"] == 14  # mostly Q4_K
    p = sooth("quantize", src, dst, "Q6_K")
    assert p.returncode == 0 and p.stdout.count("\n") == 1, p.stdout
    assert "1 F32, 1 Q5_1, 1 Q6_K" in p.stdout and "1 tensor is Q5_1 instead of Q6_K" in p.stdout, p.stdout
    assert "blk.0.odd.weight: row length 96 is not a multiple" in sooth("quantize", src, dst, "Q6_K", "-v").stderr
    write_gguf(src, rows=0)  # only rows that do not fit: the file does not call itself Q4_K
    assert sooth("quantize", src, dst, "Q4_K").returncode == 0
    got = json.loads(sooth("inspect", dst, "--json").stdout)
    assert got["metadata"]["general.file_type"] == 2


def refusals(tmp):
    src, dst = os.path.join(tmp, "in.gguf"), os.path.join(tmp, "out.gguf")
    write_gguf(src, bad=float("nan"))
    p = sooth("quantize", src, dst, "Q8_0")
    assert p.returncode == 1 and "blk.0.attn_q.weight: element 3" in p.stderr and p.stdout == "", p.stderr
    assert os.listdir(tmp) == ["in.gguf"]
    p = sooth("quantize", src, dst, "Q9_Z")
    assert p.returncode == 2 and "Q9_Z" in p.stderr and "Q4_K_M" in p.stderr
    assert sooth("quantize", src, src, "Q8_0").returncode == 1
    assert sooth("quantize", src).returncode == 2
    p = sooth("quantize", tmp + "/none.gguf", dst, "Q8_0")
    assert p.returncode == 1 and "none.gguf" in p.stderr


def interrupted(tmp):
    src, dst = os.path.join(tmp, "in.gguf"), os.path.join(tmp, "out.gguf")
    write_gguf(src, rows=12000)
    p = subprocess.Popen([*RUNNER, SOOTH, "quantize", src, dst, "Q2_K", "-t", "1"], stdout=subprocess.PIPE)
    for _ in range(500):  # until the partial file is there
        if len(os.listdir(tmp)) > 1 or p.poll() is not None:
            break
        time.sleep(0.002)
    p.send_signal(signal.SIGTERM)
    p.communicate()
    finished = p.returncode == 0  # a fast machine may win the race; then the file must be whole
    assert os.listdir(tmp) == ["in.gguf"] or (finished and sorted(os.listdir(tmp)) == ["in.gguf", "out.gguf"])


def main():
    tests = [inspect, bad_files, budget, quantize, refusals, interrupted]
    print(f"1..{len(tests)}")
    failed = 0
    for i, test in enumerate(tests, 1):
        with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
            try:
                test(tmp)
                print(f"ok {i} {test.__name__}")
            except Exception as e:  # noqa: a test must not stop the others
                failed += 1
                print(f"not ok {i} {test.__name__}: {type(e).__name__} {e}")
    raise SystemExit(1 if failed else 0)


main()
