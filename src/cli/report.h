/* Results as JSON (the fields of `run --json`) and as the line at the end of a run. */
#ifndef SO_CLI_REPORT_H
#define SO_CLI_REPORT_H

#include <jansson.h>

#include "engine/engine.h"

/* What a prompt's turns add up to. */
typedef struct so_report {
    so_buf text; /* answers, a line break between two */
    so_tokens tokens;
    so_finish finish; /* of the last turn */
    uint64_t seed;
    char drafter[64]; /* cut, if longer */
    so_verify_mode verify;
    double lenience;
    so_request_stats stats;
} so_report;

void so_report_add(so_report *r, const so_request *req, so_str text);
void so_report_free(so_report *r);
/* {"text","tokens","finish_reason","seed","timings","spec"}. */
json_t *so_report_json(const so_report *r);
/* One line per JSON object on stdout, flushed; takes over o. */
void so_report_print_json(json_t *o);
/* "prompt 31 tokens, 120 ms (258/s); answer …" on stderr. */
void so_report_print_timings(const so_report *r);

#endif
