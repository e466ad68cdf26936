/* The Kalman filter of curve.h.
 *
 * State: log t at each knot. Before a pass, the covariance grows by SO_TUNE_SPEED_DRIFT² in every
 * entry (the machine's speed) and by SO_TUNE_RATIO_DRIFT times the prior covariance of the ratios
 * between widths. A pass at knot k then moves all knots by their covariance with k. A width
 * between two knots is converted to the nearer one by the ratio of the current curve. Innovations
 * beyond three deviations are clipped: a page fault is one spike, a new speed repeats. Noise can
 * make the estimates decrease from knot to knot: such runs are pooled to their mean (pool adjacent
 * violators). A few thousand operations per pass. Thread: the engine thread. */
#include "plan/curve.h"

#include <math.h>

#include "base/mem.h"
#include "plan/tuning.h"

static const int KNOTS[SO_CURVE_KNOTS] = {1,  2,  3,  4,   5,   6,   7,   8,   9,   10,  11, 12,
                                          13, 14, 15, 16,  17,  20,  24,  28,  32,  40,  48, 56,
                                          64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512};

static double clamp(double x, double lo, double hi) { return x < lo ? lo : SO_MIN(x, hi); }

static int nearest_knot(int n) {
    int k = 0;
    while (k + 1 < SO_CURVE_KNOTS && KNOTS[k + 1] - n <= n - KNOTS[k])
        k++;
    return k;
}

static double prior_log(int n) { return log(1 + SO_TUNE_ROW_SLOPE * (n - 1)); }

/* Derivative of log t at a knot with respect to the cost of a row. */
static double slope_effect(int knot) {
    int n = KNOTS[knot] - 1;
    return n / (1 + SO_TUNE_ROW_SLOPE * n);
}

/* Prior covariance of the ratios between widths: the slope is common to all of them, so that
 * measured widths predict the next ones; in addition each step from knot to knot may differ. */
static double ratio_cov(double effect_i, double effect_j, int n_steps) {
    double slope = SO_TUNE_SLOPE_SPREAD * SO_TUNE_SLOPE_SPREAD;
    return slope * effect_i * effect_j + SO_TUNE_ROW_STEP * SO_TUNE_ROW_STEP * n_steps;
}

static void init(so_curve *c, double log_one, double spread) {
    c->noise = SO_TUNE_NOISE * SO_TUNE_NOISE;
    for (int i = 0; i < SO_CURVE_KNOTS; i++) {
        c->log_ms[i] = log_one + prior_log(KNOTS[i]);
        for (int j = 0; j < SO_CURVE_KNOTS; j++)
            c->cov[i][j] =
                spread * spread + ratio_cov(slope_effect(i), slope_effect(j), SO_MIN(i, j));
    }
}

static void add_drift(so_curve *c) {
    double effect[SO_CURVE_KNOTS], speed = SO_TUNE_SPEED_DRIFT * SO_TUNE_SPEED_DRIFT;
    for (int i = 0; i < SO_CURVE_KNOTS; i++)
        effect[i] = slope_effect(i);
    for (int i = 0; i < SO_CURVE_KNOTS; i++)
        for (int j = 0; j < SO_CURVE_KNOTS; j++)
            c->cov[i][j] +=
                speed + SO_TUNE_RATIO_DRIFT * ratio_cov(effect[i], effect[j], SO_MIN(i, j));
}

/* A measurement of log ms at knot k with variance `noise`. */
static void update(so_curve *c, int k, double innovation, double noise) {
    double column[SO_CURVE_KNOTS], sum = c->cov[k][k] + noise;
    for (int i = 0; i < SO_CURVE_KNOTS; i++)
        column[i] = c->cov[i][k];
    for (int i = 0; i < SO_CURVE_KNOTS; i++) {
        c->log_ms[i] += column[i] / sum * innovation;
        for (int j = 0; j < SO_CURVE_KNOTS; j++)
            c->cov[i][j] -= column[i] * column[j] / sum;
    }
}

/* Standard error of log t at knot k relative to the width of the latest pass: the machine's speed,
 * which is common to both, cancels. */
static double std_error(const so_curve *c, int k) {
    int last = c->last;
    double var = c->cov[k][k] + c->cov[last][last] - 2 * c->cov[k][last];
    return sqrt(SO_MAX(var, 0));
}

