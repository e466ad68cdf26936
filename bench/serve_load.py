#!/usr/bin/env python3
"""Load of a server: N streams at once, each asking for 64 tokens; total tokens per second and the time to the first token.

    bench/serve_load.py -m FILE.gguf                     ours, plain and speculative
    bench/serve_load.py -m FILE.gguf --peer PYTHON       and `PYTHON -m llama_cpp.server`, by turns in the same minutes
    bench/serve_load.py --url http://127.0.0.1:8080      one that runs already

Every stream has a prompt of its own (chat, temperature 0); tokens are counted by the server's own usage, times by this
client. Rounds of all servers alternate, so that a slow minute hits each of them; the figures are medians over rounds.
Servers other than the one asked are stopped (SIGSTOP) meanwhile: an idle neighbour must not cost anything.
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


def prompt(i, round_):
    return f"Write a short text about {TOPICS[i % len(TOPICS)]}. It is number {round_ * 100 + i}."


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Target:
    def __init__(self, name, command=None, url=None, body=None, env=None):
        self.name, self.body = name, body or {}
        self.process = None
        if command:
            port = free_port()
            self.url = urllib.parse.urlparse(f"http://127.0.0.1:{port}")
            self.log = open(f"/tmp/serve_load.{os.getpid()}.{port}", "wb+")
            os.unlink(self.log.name)
            self.process = subprocess.Popen([a.replace("{port}", str(port)) for a in command], stdout=self.log,
                                            stderr=self.log, env=dict(os.environ, **(env or {})))
        else:
            self.url = urllib.parse.urlparse(url)
        self.wait()

    def wait(self):
        for _ in range(1200):
            if self.process and self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"{self.name} ended: {self.log.read()[-1500:].decode('utf-8', 'replace')}")
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
        sys.exit(f"{self.name} does not answer")

    def pause(self, on):
        if self.process:
            self.process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def stop(self):
        if self.process:
            self.pause(False)
            self.process.terminate()
            self.process.wait()


def one_stream(target, text, n_tokens, out):
    """(seconds to the first text, tokens)"""
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": n_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, **target.body}
    start = time.monotonic()
    c = http.client.HTTPConnection(target.url.hostname, target.url.port, timeout=600)
    c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    if r.status != 200:
        raise RuntimeError(f"{target.name}: {r.status} {r.read()[:300]}")
    first, lines = None, []
    for line in r:  # looked at afterwards: the client shares the machine with the server
        if first is None and b'"content"' in line and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            first = time.monotonic() - start
        lines.append(line)
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    usage = [o["usage"]["completion_tokens"] for o in events if o.get("usage")]
    tokens = usage[-1] if usage else sum(bool(c["delta"].get("content")) for o in events for c in o["choices"])
    c.close()
    if first is None:
        raise RuntimeError(f"{target.name}: an answer without text")
    out.append((first, tokens))


def one_round(target, n_streams, n_tokens, round_):
    results, threads = [], []
    start = time.monotonic()
    for i in range(n_streams):
        threads.append(threading.Thread(target=one_stream, args=(target, prompt(i, round_), n_tokens, results)))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seconds = time.monotonic() - start
    if len(results) != n_streams:
        sys.exit(f"{target.name}: {n_streams - len(results)} of {n_streams} streams failed")
    return sum(n for _, n in results) / seconds, [t for t, _ in results]


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def measure(targets, streams, n_tokens, rounds):
    got = {(t.name, n): ([], []) for t in targets for n in streams}
    for t in targets:
        t.pause(False)
        one_round(t, 2, 16, 99)  # warm
        t.pause(True)
    for r in range(rounds):
        for n in streams:
            for t in targets:
                t.pause(False)
                rate, firsts = one_round(t, n, n_tokens, r)
                t.pause(True)
                got[t.name, n][0].append(rate)
                got[t.name, n][1].extend(firsts)
    return got


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model")
    p.add_argument("-md", "--draft")
    p.add_argument("--url", help="measure this server instead")
    p.add_argument("--sooth", default="build/sooth")
    p.add_argument("--peer", help="a Python with llama-cpp-python[server]")
    p.add_argument("--streams", default="1,4,8,16")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    streams = [int(n) for n in a.streams.split(",")]
    ours = [a.sooth, "serve", "-m", a.model or "", "-t", str(a.threads), "--port", "{port}", "--parallel", str(max(streams))]
    if a.draft:
        ours += ["-md", a.draft]
    targets = []
    try:
        if a.url:
            targets.append(Target("url", url=a.url))
        else:
            targets.append(Target("sooth plain", ours, body={"speculative": {"enabled": False}}))
            targets.append(Target("sooth speculative", ours))
            targets[-1].pause(True)
        if a.peer:
            for t in targets:
                t.pause(True)
            targets.append(Target("llama_cpp.server", [a.peer, "-m", "llama_cpp.server", "--model", a.model, "--port", "{port}",
                                                       "--n_threads", str(a.threads), "--n_threads_batch", str(a.threads),
                                                       "--n_ctx", "4096", "--interrupt_requests", "false", "--verbose", "false"]))
        got = measure(targets, streams, a.tokens, a.rounds)
    finally:
        for t in targets:
            t.stop()
    for (name, n), (rates, firsts) in got.items():
        row = {"server": name, "streams": n, "tokens": a.tokens, "rounds": len(rates),
               "tokens_per_second": round(statistics.median(rates), 1), "spread": [round(min(rates), 1), round(max(rates), 1)],
               "first_ms_median": round(1000 * statistics.median(firsts)), "first_ms_p95": round(1000 * quantile(firsts, 0.95))}
        if a.json:
            print(json.dumps(row))
        else:
            print(f"{name:18} {n:3} streams: {row['tokens_per_second']:7.1f} tok/s ({row['spread'][0]}–{row['spread'][1]}), "
                  f"first token {row['first_ms_median']} ms, p95 {row['first_ms_p95']} ms")


main()
