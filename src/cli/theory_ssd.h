/* `sooth theory --ssd`. See theory_ssd.c. */
#ifndef SO_CLI_THEORY_SSD_H
#define SO_CLI_THEORY_SSD_H

#include "cli/options.h"

int so_theory_ahead(const so_args *a);

#endif
