/* A job's results in the OpenAI API's JSON, as one object or as server-sent events. */
#ifndef SO_SERVER_FORMAT_H
#define SO_SERVER_FORMAT_H

#include "server/job.h"

typedef struct so_format {
    const char *model, *fingerprint;
    const so_tokenizer *tok;
} so_format;

/* The text of one token; incomplete UTF-8 is replaced by U+FFFD. */
json_t *so_format_token(const so_format *f, int32_t id);
/* With `echo`, appends the prompt's text; else nothing. */
void so_format_prompt(const so_format *f, const so_choice *c, so_buf *out);
/* Logprobs of the answer's tokens [from, to); if `prompt` is set, those of the prompt come first.
 * JSON null if the request did not ask for logprobs. Defined in logprobs.c. */
json_t *so_format_logprobs(const so_format *f, so_choice *c, bool prompt, int from, int to);
/* Appends o as compact JSON and releases it. */
void so_format_json(json_t *o, so_buf *out);
/* The response of a job that is done and has no error. */
void so_format_answer(const so_format *f, so_job *j, so_buf *out);
/* Appends the events that are new since the last call. True: the stream is complete. HTTP thread,
 * under the job's lock. */
bool so_format_stream(const so_format *f, so_job *j, so_buf *out);
/* True if the job or one of its choices failed or was cancelled; *out is then the error. */
bool so_format_error(const so_job *j, so_api_error *out);

#endif
