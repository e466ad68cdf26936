/* The arithmetic of compare.h. The ratio is that of sums, not a mean of ratios: in a period of eight
 * rounds the number of tokens varies by a quarter, and a mean of logarithms would favour plain decoding,
 * whose number does not vary. The logarithms only give the scatter. */
#include "plan/compare.h"

#include <math.h>

#include "base/mem.h"
#include "plan/tuning.h"

static so_compare_pair *pair_of(so_compare *c, so_method a, so_method b) {
    return &c->pairs[SO_MIN(a, b)][SO_MAX(a, b)];
}

double so_compare_ratio(const so_compare *c, so_method a, so_method b, double *error) {
    const so_compare_pair *p = &c->pairs[SO_MIN(a, b)][SO_MAX(a, b)];
    const so_compare_side *x = &p->side[a > b], *y = &p->side[a < b];
    *error = INFINITY;
    if (!(p->n > 0))
        return 0;
    double prior = SO_TUNE_COMPARE_SPREAD * SO_TUNE_COMPARE_SPREAD;
    double mean = p->log_sum / p->n;
    double squares = SO_MAX(p->log_squares - p->n * mean * mean, 0);
    double variance = (squares + SO_TUNE_COMPARE_PRIOR * prior) / (p->n + SO_TUNE_COMPARE_PRIOR);
    *error = sqrt(variance / p->n);
    return x->tokens / x->ms / (y->tokens / y->ms);
}

static void add_side(so_compare_side *to, const so_compare_side *x) {
    to->tokens += x->tokens;
    to->ms += x->ms;
}

static void scale(so_compare_pair *p, double by) {
    double *sums[] = {&p->side[0].tokens, &p->side[0].ms, &p->side[1].tokens, &p->side[1].ms, &p->n,
                      &p->log_sum,        &p->log_squares};
    for (size_t i = 0; i < SO_LEN(sums); i++)
        *sums[i] *= by;
}

/* Forgets half of a pair's record if the unused method did much better than the record says: conditions may
 * have changed. Scatter alone causes this in one pair out of six. */
static void forget_if_surprised(const so_compare *c, so_compare_pair *p, double ratio) {
    double sign = c->current == c->base ? 0 : c->current < c->base ? 1 : -1;
    double mean = p->log_sum / p->n;
    if (p->n > SO_TUNE_COMPARE_FIRST && sign * (ratio - mean) > SO_TUNE_COMPARE_SPREAD)
        scale(p, 0.5);
}

/* The method has changed: this period and the one before are a pair. */
static void add_pair(so_compare *c) {
    so_compare_pair *p = pair_of(c, c->before_method, c->current);
    bool swapped = c->before_method > c->current;
    const so_compare_side *low = swapped ? &c->now : &c->before;
    const so_compare_side *high = swapped ? &c->before : &c->now;
    double ratio = log(low->tokens / low->ms / (high->tokens / high->ms));
    forget_if_surprised(c, p, ratio);
    add_side(&p->side[0], low);
    add_side(&p->side[1], high);
    p->n++;
    p->n_ever += p->n_ever < SO_TUNE_COMPARE_FIRST;
    p->log_sum += ratio;
    p->log_squares += ratio * ratio;
}

static void fade(so_compare *c) {
    for (int a = 0; a < SO_METHODS; a++)
        for (int b = a + 1; b < SO_METHODS; b++)
            scale(&c->pairs[a][b], SO_TUNE_COMPARE_KEEP);
}

/* The method that may be faster than the base by the most; the base if none may. */
static so_method challenger(const so_compare *c, const bool may[SO_METHODS]) {
    so_method best = c->base;
    double most = 1;
    for (so_method m = 0; m < SO_METHODS; m++) {
        double error, ratio = m == c->base ? 0 : so_compare_ratio(c, m, c->base, &error);
        if (m == c->base || !may[m])
            continue;
        double bound = ratio * exp(SO_TUNE_COMPARE_HOPE * error);
        int n_pairs = c->pairs[SO_MIN(m, c->base)][SO_MAX(m, c->base)].n_ever;
        if (n_pairs < SO_TUNE_COMPARE_FIRST || c->unused[m] >= SO_TUNE_COMPARE_UNUSED)
            bound = INFINITY;
        if (bound > most) {
            best = m;
            most = bound;
        }
    }
    return best;
}

