/* The state of `sooth chat`, used by its loop (chat.c) and its commands (chat_commands.c). */
#ifndef SO_CLI_CHAT_H
#define SO_CLI_CHAT_H

#include "cli/dialog.h"
#include "cli/lines.h"
#include "cli/report.h"
#include "cli/request.h"
#include "cli/spec.h"
#include "cli/view.h"

typedef struct so_session {
    const so_args *a;
    so_bundle b;
    so_engine *e;
    so_request_opts base; /* options of every answer; /temp and /seed change `sample` */
    so_cli_spec spec;
    char *spec_text; /* value of the last /spec; NULL: as on the command line */
    so_painter painter;
    so_dialog dialog;
    so_lines *lines;
    char *file; /* file saved or loaded last, which /save may overwrite; NULL: none */
    bool json;
    bool interactive; /* turns are typed at a terminal */
    bool seed_set;    /* /seed was used since the last answer */
    bool quit;
    so_buf answer;   /* text of the last answer */
    int n_first;     /* number of tokens of the last answer that its first pass produced */
    so_report total; /* counts of all answers */
    int n_answers, n_failed;
} so_session;

/* Prints a line on stderr; stdout is for answers only. */
void so_chat_print(const so_session *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Generates an answer to the conversation, which must end with a user's turn, and appends it.
 * Returns false if the answer failed or was stopped before its first token; the conversation then
 * still ends with the user's turn. */
bool so_chat_answer(so_session *s);
/* Executes the turn if it is a command; returns whether it was one. */
bool so_chat_command(so_session *s, so_str turn);
/* Names of commands ("/help", "/system", …); NULL past the end. */
const char *so_chat_command_at(int i);

#endif
