/* Teacher forcing: computes the logits of given tokens, for commands that need logits rows and no
 * engine. It owns a cache, a pass and one sequence; callers may create further sequences in the
 * cache (so_seq_create(t->kv)).
 *
 * The decoder of an encoder-decoder model attends to a source text. A caller that gives some states
 * their length (max_source) and reads one for each sequence (so_teacher_read); for all others such
 * models are an error.
 * One thread. */
#ifndef SO_CLI_TEACHER_H
#define SO_CLI_TEACHER_H

#include "kv/kv.h"
#include "model/source.h"

typedef struct so_teacher {
    so_kv *kv;
    so_pass *pass;
    so_seq *seq;
    so_sources *sources; /* NULL: the model has no encoder */
    so_row *rows;        /* [max_rows] */
    int max_rows;
    unsigned feed_want; /* SO_PASS_… of so_teacher_feed; logits unless changed */
} so_teacher;

typedef struct so_teacher_opts {
    int n_pages;              /* size of the cache, for all sequences */
    int max_rows, max_logits; /* maximum in one pass */
    so_dtype kv_dtype;
    int max_source; /* longest source text; 0: none is given */
    int n_sources;  /* different ones that sequences have at a time; 0: one */
} so_teacher_opts;

/* Whether a teacher without source texts can run the model. */
int so_teacher_check(const so_model *m, so_err *err);

/* so_teacher_close must be called also after a failure. */
int so_teacher_open(so_teacher *t, const so_model *m, const so_teacher_opts *o, so_err *err);
void so_teacher_close(so_teacher *t);

/* With an encoder: makes the text the source of seq, which is empty. Else does nothing. */
int so_teacher_read(so_teacher *t, so_seq *seq, const int32_t *ids, int n, so_err *err);

/* Runs a chain of n ≤ max_rows tokens after seq and leaves it uncommitted: the caller commits or
 * aborts. Tokens from first_logit on have logits; the first of them is row 0 of the pass's results.
 * want: SO_PASS_…. NaN or Inf logits are an error. */
int so_teacher_rows(so_teacher *t, so_seq *seq, const int32_t *ids, int n, int first_logit,
                    unsigned want, so_err *err);
/* Appends n tokens in passes of max_rows. The last n_logits of them get logits, of which those of
 * the last pass are readable afterwards. */
int so_teacher_feed(so_teacher *t, so_seq *seq, const int32_t *ids, int n, int n_logits,
                    so_err *err);

/* A text, and the first of its rows to visit. */
typedef struct so_teacher_text {
    const int32_t *ids;
    int n, first;
    unsigned want; /* SO_PASS_…, results of the visited rows */
} so_teacher_text;
/* Visits the logits computed from ids[i], row `row` of t->pass. Returns 0 to continue, 1 to stop,
 * or an error. */
typedef int so_teacher_fn(void *user, const so_teacher *t, int i, int row);
/* Computes a text in t->seq, which is empty before and after, and calls fn for its rows in
 * order. */
int so_teacher_each(so_teacher *t, const so_teacher_text *text, so_teacher_fn *fn, void *user,
                    so_err *err);

#endif
