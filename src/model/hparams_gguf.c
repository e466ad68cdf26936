/* The shape of a model from GGUF metadata: keys of the form <architecture>.<key>.
 *
 * Owns the mapping of keys. Where GGUF has no key (Gemma's attention scale, biases), the
 * architecture's description states the rule that its files follow. Keys of unsupported features
 * that would change the result are refused by name. Any thread. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/arch.h"
#include "model/heads.h"
#include "model/t5.h"

static void refuse_arch(const so_gguf *g, so_str name, so_err *err) {
    char list[SO_ARCH_LIST_CAP];
    so_str kind = so_str_c("medusa");
    if (!so_heads_is_gguf(g)) {
        so_err_set(err, SO_EUNSUPPORTED,
                   "%s: architecture '%.*s' (general.architecture) is not supported; supported "
                   "are %s",
                   so_gguf_path(g), SO_STR_ARG(name), so_arch_list(list));
        return;
    }
    (void)so_gguf_get_str(g, "sooth.heads.kind", &kind,
                          NULL); /* damaged: medusa, for the message */
    so_err_set(err, SO_EUNSUPPORTED,
               "%s: holds heads for a model, not a model: use them with --spec '%.*s(FILE)'",
               so_gguf_path(g), SO_STR_ARG(kind));
}

static const char *arch_prefix(const so_gguf *g, so_hparams *hp, char *buf, size_t cap,
                               so_err *err) {
    so_str name;
    if (so_gguf_get_str(g, "general.architecture", &name, err) != 0) {
        so_err_prefix(err, "%s", so_gguf_path(g));
        return NULL;
    }
    if (!so_arch_by_name(name, &hp->arch)) {
        refuse_arch(g, name, err);
        return NULL;
    }
    snprintf(hp->arch_name, sizeof hp->arch_name, "%.*s", (int)name.len, name.ptr);
    snprintf(buf, cap, "%s.", hp->arch_name);
    return buf;
}

static void refuse_unknown(so_fields *f) {
    so_fields_refuse(f, "expert_count", "a mixture of experts");
    so_fields_refuse(f, "attn_logit_softcapping", "capping of attention scores");
    so_fields_refuse(f, "final_logit_softcapping", "capping of logits");
    so_fields_refuse(f, "attention.clamp_kqv", "clamping of q, k and v");
    so_fields_refuse(f, "attention.max_alibi_bias", "ALiBi");
    so_fields_refuse(f, "attention.temperature_scale",
                     "a temperature that grows with the position");
    so_fields_refuse(f, "logit_scale", "scaling of logits");
    so_fields_refuse(f, "residual_scale", "scaling of residuals");
    so_fields_refuse(f, "embedding_scale", "scaling of embeddings");
    so_fields_refuse(f, "rope.scaling.yarn_log_multiplier", "YaRN's log multiplier");
    if (!so_fields_flag(f, "attention.causal", true))
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%sattention.causal is false: only causal attention is "
                       "supported",
                       f->prefix);
}

static void read_vocab(so_fields *f, so_hparams *hp) {
    const so_tensor *embd = so_gguf_tensor(f->gguf, "token_embd.weight");
    const so_gguf_kv *tokens = so_gguf_find(f->gguf, "tokenizer.ggml.tokens");
    int64_t fallback = SO_FIELD_REQUIRED;
    if (embd)
        fallback = embd->dims[1];
    else if (tokens)
        fallback = (int64_t)tokens->n;
    int64_t n = so_fields_int(f, "vocab_size", 1, SO_MAX_VOCAB, fallback);
    if (embd) /* some files pad the matrix and state the unpadded number */
        n = embd->dims[1];
    if (n < 1 || n > SO_MAX_VOCAB)
        so_fields_fail(f, SO_ERANGE, "the vocabulary has %lld entries; 1 to %d are expected",
                       (long long)n, SO_MAX_VOCAB);
    hp->n_vocab = (int)n;
}

