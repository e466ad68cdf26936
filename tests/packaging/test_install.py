#!/usr/bin/env python3
"""`make` and `make install`: missing packages are named, and an install is always for its own PREFIX."""
import os
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def make(*args, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    return subprocess.run(["make", *args], cwd=ROOT, env=dict(clean, **env), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)


def install(tmp, prefix, *args):
    p = make("install", f"DESTDIR={tmp}", f"PREFIX={prefix}", *args)
    assert p.returncode == 0, p.stderr
    return tmp + prefix


def query(folder, sysroot, *args):
    env = dict(os.environ, PKG_CONFIG_PATH=folder, PKG_CONFIG_SYSROOT_DIR=sysroot)
    return subprocess.run(["pkg-config", *args, "sooth"], env=env, stdout=subprocess.PIPE, text=True).stdout.strip()


def prefix_is_current(tmp):
    """Two installs of one build: each sooth.pc names its own folder."""
    for prefix in ("/opt/one", "/opt/two"):
        at = install(tmp, prefix)
        assert query(at + "/lib/pkgconfig", "", "--variable=prefix") == prefix
        with open(at + "/lib/systemd/system/sooth.service") as f:
            assert f"ExecStart={prefix}/bin/sooth serve" in f.read()
    at = install(tmp, "/opt/three", "LIBDIR=/opt/three/lib/some-arch")
    assert query(at + "/lib/some-arch/pkgconfig", "", "--variable=libdir") == "/opt/three/lib/some-arch"


def works_installed(tmp):
    at = install(tmp, "/opt/one")
    env = dict(os.environ, LD_LIBRARY_PATH=at + "/lib")
    flags = query(at + "/lib/pkgconfig", tmp, "--cflags", "--libs").split()
    cc = os.environ.get("CC", "cc").split()
    subprocess.run([*cc, "examples/generate.c", *flags, "-o", tmp + "/generate"], cwd=ROOT, check=True)
    assert subprocess.run([tmp + "/generate"], env=env, stderr=subprocess.DEVNULL).returncode == 2
    assert subprocess.run([at + "/bin/sooth", "--version"], stdout=subprocess.DEVNULL).returncode == 0
    for name in ("bash-completion/completions/sooth", "zsh/site-functions/_sooth", "fish/vendor_completions.d/sooth.fish"):
        with open(f"{at}/share/{name}") as f:
            assert "quantize" in f.read(), name


def missing_packages(tmp):
    """Without the libraries: one message with the apt-get command; targets that build nothing still work."""
    p = make("-n", "all", PKG_CONFIG_LIBDIR=tmp, PKG_CONFIG_PATH=tmp)
    assert p.returncode == 2 and len(p.stderr.splitlines()) == 1, p.stderr
    assert "apt-get install libpcre2-dev libutf8proc-dev libjansson-dev libedit-dev" in p.stderr, p.stderr
    for goal in ("help", "clean"):
        p = make("-n", goal, PKG_CONFIG_LIBDIR=tmp)
        assert p.returncode == 0 and p.stderr == "", p.stderr
    p = make("-n", "all", "CC=no-such-compiler")
    assert p.returncode == 2 and p.stderr.rstrip().endswith("apt-get install gcc libc6-dev.  Stop."), p.stderr


def main():
    tests = [missing_packages, prefix_is_current, works_installed]
    print(f"1..{len(tests)}")
    failed = 0
    for i, test in enumerate(tests, 1):
        with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
            try:
                test(tmp)
                print(f"ok {i} {test.__name__}")
            except Exception as e:  # noqa: a test must not stop the others
                failed += 1
                print(f"not ok {i} {test.__name__}: {type(e).__name__} {e}")
    raise SystemExit(1 if failed else 0)


main()
