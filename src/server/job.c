/* See job.h. Lists grow by doubling. The only blocking calls take the job's lock. */
#include "server/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"

so_job *so_job_create(so_api_request *rq) {
    so_job *j = SO_NEW(so_job);
    j->rq = *rq;
    *rq = (so_api_request){0};
    pthread_mutex_init(&j->lock, NULL);
    j->refs = 1;
    j->prompts = SO_NEW_N(so_tokens, j->rq.n_prompts);
    j->seed = j->rq.has_seed ? j->rq.sample.seed : so_rng_system_seed() >> 11; /* 53 bits */
    snprintf(j->id, sizeof j->id, "%s-%016llx", j->rq.kind == SO_API_CHAT ? "chatcmpl" : "cmpl",
             (unsigned long long)so_rng_system_seed());
    j->created_s = (int64_t)time(NULL);
    j->t_created_ns = so_clock_ns();
    j->n_choices = j->rq.n_prompts * j->rq.n;
    j->choices = SO_NEW_N(so_choice, j->n_choices);
    for (int i = 0; i < j->n_choices; i++)
        j->choices[i] = (so_choice){.job = j, .index = i, .prompt = i / j->rq.n};
    return j;
}

static void free_choice(so_choice *c) {
    so_buf_free(&c->text);
    free(c->tokens);
    free(c->logprobs);
    free(c->scores);
    for (int i = 0; i < c->n_rounds; i++)
        free(c->rounds[i]);
    free(c->rounds);
}

