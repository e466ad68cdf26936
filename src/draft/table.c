/* Table files (format in table.h), and the drafter that uses a table.
 *
 * The sizes in a header are checked against the file's real size before anything is allocated, so a
 * false header costs nothing. The structure is verified even if the checksum matches. Immutable
 * once loaded; the drafter has no state per request. */
#include "draft/table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/str.h"
#include "draft/confidence.h"
#include "draft/drafters.h"

enum { HEADER = 48, VERSION = 1, ENTRY = 8, SUM = 8 };
enum { MAX_VOCAB = 1 << 24 };
static const char MAGIC[8] = {'S', 'O', 'O', 'T', 'H', 'T', 'B', 'L'};

static uint32_t get32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static uint64_t get64(const unsigned char *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

static void put32(so_buf *b, uint32_t v) {
    unsigned char p[4] = {(unsigned char)v, (unsigned char)(v >> 8), (unsigned char)(v >> 16),
                          (unsigned char)(v >> 24)};
    so_buf_append(b, p, 4);
}
static void put64(so_buf *b, uint64_t v) {
    put32(b, (uint32_t)v);
    put32(b, (uint32_t)(v >> 32));
}

void so_table_free(so_table *t) {
    if (!t)
        return;
    free(t->starts);
    free(t->entries);
    free(t);
}

int so_table_save(const so_table *t, const char *path, so_err *err) {
    so_buf b = {0};
    so_out_file *f = NULL;
    uint32_t n_entries = t->starts[t->n_contexts];
    so_buf_append(&b, MAGIC, sizeof MAGIC);
    put32(&b, VERSION);
    put32(&b, (uint32_t)t->order);
    put32(&b, (uint32_t)t->n_vocab);
    put32(&b, 0);
    put64(&b, t->tokenizer_hash);
    put64(&b, t->n_tokens);
    put64(&b, n_entries);
    for (int i = 0; i <= t->n_contexts; i++)
        put32(&b, t->starts[i]);
    for (uint32_t i = 0; i < n_entries; i++) {
        put32(&b, t->entries[i].token);
        put32(&b, t->entries[i].count);
    }
    put64(&b, so_hash_bytes(b.data, b.len));
    int rc = b.full ? so_err_set(err, SO_ELIMIT, "%s: table too large to write", path)
                    : so_out_begin(path, &f, err);
    if (rc == 0 && (rc = so_out_write(f, b.data, b.len, err)) == 0)
        rc = so_out_commit(f, err);
    else
        so_out_abort(f);
    so_buf_free(&b);
    return rc;
}

/* Reads the header and checks the size it implies. */
static int parse_header(const unsigned char *p, size_t len, const char *name, so_table *t,
                        uint64_t *n_entries, so_err *err) {
    if (len < HEADER + SUM || memcmp(p, MAGIC, sizeof MAGIC) != 0)
        return so_err_set(err, SO_EFORMAT, "%s: not a table of sooth (%zu bytes, no SOOTHTBL mark)",
                          name, len);
    if (get32(p + 8) != VERSION)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s: table version %" PRIu32 "; this sooth reads %d", name, get32(p + 8),
                          VERSION);
    uint32_t order = get32(p + 12), n_vocab = get32(p + 16);
    *n_entries = get64(p + 40);
    if (order != 1 && order != 2)
        return so_err_set(err, SO_EFORMAT, "%s: order %" PRIu32 "; 1 or 2 are possible", name,
                          order);
    if (n_vocab < 1 || n_vocab > MAX_VOCAB || get32(p + 20) != 0)
        return so_err_set(err, SO_EFORMAT,
                          "%s: vocabulary of %" PRIu32 " tokens, reserved %" PRIu32, name, n_vocab,
                          get32(p + 20));
    uint64_t n_contexts = order == 1 ? 1 : n_vocab;
    uint64_t room = len - HEADER - SUM, starts = 4 * (n_contexts + 1);
    if (starts > room || *n_entries != (room - starts) / ENTRY || (room - starts) % ENTRY != 0 ||
        *n_entries > UINT32_MAX)
        return so_err_set(err, SO_EFORMAT,
                          "%s: %" PRIu64 " entries for %" PRIu64 " contexts do not fit %zu bytes",
                          name, *n_entries, n_contexts, len);
    t->order = (int)order;
    t->n_vocab = (int)n_vocab;
    t->n_contexts = (int)n_contexts;
    t->tokenizer_hash = get64(p + 24);
    t->n_tokens = get64(p + 32);
    return 0;
}

