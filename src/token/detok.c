/* Ids to text: computes the text of each token at load, decodes, and streams.
 *
 * Decoding is a concatenation: every supported decoder works token by token, except that it may
 * drop leading spaces of the text (the dummy prefix of SentencePiece) and add spaces between
 * tokens. A decoder that depends on adjacent tokens is refused at load by its name. So the text of
 * a token is known in advance, decoding copies it, and streaming gives the same bytes as decoding
 * at once, except that it replaces invalid UTF-8.
 *
 * Streaming holds back at most three bytes: the start of an incomplete character. Loading belongs
 * to one thread; decoding may be called from any, each so_detok from one at a time. */
#include <stdlib.h>

#include "token/bytemap.h"
#include "token/tokenizer_impl.h"
#include "token/utf8.h"

void so_decoder_deinit(so_decoder *d) {
    for (int i = 0; i < d->n_steps; i++)
        so_text_op_deinit(&d->steps[i].op);
    d->n_steps = 0;
}

/* The byte of "<0x0A>", or −1 for other pieces. */
static int fallback_byte(so_str s) {
    if (s.len != 6 || memcmp(s.ptr, "<0x", 3) != 0 || s.ptr[5] != '>')
        return -1;
    int v = 0;
    for (int i = 3; i < 5; i++) {
        const char *digits = "0123456789ABCDEF", *d = strchr(digits, s.ptr[i]);
        if (!d || !*d)
            return -1;
        v = v * 16 + (int)(d - digits);
    }
    return v;
}

static so_str strip_ends(const so_decode_step *step, so_str s) {
    so_str c = {step->strip, step->strip_len};
    for (int i = 0; i < step->n_start && so_str_starts(s, c); i++)
        s = (so_str){s.ptr + c.len, s.len - c.len};
    for (int i = 0;
         i < step->n_stop && s.len >= c.len && memcmp(s.ptr + s.len - c.len, c.ptr, c.len) == 0;
         i++)
        s.len -= c.len;
    return s;
}

/* Applies one step to `in`; `out` is empty before. Bytes that the step does not apply to are
 * copied. */
static int render_step(const so_decode_step *step, so_matching *m, unsigned kind, so_str in,
                       so_buf *out, so_err *err) {
    int byte;
    switch (step->kind) {
    case SO_DECODE_REPLACE:
        if (so_utf8_valid_len(in) == in.len)
            return so_text_op_apply(&step->op, m, in, false, out, err);
        break;
    case SO_DECODE_BYTE_FALLBACK:
        if ((byte = fallback_byte(in)) >= 0) {
            so_buf_append_char(out, (char)byte);
            return 0;
        }
        break;
    case SO_DECODE_BYTE_LEVEL:
        if (!(kind & (SO_TOKEN_ADDED | SO_TOKEN_CONTROL)) && so_utf8_valid_len(in) == in.len &&
            so_bytes_unspell(in, out))
            return 0;
        break;
    case SO_DECODE_STRIP:
        in = strip_ends(step, in);
        break;
    }
    so_buf_append_str(out, in);
    return 0;
}

static int render(const so_tokenizer *t, so_matching *m, int32_t id, so_buf bufs[2], so_str *out,
                  so_err *err) {
    *out = t->pieces[id];
    for (int i = 0; i < t->decoder.n_steps; i++) {
        so_buf *next = &bufs[i & 1];
        so_buf_clear(next);
        int rc = render_step(&t->decoder.steps[i], m, t->kinds[id], *out, next, err);
        if (rc == 0 && next->full)
            rc = so_err_set(err, SO_ELIMIT, "decoding token %d exceeds the size limit", id);
        if (rc)
            return rc;
        *out = so_buf_str(next);
    }
    return 0;
}

