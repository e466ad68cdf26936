/* One forward pass: checks the batch, prepares the tables that the operations need for each row,
 * submits the architecture's operations (so_pass_submit), and makes the results readable with one
 * sync (so_pass_wait).
 *
 * Owns the scratch memory. It is allocated at create, with two exceptions: the tables of pages and
 * tails grow if a batch needs more than all batches before it (they double, so a warm engine
 * allocates nothing), and guess_ids, which so_pass_reserve_levels makes. Refuses a batch whose rows
 * contradict their sequences: a wrong slot would corrupt the cache silently, and the check costs
 * almost nothing compared with a pass.
 *
 * The positions that a row sees follow from its parents:
 *
 *   row        0   1   2   3        len 10, tree   0 ─┬─ 1 ── 3
 *   parent    −1   0   0   1                          └─ 2
 *   slot      10  11  12  13
 *   pos       10  11  11  12
 *   prefix    11  12  11  12      positions 0 … prefix−1 are in the slots of the same number
 *   tail       –   –  12  13      slots of the other positions of the path, in order
 *
 * A row extends its parent's prefix while slot and position are equal, and its tail from then on. If
 * the parent was computed by an earlier pass of the same speculation, its prefix and tail follow from
 * the slots of its ancestors, which the sequence knows (so_seq_parent).
 *
 * One thread at a time per backend, and so per model. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/arch.h"
#include "model/impl.h"
#include "model/source.h"
#include "model/weights.h"

/* Creation. */

typedef struct maker {
    so_backend *backend;
    so_err *err;
    int rc;
} maker;

static so_view device(maker *mk, size_t n, size_t width, size_t size) {
    so_view v = {0};
    size_t n_bytes;
    if (mk->rc != 0)
        return v;
    if (!so_mul_size(n, width, &n_bytes) || !so_mul_size(n_bytes, size, &n_bytes))
        mk->rc =
            so_err_set(mk->err, SO_ENOMEM, "a buffer of %zu rows of %zu is too large", n, width);
    else
        mk->rc = mk->backend->vt->buffer_create(mk->backend, SO_MAX(n_bytes, 64), &v.buf, mk->err);
    return v;
}

static void *host(maker *mk, size_t n, size_t width, size_t size) {
    size_t count;
    void *p = NULL;
    if (mk->rc != 0)
        return NULL;
    if (so_mul_size(n, width, &count))
        p = so_try_alloc(SO_MAX(count, 1), size);
    if (!p)
        mk->rc = so_err_set(mk->err, SO_ENOMEM, "no memory for %zu rows of %zu results", n, width);
    return p;
}

static void make_device(maker *mk, so_pass *p) {
    const so_hparams *hp = &p->model->hp;
    size_t n = (size_t)p->max_rows, n_out = (size_t)p->max_logits, f = sizeof(float);
    size_t d = (size_t)hp->d_model, d_ff = (size_t)hp->d_ff;
    size_t d_q = (size_t)hp->n_heads * (size_t)hp->head_dim;
    size_t d_kv = (size_t)hp->n_heads_kv * (size_t)hp->head_dim;
    p->x = device(mk, n, d, f);
    p->target_hidden = device(mk, n, (size_t)p->model->d_target_hidden, f);
    p->h = device(mk, n, d, f);
    p->q = device(mk, n, d_q, f);
    p->k = device(mk, n, d_kv, f);
    p->v = device(mk, n, d_kv, f);
    p->att = device(mk, n, d_q, f);
    p->gate = device(mk, n, d_ff, f);
    p->up = device(mk, n, d_ff, f);
    p->ids = device(mk, n, 1, sizeof(int32_t));
    p->positions = device(mk, n, 1, sizeof(int32_t));
    p->slots = device(mk, n, 1, sizeof(so_kv_slot));
    p->rows = device(mk, n, 1, sizeof(so_attn_row));
    p->cross_rows = device(mk, p->model->t5 ? n : 0, 1, sizeof(so_attn_row));
    p->pages = device(mk, (size_t)p->pages_cap, 1, sizeof(int32_t));
    p->tails = device(mk, (size_t)p->tails_cap, 1, sizeof(int32_t));
    p->rope = device(mk, n, (size_t)hp->rope_dim, f);
    p->rope_local = device(mk, n, (size_t)hp->rope_dim, f);
    p->out_rows = device(mk, n_out, 1, sizeof(int32_t));
    p->out_x = device(mk, n_out, d, f);
    p->hidden = device(mk, n_out, d, f);
    p->logits = device(mk, n_out, (size_t)p->model->logits_len, f);
    p->argmax = device(mk, n_out, 1, sizeof(int32_t));
    p->sample = device(mk, n_out, 1, sizeof(so_sample_row));
    p->sampled = device(mk, n_out, 1, sizeof(so_sample_result));
}

