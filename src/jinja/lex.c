/* Splits the source into tokens and applies Jinja's whitespace control: '-' in a tag removes all
 * space on its side, '+' keeps it; the line feed after a block tag is removed (trim_blocks), and so
 * is the space before a block tag that is first on its line (lstrip_blocks). One line feed at the
 * end of the source is dropped.
 *
 * Tokens are made on demand, so a hostile source needs no more memory than its tree. The lexer
 * checks that brackets are balanced: "}}" ends a tag only outside brackets. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "jinja/impl.h"

/* Copies the source with "\r\n" and "\r" as "\n", without the last line feed. */
void so_jj_lexer_init(so_jj *x, so_jj_lexer *l, so_str source) {
    char *p = so_jj_alloc(x, source.len + 1, 1);
    size_t n = 0;
    for (size_t i = 0; i < source.len; i++) {
        if (source.ptr[i] == '\r') {
            p[n++] = '\n';
            i += i + 1 < source.len && source.ptr[i + 1] == '\n';
        } else {
            p[n++] = source.ptr[i];
        }
    }
    if (n && p[n - 1] == '\n')
        n--;
    *l = (so_jj_lexer){.x = x, .src = {p, n}, .line_at_pos = 1};
}

/* The line number of pos. Counts on from the previous call: positions only increase. */
static int line_at(so_jj_lexer *l, size_t pos) {
    for (; l->line_pos < pos; l->line_pos++)
        l->line_at_pos += l->src.ptr[l->line_pos] == '\n';
    return l->line_at_pos;
}

_Noreturn static void fail_at(so_jj_lexer *l, size_t pos, const char *msg) {
    l->x->line = line_at(l, pos);
    so_jj_fail(l->x, SO_EFORMAT, "%s", msg);
}

static bool looking_at(const so_jj_lexer *l, size_t pos, const char *s) {
    size_t n = strlen(s);
    return so_in_range(pos, n, l->src.len) && memcmp(l->src.ptr + pos, s, n) == 0;
}

static size_t skip_space(const so_jj_lexer *l, size_t pos) {
    const char *end = l->src.ptr + l->src.len;
    size_t n;
    while (pos < l->src.len && so_jj_cp_is(so_jj_cp_at(l->src.ptr + pos, end, &n), SO_JJ_C_SPACE))
        pos += n;
    return pos;
}

/* If a tag ends at pos: the length of its end and of the space removed after it; else 0.
 * plus: '+' is allowed before `close` (not before "}}"). trim: remove one line feed. */
static size_t tag_end(const so_jj_lexer *l, size_t pos, const char *close, bool plus, bool trim) {
    if (looking_at(l, pos, "-") && looking_at(l, pos + 1, close))
        return skip_space(l, pos + 3) - pos;
    if (plus && looking_at(l, pos, "+") && looking_at(l, pos + 1, close))
        return 3;
    if (!looking_at(l, pos, close))
        return 0;
    return 2 + (trim && looking_at(l, pos + 2, "\n"));
}

/* ---- text between tags ---- */

static char sign_at(const so_jj_lexer *l, size_t pos) {
    char c = pos < l->src.len ? l->src.ptr[pos] : '\0';
    return c == '-' || c == '+' ? c : '\0';
}

/* The text [from, to) before a tag with this sign, without the space that the tag removes. */
static so_str strip_before(const so_jj_lexer *l, size_t from, size_t to, char sign, bool is_var) {
    so_str text = {l->src.ptr + from, to - from};
    if (sign == '-')
        return so_jj_trim(text, NULL, false, true);
    if (sign == '+' || is_var)
        return text;
    const char *nl = text.len ? memrchr(text.ptr, '\n', text.len) : NULL;
    bool line_starts = nl || from == 0 || l->src.ptr[from - 1] == '\n';
    so_str tail = nl ? (so_str){nl + 1, (size_t)(text.ptr + text.len - nl - 1)} : text;
    if (line_starts && so_jj_trim(tail, NULL, true, false).len == 0)
        text.len -= tail.len;
    return text;
}

