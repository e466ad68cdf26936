/* A column is an array of lines, and a line an array of cells (a character and its colour), as
 * shown. New text changes the last line, or moves its last word to a new line. Changed lines are
 * drawn again. If a column has more lines than the area has rows, its last lines are shown, and a
 * new line redraws all of them.
 *
 *   row 0       title            │ title
 *   row 1 …     first line       │ first line         between calls the cursor is in row `at`
 *
 * The cursor moves relatively between rows and absolutely within a row, so the area may be
 * anywhere on the screen. Control characters become spaces, and bytes that are not UTF-8 the
 * replacement character, so that no text controls the terminal. A character wider than a column is
 * skipped. Writes to stdout; main thread only. */
#include "cli/demo_columns.h"

#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "base/mem.h"
#include "token/utf8.h"

typedef struct cell {
    char bytes[5];
    uint8_t width;
    const char *color;
} cell;

typedef struct line {
    cell *cells;
    int n, cap, width;
} line;

typedef struct column {
    line *lines;
    int n, cap;
    int first; /* the line shown in the first row */
    int x;     /* where the column begins in a row of the screen, from 1 */
} column;

struct so_columns {
    column sides[2];
    int width, height; /* cells and rows of a column's text */
    int at;            /* row of the cursor; 0 is the title */
    int lowest;        /* lowest row drawn so far */
};

static int width_of(uint32_t cp) {
    int w = utf8proc_charwidth((utf8proc_int32_t)cp);
    return w < 0 ? 0 : w;
}

/* The first character of s as it is shown; returns its length in bytes. */
static size_t next_cell(so_str s, cell *out) {
    uint32_t cp;
    size_t len;
    *out = (cell){.color = ""};
    if (so_utf8_next(s.ptr, s.len, &cp, &len) != SO_UTF8_OK) {
        memcpy(out->bytes, "\xEF\xBF\xBD", 4);
        out->width = 1;
    } else if (cp < 0x20 || (cp >= 0x7F && cp < 0xA0)) {
        out->bytes[0] = cp == '\n' ? '\n' : ' ';
        out->width = cp != '\n';
    } else {
        memcpy(out->bytes, s.ptr, len);
        out->width = (uint8_t)width_of(cp);
    }
    return len;
}

int so_columns_width(so_str text) {
    int n = 0;
    cell c;
    for (size_t i = 0; i < text.len; n += c.width)
        i += next_cell((so_str){text.ptr + i, text.len - i}, &c);
    return n;
}

/* --- lines --- */

static line *add_line(column *c) {
    if (c->n == c->cap) {
        c->cap = c->cap ? 2 * c->cap : 64;
        c->lines = so_realloc(c->lines, (size_t)c->cap * sizeof *c->lines);
    }
    c->lines[c->n] = (line){0};
    return &c->lines[c->n++];
}

static void put(line *l, const cell *c) {
    if (l->n == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 64;
        l->cells = so_realloc(l->cells, (size_t)l->cap * sizeof *l->cells);
    }
    l->cells[l->n++] = *c;
    l->width += c->width;
}

/* Starts a new line with the last word of the full one; a word as long as a line is split. */
static line *wrap(column *c) {
    add_line(c); /* may reallocate the lines */
    line *old = &c->lines[c->n - 2], *fresh = &c->lines[c->n - 1];
    int at = old->n;
    while (at > 0 && old->cells[at - 1].bytes[0] != ' ')
        at--;
    for (int i = at; at > 0 && i < old->n; i++)
        put(fresh, &old->cells[i]);
    if (at > 0) {
        old->n = at;
        old->width -= fresh->width;
    }
    return fresh;
}

static void add_cell(column *c, int width, const cell *x) {
    line *l = &c->lines[c->n - 1];
    if (x->bytes[0] == '\n') {
        add_line(c);
        return;
    }
    if (x->width > width)
        return;
    if (l->width + x->width > width) {
        if (x->bytes[0] == ' ') { /* the line break replaces the space */
            add_line(c);
            return;
        }
        l = wrap(c);
    }
    put(l, x);
}

/* --- drawing --- */

static void go_to(so_columns *c, int row, int x) {
    if (row > c->at)
        printf("\033[%dB", row - c->at);
    else if (row < c->at)
        printf("\033[%dA", c->at - row);
    printf("\033[%dG", x);
    c->at = row;
    c->lowest = SO_MAX(c->lowest, row);
}

static void draw_line(so_columns *c, const column *col, int i) {
    const line *l = &col->lines[i];
    const char *color = "";
    go_to(c, 1 + i - col->first, col->x);
    for (int k = 0; k < l->n; k++) {
        if (strcmp(color, l->cells[k].color) != 0)
            printf("\033[0m%s", l->cells[k].color);
        color = l->cells[k].color;
        fputs(l->cells[k].bytes, stdout);
    }
    printf("%s%*s", *color ? "\033[0m" : "", c->width - l->width, "");
}

void so_columns_add(so_columns *c, int side, so_str text, const char *color) {
    column *col = &c->sides[side];
    int from = col->n - 1;
    cell x;
    for (size_t i = 0; i < text.len;) {
        i += next_cell((so_str){text.ptr + i, text.len - i}, &x);
        x.color = color;
        add_cell(col, c->width, &x);
    }
    if (col->n - col->first > c->height) {
        col->first = col->n - c->height;
        from = col->first;
    }
    for (int i = from; i < col->n; i++)
        draw_line(c, col, i);
    fflush(stdout);
}

so_columns *so_columns_open(int width, int height, const char *left, const char *right) {
    so_columns *c = SO_NEW(so_columns);
    c->width = SO_MAX((width - 4) / 2, 1);
    c->height = SO_MAX(height - 1, 1);
    for (int i = 0; i < 2; i++) {
        c->sides[i].x = 1 + i * (c->width + 3);
        add_line(&c->sides[i]);
    }
    for (int i = 0; i < c->height; i++)
        putchar('\n'); /* scrolls at the end of the screen */
    c->at = c->height;
    for (int row = 1; row <= c->height; row++) {
        go_to(c, row, c->sides[1].x - 2);
        fputs("\033[2m\xE2\x94\x82\033[0m", stdout);
    }
    const char *const titles[2] = {left, right};
    for (int i = 0; i < 2; i++) {
        go_to(c, 0, c->sides[i].x);
        printf("\033[1m%.*s\033[0m", c->width, titles[i]);
    }
    c->lowest = 0;
    fflush(stdout);
    return c;
}

void so_columns_close(so_columns *c) {
    if (!c)
        return;
    int last = SO_MAX(c->lowest, 1);
    go_to(c, last, 1);
    printf("\033[1B\033[1G\033[J"); /* erases the unused rows */
    if (last == c->height)
        putchar('\n');
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < c->sides[i].n; k++)
            free(c->sides[i].lines[k].cells);
        free(c->sides[i].lines);
    }
    free(c);
}
