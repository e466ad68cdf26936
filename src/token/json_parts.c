/* Loads the components of a tokenizer.json other than its model: normalizer, pre_tokenizer,
 * decoder, post_processor. Each is an object with a "type"; a "Sequence" contains further
 * components.
 *
 * Each component is translated to steps of our own (so_text_op, so_pretok_stage, so_decode_step),
 * so encoding does not depend on JSON. An unknown type is refused with its name and path
 * (SO_EUNSUPPORTED), never skipped. Nesting and the number of steps are limited. Loading only; one
 * thread. */
#include <stdio.h>

#include "token/json_get.h"
#include "token/tokenizer_impl.h"
#include "token/utf8.h"

enum { MAX_DEPTH = 8, PATH_BYTES = 160 };

typedef int part_fn(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err);

static int too_many(const char *path, so_err *err) {
    return so_err_set(err, SO_ELIMIT, "%s: too many components", path);
}

static int unknown_type(const char *path, so_str type, so_err *err) {
    return so_err_set(err, SO_EUNSUPPORTED, "%s.type \"%.*s\" is not supported", path,
                      SO_STR_ARG(type));
}

static int each(so_tokenizer *t, const json_t *j, const char *path, const char *key, int depth,
                part_fn *fn, so_err *err) {
    const json_t *list = json_object_get(j, key);
    if (!json_is_array(list))
        return so_json_bad(path, key, err, "must be an array");
    if (depth >= MAX_DEPTH)
        return so_json_bad(path, key, err, "nested more than %d deep", MAX_DEPTH);
    for (size_t i = 0; i < json_array_size(list); i++) {
        char sub[PATH_BYTES];
        snprintf(sub, sizeof sub, "%s.%s[%zu]", path, key, i);
        int rc = fn(t, json_array_get(list, i), sub, depth + 1, err);
        if (rc)
            return rc;
    }
    return 0;
}

/* {"String": …} or a bare string sets *literal, {"Regex": …} sets *pattern. */
static int read_pattern(const json_t *j, const char *path, so_str *literal, so_pattern **pattern,
                        so_err *err) {
    const json_t *p = json_object_get(j, "pattern");
    const json_t *regex = json_object_get(p, "Regex"), *string = json_object_get(p, "String");
    *literal = (so_str){"", 0};
    if (json_is_string(regex)) {
        int rc = so_pattern_compile(so_json_str(regex), pattern, err);
        return rc ? so_err_prefix(err, "%s.pattern", path) : 0;
    }
    if (json_is_string(p))
        string = p;
    if (!json_is_string(string))
        return so_json_bad(path, "pattern", err, "must be {\"String\": …} or {\"Regex\": …}");
    *literal = so_json_str(string);
    return 0;
}

/* ---- normalizer ---- */

static int read_replace(const json_t *j, const char *path, so_text_op *op, so_err *err) {
    so_str from, to;
    int rc = so_json_get_str(j, path, "content", &to, err);
    if (rc == 0)
        rc = read_pattern(j, path, &from, &op->pattern, err);
    if (rc == 0)
        so_text_op_set(op, from, to);
    return rc;
}

