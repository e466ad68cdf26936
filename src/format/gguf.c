/* Reads GGUF files:
 *   1. parse the header once with a bounds-checked cursor;
 *   2. check the whole tensor table (duplicates, ranges, overlap);
 *   3. open the other parts of a split file.
 *
 * Invariant: every length and count is compared with the remaining bytes before it is used.
 * Allocations are therefore at most a small multiple of the file's size; strings are also limited
 * in number (MAX_STRINGS). Error messages name the file, the field, the value and the offset.
 *
 * Refuses GGUF v1, big-endian files, the formats before GGUF, dtypes that dtype.h does not list,
 * and tensors that are misaligned, overlapping or outside the file. Accepts gaps between tensors
 * and bytes after the last one. Of the metadata of later parts of a split only general.alignment
 * and split.* are used. An open file is read-only and may be used from any thread. */
#include "format/gguf_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"

/* Limit for the string tables of one file; real vocabularies and merges take about 20 MB. */
static const size_t MAX_TABLES = (size_t)1 << 30;

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are read without byte swapping");

enum {
    MAX_STRINGS = 16 << 20, /* in one array; the largest vocabularies have about 250,000 */
    MAX_KV = 1 << 16,       /* real files have 20 to 60 entries */
    MAX_TENSORS = 1 << 16,  /* in one part; the largest models have several thousand */
    MAX_NAME = 1024,        /* bytes of a key or tensor name; real names have under 100 */
    MAX_DEPTH = 4,          /* of nested arrays */
    MIN_KV = 8 + 1 + 4 + 1, /* bytes: key length, key, type, value */
    MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8,
    DEFAULT_ALIGNMENT = 32,
    MAX_ALIGNMENT = 1 << 20,
};

/* The remedy for a file that is too short; the reader does not know where the file came from. */
#define TRUNCATED                                                                              \
    ": the file is truncated or damaged; fetch it again (a pulled model: `sooth pull --force " \
    "NAME`)"

/* A read position in one file; reads never go beyond its end. In the functions below `what` and
 * `name` describe the field for error messages. */
typedef struct cursor {
    const unsigned char *data;
    size_t len, off;
    const char *path;
    so_err *err;
} cursor;

typedef struct header {
    uint32_t version;
    uint64_t n_tensors, n_kv;
} header;

/* Bytes of one value; 0 for strings and arrays, whose size varies. */
static size_t elem_bytes(so_gguf_type t) {
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return (unsigned)t < SO_LEN(sizes) ? sizes[t] : 0;
}

const char *so_gguf_type_name(so_gguf_type t) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return (unsigned)t < SO_LEN(names) ? names[t] : "unknown type";
}

static int truncated(const cursor *c, const char *what, so_str name, uint64_t need) {
    return so_err_set(c->err, SO_EFORMAT,
                      "%s: %s%s%.*s: needs %" PRIu64
                      " bytes at offset %zu, but the file ends at %zu" TRUNCATED,
                      c->path, what, name.len ? " " : "", SO_STR_ARG(name), need, c->off, c->len);
}

static int take(cursor *c, void *out, size_t n, const char *what, so_str name) {
    if (!so_in_range(c->off, n, c->len))
        return truncated(c, what, name, n);
    memcpy(out, c->data + c->off, n);
    c->off += n;
    return SO_OK;
}

static int take_str(cursor *c, so_str *out, const char *what, so_str name) {
    uint64_t len = 0;
    int rc = take(c, &len, sizeof len, what, name);
    if (rc != SO_OK)
        return rc;
    if (!so_in_range(c->off, len, c->len))
        return truncated(c, what, name, len);
    *out = (so_str){(const char *)c->data + c->off, (size_t)len};
    c->off += (size_t)len;
    return SO_OK;
}

/* A key or tensor name: not empty, at most MAX_NAME bytes, and usable as a C string. */
static int take_name(cursor *c, so_str *out, const char *what) {
    size_t at = c->off;
    int rc = take_str(c, out, what, SO_STR(""));
    if (rc == SO_OK && (out->len == 0 || out->len > MAX_NAME))
        rc = so_err_set(c->err, SO_EFORMAT, "%s: %s at offset %zu: length %zu is not in 1…%d",
                        c->path, what, at, out->len, MAX_NAME);
    if (rc == SO_OK && memchr(out->ptr, '\0', out->len))
        rc = so_err_set(c->err, SO_EFORMAT, "%s: %s at offset %zu contains a zero byte", c->path,
                        what, at);
    return rc;
}

