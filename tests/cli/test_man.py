#!/usr/bin/env python3
"""The manual page is current and complete. Prints TAP."""
import os
import re
import subprocess
import sys

SOOTH = os.environ.get("SOOTH_BIN", "build/sooth")
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "GENERAL OPTIONS", "DRAFTERS", "EXIT STATUS", "ENVIRONMENT", "FILES",
            "EXAMPLES"]
TEST_ONLY = {"SOOTH_DEBUG"}  # read by sooth-mutants alone
results = []


def check(ok, name, why=""):
    results.append(ok)
    print(f"{'ok' if ok else 'not ok'} {len(results)} - {name}" + ("" if ok else f": {why}"))


def run(*args):
    return subprocess.run(args, check=True, stdout=subprocess.PIPE).stdout


def main():
    page = open("man/sooth.1", "rb").read()
    print("1..4")
    check(run(sys.executable, "tools/man.py", SOOTH) == page, "man page is current", "run: tools/man.py build/sooth > man/sooth.1")

    text = page.decode()
    check(re.findall(r"^\.SH (.+)$", text, re.M) == SECTIONS, "man page has its sections", re.findall(r"^\.SH (.+)$", text, re.M))

    read = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)*)"', open("src/base/env.c").read())) - TEST_ONLY
    shown = set(re.findall(r"^  (\w+) ", run(SOOTH, "help", "environment").decode().split("Files:")[0], re.M))
    check(len(read) > 8 and shown == read, "every environment variable is documented", f"differ: {sorted(shown ^ read)}")

    body = text.split(".SH ENVIRONMENT")[1].split(".SH FILES")[0]
    missing = [v for v in read if f"\\fB{v}\\fP" not in body]
    check(not missing, "the man page lists every environment variable", missing)
    return 0 if all(results) else 1


sys.exit(main())
