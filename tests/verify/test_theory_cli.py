#!/usr/bin/env python3
"""`sooth theory` from outside: the keys and values of --json, the printed tables, the SVG, bad usage."""
import json
import os
import shutil
import subprocess
import tempfile
import xml.dom.minidom

SOOTH = os.environ.get("SOOTH_BIN", "build/sooth")
results = []


def sooth(*args, env=None):
    return subprocess.run([os.path.abspath(SOOTH), "theory", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=env, timeout=60)


def point():
    p = sooth("--alpha", "0.8", "--gamma", "5", "--c", "0.05", "--json")
    assert p.returncode == 0 and p.stderr == "", p.stderr
    o = json.loads(p.stdout)
    tokens = (1 - 0.8 ** 6) / (1 - 0.8)
    want = {"expected_tokens": tokens, "speedup": tokens / 1.25, "operations": (5 * 0.05 + 6) / tokens,
            "memory_accesses": 1 / tokens, "match_acceptance_bound": 0.8 / 1.2, "oracle_tokens": 5,
            "oracle_speedup": 1 / (0.2 + 0.8 * 0.05)}
    for key, value in want.items():
        assert abs(o[key] - value) < 1e-9, (key, o[key], value)
    best = max(range(256), key=lambda g: (1 - 0.8 ** (g + 1)) / (g * 0.05 + 1))
    assert o["best_gamma"] == best and isinstance(o["best_gamma"], int)
    assert "expected" not in p.stderr and p.stdout.count("\n") == 1
    assert "3.689" in sooth("--alpha", "0.8").stdout


def limits():
    o = json.loads(sooth("--alpha", "1", "--gamma", "7", "--json").stdout)
    assert o["expected_tokens"] == 8 and o["oracle_tokens"] is None
    o = json.loads(sooth("--alpha", "0", "--c", "0.1", "--json").stdout)
    assert o["expected_tokens"] == 1 and o["best_gamma"] == 0 and o["best_speedup"] == 1


def ahead():
    inputs = ["--ssd", "--alpha", "0.8", "--c", "0.3", "--hit-rate", "0.75", "--row-cost", "0.05", "--fan-cost", "1.3"]
    o = json.loads(sooth(*inputs, "--json").stdout)

    def tokens(g):
        return (1 - 0.8 ** (g + 1)) / 0.2
    for r in o["rows"]:
        g, t = r["gamma"], 1 + 0.05 * r["gamma"]
        sync = tokens(g) / (t + 0.3 * g)
        hit = max(t, 0.3 * 1.3 * g)
        assert abs(r["synchronous"] - sync) < 1e-9
        assert abs(r["ahead"] - tokens(g) / (0.75 * hit + 0.25 * (t + 0.3 * g))) < 1e-9
        assert abs(r["ahead_plain_misses"] - (0.75 * tokens(g) + 0.25) / (0.75 * hit + 0.25)) < 1e-9
        assert r["ahead"] <= 2 * r["synchronous"]
    o = json.loads(sooth(*inputs, "--contention", "1.5", "--draft-contention", "1.2", "--scaling", "1.6", "--json").stdout)
    for r in o["rows"]:
        g, t, d = r["gamma"], 1 + 0.05 * r["gamma"], 0.3 * 1.3 * r["gamma"]
        beside = min(t * 1.5, t + d * 1.2 * (1 - 1 / 1.5))
        hit = beside if d * 1.2 <= t * 1.5 else d + t * 1.5 * (1 - 1 / 1.2)
        assert abs(r["synchronous"] - 1.6 * tokens(g) / (t + 0.3 * g)) < 1e-9
        assert abs(r["ahead"] - tokens(g) / (0.75 * hit + 0.25 * (beside + 0.3 * g))) < 1e-9
    for key in ("synchronous", "ahead", "ahead_plain_misses"):
        best = max(o["rows"], key=lambda r: r[key])
        assert o[key]["best_gamma"] == best["gamma"] and abs(o[key]["speedup"] - best[key]) < 1e-9
    assert "times as fast" in sooth(*inputs).stdout
    for args, word in ((["--ssd"], "--alpha"), (["--alpha", "0.5", "--hit-rate", "0.5"], "--ssd"),
                       (["--ssd", "--alpha", "0.5", "--hit-rate", "2"], "hit-rate"),
                       (["--ssd", "--alpha", "0.5", "--fan-cost", "0.5"], "fan-cost"),
                       (["--ssd", "--alpha", "0.5", "--contention", "0.5"], "contention"),
                       (["--alpha", "0.5", "--scaling", "2"], "--ssd")):
        p = sooth(*args)
        assert p.returncode == 2 and word in p.stderr and p.stdout == "", (args, p.returncode, p.stderr)


def paper():
    o = json.loads(sooth("--json").stdout)
    assert len(o["table1"]) == 6 and len(o["table4"]) == 12 and len(o["lenience"]) == 8
    for r in o["table1"]:
        assert f"{r['operations']:.2f}" == f"{r['paper_operations']:.2f}"
        assert f"{r['speedup']:.2f}" == f"{r['paper_speedup']:.2f}"
    off = [i for i, r in enumerate(o["table4"]) if f"{r['expected']:.1f}" != f"{r['paper_expected']:.1f}"]
    assert off == [4, 5, 11], off
    assert f"{o['bigram_speedup']:.2f}" == "1.25"
    for r in o["lenience"]:
        assert r["temp"] == 1 or f"{r['speedup']:.1f}" == f"{r['paper_speedup']:.1f}"
    f = o["figure2"]
    assert f["gamma"]["5"][80] == json.loads(sooth("--alpha", "0.8", "--json").stdout)["expected_tokens"]
    assert o["figure3"]["c"]["0.05"][80] == 8
    text = sooth().stdout
    for word in ("Table 1", "Table 4", "Lenience", "Figure 2", "Figure 3", "Figure 4"):
        assert word in text, word


def svg():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "it's a plot.svg")
        if not shutil.which("gnuplot"):
            return "gnuplot is not installed"
        p = sooth("--svg", path)
        assert p.returncode == 0, p.stderr
        text = xml.dom.minidom.parse(path).toxml()
        for word in ("Figure 2", "Figure 3", "Figure 4", "gamma = 10", "c = 0.05"):
            assert word in text, word
        assert os.listdir(d) == [os.path.basename(path)]
        p = sooth("--svg", os.path.join(d, "no", "folder.svg"))
        assert p.returncode == 1 and "folder.svg" in p.stderr and p.stdout == ""


