/* Templates: comparison with Jinja2 (golden files of tools/golden_templates.py), errors, limits,
 * threads, origins of text. */
#include "so_test.h"

#include <locale.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/gguf.h"
#include "jinja/template.h"

/* ---- helpers ---- */

static json_t *golden(const char *name) {
    char path[128];
    json_error_t je;
    snprintf(path, sizeof path, "golden/templates/%s.json", name);
    json_t *j = json_load_file(so_test_data(path), JSON_ALLOW_NUL, &je);
    if (!j)
        fail_msg("%s: %s", path, je.text);
    return j;
}

static so_str json_bytes(const json_t *j) {
    return (so_str){json_string_value(j), json_string_length(j)};
}

/* Compiles and renders. */
static int render(so_str source, const json_t *vars, int64_t now, so_buf *out, so_err *err) {
    so_template *t = NULL;
    int rc = so_template_compile(source, &t, err);
    if (rc == 0)
        rc = so_template_render(t, vars, now, out, err);
    so_template_free(t);
    return rc;
}

static int render_c(const char *source, const char *vars_json, so_buf *out, so_err *err) {
    json_t *vars = json_loads(vars_json, 0, NULL);
    assert_non_null(vars);
    int rc = render(so_str_c(source), vars, 1, out, err);
    json_decref(vars);
    return rc;
}

static void expect_text(const char *source, const char *vars_json, const char *want) {
    so_buf out = {0};
    so_err err = {0};
    if (render_c(source, vars_json, &out, &err) != 0)
        fail_msg("%s: %s", source, err.msg);
    assert_string_equal(out.data ? out.data : "", want);
    so_buf_free(&out);
}

/* The render must fail with `code` and a message that contains `part`, without output. */
static void expect_error(const char *source, const char *vars_json, int code, const char *part) {
    so_buf out = {0};
    so_err err = {0};
    int rc = render_c(source, vars_json, &out, &err);
    if (rc != code || err.code != code || !strstr(err.msg, part))
        fail_msg("%s: got %d \"%s\", expected %d with \"%s\"", source, rc, err.msg, code, part);
    assert_int_equal(out.len, 0);
}

/* Compares with the result of Jinja2. The messages of its template and undefined errors must be
 * part of ours. */
static void check_case(const char *what, size_t i, so_str source, const json_t *vars, int64_t now,
                       const json_t *want) {
    so_buf out = {0};
    so_err err = {0};
    int rc = render(source, vars, now, &out, &err);
    const json_t *text = json_object_get(want, "text");
    const char *error = json_string_value(json_object_get(want, "error"));
    if (text && rc != 0)
        fail_msg("%s case %zu: %s", what, i, err.msg);
    if (text && !so_str_eq(so_buf_str(&out), json_bytes(text)))
        fail_msg("%s case %zu:\n%.*s\ngives\n%s\nJinja2 gives\n%s", what, i, SO_STR_ARG(source),
                 out.data ? out.data : "", json_string_value(text));
    if (!text && rc == 0)
        fail_msg("%s case %zu: gives \"%s\" where Jinja2 fails: %s", what, i, out.data, error);
    const char *message = error ? strstr(error, ": ") : NULL;
    if (message &&
        (strncmp(error, "TemplateError", 13) == 0 || strncmp(error, "UndefinedError", 14) == 0)) {
        assert_int_equal(rc, SO_EINVAL);
        char part[64];
        snprintf(part, sizeof part, "%.40s", message + 2);
        if (!strstr(err.msg, part))
            fail_msg("%s case %zu: \"%s\" does not contain \"%s\"", what, i, err.msg, part);
    }
    so_buf_free(&out);
}

/* ---- golden ---- */

static void features(void **state) {
    (void)state;
    json_t *g = golden("features");
    const json_t *cases = json_object_get(g, "cases"), *vars = json_object_get(g, "vars");
    int64_t now = json_integer_value(json_object_get(g, "now"));
    assert_true(json_array_size(cases) > 300);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i);
        check_case("features", i, json_bytes(json_object_get(c, "template")), vars, now, c);
    }
    json_decref(g);
}

