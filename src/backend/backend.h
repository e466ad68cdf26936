/* The interface between models and hardware: opaque buffers, a short list of operations, explicit
 * sync.
 *
 *   model code                     backend
 *   ───────────                    ───────────────────────────────────────────
 *   submit(op) submit(op) …   →    queued, in order; nothing has been computed yet
 *   sync()                    →    all queued operations are done; downloads are filled
 *
 * Only the backend may read the contents of a buffer, a weight or a KV store. Host data goes in
 * through SO_OP_UPLOAD, whose bytes are copied at submit, and comes out through SO_OP_DOWNLOAD,
 * whose target is valid after sync. There is no graph language: an operation is a plain struct, and
 * a pass is the list of them in program order. A GPU may run ahead of the host or capture the list.
 * The CPU backend runs the whole list with one wake-up of its threads. The deferred backend keeps
 * the list until sync and makes the buffers unreadable in between, so that tests catch code that
 * reads results before sync.
 *
 * Row invariance, which every operation guarantees: an output row is a function of its own input
 * row (and of the KV positions that it attends to), with a reduction order fixed by index alone. It
 * is bit-identical for any number and order of other rows and for any number of threads.
 *
 * Results stay in their buffers, with one exception: a backend may leave out steps within a layer
 * (queries, keys, values, attention's output, and what norms, gates and products before an addition
 * give) if no later operation before the sync reads them.
 *
 * Activations are float32, row-major, [n][d] unless stated otherwise. One thread at a time may use
 * a backend. */
#ifndef SO_BACKEND_BACKEND_H
#define SO_BACKEND_BACKEND_H

#include "base/cpu.h"
#include "base/err.h"
#include "base/rng.h"
#include "format/dtype.h"

typedef struct so_backend so_backend;
typedef struct so_buffer so_buffer;     /* bytes on the device */
typedef struct so_weight so_weight;     /* a matrix [n_rows][n_cols] of some dtype, in any layout */
typedef struct so_kv_store so_kv_store; /* the pages of one KV cache, all layers, in any layout */

/* Elements of a buffer from byte offset `off` on. */
typedef struct so_view {
    so_buffer *buf;
    size_t off;
} so_view;

enum { SO_KV_PAGE = 32 }; /* positions per page */

typedef struct so_kv_shape {
    int n_layers, n_heads_kv, head_dim;
    int n_pages;
    so_dtype dtype;
} so_kv_shape;

/* The types a KV cache may have on every backend; so_backend_vt.kv_bf16 adds BF16. Entries are
 * converted to the type on write, so outputs differ between types. With the same type outputs are
 * bit-identical for every batch, CPU level and cache layout. */
#define SO_KV_DTYPES "F16, F32 and Q8_0"
static inline bool so_kv_dtype_ok(so_dtype t) {
    return t == SO_DTYPE_F16 || t == SO_DTYPE_F32 || t == SO_DTYPE_Q8_0;
}

/* Bytes of K, or of V, of one head at one position. The last block of a head is stored in full. */
static inline size_t so_kv_entry_bytes(so_dtype t, int64_t head_dim) {
    int64_t block = so_dtype_get((int)t)->block_len;
    return so_dtype_row_bytes(t, (head_dim + block - 1) / block * block);
}

/* The positions that one row attends to. A sequence keeps its entries in slots; slot s of a
 * sequence is entry s % SO_KV_PAGE of page pages[page_off + s / SO_KV_PAGE]. The row at logical
 * position `pos` attends to positions 0 … pos, its own included, in logical order:
 *
 *   positions 0 … n_prefix-1     are in slots 0 … n_prefix-1
 *   positions n_prefix … pos     are in slots tails[tail_off + 0 …]   (a branch of a token tree)
 *
 * A chain (and every prompt) has n_prefix = pos + 1 and no tail. The result is a function of the
 * logical order alone: a row of a tree gives the same bits as the last row of its path run as a
 * chain. */
typedef struct so_attn_row {
    int32_t pos, n_prefix, page_off, tail_off;
} so_attn_row;

/* Where K and V of one row are: entry `place` of page `page` of the cache. */
typedef struct so_kv_slot {
    int32_t page, place;
} so_kv_slot;

/* SO_OP_SAMPLE: what is wanted of one logits row. The token is the one that sample/sample.h defines
 * for these parameters, without bias and penalties, bit for bit:
 *
 *   y     = (x − max x) / T, rounded to float (base/exact.h); tokens with y = −∞ are never sampled
 *   cuts  top-k, top-p of what is left, min-p of what is left. The tokens that are left are always
 *         the first ones in the order (y descending, token ascending)
 *   token the one with the largest y + noise, the noise a function of key and token; lowest on ties
 *
 * guess ≥ 0 asks for the weight of one token instead, for tests of `reject`: its logit, and the
 * sum of the weights of all tokens. SO_SAMPLE_BEST asks the same for the argmax, for the confidence
 * of a draft's guess. No cuts then. */
