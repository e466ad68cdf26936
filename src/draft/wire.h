/* Messages between an engine and a draft worker, a process that drafts ahead for it (remote.h).
 * docs/formats.md has the layout byte by byte.
 *
 *   engine                                   worker
 *   HELLO    vocabulary, limits      ───►
 *                                    ◄───    WELCOME or REFUSED
 *   OPEN     a request               ───►
 *   TEXT     tokens it lacks         ───►
 *   JOB      the trees of a round    ───►
 *                                    ◄───    ALIVE     while it reads a long text
 *                                    ◄───    OUTCOMES  which ends of the round it drafts for
 *                                    ◄───    LEVEL     one guess for each of them; several
 *   STOP     the round is over       ───►
 *                                    ◄───    DONE
 *   CLOSE    the request has ended   ───►
 *   BYE      the engine ends         ───►
 *
 * A session begins with HELLO, which chooses its number at random. Messages of a session are
 * numbered from 0 in each direction. Reading checks lengths, counts, indices and ranges, so that the
 * receiver only has to compare a message with its own state: sessions, requests, the vocabulary.
 * Nothing is allocated. Pure functions; any thread. */
#ifndef SO_DRAFT_WIRE_H
#define SO_DRAFT_WIRE_H

#include "draft/async_impl.h"

enum {
    SO_WIRE_VERSION = 1,
    SO_WIRE_HEAD = 28,       /* bytes before the body */
    SO_WIRE_BYTES = 2 << 20, /* longest message */
    SO_WIRE_JOBS = 128,      /* most requests in a round */
    SO_WIRE_TOKENS = 65536,  /* most tokens of a TEXT, and of a source */
    SO_WIRE_BIASES = 65536,
    SO_WIRE_REASON = 256, /* bytes of the text of REFUSED, with its end */
    SO_WIRE_RATES = sizeof(so_async_estimates) / sizeof(so_async_rate),
};

typedef enum so_wire_type {
    SO_WIRE_HELLO = 1,
    SO_WIRE_OPEN,
    SO_WIRE_TEXT,
    SO_WIRE_JOB,
    SO_WIRE_STOP,
    SO_WIRE_CLOSE,
    SO_WIRE_BYE,
    SO_WIRE_WELCOME = 16,
    SO_WIRE_REFUSED,
    SO_WIRE_ALIVE,
    SO_WIRE_OUTCOMES,
    SO_WIRE_LEVEL,
    SO_WIRE_DONE,
} so_wire_type;

/* Why a worker refuses. After LOST and FULL the engine greets again. */
typedef enum so_wire_refusal {
    SO_WIRE_LOST = 1, /* the session is not known, or one of its messages is missing */
    SO_WIRE_FULL,     /* it serves as many engines as it can */
    SO_WIRE_MISFIT,   /* another vocabulary, or another draft than the engine asks for */
    SO_WIRE_OTHER,    /* another version of sooth */
} so_wire_refusal;

typedef struct so_wire_hello {
    uint64_t vocab_hash; /* so_draft_vocab_hash of the target's tokenizer */
    uint64_t draft_id;   /* the draft that the engine wants (so_registry_id); 0: any */
    uint32_t limits;     /* so_wire_limits of the engine */
    int n_vocab;         /* of the target */
    int d_model;         /* of the target, for drafts that can read its hidden states */
    int n_ctx, n_parallel, max_draft;
    bool encoder; /* the target has one */
} so_wire_hello;

typedef struct so_wire_welcome {
    uint64_t vocab_hash, draft_id; /* of the worker's draft */
    int n_ctx, n_parallel;         /* what it has room for */
} so_wire_welcome;

typedef struct so_wire_refused {
    so_wire_refusal why;
    char text[SO_WIRE_REASON];
} so_wire_refused;

typedef struct so_wire_open {
    uint32_t request; /* chosen by the engine, never used twice in a session */
    int max_tokens, n_prompt;
    so_sample_params sample; /* bias is NULL; the biases are in so_wire_msg */
} so_wire_open;

typedef struct so_wire_text {
    uint32_t request;
    int at; /* position of the first token */
} so_wire_text;

typedef struct so_wire_node {
    int32_t token; /* of the root: the last token of the text */
    int parent;    /* −1: the root */
    float confidence;
} so_wire_node;

/* One request's round that the target verifies. */
typedef struct so_wire_round {
    uint32_t request;
    int n_tokens, n_nodes;
    so_wire_node nodes[SO_TREE_MAX];
} so_wire_round;

typedef struct so_wire_job {
    uint32_t batch; /* number of the round, ascending in a session */
    int depth;      /* of drafts */
    int fan;        /* outcomes of each request; 0: the worker chooses */
    float left_ms;  /* until the round is over, as far as the engine knows */
    so_async_estimates estimates;
} so_wire_job;

/* What is drafted for one request: candidates after the first nodes of its tree, and outcomes. No
 * nodes: nothing is drafted for it. */
typedef struct so_wire_fan {
    int n_nodes;
    int n_candidates[SO_AHEAD_NODES];
    so_ahead_candidate candidates[SO_AHEAD_NODES][SO_AHEAD_CANDIDATES];
    int n_outcomes;
    struct {
        int node, candidate;
        float chance;
    } outcomes[SO_AHEAD_OUTCOMES];
} so_wire_fan;

/* A guess of each outcome of one request; token −1: this draft ended before. */
typedef struct so_wire_guesses {
    int n;
    struct {
        int32_t token;
        float confidence;
    } at[SO_AHEAD_OUTCOMES];
} so_wire_guesses;

/* One message; large, so it is allocated once and used again. Which members count depends on the
 * type. */
typedef struct so_wire_msg {
    so_wire_type type;
    uint64_t session;
    uint32_t number;
    so_wire_hello hello;
    so_wire_welcome welcome;
    so_wire_refused refused;
    so_wire_open open;
    so_wire_text text;
    so_wire_job job;
    uint32_t request; /* CLOSE */
    uint32_t batch;   /* STOP, OUTCOMES, LEVEL, DONE */
    uint32_t busy_us; /* OUTCOMES, LEVEL, DONE: time the worker has spent on this batch */
    int level;        /* LEVEL: from 1 */
    int n_tokens;     /* TEXT; OPEN: of the source */
    int32_t tokens[SO_WIRE_TOKENS];
    int n_biases; /* OPEN */
    so_bias biases[SO_WIRE_BIASES];
    int n_jobs; /* JOB, OUTCOMES, LEVEL: requests, in the same order in all three */
    so_wire_round rounds[SO_WIRE_JOBS];
    so_wire_fan fans[SO_WIRE_JOBS];
    so_wire_guesses guesses[SO_WIRE_JOBS];
} so_wire_msg;

/* A hash of the limits of drafting ahead that both sides must share (ahead.h). */
uint32_t so_wire_limits(void);
/* Bytes written, at most SO_WIRE_BYTES; 0: a field is out of its range, or the message too long.
 * Changes nothing in *m. */
size_t so_wire_write(so_wire_msg *m, void *out);
/* SO_EFORMAT: not a message, cut short, or a field out of range; SO_EUNSUPPORTED: of another
 * version. *m is undefined after an error. */
int so_wire_read(const void *bytes, size_t len, so_wire_msg *m, so_err *err);

#endif
