/* A conversation: an optional system message, and turns of user and assistant in order. */
#ifndef SO_CLI_DIALOG_H
#define SO_CLI_DIALOG_H

#include <jansson.h>

#include "base/str.h"
#include "token/chat.h"

/* Zero-initialise. */
typedef struct so_dialog {
    json_t *system;   /* {"role","content"}; NULL: none */
    json_t *messages; /* all others */
    size_t first;     /* first message that the model sees; earlier ones did not fit the context */
} so_dialog;

void so_dialog_free(so_dialog *d);
void so_dialog_clear(so_dialog *d); /* keeps the system message */

/* SO_EINVAL if the text is not UTF-8. */
int so_dialog_add(so_dialog *d, const char *role, so_str text, so_err *err);
/* Empty text: no system message. */
int so_dialog_set_system(so_dialog *d, so_str text, so_err *err);
so_str so_dialog_system(const so_dialog *d); /* empty: none */

size_t so_dialog_len(const so_dialog *d); /* number of messages, without the system message */
/* Whether the last message has this role. */
bool so_dialog_ends_with(const so_dialog *d, const char *role);
so_str so_dialog_last(const so_dialog *d); /* text of the last message */
void so_dialog_pop(so_dialog *d);
/* Hides the oldest visible exchange from the model. False, with nothing hidden, if only one is
 * visible. */
bool so_dialog_hide_oldest(so_dialog *d);

/* The tokens of the visible messages in the chat template, up to where the answer begins. */
int so_dialog_encode(const so_dialog *d, const so_chat *chat, so_tokens *out, so_err *err);

/* The format is a JSON object with "messages" as in the OpenAI API; load also accepts a bare list.
 * A failure leaves the file, or the conversation, unchanged. */
int so_dialog_save(const so_dialog *d, const char *path, so_err *err);
int so_dialog_load(so_dialog *d, const char *path, so_err *err);

#endif
