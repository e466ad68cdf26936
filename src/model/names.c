/* The tables of tensor names; see names.h. Pure lookups, any thread. */
#include "model/names.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

static const so_name_pair LLAMA_GLOBAL[] = {
    {"token_embd.weight", "embed_tokens.weight", 0},
    {"output_norm.weight", "norm.weight", 0},
    {SO_STATE_TENSOR, SO_STATE_TENSOR, 0}, /* drafts are GGUF files; no folder has it */
    {"output.weight", "lm_head.weight", 0},
};
static const so_name_pair LLAMA_LAYER[] = {
    {"attn_norm.weight", "input_layernorm.weight", 0},
    {"attn_q.weight", "self_attn.q_proj.weight", SO_NAME_ROTATED},
    {"attn_q.bias", "self_attn.q_proj.bias", SO_NAME_ROTATED},
    {"attn_k.weight", "self_attn.k_proj.weight", SO_NAME_ROTATED},
    {"attn_k.bias", "self_attn.k_proj.bias", SO_NAME_ROTATED},
    {"attn_v.weight", "self_attn.v_proj.weight", 0},
    {"attn_v.bias", "self_attn.v_proj.bias", 0},
    {"attn_q_norm.weight", "self_attn.q_norm.weight", 0},
    {"attn_k_norm.weight", "self_attn.k_norm.weight", 0},
    {"attn_output.weight", "self_attn.o_proj.weight", 0},
    {"attn_output.bias", "self_attn.o_proj.bias", 0},
    {"ffn_norm.weight", "post_attention_layernorm.weight", 0},
    {"ffn_gate.weight", "mlp.gate_proj.weight", 0},
    {"ffn_gate.bias", "mlp.gate_proj.bias", 0},
    {"ffn_up.weight", "mlp.up_proj.weight", 0},
    {"ffn_up.bias", "mlp.up_proj.bias", 0},
    {"ffn_down.weight", "mlp.down_proj.weight", 0},
    {"ffn_down.bias", "mlp.down_proj.bias", 0},
};

static const so_name_pair GEMMA3_GLOBAL[] = {
    {"token_embd.weight", "embed_tokens.weight", 0},
    {"output_norm.weight", "norm.weight", SO_NAME_ADD_ONE},
    {"output.weight", "lm_head.weight", 0},
};
static const so_name_pair GEMMA3_LAYER[] = {
    {"attn_norm.weight", "input_layernorm.weight", SO_NAME_ADD_ONE},
    {"attn_q.weight", "self_attn.q_proj.weight", 0},
    {"attn_q.bias", "self_attn.q_proj.bias", 0},
    {"attn_k.weight", "self_attn.k_proj.weight", 0},
    {"attn_k.bias", "self_attn.k_proj.bias", 0},
    {"attn_v.weight", "self_attn.v_proj.weight", 0},
    {"attn_v.bias", "self_attn.v_proj.bias", 0},
    {"attn_q_norm.weight", "self_attn.q_norm.weight", SO_NAME_ADD_ONE},
    {"attn_k_norm.weight", "self_attn.k_norm.weight", SO_NAME_ADD_ONE},
    {"attn_output.weight", "self_attn.o_proj.weight", 0},
    {"attn_output.bias", "self_attn.o_proj.bias", 0},
    {"post_attention_norm.weight", "post_attention_layernorm.weight", SO_NAME_ADD_ONE},
    {"ffn_norm.weight", "pre_feedforward_layernorm.weight", SO_NAME_ADD_ONE},
    {"ffn_gate.weight", "mlp.gate_proj.weight", 0},
    {"ffn_up.weight", "mlp.up_proj.weight", 0},
    {"ffn_down.weight", "mlp.down_proj.weight", 0},
    {"post_ffw_norm.weight", "post_feedforward_layernorm.weight", SO_NAME_ADD_ONE},
};

static const so_name_pair GPT2_GLOBAL[] = {
    {"token_embd.weight", "wte.weight", 0},   {"position_embd.weight", "wpe.weight", 0},
    {"output_norm.weight", "ln_f.weight", 0}, {"output_norm.bias", "ln_f.bias", 0},
    {"output.weight", "lm_head.weight", 0},
};
static const so_name_pair GPT2_LAYER[] = {
    {"attn_norm.weight", "ln_1.weight", 0},
    {"attn_norm.bias", "ln_1.bias", 0},
    {"attn_qkv.weight", "attn.c_attn.weight", SO_NAME_TRANSPOSED},
    {"attn_qkv.bias", "attn.c_attn.bias", 0},
    {"attn_output.weight", "attn.c_proj.weight", SO_NAME_TRANSPOSED},
    {"attn_output.bias", "attn.c_proj.bias", 0},
    {"ffn_norm.weight", "ln_2.weight", 0},
    {"ffn_norm.bias", "ln_2.bias", 0},
    {"ffn_up.weight", "mlp.c_fc.weight", SO_NAME_TRANSPOSED},
    {"ffn_up.bias", "mlp.c_fc.bias", 0},
    {"ffn_down.weight", "mlp.c_proj.weight", SO_NAME_TRANSPOSED},
    {"ffn_down.bias", "mlp.c_proj.bias", 0},
};