/* Checks one context's entries: in order, in the vocabulary, no token twice (seen[token] = context
 * + 1). */
static bool valid_context(const so_table *t, int context, uint32_t *seen) {
    for (uint32_t i = t->starts[context]; i < t->starts[context + 1]; i++) {
        const so_table_entry *e = &t->entries[i], *before = e - 1;
        if (e->token >= (uint32_t)t->n_vocab || e->count == 0 ||
            seen[e->token] == (uint32_t)context + 1)
            return false;
        seen[e->token] = (uint32_t)context + 1;
        if (i > t->starts[context] &&
            (before->count < e->count || (before->count == e->count && before->token > e->token)))
            return false;
    }
    return true;
}

static int check_contexts(const so_table *t, uint64_t n_entries, const char *name, so_err *err) {
    for (int i = 0; i < t->n_contexts; i++)
        if (t->starts[i] > t->starts[i + 1])
            return so_err_set(err, SO_EFORMAT, "%s: context %d ends before it starts", name, i);
    if (t->starts[0] != 0 || t->starts[t->n_contexts] != n_entries)
        return so_err_set(err, SO_EFORMAT,
                          "%s: contexts cover %" PRIu32 " to %" PRIu32 " of %" PRIu64 " entries",
                          name, t->starts[0], t->starts[t->n_contexts], n_entries);
    uint32_t *seen = so_try_alloc((size_t)t->n_vocab, sizeof *seen);
    if (!seen)
        return so_err_set(err, SO_ENOMEM, "%s: no memory for %d tokens", name, t->n_vocab);
    int bad = -1;
    for (int i = 0; i < t->n_contexts && bad < 0; i++)
        if (!valid_context(t, i, seen))
            bad = i;
    free(seen);
    return bad < 0
               ? 0
               : so_err_set(err, SO_EFORMAT,
                            "%s: context %d has an entry out of order or out of range", name, bad);
}

int so_table_parse(const void *data, size_t len, const char *name, so_table **out, so_err *err) {
    const unsigned char *p = data;
    so_table head = {0};
    uint64_t n_entries = 0;
    int rc = parse_header(p, len, name, &head, &n_entries, err);
    if (rc != 0)
        return rc;
    if (so_hash_bytes(p, len - SUM) != get64(p + len - SUM))
        return so_err_set(err, SO_EFORMAT, "%s: checksum does not match: the file is damaged",
                          name);
    so_table *t = SO_NEW(so_table);
    *t = head;
    t->starts = so_try_alloc((size_t)t->n_contexts + 1, sizeof *t->starts);
    t->entries = so_try_alloc((size_t)n_entries, sizeof *t->entries);
    if (!t->starts || !t->entries) {
        so_table_free(t);
        return so_err_set(err, SO_ENOMEM, "%s: no memory for %" PRIu64 " entries", name, n_entries);
    }
    p += HEADER;
    for (int i = 0; i <= t->n_contexts; i++, p += 4)
        t->starts[i] = get32(p);
    for (uint64_t i = 0; i < n_entries; i++, p += ENTRY)
        t->entries[i] = (so_table_entry){get32(p), get32(p + 4)};
    if ((rc = check_contexts(t, n_entries, name, err)) != 0) {
        so_table_free(t);
        return rc;
    }
    *out = t;
    return 0;
}

int so_table_load(const char *path, int n_vocab, uint64_t tokenizer_hash, so_table **out,
                  so_err *err) {
    so_map_file m = {0};
    so_table *t = NULL;
    int rc = so_file_map(path, &m, err);
    if (rc == 0)
        rc = so_table_parse(m.data, m.len, path, &t, err);
    if (rc == 0 && t->n_vocab != n_vocab)
        rc = so_err_set(err, SO_EMISMATCH,
                        "%s: counted with a vocabulary of %d tokens, the model has %d; count again",
                        path, t->n_vocab, n_vocab);
    if (rc == 0 && tokenizer_hash && t->tokenizer_hash != tokenizer_hash)
        rc = so_err_set(err, SO_EMISMATCH,
                        "%s: counted with another tokenizer (%016" PRIx64 ", the model has "
                        "%016" PRIx64 "); count again",
                        path, t->tokenizer_hash, tokenizer_hash);
    so_file_unmap(&m);
    if (rc == 0)
        *out = t;
    else
        so_table_free(t);
    return rc;
}

