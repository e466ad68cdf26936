/* Errors with an external cause (files, flags, requests): a negative code and a message.
 *
 * A function that can fail for an external reason returns SO_OK (0) or one of the codes below. On
 * failure it fills `err` with a message that names the thing, the value and, if there is one, the
 * remedy. `err` may be NULL. Bugs are not returned as errors: SO_ASSERT prints a message and
 * aborts. */
#ifndef SO_BASE_ERR_H
#define SO_BASE_ERR_H

#include <stdbool.h>
#include <stddef.h>

#define SO_ERR_TABLE(X)                     \
    X(SO_OK, 0, "ok")                       \
    X(SO_ENOMEM, -1, "out of memory")       \
    X(SO_EIO, -2, "input or output failed") \
    X(SO_EFORMAT, -3, "malformed data")     \
    X(SO_EUNSUPPORTED, -4, "not supported") \
    X(SO_ERANGE, -5, "value out of range")  \
    X(SO_EINVAL, -6, "bad argument")        \
    X(SO_ENOTFOUND, -7, "not found")        \
    X(SO_ELIMIT, -8, "limit reached")       \
    X(SO_ECANCELLED, -9, "cancelled")       \
    X(SO_EMISMATCH, -10, "files or options do not belong together")

enum so_code {
#define X(name, value, text) name = value,
    SO_ERR_TABLE(X)
#undef X
};

typedef struct so_err {
    int code;
    char msg[512];
} so_err;

/* Fills err (if not NULL) and returns `code`. A message that is too long is truncated after a whole
 * UTF-8 character. */
int so_err_set(so_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Prepends "fmt: " to err's message and returns err's code, or SO_EINVAL if err is NULL. */
int so_err_prefix(so_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The text of a code in SO_ERR_TABLE. */
const char *so_err_text(int code);

_Noreturn void so_panic(const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#define SO_ASSERT(cond)                                                  \
    do {                                                                 \
        if (__builtin_expect(!(cond), 0))                                \
            so_panic(__FILE__, __LINE__, "assertion failed: %s", #cond); \
    } while (0)

/* Compares two integers; on failure prints both values and aborts. */
#define SO_ASSERT_OP(a, op, b)                                                                  \
    do {                                                                                        \
        long long so_a_ = (long long)(a), so_b_ = (long long)(b);                               \
        if (__builtin_expect(!(so_a_ op so_b_), 0))                                             \
            so_panic(__FILE__, __LINE__, "assertion failed: %s %s %s (%lld and %lld)", #a, #op, \
                     #b, so_a_, so_b_);                                                         \
    } while (0)

#endif
