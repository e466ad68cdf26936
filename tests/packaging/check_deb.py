#!/usr/bin/env python3
"""The Debian packages that `make deb` left in build/deb: contents, lintian, and an install and purge below a temporary
root that leaves nothing behind. Without packages, or without root for the install, the test is skipped."""
import glob
import os
import shutil
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEBS = sorted(glob.glob(os.path.join(ROOT, "build/deb/*.deb")))


class Skip(Exception):
    pass


def run(*cmd, **kw):
    return subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kw)


def field(deb, name):
    return run("dpkg-deb", "-f", deb, name).stdout.strip()


def makefile_version():
    with open(os.path.join(ROOT, "Makefile")) as f:
        return next(line.split(":=")[1].strip() for line in f if line.startswith("VERSION :="))


def contents(_):
    names = {field(d, "Package"): d for d in DEBS}
    assert sorted(names) == ["libsooth-dev", "libsooth0", "sooth", "sooth-models"], names
    expected = {
        "sooth": ["usr/bin/sooth", "usr/share/man/man1/sooth.1.gz", "lib/systemd/system/sooth.service", "etc/default/sooth"],
        "libsooth0": ["/libsooth.so.0"],
        "libsooth-dev": ["usr/include/sooth.h", "/libsooth.a", "/libsooth.so", "/pkgconfig/sooth.pc", "/examples/drafter.c"],
        "sooth-models": ["usr/share/sooth/models/story/story-q8_0.gguf", "usr/share/sooth/models/smollm2/draft-q4_0.gguf"],
    }
    for package, files in expected.items():
        deb = names[package]
        assert field(deb, "Version").startswith(makefile_version() + "-"), (package, field(deb, "Version"))
        assert field(deb, "Architecture") == ("all" if package == "sooth-models" else run(
            "dpkg", "--print-architecture").stdout.strip()), package
        listing = run("dpkg-deb", "-c", deb).stdout
        for file in [*files, f"usr/share/doc/{package}/copyright"]:
            assert file in listing, (package, file)
        assert " root/root " in listing and all(" root/root " in line for line in listing.splitlines()), package


def lintian(_):
    if not shutil.which("lintian"):
        raise Skip("lintian is not installed")
    p = run("lintian", *(["--allow-root"] if os.getuid() == 0 else []), "--fail-on", "error", *DEBS)
    assert p.returncode == 0 and "E: " not in p.stdout, p.stdout


def installs_and_purges(tmp):
    """Every file and folder is gone after the purge, but for dpkg's own; the installed programs run."""
    if os.getuid() != 0:
        raise Skip("dpkg installs only as root")
    for folder in ("var/lib/dpkg/updates", "var/lib/dpkg/info", "var/log"):
        os.makedirs(os.path.join(tmp, folder))
    open(os.path.join(tmp, "var/lib/dpkg/status"), "w").close()

    def files():
        found = set()
        for top, folders, names in os.walk(tmp):
            found |= {os.path.relpath(os.path.join(top, n), tmp) for n in folders + names}
        return {f for f in found if not f.startswith("var/")}

    before = files()
    dpkg = ["dpkg", "--root=" + tmp, "--force-depends", "--force-script-chrootless"]
    p = run(*dpkg, "-i", *DEBS)
    assert p.returncode == 0, p.stdout
    sooth = os.path.join(tmp, "usr/bin/sooth")
    assert makefile_version() in run(sooth, "--version").stdout
    p = run(sooth, "run", "-m", "story", "-p", "Tell me a story about a cat.", "-n", "5", "--temp", "0")
    assert p.returncode == 0 and p.stdout.strip(), p.stdout
    names = [field(d, "Package") for d in DEBS]
    p = run(*dpkg, "-r", *names)
    assert p.returncode == 0 and files() - before == {"etc", "etc/default", "etc/default/sooth"}, (p.stdout, files())
    p = run(*dpkg, "-P", *names)
    assert p.returncode == 0 and files() == before, (p.stdout, files() - before)


def main():
    tests = [contents, lintian, installs_and_purges]
    print(f"1..{len(tests)}")
    failed = 0
    for i, test in enumerate(tests, 1):
        with tempfile.TemporaryDirectory(prefix="sooth-test-") as tmp:
            try:
                if not DEBS:
                    raise Skip("no packages in build/deb (make deb)")
                test(tmp)
                print(f"ok {i} {test.__name__}")
            except Skip as e:
                print(f"skip: {e}\nok {i} {test.__name__} # SKIP {e}")
            except Exception as e:  # noqa: a test must not stop the others
                failed += 1
                print(f"not ok {i} {test.__name__}: {type(e).__name__} {e}")
    raise SystemExit(1 if failed else 0)


main()
