/* The instruction levels of this CPU, and which of them kernels use. A level stands for a set of
 * kernels compiled with its own flags; all levels give the same bits (tested with ==), so a forced
 * level is for debugging and does not change any result. Any thread. */
#ifndef SO_BASE_CPU_H
#define SO_BASE_CPU_H

#include <stdbool.h>

typedef enum so_cpu_level {
    SO_CPU_AUTO = -1,
    SO_CPU_SCALAR = 0,
    SO_CPU_AVX2 = 1,    /* with FMA and F16C */
    SO_CPU_AVXVNNI = 2, /* AVX2 with 256-bit VNNI */
    SO_CPU_AVX512 = 3,  /* with VNNI */
    SO_CPU_AMX = 4,     /* AVX-512 with int8 tiles and GFNI */
    SO_CPU_LEVELS = 5,
} so_cpu_level;

/* Whether this CPU has it. A higher level does not imply all lower ones: AVXVNNI implies AVX2, AMX
 * implies AVX512, and AVX512 implies AVX2. */
bool so_cpu_level_usable(so_cpu_level level);
so_cpu_level so_cpu_best_level(void);
const char *so_cpu_level_name(so_cpu_level level);
bool so_cpu_level_parse(const char *name, so_cpu_level *out); /* scalar … amx, auto */

/* The level of all kernels that belong to no backend (sample/, verify/): the one set last, or the
 * best. A process-wide setting, because those kernels are called without any object that could
 * carry it. The level must be usable; SO_CPU_AUTO goes back to the best. */
void so_cpu_level_set(so_cpu_level level);
so_cpu_level so_cpu_level_in_use(void); /* never SO_CPU_AUTO */

/* The CPU's own name for itself, NUL-terminated. */
enum { SO_CPU_NAME_MAX = 49 };
void so_cpu_name(char out[SO_CPU_NAME_MAX]);

#endif
