/* Oniguruma's patterns for PCRE2: translation, compiling, limited matching.
 *
 * Hugging Face tokenizers matches with Oniguruma in its Ruby syntax. PCRE2 interprets most of it
 * the same way; translate() rewrites the rest:
 *
 *   \s \w \h \b   other sets of characters: \s without U+180E, \w with marks, \h hexadecimal digits
 *   [a[bc]]       a nested class is a union; flattened
 *   (?m:…)        dot matches newline, PCRE2's (?s:…)
 *   ^ $           always match at line breaks (PCRE2_MULTILINE)
 *   \uHHHH        a code point
 *
 * and refuses constructs without a short equivalent, naming them: negated or intersected nested
 * classes, \W and \H in a class, and {n,m}+ (possessive in PCRE2, repeated in Oniguruma).
 *
 * Limits: PCRE2's match and heap limits apply to one match, the limit on processor time to all
 * matches of a text. Matching uses the JIT if there is one, and the interpreter if the JIT's small
 * stack overflows. Patterns are immutable (any thread); a so_matching belongs to one call. */
#include "token/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <time.h>

#include "base/mem.h"
#include "token/unicode_delta.h"
#include "token/utf8.h"

enum {
    MAX_PATTERN = 64 * 1024,
    MATCH_STEPS = 1000 * 1000, /* limit for one match */
    STEPS_PER_BYTE = 64,       /* added to it for each byte of the text */
    HEAP_LIMIT_KIB = 64 * 1024,
};
/* A thousand times the need of ordinary patterns. Processor time, so that a busy or suspended
 * machine does not use it up. */
static const int64_t BUDGET_NS = 2000000000, BUDGET_NS_PER_BYTE = 20000;
static const int64_t CHECK_NS = 20000000; /* interval of reading the processor time */

#define SPACE "\\p{White_Space}"
/* Oniguruma's \w includes the six characters of category No in Latin-1 and no others. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}"
#define HEX "0-9a-fA-F"

struct so_pattern {
    pcre2_code *code;
    char *source; /* for error messages */
};

struct so_matching {
    pcre2_match_data *data;
    pcre2_match_context *limits;
    int64_t end_ns;   /* limit, in processor time of the thread */
    int64_t check_ns; /* when to read the processor time next */
    so_buf subject;
};

/* ---- translation ---- */

typedef struct translation {
    so_str in;
    size_t i;
    int depth; /* nesting of character classes; 0: outside */
    so_buf out;
} translation;

static char peek(const translation *t, size_t k) {
    return t->i + k < t->in.len ? t->in.ptr[t->i + k] : '\0';
}

static int refuse(const translation *t, const char *what, so_err *err) {
    return so_err_set(err, SO_EUNSUPPORTED, "pattern \"%.*s\": %s at byte %zu is not supported",
                      SO_STR_ARG(t->in), what, t->i);
}

static void copy(translation *t, size_t n) {
    so_buf_append(&t->out, t->in.ptr + t->i, n);
    t->i += n;
}

static void put_class(translation *t, const char *members, bool negated) {
    if (t->depth)
        so_buf_append_c(&t->out, members);
    else
        so_buf_printf(&t->out, "[%s%s]", negated ? "^" : "", members);
    t->i += 2;
}

static int put_escape(translation *t, so_err *err) {
    char c = peek(t, 1);
    switch (c) {
    case 's':
        so_buf_append_c(&t->out, SPACE);
        t->i += 2;
        return 0;
    case 'S':
        so_buf_append_c(&t->out, "\\P{White_Space}");
        t->i += 2;
        return 0;
    case 'w':
    case 'h':
        put_class(t, c == 'w' ? WORD : HEX, false);
        return 0;
    case 'W':
    case 'H':
        if (t->depth)
            return refuse(t, "a negated set within a class", err);
        put_class(t, c == 'W' ? WORD : HEX, true);
        return 0;
    case 'b':
    case 'B':
        if (t->depth)
            break;
        so_buf_append_c(
            &t->out, c == 'b' ? "(?:(?<=[" WORD "])(?![" WORD "])|(?<![" WORD "])(?=[" WORD "]))"
                              : "(?:(?<=[" WORD "])(?=[" WORD "])|(?<![" WORD "])(?![" WORD "]))");
        t->i += 2;
        return 0;
    case 'u':
        if (t->in.len - t->i < 6)
            return refuse(t, "a short \\u", err);
        so_buf_printf(&t->out, "\\x{%.4s}", t->in.ptr + t->i + 2);
        t->i += 6;
        return 0;
    default:
        break;
    }
    copy(t, SO_MIN((size_t)2, t->in.len - t->i));
    return 0;
}

