/* Reads numbers, flags and strings from GGUF metadata or a JSON object, and checks ranges.
 *
 * Errors are sticky: the first error stays in `err`, every later read returns its fallback (or, if
 * the field is required, a bound of its range), and the caller checks `rc` once at the end. Messages
 * name the file, the key, the value and the range. Private to src/model. */
#ifndef SO_MODEL_FIELDS_H
#define SO_MODEL_FIELDS_H

#include <jansson.h>

#include "format/gguf.h"
#include "model/hparams.h"

typedef struct so_fields {
    const char *file;
    const char *prefix;  /* prepended to every key in messages and GGUF lookups: "llama." */
    const so_gguf *gguf; /* exactly one of gguf and json is set */
    const json_t *json;
    so_err *err;
    int rc;
} so_fields;

#define SO_FIELD_REQUIRED INT64_MIN

/* lo ≤ value ≤ hi. If the key is absent or null: the fallback, or an error for SO_FIELD_REQUIRED. A
 * GGUF array (one value per layer) counts as one value if all entries are equal, else it is an
 * error. */
int64_t so_fields_int(so_fields *f, const char *key, int64_t lo, int64_t hi, int64_t fallback);
/* lo < value ≤ hi; otherwise as so_fields_int. A fallback of NAN means required. */
double so_fields_num(so_fields *f, const char *key, double lo, double hi, double fallback);
bool so_fields_flag(so_fields *f, const char *key, bool fallback);
/* Borrowed; empty if absent. */
so_str so_fields_str(so_fields *f, const char *key);
bool so_fields_has(const so_fields *f, const char *key);

/* An error unless the key is absent, null, 0 or false. `what` names the unsupported feature for the
 * message. */
void so_fields_refuse(so_fields *f, const char *key, const char *what);
void so_fields_fail(so_fields *f, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Limits for both sources. */
enum {
    SO_MAX_LAYERS = 1024,
    SO_MAX_WIDTH = 1 << 17,
    SO_MAX_FF = 1 << 20,
    SO_MAX_HEADS = 1024,
    SO_MAX_HEAD_DIM = 1024,
    SO_MAX_VOCAB = 1 << 22,
    SO_MAX_CTX = 1 << 27,
};

/* Derives and checks what depends on several fields, for every architecture: divisibility, head
 * size, scales. */
void so_hparams_finish(so_fields *f, so_hparams *hp);
/* full[i]: layer i has no window. Sets window_pattern, and window to 0 if no layer has one. An error
 * if the layers follow no regular pattern. */
void so_hparams_set_pattern(so_fields *f, so_hparams *hp, const bool *full);

#endif
