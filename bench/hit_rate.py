#!/usr/bin/env python3
"""Hit rate of drafting ahead against the number of outcomes (fan-out), by temperature, with hits by rank.

usage: hit_rate.py -m MODEL [-md DRAFT] --prompts FILE.jsonl [--per-category N] [--max-chars N] [--tokens N] [--fans 1,2,4,…] [--length K]
                   [--temps 0,1] [--verify match] [--fallback none|sync] [--json FILE]

Drafts are waited for (wait=K) and have a fixed length, so the counts do not depend on the machine. At temperature 0 and with `match` the
text must be that of plain decoding, or the program fails. Prints one Markdown table per temperature."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

from tree_budget import take_prompts

SOOTH = os.environ.get("SOOTH_BIN", "build/sooth")


def run(args, prompts, temp, spec):
    command = [SOOTH, "run", "-m", args.model, "--prompts", prompts, "-n", str(args.tokens), "--json", "--temp", str(temp), "--seed", "7"]
    command += ["-md", args.draft] if args.draft and spec != "none" else []
    command += ["--spec", spec]
    if spec != "none":
        command += ["--draft-cores", "1", "--spec-length", str(args.length), "--verify", args.verify if temp > 0 else "match"]
    r = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if r.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {r.returncode}")
    return [json.loads(line) for line in r.stdout.splitlines()]


def summary(answers):
    """Sums over the answers: hit rate, hits by rank, tokens per pass, α."""
    counts = [a["spec"]["async"] for a in answers if "async" in a["spec"]]
    looked_up = sum(c["rounds"] + c["skipped"] for c in counts)
    ranks = [sum(c["hits_by_rank"][i] for c in counts) for i in range(len(counts[0]["hits_by_rank"]))]
    tested = sum(d["tested"] for a in answers for d in a["spec"]["per_depth"])
    accepted = sum(d["accepted"] for a in answers for d in a["spec"]["per_depth"])
    rounds = sum(a["spec"]["rounds"] for a in answers)
    return {"hit_rate": sum(c["hits"] for c in counts) / looked_up, "rounds": looked_up, "alpha": accepted / tested if tested else None,
            "absent": sum(c["absent"] for c in counts) / looked_up, "late": sum(c["late"] for c in counts) / looked_up,
            "by_rank": [r / looked_up for r in ranks], "tokens_per_pass": sum(a["timings"]["predicted_n"] for a in answers) / rounds}


def table(temp, fans, rows):
    print(f"\ntemperature {temp:g}\n")
    print("| | " + " | ".join(f"fan {f}" for f in fans) + " |\n|---" * 1 + "|---" * len(fans) + "|")
    for name, key in (("hit rate", "hit_rate"), ("tokens per pass", "tokens_per_pass"), ("α", "alpha")):
        print(f"| {name} | " + " | ".join(f"{r[key]:.2f}" for r in rows) + " |")
    print("\nhits by rank, fan " + str(fans[-1]) + ": " + " ".join(f"{x:.3f}" for x in rows[-1]["by_rank"]))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--draft")
    p.add_argument("--prompts", required=True)
    p.add_argument("--per-category", type=int, default=4)
    p.add_argument("--max-chars", type=int, default=600)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--fans", default="1,2,4,8,16,32")
    p.add_argument("--length", type=int, default=4)
    p.add_argument("--temps", default="0,1")
    p.add_argument("--verify", default="match", choices=("match", "reject"))
    p.add_argument("--fallback", default="none")
    p.add_argument("--json")
    args = p.parse_args()
    fans, found = [int(f) for f in args.fans.split(",")], []
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        for line in take_prompts(args.prompts, args.per_category, args.max_chars):
            f.write(json.dumps(line) + "\n")
        f.flush()
        for temp in (float(t) for t in args.temps.split(",")):
            plain, rows = [a["text"] for a in run(args, f.name, temp, "none")], []
            for fan in fans:
                answers = run(args, f.name, temp, f"async(model,fan={fan},wait={args.length},fallback={args.fallback})")
                if (temp == 0 or args.verify == "match") and [a["text"] for a in answers] != plain:
                    sys.exit(f"fan {fan}, temperature {temp:g}: a text is not that of plain decoding")
                rows.append(summary(answers) | {"temp": temp, "fan": fan})
            found += rows
            table(temp, fans, rows)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