static void make_host(maker *mk, so_pass *p) {
    const so_hparams *hp = &p->model->hp;
    size_t n = (size_t)p->max_rows, n_out = (size_t)p->max_logits;
    p->h_ids = host(mk, n, 1, sizeof(int32_t));
    p->h_positions = host(mk, n, 1, sizeof(int32_t));
    p->h_out_rows = host(mk, n_out, 1, sizeof(int32_t));
    p->h_slots = host(mk, n, 1, sizeof(so_kv_slot));
    p->h_rows = host(mk, n, 1, sizeof(so_attn_row));
    p->h_cross_rows = host(mk, p->model->t5 ? n : 0, 1, sizeof(so_attn_row));
    p->h_pages = host(mk, (size_t)p->pages_cap, 1, sizeof(int32_t));
    p->h_tails = host(mk, (size_t)p->tails_cap, 1, sizeof(int32_t));
    p->h_rope = host(mk, n, (size_t)hp->rope_dim, sizeof(float));
    p->h_target_hidden = host(mk, n, (size_t)p->model->d_target_hidden, sizeof(float));
    p->seq_n = host(mk, n, 1, sizeof(int32_t));
    p->seq_page_off = host(mk, n, 1, sizeof(int32_t));
    p->h_logits = host(mk, n_out, (size_t)p->model->logits_len, sizeof(float));
    p->h_hidden = host(mk, n_out, (size_t)hp->d_model, sizeof(float));
    p->h_has_logits = host(mk, n_out, 1, sizeof(bool));
    p->h_argmax = host(mk, n_out, 1, sizeof(int32_t));
    p->h_sample = host(mk, n_out, 1, sizeof(so_sample_row));
    p->h_sampled = host(mk, n_out, 1, sizeof(so_sample_result));
}

static int check_fit(const so_model *m, so_kv *kv, int max_rows, int max_logits, so_err *err) {
    const so_kv_shape *s = so_kv_get_shape(kv);
    const so_hparams *hp = &m->hp;
    if (s->n_layers != hp->n_layers || s->n_heads_kv != hp->n_heads_kv ||
        s->head_dim != hp->head_dim)
        return so_err_set(err, SO_EMISMATCH,
                          "KV cache of %d layers, %d heads of size %d; the model has %d layers, %d "
                          "heads of size %d",
                          s->n_layers, s->n_heads_kv, s->head_dim, hp->n_layers, hp->n_heads_kv,
                          hp->head_dim);
    if (max_rows < 1 || max_rows > 1 << 20 || max_logits < 0 || max_logits > max_rows)
        return so_err_set(
            err, SO_EINVAL,
            "pass of %d rows, %d of them with logits: must be 1 to 1048576 rows, and no "
            "more with logits than rows",
            max_rows, max_logits);
    return 0;
}

int so_pass_create(const so_model *m, so_kv *kv, int max_rows, int max_logits, so_pass **out,
                   so_err *err) {
    int rc = check_fit(m, kv, max_rows, max_logits, err);
    if (rc != 0)
        return rc;
    so_pass *p = SO_NEW(so_pass);
    *p = (so_pass){.model = m,
                   .backend = m->backend,
                   .kv = kv,
                   .max_rows = max_rows,
                   .max_logits = max_logits,
                   .pages_cap = so_kv_get_shape(kv)->n_pages + max_rows,
                   .tails_cap = 8 * max_rows};
    maker mk = {.backend = m->backend, .err = err};
    make_device(&mk, p);
    make_host(&mk, p);
    if (mk.rc != 0)
        so_pass_free(p);
    else
        *out = p;
    return mk.rc;
}

void so_pass_free(so_pass *p) {
    if (!p)
        return;
    so_view views[] = {p->x,          p->h,
                       p->q,          p->k,
                       p->v,          p->att,
                       p->gate,       p->up,
                       p->ids,        p->positions,
                       p->slots,      p->rows,
                       p->pages,      p->tails,
                       p->rope,       p->rope_local,
                       p->out_rows,   p->out_x,
                       p->hidden,     p->logits,
                       p->argmax,     p->target_hidden,
                       p->guess_ids,  p->sample,
                       p->sampled,    p->inputs,
                       p->input_rows, p->cross_rows};
    for (size_t i = 0; i < SO_LEN(views); i++)
        if (views[i].buf)
            p->backend->vt->buffer_free(p->backend, views[i].buf);
    void *memory[] = {p->h_ids,     p->h_positions,     p->h_out_rows,   p->h_slots,
                      p->h_rows,    p->h_pages,         p->h_tails,      p->h_rope,
                      p->seq_n,     p->seq_page_off,    p->h_logits,     p->h_hidden,
                      p->h_argmax,  p->h_target_hidden, p->h_has_logits, p->h_sample,
                      p->h_sampled, p->h_inputs,        p->h_input_rows, p->h_cross_rows};
    for (size_t i = 0; i < SO_LEN(memory); i++)
        free(memory[i]);
    if (p->backend->in_flight == p)
        p->backend->in_flight = NULL;
    free(p);
}

