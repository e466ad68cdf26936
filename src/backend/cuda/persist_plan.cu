/* Finds runs of layers, and the product that gives the logits, in a list of operations and writes them as works
 * for the persistent kernel.
 *
 * A layer is exactly the sequence of Llama and its relatives: q, k, v; rope; store; attention; output and
 * addition; norm; gate and up with their activation; down and addition; and, before the next layer, its
 * norm. Anything else is left to the kernels of launch.cu. Whether a layer fits depends on shapes, types
 * and the number of multiprocessors, and because the results have the same bits either way, the choice may
 * also depend on the number of rows and on what is faster. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/launch.cuh"

static char *view_at(so_view v) { return v.buf ? v.buf->data + v.off : NULL; }
static bool same_view(so_view a, so_view b) { return a.buf == b.buf && a.off == b.off; }

/* The operations of one layer. */
typedef struct layer_ops {
    const so_op *q, *k, *v, *rope_q, *rope_k, *store, *attention, *o, *add_o, *norm, *gate, *up,
        *act, *down, *add_down;
    const so_op *next_norm; /* the norm of the next layer, or NULL: this is the last one */
} layer_ops;

enum { LAYER_OPS = 15 };

static bool reads(const so_op *product, so_view x) {
    return product->kind == SO_OP_MATMUL && same_view(product->matmul.x, x);
}

static bool adds_to(const so_op *add, const so_op *product) {
    return add->kind == SO_OP_ADD && same_view(add->eltwise.out, add->eltwise.a) &&
           same_view(add->eltwise.b, product->matmul.out) && add->eltwise.d == product->matmul.w->m;
}

static bool norms(const so_op *norm, const so_op *add) {
    return norm->kind == SO_OP_RMS_NORM && same_view(norm->norm.x, add->eltwise.out) &&
           norm->norm.d == add->eltwise.d;
}

/* Whether the 15 operations at o are a layer, up to the addition at its end. */
static bool is_layer(const so_op *o, size_t left, layer_ops *l) {
    if (left < LAYER_OPS)
        return false;
    *l = {o,     o + 1, o + 2,  o + 3,  o + 4,  o + 5,  o + 6,  o + 7,
          o + 8, o + 9, o + 10, o + 11, o + 12, o + 13, o + 14, NULL};
    for (int i = 0; i < LAYER_OPS; i++)
        if (o[i].n != o->n)
            return false;
    return l->q->kind == SO_OP_MATMUL && reads(l->k, l->q->matmul.x) &&
           reads(l->v, l->q->matmul.x) && l->rope_q->kind == SO_OP_ROPE &&
           same_view(l->rope_q->rope.x, l->q->matmul.out) && l->rope_k->kind == SO_OP_ROPE &&
           same_view(l->rope_k->rope.x, l->k->matmul.out) && l->store->kind == SO_OP_KV_STORE &&
           same_view(l->store->kv_store.k, l->k->matmul.out) &&
           same_view(l->store->kv_store.v, l->v->matmul.out) &&
           l->attention->kind == SO_OP_ATTENTION &&
           same_view(l->attention->attention.q, l->q->matmul.out) &&
           l->attention->attention.store == l->store->kv_store.store &&
           l->attention->attention.layer == l->store->kv_store.layer &&
           reads(l->o, l->attention->attention.out) && adds_to(l->add_o, l->o) &&
           norms(l->norm, l->add_o) && reads(l->gate, l->norm->norm.out) &&
           reads(l->up, l->norm->norm.out) &&
           (l->act->kind == SO_OP_SILU_MUL || l->act->kind == SO_OP_GELU_MUL) &&
           same_view(l->act->eltwise.a, l->gate->matmul.out) &&
           same_view(l->act->eltwise.b, l->up->matmul.out) && reads(l->down, l->act->eltwise.out) &&
           adds_to(l->add_down, l->down) &&
           same_view(l->add_o->eltwise.out, l->add_down->eltwise.out);
}

