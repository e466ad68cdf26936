/* Searching, splitting and replacing in strings, by Python's rules.
 *
 * UTF-8 is self-synchronising, so a byte search for valid UTF-8 matches only whole characters. Only
 * positions in arguments and results are converted between bytes and characters. An empty needle
 * matches before every character and at the end. Parts of a string are views of its bytes, so they
 * keep its origin flags. */
#include "jinja/impl.h"

static const char *find(so_str s, so_str sub) {
    if (sub.len == 1) /* most separators; under sanitizers memmem first reads all of s */
        return s.len ? memchr(s.ptr, sub.ptr[0], s.len) : NULL;
    return sub.len <= s.len ? memmem(s.ptr, s.len, sub.ptr, sub.len) : NULL;
}

/* The last occurrence. Ticks for the worst case, since the scan is quadratic. */
static const char *rfind(so_jj *x, so_str s, so_str sub) {
    if (sub.len > s.len)
        return NULL;
    for (size_t i = s.len - sub.len + 1; i-- > 0;) {
        if (!(i & 63))
            so_jj_tick(x, 1 + sub.len / 64);
        if (memcmp(s.ptr + i, sub.ptr, sub.len) == 0)
            return s.ptr + i;
    }
    return NULL;
}

/* ---- find, index, count, startswith, endswith: all look at self[start:end] ---- */

typedef struct part {
    so_str s;
    int64_t offset; /* characters before it */
    bool beyond;    /* start is past the end: nothing is found, not even "" */
} part;

static part part_of(so_jj *x, so_jj_val self, so_jj_val start, so_jj_val end) {
    int64_t n = (int64_t)self.s->n_chars;
    int64_t a = so_jj_index_arg(x, start, 0), b = so_jj_index_arg(x, end, n);
    a = a < 0 ? SO_MAX(a + n, 0) : a;
    b = b < 0 ? SO_MAX(b + n, 0) : SO_MIN(b, n);
    if (a > b || a > n)
        return (part){.beyond = true};
    so_jj_val v = so_jj_slice(x, self, so_jj_int(a), so_jj_int(b), SO_JJ_NONE_V);
    return (part){so_jj_bytes(v), a, false};
}

static int64_t find_index(so_jj *x, so_jj_val self, const so_jj_val *p, bool last) {
    so_str sub = so_jj_str_arg(x, p[0]);
    part w = part_of(x, self, p[1], p[2]);
    if (w.beyond)
        return -1;
    so_jj_tick(x, w.s.len / 32);
    const char *at = last ? rfind(x, w.s, sub) : find(w.s, sub);
    if (!at)
        return -1;
    return w.offset + (int64_t)so_jj_count_chars((so_str){w.s.ptr, (size_t)(at - w.s.ptr)});
}

static so_jj_val must_find(so_jj *x, int64_t i) {
    if (i < 0)
        so_jj_fail(x, SO_EINVAL, "substring not found");
    return so_jj_int(i);
}

SO_JJ_FN(so_jj_str_find) { return so_jj_int(find_index(x, self, p, false)); }
SO_JJ_FN(so_jj_str_rfind) { return so_jj_int(find_index(x, self, p, true)); }
SO_JJ_FN(so_jj_str_index) { return must_find(x, find_index(x, self, p, false)); }
SO_JJ_FN(so_jj_str_rindex) { return must_find(x, find_index(x, self, p, true)); }

static int64_t count_in(so_str s, so_str sub) {
    int64_t n = 0;
    if (!sub.len)
        return (int64_t)so_jj_count_chars(s) + 1;
    for (const char *at; (at = find(s, sub)); n++) {
        size_t used = (size_t)(at - s.ptr) + sub.len;
        s = (so_str){s.ptr + used, s.len - used};
    }
    return n;
}

SO_JJ_FN(so_jj_str_count) {
    so_str sub = so_jj_str_arg(x, p[0]);
    part w = part_of(x, self, p[1], p[2]);
    so_jj_tick(x, w.s.len / 32);
    return so_jj_int(w.beyond ? 0 : count_in(w.s, sub));
}

