#!/usr/bin/env python3
"""Measures one target with drafts of several sizes, for tables in the form of Tables 2 to 4 of Leviathan et al.

  bench/pairs.py NAME -m TARGET.gguf [-md DRAFT.gguf ...] --prompts FILE.jsonl [--tasks a,b] --store FILE.json
  bench/plot_pairs.py FILE.json -o docs/pairs.md

Each drafter is measured by `sooth theory --measure` (alpha and c over the target's own answers) and then, for every
length, by `sooth bench spec` (speed-up, and t(n) from the passes of the same runs), alternating with plain decoding: at
temperature 0, and at 1 with match and with reject. A task is a category of the prompts; one run covers all tasks of a
length. Drafters without cost are measured too: unigram and bigram (counted from half of the texts) by `theory` only,
lookup and ngram at every second length.

Results are saved in the store after every run. The same command resumes after an interruption or after --seconds (exit
status 3). A draft whose file changed is measured again; drafts that are no longer named are removed. This script
measures and does not judge."""
import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time

SETTINGS = (("0", "match"), ("1", "match"), ("1", "reject"))
COUNTED = ("unigram(draw)", "bigram(draw)")
FREE = ("lookup", "ngram")
KEPT = {"acceptance": ("kind", "alpha", "alpha_error", "match", "match_error", "covered", "tokens", "texts"),
        "speed": ("gamma", "c", "draft_ms", "timed_alpha", "predicted", "measured", "measured_error", "planned", "identical")}


class DeadlinePassed(Exception):
    """The time given by --seconds is over."""