static int tiles_per_block(const so_weight *w, int n_sms) {
    return ((w->m + SO_TILE - 1) / SO_TILE + n_sms - 1) / n_sms;
}

/* Whether the kernel has the loop for a matrix, and whether its format is quantised: a run has either fp16 or
 * quantised weights. */
static bool streams(const so_weight *w) {
    return w->fmt == SO_FMT_F16 || w->fmt == SO_FMT_Q4_32_OFF || w->fmt == SO_FMT_Q8_32 ||
           w->fmt == SO_FMT_Q8_16;
}
static bool is_quant(const so_weight *w) { return w->fmt > SO_FMT_F32; }

/* Whether the kernel can compute a layer. */
static bool layer_fits(const layer_ops *l, int n_sms) {
    const so_kv_store *s = l->store->kv_store.store;
    int d = l->add_o->eltwise.d, hd = s->shape.head_dim, heads = l->attention->attention.n_heads,
        kv = s->shape.n_heads_kv, ff = l->gate->matmul.w->m;
    const so_op *products[7] = {l->q, l->k, l->v, l->o, l->gate, l->up, l->down};
    const int widths[7] = {heads * hd, kv * hd, kv * hd, d, ff, ff, d},
              depths[7] = {d, d, d, heads * hd, d, d, ff},
              most[7] = {SO_MAX_Q,     SO_MAX_KV,    SO_MAX_KV, SO_MAX_ADD,
                         SO_MAX_GATED, SO_MAX_GATED, SO_MAX_ADD};
    for (int i = 0; i < 7; i++) {
        const so_weight *w = products[i]->matmul.w;
        if (w->m != widths[i] || w->k != depths[i] || w->m % SO_TILE != 0 || w->k % SO_UNIT != 0 ||
            tiles_per_block(w, n_sms) > most[i] || !streams(w) ||
            is_quant(w) != is_quant(l->q->matmul.w))
            return false;
    }
    if (l->k->matmul.w->fmt != l->q->matmul.w->fmt ||
        l->up->matmul.w->fmt != l->gate->matmul.w->fmt)
        return false;
    return s->shape.dtype == SO_DTYPE_F16 && (hd == 64 || hd == 128) && heads % kv == 0 &&
           l->q->n <= n_sms && d / SO_TILE <= 32 * SO_PERSIST_SQUARES &&
           l->rope_q->rope.head_dim == hd && l->rope_k->rope.head_dim == hd &&
           l->rope_q->rope.halves == l->rope_k->rope.halves && l->rope_q->rope.n_heads == heads &&
           l->rope_k->rope.n_heads == kv &&
           same_view(l->rope_q->rope.table, l->rope_k->rope.table) && l->act->eltwise.d == ff;
}

/* Hands out parts of the exchange memory; with a base of NULL it only counts. */
typedef struct allotment {
    char *base;
    size_t used;
} allotment;

static char *allot(allotment *a, size_t n_bytes) {
    char *p = a->base + a->used;
    a->used += (n_bytes + 255) / 256 * 256;
    return p;
}

/* The buffers of one twin. The scales of both twins come first, so that both are made empty before the kernel:
 * the first layer has no scale_attn and does not empty the second layer's. */
typedef struct twin {
    char *scale_attn, *scale_mlp;
    char *x_attn, *sq_attn, *q, *k, *v, *parts, *stats, *att, *x_mlp, *sq_mlp, *mlp;
} twin;

static void make_twin(allotment *a, size_t n, size_t d, size_t heads, size_t kv, size_t hd,
                      size_t ff, twin *out) {
    twin t = *out;
    t.x_attn = allot(a, n * d * 2);
    t.sq_attn = allot(a, n * (d / SO_TILE) * 4);
    t.q = allot(a, n * heads * hd * 4);
    t.k = allot(a, n * kv * hd * 4);
    t.v = allot(a, n * kv * hd * 4);
    t.parts = allot(a, n * heads * SO_PERSIST_SPLITS * hd * 4);
    t.stats = allot(a, n * heads * SO_PERSIST_SPLITS * 8);
    t.att = allot(a, n * heads * hd * 2);
    t.x_mlp = allot(a, n * d * 2);
    t.sq_mlp = allot(a, n * (d / SO_TILE) * 4);
    t.mlp = allot(a, n * ff * 2);
    *out = t;
}

