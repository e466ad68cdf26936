#!/usr/bin/env python3
"""Beam search with and without a draft, and greedy decoding, alternating: passes per step and time.

usage: beams.py SOOTH MODEL DRAFT PROMPTS.jsonl [--beams 2,4] [--lengths 0,1,2] [-n 48] [--every 8] [--most 5] [-c 2048] [--end]

For each prompt and width: greedy and plain beams, then beams with the draft for each length (0: the
planner's choice). Answers of the same width must be equal. Medians over the prompts of ms per token of the
answer, all relative to plain beams of that width; steps of the search per pass; the acceptance of the first
two levels.
"""
import argparse
import json
import statistics
import subprocess


def run(a, prompt, *more):
    cmd = [a.sooth, "run", "-m", a.model, "-p", prompt, "-n", str(a.n), "--json", "-c", a.ctx, *([] if a.end else ["--ignore-eos"]), *more]
    return json.loads(subprocess.run(cmd, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout)


def ms_per_token(result):
    return result["timings"]["predicted_ms"] / len(result["tokens"])


def alpha(results, level):
    depths = [r["spec"]["per_depth"][level] for r in results if len(r["spec"]["per_depth"]) > level]
    tested = sum(d["tested"] for d in depths)
    return sum(d["accepted"] for d in depths) / tested if tested else float("nan")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("sooth", "model", "draft", "prompts"):
        p.add_argument(name)
    p.add_argument("--beams", default="2,4")
    p.add_argument("--lengths", default="0,1,2")
    p.add_argument("--candidates", default="2")
    p.add_argument("-n", type=int, default=48)
    p.add_argument("-c", "--ctx", default="2048")
    p.add_argument("--end", action="store_true", help="answers may end before -n tokens")
    p.add_argument("--every", type=int, default=8)
    p.add_argument("--most", type=int, default=5)
    a = p.parse_args()
    prompts = [json.loads(line)["turns"][0] for line in open(a.prompts)][::a.every][:a.most]
    for w in a.beams.split(","):
        kinds = {"greedy": ["--temp", "0", "--no-spec"], "plain": ["--beams", w, "--no-spec"]}
        for u in a.candidates.split(","):
            for length in a.lengths.split(","):
                fixed = ["--spec-length", length] if length != "0" else []
                kinds[f"u={u}w, {length if fixed else 'planned'}"] = [
                    "--beams", w, "--beam-candidates", str(int(u) * int(w)), "-md", a.draft, "--spec", "model", *fixed]
        results = {k: [] for k in kinds}
        for prompt in prompts:
            for k, more in kinds.items():
                results[k].append(run(a, prompt, *more))
            for k in kinds:
                same = results[k][-1]["tokens"] == results["plain"][-1]["tokens"]
                assert same or k == "greedy", f"{k}: the answer differs"
        for k, r in results.items():
            ratio = statistics.median(ms_per_token(x) / ms_per_token(y) for x, y in zip(r, results["plain"]))
            steps = sum(len(x["tokens"]) for x in r) / sum(x["spec"]["rounds"] for x in r)
            draft = sum(x["spec"]["draft_ms"] for x in r) / sum(x["timings"]["predicted_ms"] for x in r)
            print(f"w={w} {k:16} time/plain {ratio:.2f}  steps per pass {steps:.2f}  in the draft {draft:.0%}  "
                  f"accepted {alpha(r, 0):.2f} {alpha(r, 1):.2f}", flush=True)


if __name__ == "__main__":
    main()
