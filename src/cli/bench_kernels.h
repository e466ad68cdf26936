/* `sooth bench kernels`. */
#ifndef SO_CLI_BENCH_KERNELS_H
#define SO_CLI_BENCH_KERNELS_H

#include "cli/options.h"

int so_bench_kernels(const so_args *a);

#endif