static so_jj_tok data_token(so_jj_lexer *l, size_t at, so_str text) {
    so_jj_tok t = {.kind = SO_JJ_T_DATA, .line = line_at(l, at), .text = text};
    return t;
}

/* The position after the comment that starts at from. As in Jinja2, a comment or raw block that is
 * opened at the very end of the source counts as closed. */
static size_t comment_end(so_jj_lexer *l, size_t from) {
    if (from == l->src.len)
        return from;
    for (size_t i = from; i + 1 < l->src.len; i++) {
        if (!looking_at(l, i, "#}"))
            continue;
        if (i > from && l->src.ptr[i - 1] == '-')
            return skip_space(l, i + 2);
        if (i > from && l->src.ptr[i - 1] == '+')
            return i + 2;
        return i + 2 + looking_at(l, i + 2, "\n");
    }
    fail_at(l, from, "comment without an end: {#");
}

/* If {% raw %} is at pos: the position after it; else 0. */
static size_t raw_begin(const so_jj_lexer *l, size_t pos) {
    size_t p = skip_space(l, pos + 2 + (sign_at(l, pos + 2) != '\0'));
    if (!looking_at(l, p, "raw"))
        return 0;
    p = skip_space(l, p + 3);
    size_t n = tag_end(l, p, "%}", false, false);
    return n ? p + n : 0;
}

/* The raw text at `from`; moves l->pos after {% endraw %}. */
static so_str raw_text(so_jj_lexer *l, size_t from) {
    if (from == l->src.len) {
        l->pos = from;
        return (so_str){l->src.ptr, 0};
    }
    for (size_t i = from; i + 1 < l->src.len; i++) {
        if (!looking_at(l, i, "{%"))
            continue;
        char sign = sign_at(l, i + 2);
        size_t p = skip_space(l, i + 2 + (sign != '\0'));
        if (!looking_at(l, p, "endraw"))
            continue;
        p = skip_space(l, p + 6);
        size_t n = tag_end(l, p, "%}", true, true);
        if (!n)
            continue;
        l->pos = p + n;
        return strip_before(l, from, i, sign, false);
    }
    fail_at(l, from, "raw block without an end: {% raw %}");
}

static size_t find_tag(const so_jj_lexer *l, size_t pos) {
    while (pos + 1 < l->src.len) {
        const char *p = memchr(l->src.ptr + pos, '{', l->src.len - pos - 1);
        if (!p)
            break;
        if (p[1] == '{' || p[1] == '%' || p[1] == '#')
            return (size_t)(p - l->src.ptr);
        pos = (size_t)(p - l->src.ptr) + 1;
    }
    return l->src.len;
}

/* The text up to the next tag. The token of the tag is kept in `pending`; comments have none. */
static so_jj_tok lex_text(so_jj_lexer *l) {
    size_t from = l->pos, at = find_tag(l, from);
    if (at == l->src.len) {
        l->pos = at;
        return data_token(l, from, (so_str){l->src.ptr + from, at - from});
    }
    char what = l->src.ptr[at + 1], sign = sign_at(l, at + 2);
    so_str text = strip_before(l, from, at, sign, what == '{');
    size_t raw = what == '%' ? raw_begin(l, at) : 0;
    so_jj_tok data = data_token(l, from, text);
    l->pos = at + 2 + (sign != '\0');
    if (raw) {
        l->has_pending = true;
        l->pending = data_token(l, raw, raw_text(l, raw));
    } else if (what == '#') {
        l->pos = comment_end(l, l->pos);
    } else {
        l->state = what == '{' ? SO_JJ_L_VAR : SO_JJ_L_BLOCK;
        l->has_pending = true;
        l->pending = (so_jj_tok){.kind = what == '{' ? SO_JJ_T_VAR_BEGIN : SO_JJ_T_BLOCK_BEGIN,
                                 .line = line_at(l, at)};
    }
    return data;
}

/* ---- inside of tags ---- */

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static size_t digits(const so_jj_lexer *l, size_t pos) {
    size_t p = pos;
    while (p < l->src.len && is_digit(l->src.ptr[p]))
        p++;
    return p - pos;
}