/* Sets both twins and returns how many bytes are to be made empty before the kernel. */
static size_t make_twins(const layer_ops *l, allotment *a, twin *twins) {
    const so_kv_store *s = l->store->kv_store.store;
    size_t clear = 0;
    for (int i = 0; i < 2; i++) {
        twins[i].scale_attn = allot(a, (size_t)l->q->n * 4);
        twins[i].scale_mlp = allot(a, (size_t)l->q->n * 4);
    }
    for (int i = 0; i < 2; i++) {
        make_twin(a, (size_t)l->q->n, (size_t)l->add_o->eltwise.d,
                  (size_t)l->attention->attention.n_heads, (size_t)s->shape.n_heads_kv,
                  (size_t)s->shape.head_dim, (size_t)l->gate->matmul.w->m, &twins[i]);
        clear = i == 0 ? a->used : clear;
    }
    return clear;
}

static so_persist_matrix matrix_of(const so_op *product) {
    const so_weight *w = product->matmul.w;
    const float *bias = (const float *)view_at(product->matmul.bias);
    return {w->data, w->factor, bias, w->layout, w->fmt, w->k, -1};
}

/* A run of layers that is being built. */
typedef struct builder {
    so_persist_work *works;
    so_persist_piece *stream;
    int n_works, n_products; /* n_products: of the stream */
    int n_numbers;           /* products among the works */
    bool mixed;
} builder;

static so_persist_work *new_work(builder *b, int kind) {
    so_persist_work *w = &b->works[b->n_works++];
    memset(w, 0, sizeof *w);
    w->kind = kind;
    w->number = kind == SO_PERSIST_ATTENTION ? -1 : b->n_numbers++;
    return w;
}

static so_persist_piece piece_of(const so_persist_matrix &m) {
    return {m.w, m.layout.each, m.layout.more, m.layout.n_units, m.group, m.fmt};
}

static void add_matrix(so_persist_work *w, const so_op *product, int group) {
    so_persist_matrix m = matrix_of(product);
    m.group = group;
    w->product.m[w->n_matrices++] = m;
}

/* Adds the weights of a product, whose matrices are known, to the stream. */
static void add_stream(builder *b, const so_persist_work *w) {
    const so_persist_matrix *m = w->product.m;
    int n = w->n_matrices;
    if (n == 3 && m[2].fmt != m[0].fmt) {
        b->stream[b->n_products++ * SO_PERSIST_PIECES] = piece_of(m[--n]);
        b->mixed = true;
    }
    for (int i = 0; i < n; i++)
        b->stream[b->n_products * SO_PERSIST_PIECES + i] = piece_of(m[i]);
    b->n_products++;
}

static so_exchange exchange_of(char *now, char *next, bool last) {
    return {now, last ? NULL : next};
}

static void put_sum(builder *b, const so_op *product, const so_op *add, const so_op *norm, char *x,
                    so_exchange out, so_exchange squares) {
    so_persist_work *w = new_work(b, SO_PERSIST_ADD);
    add_matrix(w, product, -1);
    add_stream(b, w);
    w->product.x = x;
    w->product.x_stride = product->matmul.w->k * 2;
    w->product.residual = (float *)view_at(add->eltwise.out);
    w->product.first = b->n_works == 3;
    w->product.last = !norm;
    w->product.norm = norm ? (const float *)view_at(norm->norm.weight) : NULL;
    w->product.out[0] = out;
    w->product.out_stride = add->eltwise.d * 2;
    w->product.squares_out = squares;
}

