/* What the files of the CPU backend share: the objects behind the opaque handles, and the list of
 * tasks that one pass of the threads walks. Only src/backend may include this. */
#ifndef SO_BACKEND_CPU_CPU_H
#define SO_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/slab.h"
#include "base/pool.h"

/* Zeroed pages from the kernel, touched when first written. */
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
    size_t group_bytes;   /* of 16 packed rows (pack.h); 0: rows as the file has them */
    so_slab_chunk *chunk; /* that holds it */
};

/* K and V, each [n_pages][n_layers][n_heads_kv] pages of one head, laid out as kernels.h says at
 * so_attn_fns. Layers of a page lie together, so that memory
 * which is backed by huge pages grows with the positions in use and not with the store. */
struct so_kv_store {
    so_kv_shape shape;
    size_t entry_bytes; /* one head of one position */
    so_buffer k, v;
};

/* Byte offset of one page of one head in k or v. */
static inline size_t so_kv_page(const so_kv_store *s, int layer, int page, int head) {
    size_t i = (size_t)page * (size_t)s->shape.n_layers + (size_t)layer;
    i = i * (size_t)s->shape.n_heads_kv + (size_t)head;
    return i * SO_KV_PAGE * s->entry_bytes;
}

/* Results of chunks of positions, where attention is split there (attention.c). */
enum { SO_ATTN_SPLIT_UNITS = 256, SO_ATTN_SPLIT_BYTES = 16 << 20 };
typedef struct so_attn_split {
    float *floats; /* [SO_ATTN_SPLIT_BYTES / 4]; NULL where there was no memory: no split */
    _Atomic int arrived[SO_ATTN_SPLIT_UNITS]; /* chunks that are done; 0 between operations */
} so_attn_split;

enum { SO_HEAD_DIM_MAX = 1024 };

typedef struct so_cpu so_cpu;
typedef void so_task_fn(const so_cpu *b, const so_op *op, int index, int count);

typedef struct so_task {
    so_task_fn *fn;
    int op;       /* index into ops */
    bool barrier; /* the team meets before this task */
    bool shared;  /* and what it did since the last meeting was shared by so_cpu_share */
} so_task;

/* Who gets how much (shares.c): member i the part cut[i] … cut[i + 1] of SO_SHARE_ONE. */
enum { SO_SHARES_MAX = 256, SO_SHARE_ONE = 1 << 16 };
typedef struct so_shares {
    int count;
    int32_t cut[SO_SHARES_MAX + 1];
    double speed[SO_SHARES_MAX]; /* 1 on average */
    long waited[SO_SHARES_MAX];  /* in the last run, turns of so_pool_barrier */
} so_shares;

/* A stretch of memory that a task reads or writes. `owner` is a buffer, a KV store or a scratch;
 * two ranges of different owners never overlap. Where each member keeps to its share of it, `parts`
 * or `columns` says how it is shared: the same range, shared alike, is then each member's own from
 * task to task, and no meeting is needed. */
typedef struct so_range {
    const void *owner;
    size_t begin, end;
    bool write;
    long parts;   /* > 0: in equal parts, as so_split(parts, 1, …) gives them */
    long columns; /* > 0: rows of so many elements, each as so_cpu_share does */
} so_range;

enum { SO_COLUMN = 32 }; /* rows of a product are shared so, and a block of activations is one */

/* Elements in one part of a row of d where the elements do not depend on each other: whole blocks
 * of activations where d has them, so that what is computed can be rounded without a meeting. */
static inline int so_cpu_grain(int d) { return d % 256 == 0 ? 256 : d % 32 == 0 ? 32 : d; }

enum { SO_OPS_MAX = 4096, SO_TASKS_MAX = 2 * SO_OPS_MAX, SO_RANGES_MAX = 64, SO_OP_RANGES = 6 };

/* Operations and what came of them. Passes repeat themselves: those that were run last are kept,
 * and one that is submitted again, operation for operation, finds its tasks as they were. */
