/* A user's function as a drafter, in two forms: it returns a chain of ids, or a tree.
 *
 * The function reads the text and fills arrays; it has no access to the engine's tree. Every guess
 * is verified as a point, so the output is exact for any answer.
 *
 * An answer is taken or refused as a whole. Too many guesses, an id outside the vocabulary, a
 * parent that is not an earlier guess or a path that is too deep are bugs, which would otherwise
 * only show as a drafter that never helps. A refusal affects one request in one step; it is logged,
 * the first time as a warning. Every call counts as one level of drafting, also if its answer is
 * refused, so that the planner weighs a slow function like a slow model. No state per request.
 * Thread: the engine thread. */
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/str.h"
#include "draft/drafters.h"

enum { NAME_LEN = 31, MAX_GUESSES = SO_TREE_MAX - 1 };

typedef struct callback {
    so_drafter base;
    so_drafter_vt vt; /* a copy per drafter, for the name */
    char name[NAME_LEN + 1];
    so_draft_fn *chain; /* one of the two is NULL */
    so_draft_tree_fn *tree;
    void *user;
    bool warned; /* about an invalid answer */
} callback;

/* The arrays that the function fills. */
typedef struct answer {
    int32_t ids[MAX_GUESSES], parents[MAX_GUESSES];
    int n;
} answer;

static int callback_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    (void)text;
    (void)err;
    *state = NULL;
    return 0;
}

static void callback_close(so_drafter *d, void *state) {
    (void)d;
    (void)state;
}

static void call_user(callback *c, const so_draft_query *q, answer *a) {
    for (int i = 0; i < q->max; i++) {
        a->ids[i] = -1; /* an id that is not written is refused */
        a->parents[i] = i - 1;
    }
    a->n = c->tree ? c->tree(c->user, q, a->ids, a->parents)
                   : c->chain(c->user, q->tokens, q->n_tokens, q->n_prompt, a->ids, q->max);
}

static int check_guess(const answer *a, int i, int n_vocab, so_err *err) {
    if (a->ids[i] < 0 || a->ids[i] >= n_vocab)
        return so_err_set(err, SO_ERANGE, "guess %d is token %d: must be from 0 to %d", i,
                          (int)a->ids[i], n_vocab - 1);
    if (a->parents[i] < -1 || a->parents[i] >= i)
        return so_err_set(
            err, SO_ERANGE,
            "guess %d has the parent %d: must be an earlier guess, or -1 for the text", i,
            (int)a->parents[i]);
    return SO_OK;
}

static int check(const answer *a, const so_draft_query *q, int n_vocab, so_err *err) {
    int depth[MAX_GUESSES];
    if (a->n < 0)
        return so_err_set(err, SO_EINVAL,
                          "returned %d: must be the number of guesses, 0 where there are none",
                          a->n);
    if (a->n > q->max)
        return so_err_set(err, SO_ERANGE, "returned %d guesses: must be at most %d, as asked for",
                          a->n, q->max);
    for (int i = 0; i < a->n; i++) {
        int rc = check_guess(a, i, n_vocab, err);
        if (rc != SO_OK)
            return rc;
        depth[i] = a->parents[i] < 0 ? 1 : depth[a->parents[i]] + 1;
        if (depth[i] > q->max_depth)
            return so_err_set(err, SO_ERANGE,
                              "guess %d is %d tokens ahead of the text: must be at most %d, as "
                              "asked for",
                              i, depth[i], q->max_depth);
    }
    return SO_OK;
}

static void add(const callback *c, const so_draft_job *job, const answer *a) {
    int node[MAX_GUESSES];
    for (int i = 0; i < a->n; i++) {
        int parent = a->parents[i] < 0 ? 0 : node[a->parents[i]];
        node[i] = parent < 0
                      ? -1
                      : so_draft_add(job, parent, a->ids[i], SO_Q_POINT, -1, c->base.index, 0.5f);
    }
}

static int callback_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    callback *c = (callback *)d;
    (void)err;
    for (int j = 0; j < n_jobs; j++) {
        so_draft_job *job = &jobs[j];
        so_draft_query q = {.tokens = job->tokens,
                            .n_tokens = job->n_tokens,
                            .n_prompt = job->n_prompt,
                            .max = SO_MIN(job->max_nodes, MAX_GUESSES),
                            .max_depth = job->max_depth};
        so_err why = {0};
        answer a;
        if (!c->tree)
            q.max = SO_MIN(q.max, q.max_depth);
        if (q.max < 1 || q.max_depth < 1)
            continue;
        call_user(c, &q, &a);
        job->n_levels = 1; /* the cost is one call, for any number of guesses */
        if (check(&a, &q, job->tree->n_vocab, &why) == SO_OK) {
            add(c, job, &a);
        } else {
            so_log(c->warned ? SO_LOG_DEBUG : SO_LOG_WARN,
                   "drafter %s: %s; the step goes on without its guesses", c->name, why.msg);
            c->warned = true;
        }
    }
    return SO_OK;
}

static void callback_free(so_drafter *d) { free(d); }

static callback *create(const char *name, void *user) {
    callback *c = SO_NEW(callback);
    size_t len = strlen(name);
    memcpy(c->name, name, SO_MIN(len, (size_t)NAME_LEN));
    c->vt = (so_drafter_vt){
        .name = c->name,
        .free = callback_free,
        .open = callback_open,
        .close = callback_close,
        .propose = callback_propose,
    };
    c->base.vt = &c->vt;
    c->base.has_cost = c->base.flat_cost = true;
    c->user = user;
    return c;
}

so_drafter *so_callback_create(const char *name, so_draft_fn *fn, void *user) {
    callback *c = create(name, user);
    c->chain = fn;
    return &c->base;
}

so_drafter *so_callback_create_tree(const char *name, so_draft_tree_fn *fn, void *user) {
    callback *c = create(name, user);
    c->tree = fn;
    return &c->base;
}
