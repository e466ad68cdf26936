/* Reading numbers out of GGUF metadata or a JSON object, each with its range.
 *
 * Errors are sticky: the first one stays in `err`, every later read returns its fallback, and the
 * caller looks at `rc` once. Messages name the file, the key, the value and the range. Private to
 * src/model. */
#ifndef SO_MODEL_FIELDS_H
#define SO_MODEL_FIELDS_H

#include <jansson.h>

#include "format/gguf.h"
#include "model/hparams.h"

typedef struct so_fields {
    const char *file;
    const char *prefix;  /* put before every key in messages, and in GGUF's lookups: "llama." */
    const so_gguf *gguf; /* one of the two is set */
    const json_t *json;
    so_err *err;
    int rc;
} so_fields;

#define SO_FIELD_REQUIRED INT64_MIN

/* Absent (or null): the fallback, or an error for SO_FIELD_REQUIRED. A GGUF array (one value per
 * layer) counts as its value if all are equal and is refused by name if they are not. */
int64_t so_fields_int(so_fields *f, const char *key, int64_t lo, int64_t hi, int64_t fallback);
/* A fallback of NAN: required. lo < value ≤ hi. */
double so_fields_num(so_fields *f, const char *key, double lo, double hi, double fallback);
bool so_fields_flag(so_fields *f, const char *key, bool fallback);
/* Borrowed; empty where absent. */
so_str so_fields_str(so_fields *f, const char *key);
bool so_fields_has(const so_fields *f, const char *key);

/* An error unless the key is absent, null, 0 or false: `what` says what it would switch on. */
void so_fields_refuse(so_fields *f, const char *key, const char *what);
void so_fields_fail(so_fields *f, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Ranges that both sources share, in one place. */
enum {
    SO_MAX_LAYERS = 1024,
    SO_MAX_WIDTH = 1 << 17,
    SO_MAX_FF = 1 << 20,
    SO_MAX_HEADS = 1024,
    SO_MAX_HEAD_DIM = 1024,
    SO_MAX_VOCAB = 1 << 22,
    SO_MAX_CTX = 1 << 27,
};

/* What holds for every architecture once its numbers are read: divisibility, head size, scales. */
void so_hparams_finish(so_fields *f, so_hparams *hp);
/* Sets window and window_pattern from a list of layers; refuses lists that are no pattern. */
void so_hparams_set_pattern(so_fields *f, so_hparams *hp, const bool *full);

#endif
