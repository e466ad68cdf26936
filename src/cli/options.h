/* Command-line options: one table (option_table.c) and one parser (options.c) for all commands.
 *
 *   int so_cmd_x(int argc, char **argv) {
 *       so_args a;
 *       if (!so_args_parse(&a, SO_CMD_X, argc, argv))
 *           return a.status;                      help was printed (0) or the usage was wrong (2)
 *       const char *model = so_args_str(&a, SO_OPT_MODEL, NULL);
 *       …
 *       so_args_free(&a);
 *
 * The parser accepts `--opt value`, `--opt=value`, `-o value`; after `--` everything is an
 * argument. Every value is checked against its type and range; a message names the option, the
 * value and what is allowed. Of an option that is given twice the last value counts; a list keeps
 * all values. Values point into argv. */
#ifndef SO_CLI_OPTIONS_H
#define SO_CLI_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "cli/commands.h"

typedef enum so_opt {
    SO_OPT_MODEL,
    SO_OPT_DRAFT_MODEL,
    SO_OPT_QUANTIZE,
    SO_OPT_CTX,
    SO_OPT_KV_TYPE,
    SO_OPT_KV_LAYOUT,
    SO_OPT_KV_PAGES,
    SO_OPT_NO_PREFIX_CACHE,
    SO_OPT_THREADS,
    SO_OPT_DEVICE,
    SO_OPT_DRAFT_DEVICE,
    SO_OPT_DRAFT_CORES,
    SO_OPT_WORKER_KEY,
    SO_OPT_CPU_LEVEL,
    SO_OPT_BATCH,
    SO_OPT_PROMPT,
    SO_OPT_FILE,
    SO_OPT_SYSTEM,
    SO_OPT_RAW,
    SO_OPT_ADD_SPECIAL,
    SO_OPT_NO_PARSE_SPECIAL,
    SO_OPT_PROMPTS,
    SO_OPT_PARALLEL,
    SO_OPT_PREDICT,
    SO_OPT_STOP,
    SO_OPT_IGNORE_EOS,
    SO_OPT_NO_HISTORY,
    SO_OPT_SEED,
    SO_OPT_NONCE,
    SO_OPT_TEMP,
    SO_OPT_TOP_K,
    SO_OPT_TOP_P,
    SO_OPT_MIN_P,
    SO_OPT_REPEAT_PENALTY,
    SO_OPT_REPEAT_LAST_N,
    SO_OPT_PRESENCE_PENALTY,
    SO_OPT_FREQUENCY_PENALTY,
    SO_OPT_LOGIT_BIAS,
    SO_OPT_LOGPROBS,
    SO_OPT_BEAMS,
    SO_OPT_LENGTH_PENALTY,
    SO_OPT_EARLY_STOPPING,
    SO_OPT_N_BEST,
    SO_OPT_BEAM_CANDIDATES,
    SO_OPT_SPEC,
    SO_OPT_SPEC_LENGTH,
    SO_OPT_VERIFY,
    SO_OPT_SPECULATIVE,
    SO_OPT_NO_SPEC,
    SO_OPT_DRAFT_MAX,
    SO_OPT_DRAFT_NODES,
    SO_OPT_DRAFT_MIN,
    SO_OPT_DRAFT_P_MIN,
    SO_OPT_DRAFT_TEMP,
    SO_OPT_PREDICTION,
    SO_OPT_VIEW,
    SO_OPT_TRACE,
    SO_OPT_HOST,
    SO_OPT_PORT,
    SO_OPT_API_KEY,
    SO_OPT_ALIAS,
    SO_OPT_STRICT_MODEL,
    SO_OPT_CORS,
    SO_OPT_ALLOW_HOST,
    SO_OPT_QUEUE,
    SO_OPT_MAX_CONNECTIONS,
    SO_OPT_MAX_BODY,
    SO_OPT_HTTP_THREADS,
    SO_OPT_TIMEOUT,
    SO_OPT_DRAIN_TIMEOUT,
    SO_OPT_LISTEN,
    SO_OPT_KEY,
    SO_OPT_MAKE_KEY,
    SO_OPT_REPEATS,
    SO_OPT_OUT,
    SO_OPT_ORDER,
    SO_OPT_MEASURE,
    SO_OPT_ALPHA,
    SO_OPT_GAMMA,
    SO_OPT_C,
    SO_OPT_C_HAT,
    SO_OPT_SSD,
    SO_OPT_HIT_RATE,
    SO_OPT_ROW_COST,
    SO_OPT_FAN_COST,
    SO_OPT_CONTENTION,
    SO_OPT_DRAFT_CONTENTION,
    SO_OPT_SCALING,
    SO_OPT_SVG,
    SO_OPT_HEADS,
    SO_OPT_SHOW,
    SO_OPT_MASK,
    SO_OPT_CHECK,
    SO_OPT_FORCE,
    SO_OPT_JSON,
    SO_OPT_VERBOSE,
    SO_OPT_NO_COLOR,
    SO_OPT_HELP,
    SO_OPT_COUNT,
} so_opt;

