#!/usr/bin/env python3
"""Load test of a server: N streams at once, each asking for 64 tokens. Reports tokens per second and time to first token.

    bench/serve_load.py -m FILE.gguf                     our server, plain and speculative
    bench/serve_load.py -m FILE.gguf --peer PYTHON       also `PYTHON -m llama_cpp.server`, alternating
    bench/serve_load.py -m FILE.gguf --whole             also answers that are sent whole
    bench/serve_load.py -m FILE.gguf --sooth A --sooth B two builds, alternating
    bench/serve_load.py --url http://127.0.0.1:8080      a server that is already running

Every stream has its own prompt (chat, temperature 0). Tokens are counted by the server's usage field, times are measured
by this client. The servers alternate round by round, so that a slow minute affects all of them; results are medians over
rounds. Servers that are not being measured are stopped (SIGSTOP), so that an idle one costs nothing.

Plain and speculative requests go to the same server process: on our machines two processes of one program differ by up to
5 %, depending on their memory placement. "speculative / plain" is the median of the ratios within each round.
"""
import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse

TOPICS = ["the sea", "a small town in winter", "how bread is baked", "a train to the mountains", "the moon", "an old clock",
          "growing tomatoes", "a lost letter", "learning to swim", "the first snow", "a market by the river", "bees",
          "a violin maker", "the wind", "building a boat", "a quiet library"]


