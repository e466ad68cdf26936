/* The shape of a model from a Hugging Face config.json.
 *
 * Knows old and new keys: rope_theta with rope_scaling (transformers 4) and rope_parameters
 * (transformers 5, per layer type for Gemma 3), a text model inside a multimodal one (text_config),
 * and the defaults of transformers classes for keys that files omit. Options of unsupported
 * features that would change the result are refused by name. Any thread. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/arch.h"

static void read_arch(so_fields *f, so_hparams *hp) {
    so_str name = so_fields_str(f, "model_type");
    const json_t *class_name = json_array_get(json_object_get(f->json, "architectures"), 0);
    const char *key = "model_type";
    char list[SO_ARCH_LIST_CAP];
    bool known;
    if (name.len == 0 && json_is_string(class_name)) {
        name = (so_str){json_string_value(class_name), json_string_length(class_name)};
        key = "architectures";
        known = so_arch_by_class(name, &hp->arch);
    } else {
        known = so_arch_by_name(name, &hp->arch);
    }
    if (f->rc == 0 && name.len == 0)
        so_fields_fail(f, SO_EFORMAT, "%smodel_type is missing", f->prefix);
    else if (!known)
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "architecture '%.*s' (%s%s) is not supported; supported are %s",
                       SO_STR_ARG(name), f->prefix, key, so_arch_list(list));
    snprintf(hp->arch_name, sizeof hp->arch_name, "%.*s", (int)SO_MIN(name.len, 31), name.ptr);
}

static void require_str(so_fields *f, const char *key, const char *want, const char *also) {
    so_str s = so_fields_str(f, key);
    if (s.len > 0 && !so_str_eq_c(s, want) && !(also && so_str_eq_c(s, also)))
        so_fields_fail(f, SO_EUNSUPPORTED, "%s%s '%.*s' is not supported; '%s' is", f->prefix, key,
                       SO_STR_ARG(s), want);
}

static void refuse_unknown(so_fields *f, bool has_encoder) {
    static const char *const experts[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    for (size_t i = 0; i < SO_LEN(experts); i++)
        so_fields_refuse(f, experts[i], "a mixture of experts");
    so_fields_refuse(f, "attn_logit_softcapping", "capping of attention scores");
    so_fields_refuse(f, "final_logit_softcapping", "capping of logits");
    so_fields_refuse(f, "use_bidirectional_attention", "attention to later tokens");
    if (!has_encoder) {
        so_fields_refuse(f, "add_cross_attention", "cross attention");
        so_fields_refuse(f, "is_encoder_decoder", "an encoder");
    }
    so_fields_refuse(f, "scale_attn_by_inverse_layer_idx",
                     "attention scaled by the layer's number");
    if (so_fields_num(f, "partial_rotary_factor", 0, 1, 1) != 1)
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%spartial_rotary_factor is not 1: partial rotary embedding is not "
                       "supported",
                       f->prefix);
}

/* by_class: the default of the transformers class; 0: the key is required. */
static int read_dim(so_fields *f, const char *key, int64_t hi, int by_class) {
    return (int)so_fields_int(f, key, 1, hi, by_class > 0 ? by_class : SO_FIELD_REQUIRED);
}

static void read_dims(so_fields *f, so_hparams *hp, const so_arch_defaults *d) {
    hp->n_vocab = read_dim(f, "vocab_size", SO_MAX_VOCAB, d->n_vocab);
    hp->d_model = read_dim(f, "hidden_size", SO_MAX_WIDTH, d->d_model);
    hp->d_ff = read_dim(f, "intermediate_size", SO_MAX_FF, d->d_ff);
    hp->n_layers = read_dim(f, "num_hidden_layers", SO_MAX_LAYERS, d->n_layers);
    hp->n_heads = read_dim(f, "num_attention_heads", SO_MAX_HEADS, d->n_heads);
    hp->n_heads_kv =
        (int)so_fields_int(f, "num_key_value_heads", 1, hp->n_heads,
                           d->n_heads_kv > 0 ? SO_MIN(d->n_heads_kv, hp->n_heads) : hp->n_heads);
    hp->n_ctx_train = read_dim(f, "max_position_embeddings", SO_MAX_CTX, d->n_ctx);
    int64_t head_dim = d->head_dim;
    if (head_dim == 0 && f->rc == 0 && !so_fields_has(f, "head_dim")) {
        if (hp->d_model % hp->n_heads != 0)
            so_fields_fail(f, SO_EFORMAT,
                           "%shidden_size %d is not a multiple of %snum_attention_heads %d",
                           f->prefix, hp->d_model, f->prefix, hp->n_heads);
        head_dim = hp->d_model / hp->n_heads;
    }
    hp->head_dim = (int)so_fields_int(f, "head_dim", 1, SO_MAX_HEAD_DIM, head_dim);
    if (f->rc == 0 && hp->head_dim > SO_MAX_HEAD_DIM)
        so_fields_fail(f, SO_ERANGE, "head size %d; at most %d is supported", hp->head_dim,
                       SO_MAX_HEAD_DIM);
    hp->norm_eps = (float)so_fields_num(f, "rms_norm_eps", 1e-30, 1, 1e-6);
}

