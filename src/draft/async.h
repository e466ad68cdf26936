/* The drafter `async(X)`: speculative speculative decoding. While the target verifies a round, X
 * drafts for the likeliest ends of that round on cores of its own. If one of them occurs, the next
 * round starts at once with the draft that is ready.
 *
 *   engine thread                              async thread
 *   ─────────────                              ────────────
 *   guesses of round r are chosen
 *   dispatch: the job, as values    ───────►   begin: the tree's rows, candidates after each node
 *   target's pass over round r                 choose the outcomes (async_choose.c)
 *        …                                     level 1 of all outcomes, published
 *   verify: accepted length, token             level 2, published
 *   seal                            ───────►   stops before the next level
 *   propose for round r+1: looks up (request, round, accepted path, next token)
 *     hit    the published levels of that outcome's draft
 *     miss   no guesses; the next alternative of the spec drafts
 *
 * The engine does not wait for the async thread, unless wait=N asks for N levels of every draft, and
 * then not for a thread that has stopped. What was not published when the engine sealed the batch
 * does not exist. So slow drafting costs guesses and nothing else, and the length of a draft adapts
 * to the time that the target takes.
 *
 * Whether it pays to draft ahead at all is measured (plan/compare.h). That is decided before a dispatch,
 * and what was dispatched is looked up, to a depth that was decided then (so_plan_ahead_depth).
 *
 * `async(X)` becomes two alternatives: the cache, a drafter that costs the engine no time, and X
 * itself, which drafts in the engine's time if the planner expects that to pay (`fallback=`).
 *
 * Exactness. Greedy decoding and `match` accept only the target's own tokens, so any guesses are
 * exact (verify/match.c). For `reject` and `lenient` the rule of sight (drafter.h) must hold:
 * whether a guess is tested must not depend on its sampled value, nor on numbers that test guesses.
 *
 *   1. One draft per outcome. Outcomes of a job are different, and a job is of one round of one
 *      request. So for the text that comes out of the round there is at most one draft, and nothing
 *      to choose by value.
 *   2. Which outcomes are drafted depends on the text, on the tree of the round before, on whole
 *      rows, on earlier verdicts and on measured times. All of these exist before a guess of the
 *      coming round is sampled. X gets neither the verifier's numbers nor the noise of the target's
 *      own sample: in `reject` candidates are the likeliest tokens of rows.
 *   3. Readiness. The guess at level k is sampled from a q row. The async thread stores the rows of
 *      level k, then publishes the level, and only then samples from them. The engine tests the
 *      guess if the level was published when it sealed the batch. Which of the two came first is
 *      settled, at the latest, when the level is published, and nothing has been computed from the
 *      number that samples the guess by then; so whatever their times depend on, they do not depend
 *      on that number. They may depend on guesses of earlier levels, which the rule allows. The
 *      engine samples from the row itself, with the same keys, so nothing that happens to the async
 *      thread afterwards takes a guess back.
 *   4. Numbers. Guesses of round r+1 are keyed by that round, the drafter's index, the position and
 *      the outcome's number. With the outcome's number, drafts of different outcomes have
 *      independent numbers. Without it a level of one outcome could be late because of a number
 *      that an earlier level of another outcome, at the same position, had used already. X drafts
 *      under an index of its own when it drafts in the engine's time.
 *   5. Guesses of drafters without a model are deterministic here (points), and are exact however
 *      they were chosen (verify/reject.c, step 3).
 *   6. What comes between the dispatch and the lookup, a request that is admitted for example, must not
 *      decide whether a sampled guess is tested: the async thread has computed with the guess by then,
 *      which takes time and memory bandwidth, so the moment at which a pass ends could depend on it,
 *      and with it what has come by then. So method and depth are those of the dispatch (plan/plan.h),
 *      and a request gets sampled drafts only if the next step is sure to have room for all of them,
 *      with every place taken and whatever is submitted meanwhile: as many as its part of a full pass,
 *      if the cache has a whole context for each place, and if nobody waits who may preempt it. It is
 *      not preempted before they have been looked up (engine/schedule.c, promises). What remains, the
 *      request's own text and the guesses of drafters before it, the rule allows. A request that is
 *      cancelled ends; one whose device fails begins anew, which no text influences. Points may be
 *      dropped at any time (5): no number was drawn for them.
 *   7. Readiness depends on the clock, so guesses are no function of the request alone:
 *      request_only is false, and `reject` has a random nonce (engine/nonce.c). The text of a seed
 *      is repeatable with `match` only.
 *
 * Hidden states of the target. While it verifies a round, those of the round do not exist yet: X gets
 * copies of the states of the text up to the last finished round, and drafts without the others. In
 * the engine's time it has them all. `cached` and `sync` are two drafters to the planner, so each has
 * the acceptance of its own drafts.
 *
 * Ownership. X, its caches and the states it opened belong to whoever holds the host's drafters
 * (so_async_lock). The async thread holds them for one pass at a time; the engine takes them to let X
 * draft in its own time, after sealing the batch. A host has one thread and serves all async drafters
 * of an engine, one batch at a time, because their models share a backend; drafters with a draft
 * worker (remote.h) have a host of their own. Each drafter has two batches, allocated at creation. If
 * both are busy, a round is not dispatched.
 *
 * Functions: engine thread. */
