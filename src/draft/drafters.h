/* The drafters that need no model, each in its own file. A create function that returns the drafter
 * never fails. The caller sets the drafter's `index` (its number in proposals, 0 to 255) and frees
 * the drafter. */
#ifndef SO_DRAFT_DRAFTERS_H
#define SO_DRAFT_DRAFTERS_H

#include "draft/drafter.h"
#include "draft/table.h"

/* Proposes nothing: plain decoding. */
so_drafter *so_none_create(void);

/* N-gram counts over the request's own latest tokens, orders max_order down to 2. Here and below, 0
 * means the default. */
typedef struct so_ngram_params {
    int max_order; /* 2 to 4; default 4 */
    int window;    /* tokens that are counted; default 8192 */
    bool draw;     /* sample from the counts (with q) instead of taking the most frequent token */
} so_ngram_params;
so_drafter *so_ngram_create(const so_ngram_params *p);

/* Prompt lookup: continues the longest suffix of the text that occurred before. */
typedef struct so_lookup_params {
    int min_len;    /* shortest match that is continued; default 2 */
    int max_tokens; /* maximum tokens in the index of one request; default 262144 */
} so_lookup_params;
so_drafter *so_lookup_create(const so_lookup_params *p);

/* The same over the texts of finished requests, kept in a corpus that several drafters may share.
 * The corpus must outlive its drafters and is used by one thread. */
typedef struct so_corpus so_corpus;
int so_corpus_create(size_t max_bytes, so_corpus **out, so_err *err);
void so_corpus_free(so_corpus *c);
void so_corpus_add(so_corpus *c, const int32_t *tokens, int n);
size_t so_corpus_tokens(const so_corpus *c); /* held now */
size_t so_corpus_bytes(const so_corpus *c);  /* allocated, at most max_bytes */
/* min_len: shortest match that is continued; default 3. */
so_drafter *so_corpus_drafter_create(so_corpus *c, int min_len);

/* Unigram or bigram counts from a file; owns the table. */
so_drafter *so_table_drafter_create(so_table *t, bool draw);

/* Follows the text the user expects (so_draft_text.expected). */
so_drafter *so_predict_create(void);

/* Uniform over the vocabulary: the baseline and the worst case. */
so_drafter *so_random_create(void);

/* Right with probability alpha, for measuring: `expected` is the target's plain output. `model` (may
 * be NULL; owned) is run for every draft, and its guesses are replaced: drafts take its time. hit: of
 * async(), the simulated chance that the outcome of a round was drafted for; negative: not simulated,
 * the only value without a model. */
so_drafter *so_oracle_create(double alpha, double hit, so_drafter *model, int n_vocab);

/* A user's function: writes at most `max` consecutive ids that may follow `tokens` to `out` and
 * returns their number; negative means failure. Every id is verified as a point, so any function is
 * exact. An invalid answer is dropped as a whole, the first time with a warning, and the step
 * continues without it. */
typedef int so_draft_fn(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                        int max);
so_drafter *so_callback_create(const char *name, so_draft_fn *fn, void *user);
/* The same with a tree: guess i is ids[i] and follows guess parents[i], which must be less than i,
 * or the text itself if parents[i] is −1. Before the call parents[i] is i − 1 (a chain). */
typedef struct so_draft_query {
    const int32_t *tokens;
    int n_tokens, n_prompt;
    int max;       /* guesses */
    int max_depth; /* longest path */
} so_draft_query;
typedef int so_draft_tree_fn(void *user, const so_draft_query *q, int32_t *ids, int32_t *parents);
so_drafter *so_callback_create_tree(const char *name, so_draft_tree_fn *fn, void *user);

/* Several drafters as one; owns them. If `first` is true, each request gets the guesses of the
 * first member that has any; if false, those of all members, merged into one tree. The engine calls
 * the members of the outermost groups one by one (so_draft_set.stages), so that each can be
 * planned; inside `model(…)` a group acts as one drafter. */
enum { SO_GROUP_MAX = 16 };
so_drafter *so_group_create(so_drafter *const *members, int n, bool first);
bool so_group_is(const so_drafter *d);
bool so_group_is_first(const so_drafter *d);
int so_group_size(const so_drafter *d); /* 1 if d is not a group */
so_drafter *so_group_member(const so_drafter *d, int i);
/* The member's part of a group's state. */
void *so_group_member_state(const so_drafter *d, void *state, int i);

#endif
