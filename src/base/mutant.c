/* Selects the active mutant from the environment (see mutant.h). An unknown name aborts: otherwise
 * a test with a misspelt name would run the correct program and report that its fault went
 * unnoticed. Linked only into sooth-mutants. */
#include "base/mutant.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"

#define NAME(id, name) #name,
static const char *const NAMES[] = {"none", SO_MUTANT_LIST(NAME)};

static so_mutant active;

static void read_name(void) {
    const char *name = so_env_mutant();
    if (!name || strcmp(name, NAMES[SO_MUTANT_NONE]) == 0)
        return;
    for (int i = 1; i < SO_MUTANT_END; i++)
        if (strcmp(name, NAMES[i]) == 0)
            active = (so_mutant)i;
    if (active) {
        fprintf(stderr, "MUTANT %s: this program is wrong on purpose\n", name);
        return;
    }
    fprintf(stderr, "SOOTH_DEBUG: no mutant '%s'; there are", name);
    for (int i = 1; i < SO_MUTANT_END; i++)
        fprintf(stderr, " %s", NAMES[i]);
    fputc('\n', stderr);
    abort();
}

so_mutant so_mutant_active(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_name);
    return active;
}