static void put_attention(builder *b, const layer_ops *l, const twin *now, const twin *next,
                          bool last) {
    const so_kv_store *s = l->store->kv_store.store;
    so_persist_work *w = new_work(b, SO_PERSIST_ATTENTION);
    so_persist_piece *p = &b->stream[b->n_products * SO_PERSIST_PIECES - 1];
    p->n_units = l->attention->attention.layer;
    p->fmt = SO_PERSIST_CHUNKS;
    w->attention.q = now->q;
    w->attention.k = now->k;
    w->attention.v = now->v;
    w->attention.table = (const float *)view_at(l->rope_q->rope.table);
    w->attention.rows = (const so_attn_row *)view_at(l->attention->attention.rows);
    w->attention.pages = (const int32_t *)view_at(l->attention->attention.pages);
    w->attention.tails = (const int32_t *)view_at(l->attention->attention.tails);
    w->attention.slots = (const so_kv_slot *)view_at(l->store->kv_store.slots);
    w->attention.k_cache = s->k;
    w->attention.v_cache = s->v;
    w->attention.entry = s->entry;
    w->attention.n_cache_layers = s->shape.n_layers;
    w->attention.layer = l->attention->attention.layer;
    w->attention.n_heads = l->attention->attention.n_heads;
    w->attention.n_heads_kv = s->shape.n_heads_kv;
    w->attention.window = l->attention->attention.window;
    w->attention.halves = l->rope_q->rope.halves;
    w->attention.scale = l->attention->attention.scale;
    w->attention.out_stride = l->attention->attention.n_heads * s->shape.head_dim * 2;
    w->attention.parts = exchange_of(now->parts, next->parts, last);
    w->attention.stats = exchange_of(now->stats, next->stats, last);
    w->attention.out = exchange_of(now->att, next->att, last);
}

/* The works of layer number `i` of a run. */
static void put_layer(builder *b, const layer_ops *layers, int i, const twin *twins) {
    const layer_ops *l = &layers[i];
    const so_op *prior = i > 0 ? layers[i - 1].next_norm : NULL; /* the norm before it */
    const twin *now = &twins[i % 2], *next = &twins[(i + 1) % 2];
    bool last = !l->next_norm;
    so_persist_work *w = new_work(b, SO_PERSIST_QKV);
    add_matrix(w, l->q, -1);
    add_matrix(w, l->k, -1);
    add_matrix(w, l->v, -1);
    add_stream(b, w);
    if (prior) { /* written by the layer before */
        w->product.x = next->x_attn;
        w->product.x_stride = prior->norm.d * 2;
        w->product.squares = next->sq_attn;
        w->product.scales = exchange_of(now->scale_attn, next->scale_attn, last);
        w->product.eps = prior->norm.eps;
    }
    w->product.out[0] = exchange_of(now->q, next->q, last);
    w->product.out[1] = exchange_of(now->k, next->k, last);
    w->product.out[2] = exchange_of(now->v, next->v, last);
    put_attention(b, l, now, next, last);
    put_sum(b, l->o, l->add_o, l->norm, now->att, exchange_of(now->x_mlp, next->x_mlp, last),
            exchange_of(now->sq_mlp, next->sq_mlp, last));
    w = new_work(b, SO_PERSIST_GATED);
    add_matrix(w, l->gate, -1);
    add_matrix(w, l->up, -1);
    add_stream(b, w);
    w->product.x = now->x_mlp;
    w->product.x_stride = l->norm->norm.d * 2;
    w->product.squares = now->sq_mlp;
    w->product.scales = exchange_of(now->scale_mlp, next->scale_mlp, last);
    w->product.eps = l->norm->norm.eps;
    w->product.act = l->act->kind;
    w->product.out[0] = exchange_of(now->mlp, next->mlp, last);
    w->product.out_stride = l->act->eltwise.d * 2;
    put_sum(b, l->down, l->add_down, l->next_norm, now->mlp,
            exchange_of(now->x_attn, next->x_attn, last),
            exchange_of(now->sq_attn, next->sq_attn, last));
}