static json_t *conversation_vars(const json_t *conv, const json_t *gold) {
    json_t *vars = json_object();
    static const char *const TOKENS[] = {"bos_token", "eos_token"};
    json_object_set_new(vars, "tools", json_null());
    json_object_set_new(vars, "documents", json_null());
    json_object_set(vars, "messages", json_object_get(conv, "messages"));
    json_object_set(vars, "add_generation_prompt", json_object_get(conv, "add_generation_prompt"));
    for (size_t i = 0; i < SO_LEN(TOKENS); i++)
        if (json_is_string(json_object_get(gold, TOKENS[i])))
            json_object_set(vars, TOKENS[i], json_object_get(gold, TOKENS[i]));
    json_object_update(vars, json_object_get(conv, "extra"));
    return vars;
}

static void check_conversations(const char *name, const json_t *gold, so_str source) {
    json_t *all = golden("conversations");
    const json_t *convs = json_object_get(all, "conversations"), *cases;
    cases = json_object_get(gold, "cases");
    assert_int_equal(json_array_size(convs), 30);
    assert_int_equal(json_array_size(cases), 30);
    for (size_t i = 0; i < 30; i++) {
        json_t *vars = conversation_vars(json_array_get(convs, i), gold);
        check_case(name, i, source, vars, json_integer_value(json_object_get(gold, "now")),
                   json_array_get(cases, i));
        json_decref(vars);
    }
    json_decref(all);
}

static void styles(void **state) {
    (void)state;
    static const char *const NAMES[] = {"alternate", "turns", "schema", "think", "rag", "calls"};
    for (size_t i = 0; i < SO_LEN(NAMES); i++) {
        char path[128];
        so_buf text = {0};
        so_err err;
        snprintf(path, sizeof path, "golden/templates/styles/%s.jinja", NAMES[i]);
        SO_OK_OR_FAIL(so_file_read(so_test_data(path), 1 << 20, &text, &err), err);
        json_t *gold = golden(NAMES[i]);
        check_conversations(NAMES[i], gold, so_buf_str(&text));
        json_decref(gold);
        so_buf_free(&text);
    }
}

static void shared_template(const char *name) {
    char path[128];
    snprintf(path, sizeof path, "tokenizers/%s/tokenizer_config.json", name);
    const char *file = so_test_shared(path);
    if (!file)
        SO_SKIP("no shared %s", path);
    json_t *cfg = json_load_file(file, 0, NULL), *gold = golden(name);
    assert_non_null(cfg);
    check_conversations(name, gold, json_bytes(json_object_get(cfg, "chat_template")));
    json_decref(cfg);
    json_decref(gold);
}

static void llama3_2(void **state) {
    (void)state;
    shared_template("llama3_2");
}

static void qwen2_5(void **state) {
    (void)state;
    shared_template("qwen2_5");
}

static void qwen3(void **state) {
    (void)state;
    shared_template("qwen3");
}

static void smollm2(void **state) {
    (void)state;
    json_t *gold = golden("smollm2");
    check_conversations("smollm2", gold, json_bytes(json_object_get(gold, "template")));
    json_decref(gold);
}

static void qwen_coder(void **state) {
    (void)state;
    const char *file = so_test_model("qwen2.5-coder-1.5b");
    so_gguf *g;
    so_str source;
    so_err err;
    if (!file)
        SO_SKIP("qwen2.5-coder-1.5b is not pulled");
    SO_OK_OR_FAIL(so_gguf_open(file, &g, &err), err);
    SO_OK_OR_FAIL(so_gguf_get_str(g, "tokenizer.chat_template", &source, &err), err);
    json_t *gold = golden("qwen2.5-coder-1.5b");
    check_conversations("qwen2.5-coder-1.5b", gold, source);
    json_decref(gold);
    so_gguf_close(g);
}

/* ---- errors name the thing and its line ---- */

