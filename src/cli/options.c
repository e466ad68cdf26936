/* The table of all options and the one parser over it.
 *
 * Adding an option is a row here and an id in options.h. A row says which subcommands take it, so
 * an option of another subcommand is refused with a message that says where it belongs. The parser
 * knows nothing of what options mean; ranges that depend on a model are checked where the model is
 * known. Printing to stderr and stdout is allowed here, as everywhere in cli/. */
#include "cli/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/env.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/str.h"

/* OPTIONAL: a flag that may carry one of its choices after '='. */
typedef enum opt_type { FLAG, OPTIONAL, TEXT, LIST, CHOICE, INT, FLOAT, SEED } opt_type;

typedef struct opt_row {
    const char *group, *name, *shrt;
    const char *aliases; /* further long names, separated by spaces */
    opt_type type;
    double min, max;   /* INT, FLOAT */
    const char *value; /* what the value is called; CHOICE: the choices, a|b|c */
    const char *deflt; /* in words, or NULL */
    const char *help;
    int cmds;
} opt_row;

#define LOADS (SO_CMD_RUN | SO_CMD_BENCH | SO_CMD_PROVE | SO_CMD_THEORY)
#define HOLDS (LOADS | SO_CMD_CHAT | SO_CMD_SERVE | SO_CMD_DEMO)
#define TALKS (SO_CMD_RUN | SO_CMD_CHAT)
#define SAMPLES (TALKS | SO_CMD_SERVE)
#define SPECULATES (SAMPLES | SO_CMD_BENCH | SO_CMD_PROVE | SO_CMD_DEMO)
#define WITH_MODEL (HOLDS | SO_CMD_INSPECT | SO_CMD_TOKENIZE | SO_CMD_COUNT)

