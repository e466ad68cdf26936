/* From a parsed spec to drafters: creation, numbering and ownership.
 *
 * Drafters of this folder are created here; those that need a model or a registry come from the
 * engine's hook, which gets the parsed node and the finished inner drafter. On failure everything
 * created so far is freed, and the message names the drafter and its column. */
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"
#include "draft/registry.h"
#include "draft/spec.h"
#include "format/checkpoint.h"

enum { DEFAULT_CORPUS_MB = 64 };

typedef struct build {
    const so_spec *spec;
    const so_draft_config *cfg;
    so_draft_set *set;
    so_err *err;
} build;

static int make_node(build *b, int node, so_drafter **out);

static double option(const so_spec_node *n, so_spec_option o, double unset) {
    return so_spec_has(n, o) ? n->opt[o] : unset;
}

static int make_table(build *b, const so_spec_node *n, so_drafter **out) {
    so_str file = so_spec_file(b->spec, n);
    char *path = so_strndup(file.ptr, file.len);
    so_table *t = NULL;
    int rc = so_table_load(path, b->cfg->n_vocab, b->cfg->tokenizer_hash, &t, b->err);
    int want = n->name == SO_SPEC_UNIGRAM ? 1 : 2;
    if (rc == 0 && t->order != want) {
        rc = so_err_set(b->err, SO_EMISMATCH, "%s: this is a %s table", path,
                        want == 1 ? "bigram" : "unigram");
        so_table_free(t);
    }
    free(path);
    if (rc == 0)
        *out = so_table_drafter_create(t, so_spec_flag(n, SO_SPEC_OPT_DRAW));
    return rc;
}

static int make_corpus(build *b, const so_spec_node *n, so_drafter **out) {
    so_corpus **store = b->cfg->corpus;
    if (!store)
        return so_err_set(b->err, SO_EUNSUPPORTED,
                          "needs the texts of finished requests, which this engine does not keep");
    size_t bytes = (size_t)option(n, SO_SPEC_OPT_MB, DEFAULT_CORPUS_MB) << 20;
    size_t has = *store ? so_corpus_bytes(*store) : 0; /* slightly less than requested */
    if (*store && so_spec_has(n, SO_SPEC_OPT_MB) && (has > bytes || has < bytes / 8 * 7))
        so_log(SO_LOG_WARN,
               "corpus(mb=%zu): mb is ignored, because the corpus of all requests already has %zu "
               "MB",
               bytes >> 20, has >> 20);
    int rc = *store ? 0 : so_corpus_create(bytes, store, b->err);
    if (rc == 0)
        *out = so_corpus_drafter_create(*store, (int)option(n, SO_SPEC_OPT_MIN, 0));
    return rc;
}

static so_drafter *make_ngram(const so_spec_node *n) {
    return so_ngram_create(&(so_ngram_params){
        .max_order = (int)option(n, SO_SPEC_OPT_ORDER, 0),
        .window = (int)option(n, SO_SPEC_OPT_WINDOW, 0),
        .draw = so_spec_flag(n, SO_SPEC_OPT_DRAW),
    });
}

static int make_oracle(build *b, const so_spec_node *n, so_drafter **out) {
    so_drafter *model = NULL;
    int rc = n->first >= 0 ? make_node(b, n->first, &model) : 0;
    if (rc == 0)
        *out = so_oracle_create(n->opt[SO_SPEC_OPT_NUMBER],
                                so_spec_has(n, SO_SPEC_OPT_HIT) ? n->opt[SO_SPEC_OPT_HIT] : -1,
                                model, b->cfg->n_vocab);
    return rc;
}

/* What a drafter lacks if there is no hook. */
static const char *needs(so_spec_name name) {
    if (name == SO_SPEC_MEDUSA || name == SO_SPEC_BLOCKWISE || name == SO_SPEC_LOOKAHEAD)
        return "heads of the target: name their file in parentheses";
    return name == SO_SPEC_MODEL ? "a draft model: give --draft-model FILE or model(FILE)"
                                 : "a counted table: name its file in parentheses";
}

static int make_by_hook(build *b, const so_spec_node *n, so_drafter **out) {
    so_drafter *inner = NULL;
    int rc = n->first >= 0 ? make_node(b, n->first, &inner) : 0;
    if (rc != 0)
        return rc;
    rc = b->cfg->make ? b->cfg->make(b->cfg->user, b->spec, n, inner, out, b->err)
                      : so_err_set(b->err, SO_EUNSUPPORTED, "needs %s", needs(n->name));
    if (rc != 0)
        so_drafter_free(inner);
    return rc;
}

/* A leaf gets its number when it is complete, so that an inner drafter precedes its outer one. */
static int add_leaf(build *b, so_drafter *d) {
    d->index = b->set->n_leaves;
    b->set->leaves[b->set->n_leaves++] = d;
    return 0;
}