static void errors_name_lines(void **state) {
    (void)state;
    expect_error("a\n\n{{ foo.bar }}", "{}", SO_EINVAL, "line 3: 'foo' is undefined");
    expect_error("{{ m.x.y }}", "{\"m\":{}}", SO_EINVAL, "'dict object' has no attribute 'x'");
    expect_error("\n{{ 1|nope }}", "{}", SO_EUNSUPPORTED, "line 2: unknown filter 'nope'");
    expect_error("{{ 1 is nope }}", "{}", SO_EUNSUPPORTED, "line 1: unknown test 'nope'");
    expect_error("{{ 'a'.nope() }}", "{}", SO_EINVAL, "'str object' has no attribute 'nope'");
    expect_error("{{ nope(1) }}", "{}", SO_EINVAL, "'nope' is undefined");
    expect_error("{{ 1|urlize }}", "{}", SO_EUNSUPPORTED, "unknown filter 'urlize'");
    expect_error("{{ 'a'.encode() }}", "{}", SO_EINVAL, "has no attribute 'encode'");
    expect_error("{{ '%e' % 1.5 }}", "{}", SO_EUNSUPPORTED, "unsupported format '%e'");
    expect_error("{{ '{:e}'.format(1.5) }}", "{}", SO_EUNSUPPORTED, "unsupported format 'e'");
    expect_error("{{ '%.2d' % 1 }}", "{}", SO_EUNSUPPORTED, "unsupported format '%.2d'");
    expect_error("{{ l|sort(attribute='a,b') }}", "{\"l\":[]}", SO_EUNSUPPORTED, "sort by more");
    expect_error("{{ 2 ** 3 }}", "{}", SO_EFORMAT, "got '**'");
    expect_error("{{ 0x1F }}", "{}", SO_EFORMAT, "got 'x1F'");
    expect_error("{{ cycler(1) }}", "{}", SO_EINVAL, "'cycler' is undefined");
    expect_error("{{ 'abcdefg' | truncate(5, true, '.', -1) }}", "{}", SO_EINVAL, "leeway");
    expect_error("{{ 'abcdefg' | truncate(2) }}", "{}", SO_EINVAL, "must be at least 3");
    expect_error("\n{% for x in l recursive %}{% endfor %}", "{}", SO_EUNSUPPORTED,
                 "line 2: recursive loops");
    expect_error("{% macro m() %}\n{{ varargs }}{% endmacro %}", "{}", SO_EUNSUPPORTED,
                 "line 2: 'varargs'");
    expect_error("{% print 1 %}", "{}", SO_EUNSUPPORTED, "{% print %}");
    expect_error("\n\n{% include 'x' %}", "{}", SO_EUNSUPPORTED, "line 3: {% include %}");
    expect_error("{% import 'x' as y %}", "{}", SO_EUNSUPPORTED, "{% import %}");
    expect_error("{% extends 'x' %}", "{}", SO_EUNSUPPORTED, "{% extends %}");
    expect_error("{% block x %}{% endblock %}", "{}", SO_EUNSUPPORTED, "{% block %}");
    expect_error("\n{% nope %}", "{}", SO_EFORMAT, "line 2: unknown tag 'nope'");
    expect_error("\n{% if x %}\n", "{}", SO_EFORMAT, "line 2: tag without its end");
    expect_error("{{ 1 +", "{}", SO_EFORMAT, "'{{' without '}}'");
    expect_error("{{ 'abc }}", "{}", SO_EFORMAT, "string without an end");
    expect_error("{{ raise_exception('no ' ~ x) }}", "{\"x\":7}", SO_EINVAL, "no 7 (raised");
    expect_error("{{ 9223372036854775807 + 1 }}", "{}", SO_ERANGE, "64 bits");
    expect_error("{{ 99999999999999999999 }}", "{}", SO_EFORMAT, "64 bits");
    expect_error("{{ 9223372036854775807 * 2 }}", "{}", SO_ERANGE, "64 bits");
    expect_error("{{ (-9223372036854775807 - 1) // -1 }}", "{}", SO_ERANGE, "64 bits");
    expect_text("{{ (-9223372036854775807 - 1) % -1 }}", "{}", "0");
}

