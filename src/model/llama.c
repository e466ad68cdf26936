/* Llama 1 to 3.2, Mistral, SmolLM2, Qwen2/2.5 and Qwen3: one layer, with what some of them add in
 * brackets.
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
 * by itself. A draft may add its target's states to x before the first layer (so_row.state).
 * Mistral's window is a property of the layer's attention. */
#include "model/impl.h"

void so_forward_llama(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_do_embed(p, p->x, p->ids, m->embed, hp->embed_scale);
    if (p->has_states) {
        so_do_linear(p, p->h, p->states, &m->state);
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
