/* The rules for the options of speculation:
 *
 *   no option               `auto`: drafters that need no file and the draft model registered for
 *                           the target (draft/registry.h), if any; the planner sets the lengths
 *   -md FILE                `model`, unless --spec names another drafter
 *   --spec model            without -md: the registered draft model
 *   --prediction FILE       `predict`, and where the text differs `model` (with -md) or
 *                           `lookup,ngram`, unless --spec names another drafter
 *   --speculative-decoding  `model` with a fixed length of 5, unless --spec-length is given
 *   --no-spec, --spec none  plain decoding; no draft model is opened
 *
 * Wrong options are reported before a model is loaded (exit status 2), and errors in files when
 * they are opened (exit status 1). Main thread, or the engine thread of `serve`. */
#include "cli/spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "cli/models.h"
#include "cli/progress.h"
#include "draft/model.h"
#include "draft/registry.h"
#include "draft/shape.h"
#include "draft/spec.h"

enum { DEFAULT_LENGTH = 5, MAX_EXPECTED_BYTES = 16 << 20 };

static int read_verify(const so_args *a, so_spec_opts *o) {
    const char *text = so_args_str(a, SO_OPT_VERIFY, "match");
    if (!so_verify_mode_parse(text, &o->verify, &o->lenience))
        return so_args_bad(a, "--verify '%.40s': must be match, reject, lenient=L or typical=E",
                           text);
    if (!(o->lenience > 0 && o->lenience <= 1))
        return so_args_bad(a, "--verify %.40s: the %s must be above 0 and at most 1", text,
                           o->verify == SO_VERIFY_TYPICAL ? "threshold" : "lenience");
    return 0;
}

/* Whether the spec names this drafter without a file, to be run in this process. */
static bool names(const so_spec *s, so_spec_name name) {
    for (int i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].name == name && s->nodes[i].file_len == 0 &&
            !so_spec_is_remote(s, &s->nodes[i]))
            return true;
    return false;
}

static int check_tables(const so_spec *s, const char *text, so_err *err) {
    if (!names(s, SO_SPEC_UNIGRAM) && !names(s, SO_SPEC_BIGRAM))
        return SO_OK;
    return so_err_set(err, SO_EINVAL,
                      "%.80s needs a counted table: name its file, as in %s(FILE) (`sooth "
                      "count` makes one)",
                      text, names(s, SO_SPEC_UNIGRAM) ? "unigram" : "bigram");
}

static const char *default_spec(const so_args *a) {
    bool model = so_args_has(a, SO_OPT_DRAFT_MODEL), fixed = so_args_has(a, SO_OPT_SPECULATIVE);
    if (so_args_has(a, SO_OPT_PREDICTION) && !fixed)
        return model ? "predict,model" : "predict,lookup,ngram";
    return model || fixed ? "model" : "auto";
}

/* Warns of files that no drafter of the spec uses. */
static void warn_unused(const so_args *a, const so_spec *spec) {
    if (so_args_has(a, SO_OPT_DRAFT_MODEL) && !names(spec, SO_SPEC_MODEL) &&
        !names(spec, SO_SPEC_AUTO))
        so_log(SO_LOG_WARN, "-md is ignored: --spec does not name `model`");
    if (so_args_has(a, SO_OPT_PREDICTION) && !names(spec, SO_SPEC_PREDICT) &&
        !names(spec, SO_SPEC_ORACLE))
        so_log(SO_LOG_WARN, "--prediction is ignored: --spec does not name `predict`");
}

/* The node budget that a drafter's spec names, or that of its tree file; 0: none. A file that cannot be
 * read is reported when the drafter is created. */
static int budget_of(const so_spec *s, const so_spec_node *n) {
    so_shape shape;
    if (so_spec_has(n, SO_SPEC_OPT_NODES))
        return (int)n->opt[SO_SPEC_OPT_NODES];
    if (n->tree_len == 0)
        return 0;
    char *path = so_strndup(so_spec_tree(s, n).ptr, so_spec_tree(s, n).len);
    int n_nodes = so_shape_read(path, &shape, NULL, NULL) == SO_OK ? shape.n_nodes : 0;
    free(path);
    return n_nodes;
}

