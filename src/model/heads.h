/* Decoding heads: small networks that guess several tokens ahead from one hidden state of a target.
 *
 *   kind        what a head computes before the output matrix
 *   ─────────   ──────────────────────────────────────────────────────────────────────────────
 *   medusa      residual blocks: x + silu(W x + b), one after the other
 *   blockwise   one block of its own width: x + V silu(W x + b)
 *   lookahead   nothing. The file has input embeddings for rows after the text; the target itself
 *               computes their hidden states, and each is projected as it is
 *
 * The output matrix is the target's own, or a head's own if the file has one; of a vocabulary subset
 * (draft files, docs/formats.md) only those rows are used. Files are GGUF files of architecture
 * `sooth-heads`, or folders with published Medusa heads.
 *
 * Position. The target samples token i + 1 from its hidden state at position i (after the last
 * norm). Head k, from 1, reads this state and guesses token i + 1 + k. When the drafter runs, token
 * i + 1 is already decided: it is the root of the tree, and head 1 guesses the first level. (In the
 * paper the tree begins with the candidates of the target's own output, because there token i + 1 is
 * not decided yet.)
 *
 * Thread: one at a time per backend, as for passes. */
#ifndef SO_MODEL_HEADS_H
#define SO_MODEL_HEADS_H

#include "model/model.h"

#define SO_HEADS_ARCH "sooth-heads"
enum { SO_HEADS_MAX = 16, SO_HEADS_MAX_LAYERS = 8, SO_HEADS_MAX_RANKS = 64 };

typedef enum so_heads_kind {
    SO_HEADS_MEDUSA,
    SO_HEADS_BLOCKWISE,
    SO_HEADS_LOOKAHEAD,
    SO_HEADS_N_KINDS
} so_heads_kind;
const char *so_heads_kind_name(so_heads_kind k);

/* What a file says about itself. */
typedef struct so_heads_info {
    so_heads_kind kind;
    int n_heads;
    int n_layers; /* medusa: residual blocks of a head, 0 to SO_HEADS_MAX_LAYERS */
    int d_hidden; /* blockwise: width of a head's block */
    /* Optional, 0 ranks if absent: how often the guess of a rank was right on held-out text. */
    int n_ranks;
    double accuracy[SO_HEADS_MAX][SO_HEADS_MAX_RANKS];
} so_heads_info;

/* Whether a checkpoint holds heads; does not check more. */
bool so_heads_is(const so_checkpoint *ck);
bool so_heads_is_gguf(const so_gguf *g);
/* Reads and checks the metadata. SO_ENOTFOUND: these are no heads. */
int so_heads_read_info(const so_checkpoint *ck, so_heads_info *out, so_err *err);
/* The same for a file of which so_heads_is_gguf is true. */
int so_heads_read_gguf(const so_gguf *g, so_heads_info *out, so_err *err);

typedef struct so_heads so_heads;

/* Loads heads for a target, on its backend; for batches of at most max_rows states. Every tensor must
 * have the shape that metadata and target require. The caller keeps ck and the target open. */
int so_heads_load(so_checkpoint *ck, const so_model *target, int max_rows, so_heads **out,
                  so_err *err);
void so_heads_free(so_heads *h); /* NULL is fine */
const so_heads_info *so_heads_get_info(const so_heads *h);
size_t so_heads_weight_bytes(const so_heads *h); /* read by one run, the output matrix included */
/* The tokens of a logits row, ascending; NULL: all, 0, 1, … */
const int32_t *so_heads_subset(const so_heads *h);
int so_heads_logits_len(const so_heads *h);
int so_heads_max_rows(const so_heads *h);
/* lookahead: [n_heads][d_model], inputs of the first layer. NULL for the other kinds. */
const float *so_heads_embeddings(const so_heads *h);

/* Computes the logits of all heads for n states, x[n][d_model]; lookahead: one row for each state.
 * Row-invariant: a row's bits do not depend on the others. */
int so_heads_run(so_heads *h, const float *x, int n, so_err *err);
/* Results of the last run: logits of the state's head (from 0; 0 for lookahead), [logits_len]. */
const float *so_heads_logits(const so_heads *h, int state, int head);
/* Whether that row has neither NaN nor infinity. */
bool so_heads_row_is_finite(const so_heads *h, int state, int head);

#endif
