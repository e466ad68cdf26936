/* The drafters that requests name: one set per spec, created once and shared by its requests.
 *
 * Owns the sets, the draft models opened for `model(FILE)`, and the corpus of finished texts. If
 * there are too many sets, one without requests is freed; the planner keeps its records. Does not
 * call drafters (speculate.c does). Engine thread. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "draft/heads.h"
#include "draft/model.h"
#include "draft/registry.h"
#include "engine/drafters.h"

enum { MAX_SETS = 32, MAX_BUNDLES = 8, MAX_HEADS = 8 };

/* Heads opened for one file. */
typedef struct open_heads {
    char *path;
    so_checkpoint *ck;
    so_heads *h;
} open_heads;

struct so_drafters {
    so_engine *e;
    so_planner *planner;
    so_spec_set *sets;
    so_corpus *corpus;
    so_async_host *host;        /* of async(); NULL: not named yet */
    so_async_host *remote_host; /* of async() with a worker: it runs on no backend */
    so_remote_engine remote;
    so_bundle bundles[MAX_BUNDLES];  /* opened for model(FILE) */
    char *bundle_paths[MAX_BUNDLES]; /* the names in the spec */
    int n_bundles;
    open_heads heads[MAX_HEADS];
    int n_heads;
};

so_drafters *so_drafters_create(so_engine *e, so_planner *planner) {
    so_drafters *d = SO_NEW(so_drafters);
    d->e = e;
    d->planner = planner;
    d->remote = (so_remote_engine){.key_file = e->o.worker_key,
                                   .tok = e->tok,
                                   .n_vocab = so_model_hparams(e->m)->n_vocab,
                                   .d_model = so_model_hparams(e->m)->d_model,
                                   .n_ctx = e->o.n_ctx,
                                   .n_parallel = e->o.n_parallel,
                                   .max_draft = e->o.max_draft,
                                   .encoder = so_model_hparams(e->m)->n_enc_layers > 0};
    return d;
}

so_async_counts so_drafters_async(const so_drafters *d) {
    so_async_counts sum = {0};
    if (d->host)
        so_async_counts_add(&sum, so_async_totals(d->host));
    if (d->remote_host)
        so_async_counts_add(&sum, so_async_totals(d->remote_host));
    return sum;
}

bool so_drafters_has_async_thread(const so_drafters *d) { return d->host != NULL; }

void so_drafters_lock(so_drafters *d) {
    if (d->host)
        so_async_lock(d->host);
}

void so_drafters_unlock(so_drafters *d) {
    if (d->host)
        so_async_unlock(d->host);
}

/* Drafters free what they have on their backend, which the async thread may be using for another set. */
static void free_set(so_drafters *d, so_spec_set *set) {
    so_plan_set_free(set->plan);
    so_drafters_lock(d);
    so_draft_set_deinit(&set->drafters);
    so_drafters_unlock(d);
    free(set->text);
    free(set->requests);
    free(set->asks);
    free(set->jobs);
    free(set);
}

static void close_heads(open_heads *o) {
    so_heads_free(o->h);
    so_checkpoint_close(o->ck);
    free(o->path);
    *o = (open_heads){0};
}

void so_drafters_free(so_drafters *d) {
    if (!d)
        return;
    for (so_spec_set *s = d->sets, *next; s; s = next) {
        next = s->next;
        free_set(d, s);
    }
    so_async_host_free(d->host);
    so_async_host_free(d->remote_host);
    so_corpus_free(d->corpus);
    for (int i = 0; i < d->n_bundles; i++) {
        so_bundle_close(&d->bundles[i]);
        free(d->bundle_paths[i]);
    }
    for (int i = 0; i < d->n_heads; i++)
        close_heads(&d->heads[i]);
    free(d);
}

so_spec_set *so_drafters_sets(const so_drafters *d) { return d->sets; }

/* --- draft models --- */

/* Opens each file once, even if several specs name it: models are large, and drafters only read
 * them. */
