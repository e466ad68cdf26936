/* The HTTP parsers: which heads are accepted or refused, and with which status; bodies have the same
 * content at every division into pieces. */
#include "so_test.h"

#include <stdlib.h>

#include "base/mem.h"
#include "server/http_parse.h"

/* --- heads --- */

#define REST "Host: x\r\n\r\n"

typedef struct head_case {
    const char *text;
    int status; /* 0: good */
    const char *path;
} head_case;

static const head_case HEADS[] = {
    {"GET / HTTP/1.1\r\n" REST, 0, "/"},
    {"GET /a%62c?x=%00 HTTP/1.1\r\n" REST, 0, "/abc"},
    {"GET /a%2fb#f HTTP/1.0\n\n", 0, "/a/b"},
    {"GET http://h:80/p/q?r HTTP/1.1\r\n" REST, 0, "/p/q"},
    {"GET HTTPS://h HTTP/1.1\r\n" REST, 0, "/"},
    {"OPTIONS * HTTP/1.1\r\n" REST, 0, "*"},
    {"GET /100% HTTP/1.1\r\n" REST, 0, "/100%"},
    {"GET /%4 HTTP/1.1\r\n" REST, 0, "/%4"},
    {"GET /%zz HTTP/1.1\r\n" REST, 0, "/%zz"},
    {"BREW /pot HTTP/1.9\r\n" REST, 0, "/pot"},
    {"GET /a%00b HTTP/1.1\r\n" REST, 400, NULL},
    {"GET /%00 HTTP/1.1\r\n" REST, 400, NULL},
    {"GET  / HTTP/1.1\r\n" REST, 400, NULL},
    {"GET / \r\n" REST, 400, NULL},
    {"GET /\r\n" REST, 400, NULL},
    {" GET / HTTP/1.1\r\n" REST, 400, NULL},
    {"G(T / HTTP/1.1\r\n" REST, 400, NULL},
    {"GET / HTTP/1.1 x\r\n" REST, 400, NULL},
    {"GET / http/1.1\r\n" REST, 400, NULL},
    {"GET / HTTP/11\r\n" REST, 400, NULL},
    {"GET /\x01 HTTP/1.1\r\n" REST, 400, NULL},
    {"GET / HTTP/2.0\r\n" REST, 505, NULL},
    {"GET / HTTP/0.9\r\n" REST, 505, NULL},
    {"GET / HTTP/1.1\r\nNoColon\r\n" REST, 400, NULL},
    {"GET / HTTP/1.1\r\n: empty\r\n" REST, 400, NULL},
    {"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400, NULL},
    {"GET / HTTP/1.1\r\nA: b\r\n folded\r\n" REST, 400, NULL},
    {"GET / HTTP/1.1\r\nA: b\rc\r\n" REST, 400, NULL},
    {"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 5\r\n" REST, 0, "/"},
    {"POST / HTTP/1.1\r\nContent-Length:\t00005 \r\n" REST, 0, "/"},
    {"POST / HTTP/1.1\r\nContent-Length: -5\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: +5\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 0x5\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length:\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 18446744073709551621\r\n" REST, 413, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 9999999999999999999999999999\r\n" REST, 413, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n" REST, 400, NULL},
    {"POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n" REST, 0, "/"},
    {"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n" REST, 501, NULL},
    {"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n" REST, 501, NULL},
    {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400, NULL},
};

static void test_heads(void **state) {
    (void)state;
    for (size_t i = 0; i < SO_LEN(HEADS); i++) {
        so_head h;
        so_api_error e = {0};
        so_str text = so_str_c(HEADS[i].text);
        assert_int_equal(so_head_find(text, 0), text.len);
        bool ok = so_head_parse(text, &h, &e);
        if (ok != (HEADS[i].status == 0) || e.status != HEADS[i].status)
            fail_msg("%s: status %d, not %d", HEADS[i].text, e.status, HEADS[i].status);
        if (ok)
            assert_string_equal(h.path, HEADS[i].path);
        else
            assert_true(e.msg[0] && e.code);
        so_head_free(&h);
    }
}

static void test_zero_bytes(void **state) {
    (void)state;
    static const char text[] = "GET /health\0x HTTP/1.1\r\nA: b\r\n\r\n";
    static const char header[] = "GET /health HTTP/1.1\r\nA: b\0c\r\n\r\n";
    so_head h;
    so_api_error e;
    assert_false(so_head_parse((so_str){text, sizeof text - 1}, &h, &e));
    assert_false(so_head_parse((so_str){header, sizeof header - 1}, &h, &e));
}

/* so_head_find finds the end of a head that arrives byte by byte. */
static void test_find(void **state) {
    (void)state;
    static const char *const heads[] = {"GET / HTTP/1.1\r\nA: b\r\n\r\n",
                                        "GET / HTTP/1.1\nA: b\n\n", "GET / HTTP/1.1\r\nA: b\n\r\n"};
    for (size_t k = 0; k < SO_LEN(heads); k++)
        for (size_t n = 0, seen = 0; n <= strlen(heads[k]); seen = n++)
            assert_int_equal(so_head_find((so_str){heads[k], n}, seen),
                             n == strlen(heads[k]) ? n : 0);
    assert_true(so_head_may_begin(SO_STR("GE")) && so_head_may_begin(SO_STR("")));
    assert_true(so_head_may_begin(SO_STR("GET /\x01")));
    assert_false(so_head_may_begin(SO_STR("\x16\x03\x01")) || so_head_may_begin(SO_STR("GET\r")));
    assert_false(so_head_may_begin(SO_STR(" GET")));
}

static void test_keep_alive(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool keep;
    } cases[] = {
        {"GET / HTTP/1.1\r\n\r\n", true},
        {"GET / HTTP/1.0\r\n\r\n", false},
        {"GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", false},
        {"GET / HTTP/1.1\r\nConnection: upgrade, close\r\n\r\n", false},
        {"GET / HTTP/1.1\r\nConnection: closed\r\n\r\n", true},
        {"GET / HTTP/1.1\r\nConnection: x\r\nconnection: close , y\r\n\r\n", false},
        {"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", true},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_head h;
        so_api_error e;
        assert_true(so_head_parse(so_str_c(cases[i].text), &h, &e));
        assert_int_equal(h.keep_alive, cases[i].keep);
        so_head_free(&h);
    }
}

