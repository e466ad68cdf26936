/* Renders templates for tools/fuzz_templates.py. Reads one JSON object per line, {"template",
 * "vars", "now"}, and writes one per line, {"text"} or {"error", "code"}. */
#include <stdio.h>
#include <stdlib.h>

#include "jinja/template.h"

static json_t *render(const json_t *job) {
    so_err err = {0};
    so_template *t = NULL;
    so_buf out = {0};
    json_t *src = json_object_get(job, "template");
    so_str source = {json_string_value(src), json_string_length(src)};
    int rc = so_template_compile(source, &t, &err);
    if (rc == 0)
        rc = so_template_render(t, json_object_get(job, "vars"),
                                json_integer_value(json_object_get(job, "now")), &out, &err);
    json_t *r = rc ? json_pack("{s:s,s:i}", "error", err.msg, "code", rc)
                   : json_pack("{s:s%}", "text", out.data ? out.data : "", out.len);
    so_template_free(t);
    so_buf_free(&out);
    return r ? r : json_pack("{s:s,s:i}", "error", "invalid UTF-8 came out", "code", 1);
}

int main(void) {
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        json_t *job = json_loads(line, JSON_ALLOW_NUL, NULL);
        json_t *r = job ? render(job) : json_pack("{s:s,s:i}", "error", "bad job", "code", 1);
        json_dumpf(r, stdout, JSON_COMPACT);
        putchar('\n');
        fflush(stdout);
        json_decref(r);
        json_decref(job);
    }
    free(line);
    return 0;
}
