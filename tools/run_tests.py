#!/usr/bin/env python3
"""Runs test programs and prints one line for each, then the slowest and the counts of run, failed and skipped tests.

A test program is a cmocka binary or a script; both write TAP to standard output.
  SOOTH_STRICT=1         a skipped test is a failure
  SOOTH_RUNNER=CMD       put in front of each binary (for instance qemu, for binaries of another architecture)
  SOOTH_TEST_SECONDS=N   time limit of each program (900)
  SOOTH_TEST_JOBS=N      run N programs at once, if none of them measures time

Programs of the folders in UNTIMED measure no time and mostly use one thread: they run two at once. Seconds of programs that ran beside
others are processor time, which other processes on the machine hardly affect.
"""
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

SLOWEST = 5
UNTIMED = ("model", "draft", "plan", "sample", "verify", "kv", "token", "format")  # the longest first


def processor_seconds(child):
    """Waits for the child. Returns its exit status and the processor time of the child and its children."""
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, used.ru_utime + used.ru_stime


def run(program):
    """(good, bad, skips, output, wall seconds, processor seconds) of one program."""
    cmd = [program]
    if not program.endswith((".py", ".sh")):
        cmd = os.environ.get("SOOTH_RUNNER", "").split() + cmd
    env = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP")
    limit = int(os.environ.get("SOOTH_TEST_SECONDS", "900"))
    start, stopped = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(cmd, env=env, stdout=log, stderr=subprocess.STDOUT)

        def stop():
            stopped.set()
            child.kill()
        alarm = threading.Timer(limit, stop)
        alarm.start()
        status, cpu = processor_seconds(child)
        alarm.cancel()
        log.seek(0)
        out = log.read().decode("utf-8", "replace")
    if stopped.is_set():
        out += f"\nstopped after {limit} s\n"
    # cmocka reports a skip as "not ok N # SKIP name"
    skips = len(re.findall(r"^(?:not )?ok\b.*# SKIP", out, re.M | re.I))
    good = len(re.findall(r"^ok\b(?!.*# SKIP)", out, re.M | re.I))
    bad = len(re.findall(r"^not ok\b(?!.*# SKIP)", out, re.M | re.I))
    if status != 0 and bad == 0:  # crashed, or reported no failure
        bad = 1
    if status == 0 and good + skips == 0:
        bad, out = 1, out + "\nno test reported\n"
    return good, bad, skips, out, time.monotonic() - start, cpu


def name_of(program):
    return re.sub(r"^.*?tests/", "", program)


def report(program, result, parallel):
    good, bad, skips, out, wall, cpu = result
    print(f"{'FAIL' if bad else 'ok':4}  {name_of(program):36} {good:4} passed{f', {bad} failed' if bad else ''}"
          f"{f', {skips} skipped' if skips else ''}  {cpu if parallel else wall:.1f} s", flush=True)
    if bad:
        print(out, flush=True)
    else:
        for line in re.findall(r"^skip: .*$", out, re.M):
            print("      " + line, flush=True)


def main():
    strict = os.environ.get("SOOTH_STRICT") == "1"
    jobs = int(os.environ.get("SOOTH_TEST_JOBS", "1"))
    programs, results = sys.argv[1:], {}
    folder = {p: name_of(p).split("/")[0] for p in programs}
    untimed = sorted((p for p in programs if folder[p] in UNTIMED), key=lambda p: UNTIMED.index(folder[p]))
    for group, at_once in (untimed, max(jobs, 2)), ([p for p in programs if p not in untimed], jobs):
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            running = {pool.submit(run, p): p for p in group}
            for done in concurrent.futures.as_completed(running):
                results[running[done]] = done.result()
                report(running[done], done.result(), at_once > 1)
    good, failed, skipped = (sum(r[i] for r in results.values()) for i in range(3))
    slow = sorted(programs, key=lambda p: -results[p][5])[:SLOWEST]
    print("slowest, processor time: " + ", ".join(f"{name_of(p)} {results[p][5]:.0f} s" for p in slow))
    print(f"tests: {good + failed} run, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed or (strict and skipped) or good + failed == 0 else 0)


main()
