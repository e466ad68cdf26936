/* Source text to tokens, with Jinja's whitespace control: '-' eats all space on its side, '+' keeps
 * it; a tag's line feed goes with the tag (trim_blocks) and so does the blank before a tag that
 * starts its line (lstrip_blocks). One trailing line feed of the source is dropped.
 *
 * Tokens are made on demand, so a hostile source costs no more memory than the tree it builds.
 * Brackets are balanced here: "}}" closes a tag only outside of them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "jinja/impl.h"

/* "\r\n" and "\r" become "\n" throughout, and the last line feed goes. */
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

/* Lines are counted forward from the last question: positions only grow. */
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

/* The end of a tag at pos: its length with the space it eats, or 0. '+' is no sign of "}}". */
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

/* What is left of text[from, to) before a tag with this sign. */
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

/* The reference takes an opening at the very end of the source for closed; so do raw blocks. */
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

/* {% raw %} at pos: the position behind it, or 0. */
static size_t raw_begin(const so_jj_lexer *l, size_t pos) {
    size_t p = skip_space(l, pos + 2 + (sign_at(l, pos + 2) != '\0'));
    if (!looking_at(l, p, "raw"))
        return 0;
    p = skip_space(l, p + 3);
    size_t n = tag_end(l, p, "%}", false, false);
    return n ? p + n : 0;
}

/* Gives the raw text from `from` on and moves behind {% endraw %}. */
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

/* Text up to the next tag; the tag's own token waits in `pending`. Comments give no token. */
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

static bool is_digit(char c, int base) {
    if (base <= 10)
        return c >= '0' && c < '0' + base;
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f');
}

/* digits with single underscores between them; `lead`: an underscore may come first */
static size_t digits(const so_jj_lexer *l, size_t pos, int base, bool lead) {
    size_t p = pos;
    while (p < l->src.len) {
        if (is_digit(l->src.ptr[p], base))
            p++;
        else if (l->src.ptr[p] == '_' && (p > pos || lead) && p + 1 < l->src.len &&
                 is_digit(l->src.ptr[p + 1], base))
            p += 2;
        else
            break;
    }
    return p - pos;
}

static void without_underscores(so_jj_lexer *l, size_t pos, size_t n, char *out, size_t cap) {
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (l->src.ptr[pos + i] == '_')
            continue;
        if (k + 1 == cap)
            fail_at(l, pos, "number too long");
        out[k++] = l->src.ptr[pos + i];
    }
    out[k] = '\0';
}

static size_t float_length(const so_jj_lexer *l, size_t pos) {
    size_t whole = digits(l, pos, 10, false), n = whole, frac = 0;
    if (!whole || (pos && l->src.ptr[pos - 1] == '.'))
        return 0;
    if (looking_at(l, pos + n, ".") && (frac = digits(l, pos + n + 1, 10, false)))
        n += 1 + frac;
    size_t e = pos + n;
    if (looking_at(l, e, "e") || looking_at(l, e, "E")) {
        e += 1 + (looking_at(l, e + 1, "+") || looking_at(l, e + 1, "-"));
        size_t exp = digits(l, e, 10, false);
        if (exp)
            return e + exp - pos;
    }
    return frac ? n : 0;
}

static so_jj_tok lex_float(so_jj_lexer *l, size_t n) {
    char text[512];
    without_underscores(l, l->pos, n, text, sizeof text);
    so_jj_tok t = {.kind = SO_JJ_T_FLOAT, .line = line_at(l, l->pos)};
    t.value = so_jj_float(strtod(text, NULL));
    l->pos += n;
    return t;
}

static so_jj_tok lex_int(so_jj_lexer *l) {
    size_t pos = l->pos, skip = 0;
    int base = 10;
    if (l->src.ptr[pos] == '0' && pos + 1 < l->src.len) {
        char c = (char)(l->src.ptr[pos + 1] | 32);
        base = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
        skip = base == 10 ? 0 : 2;
    }
    size_t n = digits(l, pos + skip, base, skip > 0);
    if (skip && !n) { /* "0x" alone: a zero, then a name */
        skip = 0;
        base = 10;
        n = 1;
    }
    if (!skip && l->src.ptr[pos] == '0') { /* a decimal starts with 0 only if it is zero */
        n = 1;
        while (looking_at(l, pos + n, "0") || looking_at(l, pos + n, "_0"))
            n += looking_at(l, pos + n, "0") ? 1 : 2;
    }
    char text[128];
    without_underscores(l, pos + skip, n, text, sizeof text);
    errno = 0;
    long long v = strtoll(text, NULL, base);
    if (errno)
        fail_at(l, pos, "integer does not fit 64 bits");
    so_jj_tok t = {.kind = SO_JJ_T_INT, .line = line_at(l, pos), .value = so_jj_int(v)};
    l->pos = pos + skip + n;
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
        if (!is_digit(c, 16) || cp > 0x10FFFF)
            fail_at(l, pos, "bad \\x, \\u or \\U escape in a string");
        cp = cp * 16 + (c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000))
        fail_at(l, pos, "escape in a string names no character");
    return cp;
}

/* A backslash before a non-ASCII character stays, and the character becomes the text of its escape:
 * the reference decodes strings by way of ASCII, and this is what comes out. */
static size_t quirk_escape(so_jj_lexer *l, so_jj_buf *b, size_t pos, size_t limit) {
    size_t n;
    char t[16];
    int32_t cp = so_jj_cp_at(l->src.ptr + pos, l->src.ptr + limit, &n);
    const char *fmt = cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x";
    snprintf(t, sizeof t, fmt, (unsigned)cp);
    so_jj_buf_add(l->x, b, so_str_c(t));
    return n;
}

/* The escape whose letter is at pos; gives the bytes it took. */
static size_t unescape(so_jj_lexer *l, so_jj_buf *b, size_t pos, size_t limit) {
    static const char FROM[] = "abfnrtv\\'\"", TO[] = "\a\b\f\n\r\t\v\\'\"";
    char c = l->src.ptr[pos];
    const char *simple = c ? strchr(FROM, c) : NULL;
    if ((unsigned char)c >= 0x80)
        return quirk_escape(l, b, pos, limit);
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
    if (is_digit(c, 8)) {
        int32_t cp = 0;
        size_t n = 0;
        for (; n < 3 && pos + n < limit && is_digit(l->src.ptr[pos + n], 8); n++)
            cp = cp * 8 + l->src.ptr[pos + n] - '0';
        so_jj_buf_cp(l->x, b, cp);
        return n;
    }
    if (c == 'N')
        fail_at(l, pos, "\\N{…} escapes are not supported");
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
    if ((n = float_length(l, l->pos)))
        return lex_float(l, n);
    if (is_digit(c, 10))
        return lex_int(l);
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