/* Rope. */

static void read_yarn(so_fields *rope, so_hparams *hp) {
    double factor = (double)hp->rope_factor, derived = 1 + 0.1 * log(SO_MAX(1.0, factor));
    double mscale = so_fields_num(rope, "mscale", -1e-9, 1e3, 0);
    double mscale_all = so_fields_num(rope, "mscale_all_dim", -1e-9, 1e3, 0);
    if (mscale != 0 && mscale_all != 0 && factor > 1)
        derived = (1 + 0.1 * mscale * log(factor)) / (1 + 0.1 * mscale_all * log(factor));
    hp->rope_attn_factor = (float)so_fields_num(rope, "attention_factor", 0, 1e6, derived);
    hp->rope_beta_fast = (float)so_fields_num(rope, "beta_fast", 0, 1e6, 32);
    hp->rope_beta_slow = (float)so_fields_num(rope, "beta_slow", 0, 1e6, 1);
    if (!so_fields_flag(rope, "truncate", true))
        so_fields_fail(rope, SO_EUNSUPPORTED, "%struncate is false, which is not supported",
                       rope->prefix);
}

/* rope: the object rope_scaling or rope_parameters. Both have the same keys. */
static void read_scaling(so_fields *rope, so_hparams *hp) {
    so_str type = so_fields_str(rope, "rope_type");
    if (type.len == 0)
        type = so_fields_str(rope, "type");
    if (type.len == 0 || so_str_eq_c(type, "default"))
        return;
    if (so_str_eq_c(type, "linear"))
        hp->rope_scaling = SO_ROPE_SCALING_LINEAR;
    else if (so_str_eq_c(type, "llama3"))
        hp->rope_scaling = SO_ROPE_SCALING_LLAMA3;
    else if (so_str_eq_c(type, "yarn"))
        hp->rope_scaling = SO_ROPE_SCALING_YARN;
    else
        so_fields_fail(rope, SO_EUNSUPPORTED,
                       "%srope_type '%.*s' is not supported; supported are default, linear, "
                       "llama3, yarn",
                       rope->prefix, SO_STR_ARG(type));
    hp->rope_ctx_orig = (int)so_fields_int(rope, "original_max_position_embeddings", 1, SO_MAX_CTX,
                                           hp->rope_ctx_orig);
    bool yarn = hp->rope_scaling == SO_ROPE_SCALING_YARN;
    hp->rope_factor = (float)so_fields_num(
        rope, "factor", 0, 1e6, yarn ? (double)hp->n_ctx_train / hp->rope_ctx_orig : NAN);
    if (hp->rope_scaling == SO_ROPE_SCALING_LLAMA3) {
        hp->rope_low = (float)so_fields_num(rope, "low_freq_factor", 0, 1e6, NAN);
        hp->rope_high = (float)so_fields_num(rope, "high_freq_factor", 0, 1e6, NAN);
    }
    if (yarn)
        read_yarn(rope, hp);
}

/* Opens the object `key` as so_fields; false if there is none. */
static bool sub_fields(so_fields *f, const json_t *parent, const char *key, const char *prefix,
                       so_fields *out) {
    const json_t *o = json_object_get(parent, key);
    if (f->rc != 0 || !o || json_is_null(o))
        return false;
    if (!json_is_object(o)) {
        so_fields_fail(f, SO_EFORMAT, "%.*s is not an object", (int)strlen(prefix) - 1, prefix);
        return false;
    }
    *out = (so_fields){.file = f->file, .prefix = prefix, .json = o, .err = f->err};
    return true;
}

static void read_rope_object(so_fields *f, so_fields *rope, so_hparams *hp, double base) {
    hp->rope_base = (float)so_fields_num(rope, "rope_theta", 1, 1e12, base);
    if (so_fields_num(rope, "partial_rotary_factor", 0, 1, 1) != 1)
        so_fields_fail(rope, SO_EUNSUPPORTED,
                       "%spartial_rotary_factor is not 1: partial rotary embedding is not "
                       "supported",
                       rope->prefix);
    read_scaling(rope, hp);
    f->rc = rope->rc;
}

