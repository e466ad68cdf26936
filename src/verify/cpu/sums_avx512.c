/* sums.h for AVX-512. */
#include "verify/cpu/sums_body.h"

const so_sums_fns so_sums_avx512 = {mass, residual};
