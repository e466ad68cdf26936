/* What separates one architecture from the others, as data. Reading shapes, tensor names, loading,
 * converting and counting go by these facts and know no architecture by name, so a new one is a
 * value of so_arch, a row in arch.c, and a file with its description, its tensor names and its
 * forward pass (llama.c, gemma3.c, gpt2.c). Private to src/model. */
#ifndef SO_MODEL_ARCH_H
#define SO_MODEL_ARCH_H

#include "model/fields.h"
#include "model/names.h"

struct so_pass;

typedef enum so_bias_kind {
    SO_BIAS_STATED, /* attention and mlp have biases where the file states or holds them */
    SO_BIAS_QKV,    /* q, k and v always, whatever config.json states */
    SO_BIAS_ALL,    /* every matrix */
} so_bias_kind;

typedef enum so_window_kind {
    SO_WINDOW_NONE,
    SO_WINDOW_ALL,      /* a window, where stated, is that of every layer (Mistral) */
    SO_WINDOW_PATTERN,  /* every n-th layer is full (Gemma) */
    SO_WINDOW_SWITCHED, /* only behind a switch of config.json, the first layers full; GGUF has no
                           key for it (Qwen) */
} so_window_kind;

/* What config.json may leave out because it is the default of its class; 0: it must be stated. */
typedef struct so_arch_defaults {
    int n_vocab, d_model, d_ff, n_layers, n_heads;
    int n_heads_kv; /* 0: as many as heads */
    int head_dim;   /* 0: d_model / n_heads */
    int n_ctx, window, window_pattern;
    bool tied;
} so_arch_defaults;

typedef struct so_arch_info {
    const char *names[3];   /* in GGUF and model_type, the first in the GGUF files we write */
    const char *aliases[2]; /* accepted too; not listed in messages */
    const char *classes[3]; /* first of "architectures" in config.json, without model_type */

    /* The forward pass: submits embedding, layers and so_pass_output. */
    void (*forward)(struct so_pass *p);
    bool layer_norm;        /* with a bias; else RMS norms */
    bool learned_positions; /* a matrix of n_ctx rows instead of rope */
    bool gated_mlp;         /* down(act(gate) · up); else down(act(up)) */
    bool post_norms;        /* a norm after attention and mlp as well */
    bool qk_norm;
    bool scaled_embed; /* embeddings times sqrt(d_model) */
    bool reads_states; /* a draft of it may read its target's states */
    so_bias_kind bias;
    so_window_kind window;
    double rope_base, rope_base_local; /* defaults; local 0: all layers rotate alike */

    /* Files. */
    const so_name_pair *global_names, *layer_names; /* tensors outside and inside layers */
    int n_global_names, n_layer_names;
    const char *hf_prefix, *hf_layers; /* "model." and "layers" of "model.layers.0.…" */
    bool fused_qkv;                    /* q, k and v are one tensor */
    bool permuted_gguf;                /* GGUF's q and k pair neighbours for rope, folders halves */
    void (*infer_gguf)(so_hparams *hp); /* sets what has no key in GGUF; may be NULL */

    /* config.json. */
    void (*read_config)(so_fields *f, so_hparams *hp, const struct so_arch_info *a);
    const char *act_key, *act, *act_alias; /* the activation that its key must name */
    double query_scalar; /* default of query_pre_attn_scalar; 0: there is no such key */
    so_arch_defaults defaults;
} so_arch_info;

/* Rows of arch.c. */
extern const so_arch_info so_arch_llama, so_arch_qwen2, so_arch_qwen3, so_arch_gemma3, so_arch_gpt2;

const so_arch_info *so_arch_get(so_arch arch);
/* By the name or the class that a file gives it; false where there is none. */
bool so_arch_by_name(so_str name, so_arch *out);
bool so_arch_by_class(so_str name, so_arch *out);
/* "llama, mistral, …" for messages. */
enum { SO_ARCH_LIST_CAP = 128 };
const char *so_arch_list(char buf[SO_ARCH_LIST_CAP]);

static inline const char *so_arch_eps_key(const so_arch_info *a) { /* in GGUF */
    return a->layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon";
}

/* Readers of config.json (hparams_json.c): with the keys of Llama and its relatives, or GPT-2's. */
void so_config_read_llama(so_fields *f, so_hparams *hp, const so_arch_info *a);
void so_config_read_gpt2(so_fields *f, so_hparams *hp, const so_arch_info *a);

#endif
