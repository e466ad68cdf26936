/* What to guess: the drafters that requests name, how long drafts may be, which guesses go into the
 * pass.
 *
 *   1. room      how deep a draft may go: the request's own limits, the end of its context (the
 *                last position is decoded plainly), the pages that are left, its share of the pass
 *   2. lengths   where drafting costs time or draws tokens, the planner fixes lengths first
 *                (lengths.c)
 *   3. propose   one call per set of drafters, for all its requests
 *   4. choose    the planner keeps the guesses that pay; a fixed length keeps them all
 *
 * A set of drafters is made once per spec and shared; what a drafter keeps for a request is opened
 * at submission and closed at its end. A drafter that fails is reported and its requests go on
 * plainly: no guess can make a token wrong, and none is worth an answer. Engine thread. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/log.h"
#include "draft/model.h"
#include "draft/registry.h"
#include "engine/costs.h"
#include "engine/impl.h"

enum { MAX_SETS = 32, MAX_BUNDLES = 8 };
enum { WORTH_KEEPING = 8 };                          /* passes after which costs are written, … */
static const size_t WORTH_KEEPING_BYTES = 8 << 20;   /* … if the model is no toy */
static const int64_t MAX_LOGITS = (int64_t)64 << 20; /* floats of all guesses in one pass */

/* --- the engine's part --- */

static so_mutant read_mutant(void) {
    static const char *const names[] = {"", "accept_all", "keep_row", "move_tail"};
    const char *name = so_env_mutant();
    for (int i = 1; name && i < (int)SO_LEN(names); i++)
        if (strcmp(name, names[i]) == 0)
            return (so_mutant)i;
    if (name)
        so_log(SO_LOG_WARN, "SOOTH_DEBUG: no mutant '%.40s' (accept_all, keep_row, move_tail)",
               name);
    return SO_MUTANT_NONE;
}

int so_speculate_max_guesses(const so_engine *e) {
    int64_t all = (int64_t)e->o.n_parallel * e->o.max_draft;
    int64_t most = MAX_LOGITS / so_model_hparams(e->m)->n_vocab;
    return (int)SO_MIN(all, SO_MAX(most, SO_MAX(e->o.n_parallel, e->o.max_draft)));
}

static void load_costs(so_engine *e) {
    char *dir = so_env_cache_dir();
    if (!dir)
        return;
    so_costs_key(e->m, e->o.kv_dtype, &e->costs_key);
    char *path = so_costs_path(dir, so_buf_str(&e->costs_key));
    bool known =
        so_costs_read(path, so_buf_str(&e->costs_key), so_planner_curve(e->planner), &e->records);
    so_log(SO_LOG_DEBUG, "costs of a pass: %s %s", known ? "as in" : "not yet in", path);
    free(path);
    free(dir);
}

static void save_costs(so_engine *e) {
    char *dir = so_env_cache_dir();
    so_err err = {0};
    bool worth =
        e->o.keep_costs == SO_KEEP_ALL || so_model_weight_bytes(e->m) >= WORTH_KEEPING_BYTES;
    if (dir && e->costs_key.len > 0 && e->n_new_costs >= WORTH_KEEPING && worth) {
        so_str key = so_buf_str(&e->costs_key);
        char *path = so_costs_path(dir, key);
        if (so_costs_write(path, key, so_planner_curve(e->planner), &e->records, &err) != SO_OK)
            so_log(SO_LOG_DEBUG, "costs of a pass are not kept: %s", err.msg);
        free(path);
    }
    free(dir);
    so_buf_free(&e->costs_key);
    so_records_free(&e->records);
}

/* Two models in one set cannot be told apart, and one that drafts at a temperature of its own says
 * nothing of how it does otherwise. 0: nothing is kept. */
static uint64_t id_of_model(const so_engine *e, const so_draft_set *s) {
    int n = 0;
    for (int i = 0; i < s->n_leaves; i++)
        n += strcmp(s->leaves[i]->vt->name, "model") == 0;
    return n == 1 && e->o.draft_temp < 0 ? e->draft_id : 0;
}

/* A draft that was never tried is believed what its file says of its agreement, on held-out text
 * and greedily; of that KEPT is left where people ask, where noise decides and where tokens are
 * drawn (SmolLM2's draft on spec_bench). So the first answer is drafted for at once. */
