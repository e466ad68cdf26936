/* The layers of a pass over up to 16 rows in one persistent kernel, and the logits of 5 to 16 rows in
 * another launch of it.
 *
 * One thread block per multiprocessor stays for all layers. A block owns a fixed set of tiles of each matrix
 * (so_layout), so its weights are a fixed sequence that does not depend on any result: one warp (the
 * producer) copies it into a ring in shared memory and never stops at the end of an operation, while
 * eight warps (the consumers) compute. A tenth warp (the helper) lists the chunks of the cache that the block attends
 * to, finds row scales, and fetches the next works' arguments.
 *
 *   product     Consumer warp s computes segment s of all tiles of the block: one tile as the B operand of
 *               mma, the rows as A. The eight sums of each output are added through shared memory.
 *   attention   An item is a KV head, up to 16 columns (query heads of rows) and a running sum; items are
 *               dealt to the blocks. Rope of q and of the new keys is computed where they are read. A block
 *               that has a row's own position stores its key and value. Then one warp per column merges the
 *               running sums. In passes without token trees keys and values come through the ring, after the
 *               weights of q, k and v, so that long contexts cost little more than reading them.
 *
 * Files, in reading order: persist_block.cuh (the ring, waiting, handing over), persist_product.cuh,
 * persist_items.cuh (what a block attends to), persist_producer.cuh, persist_columns.cuh (the sums of attention),
 * persist_chains.cuh and persist_trees.cuh (passes without and with token trees), persist_kernel.cuh (helper and
 * kernel), persist_plan.cu (host). The kernel is compiled once for each set of formats that the weights of a run
 * may have (persist_f16.cu, persist_q4.cu, persist_quant.cu).
 *
 * Speed: the consumers must compute faster than weights arrive, so that they catch up after each exchange, and
 * the work between two products must be short. Both are limited by the number of instructions, since only two
 * warps share a scheduler, and by registers: what a loop keeps in local memory it reads back behind the stream of
 * weights, which costs a tenth of the pass (docs/log/4-gpu.md, 46 and 48; look for LDL in the machine code).
 *
 * The results are bit-identical to those of the kernels in matmul.cu, attention.cu and ops.cu: the same
 * sums in the same order (device.cuh).
 *
 * HANDING OVER. Blocks exchange data through global memory without barriers. A word is empty (all ones, a
 * NaN that no conversion or arithmetic produces) until its value is written, and readers poll the word
 * itself. Each buffer exists twice, for even and odd layers. The thread that writes a word in layer l first
 * makes its twin empty, for layer l + 1. That is safe for two reasons:
 *
 *   - nobody still reads the twin, which holds layer l - 1. A block reads words only if it computes something
 *     from them that others need (results of its tiles, items, columns, or the scale of a row), and the
 *     results of layer l that a writer has read depend, through attention and both additions, on all results
 *     of layer l - 1;
 *   - nobody reads the twin of layer l + 1 before it has been made empty: whoever reads it has first read words
 *     of layer l, or results that depend on them, which were written after that. No fence orders the two
 *     writes: the code relies on the first one being visible about a microsecond later, which holds on the GPUs
 *     tried and is not promised by the memory model. Between them lies an exchange between blocks; for a block
 *     without tiles, only one turn of the helper's loop.
 *
 * Before the kernel the twins that the first layer uses are made empty.
 *
 * All blocks must run at the same time, so the kernel is launched cooperatively. A poll that lasts
 * SPIN_NS ends the kernel with a trap, which the host sees as a failed device. */
#include <string.h>

#include "backend/cuda/persist_kernel.cuh"

static size_t side_bytes(int n, bool mixed) {
    return mixed ? (size_t)CONSUMERS * SO_MAX_KV * (n <= 8 ? 1 : 2) * 256 : 0;
}

/* Shared memory without the ring. */
static size_t fixed_shared(int n, bool mixed) {
    return (size_t)CONSUMERS * x_bytes(n <= 8 ? 1 : 2) + side_bytes(n, mixed) + sizeof(control);
}

static int slots_for(const so_queue &q, int n, bool mixed) {
    size_t fixed = fixed_shared(n, mixed);
    int slots = fixed < (size_t)q.shared_block ? (int)((q.shared_block - fixed) / SLOT) : 0;
    return slots > MAX_SLOTS ? MAX_SLOTS : slots;
}

bool so_persist_usable(const so_queue *q) { return slots_for(*q, SO_PERSIST_ROWS, true) >= 4; }

static so_persist_kernel kernel_for(const so_persist_run *r) {
    return r->formats == SET_F16  ? so_persist_f16(r->n, r->head_dim)
           : r->formats == SET_Q4 ? so_persist_q4(r->n, r->head_dim)
                                  : so_persist_quant(r->n, r->head_dim);
}

void so_persist_launch(const so_queue &q, const so_persist_run *r, so_half_rows x) {
    so_persist_kernel kernel = kernel_for(r);
    persist_args p = {};
    p.works = r->works;
    p.stream = r->stream;
    p.n_works = r->n_works;
    p.n_products = r->n_products;
    p.n = r->n;
    p.n_slots = slots_for(q, r->n, r->mixed);
    p.side_bytes = (int)side_bytes(r->n, r->mixed);
    p.x = (const char *)x.data;
    p.x_stride = x.stride * 2;
    p.cache = r->cache;
    memcpy(&p.keys, r->keys, sizeof p.keys);
    memcpy(&p.values, r->values, sizeof p.values);
    p.lost = so_cuda_lost_product;
    size_t shared = (size_t)p.n_slots * SLOT + fixed_shared(r->n, r->mixed);
    if (r->clear_bytes > 0)
        cudaMemsetAsync(r->exchange, 0xff, r->clear_bytes, q.stream);
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute a = {};
    a.id = cudaLaunchAttributeCooperative;
    a.val.cooperative = 1;
    c.gridDim = dim3((unsigned)q.n_sms);
    c.blockDim = dim3(N_THREADS);
    c.dynamicSmemBytes = shared;
    c.stream = q.stream;
    c.attrs = &a;
    c.numAttrs = 1;
    so_cuda_begin_launch((const void *)kernel, shared);
    cudaLaunchKernelEx(&c, kernel, p, r->rows, r->slots);
    so_cuda_end_launch();
}
