/* The drafter `model`: a small model with the target's vocabulary. See model.c. */
#ifndef SO_DRAFT_MODEL_H
#define SO_DRAFT_MODEL_H

#include "draft/spec.h"
#include "kv/kv.h"
#include "model/model.h"
#include "token/tokenizer.h"

typedef struct so_model_drafter_opts {
    int n_vocab;    /* of the target: width of trees and rows */
    int d_model;    /* of the target: width of its hidden states, for drafts that read them */
    int n_ctx;      /* of the target; the draft's own context may be shorter and then ends
                     * drafting */
    bool encoder;   /* the target has one */
    int n_parallel; /* requests that draft at the same time */
    int n_batch;    /* maximum tokens of one catch-up pass */
    int max_draft;  /* deepest draft */
    so_dtype kv_dtype;
    so_kv_layout kv_layout;
    int n_pages;              /* of its cache; 0: for n_parallel texts of n_ctx */
    bool prefix_cache;        /* keep pages of finished texts for other requests; paged only */
    double size;              /* the draft's weights in bytes, relative to the target's */
    uint64_t id;              /* so_drafter.id */
    double claimed_agreement; /* so_drafter.claimed_agreement */
    float temp;               /* negative: the temperature of the request */
    float p_min; /* a draft ends where its most likely token has less probability; 0: never */
    /* Trees (model_tree.c); without k and best: chains. */
    int k;              /* children of a node; 0: chains, or a default with `best` */
    bool best;          /* the most likely paths within the budget */
    bool distinct;      /* sampled siblings are drawn without replacement; always with `best` */
    int nodes;          /* budget, 1 to SO_TREE_MAX − 1 */
    so_fixed_tree tree; /* of tree=FILE, without k and best */
    bool ahead;         /* it drafts ahead, inside async() */
} so_model_drafter_opts;

/* Sets the options of trees that a spec names, and reads its tree file; o->nodes is the budget if it
 * names none. */
int so_model_opts_from_spec(const so_spec *s, const so_spec_node *n, so_model_drafter_opts *o,
                            so_err *err);

/* The model must outlive the drafter. `inner` (may be NULL) drafts for the draft model; it belongs
 * to the drafter on success only. */
int so_model_drafter_create(const so_model *m, const so_model_drafter_opts *o, so_drafter *inner,
                            so_drafter **out, so_err *err);

/* Checks that ids mean the same to draft and target: same pieces, same end token; ids that only one
 * of them has must be unused or control tokens. SO_EMISMATCH: the message has both sizes and the
 * first difference. */
int so_draft_check_tokenizers(const so_tokenizer *target, const so_tokenizer *draft, so_err *err);
/* The same comparison for processes that have one tokenizer each: a hash of the pieces up to the last
 * one that is neither unused nor a control token, and of the end token. 0 if tok is NULL. */
uint64_t so_draft_vocab_hash(const so_tokenizer *tok);

#endif