static void believe_word(so_spec_set *set, so_guessing how, int leaf) {
    static const double KEPT[SO_GUESSINGS] = {0.86, 0.58, 0.66};
    if (set->draft_word > 0 && strcmp(set->drafters.leaves[leaf]->vt->name, "model") == 0)
        so_record_believe(set->draft_word * KEPT[how], &set->shared[how], leaf);
}

/* What is known of the set's drafters from other runs and other sets. */
static void lend_records(so_engine *e, so_spec_set *set, so_guessing how) {
    char name[SO_RECORD_NAME];
    for (int i = 0; i < set->drafters.n_leaves && i < SO_ESTIMATE_DRAFTERS; i++) {
        const so_record *rec = NULL;
        if (so_record_name(set->drafters.leaves[i], set->draft_id, (int)how, name))
            rec = so_records_find(&e->records, name);
        if (rec)
            so_record_lend(rec, &set->shared[how], i);
        else
            believe_word(set, how, i);
    }
}

static void learn_records(so_engine *e, so_spec_set *set, so_guessing how) {
    char name[SO_RECORD_NAME];
    for (int i = 0; i < set->drafters.n_leaves && i < SO_ESTIMATE_DRAFTERS; i++) {
        const so_drafter *d = set->drafters.leaves[i];
        if (set->shared[how].seen[i][0][SO_ESTIMATE_LEVELS].tested > 0 &&
            so_record_name(d, set->draft_id, (int)how, name))
            so_record_learn(so_records_touch(&e->records, name), &set->shared[how], i,
                            so_drafter_cost_ms(d));
    }
}

void so_speculate_init(so_engine *e) {
    int n = e->o.n_parallel, n_vocab = so_model_hparams(e->m)->n_vocab;
    e->mutant = read_mutant();
    e->planner = so_planner_create(0);
    if (e->o.keep_costs)
        load_costs(e);
    e->plan_trees = SO_NEW_N(so_plan_tree, n);
    e->plan_chains = SO_NEW_N(so_plan_chain, n);
    e->plan_owners = SO_NEW_N(so_request *, n);
    e->chain_accept = SO_NEW_N(float, n * e->o.max_draft);
    e->tree_accept = SO_NEW_N(float, n *SO_TREE_MAX);
    e->row = SO_NEW_N(float, n_vocab);
    e->scratch = SO_NEW_N(double, 2 * n_vocab);
}

static void free_set(so_engine *e, so_spec_set *set) {
    for (int how = 0; how < SO_GUESSINGS; how++)
        learn_records(e, set, (so_guessing)how);
    so_draft_set_deinit(&set->drafters);
    free(set->text);
    free(set->jobs);
    free(set->owners);
    free(set);
}

void so_speculate_deinit(so_engine *e) {
    for (so_spec_set *s = e->sets, *next; s; s = next) {
        next = s->next;
        free_set(e, s);
    }
    so_corpus_free(e->corpus);
    for (int i = 0; i < e->n_bundles; i++) {
        so_bundle_close(&e->bundles[i]);
        free(e->bundle_paths[i]);
    }
    free(e->bundles);
    free(e->bundle_paths);
    save_costs(e);
    so_planner_free(e->planner);
    free(e->plan_trees);
    free(e->plan_chains);
    free(e->plan_owners);
    free(e->chain_accept);
    free(e->tree_accept);
    free(e->row);
    free(e->scratch);
}

/* --- drafters --- */

/* Each file once, however many specs name it: a model is large, and drafters only read it. */
static int open_draft_file(so_engine *e, so_str file, const so_bundle **out, so_err *err) {
    so_bundle_opts o;
    so_bundle_defaults(&o);
    o.backend = so_model_backend(e->m);
    o.draft = true;
    if (!e->bundles) {
        e->bundles = SO_NEW_N(so_bundle, MAX_BUNDLES);
        e->bundle_paths = SO_NEW_N(char *, MAX_BUNDLES);
    }
    for (int i = 0; i < e->n_bundles; i++)
        if (so_str_eq_c(file, e->bundle_paths[i])) {
            *out = &e->bundles[i];
            return SO_OK;
        }
    char *path = so_strndup(file.ptr, file.len);
    int rc = e->n_bundles < MAX_BUNDLES
                 ? so_bundle_open(path, &o, &e->bundles[e->n_bundles], err)
                 : so_err_set(err, SO_ELIMIT, "more than %d draft models", MAX_BUNDLES);
    if (rc != SO_OK) {
        free(path);
        return rc;
    }
    e->bundle_paths[e->n_bundles] = path;
    *out = &e->bundles[e->n_bundles++];
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
               "the draft model's context is %d tokens, the target's %d: behind it "
               "there are no drafts",
               ctx, e->o.n_ctx);
    return SO_OK;
}

