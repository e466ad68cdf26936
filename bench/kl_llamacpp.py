#!/usr/bin/env python3
"""KL divergence between quantised inference and the float32 model, for sooth and llama.cpp, on one file.

usage: kl_llamacpp.py -m FILE.gguf -f TEXT [--positions 1000] [--ctx 500] [--sooth build/sooth]
                      [--device cuda] [--llama FOLDER] [--no-peer]
needs: numpy, llama-cpp-python (pip install numpy llama-cpp-python)

The reference is the same file with every weight dequantised to float32 (`sooth quantize FILE OUT F32`), run with a
float32 cache on the CPU by both engines. First the two references are compared with each other. Then KL(reference ||
engine) of the next-token distributions is averaged over the positions, for each engine with its default F16 cache,
against each reference. Prints one JSON object.

--device cuda runs both engines on the GPU, the references still on the CPU. It needs a llama.cpp with CUDA: --llama names
the folder of its libllama.so, of the release that the Python package binds. --no-peer leaves llama.cpp out.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("-m", required=True)
    ap.add_argument("-f", required=True)
    ap.add_argument("--positions", type=int, default=1000)
    ap.add_argument("--ctx", type=int, default=500)
    ap.add_argument("--sooth", default="build/sooth")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--llama", metavar="FOLDER")
    ap.add_argument("--no-peer", action="store_true")
    return ap.parse_args()


# llama_cpp reads LLAMA_CPP_LIB_PATH when it is imported. It comes before numpy, because a llama.cpp built for another
# C++ library than numpy's crashed when it loaded a model after numpy.
a = parse()
if a.llama:
    os.environ["LLAMA_CPP_LIB_PATH"] = os.path.abspath(a.llama)
if not a.no_peer:
    import llama_cpp
import numpy as np


def sooth_logits(sooth, model, tokens, ctx, extra, folder):
    """float32 [n][vocab] from `sooth bench logits`; the tokens are divided into contexts of `ctx`."""
    ids, out = os.path.join(folder, "ids.json"), os.path.join(folder, "logits.bin")
    json.dump({"tokens": tokens}, open(ids, "w"))
    subprocess.run([sooth, "bench", "logits", "-m", model, "-f", ids, "--ctx", str(ctx), "--out", out, *extra], check=True,
                   stdout=subprocess.DEVNULL)
    return np.fromfile(out, dtype=np.float32).reshape(len(tokens), -1)


def peer_logits(model, tokens, ctx, f32_cache, gpu):
    if gpu and not llama_cpp.llama_supports_gpu_offload():
        sys.exit("kl_llamacpp.py: this llama.cpp was built without CUDA: name another with --llama FOLDER")
    kind = {"type_k": 0, "type_v": 0} if f32_cache else {}
    llm = llama_cpp.Llama(model_path=model, n_ctx=ctx, n_batch=ctx, n_threads=len(os.sched_getaffinity(0)), logits_all=True,
                          verbose=False, n_gpu_layers=-1 if gpu else 0, **kind)
    rows = []
    for start in range(0, len(tokens), ctx):
        part = tokens[start:start + ctx]
        llm.reset()
        llm.eval(part)
        rows.append(np.array(llm.scores[:len(part)], dtype=np.float32))
    llm.close()
    return np.concatenate(rows)


def bos(sooth, model):
    """The BOS token that the model expects before a text, as a list of at most one id."""
    def ids(*flags):
        out = subprocess.run([sooth, "tokenize", "-m", model, "x", "--json", *flags], check=True, stdout=subprocess.PIPE)
        return json.loads(out.stdout)["tokens"]
    plain, added = ids(), ids("--add-special")
    return added[:len(added) - len(plain)] if added[-len(plain):] == plain else []


def windows(tokens, first, n, ctx):
    """n tokens in windows of ctx tokens, each of which starts with `first`."""
    out, body = [], iter(tokens)
    while len(out) < n:
        out += first if len(out) % ctx == 0 else []
        out.append(next(body))
    return out[:n]


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl(ref, other):
    """Mean and standard error of KL(ref || other), and the fraction of positions with the same argmax."""
    values, same = [], 0
    for a, b in zip(ref, other):
        n = min(len(a), len(b))
        p, q = log_softmax(a[:n]), log_softmax(b[:n])
        values.append(float((np.exp(p) * (p - q)).sum()))
        same += int(a[:n].argmax() == b[:n].argmax())
    values = np.array(values)
    return {"kl": values.mean(), "error": values.std() / len(values) ** 0.5, "top1": same / len(values)}


def main():
    gpu = a.device != "cpu"
    text = open(a.f, encoding="utf-8").read()[:a.positions * 40]
    with tempfile.TemporaryDirectory() as folder:
        part, f32 = os.path.join(folder, "text"), os.path.join(folder, "f32.gguf")
        open(part, "w", encoding="utf-8").write(text)
        out = subprocess.run([a.sooth, "tokenize", "-m", a.m, "-f", part, "--json"], check=True, stdout=subprocess.PIPE)
        tokens = windows(json.loads(out.stdout)["tokens"], bos(a.sooth, a.m), a.positions, a.ctx)
        subprocess.run([a.sooth, "quantize", a.m, f32, "F32"], check=True, stdout=subprocess.DEVNULL)
        ours = sooth_logits(a.sooth, a.m, tokens, a.ctx, ["--device", a.device], folder)
        ref_ours = sooth_logits(a.sooth, f32, tokens, a.ctx, ["--device", "cpu", "--kv-type", "f32"], folder)
        result = {"model": os.path.basename(a.m), "device": a.device, "positions": a.positions}
        if a.no_peer:
            result["sooth_f32"] = {"sooth": kl(ref_ours, ours)}
            print(json.dumps(result, indent=1))
            return
        peer = peer_logits(a.m, tokens, a.ctx, False, gpu)
        ref_peer = peer_logits(f32, tokens, a.ctx, True, False)
    result["references"] = kl(ref_ours, ref_peer)
    for name, ref in (("sooth_f32", ref_ours), ("llamacpp_f32", ref_peer)):
        s, p = kl(ref, ours), kl(ref, peer)
        result[name] = {"sooth": s, "llamacpp": p, "ratio": s["kl"] / p["kl"]}
    json.dump(result, sys.stdout, indent=1)
    print()


main()
