#!/usr/bin/env python3
"""Compares sooth and llama.cpp: the time of a pass over n tokens, with the same file and number of threads.

  bench/peer_llamacpp.py -m FILE.gguf [-m ...] [-t 2] [--rounds 15] [--seconds 170] [--only widths,prompt,context,streams]
                         [--device cuda] [--llama FOLDER] [--json]

Both engines keep the model loaded and take turns, cell by cell and round after round, so that a slow moment of the
machine affects both. The engine that starts changes from round to round. A turn consists of a few passes to warm the
caches and a few that count. Before each turn the script waits until the other engine's threads sleep; the CPU time that
an idle engine still used is printed.

  widths    passes of 1, 4, 5, 8 and 16 tokens after 256, with logits for all of them (GPU: 1, 2, 4, 8, 16, 32 and 64)
  prompt    512 tokens from the start, with logits for the last one
  context   passes of 1 and 8 tokens after 4096 (GPU: on request)
  streams   16 and 64 sequences of 256 tokens, one more token of each in one pass (CPU: on request)

llama.cpp runs with --threads for both kinds of batches, memory-mapped, with weights repacked if it has a layout for them.
Both engines use an F16 cache, unless --kv-type (ours) and --peer-kv-type (theirs) say otherwise. llama.cpp is run with
and without flash attention, for streams also with one cache for all of them, and the fastest in two rounds of warm-up counts
for each cell. ours / theirs is the ratio
of the medians over the rounds; the spread is the interquartile range of the ratios per round. The limit (roofline) is
max(bytes / bandwidth, multiply-adds / peak) of the pass, both measured in every round by sooth's threads: the bandwidth of
memory, or that of the last cache level if the weights fit it. A pair of turns is excluded, and counted, if the threads of either engine waited for a core
more than --busy percent of the time, because of another program or another guest of the host: with barriers, one delayed
thread delays all.

--device cuda (or cuda:N) runs both engines on the GPU. It needs a llama.cpp with CUDA: --llama names the folder of its
libllama.so, of the release that the Python package binds. There a pass of sooth ends with the argmax of every row on the
host, as its greedy decoding does; llama.cpp copies the logits of these rows, which is part of llama_decode.

--add FILE includes the rounds of an earlier --json output (--rounds 0: only those). This script measures and does not
judge. Needs llama-cpp-python (pip install llama-cpp-python)."""
import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import time

WIDTHS, PROMPT, SHORT_CTX, LONG_CTX = {"cpu": (1, 4, 5, 8, 16), "gpu": (1, 2, 4, 8, 16, 32, 64)}, 512, 256, 4096
STREAMS = (16, 64)
KINDS = {"cpu": "widths,prompt,context", "gpu": "widths,prompt,streams"}  # what is measured unless --only says otherwise
SETTLE_MS = 150  # milliseconds of passes that warm the caches
CORES = os.sched_getaffinity(0)  # read before OpenMP binds the threads of this process
IDLE_WAIT_S = 0.04  # seconds until the other engine's threads sleep; OpenMP threads spin for up to 20 ms


class Ours:
    """A `sooth bench passes` process; one request line, one answer line."""

    def __init__(self, a, model, n_ctx):
        cmd = [a.sooth, "bench", "passes", "-m", model, "-t", str(a.threads), "-c", str(n_ctx), "--kv-type", a.kv_type,
               "--device", a.device, "--batch-size", str(a.batch_size)]
        if "streams" in a.only:
            cmd += ["--parallel", str(max(STREAMS))]
        self.p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                                  preexec_fn=lambda: os.sched_setaffinity(0, CORES))
        self.about = self.answer()

    def answer(self):
        line = self.p.stdout.readline()
        return json.loads(line) if line else sys.exit("sooth ended unexpectedly: see its messages above")

    def ask(self, line):
        self.p.stdin.write(line + "\n")
        self.p.stdin.flush()
        return self.answer()

    def run(self, cell, times):
        if cell.get("streams"):
            return self.ask(f"streams {cell['ctx']} {cell['n']} {times}")
        return self.ask(f"pass {cell['ctx']} {cell['n']} {cell['logits']} {times}")

    def close(self):
        self.p.stdin.close()
        self.p.wait()


