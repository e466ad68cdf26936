/* A job: one generation request between the HTTP thread and the engine thread. It has one choice
 * for each answer asked for.
 *
 *        HTTP thread                               engine thread
 *   parse, encode, create ──── submit ────▶  one so_request per choice
 *   connection sleeps     ◀──── wake ──────  appends tokens, rounds and the end to the choices
 *   formats and sends what is new
 *
 * Members used by both threads are guarded by `lock`; the others belong to the thread that their
 * section names. A choice holds at most max_tokens tokens, so a client that never reads costs a
 * bounded amount of memory. The HTTP thread, the engine thread and watch.c each hold a reference;
 * releasing the last one calls `on_end`, which has the job logged and freed. */
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
    uint32_t text_end; /* length of the choice's text after this token. Text held back, because it
                          may begin a stop string or ends inside a character, is counted at a
                          later token */
    uint32_t round;
    uint8_t origin; /* so_origin */
} so_out_token;

/* One node of a round's draft, for "sooth": {"rounds": true}. */
typedef struct so_out_node {
    int32_t token;
    int16_t parent, depth;
    bool accepted, tested;
    float chance; /* so_node.chance */
} so_out_node;

typedef struct so_out_round {
    so_plan plan;
    double draft_ms, pass_ms;
    int n_nodes; /* the root and the guesses */
    so_out_node nodes[];
} so_out_round;

typedef struct so_choice {
    so_job *job;
    int index, prompt;
    so_request *req; /* engine thread */

    /* guarded by the job's lock */
    so_buf text;
    so_out_token *tokens;
    int n_tokens, cap_tokens;
    so_logprob *logprobs; /* [n_tokens][n_each] */
    int n_each;
    so_logprob *scores; /* logprobs of the prompt's tokens from the second on; only with `echo` and
                           `logprobs`, and only in the first choice of each prompt */
    bool scored;
    so_out_round **rounds; /* only if the request asks for them; an entry is NULL once sent */
    int n_rounds, cap_rounds;
    /* What the HTTP thread may read: the state after the last whole step. */
    int ready_tokens, ready_rounds;
    size_t ready_text;
    bool ready_end;
    so_finish finish;
    double score; /* beam search, once finished */
    so_err err;
    so_request_stats stats; /* once finished */
    so_spec_label label;
    bool has_nonce;
    uint64_t nonce;
    int prediction_drafted, prediction_accepted;
    uint64_t predicted_path; /* the last round's accepted guesses that are not emitted yet: bit i is
                                set if the i-th of them came from the prediction */
    int64_t t_first_ns, t_last_ns; /* of the first and last token; 0: none yet */

    /* engine thread: what has been added to the metrics */
    int n_counted;
    bool counted_end;
    int64_t t_counted_ns;
    so_request_stats counted; /* the statistics after the previous step */

    /* HTTP thread: what has been formatted for sending */
    int tokens_sent, rounds_sent;
    size_t text_sent;
    size_t echo_chars; /* length of the echoed prompt in characters, if it has logprobs */
    bool began, ended;
} so_choice;

typedef enum so_job_state {
    SO_JOB_WAITING,  /* submitted, not yet checked by the engine */
    SO_JOB_ACCEPTED, /* queued or running */
    SO_JOB_DONE,     /* every choice has finished, or the engine refused the job: see err */
} so_job_state;

struct so_job {
    so_job *next; /* in a list of the worker or of watch.c */
    pthread_mutex_t lock;
    int refs;
    so_job_state state;
    so_api_error err;       /* status 0: none */
    _Atomic bool cancelled; /* set by any thread; the engine ends the job at its next step */

    /* wake(wake_user) is called under the lock, once for each time `asleep` was set. */
    bool asleep;
    void (*wake)(void *user);
    void *wake_user;

    /* constant after creation */
    so_api_request rq;
    so_tokens *prompts;   /* [rq.n_prompts] */
    so_tokens expected;   /* rq.prediction */
    so_tokens *bad_words; /* [n_bad_words] rq.bad_words, each in up to two forms (routes.c) */
    int n_bad_words;
    so_buf spec_text;
    so_spec_opts spec;
    bool spec_is_default; /* spec comes from the server's options: the worker may drop it if the
                             draft model's context is too short */
    uint64_t seed;
    char id[48];
    int64_t created_s, t_created_ns;
    so_choice *choices;
    int n_choices;

    /* engine thread */
    so_worker *worker;
    int n_done;
    bool dirty; /* has new data since the last so_job_notify */
    int64_t t_accepted_ns, t_done_ns;

    /* HTTP thread */
    so_buf head; /* what every event of the stream begins with */
    so_buf out;  /* formatted events, sent up to out_at */
    size_t out_at;
    bool out_done;

    /* for the log */
    char client[64];
    const char *path; /* of the endpoint */
    int status;       /* HTTP status; 499: the client disconnected */
    void (*on_end)(void *user, so_job *job);
    void *on_end_user;
};

/* Takes over the contents of *rq. */
so_job *so_job_create(so_api_request *rq);
void so_job_free(so_job *job);
void so_job_acquire(so_job *job);
void so_job_release(so_job *job); /* the last one calls on_end, or frees the job if that is NULL */

/* Whether the answer shows logprobs of the prompt. */
bool so_job_scores(const so_job *job);
/* Whether c has no request of its own: with beam search all choices of a prompt share one, which
 * belongs to the first. */
bool so_choice_shares(const so_choice *c);
/* The first choice with the same prompt as c: it holds the prompt's logprobs. */
const so_choice *so_choice_scorer(const so_choice *c);

/* Engine thread, under the lock: appends what the engine produced. */
void so_choice_add_scores(so_choice *c, const so_request *req);
void so_choice_add_token(so_choice *c, const so_event *ev, int64_t now_ns);
void so_choice_add_round(so_choice *c, const so_round *round);
/* The request has ended: fills the choices that share it (so_choice_shares) with the next best
 * hypotheses. */
void so_choice_add_hypotheses(so_choice *c, const so_request *req, int64_t now_ns);
/* The request has ended: in its last round, clears the marks (tested, accepted) of guesses that
 * come after the end of the answer. */
void so_choice_trim_round(so_choice *c);
/* Engine thread, not under the lock: makes the new data visible to the HTTP thread and wakes it if
 * it sleeps. step: the step that produced the data; done: every choice has finished. */
void so_job_notify(so_job *job, const so_step_info *step, bool done);

/* Sums over all choices. Under the lock, or once the job is done. Each prompt counts once, however
 * many choices it has. */
typedef struct so_job_totals {
    so_request_stats stats;
    so_spec_label label;
    int prompt_tokens, completion_tokens, cached_tokens;
    int prediction_accepted, prediction_rejected;
} so_job_totals;
so_job_totals so_job_total(const so_job *job);

#endif
