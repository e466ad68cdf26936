/* A tree's shape for readers: text with one line per node, JSON, an SVG drawing, the dense mask of tree
 * attention. Prints to stdout; writes the SVG to a file. Main thread only. */
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/calibrate.h"

static int n_children(const so_shape *s, int parent) {
    int n = 0;
    for (int i = parent + 1; i < s->n_nodes; i++)
        n += s->nodes[i].parent == parent;
    return n;
}

/* The expected accepted guesses of the best chain in the table, at most n deep. */
static double chain_of(const so_shape_table *t, int n) {
    double path = 1, sum = 0;
    for (int d = 0; d < SO_MIN(n, t->n_depths); d++)
        sum += path *= t->accuracy[d][0];
    return sum;
}

static void print_summary(const so_shape *s, const so_shape_table *t) {
    double expected = so_shape_expected(s);
    printf("%d nodes, depth %d", s->n_nodes, s->depth);
    if (expected >= 0)
        printf(", expected tokens per pass %.2f", 1 + expected);
    if (t->n_depths > 0)
        printf(" (a chain of %d: %.2f)", SO_MIN(s->n_nodes, t->n_depths),
               1 + chain_of(t, s->n_nodes));
    printf("\n");
    if (t->n_depths == 0)
        return;
    printf("accuracy by rank, %lld positions\n", (long long)t->n_positions);
    for (int d = 0; d < t->n_depths; d++) {
        printf("  depth %2d ", d + 1);
        for (int r = 0; r < SO_MIN(t->n_ranks, 8); r++)
            printf(" %.3f", t->accuracy[d][r]);
        printf("\n");
    }
}

/* Whether `node` is the last child of its parent in depth-first order. */
static bool is_last(const so_shape *s, int node) {
    for (int i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].parent == s->nodes[node].parent && s->nodes[i].rank > s->nodes[node].rank)
            return false;
    return true;
}

static void print_node(const so_shape *s, int node) {
    const char *parts[SO_SHAPE_DEPTHS];
    int n = 0;
    for (int i = node; i >= 0; i = s->nodes[i].parent)
        parts[n++] = i == node ? (is_last(s, i) ? "└ " : "├ ") : is_last(s, i) ? "  " : "│ ";
    while (n > 0)
        fputs(parts[--n], stdout);
    printf("%d", s->nodes[node].rank);
    if (s->nodes[node].chance >= 0)
        printf("  %.3f", (double)s->nodes[node].chance);
    printf("\n");
}

static void print_text(const so_shape *s) {
    int16_t order[SO_SHAPE_MAX];
    so_shape_depth_first(s, order);
    printf("rank of each guess, chance of its path\n");
    for (int i = 0; i < s->n_nodes; i++)
        print_node(s, order[i]);
}

/* --- SVG --- */

enum { STEP = 34, TOP = 30, LEVEL = 62, RADIUS = 12 };

/* Leaves get columns in depth-first order; a parent stands over the middle of its children. */
static double place(const so_shape *s, double x[SO_SHAPE_MAX + 1]) {
    int16_t order[SO_SHAPE_MAX];
    double first[SO_SHAPE_MAX + 1], last[SO_SHAPE_MAX + 1];
    int columns = 0;
    so_shape_depth_first(s, order);
    for (int i = 0; i <= s->n_nodes; i++)
        first[i] = last[i] = -1;
    for (int k = s->n_nodes - 1; k >= -1; k--) { /* children before parents */
        int node = k < 0 ? -1 : order[k];
        if (n_children(s, node) == 0)
            x[node + 1] = STEP * (0.5 + columns++);
        else
            x[node + 1] = (first[node + 1] + last[node + 1]) / 2;
        if (node < 0)
            break;
        int p = s->nodes[node].parent + 1;
        last[p] = last[p] < 0 ? x[node + 1] : last[p];
        first[p] = x[node + 1];
    }
    for (int i = 0; i <= s->n_nodes; i++) /* from right to left above */
        x[i] = STEP * columns - x[i];
    return STEP * columns;
}

static void draw(const so_shape *s, so_buf *b) {
    double x[SO_SHAPE_MAX + 1];
    double width = SO_MAX(place(s, x), 120.0);
    so_buf_printf(b,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %d\" "
                  "font-family=\"sans-serif\" font-size=\"10\" text-anchor=\"middle\">\n"
                  "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
                  width, TOP + LEVEL * s->depth + 34);
    for (int i = 0; i < s->n_nodes; i++) {
        int p = s->nodes[i].parent, depth = s->nodes[i].depth;
        so_buf_printf(b, "<path d=\"M%.1f %dL%.1f %d\" stroke=\"#999\"/>\n", x[p + 1],
                      TOP + LEVEL * (depth - 1), x[i + 1], TOP + LEVEL * depth);
    }
    so_buf_printf(b, "<circle cx=\"%.1f\" cy=\"%d\" r=\"%d\" fill=\"#333\"/>\n", x[0], TOP, RADIUS);
    for (int i = 0; i < s->n_nodes; i++) {
        const so_shape_node *n = &s->nodes[i];
        double shade = n->chance >= 0 ? 0.15 + 0.85 * (double)n->chance : 0.5;
        int y = TOP + LEVEL * n->depth;
        so_buf_printf(b,
                      "<circle cx=\"%.1f\" cy=\"%d\" r=\"%d\" fill=\"#fff\"/><circle cx=\"%.1f\" "
                      "cy=\"%d\" r=\"%d\" fill=\"#2a7\" fill-opacity=\"%.2f\" stroke=\"#2a7\"/>"
                      "<text x=\"%.1f\" y=\"%d\">%d</text>\n",
                      x[i + 1], y, RADIUS, x[i + 1], y, RADIUS, shade, x[i + 1], y + 4, n->rank);
        if (n->chance >= 0)
            so_buf_printf(b, "<text x=\"%.1f\" y=\"%d\" fill=\"#555\">%.2f</text>\n", x[i + 1],
                          y + RADIUS + 11, (double)n->chance);
    }
    so_buf_append_c(b, "</svg>\n");
}

static int write_svg(const char *path, const so_shape *s, so_err *err) {
    so_buf b = {0};
    draw(s, &b);
    int rc = so_out_put(path, b.data, b.len, err);
    so_buf_free(&b);
    return rc;
}

int so_calibrate_show(const so_args *a, const so_shape *s, const so_shape_table *t) {
    so_buf b = {0};
    so_err err = {0};
    const char *svg = so_args_str(a, SO_OPT_SVG, NULL);
    if (svg && write_svg(svg, s, &err) != SO_OK)
        return so_args_fail(a, &err);
    if (so_args_has(a, SO_OPT_JSON)) {
        so_shape_print(s, t, "model", &b);
        fputs(b.data, stdout);
        so_buf_free(&b);
        return 0;
    }
    print_summary(s, t);
    if (so_args_has(a, SO_OPT_SHOW))
        print_text(s);
    if (so_args_has(a, SO_OPT_MASK)) {
        so_shape_print_mask(s, &b);
        fputs(b.data, stdout);
        so_buf_free(&b);
    }
    return 0;
}