/* Translates one item of a class, or the bracket that opens it. */
static int put_in_class(translation *t, so_err *err) {
    char c = peek(t, 0);
    if (c == '[' && peek(t, 1) == ':') {
        const char *end = memmem(t->in.ptr + t->i, t->in.len - t->i, ":]", 2);
        copy(t, end ? (size_t)(end - (t->in.ptr + t->i)) + 2 : 1);
        return 0;
    }
    if (c == '[') {
        if (peek(t, 1) == '^')
            return refuse(t, "a negated class within a class", err);
        t->depth++;
        t->i++;
        return 0;
    }
    if (c == ']') {
        if (--t->depth == 0)
            so_buf_append_char(&t->out, ']');
        t->i++;
        return 0;
    }
    if (c == '&' && peek(t, 1) == '&')
        return refuse(t, "an intersection of classes", err);
    if (c == '-' && (peek(t, 1) == '[' || peek(t, 1) == ']'))
        so_buf_append_char(&t->out, '\\'); /* so that flattening does not form a range */
    copy(t, 1);
    return 0;
}

static void open_class(translation *t) {
    t->depth = 1;
    copy(t, 1);
    if (peek(t, 0) == '^')
        copy(t, 1);
    if (peek(t, 0) == ']') {
        so_buf_append_char(&t->out, '\\');
        copy(t, 1);
    }
}

static void open_group(translation *t) {
    copy(t, 2);
    size_t n = strspn(t->in.ptr + t->i, "imx-"); /* the source is NUL-terminated */
    char end = peek(t, n);
    for (size_t k = 0; k < n; k++, t->i++)
        so_buf_append_char(&t->out,
                           peek(t, 0) == 'm' && (end == ':' || end == ')') ? 's' : peek(t, 0));
}

/* An interval such as {1,3} followed by '+'. */
static bool repeated_interval(const translation *t) {
    size_t n = 1 + strspn(t->in.ptr + t->i + 1, "0123456789,");
    return n > 1 && peek(t, n) == '}' && peek(t, n + 1) == '+';
}

