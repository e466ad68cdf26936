/* Reads members of a JSON object; errors name the path. Stateless; any thread. */
#ifndef SO_TOKEN_JSON_GET_H
#define SO_TOKEN_JSON_GET_H

#include <jansson.h>

#include "base/err.h"
#include "base/str.h"

/* SO_EFORMAT "PATH.KEY: what is wrong". key may be NULL. */
int so_json_bad(const char *path, const char *key, so_err *err, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static inline so_str so_json_str(const json_t *j) {
    return (so_str){json_string_value(j), json_string_length(j)};
}

/* The member must exist and be a string. */
int so_json_get_str(const json_t *o, const char *path, const char *key, so_str *out, so_err *err);
/* Absent or null: *out is unchanged. */
int so_json_get_bool(const json_t *o, const char *path, const char *key, bool *out, so_err *err);
/* Absent: *out is unchanged. Otherwise it must be an integer from lo to hi. */
int so_json_get_int(const json_t *o, const char *path, const char *key, json_int_t lo,
                    json_int_t hi, json_int_t *out, so_err *err);

#endif
