/* How deep to draft where drafting costs time or draws tokens, and whose guesses to take.
 *
 * A set that is one drafter, or several merged, gets its lengths before it is asked. In a set of
 * the form `a,b` the free drafters are asked first, at any depth; then, for each request,
 *
 *   judge   are these guesses worth more than what the drafter behind them is expected to give? If
 *           not they are dropped (and watched: shadow.h), and the next one is asked
 *   limit   how deep the drafter that costs may go for the requests that came to it; 0 is usual
 *
 * With several requests at once both are asked only where drafting has been seen to pay (see
 * so_lengths_begin).
 *
 * Of a drafter that is known, that is only whether to begin: how sure it is of a guess says more
 * about the next one than any average, so after each guess `more` weighs another. A token that is
 * drawn says nothing here; the row that it is drawn from does (`draw`, before it is drawn).
 *
 * All of them see estimates, contexts and rows, never drawn tokens (rule of sight). What a draft
 * model has not read of a text must be read before it can guess: so_speculation.n_read counts what
 * it has, as if nothing were shared with other requests. Engine thread. */
#include <math.h>

#include "engine/impl.h"

/* What to think of a model's guesses before the first was tested, and of dropped drafters. */
static const double FIRST_GUESS = 0.7, HOPELESS = 0.15, CERTAIN = 0.8;
static const double OWN_PART = 0.08, SHARED_PART = 0.02; /* of a new round in what drafts come to */
static const double CROWD_PART = 0.03, LONGEST = 8; /* of a step; plain passes: the rest is noise */
static const double PRICE_PART = 0.15;
enum { FEW = 8 };                      /* rounds */
enum { FAR = 128, PROMPT_ROWS = 256 }; /* tokens: a usual answer; a usual chunk of a prompt */

static double target_read_ms(const so_engine *e) {
    return so_curve_ms(so_planner_curve(e->planner), PROMPT_ROWS) / PROMPT_ROWS;
}

/* What drafting took was learned when there was some; the machine may be another by now, and a
 * draft that is not made is not measured again. t(1) is, so a guess is taken to have changed with
 * it: a busy minute would otherwise end speculation for good. */
static double now(const so_engine *e, double ms) {
    double plain_ms = so_curve_ms(so_planner_curve(e->planner), 1);
    return e->priced_ms > 0 && plain_ms > 0 ? ms * plain_ms / e->priced_ms : ms;
}

static double step_cost(const so_engine *e, const so_drafter *d) {
    return now(e, so_drafter_cost_ms(d));
}

double so_lengths_check_ms(const so_engine *e, const so_request *r) {
    return e->check_ms[r->spec.verify];
}

/* At the pace at which drafters smooth what they take (model.c). */
static void note_price(so_engine *e) {
    double plain_ms = so_curve_ms(so_planner_curve(e->planner), 1);
    if (!(plain_ms > 0))
        return;
    if (!(e->priced_ms > 0))
        e->priced_ms = plain_ms;
    e->priced_ms *= exp(PRICE_PART * log(plain_ms / e->priced_ms));
}

/* Not before something is known of the drafter: until then the planner limits what is risked. */
static bool may_stretch(const so_request *r, const so_drafter *lead) {
    return so_drafter_cost_ms(lead) > 0 &&
           so_estimate_sure(r->spec.estimate, lead->index) >= CERTAIN;
}

/* accept: [depth], filled. A chain that may stretch is worth its first guess at least. */
static so_plan_chain chain_of(const so_engine *e, const so_request *r, const so_drafter *lead,
                              int depth, float *accept) {
    const so_speculation *s = &r->spec;
    if (may_stretch(r, lead))
        depth = SO_MIN(depth, 1);
    for (int k = 0; k < depth; k++)
        accept[k] = (float)so_estimate_get(s->estimate, lead->index, k + 1, -1, FIRST_GUESS);
    return (so_plan_chain){
        .accept = accept,
        .max_len = depth,
        .node_ms = so_lengths_check_ms(e, r),
        .once_ms =
            now(e, so_drafter_read_ms(lead, target_read_ms(e))) * (r->n_tokens - 1 - s->n_read),
        .horizon = SO_MIN(r->max_len - r->n_tokens, FAR),
        .sure = so_estimate_sure(s->estimate, lead->index),
        .hopeful = so_estimate_hopeful(s->estimate, lead->index),
    };
}

