/* The program's entry: finds the command and passes it the arguments that follow. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/options.h"

enum { MAX_NAMES = 32 };

static int unknown_command(const char *name) {
    const char *names[MAX_NAMES];
    int n = 0;
    for (; so_command_at(n) && n < MAX_NAMES; n++)
        names[n] = so_command_at(n)->name;
    const char *near = so_near_miss(name, names, n);
    fprintf(stderr, "sooth: unknown command '%.80s'%s%s%s\n", name, near ? "; did you mean '" : "",
            near ? near : "", near ? "'?" : "");
    fputs("`sooth --help` lists the commands.\n", stderr);
    return 2;
}

static int help(int argc, char **argv) {
    if (argc < 3) {
        so_help_overview(stdout);
        return 0;
    }
    const so_command *cmd = so_command_find(argv[2]);
    const so_topic *topic = so_topic_find(argv[2]);
    bool color = so_args_color(NULL, STDOUT_FILENO);
    if (!cmd && !topic)
        return unknown_command(argv[2]);
    if (cmd)
        so_help_command(cmd, color);
    else
        so_help_topic(topic, color);
    return 0;
}

/* A command whose output could not be written (a full disk) has failed. */
static int finish(int status) {
    bool lost = fflush(stdout) != 0;
    if (status != 0 || !(lost || ferror(stdout)))
        return status;
    fputs("sooth: standard output could not be written completely\n", stderr);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        so_help_overview(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "version")) {
        puts("sooth " SO_VERSION);
        return finish(0);
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help"))
        return finish(help(argc, argv));
    const so_command *cmd = so_command_find(argv[1]);
    return cmd ? finish(cmd->run(argc - 1, argv + 1)) : unknown_command(argv[1]);
}
