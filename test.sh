#!/bin/sh
# Installs what is missing, builds, and runs every test that CI runs: all tests, with a real model where it can be
# fetched; lint; the same tests under the address and undefined-behaviour sanitizers, and under the thread sanitizer.
# SOOTH_STRICT=1 fails on a skip. One suite alone: make help.
set -eu
cd "$(dirname "$0")"
. tools/packages.sh
need $BUILD_PACKAGES $TEST_PACKAGES $PULL_PACKAGES
jobs=$(nproc)
say() { printf '\n== %s\n' "$1"; }

say "build"
make -s -j"$jobs" all tests
say "a real model"
build/sooth pull smollm2 || echo "skip: smollm2 cannot be fetched here; tests that need it will say so"
say "tests"
make -s test
say "lint"
make -s lint
say "tests under the address and undefined-behaviour sanitizers"
make -s -j"$jobs" SAN=address,undefined tests
make -s check-san
say "tests of what has threads, under the thread sanitizer (make check-tsan runs all)"
threaded="base backend engine"
make -s -j"$jobs" SAN=thread TEST_DIRS="$threaded" tests
make -s TEST_DIRS="$threaded" check-tsan
say "all passed"