static int open_draft_file(so_drafters *d, so_str file, const so_bundle **out, so_err *err) {
    so_bundle_opts o;
    so_bundle_defaults(&o);
    o.backend = d->e->o.draft_backend ? d->e->o.draft_backend : so_model_backend(d->e->m);
    o.draft = true;
    for (int i = 0; i < d->n_bundles; i++)
        if (so_str_eq_c(file, d->bundle_paths[i])) {
            *out = &d->bundles[i];
            return SO_OK;
        }
    char *path = so_strndup(file.ptr, file.len);
    int rc = d->n_bundles < MAX_BUNDLES
                 ? so_bundle_open(path, &o, &d->bundles[d->n_bundles], err)
                 : so_err_set(err, SO_ELIMIT, "more than %d draft models: name fewer files",
                              MAX_BUNDLES);
    if (rc != SO_OK) {
        free(path);
        return rc;
    }
    d->bundle_paths[d->n_bundles] = path;
    *out = &d->bundles[d->n_bundles++];
    return SO_OK;
}

static int check_draft(const so_engine *e, const so_model *draft, const so_tokenizer *tok,
                       so_err *err) {
    int a = so_model_hparams(e->m)->n_vocab, b = so_model_hparams(draft)->n_vocab;
    int ctx = so_model_hparams(draft)->n_ctx_train;
    if (e->tok && tok) {
        int rc = so_draft_check_tokenizers(e->tok, tok, err);
        if (rc != SO_OK)
            return rc;
    } else if (a != b) {
        return so_err_set(err, SO_EMISMATCH, "the target has %d token ids, the draft %d", a, b);
    }
    if (ctx < e->o.n_ctx)
        so_log(SO_LOG_WARN,
               "the draft model's context is %d tokens, the target's %d: it makes no "
               "drafts beyond its own",
               ctx, e->o.n_ctx);
    return SO_OK;
}

static so_model_drafter_opts model_opts(const so_engine *e, const so_model *m, const so_bundle *b) {
    return (so_model_drafter_opts){
        .n_vocab = so_model_hparams(e->m)->n_vocab,
        .d_model = so_model_hparams(e->m)->d_model,
        .n_ctx = e->o.n_ctx,
        .encoder = so_model_hparams(e->m)->n_enc_layers > 0,
        .n_parallel = e->o.n_parallel,
        .n_batch = e->o.n_batch,
        .max_draft = e->o.max_draft,
        .kv_dtype = e->o.kv_dtype,
        .kv_layout = e->o.kv_layout,
        .n_pages = e->o.n_pages,
        .prefix_cache = e->o.prefix_cache,
        .size = (double)so_model_weight_bytes(m) /
                (double)SO_MAX(so_model_weight_bytes(e->m), (size_t)1),
        .id = b ? so_registry_id(b->ck) : e->o.draft_id,
        .claimed_agreement = b ? so_registry_agreement(b->ck) : e->o.draft_claimed_agreement,
        .temp = e->o.draft_temp,
        .p_min = e->o.draft_p_min,
    };
}

/* A tree's budget: within --draft-nodes, and within the pages that one request can have. */
static int check_budget(const so_engine *e, int *nodes, so_err *err) {
    int room = SO_MIN(e->n_pages, so_kv_pages_for(e->o.n_ctx)) * SO_KV_PAGE - 1;
    if (*nodes > e->o.max_nodes)
        return so_err_set(err, SO_ERANGE,
                          "nodes=%d is more than the %d guesses per request of this engine: give "
                          "--draft-nodes %d",
                          *nodes, e->o.max_nodes, *nodes);
    if (*nodes > room) {
        so_log(SO_LOG_WARN,
               "trees of %d nodes are reduced to %d: the cache has room for no more per request",
               *nodes, room);
        *nodes = room;
    }
    return SO_OK;
}

/* The tree of a spec, if it names one. */
static int set_tree(const so_engine *e, const so_spec *s, const so_spec_node *n,
                    so_model_drafter_opts *o, so_err *err) {
    o->nodes = e->o.max_nodes;
    int rc = so_model_opts_from_spec(s, n, o, err);
    bool tree = o->k > 0 || o->best || o->tree.n > 0;
    return rc == SO_OK && tree ? check_budget(e, &o->nodes, err) : rc;
}

