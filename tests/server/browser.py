"""A headless Chromium, driven over the DevTools protocol, using only the standard library.

    with Browser() as b:
        page = b.open("http://127.0.0.1:8080/", 1280, 900)
        page.eval("document.title")

page.requests has every request of the page; page.problems its console messages and exceptions.
"""
import base64
import collections
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time


def find():
    """The path of the program, or None."""
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


class WebSocket:
    """Text frames of RFC 6455, client side; whole messages only."""

    def __init__(self, port, path):
        self.s = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.s.sendall((f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
        self.f = self.s.makefile("rb")
        if b"101" not in self.f.readline():
            raise RuntimeError("the browser refused the connection")
        while self.f.readline() not in (b"\r\n", b""):
            pass

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        n = len(data)
        head = struct.pack("!BB", 0x81, 0x80 | n) if n < 126 else struct.pack("!BBH", 0x81, 0xFE, n) if n < 65536 else \
            struct.pack("!BBQ", 0x81, 0xFF, n)
        repeated = mask * (n // 4 + 1)
        self.s.sendall(head + mask + bytes(a ^ b for a, b in zip(data, repeated)))

    def receive(self, seconds):
        """The next message; None on timeout."""
        message = b""
        self.s.settimeout(seconds)
        while True:
            try:
                a, b = self.f.read(2)
            except (socket.timeout, TimeoutError):
                self.f = self.s.makefile("rb")
                return None
            self.s.settimeout(60)
            n = b & 0x7F
            if n == 126:
                n, = struct.unpack("!H", self.f.read(2))
            elif n == 127:
                n, = struct.unpack("!Q", self.f.read(8))
            message += self.f.read(n)
            if a & 0x80 and a & 0x0F in (0, 1):
                return message.decode()
            if a & 0x0F > 2:
                message = b""  # ping, pong


class Page:
    def __init__(self, ws, session):
        self.ws, self.session, self.n = ws, session, 0
        self.requests, self.problems, self.events = [], [], collections.deque(maxlen=10000)
        self.done = {}  # request id: url, of finished ones

    def note(self, m):
        p, kind = m.get("params", {}), m.get("method")
        if kind == "Network.requestWillBeSent":
            self.requests.append(p["request"]["url"])
        elif kind == "Network.responseReceived":
            self.done[p["requestId"]] = p["response"]["url"]
        elif kind == "Runtime.exceptionThrown":
            d = p["exceptionDetails"]
            self.problems.append(d.get("exception", {}).get("description") or d["text"])
        elif kind == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in p["args"]))
        elif kind == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.problems.append(p["entry"]["text"] + " " + p["entry"].get("url", ""))

    def call(self, method, **params):
        self.n += 1
        mine = self.n
        self.ws.send(json.dumps({"id": mine, "method": method, "params": params, "sessionId": self.session}))
        while True:
            text = self.ws.receive(60)
            if text is None:
                raise RuntimeError(f"{method}: no answer")
            m = json.loads(text)
            if m.get("sessionId") != self.session:
                continue
            if m.get("id") == mine:
                if "error" in m:
                    raise RuntimeError(f"{method}: {m['error']['message']}")
                return m["result"]
            self.note(m)

    def eval(self, code):
        r = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in r:
            raise RuntimeError(f"{code}: {r['exceptionDetails'].get('exception', {}).get('description')}")
        return r["result"].get("value")

    def wait(self, code, seconds=60):
        """Waits until the expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.eval(code)
            if value:
                return value
            time.sleep(0.1)
        raise RuntimeError(f"never became true: {code}; problems: {self.problems}")

    def key(self, key, code=None, text=None, modifiers=0):
        """Presses and releases one key; text: what it types."""
        base = {"key": key, "code": code or key, "modifiers": modifiers,
                "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", **base, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **base)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def bodies(self, part):
        """Bodies of the responses whose URL contains part, oldest first."""
        out = []
        for rid, url in self.done.items():
            if part in url:
                try:
                    r = self.call("Network.getResponseBody", requestId=rid)
                except RuntimeError:
                    continue  # a preflight, or an aborted response
                out.append(base64.b64decode(r["body"]).decode() if r["base64Encoded"] else r["body"])
        return out

    def shot(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def size(self, width, height, phone=False, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)

    def media(self, **features):
        self.call("Emulation.setEmulatedMedia", features=[{"name": k.replace("_", "-"), "value": v} for k, v in features.items()])


class Browser:
    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="sooth-browser-")
        args = [find(), "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self.dir}", "--no-first-run",
                "--disable-gpu", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
                "--hide-scrollbars", "--disable-dev-shm-usage", "about:blank"]
        if os.geteuid() == 0:
            args.insert(1, "--no-sandbox")
        self.p = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        where = os.path.join(self.dir, "DevToolsActivePort")
        for _ in range(600):
            if os.path.exists(where) and open(where).read().count("\n") >= 1:
                break
            time.sleep(0.1)
        else:
            self.__exit__(None, None, None)
            raise RuntimeError("the browser does not start")
        port, path = open(where).read().split("\n")[:2]
        self.ws = WebSocket(int(port), path)
        self.n = 1000000
        return self

    def call(self, method, **params):
        self.n += 1
        self.ws.send(json.dumps({"id": self.n, "method": method, "params": params}))
        while True:
            m = json.loads(self.ws.receive(60))
            if m.get("id") == self.n:
                return m["result"]

    def open(self, url, width, height, phone=False, **media):
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        page = Page(self.ws, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            page.call(domain + ".enable")
        page.call("Network.enable", maxTotalBufferSize=50_000_000, maxResourceBufferSize=20_000_000)
        page.size(width, height, phone)
        if media:
            page.media(**media)
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete'")
        return page

    def __exit__(self, *_):
        self.p.terminate()
        try:
            self.p.wait(10)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
