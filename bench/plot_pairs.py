#!/usr/bin/env python3
"""Writes the results of pairs.py as tables and plots, in the form of Tables 2 to 4 of Leviathan et al.

  bench/plot_pairs.py STORE.json -o docs/pairs.md

Of the page only the part between its two marks is replaced. Plots (gnuplot, SVG) are written next to it, named after the
page and the pair. Expected values are computed here from the measured alpha, c and t(n), with the formulas of
`sooth theory --measure`; alpha is that of the timed run, as in the paper's Table 4."""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys

BEGIN, END = "<!-- from here on: bench/plot_pairs.py -->", "<!-- to here -->"
SETTINGS = (("0", "match", "0"), ("1", "match", "1, match"), ("1", "reject", "1, reject"))
# distinguishable without red-green vision (after Okabe and Ito)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")


def geometric(values):
    values = [v for v in values if v]
    return math.exp(statistics.mean(map(math.log, values))) if values else None


def expected(ratio, th, cell, gamma, everywhere):
    """(speed-up by theorem 3.8, the same with t(gamma+1) and the sampling time), times in units of a pass over one token.
    A drafter that does not guess everywhere also has plain rounds; their fraction 1 - rho follows from its tokens per pass."""
    alpha, s, c = cell["alpha"], th["sample_ms"] / th["t1_ms"], th["c"]
    tokens = gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    rho = 1 if everywhere or tokens <= 1 else min(1, (cell["tokens_per_pass"] - 1) / (tokens - 1))
    per_round, plain = rho * tokens + 1 - rho, 1 + s
    checked = gamma * c + ratio + tokens * s
    return per_round / (rho * (gamma * c + 1) + 1 - rho), per_round * plain / (rho * checked + (1 - rho) * plain)


class Pair:
    def __init__(self, name, data):
        self.name, self.data = name, data
        self.tasks, self.gammas = data["tasks"], data["gammas"]
        self.drafters = data["drafters"]
        self.models = [d for d in self.drafters if self.drafters[d]["info"]]
        self.models.sort(key=lambda d: self.drafters[d]["info"]["parameters"])
        self.free = [d for d in self.drafters if not self.drafters[d]["info"]]
        self.slug = "".join(c for c in name.lower() if c.isalnum())

    def theory(self, d, temp):
        return self.drafters[d]["theory"].get(temp)

    def cell(self, d, temp, verify, gamma, task):
        return self.drafters[d]["cells"].get(f"{temp}/{verify}/{gamma}", {}).get(task)

    def measured(self, d, temp, verify, gamma, task):
        c = self.cell(d, temp, verify, gamma, task)
        return c["speedup"] if c else None

    def ratio(self, gamma):
        """t(gamma+1) / t(1) from the speculative and plain passes of the timed runs of draft models, which guess everywhere."""
        cells = [c["all"] for d in self.models for k, c in self.drafters[d]["cells"].items() if k.endswith(f"/{gamma}")]
        got = [c["spec_pass_ms"] / c["plain_pass_ms"] for c in cells if c.get("plain_pass_ms")]
        return statistics.median(got) if got else None

    def expected(self, d, temp, verify, gamma, task):
        """For one task, or the geometric mean over all tasks, as for measured values."""
        if task == "all":
            each = [self.expected(d, temp, verify, gamma, t) for t in self.tasks]
            return geometric(e[0] for e in each), geometric(e[1] for e in each)
        th, c = self.theory(d, temp), self.cell(d, temp, verify, gamma, task)
        ratio = self.ratio(gamma)
        if not th or th.get("c") is None or not c or c["alpha"] is None or not ratio:
            return None, None
        return expected(ratio, th, c, gamma, d in self.models)


def number(x, digits=2):
    return "–" if x is None else f"{x:.{digits}f}"


def gain(x, best=False):
    """A speed-up as text; in italics if slower than plain decoding."""
    if x is None:
        return "–"
    return f"*{x:.2f}*" if x < 1 else f"**{x:.2f}**" if best else f"{x:.2f}"


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows), ""]


def shown(d):
    return f"`{d}`" if "×" not in d else d


def files_table(p):
    rows = []
    for what, info in [("target", p.data["target"]), *(("draft", p.drafters[d]["info"]) for d in reversed(p.models))]:
        rows.append([what, f"`{info['file']}`", f"{info['layers']} × {info['d']}", str(info["ff"]), f"{info['parameters'] / 1e6:.2f} M",
                     f"{info['bytes']:,}", info["type"] + (", vocabulary subset" if info["narrow"] else ""),
                     f"{info['parameters'] / p.data['target']['parameters']:.3f}", f"`{info['sha256'][:12]}`"])
    return table(["", "file", "layers × d", "ff", "parameters", "bytes", "type", "of the target", "sha256"], rows)


