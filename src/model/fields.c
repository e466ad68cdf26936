/* Typed, range-checked reads from GGUF metadata and JSON objects; fields.h has the contract.
 *
 * Owns the error messages about fields. Refuses to guess: a key of the wrong type is an error, not
 * an absent key. Any thread; no state except the caller's so_fields. */
#include "model/fields.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"

void so_fields_fail(so_fields *f, int code, const char *fmt, ...) {
    if (f->rc != 0)
        return;
    char msg[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    f->rc = so_err_set(f->err, code, "%s: %s", f->file, msg);
}

/* The GGUF entry of a key, NULL if absent. */
static const so_gguf_kv *entry(const so_fields *f, const char *key) {
    char full[128];
    snprintf(full, sizeof full, "%s%s", f->prefix, key);
    return so_gguf_find(f->gguf, full);
}

static const json_t *value(const so_fields *f, const char *key) {
    const json_t *v = json_object_get(f->json, key);
    return v && !json_is_null(v) ? v : NULL;
}

bool so_fields_has(const so_fields *f, const char *key) {
    return f->gguf ? entry(f, key) != NULL : value(f, key) != NULL;
}

static const char *json_kind(const json_t *v) {
    static const char *const names[] = {"an object", "an array", "a string", "an integer",
                                        "a number",  "true",     "false",    "null"};
    size_t t = (size_t)json_typeof(v);
    return t < SO_LEN(names) ? names[t] : "of unknown type";
}

/* A number of any type as double and, if it is whole, as integer. */
typedef struct number {
    double real;
    int64_t whole;
    bool is_whole;
} number;

static bool gguf_number(so_fields *f, const char *key, number *out) {
    const so_gguf_kv *kv = entry(f, key);
    if (!kv)
        return false;
    if (kv->n == 0 || !so_gguf_elem_f64(kv, 0, &out->real)) {
        so_fields_fail(f, SO_EFORMAT, "%s%s is %s%s; a number is expected", f->prefix, key,
                       so_gguf_type_name(kv->elem), kv->type == SO_GGUF_ARRAY ? " (an array)" : "");
        return false;
    }
    out->is_whole = so_gguf_elem_i64(kv, 0, &out->whole);
    for (uint64_t i = 1; i < kv->n; i++) {
        double other = 0;
        so_gguf_elem_f64(kv, i, &other);
        if (other != out->real) {
            so_fields_fail(f, SO_EUNSUPPORTED,
                           "%s%s differs between layers (%g and %g), which is not supported",
                           f->prefix, key, out->real, other);
            return false;
        }
    }
    return true;
}

static bool json_number(so_fields *f, const char *key, number *out) {
    const json_t *v = value(f, key);
    if (!v)
        return false;
    if (!json_is_number(v)) {
        so_fields_fail(f, SO_EFORMAT, "%s%s is %s; a number is expected", f->prefix, key,
                       json_kind(v));
        return false;
    }
    out->real = json_number_value(v);
    out->is_whole = json_is_integer(v) || (out->real == floor(out->real) && fabs(out->real) < 1e15);
    out->whole = json_is_integer(v) ? json_integer_value(v)
                 : out->is_whole    ? (int64_t)out->real
                                    : 0;
    return true;
}

static bool read_number(so_fields *f, const char *key, number *out) {
    return f->gguf ? gguf_number(f, key, out) : json_number(f, key, out);
}

static void fail_missing(so_fields *f, const char *key) {
    so_fields_fail(f, SO_EFORMAT, "%s%s is missing", f->prefix, key);
}

int64_t so_fields_int(so_fields *f, const char *key, int64_t lo, int64_t hi, int64_t fallback) {
    int64_t otherwise = fallback == SO_FIELD_REQUIRED ? lo : fallback;
    number n = {0};
    if (f->rc != 0)
        return otherwise;
    if (!read_number(f, key, &n)) {
        if (fallback == SO_FIELD_REQUIRED)
            fail_missing(f, key);
        return otherwise;
    }
    if (!n.is_whole)
        so_fields_fail(f, SO_EFORMAT, "%s%s is %g; a whole number is expected", f->prefix, key,
                       n.real);
    else if (n.whole < lo || n.whole > hi)
        so_fields_fail(f, SO_ERANGE, "%s%s is %lld; %lld to %lld is expected", f->prefix, key,
                       (long long)n.whole, (long long)lo, (long long)hi);
    return f->rc == 0 ? n.whole : otherwise;
}

double so_fields_num(so_fields *f, const char *key, double lo, double hi, double fallback) {
    number n = {0};
    if (f->rc != 0)
        return isnan(fallback) ? hi : fallback;
    if (!read_number(f, key, &n)) {
        if (isnan(fallback))
            fail_missing(f, key);
        return isnan(fallback) ? hi : fallback;
    }
    if (!(n.real > lo && n.real <= hi))
        so_fields_fail(f, SO_ERANGE, "%s%s is %g; more than %g and at most %g is expected",
                       f->prefix, key, n.real, lo, hi);
    return n.real;
}

bool so_fields_flag(so_fields *f, const char *key, bool fallback) {
    if (f->rc != 0 || !so_fields_has(f, key))
        return fallback;
    if (f->gguf) {
        const so_gguf_kv *kv = entry(f, key);
        int64_t v = 0;
        if (kv->type == SO_GGUF_BOOL && so_gguf_elem_i64(kv, 0, &v))
            return v != 0;
    } else if (json_is_boolean(value(f, key))) {
        return json_is_true(value(f, key));
    }
    so_fields_fail(f, SO_EFORMAT, "%s%s is not true or false", f->prefix, key);
    return fallback;
}

so_str so_fields_str(so_fields *f, const char *key) {
    if (f->rc != 0 || !so_fields_has(f, key))
        return SO_STR("");
    if (f->gguf) {
        const so_gguf_kv *kv = entry(f, key);
        if (kv->type == SO_GGUF_STRING)
            return kv->strings[0];
    } else if (json_is_string(value(f, key))) {
        const json_t *v = value(f, key);
        return (so_str){json_string_value(v), json_string_length(v)};
    }
    so_fields_fail(f, SO_EFORMAT, "%s%s is not a string", f->prefix, key);
    return SO_STR("");
}

void so_fields_refuse(so_fields *f, const char *key, const char *what) {
    if (f->rc != 0 || !so_fields_has(f, key))
        return;
    if (!f->gguf && json_is_false(value(f, key)))
        return;
    number n = {0};
    if (!f->gguf && json_is_true(value(f, key)))
        n.real = 1;
    else if (!read_number(f, key, &n))
        return; /* read_number has set the error */
    if (n.real != 0)
        so_fields_fail(f, SO_EUNSUPPORTED, "%s%s is %g: %s is not supported", f->prefix, key,
                       n.real, what);
}