static bool has_affix(part w, so_str affix, bool end) {
    if (w.beyond || affix.len > w.s.len)
        return false;
    return !affix.len ||
           memcmp(w.s.ptr + (end ? w.s.len - affix.len : 0), affix.ptr, affix.len) == 0;
}

static so_jj_val affix_test(so_jj *x, so_jj_val self, const so_jj_val *p, bool end) {
    part w = part_of(x, self, p[1], p[2]);
    if (p[0].kind != SO_JJ_TUPLE)
        return so_jj_bool(has_affix(w, so_jj_str_arg(x, p[0]), end));
    for (size_t i = 0; i < p[0].list->n; i++)
        if (has_affix(w, so_jj_str_arg(x, p[0].list->v[i]), end))
            return so_jj_bool(true);
    return so_jj_bool(false);
}

SO_JJ_FN(so_jj_str_startswith) { return affix_test(x, self, p, false); }
SO_JJ_FN(so_jj_str_endswith) { return affix_test(x, self, p, true); }

/* ---- split ---- */

static void push_part(so_jj *x, so_jj_list *l, so_jj_val self, const char *from, const char *to) {
    so_jj_list_push(x, l, so_jj_substr(x, self, (so_str){from, (size_t)(to - from)}));
}

static void reverse(so_jj_list *l) {
    for (size_t i = 0; i < l->n / 2; i++) {
        so_jj_val v = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = v;
    }
}

static bool space_at(const char *p, const char *end, size_t *n) {
    return so_jj_cp_is(so_jj_cp_at(p, end, n), SO_JJ_C_SPACE);
}

static so_jj_list *split_space(so_jj *x, so_jj_val self, int64_t max) {
    so_jj_list *l = so_jj_list_new(x, 4);
    const char *p = self.s->ptr, *end = p + self.s->len;
    size_t n;
    for (;;) {
        while (p < end && space_at(p, end, &n))
            p += n;
        if (p == end)
            return l;
        const char *from = p;
        if (max >= 0 && (int64_t)l->n == max) {
            push_part(x, l, self, from, end);
            return l;
        }
        while (p < end && !space_at(p, end, &n))
            p += n;
        push_part(x, l, self, from, p);
    }
}

static so_jj_list *split_by(so_jj *x, so_jj_val self, so_str sep, int64_t max) {
    so_jj_list *l = so_jj_list_new(x, 4);
    so_str s = so_jj_bytes(self);
    const char *at;
    while ((max < 0 || (int64_t)l->n < max) && (at = find(s, sep))) {
        push_part(x, l, self, s.ptr, at);
        size_t used = (size_t)(at - s.ptr) + sep.len;
        s = (so_str){s.ptr + used, s.len - used};
    }
    push_part(x, l, self, s.ptr, s.ptr + s.len);
    return l;
}

static so_jj_list *rsplit_by(so_jj *x, so_jj_val self, so_str sep, int64_t max) {
    so_jj_list *l = so_jj_list_new(x, 4);
    so_str s = so_jj_bytes(self);
    const char *at;
    while ((max < 0 || (int64_t)l->n < max) && (at = rfind(x, s, sep))) {
        push_part(x, l, self, at + sep.len, s.ptr + s.len);
        s.len = (size_t)(at - s.ptr);
    }
    push_part(x, l, self, s.ptr, s.ptr + s.len);
    reverse(l);
    return l;
}

static so_jj_val split(so_jj *x, so_jj_val self, const so_jj_val *p, bool right) {
    int64_t max = so_jj_int_arg(x, p[1], -1);
    so_jj_tick(x, self.s->len / 32);
    if (p[0].kind == SO_JJ_MISSING || p[0].kind == SO_JJ_NONE) {
        if (right && max >= 0)
            so_jj_fail(x, SO_EUNSUPPORTED, "rsplit() with a maximum needs a separator");
        return so_jj_list_val(split_space(x, self, max));
    }
    so_str sep = so_jj_str_arg(x, p[0]);
    if (!sep.len)
        so_jj_fail(x, SO_EINVAL, "empty separator");
    return so_jj_list_val((right ? rsplit_by : split_by)(x, self, sep, max));
}

SO_JJ_FN(so_jj_str_split) { return split(x, self, p, false); }
SO_JJ_FN(so_jj_str_rsplit) { return split(x, self, p, true); }