static const opt_row table[SO_OPT_COUNT] = {
    [SO_OPT_MODEL] =
        {"Model", "model", "m", NULL, TEXT, 0, 0, "FILE|FOLDER|NAME", NULL,
         "a GGUF file, a Hugging Face folder, the name of a pulled model, or story, the "
         "small one that comes with the program",
         WITH_MODEL},
    [SO_OPT_DRAFT_MODEL] = {"Model", "draft-model", "md", "model-draft spec-draft-model", TEXT, 0,
                            0, "FILE|FOLDER|NAME", NULL, "the draft model",
                            SPECULATES | SO_CMD_INSPECT | SO_CMD_THEORY},
    [SO_OPT_QUANTIZE] = {"Model", "quantize", NULL, NULL, TEXT, 0, 0, "TYPE", "as in the file",
                         "round the weights to this type at load (Q8_0, Q4_K, …)", HOLDS},
    [SO_OPT_CTX] = {"Model", "ctx-size", "c", "ctx context", INT, 0, 1 << 24, "N",
                    "the model's, at most 4096", "context length in tokens; 0: all the model has",
                    HOLDS | SO_CMD_INSPECT},
    [SO_OPT_KV_TYPE] = {"Model", "kv-type", NULL, "cache-type cache-type-k", CHOICE, 0, 0,
                        "f16|f32|q8_0", "f16",
                        "type of the KV cache; q8_0 takes half the room of f16 and rounds more",
                        HOLDS | SO_CMD_INSPECT},
    [SO_OPT_KV_LAYOUT] = {"Model", "kv-layout", NULL, NULL, CHOICE, 0, 0, "paged|slotted", "paged",
                          "pages as they are needed, or room for --ctx-size for each sequence",
                          SPECULATES},
    [SO_OPT_KV_PAGES] = {"Model", "kv-pages", NULL, NULL, INT, 1, 1 << 24, "N",
                         "enough for --parallel sequences of --ctx-size",
                         "pages of 32 positions in the KV cache; where they run out, requests wait",
                         SPECULATES},
    [SO_OPT_NO_PREFIX_CACHE] = {"Model", "no-prefix-cache", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                                "compute every prompt anew, also where another began alike",
                                SAMPLES},
    [SO_OPT_THREADS] = {"Model", "threads", "t", NULL, INT, 0, 256, "N", "all cores",
                        "threads to compute with; 0: one per core", HOLDS | SO_CMD_QUANTIZE},
    [SO_OPT_CPU_LEVEL] = {"Model", "cpu-level", NULL, NULL, CHOICE, 0, 0,
                          "auto|scalar|avx2|avxvnni|avx512|amx", "auto",
                          "instruction set of the CPU kernels", HOLDS},
    [SO_OPT_BATCH] = {"Model", "batch-size", "b", "ubatch-size", INT, 1, 4096, "N", "256",
                      "most prompt tokens in one forward pass; never changes the output", HOLDS},

    [SO_OPT_PROMPT] = {"Prompt", "prompt", "p", NULL, TEXT, 0, 0, "TEXT", NULL,
                       "the prompt; tokenize: the text",
                       SO_CMD_RUN | SO_CMD_DEMO | SO_CMD_TOKENIZE},
    [SO_OPT_FILE] =
        {"Prompt", "file", "f", NULL, TEXT, 0, 0, "FILE", NULL,
         "read the text from a file; - is standard input; theory: prompts as for --prompts",
         LOADS | SO_CMD_TOKENIZE | SO_CMD_COUNT},
    [SO_OPT_SYSTEM] = {"Prompt", "system", "sys", "system-prompt", TEXT, 0, 0, "TEXT", NULL,
                       "system message put before the prompt", TALKS},
    [SO_OPT_RAW] = {"Prompt", "raw", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                    "continue the text as it is, without the model's chat format", LOADS},
    [SO_OPT_ADD_SPECIAL] = {"Prompt", "add-special", NULL, NULL, FLAG, 0, 0, NULL,
                            "only the text's own ids",
                            "also put BOS and EOS where the model wants them", SO_CMD_TOKENIZE},
    [SO_OPT_NO_PARSE_SPECIAL] = {"Prompt", "no-parse-special", NULL, NULL, FLAG, 0, 0, NULL,
                                 "they become their ids",
                                 "treat control tokens written out in the text as plain text",
                                 SO_CMD_TOKENIZE},
    [SO_OPT_PROMPTS] = {"Prompt", "prompts", NULL, NULL, TEXT, 0, 0, "FILE.jsonl", NULL,
                        "answer every line of a file: {\"id\",\"turns\":[…]} or {\"prompt\":…}",
                        LOADS},
    [SO_OPT_PARALLEL] = {"Prompt", "parallel", "np", NULL, INT, 1, 64, "N", "1; serve: 8",
                         "how many sequences run at once", LOADS | SO_CMD_SERVE | SO_CMD_INSPECT},

    [SO_OPT_PREDICT] = {"Output", "predict", "n", "n-predict max-tokens", INT, -1, 1 << 24, "N",
                        "until the model ends or the context is full; theory: 10000; demo: 160",
                        "most tokens to generate", LOADS | SO_CMD_CHAT | SO_CMD_DEMO},
    [SO_OPT_STOP] = {"Output", "stop", "r", "reverse-prompt", LIST, 0, 0, "TEXT", NULL,
                     "end before this text; may be given several times", TALKS},
    [SO_OPT_IGNORE_EOS] = {"Output", "ignore-eos", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                           "go on after the model's end token", TALKS},
    [SO_OPT_NO_HISTORY] = {"Output", "no-history", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                           "neither read nor keep the lines typed", SO_CMD_CHAT},

    [SO_OPT_SEED] = {"Sampling", "seed", "s", NULL, SEED, 0, 0, "N", "random, reported",
                     "seed of the noise; the same seed gives the same text",
                     LOADS | SO_CMD_CHAT | SO_CMD_DEMO},
    [SO_OPT_NONCE] = {"Sampling", "nonce", NULL, NULL, INT, 0, 9007199254740991.0, "N",
                      "chosen, reported",
                      "with --verify reject or lenient: replay a run by the seed and nonce that it "
                      "reported; for debugging, not for sampling",
                      TALKS | SO_CMD_BENCH},
    [SO_OPT_TEMP] = {"Sampling", "temp", NULL, "temperature", FLOAT, 0, 100, "T",
                     "the model's own, else 0.8; bench, demo: 0; theory: both 0 and 1",
                     "temperature; 0 takes the likeliest token",
                     SAMPLES | SO_CMD_BENCH | SO_CMD_THEORY | SO_CMD_DEMO},
    [SO_OPT_TOP_K] = {"Sampling", "top-k", NULL, NULL, INT, 0, 1 << 24, "K",
                      "the model's own, else 0", "keep the K likeliest tokens; 0: all", SAMPLES},
    [SO_OPT_TOP_P] = {"Sampling", "top-p", NULL, NULL, FLOAT, 0, 1, "P", "the model's own, else 1",
                      "keep the likeliest tokens that together reach P; 1: all", SAMPLES},
    [SO_OPT_MIN_P] = {"Sampling", "min-p", NULL, NULL, FLOAT, 0, 1, "P", "the model's own, else 0",
                      "keep tokens at least P times as likely as the likeliest; 0: all", SAMPLES},
    [SO_OPT_REPEAT_PENALTY] = {"Sampling", "repeat-penalty", NULL, "repetition-penalty", FLOAT,
                               0.01, 100, "R", "the model's own, else 1",
                               "divide the logits of tokens seen before; 1: off", SAMPLES},
    [SO_OPT_REPEAT_LAST_N] = {"Sampling", "repeat-last-n", NULL, NULL, INT, -1, 1 << 24, "N", "64",
                              "how far back the penalties look; -1: whole context, 0: off",
                              SAMPLES},
    [SO_OPT_PRESENCE_PENALTY] = {"Sampling", "presence-penalty", NULL, NULL, FLOAT, -100, 100, "A",
                                 "0", "taken off the logit of every token already in the output",
                                 SAMPLES},
    [SO_OPT_FREQUENCY_PENALTY] = {"Sampling", "frequency-penalty", NULL, NULL, FLOAT, -100, 100,
                                  "A", "0", "the same, times how often the output has it", SAMPLES},
    [SO_OPT_LOGIT_BIAS] = {"Sampling", "logit-bias", "l", NULL, LIST, 0, 0, "ID=BIAS", NULL,
                           "add to a token's logit, -inf bans it (also ID+BIAS, ID-BIAS)", TALKS},
    [SO_OPT_LOGPROBS] = {"Sampling", "logprobs", NULL, NULL, INT, 0, 20, "N", "0",
                         "with --json: the model's own logprob of each token and of the N "
                         "likeliest in its place, before all of the above",
                         SO_CMD_RUN},

    [SO_OPT_SPEC] =
        {"Speculation", "spec", NULL, NULL, LIST, 0, 0, "DRAFTERS", "auto",
         "who guesses: none, ngram, lookup, corpus, unigram(FILE), bigram(FILE), "
         "predict, random, model, auto; a,b: the first that proposes; a+b: both; "
         "model(ngram): a drafter for the drafter; theory --measure: several, separated by ; "
         "or given one by one",
         SPECULATES | SO_CMD_THEORY},
    [SO_OPT_SPEC_LENGTH] = {"Speculation", "spec-length", NULL, "speculative-length", INT, 1, 64,
                            "K", "the planner decides", "guess exactly this many tokens per round",
                            SPECULATES},
    [SO_OPT_VERIFY] = {"Speculation", "verify", NULL, NULL, TEXT, 0, 0, "match|reject|lenient=L",
                       "match",
                       "how guesses are checked: the same text as without, the same distribution, "
                       "or lossy by a factor of 1/L",
                       SPECULATES},
    [SO_OPT_SPECULATIVE] = {"Speculation", "speculative-decoding", NULL, NULL, FLAG, 0, 0, NULL,
                            NULL, "guess 5 tokens per round with the model of -md", SPECULATES},
    [SO_OPT_NO_SPEC] = {"Speculation", "no-spec", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                        "plain decoding", SPECULATES & ~SO_CMD_DEMO},
    [SO_OPT_DRAFT_MAX] = {"Speculation", "draft-max", NULL, "draft draft-n", INT, 1, 64, "N", "16",
                          "deepest draft: most guesses in a row", SPECULATES},
    [SO_OPT_DRAFT_MIN] = {"Speculation", "draft-min", NULL, "draft-n-min", INT, 0, 64, "N", "0",
                          "drop drafts that are shorter", SPECULATES},
    [SO_OPT_DRAFT_P_MIN] = {"Speculation", "draft-p-min", NULL, NULL, FLOAT, 0, 1, "P", "0",
                            "a model's draft ends where its likeliest token has less", SPECULATES},
    [SO_OPT_DRAFT_TEMP] = {"Speculation", "draft-temp", NULL, NULL, FLOAT, 0, 100, "T", "as --temp",
                           "temperature of draft models", SPECULATES},
    [SO_OPT_PREDICTION] = {"Speculation", "prediction", NULL, NULL, TEXT, 0, 0, "FILE", NULL,
                           "the text you expect, for --spec predict (which is then the default)",
                           SPECULATES & ~SO_CMD_SERVE},
    [SO_OPT_VIEW] = {"Speculation", "view", NULL, NULL, OPTIONAL, 0, 0, "rounds", NULL,
                     "show guesses that stood, fell or were corrected; =rounds: a line per pass",
                     TALKS},
    [SO_OPT_TRACE] = {"Speculation", "trace", NULL, NULL, TEXT, 0, 0, "FILE", NULL,
                      "write what each step expected, chose, accepted and took (JSON lines)",
                      SO_CMD_RUN},

    [SO_OPT_HOST] = {"Server", "host", NULL, NULL, TEXT, 0, 0, "ADDRESS", "127.0.0.1",
                     "where to listen; 0.0.0.0: everywhere (then give a key)", SO_CMD_SERVE},
    [SO_OPT_PORT] = {"Server", "port", NULL, NULL, INT, 0, 65535, "N", "8080", "0: any free one",
                     SO_CMD_SERVE},
    [SO_OPT_API_KEY] = {"Server", "api-key", NULL, NULL, TEXT, 0, 0, "KEY", "none",
                        "what clients must send as a bearer token (also: SOOTH_API_KEY)",
                        SO_CMD_SERVE},
    [SO_OPT_ALIAS] = {"Server", "alias", "a", NULL, TEXT, 0, 0, "NAME", "as -m names it",
                      "the model's name in the API", SO_CMD_SERVE},
    [SO_OPT_STRICT_MODEL] = {"Server", "strict-model", NULL, NULL, FLAG, 0, 0, NULL,
                             "any name will do", "answer 404 to requests for another model",
                             SO_CMD_SERVE},
    [SO_OPT_CORS] = {"Server", "cors", NULL, NULL, TEXT, 0, 0, "ORIGIN|*", "none",
                     "pages of this origin may ask from a browser", SO_CMD_SERVE},
    [SO_OPT_ALLOW_HOST] = {"Server", "allow-host", NULL, NULL, LIST, 0, 0, "NAME", "none",
                           "a keyless server on 127.0.0.1 may be asked by this name, too (behind a "
                           "proxy); may be repeated",
                           SO_CMD_SERVE},
    [SO_OPT_QUEUE] = {"Server", "queue", NULL, NULL, INT, 0, 10000, "N", "64",
                      "answers that may wait for a place; more get 429", SO_CMD_SERVE},
    [SO_OPT_MAX_CONNECTIONS] = {"Server", "max-connections", NULL, NULL, INT, 1, 100000, "N", "512",
                                "open at once; above that the quietest is closed", SO_CMD_SERVE},
    [SO_OPT_MAX_BODY] = {"Server", "max-body", NULL, NULL, INT, 1024, 1 << 30, "BYTES", "1048576",
                         "largest request", SO_CMD_SERVE},
    [SO_OPT_HTTP_THREADS] = {"Server", "http-threads", NULL, "threads-http", INT, 1, 64, "N", "4",
                             "threads that parse and format", SO_CMD_SERVE},
    [SO_OPT_TIMEOUT] = {"Server", "timeout", NULL, NULL, INT, 1, 86400, "SECONDS", "60",
                        "for a request to arrive, and for a client to take what is sent",
                        SO_CMD_SERVE},
    [SO_OPT_DRAIN_TIMEOUT] = {"Server", "drain-timeout", NULL, NULL, INT, 0, 86400, "SECONDS", "30",
                              "what running answers get to finish when the server is told to stop",
                              SO_CMD_SERVE},

    [SO_OPT_REPEATS] = {"Measuring", "repeats", NULL, "repetitions", INT, 1, 10000, "N",
                        "9; spec: 1", "timed runs of each kind", SO_CMD_BENCH},
    [SO_OPT_OUT] = {"Measuring", "out", "o", NULL, TEXT, 0, 0, "FILE", NULL,
                    "where bench logits writes float32 rows, and count its table",
                    SO_CMD_BENCH | SO_CMD_COUNT},
    [SO_OPT_ORDER] = {"Measuring", "order", NULL, NULL, INT, 1, 2, "1|2", "2",
                      "1 counts tokens (unigram), 2 which token follows which (bigram)",
                      SO_CMD_COUNT},

    [SO_OPT_MEASURE] = {"Theory", "measure", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                        "measure alpha, c and t(n) with -m, and the speed-up beside its prediction",
                        SO_CMD_THEORY},
    [SO_OPT_ALPHA] = {"Theory", "alpha", NULL, NULL, FLOAT, 0, 1, "A", NULL,
                      "chance that a guess is accepted", SO_CMD_THEORY},
    [SO_OPT_GAMMA] = {"Theory", "gamma", NULL, NULL, INT, 0, 255, "G", "5", "guesses per round",
                      SO_CMD_THEORY},
    [SO_OPT_C] = {"Theory", "c", NULL, NULL, FLOAT, 0, 1000, "C", "0",
                  "time of one draft step, in passes of the target", SO_CMD_THEORY},
    [SO_OPT_C_HAT] = {"Theory", "c-hat", NULL, NULL, FLOAT, 0, 1000, "C", "as --c",
                      "the same in operations", SO_CMD_THEORY},
    [SO_OPT_SVG] =
        {"Theory", "svg", NULL, NULL, TEXT, 0, 0, "FILE", NULL,
         "draw a picture: figures 2 to 4 (theory, needs gnuplot), the lanes of a run (trace)",
         SO_CMD_THEORY | SO_CMD_TRACE},

    [SO_OPT_CHECK] = {"Fetching", "check", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                      "compare fetched files with their SHA-256; fetches nothing", SO_CMD_PULL},
    [SO_OPT_FORCE] = {"Fetching", "force", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                      "fetch the model again and replace the file", SO_CMD_PULL},

    [SO_OPT_JSON] = {"General", "json", NULL, NULL, FLAG, 0, 0, NULL, NULL,
                     "print JSON and nothing else on standard output", SO_CMD_ALL},
    [SO_OPT_VERBOSE] = {"General", "verbose", "v", NULL, FLAG, 0, 0, NULL, NULL,
                        "say more on standard error; twice: debug", SO_CMD_ALL},
    [SO_OPT_NO_COLOR] = {"General", "no-color", NULL, "no-colour", FLAG, 0, 0, NULL, NULL,
                         "no colour (also: NO_COLOR in the environment)", SO_CMD_ALL},
    [SO_OPT_HELP] = {"General", "help", "h", NULL, FLAG, 0, 0, NULL, NULL, "show this help",
                     SO_CMD_ALL},
};

