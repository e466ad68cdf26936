/* The arithmetic of record.h. The counts of a cell never exceed SO_TUNE_RECORD_TESTS, so an old
 * record weighs as much as the last few long answers, regardless of the numbers in the file. */
#include "plan/record.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "plan/tuning.h"

void so_records_free(so_records *r) {
    for (int i = 0; i < r->n; i++)
        free(r->items[i]);
    *r = (so_records){0};
}

/* --- names --- */

static void append_mode(so_plan_mode mode, char out[SO_RECORD_NAME]) {
    if (mode > 0)
        snprintf(out + strlen(out), SO_RECORD_NAME - strlen(out), "~%d", (int)mode);
}

bool so_record_model_name(uint64_t id, so_plan_mode mode, char out[SO_RECORD_NAME]) {
    snprintf(out, SO_RECORD_NAME, "model %016llx", (unsigned long long)id);
    append_mode(mode, out);
    return id != 0;
}

bool so_record_name(const so_drafter *d, so_plan_mode mode, char out[SO_RECORD_NAME]) {
    if (d->is_model)
        return so_record_model_name(d->id, mode, out) && d->recorded;
    if (d->id)
        snprintf(out, SO_RECORD_NAME, "%s %016llx", d->vt->name, (unsigned long long)d->id);
    else
        snprintf(out, SO_RECORD_NAME, "%s", d->vt->name);
    append_mode(mode, out);
    return d->recorded;
}

bool so_record_is_name(const char *name) {
    const char *s = name + strspn(name, "abcdefghijklmnopqrstuvwxyz");
    if (s == name || strlen(name) >= SO_RECORD_NAME)
        return false;
    if (*s == ' ' && strspn(s + 1, "0123456789abcdef") == 16)
        s += 17;
    return !*s || strcmp(s, "~1") == 0 || strcmp(s, "~2") == 0;
}

/* --- the list --- */

static int find(const so_records *r, const char *name) {
    for (int i = 0; i < r->n; i++)
        if (strcmp(r->items[i]->name, name) == 0)
            return i;
    return -1;
}

so_record *so_records_find(const so_records *r, const char *name) {
    int i = find(r, name);
    return i < 0 ? NULL : r->items[i];
}

so_record *so_records_touch(so_records *r, const char *name) {
    int at = find(r, name);
    so_record *rec;
    if (at >= 0) {
        rec = r->items[at];
    } else {
        if (r->n == SO_RECORDS_MAX)
            free(r->items[--r->n]);
        at = r->n++;
        rec = SO_NEW(so_record);
        snprintf(rec->name, sizeof rec->name, "%s", name);
    }
    memmove(r->items + 1, r->items, (size_t)at * sizeof *r->items);
    return r->items[0] = rec;
}

/* --- comparisons of methods --- */

const so_compare_kept *so_records_compared(const so_records *r, uint64_t key) {
    for (int i = 0; i < r->n_compared; i++)
        if (r->compared[i].key == key)
            return &r->compared[i];
    return NULL;
}

void so_records_keep(so_records *r, const so_compare_kept *k) {
    so_compare_kept new = *k;
    int at = 0;
    while (at < r->n_compared && r->compared[at].key != k->key)
        at++;
    at = SO_MIN(at, SO_RECORDS_COMPARED - 1);
    r->n_compared = SO_MAX(r->n_compared, at + 1);
    memmove(r->compared + 1, r->compared, (size_t)at * sizeof *r->compared);
    r->compared[0] = new;
}

/* --- counts --- */

enum { CELLS = sizeof(so_accept_table) / sizeof(so_accept_cell) };

static so_accept_cell *cells_of(so_accept_table *t) { return &(*t)[0][0][0]; }

static so_accept_cell limit(so_accept_cell c, float most) {
    float scale = c.tested > most ? most / c.tested : 1;
    return (so_accept_cell){c.accepted * scale, c.tested * scale};
}

/* Scales the counts so that their sum is at most `most`. */
static void limit_counts(const float from[SO_ACCEPT_CLASSES], float most,
                         float to[SO_ACCEPT_CLASSES]) {
    float sum = 0;
    for (int l = 0; l < SO_ACCEPT_CLASSES; l++)
        sum += from[l];
    for (int l = 0; l < SO_ACCEPT_CLASSES; l++)
        to[l] = from[l] * (sum > most ? most / sum : 1);
}

void so_record_set_prior(const so_record *rec, so_accept_shared *shared, int drafter) {
    const so_accept_cell *from = &rec->cells[0][0][0];
    so_accept_cell *to = cells_of(&shared->cells[drafter]);
    for (int i = 0; i < CELLS; i++)
        to[i] = limit(from[i], SO_TUNE_RECORD_PRIOR_TESTS);
    for (int r = 0; r < SO_ACCEPT_RANKS; r++)
        limit_counts(rec->confidences[r], SO_TUNE_RECORD_PRIOR_TESTS,
                     shared->confidences[drafter][r]);
}

void so_record_set_claim(double chance, so_accept_shared *shared, int drafter) {
    shared->cells[drafter][0][0][SO_ACCEPT_CLASSES] =
        (so_accept_cell){(float)chance * SO_TUNE_CLAIM_TESTS, SO_TUNE_CLAIM_TESTS};
}

static so_accept_cell merge(so_accept_cell old, so_accept_cell seen) {
    float keep = SO_MAX(0.0f, 1 - seen.tested / SO_TUNE_RECORD_TESTS);
    so_accept_cell c = {old.accepted * keep + seen.accepted, old.tested * keep + seen.tested};
    return limit(c, SO_TUNE_RECORD_TESTS);
}

void so_record_learn(so_record *rec, so_accept_shared *shared, int drafter) {
    so_accept_cell *kept = cells_of(&rec->cells), *seen = cells_of(&shared->seen[drafter]);
    for (int i = 0; i < CELLS; i++) {
        kept[i] = merge(kept[i], seen[i]);
        seen[i] = (so_accept_cell){0};
    }
    for (int r = 0; r < SO_ACCEPT_RANKS; r++) {
        float *counts = rec->confidences[r], *seen_counts = shared->seen_confidences[drafter][r],
              sum = 0;
        for (int l = 0; l < SO_ACCEPT_CLASSES; l++)
            sum += seen_counts[l];
        for (int l = 0; l < SO_ACCEPT_CLASSES; l++) {
            counts[l] = counts[l] * SO_MAX(0.0f, 1 - sum / SO_TUNE_RECORD_TESTS) + seen_counts[l];
            seen_counts[l] = 0;
        }
        limit_counts(counts, SO_TUNE_RECORD_TESTS, counts);
    }
}
