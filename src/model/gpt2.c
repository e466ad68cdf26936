/* GPT-2: learned positions instead of rope, layer norm, biases everywhere, a plain GELU.
 *
 *   x = token + position
 *   x ─┬─ ln ─ q, k, v ─ cache ─ attention ─ o ─(+)─ x
 *      └────────────────────────────────────────┘
 *   x ─┬─ ln ─ up ─ gelu ─ down ─(+)─ x
 *      └──────────────────────────┘
 */
#include "model/impl.h"

void so_forward_gpt2(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_do_embed(p, p->x, p->ids, m->embed, 1);
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