/* Doubles a table that exists on host and device until it holds n entries. The device copy loses
 * its contents, so this is called only before the upload. */
static int table_reserve(so_pass *p, int n, int32_t **table, int *cap, so_view *view, so_err *err) {
    if (n <= *cap)
        return 0;
    int new_cap = *cap;
    while (new_cap < n)
        new_cap = new_cap > INT32_MAX / 2 ? INT32_MAX : new_cap * 2;
    so_buffer *buf;
    so_backend *b = p->backend;
    int rc = b->vt->buffer_create(b, (size_t)new_cap * sizeof(int32_t), &buf, err);
    if (rc != 0)
        return rc;
    b->vt->buffer_free(b, view->buf);
    view->buf = buf;
    *table = so_realloc(*table, (size_t)new_cap * sizeof **table);
    *cap = new_cap;
    return 0;
}

/* The batch. */

static bool is_guess(const so_row *r) { return r->token == SO_ROW_GUESS; }

/* The slot of a parent that an earlier pass computed; −1: the parent is in this batch, or the row
 * follows the committed context. */
static int slot_before(const so_row *r) { return r->parent < -1 ? -2 - r->parent : -1; }

/* Number of open nodes on the path that ends in `slot`; 0 for slot −1. */
static int path_length(const so_seq *s, int slot) {
    int n = 0;
    for (; slot >= so_seq_len(s); slot = so_seq_parent(s, slot))
        n++;
    return n;
}

static int check_row(const so_pass *p, const so_batch *b, int i, so_err *err) {
    const so_hparams *hp = &p->model->hp;
    const so_row *r = &b->rows[i];
    if (r->seq < 0 || r->seq >= b->n_seqs)
        return so_err_set(err, SO_EINVAL, "row %d: sequence %d is not one of the batch's %d", i,
                          r->seq, b->n_seqs);
    if (!is_guess(r) && (r->token < 0 || r->token >= hp->n_vocab))
        return so_err_set(err, SO_EINVAL, "row %d: token %d is outside the vocabulary of %d", i,
                          r->token, hp->n_vocab);
    if (r->parent >= i)
        return so_err_set(err, SO_EINVAL, "row %d: parent %d is not an earlier row", i, r->parent);
    if (r->parent >= 0 && b->rows[r->parent].seq != r->seq)
        return so_err_set(err, SO_EINVAL, "row %d: parent %d belongs to another sequence", i,
                          r->parent);
    const so_seq *s = b->seqs[r->seq];
    int slot = slot_before(r), len = so_seq_len(s);
    if (slot >= 0 && (slot < len || slot >= so_seq_next_slot(s)))
        return so_err_set(err, SO_EINVAL,
                          "row %d: slot %d holds no node of an earlier pass of this speculation", i,
                          slot);
    int pos = r->parent >= 0 ? b->rows[r->parent].pos + 1 : len + path_length(s, slot);
    if (r->pos != pos)
        return so_err_set(err, SO_EINVAL,
                          "row %d: position %d does not follow its parent; %d is expected", i,
                          r->pos, pos);
    if (p->model->arch->learned_positions && r->pos >= hp->n_ctx_train)
        return so_err_set(err, SO_ERANGE,
                          "row %d: position %d is past the %d positions this model has learned", i,
                          r->pos, hp->n_ctx_train);
    return 0;
}

static int check_seqs(so_pass *p, const so_batch *b, so_err *err) {
    for (int s = 0; s < b->n_seqs; s++) {
        if (so_seq_kv(b->seqs[s]) != p->kv)
            return so_err_set(err, SO_EINVAL, "sequence %d belongs to another KV cache", s);
        so_attn_row row;
        if (p->model->t5 && !so_sources_of(b->seqs[s], &row))
            return so_err_set(err, SO_EINVAL, "sequence %d has no source text", s);
        for (int other = 0; other < s; other++)
            if (b->seqs[other] == b->seqs[s])
                return so_err_set(err, SO_EINVAL, "sequences %d and %d are the same", other, s);
        if (so_seq_next_nodes(b->seqs[s]) != p->seq_n[s])
            return so_err_set(err, SO_EINVAL,
                              "sequence %d has %d rows; its open speculation has %d nodes", s,
                              p->seq_n[s], so_seq_next_nodes(b->seqs[s]));
    }
    return 0;
}

