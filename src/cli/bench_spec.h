/* `sooth bench spec`. */
#ifndef SO_CLI_BENCH_SPEC_H
#define SO_CLI_BENCH_SPEC_H

#include "cli/options.h"

int so_bench_spec(const so_args *a);

#endif
