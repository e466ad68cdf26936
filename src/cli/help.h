/* What `sooth help` prints on standard output, wrapped to the terminal's width: at most 100
 * columns, and 80 if standard output is not a terminal. */
#ifndef SO_CLI_HELP_H
#define SO_CLI_HELP_H

#include <stdbool.h>
#include <stdio.h>

#include "cli/commands.h"

/* All commands, by group, and the topics. `sooth` without arguments prints this on stderr. */
void so_help_overview(FILE *f);
/* Usage, summary, arguments and options of one command. */
void so_help_command(const so_command *cmd, bool color);

/* A topic: a text that `sooth help NAME` prints and that does not belong to a command. */
typedef struct so_topic {
    const char *name, *summary;
    const char *intro; /* paragraphs, separated by '\n' */
    const char *rows;  /* "head\ttext\n" each; a line without '\t' is a heading */
} so_topic;

const so_topic *so_topic_at(int i); /* NULL past the end */
const so_topic *so_topic_find(const char *name);
void so_help_topic(const so_topic *t, bool color);

#endif
