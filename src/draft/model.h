/* The drafter `model`: a small model that speaks the target's vocabulary. See model.c. */
#ifndef SO_DRAFT_MODEL_H
#define SO_DRAFT_MODEL_H

#include "draft/drafter.h"
#include "kv/kv.h"
#include "model/model.h"
#include "token/tokenizer.h"

typedef struct so_model_drafter_opts {
    int n_vocab;    /* of the target: trees and rows have this width */
    int d_model;    /* of the target: the width of its states, for drafts that read them */
    int n_ctx;      /* of the target; drafting ends where the draft's own context does */
    int n_parallel; /* requests that draft at once */
    int n_batch;    /* most tokens in one catch-up pass */
    int max_draft;  /* deepest draft */
    so_dtype kv_dtype;
    so_kv_layout kv_layout;
    int n_pages;       /* of its cache; 0: enough for n_parallel texts of n_ctx */
    bool prefix_cache; /* pages of finished texts are kept for others; not with slots */
    double size;       /* of the target's weights that the draft's are */
    uint64_t id;       /* so_drafter.id */
    double claimed;    /* so_drafter.claimed */
    float temp;        /* negative: the request's */
    float p_min;       /* a draft ends where its likeliest token has less than this; 0: never */
} so_model_drafter_opts;

/* The model must outlive the drafter. `inner`, or NULL, drafts for the draft; it belongs to the
 * drafter on success only. */
int so_model_drafter_create(const so_model *m, const so_model_drafter_opts *o, so_drafter *inner,
                            so_drafter **out, so_err *err);

/* Whether a draft's ids mean the same to the target: the same pieces, kinds and end token; rows
 * that only one of them has must be unused. SO_EMISMATCH says what differs and where. */
int so_draft_check_tokenizers(const so_tokenizer *target, const so_tokenizer *draft, so_err *err);

#endif