def best_cell(p, d, temp, verify, task):
    """(length, alpha, speed-up) of the best length. For counted tables: the speed-up that `theory` measured over all tasks."""
    cells = {g: p.cell(d, temp, verify, g, task) for g in p.gammas}
    cells = {g: c for g, c in cells.items() if c and c["speedup"]}
    if cells:
        g = max(cells, key=lambda k: cells[k]["speedup"])
        return g, cells[g]["alpha"], cells[g]["speedup"]
    th = p.theory(d, temp)
    if th and th.get("measured") and verify == "match" and task == "all" and d in p.free:
        return th["gamma"], th["timed_alpha"], th["measured"]
    return None


def table2(p):
    rows = []
    for task in [*p.tasks, "all"]:
        for temp, verify, name in SETTINGS:
            found = [(d, *c) for d in [*reversed(p.models), *reversed(p.free)] if (c := best_cell(p, d, temp, verify, task))]
            best = max((f[3] for f in found), default=None)
            rows += [[task, shown(d), name, str(g), number(a), gain(s, s == best)] for d, g, a, s in found]
    return table(["task", "drafter", "temperature", "γ", "α", "speed-up"], rows)


def table3(p):
    rows = []
    for d in [*p.free, *p.models]:
        for temp in ("0", "1"):
            th = p.theory(d, temp)
            if th and th["alpha"] is not None:
                parameters = f"{p.drafters[d]['info']['parameters'] / 1e6:.2f} M" if d in p.models else "–"
                rows.append([shown(d), parameters, temp, f"{th['alpha']:.2f} ± {th['alpha_error'] or 0:.2f}",
                             f"{th['match']:.2f} ± {th['match_error'] or 0:.2f}", number(th["covered"]), number(th.get("c"), 3)])
    return table(["drafter", "parameters", "temperature", "α: Σ min(p,q)", "α of match", "positions with a guess", "c"], rows)


def alphas(cells):
    """The range of alpha over the lengths."""
    low, high = (f(c["alpha"] or 0 for c in cells) for f in (min, max))
    return number(low) if high - low < 0.005 else f"{low:.2f} to {high:.2f}"


def table4(p):
    rows = []
    for task in [*p.tasks, "all"]:
        for temp, verify, name in SETTINGS:
            for d in [*reversed(p.models), *p.free]:
                cells = {g: c for g in p.gammas if (c := p.cell(d, temp, verify, g, task)) and c["speedup"]}
                if not cells or not (th := p.theory(d, temp)):
                    continue
                best = max(c["speedup"] for c in cells.values())
                row = [task, shown(d), name, alphas(cells.values()), number(th.get("c"), 3)]
                for g in p.gammas:
                    e38, et = p.expected(d, temp, verify, g, task)
                    got = p.measured(d, temp, verify, g, task)
                    row.append(f"{number(e38)} · {number(et)} · {gain(got, got == best)}" if got else "")
                rows.append(row)
    return table(["task", "drafter", "temperature", "α", "c", *(f"γ = {g}" for g in p.gammas)], rows)


def passes(p):
    return table(["n", *(str(g + 1) for g in p.gammas)], [["t(n) / t(1)", *(number(p.ratio(g)) for g in p.gammas)]])


def agreement(p):
    """Deviation of measured from expected speed-ups, over all cells of the draft models."""
    off = ([], [])
    for d, task, (temp, verify, _), g in ((d, t, s, g) for d in p.models for t in p.tasks for s in SETTINGS for g in p.gammas):
        got = p.measured(d, temp, verify, g, task)
        for e, kept in zip(p.expected(d, temp, verify, g, task), off):
            if got and e:
                kept.append(100 * (got / e - 1))
    if len(off[0]) < 4:
        return []
    parts = [f"{statistics.median(o):+.0f} % ({q[0]:+.0f} to {q[2]:+.0f})" for o in off for q in [statistics.quantiles(o, n=4)]]
    return [f"Measured relative to expected speed-up over {len(off[0])} cells of the draft models, median and quartiles: theorem 3.8 {parts[0]}, "
            f"with t(γ+1) {parts[1]}.", ""]


def gnuplot(script, path, width, height):
    head = f"set terminal svg size {width},{height} dynamic background '#ffffff' font 'DejaVu Sans,Helvetica,sans-serif,12'\n"
    out = subprocess.run(["gnuplot", "-d", "-"], input=head + "set encoding utf8\n" + script, capture_output=True, text=True)
    if out.returncode != 0 or not out.stdout:
        sys.exit(f"gnuplot: {out.stderr}")
    with open(path, "w") as f:
        f.write(out.stdout)


