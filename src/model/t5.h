/* The weights of an encoder-decoder model, and the encoder. t5.c has the drawings. Private to
 * src/model. */
#ifndef SO_MODEL_T5_H
#define SO_MODEL_T5_H

#include "model/fields.h"
#include "model/impl.h"

typedef struct so_t5_layer {
    so_norm attn_norm, cross_norm, ffn_norm; /* cross_…: decoder only */
    so_linear q, k, v, o;
    so_linear cross_q, cross_k, cross_v, cross_o;
    so_linear gate, up, down; /* gate only if so_hparams.gated */
} so_t5_layer;

typedef struct so_t5 {
    so_t5_layer *enc, *dec; /* [n_enc_layers], [n_layers] */
    so_norm enc_out_norm;
    so_view enc_bias, dec_bias; /* [n_heads][2·rel_distance + 1], see SO_OP_ATTENTION */
} so_t5;

void so_t5_free(so_t5 *t); /* NULL is allowed */

/* Reading the shape. */
void so_t5_read_gguf(so_fields *f, so_hparams *hp);
void so_t5_finish(so_fields *f, so_hparams *hp); /* checks, and what both sources have in common */

/* The bucket of a distance (position of the key − position of the query). `both`: the encoder's,
 * which also has buckets for later positions. */
int so_t5_bucket(int distance, bool both, int n_buckets, int max_distance);

/* Buffers of an encoder's pass over one text; rows: its length. */
typedef struct so_t5_pass {
    const so_model *model;
    int n; /* rows */
    so_view x, h, q, k, v, att, gate, up;
    so_view ids, positions, rows, slots, pages; /* slots: of the text's own keys and values */
    so_kv_store *own;                           /* one layer, used by all layers in turn */
    so_view cross_slots;
    so_kv_store *cross; /* keys and values for the decoder, all its layers */
} so_t5_pass;

/* Submits the encoder and the keys and values of the decoder's cross-attention. */
void so_t5_encode(const so_t5_pass *p);

#endif
