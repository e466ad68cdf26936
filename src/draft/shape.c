/* Shapes of trees: builders, order, mask, files (shape.h).
 *
 * Growing scans all (parent, rank) pairs for each node: at most 256 · 257 · 64 steps, a few
 * milliseconds, once per calibration. Refuses anything of a file that does not describe a tree: a
 * parent must be an earlier node, so there are no cycles and no orphans, and depth and siblings are
 * checked. Holds no state. Any thread. */
#include "draft/shape.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"

/* --- building --- */

static int check_budget(int budget, so_err *err) {
    if (budget >= 1 && budget <= SO_SHAPE_MAX)
        return SO_OK;
    return so_err_set(err, SO_ERANGE, "a tree of %d nodes: must be from 1 to %d", budget,
                      SO_SHAPE_MAX);
}

static int check_depths(int n, so_err *err) {
    if (n >= 1 && n <= SO_SHAPE_DEPTHS)
        return SO_OK;
    return so_err_set(err, SO_ERANGE, "a tree of depth %d: must be from 1 to %d", n,
                      SO_SHAPE_DEPTHS);
}

static void add(so_shape *s, int parent, int rank, double chance) {
    int depth = parent < 0 ? 1 : s->nodes[parent].depth + 1;
    SO_ASSERT(s->n_nodes < SO_SHAPE_MAX && parent < s->n_nodes);
    s->nodes[s->n_nodes++] =
        (so_shape_node){(int16_t)parent, (int16_t)rank, (int16_t)depth, (float)chance};
    s->depth = SO_MAX(s->depth, depth);
}

int64_t so_shape_product_count(const int *widths, int n_depths) {
    int64_t level = 1, sum = 0;
    for (int d = 0; d < n_depths; d++)
        if (__builtin_mul_overflow(level, (int64_t)SO_MAX(widths[d], 0), &level) ||
            __builtin_add_overflow(sum, level, &sum))
            return INT64_MAX;
    return sum;
}

int so_shape_product(const int *widths, int n_depths, int budget, so_shape *out, so_err *err) {
    int rc = check_budget(budget, err);
    if (rc == SO_OK)
        rc = check_depths(n_depths, err);
    for (int d = 0; d < n_depths && rc == SO_OK; d++)
        if (widths[d] < 1 || widths[d] > SO_SHAPE_RANKS)
            rc = so_err_set(err, SO_ERANGE, "width %d at depth %d: must be from 1 to %d", widths[d],
                            d + 1, SO_SHAPE_RANKS);
    if (rc != SO_OK)
        return rc;
    *out = (so_shape){0};
    for (int rank = 0; rank < widths[0] && out->n_nodes < budget; rank++)
        add(out, -1, rank, -1);
    for (int i = 0; i < out->n_nodes && out->n_nodes < budget; i++) {
        int d = out->nodes[i].depth;
        for (int rank = 0; d < n_depths && rank < widths[d] && out->n_nodes < budget; rank++)
            add(out, i, rank, -1);
    }
    return SO_OK;
}

static int check_table(const so_shape_table *t, so_err *err) {
    double most = 0;
    int rc = check_depths(t->n_depths, err);
    if (rc == SO_OK && (t->n_ranks < 1 || t->n_ranks > SO_SHAPE_RANKS))
        rc = so_err_set(err, SO_ERANGE, "%d ranks: must be from 1 to %d", t->n_ranks,
                        SO_SHAPE_RANKS);
    for (int d = 0; d < t->n_depths && rc == SO_OK; d++)
        for (int r = 0; r < t->n_ranks && rc == SO_OK; r++) {
            double a = t->accuracy[d][r];
            if (!(a >= 0 && a <= 1))
                rc = so_err_set(err, SO_ERANGE,
                                "accuracy %g of rank %d at depth %d: must be from 0 to 1", a, r,
                                d + 1);
            most = SO_MAX(most, d == 0 ? a : 0);
        }
    if (rc == SO_OK && !(most > 0))
        rc = so_err_set(err, SO_ERANGE, "no guess of depth 1 was ever right: there is no tree");
    return rc;
}