void so_job_free(so_job *j) {
    for (int i = 0; i < j->n_choices; i++)
        free_choice(&j->choices[i]);
    for (int i = 0; i < j->rq.n_prompts; i++)
        so_tokens_free(&j->prompts[i]);
    free(j->choices);
    free(j->prompts);
    so_tokens_free(&j->expected);
    for (int i = 0; i < j->n_bad_words; i++)
        so_tokens_free(&j->bad_words[i]);
    free(j->bad_words);
    so_buf_free(&j->spec_text);
    so_buf_free(&j->head);
    so_buf_free(&j->out);
    so_api_request_free(&j->rq);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

void so_job_acquire(so_job *j) {
    pthread_mutex_lock(&j->lock);
    j->refs++;
    pthread_mutex_unlock(&j->lock);
}

void so_job_release(so_job *j) {
    pthread_mutex_lock(&j->lock);
    bool last = --j->refs == 0;
    pthread_mutex_unlock(&j->lock);
    if (last && j->on_end)
        j->on_end(j->on_end_user, j);
    else if (last)
        so_job_free(j);
}

/* --- engine thread --- */

static void *grow(void *list, int n, int *cap, size_t size) {
    if (n < *cap)
        return list;
    *cap = *cap ? 2 * *cap : 32;
    return so_realloc(list, (size_t)*cap * size);
}

void so_choice_add_token(so_choice *c, const so_event *ev, int64_t now_ns) {
    so_buf_append_str(&c->text, ev->text);
    if (ev->token == SO_TOKEN_NONE)
        return;
    if (ev->origin == SO_ORIGIN_DRAFT) {
        c->prediction_accepted += (int)(c->predicted_path & 1);
        c->predicted_path >>= 1;
    }
    int cap = c->cap_tokens;
    c->tokens = grow(c->tokens, c->n_tokens, &c->cap_tokens, sizeof *c->tokens);
    if (ev->logprobs) {
        if (cap != c->cap_tokens)
            c->logprobs = so_realloc(c->logprobs, (size_t)c->cap_tokens * (size_t)c->n_each *
                                                      sizeof *c->logprobs);
        memcpy(c->logprobs + (size_t)c->n_tokens * (size_t)c->n_each, ev->logprobs,
               (size_t)c->n_each * sizeof *c->logprobs);
    }
    c->tokens[c->n_tokens++] = (so_out_token){.id = ev->token,
                                              .text_end = (uint32_t)c->text.len,
                                              .round = (uint32_t)SO_MAX(c->n_rounds - 1, 0),
                                              .origin = (uint8_t)ev->origin};
    if (!c->t_first_ns)
        c->t_first_ns = now_ns;
    c->t_last_ns = now_ns;
}

bool so_job_scores(const so_job *j) { return j->rq.echo && j->rq.logprobs; }

const so_choice *so_choice_scorer(const so_choice *c) { return c - c->index % c->job->rq.n; }

bool so_choice_shares(const so_choice *c) {
    return c->job->rq.beams.width > 0 && c->index % c->job->rq.n != 0;
}

/* A hypothesis as one event after the other, as if the choice had a request of its own. */
static void add_hypothesis(so_choice *c, const so_beam_result *b, int64_t now_ns) {
    for (int i = 0; i < b->n_tokens; i++) {
        so_event ev = {.token = b->tokens[i],
                       .text = i ? (so_str){"", 0} : so_buf_str(&b->text),
                       .logprobs =
                           b->logprobs ? b->logprobs + (size_t)i * (size_t)c->n_each : NULL};
        so_choice_add_token(c, &ev, now_ns);
    }
    c->score = b->score;
    c->finish = b->finish;
}

void so_choice_add_hypotheses(so_choice *c, const so_request *req, int64_t now_ns) {
    int n = so_request_n_best(req);
    if (n > 0)
        c->score = so_request_result(req, 0)->score;
    for (int i = 1; c->job->rq.beams.width > 0 && i < c->job->rq.n; i++) {
        so_choice *other = c + i;
        other->n_each = c->n_each;
        other->label = c->label;
        other->err = c->err;
        other->finish = c->finish;
        if (i < n && (c->finish == SO_FINISH_STOP || c->finish == SO_FINISH_LENGTH))
            add_hypothesis(other, so_request_result(req, i), now_ns);
    }
}

/* Called at every event; copies the scores at the first one, when the prompt has been computed. */
void so_choice_add_scores(so_choice *c, const so_request *req) {
    int n_each;
    const so_logprob *p = so_request_prompt_logprobs(req, &n_each);
    if (!p || c->scored)
        return;
    size_t n = (c->job->prompts[c->prompt].len - 1) * (size_t)n_each;
    c->scores = so_alloc(SO_MAX(n, 1) * sizeof *p);
    memcpy(c->scores, p, n * sizeof *p);
    c->scored = true;
}

static void mark_nodes(so_out_round *r, const so_round *round) {
    const so_tree *t = round->tree;
    const so_verdict *v = round->verdict;
    for (int i = 0; i < t->n_nodes; i++)
        r->nodes[i] = (so_out_node){.token = t->nodes[i].token,
                                    .parent = t->nodes[i].parent,
                                    .depth = t->nodes[i].depth,
                                    .accepted = i == 0,
                                    .chance = t->nodes[i].chance};
    for (int i = 0; i < v->n_accepted; i++)
        r->nodes[v->path[i]].accepted = true;
    for (int i = 0; i < v->n_tested; i++)
        r->nodes[t->proposals[v->tested[i]].child].tested = true;
}

/* Counts guesses of drafter 0, which is `predict` if the request has a prediction (api_spec.c). A
 * node that two drafters proposed counts for both. An accepted guess is counted when it becomes a
 * token of the answer, so guesses after the end of the answer do not count. */
static void count_prediction(so_choice *c, const so_round *round) {
    const so_tree *t = round->tree;
    const so_verdict *v = round->verdict;
    c->predicted_path = 0;
    for (int i = 0; i < t->n_proposals; i++) {
        if (t->proposals[i].drafter != 0)
            continue;
        c->prediction_drafted++;
        for (int k = 0; k < v->n_accepted; k++)
            if (v->path[k] == t->proposals[i].child)
                c->predicted_path |= UINT64_C(1) << k;
    }
}

void so_choice_add_round(so_choice *c, const so_round *round) {
    if (c->job->rq.prediction.ptr)
        count_prediction(c, round);
    if (!c->job->rq.rounds)
        return;
    size_t n = (size_t)round->tree->n_nodes;
    so_out_round *r = so_alloc(sizeof *r + n * sizeof r->nodes[0]);
    *r = (so_out_round){.n_nodes = (int)n};
    mark_nodes(r, round);
    c->rounds = grow(c->rounds, c->n_rounds, &c->cap_rounds, sizeof *c->rounds);
    c->rounds[c->n_rounds++] = r;
}

/* Guesses after the end of the answer count as neither tested nor accepted (engine/counts.c). The
 * guesses one depth below the last accepted one count as tested only if the target's own token
 * became part of the answer. */
void so_choice_trim_round(so_choice *c) {
    if (c->n_rounds == 0 || c->n_rounds <= c->ready_rounds)
        return;
    so_out_round *r = c->rounds[c->n_rounds - 1];
    int n_accepted = c->stats.draft_n_accepted - c->counted.draft_n_accepted;
    int next = SO_MIN(n_accepted, SO_STATS_DEPTHS - 1);
    int n_tested =
        n_accepted + (c->stats.per_depth[next].tested > c->counted.per_depth[next].tested);
    for (int i = 1; i < r->n_nodes; i++) {
        r->nodes[i].accepted &= r->nodes[i].depth <= n_accepted;
        r->nodes[i].tested &= r->nodes[i].depth <= n_tested;
    }
}

/* Adds to the new rounds what is known only after their step: its plan and times. */
static void note_step(so_choice *c, const so_step_info *step) {
    for (int i = c->ready_rounds; i < c->n_rounds; i++) {
        c->rounds[i]->plan = step->plan;
        c->rounds[i]->draft_ms = step->draft_ms;
        c->rounds[i]->pass_ms = step->pass_ms;
    }
}

void so_job_notify(so_job *j, const so_step_info *step, bool done) {
    pthread_mutex_lock(&j->lock);
    if (done) {
        j->state = SO_JOB_DONE;
        j->t_done_ns = so_clock_ns();
    }
    for (int i = 0; i < j->n_choices; i++) {
        so_choice *c = &j->choices[i];
        note_step(c, step);
        c->ready_tokens = c->n_tokens;
        c->ready_rounds = c->n_rounds;
        c->ready_text = c->text.len;
        c->ready_end = c->finish != SO_FINISH_NONE;
    }
    if (j->asleep && (done || j->rq.stream)) { /* without `stream`: at the end only */
        j->asleep = false;
        j->wake(j->wake_user);
    }
    pthread_mutex_unlock(&j->lock);
}

/* --- totals --- */

so_job_totals so_job_total(const so_job *j) {
    so_job_totals t = {0};
    bool predicted = j->rq.prediction.ptr && j->spec.drafter;
    for (int i = 0; i < j->n_choices; i++) {
        const so_choice *c = &j->choices[i];
        so_stats_add(&t.stats, &c->stats);
        t.completion_tokens += c->n_tokens;
        if (c->index % j->rq.n == 0) /* later choices only find the first one's pages */
            t.cached_tokens += SO_MIN(c->stats.cached_n, c->stats.prompt_n);
        if (predicted) {
            t.prediction_accepted += c->prediction_accepted;
            t.prediction_rejected += c->prediction_drafted - c->prediction_accepted;
        }
    }
    for (int i = 0; i < j->rq.n_prompts; i++)
        t.prompt_tokens += (int)j->prompts[i].len;
    if (j->n_choices > 0)
        t.label = j->choices[0].label;
    return t;
}
