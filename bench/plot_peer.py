#!/usr/bin/env python3
"""Draws t(n) of sooth, llama.cpp and the roofline as SVG, from the output of peer_llamacpp.py --json.

  bench/plot_peer.py RESULT.json [...] -o FILE.svg

One panel per model: milliseconds of a pass over n tokens, both axes logarithmic, medians as points, and the ratio
ours / theirs between the curves. The colours are readable on light and dark backgrounds."""
import argparse
import json
import math
import sys

PANEL_W, PANEL_H, LEFT, TOP, BOTTOM, GAP = 330, 250, 58, 44, 44, 26
STYLES = (("theirs_ms", "llama.cpp", "#d1690e"), ("ours_ms", "sooth", "#1a7fd4"), ("roofline_ms", "roofline", "#8a8f98"))


def ticks(lo, hi):
    """1, 2 and 5 times powers of ten from lo to hi."""
    out, power = [], 10 ** math.floor(math.log10(lo))
    while power <= hi:
        out += [m * power for m in (1, 2, 5) if lo <= m * power <= hi]
        power *= 10
    return out


def number(v):
    return f"{v:g}" if v >= 1 else f"{v:.1f}"


class Panel:
    def __init__(self, result, x0, y_range):
        self.r, self.x0 = result, x0
        self.cells = sorted((c for c in result["cells"] if c["ctx"] == 256 and c["n"] == c["logits"] and "ratio" in c
                             and not c.get("streams")),
                            key=lambda c: c["n"])
        self.lo, self.hi = y_range
        self.n_lo, self.n_hi = self.cells[0]["n"], self.cells[-1]["n"]

    def x(self, n):
        return self.x0 + LEFT + PANEL_W * math.log(n / self.n_lo) / math.log(self.n_hi / self.n_lo)

    def y(self, ms):
        return TOP + PANEL_H * (1 - math.log(ms / self.lo) / math.log(self.hi / self.lo))

    def axes(self):
        out = [f'<text x="{self.x0 + LEFT}" y="{TOP - 14}" class="title">{self.r["model"]}</text>']
        for v in ticks(self.lo, self.hi):
            y = self.y(v)
            out.append(f'<path d="M{self.x0 + LEFT} {y:.1f}h{PANEL_W}" class="grid"/>'
                       f'<text x="{self.x0 + LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(v)}</text>')
        for c in self.cells:
            x = self.x(c["n"])
            out.append(f'<path d="M{x:.1f} {TOP}v{PANEL_H}" class="grid"/>'
                       f'<text x="{x:.1f}" y="{TOP + PANEL_H + 18}" text-anchor="middle">{c["n"]}</text>')
        return out

    def curves(self):
        out = []
        for key, _, colour in STYLES:
            at = [(self.x(c["n"]), self.y(c[key])) for c in self.cells]
            dash = ' stroke-dasharray="5 4"' if key == "roofline_ms" else ""
            out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="{colour}" '
                       f'stroke-width="2"{dash}/>')
            if key != "roofline_ms":
                out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in at]
        for c in self.cells:
            y = (self.y(c["ours_ms"]) + self.y(c["theirs_ms"])) / 2 + 4
            end = "start" if c is self.cells[0] else "end" if c is self.cells[-1] else "middle"
            out.append(f'<text x="{self.x(c["n"]):.1f}" y="{y:.1f}" text-anchor="{end}" class="ratio">{c["ratio"]:.2f}</text>')
        return out


def draw(results):
    values = [c[k] for r in results for c in r["cells"] if c["ctx"] == 256 and "ratio" in c for k, _, _ in STYLES]
    y_range = (min(values) / 1.3, max(values) * 1.3)
    width = len(results) * (LEFT + PANEL_W + GAP)
    height = TOP + PANEL_H + BOTTOM + 20
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           '<style>text{fill:#6b7280}.title{font-size:14px;font-weight:bold}.grid{stroke:#8a8f98;stroke-opacity:.25}'
           '.ratio{font-size:11px}</style>']
    for i, r in enumerate(results):
        panel = Panel(r, i * (LEFT + PANEL_W + GAP), y_range)
        out += panel.axes() + panel.curves()
    y = height - 10
    x = LEFT
    for _, name, colour in reversed(STYLES):
        out.append(f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="2"/><text x="{x + 30}" y="{y}">{name}</text>')
        x += 45 + 8 * len(name)
    out.append(f'<text x="{x + 10}" y="{y}">ms of a pass over n tokens after 256, {results[0]["threads"]} threads, '
               f'{results[0]["cpu"]}; between the curves: ours / theirs</text></svg>')
    return "\n".join(out) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+")
    p.add_argument("-o", "--out", required=True)
    a = p.parse_args()
    results = [json.loads(line) for path in a.files for line in open(path) if line.strip()]
    open(a.out, "w").write(draw(results))


if __name__ == "__main__":
    sys.exit(main())
