#!/bin/sh
# Live checks: fetches the three known models (1.5 GB in all, once), then runs the tests that use real models, where a
# skip counts as a failure, lets each model answer, and with the smallest checks that speculation changes no token:
# the quick grid (make grid is the whole one), that company and preemption change none either (make load), and that `prove` notices when speculation is broken on purpose.
# SOOTH_LIVE="smollm2" takes fewer models.
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
case " $models " in *" smollm2 "*) ;; *) exit 0 ;; esac
SOOTH_STRICT=1 make -s grid GRID=--quick
SOOTH_STRICT=1 make -s load
for mutant in accept_all keep_row move_tail constant_seed drop_position; do
    if SOOTH_DEBUG=mutant=$mutant build/obj/*-cc/sooth-mutants prove -m smollm2 -n 6 > /dev/null 2>&1; then
        echo "failed: prove did not notice $mutant"; exit 1
    fi
    echo "ok: prove notices $mutant"
done
