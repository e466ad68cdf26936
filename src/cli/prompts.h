/* Prompt files: one JSON object per line, with either "prompt": TEXT or "turns": [TEXT, …], and
 * optionally "id", "category" and "system". */
#ifndef SO_CLI_PROMPTS_H
#define SO_CLI_PROMPTS_H

#include <jansson.h>

#include "base/err.h"
#include "base/str.h"

typedef struct so_prompt {
    int line;         /* in the file, from 1 */
    const json_t *id; /* of any JSON type; NULL: none */
    const json_t *category;
    const char *system; /* NULL: none */
    so_str *turns;      /* at least one */
    int n_turns;
    json_t *object; /* owns the strings above; NULL for a single prompt */
} so_prompt;

typedef struct so_prompts {
    so_prompt *items;
    int n;
} so_prompts;

/* Reads and checks every line; an error names file and line. */
int so_prompts_read(const char *path, so_prompts *out, so_err *err);
/* One prompt of one turn, of any bytes. Borrows text and system (which may be NULL). */
void so_prompts_single(so_str text, const char *system, so_prompts *out);
void so_prompts_free(so_prompts *p);

#endif
