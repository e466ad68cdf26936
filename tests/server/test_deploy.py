#!/usr/bin/env python3
"""The files of packaging/ in use: nginx in front of two replicas, the systemd unit, the Prometheus configuration."""
import os
import re
import shutil
import signal
import subprocess
import tempfile

import rig

TEXT = "/v1/completions"
ASK = {"prompt": "the sea", "ignore_eos": True, "max_tokens": 40, "seed": 3}
PACKAGING = os.path.join(rig.ROOT, "packaging")


def tool(name):
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if not path:
        raise rig.Skip(f"{name} is not installed")
    return path


class Nginx(rig.Server):
    """packaging/nginx.conf with other ports."""

    def __init__(self, nginx, replicas):
        self.tmp = tempfile.TemporaryDirectory(prefix="sooth-test-")
        self.port = rig.free_port()
        self.err_path = os.path.join(self.tmp.name, "error.log")
        conf = open(os.path.join(PACKAGING, "nginx.conf")).read()
        for old, new in (("8081", replicas[0].port), ("8082", replicas[1].port), ("listen 8080", f"listen 127.0.0.1:{self.port}")):
            conf, n = re.subn(old, str(new), conf)
            assert n == 1, old
        path = os.path.join(self.tmp.name, "nginx.conf")
        temp = "".join(f"{kind}_temp_path {self.tmp.name}/{kind};\n"
                       for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        with open(path, "w") as f:
            f.write(f"daemon off; pid {self.tmp.name}/pid; error_log {self.err_path}; worker_processes 1;\n"
                    f"{'user root;' if os.getuid() == 0 else ''} events {{}}\n"
                    f"http {{ access_log off; {temp} {conf} }}\n")
        check = subprocess.run([nginx, "-t", "-c", path, "-e", self.err_path], stderr=subprocess.PIPE, text=True)
        assert check.returncode == 0, check.stderr
        self.process = subprocess.Popen([nginx, "-c", path, "-e", self.err_path])


def proxy():
    nginx = tool("nginx")
    with rig.Server("--parallel", "2", "--queue", "0") as a, rig.Server("--parallel", "2", "--queue", "0") as b:
        want = a.ok(TEXT, ASK)["choices"]
        with Nginx(nginx, (a, b)) as front:
            front.wait_ready()
            assert front.ok(TEXT, ASK)["choices"] == want
            whole = "".join(e["choices"][0]["text"] for e in front.stream(TEXT, ASK))
            assert whole == want[0]["text"]
            page = {"Origin": f"http://127.0.0.1:{front.port}"}
            assert front.post(TEXT, ASK, headers=page)[0] == 200  # the page through the proxy
            # two places in each replica: nginx sends a request that got 429 to the other one
            got = rig.parallel([lambda: front.post(TEXT, ASK)[0] for _ in range(4)])
            assert got == [200] * 4, got
            assert all(s.metrics()["sooth_generation_tokens_total"] > 0 for s in (a, b))
            # one replica is stopped, the other killed: clients see no error
            a.process.send_signal(signal.SIGTERM)
            for _ in range(20):
                assert front.ok(TEXT, ASK)["choices"] == want
            a.process.wait(60)
            a.start()
            b.process.kill()
            for _ in range(20):
                assert front.ok(TEXT, ASK)["choices"] == want


def streams_at_once():
    """Tokens pass the proxy as they are generated, not when the answer is complete."""
    nginx = tool("nginx")
    with rig.Server(layers=50) as a, rig.Server(layers=50) as b, Nginx(nginx, (a, b)) as front:
        front.wait_ready()
        reader = front.raw(rig.http_bytes(TEXT, {**ASK, "stream": True, "n": 60, "max_tokens": 240}))
        first = b""
        while b"data: " not in first:
            first += reader.recv(500)
        rig.eventually(lambda: a.metrics()["sooth_requests_running"] + b.metrics()["sooth_requests_running"] > 0,
                       what="the answer is still running when its first token has passed the proxy")
        reader.close()
        rig.eventually(lambda: a.metrics()["sooth_requests_running"] + b.metrics()["sooth_requests_running"] == 0,
                       what="a client that left is noticed through the proxy")


def unit():
    analyze = tool("systemd-analyze")
    with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
        path = os.path.join(tmp, "sooth.service")
        text = open(os.path.join(PACKAGING, "sooth.service")).read()
        with open(path, "w") as f:
            f.write(text.replace("/usr/local/bin/sooth", rig.SOOTH))
        p = subprocess.run([analyze, "verify", "--man=no", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        mine = [line for line in p.stdout.splitlines() if "sooth" in line]
        assert not mine, mine


def scrape():
    p = subprocess.run([tool("promtool"), "check", "config", os.path.join(PACKAGING, "prometheus.yml")],
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert p.returncode == 0, p.stdout


rig.main([proxy, streams_at_once, unit, scrape])