static void read_dims(so_fields *f, so_hparams *hp) {
    hp->n_layers = (int)so_fields_int(f, "block_count", 1, SO_MAX_LAYERS, SO_FIELD_REQUIRED);
    hp->d_model = (int)so_fields_int(f, "embedding_length", 1, SO_MAX_WIDTH, SO_FIELD_REQUIRED);
    hp->d_ff = (int)so_fields_int(f, "feed_forward_length", 1, SO_MAX_FF, SO_FIELD_REQUIRED);
    hp->n_heads = (int)so_fields_int(f, "attention.head_count", 1, SO_MAX_HEADS, SO_FIELD_REQUIRED);
    hp->n_heads_kv = (int)so_fields_int(f, "attention.head_count_kv", 1, hp->n_heads, hp->n_heads);
    hp->n_ctx_train = (int)so_fields_int(f, "context_length", 1, SO_MAX_CTX, SO_FIELD_REQUIRED);
    bool stated = so_fields_has(f, "attention.key_length");
    if (f->rc == 0 && !stated && hp->d_model % hp->n_heads != 0)
        so_fields_fail(f, SO_EFORMAT,
                       "%sembedding_length %d is not a multiple of %sattention.head_count %d, and "
                       "%sattention.key_length is missing",
                       f->prefix, hp->d_model, f->prefix, hp->n_heads, f->prefix);
    hp->head_dim = (int)so_fields_int(f, "attention.key_length", 1, SO_MAX_HEAD_DIM,
                                      SO_MAX(1, hp->d_model / hp->n_heads));
    if (hp->head_dim > SO_MAX_HEAD_DIM)
        so_fields_fail(f, SO_ERANGE, "head size %d; at most %d is supported", hp->head_dim,
                       SO_MAX_HEAD_DIM);
    int64_t value_len =
        so_fields_int(f, "attention.value_length", 1, SO_MAX_HEAD_DIM, hp->head_dim);
    if (value_len != hp->head_dim)
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%sattention.value_length %lld differs from the key length %d, which is not "
                       "supported",
                       f->prefix, (long long)value_len, hp->head_dim);
    read_vocab(f, hp);
}

static void read_yarn(so_fields *f, so_hparams *hp) {
    hp->rope_beta_fast = (float)so_fields_num(f, "rope.scaling.yarn_beta_fast", 0, 1e6, 32);
    hp->rope_beta_slow = (float)so_fields_num(f, "rope.scaling.yarn_beta_slow", 0, 1e6, 1);
    /* The paper derives an attention factor from rope_factor. GGUF states a multiplier of it,
     * config.json the product. */
    double attn = so_fields_num(f, "rope.scaling.attn_factor", 0, 1e6, 1);
    hp->rope_attn_factor = (float)(attn * (1 + 0.1 * log(SO_MAX(1.0, (double)hp->rope_factor))));
}

static void read_rope(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    hp->rope_halves = !a->permuted_gguf;
    hp->rope_base = (float)so_fields_num(f, "rope.freq_base", 1, 1e12, a->rope_base);
    if (a->rope_base_local > 0)
        hp->rope_base_local =
            (float)so_fields_num(f, "rope.freq_base_swa", 1, 1e12, a->rope_base_local);
    hp->rope_dim = (int)so_fields_int(f, "rope.dimension_count", 1, SO_MAX_HEAD_DIM, hp->head_dim);
    hp->rope_ctx_orig = (int)so_fields_int(f, "rope.scaling.original_context_length", 1, SO_MAX_CTX,
                                           hp->n_ctx_train);
    hp->rope_attn_factor = 1;
    /* Files of 2023 use the name rope.scale_linear. */
    double old = so_fields_num(f, "rope.scale_linear", 0, 1e6, 1);
    hp->rope_factor = (float)so_fields_num(f, "rope.scaling.factor", 0, 1e6, old);
    so_str type = so_fields_str(f, "rope.scaling.type");
    if (so_str_eq_c(type, "none") || hp->rope_factor == 1)
        hp->rope_scaling = SO_ROPE_SCALING_NONE;
    else if (so_str_eq_c(type, "linear") || type.len == 0)
        hp->rope_scaling = SO_ROPE_SCALING_LINEAR;
    else if (so_str_eq_c(type, "yarn"))
        hp->rope_scaling = SO_ROPE_SCALING_YARN;
    else
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%srope.scaling.type '%.*s' is not supported; supported are none, linear, "
                       "yarn",
                       f->prefix, SO_STR_ARG(type));
    if (hp->rope_scaling == SO_ROPE_SCALING_YARN)
        read_yarn(f, hp);
}