def no_gnuplot():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "x.svg")
        p = sooth("--svg", path, env=dict(os.environ, PATH=d))
        assert p.returncode == 1 and "gnuplot-nox" in p.stderr, p.stderr
        assert os.listdir(d) == []


def bad_usage():
    for args, word in ((["--alpha", "1.5"], "alpha"), (["--alpha", "nan"], "alpha"), (["--gamma", "3"], "alpha"),
                       (["--alpha", "0.5", "--gamma", "-1"], "gamma"), (["--alpha", "0.5", "--gamma", "256"], "gamma"),
                       (["--alpha", "0.5", "--c", "-0.1"], "--c"), (["extra"], "extra")):
        p = sooth(*args)
        assert p.returncode == 2 and word in p.stderr and p.stdout == "", (args, p.returncode, p.stderr)


tests = [point, limits, ahead, paper, svg, no_gnuplot, bad_usage]
print(f"1..{len(tests)}")
failed = 0
for i, t in enumerate(tests, 1):
    try:
        skip = t()
        if skip:
            print(f"skip: {t.__name__}: {skip}")
        print(f"ok {i} - {t.__name__}{' # SKIP' if skip else ''}")
    except AssertionError as e:
        failed += 1
        print(f"not ok {i} - {t.__name__}\n# {e!r}")
raise SystemExit(failed > 0)