static bool has_child(const so_shape *s, int parent, int rank) {
    for (int i = parent + 1; i < s->n_nodes; i++)
        if (s->nodes[i].parent == parent && s->nodes[i].rank == rank)
            return true;
    return false;
}

/* The child of `parent` with the most likely path that the shape lacks, in *rank. Returns its chance; 0:
 * there is none. */
static double best_child(const so_shape *s, const so_shape_table *t, int parent, int *rank) {
    double most = 0, before = parent < 0 ? 1 : (double)s->nodes[parent].chance;
    int d = parent < 0 ? 0 : s->nodes[parent].depth;
    for (int r = 0; d < t->n_depths && r < t->n_ranks; r++)
        if (before * t->accuracy[d][r] > most && !has_child(s, parent, r)) {
            most = before * t->accuracy[d][r];
            *rank = r;
        }
    return most;
}

int so_shape_grow(const so_shape_table *table, int budget, so_shape *out, so_err *err) {
    double chance[SO_SHAPE_MAX + 1]; /* of the best child that each node lacks; 0: the root */
    int rank[SO_SHAPE_MAX + 1] = {0};
    int rc = check_budget(budget, err);
    if (rc == SO_OK)
        rc = check_table(table, err);
    if (rc != SO_OK)
        return rc;
    *out = (so_shape){0};
    chance[0] = best_child(out, table, -1, &rank[0]);
    while (out->n_nodes < budget) {
        int best = 0, n = out->n_nodes;
        for (int i = 1; i <= n; i++)
            if (chance[i] > chance[best])
                best = i;
        if (!(chance[best] > 0))
            break;
        add(out, best - 1, rank[best], chance[best]);
        chance[best] = best_child(out, table, best - 1, &rank[best]);
        chance[n + 1] = best_child(out, table, n, &rank[n + 1]);
    }
    return SO_OK;
}

void so_shape_cut(so_shape *s, int n) {
    SO_ASSERT(n >= 1);
    s->n_nodes = SO_MIN(s->n_nodes, n);
    s->depth = 0;
    for (int i = 0; i < s->n_nodes; i++)
        s->depth = SO_MAX(s->depth, s->nodes[i].depth);
}

/* --- reading off a shape --- */

double so_shape_expected(const so_shape *s) {
    double sum = 0;
    for (int i = 0; i < s->n_nodes; i++)
        sum += s->nodes[i].chance >= 0 ? (double)s->nodes[i].chance : (double)NAN;
    return sum;
}

/* The child of `parent` with the lowest rank above `after`; −1: none. */
static int next_child(const so_shape *s, int parent, int after) {
    int best = -1;
    for (int i = parent + 1; i < s->n_nodes; i++)
        if (s->nodes[i].parent == parent && s->nodes[i].rank > after &&
            (best < 0 || s->nodes[i].rank < s->nodes[best].rank))
            best = i;
    return best;
}

void so_shape_depth_first(const so_shape *s, int16_t *order) {
    int at = -1, n = 0, after = -1;
    while (n < s->n_nodes || at >= 0) {
        int child = next_child(s, at, after);
        if (child >= 0) {
            order[n++] = (int16_t)child;
            at = child;
            after = -1;
        } else { /* back to the parent, after this child */
            after = s->nodes[at].rank;
            at = s->nodes[at].parent;
        }
    }
}

void so_shape_print_mask(const so_shape *s, so_buf *out) {
    for (int row = 0; row < s->n_nodes; row++)
        for (int col = 0; col < s->n_nodes; col++) {
            int at = row;
            while (at > col)
                at = s->nodes[at].parent;
            so_buf_append_c(out, at == col ? "1" : "0");
            so_buf_append_c(out, col + 1 < s->n_nodes ? " " : "\n");
        }
}

/* --- files --- */

static int bad(const char *name, int node, so_err *err, const char *what) {
    return so_err_set(err, SO_EFORMAT, "%s: node %d: %s", name, node, what);
}