/* Whether two layers can be in one run. */
static bool continues(const layer_ops *a, const layer_ops *b) {
    const so_kv_store *s = a->store->kv_store.store;
    return b->q->n == a->q->n && is_quant(b->q->matmul.w) == is_quant(a->q->matmul.w) &&
           b->store->kv_store.store == s &&
           same_view(a->add_o->eltwise.out, b->add_o->eltwise.out) &&
           same_view(a->q->matmul.out, b->q->matmul.out) &&
           same_view(a->gate->matmul.out, b->gate->matmul.out) &&
           a->attention->attention.n_heads == b->attention->attention.n_heads &&
           a->attention->attention.window == b->attention->attention.window &&
           a->gate->matmul.w->m == b->gate->matmul.w->m &&
           same_view(a->attention->attention.rows, b->attention->attention.rows) &&
           same_view(a->store->kv_store.slots, b->store->kv_store.slots) &&
           same_view(a->attention->attention.pages, b->attention->attention.pages) &&
           same_view(a->attention->attention.tails, b->attention->attention.tails);
}

/* Whether an operation behind the last layer reads what the kernel does not store: everything except the
 * residual. All layers use the same buffers. */
static bool results_read(const so_op *ops, size_t n_ops, const layer_ops *last) {
    const so_view inner[] = {last->q->matmul.out,    last->k->matmul.out,
                             last->v->matmul.out,    last->attention->attention.out,
                             last->o->matmul.out,    last->norm->norm.out,
                             last->gate->matmul.out, last->up->matmul.out,
                             last->act->eltwise.out, last->down->matmul.out};
    size_t end = (size_t)(last->add_down - ops) + 1;
    for (size_t i = 0; i < sizeof inner / sizeof inner[0]; i++)
        if (so_cuda_is_read(ops, n_ops, end, inner[i], last->q->n, false))
            return true;
    return false;
}

/* Whether operation i is the split norm that follows an addition of a product's result. The separate
 * kernels must see it as one, too, or their bits would differ. */
static bool is_norm_after(const so_op *ops, size_t n_ops, size_t i, const so_op *product,
                          const so_op *add) {
    return i < n_ops && norms(&ops[i], add) && same_view(ops[i].norm.out, product->matmul.out) &&
           so_cuda_is_split_norm(ops, n_ops, i, add->eltwise.out, add->n, add->eltwise.d);
}

static bool is_run_layer(const so_queue *q, const so_op *ops, size_t n_ops, size_t i,
                         layer_ops *l) {
    return ops[i].n > 0 && ops[i].n <= SO_PERSIST_ROWS && is_layer(ops + i, n_ops - i, l) &&
           layer_fits(l, q->n_sms) &&
           is_norm_after(ops, n_ops, (size_t)(l->norm - ops), l->o, l->add_o);
}

/* The layers from operation i on, one after the other with a norm between them. 0 if there are none, or if
 * the kernel cannot compute all of them: the norm after its last layer would have other bits. */
static int find_layers(const so_queue *q, const so_op *ops, size_t n_ops, size_t i,
                       layer_ops *layers, int most) {
    int n = 0;
    while (n < most && is_run_layer(q, ops, n_ops, i, &layers[n]) &&
           (n == 0 || continues(&layers[0], &layers[n]))) {
        const layer_ops *l = &layers[n++];
        i += LAYER_OPS;
        if (!is_norm_after(ops, n_ops, i, l->down, l->add_down)) {
            if (results_read(ops, n_ops, l))
                return 0;
            for (int j = 0; j + 1 < n; j++)
                layers[j].next_norm = layers[j].add_down + 1;
            return n;
        }
        i++;
    }
    return 0;
}

enum { MAX_LAYERS = 128 };

