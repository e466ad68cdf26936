/* Parser and printer of the --spec language (grammar in spec.h).
 *
 * Recursive descent over at most 1023 bytes into a fixed array of nodes. Nothing is allocated, and
 * depth and number of nodes are limited, so a hostile request costs microseconds. Two tables hold
 * all names and options. The output is written only on success. Stateless; any thread. */
#include "draft/spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "draft/ahead.h"
#include "draft/shape.h"

enum { MAX_SHOWN = 80 }; /* bytes of a bad name in a message, so that the list still fits */
#define BIT(o) (1u << SO_SPEC_OPT_##o)

static const struct {
    const char *name;
    unsigned options;
    bool file;
    bool inner; /* may have an inner drafter */
    bool tree;  /* takes tree=FILE */
} NAMES[SO_SPEC_N_NAMES] = {
    [SO_SPEC_NONE] = {"none", 0, false, false},
    [SO_SPEC_NGRAM] = {"ngram", BIT(ORDER) | BIT(WINDOW) | BIT(DRAW), false, false},
    [SO_SPEC_LOOKUP] = {"lookup", BIT(MIN), false, false},
    [SO_SPEC_CORPUS] = {"corpus", BIT(MIN) | BIT(MB), false, false},
    [SO_SPEC_UNIGRAM] = {"unigram", BIT(DRAW), true, false},
    [SO_SPEC_BIGRAM] = {"bigram", BIT(DRAW), true, false},
    [SO_SPEC_PREDICT] = {"predict", 0, false, false},
    [SO_SPEC_RANDOM] = {"random", 0, false, false},
    [SO_SPEC_ORACLE] = {"oracle", BIT(NUMBER) | BIT(HIT), false, true},
    [SO_SPEC_MODEL] = {"model", BIT(K) | BIT(NODES) | BIT(BEST) | BIT(DISTINCT), true, true, true},
    [SO_SPEC_MEDUSA] = {"medusa", BIT(K) | BIT(NODES) | BIT(BEST), true, false, true},
    [SO_SPEC_BLOCKWISE] = {"blockwise", 0, true, false},
    [SO_SPEC_LOOKAHEAD] = {"lookahead", BIT(K) | BIT(NODES) | BIT(BEST) | BIT(ENDS), true, false,
                           true},
    [SO_SPEC_AUTO] = {"auto", 0, false, false},
    [SO_SPEC_ASYNC] = {"async", BIT(FAN) | BIT(WAIT), false, true},
};

static const struct {
    const char *name;
    double min, max;
    bool whole, flag;
} OPTIONS[SO_SPEC_N_OPTIONS] = {
    [SO_SPEC_OPT_NUMBER] = {"number", 0, 1, false, false},
    [SO_SPEC_OPT_ORDER] = {"order", 2, 4, true, false},
    [SO_SPEC_OPT_WINDOW] = {"window", 1, 1 << 22, true, false},
    [SO_SPEC_OPT_MIN] = {"min", 1, 64, true, false},
    [SO_SPEC_OPT_MB] = {"mb", 1, 65536, true, false},
    [SO_SPEC_OPT_DRAW] = {"draw", 0, 1, true, true},
    [SO_SPEC_OPT_K] = {"k", 1, SO_SAMPLE_TOP_MAX, true, false},
    [SO_SPEC_OPT_NODES] = {"nodes", 1, SO_TREE_MAX - 1, true, false},
    [SO_SPEC_OPT_BEST] = {"best", 0, 1, true, true},
    [SO_SPEC_OPT_DISTINCT] = {"distinct", 0, 1, true, true},
    [SO_SPEC_OPT_HIT] = {"hit", 0, 1, false, false},
    [SO_SPEC_OPT_FAN] = {"fan", 1, SO_AHEAD_OUTCOMES, true, false},
    [SO_SPEC_OPT_WAIT] = {"wait", 0, SO_AHEAD_DEPTH, true, false},
    [SO_SPEC_OPT_ENDS] = {"ends", 1, SO_ENDS_MAX, true, false},
    [SO_SPEC_OPT_FALLBACK] = {"fallback", 0, 1, true, false},
};