/* Lets the planner decide the n chains of plan_chains and plan_owners; adds to lengths_ms what
 * drafting will take. */
static void decide(so_engine *e, int n, double step_ms) {
    so_plan_env env = {
        .max_rows = e->max_rows, .other_rows = e->other_rows + e->n_trees - n, .step_ms = step_ms};
    so_plan plan;
    int depth = 0;
    if (n == 0)
        return;
    if (e->rests && step_ms > 0) {
        for (int i = 0; i < n; i++) {
            e->plan_chains[i].length = 0;
            e->plan_owners[i]->spec.stretch = false;
        }
        return;
    }
    so_planner_lengths(e->planner, e->plan_chains, n, &env, &plan);
    for (int i = 0; i < n; i++) {
        const so_plan_chain *c = &e->plan_chains[i];
        so_speculation *s = &e->plan_owners[i]->spec;
        s->stretch &= c->length > 0 && !plan.probe;
        if (c->length == 0)
            continue;
        s->path = 1;
        s->promise = 0;
        depth = SO_MAX(depth, c->length);
        e->lengths_ms += c->once_ms;
        s->n_read = e->plan_owners[i]->n_tokens;
    }
    e->lengths_ms += depth * step_ms;
}

void so_lengths_plan(so_engine *e) {
    int n = 0, depths = e->o.max_draft;
    double step_ms = 0;
    for (so_request *r = e->running; r; r = r->next) {
        so_speculation *s = &r->spec;
        if (!r->has_tree || !s->estimate || s->set->staged || s->length > 0 || s->depth == 0)
            continue;
        const so_drafter *lead = so_drafter_leading(s->set->drafters.root);
        if (!(so_drafter_cost_ms(lead) > 0) && !(s->set->draws && r->tree->max_rows > 0))
            continue;
        e->plan_chains[n] =
            chain_of(e, r, lead, s->depth, e->chain_accept + (size_t)n * (size_t)depths);
        s->stretch = may_stretch(r, lead);
        e->plan_owners[n++] = r;
        step_ms = SO_MAX(step_ms, step_cost(e, lead));
    }
    decide(e, n, step_ms);
    for (int i = 0; i < n; i++)
        if (!e->plan_owners[i]->spec.stretch)
            e->plan_owners[i]->spec.depth = e->plan_chains[i].length;
}

/* Whether a guess that stands with chance `gain` raises the tokens a millisecond: behind `depth`
 * guesses in as many steps of the draft, another row of the pass, the host's part of it and
 * step_ms. */
static bool pays(const so_request *r, const so_drafter *d, int depth, double gain, double step_ms) {
    const so_engine *e = r->e;
    const so_curve *curve = so_planner_curve(e->planner);
    int rows = e->n_trees + e->other_rows + depth;
    double check_ms = so_lengths_check_ms(e, r);
    double spent_ms = step_ms > 0 ? 0 : step_cost(e, d); /* on the guess itself */
    double now_ms = so_curve_ms(curve, rows) + depth * (step_cost(e, d) + check_ms) + spent_ms;
    double more_ms = so_curve_ms(curve, rows + 1) - so_curve_ms(curve, rows) + check_ms + step_ms;
    return gain * now_ms > (e->n_trees + r->spec.promise) * more_ms;
}

/* The row is known, its step is paid for: whether what will be drawn from it is worth a test. */
bool so_lengths_draw(so_draft_job *job, const so_drafter *d, int depth, double sure) {
    const so_request *r = job->request;
    const so_speculation *s = &r->spec;
    if (!s->stretch)
        return true;
    double chance = so_estimate_get(s->estimate, d->index, depth, sure, FIRST_GUESS);
    if (pays(r, d, depth - 1, s->path * chance, 0))
        return true;
    so_estimate_skip(s->estimate, d->index, depth, sure);
    return false;
}

bool so_lengths_more(so_draft_job *job, const so_drafter *d, int depth, double sure) {
    so_request *r = job->request;
    so_speculation *s = &r->spec;
    so_engine *e = r->e;
    if (!s->stretch)
        return true;
    s->path *= so_estimate_get(s->estimate, d->index, depth, sure, FIRST_GUESS);
    s->promise += s->path;
    double gain = s->path * so_estimate_get(s->estimate, d->index, depth + 1, -1, FIRST_GUESS);
    if (!pays(r, d, depth, gain, step_cost(e, d)))
        return false;
    e->lengths_ms += step_cost(e, d);
    return true;
}

