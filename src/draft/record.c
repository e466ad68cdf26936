/* The arithmetic and the lines of record.h.
 *
 * Counts, not rates, are kept: a run of ten tests must not outvote one of a thousand. Counts of a
 * cell never pass MOST, so an old record weighs as much as the last few long answers, whatever the
 * file says. */
#include "draft/record.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"

static const float MOST = 512, WORTH_WRITING = 0.5f, BELIEVED = 8;
static const double MAX_STEP_MS = 1e6;
static const char *const LASTING[] = {"lookup", "ngram", "corpus"}; /* beside models */

void so_records_free(so_records *r) {
    for (int i = 0; i < r->n; i++)
        free(r->items[i]);
    *r = (so_records){0};
}

static void mark(int way, char out[SO_RECORD_NAME]) {
    if (way > 0)
        snprintf(out + strlen(out), SO_RECORD_NAME - strlen(out), "~%d", way);
}

bool so_record_model_name(uint64_t id, int way, char out[SO_RECORD_NAME]) {
    snprintf(out, SO_RECORD_NAME, "model %016llx", (unsigned long long)id);
    mark(way, out);
    return id != 0;
}

static bool is_lasting(const char *name) {
    for (size_t i = 0; i < SO_LEN(LASTING); i++)
        if (strcmp(name, LASTING[i]) == 0)
            return true;
    return false;
}

bool so_record_name(const so_drafter *d, uint64_t id, int way, char out[SO_RECORD_NAME]) {
    if (strcmp(d->vt->name, "model") == 0)
        return so_record_model_name(id, way, out);
    snprintf(out, SO_RECORD_NAME, "%s", d->vt->name);
    mark(way, out);
    return is_lasting(d->vt->name);
}

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

void so_record_lend(const so_record *rec, so_estimate_shared *shared, int drafter) {
    for (int k = 0; k < SO_ESTIMATE_DEPTHS; k++)
        for (int l = 0; l <= SO_ESTIMATE_LEVELS; l++) {
            so_estimate_cell c = rec->cells[k][l];
            float scale = c.tested > SO_RECORD_LENT ? SO_RECORD_LENT / c.tested : 1;
            shared->cells[drafter][k][l] = (so_estimate_cell){c.accepted * scale, c.tested * scale};
        }
}

void so_record_believe(double chance, so_estimate_shared *shared, int drafter) {
    shared->cells[drafter][0][SO_ESTIMATE_LEVELS] =
        (so_estimate_cell){(float)chance * BELIEVED, BELIEVED};
}

static so_estimate_cell grown(so_estimate_cell old, so_estimate_cell seen) {
    float keep = SO_MAX(0.0f, 1 - seen.tested / MOST);
    so_estimate_cell c = {old.accepted * keep + seen.accepted, old.tested * keep + seen.tested};
    float scale = c.tested > MOST ? MOST / c.tested : 1;
    return (so_estimate_cell){c.accepted * scale, c.tested * scale};
}

void so_record_learn(so_record *rec, so_estimate_shared *shared, int drafter, double step_ms) {
    for (int k = 0; k < SO_ESTIMATE_DEPTHS; k++)
        for (int l = 0; l <= SO_ESTIMATE_LEVELS; l++) {
            rec->cells[k][l] = grown(rec->cells[k][l], shared->seen[drafter][k][l]);
            shared->seen[drafter][k][l] = (so_estimate_cell){0};
        }
    rec->step_ms = step_ms >= 0 && step_ms <= MAX_STEP_MS ? step_ms : 0;
}

void so_records_print(const so_records *r, so_buf *out) {
    for (int i = 0; i < r->n; i++) {
        const so_record *rec = r->items[i];
        so_buf_printf(out, "drafter %s %.6g\n", rec->name, rec->step_ms);
        for (int k = 0; k < SO_ESTIMATE_DEPTHS; k++)
            for (int l = 0; l <= SO_ESTIMATE_LEVELS; l++)
                if (rec->cells[k][l].tested >= WORTH_WRITING)
                    so_buf_printf(out, "%d %d %.4g %.4g\n", k + 1, l,
                                  (double)rec->cells[k][l].accepted,
                                  (double)rec->cells[k][l].tested);
    }
}

/* One line of s into line; what follows it, or NULL where there is none. */
static const char *take_line(const char *s, char *line, size_t cap) {
    const char *end = strchr(s, '\n');
    if (!end || (size_t)(end - s) >= cap)
        return NULL;
    memcpy(line, s, (size_t)(end - s));
    line[end - s] = '\0';
    return end + 1;
}

static bool is_known_name(const char *name) {
    char base[SO_RECORD_NAME];
    size_t len = strlen(name);
    if (len >= sizeof base)
        return false;
    snprintf(base, sizeof base, "%s", name);
    if (len > 2 && base[len - 2] == '~' && (base[len - 1] == '1' || base[len - 1] == '2'))
        base[len - 2] = '\0';
    if (strncmp(base, "model ", 6) == 0)
        return strlen(base) == 22 && strspn(base + 6, "0123456789abcdef") == 16;
    return is_lasting(base);
}

static bool parse_head(char *line, so_records *out) {
    char *name = line + strlen("drafter "), *cut = strrchr(name, ' '), *end;
    if (!cut)
        return false;
    *cut = '\0';
    double ms = strtod(cut + 1, &end);
    if (end == cut + 1 || *end || !(ms >= 0 && ms <= MAX_STEP_MS) || !is_known_name(name) ||
        out->n == SO_RECORDS_MAX || so_records_find(out, name))
        return false;
    out->items[out->n] = SO_NEW(so_record);
    snprintf(out->items[out->n]->name, SO_RECORD_NAME, "%s", name);
    out->items[out->n++]->step_ms = ms;
    return true;
}

static bool parse_cell(const char *line, so_record *rec) {
    int depth, level, used = 0;
    float accepted, tested;
    if (sscanf(line, "%d %d %f %f%n", &depth, &level, &accepted, &tested, &used) != 4 ||
        line[used] || depth < 1 || depth > SO_ESTIMATE_DEPTHS || level < 0 ||
        level > SO_ESTIMATE_LEVELS || !(tested > 0 && tested <= MOST) ||
        !(accepted >= 0 && accepted <= tested))
        return false;
    rec->cells[depth - 1][level] = (so_estimate_cell){accepted, tested};
    return true;
}

bool so_records_parse(const char *text, so_records *out) {
    char line[128];
    bool good = true;
    *out = (so_records){0};
    while (good && *text) {
        text = take_line(text, line, sizeof line);
        good = text && (strncmp(line, "drafter ", 8) == 0
                            ? parse_head(line, out)
                            : out->n > 0 && parse_cell(line, out->items[out->n - 1]));
    }
    if (!good)
        so_records_free(out);
    return good;
}