typedef struct parser {
    so_spec *s;
    int len, at;
    int depth;
    so_err *err;
    int rc;
} parser;

typedef struct word {
    int at, len;
    bool quoted;
} word;

const char *so_spec_name_text(so_spec_name name) {
    return name < SO_SPEC_N_NAMES ? NAMES[name].name : name == SO_SPEC_FIRST ? "," : "+";
}

so_str so_spec_file(const so_spec *s, const so_spec_node *n) {
    return (so_str){s->text + n->file_at, (size_t)n->file_len};
}

so_str so_spec_tree(const so_spec *s, const so_spec_node *n) {
    return (so_str){s->text + n->tree_at, (size_t)n->tree_len};
}

so_str so_spec_device(const so_spec *s, const so_spec_node *n) {
    return (so_str){s->text + n->device_at, (size_t)n->device_len};
}

so_str so_spec_worker(const so_spec *s, const so_spec_node *n) {
    return (so_str){s->text + n->worker_at, (size_t)n->worker_len};
}

int so_spec_read_tree(const so_spec *s, const so_spec_node *n, int *nodes, so_fixed_tree *out,
                      so_err *err) {
    if (n->tree_len == 0)
        return SO_OK;
    char *path = so_strndup(so_spec_tree(s, n).ptr, so_spec_tree(s, n).len);
    so_shape shape;
    int rc = so_shape_read(path, &shape, NULL, err);
    free(path);
    if (rc != SO_OK)
        return rc;
    out->n = *nodes = SO_MIN(*nodes, shape.n_nodes);
    for (int i = 0; i < out->n; i++) {
        out->parent[i] = shape.nodes[i].parent;
        out->rank[i] = shape.nodes[i].rank;
    }
    return SO_OK;
}

/* Errors: the first one is reported. */