/* Gemma 3 since transformers 5: one object per layer type. */
static void read_rope_by_layer(so_fields *f, so_hparams *hp, const json_t *params, double base) {
    so_fields rope;
    if (sub_fields(f, params, "full_attention", "rope_parameters.full_attention.", &rope))
        read_rope_object(f, &rope, hp, base);
    if (sub_fields(f, params, "sliding_attention", "rope_parameters.sliding_attention.", &rope)) {
        hp->rope_base_local =
            (float)so_fields_num(&rope, "rope_theta", 1, 1e12, (double)hp->rope_base_local);
        require_str(&rope, "rope_type", "default", NULL);
        f->rc = rope.rc;
    }
}

static void read_rope(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    bool by_layer = a->rope_base_local > 0;
    hp->rope_halves = true;
    hp->rope_dim = hp->head_dim;
    hp->rope_factor = hp->rope_attn_factor = 1;
    hp->rope_ctx_orig =
        (int)so_fields_int(f, "original_max_position_embeddings", 1, SO_MAX_CTX, hp->n_ctx_train);
    double base = so_fields_num(f, "rope_theta", 1, 1e12, a->rope_base);
    hp->rope_base = (float)base;
    if (by_layer)
        hp->rope_base_local =
            (float)so_fields_num(f, "rope_local_base_freq", 1, 1e12, a->rope_base_local);
    const json_t *params = json_object_get(f->json, "rope_parameters");
    bool nested =
        json_object_get(params, "full_attention") || json_object_get(params, "sliding_attention");
    so_fields rope;
    if (nested && !by_layer)
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%srope_parameters per kind of layer is not supported for '%s'", f->prefix,
                       hp->arch_name);
    else if (nested)
        read_rope_by_layer(f, hp, params, base);
    else if (sub_fields(f, f->json, "rope_parameters", "rope_parameters.", &rope) ||
             sub_fields(f, f->json, "rope_scaling", "rope_scaling.", &rope))
        read_rope_object(f, &rope, hp, base);
}

/* Windows. */

static bool read_layer_types(so_fields *f, so_hparams *hp) {
    const json_t *list = json_object_get(f->json, "layer_types");
    if (f->rc != 0 || !list || json_is_null(list))
        return false;
    if (!json_is_array(list) || json_array_size(list) != (size_t)hp->n_layers) {
        so_fields_fail(f, SO_EFORMAT, "%slayer_types must be a list of %d entries", f->prefix,
                       hp->n_layers);
        return true;
    }
    bool full[SO_MAX_LAYERS];
    for (int i = 0; i < hp->n_layers; i++) {
        const char *s = json_string_value(json_array_get(list, (size_t)i));
        full[i] = s && strcmp(s, "full_attention") == 0;
        if (!full[i] && (!s || strcmp(s, "sliding_attention") != 0)) {
            so_fields_fail(f, SO_EUNSUPPORTED,
                           "%slayer_types[%d] is '%s'; full_attention and sliding_attention are "
                           "supported",
                           f->prefix, i, s ? s : "no string");
            return true;
        }
    }
    so_hparams_set_pattern(f, hp, full);
    return true;
}

static void read_window(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    bool switched = a->window == SO_WINDOW_SWITCHED;
    if (switched && !so_fields_flag(f, "use_sliding_window", false))
        return;
    hp->window = (int)so_fields_int(f, "sliding_window", 0, INT32_MAX, a->defaults.window);
    if (hp->window == 0 || read_layer_types(f, hp) || f->rc != 0)
        return;
    if (a->window == SO_WINDOW_PATTERN) {
        int64_t fallback = so_fields_int(f, "_sliding_window_pattern", 1, SO_MAX_LAYERS,
                                         a->defaults.window_pattern);
        hp->window_pattern =
            (int)so_fields_int(f, "sliding_window_pattern", 1, SO_MAX_LAYERS, fallback);
        if (hp->window_pattern == 1)
            hp->window = 0;
    } else if (switched) { /* the first max_window_layers layers have full attention */
        bool full[SO_MAX_LAYERS];
        int64_t n_full = so_fields_int(f, "max_window_layers", 0, INT32_MAX, 28);
        for (int i = 0; i < hp->n_layers; i++)
            full[i] = i < n_full;
        so_hparams_set_pattern(f, hp, full);
    }
}