typedef struct so_sample_row {
    so_rng_key key; /* of the noise */
    double inverse; /* 1 / T; 0 for T = 0: the token is the argmax */
    double top_p;   /* 1: off */
    double least;   /* min-p: tokens with y below it are dropped; −∞: off */
    int32_t top_k;  /* 0: off */
    int32_t guess;  /* −1: sample */
} so_sample_row;
enum { SO_SAMPLE_BEST = -2 };

/* SO_SAMPLE_UNKNOWN: the host has to sample from the row. It is the answer if guess ≥ 0; if a
 * partial sum of top-p is so close to the border that rounding could decide; and if too many
 * tokens (SO_SAMPLE_LIST) have nearly the y of the border. */
enum { SO_SAMPLE_UNKNOWN = -2, SO_SAMPLE_LIST = 4096 };
enum { SO_SAMPLE_MAX = 1 << 20 }; /* longest row */
typedef struct so_sample_result {
    int32_t token;    /* −1: the row holds NaN or infinity; SO_SAMPLE_BEST: the argmax */
    float top, logit; /* with a guess: the largest logit; the guess's */
    /* With a guess: at least Σ exp(y), each rounded to float; at most 1e-6 of it more. */
    double mass;
} so_sample_result;

typedef enum so_op_kind {
    SO_OP_UPLOAD,
    SO_OP_DOWNLOAD,
    SO_OP_EMBED,
    SO_OP_GATHER,
    SO_OP_RMS_NORM,
    SO_OP_LAYER_NORM,
    SO_OP_MATMUL,
    SO_OP_ADD,
    SO_OP_SILU_MUL,
    SO_OP_GELU_MUL,
    SO_OP_GELU,
    SO_OP_RELU,
    SO_OP_ROPE,
    SO_OP_KV_STORE,
    SO_OP_KV_COPY,
    SO_OP_ATTENTION,
    SO_OP_ARGMAX,
    SO_OP_SAMPLE,
    SO_OP_COUNT,
} so_op_kind;

typedef struct so_op {
    so_op_kind kind;
    int n; /* rows */
    union {
        struct {
            so_view dst;
            const void *src; /* copied at submit */
            size_t n_bytes;
        } upload;
        struct {
            so_view src;
            void *dst; /* filled at sync */
            size_t n_bytes;
        } download;
        struct {              /* out[n][d] = w[ids[i]] · scale */
            so_view out, ids; /* ids: int32[n], each below w's row count (the caller checks) */
            const so_weight *w;
            float scale;
        } embed;
        struct {                  /* out[n][d] = x[rows[i]][d] */
            so_view out, x, rows; /* rows: int32[n]; −1: the row is zero */
            int d;
        } gather;
        struct { /* out = x / rms(x) · weight, or (x − mean)/σ · weight + bias; out may be x */
            so_view out, x, weight, bias; /* weight, bias: float32[d]; bias only for LAYER_NORM */
            int d;
            float eps;
        } norm;
        struct { /* out[n][m] = x[n][k] · wᵀ, + bias[m] if bias.buf is not NULL */
            so_view out, x, bias;
            const so_weight *w;
        } matmul;
        struct { /* ADD: out = a + b. SILU_MUL: out = silu(a)·b. GELU_MUL: gelu(a)·b. GELU: gelu(a).
                    RELU: max(a, 0). gelu is the tanh form. out may be a or b. */
            so_view out, a, b;
            int d;
        } eltwise;
        struct { /* rotates x[n][n_heads][head_dim] in place; table[n][head_dim/2]: (cos, sin) */
            so_view x, table;
            int n_heads, head_dim;
            bool halves; /* pairs (i, i + head_dim/2); otherwise (2i, 2i + 1) */
        } rope;
        struct
        { /* converts k and v, [n][n_heads_kv][head_dim], to the cache's dtype and writes them */
            so_kv_store *store;
            int layer;
            so_view k, v, slots; /* slots: so_kv_slot[n] */
        } kv_store;
        struct { /* copies n entries in all layers, one after the other in the given order */
            so_kv_store *store;
            so_view from, to; /* so_kv_slot[n] */
        } kv_copy;
        struct { /* out[n][n_heads][head_dim] = softmax(q·kᵀ · scale) · v over the positions seen */
            so_kv_store *store;
            int layer, n_heads;
            so_view out, q, rows, pages, tails; /* rows: so_attn_row[n]; pages, tails: int32[] */
            float scale;
            int window; /* 0: no window; else a row sees only positions > pos − window */
            /* Added to the score of position j for row i, unless bias.buf is NULL: entry
             * min(max(j − query_pos[i], −reach), reach) + reach of the head's 2·reach + 1.
             * bias: float32[n_heads][2·reach + 1]; query_pos: int32[n]. */
            so_view bias, query_pos;
            int reach;
        } attention;
        struct { /* out int32[n]: index of the largest of x[n][d], lowest index on ties; -1 for a
                    row that holds NaN or infinity */
            so_view out, x;
            int d;
        } argmax;
        struct
        { /* out so_sample_result[n] from the logits x[n][d], their argmax best (int32[n]) and
                    the parameters rows (so_sample_row[n]) */
            so_view out, x, best, rows;
            int d;
        } sample;
    };
} so_op;