/* --- bodies --- */

/* Feeds the text in pieces of `step` bytes; the number of bytes read, −1: refused. */
static int feed(const char *text, size_t len, const so_head *h, size_t step, so_buf *out) {
    so_body b;
    so_api_error e;
    size_t n_read = 0;
    so_body_init(&b, h);
    for (size_t from = 0; from < len && b.state != SO_BODY_DONE; from += step) {
        so_str in = {text + from, SO_MIN(step, len - from)};
        for (size_t at = 0; at < in.len && b.state != SO_BODY_DONE; n_read = from + at) {
            so_str piece;
            if (!so_body_read(&b, in, &at, &piece, &e)) {
                assert_int_equal(e.status, 400);
                return -1;
            }
            so_buf_append_str(out, piece);
        }
    }
    return b.state == SO_BODY_DONE ? (int)n_read : -2;
}

static void test_bodies(void **state) {
    (void)state;
    static const struct {
        const char *text, *content; /* content NULL: refused */
        int rest;                   /* bytes behind the body */
    } cases[] = {
        {"5\r\nhello\r\n0\r\n\r\n", "hello", 0},
        {"5;a=b;c=\"d\"\r\nhello\r\n000\r\n\r\n", "hello", 0},
        {"2\r\nhe\r\n03 \r\nllo\r\n0\r\nTrailer: x\r\nB: y\r\n\r\nGET /", "hello", 5},
        {"0\r\n\r\n", "", 0},
        {"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n", "01234567890123456789", 0},
        {"-5\r\nhello\r\n0\r\n\r\n", NULL, 0},
        {"+5\r\nhello\r\n0\r\n\r\n", NULL, 0},
        {"0x5\r\nhello\r\n0\r\n\r\n", NULL, 0},
        {"\r\n", NULL, 0},
        {";x\r\n", NULL, 0},
        {"5\nhello\n0\n\n", NULL, 0},
        {"5\r\nhelloworld\r\n", NULL, 0},
        {"5\rx", NULL, 0},
        {"g\r\n", NULL, 0},
        {"10000000000000000\r\n", NULL, 0},
        {"ffffffffffffffff\r\n", NULL, 0},
        {"5;\x01\r\n", NULL, 0},
        {"0\r\nA\nB\r\n\r\n", NULL, 0},
        {"0\r\n\rx", NULL, 0},
    };
    so_head chunked = {.chunked = true};
    for (size_t i = 0; i < SO_LEN(cases); i++)
        for (size_t step = 1; step <= 40; step++) {
            so_buf out = {0};
            int n = feed(cases[i].text, strlen(cases[i].text), &chunked, step, &out);
            if (n != (cases[i].content ? (int)strlen(cases[i].text) - cases[i].rest : -1))
                fail_msg("%s in steps of %zu: %d", cases[i].text, step, n);
            if (cases[i].content)
                assert_string_equal(so_buf_str(&out).ptr, cases[i].content);
            so_buf_free(&out);
        }
    for (size_t step = 1; step <= 8; step++) {
        so_buf out = {0};
        so_head plain = {.length = 5};
        assert_int_equal(feed("helloGET", 8, &plain, step, &out), 5);
        assert_string_equal(out.data, "hello");
        so_buf_free(&out);
    }
}

/* The length of extensions and trailers is limited. */
static void test_overhead(void **state) {
    (void)state;
    so_head chunked = {.chunked = true};
    for (int big = 0; big < 2; big++) {
        so_buf text = {0}, out = {0};
        so_buf_append_c(&text, "1;");
        for (int i = 0; i < (big ? 40000 : 4000); i++)
            so_buf_append_char(&text, 'x');
        so_buf_append_c(&text, "\r\na\r\n0\r\n\r\n");
        int n = feed(text.data, text.len, &chunked, 1000, &out);
        assert_int_equal(n, big ? -1 : (int)text.len);
        so_buf_free(&text);
        so_buf_free(&out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heads),  cmocka_unit_test(test_zero_bytes),
        cmocka_unit_test(test_find),   cmocka_unit_test(test_keep_alive),
        cmocka_unit_test(test_bodies), cmocka_unit_test(test_overhead),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