def run(args, *words):
    if args.deadline and time.monotonic() > args.deadline:
        raise DeadlinePassed()
    out = subprocess.run([args.sooth, *words, "--json"], capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(f"sooth {' '.join(words)}\n{out.stderr}")
    return [json.loads(line) for line in out.stdout.splitlines()]


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def describe(args, path):
    """Size, shape and hash of a model's file."""
    d = run(args, "inspect", path)[0]
    meta = d["metadata"]
    arch = meta["general.architecture"]
    shape = {k: meta[f"{arch}.{v}"] for k, v in (("layers", "block_count"), ("d", "embedding_length"), ("ff", "feed_forward_length"))}
    types = max(d["types"].items(), key=lambda t: t[1]["parameters"])[0]
    return {**shape, "file": os.path.basename(path), "parameters": d["parameters"], "bytes": d["bytes"], "type": types,
            "narrow": "sooth.draft.output_mask" in meta, "sha256": sha256(path)}


def label_of(info, taken):
    name = f"{info['layers']} × {info['d']} ({info['parameters'] / 1e6:.1f} M)"
    return name if name not in taken else f"{name}, {info['file']}"


def choose_prompts(args):
    """The first --each prompts of every task that are short enough. Long ones waste time: every run repeats the prefill, which is not timed."""
    by_task = {}
    with open(args.prompts) as f:
        for line in filter(str.strip, f):
            prompt = json.loads(line)
            if len(prompt["turns"][0]) <= args.longest:
                by_task.setdefault(prompt.get("category", "none"), []).append(line.strip())
    tasks = args.tasks.split(",") if args.tasks else list(by_task)
    for t in tasks:
        if len(by_task.get(t, ())) < args.each:
            sys.exit(f"{args.prompts}: task '{t}' has {len(by_task.get(t, ()))} prompts of at most {args.longest} characters, but --each is {args.each}; "
                     f"available: "
                     f"{', '.join(f'{k} ({len(v)})' for k, v in by_task.items())}")
    return {t: by_task[t][:args.each] for t in tasks}


class Store:
    """One JSON file with all pairs by name. It is replaced atomically after every run."""

    def __init__(self, path):
        self.path = path
        self.data = {"pairs": {}}
        if os.path.exists(path):
            with open(path) as f:
                self.data = json.load(f)

    def save(self):
        with open(self.path + ".new", "w") as f:
            json.dump(self.data, f, indent=1, ensure_ascii=False)
        os.replace(self.path + ".new", self.path)

    def pair(self, name, head):
        """The pair's results so far. They must have been measured with the same settings."""
        p = self.data["pairs"].setdefault(name, {**head, "drafters": {}})
        for k, v in head.items():
            if p.get(k) != v:
                sys.exit(f"{self.path}: '{name}' was measured with {k} = {p.get(k)}, not {v}: use another --store or pair name")
        return p


def theory(args, specs, prompts):
    """Acceptance and cost per drafter and temperature; costs are relative to t(1) of the same run."""
    got = run(args, "theory", "--measure", "-m", args.model, "-t", str(args.threads), "-n", str(args.tokens),
              "-f", prompts, "--spec", ";".join(specs))[0]
    t1 = next(p["ms"] for p in got["passes"] if p["n"] == 1)
    out = [{} for _ in specs]
    names = list(dict.fromkeys(a["drafter"] for a in got["acceptance"]))  # in the order of the specs
    for part in ("acceptance", "speed"):
        for row in got[part]:
            at = out[names.index(row["drafter"])].setdefault(f"{row['temp']:g}", {"t1_ms": t1})
            at.update({k: row[k] for k in KEPT[part]})
            at["sample_ms"] = next(t["sample_ms"] for t in got["texts"] if t["temp"] == row["temp"])
    return out


def bench(args, words, prompts, setting, gamma):
    temp, verify = setting
    rows = run(args, "bench", "spec", "-m", args.model, *words, "-t", str(args.threads), "-n", str(args.n), "--prompts", prompts,
               "--spec-length", str(gamma), "--temp", temp, "--verify", verify, "-s", "1")
    if any(r["identical"] is False for r in rows):
        sys.exit(f"{' '.join(words)}, gamma {gamma}: the speculative text differs from the plain text")
    return {r["category"]: {k: r[k] for k in ("speedup", "speedup_spread", "alpha", "tokens_per_pass", "plain_pass_ms", "spec_pass_ms")} for r in rows}


def plan(args, pair, files):
    """Yields (drafters, run) in order, without those that the store already has."""
    known = pair["drafters"]
    for group in [*([d] for d in files), [d for d in known if d not in files]]:
        if not all(known[d]["theory"] for d in group):
            yield group, ("theory",)
    # a deterministic guess is accepted with probability p(x) in match and in reject, so one of them suffices
    timed = [(d, s, g) for s in SETTINGS for d in files for g in args.gammas]
    timed += [(d, s, g) for s in SETTINGS if s[1] == "match" for d in FREE for g in args.gammas[::2]]
    for d, setting, gamma in timed:
        if f"{'/'.join(setting)}/{gamma}" not in known[d]["cells"]:
            yield [d], ("bench", setting, gamma)


def perform(args, pair, files, prompts, group, what):
    if what[0] == "theory":
        specs = [f"model({files[d]})" if d in files else d for d in group]
        for d, got in zip(group, theory(args, specs, prompts)):
            pair["drafters"][d]["theory"] = got
        return
    d, setting, gamma = group[0], *what[1:]
    words = ["--spec", "model", "-md", files[d]] if d in files else ["--spec", d]
    got = bench(args, words, prompts, setting, gamma)
    pair["drafters"][d]["cells"][f"{'/'.join(setting)}/{gamma}"] = {**got, "commit": args.commit}


def measure(args, store, pair, files):
    jobs = list(plan(args, pair, files))
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        prompts.writelines(line + "\n" for by_turns in zip(*args.chosen.values()) for line in by_turns)
        prompts.flush()
        for i, (group, what) in enumerate(jobs):
            t = time.monotonic()
            try:
                perform(args, pair, files, prompts.name, group, what)
            except DeadlinePassed:
                print(f"{len(jobs) - i} of {len(jobs)} runs are left: run the same command again to continue")
                return 3
            store.save()
            print(f"[{i + 1}/{len(jobs)}] {', '.join(group)}: {what} {time.monotonic() - t:.1f} s", flush=True)
    return 0


def processor():
    try:
        with open("/proc/cpuinfo") as f:
            facts = dict(map(str.strip, line.split(":", 1)) for line in f.read().split("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        return "unknown processor"
    return f"{facts.get('model name', 'unknown processor')} (family {facts.get('cpu family')}, model {facts.get('model')})"


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    p.add_argument("name", help="name of the pair on the page")
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-md", "--draft", action="append", default=[], help="a draft model; may be repeated")
    p.add_argument("--prompts", required=True)
    p.add_argument("--tasks", help="categories of the prompts (default: all)")
    p.add_argument("--each", type=int, default=3, help="prompts per task")
    p.add_argument("--longest", type=int, default=1800, help="most characters of a prompt")
    p.add_argument("--tokens", type=int, default=1024, help="tokens of the target's own text per temperature, for theory")
    p.add_argument("-n", type=int, default=64, help="tokens per answer")
    p.add_argument("--gammas", type=lambda s: [int(g) for g in s.split(",")], default=[1, 2, 3, 5, 7])
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--store", required=True)
    p.add_argument("--seconds", type=float, help="start no run after this time")
    p.add_argument("--sooth", default=os.path.join(here, "..", "build", "sooth"))
    a = p.parse_args()
    a.deadline = time.monotonic() + a.seconds if a.seconds else None
    git = subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    a.commit = git.stdout.strip() or "unknown"
    return a


def main():
    args = parse()
    args.chosen = choose_prompts(args)
    store = Store(args.store)
    head = {"target": describe(args, args.model), "prompts": os.path.basename(args.prompts), "tasks": list(args.chosen),
            "each": args.each, "longest": args.longest, "n": args.n, "tokens": args.tokens,
            "gammas": args.gammas, "threads": args.threads, "cpu": processor()}
    pair = store.pair(args.name, head)
    files, drafters = {}, {}
    for path in args.draft:
        info = describe(args, path)
        label = label_of(info, drafters)
        files[label] = path
        drafters[label] = {"info": info, "theory": {}, "cells": {}}
    drafters.update({d: {"info": None, "theory": {}, "cells": {}} for d in (*COUNTED, *FREE)})
    for label, new in drafters.items():
        old = pair["drafters"].get(label)
        if old and (old["info"] or {}).get("sha256") == (new["info"] or {}).get("sha256"):
            drafters[label] = {**old, "info": new["info"]}  # the file may have moved
    pair["drafters"] = drafters
    return measure(args, store, pair, files)


if __name__ == "__main__":
    sys.exit(main())
