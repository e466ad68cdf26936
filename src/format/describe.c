/* Describes checkpoints (see describe.h). Values that JSON cannot represent are replaced: invalid
 * UTF-8 by U+FFFD, NaN and infinity by null, integers over 63 bits by a real number. Reads only the
 * open checkpoint; any thread. */
#include "format/describe.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "base/mem.h"

enum {
    FULL_ARRAY = 64, /* longer arrays are shortened to FIRST elements in JSON */
    FIRST = 8,
    LINE_ITEMS = 12, /* elements of an array in a line of text, if they fit */
};

static void find_arch(const so_checkpoint *ck, so_description *d) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    const char *model_type =
        json_string_value(json_object_get(so_checkpoint_config(ck), "model_type"));
    so_str arch = SO_STR("unknown");
    if (g)
        so_gguf_get_str(g, "general.architecture", &arch, NULL);
    else if (model_type)
        arch = so_str_c(model_type);
    so_buf b = {0};
    so_describe_text(arch, 30, &b);
    snprintf(d->arch, sizeof d->arch, "%.60s", b.len ? b.data : "unknown");
    so_buf_free(&b);
}

void so_describe(const so_checkpoint *ck, so_description *out) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    *out = (so_description){0};
    if (g)
        snprintf(out->format, sizeof out->format, "GGUF v%" PRIu32, so_gguf_version(g));
    else
        snprintf(out->format, sizeof out->format, "safetensors");
    find_arch(ck, out);
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++) {
        const so_tensor *t = so_checkpoint_tensor_at(ck, i);
        uint64_t n = (uint64_t)so_tensor_count(t);
        out->n_params += n;
        out->tensor_bytes += t->n_bytes;
        out->by_dtype[t->dtype].n_tensors++;
        out->by_dtype[t->dtype].n_params += n;
        out->by_dtype[t->dtype].n_bytes += t->n_bytes;
    }
}

/* Decodes the character of s at *at and advances *at. An invalid byte counts as one character with
 * the value −1. */
static utf8proc_int32_t next_char(so_str s, size_t *at, size_t *len) {
    utf8proc_int32_t c;
    utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)s.ptr + *at,
                                          (utf8proc_ssize_t)SO_MIN(s.len - *at, (size_t)4), &c);
    *len = n > 0 ? (size_t)n : 1;
    *at += *len;
    return n > 0 ? c : -1;
}

void so_describe_text(so_str s, size_t max_chars, so_buf *out) {
    size_t at = 0, len;
    for (size_t n = 0; at < s.len; n++) {
        if (n == max_chars) {
            so_buf_append_c(out, "…");
            return;
        }
        utf8proc_int32_t c = next_char(s, &at, &len);
        if (c == '\n')
            so_buf_append_c(out, "\\n");
        else if (c == '\t')
            so_buf_append_c(out, "\\t");
        else if (c < 0)
            so_buf_printf(out, "\\x%02x", (unsigned char)s.ptr[at - 1]);
        else if (c < 32 || (c >= 0x7F && c < 0xA0) || c == 0x2028 || c == 0x2029 ||
                 (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069))
            so_buf_printf(out, "\\u%04x", (unsigned)c);
        else
            so_buf_append(out, s.ptr + at - len, len);
    }
}

json_t *so_describe_json_text(so_str s) {
    json_t *v = json_stringn(s.ptr, s.len);
    if (v)
        return v;
    so_buf b = {0};
    size_t at = 0, len;
    while (at < s.len) {
        if (next_char(s, &at, &len) < 0)
            so_buf_append_c(&b, "\xEF\xBF\xBD");
        else
            so_buf_append(&b, s.ptr + at - len, len);
    }
    v = json_stringn(b.data, b.len);
    so_buf_free(&b);
    return v ? v : json_null();
}

/* The shortest decimal that parses to the same float: 1e-05, not 9.9999997473787516e-06. */
static double shortest(double v) {
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if ((double)strtof(text, NULL) == v)
            break;
    }
    return strtod(text, NULL);
}

static json_t *json_elem(const so_gguf_kv *kv, uint64_t i) {
    int64_t whole;
    double real;
    if (kv->elem == SO_GGUF_STRING)
        return so_describe_json_text(kv->strings[i]);
    if (kv->elem == SO_GGUF_ARRAY)
        return json_null();
    if (so_gguf_elem_i64(kv, i, &whole))
        return kv->elem == SO_GGUF_BOOL ? json_boolean(whole) : json_integer(whole);
    if (so_gguf_elem_f64(kv, i, &real) && isfinite(real))
        return json_real(kv->elem == SO_GGUF_F32 ? shortest(real) : real);
    return json_null();
}