static int check_type(const cursor *c, uint32_t type, so_str key) {
    if (type <= SO_GGUF_F64)
        return SO_OK;
    return so_err_set(c->err, SO_EFORMAT,
                      "%s: key %.*s: value type %" PRIu32 " is unknown (known: 0…12)", c->path,
                      SO_STR_ARG(key), type);
}

static int check_bools(const cursor *c, const unsigned char *p, uint64_t n, so_str key) {
    for (uint64_t i = 0; i < n; i++)
        if (p[i] > 1)
            return so_err_set(c->err, SO_EFORMAT, "%s: key %.*s: bool is %d, neither 0 nor 1",
                              c->path, SO_STR_ARG(key), p[i]);
    return SO_OK;
}

/* Skips n values of a fixed size. */
static int skip_fixed(cursor *c, so_gguf_type t, uint64_t n, so_str key) {
    size_t size = elem_bytes(t);
    if (n > (c->len - c->off) / size)
        return so_err_set(c->err, SO_EFORMAT,
                          "%s: key %.*s: %" PRIu64 " values of type %s at offset %zu run past the "
                          "file's end at %zu" TRUNCATED,
                          c->path, SO_STR_ARG(key), n, so_gguf_type_name(t), c->off, c->len);
    const unsigned char *p = c->data + c->off;
    c->off += (size_t)n * size;
    return t == SO_GGUF_BOOL ? check_bools(c, p, n, key) : SO_OK;
}

/* Reads n strings into *keep, or skips them if `keep` is NULL. */
static int read_strings(so_gguf *g, cursor *c, uint64_t n, so_str key, const so_str **keep) {
    if (n > (c->len - c->off) / 8 || n > MAX_STRINGS)
        return so_err_set(c->err, SO_EFORMAT,
                          "%s: key %.*s: %" PRIu64 " strings do not fit in the %zu bytes left "
                          "(limit %d)" TRUNCATED,
                          c->path, SO_STR_ARG(key), n, c->len - c->off, MAX_STRINGS);
    so_str *list = NULL, one;
    if (keep && !(list = so_arena_alloc(&g->arena, (size_t)n, sizeof *list)))
        return so_err_set(c->err, SO_ENOMEM, "%s: key %.*s: no memory for %" PRIu64 " strings",
                          c->path, SO_STR_ARG(key), n);
    for (uint64_t i = 0; i < n; i++) {
        int rc = take_str(c, list ? &list[i] : &one, "string of key", key);
        if (rc != SO_OK)
            return rc;
    }
    if (keep)
        *keep = list;
    return SO_OK;
}

static int read_array_head(cursor *c, so_str key, so_gguf_type *elem, uint64_t *n) {
    uint32_t type = 0;
    int rc = take(c, &type, sizeof type, "array of key", key);
    if (rc == SO_OK)
        rc = check_type(c, type, key);
    if (rc == SO_OK)
        rc = take(c, n, sizeof *n, "array of key", key);
    *elem = rc == SO_OK ? (so_gguf_type)type : SO_GGUF_U8;
    return rc;
}

/* Skips the elements of an array of arrays. */
static int skip_nested(so_gguf *g, cursor *c, uint64_t n, so_str key, int depth) {
    if (depth > MAX_DEPTH)
        return so_err_set(c->err, SO_ELIMIT, "%s: key %.*s: arrays nested deeper than %d", c->path,
                          SO_STR_ARG(key), MAX_DEPTH);
    int rc = SO_OK;
    for (uint64_t i = 0; i < n && rc == SO_OK; i++) {
        so_gguf_type elem;
        uint64_t m;
        rc = read_array_head(c, key, &elem, &m);
        if (rc != SO_OK)
            break;
        if (elem == SO_GGUF_ARRAY)
            rc = skip_nested(g, c, m, key, depth + 1);
        else if (elem == SO_GGUF_STRING)
            rc = read_strings(g, c, m, key, NULL);
        else
            rc = skip_fixed(c, elem, m, key);
    }
    return rc;
}

