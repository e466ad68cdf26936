/* Reads safetensors files. The header is JSON; everything in it is checked against the file before
 * use.
 *
 * Invariant, required by the format: sorted by offset, the tensors cover the data section exactly,
 * each starting where the previous one ends. There are no gaps, no overlaps and no bytes after the
 * last tensor, so a truncated file is always detected. Refuses headers over 32 MiB, duplicate names
 * and dtypes that the format does not define. An open file is read-only and may be used from any
 * thread. */
#include "format/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>

static const uint64_t MAX_HEADER = 32u << 20;

typedef struct kind {
    const char *name;
    int bytes;
    int dtype;        /* so_dtype; −1 if not supported */
    const char *skip; /* the reason, if not supported */
} kind;

#define KNOWN(T, size) \
    { #T, size, SO_DTYPE_##T, NULL }
#define FOREIGN(T, size) \
    { #T, size, -1, "dtype " #T " is not supported (F32, F16, BF16 and F8_E4M3 are)" }
static const kind kinds[] = {
    KNOWN(F32, 4),       KNOWN(F16, 2),   KNOWN(BF16, 2),   FOREIGN(F64, 8),   FOREIGN(I64, 8),
    FOREIGN(I32, 4),     FOREIGN(I16, 2), FOREIGN(I8, 1),   FOREIGN(U64, 8),   FOREIGN(U32, 4),
    FOREIGN(U16, 2),     FOREIGN(U8, 1),  FOREIGN(BOOL, 1), KNOWN(F8_E4M3, 1), FOREIGN(F8_E5M2, 1),
    FOREIGN(F8_E8M0, 1), FOREIGN(C64, 8),
};

/* One entry of the header's table. `skip` is the reason why the tensor is skipped, or NULL. */
typedef struct entry {
    so_tensor t;
    uint64_t begin, end;
    const char *skip;
} entry;

static const kind *find_kind(const char *name) {
    for (size_t i = 0; i < SO_LEN(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    return NULL;
}

static int bad(const so_safetensors *s, so_str name, const char *what, so_err *err) {
    return so_err_set(err, SO_EFORMAT, "%s: tensor %.*s: %s", s->path, SO_STR_ARG(name), what);
}

/* Reads the shape, reversed to fastest dimension first, and the number of elements. */
static int read_shape(const so_safetensors *s, const json_t *shape, entry *e, uint64_t *count,
                      so_err *err) {
    if (!json_is_array(shape))
        return bad(s, e->t.name, "shape is not an array", err);
    size_t n = json_array_size(shape);
    *count = 1;
    for (int i = 0; i < SO_MAX_DIMS; i++)
        e->t.dims[i] = 1;
    if (n > SO_MAX_DIMS)
        e->skip = "it has more than 4 dimensions";
    e->t.n_dims = n == 0 ? 1 : (int)SO_MIN(n, (size_t)SO_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        const json_t *dim = json_array_get(shape, i);
        int64_t v = json_is_integer(dim) ? json_integer_value(dim) : -1;
        if (v < 0)
            return bad(s, e->t.name, "shape contains a value that is not a size", err);
        if (__builtin_mul_overflow(*count, (uint64_t)v, count) || *count > INT64_MAX)
            return bad(s, e->t.name, "shape overflows 63 bits", err);
        if (n <= SO_MAX_DIMS)
            e->t.dims[n - 1 - i] = v;
    }
    if (*count == 0)
        e->skip = "it has no elements";
    return SO_OK;
}

static int read_offsets(const so_safetensors *s, const json_t *offsets, entry *e, uint64_t data_len,
                        so_err *err) {
    const json_t *b = json_array_get(offsets, 0), *f = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(b) || !json_is_integer(f) ||
        json_integer_value(b) < 0 || json_integer_value(f) < json_integer_value(b))
        return bad(s, e->t.name, "data_offsets is not a pair of ascending offsets", err);
    e->begin = (uint64_t)json_integer_value(b);
    e->end = (uint64_t)json_integer_value(f);
    if (e->end > data_len)
        return so_err_set(err, SO_EFORMAT,
                          "%s: tensor %.*s: data_offsets end at %" PRIu64
                          ", but the file has %" PRIu64 " bytes of data (truncated?)",
                          s->path, SO_STR_ARG(e->t.name), e->end, data_len);
    return SO_OK;
}

static int read_entry(so_safetensors *s, so_str name, const json_t *row, uint64_t data_len,
                      entry *e, so_err *err) {
    const char *dtype = json_string_value(json_object_get(row, "dtype"));
    char *kept = so_arena_strndup(&s->arena, name.ptr, name.len);
    if (!kept)
        return so_err_set(err, SO_ENOMEM, "%s: no memory for tensor names", s->path);
    e->t.name = (so_str){kept, name.len};
    if (!dtype)
        return bad(s, name, "dtype is missing", err);
    const kind *k = find_kind(dtype);
    if (!k)
        return so_err_set(err, SO_EUNSUPPORTED, "%s: tensor %.*s: dtype '%.40s' is unknown",
                          s->path, SO_STR_ARG(name), dtype);
    e->skip = k->skip;
    e->t.dtype = k->dtype < 0 ? SO_DTYPE_F32 : (so_dtype)k->dtype;
    uint64_t count = 0, want;
    int rc = read_shape(s, json_object_get(row, "shape"), e, &count, err);
    if (rc == SO_OK)
        rc = read_offsets(s, json_object_get(row, "data_offsets"), e, data_len, err);
    if (rc != SO_OK)
        return rc;
    if (__builtin_mul_overflow(count, (uint64_t)k->bytes, &want) || want != e->end - e->begin)
        return so_err_set(err, SO_EFORMAT,
                          "%s: tensor %.*s: data_offsets give %" PRIu64
                          " bytes, but its shape needs "
                          "%" PRIu64 " elements of %s",
                          s->path, SO_STR_ARG(name), e->end - e->begin, count, dtype);
    e->t.n_bytes = (size_t)want;
    return SO_OK;
}

static int by_begin(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static int check_cover(const so_safetensors *s, const entry *list, size_t n, uint64_t data_len,
                       so_err *err) {
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (list[i].begin != at)
            return so_err_set(err, SO_EFORMAT,
                              "%s: tensor %.*s: data_offsets begin at %" PRIu64
                              ", but the data before "
                              "it ends at %" PRIu64 " (%s)",
                              s->path, SO_STR_ARG(list[i].t.name), list[i].begin, at,
                              list[i].begin < at ? "tensors overlap" : "a gap");
        at = list[i].end;
    }
    if (at != data_len)
        return so_err_set(err, SO_EFORMAT,
                          "%s: tensors cover %" PRIu64 " bytes, but the file has %" PRIu64
                          " bytes of data",
                          s->path, at, data_len);
    return SO_OK;
}

static void keep(so_safetensors *s, const entry *list, size_t n, const unsigned char *data) {
    s->tensors = SO_NEW_N(so_tensor, n);
    s->skipped = SO_NEW_N(so_safetensors_skip, n);
    for (size_t i = 0; i < n; i++) {
        const entry *e = &list[i];
        if (e->skip) {
            s->skipped[s->n_skipped++] = (so_safetensors_skip){e->t.name, e->skip};
        } else {
            s->tensors[s->n_tensors] = e->t;
            s->tensors[s->n_tensors++].data = data + e->begin;
        }
    }
}

static int read_table(so_safetensors *s, const json_t *root, const unsigned char *data,
                      uint64_t data_len, so_err *err) {
    size_t n = 0;
    entry *list = so_try_alloc(json_object_size(root), sizeof *list);
    if (!list)
        return so_err_set(err, SO_ENOMEM, "%s: no memory for %zu tensors", s->path,
                          json_object_size(root));
    const char *key;
    json_t *row;
    int rc = SO_OK;
    json_object_foreach((json_t *)(uintptr_t)root, key, row) {
        if (strcmp(key, "__metadata__") == 0)
            continue;
        rc = read_entry(s, so_str_c(key), row, data_len, &list[n++], err);
        if (rc != SO_OK)
            break;
    }
    if (rc == SO_OK) {
        qsort(list, n, sizeof *list, by_begin);
        rc = check_cover(s, list, n, data_len, err);
    }
    if (rc == SO_OK)
        keep(s, list, n, data);
    free(list);
    return rc;
}

static int parse(so_safetensors *s, const unsigned char *data, size_t len, so_err *err) {
    uint64_t n;
    if (len < sizeof n)
        return so_err_set(err, SO_EFORMAT, "%s: %zu bytes are too short for a safetensors header",
                          s->path, len);
    memcpy(&n, data, sizeof n);
    if (n > len - sizeof n || n > MAX_HEADER)
        return so_err_set(err, SO_EFORMAT,
                          "%s: header length %" PRIu64
                          " does not fit: the file has %zu bytes and the "
                          "limit is %" PRIu64,
                          s->path, n, len, MAX_HEADER);
    json_error_t je;
    json_t *root =
        json_loadb((const char *)data + sizeof n, (size_t)n, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return so_err_set(err, SO_EFORMAT, "%s: header is not valid JSON at byte %d: %s", s->path,
                          je.position, je.text);
    int rc;
    if (!json_is_object(root))
        rc = so_err_set(err, SO_EFORMAT, "%s: header is not a JSON object", s->path);
    else
        rc = read_table(s, root, data + sizeof n + n, len - sizeof n - n, err);
    json_decref(root);
    return rc;
}

int so_safetensors_open_memory(const void *data, size_t len, const char *name, so_safetensors **out,
                               so_err *err) {
    so_safetensors *s = SO_NEW(so_safetensors);
    s->path = so_strdup(name);
    int rc = parse(s, data, len, err);
    if (rc == SO_OK)
        *out = s;
    else
        so_safetensors_close(s);
    return rc;
}

int so_safetensors_open(const char *path, so_safetensors **out, so_err *err) {
    so_map_file map;
    int rc = so_file_map(path, &map, err);
    if (rc != SO_OK)
        return rc;
    so_safetensors *s = NULL;
    rc = so_safetensors_open_memory(map.data, map.len, path, &s, err);
    if (rc != SO_OK) {
        so_file_unmap(&map);
        return rc;
    }
    s->map = map;
    *out = s;
    return SO_OK;
}

void so_safetensors_close(so_safetensors *s) {
    if (!s)
        return;
    so_file_unmap(&s->map);
    so_arena_free(&s->arena);
    free(s->tensors);
    free(s->skipped);
    free(s->path);
    free(s);
}
