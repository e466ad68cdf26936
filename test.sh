#!/bin/sh
# Installs missing packages, builds, and runs every test that CI runs:
#   - all tests, with a real model if it can be fetched;
#   - the tests of drafts and passes on a backend that computes as late as a GPU;
#   - lint;
#   - the tests of parsers, the cache, the engine and the drafters under the address and undefined-behaviour sanitizers;
#   - the tests with threads under the thread sanitizer.
# SOOTH_STRICT=1 makes a skipped test a failure. `make help` lists the single suites.
set -eu
cd "$(dirname "$0")"
. tools/packages.sh
need $BUILD_PACKAGES $TEST_PACKAGES $PULL_PACKAGES
jobs=$(nproc)
say() { printf '\n== %s\n' "$1"; }

say "build"
make -s -j"$jobs" all tests
say "a real model"
build/sooth pull smollm2 || echo "skip: smollm2 cannot be fetched here; tests that need it are skipped"
say "a real client"
python3 -m pip install -q --disable-pip-version-check --target build/python openai ||
    echo "skip: openai cannot be fetched here; tests that need it are skipped"
export PYTHONPATH="$PWD/build/python${PYTHONPATH:+:$PYTHONPATH}"
say "tests"
make -s test
say "drafts and passes on a backend that computes as late as a GPU (SOOTH_DEVICE=cuda: on a GPU)"
late="tests/model/test_pass.c tests/draft/test_model_tree.c tests/engine/test_spec.c tests/engine/test_drafts.c tests/engine/test_faults.c \
    tests/engine/test_nonfinite.c tests/engine/test_hidden_states.c tests/engine/test_device_sampling.c"
SOOTH_DEVICE=deferred make -s TESTS="$late" TEST_SCRIPTS= test
say "a real model with every drafter: the same tokens as without speculation (the whole grid: make grid)"
make -s grid GRID=--quick
say "lint"
make -s lint
say "parsers, cache, engine and drafters under the address and undefined-behaviour sanitizers (all tests: make check-san)"
checked=$(echo tests/base/test_*.c tests/format/test_*.c tests/token/test_*.c tests/kv/test_*.c tests/draft/test_*.c tests/plan/test_*.c tests/engine/test_*.c \
    tests/verify/test_verify.c tests/model/test_load.c tests/model/test_hparams.c tests/model/test_pass.c tests/server/test_serve.c)
make -s -j"$jobs" SAN=address,undefined KERNELS=plain TESTS="$checked" tests
SOOTH_TEST_JOBS=$jobs make -s KERNELS=plain TESTS="$checked" check-san
say "tests with threads under the thread sanitizer (all tests: make check-tsan)"
threaded="tests/base/test_pool.c tests/backend/test_backend.c tests/engine/test_engine.c tests/engine/test_sooth.c tests/server/test_serve.c"
make -s -j"$jobs" SAN=thread TESTS="$threaded" tests
make -s TESTS="$threaded" check-tsan
say "all passed"
