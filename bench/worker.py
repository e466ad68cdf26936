#!/usr/bin/env python3
"""Drafting ahead by a draft worker, with a delay on the way, against synchronous drafting and plain decoding: tokens per second.

  bench/worker.py [--model smollm2] [--draft models/smollm2/draft-q4_0.gguf] [--prompts FILE.jsonl] [--delays 0,0.2,5] [-n 64] [--repeats 3]
                  [--warm-up 1]

Engine and worker are processes of this host; the worker has the last core (--draft-cores 1 on both sides), the target the others.
`sync` drafts with the same model on the same last core while the target waits; `plain` does not draft. Between engine and worker is a proxy
that delays every byte by so many milliseconds in each direction; delay 0 is without the proxy. The proxy needs a little processor time
itself. Rounds alternate; medians, with the smallest and the largest. Texts must be those of plain decoding.
"""
import argparse
import collections
import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOOTH = os.environ.get("SOOTH_BIN", os.path.join(ROOT, "build", "sooth"))
PROMPTS = ["Why is the sea blue?", "Write a short story about a boat.", "How do I boil an egg?", "Explain what a prime number is.",
           "Name three cities in Italy and what they are known for.", "Write a Python function that reverses a string."]


class Proxy:
    """Forwards connections to a port, each byte `delay` seconds later; cut() ends all connections. A subclass may change the bytes."""

    def __init__(self, port, delay=0.0):
        self.target, self.delay = port, delay
        self.pairs, self.lock = set(), threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def alter(self, data):
        return data

    def accept(self):
        while True:
            a, _ = self.listener.accept()
            try:
                b = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # nobody listens any more
                a.close()
                continue
            for s in (a, b):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.pairs.add((a, b))
            threading.Thread(target=self.forward, args=(a, b), daemon=True).start()

    def forward(self, a, b):
        queue, other = collections.deque(), {a: b, b: a}  # (due, from, bytes)
        try:
            while True:
                wait = max(queue[0][0] - time.monotonic(), 0) if queue else None
                for s in select.select([a, b], [], [], wait)[0]:
                    data = s.recv(1 << 16)
                    if not data:
                        return
                    queue.append((time.monotonic() + self.delay, s, self.alter(data)))
                while queue and queue[0][0] <= time.monotonic():
                    _, s, data = queue.popleft()
                    other[s].sendall(data)
        except OSError:
            pass
        finally:
            with self.lock:
                self.pairs.discard((a, b))
            a.close(), b.close()

    def cut(self):
        with self.lock:
            for pair in self.pairs:
                for s in pair:
                    s.shutdown(socket.SHUT_RDWR) if s.fileno() >= 0 else None


def start_worker(draft, log):
    p = subprocess.Popen([SOOTH, "draft-worker", "-m", draft, "--draft-cores", "1", "--listen", "tcp://127.0.0.1:*"], stderr=open(log, "w"))
    for _ in range(3000):
        found = re.search(r"ready at tcp://127.0.0.1:(\d+)", open(log).read())
        if found:
            return p, int(found.group(1))
        time.sleep(0.01)
    sys.exit(open(log).read())


def run(a, spec, prompts):
    cmd = [SOOTH, "run", "-m", a.model, "--draft-cores", "1", "--prompts", prompts, "-n", str(a.n), "--temp", "0", "--json", "--spec", spec]
    cmd += [] if spec == "none" else ["-md", a.draft]
    done = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    ahead = [r["spec"].get("async") or {} for r in answers]
    return {"rate": sum(r["timings"]["predicted_n"] for r in answers) / sum(r["timings"]["predicted_ms"] for r in answers) * 1000,
            "tokens": [r["tokens"] for r in answers],
            "per_pass": sum(r["timings"]["predicted_n"] for r in answers) / sum(r["spec"]["rounds"] for r in answers),
            "hits": sum(x.get("hits", 0) for x in ahead), "rounds": sum(x.get("rounds", 0) + x.get("skipped", 0) for x in ahead)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="smollm2")
    p.add_argument("--draft", default=os.path.join(ROOT, "models/smollm2/draft-q4_0.gguf"))
    p.add_argument("--prompts")
    p.add_argument("--delays", default="0,0.2,5")
    p.add_argument("-n", type=int, default=64)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--warm-up", type=int, default=1, help="rounds before them that are not counted: the planner compares methods there")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        prompts = a.prompts or os.path.join(tmp, "prompts.jsonl")
        if not a.prompts:
            open(prompts, "w").writelines(json.dumps({"prompt": t}) + "\n" for t in PROMPTS)
        worker, port = start_worker(a.draft, os.path.join(tmp, "log"))
        specs = {"plain": "none", "sync": "model", "async, here": "async(model)"}
        for d in a.delays.split(","):
            at = port if float(d) == 0 else Proxy(port, float(d) / 1000).port
            specs[f"worker, {d} ms"] = f"async(model,worker=tcp://127.0.0.1:{at}),model"
        rows = {name: [] for name in specs}
        try:
            for i in range(a.repeats + a.warm_up):
                for name, spec in specs.items():
                    r = run(a, spec, prompts)
                    if i >= a.warm_up:
                        rows[name].append(r)
        finally:
            worker.terminate()
    want = rows["plain"][0]["tokens"]
    sync = statistics.median(r["rate"] for r in rows["sync"])
    print(f"{'':16} tokens/s (smallest, largest)   of sync  tokens/pass  hit rate  text")
    for name, runs in rows.items():
        rates = [r["rate"] for r in runs]
        hits, rounds = sum(r["hits"] for r in runs), sum(r["rounds"] for r in runs)
        print(f"{name:16} {statistics.median(rates):7.1f} ({min(rates):.1f}, {max(rates):.1f})      {statistics.median(rates) / sync:9.3f}"
              f"  {statistics.median(r['per_pass'] for r in runs):9.2f}  {f'{hits / rounds:8.2f}' if rounds else '       -'}"
              f"  {'same' if all(r['tokens'] == want for r in runs) else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
