/* GPT-2: learned positions instead of rope, layer norm, biases everywhere, a plain GELU.
 *
 *   x = token + position
 *   x ─┬─ ln ─ q, k, v ─ cache ─ attention ─ o ─(+)─ x
 *      └────────────────────────────────────────┘
 *   x ─┬─ ln ─ up ─ gelu ─ down ─(+)─ x
 *      └──────────────────────────┘
 */
#include "base/mem.h"
#include "model/arch.h"
#include "model/impl.h"

static void forward(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_pass_inputs(p);
    so_do_embed(p, p->h, p->positions, m->pos_embed, 1);
    so_do_add(p, p->x, p->h);
    for (int l = 0; l < hp->n_layers; l++) {
        const so_layer *w = &m->layers[l];

        so_do_layer_norm(p, p->h, p->x, &w->attn_norm);
        so_do_linear(p, p->q, p->h, &w->q);
        so_do_linear(p, p->k, p->h, &w->k);
        so_do_linear(p, p->v, p->h, &w->v);
        so_do_attention(p, l);
        so_do_linear(p, p->h, p->att, &w->o);
        so_do_add(p, p->x, p->h);

        so_do_layer_norm(p, p->h, p->x, &w->ffn_norm);
        so_do_linear(p, p->up, p->h, &w->up);
        so_do_eltwise(p, SO_OP_GELU, p->up, p->up, (so_view){0}, hp->d_ff);
        so_do_linear(p, p->h, p->up, &w->down);
        so_do_add(p, p->x, p->h);
    }
    so_pass_output(p);
}

static const so_name_pair GLOBALS[] = {
    {"token_embd.weight", "wte.weight", 0},   {"position_embd.weight", "wpe.weight", 0},
    {"output_norm.weight", "ln_f.weight", 0}, {"output_norm.bias", "ln_f.bias", 0},
    {"output.weight", "lm_head.weight", 0},
};
static const so_name_pair LAYERS[] = {
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

const so_arch_info so_arch_gpt2 = {
    .names = {"gpt2"},
    .classes = {"GPT2LMHeadModel"},
    .forward = forward,
    .layer_norm = true,
    .learned_positions = true,
    .bias = SO_BIAS_ALL,
    .global_names = GLOBALS,
    .n_global_names = SO_LEN(GLOBALS),
    .layer_names = LAYERS,
    .n_layer_names = SO_LEN(LAYERS),
    .hf_prefix = "transformer.",
    .hf_layers = "h",
    .fused_qkv = true,
    .read_config = so_config_read_gpt2,
    .act_key = "activation_function",
    .act = "gelu_new",
    .act_alias = "gelu_pytorch_tanh",
    .defaults = {.n_ctx = 1024, .tied = true},
};
