/* The engine's side of async(model,worker=ADDRESS): a drafter whose drafts come from another process,
 * on this host or elsewhere (remote_worker.h). It is the X of an async() and drafts ahead only.
 *
 *   engine thread            async thread                       draft worker
 *   dispatch  ───────────►   TEXT, JOB            ───────►      drafts for the likely ends
 *                            OUTCOMES, LEVEL …    ◄───────
 *   seal      ───────────►   STOP                 ───────►
 *   lookup
 *
 * The async thread (async_thread.c) waits for messages instead of running passes; it publishes what
 * arrives as it would publish a pass of its own. The engine never waits for the network.
 *
 * Exactness. Greedy decoding and `match` accept only the target's tokens. With `reject` the worker
 * makes points, too: the likeliest tokens of its rows, at temperature 0 (verify/reject.c, step 3:
 * exact however they were chosen, if no number that tests them took part). It is told neither seed
 * nor nonce then, so it cannot know such a number. Sampled guesses would have to be published before
 * they are sampled (async.h, step 3), which a network cannot guarantee: a message that was handed to
 * the socket is still on its way while the sender samples, on the same cores and over the same line,
 * so its arrival could depend on the sample. Besides, a q row is as long as the vocabulary. The price
 * is acceptance: a point is accepted with probability p(x) instead of Σ min(p, q).
 *
 * Failure. Whatever the worker does, it can only cost guesses. A worker that cannot be reached, does
 * not answer, has lost its session, or refuses, is left out of rounds and greeted again, at intervals
 * that double up to a limit. Each change of state is one line in the log. */
#ifndef SO_DRAFT_REMOTE_H
#define SO_DRAFT_REMOTE_H

#include "draft/async.h"
#include "token/tokenizer.h"

/* What an engine tells all its workers about itself. */
typedef struct so_remote_engine {
    const char *key_file;    /* NULL: none */
    const so_tokenizer *tok; /* of the target; NULL: it has none */
    int n_vocab, d_model, n_ctx, n_parallel, max_draft;
    bool encoder;
} so_remote_engine;

/* address: of the worker. draft_id: of the draft that the worker must have; 0: any. Does not wait for
 * the worker; fails if the address or the key is wrong, or ZeroMQ is not installed. */
int so_remote_create(const so_remote_engine *e, so_str address, uint64_t draft_id, so_drafter **out,
                     so_err *err);
bool so_remote_is(const so_drafter *d);
/* Ends the wait of the thread that runs a batch: it is sealed. Any thread. */
void so_remote_wake(so_drafter *d);

/* --- for async_thread.c --- */

struct so_async_core;
struct so_async_batch;
/* Runs a batch: has it drafted until it is sealed. */
void so_remote_run(struct so_async_core *c, struct so_async_batch *b);

#endif
