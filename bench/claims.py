#!/usr/bin/env python3
"""Tests the claims about speculation on this machine: never slower, speed-up as the formula predicts, good planning.

  bench/claims.py -m smollm2.gguf [--prompts FILE.jsonl] [--repeats 20] [-n 64] [--only never|oracle]

never   Useless drafters: `random`; a draft model with a shuffled vocabulary (made here from the target, so it costs as
        much as the target); `ngram` at temperature 1.5, where the text has no repetitions. Plain and speculative decoding
        alternate, --repeats times each. The median of the speed ratios must be at least 0.98.
oracle  A drafter that is right with probability 0.3, 0.6 or 0.9. For each length K the measured speed-up is compared with
        the paper's formula, tokens per pass / (t(K+1) / t(1)), with t(n) from the passes of the same runs (within 5 %).
        The planner is compared with the best fixed K, turn by turn: the median of the ratios must be at least 0.97.
        Lengths and planner alternate; each turn has its own seed.

The shuffled draft needs numpy and gguf (PyPI). Exit status 1 if a claim fails."""
import argparse, json, os, statistics, subprocess, sys, tempfile


def bench(args, spec, extra=(), repeats=1):
    """(speed-ups of `repeats` runs over all prompts, all values of the last run)"""
    gains, last = [], None
    for _ in range(repeats):
        cmd = [args.sooth, "bench", "spec", "-m", args.model, "--spec", spec, "--prompts", args.prompts,
               "-n", str(args.n), "-t", str(args.threads), "--json", *extra]
        out = subprocess.run(cmd, capture_output=True, text=True)
        if out.returncode != 0:
            sys.exit(f"{' '.join(cmd)}\n{out.stderr}")
        last = json.loads(out.stdout.strip().splitlines()[-1])
        if last["identical"] is False:
            sys.exit(f"{spec}: the speculative text differs from the plain text")
        gains.append(last["speedup"])
    return gains, last


def shuffled_draft(model, path):
    """Writes the target with permuted embedding rows: as slow as the target, and its guesses are wrong."""
    import gguf, numpy as np
    blob = bytearray(open(model, "rb").read())
    reader = gguf.GGUFReader(model)
    order = np.random.default_rng(1).permutation(reader.get_field("tokenizer.ggml.tokens").data.__len__())
    for t in reader.tensors:
        if t.name in ("token_embd.weight", "output.weight"):
            rows = np.frombuffer(bytes(t.data), np.uint8).reshape(int(t.shape[1]), -1)
            blob[t.data_offset:t.data_offset + rows.size] = rows[order].tobytes()
    open(path, "wb").write(blob)


def report(name, gains):
    gains = sorted(gains)
    mid, lo, hi = statistics.median(gains), gains[0], gains[-1]
    print(f"  {name:28} {mid:7.3f}x  ({lo:.3f} to {hi:.3f}, {len(gains)} runs)", flush=True)
    return mid


def never_slower(args):
    ok = True
    print(f"never slower: speed of speculative / plain decoding, {args.n} tokens per prompt, median of {args.repeats} runs")
    with tempfile.TemporaryDirectory() as tmp:
        draft = os.path.join(tmp, "shuffled.gguf")
        shuffled_draft(args.model, draft)
        cases = [("random", "random", []), ("ngram at temperature 1.5", "ngram", ["--temp", "1.5", "-s", "7"]),
                 ("draft, vocabulary shuffled", "model", ["-md", draft]),
                 ("random at temperature 1, reject", "random", ["--temp", "1", "--verify", "reject"])]
        for name, spec, extra in cases:
            ok &= report(name, bench(args, spec, extra, args.repeats)[0]) >= 0.98
    return ok


LENGTHS = {0.3: [1, 2, 3], 0.6: [1, 2, 3, 4, 5, 7], 0.9: [3, 5, 7, 9, 12, 15]}


def oracle(args):
    ok = True
    for a, lengths in LENGTHS.items():
        print(f"oracle({a}): measured speed-up, and the formula with t(K+1)/t(1) from the passes of the same runs")
        runs = {k: [] for k in lengths + ["planner"]}
        for turn in range(args.oracle_repeats):
            for k in runs:
                fixed = [] if k == "planner" else ["--spec-length", str(k)]
                runs[k].append(bench(args, f"oracle({a})", ["-s", str(turn + 1), *fixed])[1])
        gain = {k: statistics.median(r["speedup"] for r in rs) for k, rs in runs.items()}
        for k in lengths:
            ratio = statistics.median(r["spec_pass_ms"] / r["plain_pass_ms"] for r in runs[k])
            tokens = statistics.mean(r["mean_accepted"] for r in runs[k]) + 1
            off = gain[k] / (tokens / ratio) - 1
            ok &= abs(off) <= 0.05
            print(f"  K = {k:2}: {gain[k]:6.3f}x  formula {tokens / ratio:6.3f}x ({100 * off:+.1f} %)   tokens per pass "
                  f"{tokens:.3f}, expected {(1 - a ** (k + 1)) / (1 - a):.3f}; t(K+1)/t(1) {ratio:.3f}", flush=True)
        best = max(lengths, key=gain.get)
        behind = [p["speedup"] / r["speedup"] - 1 for p, r in zip(runs["planner"], runs[best])]
        ok &= statistics.median(behind) >= -0.03
        print(f"  planner: {gain['planner']:6.3f}x, {100 * statistics.median(behind):+.1f} % against K = {best} "
              f"(turns: {' '.join(f'{100 * b:+.1f}' for b in behind)})", flush=True)
    return ok


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--sooth", default=os.path.join(here, "..", "build", "sooth"))
    p.add_argument("--prompts", default=os.path.join(here, "prompts", "content.jsonl"))
    p.add_argument("--repeats", type=int, default=20)
    p.add_argument("--oracle-repeats", type=int, default=3)
    p.add_argument("-n", type=int, default=64)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--only", choices=["never", "oracle"])
    args = p.parse_args()
    ok = True
    if args.only != "oracle":
        ok &= never_slower(args)
    if args.only != "never":
        ok &= oracle(args)
    print("all claims hold" if ok else "a claim failed: see the ratios above")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
