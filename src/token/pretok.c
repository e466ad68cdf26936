/* Runs the stages of pretok.h, each over all pieces of a text.
 *
 * Invariant: spans are in order, do not overlap and are not empty; Hugging Face tokenizers also
 * drops empty pieces after every stage. A split moves no bytes, it only divides spans; a rewrite
 * writes a new text and swaps the two buffers.
 *
 * A split has three steps: (1) the matcher divides a piece into ranges, each a match or a gap; (2)
 * with `invert`, matches become gaps and gaps become matches; (3) the behaviour joins or drops
 * ranges. The rules for joining are those of Hugging Face tokenizers, also for two matches in a row
 * and for a match at the end of the piece. Any thread, each with its own so_pieces. */
#include "token/pretok.h"

#include <stdlib.h>

#include "base/mem.h"
#include "token/utf8.h"

void so_pretok_deinit(so_pretok *p) {
    for (int i = 0; i < p->n_stages; i++) {
        so_text_op_deinit(&p->stages[i].op);
        so_pattern_free(p->stages[i].pattern);
        free(p->stages[i].literal);
    }
    p->n_stages = 0;
}

so_pretok_stage *so_pretok_add(so_pretok *p) {
    if (p->n_stages == SO_PRETOK_MAX_STAGES)
        return NULL;
    so_pretok_stage *s = &p->stages[p->n_stages++];
    *s = (so_pretok_stage){0};
    return s;
}

int so_pretok_add_pattern(so_pretok *p, so_str pattern, so_err *err) {
    so_pretok_stage *s = so_pretok_add(p);
    if (!s)
        return so_err_set(err, SO_ELIMIT, "more than %d pre-tokenizer stages",
                          SO_PRETOK_MAX_STAGES);
    s->behaviour = SO_SPLIT_ISOLATED;
    return so_pattern_compile(pattern, &s->pattern, err);
}

void so_pieces_deinit(so_pieces *p) {
    so_buf_free(&p->text);
    so_buf_free(&p->next_text);
    free(p->spans);
    free(p->next);
    *p = (so_pieces){0};
}

static void push_span(so_pieces *p, size_t off, size_t len) {
    if (p->n_next == p->next_cap) {
        p->next_cap = SO_MAX((size_t)64, p->next_cap * 2);
        p->next = so_realloc(p->next, p->next_cap * sizeof *p->next);
    }
    p->next[p->n_next++] = (so_span){(uint32_t)off, (uint32_t)len};
}

static void swap_spans(so_pieces *p) {
    so_span *spans = p->spans;
    size_t cap = p->cap;
    p->spans = p->next;
    p->n = p->n_next;
    p->cap = p->next_cap;
    p->next = spans;
    p->next_cap = cap;
    p->n_next = 0;
}

/* ---- splitting ---- */

/* Joins ranges in the order of the text. A range may be empty (an empty match): it is joined like
 * any other, but a result that is empty is not written. With MERGED_WITH_NEXT a match is joined
 * with the gap that follows, but not with another match. So after a match the range stays open: a
 * gap extends the range, and another match ends it. */
typedef struct joiner {
    so_pieces *out;
    so_split behaviour;
    size_t off, len; /* the range that may still be joined */
    bool open, last_was_match;
} joiner;

static void emit(joiner *j) {
    if (j->open && j->len)
        push_span(j->out, j->off, j->len);
    j->open = false;
}

static void put_range(joiner *j, size_t off, size_t len, bool is_match) {
    bool join = false;
    switch (j->behaviour) {
    case SO_SPLIT_REMOVED:
        if (is_match)
            return;
        break;
    case SO_SPLIT_ISOLATED:
        break;
    case SO_SPLIT_MERGED_WITH_PREVIOUS:
        join = is_match && !j->last_was_match;
        break;
    case SO_SPLIT_MERGED_WITH_NEXT:
        join = !is_match && j->last_was_match;
        break;
    case SO_SPLIT_CONTIGUOUS:
        join = is_match == j->last_was_match;
        break;
    }
    j->last_was_match = is_match;
    if (join && j->open) {
        j->len = off + len - j->off;
        return;
    }
    emit(j);
    *j = (joiner){j->out, j->behaviour, off, len, true, is_match};
}

