/* A job: one HTTP request that the engine answers, with one choice for each of its answers.
 *
 *        HTTP thread                               engine thread
 *   parse, encode, create ──── submit ────▶  one so_request per choice
 *   sleep (connection suspended) ◀─ wake ──  tokens, rounds, the end are appended to choices
 *   read what is new, format, send
 *
 * Everything that both sides touch is behind `lock`; the rest belongs to the side named. What a
 * choice holds is bounded by its max_tokens, so that a client that never reads costs memory it was
 * granted and no more. A job lives until both sides have released it; the last one hands it to
 * `on_end`, for the log. */
#ifndef SO_SERVER_JOB_H
#define SO_SERVER_JOB_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/figures.h"
#include "server/api.h"

typedef struct so_job so_job;
typedef struct so_worker so_worker;

typedef struct so_out_token {
    int32_t id;
    uint32_t text_end; /* in the choice's text, as far as it was certain with this token */
    uint32_t round;
    uint8_t origin; /* so_origin */
} so_out_token;

/* What a pass was given and what stood, for those who want to see it. */
typedef struct so_out_node {
    int32_t token;
    int16_t parent, depth;
    bool accepted, tested;
} so_out_node;

typedef struct so_out_round {
    so_plan plan;
    double draft_ms, pass_ms;
    int n_nodes; /* the root and all guesses */
    so_out_node nodes[];
} so_out_round;

typedef struct so_choice {
    so_job *job;
    int index, prompt;
    so_request *req; /* engine thread */

    /* behind the job's lock */
    so_buf text;
    so_out_token *tokens;
    int n_tokens, cap_tokens;
    so_logprob *logprobs; /* [n_tokens][n_each] */
    int n_each;
    so_logprob *scores; /* of the prompt's tokens from the second on; in the first choice of each
                           prompt, where `echo` and `logprobs` meet */
    bool scored;
    so_out_round **rounds; /* only where they are wanted; those already sent are NULL */
    int n_rounds, cap_rounds;
    /* What a reader may see: steps are shown whole. */
    int ready_tokens, ready_rounds;
    size_t ready_text;
    bool ready_end;
    so_finish finish;
    so_err err;
    so_request_stats stats; /* once finished */
    so_spec_label who;
    bool has_nonce;
    uint64_t nonce;
    int prediction_drafted, prediction_accepted;
    uint64_t predicted_path; /* of the last round: which guesses of its path, first one first, were
                                predicted and are not yet told as tokens */
    int64_t t_first_ns, t_last_ns; /* 0: no token yet */

    /* engine thread: what the metrics know of */
    int n_counted;
    int64_t t_counted_ns;
    so_request_stats counted; /* as they were after the step before */

    /* HTTP thread: how much of it was sent */
    int tokens_sent, rounds_sent;
    size_t text_sent;
    size_t echo_chars; /* of the prompt, where its logprobs are shown */
    bool began, ended;
} so_choice;

typedef enum so_job_state {
    SO_JOB_WAITING,  /* for the engine to look at it */
    SO_JOB_ACCEPTED, /* checked, waiting for its turn or running */
    SO_JOB_DONE,     /* every choice has finished, or it was refused: see err */
} so_job_state;

struct so_job {
    so_job *next; /* worker's lists */
    pthread_mutex_t lock;
    int refs;
    so_job_state state;
    so_api_error err;       /* status 0: none */
    _Atomic bool cancelled; /* by whoever has lost interest */

    /* Whom to wake, and whether they sleep. */
    bool asleep;
    void (*wake)(void *user);
    void *wake_user;

    /* fixed at creation */
    so_api_request rq;
    so_tokens *prompts; /* [rq.n_prompts] */
    so_tokens expected;
    so_buf spec_text;
    so_spec_opts spec;
    bool spec_is_default; /* nobody asked for it: it may be left out */
    uint64_t seed;
    char id[48];
    int64_t created_s, t_created_ns;
    so_choice *choices;
    int n_choices;

    /* engine thread */
    so_worker *worker;
    int n_done;
    bool dirty; /* something to wake for */
    int64_t t_accepted_ns, t_done_ns;

    /* HTTP thread */
    so_buf head; /* of the chunks of a stream */
    so_buf out;  /* formatted, not yet handed over */
    size_t out_at;
    bool out_done;

    /* for the log */
    char client[64];
    const char *path; /* the route's */
    int status;       /* of HTTP; 499: the client went away */
    void (*on_end)(void *user, so_job *job);
    void *on_end_user;
};

/* Takes over *rq. */
so_job *so_job_create(so_api_request *rq);
void so_job_free(so_job *job);
void so_job_acquire(so_job *job);
void so_job_release(so_job *job); /* the last one calls on_end, which frees */

/* Whether the answer shows logprobs of the prompt; and who has those of c's. */
bool so_job_scores(const so_job *job);
const so_choice *so_choice_scorer(const so_choice *c);

/* Engine thread, under the lock. */
void so_choice_add_scores(so_choice *c, const so_request *req);
void so_choice_add_token(so_choice *c, const so_event *ev, int64_t now_ns);
void so_choice_add_round(so_choice *c, const so_round *round);
/* The request has ended, and stats say how much of its last round counts. */
void so_choice_trim_round(so_choice *c);
/* Engine thread, not under the lock: shows what there is and wakes the HTTP side if it sleeps.
 * step: the one that made it; done: every choice has finished. */
void so_job_notify(so_job *job, const so_step_info *step, bool done);

/* Totals of all choices; under the lock, or once done. Prompts count once for each prompt. */
typedef struct so_job_totals {
    so_request_stats stats;
    so_spec_label who;
    int prompt_tokens, completion_tokens, cached_tokens;
    int prediction_accepted, prediction_rejected;
    double ttft_ms; /* from arrival to the first token of any choice; negative: none */
} so_job_totals;
so_job_totals so_job_total(const so_job *job);

#endif