static void bad_input(void **state) {
    (void)state;
    so_template *t = NULL;
    so_err err = {0};
    so_buf out = {0};
    assert_int_equal(so_template_compile(SO_STR("a\xFF"), &t, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "byte 1"));
    assert_null(t);
    char *big = so_calloc(1, (2 << 20) + 1);
    memset(big, 'x', 2 << 20);
    assert_int_equal(so_template_compile((so_str){big, 2 << 20}, &t, &err), SO_ELIMIT);
    free(big);
    SO_OK_OR_FAIL(so_template_compile(SO_STR("{{ x }}"), &t, &err), err);
    json_t *list = json_array(), *bad = json_object();
    assert_int_equal(so_template_render(t, list, 0, &out, &err), SO_EINVAL);
    json_object_set_new(bad, "x", json_stringn_nocheck("\xC3", 1));
    assert_int_equal(so_template_render(t, bad, 0, &out, &err), SO_EFORMAT);
    json_decref(list);
    json_decref(bad);

    /* a full buffer is an error, and its content is unchanged */
    so_buf small = {.max = 4};
    json_t *vars = json_pack("{s:s}", "x", "too long for four");
    so_buf_append_c(&small, "ab");
    assert_int_equal(so_template_render(t, vars, 0, &small, &err), SO_ELIMIT);
    assert_string_equal(small.data, "ab");
    assert_int_equal(so_template_render(t, vars, 0, &out, NULL), 0);
    assert_string_equal(out.data, "too long for four");
    json_decref(vars);
    so_buf_free(&small);
    so_buf_free(&out);
    so_template_free(t);
    so_template_free(NULL);
}

/* ---- bombs: each ends soon with SO_ELIMIT ---- */

static char *repeated(const char *unit, size_t times, const char *before, const char *after) {
    so_buf b = {0};
    so_buf_append_c(&b, before);
    for (size_t i = 0; i < times; i++)
        so_buf_append_c(&b, unit);
    so_buf_append_c(&b, after);
    return b.data;
}

static void expect_bomb(const char *source) {
    int64_t start = so_clock_ns();
    so_buf out = {0};
    so_err err = {0};
    int rc = render_c(source, "{\"l\":[1,2,3],\"s\":\"x\"}", &out, &err);
    if (rc != SO_ELIMIT || !strstr(err.msg, "line"))
        fail_msg("%.80s…: got %d \"%s\"", source, rc, err.msg);
    double ms = so_clock_ms_since(start);
    if (ms > 20000) /* usually 100 ms; sanitizers and busy machines are slower */
        fail_msg("%.80s… took %.0f ms", source, ms);
    assert_int_equal(out.len, 0);
}

static void bombs(void **state) {
    (void)state;
    static const char *const BOMBS[] = {
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='xxxxxxxxxxxxxxxx') %}{% for a in range(64) %}{% set n.s = n.s + "
        "n.s "
        "%}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor "
        "%}",
        "{% set n = namespace(s=[1]) %}{% for a in range(64) %}{% set n.s = n.s + n.s %}{% endfor "
        "%}",
        "{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor "
        "%}{{ n.s }}",
        "{% set n = namespace(s=[]) %}{% for a in range(5000) %}{% set n.s = [n.s] %}{% endfor "
        "%}{{ "
        "n.s|tojson }}",
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% "
        "set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% "
        "set n.b = [n.b, n.b] %}{% endfor %}{{ n.a < n.b }}",
        "{{ 'x' * 999999999999 }}",
        "{{ ('x' * 1000000) * 1000000 }}",
        "{{ [1] * 999999999999 }}",
        "{{ range(99999999) }}",
        "{{ range(-9223372036854775807, 9223372036854775807) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%.99999999999f' % 1 }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ '{:.2000000000f}'.format(1.5) }}",
        "{{ s|indent(99999999999, true) }}",
        "{{ l|tojson(indent=99999999999) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% macro k() %}{% call m() %}{{ k() }}{% "
        "endcall "
        "%}{% endmacro %}{{ k() }}",
        "{% set _ = l.append(l) %}{{ l }}",
        "{% set _ = l.append(l) %}{{ l|tojson }}",
        "{% set _ = l.append(l) %}{% set k = [1,2,3] %}{% set _ = k.append(k) %}{{ l == k }}",
        "{% for x in l %}{% set _ = l.append(x) %}{% endfor %}",
        "{% set n = namespace(g=l) %}{% for i in range(5000) %}{% set n.g = n.g|map('string') %}{% "
        "endfor %}{{ n.g|list }}",
        "{{ ('a' * 100000)|replace('', 'x' * 100000) }}",
        "{{ ('a' * 1000000).split('a')|join('x' * 1000) }}",
        "{% for i in range(99999) %}{{ ('ab' * 100000).rfind('ba' * 50000) }}{% endfor %}",
        "{% for i in range(99999) %}{{ 'b' in 'a' * 100000 }}{% endfor %}",
        "{% for i in range(99999) %}{{ ('a' * 100000).strip('bcdefghia' * 1000) }}{% endfor %}",
        "{% for i in range(99999) %}{{ ('ä' * 30000)[-1] }}{% endfor %}",
        "{% set d = {} %}{% for i in range(99999) %}{% set _ = d.update({i: i}) %}{% set _ = "
        "d.pop(i // 2, 0) %}{% endfor %}",
    };
    for (size_t i = 0; i < SO_LEN(BOMBS); i++)
        expect_bomb(BOMBS[i]);
}

