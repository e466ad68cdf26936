#!/usr/bin/env python3
"""Runs a server for minutes under good requests, slow readers, resets, half-open sockets and garbage, all at once.

    tests/live/soak.py --minutes 10 [-m smollm2] [--connections 32] [-- further options of `sooth serve`]

Passes if every good request gets the answer that it gets alone, no request hangs, all cache pages are free at the end, and
memory does not grow after the warm-up; else exits with 1. SOOTH_BIN: the program, for example a thread-sanitizer build.
Without -m it serves the tiny model of the tests.
"""
import argparse
import collections
import http.client
import json
import os
import random
import socket
import struct
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
import rig  # noqa: E402

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "the sea world or in he sea the hello who where water light blue wind stone".split()


def make_requests(rng, n, size):
    """Requests of mixed lengths, temperatures and drafters; half of them share a prefix."""
    shared = " ".join(rng.choice(WORDS) for _ in range(size))
    for i in range(n):
        tail = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, size)))
        body = {"seed": i, "max_tokens": rng.randrange(1, 3 * size), "temperature": rng.choice([0, 0, 0.7, 1.2]),
                "ignore_eos": True}
        drafter = rng.choice([None, None, "none", "ngram", "lookup", "lookup,ngram", "random"])
        if drafter:
            body["speculative"] = {"drafter": drafter, "length": rng.choice([0, 2, 5])} if drafter != "none" else {"enabled": False}
        if rng.random() < 0.3:
            body["n"] = 2
        text = (shared + " " + tail) if rng.random() < 0.5 else tail
        if rng.random() < 0.5:
            yield CHAT, {**body, "messages": [{"role": "user", "content": text}]}
        else:
            scored = {"echo": True, "logprobs": 1} if rng.random() < 0.3 else {}
            yield TEXT, {**body, "prompt": text, **scored}


def scores(c):
    return c["logprobs"]["token_logprobs"] if c["logprobs"] else []


def texts(o):
    """What must be equal each time: the text of every choice, and its logprobs if requested."""
    return [[c["message"]["content"] if "message" in c else c["text"], scores(c)] for c in o["choices"]]


def texts_of_stream(data):
    parts = collections.defaultdict(lambda: ["", []])
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    for e in events[:-2]:
        for c in json.loads(e[6:])["choices"]:
            parts[c["index"]][0] += (c["delta"].get("content") or "") if "delta" in c else c["text"]
            parts[c["index"]][1] += scores(c)
    return [parts[i] for i in sorted(parts)]


