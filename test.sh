#!/bin/sh
# Installs what is missing, builds, and runs every test that CI runs: unit and golden tests, the same
# under three sanitizers, lint, and the live checks that need only models from PyPI.
# SOOTH_STRICT=1 fails on a skip. One suite alone: make help.
set -eu
cd "$(dirname "$0")"
. tools/packages.sh
need $BUILD_PACKAGES $TEST_PACKAGES $PULL_PACKAGES
jobs=$(nproc)
make -s -j"$jobs" all tests
make -s test
make -s lint
