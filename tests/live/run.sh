#!/bin/sh
# Live checks: fetches the three known models (1.5 GB in all, once), then runs the tests that use real models, where a
# skip counts as a failure, and lets each model answer. SOOTH_LIVE="smollm2" takes fewer.
set -eu
cd "$(dirname "$0")/../.."
models=${SOOTH_LIVE:-smollm2 gemma3-270m qwen2.5-coder-1.5b}
for m in $models; do
    build/sooth pull "$m" || { echo "skip: $m cannot be fetched here"; exit 0; }
    answer=$(build/sooth run -m "$m" --raw --temp 0 -n 8 -p "The capital of France is the city of")
    case "$answer" in
    *Paris*) echo "ok: $m says: $answer" ;;
    *) echo "failed: $m says: $answer"; exit 1 ;;
    esac
done
make -s tests
SOOTH_BIN=build/sooth SOOTH_STRICT=1 python3 tools/run_tests.py build/obj/*-cc/tests/engine/test_live
