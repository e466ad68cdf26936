/* The command's entry: picks the subcommand and hands it the rest of the arguments. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/options.h"

static void print_overview(FILE *f) {
    fputs("sooth runs language models faster without changing what they say.\n\n"
          "Usage: sooth COMMAND [options]\n\nCommands:\n",
          f);
    for (int i = 0; so_command_at(i); i++)
        fprintf(f, "  %-10s %s\n", so_command_at(i)->name, so_command_at(i)->summary);
    fputs("\n`sooth help COMMAND` shows its options. Exit status: 0 done, 1 failed, 2 bad usage.\n",
          f);
}

static int unknown_command(const char *name) {
    const char *names[32];
    int n = 0;
    for (; so_command_at(n) && n < 32; n++)
        names[n] = so_command_at(n)->name;
    const char *near = so_near_miss(name, names, n);
    fprintf(stderr, "sooth: unknown command '%.80s'%s%s%s\n", name, near ? "; did you mean '" : "",
            near ? near : "", near ? "'?" : "");
    fputs("`sooth --help` lists the commands.\n", stderr);
    return 2;
}

static int help(int argc, char **argv) {
    if (argc < 3) {
        print_overview(stdout);
        return 0;
    }
    const so_command *cmd = so_command_find(argv[2]);
    if (!cmd)
        return unknown_command(argv[2]);
    so_help_command(cmd, so_args_color(NULL, STDOUT_FILENO));
    return 0;
}

/* What was printed and lost (a full disk) is no success. */
static int finish(int status) {
    bool lost = fflush(stdout) != 0;
    if (status != 0 || !(lost || ferror(stdout)))
        return status;
    fputs("sooth: not all of standard output could be written\n", stderr);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_overview(stderr);
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
