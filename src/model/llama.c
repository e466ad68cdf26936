/* Llama 1 to 3.2, Mistral, SmolLM2, Qwen2/2.5 and Qwen3. One layer is drawn below; parts in
 * brackets exist only in some of them:
 *
 *   x ─┬─ rms ─┬─ q [+b] [norm] rope ─┐
 *      │       ├─ k [+b] [norm] rope ─┤ cache ─ attention ─ o [+b] ─(+)─ x
 *      │       └─ v [+b] ─────────────┘                              │
 *      └─────────────────────────────────────────────────────────────┘
 *   x ─┬─ rms ─┬─ gate ─ silu ─┐
 *      │       └─ up ──────── (·) ─ down ─(+)─ x
 *      └───────────────────────────────────┘
 *
 * [+b]: Qwen2 (q, k, v) and Llama files with attention_bias or mlp_bias. [norm]: Qwen3, each head
 * separately. A draft may add its target's hidden states to x before the first layer
 * (so_row.target_hidden). Mistral's window is part of the attention operation. */
#include "base/mem.h"
#include "model/arch.h"
#include "model/impl.h"

static void forward(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_pass_inputs(p);
    if (p->has_target_hidden) {
        so_do_linear(p, p->h, p->target_hidden, &m->target_hidden);
        so_do_add(p, p->x, p->h);
    }
    for (int l = 0; l < hp->n_layers; l++) {
        const so_layer *w = &m->layers[l];

        so_do_rms_norm(p, p->h, p->x, &w->attn_norm);
        so_do_linear(p, p->q, p->h, &w->q);
        so_do_linear(p, p->k, p->h, &w->k);
        so_do_linear(p, p->v, p->h, &w->v);
        if (hp->qk_norm) {
            so_do_head_norm(p, p->q, hp->n_heads, &w->q_norm);
            so_do_head_norm(p, p->k, hp->n_heads_kv, &w->k_norm);
        }
        so_do_rope(p, p->q, hp->n_heads, w);
        so_do_rope(p, p->k, hp->n_heads_kv, w);
        so_do_attention(p, l);
        so_do_linear(p, p->h, p->att, &w->o);
        so_do_add(p, p->x, p->h);

        so_do_rms_norm(p, p->h, p->x, &w->ffn_norm);
        so_do_linear(p, p->gate, p->h, &w->gate);
        so_do_linear(p, p->up, p->h, &w->up);
        so_do_eltwise(p, SO_OP_SILU_MUL, p->gate, p->gate, p->up, hp->d_ff);
        so_do_linear(p, p->h, p->gate, &w->down);
        so_do_add(p, p->x, p->h);
    }
    so_pass_output(p);
}

static const so_name_pair GLOBALS[] = {
    {"token_embd.weight", "embed_tokens.weight", 0},
    {"output_norm.weight", "norm.weight", 0},
    {SO_TARGET_HIDDEN_TENSOR, SO_TARGET_HIDDEN_TENSOR, 0}, /* only in GGUF files */
    {"output.weight", "lm_head.weight", 0},
};
static const so_name_pair LAYERS[] = {
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

#define LLAMA_FAMILY                                                                           \
    .forward = forward, .gated_mlp = true, .rope_base = 1e4, .global_names = GLOBALS,          \
    .n_global_names = SO_LEN(GLOBALS), .layer_names = LAYERS, .n_layer_names = SO_LEN(LAYERS), \
    .hf_prefix = "model.", .hf_layers = "layers", .read_config = so_config_read_llama,         \
    .act_key = "hidden_act", .act = "silu", .act_alias = "swish"

const so_arch_info so_arch_llama = {
    LLAMA_FAMILY,
    .names = {"llama", "mistral"},
    .aliases = {"mistral3"},
    .classes = {"LlamaForCausalLM", "MistralForCausalLM"},
    .reads_target_hidden = true,
    .window = SO_WINDOW_ALL,
    .permuted_gguf = true,
    .defaults = {.n_ctx = 2048},
};

const so_arch_info so_arch_qwen2 = {
    LLAMA_FAMILY,        .names = {"qwen2"},           .classes = {"Qwen2ForCausalLM"},
    .bias = SO_BIAS_QKV, .window = SO_WINDOW_SWITCHED, .defaults = {.n_ctx = 2048},
};

const so_arch_info so_arch_qwen3 = {
    LLAMA_FAMILY,    .names = {"qwen3"},           .classes = {"Qwen3ForCausalLM"},
    .qk_norm = true, .window = SO_WINDOW_SWITCHED, .defaults = {.n_ctx = 2048, .head_dim = 128},
};
