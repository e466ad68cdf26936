/* The held text is always shorter than the longest stop string, so plain scanning is linear in the
 * stream for all practical stop strings. With several matches the one that starts first ends it. */
#include "engine/stops.h"

#include "base/mem.h"

/* Start of the earliest stop string in the held text, or its length. */
static size_t find_stop(const so_stops *s) {
    size_t best = s->held.len;
    for (int i = 0; i < s->n_strings; i++) {
        const char *hit =
            s->held.len ? memmem(s->held.data, s->held.len, s->strings[i].ptr, s->strings[i].len)
                        : NULL;
        if (hit)
            best = SO_MIN(best, (size_t)(hit - s->held.data));
    }
    return best;
}

/* Length of the longest end of the held text that begins a stop string. */
static size_t open_tail(const so_stops *s) {
    size_t best = 0;
    for (int i = 0; i < s->n_strings; i++) {
        size_t n = SO_MIN(s->strings[i].len - 1, s->held.len);
        while (n > best && memcmp(s->held.data + s->held.len - n, s->strings[i].ptr, n) != 0)
            n--;
        best = SO_MAX(best, n);
    }
    return best;
}

bool so_stops_push(so_stops *s, so_str piece, so_buf *out) {
    if (s->n_strings == 0) {
        so_buf_append_str(out, piece);
        return false;
    }
    so_buf_append_str(&s->held, piece);
    size_t at = find_stop(s);
    if (at < s->held.len) {
        so_buf_append(out, s->held.data, at);
        so_buf_clear(&s->held);
        return true;
    }
    size_t keep = open_tail(s), sure = s->held.len - keep;
    if (sure > 0) {
        so_buf_append(out, s->held.data, sure);
        memmove(s->held.data, s->held.data + sure, keep);
        s->held.len = keep;
    }
    return false;
}

void so_stops_finish(so_stops *s, so_buf *out) {
    so_buf_append_str(out, so_buf_str(&s->held));
    so_buf_clear(&s->held);
}

void so_stops_free(so_stops *s) { so_buf_free(&s->held); }
