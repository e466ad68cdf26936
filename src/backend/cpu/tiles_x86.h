/* Tiles: their size must be a constant for their sums to stay in registers. */
#ifndef SO_BACKEND_CPU_TILES_X86_H
#define SO_BACKEND_CPU_TILES_X86_H

#include "base/loops.h"

/* Runs TILE(n) for the constant n that equals `size`, 1 … 12. */
#define TILE_CASES(size, most) \
    switch (size) {            \
        TILE_CASE(1, most)     \
        TILE_CASE(2, most)     \
        TILE_CASE(3, most)     \
        TILE_CASE(4, most)     \
        TILE_CASE(5, most)     \
        TILE_CASE(6, most)     \
        TILE_CASE(7, most)     \
        TILE_CASE(8, most)     \
        TILE_CASE(9, most)     \
        TILE_CASE(10, most)    \
        TILE_CASE(11, most)    \
        TILE_CASE(12, most)    \
    }
#define TILE_CASE(n, most) \
    case n:                \
        if (n <= most)     \
            TILE(n);       \
        break;

/* Tiles of even size: how many of the `left` rows or queries the next one takes. */
INLINE int tile_size(int left, int most) {
    int tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

#endif