static int sextet(char c) {
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* False: not base64. '=' at the end may be missing. */
static bool from_base64(so_str s, so_buf *out) {
    uint32_t bits = 0;
    int n_bits = 0;
    while (s.len > 0 && s.ptr[s.len - 1] == '=')
        s.len--;
    for (size_t i = 0; i < s.len; i++) {
        int v = sextet(s.ptr[i]);
        if (v < 0)
            return false;
        bits = bits << 6 | (uint32_t)v;
        n_bits += 6;
        if (n_bits >= 8) {
            n_bits -= 8;
            so_buf_append_char(out, (char)(bits >> n_bits & 0xFF));
        }
    }
    return s.len % 4 != 1;
}

static int read_charsmap(const json_t *j, const char *path, so_text_op *op, so_err *err) {
    so_str text;
    so_buf bytes = {0};
    int rc = so_json_get_str(j, path, "precompiled_charsmap", &text, err);
    if (rc == 0 && !from_base64(text, &bytes))
        rc = so_json_bad(path, "precompiled_charsmap", err, "is not base64");
    if (rc == 0 && (rc = so_charsmap_read(so_buf_str(&bytes), &op->map, err)))
        so_err_prefix(err, "%s", path);
    so_buf_free(&bytes);
    return rc;
}

static int fill_normalizer(so_text_op *op, const json_t *j, const char *path, so_err *err) {
    so_str s;
    int rc = 0;
    switch (op->kind) {
    case SO_TEXT_STRIP:
        op->left = op->right = true;
        rc = so_json_get_bool(j, path, "strip_left", &op->left, err);
        return rc ? rc : so_json_get_bool(j, path, "strip_right", &op->right, err);
    case SO_TEXT_REPLACE:
        return read_replace(j, path, op, err);
    case SO_TEXT_PREPEND:
        rc = so_json_get_str(j, path, "prepend", &s, err);
        if (rc == 0)
            so_text_op_set(op, SO_STR(""), s);
        return rc;
    case SO_TEXT_CHARSMAP:
        return read_charsmap(j, path, op, err);
    default:
        return 0;
    }
}

int so_json_normalizer(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err) {
    static const struct {
        const char *type;
        so_text_kind kind;
    } known[] = {
        {"NFC", SO_TEXT_NFC},
        {"NFD", SO_TEXT_NFD},
        {"NFKC", SO_TEXT_NFKC},
        {"NFKD", SO_TEXT_NFKD},
        {"Strip", SO_TEXT_STRIP},
        {"StripAccents", SO_TEXT_STRIP_ACCENTS},
        {"Replace", SO_TEXT_REPLACE},
        {"Lowercase", SO_TEXT_LOWERCASE},
        {"Prepend", SO_TEXT_PREPEND},
        {"ByteLevel", SO_TEXT_SPELL_BYTES},
        {"Precompiled", SO_TEXT_CHARSMAP},
    };
    so_str type;
    if (!j || json_is_null(j))
        return 0;
    int rc = so_json_get_str(j, path, "type", &type, err);
    if (rc)
        return rc;
    if (so_str_eq_c(type, "Sequence"))
        return each(t, j, path, "normalizers", depth, so_json_normalizer, err);
    for (size_t i = 0; i < SO_LEN(known); i++) {
        if (!so_str_eq_c(type, known[i].type))
            continue;
        so_text_op *op = so_normalizer_add(t, known[i].kind);
        return op ? fill_normalizer(op, j, path, err) : too_many(path, err);
    }
    return unknown_type(path, type, err);
}

/* ---- pre_tokenizer ---- */

static int read_behaviour(const json_t *j, const char *path, so_split *out, so_err *err) {
    static const struct {
        const char *name;
        so_split behaviour;
    } known[] = {
        {"Removed", SO_SPLIT_REMOVED},
        {"Isolated", SO_SPLIT_ISOLATED},
        {"MergedWithPrevious", SO_SPLIT_MERGED_WITH_PREVIOUS},
        {"MergedWithNext", SO_SPLIT_MERGED_WITH_NEXT},
        {"Contiguous", SO_SPLIT_CONTIGUOUS},
    };
    so_str name;
    int rc = so_json_get_str(j, path, "behavior", &name, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < SO_LEN(known); i++)
        if (so_str_eq_c(name, known[i].name))
            return *out = known[i].behaviour, 0;
    return so_json_bad(path, "behavior", err, "\"%.*s\" is unknown", SO_STR_ARG(name));
}

static so_pretok_stage *add_split(so_tokenizer *t, so_split behaviour) {
    so_pretok_stage *s = so_pretok_add(&t->pretok);
    if (s)
        s->behaviour = behaviour;
    return s;
}

static int add_class_split(so_tokenizer *t, bool (*is)(uint32_t), so_split behaviour,
                           const char *path, so_err *err) {
    so_pretok_stage *s = add_split(t, behaviour);
    if (!s)
        return too_many(path, err);
    s->is_delimiter = is;
    return 0;
}

static so_text_op *add_rewrite(so_tokenizer *t, so_text_kind kind) {
    so_pretok_stage *s = so_pretok_add(&t->pretok);
    if (!s)
        return NULL;
    s->rewrites = true;
    s->op.kind = kind;
    return &s->op;
}

static void set_literal(so_pretok_stage *s, so_str literal) {
    s->literal = so_strndup(literal.ptr, literal.len);
    s->literal_len = literal.len;
}

static int pretok_byte_level(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    bool prefix = true, regex = true;
    int rc;
    if ((rc = so_json_get_bool(j, path, "add_prefix_space", &prefix, err)) ||
        (rc = so_json_get_bool(j, path, "use_regex", &regex, err)))
        return rc;
    if (prefix) {
        so_text_op *op = add_rewrite(t, SO_TEXT_PREPEND);
        if (!op)
            return too_many(path, err);
        op->unless_there = true;
        so_text_op_set(op, SO_STR(""), SO_STR(" "));
    }
    if (regex && (rc = so_pretok_add_pattern(&t->pretok, so_str_c(so_pretok_gpt2_pattern), err)))
        return rc;
    return add_rewrite(t, SO_TEXT_SPELL_BYTES) ? 0 : too_many(path, err);
}

static int pretok_split(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    so_pretok_stage *s = add_split(t, SO_SPLIT_ISOLATED);
    so_str literal;
    int rc;
    if (!s)
        return too_many(path, err);
    set_literal(s, SO_STR(""));
    if ((rc = read_behaviour(j, path, &s->behaviour, err)) ||
        (rc = so_json_get_bool(j, path, "invert", &s->invert, err)) ||
        (rc = read_pattern(j, path, &literal, &s->pattern, err)))
        return rc;
    free(s->literal);
    set_literal(s, literal);
    return 0;
}

/* prepend_scheme, or add_prefix_space in older files. */
static int read_scheme(const json_t *j, const char *path, bool *prepends, bool *first_only,
                       so_err *err) {
    so_str scheme;
    *prepends = true;
    *first_only = false;
    if (!json_object_get(j, "prepend_scheme"))
        return so_json_get_bool(j, path, "add_prefix_space", prepends, err);
    int rc = so_json_get_str(j, path, "prepend_scheme", &scheme, err);
    if (rc)
        return rc;
    *first_only = so_str_eq_c(scheme, "first");
    *prepends = !so_str_eq_c(scheme, "never");
    if (*prepends && !*first_only && !so_str_eq_c(scheme, "always"))
        return so_json_bad(path, "prepend_scheme", err, "\"%.*s\" is unknown", SO_STR_ARG(scheme));
    return 0;
}

static int read_replacement(const json_t *j, const char *path, so_str *out, so_err *err) {
    uint32_t cp;
    int rc = so_json_get_str(j, path, "replacement", out, err);
    if (rc == 0 && !so_vocab_single_char(*out, &cp))
        rc = so_json_bad(path, "replacement", err, "must be one character");
    return rc;
}

static int pretok_metaspace(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    so_str rep;
    bool prepends, first_only, splits = true;
    int rc;
    if ((rc = read_replacement(j, path, &rep, err)) ||
        (rc = read_scheme(j, path, &prepends, &first_only, err)) ||
        (rc = so_json_get_bool(j, path, "split", &splits, err)))
        return rc;
    so_text_op *op = add_rewrite(t, SO_TEXT_REPLACE);
    if (!op)
        return too_many(path, err);
    so_text_op_set(op, SO_STR(" "), rep);
    if (prepends) {
        if (!(op = add_rewrite(t, SO_TEXT_PREPEND)))
            return too_many(path, err);
        op->unless_there = true;
        op->first_only = first_only;
        so_text_op_set(op, SO_STR(""), rep);
    }
    if (!splits)
        return 0;
    so_pretok_stage *s = add_split(t, SO_SPLIT_MERGED_WITH_NEXT);
    if (!s)
        return too_many(path, err);
    set_literal(s, rep);
    return 0;
}

static int pretok_digits(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    bool each_alone = false;
    int rc = so_json_get_bool(j, path, "individual_digits", &each_alone, err);
    return rc ? rc
              : add_class_split(t, so_char_is_numeric,
                                each_alone ? SO_SPLIT_ISOLATED : SO_SPLIT_CONTIGUOUS, path, err);
}

static int pretok_punctuation(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    so_split behaviour = SO_SPLIT_ISOLATED;
    int rc = json_object_get(j, "behavior") ? read_behaviour(j, path, &behaviour, err) : 0;
    return rc ? rc : add_class_split(t, so_char_is_punct, behaviour, path, err);
}

/* \w+|[^\w\s]+ with the \w of Rust's regex crate, which Hugging Face tokenizers uses only here. */
#define RUST_WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}"

static int pretok_whitespace(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    (void)j;
    so_pretok_stage *s = add_split(t, SO_SPLIT_REMOVED);
    if (!s)
        return too_many(path, err);
    s->invert = true;
    return so_pattern_compile(SO_STR("[" RUST_WORD "]+|[^" RUST_WORD "\\s]+"), &s->pattern, err);
}

static int pretok_whitespace_split(so_tokenizer *t, const json_t *j, const char *path,
                                   so_err *err) {
    (void)j;
    return add_class_split(t, so_char_is_space, SO_SPLIT_REMOVED, path, err);
}

static int pretok_delimiter(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    so_str c;
    uint32_t cp;
    int rc = so_json_get_str(j, path, "delimiter", &c, err);
    if (rc)
        return rc;
    if (!so_vocab_single_char(c, &cp))
        return so_json_bad(path, "delimiter", err, "must be one character");
    so_pretok_stage *s = add_split(t, SO_SPLIT_REMOVED);
    if (!s)
        return too_many(path, err);
    set_literal(s, c);
    return 0;
}

static int pretok_bert(so_tokenizer *t, const json_t *j, const char *path, so_err *err) {
    int rc = pretok_whitespace_split(t, j, path, err);
    return rc ? rc : add_class_split(t, so_char_is_punct, SO_SPLIT_ISOLATED, path, err);
}

int so_json_pretok(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err) {
    static const struct {
        const char *type;
        int (*read)(so_tokenizer *t, const json_t *j, const char *path, so_err *err);
    } known[] = {
        {"ByteLevel", pretok_byte_level},
        {"Split", pretok_split},
        {"Metaspace", pretok_metaspace},
        {"Digits", pretok_digits},
        {"Punctuation", pretok_punctuation},
        {"Whitespace", pretok_whitespace},
        {"WhitespaceSplit", pretok_whitespace_split},
        {"CharDelimiterSplit", pretok_delimiter},
        {"BertPreTokenizer", pretok_bert},
    };
    so_str type;
    if (!j || json_is_null(j))
        return 0;
    int rc = so_json_get_str(j, path, "type", &type, err);
    if (rc)
        return rc;
    if (so_str_eq_c(type, "Sequence"))
        return each(t, j, path, "pretokenizers", depth, so_json_pretok, err);
    for (size_t i = 0; i < SO_LEN(known); i++)
        if (so_str_eq_c(type, known[i].type))
            return known[i].read(t, j, path, err);
    return unknown_type(path, type, err);
}

/* ---- decoder ---- */

static int decode_strip(so_tokenizer *t, so_decode_step *step, const json_t *j, const char *path,
                        so_err *err) {
    so_str c;
    uint32_t cp;
    json_int_t start = 0, stop = 0;
    int rc;
    if ((rc = so_json_get_str(j, path, "content", &c, err)) ||
        (rc = so_json_get_int(j, path, "start", 0, 1000, &start, err)) ||
        (rc = so_json_get_int(j, path, "stop", 0, 1000, &stop, err)))
        return rc;
    if (!so_vocab_single_char(c, &cp))
        return so_json_bad(path, "content", err, "must be one character");
    if (t->decoder.fused) {
        if (cp != ' ' || start > 1 || stop > 0)
            return so_err_set(
                err, SO_EUNSUPPORTED,
                "%s: stripping more than one leading space after Fuse is not supported", path);
        t->decoder.drops_space = start == 1;
        t->decoder.n_steps--;
        return 0;
    }
    memcpy(step->strip, c.ptr, c.len);
    step->strip_len = c.len;
    step->n_start = (int)start;
    step->n_stop = (int)stop;
    return 0;
}

static int decode_metaspace(so_tokenizer *t, so_decode_step *step, const json_t *j,
                            const char *path, so_err *err) {
    so_str rep;
    bool prepends, first_only;
    int rc;
    if ((rc = read_replacement(j, path, &rep, err)) ||
        (rc = read_scheme(j, path, &prepends, &first_only, err)))
        return rc;
    step->op.kind = SO_TEXT_REPLACE;
    so_text_op_set(&step->op, rep, SO_STR(" "));
    t->decoder.drops_space = t->decoder.drops_run = prepends;
    return 0;
}

static int add_decoder(so_tokenizer *t, so_str type, const json_t *j, const char *path,
                       so_err *err) {
    so_decoder *d = &t->decoder;
    if (d->n_steps == SO_TOKENIZER_MAX_OPS)
        return too_many(path, err);
    so_decode_step *step = &d->steps[d->n_steps++];
    *step = (so_decode_step){0};
    if (so_str_eq_c(type, "Strip")) {
        step->kind = SO_DECODE_STRIP;
        return decode_strip(t, step, j, path, err);
    }
    if (d->fused)
        return so_err_set(err, SO_EUNSUPPORTED, "%s: \"%.*s\" after Fuse is not supported", path,
                          SO_STR_ARG(type));
    if (so_str_eq_c(type, "ByteLevel"))
        return step->kind = SO_DECODE_BYTE_LEVEL, 0;
    if (so_str_eq_c(type, "ByteFallback"))
        return step->kind = SO_DECODE_BYTE_FALLBACK, 0;
    step->kind = SO_DECODE_REPLACE;
    if (so_str_eq_c(type, "Metaspace"))
        return decode_metaspace(t, step, j, path, err);
    step->op.kind = SO_TEXT_REPLACE;
    if (so_str_eq_c(type, "Replace"))
        return read_replace(j, path, &step->op, err);
    return unknown_type(path, type, err);
}

int so_json_decoder(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err) {
    so_str type;
    if (!j || json_is_null(j)) {
        t->decoder.joins = depth == 0;
        return 0;
    }
    int rc = so_json_get_str(j, path, "type", &type, err);
    if (rc)
        return rc;
    if (so_str_eq_c(type, "Sequence"))
        return each(t, j, path, "decoders", depth, so_json_decoder, err);
    if (so_str_eq_c(type, "Fuse"))
        return t->decoder.fused = true, 0;
    return add_decoder(t, type, j, path, err);
}

/* ---- post_processor ---- */

static int push_id(const so_tokenizer *t, const json_t *j, const char *path, const char *key,
                   so_tokens *out, so_err *err) {
    if (!json_is_integer(j) || json_integer_value(j) < 0 || json_integer_value(j) >= t->n_vocab)
        return so_json_bad(path, key, err, "must be the id of a token (0 to %d)", t->n_vocab - 1);
    so_tokens_push(out, (int32_t)json_integer_value(j));
    return 0;
}

/* The ids of a special token that a template names. */
static int push_special(const so_tokenizer *t, const json_t *j, const json_t *item,
                        const char *path, so_tokens *out, so_err *err) {
    so_str name;
    int rc = so_json_get_str(item, path, "id", &name, err);
    if (rc)
        return rc;
    const json_t *def = json_object_getn(json_object_get(j, "special_tokens"), name.ptr, name.len);
    const json_t *ids = json_object_get(def, "ids");
    if (!json_is_array(ids))
        return so_json_bad(path, "special_tokens", err, "has no ids for \"%.*s\"",
                           SO_STR_ARG(name));
    for (size_t i = 0; rc == 0 && i < json_array_size(ids); i++)
        rc = push_id(t, json_array_get(ids, i), path, "special_tokens ids", out, err);
    return rc;
}

static int read_template(so_tokenizer *t, const json_t *j, const char *path, so_tokens *before,
                         so_tokens *after, so_err *err) {
    const json_t *single = json_object_get(j, "single");
    bool seen = false;
    int rc = 0;
    if (!json_is_array(single))
        return so_json_bad(path, "single", err, "must be an array");
    for (size_t i = 0; rc == 0 && i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const json_t *special = json_object_get(item, "SpecialToken");
        if (special)
            rc = push_special(t, j, special, path, seen ? after : before, err);
        else if (json_object_get(item, "Sequence") && !seen)
            seen = true;
        else
            rc = so_json_bad(path, "single", err,
                             "item %zu is neither a special token nor the text", i);
    }
    if (rc == 0 && !seen)
        rc = so_json_bad(path, "single", err, "does not name the text");
    return rc;
}

/* BertProcessing and RobertaProcessing: ["[SEP]", 102] and ["[CLS]", 101]. */
static int read_cls_sep(so_tokenizer *t, const json_t *j, const char *path, so_tokens *before,
                        so_tokens *after, so_err *err) {
    int rc = push_id(t, json_array_get(json_object_get(j, "cls"), 1), path, "cls", before, err);
    return rc ? rc
              : push_id(t, json_array_get(json_object_get(j, "sep"), 1), path, "sep", after, err);
}

/* The tokens of a later processor go outside those of an earlier one. */
static void wrap(so_tokenizer *t, so_tokens *before, const so_tokens *after) {
    so_tokens_append(before, t->prefix.ids, t->prefix.len);
    so_tokens_free(&t->prefix);
    so_tokens_append(&t->prefix, before->ids, before->len);
    so_tokens_append(&t->suffix, after->ids, after->len);
}

int so_json_post(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err) {
    so_str type;
    if (!j || json_is_null(j))
        return 0;
    int rc = so_json_get_str(j, path, "type", &type, err);
    if (rc)
        return rc;
    if (so_str_eq_c(type, "Sequence"))
        return each(t, j, path, "processors", depth, so_json_post, err);
    if (so_str_eq_c(type, "ByteLevel"))
        return 0; /* changes offsets only */
    bool is_template = so_str_eq_c(type, "TemplateProcessing");
    if (!is_template && !so_str_eq_c(type, "BertProcessing") &&
        !so_str_eq_c(type, "RobertaProcessing"))
        return unknown_type(path, type, err);
    so_tokens before = {0}, after = {0};
    rc = is_template ? read_template(t, j, path, &before, &after, err)
                     : read_cls_sep(t, j, path, &before, &after, err);
    if (rc == 0)
        wrap(t, &before, &after);
    so_tokens_free(&before);
    so_tokens_free(&after);
    return rc;
}