static int read_kv(so_gguf *g, cursor *c, so_gguf_kv *kv) {
    uint32_t type = 0;
    int rc = take_name(c, &kv->key, "metadata key");
    if (rc == SO_OK)
        rc = take(c, &type, sizeof type, "value type of key", kv->key);
    if (rc == SO_OK)
        rc = check_type(c, type, kv->key);
    if (rc != SO_OK)
        return rc;
    kv->type = kv->elem = (so_gguf_type)type;
    kv->n = 1;
    if (kv->type == SO_GGUF_ARRAY)
        rc = read_array_head(c, kv->key, &kv->elem, &kv->n);
    if (rc != SO_OK)
        return rc;
    size_t start = c->off;
    if (kv->elem == SO_GGUF_STRING)
        rc = read_strings(g, c, kv->n, kv->key, &kv->strings);
    else if (kv->elem == SO_GGUF_ARRAY)
        rc = skip_nested(g, c, kv->n, kv->key, 1);
    else
        rc = skip_fixed(c, kv->elem, kv->n, kv->key);
    kv->data = c->data + start;
    kv->n_bytes = c->off - start;
    return rc;
}

static int read_all_kv(so_gguf *g, cursor *c, uint64_t n) {
    if (n > (c->len - c->off) / MIN_KV || n > MAX_KV)
        return so_err_set(c->err, SO_EFORMAT,
                          "%s: metadata count %" PRIu64
                          " does not fit in a file of %zu bytes (limit %d)" TRUNCATED,
                          c->path, n, c->len, MAX_KV);
    g->kv = so_try_alloc((size_t)n, sizeof *g->kv);
    if (!g->kv)
        return so_err_set(c->err, SO_ENOMEM, "%s: no memory for %" PRIu64 " metadata entries",
                          c->path, n);
    g->kv_index = so_map_create((size_t)n);
    for (uint64_t i = 0; i < n; i++) {
        so_gguf_kv *kv = &g->kv[i];
        int rc = read_kv(g, c, kv);
        if (rc != SO_OK)
            return rc;
        if (!so_map_add(g->kv_index, kv->key, (int64_t)i))
            return so_err_set(c->err, SO_EFORMAT, "%s: metadata key %.*s appears twice", c->path,
                              SO_STR_ARG(kv->key));
        g->n_kv++;
    }
    return SO_OK;
}

