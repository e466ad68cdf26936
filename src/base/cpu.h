/* CPU levels: which instruction sets this CPU has, and which one the kernels use.
 *
 * Each level is a set of kernels compiled with its own flags. All levels produce identical bits
 * (tests compare with ==), so forcing a level is a debugging aid and changes no result. Any
 * thread. */
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

/* Whether this CPU supports the level. The levels are not strictly ordered: AVXVNNI and AVX512 both
 * imply AVX2, AMX implies AVX512, but AVX512 does not imply AVXVNNI. */
bool so_cpu_level_usable(so_cpu_level level);
so_cpu_level so_cpu_best_level(void);
const char *so_cpu_level_name(so_cpu_level level);
bool so_cpu_level_parse(const char *name, so_cpu_level *out); /* scalar … amx, auto */

/* The level used by kernels outside the backends (sample/, verify/): the last one set, by default
 * the best. It is process-wide because these kernels are called without an object that could hold
 * it. The level must be usable; SO_CPU_AUTO selects the best. */
void so_cpu_level_set(so_cpu_level level);
so_cpu_level so_cpu_level_in_use(void); /* never SO_CPU_AUTO */

/* The CPU's brand string, NUL-terminated. */
enum { SO_CPU_NAME_MAX = 49 };
void so_cpu_name(char out[SO_CPU_NAME_MAX]);

#endif