class Theirs:
    """The library of llama-cpp-python, with one context per length, number of sequences and mode: (flash attention, one
    cache for all sequences)."""

    def __init__(self, lib, model, threads, cache, device):
        self.lib, self.threads, self.contexts = lib, threads, {}
        self.cache = {"f32": 0, "f16": 1, "q8_0": 8}[cache]  # ggml type numbers
        params = lib.llama_model_default_params()
        if hasattr(params, "use_mmap"):
            params.use_mmap = True
        params.n_gpu_layers = 0 if device == "cpu" else 999
        params.main_gpu = int(device.partition(":")[2] or 0)
        params.split_mode = 0  # one GPU
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            sys.exit(f"{model}: llama.cpp cannot load it")
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(PROMPT, 0, 1)

    def modes(self, cell):
        for flash in (False, True) if self.cache < 8 else (True,):  # a quantised cache needs flash attention
            for unified in (False, True) if cell.get("streams") else (False,):
                yield flash, unified

    def context(self, cell, mode):
        length, n_seqs = cell["ctx"], cell.get("streams", 1)
        key = length, n_seqs, mode
        if key not in self.contexts:
            lib, p = self.lib, self.lib.llama_context_default_params()
            p.n_ctx = length + PROMPT if n_seqs == 1 else n_seqs * 2 * length
            p.n_batch, p.n_ubatch, p.n_seq_max = PROMPT, PROMPT, n_seqs
            p.n_threads = p.n_threads_batch = self.threads
            p.type_k = p.type_v = self.cache
            p.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if mode[0] else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            p.kv_unified = mode[1]
            ctx = lib.llama_init_from_model(self.model, p)
            if not ctx:
                sys.exit(f"llama.cpp: no context of {p.n_ctx} tokens for {n_seqs} sequences: out of memory? "
                         "--only leaves cells out")
            for seq in range(n_seqs):
                for at in range(0, length, PROMPT):
                    n = min(PROMPT, length - at)
                    self.decode(ctx, [(at + i, seq) for i in range(n)], 1)
            self.contexts[key] = ctx
        return self.contexts[key]

    def decode(self, ctx, rows, n_logits):
        """Computes rows, each a position and a sequence."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (pos, seq) in enumerate(rows):
            b.token[i] = (pos + i) * 7919 % self.n_vocab
            b.pos[i] = pos
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = seq
            b.logits[i] = i >= len(rows) - n_logits
        t = time.perf_counter()
        if self.lib.llama_decode(ctx, b) != 0:
            sys.exit(f"llama.cpp: llama_decode failed for {len(rows)} tokens at position {rows[0][0]}")
        self.lib.llama_get_logits(ctx)  # waits for the pass
        return 1e3 * (time.perf_counter() - t)

    def run(self, cell, times, mode):
        ctx, ms = self.context(cell, mode), []
        at, n = cell["ctx"], cell["n"]
        rows = [(at, i) for i in range(n)] if cell.get("streams") else [(at + i, 0) for i in range(n)]
        for _ in range(times):
            ms.append(self.decode(ctx, rows, cell["logits"]))
            if not self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(ctx), -1, at, -1):
                sys.exit(f"llama.cpp: the tokens from position {at} on cannot be removed from the cache")
        return ms

    def forget(self, cell, mode):
        """Frees the contexts of a cell in all modes but one."""
        for other in self.modes(cell):
            key = cell["ctx"], cell.get("streams", 1), other
            if other != mode and cell.get("streams") and key in self.contexts:
                self.lib.llama_free(self.contexts.pop(key))

    def close(self):
        for ctx in self.contexts.values():
            self.lib.llama_free(ctx)
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_model_free(self.model)


def thread_seconds(pid):
    """(seconds that the threads of a process ran, seconds that they were runnable without a core)"""
    ran = waited = 0
    for t in os.listdir(f"/proc/{pid}/task"):
        fields = open(f"/proc/{pid}/task/{t}/schedstat").read().split()
        ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran * 1e-9, waited * 1e-9


def stolen_seconds():
    """Time that the host gave to other guests (steal), summed over cores."""
    return int(open("/proc/stat").readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def make_cells(only, kind):
    cells = []
    if "widths" in only:
        cells += [dict(name=f"n = {n}", ctx=SHORT_CTX, n=n, logits=n) for n in WIDTHS[kind]]
    if "prompt" in only:
        cells += [dict(name=f"prompt {PROMPT}", ctx=0, n=PROMPT, logits=1)]
    if "context" in only:
        have = {(c["ctx"], c["n"]) for c in cells}
        cells += [dict(name=f"n = {n}, context {ctx}", ctx=ctx, n=n, logits=n)
                  for ctx in (SHORT_CTX, LONG_CTX) for n in (1, 8) if (ctx, n) not in have]
    if "streams" in only:
        cells += [dict(name=f"{n} streams", ctx=SHORT_CTX, n=n, logits=n, streams=n) for n in STREAMS]
    return cells


def warm_up(cells, ours, theirs):
    """Chooses llama.cpp's fastest mode and the number of passes per turn for each cell."""
    for cell in cells:
        best = {}
        for _ in range(2):
            for mode in theirs.modes(cell):
                best[mode] = min(best.get(mode, 1e9), *theirs.run(cell, 2, mode))
        cell["mode"] = min(best, key=best.get)
        cell["flash"] = cell["mode"][0]
        theirs.forget(cell, cell["mode"])
        slow = best[cell["mode"]]
        cell["settle"] = max(1, min(10, int(SETTLE_MS / slow))) if slow < 1500 else 0
        cell["count"] = 20 if slow < 10 else 5 if slow < 60 else 3 if slow < 250 else 1
        tell(f"warm-up: {cell['name']}")
        time.sleep(IDLE_WAIT_S)
        ours.run(cell, 2)


