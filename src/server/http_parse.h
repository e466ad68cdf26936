/* HTTP/1.1 requests as bytes: where a head ends, what it says, and how a body is framed.
 *
 *   in:  POST /v1/completions HTTP/1.1\r\n      request line ┐
 *        Host: localhost\r\n                    header       │ head, at most SO_HEAD_MAX bytes
 *        Content-Length: 17\r\n                 header       │
 *        \r\n                                                ┘
 *        {"prompt": "he"}\n                     body: Content-Length bytes, chunks, or none
 *
 * Pure functions over (pointer, length); no sockets, no globals, any thread. The fuzz target of
 * both parsers is tests/fuzz/fuzz_request.c. */
#ifndef SO_SERVER_HTTP_PARSE_H
#define SO_SERVER_HTTP_PARSE_H

#include "server/api.h"

enum { SO_HEAD_MAX = 32 << 10 };

typedef struct so_header {
    const char *name, *value; /* the value without space around it */
} so_header;

/* A parsed head. Strings are NUL-terminated and live as long as the head. */
typedef struct so_head {
    char *text; /* owned; the other strings point into it */
    const char *method;
    const char *path; /* percent-decoded, without scheme, host and query */
    int minor;        /* of HTTP/1.minor: 0 or 1 */
    so_header *headers;
    int n_headers;
    bool keep_alive; /* the client wants the connection to stay open */
    bool chunked;
    uint64_t length; /* Content-Length; 0 without one */
} so_head;

/* The length of the head at the start of `in`, with the empty line at its end; 0: incomplete. The
 * first `seen` bytes are known to hold no end of a head. */
size_t so_head_find(so_str in, size_t seen);
/* Whether the bytes may still become a request: a head begins with a method. */
bool so_head_may_begin(so_str in);
/* Parses a complete head. False: *err is filled, *out is empty. */
bool so_head_parse(so_str text, so_head *out, so_api_error *err);
void so_head_free(so_head *h);
/* The first header of that name, whatever its case; NULL: there is none. */
const char *so_head_get(const so_head *h, const char *name);
/* Whether the head was parsed and has this method. */
bool so_head_is(const so_head *h, const char *method);

typedef enum so_body_state {
    SO_BODY_SIZE,      /* the hexadecimal size of a chunk */
    SO_BODY_EXTENSION, /* the rest of that line, which is ignored */
    SO_BODY_SIZE_LF,
    SO_BODY_CONTENT,
    SO_BODY_CONTENT_CR,
    SO_BODY_CONTENT_LF,
    SO_BODY_TRAILER_START, /* a line of trailers, or the empty line at the end */
    SO_BODY_TRAILER,
    SO_BODY_TRAILER_LF,
    SO_BODY_LAST_LF,
    SO_BODY_DONE,
} so_body_state;

/* Reads a body piece by piece. */
typedef struct so_body {
    so_body_state state;
    bool chunked;
    uint64_t left;   /* bytes still to come, of the content or of the chunk */
    size_t overhead; /* bytes of extensions and trailers so far */
    int n_digits;
} so_body;

void so_body_init(so_body *b, const so_head *h);
/* Reads from in[*at …] and moves *at past the bytes that were read. *piece is set to the content
 * that was found, a part of `in`, at most one piece per call. Call again until b->state is
 * SO_BODY_DONE or *at is in.len. Returns false, with *err filled, if the chunks are malformed. */
bool so_body_read(so_body *b, so_str in, size_t *at, so_str *piece, so_api_error *err);

#endif