static int check_batch(so_pass *p, const so_batch *b, so_err *err) {
    if (b->n_rows < 1 || b->n_rows > p->max_rows || b->n_seqs < 1 || b->n_seqs > p->max_rows)
        return so_err_set(err, SO_EINVAL,
                          "a batch of %d rows and %d sequences; 1 to %d are possible", b->n_rows,
                          b->n_seqs, p->max_rows);
    memset(p->seq_n, 0, (size_t)b->n_seqs * sizeof *p->seq_n);
    int n_out = 0;
    for (int i = 0; i < b->n_rows; i++) {
        int rc = check_row(p, b, i, err);
        if (rc != 0)
            return rc;
        p->seq_n[b->rows[i].seq]++;
        n_out += b->rows[i].want_logits;
    }
    if (n_out > p->max_logits)
        return so_err_set(err, SO_EINVAL, "%d rows want logits; at most %d can have them", n_out,
                          p->max_logits);
    return check_seqs(p, b, err);
}

/* Divides the rows into levels (model.h). Level 0 has the rows whose tokens are known. A guess
 * (SO_ROW_GUESS) whose parent is in the latest level starts a new one. */
static int lay_out_levels(so_pass *p, const so_batch *b, so_err *err) {
    int n_out = 0, level = 0, parent = 0; /* rows before `parent` get no more guesses */
    p->level_row[0] = p->level_out[0] = 0;
    for (int i = 0; i < b->n_rows; i++) {
        const so_row *r = &b->rows[i];
        bool guess = is_guess(r);
        if (guess && r->parent >= p->level_row[level]) {
            if (level + 1 == SO_PASS_LEVELS)
                return so_err_set(err, SO_EINVAL, "row %d: more than %d levels", i, SO_PASS_LEVELS);
            parent = p->level_row[level++];
            p->level_row[level] = i;
            p->level_out[level] = n_out;
        }
        while (guess && parent < i && !b->rows[parent].want_logits)
            parent++;
        if (guess != (level > 0) || (guess && r->parent != parent++))
            return so_err_set(
                err, SO_EINVAL,
                "row %d: guesses must come last, in the order of the rows with logits "
                "that they follow",
                i);
        n_out += r->want_logits;
    }
    p->n_levels = level + 1;
    p->level_row[p->n_levels] = b->n_rows;
    p->level_out[p->n_levels] = n_out;
    return 0;
}

static int lay_out_pages(so_pass *p, const so_batch *b, so_err *err) {
    int64_t total = 0;
    for (int s = 0; s < b->n_seqs; s++) {
        int n;
        so_seq_pages(b->seqs[s], &n);
        total += n;
    }
    if (total > INT32_MAX)
        return so_err_set(err, SO_ELIMIT,
                          "the batch's sequences have %lld pages; at most %d are possible",
                          (long long)total, INT32_MAX);
    int rc = table_reserve(p, (int)total, &p->h_pages, &p->pages_cap, &p->pages, err);
    if (rc != 0)
        return rc;
    p->n_pages = 0;
    for (int s = 0; s < b->n_seqs; s++) {
        int n;
        const int32_t *pages = so_seq_pages(b->seqs[s], &n);
        p->seq_page_off[s] = p->n_pages;
        if (n > 0)
            memcpy(p->h_pages + p->n_pages, pages, (size_t)n * sizeof *pages);
        p->n_pages += n;
    }
    return 0;
}

/* The number of positions of a row's parent that are in the slots of the same number. */
static int parent_prefix(const so_pass *p, const so_seq *s, const so_row *r) {
    if (r->parent >= 0)
        return p->h_rows[r->parent].n_prefix;
    int n = r->pos, pos = r->pos - 1; /* the whole path, up to the lowest one elsewhere */
    for (int slot = slot_before(r); slot >= so_seq_len(s); slot = so_seq_parent(s, slot), pos--)
        if (slot != pos)
            n = pos;
    return n;
}

/* Writes the parent's tail of n slots. */
static void copy_tail(const so_pass *p, const so_seq *s, const so_row *r, int n, int32_t *out) {
    if (n > 0 && r->parent >= 0)
        memcpy(out, p->h_tails + p->h_rows[r->parent].tail_off, (size_t)n * sizeof *out);
    if (r->parent >= 0)
        return;
    for (int slot = slot_before(r); n > 0; slot = so_seq_parent(s, slot))
        out[--n] = slot;
}

/* Computes prefix and tail of row i; see the drawing at the top. */
static int lay_out_view(so_pass *p, const so_batch *b, int i, int slot, so_err *err) {
    const so_row *r = &b->rows[i];
    const so_seq *s = b->seqs[r->seq];
    int n_prefix = parent_prefix(p, s, r), n_parent_tail = r->pos - n_prefix;
    bool chain = n_parent_tail == 0 && slot == r->pos;
    p->h_rows[i] = (so_attn_row){.pos = r->pos,
                                 .n_prefix = chain ? r->pos + 1 : n_prefix,
                                 .page_off = p->seq_page_off[r->seq],
                                 .tail_off = p->n_tails};
    if (chain)
        return 0;
    if (p->n_tails > INT32_MAX - n_parent_tail - 1)
        return so_err_set(err, SO_ELIMIT, "row %d: the batch's branches are too long", i);
    int rc = table_reserve(p, p->n_tails + n_parent_tail + 1, &p->h_tails, &p->tails_cap, &p->tails,
                           err);
    if (rc != 0)
        return rc;
    copy_tail(p, s, r, n_parent_tail, p->h_tails + p->n_tails);
    p->n_tails += n_parent_tail;
    p->h_tails[p->n_tails++] = slot;
    return 0;
}

