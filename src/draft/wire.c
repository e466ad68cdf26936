/* Messages of draft workers: to bytes and back (wire.h, docs/formats.md).
 *
 * Each message is described once, by a function that writes its fields or reads them, depending on
 * the direction: so both sides agree by construction, and a test that reads what was written covers
 * the layout. All numbers are little-endian and 4 or 8 bytes long. A read field that is out of its
 * range, or behind the end, makes the whole message bad; its value is then 0, so that loops over
 * counts end. Bytes after the last field are refused, too.
 *
 * Knows nothing of sessions, requests and vocabularies: it has no state. */
#include "draft/wire.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

/* The longest OUTCOMES fits a message. */
_Static_assert(SO_WIRE_HEAD + 12 +
                       SO_WIRE_JOBS * (8 + SO_AHEAD_NODES * (4 + 8 * SO_AHEAD_CANDIDATES) +
                                       12 * SO_AHEAD_OUTCOMES) <=
                   SO_WIRE_BYTES,
               "fewer SO_WIRE_JOBS");

static const char MAGIC[4] = {'s', 'd', 'w', '1'};

typedef struct io {
    unsigned char *out;      /* NULL: reading */
    const unsigned char *in; /* NULL: writing */
    size_t at, len;          /* len: of the input, or the room for the output */
    const char *bad;         /* the first field that is wrong; NULL: none */
} io;

static void fail(io *s, const char *field) {
    if (!s->bad)
        s->bad = field;
}

/* --- fields --- */

static void bytes(io *s, void *p, size_t n, const char *field) {
    if (s->bad || n > s->len - s->at) {
        fail(s, field);
        if (s->in)
            memset(p, 0, n);
        return;
    }
    if (s->in)
        memcpy(p, s->in + s->at, n);
    else
        memcpy(s->out + s->at, p, n);
    s->at += n;
}