#ifndef SO_DRAFT_ASYNC_H
#define SO_DRAFT_ASYNC_H

#include "draft/drafter.h"

typedef struct so_async_host so_async_host;

enum { SO_ASYNC_RANKS = 8 };

/* For tests: what goes wrong in the async thread. Rates are chances per event, drawn from `seed`. */
typedef struct so_async_faults {
    uint64_t seed;
    double delay_rate, delay_ms; /* before a level is computed or published */
    double abandon_rate;         /* the batch is given up half way */
    double nonsense_rate;        /* a batch has random tokens, also outside the vocabulary */
    double stop_rate;            /* the thread does nothing for stop_ms, with a batch in hand */
    double stop_ms;
    int64_t *happened; /* counts faults; read it after the host is freed. NULL: not wanted */
} so_async_faults;

/* Starts the async thread. faults: NULL, or copied. */
int so_async_host_create(const so_async_faults *faults, so_async_host **out, so_err *err);
void so_async_host_free(so_async_host *h); /* NULL is fine; all its drafters must have been freed */
/* Exclusive use of what the drafters of the host run on. Waits for one pass at most. Calls nest. */
void so_async_lock(so_async_host *h);
void so_async_unlock(so_async_host *h);

typedef struct so_async_opts {
    so_drafter *inner; /* X; owned on success */
    int n_vocab, n_parallel;
    int d_hidden; /* of the target, if X reads its hidden states */
    int fan_out;  /* outcomes per round and request; 0: chosen in each round */
    int wait;     /* levels for which the engine waits before it looks up; 0: it never waits */
    bool sync;    /* also create the drafter that lets X draft in the engine's time */
    bool remote;  /* X is a draft worker (remote.h), which cannot do that */
} so_async_opts;
/* *cached: the drafter that serves finished drafts. *sync: X in the engine's time; NULL if o->sync is
 * false. Both must be members of one group, `cached` before `sync`, so that a request is opened in
 * both. */
void so_async_create(so_async_host *h, const so_async_opts *o, so_drafter **cached,
                     so_drafter **sync);
/* The numbers of `cached` in proposals, already set, and of X and `sync`. */
void so_async_set_index(so_drafter *cached, so_drafter *sync, int inner);
bool so_async_is(const so_drafter *d); /* the drafter `cached` */

/* What happened in the rounds of one request. */
typedef struct so_async_counts {
    int rounds;  /* rounds for the ends of which outcomes were drafted */
    int hits;    /* their end was among the outcomes, and at least one level was ready */
    int late;    /* it was among the outcomes, but no level was ready */
    int absent;  /* it was not among them */
    int skipped; /* rounds that were not dispatched, or left out, or whose outcomes were not ready */
    int off;     /* rounds that the planner did not have drafted ahead; none of the others */
    int outcomes;        /* outcomes drafted, all rounds */
    int drafted, served; /* guesses drafted for all outcomes; guesses given to the engine */
    int by_rank
        [SO_ASYNC_RANKS]; /* hits by the rank of their outcome, likeliest first; the last: all others */
    /* Drafting time of the async thread or the draft worker; that of a shared batch is divided by
     * its requests. */
    double worker_ms;
} so_async_counts;
void so_async_counts_add(so_async_counts *to, const so_async_counts *n);
void so_async_get_counts(const so_drafter *cached, const void *state, so_async_counts *out);
/* Of all requests since the host was created. */
const so_async_counts *so_async_totals(const so_async_host *h);

#endif