static void fail_at(parser *p, int at, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void fail_at(parser *p, int at, const char *fmt, ...) {
    char msg[400];
    va_list ap;
    if (p->rc != 0)
        return;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    p->rc = so_err_set(p->err, SO_EINVAL, "--spec, column %d: %s", at + 1, msg);
}

static void known_names(char *out, size_t cap) {
    size_t n = 0;
    out[0] = '\0';
    for (int i = 0; i < SO_SPEC_N_NAMES && n < cap; i++)
        n += (size_t)snprintf(out + n, cap - n, "%s%s", i ? ", " : "", NAMES[i].name);
}

static void known_options(so_spec_name name, char *out, size_t cap) {
    size_t n = 0;
    out[0] = '\0';
    for (int o = 0; o < SO_SPEC_N_OPTIONS && n < cap; o++)
        if (NAMES[name].options >> o & 1)
            n += (size_t)snprintf(out + n, cap - n, " %s%s",
                                  o == SO_SPEC_OPT_NUMBER ? "a number" : OPTIONS[o].name,
                                  o == SO_SPEC_OPT_NUMBER || OPTIONS[o].flag ? "" : "=N");
    if (NAMES[name].tree && n < cap)
        n += (size_t)snprintf(out + n, cap - n, " tree=FILE");
    if (n == 0)
        snprintf(out, cap, " no options");
}

/* Tokens of the text. */

static void skip_spaces(parser *p) {
    while (p->at < p->len && (p->s->text[p->at] == ' ' || p->s->text[p->at] == '\t'))
        p->at++;
}

static bool accept(parser *p, char c) {
    skip_spaces(p);
    if (p->rc != 0 || p->at >= p->len || p->s->text[p->at] != c)
        return false;
    p->at++;
    return true;
}

static word quoted_word(parser *p) {
    word w = {p->at + 1, 0, true};
    for (p->at++; p->at < p->len && p->s->text[p->at] != '"'; p->at++)
        w.len++;
    if (p->at >= p->len)
        fail_at(p, w.at - 1, "a quote is not closed");
    else if (w.len == 0)
        fail_at(p, w.at - 1, "the name is empty");
    p->at++;
    return w;
}

static word next_word(parser *p) {
    skip_spaces(p);
    if (p->at < p->len && p->s->text[p->at] == '"')
        return quoted_word(p);
    word w = {p->at, 0, false};
    while (p->at < p->len && !strchr(" \t,()+=\"", p->s->text[p->at]))
        p->at++, w.len++;
    if (w.len == 0 && p->at < p->len)
        fail_at(p, w.at, "a name is missing before '%c'", p->s->text[p->at]);
    else if (w.len == 0)
        fail_at(p, w.at, "a name is missing at the end");
    return w;
}

static so_str word_str(const parser *p, word w) {
    return (so_str){p->s->text + w.at, (size_t)w.len};
}

static int find_name(so_str s) {
    for (int i = 0; i < SO_SPEC_N_NAMES; i++)
        if (so_str_eq_c(s, NAMES[i].name))
            return i;
    return -1;
}

static int find_option(so_str s) {
    for (int i = SO_SPEC_OPT_NUMBER + 1; i < SO_SPEC_N_OPTIONS; i++)
        if (i != SO_SPEC_OPT_FALLBACK && so_str_eq_c(s, OPTIONS[i].name))
            return i;
    return -1;
}

static bool to_number(so_str s, double *out) {
    char buf[32], *end;
    if (s.len == 0 || s.len >= sizeof buf || strspn(s.ptr, "0123456789.eE-") < s.len)
        return false;
    memcpy(buf, s.ptr, s.len);
    buf[s.len] = '\0';
    *out = strtod(buf, &end);
    return *end == '\0' && end != buf && isfinite(*out);
}

/* Nodes. */

static int new_node(parser *p, so_spec_name name, int at) {
    if (p->s->n_nodes == SO_SPEC_MAX_NODES) {
        fail_at(p, at, "more than %d drafters", SO_SPEC_MAX_NODES);
        return -1;
    }
    p->s->nodes[p->s->n_nodes] =
        (so_spec_node){.name = name, .first = -1, .next = -1, .fallback = -1, .column = at + 1};
    return p->s->n_nodes++;
}

static int parse_item(parser *p, word w);
static int parse_merge(parser *p, word w);

/* Appends a member; returns the new end of the list. */
static int append(parser *p, int *first, int last, int member) {
    if (member < 0)
        return last;
    if (last < 0)
        *first = member;
    else
        p->s->nodes[last].next = member;
    return member;
}

/* A list of one is its member; a longer list gets a node of its own. */
static int close_list(parser *p, so_spec_name name, int first, int at) {
    if (p->rc != 0 || first < 0 || p->s->nodes[first].next < 0)
        return p->rc != 0 ? -1 : first;
    int node = new_node(p, name, at);
    if (node >= 0)
        p->s->nodes[node].first = first;
    return node;
}

static void set_option(parser *p, so_spec_node *n, int o, double v, int at) {
    if (!(NAMES[n->name].options >> o & 1)) {
        char known[128];
        known_options(n->name, known, sizeof known);
        fail_at(p, at, "%s does not take %s; it takes%s", NAMES[n->name].name,
                o == SO_SPEC_OPT_NUMBER ? "a number" : OPTIONS[o].name, known);
    } else if (n->has >> o & 1) {
        fail_at(p, at, "%s is given twice", OPTIONS[o].name);
    } else if (!(v >= OPTIONS[o].min && v <= OPTIONS[o].max) ||
               (OPTIONS[o].whole && v != floor(v))) {
        fail_at(p, at, "%s of %s is %g; it must be %s %g to %g", OPTIONS[o].name,
                NAMES[n->name].name, v, OPTIONS[o].whole ? "a whole number from" : "from",
                OPTIONS[o].min, OPTIONS[o].max);
    } else {
        n->has |= 1u << o;
        n->opt[o] = v;
    }
}

static void parse_tree(parser *p, so_spec_node *n, word key) {
    word w = next_word(p);
    if (p->rc == 0 && n->tree_len > 0)
        fail_at(p, key.at, "%s takes one tree", NAMES[n->name].name);
    n->tree_at = w.at;
    n->tree_len = w.len;
}

static void parse_worker(parser *p, so_spec_node *n, word key) {
    word w = next_word(p);
    if (p->rc == 0 && n->worker_len > 0)
        fail_at(p, key.at, "async takes one worker");
    n->worker_at = w.at;
    n->worker_len = w.len;
}

static void parse_device(parser *p, so_spec_node *n, word key) {
    word w = next_word(p);
    so_str s = word_str(p, w);
    if (p->rc == 0 && n->device_len > 0)
        fail_at(p, key.at, "async takes one device");
    else if (p->rc == 0 && !so_str_eq_c(s, "cpu") && !so_str_eq_c(s, "cuda") &&
             !so_str_starts(s, SO_STR("cuda:")))
        fail_at(p, w.at, "device=%.*s: must be cpu, cuda or cuda:N", SO_STR_ARG(s));
    n->device_at = w.at;
    n->device_len = w.len;
}

static void parse_option(parser *p, so_spec_node *n, word key) {
    int o = find_option(word_str(p, key));
    double v = 0;
    if (NAMES[n->name].tree && so_str_eq_c(word_str(p, key), "tree")) {
        parse_tree(p, n, key);
        return;
    }
    if (n->name == SO_SPEC_ASYNC && so_str_eq_c(word_str(p, key), "worker")) {
        parse_worker(p, n, key);
        return;
    }
    if (n->name == SO_SPEC_ASYNC && so_str_eq_c(word_str(p, key), "device")) {
        parse_device(p, n, key);
        return;
    }
    if (o < 0) {
        char known[128];
        known_options(n->name, known, sizeof known);
        fail_at(p, key.at, "unknown option \"%.*s\" of %s; it takes%s",
                SO_STR_ARG(word_str(p, key)), NAMES[n->name].name, known);
        return;
    }
    word w = next_word(p);
    if (p->rc == 0 && !to_number(word_str(p, w), &v))
        fail_at(p, w.at, "%s is \"%.*s\", not a number", OPTIONS[o].name,
                SO_STR_ARG(word_str(p, w)));
    set_option(p, n, o, v, key.at);
}

static void set_file(parser *p, so_spec_node *n, word w) {
    if (!NAMES[n->name].file) {
        char known[128];
        known_options(n->name, known, sizeof known);
        fail_at(p, w.at, "%s does not take \"%.*s\"; it takes%s", NAMES[n->name].name,
                SO_STR_ARG(word_str(p, w)), known);
    } else if (n->file_len > 0) {
        fail_at(p, w.at, "%s takes one file", NAMES[n->name].name);
    } else {
        n->file_at = w.at;
        n->file_len = w.len;
    }
}

/* Parses the fallbacks of an async, which are its last arguments. */
static void parse_fallback(parser *p, int node) {
    so_spec_node *n = &p->s->nodes[node];
    int last = -1;
    n->has |= BIT(FALLBACK);
    n->opt[SO_SPEC_OPT_FALLBACK] = 0;
    do {
        word w = next_word(p);
        if (p->rc != 0)
            return;
        if (!w.quoted && so_str_eq_c(word_str(p, w), "sync"))
            n->opt[SO_SPEC_OPT_FALLBACK] = 1;
        else if (w.quoted || !so_str_eq_c(word_str(p, w), "none"))
            last = append(p, &n->fallback, last, parse_merge(p, w));
    } while (accept(p, ','));
}

/* Parses one argument of `node`; a drafter is appended to the list of inner drafters. */
static int parse_arg(parser *p, int node, int *first, int last) {
    so_spec_node *n = &p->s->nodes[node]; /* the array never moves */
    word w = next_word(p);
    so_str s = word_str(p, w);
    double v;
    if (p->rc != 0)
        return last;
    if (!w.quoted && accept(p, '=')) {
        if (n->name == SO_SPEC_ASYNC && so_str_eq_c(s, "fallback"))
            parse_fallback(p, node);
        else
            parse_option(p, n, w);
    } else if (!w.quoted && to_number(s, &v)) {
        set_option(p, n, SO_SPEC_OPT_NUMBER, v, w.at);
    } else if (!w.quoted && find_name(s) >= 0 && NAMES[n->name].inner) {
        return append(p, first, last, parse_merge(p, w));
    } else if (!w.quoted && find_option(s) >= 0 && OPTIONS[find_option(s)].flag) {
        set_option(p, n, find_option(s), 1, w.at);
    } else {
        set_file(p, n, w);
    }
    return last;
}

static void parse_args(parser *p, int node) {
    int first = -1, last = -1, at = p->at;
    if (++p->depth > SO_SPEC_MAX_DEPTH)
        fail_at(p, at, "nested deeper than %d", SO_SPEC_MAX_DEPTH);
    while (p->rc == 0) {
        last = parse_arg(p, node, &first, last);
        if (!accept(p, ','))
            break;
    }
    if (p->rc == 0 && !accept(p, ')')) {
        if (p->at < p->len)
            fail_at(p, p->at, "',' or ')' is missing before '%c'", p->s->text[p->at]);
        else
            fail_at(p, p->at, "')' is missing at the end");
    }
    p->depth--;
    p->s->nodes[node].first = close_list(p, SO_SPEC_FIRST, first, at);
}

/* Whether a drafter needs neither other requests nor the target's latest hidden states. */
static bool is_independent(const so_spec *s, int node) {
    so_spec_name name = s->nodes[node].name;
    bool ok = name != SO_SPEC_CORPUS && !(name >= SO_SPEC_MEDUSA && name <= SO_SPEC_LOOKAHEAD);
    for (int i = s->nodes[node].first; i >= 0 && ok; i = s->nodes[i].next)
        ok = is_independent(s, i);
    return ok;
}

/* The worker has a draft model of its own, and drafts ahead only. */
static void check_remote(parser *p, const so_spec_node *n) {
    const so_spec_node *x = &p->s->nodes[n->first];
    if (x->name != SO_SPEC_MODEL || x->has || x->first >= 0 || x->tree_len > 0)
        fail_at(p, x->column - 1,
                "a worker runs `model`, without options: write async(model,worker=ADDRESS), or "
                "model(FILE) to require that the worker's draft is FILE");
    if (n->device_len > 0)
        fail_at(p, n->column - 1, "a worker has hardware of its own: without device=");
    if (so_spec_flag(n, SO_SPEC_OPT_FALLBACK))
        fail_at(p, n->column - 1,
                "a worker does not draft while the model waits: without sync in fallback=");
}

static void check_async(parser *p, const so_spec_node *n) {
    if (n->first < 0)
        fail_at(p, n->column - 1, "async needs the drafter that it runs, as in async(model)");
    else if (p->s->nodes[n->first].name >= SO_SPEC_N_NAMES || !is_independent(p->s, n->first))
        fail_at(p, p->s->nodes[n->first].column - 1,
                "async runs one drafter, and not corpus, which other requests write to, nor heads, "
                "which read the pass that is running: write the others after it, as in "
                "async(model),lookup");
    if (p->rc == 0 && n->worker_len > 0)
        check_remote(p, n);
}

static void check_item(parser *p, const so_spec_node *n) {
    if (n->name == SO_SPEC_ASYNC)
        check_async(p, n);
    if (n->name == SO_SPEC_ORACLE && !so_spec_has(n, SO_SPEC_OPT_NUMBER))
        fail_at(p, n->column - 1, "oracle needs its rate, as in oracle(0.8)");
    if (n->name == SO_SPEC_ORACLE && n->first >= 0 && p->s->nodes[n->first].name != SO_SPEC_MODEL)
        fail_at(p, p->s->nodes[n->first].column - 1,
                "the inner drafter of oracle is run for its cost and must be one model, as in "
                "oracle(0.8,model)");
    if (so_spec_has(n, SO_SPEC_OPT_HIT) && n->first < 0)
        fail_at(p, n->column - 1,
                "hit simulates drafting ahead with a model, as in "
                "async(oracle(0.8,hit=0.7,model),fan=8)");
    bool k = so_spec_has(n, SO_SPEC_OPT_K), best = so_spec_flag(n, SO_SPEC_OPT_BEST);
    bool tree = k || best || n->tree_len > 0;
    if (n->tree_len > 0 && (k || best))
        fail_at(p, n->column - 1, "tree=FILE has its own shape: without %s", k ? "k" : "best");
    if (so_spec_has(n, SO_SPEC_OPT_NODES) && !tree && n->name == SO_SPEC_MODEL)
        fail_at(p, n->column - 1,
                "nodes needs a tree: give k=N, best or tree=FILE, as in model(k=4,nodes=16)");
    if (so_spec_flag(n, SO_SPEC_OPT_DISTINCT) && !k)
        fail_at(p, n->column - 1, "distinct needs k, as in model(k=4,distinct)");
    if (tree && n->first >= 0)
        fail_at(p, n->column - 1, "a draft model with an inner drafter makes chains: without %s",
                k      ? "k"
                : best ? "best"
                       : "tree");
}

static int parse_item(parser *p, word w) {
    int name = w.quoted ? -1 : find_name(word_str(p, w));
    if (name < 0) {
        char known[256];
        so_str shown = word_str(p, w);
        shown.len = SO_MIN(shown.len, (size_t)MAX_SHOWN);
        known_names(known, sizeof known);
        fail_at(p, w.at, "unknown drafter \"%.*s\": must be one of %s", SO_STR_ARG(shown), known);
        return -1;
    }
    int node = new_node(p, (so_spec_name)name, w.at);
    if (node >= 0 && accept(p, '('))
        parse_args(p, node);
    if (p->rc == 0)
        check_item(p, &p->s->nodes[node]);
    return p->rc == 0 ? node : -1;
}

static int parse_merge(parser *p, word w) {
    int first = -1, last = -1, at = w.at;
    for (;;) {
        last = append(p, &first, last, parse_item(p, w));
        if (!accept(p, '+'))
            break;
        w = next_word(p);
        if (p->rc != 0)
            break;
    }
    return close_list(p, SO_SPEC_MERGE, first, at);
}

static int parse_spec(parser *p) {
    int first = -1, last = -1;
    do {
        word w = next_word(p);
        if (p->rc != 0)
            return -1;
        last = append(p, &first, last, parse_merge(p, w));
    } while (accept(p, ','));
    skip_spaces(p);
    if (p->rc == 0 && p->at < p->len)
        fail_at(p, p->at, "'%c' is not expected here", p->s->text[p->at]);
    return close_list(p, SO_SPEC_FIRST, first, 0);
}

/* Whether a node is an alternative of the whole spec. */
static bool is_alternative(const so_spec *s, int node) {
    if (s->root == node)
        return true;
    for (int i = s->root >= 0 && s->nodes[s->root].name == SO_SPEC_FIRST ? s->nodes[s->root].first
                                                                         : -1;
         i >= 0; i = s->nodes[i].next)
        if (i == node)
            return true;
    return false;
}

/* none and auto cannot be combined with other drafters, async not merged or put into others. */
static void check_whole_specs(parser *p) {
    for (int i = 0; i < p->s->n_nodes && p->rc == 0; i++)
        if (p->s->nodes[i].name == SO_SPEC_ASYNC && !is_alternative(p->s, i))
            fail_at(p, p->s->nodes[i].column - 1,
                    "async must be an alternative of its own, as in async(model),lookup");
    for (int i = 0; i < p->s->n_nodes; i++) {
        const so_spec_node *n = &p->s->nodes[i];
        if ((n->name == SO_SPEC_NONE || n->name == SO_SPEC_AUTO) && p->s->n_nodes > 1)
            fail_at(p, n->column - 1, "%s cannot be combined with other drafters",
                    NAMES[n->name].name);
    }
}

int so_spec_parse(so_str text, so_spec *out, so_err *err) {
    so_spec s = {.root = -1};
    parser p = {.s = &s, .len = (int)SO_MIN(text.len, (size_t)SO_SPEC_MAX_TEXT), .err = err};
    if (text.len > SO_SPEC_MAX_TEXT)
        return so_err_set(err, SO_EINVAL, "--spec has %zu bytes; at most %d", text.len,
                          SO_SPEC_MAX_TEXT);
    if (text.len > 0)
        memcpy(s.text, text.ptr, text.len);
    if (memchr(s.text, '\0', text.len))
        return so_err_set(err, SO_EINVAL, "--spec contains a zero byte");
    s.root = parse_spec(&p);
    check_whole_specs(&p);
    if (p.rc == 0)
        *out = s;
    return p.rc;
}

/* Printing. */

static void print_node(const so_spec *s, int node, so_buf *out);

static void print_list(const so_spec *s, int first, const char *sep, so_buf *out) {
    for (int i = first; i >= 0; i = s->nodes[i].next) {
        if (i != first)
            so_buf_append_c(out, sep);
        print_node(s, i, out);
    }
}

static void print_file(so_str file, so_buf *out) {
    double v;
    bool plain = find_name(file) < 0 && find_option(file) < 0 && !to_number(file, &v) &&
                 !so_str_eq_c(file, "tree") && !so_str_eq_c(file, "worker") &&
                 !so_str_eq_c(file, "device");
    for (size_t i = 0; i < file.len; i++)
        plain = plain && !strchr(" \t,()+=\"", file.ptr[i]);
    so_buf_append_c(out, plain ? "" : "\"");
    so_buf_append_str(out, file);
    so_buf_append_c(out, plain ? "" : "\"");
}

static void print_fallback(const so_spec *s, const so_spec_node *n, so_buf *out) {
    bool sync = n->opt[SO_SPEC_OPT_FALLBACK] != 0;
    so_buf_append_c(out, "fallback=");
    print_list(s, n->fallback, ",", out);
    so_buf_append_c(out, sync              ? (n->fallback >= 0 ? ",sync" : "sync")
                         : n->fallback < 0 ? "none"
                                           : "");
}

static void print_args(const so_spec *s, const so_spec_node *n, so_buf *out) {
    const char *sep = "(";
    if (n->file_len > 0) {
        so_buf_append_c(out, sep);
        print_file(so_spec_file(s, n), out);
        sep = ",";
    }
    for (int o = 0; o < SO_SPEC_N_OPTIONS; o++) {
        if (!(n->has >> o & 1) || o == SO_SPEC_OPT_FALLBACK)
            continue;
        so_buf_append_c(out, sep);
        if (o != SO_SPEC_OPT_NUMBER)
            so_buf_printf(out, "%s=", OPTIONS[o].name);
        so_buf_printf(out, "%.15g", n->opt[o]);
        sep = ",";
    }
    if (n->tree_len > 0) {
        so_buf_printf(out, "%stree=", sep);
        print_file(so_spec_tree(s, n), out);
        sep = ",";
    }
    if (n->first >= 0) {
        so_buf_append_c(out, sep);
        print_node(s, n->first, out);
        sep = ",";
    }
    if (n->device_len > 0) {
        so_buf_printf(out, "%sdevice=", sep);
        so_buf_append_str(out, so_spec_device(s, n));
        sep = ",";
    }
    if (n->worker_len > 0) {
        so_buf_printf(out, "%sworker=", sep);
        print_file(so_spec_worker(s, n), out);
        sep = ",";
    }
    if (so_spec_has(n, SO_SPEC_OPT_FALLBACK)) {
        so_buf_append_c(out, sep);
        print_fallback(s, n, out);
    }
    if (*sep == ',')
        so_buf_append_c(out, ")");
}

static void print_node(const so_spec *s, int node, so_buf *out) {
    const so_spec_node *n = &s->nodes[node];
    if (n->name >= SO_SPEC_N_NAMES) {
        print_list(s, n->first, n->name == SO_SPEC_FIRST ? "," : "+", out);
        return;
    }
    so_buf_append_c(out, NAMES[n->name].name);
    print_args(s, n, out);
}

static bool is_within(const so_spec *s, int node, const so_spec_node *n) {
    for (int i = node; i >= 0; i = s->nodes[i].next)
        if (&s->nodes[i] == n || is_within(s, s->nodes[i].first, n))
            return true;
    return false;
}

const so_spec_node *so_spec_async_of(const so_spec *s, const so_spec_node *n) {
    for (int i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].name == SO_SPEC_ASYNC && is_within(s, s->nodes[i].first, n))
            return &s->nodes[i];
    return NULL;
}

bool so_spec_is_async(const so_spec *s, const so_spec_node *n) {
    return so_spec_async_of(s, n) != NULL;
}

bool so_spec_is_remote(const so_spec *s, const so_spec_node *n) {
    for (int i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].name == SO_SPEC_ASYNC && s->nodes[i].worker_len > 0 &&
            is_within(s, s->nodes[i].first, n))
            return true;
    return false;
}

void so_spec_print(const so_spec *s, so_buf *out) { print_node(s, s->root, out); }