/* Reads a whole number from lo to hi. */
static bool get_int(const json_t *o, const char *key, int lo, int hi, int *out) {
    const json_t *j = json_object_get(o, key);
    json_int_t v = json_integer_value(j);
    if (!json_is_integer(j) || v < lo || v > hi)
        return false;
    *out = (int)v;
    return true;
}

static bool get_chance(const json_t *j, double *out) {
    *out = json_number_value(j);
    return json_is_number(j) && *out >= 0 && *out <= 1;
}

static int parse_node(const json_t *o, const char *name, so_shape *s, so_err *err) {
    int node = s->n_nodes, parent = -1, rank = 0;
    double chance = -1;
    char msg[96];
    if (!get_int(o, "parent", -1, SO_SHAPE_MAX, &parent))
        return bad(name, node, err, "parent must be a node's number, or -1 for the root");
    if (parent >= node) {
        snprintf(msg, sizeof msg, "parent %d is not an earlier node (a cycle, or a wrong order)",
                 parent);
        return bad(name, node, err, msg);
    }
    if (!get_int(o, "rank", 0, SO_SHAPE_RANKS - 1, &rank)) {
        snprintf(msg, sizeof msg, "rank must be from 0 to %d", SO_SHAPE_RANKS - 1);
        return bad(name, node, err, msg);
    }
    if (has_child(s, parent, rank)) {
        if (parent < 0)
            snprintf(msg, sizeof msg, "an earlier child of the root has rank %d, too", rank);
        else
            snprintf(msg, sizeof msg, "an earlier child of node %d has rank %d, too", parent, rank);
        return bad(name, node, err, msg);
    }
    if (parent >= 0 && s->nodes[parent].depth == SO_SHAPE_DEPTHS) {
        snprintf(msg, sizeof msg, "deeper than %d", SO_SHAPE_DEPTHS);
        return bad(name, node, err, msg);
    }
    if (json_object_get(o, "chance") && !get_chance(json_object_get(o, "chance"), &chance))
        return bad(name, node, err, "chance must be from 0 to 1");
    add(s, parent, rank, chance);
    return SO_OK;
}

static int parse_nodes(const json_t *list, const char *name, so_shape *s, so_err *err) {
    size_t n = json_array_size(list);
    int rc = SO_OK;
    if (n < 1 || n > SO_SHAPE_MAX)
        return so_err_set(err, SO_ERANGE, "%s: nodes must be a list of 1 to %d nodes; it has %zu",
                          name, SO_SHAPE_MAX, n);
    for (size_t i = 0; i < n && rc == SO_OK; i++)
        rc = parse_node(json_array_get(list, i), name, s, err);
    return rc;
}

static int parse_table(const json_t *list, const char *name, so_shape_table *t, so_err *err) {
    size_t n = json_array_size(list), n_ranks = json_array_size(json_array_get(list, 0));
    if (!json_is_array(list) || n < 1 || n > SO_SHAPE_DEPTHS || n_ranks < 1 ||
        n_ranks > SO_SHAPE_RANKS)
        return so_err_set(err, SO_EFORMAT, "%s: accuracy must have 1 to %d depths of 1 to %d ranks",
                          name, SO_SHAPE_DEPTHS, SO_SHAPE_RANKS);
    t->n_depths = (int)n;
    t->n_ranks = (int)n_ranks;
    for (size_t d = 0; d < n; d++) {
        const json_t *row = json_array_get(list, d);
        bool ok = json_array_size(row) == n_ranks;
        for (size_t r = 0; r < n_ranks && ok; r++)
            ok = get_chance(json_array_get(row, r), &t->accuracy[d][r]);
        if (!ok)
            return so_err_set(err, SO_EFORMAT,
                              "%s: accuracy of depth %zu must be %zu numbers from 0 to 1", name,
                              d + 1, n_ranks);
    }
    return SO_OK;
}

