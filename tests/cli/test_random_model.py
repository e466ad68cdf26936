#!/usr/bin/env python3
"""tools/random_model.py: sooth and llama.cpp read its files in every type, numbers stay finite, the same arguments give the
same bytes, and a pair of such models can be measured (`bench pair`). Prints TAP."""
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile

SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", "build/sooth"))
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
LOAD = """import ctypes, sys, llama_cpp
quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
for path in sys.argv[1:]:
    m = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    print(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(m)) if m else 0)
"""
results = []


def check(ok, name, why=""):
    results.append(ok)
    print(f"{'ok' if ok else 'not ok'} {len(results)} - {name}" + ("" if ok else ": " + why.replace("\n", " | ")))


def run(*args):
    return subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)


def make(path, *args):
    return run(sys.executable, "tools/random_model.py", "tiny", path, *args)


def digest(path):
    return hashlib.sha256(open(path, "rb").read()).hexdigest()


def reads(folder):
    """Perplexity of a text: near the size of the vocabulary, as random logits of size 1 give it."""
    text = os.path.join(folder, "text")
    open(text, "w").write(" ".join(str(i * i) for i in range(200)))
    for kind in TYPES:
        path = os.path.join(folder, kind + ".gguf")
        made = make(path, "--type", kind)
        r = run(SOOTH, "bench", "ppl", "-m", path, "--device", "cpu", "-f", text, "-c", "64", "--json")
        ppl = json.loads(r.stdout)["ppl"] if r.returncode == 0 else math.nan
        check(made.returncode == 0 and 100 < ppl < 10000, f"{kind}: perplexity", f"{ppl} {made.stderr} {r.stderr}")


def same_bytes(folder):
    paths = [os.path.join(folder, f"same{i}.gguf") for i in range(3)]
    for path, seed in zip(paths, "778"):
        make(path, "--seed", seed, "--type", "Q4_K", "--layers", "1")
    check(digest(paths[0]) == digest(paths[1]) != digest(paths[2]), "the seed decides the bytes")


def refuses(folder):
    r = run(sys.executable, "tools/random_model.py", "135m", os.path.join(folder, "no.gguf"), "--type", "Q4_K")
    check(r.returncode == 1 and "multiple of 256" in r.stderr, "a type that does not fit the shape", r.stderr)
    r = make(os.path.join(folder, "no.gguf"), "--vocab", "10")
    check(r.returncode == 1 and "at least 258" in r.stderr, "a vocabulary that is too small", r.stderr)
    cut = os.path.join(folder, "cut.gguf")
    open(cut, "wb").write(open(os.path.join(folder, "BF16.gguf"), "rb").read()[:3000])
    for source, why in (("README.md", "not a GGUF file"), (cut, "in the middle of its keys"), ("/no/such", "No such file")):
        r = make(os.path.join(folder, "no.gguf"), "--tokenizer", source)
        check(r.returncode == 1 and why in r.stderr and "Traceback" not in r.stderr, f"--tokenizer: {why}", r.stderr)
    r = make(os.path.join(folder, "missing", "no.gguf"))
    check(r.returncode == 1 and "No such file" in r.stderr and "Traceback" not in r.stderr, "a folder that is missing", r.stderr)


def same_tokenizer(folder):
    """The story model's tokenizer in a random model: the same ids, and the story draft drafts for it."""
    path = os.path.join(folder, "story.gguf")
    made = make(path, "--tokenizer", "models/story/story-q8_0.gguf")
    ids = [run(SOOTH, "tokenize", "-m", m, "A little boat, a big sea.") for m in (path, "models/story/story-q8_0.gguf")]
    check(made.returncode == 0 and ids[0].stdout == ids[1].stdout and ids[0].stdout, "the tokenizer of another model", made.stderr + ids[0].stderr)
    r = run(SOOTH, "run", "-m", path, "-md", "models/story/story-q8_0.gguf", "--device", "cpu", "-n", "8", "A little boat", "--json",
            "--spec-length", "2", "--ignore-eos")
    check(r.returncode == 0 and json.loads(r.stdout)["timings"]["draft_n"] > 0, "a draft with that tokenizer", r.stdout + r.stderr)


def pair(folder):
    target = os.path.join(folder, "target.gguf")
    make(target, "--layers", "6", "--seed", "2")
    drafts = ";".join(f"model({folder}/{k}.gguf)" for k in ("BF16", "Q4_K"))
    r = run(SOOTH, "bench", "pair", "-m", target, "--device", "cpu", "-t", "1", "--spec", drafts, "-c", "32", "-n", "16",
            "--draft-max", "2", "--repeats", "1", "--json")
    found = [json.loads(line) for line in r.stdout.splitlines()]
    check(len(found) == 2 and all(o["identical"] and len(o["cells"]) == 8 for o in found), "bench pair with two drafts",
          r.stderr + r.stdout)


def pair_ahead(folder):
    """Drafting ahead with simulated hits, for 1 of 2 cores each."""
    target, draft = (os.path.join(folder, k) for k in ("target.gguf", "BF16.gguf"))
    args = ("bench", "pair", "-m", target, "-md", draft, "--device", "cpu", "--spec", "async(model,fan=4)", "-c", "32", "-n", "48", "--draft-max", "2",
            "--repeats", "2", "--json")
    r = run(SOOTH, *args, "--alpha", "0.8")
    check(r.returncode == 2 and "give both" in r.stderr, "a hit rate is needed", r.stderr)
    if os.cpu_count() < 2:
        return
    for rate in (0, 1):
        r = run(SOOTH, *args, "--alpha", "0.8", "--hit-rate", str(rate))
        o = json.loads(r.stdout) if r.returncode == 0 else {"ahead": {"rows": []}}
        rows = o["ahead"]["rows"]
        check(len(rows) == 2 and o["identical"] and all(abs(x["hit_rate"] - rate) < 0.15 for x in rows), f"drafting ahead, hit rate {rate}",
              r.stderr + r.stdout)


def llama_cpp(folder):
    r = run(sys.executable, "-c", LOAD, *(os.path.join(folder, k + ".gguf") for k in TYPES))
    if "No module named 'llama_cpp'" in r.stderr:
        results.append(True)
        print(f"ok {len(results)} - llama.cpp # SKIP llama-cpp-python is not installed")
    else:
        check(r.stdout.split() == ["512"] * len(TYPES), "llama.cpp loads every type", r.stdout + r.stderr)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for part in (reads, same_bytes, refuses, same_tokenizer, pair, pair_ahead, llama_cpp):
            part(folder)
    print(f"1..{len(results)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