/* Where a folder keeps its language model: alone, bare, or beside a vision tower. */
static const char *find_prefix(const so_checkpoint *ck, const char *embed) {
    static const char *const prefixes[] = {"model.", "", "language_model.model.",
                                           "model.language_model.", "transformer."};
    for (size_t i = 0; i < SO_LEN(prefixes); i++) {
        char name[SO_NAME_CAP];
        snprintf(name, sizeof name, "%s%s", prefixes[i], embed);
        if (so_checkpoint_tensor(ck, name))
            return prefixes[i];
    }
    return strcmp(embed, "wte.weight") == 0 ? "transformer." : "model.";
}

void so_names_init(so_names *n, const so_checkpoint *ck, const so_hparams *hp) {
    bool gpt2 = hp->arch == SO_ARCH_GPT2, gemma = hp->arch == SO_ARCH_GEMMA3;
    n->ck = ck;
    n->global = gpt2 ? GPT2_GLOBAL : gemma ? GEMMA3_GLOBAL : LLAMA_GLOBAL;
    n->layer = gpt2 ? GPT2_LAYER : gemma ? GEMMA3_LAYER : LLAMA_LAYER;
    n->n_global = (int)(gpt2    ? SO_LEN(GPT2_GLOBAL)
                        : gemma ? SO_LEN(GEMMA3_GLOBAL)
                                : SO_LEN(LLAMA_GLOBAL));
    n->n_layer = (int)(gpt2    ? SO_LEN(GPT2_LAYER)
                       : gemma ? SO_LEN(GEMMA3_LAYER)
                               : SO_LEN(LLAMA_LAYER));
    n->hf_prefix = so_checkpoint_gguf(ck) ? "" : find_prefix(ck, n->global[0].hf);
    n->hf_layers = gpt2 ? "h" : "layers";
}

static void file_name(const so_names *n, const so_name_pair *pair, int layer,
                      char buf[SO_NAME_CAP]) {
    bool gguf = so_checkpoint_gguf(n->ck) != NULL;
    if (gguf && layer >= 0)
        snprintf(buf, SO_NAME_CAP, "blk.%d.%s", layer, pair->gguf);
    else if (gguf)
        snprintf(buf, SO_NAME_CAP, "%s", pair->gguf);
    else if (layer >= 0)
        snprintf(buf, SO_NAME_CAP, "%s%s.%d.%s", n->hf_prefix, n->hf_layers, layer, pair->hf);
    else if (strcmp(pair->hf, "lm_head.weight") == 0) /* stands beside the model, not in it */
        snprintf(buf, SO_NAME_CAP, "%slm_head.weight",
                 so_checkpoint_tensor(n->ck, "language_model.lm_head.weight") ? "language_model."
                                                                              : "");
    else
        snprintf(buf, SO_NAME_CAP, "%s%s", n->hf_prefix, pair->hf);
}

const so_name_pair *so_names_resolve(const so_names *n, const char *gguf, int layer,
                                     char buf[SO_NAME_CAP]) {
    const so_name_pair *table = layer >= 0 ? n->layer : n->global;
    int count = layer >= 0 ? n->n_layer : n->n_global;
    for (int i = 0; i < count; i++)
        if (strcmp(table[i].gguf, gguf) == 0) {
            file_name(n, &table[i], layer, buf);
            return &table[i];
        }
    return NULL;
}

static bool ends_with(so_str s, const char *suffix) {
    size_t n = strlen(suffix);
    return s.len >= n && memcmp(s.ptr + s.len - n, suffix, n) == 0;
}

bool so_names_ignored(so_str name) {
    static const char *const prefixes[] = {"vision_tower.", "multi_modal_projector.",
                                           "model.vision_tower.", "model.multi_modal_projector."};
    static const char *const suffixes[] = {".rotary_emb.inv_freq", ".attn.bias",
                                           ".attn.masked_bias"};
    for (size_t i = 0; i < SO_LEN(prefixes); i++)
        if (so_str_starts(name, so_str_c(prefixes[i])))
            return true;
    for (size_t i = 0; i < SO_LEN(suffixes); i++)
        if (ends_with(name, suffixes[i]))
            return true;
    return false;
}
