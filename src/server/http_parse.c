/* See http_parse.h.
 *
 * Strict where two parsers could disagree about where a request ends, since a proxy in front might
 * read it differently (request smuggling): one Content-Length of digits only or one
 * Transfer-Encoding "chunked", never both; no space before a colon, no folded lines, no control
 * characters; chunk lines end with CR LF. Lenient where nothing depends on it: a bare LF may end a
 * header line; methods and headers may be unknown; a malformed percent sign stands for itself. A
 * zero byte in a path, raw or as %00, is refused: C strings would end there. */
#include "server/http_parse.h"

#include <ctype.h>
#include <stdlib.h>
#include <strings.h>

#include "base/mem.h"

enum { MAX_OVERHEAD = 32 << 10 }; /* of extensions and trailers in one body */

static bool is_token_char(char c) {
    return c > ' ' && c < 127 && !strchr("\"(),/:;<=>?@[\\]{}", c);
}

size_t so_head_find(so_str in, size_t seen) {
    for (size_t i = seen > 3 ? seen - 3 : 0; i < in.len; i++) {
        if (in.ptr[i] != '\n')
            continue;
        if (i + 1 < in.len && in.ptr[i + 1] == '\n')
            return i + 2;
        if (i + 2 < in.len && in.ptr[i + 1] == '\r' && in.ptr[i + 2] == '\n')
            return i + 3;
    }
    return 0;
}

bool so_head_may_begin(so_str in) {
    for (size_t i = 0; i < in.len && in.ptr[i] != ' '; i++)
        if (!is_token_char(in.ptr[i]) || i == 32)
            return false;
    return in.len == 0 || in.ptr[0] != ' ';
}

/* --- the request line --- */

static bool bad_line(so_api_error *err) {
    return so_api_fail(err, 400, "invalid_http", NULL,
                       "the request does not begin with METHOD PATH HTTP/1.1");
}

static bool read_version(const char *v, so_head *h, so_api_error *err) {
    if (strncmp(v, "HTTP/", 5) != 0 || !isdigit((unsigned char)v[5]) || v[6] != '.' ||
        !isdigit((unsigned char)v[7]) || v[8] != '\0')
        return bad_line(err);
    if (v[5] != '1')
        return so_api_fail(err, 505, "unsupported_version", NULL,
                           "%s is not supported: use HTTP/1.1", v);
    h->minor = v[7] == '0' ? 0 : 1;
    return true;
}

