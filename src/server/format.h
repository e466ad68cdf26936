/* Answers: what a job has produced, as the OpenAI API's JSON, whole or as server-sent events. */
#ifndef SO_SERVER_FORMAT_H
#define SO_SERVER_FORMAT_H

#include "server/job.h"

typedef struct so_format {
    const char *model, *fingerprint;
    const so_tokenizer *tok;
} so_format;

/* The text of one token, repaired where it is a part of a character. */
json_t *so_format_token(const so_format *f, int32_t id);
/* Appends the prompt where `echo` puts it before the answer. */
void so_format_prompt(const so_format *f, const so_choice *c, so_buf *out);
/* Of the tokens [from, to) of the answer, after the prompt's if wanted; null where nobody asked
 * (logprobs.c). */
json_t *so_format_logprobs(const so_format *f, so_choice *c, bool prompt, int from, int to);
/* One line of JSON. Takes over o. */
void so_format_json(json_t *o, so_buf *out);
/* The whole answer of a job that is done and has no error. */
void so_format_answer(const so_format *f, so_job *j, so_buf *out);
/* Appends the events that are new since the last call; true when the stream is complete. Under the
 * job's lock, HTTP thread. */
bool so_format_stream(const so_format *f, so_job *j, so_buf *out);
/* The error a job ended with, if any: its own, or that of a choice. */
bool so_format_error(const so_job *j, so_api_error *out);

#endif
