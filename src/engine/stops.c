/* The search for stop strings (stops.h). The held text is shorter than the longest stop string, so
 * the scan is linear in the length of the stream for stop strings of practical length. If several
 * stop strings match, the one that starts first ends the stream. Each stream has one thread. */
#include "engine/stops.h"

#include "base/mem.h"

/* Start of the earliest stop string in the held text, or the length of the held text. */
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

/* Length of the longest suffix of the held text that is a prefix of a stop string. */
static size_t partial_match_len(const so_stops *s) {
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
    size_t keep = partial_match_len(s), n_clear = s->held.len - keep;
    if (n_clear > 0) {
        so_buf_append(out, s->held.data, n_clear);
        memmove(s->held.data, s->held.data + n_clear, keep);
        s->held.len = keep;
    }
    return false;
}

void so_stops_finish(so_stops *s, so_buf *out) {
    so_buf_append_str(out, so_buf_str(&s->held));
    so_buf_clear(&s->held);
}

void so_stops_free(so_stops *s) { so_buf_free(&s->held); }