static void deep_sources(void **state) {
    (void)state;
    static const char *const UNITS[] = {
        "(",    "[",  "{'a':", "not ", "-",         "+",  "x if x else ",
        "x|f(", "x[", "x(",    "x.a(", "x is in (", "~(", "1**-"};
    for (size_t i = 0; i < SO_LEN(UNITS); i++) {
        char *source = repeated(UNITS[i], (900 << 10) / strlen(UNITS[i]), "{{ ", "x }}");
        so_err err = {0};
        so_buf out = {0};
        int rc = render_c(source, "{\"x\":1}", &out, &err);
        if (rc != SO_ELIMIT && rc != SO_EFORMAT)
            fail_msg("many %s: got %d \"%s\"", UNITS[i], rc, err.msg);
        free(source);
    }
    static const char *const CHAINS[] = {"x + ", "x * ", "x or ", "x and "};
    for (size_t i = 0; i < SO_LEN(CHAINS); i++) {
        char *source = repeated(CHAINS[i], 50000, "{{ ", "x }}");
        expect_bomb(source);
        free(source);
    }
    char *source = repeated("|string", 50000, "{{ x", " }}");
    expect_bomb(source);
    free(source);
    source = repeated(".a", 50000, "{{ x", " }}");
    expect_bomb(source);
    free(source);
    source = repeated("{% if x %}", 50000, "", "");
    expect_bomb(source);
    free(source);
    source = repeated("{% for x in l %}", 50000, "", "");
    expect_bomb(source);
    free(source);
    source = repeated("{% macro m() %}", 50000, "", "");
    expect_bomb(source);
    free(source);
}

/* The limits do not affect a long conversation. */
static void large_conversation(void **state) {
    (void)state;
    so_err err = {0};
    so_buf out = {0};
    json_t *gold = golden("smollm2"), *messages = json_array();
    char *content = repeated("The quick brown fox. ", 100, "", "");
    for (int i = 0; i < 4000; i++)
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", i % 2 ? "assistant" : "user",
                                                  "content", content));
    json_t *vars = json_pack("{s:O,s:b}", "messages", messages, "add_generation_prompt", 1);
    SO_OK_OR_FAIL(render(json_bytes(json_object_get(gold, "template")), vars, 0, &out, &err), err);
    assert_true(out.len > 4000 * strlen(content));
    so_buf_free(&out);

    /* appending to one text takes linear time */
    static const char ACCUMULATE[] =
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t "
        "= n.t + m.role + m.content %}{% endfor %}{{ n.t }}";
    SO_OK_OR_FAIL(render(so_str_c(ACCUMULATE), vars, 0, &out, &err), err);
    assert_true(out.len > 4000 * strlen(content));
    so_buf_free(&out);
    free(content);
    json_decref(vars);
    json_decref(messages);
    json_decref(gold);
}

