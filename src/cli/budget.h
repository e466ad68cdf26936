/* `sooth inspect -m T -md D --ctx C --parallel N`: the memory that target and draft model need. */
#ifndef SO_CLI_BUDGET_H
#define SO_CLI_BUDGET_H

#include "cli/options.h"

/* Prints the budget; returns the exit status. */
int so_cli_budget(const so_args *a, const char *target);

#endif
