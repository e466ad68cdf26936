/* Lookup across requests: the texts of finished requests, in a corpus of fixed size.
 *
 * The corpus is a ring of four suffix indices of equal size. Texts are added to the current index.
 * If the next text does not fit, the oldest index is cleared and becomes the current one: the
 * oldest quarter is dropped at once, and memory never grows after creation. A separator that is not
 * a token ends every text, so no guess continues from one text into another. If a text begins
 * with tokens that are already stored (a system prompt), only the last 64 of them are stored again.
 *
 * A request follows its own text through each index with a cursor. Adding a text invalidates the
 * cursors into that index; they are rebuilt from the request's last 64 tokens. So a match of more
 * than 64 tokens counts as one of 64.
 *
 * Guesses reveal texts of other requests through timing: never share a corpus between users who
 * must not learn about each other. One thread. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/confidence.h"
#include "draft/drafters.h"
#include "draft/suffix.h"

enum { N_PARTS = 4, TAIL = 64, SEPARATOR = -1, DEFAULT_MIN = 3, MIN_PART = 128 };

typedef struct part {
    so_suffix *index;
    uint64_t version; /* number of changes */
} part;

struct so_corpus {
    part parts[N_PARTS];
    int current;
};

int so_corpus_create(size_t max_bytes, so_corpus **out, so_err *err) {
    int cap = 1 << 26; /* the largest index supported */
    while (cap >= MIN_PART && N_PARTS * so_suffix_bytes(cap) > max_bytes)
        cap -= SO_MAX(1, cap / 16);
    if (cap < MIN_PART)
        return so_err_set(err, SO_ERANGE, "corpus of %zu bytes is too small; at least %zu",
                          max_bytes, N_PARTS * so_suffix_bytes(MIN_PART));
    so_corpus *c = SO_NEW(so_corpus);
    for (int i = 0; i < N_PARTS; i++) {
        int rc = so_suffix_create(cap, &c->parts[i].index, err);
        if (rc != 0) {
            so_corpus_free(c);
            return so_err_prefix(err, "corpus");
        }
    }
    *out = c;
    return 0;
}

void so_corpus_free(so_corpus *c) {
    if (!c)
        return;
    for (int i = 0; i < N_PARTS; i++)
        so_suffix_free(c->parts[i].index);
    free(c);
}

size_t so_corpus_tokens(const so_corpus *c) {
    size_t n = 0;
    for (int i = 0; i < N_PARTS; i++)
        n += (size_t)so_suffix_len(c->parts[i].index);
    return n;
}

size_t so_corpus_bytes(const so_corpus *c) {
    return N_PARTS * so_suffix_bytes(so_suffix_cap(c->parts[0].index));
}

static void advance(so_corpus *c) {
    c->current = (c->current + 1) % N_PARTS;
    so_suffix_clear(c->parts[c->current].index);
    c->parts[c->current].version++;
}

void so_corpus_add(so_corpus *c, const int32_t *tokens, int n) {
    int known = 0;
    for (int i = 0; i < N_PARTS; i++)
        known = SO_MAX(known, so_suffix_prefix(c->parts[i].index, tokens, n));
    if (known >= n)
        return;
    int skip = SO_MAX(0, known - TAIL), cap = so_suffix_cap(c->parts[0].index);
    if (n - skip > cap - 1)
        skip = n - (cap - 1); /* only the end of a text longer than an index */
    if (so_suffix_len(c->parts[c->current].index) + n - skip + 1 > cap)
        advance(c);
    part *p = &c->parts[c->current];
    for (int i = skip; i < n; i++)
        so_suffix_add(p->index, tokens[i]);
    so_suffix_add(p->index, SEPARATOR);
    p->version++;
}

/* The drafter. Several drafters may read one corpus. */

typedef struct corpus_drafter {
    so_drafter base;
    so_corpus *corpus;
    int min_len;
} corpus_drafter;

typedef struct corpus_state {
    int32_t *text; /* [cap] */
    int len, cap;
    so_suffix_cursor cursors[N_PARTS];
    uint64_t versions[N_PARTS];
} corpus_state;