static bool is_limited(const so_draft_job *job, const so_drafter *member) {
    const so_request *r = job->request;
    return r->spec.length == 0 && job->max_depth > 0 &&
           (so_drafter_cost_ms(member) > 0 || (member->draws && r->tree->max_rows > 0));
}

void so_lengths_limit(void *user, so_draft_job *jobs, int n_jobs, const so_drafter *member) {
    so_engine *e = user;
    const so_drafter *lead = so_drafter_leading(member);
    int n = 0;
    for (int i = 0; i < n_jobs; i++)
        if (is_limited(&jobs[i], member)) {
            so_request *r = jobs[i].request;
            e->plan_chains[n] = chain_of(e, r, lead, SO_MIN(jobs[i].max_depth, e->o.max_draft),
                                         e->chain_accept + (size_t)n * (size_t)e->o.max_draft);
            r->spec.stretch = may_stretch(r, lead);
            e->plan_owners[n++] = r;
        }
    decide(e, n, step_cost(e, lead));
    n = 0;
    for (int i = 0; i < n_jobs; i++)
        if (is_limited(&jobs[i], member)) {
            if (!e->plan_owners[n]->spec.stretch)
                jobs[i].max_depth = e->plan_chains[n].length;
            n++;
        }
}

static void smooth(so_stretch *s, double tokens, double passes, double part) {
    s->n++;
    part = SO_MAX(part, 1.0 / s->n);
    s->tokens += part * (tokens - s->tokens);
    s->passes += part * (passes - s->passes);
}

/* --- whether to draft at all, among several --- */

static int crowd_of(int n_requests) {
    int bits = 0;
    for (; n_requests > 0; n_requests /= 2)
        bits++;
    return SO_MIN(bits, SO_CROWDS - 1);
}

/* Beside others a guess takes the place of a sure token, so little is gained at best, and errors
 * that one request alone does not notice decide: what is known of t(n) comes from the widths that
 * were taken, a step that always drafts never sees the plain one, and of what is drafted only the
 * sure guesses are checked, while all of it is paid for. Seen with 4 and 8 requests: 13 % slower
 * than plain, and by the plan 4 % faster. So both ways are measured, tokens a millisecond by the
 * clock, and the better one is taken; the other has LOOK of ROUND steps, together, since a draft
 * model that has slept must first read what was said. One request alone is left to the estimates:
 * they follow its text from guess to guess. */
enum { ENOUGH = 16, ROUND = 256, LOOK = 8 };

static double rate_of(const so_stretch *s) { return s->passes > 0 ? s->tokens / s->passes : 0; }

void so_lengths_begin(so_engine *e) {
    const so_stretch *with = &e->drafted[crowd_of(e->n_trees)];
    const so_stretch *without = &e->undrafted[crowd_of(e->n_trees)];
    e->rests = false;
    if (e->n_trees < 2 || with->n < ENOUGH)
        return;
    e->turn = (e->turn + 1) % ROUND;
    bool look = e->turn < LOOK;
    e->rests = without->n < ENOUGH || (rate_of(with) < rate_of(without)) != look;
}

/* Times are taken in plain passes, as the curve has them at that moment: the machine's slow minutes
 * cancel, and so do the curve's mistakes, for both ways are measured by it. A step that also reads
 * a prompt says little; what was drafted in it, often the first guess behind a prompt that the
 * draft had to read first, is put on the bill of the next one. */
void so_lengths_observe(so_engine *e, double pass_ms, int n_tokens) {
    int n = e->plan.n_requests;
    bool drafted = e->lengths_ms > 0;
    if (drafted && e->planner)
        note_price(e);
    if (!(e->plan.plain_ms > 0) || n < 2)
        return;
    if (drafted)
        e->unpaid_ms += e->info.draft_ms;
    if (e->other_rows > 0)
        return;
    double ms = pass_ms + (drafted ? e->unpaid_ms : 0);
    smooth(drafted ? &e->drafted[crowd_of(n)] : &e->undrafted[crowd_of(n)], (double)n_tokens / n,
           SO_MIN(ms / e->plan.plain_ms, LONGEST), CROWD_PART);
    if (drafted)
        e->unpaid_ms = 0;
}

