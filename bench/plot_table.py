#!/usr/bin/env python3
"""Draws the rows of a Markdown table as lines, as SVG: the header's numbers are x (spaced by their logarithm), cells are y.

  bench/plot_table.py -o FILE.svg [--x LABEL] [--y LABEL] < TABLE

Empty cells are left out, text after a number (a star) is ignored. The colours are readable on light and dark backgrounds."""
import argparse
import html
import math
import re
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 620, 320, 52, 190, 18, 44
COLOURS = ("#d1690e", "#1a7fd4", "#2e9e5b", "#9b59b6", "#8a8f98", "#c0392b")


def read(lines):
    rows = [[c.strip() for c in line.strip().strip("|").split("|")] for line in lines if line.strip().startswith("|")]
    xs = [float(c) for c in rows[0][1:]]
    series = []
    for row in rows[2:]:
        cells = [re.match(r"[\d.]+", c) for c in row[1:]]
        series.append((row[0].replace("`", ""), [(x, float(c.group())) for x, c in zip(xs, cells) if c]))
    return xs, series


def draw(xs, series, x_label, y_label):
    low = math.floor(min(y for _, s in series for _, y in s) * 10) / 10
    high = math.ceil(max(y for _, s in series for _, y in s) * 10) / 10
    span = math.log(max(xs) / min(xs)) or 1

    def at(x, y):
        return (LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / min(xs)) / span, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low))

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#8a8f98">']
    step = 0.5 if high - low > 1 else 0.1 if high - low > 0.3 else 0.05
    y = math.ceil(low / step) * step
    while y <= high + 1e-9:
        py = at(min(xs), y)[1]
        out.append(f'<path d="M{LEFT} {py:.1f}H{WIDTH - RIGHT}" stroke="#8a8f98" stroke-opacity="0.25"/><text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:.2f}</text>')
        y += step
    for x in xs:
        out.append(f'<text x="{at(x, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>')
    out.append(f'<text transform="translate(13 {(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text>')
    ends, labels = [], sorted(range(len(series)), key=lambda k: at(*series[k][1][-1])[1])
    for k in labels:  # labels from the top, at least a line apart
        ends.append(max(at(*series[k][1][-1])[1], ends[-1] + 15 if ends else 0))
    for k, label_y in zip(labels, ends):
        name, points = series[k]
        colour = COLOURS[k % len(COLOURS)]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in points))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in (at(*p) for p in points)]
        out.append(f'<text x="{WIDTH - RIGHT + 12}" y="{label_y + 4:.1f}" fill="{colour}">{html.escape(name)}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("-o", "--out", required=True)
    ap.add_argument("--x", default="")
    ap.add_argument("--y", default="")
    args = ap.parse_args()
    xs, series = read(sys.stdin)
    with open(args.out, "w", encoding="utf-8") as f:
        f.write(draw(xs, series, args.x, args.y))
    return 0


if __name__ == "__main__":
    sys.exit(main())
