/* The sources of an encoder-decoder model: texts that its encoder has read, and the keys and values
 * that the decoder attends to, computed once per text and kept in pages of their own.
 *
 *   sources   [ text A, 2 users ][ text B, 0 users ][ … ]      n of them, each with room for max_len
 *                   ▲     ▲
 *   sequences       s1    s2       (so_seq_get_source)
 *
 * A text that is still here is not computed again: equal texts of several requests, or of a request
 * that was preempted, share one source. A source without users stays until its room is needed, the
 * least recently used first. Each text gets a serial number that is never used again, so shared
 * prefixes of decoder tokens (kv/prefix.h) belong to one source.
 *
 * The cache of a decoder and its sources have one owner, which makes all calls and has exclusive
 * use of the backend. */
#ifndef SO_MODEL_SOURCE_H
#define SO_MODEL_SOURCE_H

#include "model/model.h"

typedef struct so_sources so_sources;

/* Texts that stay for later requests, beyond those of running ones. */
enum { SO_SOURCES_SPARE = 4 };

/* n: as many sequences as ever have a source at the same time, at least 1. dtype: of the kept keys
 * and values. */
int so_sources_create(const so_model *m, int max_len, int n, so_dtype dtype, so_sources **out,
                      so_err *err);
void so_sources_free(so_sources *s); /* NULL is allowed; no sequence has a source of it */
int so_sources_max_len(const so_sources *s);
/* Bytes of n sources, what the decoder reads; INT64_MAX: more than that. 0 for
 * models without an encoder. */
int64_t so_sources_bytes(const so_hparams *hp, int64_t max_len, int n, so_dtype dtype);

/* Makes the text the source of an empty sequence; runs the encoder if the text is not here. n is at
 * most max_len. SO_ELIMIT: all sources have users. No pass may be in flight. */
int so_sources_set(so_sources *s, so_seq *seq, const int32_t *tokens, int n, so_err *err);
/* After a failed pass on the device: nothing that was computed is used again. */
void so_sources_forget(so_sources *s);

/* For the decoder's pass (pass.c, t5.c). */
so_kv_store *so_sources_store(const so_sources *s);
so_view so_sources_pages(const so_sources *s);
/* The sources that seq's source belongs to, and the row that sees all of it. NULL: none. */
const so_sources *so_sources_of(const so_seq *seq, so_attn_row *row);

#endif