/* The slot of a row that has been laid out: the end of its prefix or of its tail. */
static int own_slot(const so_pass *p, const so_attn_row *r) {
    return r->n_prefix > r->pos ? r->pos : p->h_tails[r->tail_off + r->pos - r->n_prefix];
}

/* Tells the sequence which slot row i in `slot` follows, for later passes. */
static void note_parent(const so_pass *p, const so_batch *b, int i, int slot) {
    const so_row *r = &b->rows[i];
    so_seq *s = b->seqs[r->seq];
    int parent = slot_before(r);
    if (r->parent >= 0)
        parent = own_slot(p, &p->h_rows[r->parent]);
    so_seq_set_parent(s, slot, parent >= 0 ? parent : so_seq_len(s) - 1);
}

/* A row without a hidden state of the target (hidden is NULL) gets zeros: their product with the
 * matrix adds nothing to the row, so one product can be computed for all rows of a level. */
static void lay_out_target_hidden(so_pass *p, const float *hidden, int i) {
    size_t d = (size_t)p->model->d_target_hidden;
    float *to = p->h_target_hidden + (size_t)i * d;
    if (d == 0)
        return;
    if (hidden)
        memcpy(to, hidden, d * sizeof *to);
    else
        memset(to, 0, d * sizeof *to);
}

/* Memory for rows with an input of their own, made when a batch first has one. */
static int make_inputs(so_pass *p, const so_batch *b, so_err *err) {
    const so_hparams *hp = &p->model->hp;
    size_t n = (size_t)p->max_rows, d = (size_t)hp->d_model;
    bool any = false;
    for (int i = 0; i < b->n_rows; i++)
        any |= b->rows[i].embedding != NULL;
    if (!any || p->h_input_rows)
        return 0;
    maker mk = {.backend = p->backend, .err = err};
    if (!p->inputs.buf)
        p->inputs = device(&mk, 2 * n, d, sizeof(float));
    if (!p->input_rows.buf)
        p->input_rows = device(&mk, n, 1, sizeof(int32_t));
    if (!p->h_inputs)
        p->h_inputs = host(&mk, n, d, sizeof(float));
    p->h_input_rows = host(&mk, n, 1, sizeof(int32_t));
    return mk.rc;
}

static void lay_out_input(so_pass *p, const so_row *r, int i) {
    size_t d = (size_t)p->model->hp.d_model;
    if (!p->h_input_rows)
        return;
    p->h_input_rows[i] = i;
    if (!r->embedding)
        return;
    p->h_input_rows[i] = p->max_rows + p->n_inputs;
    memcpy(p->h_inputs + (size_t)p->n_inputs++ * d, r->embedding, d * sizeof(float));
}

/* Results that are wanted of a row with want_logits, number p->n_out. A row without parameters is
 * greedy. */
static void lay_out_wants(so_pass *p, const so_row *r, int row_of_level) {
    p->h_out_rows[p->n_out] = row_of_level;
    p->h_has_logits[p->n_out] = (p->want & SO_PASS_LOGITS) || r->logits_to_host;
    p->has_host_logits |= p->h_has_logits[p->n_out];
    p->h_sample[p->n_out] = r->sample ? *r->sample : (so_sample_row){.guess = -1};
    SO_ASSERT(!p->model->vocab_subset || !r->sample || r->sample->guess == SO_SAMPLE_BEST);
    p->n_out++;
}

static int lay_out_rows(so_pass *p, const so_batch *b, so_err *err) {
    memset(p->seq_n, 0, (size_t)b->n_seqs * sizeof *p->seq_n);
    p->n = b->n_rows;
    p->n_out = p->n_tails = p->n_inputs = 0;
    p->has_host_logits = false;
    for (int i = 0, level = 0; i < b->n_rows; i++) {
        const so_row *r = &b->rows[i];
        level += i == p->level_row[level + 1];
        int slot = so_seq_next_slot(b->seqs[r->seq]) + p->seq_n[r->seq]++;
        p->h_ids[i] = is_guess(r) ? 0 : r->token;
        p->h_positions[i] = r->pos;
        p->h_slots[i] = (so_kv_slot){p->h_pages[p->seq_page_off[r->seq] + slot / SO_KV_PAGE],
                                     slot % SO_KV_PAGE};
        lay_out_target_hidden(p, r->target_hidden, i);
        lay_out_input(p, r, i);
        if (r->want_logits)
            lay_out_wants(p, r, i - p->level_row[level]);
        int rc = lay_out_view(p, b, i, slot, err);
        if (rc != 0)
            return rc;
        note_parent(p, b, i, slot);
        if (p->model->t5)
            p->sources = so_sources_of(b->seqs[r->seq], &p->h_cross_rows[i]);
    }
    return 0;
}