/* ---- state ---- */

typedef struct job {
    const so_template *t;
    const json_t *vars;
    const char *want;
    int bad;
} job;

static void *render_many(void *arg) {
    job *j = arg;
    for (int i = 0; i < 200; i++) {
        so_buf out = {0};
        if (so_template_render(j->t, j->vars, 1, &out, NULL) != 0 || strcmp(out.data, j->want) != 0)
            j->bad++;
        so_buf_free(&out);
    }
    return NULL;
}

static void many_threads(void **state) {
    (void)state;
    so_template *t;
    so_err err;
    SO_OK_OR_FAIL(so_template_compile(SO_STR("{% macro m(x) %}<{{ x }}>{% endmacro %}{% set _ = "
                                             "l.append(9) %}{% for x in l|sort %}{{ m(x) }}{% "
                                             "endfor %}{{ d.update(q=1) }}{{ d }}"),
                                      &t, &err),
                  err);
    json_t *vars = json_loads("{\"l\":[3,1,2],\"d\":{\"a\":1}}", 0, NULL);
    job jobs[4];
    pthread_t ids[4];
    for (int i = 0; i < 4; i++) {
        jobs[i] = (job){t, vars, "<1><2><3><9>None{'a': 1, 'q': 1}", 0};
        assert_int_equal(pthread_create(&ids[i], NULL, render_many, &jobs[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(ids[i], NULL);
        assert_int_equal(jobs[i].bad, 0);
    }
    json_decref(vars);
    so_template_free(t);
}

static void appends_and_keeps_variables(void **state) {
    (void)state;
    so_template *t;
    so_err err;
    so_buf out = {0};
    so_buf_append_c(&out, "before ");
    SO_OK_OR_FAIL(so_template_compile(SO_STR("{% set _ = l.append(1) %}{{ l }}"), &t, &err), err);
    json_t *vars = json_loads("{\"l\":[]}", 0, NULL);
    for (int i = 0; i < 2; i++)
        SO_OK_OR_FAIL(so_template_render(t, vars, 0, &out, &err), err);
    assert_string_equal(out.data, "before [1][1]");
    assert_int_equal(json_array_size(json_object_get(vars, "l")), 0);
    json_decref(vars);
    so_buf_free(&out);
    so_template_free(t);
}

/* now = 0 means the current time, in the local zone. */
static void present_time(void **state) {
    (void)state;
    char want[16];
    so_err err;
    so_buf out = {0};
    json_t *vars = json_object();
    time_t now = time(NULL);
    struct tm tm;
    strftime(want, sizeof want, "%Y", localtime_r(&now, &tm));
    SO_OK_OR_FAIL(render(SO_STR("{{ strftime_now('%Y') }}"), vars, 0, &out, &err), err);
    assert_string_equal(out.data, want); /* may fail at the turn of the year */
    so_buf_free(&out);
    json_decref(vars);
}

/* The locale of the host program must not change numbers. Without an installed locale that has a
 * decimal comma this tests only the C locale. */
static void foreign_locale(void **state) {
    (void)state;
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8"))
        setlocale(LC_NUMERIC, "fr_FR.UTF-8");
    expect_text("{{ 1.5 + x }} {{ '2.5'|float }} {{ '%.2f' % 1.25 }}", "{\"x\":0.25}",
                "1.75 2.5 1.25");
    setlocale(LC_NUMERIC, "C");
}

/* Deliberate differences: Python prints addresses of objects, ranges and views of a dict. */
static void differs_from_python(void **state) {
    (void)state;
    expect_text("{{ [1]|map('string') }} {{ 'a'.upper }} {{ range }}", "{}",
                "<generator object> <method object> <function object>");
    expect_text("{{ range(3) }} {{ {'a': 1}.items() }}", "{}", "[0, 1, 2] [('a', 1)]");
    expect_text("{{ -9223372036854775807 - 1 }}", "{}", "-9223372036854775808");
    expect_text("{% set x | replace('a', y) %}banana{% endset %}{{ x }}", "{\"y\":\"o\"}",
                "bonono");
}

/* Renders with `data` as the caller's data; `want` has '#' where a byte came from it. */
static void expect_origin(const char *source, const char *data_json, const char *text,
                          const char *want) {
    so_err err = {0};
    so_template *t;
    so_buf out = {0}, from = {0};
    json_t *vars = json_pack("{s:s}", "eos_token", "</s>"), *data = json_loads(data_json, 0, NULL);
    assert_non_null(data);
    SO_OK_OR_FAIL(so_template_compile(so_str_c(source), &t, &err), err);
    SO_OK_OR_FAIL(so_template_render_traced(t, vars, data, 0, &out, &from, &err), err);
    assert_string_equal(out.data, text);
    assert_int_equal(from.len, out.len);
    for (size_t i = 0; i < from.len; i++)
        from.data[i] = from.data[i] ? '#' : '.';
    if (strncmp(from.data, want, from.len) != 0 || strlen(want) != from.len)
        fail_msg("%s\n  %s\n  %.*s\n  %s", source, text, (int)from.len, from.data, want);
    so_template_free(t);
    so_buf_free(&out);
    so_buf_free(&from);
    json_decref(vars);
    json_decref(data);
}

static void origins(void **state) {
    (void)state;
    static const struct {
        const char *source, *data, *text, *want;
    } CASES[] = {
        {"a{{ x }}b{{ eos_token }}", "{\"x\":\"</s>\"}", "a</s>b</s>", ".####....."},
        {"{{ '<' + x + '>' }}", "{\"x\":\"xy\"}", "<xy>", ".##."},
        {"{% set s = x ~ eos_token %}{{ s ~ s }}", "{\"x\":\"ab\"}", "ab</s>ab</s>",
         "##....##...."},
        {"{{ x.strip() }}|{{ x | trim }}|", "{\"x\":\" a \"}", "a|a|", "#.#."},
        {"{{ x.split('-')[1] }}{{ x[1:3] }}", "{\"x\":\"ab-cd\"}", "cdb-", "####"},
        {"{{ x | upper }}{{ 'u' | upper }}", "{\"x\":\"aß\"}", "ASSU", "###."},
        {"{{ x.title() }}{{ x.capitalize() }}", "{\"x\":\"aB\"}", "AbAb", "####"},
        {"{{ x | replace('b', '</s>') }}", "{\"x\":\"abc\"}", "a</s>c", "#....#"},
        {"{{ '</s>' | replace('s', x) }}", "{\"x\":\"ab\"}", "</ab>", "..##."},
        {"{{ x | tojson }}", "{\"x\":[\"</s>\",1]}", "[\"</s>\", 1]", "..####....."},
        {"{{ x }}", "{\"x\":[\"</s>\"]}", "['</s>']", "..####.."},
        {"{{ x | join('-') }}", "{\"x\":[\"a\",\"b\"]}", "a-b", "#.#"},
        {"{{ x * 3 }}{{ '-' * 2 }}", "{\"x\":\"a\"}", "aaa--", "###.."},
        {"{{ '%s:%5s' % (x, x) }}", "{\"x\":\"ab\"}", "ab:   ab", "##....##"},
        {"{{ '[{}]'.format(x) }}", "{\"x\":\"ab\"}", "[ab]", ".##."},
        {"{{ '%.1s|%-3s|%r' % (x, x, x) }}", "{\"x\":\"ab\"}", "a|ab |'ab'", "#.##...##."},
        {"{{ '{:.1}|{:*^4}|{!r}'.format(x, x, x) }}", "{\"x\":\"ab\"}", "a|*ab*|'ab'",
         "#..##...##."},
        {"{{ x.partition('-')[2] }}{{ x.rsplit('-', 1)[0] }}", "{\"x\":\"a-b\"}", "ba", "##"},
        {"{{ x | truncate(5, true, '.', 0) }}", "{\"x\":\"abcdefg\"}", "abcd.", "####."},
        {"{{ x | title }}{{ x | lower }}", "{\"x\":\"aB\"}", "Abab", "####"},
        {"{{ x.removeprefix('a') }}{{ x.splitlines()[0] }}", "{\"x\":\"ab\"}", "bab", "###"},
        {"{{ '-'.join(x) }}{{ x.items() | first | last }}", "{\"x\":{\"a\":\"b\",\"c\":\"\"}}",
         "a-cb", "#.##"},
        {"{{ x.format(1) }}", "{\"x\":\"a{}b\"}", "a1b", "#.#"},
        {"{{ x | reverse }}", "{\"x\":\"ab\"}", "ba", "##"},
        {"{{ x | escape }}", "{\"x\":\"a<\"}", "a&lt;", "#...."},
        {"{{ x | indent(1) }}", "{\"x\":\"a\\nb\"}", "a\n b", "#..#"},
        {"{% for c in x %}{{ c }}.{% endfor %}", "{\"x\":\"ab\"}", "a.b.", "#.#."},
        {"{% for k in x %}{{ k }}{% endfor %}", "{\"x\":{\"</s>\":1}}", "</s>", "####"},
        {"{% set y %}<{{ x }}>{% endset %}{{ y | trim }}", "{\"x\":\"a\"}", "<a>", ".#."},
        {"{% macro m(a) %}({{ a }}){% endmacro %}{{ m(x) }}", "{\"x\":\"a\"}", "(a)", ".#."},
        {"{{ '<|' + x.role + '|>' }}", "{\"x\":{\"role\":\"user\"}}", "<|user|>", "........"},
        {"{{ '<|' + x.role + '|>' }}", "{\"x\":{\"role\":\"a|>\"}}", "<|a|>|>", "..###.."},
        {"{{ x.role[0] }}", "{\"x\":{\"role\":[\"a\"]}}", "a", "#"},
    };
    for (size_t i = 0; i < SO_LEN(CASES); i++)
        expect_origin(CASES[i].source, CASES[i].data, CASES[i].text, CASES[i].want);
}

/* Flags are kept when a buffer grows beyond one chunk. */
static void origins_of_long_texts(void **state) {
    (void)state;
    so_err err = {0};
    so_template *t;
    so_buf out = {0}, from = {0}, x = {0};
    for (int i = 0; i < 3000; i++)
        so_buf_append(&x, "data", 4);
    json_t *vars = json_object(), *data = json_pack("{s:s#}", "x", x.data, (int)x.len);
    const char *source = "{% set ns = namespace(s='') %}{% for i in range(40) %}"
                         "{% set ns.s = ns.s ~ '<' ~ x ~ '>' %}{% endfor %}{{ ns.s }}";
    SO_OK_OR_FAIL(so_template_compile(so_str_c(source), &t, &err), err);
    SO_OK_OR_FAIL(so_template_render_traced(t, vars, data, 0, &out, &from, &err), err);
    assert_int_equal(out.len, 40 * (x.len + 2));
    assert_int_equal(from.len, out.len);
    for (size_t i = 0; i < out.len; i++)
        if (from.data[i] != (out.data[i] != '<' && out.data[i] != '>'))
            fail_msg("byte %zu ('%c') has origin %d", i, out.data[i], from.data[i]);
    so_template_free(t);
    so_buf_free(&out);
    so_buf_free(&from);
    so_buf_free(&x);
    json_decref(vars);
    json_decref(data);
}

int main(void) {
    setenv("TZ", "UTC", 1);
    tzset();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(features),
        cmocka_unit_test(styles),
        cmocka_unit_test(smollm2),
        cmocka_unit_test(llama3_2),
        cmocka_unit_test(qwen2_5),
        cmocka_unit_test(qwen3),
        cmocka_unit_test(qwen_coder),
        cmocka_unit_test(errors_name_lines),
        cmocka_unit_test(bad_input),
        cmocka_unit_test(bombs),
        cmocka_unit_test(deep_sources),
        cmocka_unit_test(large_conversation),
        cmocka_unit_test(many_threads),
        cmocka_unit_test(appends_and_keeps_variables),
        cmocka_unit_test(present_time),
        cmocka_unit_test(foreign_locale),
        cmocka_unit_test(differs_from_python),
        cmocka_unit_test(origins),
        cmocka_unit_test(origins_of_long_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
