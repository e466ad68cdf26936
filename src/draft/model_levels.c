/* Chains of the drafter `model` (model.c): how many levels the next pass computes, and whether there
 * is another pass.
 *
 * Levels together. On a remote backend a pass costs a round trip, so greedy chains draft several
 * levels in one pass: the device feeds the argmax of each row to the next level (SO_ROW_GUESS). The
 * tokens are those of one pass for each level, and a pass has fewer round trips.
 *
 * Where the argmax is the guess, such a backend also computes its probability (SO_SAMPLE_BEST), so
 * that no logits are downloaded. The tokens are those of the host; the probability, which only the
 * planner reads, differs from the host's estimate by rounding.
 *
 * Prices (so_draft_terms). A pass costs the trip price, and each of its levels the level price, for
 * all chains together. So before a pass the chains ask what it is expected to gain with as many
 * levels as pay (so_model_end_unprofitable); in a pass that is made, a level has to pay for itself
 * alone (so_model_levels_together). Both are decided by the chances that are known before the rows
 * are seen. A level that is computed together with those before it saves a trip, but it is in vain
 * where their rows would have ended the chain; so it has to wait for them if levels are dear and
 * trips are cheap (is_worth_joining). Afterwards the guesses of all computed levels are taken (draw_levels in model.c): their
 * cost is spent. Where every level is a pass, as on CPUs, another pass is another level.
 *
 * Refuses levels together where the host is needed between levels: sampled tokens, penalties, biases,
 * a vocabulary subset, an inner drafter. Thread: the engine thread. */
#include "base/log.h"
#include "draft/model_impl.h"

double so_model_next_gain(const so_model_chain *c) {
    const so_draft_terms *t = c->job->terms;
    return t ? c->path * so_terms_chance(t, c->depth + 1, -1) - so_terms_row(t, c->depth + 1) : 1;
}

/* Whether the device's argmax can be a guess: it compares all ids. */
static bool has_argmax(const so_model_drafter *md) {
    return so_model_backend(md->m)->vt->remote && md->n_subset == so_model_logits_len(md->m) &&
           md->n_subset <= SO_SAMPLE_MAX;
}

bool so_model_argmax_is_guess(const so_model_drafter *md, int n) {
    bool is = has_argmax(md);
    for (int i = 0; i < n && is; i++) {
        so_sample_params p = so_model_params(md, md->chains[i].job);
        is = md->chains[i].done || so_sample_is_argmax(&p);
    }
    return is;
}