static int parse_object(const json_t *o, const char *name, so_shape *s, so_shape_table *t,
                        so_err *err) {
    int version = 0, depth = 0, rc;
    const json_t *accuracy = json_object_get(o, "accuracy");
    if (!get_int(o, "sooth_tree", 1, 1, &version))
        return so_err_set(err, SO_EFORMAT,
                          "%s: not a tree file of this sooth (it starts with \"sooth_tree\": 1)",
                          name);
    rc = parse_nodes(json_object_get(o, "nodes"), name, s, err);
    if (rc == SO_OK && (!get_int(o, "depth", 1, SO_SHAPE_DEPTHS, &depth) || depth != s->depth))
        rc = so_err_set(err, SO_EFORMAT, "%s: depth must be that of the deepest node, %d", name,
                        s->depth);
    if (rc == SO_OK && accuracy)
        rc = parse_table(accuracy, name, t, err);
    const json_t *n = json_object_get(o, "positions");
    if (rc == SO_OK && n && (!json_is_integer(n) || json_integer_value(n) < 0))
        rc = so_err_set(err, SO_EFORMAT, "%s: positions must be a whole number from 0", name);
    t->n_positions = json_integer_value(n);
    return rc;
}

int so_shape_parse(so_str json, const char *name, so_shape *out, so_shape_table *table,
                   so_err *err) {
    json_error_t e;
    so_shape s = {0};
    so_shape_table *t = SO_NEW(so_shape_table);
    json_t *o = json.len > SO_SHAPE_MAX_BYTES
                    ? NULL
                    : json_loadb(json.ptr ? json.ptr : "", json.len, JSON_REJECT_DUPLICATES, &e);
    int rc;
    if (json.len > SO_SHAPE_MAX_BYTES)
        rc = so_err_set(err, SO_ELIMIT, "%s: a tree file of %zu bytes; at most %d", name, json.len,
                        SO_SHAPE_MAX_BYTES);
    else if (!o)
        rc = so_err_set(err, SO_EFORMAT, "%s: line %d: %s", name, e.line, e.text);
    else
        rc = parse_object(o, name, &s, t, err);
    if (rc == SO_OK) {
        *out = s;
        if (table)
            *table = *t;
    }
    json_decref(o);
    free(t);
    return rc;
}

int so_shape_read(const char *path, so_shape *out, so_shape_table *table, so_err *err) {
    so_buf text = {0};
    int rc = so_file_read(path, SO_SHAPE_MAX_BYTES, &text, err);
    if (rc == SO_OK)
        rc = so_shape_parse(so_buf_str(&text), path, out, table, err);
    so_buf_free(&text);
    return rc;
}

static void print_table(const so_shape_table *t, so_buf *out) {
    so_buf_printf(out, ",\n \"positions\": %" PRId64 ",\n \"accuracy\": [", t->n_positions);
    for (int d = 0; d < t->n_depths; d++) {
        so_buf_append_c(out, d ? ",\n  [" : "\n  [");
        for (int r = 0; r < t->n_ranks; r++)
            so_buf_printf(out, "%s%.6g", r ? ", " : "", t->accuracy[d][r]);
        so_buf_append_c(out, "]");
    }
    so_buf_append_c(out, "]");
}

void so_shape_print(const so_shape *s, const so_shape_table *table, const char *drafter,
                    so_buf *out) {
    so_buf_printf(out, "{\"sooth_tree\": 1,\n \"drafter\": \"%s\",\n \"depth\": %d", drafter,
                  s->depth);
    if (table && table->n_depths > 0)
        print_table(table, out);
    so_buf_append_c(out, ",\n \"nodes\": [");
    for (int i = 0; i < s->n_nodes; i++) {
        const so_shape_node *n = &s->nodes[i];
        so_buf_printf(out, "%s\n  {\"parent\": %d, \"rank\": %d", i ? "," : "", n->parent, n->rank);
        if (n->chance >= 0)
            so_buf_printf(out, ", \"chance\": %.9g", (double)n->chance);
        so_buf_append_c(out, "}");
    }
    so_buf_append_c(out, "]}\n");
}
