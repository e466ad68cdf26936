"""Shared by the server's tests: a server process on the tiny model, HTTP requests, TAP output.

    with Server("--queue", "2") as s:
        status, headers, body = s.post("/v1/completions", {"prompt": "he"})

SOOTH_BIN: the program under test (default build/sooth). tests/server/tiny_model of the same build writes the model.
"""
import contextlib
import glob
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", os.path.join(ROOT, "build", "sooth")))
RUNNER = os.environ.get("SOOTH_RUNNER", "").split()


class Skip(Exception):
    pass


def tiny_model(path, template=None, layers=0):
    """Writes the tiny model, with the helper of the same build as the program; more layers make it slower."""
    near = [os.path.join(os.path.dirname(SOOTH), "tests", "server", "tiny_model"),
            *glob.glob(os.path.join(ROOT, "build", "obj", "*-cc", "tests", "server", "tiny_model"))]
    tool = next((p for p in near if os.path.exists(p)), None)
    if not tool:
        raise Skip("tests/server/tiny_model is not built (make tests)")
    subprocess.run([*RUNNER, tool, path, template or "", str(layers)], check=True)


def real_model(name):
    """The file of a pulled model; skips the test if there is none."""
    folders = [os.environ.get("SOOTH_MODELS", ""),
               os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "sooth", "models")]
    for folder in folders:
        path = os.path.join(folder, name + ".gguf")
        if folder and os.path.exists(path):
            return path
    raise Skip(f"{name} is not pulled")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server process. wait=False: return before it is ready."""

    def __init__(self, *args, model=None, template=None, layers=0, wait=True, env=None, port=None):
        self.tmp = tempfile.TemporaryDirectory(prefix="sooth-test-")
        self.port = port or free_port()
        if model is None:
            model = os.path.join(self.tmp.name, "tiny.gguf")
            tiny_model(model, template, layers)
        self.log_path = os.path.join(self.tmp.name, "log")
        self.err_path = os.path.join(self.tmp.name, "err")
        self.env = dict(os.environ, XDG_CACHE_HOME=self.tmp.name, HOME=self.tmp.name, **(env or {}))
        self.command = [*RUNNER, SOOTH, "serve", "-m", model, "--port", str(self.port), "--json", *args]
        self.start(wait)

    def start(self, wait=True):
        with open(self.log_path, "a") as out, open(self.err_path, "a") as err:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=err, env=self.env)
        if wait:
            self.wait_ready()

    def wait_ready(self, seconds=60):
        for _ in range(50 * seconds):
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}: {self.errors()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("the server is not ready: " + self.errors())

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                if exc[0] is None:
                    raise AssertionError("the server does not stop: " + self.errors())
        status = self.process.returncode
        err = self.errors()
        self.tmp.cleanup()
        if exc[0] is None and status not in (0, -9):
            raise AssertionError(f"the server ended with {status}: {err}")

    def errors(self):
        return open(self.err_path).read()

    def log(self):
        """The request lines of the log so far."""
        return [json.loads(line) for line in open(self.log_path) if line.endswith("\n")]

    def wait_log(self, match, seconds=60):
        for _ in range(50 * seconds):
            for line in self.log():
                if match(line):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no such line in the log: {self.log()}")

    # --- requests ---

    def request(self, method, path, body=None, headers=None, timeout=3600):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            if body is not None and not isinstance(body, (bytes, str)):
                body = json.dumps(body)
            c.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            r = c.getresponse()
            data = r.read()
        finally:
            c.close()
        if "json" in (r.getheader("Content-Type") or "") and data:
            data = json.loads(data)
        return r.status, {k.lower(): v for k, v in r.getheaders()}, data

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def post(self, path, body, **more):
        return self.request("POST", path, body, **more)

    def ok(self, path, body, **more):
        status, _, data = self.post(path, body, **more)
        assert status == 200, (status, data)
        return data

    def stream(self, path, body, headers=None):
        """The events of a streamed response; checks that [DONE] is the last, and leaves it out."""
        status, got, data = self.request("POST", path, {**body, "stream": True}, headers)
        assert status == 200 and got["content-type"].startswith("text/event-stream"), (status, data)
        events = data.decode().split("\n\n")
        assert events.pop() == "" and all(e.startswith("data: ") for e in events), events[-3:]
        assert events.pop() == "data: [DONE]", events[-1]
        return [json.loads(e[6:]) for e in events]

    def metrics(self):
        """/metrics as a dictionary: name with labels → value."""
        text = self.get("/metrics")[2].decode()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
                for line in text.splitlines() if not line.startswith("#")}

    def raw(self, data=b"", receive=0, timeout=10):
        """A socket connected to the server, with data sent."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        if receive:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        s.sendall(data)
        return s


def http_bytes(path, body, more=""):
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def eventually(condition, seconds=60, what="condition"):
    for _ in range(50 * seconds):  # counts turns, not seconds: a suspended machine must not use up the time
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def parallel(functions):
    """Runs the functions in threads; returns their results in order, or raises the first exception."""
    results, threads = [None] * len(functions), []

    def call(i, f):
        try:
            results[i] = (True, f())
        except BaseException as e:  # noqa: raised again below
            results[i] = (False, e)
    for i, f in enumerate(functions):
        threads.append(threading.Thread(target=call, args=(i, f)))
        threads[-1].start()
    for t in threads:
        t.join()
    for ok, value in results:
        if not ok:
            raise value
    return [value for _, value in results]


def main(tests):
    """Runs test functions and prints TAP."""
    only = sys.argv[1:]
    tests = [t for t in tests if not only or t.__name__ in only]
    print(f"1..{len(tests)}", flush=True)
    failed = 0
    for i, test in enumerate(tests, 1):
        try:
            test()
            print(f"ok {i} {test.__name__}", flush=True)
        except Skip as e:
            print(f"skip: {e}\nok {i} # SKIP {test.__name__}", flush=True)
        except BaseException as e:  # noqa: the other tests still run
            if isinstance(e, KeyboardInterrupt):
                raise
            failed += 1
            import traceback
            traceback.print_exc(file=sys.stdout)
            print(f"not ok {i} {test.__name__}: {type(e).__name__} {str(e)[:500]}", flush=True)
    raise SystemExit(1 if failed else 0)