/* Submitting. */

static void upload(so_pass *p, so_view dst, const void *src, size_t n_bytes) {
    if (n_bytes > 0)
        so_submit(p->backend, &(so_op){.kind = SO_OP_UPLOAD, .upload = {dst, src, n_bytes}});
}

static void download(so_pass *p, void *dst, so_view src, size_t n_bytes) {
    so_submit(p->backend, &(so_op){.kind = SO_OP_DOWNLOAD, .download = {src, dst, n_bytes}});
}

static void upload_rope(so_pass *p, so_view dst, const float *inv_freq, float scale) {
    int d = p->model->hp.rope_dim;
    if (!inv_freq)
        return;
    for (int i = 0; i < p->n; i++)
        so_rope_fill(inv_freq, d / 2, scale, p->h_positions[i], p->h_rope + (size_t)i * (size_t)d);
    upload(p, dst, p->h_rope, (size_t)p->n * (size_t)d * sizeof(float));
}

/* What all levels share, and the tokens of the first level; later levels get theirs from
 * submit_guesses. */
static void upload_tables(so_pass *p) {
    upload(p, p->ids, p->h_ids, (size_t)p->level_row[1] * sizeof *p->h_ids);
    upload(p, p->pages, p->h_pages, (size_t)p->n_pages * sizeof *p->h_pages);
    upload(p, p->tails, p->h_tails, (size_t)p->n_tails * sizeof *p->h_tails);
}

static void upload_level(so_pass *p) {
    const so_model *m = p->model;
    size_t n = (size_t)p->n;
    upload(p, p->slots, p->h_slots, n * sizeof *p->h_slots);
    upload(p, p->rows, p->h_rows, n * sizeof *p->h_rows);
    upload(p, p->out_rows, p->h_out_rows, (size_t)p->n_out * sizeof *p->h_out_rows);
    if (p->want & SO_PASS_SAMPLE)
        upload(p, p->sample, p->h_sample, (size_t)p->n_out * sizeof *p->h_sample);
    if (p->has_target_hidden)
        upload(p, p->target_hidden, p->h_target_hidden,
               n * (size_t)m->d_target_hidden * sizeof *p->h_target_hidden);
    if (m->t5)
        upload(p, p->cross_rows, p->h_cross_rows, n * sizeof *p->h_cross_rows);
    if (m->pos_embed || m->t5)
        upload(p, p->positions, p->h_positions, n * sizeof *p->h_positions);
    upload_rope(p, p->rope, m->inv_freq, m->hp.rope_attn_factor);
    upload_rope(p, p->rope_local, m->inv_freq_local, 1);
}

void so_pass_inputs(so_pass *p) {
    const so_model *m = p->model;
    size_t d = (size_t)m->hp.d_model;
    if (p->n_inputs == 0) {
        so_do_embed(p, p->x, p->ids, m->embed, m->hp.embed_scale);
        return;
    }
    so_view given = {p->inputs.buf, p->inputs.off + (size_t)p->max_rows * d * sizeof(float)};
    so_do_embed(p, p->inputs, p->ids, m->embed, m->hp.embed_scale);
    upload(p, given, p->h_inputs, (size_t)p->n_inputs * d * sizeof(float));
    upload(p, p->input_rows, p->h_input_rows, (size_t)p->n * sizeof *p->h_input_rows);
    so_submit(p->backend, &(so_op){.kind = SO_OP_GATHER,
                                   .n = p->n,
                                   .gather = {p->x, p->inputs, p->input_rows, m->hp.d_model}});
}

void so_pass_output(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;
    if (p->n_out == 0)
        return;
    so_submit(p->backend, &(so_op){.kind = SO_OP_GATHER,
                                   .n = p->n_out,
                                   .gather = {p->out_x, p->x, p->out_rows, hp->d_model}});
    so_submit(p->backend, &(so_op){.kind = m->arch->layer_norm ? SO_OP_LAYER_NORM : SO_OP_RMS_NORM,
                                   .n = p->n_out,
                                   .norm = {p->hidden, p->out_x, m->out_norm.weight,
                                            m->out_norm.bias, hp->d_model, hp->norm_eps}});
    if (!p->has_host_logits && !(p->want & SO_PASS_ARGMAX))
        return; /* only hidden states are wanted */
    so_submit(p->backend, &(so_op){.kind = SO_OP_MATMUL,
                                   .n = p->n_out,
                                   .matmul = {p->logits, p->hidden, m->output.bias, m->output.w}});
    if (p->want & SO_PASS_ARGMAX)
        so_submit(p->backend, &(so_op){.kind = SO_OP_ARGMAX,
                                       .n = p->n_out,
                                       .argmax = {p->argmax, p->logits, m->logits_len}});
    if (p->want & SO_PASS_SAMPLE)
        so_submit(p->backend,
                  &(so_op){.kind = SO_OP_SAMPLE,
                           .n = p->n_out,
                           .sample = {p->sampled, p->logits, p->argmax, p->sample, m->logits_len}});
}