double so_curve_std_error(const so_curve *c, int n) {
    return c->noise > 0 ? std_error(c, nearest_knot(n)) : 0;
}

/* A width that is not known well is assumed to be slightly cheaper than likely. Otherwise a width
 * that once seemed expensive would never be tried again. */
static double optimistic_log(const so_curve *c, int k) {
    return c->log_ms[k] - SO_MIN(SO_TUNE_OPTIMISM * std_error(c, k), SO_TUNE_OPTIMISM_MAX);
}

/* Makes knot_ms non-decreasing. */
static void pool(so_curve *c) {
    double sum[SO_CURVE_KNOTS];
    int count[SO_CURVE_KNOTS], n = 0;
    for (int k = 0; k < SO_CURVE_KNOTS; k++, n++) {
        sum[n] = optimistic_log(c, k);
        count[n] = 1;
        for (; n > 0 && sum[n - 1] * count[n] >= sum[n] * count[n - 1]; n--) {
            sum[n - 1] += sum[n];
            count[n - 1] += count[n];
        }
    }
    for (int i = 0, k = 0; i < n; i++) {
        double ms = exp(sum[i] / count[i]);
        for (int end = k + count[i]; k < end; k++)
            c->knot_ms[k] = ms;
    }
}

void so_curve_observe(so_curve *c, int n, double ms) {
    if (n < 1 || n > SO_CURVE_MAX || !(ms > 0) || !isfinite(ms))
        return;
    int k = nearest_knot(n);
    double y = log(ms);
    if (!(c->noise > 0)) {
        init(c, y - prior_log(n), 1);
        update(c, k, 0, c->noise);
    } else {
        y += log(so_curve_ms(c, KNOTS[k]) / so_curve_ms(c, n)); /* converted to the knot's width */
        add_drift(c);
        double expected = c->cov[k][k], error = y - c->log_ms[k];
        double limit = SO_TUNE_OUTLIER * sqrt(expected + c->noise);
        error = clamp(error, -limit, limit);
        update(c, k, error, c->noise);
        double seen = clamp(error * error - expected, SO_TUNE_NOISE_MIN * SO_TUNE_NOISE_MIN,
                            SO_TUNE_NOISE_MAX * SO_TUNE_NOISE_MAX);
        c->noise += SO_TUNE_NOISE_GAIN * (seen - c->noise);
    }
    c->weight[k] = SO_MIN(c->weight[k] + 1, SO_TUNE_POINT_WEIGHT);
    c->last = k;
    pool(c);
}

double so_curve_ms(const so_curve *c, int n) {
    const double *ms = c->knot_ms;
    int k = 0;
    if (!(c->noise > 0))
        return 0;
    n = SO_MAX(n, 1);
    if (n <= 17)
        return ms[n - 1];
    while (k + 2 < SO_CURVE_KNOTS && KNOTS[k + 1] < n)
        k++; /* beyond the last knot the last segment is extended */
    return ms[k] + (ms[k + 1] - ms[k]) * (n - KNOTS[k]) / (KNOTS[k + 1] - KNOTS[k]);
}

int so_curve_export(const so_curve *c, so_curve_point *points, int cap) {
    int n = 0;
    for (int k = 0; k < SO_CURVE_KNOTS && n < cap; k++)
        if (c->weight[k] > 0)
            points[n++] = (so_curve_point){KNOTS[k], exp(c->log_ms[k]), c->weight[k]};
    return n;
}

int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err) {
    for (int i = 0; i < n; i++)
        if (points[i].n < 1 || points[i].n > SO_CURVE_MAX || !(points[i].ms > 0) ||
            !(points[i].ms < 1e9) || !(points[i].weight > 0))
            return so_err_set(err, SO_EINVAL, "cost curve: %g ms for %d rows, weight %g",
                              points[i].ms, points[i].n, points[i].weight);
    *c = (so_curve){0};
    for (int i = 0; i < n; i++) {
        int k = nearest_knot(points[i].n);
        double y = log(points[i].ms), weight = SO_MIN(points[i].weight, SO_TUNE_OLD_POINT_WEIGHT);
        if (i == 0)
            init(c, y - prior_log(points[i].n), 1);
        update(c, k, y - c->log_ms[k], c->noise / weight);
        c->weight[k] = weight;
    }
    if (n > 0)
        pool(c);
    return 0;
}