/* --- messages --- */

static int edit_distance(const char *a, const char *b) {
    enum { MAX = 40 };
    int la = (int)strlen(a), lb = (int)strlen(b), row[MAX + 1];
    if (la > MAX || lb > MAX)
        return MAX;
    for (int j = 0; j <= lb; j++)
        row[j] = j;
    for (int i = 1; i <= la; i++) {
        int diag = row[0];
        row[0] = i;
        for (int j = 1; j <= lb; j++) {
            int sub = diag + (a[i - 1] != b[j - 1]);
            diag = row[j];
            row[j] = SO_MIN(sub, SO_MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[lb];
}

const char *so_near_miss(const char *word, const char *const *candidates, int n) {
    const char *best = NULL;
    int best_d = 3; /* two typing errors */
    for (int i = 0; i < n; i++) {
        int d = edit_distance(word, candidates[i]);
        if (strlen(word) >= 3 && strncmp(word, candidates[i], strlen(word)) == 0)
            d = SO_MIN(d, 1); /* an abbreviation */
        if (d < best_d && d < (int)strlen(candidates[i])) {
            best_d = d;
            best = candidates[i];
        }
    }
    return best;
}

int so_args_bad(const so_args *a, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "sooth %s: ", a->cmd->name);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n`sooth help %s` shows the options.\n", a->cmd->name);
    va_end(ap);
    return 2;
}

int so_args_fail(const so_args *a, const so_err *err) {
    fprintf(stderr, "sooth %s: %s\n", a->cmd->name, err->msg);
    return 1;
}

/* --- looking up --- */

static bool alias_matches(const char *aliases, so_str name) {
    while (aliases && *aliases) {
        size_t len = strcspn(aliases, " ");
        if (so_str_eq((so_str){aliases, len}, name))
            return true;
        aliases += len + (aliases[len] == ' ');
    }
    return false;
}

/* The row of "--name" or "-name" (without its value), or −1. */
static int find_row(so_str flag) {
    bool is_long = so_str_starts(flag, SO_STR("--"));
    so_str name = {flag.ptr + (is_long ? 2 : 1), flag.len - (is_long ? 2 : 1)};
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        const opt_row *o = &table[i];
        if (is_long ? so_str_eq_c(name, o->name) || alias_matches(o->aliases, name)
                    : o->shrt && so_str_eq_c(name, o->shrt))
            return i;
    }
    return -1;
}

static bool bad_flag(so_args *a, so_str flag) {
    const char *names[SO_OPT_COUNT];
    int n = 0;
    char word[64];
    while (flag.len && *flag.ptr == '-')
        flag.ptr++, flag.len--;
    snprintf(word, sizeof word, "%.*s", SO_STR_ARG(flag));
    for (char *p = word; *p; p++)
        *p = *p == '_' ? '-' : (char)tolower((unsigned char)*p);
    for (int i = 0; i < SO_OPT_COUNT; i++)
        if (table[i].cmds & a->cmd->bit)
            names[n++] = table[i].name;
    const char *near = so_near_miss(word, names, n);
    a->status = near ? so_args_bad(a, "unknown option '%s%.*s'; did you mean --%s?",
                                   flag.len == 1 ? "-" : "--", SO_STR_ARG(flag), near)
                     : so_args_bad(a, "unknown option '%s%.*s'", flag.len == 1 ? "-" : "--",
                                   SO_STR_ARG(flag));
    return false;
}

static bool wrong_command(so_args *a, const opt_row *o) {
    so_buf who = {0};
    for (int i = 0; so_command_at(i); i++)
        if (so_command_at(i)->bit & o->cmds)
            so_buf_printf(&who, "%s%s", who.len ? ", " : "", so_command_at(i)->name);
    a->status = so_args_bad(a, "--%s is no option of this command (it belongs to: %s)", o->name,
                            who.len ? who.data : "none");
    so_buf_free(&who);
    return false;
}

/* --- values --- */

static bool bad_value(so_args *a, const opt_row *o, const char *text) {
    const char *kind = o->type == INT ? "a whole number" : "a number";
    if (o->type == CHOICE || o->type == OPTIONAL)
        a->status = so_args_bad(a, "--%s '%.80s': must be one of %s", o->name, text, o->value);
    else if (o->type == SEED)
        a->status = so_args_bad(a,
                                "--%s '%.80s': must be a whole number from 0 to %lld, or -1 for "
                                "a random one",
                                o->name, text, (long long)INT64_MAX);
    else
        a->status = so_args_bad(a, "--%s '%.80s': must be %s from %g to %.16g", o->name, text, kind,
                                o->min, o->max);
    return false;
}

static bool is_choice(const char *choices, const char *text) {
    size_t len = strlen(text);
    for (const char *c = choices; *c;) {
        size_t n = strcspn(c, "|");
        if (n == len && strncasecmp(c, text, n) == 0)
            return true;
        c += n + (c[n] == '|');
    }
    return false;
}

static bool starts_number(const char *text) {
    const char *p = text + (*text == '-' || *text == '+');
    return isdigit((unsigned char)*p) || (*p == '.' && isdigit((unsigned char)p[1]));
}

static bool parse_value(so_args *a, int id, const char *text) {
    const opt_row *o = &table[id];
    char *end = NULL;
    errno = 0;
    switch (o->type) {
    case OPTIONAL:
        if (text && !is_choice(o->value, text))
            return bad_value(a, o, text);
        break;
    case FLAG:
    case TEXT:
    case LIST:
        break;
    case CHOICE:
        if (!is_choice(o->value, text))
            return bad_value(a, o, text);
        break;
    case INT:
        a->val[id].i = strtoll(text, &end, 10);
        if (!starts_number(text) || *end || errno || (double)a->val[id].i < o->min ||
            (double)a->val[id].i > o->max)
            return bad_value(a, o, text);
        break;
    case FLOAT:
        a->val[id].f = strtod(text, &end);
        if (!starts_number(text) || *end || !isfinite(a->val[id].f) || a->val[id].f < o->min ||
            a->val[id].f > o->max)
            return bad_value(a, o, text);
        break;
    case SEED: /* −1 counts as not given */
        a->val[id].i = strtoll(text, &end, 10);
        if (!starts_number(text) || *end || errno || a->val[id].i < -1)
            return bad_value(a, o, text);
        break;
    }
    return true;
}

static void take(so_args *a, int id, const char *text) {
    int n = ++a->val[id].n_given;
    a->val[id].text = text;
    if (table[id].type == LIST) {
        a->val[id].items = so_realloc(a->val[id].items, (size_t)n * sizeof *a->val[id].items);
        a->val[id].items[n - 1] = text;
    }
    if (table[id].type == SEED && a->val[id].i == -1)
        a->val[id].n_given = 0;
}

/* One option at argv[*i]; moves *i onto its value where that is an argument of its own. */
static bool parse_option(so_args *a, int argc, char **argv, int *i) {
    const char *arg = argv[*i], *eq = strchr(arg, '=');
    so_str flag = {arg, eq ? (size_t)(eq - arg) : strlen(arg)};
    int id = find_row(flag);
    if (id < 0)
        return bad_flag(a, flag);
    const opt_row *o = &table[id];
    if (!(o->cmds & a->cmd->bit))
        return wrong_command(a, o);
    const char *text = eq ? eq + 1 : NULL;
    if (o->type == FLAG && text) {
        a->status = so_args_bad(a, "--%s takes no value, got '%.80s'", o->name, text);
        return false;
    }
    if (o->type > OPTIONAL && !text) {
        if (*i + 1 >= argc) {
            a->status = so_args_bad(a, "--%s needs a value (%s)", o->name, o->value);
            return false;
        }
        text = argv[++*i];
    }
    if (!parse_value(a, id, text))
        return false;
    take(a, id, text);
    return true;
}

static bool check_positionals(so_args *a) {
    if (a->n_pos > a->cmd->max_pos) {
        a->status = so_args_bad(a, "unexpected argument '%.80s'", a->pos[a->cmd->max_pos]);
        return false;
    }
    if (a->n_pos < a->cmd->min_pos) {
        a->status = so_args_bad(a, "too few arguments; usage: sooth %s %.*s", a->cmd->name,
                                (int)strcspn(a->cmd->usage, "\n"), a->cmd->usage);
        return false;
    }
    return true;
}

bool so_args_parse(so_args *a, int cmd_bit, int argc, char **argv) {
    *a = (so_args){.cmd = so_command_by_bit(cmd_bit), .pos = SO_NEW_N(const char *, argc)};
    SO_ASSERT(a->cmd != NULL);
    bool ok = true, only_args = false;
    for (int i = 1; i < argc && ok; i++) {
        if (!only_args && strcmp(argv[i], "--") == 0)
            only_args = true;
        else if (!only_args && argv[i][0] == '-' && argv[i][1] != '\0')
            ok = parse_option(a, argc, argv, &i);
        else
            a->pos[a->n_pos++] = argv[i];
    }
    if (ok && a->val[SO_OPT_HELP].n_given) {
        so_help_command(a->cmd, so_args_color(a, STDOUT_FILENO));
        a->status = 0;
        ok = false;
    }
    ok = ok && check_positionals(a);
    if (ok && a->val[SO_OPT_VERBOSE].n_given)
        so_log_set_level(a->val[SO_OPT_VERBOSE].n_given > 1 ? SO_LOG_DEBUG : SO_LOG_INFO);
    if (!ok)
        so_args_free(a);
    return ok;
}

void so_args_free(so_args *a) {
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        free(a->val[i].items);
        a->val[i].items = NULL;
    }
    free(a->pos);
    a->pos = NULL;
}