void so_config_read_llama(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    read_dims(f, hp, &a->defaults);
    read_rope(f, hp, a);
    read_window(f, hp, a);
    require_str(f, a->act_key, a->act, a->act_alias);
    if (a->query_scalar > 0) {
        double scalar = so_fields_num(f, "query_pre_attn_scalar", 0, 1e9, a->query_scalar);
        hp->attn_scale = (float)(1 / sqrt(scalar));
    }
    bool bias = so_fields_flag(f, "attention_bias", false);
    hp->bias_qkv = bias || a->bias == SO_BIAS_QKV;
    hp->bias_out = bias && a->bias != SO_BIAS_QKV;
    hp->bias_mlp = so_fields_flag(f, "mlp_bias", false);
    hp->qk_norm = a->qk_norm;
}

void so_config_read_gpt2(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    if (!so_fields_flag(f, "scale_attn_weights", true))
        so_fields_fail(f, SO_EUNSUPPORTED, "%sscale_attn_weights is false, which is not supported",
                       f->prefix);
    hp->n_vocab = (int)so_fields_int(f, "vocab_size", 1, SO_MAX_VOCAB, SO_FIELD_REQUIRED);
    hp->d_model = (int)so_fields_int(f, "n_embd", 1, SO_MAX_WIDTH, SO_FIELD_REQUIRED);
    hp->n_layers = (int)so_fields_int(f, "n_layer", 1, SO_MAX_LAYERS, SO_FIELD_REQUIRED);
    hp->n_heads = (int)so_fields_int(f, "n_head", 1, SO_MAX_HEADS, SO_FIELD_REQUIRED);
    hp->n_heads_kv = hp->n_heads;
    hp->d_ff = (int)so_fields_int(f, "n_inner", 1, SO_MAX_FF, 4 * (int64_t)hp->d_model);
    hp->n_ctx_train = read_dim(f, "n_positions", SO_MAX_CTX, a->defaults.n_ctx);
    hp->norm_eps = (float)so_fields_num(f, "layer_norm_epsilon", 1e-30, 1, 1e-5);
    if (hp->d_model % hp->n_heads != 0)
        so_fields_fail(f, SO_EFORMAT, "%sn_embd %d is not a multiple of %sn_head %d", f->prefix,
                       hp->d_model, f->prefix, hp->n_heads);
    hp->head_dim = hp->d_model / hp->n_heads;
    if (hp->head_dim > SO_MAX_HEAD_DIM)
        so_fields_fail(f, SO_ERANGE, "head size %d; at most %d is supported", hp->head_dim,
                       SO_MAX_HEAD_DIM);
    require_str(f, a->act_key, a->act, a->act_alias);
    hp->bias_qkv = hp->bias_out = hp->bias_mlp = true;
}

/* Folders with weights quantised by other tools. Those of 8-bit floats are supported; a tensor of
 * another kind in one of them is refused by its dtype. */
static void refuse_quantised(so_fields *f, const json_t *quantised) {
    static const char *const methods[] = {"fp8", "fbgemm_fp8", "compressed-tensors"};
    const char *method = json_string_value(json_object_get(quantised, "quant_method"));
    if (!json_is_object(quantised))
        return;
    for (size_t i = 0; i < SO_LEN(methods); i++)
        if (method && strcmp(method, methods[i]) == 0)
            return;
    so_fields_fail(
        f, SO_EUNSUPPORTED,
        "quantization_config: weights quantised by '%.40s' are not supported (8-bit "
        "floats of fp8, fbgemm_fp8 and compressed-tensors are); use the original weights "
        "or a GGUF file",
        method ? method : "?");
}

int so_hparams_from_json(const json_t *config, const char *file, so_hparams *out, so_err *err) {
    so_hparams hp = {0};
    so_fields f = {.file = file, .prefix = "", .json = config, .err = err};
    so_fields text;
    if (!json_is_object(config))
        return so_err_set(err, SO_EFORMAT, "%s: the file is not a JSON object", file);
    /* Gemma 3 and Mistral 3 keep the language model's shape in text_config, next to the vision
     * part. */
    bool tied_above = so_fields_flag(&f, "tie_word_embeddings", false);
    bool above = so_fields_has(&f, "tie_word_embeddings");
    if (sub_fields(&f, config, "text_config", "text_config.", &text))
        f = text;
    refuse_quantised(&f, json_object_get(config, "quantization_config"));
    read_arch(&f, &hp);
    if (f.rc == 0) {
        const so_arch_info *a = so_arch_get(hp.arch);
        refuse_unknown(&f, a->encoder);
        a->read_config(&f, &hp, a);
        hp.tied = so_fields_flag(&f, "tie_word_embeddings", above ? tied_above : a->defaults.tied);
        so_hparams_finish(&f, &hp);
    }
    if (f.rc == 0)
        *out = hp;
    return f.rc;
}