/* The length of the float at pos, or 0. */
static size_t float_length(const so_jj_lexer *l, size_t pos) {
    size_t whole = digits(l, pos), n = whole, frac = 0;
    if (!whole || (pos && l->src.ptr[pos - 1] == '.'))
        return 0;
    if (looking_at(l, pos + n, ".") && (frac = digits(l, pos + n + 1)))
        n += 1 + frac;
    size_t e = pos + n;
    if (looking_at(l, e, "e") || looking_at(l, e, "E")) {
        e += 1 + (looking_at(l, e + 1, "+") || looking_at(l, e + 1, "-"));
        size_t exp = digits(l, e);
        if (exp)
            return e + exp - pos;
    }
    return frac ? n : 0;
}

/* Only decimal digits: 0x1F and 1_000 end after the first digit and fail to parse. */
static so_jj_tok lex_number(so_jj_lexer *l, size_t float_len) {
    size_t n = float_len ? float_len : digits(l, l->pos);
    so_jj_tok t = {.line = line_at(l, l->pos)};
    so_str text = so_jj_bytes(so_jj_str_copy(l->x, (so_str){l->src.ptr + l->pos, n}));
    if (float_len) {
        t.kind = SO_JJ_T_FLOAT;
        t.value = so_jj_float(strtod(text.ptr, NULL));
    } else {
        t.kind = SO_JJ_T_INT;
        errno = 0;
        t.value = so_jj_int(strtoll(text.ptr, NULL, 10));
        if (errno)
            fail_at(l, l->pos, "integer does not fit 64 bits");
    }
    l->pos += n;
    return t;
}

static so_jj_tok lex_name(so_jj_lexer *l) {
    const char *end = l->src.ptr + l->src.len;
    size_t p = l->pos, n;
    while (p < l->src.len && so_jj_cp_is(so_jj_cp_at(l->src.ptr + p, end, &n), SO_JJ_C_ID_PART))
        p += n;
    so_jj_tok t = {.kind = SO_JJ_T_NAME, .line = line_at(l, l->pos)};
    t.text = (so_str){l->src.ptr + l->pos, p - l->pos};
    l->pos = p;
    return t;
}

static int32_t hex_escape(so_jj_lexer *l, size_t pos, size_t n, size_t limit) {
    int32_t cp = 0;
    if (pos + n > limit)
        fail_at(l, pos, "truncated \\x, \\u or \\U escape in a string");
    for (size_t i = 0; i < n; i++) {
        char c = l->src.ptr[pos + i];
        bool letter = (c | 32) >= 'a' && (c | 32) <= 'f';
        if ((!is_digit(c) && !letter) || cp > 0x10FFFF)
            fail_at(l, pos, "bad \\x, \\u or \\U escape in a string");
        cp = cp * 16 + (letter ? (c | 32) - 'a' + 10 : c - '0');
    }
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000))
        fail_at(l, pos, "escape in a string names no character");
    return cp;
}

/* Appends the character of the escape whose letter is at pos; returns the bytes used. */
static size_t unescape(so_jj_lexer *l, so_jj_buf *b, size_t pos, size_t limit) {
    static const char FROM[] = "abfnrtv\\'\"", TO[] = "\a\b\f\n\r\t\v\\'\"";
    char c = l->src.ptr[pos];
    const char *simple = c ? strchr(FROM, c) : NULL;
    if (c == '\n')
        return 1;
    if (simple) {
        so_jj_buf_char(l->x, b, TO[simple - FROM]);
        return 1;
    }
    if (c == 'x' || c == 'u' || c == 'U') {
        size_t n = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        so_jj_buf_cp(l->x, b, hex_escape(l, pos + 1, n, limit));
        return 1 + n;
    }
    if (c == 'N' || is_digit(c))
        fail_at(l, pos, "\\N{…} and octal escapes in strings are not supported");
    so_jj_buf_char(l->x, b, '\\');
    so_jj_buf_char(l->x, b, c);
    return 1;
}

