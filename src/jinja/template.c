/* The interface of the template interpreter: compile and render.
 *
 * A compiled template is immutable, so any thread may render it. A render allocates from an arena
 * of its own, which is freed at the end; its text is appended to the caller's buffer only if the
 * whole render succeeds. Numbers and dates are formatted in the C locale, independent of the host
 * program's. */
#include "jinja/template.h"

#include <locale.h>
#include <stdlib.h>

#include "jinja/impl.h"

struct so_template {
    so_arena arena;
    so_jj_node *root;
};

/* A function of its own, so that no local variable of the caller is live across setjmp. */
static int compile_guarded(so_jj *x, so_template *t, so_str source) {
    if (setjmp(x->exit) != 0)
        return x->code;
    t->root = so_jj_parse(x, source);
    so_jj_resolve(x, t->root);
    return 0;
}

static int check_source(so_str source, so_err *err) {
    size_t n_chars, bad;
    if (source.len > SO_JJ_MAX_SOURCE)
        return so_err_set(err, SO_ELIMIT, "template of %zu bytes; the limit is %d", source.len,
                          SO_JJ_MAX_SOURCE);
    if (!so_jj_utf8_check(source, &n_chars, &bad))
        return so_err_set(err, SO_EFORMAT, "template: invalid UTF-8 at byte %zu", bad);
    return 0;
}

int so_template_compile(so_str source, so_template **out, so_err *err) {
    int rc = check_source(source, err);
    if (rc)
        return rc;
    so_template *t = SO_NEW(so_template);
    t->arena.max = SO_JJ_MAX_COMPILE_BYTES;
    so_jj *x = SO_NEW(so_jj);
    *x = (so_jj){.arena = &t->arena, .err = err, .line = 1, .max_steps = SO_JJ_MAX_STEPS};
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), old = uselocale(c);
    rc = compile_guarded(x, t, source);
    uselocale(old);
    freelocale(c);
    free(x);
    if (rc) {
        so_template_free(t);
        return rc;
    }
    *out = t;
    return 0;
}

void so_template_free(so_template *t) {
    if (!t)
        return;
    so_arena_free(&t->arena);
    free(t);
}

static int render_guarded(so_jj *x, const so_template *t, const json_t *vars, const json_t *data) {
    if (setjmp(x->exit) != 0)
        return x->code;
    so_jj_dict *all = so_jj_from_json(x, vars).dict;
    if (data) {
        x->reads_data = true;
        so_jj_dict_update(x, all, so_jj_from_json(x, data), &(so_jj_args){0});
    }
    x->vars = all;
    size_t more = x->arena->used + x->in_bytes;
    if (!so_mul_size(more, SO_JJ_INPUT_FACTOR, &more))
        more = 0;
    x->arena->max += more;
    x->max_out += more;
    x->max_steps += x->steps * SO_JJ_STEP_FACTOR;
    so_jj_run(x, t->root);
    return 0;
}

int so_template_render_traced(const so_template *t, const json_t *vars, const json_t *data,
                              int64_t now, so_buf *out, so_buf *from_data, so_err *err) {
    if (!json_is_object(vars) || (data && !json_is_object(data)))
        return so_err_set(err, SO_EINVAL, "template: the variables must be a JSON object");
    so_arena arena = {.max = SO_JJ_MAX_RENDER_BYTES};
    so_jj_buf text = {0};
    so_jj *x = SO_NEW(so_jj);
    *x = (so_jj){.arena = &arena,
                 .err = err,
                 .line = 1,
                 .max_steps = SO_JJ_MAX_STEPS,
                 .max_out = SO_JJ_MAX_OUTPUT,
                 .out = &text,
                 .track_origins = from_data != NULL,
                 .now = now};
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), old = uselocale(c);
    int rc = render_guarded(x, t, vars, data);
    uselocale(old);
    freelocale(c);
    if (rc == 0 && text.len) {
        so_buf_append(out, text.data, text.len);
        if (from_data)
            so_buf_append(from_data, so_jj_origin(x, text.data), text.len);
        if (out->full || (from_data && from_data->full))
            rc = so_err_set(err, SO_ELIMIT, "the rendered text does not fit its buffer");
    }
    free(x);
    so_arena_free(&arena);
    return rc;
}

int so_template_render(const so_template *t, const json_t *vars, int64_t now, so_buf *out,
                       so_err *err) {
    return so_template_render_traced(t, vars, NULL, now, out, NULL, err);
}
