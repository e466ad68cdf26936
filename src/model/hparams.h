/* The shape of a model, read from GGUF metadata or config.json. Every number is checked against a
 * range before anything is allocated from it. Pure reads; any thread. */
#ifndef SO_MODEL_HPARAMS_H
#define SO_MODEL_HPARAMS_H

#include "format/checkpoint.h"

/* The architectures. arch.h describes their properties. */
typedef enum so_arch {
    SO_ARCH_LLAMA,  /* Llama 1 to 3.2, Mistral, SmolLM2 */
    SO_ARCH_QWEN2,  /* Llama with biases on q, k, v */
    SO_ARCH_QWEN3,  /* Llama with a norm on each head of q and k */
    SO_ARCH_GEMMA3, /* norms also after attention and MLP, GELU; rope_base_local */
    SO_ARCH_GPT2,   /* learned positions, layer norm, biases everywhere */
    SO_ARCH_T5,     /* an encoder and a decoder, relative positions; t5.h */
} so_arch;

typedef enum so_rope_scaling {
    SO_ROPE_SCALING_NONE,
    SO_ROPE_SCALING_LINEAR,
    SO_ROPE_SCALING_LLAMA3,
    SO_ROPE_SCALING_YARN,
} so_rope_scaling;

typedef struct so_hparams {
    so_arch arch;
    char arch_name[32]; /* as the file states it */
    int n_layers, d_model, n_heads, n_heads_kv, head_dim, d_ff, n_vocab, n_ctx_train;
    float norm_eps;
    float attn_scale; /* factor of q·k */
    float embed_scale;
    bool tied;                         /* the output matrix is the embedding matrix */
    bool bias_qkv, bias_out, bias_mlp; /* of q, k, v; of the attention's output; of the MLP */
    bool qk_norm;                      /* an RMS norm on each head of q and k */
    int window;                        /* 0: none */
    int window_pattern; /* every window_pattern-th layer has no window; 0: all layers have it */
    bool rope_halves;   /* see SO_OP_ROPE; false for the permuted Llama weights of GGUF */
    float rope_base;
    float rope_base_local; /* Gemma 3: base of layers with a window, which use no rope scaling;
                              0: they use rope_base */
    int rope_dim;          /* rotated dimensions of a head; 0: learned positions instead of rope */
    so_rope_scaling rope_scaling;
    float rope_factor, rope_low, rope_high; /* llama3: low_freq_factor, high_freq_factor */
    float rope_attn_factor, rope_beta_fast, rope_beta_slow; /* yarn */
    int rope_ctx_orig;                                      /* context length before rope scaling */
    /* Encoder-decoder models: n_layers counts the decoder's layers. */
    int n_enc_layers;              /* 0: no encoder */
    int rel_buckets, rel_distance; /* of the position bias: buckets, and where the last begins */
    int decoder_start;             /* token */
    bool gated;                    /* down(gelu(gate) · up); else down(relu(up)) */
    float output_scale;            /* of the logits */
} so_hparams;

/* Whether a layer attends only to the last `window` positions. */
static inline bool so_hparams_layer_local(const so_hparams *hp, int layer) {
    return hp->window > 0 && (hp->window_pattern == 0 || (layer + 1) % hp->window_pattern != 0);
}

int so_hparams_read(const so_checkpoint *ck, so_hparams *out, so_err *err);
/* The two sources. `file` is the name of the JSON file for messages. */
int so_hparams_from_gguf(const so_gguf *g, so_hparams *out, so_err *err);
int so_hparams_from_json(const json_t *config, const char *file, so_hparams *out, so_err *err);
int64_t so_hparams_kv_bytes_per_token(const so_hparams *hp, so_dtype kv_dtype);

#endif
