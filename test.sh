#!/bin/sh
# Installs what is missing, builds, and runs every test that CI runs: all tests, with a real model where it can be
# fetched; lint; those that read files and text, and those of the engine and the drafters, under the address and
# undefined-behaviour sanitizers, those with threads under the thread sanitizer.
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
say "a real client"
python3 -m pip install -q --disable-pip-version-check --target build/python openai ||
    echo "skip: openai cannot be fetched here; tests that need it will say so"
export PYTHONPATH="$PWD/build/python${PYTHONPATH:+:$PYTHONPATH}"
say "tests"
make -s test
say "a real model with every drafter: every token as without speculation (make grid: all of it)"
make -s grid GRID=--quick
say "lint"
make -s lint
say "what reads files and text, the engine and the drafters, under the address and undefined-behaviour sanitizers (make check-san: all)"
checked=$(echo tests/base/test_*.c tests/format/test_*.c tests/token/test_*.c tests/kv/test_*.c tests/draft/test_*.c tests/plan/test_*.c tests/engine/test_*.c \
    tests/verify/test_verify.c tests/model/test_load.c tests/model/test_hparams.c tests/model/test_pass.c tests/server/test_serve.c)
make -s -j"$jobs" SAN=address,undefined KERNELS=plain TESTS="$checked" tests
SOOTH_TEST_JOBS=$jobs make -s KERNELS=plain TESTS="$checked" check-san
say "what has threads, under the thread sanitizer (make check-tsan: all)"
threaded="tests/base/test_pool.c tests/backend/test_backend.c tests/engine/test_engine.c tests/engine/test_sooth.c tests/server/test_serve.c"
make -s -j"$jobs" SAN=thread TESTS="$threaded" tests
make -s TESTS="$threaded" check-tsan
say "all passed"
