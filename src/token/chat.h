/* Messages to prompt text, by the model's own template with the variables that templates expect
 * (messages, tools, documents, add_generation_prompt, bos_token, eos_token, …). The text of a
 * control token becomes its id only where the template wrote it, never in the text of a message. */
#ifndef SO_TOKEN_CHAT_H
#define SO_TOKEN_CHAT_H

#include "jinja/template.h"
#include "token/tokenizer.h"

typedef struct so_chat so_chat;

/* SO_ENOTFOUND if the tokenizer has no template. */
int so_chat_create(const so_tokenizer *t, so_chat **out, so_err *err);
void so_chat_free(so_chat *c);

/* messages: array of {"role","content",…}. extra: object with further variables (tools, documents,
 * enable_thinking, …) or NULL. Appends the prompt text. */
int so_chat_render(const so_chat *c, const json_t *messages, const json_t *extra,
                   bool add_generation_prompt, so_buf *out, so_err *err);
/* Renders with the generation prompt and appends the ids. Control tokens that the template writes
 * become their ids; the same text in messages, tools and other data is encoded as ordinary text.
 * BOS is added in front if the model requires one and the template wrote none. */
int so_chat_encode(const so_chat *c, const json_t *messages, const json_t *extra, so_tokens *out,
                   so_err *err);

/* How a rendered conversation ends. */
typedef enum so_chat_end {
    SO_CHAT_ASK,      /* with the generation prompt: the model answers */
    SO_CHAT_AS_IS,    /* after the last message */
    SO_CHAT_CONTINUE, /* within the last message, right after its text: the model continues it */
} so_chat_end;
/* so_chat_encode with another ending. CONTINUE cuts the text as transformers'
 * continue_final_message does; SO_EINVAL if the last message has no text or the template does not
 * output it unchanged. */
int so_chat_encode_to(const so_chat *c, const json_t *messages, const json_t *extra,
                      so_chat_end end, so_tokens *out, so_err *err);

#endif
