/* A request without a model: a text, a tree and one drafter. */
#ifndef SO_TEST_DRAFT_RIG_H
#define SO_TEST_DRAFT_RIG_H

#include "so_test.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "draft/drafters.h"

enum { RIG_TEXT = 8192, RIG_VOCAB = 1000 };

typedef struct rig {
    so_drafter *d;
    so_tree tree;
    void *state;
    int32_t text[RIG_TEXT];
    int n, n_prompt;
    uint64_t seed;
    uint32_t round;
    float temp;
} rig;

typedef struct dice {
    uint64_t seed;
    uint32_t n;
} dice;

static inline double dice_uniform(dice *d) {
    so_rng_key key = {.seed = d->seed, .purpose = SO_RNG_TEST};
    return so_rng_uniform(&key, d->n++);
}
static inline int dice_below(dice *d, int n) { return (int)(dice_uniform(d) * n); }

static inline void rig_open_expecting(rig *r, so_drafter *d, const int32_t *prompt, int n_prompt,
                                      const int32_t *expected, int n_expected) {
    so_err err = {0};
    memset(r, 0, sizeof *r);
    r->d = d;
    so_tree_init(&r->tree, RIG_VOCAB, 8);
    so_draft_text text = {.prompt = prompt,
                          .n_prompt = n_prompt,
                          .expected = expected,
                          .n_expected = n_expected,
                          .max_tokens = RIG_TEXT};
    SO_OK_OR_FAIL(d->vt->open(d, &text, &r->state, &err), err);
    if (n_prompt)
        memcpy(r->text, prompt, (size_t)n_prompt * sizeof *prompt);
    r->n = r->n_prompt = n_prompt;
}
static inline void rig_open(rig *r, so_drafter *d, const int32_t *prompt, int n_prompt) {
    rig_open_expecting(r, d, prompt, n_prompt, NULL, 0);
}

/* Ends the request; the drafter stays. */
static inline void rig_end(rig *r) {
    r->d->vt->close(r->d, r->state);
    so_tree_deinit(&r->tree);
}
static inline void rig_close(rig *r) {
    rig_end(r);
    so_drafter_free(r->d);
}

/* Appends tokens to the text; observe: passes them to the drafter, else it has to catch up. */
static inline void rig_emit(rig *r, const int32_t *tokens, int n, bool observe) {
    memcpy(r->text + r->n, tokens, (size_t)n * sizeof *tokens);
    r->n += n;
    if (observe)
        so_drafter_observe(r->d, r->state, tokens, n);
}

static inline so_draft_job rig_job(rig *r, int max_nodes, int max_depth) {
    so_tree_reset(&r->tree, r->text[r->n - 1], r->n - 1);
    return (so_draft_job){.state = r->state,
                          .tokens = r->text,
                          .n_tokens = r->n,
                          .n_prompt = r->n_prompt,
                          .tree = &r->tree,
                          .max_nodes = max_nodes,
                          .max_depth = max_depth,
                          .seed = r->seed,
                          .round = r->round++,
                          .temp = r->temp};
}

/* Drafts a chain of at most `max` guesses into `out`; returns its length. */
static inline int rig_chain(rig *r, int max, int32_t *out) {
    so_err err = {0};
    so_draft_job job = rig_job(r, max, max);
    SO_OK_OR_FAIL(r->d->vt->propose(r->d, &job, 1, &err), err);
    so_tree_check(&r->tree);
    assert_in_range(r->tree.n_nodes, 1, max + 1);
    for (int i = 1; i < r->tree.n_nodes; i++) {
        assert_int_equal(r->tree.nodes[i].parent, i - 1);
        out[i - 1] = r->tree.nodes[i].token;
    }
    return r->tree.n_nodes - 1;
}

/* Longest suffix of text[0..n) that ends earlier; *end: its latest earlier end. */
static inline int naive_match(const int32_t *text, int n, int *end) {
    int best = 0;
    *end = 0;
    for (int e = n - 1; e >= 1; e--) {
        int len = 0;
        while (len < e && text[e - 1 - len] == text[n - 1 - len])
            len++;
        if (len > best)
            best = len, *end = e;
    }
    return best;
}

static inline void assert_tokens(const int32_t *got, int n, const int32_t *want, int n_want) {
    assert_int_equal(n, n_want);
    for (int i = 0; i < n; i++)
        assert_int_equal(got[i], want[i]);
}

#endif