/* Limits of the hardware, for comparing measured times with (backend/probe.h). */
typedef struct so_probe {
    double read_gb;  /* 10^9 bytes per second, all threads reading */
    double mac_giga; /* 10^9 multiply-adds per second of the kind that products use (CPU: int8, GPU:
                        fp16), all threads, operands in registers */
} so_probe;

/* All entries but the last four are required. */
typedef struct so_backend_vt {
    const char *name;
    bool remote; /* results are copied over a bus: download what is needed, not everything */
    void (*free)(so_backend *b);
    int (*buffer_create)(so_backend *b, size_t n_bytes, so_buffer **out, so_err *err); /* zeroed */
    void (*buffer_free)(so_backend *b, so_buffer *buf);
    /* The tensor's bytes are borrowed and must outlive the weight, unless weight_pack copied
     * them. */
    int (*weight_create)(so_backend *b, const so_tensor *t, so_weight **out, so_err *err);
    /* Copies the weight into the layout that the backend multiplies fastest. Returns true if it
     * did: the tensor's bytes are not read again. Returns false if the type has no faster layout or
     * there is no memory for the copy: the bytes stay borrowed. Results have the same bits either
     * way. */
    bool (*weight_pack)(so_backend *b, so_weight *w);
    void (*weight_free)(so_backend *b, so_weight *w);
    int (*kv_create)(so_backend *b, const so_kv_shape *s, so_kv_store **out, so_err *err);
    void (*kv_free)(so_backend *b, so_kv_store *s);
    void (*submit)(so_backend *b, const so_op *op);
    /* After a failure, operations since the last sync may not have run; the next pass may succeed,
     * unless the device is lost. A sync with nothing queued fails only if the device is lost. */
    int (*sync)(so_backend *b, so_err *err);
    /* One line that names the hardware and the settings. Recorded costs are keyed by it: backends
     * with equal descriptions are assumed to need equal time for a pass. */
    void (*describe)(const so_backend *b, so_buf *out);
    /* Measures the read bandwidth of the device's memory, with n_bytes, and its multiply-add rate.
     * NULL: the backend has no device of its own; so_prober measures the CPU. */
    int (*probe)(so_backend *b, size_t n_bytes, so_probe *out, so_err *err);
    /* Bytes of the device's own memory. NULL: it has none, and uses the machine's. */
    int (*memory)(so_backend *b, size_t *free_bytes, size_t *total_bytes, so_err *err);
    bool kv_bf16;     /* KV caches may be BF16 */
    bool encoder_ops; /* RELU and the bias of attention, which encoder-decoder models need */
} so_backend_vt;

struct so_backend {
    const so_backend_vt *vt;
    const void *in_flight; /* the so_pass that has submitted and not yet synced; NULL: none */
    unsigned n_failed;     /* passes whose sync failed */
    unsigned n_unusual;    /* passes whose time says nothing about the next ones, because something
                              was prepared for them */
    double encode_ms;      /* of reading source texts (model/source.c), for traces */
    const char *note;      /* what is slower on this hardware than on others; NULL: nothing */
};

/* Detects a backend library that was built with other struct sizes or operations. */
#define SO_BACKEND_ABI                                                                         \
    ((unsigned)(sizeof(so_op) + 1000 * sizeof(so_backend_vt) + 1000000 * sizeof(so_backend)) + \
     100000000u * SO_OP_COUNT)

typedef struct so_backend_opts {
    int n_threads;           /* 0: one per core this process may use, or per core of the range */
    int first_core, n_cores; /* a range of cores of its own (base/pool.h); n_cores 0: all */
    so_cpu_level level;      /* a level that this CPU lacks is an error */
    bool warn_slow;          /* log a warning for settings that are correct but slow */
} so_backend_opts;

/* Opens a backend by its name:
 *
 *   cpu        the default, for NULL
 *   deferred   for tests: a CPU backend that runs only at sync; its buffers cannot be read before
 *   cuda[:N]   GPU number N, or 0; needs libsooth_cuda.so (cuda_load.c). Ignores the options
 *
 * An unknown name is an error that lists the known ones. */
int so_backend_open(const char *name, const so_backend_opts *o, so_backend **out, so_err *err);
void so_backend_free(so_backend *b); /* NULL is allowed */

static inline void so_submit(so_backend *b, const so_op *op) { b->vt->submit(b, op); }

#endif
