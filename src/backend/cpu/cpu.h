/* Declarations private to the CPU backend: the objects behind the opaque handles, and the list of
 * tasks that the threads run for one pass. Only src/backend may include this. */
#ifndef SO_BACKEND_CPU_CPU_H
#define SO_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/slab.h"
#include "base/pool.h"

/* Zeroed pages from the operating system, backed by memory when first written. */
struct so_buffer {
    unsigned char *data;
    size_t n_bytes;
    size_t map_bytes; /* n_bytes rounded up to pages */
};

struct so_weight {
    so_dtype dtype;
    int n_cols;
    long n_rows;
    size_t row_bytes;
    const uint8_t *data;  /* borrowed, or packed in `chunk` */
    size_t tile_bytes;    /* of 32 packed rows (pack.h); 0: not packed, rows as in the file */
    so_slab_chunk *chunk; /* of the slab that holds the packed rows; NULL: not packed */
};

/* K and V, each [n_pages / SO_KV_RUN][n_layers][n_heads_kv][SO_KV_RUN] pages of one head, in the
 * layout given at so_attn_fns (kernels.h). Pages are given to a sequence mostly in ascending order,
 * so the pages of one chunk of positions are one stream in memory, which processors prefetch better
 * than single pages. All layers of a run of pages are adjacent: with huge pages, memory use then
 * grows with the positions in use and not with the size of the cache. */
enum { SO_KV_RUN = SO_ATTN_CHUNK / SO_KV_PAGE };
struct so_kv_store {
    so_kv_shape shape;
    size_t entry_bytes; /* of one head at one position */
    so_buffer k, v;
};

/* Byte offset of one page of one head in k or v. */
static inline size_t so_kv_page(const so_kv_store *s, int layer, int page, int head) {
    size_t i = (size_t)(page / SO_KV_RUN) * (size_t)s->shape.n_layers + (size_t)layer;
    i = i * (size_t)s->shape.n_heads_kv + (size_t)head;
    i = i * SO_KV_RUN + (size_t)(page % SO_KV_RUN);
    return i * SO_KV_PAGE * s->entry_bytes;
}

/* Partial results of chunks of positions, for attention that is split at chunks (attention.c). */
enum { SO_ATTN_SPLIT_UNITS = 256, SO_ATTN_SPLIT_BYTES = 16 << 20 };
typedef struct so_attn_split {
    float *floats; /* [SO_ATTN_SPLIT_BYTES / 4]; NULL: no memory, attention is not split */
    _Atomic int n_done[SO_ATTN_SPLIT_UNITS]; /* chunks finished; 0 between operations */
} so_attn_split;

enum { SO_HEAD_DIM_MAX = 1024 };

typedef struct so_cpu so_cpu;
typedef void so_task_fn(const so_cpu *b, const so_op *op, int index, int count);

typedef struct so_task {
    so_task_fn *fn;
    int op;        /* index into ops */
    bool barrier;  /* threads wait for each other before this task */
    bool weighted; /* all work since the last barrier was split by so_cpu_split_weighted */
} so_task;

/* How work is split between threads of different speed (balance.c). With the whole work as
 * SO_BALANCE_ONE, thread i gets the part from cut[i] to cut[i + 1]. */
enum { SO_BALANCE_MAX = 256, SO_BALANCE_ONE = 1 << 16 };
typedef struct so_balance {
    int count;
    int32_t cut[SO_BALANCE_MAX + 1];
    double speed[SO_BALANCE_MAX]; /* relative; 1 on average */
    long waited[SO_BALANCE_MAX];  /* in the last run, in spins of so_pool_barrier's waiting loop */
} so_balance;

/* A range of memory that a task reads or writes. `owner` is a buffer, a KV store or a scratch;
 * ranges of different owners never overlap. If each thread accesses only its own part of the range,
 * `parts` or `columns` states how the range is split. If two tasks split the same range in the same
 * way, a thread reads only what it wrote itself, and no barrier is needed between the tasks. */
typedef struct so_range {
    const void *owner;
    size_t begin, end;
    bool write;
    long parts;   /* > 0: split as so_split(parts, 1, …) does */
    long columns; /* > 0: rows of that many elements, each split by so_cpu_split_weighted with grain
                     SO_COLUMN_GRAIN */
} so_range;

/* Columns of a product are split at multiples of this many elements: one block of activations. */
enum { SO_COLUMN_GRAIN = 32 };

/* Granularity, in elements, for splitting a row of d elements that do not depend on each other:
 * whole blocks of activations where d is a multiple of them, so that the thread that computed a
 * block can quantise it without a barrier. */
static inline int so_cpu_grain(int d) { return d % 256 == 0 ? 256 : d % 32 == 0 ? 32 : d; }

enum { SO_OPS_MAX = 4096, SO_TASKS_MAX = 2 * SO_OPS_MAX, SO_RANGES_MAX = 64, SO_OP_RANGES = 8 };

/* A list of operations and the tasks made from it. Passes repeat: the most recently run lists are
 * kept, and a list that is submitted again, operation for operation, reuses its tasks. */
