/* Learning and reading of t(n). The table of all n is made again after each observation (a few
 * hundred additions), so that reading is one lookup. Noise makes measured points cross: runs that
 * fall are pooled to their weighted mean (pool adjacent violators). One thread. */
#include "draft/curve.h"

#include <math.h>

#include "base/mem.h"

static const double DEFAULT_SLOPE = 0.1; /* of t(1), per row, where nothing was measured */
static const double MIN_SLOPE = 0.005;
static const double MAX_WEIGHT = 16, TRUSTED = 4, IMPORT_WEIGHT = 2;

typedef struct pool {
    double ms, weight;
    int first, last; /* the measured n it covers */
} pool;

static int make_pools(const so_curve *c, pool *pools) {
    int n_pools = 0;
    for (int n = 1; n <= SO_CURVE_MAX; n++) {
        if (!(c->weight[n] > 0))
            continue;
        pool p = {c->scale * c->shape[n], c->weight[n], n, n};
        while (n_pools > 0 && pools[n_pools - 1].ms >= p.ms) {
            const pool *q = &pools[--n_pools];
            p.ms = (q->ms * q->weight + p.ms * p.weight) / (q->weight + p.weight);
            p.weight += q->weight;
            p.first = q->first;
        }
        pools[n_pools++] = p;
    }
    return n_pools;
}

static void line(so_curve *c, int n0, double ms0, int n1, double ms1) {
    for (int n = n0; n <= n1 && n <= SO_CURVE_MAX; n++)
        c->ms[n] = n1 == n0 ? ms0 : ms0 + (ms1 - ms0) * (n - n0) / (n1 - n0);
}

/* Between measured points the curve is hoped to lie halfway between the straight line and the lower
 * point: real curves have steps (kernels of four rows), and a place that is never thought good is
 * never measured. */
static void hope(so_curve *c, int n0, double ms0, int n1, double ms1) {
    line(c, n0, ms0, n1, ms1);
    for (int n = n0 + 1; n < n1 && n <= SO_CURVE_MAX; n++)
        c->ms[n] = (c->ms[n] + ms0) / 2;
}

static void rebuild(so_curve *c) {
    pool pools[SO_CURVE_MAX];
    int n_pools = make_pools(c, pools);
    if (n_pools == 0)
        return;
    const pool *head = &pools[0], *tail = &pools[n_pools - 1];
    double one = head->ms / (1 + DEFAULT_SLOPE * (head->first - 1));
    line(c, 1, one, head->first, head->ms);
    for (int i = 0; i < n_pools; i++) {
        line(c, pools[i].first, pools[i].ms, pools[i].last, pools[i].ms);
        if (i + 1 < n_pools)
            hope(c, pools[i].last, pools[i].ms, pools[i + 1].first, pools[i + 1].ms);
    }
    /* Past the last point: as steep as from the first point to it. Anything steeper would keep the
     * planner from ever looking there; one look is what being wrong costs. */
    c->slope = DEFAULT_SLOPE * one;
    if (tail->last > head->first)
        c->slope = SO_MAX(MIN_SLOPE * one, (tail->ms - head->ms) / (tail->last - head->first));
    for (int n = tail->last + 1; n <= SO_CURVE_MAX; n++)
        c->ms[n] = tail->ms + c->slope * (n - tail->last);
}

static double clamp(double x, double lo, double hi) { return x < lo ? lo : SO_MIN(x, hi); }

void so_curve_observe(so_curve *c, int n, double ms) {
    if (n < 1 || n > SO_CURVE_MAX || !(ms > 0) || !isfinite(ms))
        return;
    if (!(c->scale > 0))
        c->scale = 1;
    if (!(c->weight[n] > 0)) {
        /* A pass costs no more than its rows one by one: a first measurement past that is noise. */
        double most = c->weight[1] > 0 ? 1.25 * n * c->scale * c->shape[1] : ms;
        c->shape[n] = SO_MIN(ms, most) / c->scale;
    } else {
        double off = clamp(ms / (c->scale * c->shape[n]), 0.7, 1.3) - 1;
        if (c->weight[n] >= TRUSTED)
            c->scale *= 1 + off / 8;
        c->shape[n] *= 1 + off * SO_MAX(1.0 / 16, 1 / (c->weight[n] + 1));
    }
    c->weight[n] = SO_MIN(c->weight[n] + 1, MAX_WEIGHT);
    rebuild(c);
}

double so_curve_ms(const so_curve *c, int n) {
    if (!(c->scale > 0))
        return 0;
    n = SO_MAX(n, 1);
    return n <= SO_CURVE_MAX ? c->ms[n] : c->ms[SO_CURVE_MAX] + c->slope * (n - SO_CURVE_MAX);
}

int so_curve_export(const so_curve *c, so_curve_point *points, int cap) {
    int k = 0;
    for (int n = 1; n <= SO_CURVE_MAX && k < cap; n++)
        if (c->weight[n] > 0)
            points[k++] = (so_curve_point){n, c->scale * c->shape[n], c->weight[n]};
    return k;
}

int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err) {
    for (int i = 0; i < n; i++)
        if (points[i].n < 1 || points[i].n > SO_CURVE_MAX || !(points[i].ms > 0) ||
            !(points[i].ms < 1e9) || !(points[i].weight > 0))
            return so_err_set(err, SO_EINVAL, "cost curve: %g ms for %d rows, weight %g",
                              points[i].ms, points[i].n, points[i].weight);
    *c = (so_curve){.scale = n > 0 ? 1 : 0};
    for (int i = 0; i < n; i++) {
        c->shape[points[i].n] = points[i].ms;
        c->weight[points[i].n] = SO_MIN(points[i].weight, IMPORT_WEIGHT);
    }
    rebuild(c);
    return 0;
}
