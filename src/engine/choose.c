/* The choice among drafts (choose.h): a prior from what the file says, outweighed by what was seen.
 *
 * The file's word (so_draft_for.agreement) is expected to be kept as well as drafts have been seen
 * to keep theirs; a guess of a draft that was not tried yet is expected to cost half what one of a
 * tried draft does, for waiting and the host's part, and the rest by its size. Files
 * are opened for their headers alone. What cannot be read, of records or of a file, counts as not
 * known. Nothing here changes a text. */
#include "engine/choose.h"

#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/mem.h"
#include "engine/costs.h"

enum { ENOUGH_TESTS = 4 }; /* a draft that is soon given up is not tested often */

typedef struct candidate {
    double word, bytes;
    const so_record *rec; /* NULL: not tried yet */
} candidate;

static const double KEPT = 0.8;             /* usual prompts are harder than held-out text */
static const double WORD = 32, NO_WORD = 1; /* what they weigh, in tests */

static candidate look_up(const so_records *r, const char *path) {
    candidate x = {0};
    so_checkpoint *ck = NULL;
    if (so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, NULL) != SO_OK)
        return x;
    char name[SO_RECORD_NAME];
    x.word = so_registry_agreement(ck);
    x.bytes = (double)so_checkpoint_bytes(ck);
    for (int way = 0; way < SO_RECORD_WAYS && !x.rec; way++) {
        if (so_record_model_name(so_registry_id(ck), way, name))
            x.rec = so_records_find(r, name);
        if (x.rec && x.rec->cells[0][SO_ESTIMATE_LEVELS].tested < ENOUGH_TESTS)
            x.rec = NULL;
    }
    so_checkpoint_close(ck);
    return x;
}

/* What their guesses came to, in parts of their word, and one whose guess has been timed, or NULL.
 */
static void compare(const candidate *all, int n, double *kept, const candidate **timed) {
    double accepted = WORD * KEPT, tested = WORD;
    *timed = NULL;
    for (int i = 0; i < n; i++) {
        if (!all[i].rec)
            continue;
        so_estimate_cell first = all[i].rec->cells[0][SO_ESTIMATE_LEVELS];
        if (all[i].word > 0) {
            accepted += (double)first.accepted;
            tested += all[i].word * (double)first.tested;
        }
        if (all[i].bytes > 0 && all[i].rec->step_ms > 0)
            *timed = &all[i];
    }
    *kept = accepted / tested;
}

static double step_of(const candidate *x, const candidate *timed) {
    if (x->rec && x->rec->step_ms > 0)
        return x->rec->step_ms;
    return timed ? timed->rec->step_ms * (1 + x->bytes / timed->bytes) / 2 : 0;
}

static double gain(const candidate *x, const so_curve *c, double kept, const candidate *timed) {
    double expected = x->word > 0 ? SO_MIN(x->word * kept, 1.0) : 0.5;
    double weight = x->word > 0 ? WORD : NO_WORD;
    double step_ms = step_of(x, timed);
    double best = 1, tokens = 1, value = 1, plain_ms = so_curve_ms(c, 1);
    if (!x->rec && !(x->word > 0))
        return 1e9;
    for (int k = 0; k < SO_ESTIMATE_DEPTHS; k++) {
        so_estimate_cell seen = {0};
        if (x->rec)
            seen = x->rec->cells[k][SO_ESTIMATE_LEVELS];
        value *= ((double)seen.accepted + weight * expected) / ((double)seen.tested + weight);
        tokens += value;
        best = SO_MAX(best, tokens * plain_ms / (so_curve_ms(c, k + 2) + (k + 1) * step_ms));
    }
    return best;
}

/* The first of equals. */
static int choose(const so_records *r, const so_curve *c, const so_registry_found *f) {
    candidate all[SO_REGISTRY_MAX];
    const candidate *timed;
    double kept, most = -1;
    int best = 0;
    for (int i = 0; i < f->n; i++)
        all[i] = look_up(r, f->paths[i]);
    compare(all, f->n, &kept, &timed);
    for (int i = 0; i < f->n; i++) {
        double x = gain(&all[i], c, kept, timed);
        if (x > most) {
            most = x;
            best = i;
        }
    }
    return best;
}

void so_choose_first(const so_model *target, so_registry_found *f) {
    so_curve *curve = SO_NEW(so_curve);
    so_records records = {0};
    so_buf key = {0};
    char *dir = so_env_cache_dir();
    so_costs_key(target, SO_DTYPE_F16, &key);
    char *path = dir ? so_costs_path(dir, so_buf_str(&key)) : NULL;
    if (path && so_costs_read(path, so_buf_str(&key), curve, &records) &&
        so_curve_ms(curve, 1) > 0) {
        int best = choose(&records, curve, f);
        char *first = f->paths[best];
        memmove(f->paths + 1, f->paths, (size_t)best * sizeof *f->paths);
        f->paths[0] = first;
    }
    so_records_free(&records);
    so_buf_free(&key);
    free(path);
    free(dir);
    free(curve);
}