/* Logits rows first … first + n - 1. */
static void download_logits(so_pass *p, int first, int n) {
    size_t row = (size_t)p->model->logits_len, at = (size_t)first * row;
    so_view from = {p->logits.buf, p->logits.off + at * sizeof(float)};
    if (n > 0)
        download(p, p->h_logits + at, from, (size_t)n * row * sizeof(float));
}

/* Neighbouring rows are one download. */
static void download_wanted_logits(so_pass *p) {
    int first = 0;
    for (int i = 0; i < p->n_out; i++)
        if (!p->h_has_logits[i]) {
            download_logits(p, first, i - first);
            first = i + 1;
        }
    download_logits(p, first, p->n_out - first);
}

/* Whether the argmax alone tells that a row is not finite (so_pass_check). On a GPU a hidden state
 * with NaN or infinity makes every logit of its row so; the CPU's products of integers may lose
 * it. */
static bool argmax_tells(const so_pass *p) {
    return (p->want & SO_PASS_ARGMAX) && p->backend->vt->remote;
}

static void submit_downloads(so_pass *p) {
    const so_hparams *hp = &p->model->hp;
    size_t n = (size_t)p->n_out;
    if (n == 0)
        return;
    if ((p->want & SO_PASS_HIDDEN) || !argmax_tells(p))
        download(p, p->h_hidden, p->hidden, n * (size_t)hp->d_model * sizeof(float));
    download_wanted_logits(p);
    if (p->want & SO_PASS_ARGMAX)
        download(p, p->h_argmax, p->argmax, n * sizeof(int32_t));
    if (p->want & SO_PASS_SAMPLE)
        download(p, p->h_sampled, p->sampled, n * sizeof *p->h_sampled);
}

/* A copy of the pass with the rows and results of one level alone, in the same buffers. */
static so_pass level_of(const so_pass *p, const so_batch *b, int level) {
    int row = p->level_row[level], out = p->level_out[level];
    so_pass l = *p;
    l.n = p->level_row[level + 1] - row;
    l.n_out = p->level_out[level + 1] - out;
    l.h_ids += row;
    l.h_positions += row;
    l.h_slots += row;
    l.h_rows += row;
    l.h_cross_rows += row;
    l.h_target_hidden += (size_t)row * (size_t)p->model->d_target_hidden;
    l.h_out_rows += out;
    l.h_logits += (size_t)out * (size_t)p->model->logits_len;
    l.h_hidden += (size_t)out * (size_t)p->model->hp.d_model;
    l.h_has_logits += out;
    l.h_argmax += out;
    l.h_sample += out;
    l.h_sampled += out;
    l.has_target_hidden = false;
    for (int i = 0; i < l.n && p->model->d_target_hidden > 0; i++)
        l.has_target_hidden |= b->rows[row + i].target_hidden != NULL;
    return l;
}

/* Sets the tokens of the next level's n rows to the argmax of this level's logits. If the logits are
 * not finite, the argmax is −1, for which gather writes 0: a valid token, so the next level can be
 * computed. */
static void submit_guesses(so_pass *p, int n) {
    so_submit(
        p->backend,
        &(so_op){.kind = SO_OP_GATHER, .n = n, .gather = {p->ids, p->guess_ids, p->argmax, 1}});
}

int so_pass_reserve_levels(so_pass *p, so_err *err) {
    size_t n_bytes = (size_t)p->model->logits_len * sizeof(int32_t);
    if (p->guess_ids.buf)
        return 0;
    return p->backend->vt->buffer_create(p->backend, n_bytes, &p->guess_ids.buf, err);
}

/* Once, and again after a failed pass, which may have lost it. */
static void upload_guess_ids(so_pass *p) {
    const so_model *m = p->model;
    size_t n = (size_t)m->logits_len;
    if (p->has_guess_ids)
        return;
    int32_t *ids = SO_NEW_N(int32_t, n);
    for (size_t i = 0; i < n; i++)
        ids[i] = m->vocab_subset ? m->vocab_subset[i] : (int32_t)i;
    upload(p, p->guess_ids, ids, n * sizeof *ids);
    free(ids);
    p->has_guess_ids = true;
}

static void submit_levels(so_pass *p, const so_batch *b) {
    upload_tables(p);
    if (p->n_levels > 1)
        upload_guess_ids(p);
    for (int i = 0; i < p->n_levels; i++) {
        so_pass l = level_of(p, b, i);
        upload_level(&l);
        p->model->arch->forward(&l);
        if (i + 1 < p->n_levels)
            submit_guesses(&l, p->level_row[i + 2] - p->level_row[i + 1]);
        submit_downloads(&l);
    }
}

