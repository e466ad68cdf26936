/* sums.h for AVX2. */
#include "verify/cpu/sums_body.h"

const so_sums_fns so_sums_avx2 = {mass, residual};
