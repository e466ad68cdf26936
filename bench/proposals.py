#!/usr/bin/env python3
"""Acceptance of K proposals from one row: measured beside the formula, K from 1 to 8.

usage: proposals.py [-m MODEL] [--prompts FILE.jsonl] [--tokens N]

Both are counted over the same positions of the target's own text at temperature 1 (`sooth theory --measure`). Formula: the mean of
so_theory_accept_several. Measured: how often --verify reject accepts one of the samples of --spec 'model(k=K)', drawn with and
without replacement. The counts do not depend on the machine. +- is one standard error over texts. Prints a Markdown table.
"""
import argparse
import json
import os
import subprocess
import sys

SOOTH = os.environ.get("SOOTH_BIN", "build/sooth")


def measure(args, specs):
    r = subprocess.run([SOOTH, "theory", "--measure", "-m", args.model, "--spec", ";".join(specs), "--temp", "1", "--prompts",
                        args.prompts, "-n", str(args.tokens), "--gamma", "1", "--json"], stdout=subprocess.PIPE, check=True)
    return json.loads(r.stdout)["acceptance"]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("-m", "--model", default="story")
    ap.add_argument("--prompts", default="bench/prompts/story.jsonl")
    ap.add_argument("--tokens", type=int, default=2000)
    args = ap.parse_args()
    print("| K | formula | measured | +- | distinct, measured | +- |\n|---|---|---|---|---|---|")
    for k in range(1, 9):
        independent, distinct = measure(args, [f"model(k={k})", f"model(k={k},distinct)"])
        formula = [p["acceptance"] for p in independent["proposals"] if p["k"] == k][0]
        print(f"| {k} | {formula:.3f} | {independent['own_acceptance']:.3f} | {independent['own_error']:.3f} | "
              f"{distinct['own_acceptance']:.3f} | {distinct['own_error']:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
