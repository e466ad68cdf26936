/* The options of beam search in a request, under vLLM's names:
 *
 *   "use_beam_search": true     search instead of sampling
 *   "n", "best_of"              results; hypotheses at a time, n if it is not given
 *   "length_penalty", "early_stopping"   as in Hugging Face's generate; early_stopping may be "never"
 *
 * Beam search samples nothing: a temperature above 0 or a penalty for repeated tokens is refused, and
 * what the server or the model recommends for sampling does not apply. Without use_beam_search the
 * other fields are refused unless they are neutral, because they would be ignored. Pure functions;
 * any thread. */
#include <math.h>

#include "server/api.h"

enum { MAX_PENALTY = 10 };

static const json_t *member(const so_api_request *r, const char *name) {
    const json_t *v = json_object_get(r->root, name);
    return json_is_null(v) ? NULL : v;
}

static bool bad_value(so_api_error *e, const char *name, const char *want) {
    return so_api_fail(e, 400, "invalid_value", name, "'%s' must be %s", name, want);
}

/* Fields that would have no effect without beam search. */
static bool check_unused(const so_api_request *r, so_api_error *e) {
    const json_t *best_of = member(r, "best_of"), *stop = member(r, "early_stopping");
    const json_t *penalty = member(r, "length_penalty");
    if (best_of && json_number_value(best_of) != 1)
        return so_api_refuse(e, "best_of", ", set it to 1, or set 'use_beam_search'");
    if (stop && !so_api_is_empty(stop))
        return so_api_refuse(e, "early_stopping", ", or set 'use_beam_search'");
    if (penalty && json_number_value(penalty) != 1)
        return so_api_refuse(e, "length_penalty", ", set it to 1, or set 'use_beam_search'");
    return true;
}

static bool read_width(so_api_request *r, so_api_error *e) {
    const json_t *best_of = member(r, "best_of");
    double width = best_of ? json_number_value(best_of) : r->n;
    if (best_of && (!json_is_number(best_of) || width != floor(width)))
        return bad_value(e, "best_of", "a whole number");
    if (!(width >= r->n && width <= SO_BEAM_MAX))
        return so_api_fail(e, 400, "invalid_value", best_of ? "best_of" : "n",
                           "'%s' is %g: beam search needs at least 'n' hypotheses, which is %d, "
                           "and at most %d",
                           best_of ? "best_of" : "n", width, r->n, SO_BEAM_MAX);
    r->beams.width = (int)width;
    r->beams.n_best = r->n;
    return true;
}

static bool read_rules(so_api_request *r, so_api_error *e) {
    const json_t *stop = member(r, "early_stopping"), *penalty = member(r, "length_penalty");
    double x = penalty ? json_number_value(penalty) : 1;
    bool never = json_is_string(stop) && strcmp(json_string_value(stop), "never") == 0;
    if (penalty && (!json_is_number(penalty) || !(x >= -MAX_PENALTY && x <= MAX_PENALTY)))
        return bad_value(e, "length_penalty", "a number from -10 to 10");
    if (stop && !never && !json_is_boolean(stop))
        return bad_value(e, "early_stopping", "true, false or \"never\"");
    r->beams.length_penalty = x;
    r->beams.early_stop = never                ? SO_EARLY_STOP_NEVER
                          : json_is_true(stop) ? SO_EARLY_STOP_YES
                                               : SO_EARLY_STOP_NO;
    return true;
}

/* Replaces defaults for sampling by neutral values; refuses what the request itself asks for. */
static bool read_sampling(so_api_request *r, so_api_error *e) {
    static const struct {
        const char *name;
        double neutral;
    } fields[] = {{"temperature", 0},
                  {"repeat_penalty", 1},
                  {"repetition_penalty", 1},
                  {"presence_penalty", 0},
                  {"frequency_penalty", 0}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *v = member(r, fields[i].name);
        if (v && json_number_value(v) != fields[i].neutral)
            return so_api_fail(e, 400, "invalid_value", fields[i].name,
                               "'%s' is %g: beam search does not sample; leave it out or set it "
                               "to %g",
                               fields[i].name, json_number_value(v), fields[i].neutral);
    }
    r->sample.temp = 0;
    r->sample.repeat_penalty = 1;
    r->sample.presence_penalty = r->sample.frequency_penalty = 0;
    return true;
}

bool so_api_read_beams(so_api_request *r, so_api_error *e) {
    const json_t *use = member(r, "use_beam_search");
    so_beam_opts_defaults(&r->beams);
    if (use && !json_is_boolean(use))
        return bad_value(e, "use_beam_search", "true or false");
    if (!json_is_true(use))
        return check_unused(r, e);
    if (r->max_tokens == 0)
        return so_api_fail(e, 400, "invalid_value", "max_tokens",
                           "'max_tokens' is 0: beam search needs at least 1");
    return read_width(r, e) && read_rules(r, e) && read_sampling(r, e);
}
