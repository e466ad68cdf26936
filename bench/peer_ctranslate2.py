#!/usr/bin/env python3
"""Compares sooth and CTranslate2: time of translations, with the same weights and number of threads.

  bench/peer_ctranslate2.py [-m models/ende/ende-q4_0.gguf] --texts test.tsv [-t 2] [--rounds 7] [--only greedy,beams,batch] [--json]

The weights of the GGUF file (architecture t5) are dequantised and written as a CTranslate2 model, which quantises them to 8 bits as its
converter would (--type). Both engines keep the model loaded and take turns, round after round; the one that starts changes from round to
round, and the other's process is stopped meanwhile. sooth is a server without speculation (`sooth serve --no-spec --no-prefix-cache`), and
its times are those of an HTTP client, with tokenizing and formatting; CTranslate2's are those of translate_batch over tokens that
were prepared before. A round computes every cell:

  greedy, beams 4   --one sentences, one after the other, encoder included: time / tokens, the end token counted
  batch             --many sentences in batches of 16, greedy: time of all; sooth gets them at once and runs 16 at a time
  batch, beams 4    the same with 4 beams

CTranslate2 is tried with each of its libraries for matrix products (the environment variable CT2_USE_MKL), with one translation on all
threads and with one per thread; the fastest in a warm-up counts for each cell. ours / theirs is the ratio of the medians over
rounds, the spread is that of the ratios of the rounds. Greedy translations of all --many sentences are compared: how many are equal, and BLEU
of each against the second column of --texts, because the engines quantise differently.

This script measures and does not judge. Needs numpy, gguf, ctranslate2, sacrebleu (pip install).
"""
import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, MAX_TOKENS = 16, 120
MOST = 64  # prompts of one request to sooth


# ---- the model for CTranslate2 ----

def field(reader, key, default=None):
    f = reader.fields.get(key)
    return f.contents() if f else default


class Weights:
    """Dequantised tensors and metadata of a GGUF file."""

    def __init__(self, path):
        import gguf
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in self.reader.tensors}
        if self.get("general.architecture") != "t5":
            sys.exit(f"{path}: architecture '{self.get('general.architecture')}'; only t5 can be compared")
        self.pieces = self.get("tokenizer.ggml.tokens")

    def get(self, key, default=None):
        return field(self.reader, key, default)

    def __getitem__(self, name):
        import gguf
        import numpy as np
        t = self.tensors[name]
        return np.ascontiguousarray(gguf.dequantize(t.data, t.tensor_type), np.float32)


def fill_attention(spec, w, at, names, bias):
    import numpy as np
    spec.queries_scale = 1.0
    spec.layer_norm.gamma = w[f"{at}_norm.weight"]
    for linear, parts in zip(spec.linear, names):
        linear.weight = np.concatenate([w[f"{at}_{part}.weight"] for part in parts])
    if bias is not None:
        spec.relative_attention_bias, spec.relative_attention_max_distance = bias, np.int32(128)


def fill_layers(spec, w, side):
    import numpy as np
    gated = f"{side}.blk.0.ffn_gate.weight" in w.tensors
    # [buckets][heads] here; a GGUF file has the same order
    bias = w[f"{side}.blk.0.attn_rel_b.weight"]
    for i, layer in enumerate(spec.layer):
        at = f"{side}.blk.{i}."
        fill_attention(layer.self_attention, w, at + "attn", ("qkv", "o"), bias)
        if side == "dec":
            fill_attention(layer.attention, w, at + "cross_attn", ("q", "kv", "o"), None)
        layer.ffn.layer_norm.gamma = w[at + "ffn_norm.weight"]
        layer.ffn.linear_0.weight = w[at + ("ffn_gate.weight" if gated else "ffn_up.weight")]
        if gated:
            layer.ffn.linear_0_noact.weight = w[at + "ffn_up.weight"]
        layer.ffn.linear_1.weight = w[at + "ffn_down.weight"]
    spec.layer_norm.gamma = w[f"{side}.output_norm.weight"]
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = np.array(w["token_embd.weight"])
    spec.scale_embeddings = False


