/* Drafting from the text that the user expects (an edited file, a template).
 *
 * A pointer follows the expected text. If the model writes something else, the pointer is set
 * again:
 *   1. if the last three output tokens occur in the expected text: to the place with the longest
 *      match (up to 32 tokens), among equals the nearest to the pointer;
 *   2. else if the last token occurs near the pointer (8 back, 16 ahead): there (text was omitted
 *      or inserted);
 *   3. else one token was replaced: continue after it. After four replacements in a row the
 *      position is lost, and nothing is proposed until rule 1 or 2 finds it again.
 * Rule 1 examines at most 64 places, found by binary search in a sorted list of 3-grams, so a token
 * costs O(log n) for any text. Guesses are points; confidence grows with the number of tokens
 * that matched in a row. Thread: the engine thread. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/confidence.h"
#include "draft/counts.h"
#include "draft/drafters.h"

enum { GRAM = 3, HISTORY = 32, NEAR_BACK = 8, NEAR_AHEAD = 16, LOST = 4, PLACES = 64 };
enum { MAX_EXPECTED = 1 << 24 };

typedef struct gram {
    uint64_t hash;
    int32_t end; /* index just after it */
} gram;

typedef struct predict_state {
    int32_t *expected;
    int n_expected;
    gram *grams; /* sorted by (hash, end) */
    int n_grams;
    int at;     /* index of the next expected token */
    int agreed; /* newest tokens that matched in a row */
    int replaced;
    int32_t history[HISTORY]; /* of the output, newest last */
    int n_history;
    int n_seen; /* tokens of prompt and output */
} predict_state;

static int compare_grams(const void *a, const void *b) {
    const gram *x = a, *y = b;
    if (x->hash != y->hash)
        return x->hash < y->hash ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Number of tokens before `end` in the expected text that equal the end of the output. */
static int agreement(const predict_state *s, int end) {
    int n = 0;
    while (n < s->n_history && n < end &&
           s->history[s->n_history - 1 - n] == s->expected[end - 1 - n])
        n++;
    return n;
}

/* The first gram not below (hash, end). */
static int lower_bound(const predict_state *s, uint64_t hash, int32_t end) {
    int lo = 0, hi = s->n_grams;
    gram key = {hash, end};
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (compare_grams(&s->grams[mid], &key) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Rule 1: searches outwards from the pointer, so that the nearest of equals is found first. */
static bool find_grams(predict_state *s) {
    if (s->n_history < GRAM)
        return false;
    uint64_t hash = so_counts_hash(s->history + s->n_history - GRAM, GRAM);
    int up = lower_bound(s, hash, s->at), down = up - 1, best = 0, best_end = 0;
    for (int i = 0; i < PLACES; i++) {
        bool has_up = up < s->n_grams && s->grams[up].hash == hash;
        bool has_down = down >= 0 && s->grams[down].hash == hash;
        if (!has_up && !has_down)
            break;
        bool take_up =
            has_up && (!has_down || s->grams[up].end - s->at <= s->at - s->grams[down].end);
        int end = s->grams[take_up ? up++ : down--].end, n = agreement(s, end);
        if (n > best)
            best = n, best_end = end;
    }
    if (best < GRAM)
        return false;
    s->at = best_end;
    s->agreed = best;
    return true;
}

/* Rule 2. */
static bool find_near(predict_state *s, int32_t token) {
    for (int i = 0; i <= NEAR_AHEAD; i++) {
        int ahead = s->at + i, back = s->at - i;
        bool is_ahead = ahead < s->n_expected && s->expected[ahead] == token;
        bool is_back = i > 0 && i <= NEAR_BACK && back >= 0 && back < s->n_expected &&
                       s->expected[back] == token;
        if (is_ahead || is_back) {
            s->at = (is_ahead ? ahead : back) + 1;
            s->agreed = 1;
            return true;
        }
    }
    return false;
}

static void follow(predict_state *s, int32_t token) {
    if (s->n_history == HISTORY)
        memmove(s->history, s->history + 1, (size_t)--s->n_history * sizeof *s->history);
    s->history[s->n_history++] = token;
    if (s->at < s->n_expected && s->expected[s->at] == token && s->replaced < LOST) {
        s->at++;
        s->agreed++;
        s->replaced = 0;
    } else if (find_grams(s) || find_near(s, token)) {
        s->replaced = 0;
    } else {
        if (s->replaced < LOST)
            s->at = SO_MIN(s->at + 1, s->n_expected);
        s->replaced = SO_MIN(s->replaced + 1, LOST);
        s->agreed = 0;
    }
}

static void feed(predict_state *s, const int32_t *tokens, int n) {
    for (int i = 0; i < n; i++)
        follow(s, tokens[i]);
    s->n_seen += n;
}

static void predict_close(so_drafter *d, void *state) {
    (void)d;
    predict_state *s = state;
    free(s->expected);
    free(s->grams);
    free(s);
}

static int predict_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    int n = text->expected ? text->n_expected : 0;
    if (n < 0 || n > MAX_EXPECTED)
        return so_err_set(err, SO_ERANGE, "predict: expected text of %d tokens; at most %d", n,
                          MAX_EXPECTED);
    predict_state *s = SO_NEW(predict_state);
    s->expected = so_try_alloc((size_t)n, sizeof *s->expected);
    s->grams = so_try_alloc((size_t)n, sizeof *s->grams);
    if (!s->expected || !s->grams) {
        predict_close(d, s);
        return so_err_set(err, SO_ENOMEM, "predict: no memory for %d expected tokens", n);
    }
    if (n > 0)
        memcpy(s->expected, text->expected, (size_t)n * sizeof *s->expected);
    s->n_expected = n;
    s->n_grams = SO_MAX(0, n - GRAM + 1);
    for (int i = 0; i < s->n_grams; i++)
        s->grams[i] = (gram){so_counts_hash(s->expected + i, GRAM), i + GRAM};
    qsort(s->grams, (size_t)s->n_grams, sizeof *s->grams, compare_grams);
    s->n_seen = text->n_prompt; /* the prompt is not output */
    *state = s;
    return 0;
}

static void predict_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    (void)d;
    feed(state, tokens, n);
}

static int predict_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int j = 0; j < n_jobs; j++) {
        predict_state *s = jobs[j].state;
        if (jobs[j].n_tokens > s->n_seen)
            feed(s, jobs[j].tokens + s->n_seen, jobs[j].n_tokens - s->n_seen);
        if (s->replaced >= LOST)
            continue;
        for (int node = 0, i = 0; node >= 0 && s->at + i < s->n_expected; i++)
            node = so_draft_add(&jobs[j], node, s->expected[s->at + i], SO_Q_POINT, -1, d->index,
                                so_draft_confidence(s->agreed + i + 1));
    }
    return 0;
}

static void predict_free(so_drafter *d) { free(d); }

static const so_drafter_vt PREDICT_VT = {
    .name = "predict",
    .free = predict_free,
    .open = predict_open,
    .close = predict_close,
    .propose = predict_propose,
    .observe = predict_observe,
};

so_drafter *so_predict_create(void) {
    so_drafter *d = SO_NEW(so_drafter);
    d->vt = &PREDICT_VT;
    d->request_only = true;
    return d;
}
