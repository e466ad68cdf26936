/* What every test shares: cmocka in the right order, skips with a reason, fixtures, scratch
 * folders. */
#ifndef SO_TEST_H
#define SO_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/err.h"
#include "base/str.h"

/* Prints "skip: reason" and leaves the test. */
#define SO_SKIP(...)                    \
    do {                                \
        so_test_note_skip(__VA_ARGS__); \
        skip();                         \
    } while (0)

/* rc must be 0; prints the error's message where it is not. */
#define SO_OK_OR_FAIL(rc, err)                                      \
    do {                                                            \
        if ((rc) != 0)                                              \
            fail_msg("%s gave %d: %s", #rc, (err).code, (err).msg); \
    } while (0)

/* True in builds with a sanitizer, which are several times slower: large grids are thinned there,
 * always in the same way. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SO_TEST_SANITIZED 1
#elif defined(__has_feature)
#define SO_TEST_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define SO_TEST_SANITIZED 0
#endif

void so_test_note_skip(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Path of a file in the shared material beside the checkout (SOOTH_SHARED or ../shared), or NULL
 * where it is absent. Static storage, valid until the next call. */
const char *so_test_shared(const char *name);
/* Path of a file under tests/ (SOOTH_TESTS or ./tests). Static storage. */
const char *so_test_data(const char *name);
/* A pulled model's file (SOOTH_MODELS or the user's cache), or NULL. */
const char *so_test_model(const char *name);
/* A fresh folder, removed with its content by so_test_tmp_free. */
char *so_test_tmp(void);
void so_test_tmp_free(char *dir);
/* Unpacks FILE.xz of the shared material into dir; the new path, or NULL where it is absent. */
char *so_test_unxz(const char *shared_name, const char *dir);

/* The signal that a child process dies of when it runs fn(user); 0: it returns. Not under a
 * sanitizer, which handles the signals itself. */
int so_test_dies_of(void (*fn)(void *user), void *user);

/* Built with a sanitizer that maps memory of its own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SO_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SO_SANITIZED 1
#endif
#endif
#ifndef SO_SANITIZED
#define SO_SANITIZED 0
#endif

#endif
