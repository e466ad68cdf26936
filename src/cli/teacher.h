/* Teacher forcing: runs given tokens through a model and hands out the logits rows, for commands
 * that need rows and no engine. A cache, a pass and one sequence; callers may add sequences of
 * their own (so_seq_create(t->kv)). One thread. */
#ifndef SO_CLI_TEACHER_H
#define SO_CLI_TEACHER_H

#include "kv/kv.h"
#include "model/model.h"

typedef struct so_teacher {
    so_kv *kv;
    so_pass *pass;
    so_seq *seq;
    so_row *rows; /* [max_rows] */
    int max_rows;
} so_teacher;

typedef struct so_teacher_opts {
    int n_pages;              /* of the cache, for all sequences */
    int max_rows, max_logits; /* of one pass */
    so_dtype kv_dtype;
} so_teacher_opts;

/* To be closed also where it fails. */
int so_teacher_open(so_teacher *t, const so_model *m, const so_teacher_opts *o, so_err *err);
void so_teacher_close(so_teacher *t);

/* Runs a chain of n ≤ max_rows tokens behind seq and leaves it open: the caller commits or aborts.
 * Rows from first_logit on have logits, row 0 of the pass is the first of them; want: SO_PASS_… An
 * error where logits are not finite. */
int so_teacher_rows(so_teacher *t, so_seq *seq, const int32_t *ids, int n, int first_logit,
                    unsigned want, so_err *err);
/* Appends n tokens, max_rows at a time. The last n_logits of them have logits; those of the last
 * pass can be read. */
int so_teacher_feed(so_teacher *t, so_seq *seq, const int32_t *ids, int n, int n_logits,
                    so_err *err);

/* A text and the rows of it that are wanted, from `first` on. */
typedef struct so_teacher_text {
    const int32_t *ids;
    int n, first;
    unsigned want; /* SO_PASS_… of those rows */
} so_teacher_text;
/* The row computed from ids[i] is row `row` of t->pass. 0: go on, 1: that is enough, or an error.
 */
typedef int so_teacher_fn(void *user, const so_teacher *t, int i, int row);
/* Reads a text into t->seq, which is empty before and after, and calls fn for its rows in order. */
int so_teacher_each(so_teacher *t, const so_teacher_text *text, so_teacher_fn *fn, void *user,
                    so_err *err);

#endif
