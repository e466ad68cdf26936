/* All lines are checked before the first prompt runs, so that an error in line 80 is reported at
 * once and not after an hour. Empty lines are skipped; unknown fields are ignored. */
#include "cli/prompts.h"

#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"

enum { MAX_FILE = 256 << 20, MAX_PROMPTS = 1000000, MAX_TURNS = 1000 };

static int check_turns(const json_t *turns, const char *path, int line, so_err *err) {
    size_t n = json_array_size(turns);
    if (!json_is_array(turns) || n == 0 || n > MAX_TURNS)
        return so_err_set(err, SO_EFORMAT, "%s:%d: \"turns\" must be a list of 1 to %d strings",
                          path, line, MAX_TURNS);
    for (size_t i = 0; i < n; i++)
        if (!json_is_string(json_array_get(turns, i)))
            return so_err_set(err, SO_EFORMAT, "%s:%d: turn %zu is not a string", path, line,
                              i + 1);
    return SO_OK;
}

/* Takes ownership of `object`. */
static int from_object(json_t *object, const char *path, int line, so_prompt *out, so_err *err) {
    json_t *turns = json_object_get(object, "turns"), *prompt = json_object_get(object, "prompt");
    json_t *system = json_object_get(object, "system");
    int rc = SO_OK;
    if (!json_is_object(object) || !turns == !prompt)
        rc = so_err_set(err, SO_EFORMAT,
                        "%s:%d: must be an object with either \"turns\" or \"prompt\"", path, line);
    else if (prompt && !json_is_string(prompt))
        rc = so_err_set(err, SO_EFORMAT, "%s:%d: \"prompt\" is not a string", path, line);
    else if (system && !json_is_string(system))
        rc = so_err_set(err, SO_EFORMAT, "%s:%d: \"system\" is not a string", path, line);
    else if (turns)
        rc = check_turns(turns, path, line, err);
    if (rc != SO_OK) {
        json_decref(object);
        return rc;
    }
    *out = (so_prompt){.line = line,
                       .id = json_object_get(object, "id"),
                       .system = json_string_value(system),
                       .category = json_object_get(object, "category"),
                       .n_turns = turns ? (int)json_array_size(turns) : 1,
                       .object = object};
    out->turns = SO_NEW_N(so_str, out->n_turns);
    for (int i = 0; i < out->n_turns; i++) {
        const json_t *s = turns ? json_array_get(turns, (size_t)i) : prompt;
        out->turns[i] = (so_str){json_string_value(s), json_string_length(s)};
    }
    return SO_OK;
}

static bool is_blank(so_str s) {
    for (size_t i = 0; i < s.len; i++)
        if (!strchr(" \t\r", s.ptr[i]) || s.ptr[i] == '\0')
            return false;
    return true;
}

static int add_line(so_prompts *p, so_str text, const char *path, int line, so_err *err) {
    json_error_t je;
    json_t *object = json_loadb(text.ptr, text.len, JSON_ALLOW_NUL, &je);
    if (!object)
        return so_err_set(err, SO_EFORMAT, "%s:%d: not JSON: %s (column %d)", path, line, je.text,
                          je.column);
    if (p->n >= MAX_PROMPTS) {
        json_decref(object);
        return so_err_set(err, SO_ELIMIT, "%s: more than %d prompts", path, MAX_PROMPTS);
    }
    if ((p->n & (p->n - 1)) == 0) /* grow at every power of two */
        p->items = so_realloc(p->items, (size_t)SO_MAX(1, 2 * p->n) * sizeof *p->items);
    int rc = from_object(object, path, line, &p->items[p->n], err);
    p->n += rc == SO_OK;
    return rc;
}

int so_prompts_read(const char *path, so_prompts *out, so_err *err) {
    so_buf file = {.max = MAX_FILE};
    so_prompts p = {0};
    int rc = so_file_read(path, MAX_FILE, &file, err), line = 0;
    for (size_t at = 0; rc == SO_OK && at < file.len;) {
        char *end = memchr(file.data + at, '\n', file.len - at);
        size_t len = end ? (size_t)(end - file.data) - at : file.len - at;
        so_str text = {file.data + at, len};
        line++;
        if (!is_blank(text))
            rc = add_line(&p, text, path, line, err);
        at += len + 1;
    }
    if (rc == SO_OK && p.n == 0)
        rc = so_err_set(err, SO_EFORMAT, "%s: contains no prompt", path);
    so_buf_free(&file);
    if (rc == SO_OK)
        *out = p;
    else
        so_prompts_free(&p);
    return rc;
}

void so_prompts_single(so_str text, const char *system, so_prompts *out) {
    *out = (so_prompts){.items = SO_NEW(so_prompt), .n = 1};
    out->items[0] = (so_prompt){.line = 1, .system = system, .n_turns = 1};
    out->items[0].turns = SO_NEW(so_str);
    out->items[0].turns[0] = text;
}

void so_prompts_free(so_prompts *p) {
    for (int i = 0; i < p->n; i++) {
        free(p->items[i].turns);
        json_decref(p->items[i].object);
    }
    free(p->items);
    *p = (so_prompts){0};
}
