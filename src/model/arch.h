/* The properties of an architecture, as data. All code of src/model that reads, loads, converts or
 * sizes a model uses these properties and never tests for an architecture by name. To add an
 * architecture:
 *   1. a value of the enum so_arch in hparams.h;
 *   2. a file with its so_arch_info, its tensor names and its forward pass (like llama.c, gemma3.c,
 *      gpt2.c);
 *   3. the declaration of that so_arch_info below;
 *   4. its row in the table of arch.c;
 *   5. tests: a small model of it in tests/golden, its name in the lists of tests/model
 *      (test_golden.c, test_invariance.c, test_convert.c, test_budget.c).
 * Private to src/model. */
#ifndef SO_MODEL_ARCH_H
#define SO_MODEL_ARCH_H

#include "model/fields.h"
#include "model/names.h"

struct so_pass;
struct so_loader;

typedef enum so_bias_kind {
    SO_BIAS_STATED, /* as config.json states, or as the tensors of a GGUF file show */
    SO_BIAS_QKV,    /* q, k and v have biases, regardless of config.json */
    SO_BIAS_ALL,    /* every matrix has a bias */
} so_bias_kind;

typedef enum so_window_kind {
    SO_WINDOW_NONE,
    SO_WINDOW_ALL,      /* a window, if stated, applies to every layer (Mistral) */
    SO_WINDOW_PATTERN,  /* every n-th layer has full attention, the others a window (Gemma) */
    SO_WINDOW_SWITCHED, /* a window only if config.json switches it on, and not in the first layers;
                           GGUF has no key for it (Qwen) */
} so_window_kind;

/* Values of keys that config.json omits: the defaults of the transformers class. 0: the key is
 * required, unless noted. */
typedef struct so_arch_defaults {
    int n_vocab, d_model, d_ff, n_layers, n_heads;
    int n_heads_kv; /* 0: n_heads */
    int head_dim;   /* 0: d_model / n_heads */
    int n_ctx;
    int window, window_pattern; /* 0: none */
    bool tied;
} so_arch_defaults;

typedef struct so_arch_info {
    const char *names[3];   /* in GGUF and model_type (config.json); names[0] is written to GGUF */
    const char *aliases[2]; /* also accepted, not listed in messages */
    const char *classes[3]; /* compared with "architectures"[0] if model_type is missing */

    /* The forward pass: submits the embedding, the layers and so_pass_output. */
    void (*forward)(struct so_pass *p);
    bool layer_norm;        /* layer norms with bias; else RMS norms */
    bool learned_positions; /* a position matrix of n_ctx rows instead of rope */
    bool gated_mlp;         /* down(act(gate) · up); else down(act(up)) */
    bool post_norms;        /* norms also after attention and MLP */
    bool qk_norm;
    bool scaled_embed;                  /* embeddings are multiplied by sqrt(d_model) */
    bool reads_target_hidden;           /* draft models may read their target's hidden states */
    bool encoder;                       /* an encoder, and relative positions instead of rope */
    void (*load)(struct so_loader *ld); /* loads the layers; NULL: as load.c does for decoders */
    /* The name in a folder of the tensor with a GGUF name outside the layers; false: none. If set,
     * the tables of names below are not used. */
    bool (*folder_name)(const char *gguf, char *buf, size_t cap);
    bool (*ignored)(so_str name); /* tensors that the pass does not need; NULL: none */
    so_bias_kind bias;
    so_window_kind window;
    double rope_base, rope_base_local; /* defaults; local 0: all layers use rope_base */

    /* Files. */
    const so_name_pair *global_names, *layer_names; /* tensors outside and inside the layers */
    int n_global_names, n_layer_names;
    const char *hf_prefix, *hf_layers;  /* "model." and "layers" of "model.layers.0.…" */
    bool fused_qkv;                     /* q, k and v are one tensor */
    bool permuted_gguf;                 /* GGUF files permute the rows of q and k, see names.h */
    void (*infer_gguf)(so_hparams *hp); /* infers what GGUF has no key for; may be NULL */

    /* config.json. */
    void (*read_config)(so_fields *f, so_hparams *hp, const struct so_arch_info *a);
    const char *act_key, *act, *act_alias; /* key, and the activation it must name */
    double query_scalar; /* default of query_pre_attn_scalar; 0: there is no such key */
    so_arch_defaults defaults;
} so_arch_info;

/* The rows of the table in arch.c. */
extern const so_arch_info so_arch_llama, so_arch_qwen2, so_arch_qwen3, so_arch_gemma3, so_arch_gpt2,
    so_arch_t5;

const so_arch_info *so_arch_get(so_arch arch);
/* Look up by the name or the class that a file states; false: not supported. */
bool so_arch_by_name(so_str name, so_arch *out);
bool so_arch_by_class(so_str name, so_arch *out);
/* "llama, mistral, …" for messages. */
enum { SO_ARCH_LIST_CAP = 128 };
const char *so_arch_list(char buf[SO_ARCH_LIST_CAP]);

static inline const char *so_arch_eps_key(const so_arch_info *a) { /* in GGUF */
    return a->layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon";
}

/* Readers of config.json (hparams_json.c): keys of Llama and similar models, and keys of GPT-2. */
void so_config_read_llama(so_fields *f, so_hparams *hp, const so_arch_info *a);
void so_config_read_gpt2(so_fields *f, so_hparams *hp, const so_arch_info *a);
void so_config_read_t5(so_fields *f, so_hparams *hp, const so_arch_info *a);

#endif