size_t so_persist_need(const so_queue *q, const so_op *ops, size_t n_ops) {
    layer_ops l;
    size_t most = 0;
    int n = 0; /* rows of the layers seen so far: those with as many need as much */
    for (size_t i = 0; i < n_ops; i++)
        if (ops[i].kind == SO_OP_MATMUL && ops[i].n > n && is_run_layer(q, ops, n_ops, i, &l)) {
            allotment a = {NULL, 0};
            twin twins[2];
            make_twins(&l, &a, twins);
            most = a.used > most ? a.used : most;
            n = ops[i].n;
        }
    return most;
}

static bool upload(void **to, const void *from, size_t n_bytes) {
    return cudaMalloc(to, n_bytes) == cudaSuccess &&
           cudaMemcpy(*to, from, n_bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaStreamSynchronize(cudaStreamLegacy) == cudaSuccess; /* it may return early */
}

/* Copies a builder's works to the device and frees it. */
static bool send_works(builder *b, so_persist_run *run) {
    run->n_works = b->n_works;
    run->n_products = b->n_products;
    run->mixed = b->mixed;
    for (int i = 0; i < b->n_products * SO_PERSIST_PIECES; i++)
        if (b->stream[i].w)
            run->formats |= 1u << b->stream[i].fmt;
    bool ok = upload((void **)&run->works, b->works, (size_t)b->n_works * sizeof *b->works) &&
              upload((void **)&run->stream, b->stream,
                     (size_t)b->n_products * SO_PERSIST_PIECES * sizeof *b->stream);
    free(b->works);
    free(b->stream);
    return ok;
}

/* How the heads' entries of a cache can be copied in boxes. False: the driver cannot say. */
static bool map_entries(const so_kv_store *s, const char *data, char *out) {
    CUtensorMap map;
    void *encode = NULL;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaError_t rc = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                                      cudaEnableDefault, &found);
#else
    cudaError_t rc =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
#endif
    if (rc != cudaSuccess) {
        (void)cudaGetLastError(); /* the pass is computed without the maps */
        return false;
    }
    cuuint64_t width = (cuuint64_t)s->shape.head_dim, stride = width * 2,
               rows = (cuuint64_t)s->shape.n_pages * s->shape.n_layers * s->shape.n_heads_kv *
                      SO_KV_PAGE;
    if (found != cudaDriverEntryPointSuccess || rows > INT32_MAX || s->shape.dtype != SO_DTYPE_F16)
        return false;
    cuuint64_t size[2] = {width, rows};
    cuuint32_t box[2] = {64, SO_KV_PAGE}, step[2] = {1, 1};
    bool ok =
        ((decltype(&cuTensorMapEncodeTiled))encode)(
            &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)data, size, &stride, box, step,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    memcpy(out, &map, sizeof map);
    return ok;
}

static bool map_cache(const so_kv_store *s, char *keys, char *values) {
    return map_entries(s, s->k, keys) && map_entries(s, s->v, values);
}

static bool make_run(const layer_ops *layers, int n, size_t first, char *exchange,
                     size_t exchange_bytes, so_persist_run *run) {
    allotment a = {exchange, 0};
    twin twins[2];
    size_t clear = make_twins(&layers[0], &a, twins);
    memset(run, 0, sizeof *run);
    if (a.used > exchange_bytes)
        return false;
    builder b = {(so_persist_work *)calloc((size_t)n * 5, sizeof *b.works),
                 (so_persist_piece *)calloc((size_t)n * 5 * SO_PERSIST_PIECES, sizeof *b.stream)};
    for (int i = 0; i < n; i++)
        put_layer(&b, layers, i, twins);
    const so_kv_store *s = layers[0].store->kv_store.store;
    run->first_op = first;
    run->n_ops = (size_t)n * (LAYER_OPS + 1) - 1;
    run->n = layers[0].q->n;
    run->head_dim = s->shape.head_dim;
    run->exchange = exchange;
    run->clear_bytes = clear;
    const so_persist_work *w = &b.works[1];
    run->cache = {w->attention.pages,
                  s->shape.n_layers,
                  s->shape.head_dim,
                  w->attention.n_heads,
                  s->shape.n_heads_kv,
                  w->attention.window,
                  map_cache(s, run->keys, run->values)};
    run->rows = w->attention.rows;
    run->slots = w->attention.slots;
    return send_works(&b, run);
}

