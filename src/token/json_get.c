/* Typed access to JSON members; every error names the path, the key and what was found. */
#include "token/json_get.h"

#include <stdio.h>

int so_json_bad(const char *path, const char *key, so_err *err, const char *fmt, ...) {
    char what[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return so_err_set(err, SO_EFORMAT, "%s%s%s: %s", path, key ? "." : "", key ? key : "", what);
}

static const char *type_name(const json_t *j) {
    static const char *const names[] = {"an object", "an array", "a string", "an integer",
                                        "a number",  "true",     "false",    "null"};
    return j ? names[json_typeof(j)] : "missing";
}

int so_json_get_str(const json_t *o, const char *path, const char *key, so_str *out, so_err *err) {
    const json_t *j = json_object_get(o, key);
    if (!json_is_string(j))
        return so_json_bad(path, key, err, "must be a string, it is %s", type_name(j));
    *out = so_json_str(j);
    return 0;
}

int so_json_get_bool(const json_t *o, const char *path, const char *key, bool *out, so_err *err) {
    const json_t *j = json_object_get(o, key);
    if (!j || json_is_null(j))
        return 0;
    if (!json_is_boolean(j))
        return so_json_bad(path, key, err, "must be true or false, it is %s", type_name(j));
    *out = json_is_true(j);
    return 0;
}

int so_json_get_int(const json_t *o, const char *path, const char *key, json_int_t lo,
                    json_int_t hi, json_int_t *out, so_err *err) {
    const json_t *j = json_object_get(o, key);
    if (!j)
        return 0;
    if (!json_is_integer(j))
        return so_json_bad(path, key, err, "must be an integer, it is %s", type_name(j));
    json_int_t v = json_integer_value(j);
    if (v < lo || v > hi)
        return so_json_bad(path, key, err, "must be %lld to %lld, it is %lld", (long long)lo,
                           (long long)hi, (long long)v);
    *out = v;
    return 0;
}