/* SO_TYPE_OPTIONAL: a flag that may carry one of its choices after '='. SO_TYPE_SEED: a whole
 * number; -1 counts as not given. */
typedef enum so_opt_type {
    SO_TYPE_FLAG,
    SO_TYPE_OPTIONAL,
    SO_TYPE_TEXT,
    SO_TYPE_LIST,
    SO_TYPE_CHOICE,
    SO_TYPE_INT,
    SO_TYPE_FLOAT,
    SO_TYPE_SEED,
} so_opt_type;

typedef struct so_option {
    const char *group;   /* heading in the help */
    const char *name;    /* --name */
    const char *letter;  /* -letter, of one to three letters; NULL: none */
    const char *aliases; /* further long names, separated by spaces */
    so_opt_type type;
    double min, max;          /* SO_TYPE_INT, SO_TYPE_FLOAT */
    const char *value;        /* what help calls the value; one that begins with FILE is a path */
    const char *choices;      /* "a|b|c" if the values can be listed, else NULL */
    const char *default_text; /* description of the default; NULL: none */
    const char *help;         /* one sentence */
    int cmds;                 /* bits of the commands that have the option */
} so_option;

const so_option *so_option_at(so_opt id);
/* Help text and default of an option in one command. */
const char *so_option_help(so_opt id, int cmd_bit);
const char *so_option_default(so_opt id, int cmd_bit);

typedef struct so_args {
    const so_command *cmd;
    int status; /* the exit status when parsing returned false */
    struct {
        int n_given;
        const char *text; /* the last value given */
        int64_t i;
        double f;
        const char **items; /* SO_TYPE_LIST: all values */
    } val[SO_OPT_COUNT];
    const char **pos;
    int n_pos;
} so_args;

bool so_args_parse(so_args *a, int cmd_bit, int argc, char **argv);
void so_args_free(so_args *a);

bool so_args_has(const so_args *a, so_opt id);
const char *so_args_str(const so_args *a, so_opt id, const char *fallback);
int64_t so_args_int(const so_args *a, so_opt id, int64_t fallback);
double so_args_float(const so_args *a, so_opt id, double fallback);

/* Prints "sooth CMD: message" and how to get help; returns 2. */
int so_args_bad(const so_args *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Prints "sooth CMD: message" of err; returns 1. */
int so_args_fail(const so_args *a, const so_err *err);

/* Whether colours may be written to this descriptor: it must be a terminal that supports control
 * sequences, and neither NO_COLOR nor --no-color may be set. a may be NULL. */
bool so_args_color(const so_args *a, int fd);
/* The candidate that differs from `word` by the fewest typing errors, at most two; NULL: none. If a
 * candidate begins with `word`, of three letters or more, that counts as one error. */
const char *so_near_miss(const char *word, const char *const *candidates, int n);

#endif