def tell(text):
    """Shows what is going on, on a terminal; the next text replaces it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def watched(who, ours, run):
    """(result of run(), percentages of its time: engine `who` waited for a core, the host took a core, the idle engine
    ran)"""
    pids = {"ours": ours.p.pid, "theirs": os.getpid()}
    idle = "theirs" if who == "ours" else "ours"
    time.sleep(IDLE_WAIT_S)
    before, stolen = {k: thread_seconds(pid) for k, pid in pids.items()}, stolen_seconds()
    t = time.perf_counter()
    result = run()
    took = time.perf_counter() - t
    after = {k: thread_seconds(pid) for k, pid in pids.items()}
    return result, {"waited_percent": 100 * (after[who][1] - before[who][1]) / took,
                    "stolen_percent": 100 * (stolen_seconds() - stolen) / took,
                    "idle_percent": 100 * (after[idle][0] - before[idle][0]) / took}


def one_turn(cell, who, ours, theirs):
    n = cell["settle"] + cell["count"]
    ms, watch = watched(who, ours, lambda: ours.run(cell, n)["ms"] if who == "ours" else theirs.run(cell, n, cell["mode"]))
    return dict(watch, ms=statistics.median(ms[cell["settle"]:]))


def one_round(number, cells, ours, theirs):
    """One turn of each engine for every cell, and a measurement of bandwidth and peak rate."""
    probe, watch = watched("ours", ours, lambda: ours.ask("probe"))
    result = {"probe": dict(probe, **watch), "cells": {}}
    for cell in cells:
        order = ("ours", "theirs") if number % 2 else ("theirs", "ours")
        result["cells"][cell["name"]] = {who: one_turn(cell, who, ours, theirs) for who in order}
    return result


def measure(a, lib, model, stop):
    n_ctx = LONG_CTX + PROMPT if "context" in a.only else SHORT_CTX + PROMPT
    ours, theirs = Ours(a, model, n_ctx), Theirs(lib, model, a.threads, a.peer_kv_type, a.device)
    cells, rounds = make_cells(a.only, a.kind), []
    warm_up(cells, ours, theirs)
    for cell in cells:
        cell.update({k: v for k, v in ours.run(cell, 1).items() if k != "ms"})
    try:
        while len(rounds) < a.rounds and (not rounds or time.perf_counter() < stop):
            rounds.append(one_round(len(rounds), cells, ours, theirs))
            tell(f"{os.path.basename(model)}: round {len(rounds)}")
    except KeyboardInterrupt:  # keep what was measured
        if not rounds:
            raise
    tell("")
    about = {"model": os.path.basename(model), "cpu": ours.about["cpu"], "device": a.device, "threads": a.threads,
             "sooth": ours.about["backend"], "weight_bytes": ours.about["weight_bytes"],
             "llama_cpp": lib.__version__, "llama_cpp_build": lib.llama_print_system_info().decode().strip(" |")}
    ours.close()
    theirs.close()
    return dict(about, cells=cells, rounds=rounds)


def merge(results):
    """Merges the results of each model; a cell uses the rounds that contain it."""
    out = {}
    for r in results:
        have = out.setdefault(r["model"], dict(r, cells=[], rounds=[]))
        names = {c["name"] for c in have["cells"]}
        have["cells"] += [c for c in r["cells"] if c["name"] not in names]
        have["rounds"] += r["rounds"]
    return list(out.values())


def quiet(pairs, limit):
    """(number of undisturbed pairs, these pairs, or all pairs if there are none)"""
    kept = [p for p in pairs if max(t["waited_percent"] + t["stolen_percent"] for t in p.values()) <= limit]
    return len(kept), kept or pairs


def summarise_cell(r, cell, limit):
    pairs = [x["cells"][cell["name"]] for x in r["rounds"] if cell["name"] in x["cells"]]
    n_quiet, kept = quiet(pairs, limit)
    ratios = sorted(p["ours"]["ms"] / p["theirs"]["ms"] for p in kept)
    ours, theirs = (statistics.median(p[k]["ms"] for p in kept) for k in ("ours", "theirs"))
    floor = 1e-6 * max(cell["bytes"] / r["read_gb_per_second"], cell["macs"] / r["peak_gmac_per_second"])
    cell.update(ours_ms=ours, theirs_ms=theirs, ratio=ours / theirs, n_pairs=len(pairs), n_quiet=n_quiet,
                ratio_quartiles=[ratios[round(q * (len(ratios) - 1))] for q in (0.25, 0.75)],
                ratio_extremes=[ratios[0], ratios[-1]], roofline_ms=floor, roofline_percent=100 * floor / ours,
                theirs_roofline_percent=100 * floor / theirs)


def summarise(r, limit):
    """Adds medians, ratios and rooflines to a result."""
    _, probes = quiet([{"ours": x["probe"]} for x in r["rounds"]], limit)
    for key in ("read_gb_per_second", "peak_gmac_per_second", "memory_gb_per_second", "cache_gb_per_second"):
        values = [p["ours"][key] for p in probes if p["ours"][key] is not None]
        r[key] = statistics.median(values) if values else None
    for cell in r["cells"]:
        summarise_cell(r, cell, limit)
    return r


def show(r):
    cache_rate = "" if r["cache_gb_per_second"] is None else f" ({r['cache_gb_per_second']:.1f} within the cache)"
    turns = [p for x in r["rounds"] for p in x["cells"].values()]
    idle = [max(p[who]["idle_percent"] for p in turns) for who in ("theirs", "ours")]
    stolen = statistics.mean(t["stolen_percent"] for p in turns for t in p.values())
    print(f"{r['model']}: {r['sooth']}; llama-cpp-python {r['llama_cpp']}, {r['threads']} threads\n"
          f"  weights {r['weight_bytes'] / 1e6:.0f} MB, reading memory {r['memory_gb_per_second']:.1f} GB/s{cache_rate}, "
          f"multiply-adds {r['peak_gmac_per_second']:.0f} G/s; the host took {stolen:.0f} "
          f"% of a core; idle engines used at most {idle[0]:.1f} % (ours), {idle[1]:.1f} % (theirs) of a core\n"
          f"  {'':22}    ours   theirs   ours/theirs  quartiles      limit  ours (theirs)   flash  undisturbed")
    for c in r["cells"]:
        print(f"  {c['name']:22} {c['ours_ms']:7.2f}  {c['theirs_ms']:7.2f}   {c['ratio']:11.3f}  "
              f"{c['ratio_quartiles'][0]:.3f}-{c['ratio_quartiles'][1]:.3f}  {c['roofline_ms']:7.2f}  "
              f"{c['roofline_percent']:4.0f} % ({c['theirs_roofline_percent']:3.0f} %)  {'on ' if c['flash'] else 'off'}    "
              f"{c['n_quiet']}/{c['n_pairs']}")
    for c in r["cells"]:
        if c.get("streams"):
            per_second = [1e3 * c["n"] / c[k] for k in ("ours_ms", "theirs_ms")]
            print(f"  {c['name']}: {per_second[0]:.0f} tokens/s in all, theirs {per_second[1]:.0f}; ours/theirs "
                  f"{per_second[0] / per_second[1]:.2f}")
        elif c["name"].startswith("prompt"):
            print(f"  {c['name']}: {1e3 * c['n'] / c['ours_ms']:.0f} tokens/s, theirs {1e3 * c['n'] / c['theirs_ms']:.0f}; "
                  f"ours/theirs {c['theirs_ms'] / c['ours_ms']:.2f}")
    by = {(c["ctx"], c["n"]): c for c in r["cells"] if not c.get("streams")}
    for n in (1, 8):
        if (SHORT_CTX, n) in by and (LONG_CTX, n) in by:
            near, long = by[SHORT_CTX, n], by[LONG_CTX, n]
            print(f"  t({n}) after {LONG_CTX} / after {SHORT_CTX} tokens: ours {long['ours_ms'] / near['ours_ms']:.2f}, "
                  f"theirs {long['theirs_ms'] / near['theirs_ms']:.2f}")


def load_library(a):
    if a.llama:  # read when llama_cpp is imported
        os.environ["LLAMA_CPP_LIB_PATH"] = os.path.abspath(a.llama)
    try:
        import llama_cpp
    except ImportError:
        sys.exit("llama.cpp's library is missing: pip install llama-cpp-python")
    callback = llama_cpp.llama_log_callback(lambda level, text, user: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.keep_callback = callback
    llama_cpp.llama_backend_init()
    if a.kind == "gpu" and not llama_cpp.llama_supports_gpu_offload():
        sys.exit(f"--device {a.device}: this llama.cpp was built without CUDA: name another with --llama FOLDER")
    return llama_cpp


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    p.add_argument("-m", "--model", action="append", default=[])
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--kv-type", default="f16", choices=("f16", "f32", "q8_0"))
    p.add_argument("--peer-kv-type", default="f16", choices=("f16", "f32", "q8_0"))
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--seconds", type=float, default=1e9, help="time limit per model, with loading")
    p.add_argument("--only", help="widths, prompt, context, streams; the default depends on the device")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    p.add_argument("--llama", metavar="FOLDER", help="folder of the libllama.so to use")
    p.add_argument("--batch-size", type=int, default=256, help="sooth's rows in one pass of a prompt, as in the engine")
    p.add_argument("--busy", type=float, default=5, help="exclude turns that waited for a core longer, in percent")
    p.add_argument("--add", action="append", default=[], metavar="FILE")
    p.add_argument("--sooth", default=os.path.join(here, "..", "build", "sooth"))
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    a.kind = "cpu" if a.device == "cpu" else "gpu"
    if a.device.partition(":")[0] not in ("cpu", "cuda"):
        p.error(f"--device {a.device}: must be cpu, cuda or cuda:N")
    a.only = set((a.only or KINDS[a.kind]).split(","))
    if not a.only <= {"widths", "prompt", "context", "streams"}:
        p.error(f"--only {','.join(sorted(a.only))}: must be a list of widths, prompt, context, streams")
    if not a.model and not a.add:
        p.error("name a model (-m FILE.gguf) or earlier results (--add FILE)")
    results = [r for path in a.add for line in open(path) if line.strip() for r in [json.loads(line)]]
    if a.model and a.rounds > 0:
        lib = load_library(a)
        for model in a.model:
            results.append(measure(a, lib, model, time.perf_counter() + a.seconds))
    for r in merge(results):
        summarise(r, a.busy)
        print(json.dumps(r), flush=True) if a.json else show(r)
    return 0


if __name__ == "__main__":
    sys.exit(main())