bool so_args_has(const so_args *a, so_opt id) { return a->val[id].n_given > 0; }

const char *so_args_str(const so_args *a, so_opt id, const char *fallback) {
    return so_args_has(a, id) ? a->val[id].text : fallback;
}

int64_t so_args_int(const so_args *a, so_opt id, int64_t fallback) {
    return so_args_has(a, id) ? a->val[id].i : fallback;
}

double so_args_float(const so_args *a, so_opt id, double fallback) {
    return so_args_has(a, id) ? a->val[id].f : fallback;
}

/* --- help --- */

enum { HELP_COLUMN = 30, HELP_WIDTH = 100 };

/* Words of `text` from column HELP_COLUMN on, wrapped. */
static void print_wrapped(const char *text, int column) {
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (column + len + 1 > HELP_WIDTH) {
            printf("\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        printf(" %.*s", len, text);
        column += len + 1;
        text += len + (text[len] == ' ');
    }
    putchar('\n');
}

static void print_option(const opt_row *o) {
    so_buf left = {0}, right = {0};
    if (o->shrt)
        so_buf_printf(&left, "  -%s, --%s", o->shrt, o->name);
    else
        so_buf_printf(&left, "      --%s", o->name);
    if (o->value)
        so_buf_printf(&left, o->type == OPTIONAL ? "[=%s]" : " %s", o->value);
    so_buf_append_c(&right, o->help);
    if (o->deflt)
        so_buf_printf(&right, " (default: %s)", o->deflt);
    printf("%-*s", HELP_COLUMN, left.data);
    if (left.len >= HELP_COLUMN)
        printf("\n%*s", HELP_COLUMN, "");
    print_wrapped(right.data, HELP_COLUMN);
    so_buf_free(&left);
    so_buf_free(&right);
}

bool so_args_color(const so_args *a, int fd) {
    return isatty(fd) == 1 && !so_env_no_color() && !(a && so_args_has(a, SO_OPT_NO_COLOR));
}

void so_help_command(const so_command *cmd, bool color) {
    for (const char *u = cmd->usage, *lead = "Usage:"; *u; lead = "      ") {
        size_t len = strcspn(u, "\n");
        printf("%s sooth %s %.*s\n", lead, cmd->name, (int)len, u);
        u += len + (u[len] == '\n');
    }
    printf("\n%c%s.\n", toupper((unsigned char)cmd->summary[0]), cmd->summary + 1);
    const char *group = "";
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        const opt_row *o = &table[i];
        if (!(o->cmds & cmd->bit))
            continue;
        if (strcmp(group, o->group) != 0)
            printf("\n%s%s:%s\n", color ? "\033[1m" : "", o->group, color ? "\033[0m" : "");
        group = o->group;
        print_option(o);
    }
}
