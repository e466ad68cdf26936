#!/usr/bin/env python3
"""Runs a server whose drafts come from a draft worker, for minutes, while clients stream, cancel and read slowly and the worker is killed,
restarted, stopped, delayed and cut off.

    tests/live/soak_worker.py --minutes 10 [--laps 10] [-m TARGET -md DRAFT] [--connections 8] [--seed 1]

The time is divided into laps. After each one the clients pause, the worker is put in order and the server becomes idle; then its memory and
its open files are counted. Passes if

  - every answer, greedy or with `match`, is that of plain decoding; with `reject`, whose text no seed repeats, it has its length;
  - in every lap, drafts of the worker are found again;
  - memory and open files are no more after the last lap than after the second one;
  - no client hangs, and all cache pages are free at the end.

Else exits with 1. The default models are the story pair, which comes with sooth; the server, the worker and a local draft have a thread
each. SOOTH_BIN: the program, for example a thread-sanitizer build.
"""
import argparse
import collections
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import soak  # noqa: E402  (it finds rig)
from soak import rig  # noqa: E402

sys.path.insert(0, os.path.join(rig.ROOT, "bench"))
from worker import Proxy  # noqa: E402

STORY = os.path.join(rig.ROOT, "models", "story")
DRAFTERS = [None] * 5 + ["async(model)", "model", "lookup,async(model,fallback=none)"]  # None: the server's, with the worker
CONTEXT = 256  # small: a cache grows until each of its pages was used once
PROMPTS = ["Once upon a time there was a little boat", "The dog saw a red ball and", "Tom and Lily went to the park.",
           "One day, a bird", "The sun was hot and"]


class GarblingProxy(Proxy):
    """With `garble` a byte of some messages is changed."""

    def __init__(self, port, rng):
        self.rng, self.garble = rng, False
        super().__init__(port)

    def alter(self, data):
        if not self.garble or self.rng.random() >= 0.02:
            return data
        at = self.rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1:]


class Worker:
    """A draft worker that is started again at the same port."""

    def __init__(self, draft, options, log):
        self.draft, self.options, self.log, self.port, self.starts = draft, options, log, rig.free_port(), 0
        self.start()

    def start(self):
        with open(self.log, "a") as err:
            self.process = subprocess.Popen([*rig.RUNNER, rig.SOOTH, "draft-worker", "-m", self.draft, "--listen",
                                             f"tcp://127.0.0.1:{self.port}", *self.options], stderr=err)
        self.starts += 1

    def stop(self, sig):
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(sig)
        return self.process.wait(60)


class Chaos:
    """What happens to the worker and to the way to it."""

    def __init__(self, worker, proxy, rng, counts):
        self.w, self.proxy, self.rng, self.counts = worker, proxy, rng, counts

    def killed(self):
        self.w.stop(signal.SIGKILL)
        self.pause(1.0)
        self.w.start()

    def restarted(self):
        status = self.w.stop(signal.SIGTERM)
        if status != 0:
            raise AssertionError(f"the worker ended with {status}")
        self.w.start()

    def stopped(self):
        self.w.process.send_signal(signal.SIGSTOP)
        self.pause(self.rng.choice([0.01, 0.3, 2.5]))
        self.w.process.send_signal(signal.SIGCONT)

    def delayed(self):
        self.proxy.delay = self.rng.choice([0.0002, 0.002, 0.02, 0.2])
        self.pause(1.0)
        self.proxy.delay = 0.0

    def cut(self):
        self.proxy.cut()

    def garbled(self):
        self.proxy.garble = True
        self.pause(0.5)
        self.proxy.garble = False

    def pause(self, seconds):
        time.sleep(self.rng.random() * seconds)

    def run(self, stop):
        kinds = [self.killed, self.restarted, self.stopped, self.stopped, self.delayed, self.cut, self.garbled]
        while not stop.is_set():
            kind = self.rng.choice(kinds)
            kind()
            self.counts[kind.__name__] += 1
            self.pause(self.rng.choice([0.1, 1.5]))


def make_cases(rng, n):
    for i in range(n):
        body = {"prompt": rng.choice(PROMPTS) + f" {i}", "seed": i, "max_tokens": rng.randrange(1, 160), "ignore_eos": True,
                "temperature": rng.choice([0, 0, 0.7, 1.2])}
        yield body, rng.choice(DRAFTERS), rng.choice([0, 0, 3])


def spec_of(drafter, length):
    spec = {"length": length} if length else {}
    return {**({"drafter": drafter} if drafter else {}), **spec}


def mapped_mb(pid):
    """Writable memory of its own, used or not: of large arrays, pages are used for the first time during many laps."""
    return int(re.search(r"VmData:\s+(\d+)", open(f"/proc/{pid}/status").read()).group(1)) / 1e3


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Clients(soak.Soak):
    """The clients of soak.py, without those that send garbage; and some whose text is drawn with `reject`."""

    def rejected(self, rng):
        _, body = rng.choice(self.cases)
        o = self.s.ok(soak.TEXT, {**body, "temperature": 1, "speculative": {**body["speculative"], "verify": "reject"}})
        if o["usage"]["completion_tokens"] != body["max_tokens"]:
            self.fail(f"reject: {o['usage']} instead of {body['max_tokens']} tokens")

    def client(self, index):
        rng = random.Random(self.seed * 1000 + index)
        kinds = [self.good] * 4 + [self.streamed] * 6 + [self.rejected] * 2 + [self.leaver] * 3 + [self.slow_reader, self.metrics]
        while not self.stop.is_set():
            kind = rng.choice(kinds)
            try:
                other = kind(rng)
                with self.lock:
                    self.counts[other or kind.__name__] += 1
            except Exception as e:  # noqa: counted; the other clients continue
                self.fail(f"{kind.__name__}: {type(e).__name__} {str(e)[:300]}")
                if self.s.process.poll() is not None:
                    return


