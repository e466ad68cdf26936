/* The commands: one row each in commands.c, one function each in a file of its own. */
#ifndef SO_CLI_COMMANDS_H
#define SO_CLI_COMMANDS_H

/* One bit per command; so_option.cmds is a set of them. */
enum {
    SO_CMD_RUN = 1 << 0,
    SO_CMD_PULL = 1 << 1,
    SO_CMD_BENCH = 1 << 2,
    SO_CMD_INSPECT = 1 << 3,
    SO_CMD_QUANTIZE = 1 << 4,
    SO_CMD_TOKENIZE = 1 << 5,
    SO_CMD_THEORY = 1 << 6,
    SO_CMD_PROVE = 1 << 7,
    SO_CMD_TRACE = 1 << 8,
    SO_CMD_COUNT = 1 << 9,
    SO_CMD_CHAT = 1 << 10,
    SO_CMD_SERVE = 1 << 11,
    SO_CMD_DEMO = 1 << 12,
    SO_CMD_COMPLETION = 1 << 13,
    SO_CMD_CALIBRATE = 1 << 14,
    SO_CMD_WORKER = 1 << 15,
    SO_CMD_ALL = ~0,
};

typedef enum so_command_group { SO_GROUP_USE, SO_GROUP_MEASURE } so_command_group;

typedef struct so_command {
    int bit; /* SO_CMD_… */
    const char *name;
    int (*run)(int argc, char **argv); /* argv[0] is the command; returns the exit status */
    so_command_group group;            /* heading in `sooth help` */
    const char *usage;                 /* what follows the name; '\n' begins another form */
    const char *summary;
    const char *args; /* values of the first argument and their meaning, "a\tmeaning\n…", or NULL */
    int min_pos, max_pos; /* number of arguments that are not options */
} so_command;

const so_command *so_command_at(int i); /* NULL past the end */
const so_command *so_command_find(const char *name);
const so_command *so_command_by_bit(int bit);

int so_cmd_demo(int argc, char **argv);
int so_cmd_run(int argc, char **argv);
int so_cmd_chat(int argc, char **argv);
int so_cmd_serve(int argc, char **argv);
int so_cmd_pull(int argc, char **argv);
int so_cmd_bench(int argc, char **argv);
int so_cmd_inspect(int argc, char **argv);
int so_cmd_quantize(int argc, char **argv);
int so_cmd_tokenize(int argc, char **argv);
int so_cmd_theory(int argc, char **argv);
int so_cmd_trace(int argc, char **argv);
int so_cmd_prove(int argc, char **argv);
int so_cmd_count(int argc, char **argv);
int so_cmd_completion(int argc, char **argv);
int so_cmd_calibrate(int argc, char **argv);
int so_cmd_draft_worker(int argc, char **argv);

#endif
