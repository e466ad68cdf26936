/* The choice among registered drafts (choose_draft.h): a prior from the claimed agreement,
 * outweighed by observations. A claim is scaled by how well the tried drafts of this target met
 * theirs. The costs of an untried draft are estimated from its size, from what the tried ones cost
 * beyond theirs and, where drafts run on a device, from the prior of trip.h. Only headers of files
 * are read. A record or file that cannot be read counts as unknown. The choice changes the speed.
 * It does not change the text with greedy decoding or `match`, nor the distribution of the text
 * with `reject`. */
#include "plan/choose_draft.h"

#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/mem.h"
#include "plan/store.h"
#include "plan/tuning.h"

typedef struct draft {
    double claimed_agreement, size; /* size: weights relative to the target's */
    const so_record *rec;           /* NULL: untried */
} draft;

static so_accept_cell first_guesses(const so_record *rec, int depth) {
    return rec ? rec->cells[depth][0][SO_ACCEPT_CLASSES] : (so_accept_cell){0};
}

static draft look_up(const so_records *r, const char *path, double target_bytes) {
    draft x = {0};
    so_checkpoint *ck = NULL;
    if (so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, NULL) != SO_OK)
        return x;
    char name[SO_RECORD_NAME];
    x.claimed_agreement = so_registry_agreement(ck);
    x.size = (double)so_checkpoint_bytes(ck) / SO_MAX(target_bytes, 1);
    for (int mode = 0; mode < SO_PLAN_MODES && !x.rec; mode++) {
        if (so_record_model_name(so_registry_id(ck), (so_plan_mode)mode, name))
            x.rec = so_records_find(r, name);
        if (x.rec && first_guesses(x.rec, 0).tested < SO_TUNE_CHOICE_TESTS)
            x.rec = NULL;
    }
    so_checkpoint_close(ck);
    return x;
}

/* Observed acceptance relative to the claims, over the drafts that were tried. */
static double claim_factor(const draft *all, int n) {
    double tested = SO_TUNE_CHOICE_CLAIM, accepted = tested * SO_TUNE_CLAIM_FACTOR[SO_PLAN_GREEDY];
    for (int i = 0; i < n; i++) {
        so_accept_cell c = first_guesses(all[i].rec, 0);
        if (all[i].claimed_agreement > 0) {
            accepted += (double)c.accepted;
            tested += all[i].claimed_agreement * (double)c.tested;
        }
    }
    return accepted / tested;
}

/* What a level of the tried drafts costs beyond their size, as a fraction of the target's pass: the
 * mean, but at least the prior. On a GPU small models cost far more than their size suggests, and an
 * untried draft would look cheap for its small size alone. */
static double fixed_part(const draft *all, int n, const so_costs *c) {
    double sum = 0, pass = so_costs_pass(c, 1);
    int tried = 0;
    for (int i = 0; i < n; i++)
        if (all[i].rec && all[i].rec->n_level_points > 0) {
            so_curve level = {0};
            so_curve_import(&level, all[i].rec->level_points, all[i].rec->n_level_points, NULL);
            sum += so_curve_ms(&level, 1) / pass - all[i].size;
            tried++;
        }
    return tried > 0 && pass > 0 ? SO_MAX(sum / tried, SO_TUNE_LEVEL_FIXED) : SO_TUNE_LEVEL_FIXED;
}

/* fixed: fixed_part. */
static so_level_costs level_costs(const draft *x, const so_costs *c, double fixed, bool remote) {
    so_draft_cost cost = {.size = x->size + fixed - SO_TUNE_LEVEL_FIXED};
    if (x->rec && x->rec->n_level_points > 0)
        so_curve_import(&cost.one_level, x->rec->level_points, x->rec->n_level_points, NULL);
    if (remote && x->rec && x->rec->trip_error > 0)
        so_trip_import(&cost.trip, x->rec->trip_fixed_part, x->rec->trip_error);
    else if (remote)
        so_trip_start(&cost.trip);
    return (so_level_costs){.trip_ms = so_costs_trip(c, &cost),
                            .level_ms = so_costs_level(c, &cost, 1),
                            .per_trip = SO_PASS_LEVELS};
}

/* The expected speed-up with the best fixed length; 1e9 without record and claim, so that the draft
 * is tried. */
static double speed_up(const draft *x, const so_costs *c, double factor, double fixed,
                       bool remote) {
    double expected = x->claimed_agreement > 0 ? SO_MIN(x->claimed_agreement * factor, 1.0) : 0.5;
    double weight = x->claimed_agreement > 0 ? SO_TUNE_CHOICE_CLAIM : SO_TUNE_CHOICE_NO_CLAIM;
    double best = 1, tokens = 1, value = 1;
    so_level_costs costs = level_costs(x, c, fixed, remote);
    if (!x->rec && !(x->claimed_agreement > 0))
        return 1e9;
    for (int k = 0; k < SO_ACCEPT_DEPTHS; k++) {
        so_accept_cell seen = first_guesses(x->rec, k);
        value *= ((double)seen.accepted + weight * expected) / ((double)seen.tested + weight);
        tokens += value;
        double ms = so_costs_pass(c, k + 2) + so_level_costs_sum(&costs, k + 1);
        best = SO_MAX(best, tokens * so_costs_pass(c, 1) / ms);
    }
    return best;
}

int so_choose_draft(const so_records *r, const so_costs *c, const so_registry_found *f,
                    const so_model *target) {
    draft all[SO_REGISTRY_MAX];
    double target_bytes = (double)so_model_weight_bytes(target);
    double most = -1;
    int best = 0;
    for (int i = 0; i < f->n; i++)
        all[i] = look_up(r, f->paths[i], target_bytes);
    double factor = claim_factor(all, f->n), fixed = fixed_part(all, f->n, c);
    for (int i = 0; i < f->n; i++) {
        double x = speed_up(&all[i], c, factor, fixed, so_model_backend(target)->vt->remote);
        if (x > most) {
            most = x;
            best = i;
        }
    }
    return best;
}

void so_choose_first(const so_model *target, so_dtype kv_dtype, so_registry_found *f) {
    so_costs *costs = SO_NEW(so_costs);
    so_records records = {0};
    so_buf key = {0};
    const char *why;
    char *dir = so_env_cache_dir();
    so_store_key(target, kv_dtype, &key);
    char *path = dir ? so_store_path(dir, so_buf_str(&key)) : NULL;
    if (path && so_store_read(path, so_buf_str(&key), costs, &records, &why)) {
        int best = so_choose_draft(&records, costs, f, target);
        char *first = f->paths[best];
        memmove(f->paths + 1, f->paths, (size_t)best * sizeof *f->paths);
        f->paths[0] = first;
    }
    so_records_free(&records);
    so_costs_deinit(costs);
    so_buf_free(&key);
    free(path);
    free(dir);
    free(costs);
}
