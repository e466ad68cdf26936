/* Learning and reading of t(n) (curve.h has the model).
 *
 * The line around a knot is a least-squares fit to the knots near it on a logarithmic scale of n,
 * weighted by the passes seen there and by relative error. A tenth per row enters the fit as a weak
 * measurement at every knot: it decides where there is no other. Noise makes values cross: runs
 * that fall are pooled to their weighted mean (pool adjacent violators). All of it is made again
 * after each observation, in a few microseconds, so that reading is one interpolation. One thread.
 */
#include "draft/curve.h"

#include <math.h>

#include "base/mem.h"

static const int KNOTS[SO_CURVE_KNOTS] = {1,  2,  3,  4,   5,   6,   7,   8,   9,   10,  11, 12,
                                          13, 14, 15, 16,  17,  20,  24,  28,  32,  40,  48, 56,
                                          64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512};
static const double FIRST_SLOPE = 0.1;  /* of t(1), per row, where nothing was measured */
static const double FIRST_WEIGHT = 0.1; /* passes that this guess is worth, per knot */
static const double LINE_WEIGHT = 3;    /* passes that the line is worth at its knot */
static const double REACH = 0.5;        /* of the fit: standard deviation of log n */
static const double GAIN = 0.3;         /* of the scale */
static const double MAX_WEIGHT = 64, TRUSTED = 4, IMPORT_WEIGHT = 4;

static double clamp(double x, double lo, double hi) { return x < lo ? lo : SO_MIN(x, hi); }

static double first_ratio(int n) { return 1 + FIRST_SLOPE * (n - 1); }

static int nearest_knot(int n) {
    int k = 0;
    while (k + 1 < SO_CURVE_KNOTS && KNOTS[k + 1] - n <= n - KNOTS[k])
        k++;
    return k;
}

/* shape(1) as far as the lowest measured knot tells. */
static double guess_one(const so_curve *c) {
    int k = 0;
    while (!(c->weight[k] > 0))
        k++;
    return c->shape[k] / first_ratio(KNOTS[k]);
}

/* exp(−x²/2) is 1/(1 + x²/2)² to within what matters here, without a call. */
static double nearness(int i, int j) {
    double ratio = (double)KNOTS[SO_MAX(i, j)] / KNOTS[SO_MIN(i, j)] - 1;
    double x = ratio / (1 + ratio / 2) / REACH; /* log ratio, near enough */
    double y = 1 + x * x / 2;
    return 1 / (y * y);
}

/* The line around knot i, at the knot. */
static double fit(const so_curve *c, int i, double one) {
    double sw = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
    for (int j = 0; j < SO_CURVE_KNOTS; j++) {
        double first = one * first_ratio(KNOTS[j]), near = nearness(i, j);
        double w = c->weight[j] + FIRST_WEIGHT;
        double y = (c->weight[j] * c->shape[j] + FIRST_WEIGHT * first) / w;
        double x = KNOTS[j] - KNOTS[i];
        w *= near / (y * y);
        sw += w;
        sx += w * x;
        sy += w * y;
        sxx += w * x * x;
        sxy += w * x * y;
    }
    double det = sw * sxx - sx * sx;
    double slope = det > 0 ? SO_MAX((sw * sxy - sx * sy) / det, 0) : 0;
    return (sy - slope * sx) / sw;
}

/* Makes knot_ms rise. */
static void pool(so_curve *c) {
    double ms[SO_CURVE_KNOTS], weight[SO_CURVE_KNOTS];
    int last[SO_CURVE_KNOTS], n = 0;
    for (int k = 0; k < SO_CURVE_KNOTS; k++, n++) {
        ms[n] = c->knot_ms[k];
        weight[n] = c->weight[k] + LINE_WEIGHT;
        last[n] = k;
        for (; n > 0 && ms[n - 1] >= ms[n]; n--) {
            double sum = weight[n - 1] + weight[n];
            ms[n - 1] = (ms[n - 1] * weight[n - 1] + ms[n] * weight[n]) / sum;
            weight[n - 1] = sum;
            last[n - 1] = k;
        }
    }
    for (int i = 0, k = 0; i < n; i++)
        for (; k <= last[i]; k++)
            c->knot_ms[k] = ms[i];
}

