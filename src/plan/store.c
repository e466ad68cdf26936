/* The file of store.h. Its name is a hash of the key. Different keys may have the same hash, so the
 * whole key is in the file and is compared when the file is read. */
#include "plan/store.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "plan/tuning.h"

static const char HEAD[] = "sooth plan 1\n";
static const double MAX_MS = 1e6, MIN_POINT_MS = 1e-6;
enum { MAX_FILE = 1 << 20 };

void so_store_key(const so_model *m, so_dtype kv_dtype, so_buf *out) {
    const so_hparams *hp = so_model_hparams(m);
    so_buf_printf(out, "%s layers %d width %d heads %d/%d vocab %d weights %zu cache %s on ",
                  hp->arch_name, hp->n_layers, hp->d_model, hp->n_heads, hp->n_heads_kv,
                  hp->n_vocab, so_model_weight_bytes(m), so_dtype_get(kv_dtype)->name);
    so_backend *b = so_model_backend(m);
    b->vt->describe(b, out);
    so_buf_append_c(out, ", sooth " SO_VERSION);
}

char *so_store_path(const char *dir, so_str key) {
    char name[40];
    snprintf(name, sizeof name, "%016llx.txt", (unsigned long long)so_hash_bytes(key.ptr, key.len));
    char *costs = so_path_join(dir, "costs"), *path = so_path_join(costs, name);
    free(costs);
    return path;
}

/* --- writing --- */

static void print_points(const char *key, const so_curve_point *p, int n, so_buf *out) {
    for (int i = 0; i < n; i++)
        so_buf_printf(out, "%s %d %.6g %.4g\n", key, p[i].n, p[i].ms, p[i].weight);
}

static void print_record(const so_record *rec, so_buf *out) {
    so_buf_printf(out, "drafter %s\n", rec->name);
    if (rec->catch_up_ms.n > 0)
        so_buf_printf(out, "read %.6g\n", rec->catch_up_ms.value);
    if (rec->trip_error > 0)
        so_buf_printf(out, "trip %.6g %.6g\n", rec->trip_fixed_part, rec->trip_error);
    print_points("step", rec->level_points, rec->n_level_points, out);
    for (int r = 0; r < SO_ACCEPT_RANKS; r++)
        for (int l = 0; l < SO_ACCEPT_CLASSES; l++)
            if (rec->confidences[r][l] >= SO_TUNE_WRITE_TESTS)
                so_buf_printf(out, "rows %d %d %.4g\n", r, l, (double)rec->confidences[r][l]);
    for (int d = 0; d < SO_ACCEPT_DEPTHS; d++)
        for (int r = 0; r < SO_ACCEPT_RANKS; r++)
            for (int l = 0; l <= SO_ACCEPT_CLASSES; l++) {
                so_accept_cell c = rec->cells[d][r][l];
                if (c.tested >= SO_TUNE_WRITE_TESTS)
                    so_buf_printf(out, "cell %d %d %d %.4g %.4g\n", d + 1, r, l, (double)c.accepted,
                                  (double)c.tested);
            }
}

static void print_compared(const so_compare_kept *k, so_buf *out) {
    so_buf_printf(out, "methods %016llx %d\n", (unsigned long long)k->key, (int)k->base);
    for (int a = 0; a < SO_METHODS; a++)
        for (int b = a + 1; b < SO_METHODS; b++) {
            const so_compare_kept_pair *p = &k->pairs[a][b];
            if (p->n > 0)
                so_buf_printf(out, "pair %d %d %.6g %.6g %.6g %.6g %.6g %.6g %.6g\n", a, b, p->n,
                              p->side[0].tokens, p->side[0].ms, p->side[1].tokens, p->side[1].ms,
                              p->ratio, p->scatter);
        }
}

void so_store_print(const so_costs *c, const so_records *r, so_buf *out) {
    so_curve_point points[SO_CURVE_KNOTS];
    print_points("pass", points, so_curve_export(&c->pass, points, SO_CURVE_KNOTS), out);
    if (c->draw_ms.n > 0)
        so_buf_printf(out, "draw %.6g\n", c->draw_ms.value);
    for (int m = 0; m < SO_VERIFY_MODES; m++)
        if (c->check_ms[m].n > 0)
            so_buf_printf(out, "check %d %.6g\n", m, c->check_ms[m].value);
    for (int i = 0; i < r->n_compared; i++)
        print_compared(&r->compared[i], out);
    for (int i = 0; i < r->n; i++)
        print_record(r->items[i], out);
}

int so_store_write(const char *path, so_str key, const so_costs *c, const so_records *r,
                   so_err *err) {
    so_buf text = {0};
    char *dir = so_strndup(path, (size_t)(strrchr(path, '/') - path));
    int rc = so_dir_create(dir, err);
    so_buf_append_c(&text, HEAD);
    so_buf_append_str(&text, key);
    so_buf_append_char(&text, '\n');
    so_store_print(c, r, &text);
    so_buf_append_c(&text, "end\n");
    if (rc == SO_OK)
        rc = so_out_put(path, text.data, text.len, err);
    so_buf_free(&text);
    free(dir);
    return rc;
}

