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
    size_t first;     /* the model sees messages from here on; earlier ones no longer fit */
} so_dialog;

void so_dialog_free(so_dialog *d);
void so_dialog_clear(so_dialog *d); /* keeps the system message */

/* SO_EINVAL where the text is no UTF-8. */
int so_dialog_add(so_dialog *d, const char *role, so_str text, so_err *err);
/* Empty text: no system message. */
int so_dialog_set_system(so_dialog *d, so_str text, so_err *err);
so_str so_dialog_system(const so_dialog *d); /* empty: none */

size_t so_dialog_len(const so_dialog *d); /* messages, without the system one */
/* True where the last message is of this role. */
bool so_dialog_ends_with(const so_dialog *d, const char *role);
so_str so_dialog_last(const so_dialog *d); /* its text */
void so_dialog_pop(so_dialog *d);
/* Hides the oldest exchange from the model. False where only one turn is left to see. */
bool so_dialog_hide_oldest(so_dialog *d);

/* The tokens of what the model sees, in its chat format, up to where the answer begins. */
int so_dialog_encode(const so_dialog *d, const so_chat *chat, so_tokens *out, so_err *err);

/* A JSON object with "messages" as the OpenAI API has them; load also takes the bare list. On
 * failure the file, or the conversation, is as it was. */
int so_dialog_save(const so_dialog *d, const char *path, so_err *err);
int so_dialog_load(so_dialog *d, const char *path, so_err *err);

#endif
