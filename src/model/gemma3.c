/* Gemma 3 (text). Norms before and after each half of a layer, a norm on each head of q and k, GELU
 * instead of SiLU, embeddings scaled by sqrt(d).
 *
 *   x ─┬─ rms ─┬─ q norm rope ─┐
 *      │       ├─ k norm rope ─┤ cache ─ attention ─ o ─ rms ─(+)─ x
 *      │       └─ v ───────────┘                               │
 *      └───────────────────────────────────────────────────────┘
 *   x ─┬─ rms ─┬─ gate ─ gelu ─┐
 *      │       └─ up ──────── (·) ─ down ─ rms ─(+)─ x
 *      └─────────────────────────────────────────┘
 *
 * Five layers of six see a window and rotate with their own base; the sixth sees everything. */
#include "model/impl.h"

void so_forward_gemma3(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_do_embed(p, p->x, p->ids, m->embed, hp->embed_scale);
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
