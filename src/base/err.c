/* Error messages and so_panic, which reports a bug and aborts. Any thread. Nothing here allocates,
 * so an out-of-memory error can be reported too. */
#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Removes an incomplete UTF-8 sequence at the end of a full buffer. A truncated message therefore
 * stays valid UTF-8 if its arguments were. */
static void trim_partial_utf8(char *s, size_t cap) {
    size_t len = strlen(s), start = len;
    if (len + 1 < cap)
        return;
    while (start > 0 && ((unsigned char)s[start - 1] & 0xC0) == 0x80)
        start--;
    if (start == 0)
        return;
    unsigned char lead = (unsigned char)s[start - 1];
    size_t want = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    if (len - (start - 1) < want)
        s[start - 1] = '\0';
}

int so_err_set(so_err *err, int code, const char *fmt, ...) {
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
        trim_partial_utf8(err->msg, sizeof err->msg);
        err->code = code;
    }
    return code;
}

int so_err_prefix(so_err *err, const char *fmt, ...) {
    if (!err)
        return SO_EINVAL;
    char old[sizeof err->msg];
    memcpy(old, err->msg, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    size_t len = strlen(err->msg), room = sizeof err->msg - 1 - len;
    strncat(err->msg, ": ", room);
    strncat(err->msg, old, room > 2 ? room - 2 : 0);
    trim_partial_utf8(err->msg, sizeof err->msg);
    return err->code;
}

const char *so_err_text(int code) {
    switch (code) {
#define X(name, value, text) \
    case name:               \
        return text;
        SO_ERR_TABLE(X)
#undef X
    default:
        return "unknown error";
    }
}

void so_panic(const char *file, int line, const char *fmt, ...) {
    char msg[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    fprintf(stderr, "sooth: bug at %s:%d: %s\n", file, line, msg);
    abort();
}