/* --- reading --- */

typedef struct parser {
    so_costs *c;
    so_records *r;
    so_record *rec; /* the drafter of the current lines; NULL before the first */
    so_curve_point points[SO_CURVE_KNOTS]; /* of t(n) */
    int n_points;
} parser;

/* Exactly n numbers, with single spaces between them. */
static bool parse_numbers(const char *s, double *out, int n) {
    for (int i = 0; i < n; i++) {
        char *end;
        if (!isdigit((unsigned char)*s)) /* strtod would accept spaces, signs and names */
            return false;
        out[i] = strtod(s, &end);
        if (!isfinite(out[i]) || *end != (i + 1 < n ? ' ' : '\0'))
            return false;
        s = end + 1;
    }
    return true;
}

static bool is_ms(double x) { return x >= 0 && x <= MAX_MS; }
static bool is_whole(double x, int lo, int hi) { return x >= lo && x <= hi && x == floor(x); }

static bool parse_point(const char *s, so_curve_point *points, int *n) {
    double x[3]; /* rows, ms, weight */
    if (*n == SO_CURVE_KNOTS || !parse_numbers(s, x, 3) || !is_whole(x[0], 1, SO_CURVE_MAX) ||
        !(x[1] >= MIN_POINT_MS && is_ms(x[1])) || !(x[2] > 0 && x[2] <= SO_TUNE_POINT_WEIGHT) ||
        (*n > 0 && x[0] <= points[*n - 1].n))
        return false;
    points[(*n)++] = (so_curve_point){(int)x[0], x[1], x[2]};
    return true;
}

static bool parse_ms(const char *s, so_mean *out) {
    double ms;
    if (out->n > 0 || !parse_numbers(s, &ms, 1) || !is_ms(ms))
        return false;
    *out = (so_mean){ms, 1};
    return true;
}

static bool parse_check(const char *s, so_costs *c) {
    double x[2]; /* mode, ms */
    if (!parse_numbers(s, x, 2) || !is_whole(x[0], 0, SO_VERIFY_MODES - 1) || !is_ms(x[1]) ||
        c->check_ms[(int)x[0]].n > 0)
        return false;
    c->check_ms[(int)x[0]] = (so_mean){x[1], 1};
    return true;
}

static bool parse_drafter(const char *name, parser *p) {
    if (!so_record_is_name(name) || p->r->n == SO_RECORDS_MAX || so_records_find(p->r, name))
        return false;
    p->rec = p->r->items[p->r->n++] = SO_NEW(so_record);
    memcpy(p->rec->name, name, strlen(name) + 1); /* so_record_is_name checked the length */
    return true;
}

static bool parse_cell(const char *s, so_record *rec) {
    double x[5]; /* depth, rank, class, accepted, tested */
    if (!parse_numbers(s, x, 5) || !is_whole(x[0], 1, SO_ACCEPT_DEPTHS) ||
        !is_whole(x[1], 0, SO_ACCEPT_RANKS - 1) || !is_whole(x[2], 0, SO_ACCEPT_CLASSES) ||
        !(x[4] > 0 && x[4] <= SO_TUNE_RECORD_TESTS) || !(x[3] >= 0 && x[3] <= x[4]))
        return false;
    so_accept_cell *c = &rec->cells[(int)x[0] - 1][(int)x[1]][(int)x[2]];
    if (c->tested > 0)
        return false;
    *c = (so_accept_cell){(float)x[3], (float)x[4]};
    return true;
}

static bool parse_rows(const char *s, so_record *rec) {
    double x[3]; /* rank, class, rows */
    if (!parse_numbers(s, x, 3) || !is_whole(x[0], 0, SO_ACCEPT_RANKS - 1) ||
        !is_whole(x[1], 0, SO_ACCEPT_CLASSES - 1) || !(x[2] > 0 && x[2] <= SO_TUNE_RECORD_TESTS) ||
        rec->confidences[(int)x[0]][(int)x[1]] > 0)
        return false;
    rec->confidences[(int)x[0]][(int)x[1]] = (float)x[2];
    return true;
}

static bool parse_trip(const char *s, so_record *rec) {
    double x[2]; /* fixed part, its standard error */
    if (rec->trip_error > 0 || !parse_numbers(s, x, 2) || x[0] > SO_TUNE_TRIP_FIXED_MAX ||
        !(x[1] > 0 && x[1] <= 1))
        return false;
    rec->trip_fixed_part = x[0];
    rec->trip_error = x[1];
    return true;
}