int so_decoder_render(so_tokenizer *t, so_err *err) {
    so_buf all = {.max = so_text_limit(t->piece_len)},
           bufs[2] = {{.max = 1 << 20}, {.max = 1 << 20}};
    so_matching *m = so_matching_create(t->piece_len);
    uint32_t *ends = so_try_alloc((size_t)t->n_vocab + 1, sizeof *ends);
    t->texts = so_try_alloc((size_t)t->n_vocab, sizeof *t->texts);
    int rc =
        ends && t->texts ? 0 : so_err_set(err, SO_ENOMEM, "no memory for %d tokens", t->n_vocab);
    for (int32_t id = 0; rc == 0 && id < t->n_vocab; id++) {
        so_str text;
        rc = render(t, m, id, bufs, &text, err);
        if (rc == 0) {
            so_buf_append_str(&all, text);
            ends[id] = (uint32_t)all.len;
        }
    }
    if (rc == 0 && all.full)
        rc =
            so_err_set(err, SO_ELIMIT, "the decoded texts of the vocabulary exceed the size limit");
    for (int32_t id = 0; rc == 0 && id < t->n_vocab; id++) {
        uint32_t begin = id ? ends[id - 1] : 0;
        t->texts[id] = (so_str){all.data ? all.data + begin : "", ends[id] - begin};
    }
    t->text_bytes = all.data;
    so_buf_free(&bufs[0]);
    so_buf_free(&bufs[1]);
    so_matching_free(m);
    free(ends);
    return rc;
}

/* The text that id appends. *started: the output is not empty; *joined: a space goes first. */
static so_str text_of(const so_tokenizer *t, int32_t id, bool special, bool *started,
                      bool *joined) {
    *joined = false;
    if (id < 0 || id >= t->n_vocab || (!special && (t->kinds[id] & SO_TOKEN_CONTROL)))
        return (so_str){"", 0};
    so_str s = t->texts[id];
    *joined = t->decoder.joins && *started;
    bool first = !*started && s.len > 0;
    if (first && t->decoder.drops_space && s.ptr[0] == ' ')
        s = (so_str){s.ptr + 1, s.len - 1};
    while (first && t->decoder.drops_run && s.len && s.ptr[0] == ' ')
        s = (so_str){s.ptr + 1, s.len - 1};
    *started = *started || first;
    return s;
}

so_str so_tokenizer_text(const so_tokenizer *t, int32_t id) {
    return id >= 0 && id < t->n_vocab ? t->texts[id] : (so_str){"", 0};
}

void so_tokenizer_decode(const so_tokenizer *t, const int32_t *ids, size_t n, bool special,
                         so_buf *out) {
    bool started = false, joined;
    for (size_t i = 0; i < n; i++) {
        so_str s = text_of(t, ids[i], special, &started, &joined);
        if (joined)
            so_buf_append_char(out, ' ');
        so_buf_append_str(out, s);
    }
}

static void put_bytes(so_detok *d, so_str s, so_buf *out) {
    uint32_t cp;
    size_t len;
    while (d->n_held && s.len) {
        d->held[d->n_held++] = (unsigned char)s.ptr[0];
        so_utf8 r = so_utf8_next((const char *)d->held, (size_t)d->n_held, &cp, &len);
        if (r == SO_UTF8_BAD) { /* the held bytes are one error; this byte starts a new sequence */
            so_buf_append_c(out, SO_UTF8_REPLACEMENT);
            d->n_held = 0;
            break;
        }
        s = (so_str){s.ptr + 1, s.len - 1};
        if (r == SO_UTF8_OK) {
            so_buf_append(out, d->held, (size_t)d->n_held);
            d->n_held = 0;
        }
    }
    while (s.len) {
        size_t ok = so_utf8_valid_len(s);
        so_buf_append(out, s.ptr, ok);
        s = (so_str){s.ptr + ok, s.len - ok};
        if (s.len == 0)
            return;
        if (so_utf8_next(s.ptr, s.len, &cp, &len) == SO_UTF8_SHORT) {
            memcpy(d->held, s.ptr, s.len);
            d->n_held = (int)s.len;
            return;
        }
        so_buf_append_c(out, SO_UTF8_REPLACEMENT);
        s = (so_str){s.ptr + len, s.len - len};
    }
}

void so_detok_push(so_detok *d, int32_t id, so_buf *out) {
    bool joined;
    so_str s = text_of(d->t, id, d->special, &d->started, &joined);
    if (joined)
        put_bytes(d, SO_STR(" "), out);
    put_bytes(d, s, out);
}

void so_detok_finish(so_detok *d, so_buf *out) {
    if (d->n_held)
        so_buf_append_c(out, SO_UTF8_REPLACEMENT);
    d->n_held = 0;
}
