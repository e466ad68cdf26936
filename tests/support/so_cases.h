/* Requests to an engine over a tiny model, with the tokens plain decoding gives them: what tests of
 * speculation compare with. */
#ifndef SO_CASES_H
#define SO_CASES_H

#include "engine/engine.h"
#include "so_rig.h"

enum { SO_CASE_PREDICT = 24, SO_CASES = 6, SO_CASE_PROMPT = 48, SO_CASE_CTX = 96 };

typedef struct so_case {
    int32_t prompt[SO_CASE_PROMPT];
    int n_prompt;
    so_sample_params sample;
    int n_logprobs;
    int32_t want[SO_CASE_PREDICT];
    int n_want;
} so_case;

/* Opens tests/golden/models/NAME. */
void so_case_model(so_rig *r, const char *name);
/* The c-th case without `want`: greedy and sampled, with and without penalties, bias and cuts. */
void so_case_make(int c, int n_vocab, so_case *out);
/* Opens two of them and makes all cases, with what the first says by plain decoding. */
void so_case_open(so_rig *target, const char *target_name, so_rig *draft, const char *draft_name,
                  so_case cases[SO_CASES]);
/* Fills `want` of n cases by plain decoding, one after the other. */
void so_case_plain(const so_rig *target, so_case *cases, int n);

typedef struct so_case_engine_opts {
    const so_rig *draft; /* NULL: none */
    int n_parallel, n_batch;
    int n_ctx;                      /* 0: SO_CASE_CTX */
    int n_pages;                    /* 0: a context for each request */
    float draft_temp;               /* −1: the request's own */
    so_draft_fn *drafter;           /* `user`; NULL: none */
    so_draft_tree_fn *tree_drafter; /* the same as a tree */
    void *drafter_user;
    const so_async_faults *async_faults;
    const char *worker_key; /* of draft workers; may be NULL */
    so_step_fn *on_step;    /* may be NULL */
    void *step_user;
} so_case_engine_opts;

so_engine *so_case_engine(const so_rig *target, const so_case_engine_opts *o);
/* The request of a case. Drafters that expect a text are given `want`, unless spec names one. */
so_request_opts so_case_opts(const so_case *c, const so_spec_opts *spec);
so_request *so_case_submit(so_engine *e, const so_case *c, const so_spec_opts *spec);
/* Submits, steps until nothing is left, and gives back the request. */
so_request *so_case_finish(so_engine *e, const so_request_opts *o);
/* Steps until nothing is left. */
void so_case_run(so_engine *e);
/* Runs the case alone with a drafter that cannot be wrong: every guess at every depth stands, the
 * text is plain decoding's (in distribution, where `reject` draws), and it takes ⌈n/(K+1)⌉ passes.
 */
void so_case_perfect(const so_rig *target, const so_rig *draft, const so_case *c,
                     so_verify_mode verify, const char *drafter, int length);
/* Fails unless the request has said the n tokens. */
void so_case_expect(const so_request *r, const int32_t *want, int n);
/* Whether the request ended with exactly the plain tokens. */
bool so_case_same(const so_request *r, const so_case *c);

#endif