static bool parse_methods(const char *s, so_records *r) {
    char *end;
    double base;
    if (strspn(s, "0123456789abcdef") != 16 || s[16] != ' ' || r->n_compared == SO_RECORDS_COMPARED)
        return false;
    uint64_t key = strtoull(s, &end, 16);
    if (!parse_numbers(end + 1, &base, 1) || !is_whole(base, 0, SO_METHODS - 1) ||
        so_records_compared(r, key))
        return false;
    r->compared[r->n_compared++] = (so_compare_kept){.key = key, .base = (so_method)base};
    return true;
}

static bool parse_pair(const char *s, so_records *r) {
    double x[9]; /* low, high, n, tokens, ms, tokens, ms, ratio, scatter */
    if (r->n_compared == 0 || !parse_numbers(s, x, 9) || !is_whole(x[0], 0, SO_METHODS - 2) ||
        !is_whole(x[1], (int)x[0] + 1, SO_METHODS - 1) || !(x[2] > 0) ||
        x[2] > SO_TUNE_COMPARE_KEPT || !(x[7] > 1e-6) || x[7] > 1e6 || x[8] > 1e6)
        return false;
    for (int i = 3; i < 7; i++)
        if (!(x[i] > 0) || x[i] > MAX_MS * 1e3)
            return false;
    so_compare_kept_pair *p = &r->compared[r->n_compared - 1].pairs[(int)x[0]][(int)x[1]];
    if (p->n > 0)
        return false;
    *p = (so_compare_kept_pair){x[2], {{x[3], x[4]}, {x[5], x[6]}}, x[7], x[8]};
    return true;
}

/* The rest of s after `key` and a space, or NULL. */
static const char *after(const char *s, const char *key) {
    size_t n = strlen(key);
    return strncmp(s, key, n) == 0 && s[n] == ' ' ? s + n + 1 : NULL;
}

static bool parse_line(const char *line, parser *p) {
    const char *s;
    if ((s = after(line, "drafter")))
        return parse_drafter(s, p);
    if (p->rec && (s = after(line, "cell")))
        return parse_cell(s, p->rec);
    if (p->rec && (s = after(line, "rows")))
        return parse_rows(s, p->rec);
    if (p->rec && (s = after(line, "step")))
        return parse_point(s, p->rec->level_points, &p->rec->n_level_points);
    if (p->rec && (s = after(line, "trip")))
        return parse_trip(s, p->rec);
    if (p->rec && (s = after(line, "read")))
        return parse_ms(s, &p->rec->catch_up_ms);
    if (p->rec)
        return false;
    if ((s = after(line, "pass")))
        return parse_point(s, p->points, &p->n_points);
    if ((s = after(line, "methods")))
        return parse_methods(s, p->r);
    if ((s = after(line, "pair")))
        return parse_pair(s, p->r);
    if ((s = after(line, "draw")))
        return parse_ms(s, &p->c->draw_ms);
    return (s = after(line, "check")) && parse_check(s, p->c);
}

bool so_store_parse(const char *text, so_costs *c, so_records *r) {
    parser p = {.c = c, .r = r};
    char line[128];
    bool good = true;
    while (good && *text) {
        const char *end = strchr(text, '\n');
        good = end && (size_t)(end - text) < sizeof line;
        if (!good)
            break;
        memcpy(line, text, (size_t)(end - text));
        line[end - text] = '\0';
        good = parse_line(line, &p);
        text = end + 1;
    }
    if (good && p.n_points > 0 && so_curve_import(&c->pass, p.points, p.n_points, NULL) == SO_OK)
        return true;
    so_records_free(r);
    *c = (so_costs){0};
    return false;
}

static bool skip(so_str *s, so_str prefix) {
    if (!so_str_starts(*s, prefix))
        return false;
    s->ptr += prefix.len;
    s->len -= prefix.len;
    return true;
}

/* Removes the last line, which must be "end": a truncated file has none. */
static bool cut_end(so_buf *file) {
    static const char END[] = "\nend\n";
    size_t n = sizeof END - 1;
    if (file->len < n || memcmp(file->data + file->len - n, END, n) != 0)
        return false;
    file->data[file->len - n + 1] = '\0';
    file->len -= n - 1;
    return true;
}

bool so_store_read(const char *path, so_str key, so_costs *c, so_records *r, const char **why) {
    so_buf file = {0};
    *why = "the file does not exist yet";
    if (so_file_exists(path) && so_file_read(path, MAX_FILE, &file, NULL) == SO_OK) {
        so_str rest = so_buf_str(&file);
        if (!skip(&rest, so_str_c(HEAD)))
            *why = "the file is of another version";
        else if (!skip(&rest, key) || !skip(&rest, SO_STR("\n")))
            *why = "the file is for another model or machine";
        else if (memchr(rest.ptr, 0, rest.len) || !cut_end(&file) ||
                 !so_store_parse(rest.ptr, c, r))
            *why = "the file is damaged";
        else
            *why = NULL;
    }
    so_buf_free(&file);
    return *why == NULL;
}
