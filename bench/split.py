#!/usr/bin/env python3
"""Drafting ahead with a part of the cores for each model, against synchronous drafting with the same parts, and with all cores for both.

  bench/split.py -m TARGET.gguf DRAFT.gguf … [--alpha 0.82] [--hit-rate 0.72] [--fan 4] [--draft-max 4] [-n 64] [--repeats 3] [--threads 1]

Acceptance and hits are simulated (`sooth bench pair`), so models with random weights will do. For each draft two commands alternate:
`--threads 1 --draft-cores 1` with async(model) measures synchronous drafting and drafting ahead with one core for each model, and
`--threads 2` synchronous drafting with both cores for both. Each is taken at its own best length. Tokens per second for the expected
number of tokens per round; medians, with the smallest and the largest of the repeats. `round`: the measured time of a round that drafts
ahead over the predicted one, at that length; `theory`: the ratios by `sooth theory --ssd`, from times of passes in the same run.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOOTH = os.environ.get("SOOTH_BIN", os.path.join(ROOT, "build", "sooth"))


def sooth(*args):
    done = subprocess.run([SOOTH, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def pair(a, draft, threads, *more):
    o = sooth("bench", "pair", "-m", a.model, "-md", draft, "-t", threads, "--alpha", a.alpha, "--draft-max", a.draft_max, "-n", a.n,
              "--repeats", 1, "--json", *(["--cpu-level", a.cpu_level] if a.cpu_level else []), *more)
    if not o["identical"]:
        sys.exit("texts differ from plain decoding")
    return o


def expected(alpha, gamma):
    return sum(alpha ** i for i in range(gamma + 1))


def best_sync(a, o):
    """The best length, and its tokens per second."""
    def round_ms(c):
        return c["pass_ms"] + c["gamma"] * c["draft_ms"] + c["other_us"] / 1000
    return max((1000 * expected(a.alpha, c["gamma"]) / round_ms(c), c["gamma"]) for c in o["cells"])


def best_ahead(a, o):
    return max((1000 * expected(a.alpha, r["gamma"]) / r["ms"], r["gamma"]) for r in o["ahead"]["rows"])


def theory(a, one, both):
    """Drafting ahead against synchronous drafting with one core each, and with both cores for both."""
    t = {p["n"]: p["ms"] for p in one["passes"]}
    t2 = {p["n"]: p["ms"] for p in both["passes"]}
    g = best_ahead(a, one)[1]
    row = one["ahead"]["rows"][g - 1]
    scaling = (t[g + 1] + g * one["draft_pass_ms"]) / (t2[g + 1] + g * both["draft_pass_ms"])
    inputs = ["theory", "--ssd", "--json", "--alpha", a.alpha, "--c", one["c"], "--hit-rate", row["hit_rate"],
              "--row-cost", max((t[g + 1] / t[1] - 1) / g, 0), "--fan-cost", max(row["draft_ahead_ms"] / g / one["draft_pass_ms"], 1),
              "--contention", max(row["contention"], 1), "--draft-contention", max(one["ahead"]["draft_contention"], 1)]
    rows = sooth(*inputs)["rows"][:a.draft_max]
    ahead, sync = max(r["ahead"] for r in rows), max(r["synchronous"] for r in rows)
    return ahead / sync, ahead / sync / max(scaling, 1), scaling


def spread(values):
    return f"{statistics.median(values):6.1f} ({min(values):.1f}, {max(values):.1f})"


def measure(a, draft):
    rows, last = [], None
    for _ in range(a.repeats):
        one = pair(a, draft, a.threads, "--draft-cores", a.threads, "--spec", f"async(model,fan={a.fan})", "--hit-rate", a.hit_rate)
        both = pair(a, draft, 2 * a.threads)
        row = {"one": best_sync(a, one)[0], "both": best_sync(a, both)[0], "ahead": best_ahead(a, one)[0]}
        ahead = one["ahead"]["rows"][best_ahead(a, one)[1] - 1]
        row |= {"round": ahead["ms"] / ahead["expected_ms"], "alone": ahead["ms"] / ahead["expected_alone_ms"], "c": one["c"],
                "slow": ahead["contention"], "draft_slow": one["ahead"]["draft_contention"], "gamma": ahead["gamma"],
                "hits": ahead["hit_rate"], "theory": theory(a, one, both)}
        rows.append(row)
        last = row
    def median(key):
        return statistics.median(r[key] for r in rows)
    t1, t2, scaling = (statistics.median(r["theory"][i] for r in rows) for i in range(3))
    one, both = [r["ahead"] / r["one"] for r in rows], [r["ahead"] / r["both"] for r in rows]
    print(f"{os.path.basename(draft):22} {median('c'):5.3f} {spread([r['one'] for r in rows]):>22} {spread([r['ahead'] for r in rows]):>22} "
          f"{spread([r['both'] for r in rows]):>22}   {statistics.median(one):5.2f} ({min(one):.2f}, {max(one):.2f}) {t1:6.2f}   "
          f"{statistics.median(both):5.2f} ({min(both):.2f}, {max(both):.2f}) {t2:6.2f}   {median('slow'):4.2f} {median('draft_slow'):4.2f} "
          f"{scaling:4.2f}  {median('round'):5.3f} {median('alone'):5.3f}  {last['gamma']} {median('hits'):4.2f}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("drafts", nargs="+")
    p.add_argument("--alpha", type=float, default=0.82)
    p.add_argument("--hit-rate", type=float, default=0.72)
    p.add_argument("--fan", type=int, default=4)
    p.add_argument("--draft-max", type=int, default=4)
    p.add_argument("-n", type=int, default=64)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=1, help="of each model")
    p.add_argument("--cpu-level", help="kernels that compute more slowly, for a target that memory does not limit")
    a = p.parse_args()
    print(f"{os.path.basename(a.model)}, alpha {a.alpha}, hit rate {a.hit_rate}, {a.fan} outcomes; tokens/s\n"
          f"{'draft':22} {'c':>5} {'sync, one core each':>22} {'ahead, one core each':>22} {'sync, both for both':>22}   "
          f"ahead/one each  theory   ahead/both    theory   slow: target, draft, scaling  round alone  gamma hits")
    for draft in a.drafts:
        measure(a, draft)


main()