static so_jj_tok lex_string(so_jj_lexer *l) {
    size_t from = l->pos + 1, p = from;
    char quote = l->src.ptr[l->pos];
    while (p < l->src.len && l->src.ptr[p] != quote)
        p += 1 + (l->src.ptr[p] == '\\');
    if (p >= l->src.len)
        fail_at(l, l->pos, "string without an end");
    so_jj_tok t = {.kind = SO_JJ_T_STRING, .line = line_at(l, l->pos)};
    so_jj_buf b = {0};
    for (size_t i = from; i < p;) {
        const char *bs = memchr(l->src.ptr + i, '\\', p - i);
        size_t n = bs ? (size_t)(bs - l->src.ptr) - i : p - i;
        so_jj_buf_add(l->x, &b, (so_str){l->src.ptr + i, n});
        i += n;
        if (bs)
            i += 1 + unescape(l, &b, i + 1, p);
    }
    t.text = (so_str){b.data ? b.data : "", b.len};
    l->pos = p + 1;
    return t;
}

static void check_balance(so_jj_lexer *l, char c) {
    if (c == '(' || c == '[' || c == '{') {
        if (l->n_balance == SO_JJ_MAX_TREE_DEPTH) {
            l->x->line = line_at(l, l->pos);
            so_jj_fail(l->x, SO_ELIMIT, "brackets nested deeper than %d", SO_JJ_MAX_TREE_DEPTH);
        }
        l->balance[l->n_balance++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
        if (!l->n_balance || l->balance[--l->n_balance] != c)
            fail_at(l, l->pos,
                    c == ')'   ? "unexpected ')'"
                    : c == ']' ? "unexpected ']'"
                               : "unexpected '}'");
    }
}

static so_jj_tok lex_operator(so_jj_lexer *l) {
    static const char *const TWO[] = {"//", "**", "==", "!=", ">=", "<="};
    so_jj_tok t = {.kind = SO_JJ_T_OP, .line = line_at(l, l->pos)};
    char c = l->src.ptr[l->pos];
    t.text = (so_str){l->src.ptr + l->pos, 1};
    for (size_t i = 0; i < SO_LEN(TWO); i++)
        if (looking_at(l, l->pos, TWO[i]))
            t.text.len = 2;
    if (t.text.len == 1 && (!c || !strchr("+-/*%~[](){}><=.:|,;", c))) {
        l->x->line = t.line;
        so_jj_fail(l->x, SO_EFORMAT, "unexpected character '%c' in a tag", c >= 32 ? c : '?');
    }
    check_balance(l, c);
    l->pos += t.text.len;
    return t;
}

static so_jj_tok lex_tag(so_jj_lexer *l) {
    bool var = l->state == SO_JJ_L_VAR;
    l->pos = skip_space(l, l->pos);
    if (l->pos == l->src.len)
        fail_at(l, l->pos, var ? "'{{' without '}}'" : "'{%' without '%}'");
    size_t n = l->n_balance ? 0 : tag_end(l, l->pos, var ? "}}" : "%}", !var, !var);
    if (n) {
        so_jj_tok t = {.kind = var ? SO_JJ_T_VAR_END : SO_JJ_T_BLOCK_END,
                       .line = line_at(l, l->pos)};
        l->pos += n;
        l->state = SO_JJ_L_TEXT;
        return t;
    }
    char c = l->src.ptr[l->pos];
    if (is_digit(c))
        return lex_number(l, float_length(l, l->pos));
    if (c == '"' || c == '\'')
        return lex_string(l);
    if (so_jj_cp_is(so_jj_cp_at(l->src.ptr + l->pos, l->src.ptr + l->src.len, &n),
                    SO_JJ_C_ID_START))
        return lex_name(l);
    return lex_operator(l);
}

so_jj_tok so_jj_lex(so_jj_lexer *l) {
    for (;;) {
        so_jj_tok t;
        if (l->has_pending) {
            l->has_pending = false;
            t = l->pending;
        } else if (l->state != SO_JJ_L_TEXT) {
            t = lex_tag(l);
        } else if (l->pos == l->src.len) {
            return (so_jj_tok){.kind = SO_JJ_T_EOF, .line = line_at(l, l->pos)};
        } else {
            t = lex_text(l);
        }
        so_jj_tick(l->x, 1);
        if (t.kind != SO_JJ_T_DATA || t.text.len)
            return t;
    }
}
