/* Mutants: deliberate faults that `sooth prove` and the tests must detect.
 *
 * They exist only if SO_MUTANTS is defined, that is in the test program sooth-mutants (make
 * mutants). There SOOTH_DEBUG=mutant=NAME enables one fault and prints a line on stderr. In every
 * other program SO_MUTANT(NAME) is the constant false and the compiler removes the faulty code.
 *
 *     if (SO_MUTANT(ACCEPT_ALL))
 *         accept_all(r);
 *
 * The Makefile compiles a second time only the files that contain "SO_MUTANT", so no type may
 * depend on SO_MUTANTS. To add a fault, add a line here and an `if` where it takes effect. */
#ifndef SO_BASE_MUTANT_H
#define SO_BASE_MUTANT_H

#include <stdbool.h>

#ifdef SO_MUTANTS

#define SO_MUTANT_LIST(X)                                                                          \
    X(ACCEPT_ALL, accept_all)         /* every guess is accepted */                                \
    X(KEEP_ROW, keep_row)             /* the cache keeps a rejected guess, not the last token */   \
    X(MOVE_TAIL, move_tail)           /* a guess is verified with the logits row before its own */ \
    X(CONSTANT_SEED, constant_seed)   /* `reject`: random numbers ignore the seed */               \
    X(DROP_CHOICE, drop_choice)       /* `reject`: random numbers ignore the choice */             \
    X(DROP_POSITION, drop_position)   /* `reject`: random numbers ignore the position */           \
    X(TOKEN_POSITION, token_position) /* plain sampling ignores the position */                    \
    X(REUSE_DRAFT, reuse_draft)       /* the test of a guess reuses the number that sampled it */  \
    X(REUSE_ACCEPT, reuse_accept)     /* the residual is sampled with the failed test's number */  \
    X(ASYNC_BETTER, async_better)     /* `async`: the likelier of two sampled guesses is kept */   \
    X(ASYNC_LATE, async_late)         /* `async`: an unlikely guess counts as late */              \
    X(ASYNC_OTHER_ROUND, async_other_round) /* `async`: a draft of another text is served */

#define SO_MUTANT_ENUM(id, name) SO_MUTANT_##id,
typedef enum so_mutant { SO_MUTANT_NONE, SO_MUTANT_LIST(SO_MUTANT_ENUM) SO_MUTANT_END } so_mutant;

/* The mutant named in the environment, read at the first call. Any thread. */
so_mutant so_mutant_active(void);
#define SO_MUTANT(id) (so_mutant_active() == SO_MUTANT_##id)

#else
#define SO_MUTANT(id) false
#endif
#endif