static int make_model(so_engine *e, so_str file, so_drafter *inner, so_drafter **out, so_err *err) {
    const so_model *m = e->o.draft;
    const so_tokenizer *tok = e->o.draft_tok;
    const so_bundle *b = NULL;
    int rc = SO_OK;
    if (file.len > 0) {
        rc = open_draft_file(e, file, &b, err);
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
        rc = so_registry_admit(b->ck, so_model_hparams(e->m), e->tok, err);
    if (rc == SO_OK)
        rc = check_draft(e, m, tok, err);
    e->draft_id = b ? so_registry_id(b->ck) : e->o.draft_id;
    e->draft_word = b ? so_registry_agreement(b->ck) : e->o.draft_word;
    if (rc != SO_OK)
        return so_err_prefix(err, "the draft does not fit the target");
    so_model_drafter_opts o = {.n_vocab = so_model_hparams(e->m)->n_vocab,
                               .d_model = so_model_hparams(e->m)->d_model,
                               .n_ctx = e->o.n_ctx,
                               .n_parallel = e->o.n_parallel,
                               .n_batch = e->o.n_batch,
                               .max_draft = e->o.max_draft,
                               .kv_dtype = e->o.kv_dtype,
                               .kv_layout = e->o.kv_layout,
                               .n_pages = e->o.n_pages,
                               .prefix_cache = e->o.prefix_cache,
                               .share = (double)so_model_weight_bytes(m) /
                                        (double)SO_MAX(so_model_weight_bytes(e->m), (size_t)1),
                               .temp = e->o.draft_temp,
                               .p_min = e->o.draft_p_min};
    return so_model_drafter_create(m, &o, inner, out, err);
}

static int make_drafter(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                        so_drafter **out, so_err *err) {
    if (n->name == SO_SPEC_MODEL)
        return make_model(user, so_spec_file(s, n), inner, out, err);
    if (n->name == SO_SPEC_AUTO) {
        so_engine *e = user;
        return e->o.draft ? make_model(e, (so_str){0}, NULL, out, err) : SO_ENOTFOUND;
    }
    if (n->name == SO_SPEC_UNIGRAM || n->name == SO_SPEC_BIGRAM)
        return so_err_set(
            err, SO_EINVAL,
            "needs a counted table: name its file in parentheses (`sooth count` makes "
            "one)");
    return so_err_set(err, SO_EUNSUPPORTED, "is not known to this version");
}

/* The one drafter that no spec can name: the caller's own. */
static int build_user(const so_engine *e, so_draft_set *out, so_err *err) {
    if (!e->o.user_drafter)
        return so_err_set(err, SO_EINVAL, "the drafter `user` needs a function of yours");
    *out = (so_draft_set){.root = so_callback_create("user", e->o.user_drafter, e->o.drafter_user),
                          .n_leaves = 1};
    out->leaves[0] = out->root;
    return SO_OK;
}

/* spec NULL: `user`. */
static int make_set(so_engine *e, const so_spec *spec, char *text, so_err *err) {
    so_spec_set *set = SO_NEW(so_spec_set);
    so_draft_config cfg = {.n_vocab = so_model_hparams(e->m)->n_vocab,
                           .tokenizer_hash = e->tok ? so_tokenizer_hash(e->tok) : 0,
                           .corpus = &e->corpus,
                           .make = make_drafter,
                           .user = e};
    int rc =
        spec ? so_spec_build(spec, &cfg, &set->drafters, err) : build_user(e, &set->drafters, err);
    if (rc != SO_OK) {
        free(set);
        return rc;
    }
    set->staged = strcmp(set->drafters.root->vt->name, "first") == 0;
    if (set->staged) {
        so_group_set_judge(set->drafters.root, so_lengths_judge, e);
        so_group_set_limit(set->drafters.root, so_lengths_limit, e);
    }
    set->text = text;
    for (int i = 0; i < set->drafters.n_leaves; i++)
        set->draws |= set->drafters.leaves[i]->draws;
    set->jobs = SO_NEW_N(so_draft_job, e->o.n_parallel);
    set->owners = SO_NEW_N(so_request *, e->o.n_parallel);
    set->draft_id = id_of_model(e, &set->drafters);
    set->draft_word = set->draft_id ? e->draft_word : 0;
    for (int how = 0; how < SO_GUESSINGS; how++)
        lend_records(e, set, (so_guessing)how);
    set->next = e->sets;
    e->sets = set;
    return SO_OK;
}

/* Makes room for one more set by dropping one that nobody uses. */
static int limit_sets(so_engine *e, so_err *err) {
    int n = 0;
    so_spec_set **unused = NULL;
    for (so_spec_set **at = &e->sets; *at; at = &(*at)->next, n++)
        if ((*at)->n_requests == 0)
            unused = at;
    if (n < MAX_SETS)
        return SO_OK;
    if (!unused)
        return so_err_set(err, SO_ELIMIT, "requests with %d different drafters run: wait", n);
    so_spec_set *old = *unused;
    *unused = old->next;
    free_set(e, old);
    return SO_OK;
}

static int find_set(so_engine *e, const char *text, so_spec_set **out, so_err *why) {
    so_err local = {0}, *err = &local; /* opening files leaves traces of what was tried */
    so_spec *spec = SO_NEW(so_spec);
    so_buf name = {0};
    bool user = strcmp(text, "user") == 0;
    int rc = user ? SO_OK : so_spec_parse(so_str_c(text), spec, err);
    if (user)
        so_buf_append_c(&name, text);
    else if (rc == SO_OK)
        so_spec_print(spec, &name);
    for (so_spec_set *s = e->sets; s && rc == SO_OK && !*out; s = s->next)
        if (so_str_eq_c(so_buf_str(&name), s->text))
            *out = s;
    if (rc == SO_OK && !*out) {
        rc = limit_sets(e, err);
        char *copy = so_strndup(so_buf_str(&name).ptr, name.len);
        if (rc == SO_OK)
            rc = make_set(e, user ? NULL : spec, copy, err);
        if (rc == SO_OK)
            *out = e->sets;
        else
            free(copy);
    }
    so_buf_free(&name);
    free(spec);
    return rc == SO_OK ? rc : so_err_set(why, rc, "%s", local.msg);
}

/* --- a request's part --- */

static int check_opts(const so_engine *e, const so_spec_opts *o, so_err *err) {
    int most = e->o.max_draft;
    if (most == 0)
        return so_err_set(err, SO_EUNSUPPORTED, "this engine was made without speculation");
    if (o->length < 0 || o->length > most)
        return so_err_set(err, SO_ERANGE, "--spec-length %d: must be from 1 to %d", o->length,
                          most);
    if (o->draft_max < 0 || o->draft_max > most)
        return so_err_set(err, SO_ERANGE, "--draft-max %d: must be from 1 to %d", o->draft_max,
                          most);
    if (o->draft_min < 0 || o->draft_min > most)
        return so_err_set(err, SO_ERANGE, "--draft-min %d: must be from 0 to %d", o->draft_min,
                          most);
    if (o->verify == SO_VERIFY_LENIENT && !(o->lenience > 0 && o->lenience <= 1))
        return so_err_set(err, SO_ERANGE,
                          "--verify lenient=%g: must be above 0 and at most 1 (1 is exact)",
                          o->lenience);
    return SO_OK;
}

static so_guessing guessing_of(const so_request *r, so_verify_mode verify) {
    if (r->sample.temp == 0)
        return SO_GUESSING_GREEDY;
    return verify == SO_VERIFY_MATCH ? SO_GUESSING_NOISE : SO_GUESSING_DRAWN;
}

int so_speculate_open(so_request *r, const so_spec_opts *o, so_err *err) {
    so_speculation *s = &r->spec;
    so_spec_set *set = NULL;
    int rc = o->drafter ? check_opts(r->e, o, err) : SO_OK;
    if (rc == SO_OK && o->drafter)
        rc = find_set(r->e, o->drafter, &set, err);
    if (rc != SO_OK || !set)
        return rc;
    so_draft_text text = {.prompt = r->tokens,
                          .n_prompt = r->n_prompt,
                          .expected = o->expected,
                          .n_expected = o->n_expected,
                          .max_tokens = r->max_len};
    rc = set->drafters.root->vt->open(set->drafters.root, &text, &s->state, err);
    if (rc != SO_OK)
        return rc;
    set->n_requests++;
    s->set = set;
    s->length = o->length;
    s->draft_max = o->draft_max ? o->draft_max : r->e->o.max_draft;
    s->draft_min = o->draft_min;
    s->verify = o->verify;
    s->lenience = o->verify == SO_VERIFY_LENIENT ? o->lenience : 1;
    s->n_told = r->n_prompt;
    s->shadow = SO_NEW(so_shadow);
    s->estimate = SO_NEW(so_estimate);
    s->guessing = guessing_of(r, o->verify);
    so_estimate_init(s->estimate, &set->shared[s->guessing]);
    if (s->verify == SO_VERIFY_LENIENT && s->lenience < 1)
        r->greedy = false; /* needs the logits */
    return SO_OK;
}

void so_speculate_close(so_request *r) {
    so_speculation *s = &r->spec;
    if (!s->estimate)
        return;
    s->set->drafters.root->vt->close(s->set->drafters.root, s->state);
    free(s->shadow);
    free(s->estimate);
    s->estimate = NULL;
}

/* The request is gone: its set, whose name it showed, may go too. */
void so_speculate_release(so_request *r) {
    so_speculate_close(r);
    if (r->spec.set)
        r->spec.set->n_requests--;
}

void so_speculate_admit(so_request *r) {
    so_tree *t = r->tree;
    int n = r->spec.verify != SO_VERIFY_MATCH && r->sample.temp > 0 ? r->e->o.max_draft : 0;
    if (n > 0 && !t->q)
        t->q = SO_NEW_N(float, (size_t)n *(size_t)t->n_vocab);
    t->max_rows = n;
}

void so_speculate_park(so_request *r) {
    r->spec.n_read = 0;
    if (r->spec.estimate)
        so_drafter_park(r->spec.set->drafters.root, r->spec.state);
}

bool so_speculate_reads_states(const so_request *r) {
    return r->spec.estimate && r->spec.set->drafters.root->reads_states;
}

void so_speculate_state(so_request *r, int node) {
    if (so_speculate_reads_states(r))
        so_drafter_read_state(r->spec.set->drafters.root, r->spec.state, r->n_tokens,
                              so_pass_hidden(r->e->pass, r->first_logit + node));
}

void so_speculate_tell(so_request *r) {
    so_speculation *s = &r->spec;
    int n = r->n_tokens - s->n_told;
    if (!s->estimate || n <= 0)
        return;
    so_drafter_observe(s->set->drafters.root, s->state, r->tokens + s->n_told, n);
    so_shadow_advance(s->shadow, s->estimate, r->tokens + s->n_told, n);
    s->n_told = r->n_tokens;
}

/* --- 1. room --- */

static bool speculates(const so_request *r) { return r->has_tree && r->spec.estimate; }

static void set_room(so_request *r, int share) {
    so_speculation *s = &r->spec;
    int depth = s->length ? s->length : s->draft_max;
    s->stretch = false;
    depth = SO_MIN(depth, r->max_len - r->n_tokens - 1);
    s->max_nodes = depth > 0 ? so_schedule_room(r, SO_MIN(share, SO_TREE_MAX - 1)) : 0;
    s->depth = SO_MAX(0, SO_MIN(depth, s->max_nodes));
}

/* --- 3. propose (2. is lengths.c) --- */

static void add_job(so_request *r) {
    so_speculation *s = &r->spec;
    so_spec_set *set = s->set;
    set->owners[set->n_jobs] = r;
    set->jobs[set->n_jobs++] = (so_draft_job){.state = s->state,
                                              .request = r,
                                              .tokens = r->tokens,
                                              .n_tokens = r->n_tokens,
                                              .n_prompt = r->n_prompt,
                                              .tree = r->tree,
                                              .max_nodes = s->max_nodes,
                                              .max_depth = s->depth,
                                              .draw = so_lengths_draw,
                                              .more = so_lengths_more,
                                              .seed = r->sample.seed,
                                              .choice = r->sample.choice,
                                              .round = s->round,
                                              .temp = r->sample.temp,
                                              .sample = &r->sample};
}

static void forget_guesses(so_tree *t) { so_tree_reset(t, t->nodes[0].token, t->root_pos); }

static void propose_set(so_spec_set *set) {
    so_err err = {0};
    int64_t t = so_clock_ns();
    int rc = set->drafters.root->vt->propose(set->drafters.root, set->jobs, set->n_jobs, &err);
    double ms = so_clock_ms_since(t);
    if (rc != SO_OK) /* once aloud: a broken drafter fails at every step */
        so_log(set->failed ? SO_LOG_DEBUG : SO_LOG_WARN,
               "drafter %s: %s; the step goes on without guesses", set->text, err.msg);
    set->failed |= rc != SO_OK;
    for (int i = 0; i < set->n_jobs; i++) {
        set->owners[i]->stats.draft_ms += ms;
        if (rc != SO_OK)
            forget_guesses(set->owners[i]->tree);
    }
}

/* Short drafts go, but only where every guess is a point: dropping a drawn token because of what
 * follows it would bias the output. */
static void review(so_request *r) {
    if (so_tree_all_points(r->tree) && r->tree->n_nodes - 1 < r->spec.draft_min)
        forget_guesses(r->tree);
    so_shadow_watch(r->spec.shadow, r->tree);
}

static double propose(so_engine *e) {
    int64_t t = so_clock_ns();
    for (so_spec_set *s = e->sets; s; s = s->next)
        s->n_jobs = 0;
    for (so_request *r = e->running; r; r = r->next)
        if (speculates(r) && r->spec.depth > 0)
            add_job(r);
    for (so_spec_set *s = e->sets; s; s = s->next) {
        if (s->n_jobs > 0)
            propose_set(s);
        for (int i = 0; i < s->n_jobs; i++)
            review(s->owners[i]);
    }
    return so_clock_ms_since(t);
}

/* --- 4. choose --- */

static void choose(so_engine *e, double draft_ms) {
    int n = 0;
    so_plan_env env = {.other_rows = e->other_rows, .max_rows = e->max_rows, .draft_ms = draft_ms};
    for (so_request *r = e->running; r; r = r->next) {
        if (!r->has_tree)
            continue;
        float *accept = e->tree_accept + (size_t)n * SO_TREE_MAX;
        so_plan_tree *p = &e->plan_trees[n];
        p->tree = r->tree;
        p->accept = accept;
        p->whole = r->spec.length > 0;
        p->node_ms = so_lengths_check_ms(e, r);
        p->sure = 0;
        accept[0] = 1;
        if (speculates(r)) {
            so_estimate_tree(r->spec.estimate, r->tree, accept);
            if (r->tree->n_proposals > 0)
                p->sure = so_estimate_sure(r->spec.estimate, r->tree->proposals[0].drafter);
        }
        e->plan_owners[n++] = r;
    }
    so_planner_choose(e->planner, e->plan_trees, n, &env, &e->plan);
    for (int i = 0; i < n; i++)
        if (speculates(e->plan_owners[i]))
            so_lengths_learn(e->plan_owners[i], &e->plan_trees[i]);
    for (int i = 0; i < n; i++)
        if (e->plan_trees[i].n_keep < e->plan_owners[i]->tree->n_nodes - 1)
            so_plan_prune(e->plan_owners[i]->tree, e->plan_trees[i].keep);
}

void so_speculate_step(so_engine *e) {
    int n_spec = 0;
    e->plan.n_requests = e->n_trees = e->other_rows = 0;
    e->lengths_ms = 0;
    for (so_request *r = e->running; r; r = r->next) {
        n_spec += speculates(r);
        e->n_trees += r->has_tree;
        e->other_rows += r->n_chunk;
    }
    if (n_spec == 0)
        return;
    for (so_request *r = e->running; r; r = r->next)
        if (speculates(r))
            set_room(r, e->max_guesses / n_spec);
    so_lengths_begin(e);
    so_lengths_plan(e);
    double draft_ms = e->info.draft_ms = propose(e);
    /* As planned, where it was: the clock's bad luck is nobody's fault (so_planner_observe). */
    choose(e, e->lengths_ms > 0 ? SO_MIN(draft_ms, e->lengths_ms) : draft_ms);
}

void so_speculate_observe(so_engine *e, double pass_ms) {
    int n_tokens = 0;
    if (e->plan.n_requests == 0)
        return;
    for (so_request *r = e->running; r; r = r->next) {
        if (!r->has_tree)
            continue;
        n_tokens += r->verdict.n_accepted + 1;
        r->spec.round++;
        if (speculates(r))
            so_estimate_verdict(r->spec.estimate, r->tree, &r->verdict);
    }
    so_lengths_observe(e, pass_ms, n_tokens);
    so_planner_observe(e->planner, &e->plan, pass_ms, n_tokens);
    e->n_new_costs++;
}