/* device= of async(): the command line opens drafts there; elsewhere they are on some device already. */
static int check_device(const so_spec *s, const so_spec_node *async, const so_backend *b,
                        so_err *err) {
    so_str want = so_spec_device(s, async);
    bool is_cuda = so_str_starts(want, SO_STR("cuda"));
    if (want.len == 0 || is_cuda == (strcmp(b->vt->name, "cuda") == 0))
        return SO_OK;
    return so_err_set(err, SO_EINVAL,
                      "device=%.*s: the draft models of this process run on another device (%s); "
                      "start it with --draft-device %.*s (in the library draft_device)",
                      SO_STR_ARG(want), b->vt->name, SO_STR_ARG(want));
}

static int make_model(so_drafters *d, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                      so_drafter **out, so_err *err) {
    const so_engine *e = d->e;
    so_str file = n->name == SO_SPEC_MODEL ? so_spec_file(s, n) : (so_str){0};
    const so_model *m = e->o.draft;
    const so_tokenizer *tok = e->o.draft_tok;
    const so_bundle *b = NULL;
    int rc = SO_OK;
    if (file.len > 0) {
        rc = open_draft_file(d, file, &b, err);
        if (rc != SO_OK)
            return rc;
        m = b->model;
        tok = b->tok;
        so_memory_warn(e, m);
    }
    if (!m)
        return so_err_set(err, SO_EINVAL,
                          "needs a draft model: give --draft-model FILE or model(FILE)");
    if (b)
        rc = so_registry_check_file(b->ck, so_model_hparams(e->m), e->tok, err);
    if (rc == SO_OK)
        rc = check_draft(e, m, tok, err);
    so_model_drafter_opts o = model_opts(e, m, b);
    o.ahead = so_spec_is_async(s, n);
    if (rc == SO_OK && o.ahead)
        rc = check_device(s, so_spec_async_of(s, n), so_model_backend(m), err);
    if (rc == SO_OK && o.ahead && so_model_backend(m) == so_model_backend(e->m))
        rc = so_err_set(err, SO_EINVAL,
                        "async needs hardware of its own for the draft model: give --draft-cores N "
                        "or --draft-device (in the library draft_cores, draft_device)");
    if (rc == SO_OK)
        rc = set_tree(e, s, n, &o, err);
    return rc == SO_OK ? so_model_drafter_create(m, &o, inner, out, err) : rc;
}

/* --- heads --- */

static int load_heads(const so_engine *e, so_heads_kind kind, open_heads *o, so_err *err) {
    so_heads_info info;
    int rc = so_checkpoint_open(o->path, SO_CHECKPOINT_ALL, &o->ck, err);
    if (rc == SO_OK)
        rc = so_heads_read_info(o->ck, &info, err);
    if (rc == SO_OK && info.kind != kind)
        rc = so_err_set(err, SO_EMISMATCH, "%s: these are %s heads: use --spec '%s(FILE)'", o->path,
                        so_heads_kind_name(info.kind), so_heads_kind_name(info.kind));
    if (rc == SO_OK)
        rc = so_registry_check_file(o->ck, so_model_hparams(e->m), e->tok, err);
    if (rc == SO_OK)
        rc = so_heads_load(o->ck, e->m, so_heads_drafter_rows(&info, e->o.n_parallel), &o->h, err);
    return rc;
}

/* Opens each file once, even if several specs name it. */
static int open_heads_file(so_drafters *d, so_heads_kind kind, const char *path, open_heads **out,
                           so_err *err) {
    for (int i = 0; i < d->n_heads; i++)
        if (strcmp(d->heads[i].path, path) == 0 && so_heads_get_info(d->heads[i].h)->kind == kind) {
            *out = &d->heads[i];
            return SO_OK;
        }
    if (d->n_heads == MAX_HEADS)
        return so_err_set(err, SO_ELIMIT, "more than %d files of heads: name fewer", MAX_HEADS);
    open_heads o = {.path = so_strdup(path)};
    int rc = load_heads(d->e, kind, &o, err);
    if (rc != SO_OK) {
        close_heads(&o);
        return rc;
    }
    d->heads[d->n_heads] = o;
    *out = &d->heads[d->n_heads++];
    return SO_OK;
}

