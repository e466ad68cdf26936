#!/bin/sh
# Builds libsooth_cuda.so: cuda.sh OUT [ARCH…], e.g. cuda.sh build/libsooth_cuda.so 90. Objects go to OUT's folder/cuda. CUDA_FLAGS: more flags for nvcc.
set -eu
out=$1
shift
dir=$(dirname "$out")/cuda
mkdir -p "$dir"
gencode=""
[ $# -gt 0 ] || set -- 90
for a in "$@"; do
    [ "$a" = 90 ] && a=90a && gencode="$gencode -DSO_WGMMA" # instructions that only 9.0 has
    gencode="$gencode -gencode arch=compute_$a,code=sm_$a"
done
flags="-std=c++17 -O3 -Isrc -Xcompiler -fPIC,-fvisibility=hidden $gencode ${CUDA_FLAGS:-}"
[ "$(cat "$dir/flags" 2>/dev/null)" = "$flags" ] || rm -f "$dir"/*.o
echo "$flags" > "$dir/flags"
jobs=""
for f in src/backend/cuda/*.cu; do
    o=$dir/$(basename "$f" .cu).o
    if [ ! -e "$o" ] || [ -n "$(find "$f" src/backend/cuda/*.cuh src/backend/*.h src/base/exact.h src/base/rng.h -newer "$o" 2>/dev/null)" ]; then
        { nvcc $flags -c "$f" -o "$o.new" && mv "$o.new" "$o"; } &
        jobs="$jobs $!"
    fi
done
for j in $jobs; do wait "$j"; done
for f in base/err format/dtype base/str base/mem; do
    ${CC:-cc} -std=c11 -D_GNU_SOURCE -O2 -fPIC -fvisibility=hidden -Isrc -c "src/$f.c" -o "$dir/$(basename $f).o"
done
nvcc -shared -cudart static -o "$out" "$dir"/*.o
