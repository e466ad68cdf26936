/* `sooth chat`: the session that its loop (chat.c) and its commands (chat_commands.c) share. */
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
    so_request_opts base; /* what all answers share; sample and spec change by command */
    so_cli_spec spec;
    char *spec_text; /* what /spec said; NULL: the command line stands */
    so_painter painter;
    so_dialog dialog;
    so_lines *lines;
    char *file; /* the last one saved or loaded, which may be overwritten; NULL: none */
    bool json;
    bool person;     /* turns are typed at a terminal */
    bool chose_seed; /* since the last answer */
    bool leave;
    /* Of the answers so far: */
    so_buf answer; /* the last … */
    int n_first;   /* … and its tokens that came with the first pass */
    so_report total;
    int n_answers, n_failed;
} so_session;

/* A line for the person, on stderr, so that answers can be piped on. */
void so_chat_say(const so_session *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Answers the conversation, which ends with the user's turn. False where there is no answer,
 * because it failed or was stopped before its first word: the turn stands there alone then. */
bool so_chat_answer(so_session *s);
/* Whether the turn is a command; it has been carried out then. */
bool so_chat_command(so_session *s, so_str turn);
/* "/help", "/system", …; NULL past the end. */
const char *so_chat_command_at(int i);

#endif