def prompt(i, number):
    return f"Write a short text about {TOPICS[i % len(TOPICS)]}. It is number {number * 100 + i}."


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, name, command=None, url=None):
        self.name = name
        self.process = None
        self.asked = 0  # rounds so far; each uses new prompts, because old ones are in the prefix cache
        if command:
            port = free_port()
            self.url = urllib.parse.urlparse(f"http://127.0.0.1:{port}")
            self.log = open(f"/tmp/serve_load.{os.getpid()}.{port}", "wb+")
            os.unlink(self.log.name)
            self.process = subprocess.Popen([a.replace("{port}", str(port)) for a in command], stdout=self.log,
                                            stderr=self.log)
        else:
            self.url = urllib.parse.urlparse(url)
        self.wait()

    def wait(self):
        for _ in range(1200):
            if self.process and self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"{self.name} ended unexpectedly: {self.log.read()[-1500:].decode('utf-8', 'replace')}")
            try:
                c = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=60)
                c.request("POST", "/v1/chat/completions", json.dumps({
                    "model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
                    {"Content-Type": "application/json"})
                if c.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit(f"{self.name} does not answer after 1200 attempts")

    def pause(self, on):
        if self.process:
            self.process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def stop(self):
        if self.process:
            self.pause(False)
            self.process.terminate()
            self.process.wait()


class Target:
    """A server with one kind of request (plain or speculative)."""

    def __init__(self, server, kind="", body=None):
        self.server, self.url = server, server.url
        self.name = f"{server.name} {kind}".strip()
        self.kind, self.body, self.whole = kind, body or {}, False


def one_stream(target, text, n_tokens, out):
    """Appends (seconds to the first text or to the whole answer, tokens) to out."""
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": n_tokens, "temperature": 0,
            **({} if target.whole else {"stream": True, "stream_options": {"include_usage": True}}), **target.body}
    start = time.monotonic()
    c = http.client.HTTPConnection(target.url.hostname, target.url.port, timeout=600)
    c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    if r.status != 200:
        raise RuntimeError(f"{target.name}: {r.status} {r.read()[:300]}")
    if target.whole:
        o = json.loads(r.read())
        out.append((time.monotonic() - start, o["usage"]["completion_tokens"]))
        c.close()
        return
    first, lines = None, []
    for line in r:  # parsed after the answer: the client shares the machine with the server
        if first is None and b'"content"' in line and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            first = time.monotonic() - start
        lines.append(line)
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    usage = [o["usage"]["completion_tokens"] for o in events if o.get("usage")]
    tokens = usage[-1] if usage else sum(bool(c["delta"].get("content")) for o in events for c in o["choices"])
    c.close()
    if first is None:
        raise RuntimeError(f"{target.name}: the answer has no text")
    out.append((first, tokens))


def one_round(target, n_streams, n_tokens):
    server, results, threads = target.server, [], []
    server.asked += 1
    server.pause(False)
    start = time.monotonic()
    for i in range(n_streams):
        threads.append(threading.Thread(target=one_stream, args=(target, prompt(i, server.asked), n_tokens, results)))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seconds = time.monotonic() - start
    server.pause(True)
    if len(results) != n_streams:
        sys.exit(f"{target.name}: {n_streams - len(results)} of {n_streams} streams failed")
    return sum(n for _, n in results) / seconds, [t for t, _ in results]


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def measure(targets, modes, streams, n_tokens, rounds):
    """{(server, mode, streams): (rates, seconds to the first token, or to the end of a whole answer)}"""
    got = {(t.name, m, n): ([], []) for t in targets for m in modes for n in streams}
    for t in targets:
        one_round(t, 2, 16)  # warm-up
    for r in range(rounds):
        for m, n in ((m, n) for n in streams for m in modes):
            for t in targets if r % 2 == 0 else reversed(targets):
                t.whole = m == "whole"
                rate, times = one_round(t, n, n_tokens)
                got[t.name, m, n][0].append(rate)
                got[t.name, m, n][1].extend(times)
    return got


def start(a, streams, servers):
    """Starts the servers and returns the targets. Started servers are appended to `servers` even if a later one fails."""
    targets = []
    if a.url:
        servers.append(Server("url", url=a.url))
        return [Target(servers[0])]
    for build in a.sooth or ["build/sooth"]:
        ours = [build, "serve", "-m", a.model or "", "-t", str(a.threads), "--port", "{port}", "--parallel", str(max(streams))]
        if a.draft:
            ours += ["-md", a.draft]
        servers.append(Server(build if a.sooth and len(a.sooth) > 1 else "sooth", ours))
        servers[-1].pause(True)
        for kind in a.only or ["plain", "speculative"]:
            targets.append(Target(servers[-1], kind, {"speculative": {"enabled": False}} if kind == "plain" else {}))
    if a.peer:
        servers.append(Server("llama_cpp.server", [
            a.peer, "-m", "llama_cpp.server", "--model", a.model, "--port", "{port}", "--n_threads", str(a.threads),
            "--n_threads_batch", str(a.threads), "--n_ctx", "4096", "--interrupt_requests", "false", "--verbose", "false"]))
        servers[-1].pause(True)
        targets.append(Target(servers[-1]))
    return targets


def report(key, rates, times, a):
    name, mode, n = key
    row = {"server": name, "mode": mode, "streams": n, "tokens": a.tokens, "rates": [round(r, 1) for r in rates],
           "tokens_per_second": round(statistics.median(rates), 1), "spread": [round(min(rates), 1), round(max(rates), 1)],
           f"{'answer' if mode == 'whole' else 'first'}_ms_median": round(1000 * statistics.median(times)),
           f"{'answer' if mode == 'whole' else 'first'}_ms_p95": round(1000 * quantile(times, 0.95))}
    if a.json:
        print(json.dumps(row))
        return
    what = "whole answer" if mode == "whole" else "first token"
    print(f"{name:18} {n:3} {mode:8}: {row['tokens_per_second']:7.1f} tok/s ({row['spread'][0]}–{row['spread'][1]}), "
          f"{what} {1000 * statistics.median(times):.0f} ms, p95 {1000 * quantile(times, 0.95):.0f} ms")


def compare(targets, got):
    """Prints the speed ratio of speculative and plain requests of the same server, by round."""
    for plain in (t for t in targets if t.kind == "plain"):
        for t in (t for t in targets if t.server is plain.server and t.kind == "speculative"):
            for (name, mode, n), (rates, _) in got.items():
                if name == t.name:
                    ratios = sorted(x / y for x, y in zip(rates, got[plain.name, mode, n][0]))
                    print(f"{t.server.name:18} {n:3} {mode:8}: speculative / plain {statistics.median(ratios):.2f} "
                          f"({ratios[0]:.2f}–{ratios[-1]:.2f})")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model")
    p.add_argument("-md", "--draft")
    p.add_argument("--url", help="measure this server instead")
    p.add_argument("--sooth", action="append", help="the program (build/sooth); repeat to compare builds")
    p.add_argument("--only", action="append", choices=["plain", "speculative"], help="only plain or only speculative requests")
    p.add_argument("--whole", action="store_true", help="also measure answers that are sent whole")
    p.add_argument("--peer", help="a Python with llama-cpp-python[server]")
    p.add_argument("--streams", default="1,4,8,16")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    streams = [int(n) for n in a.streams.split(",")]
    servers = []
    try:
        targets = start(a, streams, servers)
        got = measure(targets, ["streamed", "whole"] if a.whole else ["streamed"], streams, a.tokens, a.rounds)
    finally:
        for s in servers:
            s.stop()
    for key, (rates, times) in got.items():
        report(key, rates, times, a)
    if not a.json:
        compare(targets, got)


main()
