#!/usr/bin/env python3
"""Every command in README's shell blocks works, and every file it links to exists. Speaks TAP.

./test.sh is what runs this test, so it is not run again. Commands that need a model which has not been fetched are skipped.
`sooth serve` is started on a free port and asked for its health; `sooth chat` reads one line."""
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", os.path.join(ROOT, "build", "sooth")))
TIMEOUT_S = 600


class Skip(Exception):
    pass


def commands():
    text = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
        for line in block.splitlines():
            line = re.sub(r"\s+#.*", "", line).strip()
            if line and not line.startswith("export "):
                yield line


def have_model(name):
    return name == "story" or subprocess.run([SOOTH, "inspect", name], capture_output=True).returncode == 0


def run(argv, stdin=""):
    r = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert r.returncode == 0, f"exit {r.returncode}: {r.stderr.strip()[-500:]}"
    return r.stdout


def serve(argv):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    p = subprocess.Popen(argv + ["--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        for _ in range(600):
            assert p.poll() is None, f"ended with {p.returncode}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as r:
                    assert r.status == 200
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("not ready after 60 s")
    finally:
        p.terminate()
        p.wait(30)


def check(line):
    argv = shlex.split(line)
    if argv[0] == "./test.sh":
        return
    if argv[0] == "./demo.sh":
        assert "identical: yes" in run([SOOTH, "demo"])
        assert os.access(os.path.join(ROOT, "demo.sh"), os.X_OK)
        return
    assert argv[0] == "sooth", f"unknown program {argv[0]}"
    argv[0] = SOOTH
    model = argv[argv.index("-m") + 1] if "-m" in argv else argv[-1]
    if not have_model(model):
        raise Skip(f"{model} is not pulled")
    if argv[1] == "serve":
        serve(argv)
    elif argv[1] == "chat":
        assert run(argv + ["-n", "8"], "Hello\n").strip()
    else:
        assert run(argv).strip() or argv[1] == "pull"


def links():
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md") + tuple(
            os.path.join("docs", f) for f in os.listdir(os.path.join(ROOT, "docs")) if f.endswith(".md")):
        path = os.path.join(ROOT, name)
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", open(path, encoding="utf-8").read()):
            if not target.startswith(("http:", "https:")):
                full = os.path.join(os.path.dirname(path), target)
                assert os.path.exists(full), f"{name} links to {target}, which does not exist"


def main():
    cases = [(line, lambda line=line: check(line)) for line in commands()] + [("links between documents", links)]
    failed = 0
    print(f"1..{len(cases)}")
    for i, (name, case) in enumerate(cases, 1):
        try:
            case()
            print(f"ok {i} - {name}", flush=True)
        except Skip as e:
            print(f"skip: {e}\nnot ok {i} # SKIP {name}", flush=True)
        except (AssertionError, subprocess.TimeoutExpired) as e:
            failed += 1
            print(f"not ok {i} - {name}\n# {e}", flush=True)
    sys.exit(1 if failed else 0)


main()