static int translate(translation *t, so_err *err) {
    while (t->i < t->in.len) {
        int rc = 0;
        char c = peek(t, 0);
        if (c == '\\')
            rc = put_escape(t, err);
        else if (t->depth)
            rc = put_in_class(t, err);
        else if (c == '[')
            open_class(t);
        else if (c == '(' && peek(t, 1) == '?')
            open_group(t);
        else if (c == '{' && repeated_interval(t))
            rc = refuse(t, "a repeated interval", err);
        else
            copy(t, 1);
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- compiling ---- */

static int compile(so_pattern *p, so_str text, so_err *err) {
    int code;
    PCRE2_SIZE at;
    pcre2_compile_context *cc = pcre2_compile_context_create(NULL);
    SO_ASSERT(cc);
    pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
    p->code = pcre2_compile((PCRE2_SPTR)text.ptr, text.len,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                            &code, &at, cc);
    pcre2_compile_context_free(cc);
    if (!p->code) {
        char why[160];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return so_err_set(err, SO_EFORMAT, "pattern \"%s\" does not compile: %s", p->source, why);
    }
    pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* may fail: then the interpreter matches */
    return 0;
}

int so_pattern_compile(so_str source, so_pattern **out, so_err *err) {
    if (source.len > MAX_PATTERN)
        return so_err_set(err, SO_ELIMIT, "a pattern of %zu bytes (at most %d)", source.len,
                          MAX_PATTERN);
    if (memchr(source.ptr, 0, source.len))
        return so_err_set(err, SO_EFORMAT, "a pattern with a NUL byte");
    so_pattern *p = SO_NEW(so_pattern);
    p->source = so_strndup(source.ptr, source.len);
    translation t = {.in = {p->source, source.len}};
    int rc = translate(&t, err);
    if (rc == 0)
        rc = compile(p, so_buf_str(&t.out), err);
    so_buf_free(&t.out);
    if (rc) {
        so_pattern_free(p);
        return rc;
    }
    *out = p;
    return 0;
}

void so_pattern_free(so_pattern *p) {
    if (!p)
        return;
    pcre2_code_free(p->code);
    free(p->source);
    free(p);
}

/* ---- matching ---- */

static int64_t clock_ns(clockid_t id) {
    struct timespec ts;
    clock_gettime(id, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

so_matching *so_matching_create(size_t text_len) {
    so_matching *m = SO_NEW(so_matching);
    m->data = pcre2_match_data_create(1, NULL);
    m->limits = pcre2_match_context_create(NULL);
    SO_ASSERT(m->data && m->limits);
    uint64_t steps = MATCH_STEPS + (uint64_t)text_len * STEPS_PER_BYTE;
    pcre2_set_match_limit(m->limits, (uint32_t)SO_MIN(steps, (uint64_t)UINT32_MAX));
    pcre2_set_heap_limit(m->limits, HEAP_LIMIT_KIB);
    m->end_ns =
        clock_ns(CLOCK_THREAD_CPUTIME_ID) + BUDGET_NS + BUDGET_NS_PER_BYTE * (int64_t)text_len;
    return m;
}

/* Reading the coarse clock takes a few nanoseconds; reading the processor time is a system call. */
static bool time_is_up(so_matching *m) {
    int64_t now = clock_ns(CLOCK_MONOTONIC_COARSE);
    if (now < m->check_ns)
        return false;
    m->check_ns = now + CHECK_NS;
    return clock_ns(CLOCK_THREAD_CPUTIME_ID) > m->end_ns;
}

void so_matching_free(so_matching *m) {
    if (!m)
        return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->limits);
    so_buf_free(&m->subject);
    free(m);
}

so_str so_matching_subject(so_matching *m, so_str text) {
    bool copied = false;
    for (size_t i = 0, len; i < text.len; i += len) {
        uint32_t to = so_unicode_stand_in(so_utf8_at(text.ptr + i, &len));
        if (!to)
            continue;
        if (!copied) {
            so_buf_clear(&m->subject);
            so_buf_append_str(&m->subject, text);
            copied = true;
        }
        SO_ASSERT_OP(so_utf8_put(to, m->subject.data + i), ==, len);
    }
    return copied ? so_buf_str(&m->subject) : text;
}

static int match(so_find *f, so_err *err) {
    const so_pattern *p = f->pattern;
    so_matching *m = f->matching;
    if (time_is_up(m))
        return so_err_set(err, SO_ELIMIT, "pattern \"%s\" exceeds the time limit on this text",
                          p->source);
    int rc = pcre2_match(p->code, (PCRE2_SPTR)f->text.ptr, f->text.len, f->pos, PCRE2_NO_UTF_CHECK,
                         m->data, m->limits);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(p->code, (PCRE2_SPTR)f->text.ptr, f->text.len, f->pos,
                         PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, m->data, m->limits);
    if (rc >= 0)
        return 1;
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    char why[160];
    pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
    return so_err_set(err, SO_ELIMIT, "pattern \"%s\" failed at byte %zu of the text: %s",
                      p->source, f->pos, why);
}

/* An empty match directly after the previous match is skipped, as in Hugging Face tokenizers. */
int so_find_next(so_find *f, size_t *start, size_t *end, so_err *err) {
    while (f->pos <= f->text.len) {
        int rc = match(f, err);
        if (rc <= 0)
            return rc;
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(f->matching->data);
        if (at[0] > at[1] || at[0] < f->pos) /* possible with \K in a lookaround */
            return so_err_set(err, SO_EUNSUPPORTED, "pattern \"%s\" matches backwards",
                              f->pattern->source);
        if (at[0] == at[1] && f->any && f->last_end == at[1]) {
            size_t len = 1;
            if (f->pos < f->text.len)
                so_utf8_at(f->text.ptr + f->pos, &len);
            f->pos += len;
            continue;
        }
        *start = at[0];
        *end = f->pos = f->last_end = at[1];
        f->any = true;
        return 1;
    }
    return 0;
}