def idle(s):
    m = s.metrics()
    return m["sooth_requests_running"] == 0 and m["sooth_requests_waiting"] == 0 and m["sooth_kv_pages_used"] == 0


def hits_of(s):
    return s.metrics()["sooth_async_hits_total"]


def find_drafts_again(s, body):
    """Requests until the worker's drafts are hit: it may have to be greeted first, at intervals of up to 5 s."""
    before = hits_of(s)
    for _ in range(400):
        s.ok(soak.TEXT, {**body, "speculative": {"length": 3}, "max_tokens": 60})
        if hits_of(s) > before:
            return True
        time.sleep(0.05)
    return False


def run_lap(s, a, lap, cases, want, chaos, total):
    clients = Clients(s, cases, want, a.seed + lap)
    threads = [threading.Thread(target=clients.client, args=(i,), daemon=True) for i in range(a.connections)]
    failures = clients.failures

    def trouble():
        try:
            chaos.run(clients.stop)
        except Exception as e:  # noqa: reported below
            clients.fail(f"worker: {type(e).__name__} {e}")
    threads.append(threading.Thread(target=trouble, daemon=True))
    for t in threads:
        t.start()
    end = time.monotonic() + a.minutes * 60 / a.laps
    while time.monotonic() < end and s.process.poll() is None:
        time.sleep(0.2)
    clients.stop.set()
    for t in threads:
        t.join(300)
    total.update(clients.counts)
    if any(t.is_alive() for t in threads):
        failures.append("a client still waits for its answer")
    return failures


def run(s, a, worker, proxy):
    rng = random.Random(a.seed)
    plain = list(make_cases(rng, a.cases))
    off = {"speculative": {"enabled": False}}
    want = [soak.texts(s.ok(soak.TEXT, {**body, **off})) for body, _, _ in plain]
    cases = [(soak.TEXT, {**body, "speculative": spec_of(drafter, length)}) for body, drafter, length in plain]
    total, faults, rows, problems = collections.Counter(), collections.Counter(), [], []
    chaos = Chaos(worker, proxy, random.Random(a.seed + 1), faults)
    for lap in range(a.laps):
        problems += run_lap(s, a, lap, cases, want, chaos, total)
        if s.process.poll() is not None:
            return problems + [f"the server ended with {s.process.returncode}: {s.errors()[-2000:]}"]
        if not find_drafts_again(s, plain[0][0]):
            problems.append(f"lap {lap + 1}: the worker's drafts are not found again")
        rig.eventually(lambda: idle(s), 30, "nothing runs, all pages are free")
        time.sleep(6)  # the server's idle connections end, and so do those that were cut
        rows.append((mapped_mb(s.process.pid), open_files(s.process.pid)))
        print(f"lap {lap + 1}: {rows[-1][0]:.1f} MB mapped, {soak.resident_mb(s.process.pid):.1f} used, {rows[-1][1]} open files; worker {soak.resident_mb(worker.process.pid):.1f} MB, "
              f"{open_files(worker.process.pid)}; {dict(total)}; {dict(faults)}; hits {hits_of(s):.0f}", flush=True)
    first, last = rows[min(1, len(rows) - 1)], rows[-1]
    if last[0] > first[0] + 4:
        problems.append(f"memory grows: {first[0]:.1f} MB, then {last[0]:.1f} MB")
    if last[1] > first[1]:
        problems.append(f"open files: {first[1]}, then {last[1]}")
    lines = [line for line in s.errors().splitlines() if line]
    print(f"{len(lines)} lines in the server's log; the last ones:", *lines[-6:], sep="\n  ")
    return problems


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=10)
    p.add_argument("--laps", type=int, default=10)
    p.add_argument("-m", "--model", default=os.path.join(STORY, "story-q8_0.gguf"))
    p.add_argument("-md", "--draft", default=os.path.join(STORY, "story-draft-q4_0.gguf"))
    p.add_argument("--connections", type=int, default=8)
    p.add_argument("--cases", type=int, default=60)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    log = f"/tmp/sooth-soak-worker-{os.getpid()}.log"
    worker = Worker(a.draft, ["-t", "1"], log)
    try:
        proxy = GarblingProxy(worker.port, random.Random(a.seed + 2))
        spec = f"async(model,worker=tcp://127.0.0.1:{proxy.port}),model"
        with rig.Server("-t", "1", "--draft-cores", "1", "-md", a.draft, "--parallel", "4", "--ctx-size", str(CONTEXT), "--timeout", "60",
                        "--spec", spec, model=a.model) as s:
            problems = run(s, a, worker, proxy)
    finally:
        worker.stop(signal.SIGKILL)
    print("worker log:", open(log).read()[-1500:]) if problems else None
    if "Sanitizer" in open(log).read():
        problems.append("a sanitizer's report in " + log)
    else:
        os.remove(log)
    for problem in problems[:20]:
        print("problem:", problem)
    print("soak: failed" if problems else "soak: passed")
    raise SystemExit(1 if problems else 0)


main()