def write_model(w, folder, kind):
    import ctranslate2
    from ctranslate2.specs import common_spec, transformer_spec
    gated = "enc.blk.0.ffn_gate.weight" in w.tensors
    n_enc = w.get("t5.block_count")
    spec = transformer_spec.TransformerSpec.from_config(
        (n_enc, w.get("t5.decoder_block_count", n_enc)), w.get("t5.attention.head_count"), pre_norm=True, rms_norm=True, ffn_glu=gated,
        activation=common_spec.Activation.GELUTanh if gated else common_spec.Activation.RELU, relative_attention_bias=True)
    fill_layers(spec.encoder, w, "enc")
    fill_layers(spec.decoder, w, "dec")
    tied = "output.weight" not in w.tensors
    spec.decoder.projection.weight = w["token_embd.weight" if tied else "output.weight"]
    if tied:
        spec.decoder.scale_outputs = w.get("t5.embedding_length") ** -0.5
    spec.register_source_vocabulary(w.pieces)
    spec.register_target_vocabulary(w.pieces)
    spec.config.decoder_start_token = w.pieces[w.get("t5.decoder_start_token_id", 0)]
    spec.config.bos_token = w.pieces[w.get("tokenizer.ggml.padding_token_id", 0)]
    spec.config.eos_token = w.pieces[w.get("tokenizer.ggml.eos_token_id", 1)]
    spec.config.unk_token = w.pieces[w.get("tokenizer.ggml.unknown_token_id", 2)]
    spec.validate()
    spec.optimize(quantization=kind)
    spec.save(folder)
    return ctranslate2.__version__


def text_of(pieces):
    out = b""
    for p in pieces:
        byte = len(p) == 6 and p.startswith("<0x") and p.endswith(">")
        out += bytes([int(p[3:5], 16)]) if byte else p.encode()
    return out.decode("utf-8", "replace").replace("\u2581", " ").strip()


# ---- the engines ----

class Ours:
    """`sooth serve`; each turn is one request after the other, or all texts at once."""
    modes = (None,)

    def __init__(self, a):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen([a.sooth, "serve", "-m", a.model, "-t", str(a.threads), "-np", str(BATCH), "--port", str(self.port),
                                         "--no-spec", "--no-prefix-cache", "--queue", str(a.many)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=60).close()
            except OSError:
                time.sleep(0.1)
        sys.exit("sooth serve does not answer")

    def ask(self, connection, prompt, beams):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, **({"use_beam_search": True, "best_of": beams} if beams > 1 else {})}
        connection.request("POST", "/v1/completions", json.dumps(body))
        r = connection.getresponse()
        o = json.loads(r.read())
        return o if r.status == 200 else sys.exit(f"sooth serve: {o}")

    def run(self, texts, beams, batch, mode):
        """(seconds, translations, their tokens). Connections are new, because the server closes those that were idle."""
        parts = [[x["text"] for x in texts[i:i + MOST]] for i in range(0, len(texts), MOST)] if batch else [x["text"] for x in texts]
        connections = [http.client.HTTPConnection("127.0.0.1", self.port, timeout=600) for _ in (parts if batch else [0])]
        t = time.perf_counter()
        with ThreadPoolExecutor(len(connections)) as pool:
            answers = list(pool.map(lambda i: self.ask(connections[i % len(connections)], parts[i], beams), range(len(parts))))
        seconds = time.perf_counter() - t
        for c in connections:
            c.close()
        choices = [c for o in answers for c in o["choices"]]
        n_tokens = sum(o["usage"]["completion_tokens"] for o in answers) + sum(c["finish_reason"] == "stop" for c in choices)
        return seconds, [c["text"].strip() for c in choices], n_tokens

    def pause(self, on):
        self.process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def close(self):
        self.pause(False)
        self.process.terminate()
        self.process.wait()