/* The file of the spec, or the registered one; the caller frees *path. */
static int find_heads(const so_engine *e, so_heads_kind kind, so_str file, char **path,
                      so_err *err) {
    so_registry_found found = {0};
    *path = NULL;
    if (file.len > 0) {
        *path = so_strndup(file.ptr, file.len);
        return SO_OK;
    }
    if (e->tok)
        so_registry_search(so_model_checkpoint(e->m), so_model_hparams(e->m), e->tok,
                           (so_registry_kind)(SO_REGISTRY_MEDUSA + (int)kind), &found);
    if (found.n > 0)
        *path = so_strdup(found.paths[0]);
    so_registry_found_free(&found);
    return *path ? SO_OK
                 : so_err_set(err, SO_EINVAL,
                              "needs heads, and none are registered for this target: name their "
                              "file, as in %s(FILE)",
                              so_heads_kind_name(kind));
}

static int make_heads(so_drafters *d, const so_spec *s, const so_spec_node *n, so_drafter **out,
                      so_err *err) {
    const so_engine *e = d->e;
    so_heads_kind kind = (so_heads_kind)(n->name - SO_SPEC_MEDUSA);
    so_heads_drafter_opts o = {
        .n_parallel = e->o.n_parallel, .max_draft = e->o.max_draft, .n_ctx = e->o.n_ctx};
    open_heads *heads = NULL;
    char *path = NULL;
    int rc = find_heads(e, kind, so_spec_file(s, n), &path, err);
    if (rc == SO_OK)
        rc = open_heads_file(d, kind, path, &heads, err);
    free(path);
    if (rc == SO_OK)
        rc = so_heads_opts_from_spec(s, n, e->o.max_nodes, &o, err);
    if (rc == SO_OK)
        rc = check_budget(e, &o.nodes, err);
    if (rc != SO_OK)
        return rc;
    o.id = so_registry_id(heads->ck);
    return so_heads_drafter_create(heads->h, e->m, e->kv, &o, out, err);
}

/* --- sets --- */

static int make_drafter(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                        so_drafter **out, so_err *err) {
    so_drafters *d = user;
    if (n->name == SO_SPEC_MODEL)
        return make_model(d, s, n, inner, out, err);
    if (n->name >= SO_SPEC_MEDUSA && n->name <= SO_SPEC_LOOKAHEAD)
        return make_heads(d, s, n, out, err);
    if (n->name == SO_SPEC_AUTO)
        return d->e->o.draft ? make_model(d, s, n, NULL, out, err) : SO_ENOTFOUND;
    if (n->name == SO_SPEC_UNIGRAM || n->name == SO_SPEC_BIGRAM)
        return so_err_set(
            err, SO_EINVAL,
            "needs a counted table: name its file in parentheses (`sooth count` makes "
            "one)");
    return so_err_set(err, SO_EUNSUPPORTED, "is not supported by this version");
}

/* The caller's own drafter, `user`, which is not part of the spec language. */
static int build_user(const so_engine *e, so_draft_set *out, so_err *err) {
    if (!e->o.user_drafter && !e->o.user_tree_drafter)
        return so_err_set(err, SO_EINVAL,
                          "the drafter `user` needs a function: set drafter or tree_drafter");
    so_drafter *d = e->o.user_tree_drafter
                        ? so_callback_create_tree("user", e->o.user_tree_drafter, e->o.drafter_user)
                        : so_callback_create("user", e->o.user_drafter, e->o.drafter_user);
    d->tree_nodes = e->o.user_tree_drafter ? e->o.max_nodes : 0;
    *out = (so_draft_set){.root = d, .leaves = {d}, .n_leaves = 1};
    so_draft_set_list_stages(out);
    return SO_OK;
}

