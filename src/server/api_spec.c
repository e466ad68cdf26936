/* The speculation options of a request: its own fields, else the server's options.
 *
 *   "speculative": {"enabled": false}   plain decoding, whatever the other fields are
 *   "speculative": {"drafter": "…"}     this drafter; the planner sets lengths unless `length` does
 *   "prediction": …                     `predict` first, then the drafter used otherwise
 *   neither                             the server's --spec
 *
 * A drafter that reads a file (model(FILE), bigram(FILE)) or has a worker is refused: only the operator decides
 * which files the server opens, and which hosts it connects to. Pure functions. Any thread. */
#include "draft/spec.h"
#include "server/api.h"

enum { NAMES_PREDICT = 1, NAMES_TEXT = 2, NAMES_FILE = 4, IS_NONE = 8, NAMES_WORKER = 16 };

static bool examine(so_str text, int *what, so_api_error *err) {
    so_spec spec;
    so_err e = {0};
    *what = 0;
    if (so_spec_parse(text, &spec, &e) != SO_OK)
        return so_api_fail_err(err, &e);
    for (int i = 0; i < spec.n_nodes; i++) {
        so_spec_name name = spec.nodes[i].name;
        *what |= name == SO_SPEC_PREDICT ? NAMES_PREDICT : 0;
        *what |= name == SO_SPEC_PREDICT || name == SO_SPEC_ORACLE ? NAMES_TEXT : 0;
        *what |= spec.nodes[i].file_len > 0 || spec.nodes[i].tree_len > 0 ? NAMES_FILE : 0;
        *what |= spec.nodes[i].worker_len > 0 ? NAMES_WORKER : 0;
    }
    *what |= spec.nodes[spec.root].name == SO_SPEC_NONE ? IS_NONE : 0;
    return true;
}

static bool check_own(const so_api_request *r, int what, so_api_error *err) {
    const char *name = "speculative.drafter", *text = r->spec.drafter;
    if (what & NAMES_FILE)
        return so_api_fail(err, 400, "unsupported_value", name,
                           "'%s' names a file: only the server's option --spec may name files",
                           name);
    if (what & NAMES_WORKER)
        return so_api_fail(
            err, 400, "unsupported_value", name,
            "'%s' names a draft worker: only the server's option --spec may name one", name);
    if ((what & NAMES_TEXT) && !r->prediction.ptr)
        return so_api_fail(err, 400, "missing_required_parameter", "prediction",
                           "'%s' is '%.80s', which guesses from an expected text: send it as "
                           "'prediction'",
                           name, text);
    /* job.c counts the guesses of drafter 0 as those of the prediction. */
    if ((what & NAMES_PREDICT) && strncmp(text, "predict", 7) != 0)
        return so_api_fail(err, 400, "unsupported_value", name,
                           "'%s' must name predict first, as in predict,lookup", name);
    return true;
}

/* Appends the drafter's name to `text`; nothing for plain decoding. */
static bool choose_drafter(const so_api_request *r, const so_spec_opts *deflt, so_buf *text,
                           so_api_error *err) {
    const char *own = r->spec.drafter, *base = own ? own : deflt->drafter;
    int what = 0;
    if (r->spec.enabled == 0)
        return true;
    if (!base && r->spec.enabled == 1)
        base = "auto";
    if (own && (!examine(so_str_c(own), &what, err) || !check_own(r, what, err)))
        return false;
    if (what & IS_NONE)
        return true;
    if (r->prediction.ptr && !(what & NAMES_TEXT)) {
        so_buf_append_c(text, base ? "predict," : "predict");
        /* auto cannot be combined with other drafters */
        base = base && strcmp(base, "auto") == 0 ? "lookup,ngram" : base;
    }
    if (base)
        so_buf_append_c(text, base);
    return true;
}

static bool check_lengths(const so_spec_opts *o, int max_draft, so_api_error *err) {
    if (o->length > max_draft)
        return so_api_fail(err, 400, "invalid_value", "speculative.length",
                           "'speculative.length' is %d: this server allows at most %d", o->length,
                           max_draft);
    if (o->draft_max > max_draft)
        return so_api_fail(err, 400, "invalid_value", "speculative.draft_max",
                           "'speculative.draft_max' is %d: this server allows at most %d",
                           o->draft_max, max_draft);
    if (o->draft_min > (o->draft_max ? o->draft_max : max_draft))
        return so_api_fail(err, 400, "invalid_value", "speculative.draft_min",
                           "'speculative.draft_min' is %d, above 'draft_max', which is %d",
                           o->draft_min, o->draft_max ? o->draft_max : max_draft);
    return true;
}

bool so_api_choose_spec(const so_api_request *r, const so_spec_opts *deflt, int max_draft,
                        so_buf *text, so_spec_opts *out, so_api_error *err) {
    const so_api_spec *s = &r->spec;
    so_spec_opts o = *deflt;
    if (max_draft == 0 && (s->drafter || s->enabled == 1))
        return so_api_fail(err, 400, "unsupported_value", "speculative",
                           "this server was started without speculation (--no-spec)");
    if (max_draft > 0 && !choose_drafter(r, deflt, text, err))
        return false;
    o.drafter = text->len ? text->data : NULL;
    if (!o.drafter) {
        *out = (so_spec_opts){0};
        return true;
    }
    if (s->drafter)
        o.length = 0;
    if (s->length)
        o.length = s->length;
    if (s->draft_max)
        o.draft_max = s->draft_max;
    if (s->draft_min)
        o.draft_min = s->draft_min;
    if (s->has_verify) {
        o.verify = s->verify;
        o.lenience = s->lenience;
    }
    if (!check_lengths(&o, max_draft, err))
        return false;
    *out = o;
    return true;
}