int so_pass_submit(so_pass *p, const so_batch *batch, unsigned want, so_err *err) {
    SO_ASSERT(!p->backend->in_flight);
    p->n_out = 0; /* a failed pass has no results */
    p->want = want | (want & SO_PASS_SAMPLE ? SO_PASS_ARGMAX : 0);
    int rc = check_batch(p, batch, err);
    if (rc == 0)
        rc = lay_out_levels(p, batch, err);
    if (rc == 0 && p->n_levels > 1)
        rc = so_pass_reserve_levels(p, err);
    if (rc == 0)
        rc = make_inputs(p, batch, err);
    if (rc == 0)
        rc = lay_out_pages(p, batch, err);
    if (rc == 0)
        rc = lay_out_rows(p, batch, err);
    if (rc != 0)
        return rc;
    p->want |= p->n_levels > 1 ? SO_PASS_ARGMAX : 0;
    SO_ASSERT(p->n_levels == 1 || p->n_inputs == 0);
    submit_levels(p, batch);
    p->backend->in_flight = p;
    return 0;
}

int so_pass_wait(so_pass *p, so_err *err) {
    SO_ASSERT(p->backend->in_flight == p);
    p->backend->in_flight = NULL;
    int rc = p->backend->vt->sync(p->backend, err);
    if (rc != 0) {
        p->n_out = 0;
        p->has_guess_ids = false;
        p->backend->n_failed++;
    }
    return rc;
}

int so_pass_run(so_pass *p, const so_batch *batch, unsigned want, so_err *err) {
    int rc = so_pass_submit(p, batch, want, err);
    return rc == 0 ? so_pass_wait(p, err) : rc;
}

static size_t row_of(const so_pass *p, int i) {
    SO_ASSERT(p->backend->in_flight != p);
    SO_ASSERT_OP(i, >=, 0);
    SO_ASSERT_OP(i, <, p->n_out);
    return (size_t)i;
}

static size_t result(const so_pass *p, int i, unsigned need) {
    SO_ASSERT(p->want & need);
    return row_of(p, i);
}

/* Checked on request, since most rows of a tree are never used. If the pass computed the argmax,
 * the argmax is checked instead of the logits (−1: not finite), so that the result of this check
 * does not depend on whether the pass also downloaded logits for the sake of other rows. */
static bool is_finite(const so_pass *p, int i) {
    const so_hparams *hp = &p->model->hp;
    size_t at = row_of(p, i);
    if (argmax_tells(p))
        return p->h_argmax[at] >= 0;
    if (so_weights_nonfinite(p->h_hidden + at * (size_t)hp->d_model, hp->d_model) >= 0)
        return false;
    if (p->want & SO_PASS_ARGMAX)
        return p->h_argmax[at] >= 0;
    int n = p->model->logits_len;
    return !p->h_has_logits[at] || so_weights_nonfinite(p->h_logits + at * (size_t)n, n) < 0;
}

int so_pass_check(const so_pass *p, int i, so_err *err) {
    if (is_finite(p, i))
        return 0;
    return so_err_set(
        err, SO_EFORMAT,
        "logits are not finite; the weights of %s hold NaN or infinity, or give keys or "
        "values past the range of the KV cache's type",
        so_checkpoint_path(p->model->ck));
}

int so_pass_check_all(const so_pass *p, so_err *err) {
    int rc = 0;
    for (int i = 0; i < p->n_out && rc == 0; i++)
        rc = so_pass_check(p, i, err);
    return rc;
}

const float *so_pass_logits(const so_pass *p, int i) {
    size_t at = row_of(p, i);
    SO_ASSERT(p->h_has_logits[at]);
    return p->h_logits + at * (size_t)p->model->logits_len;
}

const float *so_pass_fetch_logits(so_pass *p, int i, so_err *err) {
    if (!p->h_has_logits[row_of(p, i)]) {
        SO_ASSERT(p->n_levels == 1 && (p->want & SO_PASS_ARGMAX) && !p->backend->in_flight);
        download_logits(p, i, 1);
        if (p->backend->vt->sync(p->backend, err) != 0) {
            p->backend->n_failed++;
            return NULL;
        }
        p->h_has_logits[i] = true;
    }
    return so_pass_logits(p, i);
}

const so_sample_result *so_pass_sampled(const so_pass *p, int i) {
    return &p->h_sampled[result(p, i, SO_PASS_SAMPLE)];
}

int32_t so_pass_argmax(const so_pass *p, int i) {
    int32_t at = p->h_argmax[result(p, i, SO_PASS_ARGMAX)];
    return at >= 0 && p->model->vocab_subset ? p->model->vocab_subset[at] : at;
}

const float *so_pass_hidden(const so_pass *p, int i) {
    return p->h_hidden + result(p, i, SO_PASS_HIDDEN) * (size_t)p->model->hp.d_model;
}
