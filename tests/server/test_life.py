#!/usr/bin/env python3
"""A server's lifecycle: loading, access control, a full queue, drain, kill and restart."""
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

import rig

TEXT = "/v1/completions"
LONG = {"prompt": "he", "ignore_eos": True, "max_tokens": 240, "seed": 1}


def notifies_service_manager():
    with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(os.path.join(tmp, "notify"))
        notify.settimeout(20)
        with rig.Server("--host", "localhost", wait=False, env={"NOTIFY_SOCKET": os.path.join(tmp, "notify")}) as s:
            assert notify.recv(100) == b"READY=1"
            s.wait_ready()
            s.process.send_signal(signal.SIGTERM)
            assert notify.recv(100) == b"STOPPING=1"
            assert s.process.wait(120) == 0
        notify.close()


def loading_gets_503():
    model = rig.real_model("smollm2")
    with rig.Server(model=model, wait=False) as s:
        seen = set()
        for _ in range(2000):
            try:
                status, headers, o = s.get("/health")
            except OSError:
                continue
            seen.add((status, o["status"]))
            if status == 200:
                break
            status, headers, o = s.post(TEXT, {**LONG, "max_tokens": 1})
            if status == 503:
                assert int(headers["retry-after"]) >= 1 and o["error"]["code"] == "loading", o
        assert (503, "loading") in seen and (200, "ready") in seen, seen


def bad_starts():
    def run(*args):
        return subprocess.run([*rig.RUNNER, rig.SOOTH, "serve", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=60)
    with rig.Server() as s:
        model = os.path.join(s.tmp.name, "tiny.gguf")
        p = run("-m", model, "--port", str(s.port))
        assert p.returncode == 1 and "choose another --port" in p.stderr, p.stderr
        p = run("-m", model, "--port", "0", "--host", "no.such.host.invalid")
        assert p.returncode == 1 and "no.such.host.invalid" in p.stderr
        p = run("-m", model, "--port", "0", "--ctx-size", "100000")
        assert p.returncode == 2 and "for this model" in p.stderr
        p = run("-m", model, "--port", "0", "--api-key", "")
        assert p.returncode == 2 and "--api-key" in p.stderr
        p = run("-m", model, "--port", "0", "--spec", "model")
        assert p.returncode == 2 and "-md" in p.stderr
        for name in ("--alias", "--cors"):
            p = run("-m", model, "--port", "0", name, "")
            assert p.returncode == 2 and name in p.stderr, p.stderr
        # a drafter that cannot be opened fails the start, not each request
        for spec, word in (("model(/nowhere/d.gguf)", "/nowhere/d.gguf"), ("ngram,bigram(/nowhere/b)", "/nowhere/b"),
                           (f"bigram({model})", "not a table")):
            p = run("-m", model, "--port", "0", "--spec", spec)
            assert p.returncode == 1 and "--spec" in p.stderr and word in p.stderr and "ready" not in p.stderr, p.stderr
        p = run("-m", model, "--port", "0", "--spec", "unigram")
        assert p.returncode == 2 and "counted table" in p.stderr, p.stderr
    p = run("-m", "/nowhere/x.gguf", "--port", "0")
    assert p.returncode == 1 and "/nowhere/x.gguf" in p.stderr and p.stdout == ""
    assert run().returncode == 2 and run("-m", "x", "--port", "99999").returncode == 2


def warns_without_key():
    """The server warns if other machines can reach it and there is no key."""
    for args, warned in ((("--host", "0.0.0.0"), True), (("--host", "0.0.0.0", "--api-key", "k"), False),
                         (("--host", "127.0.0.2"), False)):
        with rig.Server(*args, wait=False) as s:
            rig.eventually(lambda: "ready at" in s.errors(), 60, "the server is ready")
            assert ("--api-key" in s.errors()) == warned, s.errors()


def keys():
    for env, args in (({}, ("--api-key", "secret")), ({"SOOTH_API_KEY": "secret"}, ())):
        with rig.Server(*args, env=env) as s:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"},
                            {"Authorization": "Bearer secre"}, {"Authorization": "Bearer secrett"},
                            {"Authorization": "Bearer "}):
                status, got, o = s.post(TEXT, LONG, headers=headers)
                assert status == 401 and o["error"]["code"] == "invalid_api_key" and got["www-authenticate"] == "Bearer"
                assert s.get("/metrics", headers=headers)[0] == 401 and s.get("/v1/models", headers=headers)[0] == 401
            for good in ("bearer secret", "Bearer   secret"):
                assert s.get("/v1/models", headers={"Authorization": good})[0] == 200, good
            good = {"Authorization": "Bearer secret"}
            assert s.post(TEXT, LONG, headers=good)[0] == 200 and s.get("/metrics", headers=good)[0] == 200
            assert s.get("/health")[0] == 200 and s.get("/")[0] == 200  # open


