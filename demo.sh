#!/bin/sh
# Installs what is missing, builds, fetches a small real model once (98 MB), and lets it answer.
set -eu
cd "$(dirname "$0")"
. tools/packages.sh
need $BUILD_PACKAGES $PULL_PACKAGES
make -s -j"$(nproc)" all
build/sooth pull smollm2
prompt=${1:-"Why does the sea look blue? Answer in three sentences."}
echo "> $prompt"
build/sooth run -m smollm2 -p "$prompt" -n 128 --temp 0 -v