/* Names of GGUF types that are not supported here, for error messages. */
static const char *foreign_type(uint32_t type) {
    static const char *const names[] = {
        [4] = "Q4_2",    [5] = "Q4_3",     [9] = "Q8_1",   [15] = "Q8_K",   [16] = "IQ2_XXS",
        [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",
        [22] = "IQ2_S",  [23] = "IQ4_XS",  [24] = "I8",    [25] = "I16",    [26] = "I32",
        [27] = "I64",    [28] = "F64",     [29] = "IQ1_M", [34] = "TQ1_0",  [35] = "TQ2_0",
        [39] = "MXFP4",
    };
    return type < SO_LEN(names) && names[type] ? names[type] : "unknown";
}

/* Sets n_bytes; false if the size overflows 63 bits. */
static bool tensor_bytes(so_tensor *t) {
    const so_dtype_info *info = so_dtype_get((int)t->dtype);
    int64_t count = 1;
    for (int i = 0; i < t->n_dims; i++)
        if (__builtin_mul_overflow(count, t->dims[i], &count))
            return false;
    int64_t bytes;
    if (__builtin_mul_overflow(count / info->block_len, info->block_bytes, &bytes))
        return false;
    t->n_bytes = (size_t)bytes;
    return true;
}

static int read_dims(cursor *c, so_tensor *t) {
    uint32_t n_dims = 0;
    int rc = take(c, &n_dims, sizeof n_dims, "dimensions of tensor", t->name);
    if (rc != SO_OK)
        return rc;
    if (n_dims < 1 || n_dims > SO_MAX_DIMS)
        return so_err_set(c->err, SO_EFORMAT, "%s: tensor %.*s: %" PRIu32 " dimensions, not 1…%d",
                          c->path, SO_STR_ARG(t->name), n_dims, SO_MAX_DIMS);
    t->n_dims = (int)n_dims;
    for (int i = 0; i < SO_MAX_DIMS; i++) {
        t->dims[i] = 1;
        if (i < t->n_dims)
            rc = take(c, &t->dims[i], sizeof t->dims[i], "dimensions of tensor", t->name);
        if (rc != SO_OK)
            return rc;
        if (t->dims[i] < 1)
            return so_err_set(c->err, SO_EFORMAT, "%s: tensor %.*s: dimension %d is %" PRId64,
                              c->path, SO_STR_ARG(t->name), i, t->dims[i]);
    }
    return SO_OK;
}

/* Stores the tensor's offset in the data section in *offset. place_tensors sets t->data later, when
 * the length of the header is known. */
static int read_tensor(cursor *c, so_tensor *t, uint64_t *offset) {
    uint32_t type = 0;
    int rc = take_name(c, &t->name, "tensor name");
    if (rc == SO_OK)
        rc = read_dims(c, t);
    if (rc == SO_OK)
        rc = take(c, &type, sizeof type, "type of tensor", t->name);
    if (rc == SO_OK)
        rc = take(c, offset, sizeof *offset, "offset of tensor", t->name);
    if (rc != SO_OK)
        return rc;
    const so_dtype_info *info =
        type < SO_DTYPE_COUNT && so_dtype_in_gguf((int)type) ? so_dtype_get((int)type) : NULL;
    if (!info)
        return so_err_set(c->err, SO_EUNSUPPORTED,
                          "%s: tensor %.*s: type %" PRIu32
                          " (%s) is not supported (F32, F16, BF16, "
                          "Q4_0…Q8_0 and Q2_K…Q6_K are)",
                          c->path, SO_STR_ARG(t->name), type, foreign_type(type));
    t->dtype = (so_dtype)type;
    if (t->dims[0] % info->block_len != 0)
        return so_err_set(c->err, SO_EFORMAT,
                          "%s: tensor %.*s: rows of %" PRId64 " elements are not a multiple of "
                          "%s's block of %d",
                          c->path, SO_STR_ARG(t->name), t->dims[0], info->name, info->block_len);
    if (!tensor_bytes(t))
        return so_err_set(c->err, SO_EFORMAT, "%s: tensor %.*s: the dimensions overflow 63 bits",
                          c->path, SO_STR_ARG(t->name));
    return SO_OK;
}

static int read_alignment(const so_gguf *g, const cursor *c, uint64_t *out) {
    int64_t a = DEFAULT_ALIGNMENT;
    int rc = so_gguf_get_i64(g, "general.alignment", &a, c->err);
    if (rc != SO_OK && rc != SO_ENOTFOUND)
        return rc;
    /* 8 is the format's minimum; it keeps every float naturally aligned */
    if (a < 8 || a > MAX_ALIGNMENT || (a & (a - 1)) != 0)
        return so_err_set(c->err, SO_EFORMAT,
                          "%s: general.alignment is %" PRId64 ", not a power of two in 8…%d",
                          c->path, a, MAX_ALIGNMENT);
    *out = (uint64_t)a;
    return SO_OK;
}

static int by_address(const void *a, const void *b) {
    const so_tensor *x = *(const so_tensor *const *)a, *y = *(const so_tensor *const *)b;
    return x->data < y->data ? -1 : x->data > y->data;
}

/* Sorted by address, every tensor must start at or after the end of the one before it. */
static int check_overlap(const so_gguf *g, size_t first, const cursor *c) {
    size_t n = g->n_tensors - first;
    const so_tensor **order = so_try_alloc(n, sizeof *order);
    if (!order)
        return so_err_set(c->err, SO_ENOMEM, "%s: no memory for %zu tensors", c->path, n);
    for (size_t i = 0; i < n; i++)
        order[i] = &g->tensors[first + i];
    qsort(order, n, sizeof *order, by_address);
    int rc = SO_OK;
    for (size_t i = 1; i < n && rc == SO_OK; i++)
        if ((const char *)order[i - 1]->data + order[i - 1]->n_bytes > (const char *)order[i]->data)
            rc = so_err_set(c->err, SO_EFORMAT, "%s: tensors %.*s and %.*s overlap", c->path,
                            SO_STR_ARG(order[i - 1]->name), SO_STR_ARG(order[i]->name));
    free(order);
    return rc;
}

/* Sets t->data from the offsets and checks that each tensor lies inside the data section. */
static int place_tensors(so_gguf *g, size_t first, const uint64_t *offsets, const cursor *c,
                         uint64_t align) {
    uint64_t start = (c->off + align - 1) & ~(align - 1);
    uint64_t room = start < c->len ? c->len - start : 0;
    for (size_t i = first; i < g->n_tensors; i++) {
        so_tensor *t = &g->tensors[i];
        uint64_t off = offsets[i - first];
        if (off % align != 0)
            return so_err_set(c->err, SO_EFORMAT,
                              "%s: tensor %.*s: offset %" PRIu64 " is not a multiple of the "
                              "alignment %" PRIu64,
                              c->path, SO_STR_ARG(t->name), off, align);
        if (!so_in_range(off, t->n_bytes, room))
            return so_err_set(c->err, SO_EFORMAT,
                              "%s: tensor %.*s: %zu bytes at offset %" PRIu64
                              " run past the %" PRIu64 " bytes of tensor data" TRUNCATED,
                              c->path, SO_STR_ARG(t->name), t->n_bytes, off, room);
        t->data = c->data + start + off;
    }
    return check_overlap(g, first, c);
}

/* Extends g->tensors by n entries, after those of earlier parts. */
static int grow_tensors(so_gguf *g, uint64_t n, const cursor *c) {
    if (n > (c->len - c->off) / MIN_TENSOR || n > MAX_TENSORS)
        return so_err_set(c->err, SO_EFORMAT,
                          "%s: tensor count %" PRIu64
                          " does not fit in a file of %zu bytes (limit %d)" TRUNCATED,
                          c->path, n, c->len, MAX_TENSORS);
    so_tensor *grown = so_try_alloc(g->n_tensors + (size_t)n, sizeof *grown);
    if (!grown)
        return so_err_set(c->err, SO_ENOMEM, "%s: no memory for %" PRIu64 " tensors", c->path, n);
    if (g->n_tensors)
        memcpy(grown, g->tensors, g->n_tensors * sizeof *grown);
    free(g->tensors);
    g->tensors = grown;
    return SO_OK;
}

static int read_tensors(so_gguf *g, const so_gguf *meta, cursor *c, uint64_t n) {
    size_t first = g->n_tensors;
    uint64_t align = 0, *offsets = NULL;
    int rc = read_alignment(meta, c, &align);
    if (rc == SO_OK)
        rc = grow_tensors(g, n, c);
    if (rc == SO_OK && !(offsets = so_try_alloc((size_t)n, sizeof *offsets)))
        rc = so_err_set(c->err, SO_ENOMEM, "%s: no memory for %" PRIu64 " tensors", c->path, n);
    for (uint64_t i = 0; i < n && rc == SO_OK; i++) {
        so_tensor *t = &g->tensors[g->n_tensors];
        rc = read_tensor(c, t, &offsets[i]);
        if (rc == SO_OK && !so_map_add(g->tensor_index, t->name, (int64_t)g->n_tensors))
            rc = so_err_set(c->err, SO_EFORMAT, "%s: tensor %.*s appears twice", c->path,
                            SO_STR_ARG(t->name));
        g->n_tensors += rc == SO_OK;
    }
    if (rc == SO_OK)
        rc = place_tensors(g, first, offsets, c, align);
    free(offsets);
    return rc;
}

static int check_magic(const cursor *c, const char *magic) {
    if (memcmp(magic, "GGUF", 4) == 0)
        return SO_OK;
    if (memcmp(magic, "FUGG", 4) == 0)
        return so_err_set(c->err, SO_EUNSUPPORTED, "%s: big-endian GGUF is not supported", c->path);
    if (memcmp(magic, "lmgg", 4) == 0 || memcmp(magic, "tjgg", 4) == 0 ||
        memcmp(magic, "fmgg", 4) == 0 || memcmp(magic, "algg", 4) == 0)
        return so_err_set(c->err, SO_EUNSUPPORTED,
                          "%s: a GGML file from before GGUF; convert the model to GGUF", c->path);
    const unsigned char *m = (const unsigned char *)magic;
    return so_err_set(c->err, SO_EFORMAT,
                      "%s: not a GGUF file: magic is %02x %02x %02x %02x, not 'GGUF'", c->path,
                      m[0], m[1], m[2], m[3]);
}

static int read_header(cursor *c, header *h) {
    char magic[4];
    int rc = take(c, magic, sizeof magic, "magic", SO_STR(""));
    if (rc == SO_OK)
        rc = check_magic(c, magic);
    if (rc == SO_OK)
        rc = take(c, &h->version, sizeof h->version, "version", SO_STR(""));
    if (rc != SO_OK)
        return rc;
    if (h->version && (h->version & 0xFFFF) == 0)
        return so_err_set(c->err, SO_EUNSUPPORTED,
                          "%s: version reads 0x%08" PRIx32 ": big-endian GGUF is not supported",
                          c->path, h->version);
    if (h->version < 2 || h->version > 3)
        return so_err_set(c->err, SO_EUNSUPPORTED,
                          "%s: GGUF version %" PRIu32 " is not supported; 2 and 3 are", c->path,
                          h->version);
    rc = take(c, &h->n_tensors, sizeof h->n_tensors, "tensor count", SO_STR(""));
    if (rc == SO_OK)
        rc = take(c, &h->n_kv, sizeof h->n_kv, "metadata count", SO_STR(""));
    return rc;
}

static so_gguf *create(const char *path) {
    so_gguf *g = SO_NEW(so_gguf);
    g->path = so_strdup(path);
    g->tensor_index = so_map_create(64);
    g->arena.max = MAX_TABLES;
    return g;
}

/* Parses header, metadata and tensors of one file. The tensors are added to `into`. That is `g`
 * itself for the first part; for later parts of a split, `g` is temporary and holds only the part's
 * metadata while it is checked. */
static int parse(so_gguf *g, const void *data, size_t len, so_gguf *into, so_err *err) {
    cursor c = {data, len, 0, g->path, err};
    header h;
    int rc = read_header(&c, &h);
    if (rc != SO_OK)
        return rc;
    g->version = h.version;
    rc = read_all_kv(g, &c, h.n_kv);
    if (rc == SO_OK)
        rc = read_tensors(into, g, &c, h.n_tensors);
    into->file_bytes += len;
    return rc;
}

/* split.no, split.count and split.tensors.count; if absent, the values of an unsplit file. */
typedef struct split {
    int64_t no, count, n_tensors;
} split;

static int read_split(const so_gguf *g, split *s, so_err *err) {
    static const char *const keys[] = {"split.no", "split.count", "split.tensors.count"};
    int64_t *const fields[] = {&s->no, &s->count, &s->n_tensors};
    *s = (split){0, 1, -1};
    for (size_t i = 0; i < SO_LEN(keys); i++) {
        int rc = so_gguf_get_i64(g, keys[i], fields[i], err);
        if (rc != SO_OK && rc != SO_ENOTFOUND)
            return rc;
    }
    if (s->count < 0 || s->count > SO_GGUF_MAX_PARTS || s->no < 0 ||
        (s->count > 0 && s->no >= s->count))
        return so_err_set(err, SO_EFORMAT,
                          "%s: split.no %" PRId64 " of split.count %" PRId64
                          " is not valid (at most %d parts)",
                          g->path, s->no, s->count, SO_GGUF_MAX_PARTS);
    return SO_OK;
}

/* PREFIX-00001-of-00003.gguf → the path of part `no` (counted from 0); NULL if the path does not
 * have this form. */
static char *sibling_path(const char *path, int64_t no, int64_t count) {
    char tail[64];
    int n = snprintf(tail, sizeof tail, "-00001-of-%05" PRId64 ".gguf", count);
    size_t len = strlen(path);
    if (len <= (size_t)n || strcmp(path + len - (size_t)n, tail) != 0)
        return NULL;
    so_buf b = {0};
    so_buf_append(&b, path, len - (size_t)n);
    so_buf_printf(&b, "-%05" PRId64 "-of-%05" PRId64 ".gguf", no + 1, count);
    return b.data;
}

static int open_sibling(so_gguf *g, const char *path, int64_t no, int64_t count, so_err *err) {
    so_map_file *map = &g->maps[g->n_maps];
    int rc = so_file_map(path, map, err);
    if (rc != SO_OK)
        return so_err_prefix(err, "%s: part %" PRId64 " of %" PRId64 " cannot be opened", g->path,
                             no + 1, count);
    g->n_maps++;
    so_gguf *part = create(path);
    split s;
    rc = parse(part, map->data, map->len, g, err);
    if (rc == SO_OK)
        rc = read_split(part, &s, err);
    if (rc == SO_OK && (s.no != no || s.count != count))
        rc = so_err_set(err, SO_EMISMATCH,
                        "%s: split.no is %" PRId64 " of %" PRId64 ", expected %" PRId64
                        " of %" PRId64,
                        path, s.no, s.count, no, count);
    so_gguf_close(part);
    return rc;
}

static int open_siblings(so_gguf *g, so_err *err) {
    split s;
    int rc = read_split(g, &s, err);
    if (rc != SO_OK || s.count <= 1)
        return rc;
    if (s.no != 0)
        return so_err_set(err, SO_EINVAL,
                          "%s: split.no is %" PRId64 ": this is part %" PRId64 " of %" PRId64
                          "; open the first, …-00001-of-%05" PRId64 ".gguf",
                          g->path, s.no, s.no + 1, s.count, s.count);
    for (int64_t no = 1; no < s.count && rc == SO_OK; no++) {
        char *path = sibling_path(g->path, no, s.count);
        if (!path)
            return so_err_set(err, SO_EINVAL,
                              "%s: split.count is %" PRId64 ", but the name does not end in "
                              "-00001-of-%05" PRId64 ".gguf, so the other parts cannot be found",
                              g->path, s.count, s.count);
        rc = open_sibling(g, path, no, s.count, err);
        free(path);
    }
    if (rc == SO_OK && s.n_tensors >= 0 && (size_t)s.n_tensors != g->n_tensors)
        rc = so_err_set(err, SO_EMISMATCH,
                        "%s: split.tensors.count is %" PRId64 ", but the parts hold %zu", g->path,
                        s.n_tensors, g->n_tensors);
    return rc;
}

int so_gguf_open(const char *path, so_gguf **out, so_err *err) {
    so_map_file first;
    int rc = so_file_map(path, &first, err);
    if (rc != SO_OK)
        return rc;
    so_gguf *g = create(path);
    g->maps = SO_NEW_N(so_map_file, SO_GGUF_MAX_PARTS);
    g->maps[g->n_maps++] = first;
    rc = parse(g, first.data, first.len, g, err);
    if (rc == SO_OK)
        rc = open_siblings(g, err);
    if (rc == SO_OK)
        *out = g;
    else
        so_gguf_close(g);
    return rc;
}

int so_gguf_open_memory(const void *data, size_t len, const char *name, so_gguf **out,
                        so_err *err) {
    so_gguf *g = create(name);
    split s;
    int rc = parse(g, data, len, g, err);
    if (rc == SO_OK)
        rc = read_split(g, &s, err);
    if (rc == SO_OK && s.count > 1)
        rc = so_err_set(err, SO_EUNSUPPORTED,
                        "%s: split.count is %" PRId64 ": a file in memory cannot be split", name,
                        s.count);
    if (rc == SO_OK)
        *out = g;
    else
        so_gguf_close(g);
    return rc;
}

void so_gguf_drop(const so_gguf *g, const void *p, size_t len) {
    for (size_t i = 0; i < (size_t)g->n_maps; i++)
        if (so_file_drop(&g->maps[i], p, len))
            return;
}

void so_gguf_close(so_gguf *g) {
    if (!g)
        return;
    for (size_t i = 0; i < g->n_maps; i++)
        so_file_unmap(&g->maps[i]);
    free(g->maps);
    so_map_free(g->kv_index);
    so_map_free(g->tensor_index);
    so_arena_free(&g->arena);
    free(g->kv);
    free(g->tensors);
    free(g->path);
    free(g);
}
