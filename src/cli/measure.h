/* `sooth theory --measure`: what the formulas take as given, measured, and what they say beside
 * what happens. Four files share this header:
 *
 *   measure.c        options, drafters, the order of things
 *   measure_text.c   the target's own text, and acceptance over it (the paper's Tables 3 and 5)
 *   measure_speed.c  time of passes, speed-up predicted and measured (Table 4)
 *   measure_print.c  tables and JSON
 *
 * Acceptance is measured by teacher forcing: the target reads its own text, many rows at a time,
 * and every drafter is asked for one guess at every position, told the true text so far. */
#ifndef SO_CLI_MEASURE_H
#define SO_CLI_MEASURE_H

#include "cli/load.h"
#include "cli/progress.h"
#include "cli/teacher.h"
#include "draft/spec.h"

enum { SO_MEASURE_WANT = SO_PASS_LOGITS | SO_PASS_HIDDEN }; /* of every pass */
enum {
    SO_MEASURE_DRAFTERS = 32,
    SO_MEASURE_TEMPS = 2,
    SO_MEASURE_LENIENCES = 4,
    SO_MEASURE_GAMMA = 16, /* the longest draft that is considered, unless --gamma says more */
    SO_MEASURE_WIDEST = SO_MAX_DRAFT + 1,
    SO_MEASURE_FILES = 8,    /* draft models named in specs */
    SO_MEASURE_BEHIND = 256, /* tokens behind which passes are timed */
    SO_MEASURE_ROUNDS = 64,  /* timed passes of one width that are kept */
};
extern const double so_measure_leniences[SO_MEASURE_LENIENCES]; /* 1, 0.5, 0.3, 0.1 */

/* A ratio of two totals over texts, Σa/Σn, with the standard error that texts give: the tokens of
 * one text are not independent, texts are. */
typedef struct so_ratio {
    double a, n, aa, an, nn;
    int k;
} so_ratio;
void so_ratio_add(so_ratio *r, double a, double n);
double so_ratio_value(const so_ratio *r); /* NaN where n is 0 */
double so_ratio_error(const so_ratio *r); /* NaN with fewer than two texts */

/* One text: a prompt and what the target said. Texts take turns in two halves: tables that are
 * counted from the texts of one half guess in the other. */
typedef struct so_measure_text {
    so_tokens ids;
    int n_prompt;
    uint64_t seed;
} so_measure_text;

/* One drafter at one temperature. */
typedef struct so_measure_result {
    so_ratio alpha;   /* Σ min(p,q) over positions with a guess; of a point p(x) */
    so_ratio match;   /* what `match` accepts there */
    so_ratio covered; /* positions with a guess, of all */
    so_ratio lenient[SO_MEASURE_LENIENCES];
    int64_t n_drawn; /* guesses that were drawn from a row; the others are points */
    double draft_ms; /* of one guess, median */
    /* measure_speed.c */
    int gamma;               /* guesses per round of `fixed`; 0: not measured yet */
    double ideal, predicted; /* with `match` and gamma: theorem 3.8, and with the measured t(n) */
    double lenient_speed[SO_MEASURE_LENIENCES]; /* predicted, with the measured t(n) … */
    int lenient_gamma[SO_MEASURE_LENIENCES];    /* … and the best gamma */
    so_ratio fixed, planned;                    /* plain time over speculative time */
    int64_t n_tokens;                           /* in each way */
    int64_t n_tested, n_accepted;               /* guesses, where gamma was fixed */
    int n_texts, n_different;
} so_measure_result;

typedef struct so_measure_drafter {
    char *name; /* the spec in its shortest form */
    so_spec spec;
    bool told;    /* guesses from the text itself (oracle, predict): right or wrong is all it has */
    bool counted; /* a unigram or bigram without a file */
    /* of the temperature at hand: */
    so_draft_set sets[2]; /* by the half a text is in; the second only where `counted` */
    so_corpus *corpus[2];
    double *times; /* [n_times] milliseconds of guesses */
    int n_times;
    so_measure_result results[SO_MEASURE_TEMPS];
} so_measure_drafter;

typedef struct so_measure {
    const so_args *a;
    so_bundle b, draft; /* draft.model NULL: none */
    so_engine_opts eo;  /* what the command line says of context, cache and batches */
    so_bundle files[SO_MEASURE_FILES];
    char *file_names[SO_MEASURE_FILES];
    int n_files;
    so_measure_drafter *drafters; /* [SO_MEASURE_DRAFTERS] */
    int n_drafters;
    so_tokens *prompts;
    int n_prompts;
    float temps[SO_MEASURE_TEMPS];
    int n_temps;
    int n_tokens; /* wanted at each temperature */
    int n_answer; /* most tokens of one text */
    int max_gamma, fixed_gamma;
    uint64_t seed;

    int temp; /* index of the temperature at hand */
    so_measure_text *texts;
    int n_texts;
    int64_t got_tokens[SO_MEASURE_TEMPS];
    int got_texts[SO_MEASURE_TEMPS];

    int n_behind;   /* tokens in the cache when passes are timed */
    double *rounds; /* [SO_MEASURE_WIDEST + 1][SO_MEASURE_ROUNDS] milliseconds by width */
    int n_rounds;
    double t_ms[SO_MEASURE_WIDEST + 1]; /* their medians */
    double sample_ms[SO_MEASURE_TEMPS]; /* of drawing one token of the target */

    so_teacher t;
    so_seq *timed; /* of t's cache: for timing passes behind n_behind tokens */
    so_progress bar;
    so_err err;
} so_measure;

/* The command. */
int so_theory_measure(const so_args *a);

/* Ctrl-C was pressed: finish the line, print what there is. */
bool so_measure_stopped(void);
/* Share of the whole work that is behind us, `part` of 0 … 1 through this temperature. */
void so_measure_progress(so_measure *m, double part);
so_sample_params so_measure_sampling(const so_measure *m, uint64_t seed);
/* Drafters for one half of the texts. */
int so_measure_build(so_measure *m, so_measure_drafter *d, int half, so_draft_set *out);

/* measure_text.c: texts of this temperature; acceptance of every drafter over them. Both return
 * early, with SO_OK, when stopped. */
int so_measure_write(so_measure *m);
int so_measure_accept(so_measure *m);
void so_measure_forget(so_measure *m); /* the texts */

/* measure_speed.c */
/* Times passes of every width n_rounds times more; t(n) is the median of all rounds. */
int so_measure_passes(so_measure *m, int n_rounds);
int so_measure_speed(so_measure *m, int drafter); /* at this temperature */
/* Predictions for everything that was raced, with the final t(n). */
void so_measure_foretell(so_measure *m);

/* measure_print.c */
void so_measure_print(const so_measure *m, bool complete);

#endif