so_jj_list *so_jj_split_lines(so_jj *x, so_jj_val s, bool keep_ends) {
    so_jj_list *l = so_jj_list_new(x, 4);
    const char *p = s.s->ptr, *end = p + s.s->len;
    so_jj_tick(x, s.s->len / 32);
    while (p < end) {
        const char *from = p;
        size_t n = 0;
        while (p < end && !so_jj_cp_is(so_jj_cp_at(p, end, &n), SO_JJ_C_LINE_END))
            p += n;
        const char *text_end = p;
        if (p < end)
            p += *p == '\r' && p + 1 < end && p[1] == '\n' ? 2 : n;
        push_part(x, l, s, from, keep_ends ? p : text_end);
    }
    return l;
}

SO_JJ_FN(so_jj_str_splitlines) {
    bool keep = p[0].kind != SO_JJ_MISSING && so_jj_truth(p[0]);
    return so_jj_list_val(so_jj_split_lines(x, self, keep));
}

static so_jj_val three(so_jj *x, so_jj_val self, so_str a, so_str b, so_str c) {
    so_jj_list *l = so_jj_list_new(x, 3);
    so_jj_list_push(x, l, so_jj_substr(x, self, a));
    so_jj_list_push(x, l, so_jj_substr(x, self, b));
    so_jj_list_push(x, l, so_jj_substr(x, self, c));
    return so_jj_tuple_val(l);
}

static so_jj_val partition(so_jj *x, so_jj_val self, so_jj_val sep_v, bool last) {
    so_str s = so_jj_bytes(self), sep = so_jj_str_arg(x, sep_v), none = {s.ptr, 0};
    if (!sep.len)
        so_jj_fail(x, SO_EINVAL, "empty separator");
    so_jj_tick(x, s.len / 32);
    const char *at = last ? rfind(x, s, sep) : find(s, sep);
    if (!at)
        return last ? three(x, self, none, none, s) : three(x, self, s, none, none);
    size_t n = (size_t)(at - s.ptr);
    return three(x, self, (so_str){s.ptr, n}, (so_str){at, sep.len},
                 (so_str){at + sep.len, s.len - n - sep.len});
}

SO_JJ_FN(so_jj_str_partition) { return partition(x, self, p[0], false); }
SO_JJ_FN(so_jj_str_rpartition) { return partition(x, self, p[0], true); }

/* ---- replace ---- */

/* An empty `from` matches before every character and at the end. */
static so_jj_val replace_empty(so_jj *x, so_str s, so_str to, int64_t count) {
    so_jj_buf b = {0};
    size_t i = 0, n;
    for (; i < s.len && count != 0; i += n, count--) {
        so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        so_jj_buf_add(x, &b, to);
        so_jj_buf_add(x, &b, (so_str){s.ptr + i, n});
        so_jj_tick(x, 1);
    }
    if (count != 0)
        so_jj_buf_add(x, &b, to);
    so_jj_buf_add(x, &b, (so_str){s.ptr + i, s.len - i});
    return so_jj_buf_str(x, &b);
}

so_jj_val so_jj_replace(so_jj *x, so_str s, so_str from, so_str to, int64_t count) {
    so_jj_buf b = {0};
    const char *at;
    so_jj_tick(x, s.len / 32);
    if (!from.len)
        return replace_empty(x, s, to, count);
    for (; count != 0 && (at = find(s, from)); count--) {
        size_t n = (size_t)(at - s.ptr);
        so_jj_buf_add(x, &b, (so_str){s.ptr, n});
        so_jj_buf_add(x, &b, to);
        so_jj_tick(x, 1);
        s = (so_str){at + from.len, s.len - n - from.len};
    }
    so_jj_buf_add(x, &b, s);
    return so_jj_buf_str(x, &b);
}

SO_JJ_FN(so_jj_str_replace) {
    so_str from = so_jj_str_arg(x, p[0]), to = so_jj_str_arg(x, p[1]);
    if (self.s->markup)
        to = so_jj_bytes(so_jj_escaped(x, p[1]));
    return so_jj_like(x, self,
                      so_jj_replace(x, so_jj_bytes(self), from, to, so_jj_int_arg(x, p[2], -1)));
}
