/* The file (costs.h): a line that names the format, a line with the key, then one line per point of
 * the curve: rows, milliseconds, passes seen; then the records of drafters (draft/record.h). The
 * name of the file is a hash of the key; the key
 * inside decides. Written beside its target and renamed, so that two runs that end together leave
 * one of the two. */
#include "engine/costs.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"

static const char HEAD[] = "sooth costs 3\n";
enum { MAX_FILE = 1 << 18 };

void so_costs_key(const so_model *m, so_dtype kv_dtype, so_buf *out) {
    const so_hparams *hp = so_model_hparams(m);
    so_buf_printf(out, "%s layers %d width %d heads %d/%d vocab %d weights %zu cache %s on ",
                  hp->arch_name, hp->n_layers, hp->d_model, hp->n_heads, hp->n_heads_kv,
                  hp->n_vocab, so_model_weight_bytes(m), so_dtype_get(kv_dtype)->name);
    so_backend *b = so_model_backend(m);
    b->vt->describe(b, out);
    so_buf_append_c(out, ", sooth " SO_VERSION);
}

char *so_costs_path(const char *dir, so_str key) {
    char name[40];
    snprintf(name, sizeof name, "%016llx.txt", (unsigned long long)so_hash_bytes(key.ptr, key.len));
    char *costs = so_path_join(dir, "costs"), *path = so_path_join(costs, name);
    free(costs);
    return path;
}

static bool skip(so_str *s, so_str prefix) {
    if (!so_str_starts(*s, prefix))
        return false;
    s->ptr += prefix.len;
    s->len -= prefix.len;
    return true;
}

/* How many points; *rest is what follows them. */
static int read_points(const char *s, so_curve_point *points, const char **rest) {
    int n = 0, used = 0;
    while (n < SO_CURVE_KNOTS && sscanf(s, "%d %lf %lf\n%n", &points[n].n, &points[n].ms,
                                        &points[n].weight, &used) == 3) {
        s += used;
        n++;
    }
    *rest = s;
    return n;
}

bool so_costs_read(const char *path, so_str key, so_curve *c, so_records *r) {
    so_buf file = {0};
    so_curve_point points[SO_CURVE_KNOTS];
    so_records found = {0};
    const char *end = NULL;
    int n = 0;
    if (so_file_exists(path) && so_file_read(path, MAX_FILE, &file, NULL) == SO_OK) {
        so_str rest = so_buf_str(&file);
        if (memchr(rest.ptr, 0, rest.len) == NULL && skip(&rest, so_str_c(HEAD)) &&
            skip(&rest, key) && skip(&rest, SO_STR("\n")))
            n = read_points(rest.ptr, points, &end);
    }
    bool good =
        n > 0 && so_records_parse(end, &found) && so_curve_import(c, points, n, NULL) == SO_OK;
    so_buf_free(&file);
    if (good)
        *r = found;
    else
        so_records_free(&found);
    return good;
}

int so_costs_write(const char *path, so_str key, const so_curve *c, const so_records *r,
                   so_err *err) {
    so_curve_point points[SO_CURVE_KNOTS];
    so_out_file *f = NULL;
    so_buf text = {0};
    char *dir = so_strndup(path, (size_t)(strrchr(path, '/') - path));
    int n = so_curve_export(c, points, SO_CURVE_KNOTS), rc = so_dir_create(dir, err);
    so_buf_append_c(&text, HEAD);
    so_buf_append_str(&text, key);
    for (int i = 0; i < n; i++)
        so_buf_printf(&text, "\n%d %.6g %g", points[i].n, points[i].ms, points[i].weight);
    so_buf_append_char(&text, '\n');
    so_records_print(r, &text);
    if (rc == SO_OK)
        rc = so_out_begin(path, &f, err);
    if (rc == SO_OK) {
        rc = so_out_write(f, text.data, text.len, err);
        if (rc == SO_OK)
            rc = so_out_commit(f, err);
        else
            so_out_abort(f);
    }
    so_buf_free(&text);
    free(dir);
    return rc;
}