def plot_speed(p, path):
    """Speed-up over gamma, one panel per setting: measured with points, expected (with t(gamma+1)) dashed."""
    drafters = [*reversed(p.models), *(d for d in p.free if p.drafters[d]["cells"])]
    script = [f"set multiplot layout 1,{len(SETTINGS)}", "set grid lt 1 lc rgb '#dddddd'", "set xlabel 'γ'",
              f"set xrange [0.5:{max(p.gammas) + 0.5}]", f"set xtics ({', '.join(map(str, p.gammas))})", "set key bottom left Left reverse samplen 2 font ',10' spacing 0.9"]
    values = [v for d in drafters for t, f, _ in SETTINGS for g in p.gammas
              for v in (p.measured(d, t, f, g, "all"), p.expected(d, t, f, g, "all")[1]) if v]
    low, high = min(values, default=0.5), max(values, default=2)
    script.append(f"set yrange [{math.floor(low * 10 - 3) / 10}:{math.ceil(high * 10 + 1) / 10}]")
    for temp, verify, name in SETTINGS:
        lines, data = ["1 with lines lc rgb '#888888' dt 3 notitle", "NaN with lines lw 2 dt 2 lc rgb '#555555' title 'dashed: expected'"], []
        for i, d in enumerate(drafters):
            got = [(g, p.measured(d, temp, verify, g, "all")) for g in p.gammas]
            if not any(v for _, v in got):
                continue
            want = [(g, p.expected(d, temp, verify, g, "all")[1]) for g in p.gammas]
            for points, style, title in ((got, "linespoints pt 7 ps 0.6", f"title '{d}'"), (want, "lines dt 2", "notitle")):
                lines.append(f"'-' with {style} lw 2 lc rgb '{COLOURS[i % len(COLOURS)]}' {title}")
                data += [f"{g} {v}" for g, v in points if v] + ["e"]
        script += [f"set title '{p.name}, temperature {name}'", "plot " + ", ".join(lines), *data, "unset key"]
    gnuplot("\n".join([*script, "unset multiplot", ""]), path, 1100, 420)


def plot_alpha(pairs, path):
    """Share of tokens that are guessed right, over the drafters ordered by size; one panel per pair."""
    series = (("0", "alpha", "temperature 0"), ("1", "alpha", "temperature 1, Σ min(p,q)"), ("1", "match", "temperature 1, match"))
    script = [f"set multiplot layout 1,{len(pairs)}", "set grid ytics lt 1 lc rgb '#dddddd'", "set yrange [0:1]", "set ylabel 'α × positions with a guess'",
              "set key top left Left reverse samplen 2", "set xtics rotate by -30", "set rmargin 7"]
    for p in pairs:
        drafters = [*p.free, *p.models]
        tics = ", ".join(f"'{d.replace('(draw)', '')}' {i}" for i, d in enumerate(drafters))
        lines, data = [], []
        for k, (temp, key, title) in enumerate(series):
            style = f"pt {(7, 5, 9)[k]} ps 0.7 lw 2 lc rgb '{COLOURS[k]}'"
            for group, how in ((p.free, f"points {style} title '{title}'"), (p.models, f"linespoints {style} notitle")):
                points = [(drafters.index(d), th[key] * th["covered"]) for d in group if (th := p.theory(d, temp)) and th[key] is not None]
                if points:
                    lines.append(f"'-' with {how}")
                    data += [f"{x} {y}" for x, y in points] + ["e"]
        script += [f"set title '{p.name}'", f"set xrange [-0.5:{len(drafters) - 0.5}]", f"set xtics ({tics})", "plot " + ", ".join(lines), *data]
    gnuplot("\n".join([*script, "unset multiplot", ""]), path, 1100, 440)


def section(p, stem):
    head = p.data
    commits = sorted({c["commit"] for d in p.drafters.values() for c in d["cells"].values()})
    return [f"## {p.name}", "",
            f"{head['cpu']}, {head['threads']} threads; `{head['prompts']}`, {head['each']} prompts of each task, {head['n']} tokens each; "
            f"Table 3 over {head['tokens']} tokens at each temperature; commit {', '.join(commits)}.", "",
            *files_table(p), *passes(p),
            f"![speed-up of {p.name} over γ, measured and expected]({stem}-{p.slug}.svg)", "",
            "### Table 2: the best length, measured", "", *table2(p),
            "### Table 3: α", "", *table3(p),
            "### Table 4: expected and measured", "", *table4(p), *agreement(p)]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("store")
    a.add_argument("-o", "--out", required=True)
    args = a.parse_args()
    with open(args.store) as f:
        pairs = [Pair(name, data) for name, data in json.load(f)["pairs"].items()]
    before, after = f"# Pairs\n\n{BEGIN}", f"{END}\n"
    if os.path.exists(args.out):
        with open(args.out) as f:
            text = f.read()
        if BEGIN not in text or END not in text:
            sys.exit(f"{args.out}: the marks '{BEGIN}' and '{END}' are missing: the page is not changed")
        before, after = text[:text.index(BEGIN) + len(BEGIN)], text[text.index(END):]
    base = os.path.splitext(args.out)[0]
    stem = os.path.basename(base)
    for p in pairs:
        plot_speed(p, f"{base}-{p.slug}.svg")
    plot_alpha(pairs, f"{base}-alpha.svg")
    body = [f"![α over the drafters by size]({stem}-alpha.svg)", "", *(line for p in pairs for line in section(p, stem))]
    with open(args.out, "w") as f:
        f.write("\n".join([before, "", *body, after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