static void rebuild(so_curve *c) {
    double one = guess_one(c);
    for (int k = 0; k < SO_CURVE_KNOTS; k++) {
        double w = c->weight[k], line = fit(c, k, one);
        c->knot_ms[k] = c->scale * (w * c->shape[k] + LINE_WEIGHT * line) / (w + LINE_WEIGHT);
    }
    pool(c);
}

static double median3(const double v[3]) {
    return SO_MAX(SO_MIN(v[0], v[1]), SO_MIN(SO_MAX(v[0], v[1]), v[2]));
}

/* What of an error, as a logarithm, is the scale's goes there; gives the rest. The median of three
 * passes tells a busy minute from a hiccup. */
static double move_scale(so_curve *c, double error) {
    c->errors[c->n_errors++ % 3] = error;
    double common = median3(c->errors);
    c->scale *= exp(GAIN * common);
    for (int i = 0; i < 3; i++)
        c->errors[i] -= GAIN * common;
    return error - common;
}

void so_curve_observe(so_curve *c, int n, double ms) {
    if (n < 1 || n > SO_CURVE_MAX || !(ms > 0) || !isfinite(ms))
        return;
    int k = nearest_knot(n);
    bool first = !(c->scale > 0);
    double ratio = first ? first_ratio(KNOTS[k]) / first_ratio(n)
                         : so_curve_ms(c, KNOTS[k]) / so_curve_ms(c, n);
    ms *= ratio; /* as if it had been the knot's number of rows */
    if (first) {
        c->scale = 1;
        c->shape[k] = ms;
    } else if (!(c->weight[k] > 0)) {
        double expected = c->knot_ms[k];
        c->shape[k] = clamp(ms, expected / 2, expected * 2) / c->scale;
    } else {
        double error = clamp(log(ms / (c->scale * c->shape[k])), -1, 1);
        if (c->weight[k] >= TRUSTED)
            error = move_scale(c, error);
        c->shape[k] *= exp(clamp(error, -0.3, 0.3) / (c->weight[k] + 1));
    }
    c->weight[k] = SO_MIN(c->weight[k] + 1, MAX_WEIGHT);
    rebuild(c);
}

double so_curve_ms(const so_curve *c, int n) {
    const double *ms = c->knot_ms;
    int k = 0;
    if (!(c->scale > 0))
        return 0;
    n = SO_MAX(n, 1);
    if (n <= 17)
        return ms[n - 1];
    while (k + 2 < SO_CURVE_KNOTS && KNOTS[k + 1] < n)
        k++; /* past the last knot the last piece goes on */
    return ms[k] + (ms[k + 1] - ms[k]) * (n - KNOTS[k]) / (KNOTS[k + 1] - KNOTS[k]);
}

int so_curve_export(const so_curve *c, so_curve_point *points, int cap) {
    int n = 0;
    for (int k = 0; k < SO_CURVE_KNOTS && n < cap; k++)
        if (c->weight[k] > 0)
            points[n++] = (so_curve_point){KNOTS[k], c->scale * c->shape[k], c->weight[k]};
    return n;
}

int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err) {
    for (int i = 0; i < n; i++)
        if (points[i].n < 1 || points[i].n > SO_CURVE_MAX || !(points[i].ms > 0) ||
            !(points[i].ms < 1e9) || !(points[i].weight > 0))
            return so_err_set(err, SO_EINVAL, "cost curve: %g ms for %d rows, weight %g",
                              points[i].ms, points[i].n, points[i].weight);
    *c = (so_curve){.scale = n > 0 ? 1 : 0};
    for (int i = 0; i < n; i++) {
        int k = nearest_knot(points[i].n);
        c->shape[k] = points[i].ms;
        c->weight[k] = SO_MIN(points[i].weight, IMPORT_WEIGHT);
    }
    if (n > 0)
        rebuild(c);
    return 0;
}
