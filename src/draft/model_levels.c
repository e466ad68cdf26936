/* Chains of the drafter `model` (model.c): how many levels the next pass computes, and whether there
 * is another level.
 *
 * Levels together. On a remote backend a pass costs a round trip, so greedy chains draft several
 * levels in one pass: the device feeds the argmax of each row to the next level (SO_ROW_GUESS).
 * Afterwards the guesses are taken level by level, on the same conditions as if each level had been
 * a pass, and what lies past the end of a chain is dropped. So the guesses are the same; passes are
 * saved, and some levels may be computed in vain.
 *
 * Where the argmax is the guess, such a backend also computes its probability (SO_SAMPLE_BEST), so
 * that no logits are downloaded. The tokens are those of the host; the probability, which only the
 * planner reads, differs from the host's estimate by rounding.
 *
 * Refuses levels together where the host is needed between levels: sampled tokens, penalties, biases,
 * a vocabulary subset, an inner drafter. Thread: the engine thread. */
#include "base/log.h"
#include "draft/model_impl.h"

double so_model_next_gain(const so_model_chain *c) {
    const so_draft_terms *t = c->job->terms;
    return t ? c->path * so_terms_chance(t, c->depth + 1, -1) - so_terms_row(t, c->depth + 1) : 1;
}

/* Ends all chains if another level does not pay: it is one pass of the draft for all of them, and
 * their gains together must exceed its price. If one chain has no terms or is still in catch-up,
 * the pass is made anyway, and all continue. */
void so_model_end_unprofitable(so_model_drafter *md, int n) {
    double gain = 0, price = 0;
    for (int i = 0; i < n; i++) {
        const so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        if (!c->job->terms || c->first_logit < 0)
            return;
        gain += so_model_next_gain(c);
        price = SO_MAX(price, (double)c->job->terms->level_price);
    }
    for (int i = 0; i < n && gain <= price; i++)
        md->chains[i].done = true;
}

bool so_model_argmax_is_guess(const so_model_drafter *md, int n) {
    bool is = so_model_backend(md->m)->vt->remote && md->n_subset == so_model_logits_len(md->m) &&
              md->n_subset <= SO_SAMPLE_MAX;
    for (int i = 0; i < n && is; i++) {
        so_sample_params p = so_model_params(md, md->chains[i].job);
        is = md->chains[i].done || so_sample_is_argmax(&p);
    }
    return is;
}

/* Whether the pass has the memory for several levels. A device without it drafts level by level. */
static bool has_levels(so_model_drafter *md) {
    so_err err = {0};
    if (md->no_levels || so_pass_reserve_levels(md->pass, &err) == SO_OK)
        return !md->no_levels;
    so_log(SO_LOG_DEBUG, "draft model: %s; it drafts one level per pass", err.msg);
    md->no_levels = true;
    return false;
}

/* Maximum number of levels of the next pass; 1: the chains need the host for every guess, or pages,
 * rows or memory do not suffice for more. */
static int max_levels(so_model_drafter *md, int n) {
    int levels = SO_PASS_LEVELS, n_active = 0, n_missing = 0;
    int64_t n_pages = 0;
    bool possible = !md->inner && so_model_argmax_is_guess(md, n);
    for (int i = 0; i < n && possible; i++) {
        const so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        levels = SO_MIN(levels, SO_MIN(c->limit - c->depth, so_model_tree_room(c->job)));
        n_missing += c->n_text - so_seq_len(c->s->seq) - 1;
        n_active++;
    }
    if (!possible || n_active == 0 || n_missing > md->o.n_batch)
        return 1;
    levels = SO_MIN(levels, md->max_logits / n_active);
    for (int i = 0; i < n; i++) {
        const so_seq *s = md->chains[i].s->seq;
        if (!md->chains[i].done)
            n_pages += so_seq_pages_needed(s, md->chains[i].n_text - so_seq_len(s) + levels - 1);
    }
    return levels > 1 && n_pages <= so_kv_available_pages(md->kv) && has_levels(md) ? levels : 1;
}

/* Whether level number `level` of the next pass, the first being 0, is expected to pay, with the
 * chances that are known before the rows are seen. */
static bool level_pays(so_model_drafter *md, int n, int level) {
    double gain = 0, price = 0;
    for (int i = 0; i < n; i++) {
        so_model_chain *c = &md->chains[i];
        const so_draft_terms *t = c->job->terms;
        int depth = c->depth + level;
        if (c->done)
            continue;
        if (!t)
            return true;
        c->expected *= so_terms_chance(t, depth, -1);
        gain += SO_MAX(c->expected * so_terms_chance(t, depth + 1, -1) - so_terms_row(t, depth + 1),
                       0.0);
        price = SO_MAX(price, (double)t->level_price);
    }
    return gain > price;
}

int so_model_levels_together(so_model_drafter *md, int n) {
    int max = max_levels(md, n), levels = 1;
    for (int i = 0; i < n; i++)
        md->chains[i].expected = md->chains[i].path;
    while (levels < max && level_pays(md, n, levels))
        levels++;
    return levels;
}