/* `auto`: the free drafters that need no file, then the registered draft model if there is one. */
static int make_auto(build *b, const so_spec_node *n, so_drafter **out) {
    so_drafter *members[3] = {NULL};
    int rc = b->cfg->make ? b->cfg->make(b->cfg->user, b->spec, n, NULL, &members[2], b->err)
                          : SO_ENOTFOUND;
    if (rc != 0 && rc != SO_ENOTFOUND)
        return rc;
    members[0] = so_lookup_create(NULL);
    members[1] = so_ngram_create(NULL);
    int count = rc == 0 ? 3 : 2;
    for (int i = 0; i < count; i++)
        add_leaf(b, members[i]);
    *out = so_group_create(members, count, true);
    return 0;
}

static int make_leaf(build *b, const so_spec_node *n, so_drafter **out) {
    switch (n->name) {
    case SO_SPEC_NONE:
        *out = so_none_create();
        return 0;
    case SO_SPEC_NGRAM:
        *out = make_ngram(n);
        return 0;
    case SO_SPEC_LOOKUP:
        *out = so_lookup_create(&(so_lookup_params){.min_len = (int)option(n, SO_SPEC_OPT_MIN, 0)});
        return 0;
    case SO_SPEC_CORPUS:
        return make_corpus(b, n, out);
    case SO_SPEC_PREDICT:
        *out = so_predict_create();
        return 0;
    case SO_SPEC_RANDOM:
        *out = so_random_create();
        return 0;
    case SO_SPEC_ORACLE:
        return make_oracle(b, n, out);
    case SO_SPEC_UNIGRAM:
    case SO_SPEC_BIGRAM:
        return n->file_len > 0 ? make_table(b, n, out) : make_by_hook(b, n, out);
    default:
        return make_by_hook(b, n, out);
    }
}

/* Puts the place in the spec, and the file it names, in front of the message. If a draft model or
 * heads that the spec does not name (they came from -md or the registry) do not fit the target, the
 * message stays as it is: the spec is not at fault. */
static int locate_error(build *b, const so_spec_node *n, int rc) {
    so_str file = so_spec_file(b->spec, n);
    bool model =
        n->name == SO_SPEC_AUTO || (n->name >= SO_SPEC_MODEL && n->name <= SO_SPEC_LOOKAHEAD);
    bool has_file = b->err && so_str_starts(so_str_c(b->err->msg), file);
    if (model && rc == SO_EMISMATCH && file.len == 0)
        return rc;
    if (rc == SO_EMISMATCH && file.len > 0 && !has_file)
        so_err_prefix(b->err, "%.*s", SO_STR_ARG(file));
    so_err_prefix(b->err, "--spec, column %d: %s", n->column, so_spec_name_text(n->name));
    return rc;
}

static bool has_sync(const so_spec_node *n) {
    if (n->worker_len > 0)
        return false;
    return !so_spec_has(n, SO_SPEC_OPT_FALLBACK) || n->opt[SO_SPEC_OPT_FALLBACK] != 0;
}

/* The id of the draft that a worker must have; 0: any. */
static int read_draft_id(build *b, const so_spec_node *model, uint64_t *id) {
    so_str file = so_spec_file(b->spec, model);
    so_checkpoint *ck = NULL;
    if (file.len == 0)
        return 0;
    char *path = so_strndup(file.ptr, file.len);
    int rc = so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, b->err);
    free(path);
    if (rc == 0)
        *id = so_registry_id(ck);
    so_checkpoint_close(ck);
    return rc;
}

static int make_remote(build *b, const so_spec_node *n, so_drafter **out) {
    uint64_t id = 0;
    if (!b->cfg->remote)
        return so_err_set(b->err, SO_EUNSUPPORTED, "needs an engine");
    int rc = read_draft_id(b, &b->spec->nodes[n->first], &id);
    if (rc == 0)
        rc = so_remote_create(b->cfg->remote, so_spec_worker(b->spec, n), id, out, b->err);
    if (rc == 0)
        add_leaf(b, *out);
    return rc;
}

/* The drafters that serve an async(X): the cache, the fallbacks, and X in the engine's time. X has the
 * number that it got as a leaf; if it drafts in the engine's time, under this number. */
