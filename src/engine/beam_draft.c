/* The guesses of a beam search: which drafter makes them, and how many. beam.c verifies them and
 * states why they change no result. The first draft model among the request's drafters guesses;
 * other drafters know no probabilities, so that they cannot rank candidates. A drafter that fails
 * is logged and the search continues without guesses.
 *
 * With a fixed --spec-length every pass has so many levels, as far as the pass, the cache and the
 * longest answer allow; otherwise plan/beam_levels.h decides. Engine thread. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/beam.h"
#include "engine/drafters.h"

/* Finds the stage whose drafter can guess; −1: none. */
static int find_stage(const so_draft_set *d) {
    for (int i = 0; i < d->n_stages; i++)
        if (d->stages[i].drafter->vt->propose_beams)
            return i;
    return -1;
}

static void list_ends(so_request *r) {
    so_beams *b = r->beams;
    int n_vocab = so_model_hparams(r->e->m)->n_vocab;
    b->ends = SO_NEW_N(int32_t, b->n_ends);
    for (int32_t id = 0, n = 0; id < n_vocab && n < b->n_ends; id++)
        if (so_restrict_ends(r, id))
            b->ends[n++] = id;
}

int so_beams_open_draft(so_request *r, so_spec_set *set, const so_draft_text *text,
                        const so_spec_opts *o, so_err *err) {
    so_beams *b = r->beams;
    int stage = find_stage(&set->drafters), rc = SO_OK;
    if (stage < 0) {
        so_log(strcmp(o->drafter, "auto") == 0 || set->failed ? SO_LOG_DEBUG : SO_LOG_WARN,
               "beam search: %s makes no guesses: only a draft model can rank its guesses",
               set->text);
        set->failed = true;
        return SO_OK;
    }
    so_drafter *d = set->drafters.stages[stage].drafter;
    rc = d->vt->open(d, text, &b->draft_state, err);
    if (rc != SO_OK)
        return rc;
    b->drafter = d;
    b->length = o->length;
    b->most_levels = SO_MIN(o->draft_max ? o->draft_max : r->e->o.max_draft, SO_BEAM_LEVELS);
    b->width = b->o.candidates ? b->o.candidates : SO_MIN(2 * b->o.width, SO_BEAM_MAX_CANDIDATES);
    list_ends(r);
    r->spec.set = set;
    set->n_users++;
    return SO_OK;
}

void so_beams_close_draft(so_request *r) {
    so_beams *b = r->beams;
    if (b && b->draft_state)
        b->drafter->vt->close(b->drafter, b->draft_state);
    if (b)
        b->draft_state = NULL;
}

void so_beams_preempt(so_request *r) {
    if (r->beams && r->beams->draft_state)
        so_drafter_preempt(r->beams->drafter, r->beams->draft_state);
}

/* --- a step --- */

/* Levels that the step has room for, after reserving pages for them. */
static int reserve_levels(so_request *r) {
    so_beams *b = r->beams;
    int steps_left = b->search.rule.max_depth - b->search.depth;
    int most = b->length ? b->length : b->most_levels;
    most = SO_MIN(most, SO_MIN(steps_left - 1, (SO_TREE_MAX - 1) / b->width));
    most = SO_MIN(most, r->e->beam_rows_left / b->width);
    int n = b->length ? most
                      : so_beam_levels_choose(&r->spec.set->beam_levels, b->o.width, b->width,
                                              SO_MAX(most, 0));
    return n > 0 ? so_schedule_reserve(r, n * b->width) / b->width : 0;
}

static void propose(so_request *r, int n_levels) {
    so_beams *b = r->beams;
    so_spec_set *set = r->spec.set;
    so_err err = {0};
    so_beam_row known[SO_BEAM_MAX];
    for (int i = 0; i < b->search.n_live; i++)
        known[i] = (so_beam_row){b->items + (size_t)i * (size_t)b->row_len,
                                 b->scored[i] ? b->n_items[i] : 0};
    so_draft_beams job = {.state = b->draft_state,
                          .tokens = r->tokens,
                          .n_tokens = r->n_tokens,
                          .search = &b->search,
                          .tree = b->tree,
                          .n_tree = b->n_tree,
                          .known = known,
                          .ends = b->ends,
                          .n_ends = b->n_ends,
                          .width = b->width,
                          .max_levels = n_levels,
                          .guesses = b->guesses};
    const so_backend *backend = so_model_backend(r->e->m);
    unsigned n_failed = backend->n_failed;
    so_speculate_lock(r->e);
    int rc = b->drafter->vt->propose_beams(b->drafter, &job, &err);
    so_speculate_unlock(r->e);
    if (rc == SO_OK) {
        b->n_guesses = job.n_guesses;
        r->e->beam_rows_left -= job.n_guesses;
        return;
    }
    so_log(set->failed ? SO_LOG_DEBUG : SO_LOG_WARN,
           "drafter %s: %s; continuing without its guesses", set->text, err.msg);
    set->failed = true;
    set->off |= backend->n_failed != n_failed;
}

void so_beams_propose(so_engine *e) {
    for (so_request *r = e->running; r; r = r->next) {
        so_beams *b = r->beams;
        if (!b)
            continue;
        b->draft_ms = 0;
        b->usual = r->n_chunk == 0 && r->stats.rounds > 0;
        if (r->n_beam_rows == 0 || !b->draft_state || r->spec.set->off || b->n_pending > 0)
            continue;
        int n = reserve_levels(r);
        if (n == 0)
            continue;
        int64_t t = so_clock_ns();
        propose(r, n);
        b->draft_ms = so_clock_ms_since(t);
        b->usual &= b->drafted; /* the first draft also computes the prompt */
        b->drafted = true;
        r->stats.draft_ms += b->draft_ms;
        e->step.info.draft_ms += b->draft_ms;
    }
}

void so_beams_observe_pass(so_engine *e, double pass_ms) {
    for (so_request *r = e->running; r; r = r->next) {
        so_beams *b = r->beams;
        if (!b || r->n_beam_rows == 0 || !b->draft_state || b->n_tested + b->n_done_steps == 0)
            continue;
        so_beam_levels_observe(&r->spec.set->beam_levels, b->n_levels, b->n_tested, b->n_accepted,
                               b->usual ? pass_ms + b->draft_ms : -1);
    }
}
