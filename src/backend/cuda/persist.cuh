/* The layers of a pass in one persistent kernel; see persist.cu. */
#ifndef SO_BACKEND_CUDA_PERSIST_CUH
#define SO_BACKEND_CUDA_PERSIST_CUH

#include <cuda.h>

#include "backend/cuda/device.cuh"

enum {
    SO_PERSIST_ROWS = 16,    /* maximum number of rows */
    SO_PERSIST_MATRICES = 3, /* of one product: q, k, v */
    SO_PERSIST_COLS = 16,    /* columns of an attention item */
    SO_PERSIST_SPLITS = 32,  /* running sums of attention, as in softmax.cuh */
    SO_PERSIST_SQUARES = 16, /* sums of squares that a lane adds: rows of at most 4096 */
};

/* Tiles of a matrix that a block can have. */
enum { SO_MAX_Q = 4, SO_MAX_KV = 2, SO_MAX_ADD = 4, SO_MAX_GATED = 8, SO_MAX_TILES = 16 };

/* A matrix as the kernel reads it. */
typedef struct so_persist_matrix {
    const char *w;
    const float *factor, *bias; /* bias: or NULL */
    so_layout layout;
    int fmt, k;
    int group; /* only this group of SO_MAX_TILES of a block's tiles; -1: all of them */
} so_persist_matrix;

/* A part of the stream of weights: one matrix of a product. If v has another format than q and k, it is
 * streamed before them, like a product of its own. */
typedef struct so_persist_piece {
    const char *w;
    int each, more; /* tiles of a block, as in so_layout */
    int n_units, group, fmt;
} so_persist_piece;
/* Pieces of a product; unused ones have no tiles. The last one is no matrix: if its `fmt` is
 * SO_PERSIST_CHUNKS, attention follows, whose keys and values are those of layer n_units of the cache. */
enum { SO_PERSIST_PIECES = 4, SO_PERSIST_CHUNKS = -1 };

/* The cache of a run, and which heads read it. */
typedef struct so_persist_cache {
    const int32_t *pages; /* as so_attn_row.page_off counts them */
    int n_layers, head_dim, n_heads, n_heads_kv, window;
    bool boxes; /* there are maps of keys and values, by which they can be copied into the ring */
} so_persist_cache;

/* Words that thread blocks hand to each other. `now` is written in this layer, `next` by the same thread in
 * the next one. Before it writes a word of `now`, the thread makes the same word of `next` empty. */
typedef struct so_exchange {
    char *now, *next; /* next: NULL if there is no next layer */
} so_exchange;

enum { SO_PERSIST_QKV, SO_PERSIST_ADD, SO_PERSIST_GATED, SO_PERSIST_OUT, SO_PERSIST_ATTENTION };

/* One work of the kernel: a product or an attention. */
typedef struct so_persist_work {
    int kind, n_matrices;
    int number; /* of a product, among those of the list */
    union {
        struct {
            so_persist_matrix m[SO_PERSIST_MATRICES];
            const char *x; /* fp16 rows; NULL: the kernel's x */
            int x_stride, act;
            const char *squares; /* float [row][k / 8], or NULL: rows are not to be scaled */
            so_exchange scales;  /* float [row], with squares: the rows' scales */
            float eps;
            int pad;
            so_exchange out[SO_PERSIST_MATRICES]; /* QKV: float rows. Others: out[0], fp16 rows */
            float *result;                        /* OUT: [row][m], not handed to anybody */
            int out_stride;
            float *
                residual; /* ADD: [row][m]; read before the first addition of a run, written by the last */
            bool first, last;        /* ADD: of the run */
            const float *norm;       /* ADD: weight of the norm that follows, or NULL: none */
            so_exchange squares_out; /* ADD, with norm: float [row][m / 8] */
        } product;
        struct {
            const char *q, *k, *v; /* float rows, before rope */
            const float *table;    /* rope, [row][head_dim / 2] (cos, sin) */
            const so_attn_row *rows;
            const int32_t *pages, *tails;
            const so_kv_slot *slots;
            char *k_cache, *v_cache;
            size_t entry;
            int n_cache_layers, layer, n_heads, n_heads_kv;
            int window, halves;
            float scale;
            int out_stride;
            so_exchange parts; /* float [row][head][SPLITS][head_dim] */
            so_exchange stats; /* float2 [row][head][SPLITS] m, l */
            so_exchange out;   /* fp16 rows */
        } attention;
    };
} so_persist_work;

/* A run of layers of a list, or the product that gives the logits. */
typedef struct so_persist_run {
    size_t first_op, n_ops;
    int n, head_dim;
    int n_works, n_products;  /* n_products: of the stream */
    unsigned formats;         /* of the weights, 1 << so_fmt each */
    bool mixed;               /* v of some layer has another format than q and k */
    so_persist_work *works;   /* device */
    so_persist_piece *stream; /* device, [n_products][SO_PERSIST_PIECES] in the order of use */
    so_persist_cache cache;
    char keys[sizeof(CUtensorMap)],
        values[sizeof(
            CUtensorMap)];   /* tensor maps of the cache, as bytes: a plan's memory does not have
                                       the alignment that the type demands */
    char *exchange;          /* device */
    size_t clear_bytes;      /* of `exchange`, to be filled with ones before the kernel */
    const so_attn_row *rows; /* device, like the slots of all layers */
    const so_kv_slot *slots;
} so_persist_run;

enum { SO_PERSIST_RUNS = 8 }; /* layers and logits; a list has few of them */
typedef struct so_persist_plan {
    so_persist_run run[SO_PERSIST_RUNS];
    int n_runs;
} so_persist_plan;

/* Tests set this to the number of a product: in kernels that are planned from then on, thread block 0 hands over
 * none of its results, so that the others wait in vain. -1: none. */
extern "C" int so_cuda_lost_product;

/* Whether the GPU can run the kernel. */
bool so_persist_usable(const so_queue *q);
/* Bytes of exchange memory for a list; 0: the kernel computes no layers of it (the logits need none). */
size_t so_persist_need(const so_queue *q, const so_op *ops, size_t n_ops);
/* Finds the layers of the list that the kernel can compute. Allocates device memory; a plan without
 * runs is the answer if there is none. Not during a capture. */
void so_persist_plan_make(const so_queue *q, const so_op *ops, size_t n_ops, char *exchange,
                          size_t exchange_bytes, so_persist_plan *plan);
void so_persist_plan_free(so_persist_plan *plan);
/* Queues the layers. x: the rows that the first product reads. */
void so_persist_launch(const so_queue &q, const so_persist_run *run, so_half_rows x);

#endif