static void feed(corpus_state *s, const so_corpus *c, const int32_t *tokens, int n) {
    n = SO_MIN(n, s->cap - s->len);
    for (int p = 0; p < N_PARTS; p++)
        for (int i = 0; s->versions[p] == c->parts[p].version && i < n; i++)
            so_suffix_step(c->parts[p].index, &s->cursors[p], tokens[i]);
    if (n > 0)
        memcpy(s->text + s->len, tokens, (size_t)n * sizeof *s->text);
    s->len += n;
}

static void refresh(corpus_state *s, const so_corpus *c) {
    for (int p = 0; p < N_PARTS; p++) {
        if (s->versions[p] == c->parts[p].version)
            continue;
        s->versions[p] = c->parts[p].version;
        s->cursors[p] = (so_suffix_cursor){0};
        for (int i = SO_MAX(0, s->len - TAIL); i < s->len; i++)
            so_suffix_step(c->parts[p].index, &s->cursors[p], s->text[i]);
    }
}

static int corpus_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    const so_corpus *c = ((corpus_drafter *)d)->corpus;
    corpus_state *s = SO_NEW(corpus_state);
    s->cap = SO_MAX(SO_MAX(text->max_tokens, text->n_prompt), 1);
    s->text = so_try_alloc((size_t)s->cap, sizeof *s->text);
    if (!s->text) {
        free(s);
        return so_err_set(err, SO_ENOMEM, "corpus: no memory for a text of %d tokens",
                          SO_MAX(text->max_tokens, text->n_prompt));
    }
    for (int p = 0; p < N_PARTS; p++)
        s->versions[p] = c->parts[p].version - 1; /* invalid: refresh() rebuilds them */
    feed(s, c, text->prompt, text->n_prompt);
    *state = s;
    return 0;
}

static void corpus_close(so_drafter *d, void *state) {
    corpus_state *s = state;
    so_corpus_add(((corpus_drafter *)d)->corpus, s->text, s->len);
    free(s->text);
    free(s);
}

static void corpus_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    feed(state, ((corpus_drafter *)d)->corpus, tokens, n);
}

static void propose_one(const corpus_drafter *d, so_draft_job *job) {
    corpus_state *s = job->state;
    const so_corpus *c = d->corpus;
    if (job->n_tokens > s->len)
        feed(s, c, job->tokens + s->len, job->n_tokens - s->len);
    refresh(s, c);
    int best = -1, len = 0;
    for (int i = 0; i < N_PARTS; i++) { /* newest part first: it wins among equal lengths */
        int p = (c->current + N_PARTS - i) % N_PARTS, n = SO_MIN(s->cursors[p].len, TAIL);
        if (n > len)
            best = p, len = n;
    }
    if (best < 0 || len < d->min_len)
        return;
    const so_suffix *index = c->parts[best].index;
    const int32_t *text = so_suffix_tokens(index);
    int at = so_suffix_end(index, &s->cursors[best]), n = so_suffix_len(index);
    for (int node = 0, i = 0; node >= 0 && at + i < n && text[at + i] != SEPARATOR; i++)
        node = so_draft_add(job, node, text[at + i], SO_Q_POINT, -1, d->base.index,
                            so_draft_confidence(len + i));
}

static int corpus_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int i = 0; i < n_jobs; i++)
        propose_one((const corpus_drafter *)d, &jobs[i]);
    return 0;
}

static void corpus_drafter_free(so_drafter *d) { free(d); }

static const so_drafter_vt CORPUS_VT = {
    .name = "corpus",
    .free = corpus_drafter_free,
    .open = corpus_open,
    .close = corpus_close,
    .propose = corpus_propose,
    .observe = corpus_observe,
};

so_drafter *so_corpus_drafter_create(so_corpus *c, int min_len) {
    corpus_drafter *d = SO_NEW(corpus_drafter);
    d->base.vt = &CORPUS_VT;
    d->base.recorded = true;
    d->corpus = c;
    d->min_len = min_len > 0 ? min_len : DEFAULT_MIN;
    if (d->min_len != DEFAULT_MIN)
        d->base.id = so_hash_bytes(&d->min_len, sizeof d->min_len);
    return &d->base;
}