/* The three matchers: each passes the ranges of one piece to put_range. */
static int split_by_pattern(const so_pretok_stage *s, so_matching *m, so_str piece, size_t base,
                            joiner *j, so_err *err) {
    so_find find = {.pattern = s->pattern, .matching = m, .text = piece};
    size_t done = 0, start, end;
    int rc;
    while ((rc = so_find_next(&find, &start, &end, err)) > 0) {
        if (done != start)
            put_range(j, base + done, start - done, s->invert);
        put_range(j, base + start, end - start, !s->invert);
        done = end;
    }
    if (rc == 0 && done != piece.len)
        put_range(j, base + done, piece.len - done, s->invert);
    return rc;
}

static void split_by_literal(const so_pretok_stage *s, so_str piece, size_t base, joiner *j) {
    size_t done = 0;
    while (s->literal_len) {
        const char *hit = so_text_find((so_str){piece.ptr + done, piece.len - done},
                                       (so_str){s->literal, s->literal_len});
        if (!hit)
            break;
        size_t start = (size_t)(hit - piece.ptr);
        if (done != start)
            put_range(j, base + done, start - done, s->invert);
        put_range(j, base + start, s->literal_len, !s->invert);
        done = start + s->literal_len;
    }
    if (done != piece.len)
        put_range(j, base + done, piece.len - done, s->invert);
}

static void split_by_class(const so_pretok_stage *s, so_str piece, size_t base, joiner *j) {
    size_t done = 0, i = 0, len;
    for (; i < piece.len; i += len) {
        if (!s->is_delimiter(so_utf8_at(piece.ptr + i, &len)))
            continue;
        if (done != i)
            put_range(j, base + done, i - done, s->invert);
        put_range(j, base + i, len, !s->invert);
        done = i + len;
    }
    if (done != piece.len)
        put_range(j, base + done, piece.len - done, s->invert);
}

static int split(const so_pretok_stage *s, so_matching *m, so_pieces *p, so_err *err) {
    so_str text = so_buf_str(&p->text);
    if (s->pattern)
        text = so_matching_subject(m, text);
    uint32_t begin = p->n ? p->spans[0].off : 0;
    for (size_t i = 0; i < p->n; i++) {
        so_span at = p->spans[i];
        so_str piece = {text.ptr + at.off, at.len};
        joiner j = {.out = p, .behaviour = s->behaviour};
        int rc = 0;
        if (s->pattern)
            rc = split_by_pattern(s, m, piece, at.off, &j, err);
        else if (s->literal)
            split_by_literal(s, piece, at.off, &j);
        else
            split_by_class(s, piece, at.off, &j);
        if (rc < 0)
            return rc;
        emit(&j);
    }
    swap_spans(p);
    p->first = p->first && p->n && p->spans[0].off == begin;
    return 0;
}

/* ---- rewriting ---- */

static int rewrite(const so_text_op *op, so_matching *m, so_pieces *p, so_err *err) {
    so_buf_clear(&p->next_text);
    for (size_t i = 0; i < p->n; i++) {
        so_str piece = {p->text.data + p->spans[i].off, p->spans[i].len};
        size_t begin = p->next_text.len;
        int rc = so_text_op_apply(op, m, piece, p->first && i == 0, &p->next_text, err);
        if (rc)
            return rc;
        if (p->next_text.len != begin)
            push_span(p, begin, p->next_text.len - begin);
    }
    if (p->next_text.full)
        return so_err_set(err, SO_ELIMIT, "pre-tokenizing makes the text longer than the limit");
    so_buf text = p->text;
    p->text = p->next_text;
    p->next_text = text;
    swap_spans(p);
    return 0;
}

int so_pretok_run(const so_pretok *p, so_matching *m, so_str text, bool first, so_pieces *out,
                  so_err *err) {
    out->n_next = 0;
    so_buf_clear(&out->text);
    out->text.max = out->next_text.max = so_text_limit(text.len);
    so_buf_append_str(&out->text, text);
    if (text.len)
        push_span(out, 0, text.len);
    swap_spans(out);
    out->first = first;
    for (int i = 0; i < p->n_stages; i++) {
        const so_pretok_stage *s = &p->stages[i];
        int rc = s->rewrites ? rewrite(&s->op, m, out, err) : split(s, m, out, err);
        if (rc)
            return rc;
    }
    return 0;
}
