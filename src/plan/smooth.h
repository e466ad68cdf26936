/* The planner's running mean: the first values count equally, later ones have a fixed weight
 * `part`. */
#ifndef SO_PLAN_SMOOTH_H
#define SO_PLAN_SMOOTH_H

#include "base/mem.h"

/* Zero-initialise. */
typedef struct so_mean {
    double value;
    int n; /* number of values */
} so_mean;

static inline void so_smooth(so_mean *m, double x, double part) {
    m->n += m->n < 1 << 30;
    part = SO_MAX(part, 1.0 / m->n);
    m->value += part * (x - m->value);
}

/* For times, so that one interruption does not distort the mean: after four values a new value is
 * limited to three times the mean. */
static inline void so_smooth_time(so_mean *m, double ms, double part) {
    if (m->n >= 4 && m->value > 0)
        ms = SO_MIN(ms, m->value * 3);
    so_smooth(m, ms, part);
}

#endif