/* The key holds a number n (every n-th layer has no window) or a flag per layer (true: window). */
static void read_pattern(so_fields *f, so_hparams *hp, int fallback) {
    char key[64];
    snprintf(key, sizeof key, "%sattention.sliding_window_pattern", f->prefix);
    const so_gguf_kv *kv = so_gguf_find(f->gguf, key);
    if (!kv || kv->type != SO_GGUF_ARRAY) {
        hp->window_pattern =
            (int)so_fields_int(f, "attention.sliding_window_pattern", 0, SO_MAX_LAYERS, fallback);
        if (hp->window_pattern == 1)
            hp->window = 0;
        return;
    }
    if (kv->n != (uint64_t)hp->n_layers) {
        so_fields_fail(f, SO_EFORMAT, "%s has %llu entries for %d layers", key,
                       (unsigned long long)kv->n, hp->n_layers);
        return;
    }
    bool full[SO_MAX_LAYERS];
    for (int i = 0; i < hp->n_layers; i++) {
        int64_t sliding = 0;
        if (!so_gguf_elem_i64(kv, (uint64_t)i, &sliding))
            so_fields_fail(f, SO_EFORMAT, "%s: entry %d is not a number", key, i);
        full[i] = sliding == 0;
    }
    so_hparams_set_pattern(f, hp, full);
}

/* Architectures with another window rule ignore the key: Qwen files state a window although it is
 * switched off. */
static void read_window(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    if (a->window != SO_WINDOW_ALL && a->window != SO_WINDOW_PATTERN)
        return;
    hp->window = (int)so_fields_int(f, "attention.sliding_window", 0, INT32_MAX, 0);
    if (a->window == SO_WINDOW_PATTERN && hp->window > 0)
        read_pattern(f, hp, a->defaults.window_pattern);
}

static void read_rest(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    bool all = a->bias == SO_BIAS_ALL;
    hp->norm_eps = (float)so_fields_num(f, so_arch_eps_key(a), 1e-30, 1, NAN);
    hp->attn_scale = (float)so_fields_num(f, "attention.scale", -1e-30, 1e6, 0);
    if (a->infer_gguf)
        a->infer_gguf(hp);
    hp->tied = so_gguf_tensor(f->gguf, "output.weight") == NULL;
    hp->qk_norm = a->qk_norm;
    hp->bias_qkv = a->bias != SO_BIAS_STATED || so_gguf_tensor(f->gguf, "blk.0.attn_q.bias");
    hp->bias_out = all || so_gguf_tensor(f->gguf, "blk.0.attn_output.bias");
    hp->bias_mlp = all || so_gguf_tensor(f->gguf, "blk.0.ffn_down.bias");
}

int so_hparams_from_gguf(const so_gguf *g, so_hparams *out, so_err *err) {
    so_hparams hp = {0};
    so_err local = {0};
    char prefix[40];
    if (!err)
        err = &local;
    if (!arch_prefix(g, &hp, prefix, sizeof prefix, err))
        return err->code;
    const so_arch_info *a = so_arch_get(hp.arch);
    so_fields f = {.file = so_gguf_path(g), .prefix = prefix, .gguf = g, .err = err};
    refuse_unknown(&f);
    read_dims(&f, &hp);
    if (a->encoder)
        so_t5_read_gguf(&f, &hp);
    else if (!a->learned_positions)
        read_rope(&f, &hp, a);
    read_window(&f, &hp, a);
    read_rest(&f, &hp, a);
    so_hparams_finish(&f, &hp);
    if (f.rc == 0)
        *out = hp;
    return f.rc;
}