enum { SO_LISTS = 16 };
typedef struct so_list {
    so_op ops[SO_OPS_MAX];
    so_task tasks[SO_TASKS_MAX];
    _Atomic int claimed[SO_OPS_MAX]; /* pieces of a matmul that threads have claimed (ops.c) */
    uint8_t scratch_of[SO_OPS_MAX];  /* which scratch holds the activations of a matmul */
    int n_ops, n_tasks;              /* when last run; n_ops 0: not reusable */
    uint64_t run;                    /* number of that run */
    long wait_max;                   /* maximum spins that count at one barrier (cpu.c) */
} so_list;

typedef struct so_scratch {
    unsigned char *data;
    size_t n_bytes, need;
} so_scratch;

/* Where the choice of prefetch came from (backend/prefetch.h). */
typedef enum so_prefetch_origin {
    SO_PREFETCH_DEFAULT,
    SO_PREFETCH_MEASURED,
    SO_PREFETCH_KEPT,
} so_prefetch_origin;

/* Products that are prefetched alike: by the block length of the weights (32 or 256) and by whether
 * the product has one activation row or several. */
enum { SO_PREFETCH_CLASSES = 4 };
static inline int so_prefetch_class(int block_len, int n) {
    return (block_len == 256 ? 1 : 0) + (n > 1 ? 2 : 0);
}

struct so_cpu {
    so_backend base;
    const so_kernels *kernels;
    so_pool *pool;
    so_slab slab;       /* packed weights */
    so_list *lists;     /* [SO_LISTS] */
    so_list *list;      /* the one being filled */
    bool matches;       /* the operations so far equal those of `list` when it was last run */
    int n_ops, n_tasks; /* so far; tasks are not counted while `matches` */
    uint64_t n_runs;
    /* Ranges touched by the tasks since the last barrier. */
    so_range open[SO_RANGES_MAX];
    int n_open;
    bool open_weighted; /* all of these tasks are split by so_cpu_split_weighted */
    so_balance balance;
    so_prefetch prefetch[SO_PREFETCH_CLASSES];
    so_prefetch_origin prefetch_origin;
    /* Bytes of the uploads in the list, copied at submit. */
    unsigned char *uploads;
    size_t uploads_len, uploads_cap;
    /* Quantised activations. Two buffers alternate, so that the next activations can be written
     * while other threads still read the current ones. */
    so_scratch scratch[2];
    int scratch_at;     /* the buffer written last */
    so_range quantized; /* the floats it was quantised from; owner NULL: nothing to reuse */
    int quantized_n, quantized_block; /* their rows, and elements per block */
    so_attn_split *attn;
    so_err err; /* first failure since the last sync */
};

/* The part [*begin, *end) of n items that thread `index` computes, in proportion to its speed.
 * Borders are multiples of `grain`. During a run they depend only on the number of grains: if two
 * arrays have equally many, a thread gets the same grains of both. */
static inline void so_cpu_split_weighted(const so_cpu *b, long n, long grain, int index,
                                         long *begin, long *end) {
    const int32_t *cut = b->balance.cut + index;
    long units = (n + grain - 1) / grain;
    *begin = (units * cut[0] + SO_BALANCE_ONE / 2) / SO_BALANCE_ONE * grain;
    *end = (units * cut[1] + SO_BALANCE_ONE / 2) / SO_BALANCE_ONE * grain;
    *begin = *begin < n ? *begin : n;
    *end = *end < n ? *end : n;
}

/* balance.c */
void so_balance_init(so_balance *s, int count);
/* Adjusts the split after a run of t_ns; one spin of the waiting loop takes spin_ns. */
void so_balance_update(so_balance *s, int64_t t_ns, double spin_ns);

/* prefetch.c: the choice before any measurement */
void so_cpu_prefetch_init(so_cpu *b);

/* ops.c */
extern so_task_fn *const so_cpu_tasks[SO_OP_COUNT]; /* the default split of each operation */
/* Quantise the activations of a matmul before its product. Split into parts of so_cpu_grain
 * elements, whole rows, or columns. */
so_task_fn so_cpu_quantize, so_cpu_quantize_rows, so_cpu_quantize_columns;
so_task_fn so_cpu_eltwise_columns, so_cpu_rope_columns;
so_act so_cpu_activations(const so_cpu *b, const so_op *op); /* of a matmul */
/* Bytes of scratch a matmul needs; 0 for float weights, SIZE_MAX on overflow. */
size_t so_cpu_scratch_bytes(const so_weight *w, int n);
/* Whether all rows of w are assigned to threads before its product runs. */
bool so_cpu_matmul_is_static(const so_weight *w, int count);
/* attention.c. _quantized also writes the activations of the matmul that follows in the list. */
so_task_fn so_cpu_attention, so_cpu_attention_quantized;
so_task_fn so_cpu_kv_store, so_cpu_kv_copy; /* cache.c */
so_task_fn so_cpu_sample;                   /* sample.c */

/* ranges.c */
/* Fills `out` with the memory ranges op touches and returns their number. Aborts if a range exceeds
 * its buffer. */
int so_cpu_ranges(const so_op *op, so_range *out);

/* Called by so_backend_open; cpu.c, ../deferred.c and ../cuda_load.c. */
int so_backend_cpu_create(const so_backend_opts *o, so_backend **out, so_err *err);
int so_backend_deferred_create(const so_backend_opts *o, so_backend **out, so_err *err);
int so_backend_cuda_create(int device, so_backend **out, so_err *err);

/* level.c */
const so_kernels *so_cpu_kernels(so_cpu_level level); /* NULL: the CPU lacks the level */

#endif