int so_model_levels_per_pass(const so_model_drafter *md) {
    bool possible = !md->inner && md->base.tree_nodes == 0 && has_argmax(md);
    return possible ? SO_MIN(SO_PASS_LEVELS, md->max_logits) : 1;
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

/* Maximum number of levels of the next pass, whatever the limits of the chains; 1: they need the host
 * for every guess, or rows or memory do not suffice for more. */
static int most_levels(so_model_drafter *md, int n) {
    int n_active = 0, n_missing = 0;
    bool possible = !md->inner && so_model_argmax_is_guess(md, n);
    for (int i = 0; i < n && possible; i++) {
        const so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        n_missing += c->n_text - so_seq_len(c->s->seq) - 1;
        n_active++;
    }
    if (!possible || n_active == 0 || n_missing > md->o.n_batch)
        return 1;
    int levels = SO_MIN(SO_PASS_LEVELS, md->max_logits / n_active);
    return levels > 1 && has_levels(md) ? levels : 1;
}

/* The same within the limits of the chains, and with the pages that are available. */
static int within_limits(const so_model_drafter *md, int n, int levels) {
    int64_t n_pages = 0;
    for (int i = 0; i < n && levels > 1; i++) {
        const so_model_chain *c = &md->chains[i];
        if (!c->done)
            levels = SO_MIN(levels, SO_MIN(c->limit - c->depth, so_model_tree_room(c->job)));
    }
    for (int i = 0; i < n && levels > 1; i++) {
        const so_seq *s = md->chains[i].s->seq;
        if (!md->chains[i].done)
            n_pages += so_seq_pages_needed(s, md->chains[i].n_text - so_seq_len(s) + levels - 1);
    }
    return levels > 1 && n_pages <= so_kv_available_pages(md->kv) ? levels : 1;
}

/* What level number `level` of the next pass, the first being 0, is expected to gain beyond its
 * price, with the chances that are known before the rows are seen. Call for 0, 1, … in order. */
static double level_gain(so_model_drafter *md, int n, int level) {
    double gain = 0, price = 0;
    for (int i = 0; i < n; i++) {
        so_model_chain *c = &md->chains[i];
        const so_draft_terms *t = c->job->terms;
        int depth = c->depth + level;
        if (c->done)
            continue;
        c->expected = level == 0 ? c->path : c->expected * so_terms_chance(t, depth, -1);
        gain += SO_MAX(c->expected * so_terms_chance(t, depth + 1, -1) - so_terms_row(t, depth + 1),
                       0.0);
        price = SO_MAX(price, (double)t->level_price);
    }
    return gain - price;
}

static bool all_have_terms(const so_model_drafter *md, int n) {
    for (int i = 0; i < n; i++)
        if (!md->chains[i].done && !md->chains[i].job->terms)
            return false;
    return true;
}

/* Whether the level that level_gain was last called for should be computed together with those
 * before it, rather than when their rows are known: the trip that it saves if a chain goes on,
 * against the level if none does. A chain is taken to go on where its guesses are accepted. */
static bool is_worth_joining(const so_model_drafter *md, int n) {
    double none = 1, hoped = 0, pass = 0;
    for (int i = 0; i < n; i++) {
        const so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        none *= 1 - (c->path > 0 ? c->expected / c->path : 0);
        hoped = SO_MAX(hoped, (double)c->job->terms->hoped_trip_price);
        pass = SO_MAX(pass, so_terms_pass(c->job->terms));
    }
    return (1 - none) * pass > pass - hoped;
}

/* How many levels pay in a pass with at most `max`, and what they gain together. */
static int levels_that_pay(so_model_drafter *md, int n, int max, double *gain) {
    int levels = 1;
    *gain = level_gain(md, n, 0);
    for (double more; levels < max && (more = level_gain(md, n, levels)) > 0; levels++) {
        if (!is_worth_joining(md, n))
            break;
        *gain += more;
    }
    return levels;
}

/* Most levels that a pass could have for this job, reported to the planner for the next call. A sampled
 * job in the same call, or a long catch-up, lowers the levels of this call only. n: jobs of the call. */
static int levels_of_job(const so_model_drafter *md, const so_draft_job *job, int n) {
    so_sample_params p = so_model_params(md, job);
    bool possible = !md->no_levels && so_model_levels_per_pass(md) > 1 && so_sample_is_argmax(&p);
    return possible ? SO_MAX(SO_MIN(SO_PASS_LEVELS, md->max_logits / n), 1) : 1;
}

int so_model_levels_together(so_model_drafter *md, int n) {
    int levels = within_limits(md, n, most_levels(md, n));
    double gain;
    for (int i = 0; i < n; i++)
        if (!md->chains[i].done)
            md->chains[i].job->levels_per_pass = levels_of_job(md, md->chains[i].job, n);
    return levels > 1 && all_have_terms(md, n) ? levels_that_pay(md, n, levels, &gain) : levels;
}

/* If one chain has no terms or is still in catch-up, the pass is made anyway, and all continue. */
void so_model_end_unprofitable(so_model_drafter *md, int n) {
    double gain, price = 0;
    int n_active = 0;
    for (int i = 0; i < n; i++) {
        const so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        if (!c->job->terms || c->first_logit < 0)
            return;
        price = SO_MAX(price, (double)c->job->terms->trip_price);
        n_active++;
    }
    if (n_active == 0)
        return;
    levels_that_pay(md, n, within_limits(md, n, most_levels(md, n)), &gain);
    for (int i = 0; i < n && gain <= price; i++)
        md->chains[i].done = true;
}