/* The largest alternative: a chain of each of its drafters, or its tree. */
int so_drafters_max_nodes(const so_spec_set *set, int depth) {
    const so_draft_set *s = &set->drafters;
    int n = 0, most = 0;
    for (int i = 0; i < s->n_stages; i++) {
        bool same = i > 0 && s->stages[i].alternative == s->stages[i - 1].alternative;
        int own = s->stages[i].drafter->tree_nodes;
        n = (same ? n : 0) + (own > 0 ? own : depth);
        most = SO_MAX(most, n);
    }
    return most;
}

/* spec NULL: the drafter `user`. */
static int make_set(so_drafters *d, const so_spec *spec, char *text, so_err *err) {
    so_engine *e = d->e;
    so_spec_set *set = SO_NEW(so_spec_set);
    so_draft_config cfg = {.n_parallel = e->o.n_parallel,
                           .host = &d->host,
                           .remote_host = &d->remote_host,
                           .remote = &d->remote,
                           .faults = e->o.async_faults,
                           .n_vocab = so_model_hparams(e->m)->n_vocab,
                           .d_model = so_model_hparams(e->m)->d_model,
                           .tokenizer_hash = e->tok ? so_tokenizer_hash(e->tok) : 0,
                           .corpus = &d->corpus,
                           .make = make_drafter,
                           .user = d};
    so_async_host *locked = d->host; /* models are loaded on its backend */
    if (locked)
        so_async_lock(locked);
    int rc =
        spec ? so_spec_build(spec, &cfg, &set->drafters, err) : build_user(e, &set->drafters, err);
    if (locked)
        so_async_unlock(locked);
    if (rc != SO_OK) {
        free(set);
        return rc;
    }
    set->text = text;
    set->requests = SO_NEW_N(so_request *, e->o.n_parallel);
    set->asks = SO_NEW_N(so_plan_query, e->o.n_parallel);
    set->jobs = SO_NEW_N(so_draft_job, e->o.n_parallel);
    set->plan = so_plan_set_create(d->planner, &set->drafters);
    set->next = d->sets;
    d->sets = set;
    return SO_OK;
}

/* If there are MAX_SETS sets, frees one that no request uses. */
static int limit_sets(so_drafters *d, so_err *err) {
    int n = 0;
    so_spec_set **unused = NULL;
    for (so_spec_set **at = &d->sets; *at; at = &(*at)->next, n++)
        if ((*at)->n_users == 0)
            unused = at;
    if (n < MAX_SETS)
        return SO_OK;
    if (!unused)
        return so_err_set(err, SO_ELIMIT,
                          "%d different drafter specs are in use: wait until a request ends", n);
    so_spec_set *old = *unused;
    *unused = old->next;
    free_set(d, old);
    return SO_OK;
}

int so_drafters_find(so_drafters *d, const char *text, so_spec_set **out, so_err *out_err) {
    so_err local = {0}, *err = &local; /* the caller's error is set only on failure */
    so_spec *spec = SO_NEW(so_spec);
    so_buf name = {0};
    bool user = strcmp(text, "user") == 0;
    int rc = user ? SO_OK : so_spec_parse(so_str_c(text), spec, err);
    *out = NULL;
    if (user)
        so_buf_append_c(&name, text);
    else if (rc == SO_OK)
        so_spec_print(spec, &name);
    for (so_spec_set *s = d->sets; s && rc == SO_OK && !*out; s = s->next)
        if (so_str_eq_c(so_buf_str(&name), s->text))
            *out = s;
    if (rc == SO_OK && !*out) {
        rc = limit_sets(d, err);
        char *copy = so_strndup(so_buf_str(&name).ptr, name.len);
        if (rc == SO_OK)
            rc = make_set(d, user ? NULL : spec, copy, err);
        if (rc == SO_OK)
            *out = d->sets;
        else
            free(copy);
    }
    so_buf_free(&name);
    free(spec);
    return rc == SO_OK ? rc : so_err_set(out_err, rc, "%s", local.msg);
}