/* The drafter. */

typedef struct table_drafter {
    so_drafter base;
    so_table *table;
    uint64_t *totals; /* [n_contexts] */
} table_drafter;

static int table_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    (void)text;
    (void)err;
    *state = NULL;
    return 0;
}

static void table_close(so_drafter *d, void *state) {
    (void)d;
    (void)state;
}

/* Fills a new q row with the context's counts and samples a token from it. −1: no row is left. */
static int draw_row(const table_drafter *d, const so_draft_job *job, int context, int depth,
                    int32_t *token) {
    const so_table *t = d->table;
    int row = so_tree_new_row(job->tree);
    if (row < 0)
        return -1;
    float *q = so_tree_row(job->tree, row);
    double total = (double)d->totals[context], sum = 0;
    double target = so_draft_uniform(&d->base, job, depth, 0) * total;
    memset(q, 0, (size_t)job->tree->n_vocab * sizeof *q);
    for (uint32_t i = t->starts[context]; i < t->starts[context + 1]; i++) {
        const so_table_entry *e = &t->entries[i];
        q[e->token] = (float)(e->count / total);
        if (sum <= target)
            *token = (int32_t)e->token;
        sum += e->count;
    }
    return row;
}

static void propose_one(const table_drafter *d, so_draft_job *job) {
    const so_table *t = d->table;
    if (job->tree->n_vocab < t->n_vocab)
        return;
    int32_t last = job->tree->nodes[0].token;
    for (int node = 0; node >= 0 && job->tree->nodes[node].depth < job->max_depth;) {
        int context = t->order == 1 ? 0 : last;
        if (context < 0 || context >= t->n_contexts || t->starts[context] == t->starts[context + 1])
            return;
        const so_table_entry *best = &t->entries[t->starts[context]];
        int row = -1;
        last = (int32_t)best->token;
        if (d->base.draws && job->temp > 0)
            row = draw_row(d, job, context, job->tree->nodes[node].depth + 1, &last);
        double total = (double)d->totals[context], count = row < 0 ? best->count : total;
        node = so_draft_add(job, node, last, so_draft_kind(row), row, d->base.index,
                            so_draft_count_confidence(count, total) * 0.5f);
    }
}

static int table_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int i = 0; i < n_jobs; i++)
        propose_one((const table_drafter *)d, &jobs[i]);
    return 0;
}

static void table_drafter_free(so_drafter *d) {
    table_drafter *t = (table_drafter *)d;
    so_table_free(t->table);
    free(t->totals);
    free(t);
}

#define TABLE_VT(NAME)                                                                      \
    {                                                                                       \
        .name = NAME, .free = table_drafter_free, .open = table_open, .close = table_close, \
        .propose = table_propose,                                                           \
    }
static const so_drafter_vt UNIGRAM_VT = TABLE_VT("unigram");
static const so_drafter_vt BIGRAM_VT = TABLE_VT("bigram");

so_drafter *so_table_drafter_create(so_table *t, bool draw) {
    table_drafter *d = SO_NEW(table_drafter);
    d->base.vt = t->order == 1 ? &UNIGRAM_VT : &BIGRAM_VT;
    d->table = t;
    d->base.draws = draw;
    d->base.request_only = true;
    d->base.id = so_hash_bytes(t->entries, t->starts[t->n_contexts] * sizeof *t->entries) ^
                 so_hash_bytes(t->starts, ((size_t)t->n_contexts + 1) * sizeof *t->starts);
    d->totals = SO_NEW_N(uint64_t, t->n_contexts);
    for (int c = 0; c < t->n_contexts; c++)
        for (uint32_t i = t->starts[c]; i < t->starts[c + 1]; i++)
            d->totals[c] += t->entries[i].count;
    return &d->base;
}
