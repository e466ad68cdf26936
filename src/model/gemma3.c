/* Gemma 3 (text). Differences from Llama: norms before and after attention and MLP, a norm on each
 * head of q and k, GELU instead of SiLU, embeddings scaled by sqrt(d_model).
 *
 *   x ─┬─ rms ─┬─ q norm rope ─┐
 *      │       ├─ k norm rope ─┤ cache ─ attention ─ o ─ rms ─(+)─ x
 *      │       └─ v ───────────┘                               │
 *      └───────────────────────────────────────────────────────┘
 *   x ─┬─ rms ─┬─ gate ─ gelu ─┐
 *      │       └─ up ──────── (·) ─ down ─ rms ─(+)─ x
 *      └─────────────────────────────────────────┘
 *
 * Five of six layers have a window and their own rope base; the sixth attends to all positions. */
#include <math.h>

#include "base/mem.h"
#include "model/arch.h"
#include "model/impl.h"

static void forward(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_pass_inputs(p);
    for (int l = 0; l < hp->n_layers; l++) {
        const so_layer *w = &m->layers[l];

        so_do_rms_norm(p, p->h, p->x, &w->attn_norm);
        so_do_linear(p, p->q, p->h, &w->q);
        so_do_linear(p, p->k, p->h, &w->k);
        so_do_linear(p, p->v, p->h, &w->v);
        so_do_head_norm(p, p->q, hp->n_heads, &w->q_norm);
        so_do_head_norm(p, p->k, hp->n_heads_kv, &w->k_norm);
        so_do_rope(p, p->q, hp->n_heads, w);
        so_do_rope(p, p->k, hp->n_heads_kv, w);
        so_do_attention(p, l);
        so_do_linear(p, p->h, p->att, &w->o);
        so_do_rms_norm(p, p->h, p->h, &w->attn_post_norm);
        so_do_add(p, p->x, p->h);

        so_do_rms_norm(p, p->h, p->x, &w->ffn_norm);
        so_do_linear(p, p->gate, p->h, &w->gate);
        so_do_linear(p, p->up, p->h, &w->up);
        so_do_eltwise(p, SO_OP_GELU_MUL, p->gate, p->gate, p->up, hp->d_ff);
        so_do_linear(p, p->h, p->gate, &w->down);
        so_do_rms_norm(p, p->h, p->h, &w->ffn_post_norm);
        so_do_add(p, p->x, p->h);
    }
    so_pass_output(p);
}

static const so_name_pair GLOBALS[] = {
    {"token_embd.weight", "embed_tokens.weight", 0},
    {"output_norm.weight", "norm.weight", SO_NAME_ADD_ONE},
    {"output.weight", "lm_head.weight", 0},
};
static const so_name_pair LAYERS[] = {
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

/* Gemma 3 27B alone divides q·k by sqrt(d_model / n_heads) (168), not by sqrt(head_dim) (128). GGUF
 * has no key for this, so the model is recognised by its 62 layers. */
static void infer_gguf(so_hparams *hp) {
    if (hp->n_layers == 62 && hp->attn_scale == 0)
        hp->attn_scale = (float)(1 / sqrt((double)hp->d_model / hp->n_heads));
}

const so_arch_info so_arch_gemma3 = {
    .names = {"gemma3"},
    .aliases = {"gemma3_text"},
    .classes = {"Gemma3ForCausalLM"},
    .forward = forward,
    .gated_mlp = true,
    .post_norms = true,
    .qk_norm = true,
    .scaled_embed = true,
    .window = SO_WINDOW_PATTERN,
    .rope_base = 1e6,
    .rope_base_local = 1e4,
    .global_names = GLOBALS,
    .n_global_names = SO_LEN(GLOBALS),
    .layer_names = LAYERS,
    .n_layer_names = SO_LEN(LAYERS),
    .hf_prefix = "model.",
    .hf_layers = "layers",
    .infer_gguf = infer_gguf,
    .read_config = so_config_read_llama,
    .act_key = "hidden_activation",
    .act = "gelu_pytorch_tanh",
    .query_scalar = 256,
    /* text_config states only values that differ from the class defaults */
    .defaults = {.n_vocab = 262208,
                 .d_model = 2304,
                 .d_ff = 9216,
                 .n_layers = 26,
                 .n_heads = 8,
                 .n_heads_kv = 4,
                 .head_dim = 256,
                 .n_ctx = 131072,
                 .window = 4096,
                 .window_pattern = 6,
                 .tied = true},
};
