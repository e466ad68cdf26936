/* Chat templates: an interpreter for the part of Jinja2 that chat templates use.
 *
 * A template is compiled once and rendered from any thread; variables are JSON. Steps, output
 * bytes, recursion and memory are limited, so a hostile template ends with an error that names its
 * line. An unsupported construct is an error that names it and its line. */
#ifndef SO_JINJA_TEMPLATE_H
#define SO_JINJA_TEMPLATE_H

#include <jansson.h>

#include "base/err.h"
#include "base/str.h"

typedef struct so_template so_template;

int so_template_compile(so_str source, so_template **out, so_err *err);
void so_template_free(so_template *t);

/* Renders with the members of the object `vars` as global variables and appends the text to out,
 * which is unchanged on failure. trim_blocks and lstrip_blocks are on, as in transformers.
 * raise_exception() in a template returns SO_EINVAL with its message, an exceeded limit SO_ELIMIT.
 * strftime_now() uses `now` in seconds since the epoch, as local time; 0: the current time. */
int so_template_render(const so_template *t, const json_t *vars, int64_t now, so_buf *out,
                       so_err *err);

/* The same with the members of the object `data` as further variables, which override `vars`.
 * Appends one byte to `from_data` for each byte of text: 1 if it came from a string in `data`, else
 * 0. A "role" of letters, digits, '_' and '-' does not count as data. */
int so_template_render_traced(const so_template *t, const json_t *vars, const json_t *data,
                              int64_t now, so_buf *out, so_buf *from_data, so_err *err);

#endif