class Theirs:
    """Processes of this script, one for each library of matrix products; a mode names one of them and its translations at a time."""

    def __init__(self, a, folder):
        self.workers = {}
        for mkl in ("0", "1"):
            command = [sys.executable, os.path.abspath(__file__), "--worker", folder, "-t", str(a.threads), "--type", a.type]
            self.workers[mkl] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                                 env=dict(os.environ, CT2_USE_MKL=mkl))
        self.modes = tuple((mkl, n) for mkl in self.workers for n in (1, a.threads))

    def run(self, texts, beams, batch, mode):
        mkl, n = mode
        p = self.workers[mkl]
        job = {"texts": [x["pieces"] for x in texts], "beams": beams, "batch": batch, "inter": n}
        p.stdin.write(json.dumps(job) + "\n")
        p.stdin.flush()
        line = p.stdout.readline() or sys.exit("CTranslate2 ended unexpectedly")
        o = json.loads(line)
        return o["seconds"], [text_of(x) for x in o["out"]], sum(len(x) + (len(x) < MAX_TOKENS) for x in o["out"])

    def pause(self, on):
        for p in self.workers.values():
            p.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def close(self):
        self.pause(False)
        for p in self.workers.values():
            p.stdin.close()
            p.wait()


def worker(a):
    import ctranslate2
    engines = {n: ctranslate2.Translator(a.worker, device="cpu", compute_type=a.type, inter_threads=n, intra_threads=a.threads // n)
               for n in {1, a.threads}}
    for line in sys.stdin:
        job = json.loads(line)
        engine, how = engines[job["inter"]], dict(beam_size=job["beams"], max_decoding_length=MAX_TOKENS)
        t = time.perf_counter()
        if job["batch"]:
            out = engine.translate_batch(job["texts"], max_batch_size=BATCH, **how)
        else:
            out = [engine.translate_batch([x], **how)[0] for x in job["texts"]]
        seconds = time.perf_counter() - t
        print(json.dumps({"seconds": seconds, "out": [r.hypotheses[0] for r in out]}), flush=True)


# ---- measuring ----

def read_texts(a, w):
    """The first --many sentences that need no more than 100 tokens: text, reference, pieces."""
    texts = []
    for line in open(a.texts, encoding="utf-8"):
        source, _, reference = line.rstrip("\n").partition("\t")
        out = subprocess.run([a.sooth, "tokenize", "-m", a.model, "-p", source, "--add-special", "--json"], check=True,
                             stdout=subprocess.PIPE, text=True).stdout
        ids = json.loads(out)["tokens"]
        if len(ids) <= 100:
            texts.append({"text": source, "reference": reference, "pieces": [w.pieces[i] for i in ids]})
        if len(texts) == a.many:
            break
    return texts


def make_cells(a):
    all_cells = [dict(name="greedy", beams=1, batch=False, part="greedy"), dict(name="beams 4", beams=4, batch=False, part="beams"),
                 dict(name=f"{a.many} in batches of {BATCH}", beams=1, batch=True, part="batch"),
                 dict(name=f"{a.many} in batches of {BATCH}, beams 4", beams=4, batch=True, part="batch")]
    return [c for c in all_cells if c["part"] in a.only.split(",")]


def turn(engine, cell, texts, mode):
    engine.pause(False)
    result = engine.run(texts, cell["beams"], cell["batch"], mode)
    engine.pause(True)
    return result


def warm_up(cells, engines, texts):
    for cell in cells:
        for name, engine in engines.items():
            some = texts[:BATCH] if cell["batch"] else texts[:2]
            times = {m: min(turn(engine, cell, some, m)[0] for _ in range(2)) for m in engine.modes}
            cell[name] = {"mode": min(times, key=times.get), "seconds": []}


def measure(cells, engines, texts, a, stop):
    for number in range(a.rounds):
        if number and time.perf_counter() > stop:
            break
        for cell in cells:
            for name in sorted(engines, reverse=bool(number % 2)):
                at = cell[name]
                seconds, at["texts"], at["tokens"] = turn(engines[name], cell, texts if cell["batch"] else texts[:a.one], at["mode"])
                at["seconds"].append(seconds)


def summarise(cell):
    for name in ("ours", "theirs"):
        at = cell[name]
        at["median_s"] = statistics.median(at["seconds"])
        at["ms_per_token"] = 1e3 * at["median_s"] / at["tokens"]
    o, t = cell["ours"], cell["theirs"]
    unit = 1 if cell["batch"] else t["tokens"] / o["tokens"]
    cell["ratio"] = unit * o["median_s"] / t["median_s"]
    ratios = [unit * x / y for x, y in zip(o["seconds"], t["seconds"])]
    cell["ratio_extremes"] = [min(ratios), max(ratios)]


def compare(cell, texts):
    """Equal translations and BLEU."""
    import sacrebleu
    o, t = cell["ours"]["texts"], cell["theirs"]["texts"]
    refs = [[x["reference"] for x in texts[:len(o)]]]
    return dict(n=len(o), equal=sum(x == y for x, y in zip(o, t)), ours_bleu=sacrebleu.corpus_bleu(o, refs).score,
                theirs_bleu=sacrebleu.corpus_bleu(t, refs).score)


def show(cells, about):
    print(f"{about['model']}: {about['threads']} threads of {about['cpu']}; CTranslate2 {about['ctranslate2']}, {about['type']}; "
          f"{len(cells[0]['ours']['seconds'])} rounds")
    print(f"  {'':34}     ours    theirs  ours/theirs  extremes     equal texts   BLEU ours  theirs   their mode (MKL, translations at a time)")
    for c in cells:
        unit, o, t, s = ("s" if c["batch"] else "ms/token"), c["ours"], c["theirs"], c["same"]
        key = "median_s" if c["batch"] else "ms_per_token"
        print(f"  {c['name']:32} {unit:8} {o[key]:6.3f}  {t[key]:6.3f}  {c['ratio']:10.2f}   {c['ratio_extremes'][0]:.2f}-{c['ratio_extremes'][1]:.2f}"
              f"    {s['equal']:4}/{s['n']:<4}     {s['ours_bleu']:6.2f}    {s['theirs_bleu']:6.2f}   {t['mode']}")


def cpu_name():
    names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else "?"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", default=os.path.join(HERE, "..", "models", "ende", "ende-q4_0.gguf"))
    p.add_argument("--texts", help="source, tab, reference in each line")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--type", default="int8", help="CTranslate2's type of weights")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--seconds", type=float, default=1e9, help="begin no round after this time")
    p.add_argument("--one", type=int, default=40)
    p.add_argument("--many", type=int, default=200)
    p.add_argument("--only", default="greedy,beams,batch")
    p.add_argument("--sooth", default=os.path.join(HERE, "..", "build", "sooth"))
    p.add_argument("--json", action="store_true")
    p.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        return worker(a)
    if not a.texts:
        p.error("name a file of sentences: --texts FILE.tsv")
    stop = time.perf_counter() + a.seconds
    w = Weights(a.model)
    with tempfile.TemporaryDirectory() as folder:
        version = write_model(w, folder, a.type)
        texts, cells = read_texts(a, w), make_cells(a)
        engines = {"theirs": Theirs(a, folder), "ours": Ours(a)}
        try:
            warm_up(cells, engines, texts)
            measure(cells, engines, texts, a, stop)
        finally:
            for e in engines.values():
                e.close()
    about = {"model": os.path.basename(a.model), "cpu": cpu_name(), "threads": a.threads, "ctranslate2": version, "type": a.type}
    for c in cells:
        summarise(c)
        c["same"] = compare(c, texts)
    print(json.dumps(dict(about, cells=cells))) if a.json else show(cells, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