/* The base of the next period: the current method if it was measured to be faster. */
static void choose_base(so_compare *c, const bool may[SO_METHODS]) {
    double error, ratio = so_compare_ratio(c, c->current, c->base, &error);
    bool is_faster = c->current != c->base && ratio > 1 + SO_TUNE_COMPARE_PROOF * error;
    if (!may[c->base] || is_faster)
        c->base = may[c->current] ? c->current : SO_METHOD_AHEAD;
}

static int period(const so_compare *c) {
    return SO_TUNE_COMPARE_PERIOD / 2 + (int)((c->random >> 16) % (SO_TUNE_COMPARE_PERIOD + 1));
}

void so_compare_observe(so_compare *c, double tokens, double ms, const bool may[SO_METHODS]) {
    if (!(tokens > 0) || !(ms > 0) || !isfinite(tokens) || !isfinite(ms))
        return;
    if (c->n_now == 0 && c->n_before > 0 && c->before_method != c->current &&
        c->settled_ms < SO_TUNE_COMPARE_SETTLE_MS) {
        c->settled_ms += ms;
        return;
    }
    /* An interruption of the machine says nothing about the method. */
    if (c->n_now > 0)
        ms = SO_MIN(ms, SO_TUNE_COMPARE_SPIKE * c->now.ms / c->n_now);
    else if (c->n_before > 0)
        ms = SO_MIN(ms, SO_TUNE_COMPARE_SPIKE * c->before.ms / c->n_before);
    add_side(&c->now, &(so_compare_side){tokens, ms});
    if (++c->n_now < period(c))
        return;
    c->random = c->random * 1664525 + 1013904223;
    fade(c);
    if (c->n_before > 0 && c->before_method != c->current)
        add_pair(c);
    bool was_base = c->current == c->base;
    for (so_method m = 0; m < SO_METHODS; m++)
        c->unused[m] = m == c->current ? 0 : c->unused[m] + 1;
    choose_base(c, may);
    c->before_method = c->current;
    c->before = c->now;
    c->n_before = c->n_now;
    c->current = was_base || c->current == c->base ? challenger(c, may) : c->base;
    c->now = (so_compare_side){0};
    c->n_now = 0;
    c->settled_ms = 0;
}

/* --- between runs --- */

bool so_compare_keep(const so_compare *c, so_compare_kept *out) {
    bool any = false;
    out->base = c->base;
    for (int a = 0; a < SO_METHODS; a++)
        for (int b = a + 1; b < SO_METHODS; b++) {
            const so_compare_pair *p = &c->pairs[a][b];
            so_compare_kept_pair *k = &out->pairs[a][b];
            *k = (so_compare_kept_pair){0};
            if (!(p->n >= SO_TUNE_COMPARE_FIRST / 2.0))
                continue;
            double scale = SO_MIN(SO_TUNE_COMPARE_KEPT / p->n, 1.0), mean = p->log_sum / p->n;
            *k = (so_compare_kept_pair){.n = p->n * scale,
                                        .ratio = exp(mean),
                                        .scatter = SO_MAX(p->log_squares / p->n - mean * mean, 0)};
            for (int i = 0; i < 2; i++)
                k->side[i] = (so_compare_side){p->side[i].tokens * scale, p->side[i].ms * scale};
            any = true;
        }
    return any;
}

void so_compare_resume(so_compare *c, const so_compare_kept *k) {
    for (int a = 0; a < SO_METHODS; a++)
        for (int b = a + 1; b < SO_METHODS; b++) {
            const so_compare_kept_pair *from = &k->pairs[a][b];
            if (!(from->n > 0))
                continue;
            double mean = log(from->ratio);
            c->pairs[a][b] = (so_compare_pair){
                .side = {from->side[0], from->side[1]},
                .n = from->n,
                .log_sum = from->n * mean,
                .log_squares = from->n * (from->scatter + mean * mean),
                .n_ever = SO_TUNE_COMPARE_FIRST,
            };
        }
    c->base = c->current = k->base;
    for (int m = 0; m < SO_METHODS; m++) { /* short runs, too, measure an unused method some time */
        c->random = c->random * 1664525 + 1013904223;
        c->unused[m] = (int)((c->random >> 16) % SO_TUNE_COMPARE_UNUSED);
    }
}
