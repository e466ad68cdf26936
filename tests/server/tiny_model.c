/* Writes the tiny model of the tests to a file, for tests that are scripts.
 *
 *   tiny_model FILE [TEMPLATE [LAYERS]]      TEMPLATE '': the default one
 */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "so_tiny.h"

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: tiny_model FILE [TEMPLATE [LAYERS]]\n");
        return 2;
    }
    so_tiny_opts o = {.template = argc > 2 && *argv[2] ? argv[2] : NULL,
                      .layers = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 0};
    so_tiny_write(argv[1], &o);
    return 0;
}