static int hex_of(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Removes the query and percent-decodes in place: the result is never longer. */
static bool decode_path(char *path, so_api_error *err) {
    char *to = path;
    path[strcspn(path, "?#")] = '\0';
    for (const char *p = path; *p; p++) {
        int hi = p[0] == '%' ? hex_of(p[1]) : -1, lo = hi >= 0 ? hex_of(p[2]) : -1;
        if (lo < 0) {
            *to++ = *p;
            continue;
        }
        if (hi == 0 && lo == 0)
            return so_api_fail(err, 400, "invalid_path", NULL, "the path contains a zero byte");
        *to++ = (char)(hi * 16 + lo);
        p += 2;
    }
    *to = '\0';
    return true;
}

/* The path of a target, which may be a whole address: http://host:port/path. */
static char *path_in(char *target) {
    static char root[] = "/";
    char *host = strncasecmp(target, "http://", 7) == 0    ? target + 7
                 : strncasecmp(target, "https://", 8) == 0 ? target + 8
                                                           : NULL;
    if (!host)
        return target;
    host += strcspn(host, "/?#");
    return *host == '/' ? host : root;
}

static bool read_request_line(char *line, so_head *h, so_api_error *err) {
    char *target = strchr(line, ' '), *version = target ? strchr(target + 1, ' ') : NULL;
    if (!version || target == line || target + 1 == version)
        return bad_line(err);
    *target++ = '\0';
    *version++ = '\0';
    for (const char *p = line; *p; p++)
        if (!is_token_char(*p))
            return bad_line(err);
    h->method = line;
    h->path = path_in(target);
    return read_version(version, h, err) &&
           (h->path[1] == '\0' || decode_path((char *)(uintptr_t)h->path, err));
}

/* --- headers --- */

static bool read_header(char *line, so_header *out, so_api_error *err) {
    char *colon = strchr(line, ':');
    bool ok = colon && colon > line;
    for (const char *p = line; ok && p < colon; p++)
        ok = is_token_char(*p);
    if (!ok)
        return so_api_fail(err, 400, "invalid_http", NULL,
                           "a header line is not of the form 'Name: value'");
    *colon = '\0';
    char *value = colon + 1 + strspn(colon + 1, " \t"), *end = value + strlen(value);
    while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    *end = '\0';
    *out = (so_header){line, value};
    return true;
}

/* NUL-terminates the line at *at and moves *at to the next line. Returns NULL if the line contains
 * a control character. */
static char *take_line(char *text, size_t len, size_t *at) {
    char *line = text + *at, *end = memchr(line, '\n', len - *at);
    *at = (size_t)(end - text) + 1;
    if (end > line && end[-1] == '\r')
        end--;
    *end = '\0';
    for (const char *p = line; p < end; p++)
        if (((unsigned char)*p < ' ' && *p != '\t') || *p == 127)
            return NULL;
    return line;
}

const char *so_head_get(const so_head *h, const char *name) {
    for (int i = 0; i < h->n_headers; i++)
        if (strcasecmp(h->headers[i].name, name) == 0)
            return h->headers[i].value;
    return NULL;
}

bool so_head_is(const so_head *h, const char *method) {
    return h->method && strcmp(h->method, method) == 0;
}

static int count_headers(const so_head *h, const char *name) {
    int n = 0;
    for (int i = 0; i < h->n_headers; i++)
        n += strcasecmp(h->headers[i].name, name) == 0;
    return n;
}

/* Whether a comma-separated header has this item. */
static bool has_item(const so_head *h, const char *name, const char *item) {
    size_t n = strlen(item);
    for (int i = 0; i < h->n_headers; i++) {
        if (strcasecmp(h->headers[i].name, name) != 0)
            continue;
        for (const char *p = h->headers[i].value; *p; p += strcspn(p, ","), p += *p == ',') {
            p += strspn(p, " \t");
            if (strncasecmp(p, item, n) == 0 && strchr(", \t", p[n]))
                return true;
        }
    }
    return false;
}

/* --- framing --- */

static bool read_length(const char *text, uint64_t *out, so_api_error *err) {
    size_t n = strspn(text, "0123456789");
    if (n == 0 || text[n] != '\0')
        return so_api_fail(err, 400, "invalid_length", NULL,
                           "Content-Length '%.40s' is not a number of bytes", text);
    text += strspn(text, "0");
    if (strlen(text) > 18) /* 10^18 < 2^63 */
        return so_api_fail(err, 413, "body_too_large", NULL,
                           "Content-Length %.40s is more than this server accepts (--max-body)",
                           text);
    *out = strtoull(text, NULL, 10);
    return true;
}

static bool read_framing(so_head *h, so_api_error *err) {
    const char *length = so_head_get(h, "Content-Length");
    const char *coding = so_head_get(h, "Transfer-Encoding");
    if (count_headers(h, "Content-Length") + count_headers(h, "Transfer-Encoding") > 1)
        return so_api_fail(err, 400, "ambiguous_length", NULL,
                           "the request states its length more than once");
    if (count_headers(h, "Host") > 1)
        return so_api_fail(err, 400, "invalid_http", NULL, "the request has several Host headers");
    if (coding && h->minor == 0)
        return so_api_fail(err, 400, "invalid_http", NULL,
                           "Transfer-Encoding is not allowed in an HTTP/1.0 request");
    if (coding && strcasecmp(coding, "chunked") != 0)
        return so_api_fail(err, 501, "unsupported_encoding", NULL,
                           "Transfer-Encoding '%.40s' is not supported: use chunked", coding);
    h->chunked = coding != NULL;
    h->keep_alive = h->minor > 0 ? !has_item(h, "Connection", "close")
                                 : has_item(h, "Connection", "keep-alive");
    return !length || read_length(length, &h->length, err);
}

/* --- the head --- */

static bool read_lines(so_head *h, size_t len, so_api_error *err) {
    size_t at = 0;
    char *line = take_line(h->text, len, &at);
    if (line && !read_request_line(line, h, err))
        return false;
    while (line && (line = take_line(h->text, len, &at)) && *line)
        if (!read_header(line, &h->headers[h->n_headers++], err))
            return false;
    if (!line)
        return so_api_fail(err, 400, "invalid_http", NULL,
                           "the request's head contains a control character");
    return read_framing(h, err);
}

bool so_head_parse(so_str text, so_head *out, so_api_error *err) {
    so_head h = {.text = so_strndup(text.ptr, text.len)};
    int n_lines = 0;
    for (size_t i = 0; i < text.len; i++)
        n_lines += text.ptr[i] == '\n';
    h.headers = SO_NEW_N(so_header, n_lines);
    *out = (so_head){0};
    if (!read_lines(&h, text.len, err)) {
        so_head_free(&h);
        return false;
    }
    *out = h;
    return true;
}

void so_head_free(so_head *h) {
    free(h->text);
    free(h->headers);
    *h = (so_head){0};
}

/* --- bodies --- */

void so_body_init(so_body *b, const so_head *h) {
    *b = (so_body){.chunked = h->chunked, .left = h->length, .state = SO_BODY_CONTENT};
    if (h->chunked)
        b->state = SO_BODY_SIZE;
    else if (h->length == 0)
        b->state = SO_BODY_DONE;
}

static bool bad_chunk(so_api_error *err, const char *what) {
    return so_api_fail(err, 400, "invalid_chunk", NULL, "the chunked body is malformed: %s", what);
}

static bool read_size(so_body *b, char c, so_api_error *err) {
    int digit = hex_of(c);
    if (digit >= 0) {
        b->left = b->left * 16 + (uint64_t)digit;
        return ++b->n_digits <= 15 || bad_chunk(err, "the size of a chunk has too many digits");
    }
    if (b->n_digits == 0 || (c != '\r' && c != ';' && c != ' ' && c != '\t'))
        return bad_chunk(err, "the size of a chunk is not a hexadecimal number");
    b->state = c == '\r' ? SO_BODY_SIZE_LF : SO_BODY_EXTENSION;
    return true;
}

static bool expect(so_body *b, char c, char want, so_body_state next, so_api_error *err) {
    b->state = next;
    return c == want || bad_chunk(err, "a line does not end with CR LF");
}

/* A byte of an extension or a trailer, which are ignored up to the end of the line. */
static bool skip_line(so_body *b, char c, so_body_state next, so_api_error *err) {
    if (++b->overhead > MAX_OVERHEAD)
        return bad_chunk(err, "extensions and trailers are too long");
    if (((unsigned char)c < ' ' && c != '\t' && c != '\r') || c == 127)
        return bad_chunk(err, "a line contains a control character");
    if (c == '\r')
        b->state = next;
    return true;
}

/* One byte of framing. */
static bool read_frame(so_body *b, char c, so_api_error *err) {
    switch (b->state) {
    case SO_BODY_SIZE:
        return read_size(b, c, err);
    case SO_BODY_EXTENSION:
        return skip_line(b, c, SO_BODY_SIZE_LF, err);
    case SO_BODY_SIZE_LF:
        return expect(b, c, '\n', b->left ? SO_BODY_CONTENT : SO_BODY_TRAILER_START, err);
    case SO_BODY_CONTENT_CR:
        return expect(b, c, '\r', SO_BODY_CONTENT_LF, err);
    case SO_BODY_CONTENT_LF:
        b->n_digits = 0;
        return expect(b, c, '\n', SO_BODY_SIZE, err);
    case SO_BODY_TRAILER_START:
        b->state = SO_BODY_TRAILER;
        return skip_line(b, c, SO_BODY_LAST_LF, err);
    case SO_BODY_TRAILER:
        return skip_line(b, c, SO_BODY_TRAILER_LF, err);
    case SO_BODY_TRAILER_LF:
        return expect(b, c, '\n', SO_BODY_TRAILER_START, err);
    default:
        return expect(b, c, '\n', SO_BODY_DONE, err);
    }
}

bool so_body_read(so_body *b, so_str in, size_t *at, so_str *piece, so_api_error *err) {
    *piece = (so_str){in.ptr, 0};
    while (b->state != SO_BODY_CONTENT && b->state != SO_BODY_DONE && *at < in.len)
        if (!read_frame(b, in.ptr[(*at)++], err))
            return false;
    if (b->state != SO_BODY_CONTENT)
        return true;
    size_t n = (size_t)SO_MIN(b->left, (uint64_t)(in.len - *at));
    *piece = (so_str){in.ptr + *at, n};
    *at += n;
    b->left -= n;
    if (b->left == 0)
        b->state = b->chunked ? SO_BODY_CONTENT_CR : SO_BODY_DONE;
    return true;
}