static void u32(io *s, uint32_t *v, const char *field) {
    unsigned char b[4] = {(unsigned char)*v, (unsigned char)(*v >> 8), (unsigned char)(*v >> 16),
                          (unsigned char)(*v >> 24)};
    bytes(s, b, 4, field);
    *v = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static void u64(io *s, uint64_t *v, const char *field) {
    uint32_t low = (uint32_t)*v, high = (uint32_t)(*v >> 32);
    u32(s, &low, field);
    u32(s, &high, field);
    *v = low | (uint64_t)high << 32;
}

static void i32(io *s, int32_t *v, const char *field) {
    uint32_t u = (uint32_t)*v;
    u32(s, &u, field);
    memcpy(v, &u, sizeof u);
}

/* A number in [min, max]. */
static void num(io *s, int *v, int min, int max, const char *field) {
    i32(s, v, field);
    if (*v < min || *v > max)
        fail(s, field);
    if (s->bad && s->in)
        *v = 0;
}

static void f32(io *s, float *v, const char *field) {
    uint32_t u;
    memcpy(&u, v, sizeof u);
    u32(s, &u, field);
    memcpy(v, &u, sizeof u);
}

static void real(io *s, float *v, float min, float max, const char *field) {
    f32(s, v, field);
    if (!(*v >= min && *v <= max)) {
        fail(s, field);
        if (s->in)
            *v = 0;
    }
}

static void chance(io *s, float *v, const char *field) { real(s, v, 0, 1, field); }

/* --- messages --- */

static void hello(io *s, so_wire_msg *m) {
    so_wire_hello *h = &m->hello;
    int encoder = h->encoder;
    u64(s, &h->vocab_hash, "vocab_hash");
    u64(s, &h->draft_id, "draft_id");
    u32(s, &h->limits, "limits");
    num(s, &h->n_vocab, 1, 1 << 24, "n_vocab");
    num(s, &h->d_model, 1, 1 << 24, "d_model");
    num(s, &h->n_ctx, 1, 1 << 24, "n_ctx");
    num(s, &h->n_parallel, 1, 1 << 16, "n_parallel");
    num(s, &h->max_draft, 1, SO_TREE_MAX, "max_draft");
    num(s, &encoder, 0, 1, "encoder");
    h->encoder = encoder;
}

static void welcome(io *s, so_wire_msg *m) {
    so_wire_welcome *w = &m->welcome;
    u64(s, &w->vocab_hash, "vocab_hash");
    u64(s, &w->draft_id, "draft_id");
    num(s, &w->n_ctx, 1, 1 << 24, "n_ctx");
    num(s, &w->n_parallel, 1, 1 << 16, "n_parallel");
}

/* The text is printed in logs: only printable ASCII passes. */
static void refused(io *s, so_wire_msg *m) {
    so_wire_refused *r = &m->refused;
    int why = (int)r->why, n = (int)strnlen(r->text, SO_WIRE_REASON - 1);
    num(s, &why, SO_WIRE_LOST, SO_WIRE_OTHER, "why");
    num(s, &n, 0, SO_WIRE_REASON - 1, "length of the reason");
    bytes(s, r->text, (size_t)n, "reason");
    r->why = (so_wire_refusal)why;
    if (!s->in)
        return;
    r->text[n] = '\0';
    for (int i = 0; i < n; i++)
        if (r->text[i] < ' ' || r->text[i] > '~')
            fail(s, "reason");
}

static void sample(io *s, so_sample_params *p) {
    f32(s, &p->temp, "temp");
    i32(s, &p->top_k, "top_k");
    f32(s, &p->top_p, "top_p");
    f32(s, &p->min_p, "min_p");
    f32(s, &p->repeat_penalty, "repeat_penalty");
    f32(s, &p->presence_penalty, "presence_penalty");
    f32(s, &p->frequency_penalty, "frequency_penalty");
    i32(s, &p->repeat_last_n, "repeat_last_n");
    u64(s, &p->seed, "seed");
    u32(s, &p->choice, "choice");
    p->bias = s->in ? NULL : p->bias;
    p->n_bias = s->in ? 0 : p->n_bias;
}

static void tokens(io *s, so_wire_msg *m) {
    num(s, &m->n_tokens, 0, SO_WIRE_TOKENS, "n_tokens");
    if (s->in && (size_t)m->n_tokens * 4 > s->len - s->at)
        fail(s, "tokens");
    for (int i = 0; i < m->n_tokens && !s->bad; i++)
        i32(s, &m->tokens[i], "token");
}

static void open(io *s, so_wire_msg *m) {
    so_wire_open *o = &m->open;
    u32(s, &o->request, "request");
    num(s, &o->max_tokens, 1, 1 << 24, "max_tokens");
    num(s, &o->n_prompt, 0, o->max_tokens, "n_prompt");
    sample(s, &o->sample);
    tokens(s, m);
    num(s, &m->n_biases, 0, SO_WIRE_BIASES, "n_biases");
    for (int i = 0; i < m->n_biases && !s->bad; i++) {
        i32(s, &m->biases[i].token, "token of a bias");
        f32(s, &m->biases[i].bias, "bias");
    }
}

static void text(io *s, so_wire_msg *m) {
    u32(s, &m->text.request, "request");
    num(s, &m->text.at, 0, 1 << 24, "at");
    tokens(s, m);
}

static void estimates(io *s, so_async_estimates *e) {
    so_async_rate *r = (so_async_rate *)e;
    for (int i = 0; i < (int)SO_WIRE_RATES && !s->bad; i++) {
        real(s, &r[i].all, 1e-6f, 1e6f, "estimate");
        real(s, &r[i].yes, 0, r[i].all, "estimate");
    }
}

static void rounds(io *s, so_wire_round *r) {
    u32(s, &r->request, "request");
    num(s, &r->n_tokens, 1, 1 << 24, "n_tokens of a job");
    num(s, &r->n_nodes, 1, SO_TREE_MAX, "n_nodes");
    for (int i = 0; i < r->n_nodes && !s->bad; i++) {
        i32(s, &r->nodes[i].token, "token of a node");
        num(s, &r->nodes[i].parent, i ? 0 : -1, i - 1, "parent");
        chance(s, &r->nodes[i].confidence, "confidence");
    }
}

static void job(io *s, so_wire_msg *m) {
    so_wire_job *j = &m->job;
    u32(s, &j->batch, "batch");
    num(s, &j->depth, 1, SO_AHEAD_DEPTH, "depth");
    num(s, &j->fan, 0, SO_AHEAD_OUTCOMES, "fan");
    real(s, &j->left_ms, 0, 1e6f, "left_ms");
    estimates(s, &j->estimates);
    num(s, &m->n_jobs, 1, SO_WIRE_JOBS, "n_jobs");
    for (int i = 0; i < m->n_jobs && !s->bad; i++)
        rounds(s, &m->rounds[i]);
}

static void outcomes(io *s, so_wire_fan *f) {
    num(s, &f->n_outcomes, 0, SO_AHEAD_OUTCOMES, "n_outcomes");
    for (int i = 0; i < f->n_outcomes && !s->bad; i++) {
        int *node = &f->outcomes[i].node, *candidate = &f->outcomes[i].candidate;
        num(s, node, 0, f->n_nodes - 1, "node of an outcome");
        num(s, candidate, 0, s->bad ? 0 : f->n_candidates[*node] - 1, "candidate of an outcome");
        chance(s, &f->outcomes[i].chance, "chance of an outcome");
        for (int k = 0; k < i && !s->bad; k++)
            if (f->outcomes[k].node == *node && f->outcomes[k].candidate == *candidate)
                fail(s, "an outcome that comes twice");
    }
}

static void fan(io *s, so_wire_fan *f) {
    num(s, &f->n_nodes, 0, SO_AHEAD_NODES, "n_nodes");
    for (int i = 0; i < f->n_nodes && !s->bad; i++) {
        num(s, &f->n_candidates[i], 0, SO_AHEAD_CANDIDATES, "n_candidates");
        for (int k = 0; k < f->n_candidates[i] && !s->bad; k++) {
            so_ahead_candidate *c = &f->candidates[i][k];
            num(s, &c->token, 0, INT32_MAX, "token of a candidate");
            chance(s, &c->chance, "chance of a candidate");
            for (int j = 0; j < k && !s->bad; j++)
                if (f->candidates[i][j].token == c->token)
                    fail(s, "a candidate that comes twice");
        }
    }
    outcomes(s, f);
}

static void batch(io *s, so_wire_msg *m) {
    u32(s, &m->batch, "batch");
    u32(s, &m->busy_us, "busy_us");
}

static void fans(io *s, so_wire_msg *m) {
    batch(s, m);
    num(s, &m->n_jobs, 1, SO_WIRE_JOBS, "n_jobs");
    for (int i = 0; i < m->n_jobs && !s->bad; i++)
        fan(s, &m->fans[i]);
}

static void level(io *s, so_wire_msg *m) {
    batch(s, m);
    num(s, &m->level, 1, SO_AHEAD_DEPTH, "level");
    num(s, &m->n_jobs, 1, SO_WIRE_JOBS, "n_jobs");
    for (int i = 0; i < m->n_jobs && !s->bad; i++) {
        so_wire_guesses *g = &m->guesses[i];
        num(s, &g->n, 0, SO_AHEAD_OUTCOMES, "guesses");
        for (int k = 0; k < g->n && !s->bad; k++) {
            num(s, &g->at[k].token, -1, INT32_MAX, "guess");
            chance(s, &g->at[k].confidence, "confidence");
        }
    }
}

static void body(io *s, so_wire_msg *m) {
    switch (m->type) {
    case SO_WIRE_HELLO:
        hello(s, m);
        break;
    case SO_WIRE_OPEN:
        open(s, m);
        break;
    case SO_WIRE_TEXT:
        text(s, m);
        break;
    case SO_WIRE_JOB:
        job(s, m);
        break;
    case SO_WIRE_STOP:
    case SO_WIRE_DONE:
        batch(s, m);
        break;
    case SO_WIRE_CLOSE:
        u32(s, &m->request, "request");
        break;
    case SO_WIRE_WELCOME:
        welcome(s, m);
        break;
    case SO_WIRE_REFUSED:
        refused(s, m);
        break;
    case SO_WIRE_ALIVE:
    case SO_WIRE_BYE:
        break;
    case SO_WIRE_OUTCOMES:
        fans(s, m);
        break;
    case SO_WIRE_LEVEL:
        level(s, m);
        break;
    default:
        fail(s, "type");
    }
}

/* --- whole messages --- */

uint32_t so_wire_limits(void) {
    const uint32_t all[] = {SO_AHEAD_OUTCOMES, SO_AHEAD_DEPTH, SO_AHEAD_NODES, SO_AHEAD_CANDIDATES,
                            SO_WIRE_RATES};
    return (uint32_t)so_hash_bytes(all, sizeof all);
}

static void head(io *s, so_wire_msg *m, uint32_t *version, uint32_t *n_body) {
    uint32_t type = (uint32_t)m->type;
    char magic[4];
    memcpy(magic, MAGIC, sizeof magic);
    bytes(s, magic, sizeof magic, "magic");
    if (memcmp(magic, MAGIC, sizeof magic) != 0)
        fail(s, "magic");
    u32(s, version, "version");
    u32(s, &type, "type");
    u64(s, &m->session, "session");
    u32(s, &m->number, "number");
    u32(s, n_body, "length");
    m->type = (so_wire_type)type;
}

size_t so_wire_write(so_wire_msg *m, void *out) {
    io s = {.out = out, .len = SO_WIRE_BYTES};
    uint32_t version = SO_WIRE_VERSION, n_body = 0;
    head(&s, m, &version, &n_body);
    body(&s, m);
    if (s.bad)
        return 0;
    size_t len = s.at;
    n_body = (uint32_t)(len - SO_WIRE_HEAD);
    s.at = 0;
    head(&s, m, &version, &n_body);
    return len;
}

int so_wire_read(const void *in, size_t len, so_wire_msg *m, so_err *err) {
    io s = {.in = in, .len = len};
    uint32_t version = 0, n_body = 0;
    if (len > SO_WIRE_BYTES)
        return so_err_set(err, SO_EFORMAT, "a message of %zu bytes: at most %d are allowed", len,
                          SO_WIRE_BYTES);
    head(&s, m, &version, &n_body);
    if (!s.bad && version != SO_WIRE_VERSION)
        return so_err_set(err, SO_EUNSUPPORTED, "a message of version %u; this sooth speaks %d",
                          version, SO_WIRE_VERSION);
    if (!s.bad && n_body != len - SO_WIRE_HEAD)
        return so_err_set(err, SO_EFORMAT, "a message of %zu bytes that states a length of %u", len,
                          n_body + SO_WIRE_HEAD);
    body(&s, m);
    if (!s.bad && s.at != len)
        fail(&s, "bytes after the end");
    return s.bad ? so_err_set(err, SO_EFORMAT, "a malformed message (%s)", s.bad) : SO_OK;
}