/* --- what drafts come to --- */

void so_lengths_learn(so_request *r, const so_plan_tree *chosen) {
    so_engine *e = r->e;
    const so_drafter *lead = so_drafter_leading(r->spec.set->drafters.root);
    const so_curve *curve = so_planner_curve(e->planner);
    const so_tree *t = chosen->tree;
    float chance[SO_TREE_MAX] = {1};
    double tokens = 1, plain_ms = so_curve_ms(curve, e->n_trees + e->other_rows);
    if (!r->spec.stretch || t->n_proposals == 0 || t->proposals[0].drafter != lead->index ||
        !(plain_ms > 0))
        return;
    for (int i = 1; i < t->n_nodes; i++) {
        chance[i] = chance[t->nodes[i].parent] * chosen->accept[i];
        tokens += chosen->keep[i] ? (double)chance[i] : 0;
    }
    double ms = so_curve_ms(curve, e->n_trees + e->other_rows + chosen->n_keep) +
                (t->n_nodes - 1) * step_cost(e, lead) + chosen->n_keep * so_lengths_check_ms(e, r);
    smooth(&r->spec.stretches, tokens, ms / plain_ms, OWN_PART);
    smooth(&r->spec.set->stretches[r->spec.guessing], tokens, ms / plain_ms, SHARED_PART);
}

/* What a draft of a request that may stretch is worth against a plain pass, from those before it;
 * 0: there were too few. */
static double stretch_worth(const so_request *r) {
    const so_stretch *own = &r->spec.stretches, *all = &r->spec.set->stretches[r->spec.guessing];
    if (all->n < FEW)
        return 0;
    double w = (double)own->n / (own->n + FEW);
    return (w * own->tokens + (1 - w) * all->tokens) / (w * own->passes + (1 - w) * all->passes);
}

/* The first chain of a tree, as the estimates see it. */
static int chain_chances(const so_request *r, float *out, int cap) {
    float accept[SO_TREE_MAX];
    int n = 0;
    so_estimate_tree(r->spec.estimate, r->tree, accept);
    for (int node = 0; n < cap && r->tree->nodes[node].first >= 0;) {
        node = r->tree->proposals[r->tree->nodes[node].first].child;
        out[n++] = accept[node];
    }
    return n;
}

/* Whether the drafter that costs is expected to gain more than the free guesses in the tree. */
static bool is_outdone(const so_engine *e, const so_request *r, const so_drafter *by) {
    const so_drafter *lead = so_drafter_leading(r->spec.set->drafters.root);
    float free_chances[SO_TREE_MAX], accept[SO_TREE_MAX];
    if (lead == by || !(so_drafter_cost_ms(lead) > 0) || e->rests)
        return false;
    so_plan_env env = {.max_rows = e->max_rows, .other_rows = e->other_rows};
    so_plan_chain have = {.accept = free_chances,
                          .max_len = chain_chances(r, free_chances, SO_TREE_MAX),
                          .node_ms = so_lengths_check_ms(e, r),
                          .sure = so_estimate_sure(r->spec.estimate, by->index)};
    so_plan_chain want = chain_of(e, r, lead, SO_MIN(r->spec.depth, SO_TREE_MAX - 1), accept);
    double now = so_planner_worth(e->planner, &have, e->n_trees, &env);
    env.step_ms = step_cost(e, lead);
    double then = so_planner_worth(e->planner, &want, e->n_trees, &env);
    if (then > 1 && may_stretch(r, lead))
        then = SO_MAX(then, stretch_worth(r));
    return then > now;
}

/* They are watched all the same, so that a drafter that has become good again is taken back. */
bool so_lengths_judge(void *user, const so_draft_job *job, const so_drafter *by) {
    so_request *r = job->request;
    so_speculation *s = &r->spec;
    const so_proposal *p = &job->tree->proposals[0];
    double chance =
        so_estimate_get(s->estimate, p->drafter, 1, job->tree->nodes[p->child].accept, FIRST_GUESS);
    bool hopeless = chance < HOPELESS && so_estimate_sure(s->estimate, p->drafter) >= CERTAIN;
    if (s->length > 0 || !(hopeless || is_outdone(user, r, by)))
        return true;
    so_shadow_watch(s->shadow, job->tree);
    return false;
}