static json_t *json_elems(const so_gguf_kv *kv, uint64_t n) {
    json_t *list = json_array();
    for (uint64_t i = 0; i < n; i++)
        json_array_append_new(list, json_elem(kv, i));
    return list;
}

static json_t *json_value(const so_gguf_kv *kv) {
    if (kv->type != SO_GGUF_ARRAY)
        return json_elem(kv, 0);
    if (kv->n <= FULL_ARRAY && kv->elem != SO_GGUF_ARRAY)
        return json_elems(kv, kv->n);
    return json_pack("{s:s, s:I, s:o}", "type", so_gguf_type_name(kv->elem), "length",
                     (json_int_t)kv->n, "first",
                     json_elems(kv, kv->elem == SO_GGUF_ARRAY ? 0 : FIRST));
}

static json_t *json_metadata(const so_checkpoint *ck) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    if (!g)
        return json_deep_copy(so_checkpoint_config(ck));
    json_t *o = json_object();
    for (size_t i = 0; i < so_gguf_n_kv(g); i++) {
        const so_gguf_kv *kv = so_gguf_kv_at(g, i);
        json_t *key = so_describe_json_text(kv->key);
        json_object_set_new(o, json_string_value(key), json_value(kv));
        json_decref(key);
    }
    return o;
}

static json_t *json_tensors(const so_checkpoint *ck) {
    json_t *list = json_array();
    bool slowest_first = !so_checkpoint_gguf(ck);
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++) {
        const so_tensor *t = so_checkpoint_tensor_at(ck, i);
        json_t *shape = json_array();
        for (int d = 0; d < t->n_dims; d++)
            json_array_append_new(shape,
                                  json_integer(t->dims[slowest_first ? t->n_dims - 1 - d : d]));
        json_array_append_new(list, json_pack("{s:o, s:s, s:o, s:I}", "name",
                                              so_describe_json_text(t->name), "dtype",
                                              so_dtype_get((int)t->dtype)->name, "shape", shape,
                                              "bytes", (json_int_t)t->n_bytes));
    }
    return list;
}

json_t *so_describe_json(const so_checkpoint *ck) {
    so_description d;
    so_describe(ck, &d);
    json_t *types = json_object();
    for (int t = 0; t < SO_DTYPE_COUNT; t++)
        if (d.by_dtype[t].n_tensors)
            json_object_set_new(types, so_dtype_get(t)->name,
                                json_pack("{s:I, s:I, s:I}", "tensors",
                                          (json_int_t)d.by_dtype[t].n_tensors, "parameters",
                                          (json_int_t)d.by_dtype[t].n_params, "bytes",
                                          (json_int_t)d.by_dtype[t].n_bytes));
    return json_pack("{s:o, s:s, s:s, s:I, s:I, s:o, s:o, s:o}", "path",
                     so_describe_json_text(so_str_c(so_checkpoint_path(ck))), "format", d.format,
                     "arch", d.arch, "parameters", (json_int_t)d.n_params, "bytes",
                     (json_int_t)so_checkpoint_bytes(ck), "types", types, "tensors",
                     json_tensors(ck), "metadata", json_metadata(ck));
}

void so_describe_type(const so_gguf_kv *kv, so_buf *out) {
    so_buf_append_c(out, so_gguf_type_name(kv->elem));
    if (kv->type == SO_GGUF_ARRAY)
        so_buf_printf(out, "[%" PRIu64 "]", kv->n);
}

static void append_elem(const so_gguf_kv *kv, uint64_t i, size_t width, so_buf *out) {
    int64_t whole;
    double real;
    if (kv->elem == SO_GGUF_STRING)
        so_describe_text(kv->strings[i], width, out);
    else if (kv->elem == SO_GGUF_BOOL && so_gguf_elem_i64(kv, i, &whole))
        so_buf_append_c(out, whole ? "true" : "false");
    else if (so_gguf_elem_i64(kv, i, &whole))
        so_buf_printf(out, "%" PRId64, whole);
    else if (so_gguf_elem_f64(kv, i, &real))
        so_buf_printf(out, "%.9g", kv->elem == SO_GGUF_F32 ? shortest(real) : real);
}

void so_describe_value(const so_gguf_kv *kv, size_t width, so_buf *out) {
    if (kv->elem == SO_GGUF_ARRAY)
        return;
    if (kv->type != SO_GGUF_ARRAY) {
        append_elem(kv, 0, width, out);
        return;
    }
    size_t start = out->len;
    for (uint64_t i = 0; i < kv->n; i++) {
        size_t used = out->len - start;
        if (i == LINE_ITEMS || used >= width) {
            so_buf_append_c(out, ", …");
            return;
        }
        if (i > 0)
            so_buf_append_c(out, ", ");
        append_elem(kv, i, SO_MIN(width, (size_t)24), out);
    }
}
