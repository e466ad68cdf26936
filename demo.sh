#!/bin/sh
# Installs missing packages, builds, and answers one prompt twice: with plain decoding and with speculation. Once the packages
# are installed it needs no network, unless models/story is missing: then it fetches a small model once (98 MB).
#   ./demo.sh [options of `sooth demo`], for example  ./demo.sh -p "Why is the sea blue?" --temp 0.7 --seed 1
set -eu
cd "$(dirname "$0")"
. tools/packages.sh
need $BUILD_PACKAGES
make -s -j"$(nproc)" all
if ! ls models/story/*.gguf >/dev/null 2>&1; then
    need $PULL_PACKAGES
    build/sooth pull smollm2
fi
exec build/sooth demo "$@"
