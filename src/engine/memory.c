/* Compares the memory that the KV caches may grow to with the memory that is available, and warns.
 * Caches are mapped but not touched at creation, so creation does not fail if memory is short: the
 * machine would swap, or the process would be killed, in the middle of an answer. Target and draft
 * are added up, with the source texts of encoder-decoder models. This is a warning, not an error,
 * because requests may stay below --ctx-size. Engine thread. */
#include "base/cgroup.h"
#include "base/log.h"
#include "engine/impl.h"

/* n_source: positions of each source text, of encoder-decoder models. */
static size_t cache_bytes(const so_engine *e, const so_model *m, int64_t n_positions,
                          int64_t n_source) {
    const so_hparams *hp = so_model_hparams(m);
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .dtype = e->o.kv_dtype};
    int n_sources = e->o.n_parallel + SO_SOURCES_SPARE;
    return so_kv_bytes_per_token(&shape) * (size_t)n_positions +
           (size_t)so_sources_bytes(hp, n_source, n_sources, e->o.kv_dtype);
}

void so_memory_warn(const so_engine *e, const so_model *draft) {
    int64_t n_seq = SO_MIN(e->o.n_ctx, draft ? so_model_hparams(draft)->n_ctx_train : 0);
    size_t own = cache_bytes(e, e->m, (int64_t)e->n_pages * SO_KV_PAGE, e->o.n_ctx);
    int64_t n_draft = e->o.n_pages ? (int64_t)e->o.n_pages * SO_KV_PAGE : n_seq * e->o.n_parallel;
    size_t drafts = draft ? cache_bytes(e, draft, n_draft, n_seq) : 0;
    size_t available = so_mem_available();
    if (own + drafts <= available)
        return;
    so_log(SO_LOG_WARN,
           "--parallel %d with --ctx-size %d: the KV cache may grow to %zu MB%s, and %zu MB are "
           "available: lower one of them",
           e->o.n_parallel, e->o.n_ctx, (own + drafts) >> 20, draft ? " with the draft's" : "",
           available >> 20);
}