def origins():
    own, other = "http://127.0.0.1:%d", {"Origin": "http://evil.example"}
    with rig.Server() as s:
        status, headers, o = s.post(TEXT, LONG, headers=other)
        assert status == 403 and "evil.example" in o["error"]["message"] and "access-control-allow-origin" not in headers
        assert s.post(TEXT, LONG, headers={"Origin": own % s.port})[0] == 200  # the page's own
        assert s.request("OPTIONS", TEXT, headers=other)[0] == 403
        assert s.request("OPTIONS", TEXT)[0] == 405
    with rig.Server("--cors", "http://good.example") as s:
        status, headers, _ = s.post(TEXT, LONG, headers={"Origin": "http://good.example"})
        assert status == 200 and headers["access-control-allow-origin"] == "http://good.example"
        status, headers, _ = s.request("OPTIONS", TEXT, headers={"Origin": "http://good.example"})
        assert status == 204 and "POST" in headers["access-control-allow-methods"]
        asks = {"Origin": "http://good.example", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
        assert "x-stainless-os" in s.request("OPTIONS", TEXT, headers=asks)[1]["access-control-allow-headers"]
        assert s.post(TEXT, LONG, headers=other)[0] == 403
    with rig.Server("--cors", "*") as s:
        assert s.post(TEXT, LONG, headers=other)[1]["access-control-allow-origin"] == "*"


def hosts():
    """DNS rebinding: a foreign name that resolves to this machine, with the Origin that a browser would send."""
    def ask(s, host, **more):
        return s.post(TEXT, LONG, headers={"Host": host, **more})
    with rig.Server("--allow-host", "my.example") as s:
        for good in ("localhost", "LocalHost.:%d" % s.port, "127.0.0.1", "127.9.9.9:80", "[::1]:%d" % s.port, "a.localhost",
                     "my.example", "MY.example:99"):
            assert ask(s, good)[0] == 200, good
        for bad in ("evil.example", "evil.example:%d" % s.port, "localhost.evil.example", "evillocalhost", "128.0.0.1",
                    "127.0.0.1.evil.example", "[::2]", "[::1", "", ":80", "my.example.evil"):
            status, _, o = ask(s, bad, Origin="http://" + bad)
            assert status == 403 and o["error"]["code"] == "foreign_host", (bad, status)
        for path in ("/", "/health", "/metrics", "/v1/models"):
            assert s.get(path, headers={"Host": "evil.example"})[0] == 403, path
        for version, status in ((b"1.1", b"400"), (b"1.0", b"200")):  # without a Host
            with s.raw(b"GET /health HTTP/" + version + b"\r\nConnection: close\r\n\r\n") as c:
                assert c.recv(64).split(b" ")[1] == status, version
    with rig.Server("--api-key", "secret") as s:  # with a key any Host is accepted: the page does not have the key
        assert ask(s, "evil.example")[0] == 401
        assert ask(s, "proxy.example", Authorization="Bearer secret")[0] == 200
    with rig.Server("--api-key", "secret", "--allow-host", "proxy.example") as s:  # unless names are given
        assert ask(s, "evil.example", Authorization="Bearer secret")[0] == 403
        assert ask(s, "proxy.example", Authorization="Bearer secret")[0] == 200


def full_queue():
    with rig.Server("--parallel", "1", "--queue", "2", layers=32) as s:
        results = rig.parallel([lambda: s.post(TEXT, LONG) for _ in range(24)])
        codes = [status for status, _, _ in results]
        assert set(codes) == {200, 429}, codes
        for status, headers, o in results:
            if status == 429:
                assert int(headers["retry-after"]) >= 1 and o["error"]["type"] == "rate_limit_error"
        assert len({o["choices"][0]["text"] for status, _, o in results if status == 200}) == 1
        status, _, o = s.post(TEXT, {**LONG, "n": 4})  # more than the queue can ever hold: 400, not 429
        assert status == 400 and o["error"]["param"] == "n"
        assert s.metrics()['sooth_requests_refused_total{reason="queue_full"}'] == codes.count(429)
        assert s.post(TEXT, LONG)[0] == 200


def drain():
    """SIGTERM: a running answer is finished, and the program exits with 0."""
    with rig.Server("--parallel", "2") as s:
        reader = s.raw(rig.http_bytes(TEXT, {**LONG, "stream": True, "n": 2}))
        reader.recv(300)
        s.process.send_signal(signal.SIGTERM)
        rig.eventually(lambda: s.process.poll() is not None or s.get("/health")[2]["status"] == "draining")
        data = b""
        while part := reader.recv(65536):
            data += part
        assert b"[DONE]" in data
        assert s.process.wait(120) == 0


def drain_signalled_twice():
    """`timeout` and some supervisors signal both the program and its process group: that counts as one signal."""
    with rig.Server("--parallel", "2", layers=32) as s:
        reader = s.raw(rig.http_bytes(TEXT, {**LONG, "stream": True}))
        data = reader.recv(300)
        for _ in range(2):
            s.process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        while part := reader.recv(65536):
            data += part
        assert b"[DONE]" in data
        assert s.process.wait(120) == 0


def drain_refuses():
    with rig.Server("--parallel", "1", "--timeout", "30") as s:
        # a client that does not read keeps its request open
        slow = s.raw(rig.http_bytes(TEXT, {**LONG, "stream": True, "n": 16, "logprobs": 20, "sooth": {"rounds": True}}),
                     receive=2048)
        rig.eventually(lambda: s.metrics()["sooth_generation_tokens_total"] > 100)
        s.process.send_signal(signal.SIGTERM)
        rig.eventually(lambda: s.get("/health")[2]["status"] == "draining")
        status, headers, o = s.post(TEXT, LONG)
        assert status == 503 and o["error"]["code"] == "draining" and "retry-after" in headers
        assert headers["connection"] == "close"
        time.sleep(0.5)
        s.process.send_signal(signal.SIGTERM)  # the second signal ends it at once
        s.process.wait(5)
        slow.close()
        s.process.returncode = 0


def drain_timeout():
    with rig.Server("--drain-timeout", "1") as s:
        slow = s.raw(rig.http_bytes(TEXT, {**LONG, "stream": True, "n": 16, "logprobs": 20, "sooth": {"rounds": True}}),
                     receive=2048)
        rig.eventually(lambda: s.metrics()["sooth_generation_tokens_total"] > 100)
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(60) == 0
        slow.close()


def killed_and_restarted():
    with rig.Server() as s:
        want = s.ok(TEXT, LONG)["choices"]
        readers = [s.raw(rig.http_bytes(TEXT, {**LONG, "stream": True})) for _ in range(4)]
        for r in readers:
            r.recv(10)
        s.process.kill()
        s.process.wait()
        s.start()  # the port can be bound again at once
        assert s.ok(TEXT, LONG)["choices"] == want
        for r in readers:
            r.close()


def fingerprints():
    """Equal for servers that give equal texts: CPU level and threads do not matter, the device and the cache type do."""
    with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
        model = os.path.join(tmp, "tiny.gguf")
        rig.tiny_model(model)

        def of(*args):
            with rig.Server(*args, model=model) as s:
                return s.get("/props")[2]["system_fingerprint"]
        cpu = of("--threads", "2")
        assert of("--threads", "1", "--cpu-level", "scalar") == cpu
        assert of("--threads", "2", "--device", "deferred") != cpu
        assert of("--threads", "2", "--kv-type", "f32") != cpu


def stops_while_busy():
    """SIGTERM at various moments under load: a clean exit each time."""
    for delay in (0.0, 0.005, 0.02, 0.05):
        with rig.Server("--drain-timeout", "0") as s:
            stop = threading.Event()

            def client():
                while not stop.is_set():
                    try:
                        s.post(TEXT, {**LONG, "stream": True}, timeout=5)
                    except Exception:  # noqa: the server may stop at any moment
                        return
            threads = [threading.Thread(target=client) for _ in range(6)]
            for t in threads:
                t.start()
            time.sleep(0.1 + delay)
            s.process.send_signal(signal.SIGTERM)
            assert s.process.wait(120) == 0, s.errors()
            stop.set()
            for t in threads:
                t.join()


rig.main([notifies_service_manager, loading_gets_503, bad_starts, warns_without_key, keys, origins, hosts, full_queue, drain, drain_signalled_twice, drain_refuses, drain_timeout,
          killed_and_restarted, fingerprints, stops_while_busy])