class Soak:
    def __init__(self, server, cases, want, seed):
        self.s, self.cases, self.want = server, cases, want
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.failures = []
        self.seed = seed

    def fail(self, what):
        with self.lock:
            self.failures.append(what)

    def check(self, i, got):
        if got == self.want[i]:
            with self.lock:
                self.counts["good"] += 1
        else:
            self.fail(f"request {i}: {got!r} instead of {self.want[i]!r}")

    # --- kinds of clients ---

    def good(self, rng):
        i = rng.randrange(len(self.cases))
        path, body = self.cases[i]
        status, _, o = self.s.post(path, body)
        if status == 429:
            return "refused"
        assert status == 200, (status, o)
        self.check(i, texts(o))
        return None

    def streamed(self, rng):
        i = rng.randrange(len(self.cases))
        path, body = self.cases[i]
        status, _, data = self.s.post(path, {**body, "stream": True})
        if status == 429:
            return "refused"
        assert status == 200, (status, data)
        self.check(i, texts_of_stream(data))
        return None

    def keep_alive(self, rng):
        c = http.client.HTTPConnection("127.0.0.1", self.s.port, timeout=3600)
        for _ in range(3):
            i = rng.randrange(len(self.cases))
            path, body = self.cases[i]
            c.request("POST", path, json.dumps(body))
            r = c.getresponse()
            data = r.read()
            if r.status == 200:
                self.check(i, texts(json.loads(data)))
            elif r.status != 429:
                raise AssertionError(data)
        c.close()
        return None

    def slow_reader(self, rng):
        """Reads a little at a time; the answer must be complete and correct."""
        i = rng.randrange(len(self.cases))
        path, body = self.cases[i]
        c = self.s.raw(receive=1024, timeout=3600)
        c.sendall(rig.http_bytes(path, {**body, "stream": True}, "Connection: close\r\n"))
        data = b""
        while part := c.recv(rng.randrange(1, 4000)):
            data += part
            time.sleep(rng.random() * 0.02)
        c.close()
        if b" 429 " in data[:20]:
            return "refused"
        head, _, rest = data.partition(b"\r\n\r\n")
        out = b""
        while rest:  # chunks
            size, _, rest = rest.partition(b"\r\n")
            out, rest = out + rest[:int(size, 16)], rest[int(size, 16) + 2:]
        self.check(i, texts_of_stream(out))
        return None

    def leaver(self, rng):
        path, body = rng.choice(self.cases)
        c = self.s.raw(rig.http_bytes(path, {**body, "stream": rng.random() < 0.5}))
        c.settimeout(rng.random() * 0.2 + 0.001)
        try:
            c.recv(rng.randrange(1, 500))
        except OSError:
            pass
        if rng.random() < 0.5:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        c.close()

    def half_open(self, rng):
        path, body = rng.choice(self.cases)
        data = rig.http_bytes(path, body)
        c = self.s.raw(data[:rng.randrange(len(data))])
        time.sleep(rng.random() * 2)
        c.close()

    def garbage(self, rng):
        kinds = (rng.randbytes(rng.randrange(1, 3000)), b"GET / HTTP/1.1\r\n" + rng.randbytes(200),
                 rig.http_bytes(TEXT, {"prompt": 5}), rig.http_bytes(TEXT, [1, 2, 3]),
                 rig.http_bytes(CHAT, {"messages": [{"role": "x"}]}),
                 b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\n" + rng.randbytes(30))
        c = self.s.raw(rng.choice(kinds))
        c.settimeout(0.5)
        try:
            c.recv(1000)
        except OSError:
            pass
        c.close()

    def metrics(self, rng):
        self.s.metrics()

    def client(self, index):
        rng = random.Random(self.seed * 1000 + index)
        kinds = [self.good] * 6 + [self.streamed] * 6 + [self.keep_alive, self.slow_reader, self.slow_reader, self.leaver,
                                                         self.leaver, self.half_open, self.garbage, self.metrics]
        while not self.stop.is_set():
            kind = rng.choice(kinds)
            try:
                other = kind(rng)
                with self.lock:
                    self.counts[other or kind.__name__] += 1
                if other:
                    time.sleep(0.05)
            except Exception as e:  # noqa: counted; the other clients continue
                self.fail(f"{kind.__name__}: {type(e).__name__} {str(e)[:300]}")
                if self.s.process.poll() is not None:
                    return


def resident_mb(pid):
    return int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def run(s, a):
    rng = random.Random(a.seed)
    cases = list(make_requests(rng, a.cases, a.size))
    want = [texts(s.ok(path, body)) for path, body in cases]
    print(f"{len(cases)} requests, each answered alone", flush=True)
    soak = Soak(s, cases, want, a.seed)
    threads = [threading.Thread(target=soak.client, args=(i,), daemon=True) for i in range(a.connections)]
    for t in threads:
        t.start()
    memory, seconds = [], a.minutes * 60
    start = time.monotonic()
    while time.monotonic() - start < seconds and s.process.poll() is None:
        time.sleep(min(5, seconds / 20))
        memory.append(resident_mb(s.process.pid))
        if len(memory) % 12 == 0:
            print(f"{time.monotonic() - start:5.0f} s: {memory[-1]:.1f} MB, {dict(soak.counts)}", flush=True)
    soak.stop.set()
    for t in threads:
        t.join(300)
    problems = list(soak.failures)
    if any(t.is_alive() for t in threads):
        problems.append("a client still waits for its answer")
    if s.process.poll() is not None:
        return problems + [f"the server ended with {s.process.returncode}: {s.errors()[-2000:]}"], soak, memory

    def idle():
        m = s.metrics()
        return m["sooth_requests_running"] == 0 and m["sooth_requests_waiting"] == 0 and m["sooth_kv_pages_used"] == 0
    try:
        rig.eventually(idle, 20, "nothing runs, all pages are free")
    except AssertionError as e:
        problems.append(str(e))
    settled = memory[len(memory) // 4:]
    half = len(settled) // 2
    first, last = max(settled[:half]), max(settled[half:])
    if last > first * 1.02 + 4:
        problems.append(f"memory grows: {first:.1f} MB, then {last:.1f} MB")
    return problems, soak, memory


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=10)
    p.add_argument("--connections", type=int, default=32)
    p.add_argument("-m", "--model")
    p.add_argument("--cases", type=int, default=40)
    p.add_argument("--size", type=int, default=12)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("options", nargs="*", help="of sooth serve, after --")
    a = p.parse_args()
    model = rig.real_model(a.model) if a.model and not os.path.exists(a.model) else a.model
    with rig.Server("--timeout", "20", *a.options, model=model) as s:
        problems, soak, memory = run(s, a)
        m = s.metrics() if s.process.poll() is None else {}
    print(f"{dict(soak.counts)}")
    print(f"memory: {memory[0]:.1f} MB at first, {max(memory[len(memory) // 4:len(memory) // 2 + 1]):.1f} MB settled, "
          f"{memory[-1]:.1f} MB at last")
    names = ("sooth_generation_tokens_total", "sooth_preemptions_total", "sooth_prefix_cache_hits_total", "sooth_kv_pages_used",
             'sooth_requests_finished_total{reason="cancelled"}', 'sooth_requests_finished_total{reason="error"}')
    print(", ".join(f"{n} {m.get(n, '?')}" for n in names))
    for problem in problems[:20]:
        print("problem:", problem)
    print("soak: failed" if problems else "soak: passed")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