enum { SO_LISTS = 16 };
typedef struct so_list {
    so_op ops[SO_OPS_MAX];
    so_task tasks[SO_TASKS_MAX];
    _Atomic int taken[SO_OPS_MAX];  /* pieces of a product that members have taken (ops.c) */
    uint8_t scratch_of[SO_OPS_MAX]; /* the set of activations that a matmul reads */
    int n_ops, n_tasks;             /* of the last run; 0: it cannot be used again */
    uint64_t run;                   /* number of that run */
    long wait_most; /* turns of waiting that count at one meeting; 0: it was never run */
} so_list;

typedef struct so_scratch {
    unsigned char *data;
    size_t n_bytes, need;
} so_scratch;

struct so_cpu {
    so_backend base;
    const so_kernels *kernels;
    so_pool *pool;
    so_slab slab;       /* packed weights */
    so_list *lists;     /* [SO_LISTS] */
    so_list *list;      /* that is filled now */
    bool known;         /* so far it is as it was when it was run last */
    int n_ops, n_tasks; /* of it, by now; tasks are not counted while it is known */
    uint64_t n_runs;
    /* What the tasks since the last barrier touch. */
    so_range open[SO_RANGES_MAX];
    int n_open;
    bool open_shared; /* those tasks are shared by so_cpu_share, all of them */
    so_shares shares;
    /* Bytes of the uploads in the list, copied at submit. */
    unsigned char *uploads;
    size_t uploads_len, uploads_cap;
    /* Quantised activations, two sets in turn: the next ones are made while these are still used;
     * what the last were made from. */
    so_scratch scratch[2];
    int scratch_at;     /* the last set */
    so_range quantized; /* owner NULL: nothing to reuse */
    int quantized_n, quantized_block;
    so_attn_split *attn;
    so_err err; /* first failure since the last sync */
};

/* [*begin, *end) of n items for member `index`, by its speed; borders at multiples of `grain`. The
 * same in all of a run for as many grains. */
static inline void so_cpu_share(const so_cpu *b, long n, long grain, int index, long *begin,
                                long *end) {
    const int32_t *cut = b->shares.cut + index;
    long units = (n + grain - 1) / grain;
    *begin = (units * cut[0] + SO_SHARE_ONE / 2) / SO_SHARE_ONE * grain;
    *end = (units * cut[1] + SO_SHARE_ONE / 2) / SO_SHARE_ONE * grain;
    *begin = *begin < n ? *begin : n;
    *end = *end < n ? *end : n;
}

/* shares.c */
void so_shares_init(so_shares *s, int count);
/* After a run of t_ns; turn_ns: of a turn of waiting. */
void so_shares_learn(so_shares *s, int64_t t_ns, double turn_ns);

/* ops.c */
extern so_task_fn *const so_cpu_tasks[SO_OP_COUNT];
/* The first half of a matmul, in parts of so_cpu_grain elements, in whole rows or in columns. */
so_task_fn so_cpu_quantize, so_cpu_quantize_rows, so_cpu_quantize_columns;
so_task_fn so_cpu_eltwise_columns, so_cpu_rope_columns;
so_act so_cpu_activations(const so_cpu *b, const so_op *op); /* of a matmul */
/* Whether all rows of a product are dealt out beforehand, in columns of its result. */
bool so_cpu_dealt_whole(const so_weight *w, int count);
/* attention.c; rounded: also makes the activations of the matmul that follows in the list */
so_task_fn so_cpu_attention, so_cpu_attention_rounded;
so_task_fn so_cpu_kv_store, so_cpu_kv_copy; /* cache.c */
/* Bytes of scratch a matmul needs; 0 for float weights, SIZE_MAX where it does not fit. */
size_t so_cpu_scratch_bytes(const so_weight *w, int n);

/* ranges.c */
/* The memory op touches, checked to lie inside its buffers (a breach aborts); how many ranges. */
int so_cpu_ranges(const so_op *op, so_range *out);

/* What so_backend_open calls: cpu.c, ../deferred.c. */
int so_backend_cpu_create(const so_backend_opts *o, so_backend **out, so_err *err);
int so_backend_deferred_create(const so_backend_opts *o, so_backend **out, so_err *err);

/* level.c */
const so_kernels *so_cpu_kernels(so_cpu_level level); /* NULL where the CPU lacks it */

#endif