/* Whether operation i gives the logits: a product that is not fused with the next operation and has at least
 * OUT_TILES tiles for each block. With few rows the kernel is 2 % faster for the 1B shape and as much slower
 * for the 3B; with more it is up to 4 % faster. A library for tests is built without these limits. */
#ifndef SO_PERSIST_MIN
#define SO_PERSIST_MIN 1
#endif
enum { OUT_TILES = SO_PERSIST_MIN ? 32 : 1, OUT_ROWS = SO_PERSIST_MIN ? 5 : 1 };
static bool is_output(const so_queue *q, const so_op *ops, size_t n_ops, size_t i) {
    const so_op *o = &ops[i];
    const so_weight *w = o->matmul.w;
    bool alone =
        i + 1 == n_ops || ops[i + 1].kind == SO_OP_ARGMAX || ops[i + 1].kind == SO_OP_GATHER;
    return alone && o->n >= OUT_ROWS && o->n <= SO_PERSIST_ROWS && streams(w) &&
           w->m % SO_TILE == 0 && w->k % SO_UNIT == 0 && w->n_units % 8 == 0 &&
           w->layout.n_tiles / q->n_sms >= OUT_TILES && !same_view(o->matmul.x, o->matmul.out);
}

static bool make_output(const so_queue *q, const so_op *ops, size_t i, so_persist_run *run) {
    int most = tiles_per_block(ops[i].matmul.w, q->n_sms),
        n = (most + SO_MAX_TILES - 1) / SO_MAX_TILES;
    builder b = {(so_persist_work *)calloc((size_t)n, sizeof *b.works),
                 (so_persist_piece *)calloc((size_t)n * SO_PERSIST_PIECES, sizeof *b.stream)};
    memset(run, 0, sizeof *run);
    for (int g = 0; g < n; g++) {
        so_persist_work *w = new_work(&b, SO_PERSIST_OUT);
        add_matrix(w, &ops[i], g);
        add_stream(&b, w);
        w->product.result = (float *)view_at(ops[i].matmul.out);
    }
    run->first_op = i;
    run->n_ops = 1;
    run->n = ops[i].n;
    run->head_dim = 64; /* any */
    return send_works(&b, run);
}

static void free_run(so_persist_run *r) {
    cudaFree(r->works);
    cudaFree(r->stream);
}

void so_persist_plan_make(const so_queue *q, const so_op *ops, size_t n_ops, char *exchange,
                          size_t exchange_bytes, so_persist_plan *plan) {
    memset(plan, 0, sizeof *plan);
    if (!q->persist)
        return;
    layer_ops *layers = (layer_ops *)calloc(MAX_LAYERS, sizeof *layers);
    for (size_t i = 0; i < n_ops && plan->n_runs < SO_PERSIST_RUNS; i++) {
        if (ops[i].kind != SO_OP_MATMUL)
            continue;
        int n = find_layers(q, ops, n_ops, i, layers, MAX_LAYERS);
        if (n == 0 && !is_output(q, ops, n_ops, i))
            continue;
        so_persist_run *r = &plan->run[plan->n_runs];
        if (!(n > 0 ? make_run(layers, n, i, exchange, exchange_bytes, r)
                    : make_output(q, ops, i, r))) {
            free_run(r);
            (void)cudaGetLastError();
            break;
        }
        plan->n_runs++;
        i += r->n_ops - 1;
    }
    free(layers);
}

void so_persist_plan_free(so_persist_plan *plan) {
    for (int i = 0; i < plan->n_runs; i++)
        free_run(&plan->run[i]);
    plan->n_runs = 0;
}