static int read_drafter(const so_args *a, so_cli_spec *out) {
    so_spec spec;
    so_err err = {0};
    if (so_args_has(a, SO_OPT_NO_SPEC)) {
        if (so_args_has(a, SO_OPT_SPEC) || so_args_has(a, SO_OPT_SPECULATIVE))
            return so_args_bad(a, "--no-spec contradicts --spec and --speculative-decoding");
        return 0;
    }
    const char *text = so_args_str(a, SO_OPT_SPEC, default_spec(a));
    if (so_spec_parse(so_str_c(text), &spec, &err) != SO_OK)
        return so_args_bad(a, "%s", err.msg);
    if (check_tables(&spec, text, &err) != SO_OK)
        return so_args_bad(a, "--spec %s", err.msg);
    if (spec.nodes[spec.root].name == SO_SPEC_NONE)
        return 0;
    out->opts.drafter = text;
    out->wants_model = names(&spec, SO_SPEC_MODEL);
    out->takes_model = names(&spec, SO_SPEC_AUTO);
    for (int i = 0; i < spec.n_nodes; i++)
        out->n_nodes = SO_MAX(out->n_nodes, budget_of(&spec, &spec.nodes[i]));
    out->wants_text = names(&spec, SO_SPEC_PREDICT) || names(&spec, SO_SPEC_ORACLE);
    warn_unused(a, &spec);
    return 0;
}

int so_cli_spec_read(const so_args *a, so_cli_spec *out) {
    so_spec_opts *o = &out->opts;
    int status = read_drafter(a, out);
    if (status == 0)
        status = read_verify(a, o);
    if (status != 0)
        return status;
    int fixed = so_args_has(a, SO_OPT_SPECULATIVE) && o->drafter ? DEFAULT_LENGTH : 0;
    o->length = (int)so_args_int(a, SO_OPT_SPEC_LENGTH, fixed);
    o->draft_max = (int)so_args_int(a, SO_OPT_DRAFT_MAX, 0);
    o->draft_min = (int)so_args_int(a, SO_OPT_DRAFT_MIN, 0);
    int most = o->draft_max ? o->draft_max : SO_CLI_DRAFT_MAX;
    if (o->draft_min > most)
        return so_args_bad(a, "--draft-min %d is above --draft-max %d", o->draft_min, most);
    if (o->draft_max && o->length > o->draft_max)
        return so_args_bad(a, "--spec-length %d is above --draft-max %d", o->length, o->draft_max);
    if (o->length && o->draft_min > o->length)
        return so_args_bad(a,
                           "--draft-min %d is above --spec-length %d: every draft would be dropped",
                           o->draft_min, o->length);
    if (so_verify_mode_is_lossy(o->verify, o->lenience) && o->drafter)
        so_log(SO_LOG_WARN,
               "--verify %s=%g is lossy: the text may differ from that of plain decoding",
               so_verify_mode_name(o->verify), o->lenience);
    return 0;
}

int so_cli_spec_check_text(const so_args *a, const so_cli_spec *s) {
    if (!s->wants_text || so_args_has(a, SO_OPT_PREDICTION))
        return 0;
    return so_args_bad(a, "--spec %.80s needs the expected text: give --prediction FILE",
                       s->opts.drafter);
}

int so_cli_open_draft(const so_args *a, const so_bundle *target, so_bundle *out) {
    return so_cli_open_draft_named(a, target, so_args_str(a, SO_OPT_DRAFT_MODEL, ""), out);
}

int so_cli_open_draft_named(const so_args *a, const so_bundle *target, const char *name,
                            so_bundle *out) {
    so_bundle_opts o;
    so_bundle draft = {0};
    so_err err = {0};
    so_progress bar;
    char *path = NULL;
    if (so_model_resolve(name, &path, &err) != SO_OK)
        return so_args_fail(a, &err);
    so_bundle_defaults(&o);
    so_progress_begin(&bar, "loading the draft");
    o.progress = so_progress_callback;
    o.user = &bar;
    int rc = so_bundle_open_draft(path, target, &o, &draft, &err);
    so_progress_end(&bar);
    free(path);
    if (rc == SO_OK)
        rc = so_draft_check_tokenizers(target->tok, draft.tok, &err);
    if (rc == SO_EMISMATCH)
        so_err_prefix(&err, "-md %.200s does not fit -m %.200s", name,
                      so_args_str(a, SO_OPT_MODEL, ""));
    if (rc == SO_OK)
        *out = draft;
    else
        so_bundle_close(&draft);
    return rc == SO_OK ? 0 : so_args_fail(a, &err);
}

