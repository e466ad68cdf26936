#!/bin/sh
# Installs what is missing, builds, and answers one prompt twice: plainly and speculatively. Needs no network once the packages
# are there, unless the pair that comes with the program is not in this tree: then a small model is fetched once (98 MB).
#   ./demo.sh [options of `sooth demo`], as in  ./demo.sh -p "Why is the sea blue?" --temp 0.7 --seed 1
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
