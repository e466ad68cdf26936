#!/usr/bin/env python3
"""Runs test programs (TAP on stdout) and prints one line each, then run, failed and skipped counts.

A test program is a cmocka binary or a script that speaks TAP. SOOTH_STRICT=1 makes a skip a failure.
SOOTH_RUNNER is put in front of each binary (qemu for another machine's binaries, say).
"""
import os
import re
import subprocess
import sys
import time


def run(program):
    """(ok, failed, skipped, output) of one program."""
    cmd = [program]
    if not program.endswith((".py", ".sh")):
        cmd = os.environ.get("SOOTH_RUNNER", "").split() + cmd
    env = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP")
    limit = int(os.environ.get("SOOTH_TEST_SECONDS", "900"))
    try:
        p = subprocess.run(cmd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        out, status = p.stdout.decode("utf-8", "replace"), p.returncode
    except subprocess.TimeoutExpired as e:
        out, status = (e.stdout or b"").decode("utf-8", "replace"), 124
        out += f"\nstopped after {limit} s\n"
    # cmocka reports a skip as "not ok N # SKIP name"
    skips = len(re.findall(r"^(?:not )?ok\b.*# SKIP", out, re.M | re.I))
    good = len(re.findall(r"^ok\b(?!.*# SKIP)", out, re.M | re.I))
    bad = len(re.findall(r"^not ok\b(?!.*# SKIP)", out, re.M | re.I))
    if status != 0 and bad == 0:  # crashed, or said nothing
        bad = 1
    if status == 0 and good + skips == 0:
        bad, out = 1, out + "\nno test reported\n"
    return good, bad, skips, out


def main():
    strict = os.environ.get("SOOTH_STRICT") == "1"
    total = failed = skipped = 0
    for program in sys.argv[1:]:
        start = time.monotonic()
        good, bad, skips, out = run(program)
        total += good + bad
        failed += bad
        skipped += skips
        name = re.sub(r"^.*?tests/", "", program)
        print(f"{'FAIL' if bad else 'ok':4}  {name:36} {good:4} passed{f', {bad} failed' if bad else ''}"
              f"{f', {skips} skipped' if skips else ''}  {time.monotonic() - start:.1f} s", flush=True)
        if bad:
            print(out, flush=True)
        else:
            for line in re.findall(r"^skip: .*$", out, re.M):
                print("      " + line, flush=True)
    print(f"tests: {total} run, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed or (strict and skipped) or total == 0 else 0)


main()
