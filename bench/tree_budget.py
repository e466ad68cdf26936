#!/usr/bin/env python3
"""Tokens per pass against the node budget of a draft: chains and trees of one draft model, or of heads.

usage: tree_budget.py -m MODEL --prompts FILE.jsonl [--per-category N] [--max-chars N] [--tokens N] [--budgets 1,2,4,…] [--part greedy|reject]
                      [--tree FILE] [--shapes 'NAME;…'] [--heads medusa|lookahead] [--ends]

--ends: look-ahead rows on the ends of trees, by the number of ends (docs/speculation.md), in place of the node budget.

--tree adds the shape of a file that `sooth calibrate` wrote, cut to each budget.

Every draft has a fixed depth, so all nodes are tested and the planner decides nothing: the counts do not depend on the machine.
At temperature 0 the text must be that of plain decoding, or the program fails. Prints one row per shape, one column per budget,
as a Markdown table; --json writes the counts by category too.
"""
import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile

SOOTH = os.environ.get("SOOTH_BIN", "build/sooth")
MOST_EMBEDDINGS = 16  # of a file
DEPTH = 16  # of trees; chains are as long as their budget
HEADS = [("{h}: chain", "{h}"), ("{h}: Cartesian, k=2", "{h}(k=2,nodes={{n}})"), ("{h}: calibrated", "{h}(nodes={{n}})"),
         ("{h}: best-first", "{h}(best,nodes={{n}})")]

ENDS = [("lookahead on ends: chain", "lookahead(ends={n})", 4), ("lookahead on ends: best-first, 16 nodes", "lookahead(best,nodes=16,ends={n})", 16)]

GREEDY = [("chain", "model"), ("Cartesian, k=2", "model(k=2,nodes={n})"), ("Cartesian, k=4", "model(k=4,nodes={n})"),
          ("best-first", "model(best,nodes={n})")]
REJECT = [("one proposal (chain)", "model"), ("k=2", "model(k=2,nodes={n})"), ("k=4", "model(k=4,nodes={n})"),
          ("k=2, distinct", "model(k=2,distinct,nodes={n})"), ("best", "model(best,nodes={n})")]


def take_prompts(path, per_category, max_chars):
    """The first prompts of each category that are not too long, one turn each."""
    seen, out = collections.Counter(), []
    with open(path, encoding="utf-8") as f:
        for line in f:
            p = json.loads(line)
            category = p.get("category", "all")
            if seen[category] < per_category and len(p["turns"][0]) <= max_chars:
                seen[category] += 1
                out.append({"id": p.get("id", len(out)), "category": category, "turns": p["turns"][:1]})
    if not out:
        sys.exit(f"{path}: no prompt of at most {max_chars} characters")
    return out


def answer(args, prompts, spec, length, temp, verify, nodes):
    command = [SOOTH, "run", "-m", args.model, "--prompts", prompts, "--parallel", str(args.parallel), "-n", str(args.tokens),
               "--temp", str(temp), "--seed", str(args.seed), "--json"]
    if spec:
        command += ["--spec", spec, "--spec-length", str(length), "--draft-max", str(max(length, 1)), "--verify", verify,
                    "--draft-nodes", str(max(nodes, length))]
    else:
        command += ["--no-spec"]
    r = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in r.stdout.splitlines()]


def per_pass(answers):
    """Tokens and passes by category; "all" is their sum."""
    sums = collections.defaultdict(lambda: [0, 0])
    for a in answers:
        tokens = a["timings"]["predicted_n"] + (a["finish_reason"] == "stop")
        for key in (a.get("category", "all"), "all"):
            sums[key][0] += tokens
            sums[key][1] += a["spec"]["rounds"]
    return sums


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("-m", "--model", required=True)
    ap.add_argument("--prompts", required=True)
    ap.add_argument("--per-category", type=int, default=3)
    ap.add_argument("--max-chars", type=int, default=700)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--parallel", type=int, default=4)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--budgets", default="1,2,4,8,16,32,64")
    ap.add_argument("--part", choices=["greedy", "reject"], default="greedy")
    ap.add_argument("--shapes", help="only these, by name, separated by ;")
    ap.add_argument("--tree", help="a tree of sooth calibrate")
    ap.add_argument("--heads", choices=["medusa", "lookahead"], help="the registered heads instead of the draft model")
    ap.add_argument("--ends", action="store_true", help="look-ahead rows on the ends of trees")
    ap.add_argument("--json", help="file for the counts")
    args = ap.parse_args()
    budgets = [int(b) for b in args.budgets.split(",")]
    temp, verify = (0, "match") if args.part == "greedy" else (1, "reject")
    shapes = GREEDY if args.part == "greedy" else REJECT
    if args.heads:
        shapes = [(name.format(h=args.heads), spec.format(h=args.heads)) for name, spec in HEADS]
    if args.tree:
        shapes = shapes + [("calibrated", (args.heads or "model") + '(tree="' + args.tree + '",nodes={n})')]
    if args.shapes:
        shapes = [s for s in shapes if s[0] in args.shapes.split(";")]
    out = {}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as f:
        for p in take_prompts(args.prompts, args.per_category, args.max_chars):
            f.write(json.dumps(p) + "\n")
    plain = answer(args, f.name, None, 0, temp, verify, 0) if temp == 0 else None
    if args.ends:
        budgets, shapes = [1, 2, 4, 8], ENDS
    print("| shape | " + " | ".join(str(b) for b in budgets) + " |\n|---|" + "---|" * len(budgets))
    for name, spec, *nodes in shapes:
        row = []
        for n in budgets:
            length = min(n, 64) if "(" not in spec else min(nodes[0] if nodes else n, DEPTH)
            room = nodes[0] + n * MOST_EMBEDDINGS if nodes else n  # the rows take what the guesses leave
            got = answer(args, f.name, spec.format(n=n), length, temp, verify, room)
            if plain and [a["tokens"] for a in got] != [a["tokens"] for a in plain]:
                sys.exit(f"{spec.format(n=n)}: the text differs from plain decoding")
            sums = per_pass(got)
            row.append(f"{sums['all'][0] / sums['all'][1]:.2f}")
            out.setdefault(name, {})[n] = sums
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    os.unlink(f.name)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(out, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
