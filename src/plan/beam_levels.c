/* See beam_levels.h. */
#include "plan/beam_levels.h"

#include "base/mem.h"

enum { REFRESH = 40, WARM = 2 };
static const double KEEP = 0.8;     /* weight of what was measured before */
static const double FORGET = 0.995; /* of counts, per pass */

/* An untried level counts as accepted every second time. */
static double chance(const so_beam_levels *b, int level) {
    return (b->accepted[level] + 1) / (b->tested[level] + 2);
}

static double expected_steps(const so_beam_levels *b, int n) {
    double sum = 1, path = 1;
    for (int i = 0; i < n; i++)
        sum += path *= chance(b, i);
    return sum;
}

/* Steps per ms; of a number that was not tried, at most. */
static double rate(const so_beam_levels *b, int n) {
    int known = n;
    while (known > 0 && b->n[known] < WARM)
        known--;
    if (b->n[known] < WARM)
        return 1e300; /* nothing was measured yet */
    return expected_steps(b, n) / SO_MAX(b->ms[known], 1e-6);
}

int so_beam_levels_choose(so_beam_levels *b, int width, int candidates, int most) {
    int best = 0;
    if (b->width != width || b->candidates != candidates)
        *b = (so_beam_levels){.width = width, .candidates = candidates};
    most = SO_MIN(most, SO_BEAM_LEVELS);
    if (b->n[0] < WARM)
        return 0;
    for (int n = 1; n <= most; n++) {
        if (rate(b, n) > rate(b, best))
            best = n;
        if (b->n[n] < WARM)
            break; /* larger ones are tried after this one */
    }
    if (++b->n_passes % REFRESH == 0) { /* a neighbour, below and above by turns */
        int other = best + (b->n_passes / REFRESH % 2 ? 1 : -1);
        best = other >= 0 && other <= most ? other : best;
    }
    return best;
}

void so_beam_levels_observe(so_beam_levels *b, int n, int tested, int accepted, double ms) {
    if (n > SO_BEAM_LEVELS)
        return;
    for (int i = 0; i < SO_BEAM_LEVELS; i++) {
        b->tested[i] = b->tested[i] * FORGET + (i < tested);
        b->accepted[i] = b->accepted[i] * FORGET + (i < accepted);
    }
    if (ms < 0)
        return;
    b->ms[n] = b->n[n] == 0 ? ms : KEEP * b->ms[n] + (1 - KEEP) * ms;
    b->n[n]++;
}
