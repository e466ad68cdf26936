/* Faults put in on purpose, to show that `sooth prove` and the tests notice them.
 *
 * They exist only where SO_MUTANTS is defined: in the test program sooth-mutants (make mutants),
 * where SOOTH_DEBUG=mutant=NAME switches one on and a line on stderr says so. Everywhere else
 * SO_MUTANT(NAME) is the constant false and the compiler removes what depends on it.
 *
 *     if (SO_MUTANT(ACCEPT_ALL))
 *         accept_all(r);
 *
 * The Makefile compiles a second time the files that contain "SO_MUTANT", and only those: no type
 * may depend on SO_MUTANTS. A new fault is one line here and one hook. */
#ifndef SO_BASE_MUTANT_H
#define SO_BASE_MUTANT_H

#include <stdbool.h>

#ifdef SO_MUTANTS

#define SO_MUTANT_LIST(X)                                                                          \
    X(ACCEPT_ALL, accept_all)         /* every guess stands */                                     \
    X(KEEP_ROW, keep_row)             /* the cache keeps a rejected guess, not the last token */   \
    X(MOVE_TAIL, move_tail)           /* a guess is checked against the row before its own */      \
    X(CONSTANT_SEED, constant_seed)   /* `reject` tests and draws ignore the seed … */           \
    X(DROP_CHOICE, drop_choice)       /* … the choice … */                                     \
    X(DROP_POSITION, drop_position)   /* … the position */                                       \
    X(TOKEN_POSITION, token_position) /* plain draws ignore the position */                        \
    X(REUSE_DRAFT, reuse_draft)       /* a drafted token is tested with the number that drew it */ \
    X(REUSE_ACCEPT, reuse_accept)     /* a residual is drawn with the number of the failed test */

#define SO_MUTANT_ENUM(id, name) SO_MUTANT_##id,
typedef enum so_mutant { SO_MUTANT_NONE, SO_MUTANT_LIST(SO_MUTANT_ENUM) SO_MUTANT_END } so_mutant;

/* The one named in the environment, read at the first call. Any thread. */
so_mutant so_mutant_active(void);
#define SO_MUTANT(id) (so_mutant_active() == SO_MUTANT_##id)

#else
#define SO_MUTANT(id) false
#endif
#endif