int so_cli_no_draft(const so_args *a, const char *option) {
    return so_args_bad(
        a,
        "%s needs a draft model, and none is registered for %.200s: give -md FILE or "
        "--spec 'model(FILE)'",
        option, so_args_str(a, SO_OPT_MODEL, ""));
}

static int find_draft(const so_args *a, const so_bundle *target, so_dtype kv_dtype,
                      so_cli_spec *s) {
    if (so_args_has(a, SO_OPT_DRAFT_MODEL))
        return so_cli_open_draft(a, target, &s->draft);
    if (so_bundle_find_draft(target, kv_dtype, &s->draft) || !s->wants_model)
        return 0;
    char option[100] = "--speculative-decoding";
    if (so_args_has(a, SO_OPT_SPEC))
        snprintf(option, sizeof option, "--spec %.80s", s->opts.drafter);
    return so_cli_no_draft(a, option);
}

static int read_expected(const so_args *a, const so_bundle *target, so_cli_spec *s) {
    so_buf text = {.max = MAX_EXPECTED_BYTES};
    so_err err = {0};
    int rc = so_file_read(so_args_str(a, SO_OPT_PREDICTION, "-"), MAX_EXPECTED_BYTES, &text, &err);
    if (rc == SO_OK)
        rc = so_tokenizer_encode(target->tok, so_buf_str(&text), 0, &s->expected, &err);
    so_buf_free(&text);
    s->opts.expected = s->expected.ids;
    s->opts.n_expected = (int)s->expected.len;
    return rc == SO_OK ? 0 : so_args_fail(a, &err);
}

int so_cli_spec_open(const so_args *a, const so_bundle *target, so_cli_spec *s,
                     so_engine_opts *eo) {
    int status = 0;
    if (!s->opts.drafter)
        return 0;
    if (s->wants_model || s->takes_model)
        status = find_draft(a, target, eo->kv_dtype, s);
    if (status == 0 && s->wants_text && so_args_has(a, SO_OPT_PREDICTION))
        status = read_expected(a, target, s);
    eo->keep_costs = SO_KEEP_LARGE_MODELS;
    eo->max_draft = s->opts.draft_max ? s->opts.draft_max : SO_CLI_DRAFT_MAX;
    if (s->opts.length > eo->max_draft)
        eo->max_draft = s->opts.length;
    eo->max_nodes = (int)so_args_int(a, SO_OPT_DRAFT_NODES, 0);
    if (eo->max_nodes == 0 && s->n_nodes > 2 * eo->max_draft)
        eo->max_nodes = s->n_nodes; /* the spec itself gives a larger budget than the default */
    eo->worker_key = so_args_str(a, SO_OPT_WORKER_KEY, NULL);
    eo->draft = s->draft.model;
    eo->draft_tok = s->draft.tok;
    eo->draft_id = s->draft.ck ? so_registry_id(s->draft.ck) : 0;
    eo->draft_claimed_agreement = s->draft.ck ? so_registry_agreement(s->draft.ck) : 0;
    eo->draft_temp = (float)so_args_float(a, SO_OPT_DRAFT_TEMP, -1);
    eo->draft_p_min = (float)so_args_float(a, SO_OPT_DRAFT_P_MIN, 0);
    return status;
}

int so_cli_spec_change(so_cli_spec *s, const char *text, so_err *err) {
    so_spec spec;
    int rc = so_spec_parse(so_str_c(text), &spec, err);
    if (rc == SO_OK)
        rc = check_tables(&spec, text, err);
    if (rc != SO_OK)
        return rc;
    if (names(&spec, SO_SPEC_MODEL) && !s->draft.model)
        return so_err_set(err, SO_EINVAL,
                          "%.80s needs a draft model: start with -md FILE, or use model(FILE)",
                          text);
    if ((names(&spec, SO_SPEC_PREDICT) || names(&spec, SO_SPEC_ORACLE)) && !s->expected.ids)
        return so_err_set(err, SO_EINVAL,
                          "%.80s needs the expected text: start with --prediction FILE", text);
    s->opts.drafter = spec.nodes[spec.root].name == SO_SPEC_NONE ? NULL : text;
    return SO_OK;
}

void so_cli_spec_close(so_cli_spec *s) {
    so_bundle_close(&s->draft);
    so_tokens_free(&s->expected);
}