static int make_async(build *b, const so_spec_node *n, so_drafter **out, int *count) {
    so_drafter *inner = NULL, *sync = NULL;
    bool remote = n->worker_len > 0;
    so_async_host **host = remote ? b->cfg->remote_host : b->cfg->host;
    int at = *count, rc = remote ? make_remote(b, n, &inner) : make_node(b, n->first, &inner);
    if (rc == 0 && !host)
        rc = so_err_set(b->err, SO_EUNSUPPORTED,
                        "needs an engine: it drafts in a thread of its own");
    if (rc == 0 && !*host)
        rc = so_async_host_create(b->cfg->faults, host, b->err);
    if (rc != 0) {
        so_drafter_free(inner);
        return locate_error(b, n, rc);
    }
    so_async_opts o = {.inner = inner,
                       .n_vocab = b->cfg->n_vocab,
                       .n_parallel = SO_MAX(b->cfg->n_parallel, 1),
                       .d_hidden = inner->wants_target_hidden ? b->cfg->d_model : 0,
                       .fan_out = (int)option(n, SO_SPEC_OPT_FAN, 0),
                       .wait = (int)option(n, SO_SPEC_OPT_WAIT, 0),
                       .sync = has_sync(n),
                       .remote = remote};
    so_async_create(*host, &o, &out[at++], &sync);
    add_leaf(b, out[at - 1]);
    so_async_set_index(out[at - 1], sync, inner->index);
    if (sync)
        b->set->leaves[inner->index] = sync;
    for (int i = n->fallback; i >= 0 && rc == 0; i = b->spec->nodes[i].next) {
        if (at + 1 >= SO_GROUP_MAX)
            rc = so_err_set(b->err, SO_ELIMIT, "more than %d drafters in one list", SO_GROUP_MAX);
        else if ((rc = make_node(b, i, &out[at])) == 0)
            at++;
    }
    if (sync)
        out[at++] = sync;
    *count = at;
    return rc;
}

static int make_group(build *b, const so_spec_node *n, so_drafter **out) {
    so_drafter *members[SO_SPEC_MAX_NODES];
    int count = 0, rc = 0;
    int first = n->name == SO_SPEC_ASYNC ? (int)(n - b->spec->nodes) : n->first;
    for (int i = first; i >= 0 && rc == 0; i = b->spec->nodes[i].next) {
        if (count + 2 > SO_GROUP_MAX)
            rc = so_err_set(b->err, SO_ELIMIT, "more than %d drafters in one list",
                            SO_GROUP_MAX - 1);
        else if (b->spec->nodes[i].name == SO_SPEC_ASYNC)
            rc = make_async(b, &b->spec->nodes[i], members, &count);
        else if ((rc = make_node(b, i, &members[count])) == 0)
            count++;
    }
    if (rc != 0) {
        while (--count >= 0)
            so_drafter_free(members[count]);
        return rc;
    }
    *out = so_group_create(members, count, n->name != SO_SPEC_MERGE);
    return 0;
}

static int make_node(build *b, int node, so_drafter **out) {
    const so_spec_node *n = &b->spec->nodes[node];
    if (n->name >= SO_SPEC_N_NAMES || n->name == SO_SPEC_ASYNC)
        return make_group(b, n, out);
    int rc = n->name == SO_SPEC_AUTO ? make_auto(b, n, out) : make_leaf(b, n, out);
    if (rc == 0)
        return n->name == SO_SPEC_AUTO ? 0 : add_leaf(b, *out);
    return locate_error(b, n, rc);
}

static void list_members(so_draft_set *set, so_drafter *d, int alternative, int outer) {
    bool merged = so_group_is(d);
    for (int i = 0; i < so_group_size(d); i++)
        set->stages[set->n_stages++] = (so_draft_stage){
            .drafter = merged ? so_group_member(d, i) : d,
            .alternative = alternative,
            .outer = outer,
            .inner = merged ? i : -1,
        };
}

void so_draft_set_list_stages(so_draft_set *set) {
    set->n_stages = 0;
    if (!so_group_is_first(set->root)) {
        list_members(set, set->root, 0, -1);
        return;
    }
    for (int i = 0; i < so_group_size(set->root); i++)
        list_members(set, so_group_member(set->root, i), i, i);
}

void *so_draft_set_state(const so_draft_set *set, void *state, int stage) {
    const so_draft_stage *g = &set->stages[stage];
    const so_drafter *d = set->root;
    if (g->outer >= 0) {
        state = so_group_member_state(d, state, g->outer);
        d = so_group_member(d, g->outer);
    }
    return g->inner >= 0 ? so_group_member_state(d, state, g->inner) : state;
}

int so_spec_build(const so_spec *s, const so_draft_config *cfg, so_draft_set *out, so_err *err) {
    so_draft_set set = {0};
    build b = {s, cfg, &set, err};
    int rc = make_node(&b, s->root, &set.root);
    if (rc != 0)
        return rc;
    so_draft_set_list_stages(&set);
    *out = set;
    return 0;
}

void so_draft_set_deinit(so_draft_set *set) {
    so_drafter_free(set->root);
    *set = (so_draft_set){0};
}
