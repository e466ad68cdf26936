/* SO_OP_SAMPLE in plain C. With a CPU backend the engine samples on the host, in the vector code of
 * sample/ and only where verification arrives, so this is the reference for the GPU and what the
 * deferred backend runs in tests. Same steps as cuda/sample.cu, one row per thread. The invariant
 * is that of backend/sample_row.h: a token, where one is given, is the host's. */
#include <math.h>
#include <stdlib.h>

#include "backend/cpu/cpu.h"
#include "backend/sample_row.h"
#include "base/mem.h"

typedef struct row {
    const so_sample_row *r;
    const float *x;
    int d;
    double top;
} row;

typedef struct bins {
    uint32_t count[SO_SAMPLE_BINS];
    uint64_t mass[SO_SAMPLE_BINS];
    so_sample_entry list[SO_SAMPLE_LIST];
} bins;

static so_sample_entry entry_of(const row *w, int32_t i) {
    return (so_sample_entry){so_exact_y(w->x[i], w->top, w->r->inverse), i};
}

static uint64_t units_of(so_sample_entry e) { return so_sample_units(so_exact_exp((double)e.y)); }

static void fill_bins(const row *w, bins *b) {
    memset(b->count, 0, sizeof b->count);
    memset(b->mass, 0, sizeof b->mass);
    for (int32_t i = 0; i < w->d; i++) {
        so_sample_entry e = entry_of(w, i);
        if (!(e.y > -INFINITY))
            continue;
        b->count[so_sample_bin(e.y)]++;
        if (w->r->top_p < 1)
            b->mass[so_sample_bin(e.y)] += units_of(e);
    }
}

static int in_order(const void *a, const void *b) {
    const so_sample_entry *x = a, *y = b;
    return so_sample_before(*x, *y) ? -1 : so_sample_before(*y, *x);
}

/* Lists the tokens of a bin up to the border, in order. Returns their number, −1 if there are too
 * many. */
static int list_bin(const row *w, bins *b, int bin, so_sample_entry border) {
    int n = 0;
    for (int32_t i = 0; i < w->d; i++) {
        so_sample_entry e = entry_of(w, i);
        if (!(e.y > -INFINITY) || so_sample_bin(e.y) != bin || so_sample_before(border, e))
            continue;
        if (n == SO_SAMPLE_LIST)
            return -1;
        b->list[n++] = e;
    }
    qsort(b->list, (size_t)n, sizeof *b->list, in_order);
    return n;
}

/* top-k. Afterwards `mass` has the masses of the tokens that are left. False: unknown. */
static bool cut_k(const row *w, bins *b, so_sample_entry *border) {
    int64_t k = w->r->top_k, before = 0;
    int bin = 0;
    while (bin < SO_SAMPLE_BINS && before + b->count[bin] < k)
        before += b->count[bin++];
    if (bin == SO_SAMPLE_BINS)
        return true; /* fewer than k tokens have a finite y */
    if (list_bin(w, b, bin, *border) < 0)
        return false;
    *border = b->list[k - before - 1];
    memset(b->mass + bin, 0, (size_t)(SO_SAMPLE_BINS - bin) * sizeof *b->mass);
    for (int i = 0; i < k - before && w->r->top_p < 1; i++)
        b->mass[bin] += units_of(b->list[i]);
    return true;
}

static bool cut_p(const row *w, bins *b, so_sample_entry *border) {
    uint64_t sum = 0, before = 0;
    int bin = 0;
    for (int i = 0; i < SO_SAMPLE_BINS; i++)
        sum += b->mass[i];
    double total = (double)sum, target = so_exact_mul(w->r->top_p, total);
    while (bin < SO_SAMPLE_BINS - 1 && (double)(before + b->mass[bin]) < target)
        before += b->mass[bin++];
    int n = list_bin(w, b, bin, *border);
    for (int i = 0; i < n; i++) {
        uint64_t after = before + units_of(b->list[i]);
        if ((double)after >= target) {
            *border = b->list[i];
            return so_sample_is_certain((double)before, (double)after, target,
                                        so_sample_margin(w->d, total));
        }
        before = after;
    }
    return false;
}

static so_sample_entry find_border(const row *w) {
    so_sample_entry border = so_sample_no_border();
    if (!so_sample_has_border(w->r, w->d))
        return border;
    bins b;
    fill_bins(w, &b);
    bool known = !so_sample_cuts_k(w->r, w->d) || cut_k(w, &b, &border);
    if (known && w->r->top_p < 1)
        known = cut_p(w, &b, &border);
    if (!known)
        border.token = SO_SAMPLE_UNKNOWN;
    return border;
}

static int32_t sample(const row *w, int32_t best) {
    so_sample_entry border = find_border(w);
    so_sample_leader l = so_sample_first(w->r, best);
    if (border.token == SO_SAMPLE_UNKNOWN)
        return SO_SAMPLE_UNKNOWN;
    for (int32_t i = 0; i < w->d; i += 4) {
        uint32_t words[4];
        so_rng_block(&w->r->key, (uint32_t)i / 4, words);
        for (int32_t k = i; k < SO_MIN(i + 4, w->d); k++) {
            so_sample_entry e = entry_of(w, k);
            if (so_sample_keeps(w->r, border, e) && so_sample_may_win(e.y, l))
                so_sample_challenge(&l, e, words[k - i]);
        }
    }
    return l.token;
}

static double mass(const row *w) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < w->d; i++)
        sum += so_sample_units((double)(float)so_exact_exp((double)entry_of(w, i).y));
    return so_sample_mass(sum, w->d);
}

static so_sample_result result_of(const so_sample_row *r, const float *x, int d, int32_t best) {
    so_sample_result out = {.token = best};
    if (best < 0 || r->inverse == 0)
        return out;
    SO_ASSERT(best < d && r->guess < d);
    row w = {r, x, d, (double)x[best]};
    if (!so_sample_weighs(r)) {
        out.token = sample(&w, best);
        return out;
    }
    return (so_sample_result){r->guess >= 0 ? SO_SAMPLE_UNKNOWN : best, x[best],
                              x[so_sample_weighed(r, best)], mass(&w)};
}

void so_cpu_sample(const so_cpu *b, const so_op *op, int index, int count) {
    (void)b;
    const unsigned char *x = op->sample.x.buf->data + op->sample.x.off;
    const int32_t *best = (const void *)(op->sample.best.buf->data + op->sample.best.off);
    const so_sample_row *rows = (const void *)(op->sample.rows.buf->data + op->sample.rows.off);
    so_sample_result *out = (void *)(op->sample.out.buf->data + op->sample.out.off);
    long begin, end;
    so_split(op->n, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++)
        out[i] = result_of(&rows[i], (const float *)(const void *)x + i * op->sample.d,
                           op->sample.d, best[i]);
}
