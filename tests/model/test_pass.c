/* Passes: refused batches, results, and tables that grow. */
#include "so_test.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/half.h"
#include "base/mem.h"
#include "so_rig.h"
#include "so_shape.h"

static const so_shape SHAPE = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = 67, .n_ctx = 512,
                               .seed = 21};

static char *g_dir, *g_path;

static int setup(void **state) {
    (void)state;
    g_dir = so_test_tmp();
    g_path = so_shape_write(g_dir, &SHAPE);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    free(g_path);
    so_test_tmp_free(g_dir);
    return 0;
}

static void refused(so_rig *r, so_seq *const *seqs, int n_seqs, const so_row *rows, int n, int code,
                    const char *message) {
    so_err err = {0};
    int rc = so_pass_run(r->p, &(so_batch){rows, n, seqs, n_seqs}, SO_PASS_LOGITS, &err);
    if (rc != code || !strstr(err.msg, message))
        fail_msg("%d '%s', and not %d '%s'", rc, err.msg, code, message);
}

static void refuses_batches(void **state) {
    (void)state;
    so_rig r;
    so_err err = {0};
    so_rig_open(&r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 4});
    so_seq *a = so_seq_create(r.kv), *b = so_seq_create(r.kv), *both[] = {a, b}, *twice[] = {a, a};
    so_rig_chain(&r, a, (int32_t[]){1, 2, 3}, 3, NULL);
    SO_OK_OR_FAIL(so_seq_begin(a, 2, &err), err);
    const so_row good[] = {{1, 3, 0, -1, .want_logits = true}, {2, 4, 0, 0, .want_logits = true}};
    so_row rows[5];
#define BAD(change, n, code, message)                 \
    do {                                              \
        memcpy(rows, good, sizeof good);              \
        change;                                       \
        refused(&r, both, 2, rows, n, code, message); \
    } while (0)
    BAD(rows[1].token = 67, 2, SO_EINVAL, "row 1: token 67 is outside the vocabulary of 67");
    BAD(rows[0].token = -1, 2, SO_EINVAL, "row 0: token -1");
    BAD(rows[0].token = SO_ROW_GUESS, 2, SO_EINVAL, "row 0: guesses must come last");
    BAD((rows[0].want_logits = false, rows[1].token = SO_ROW_GUESS), 2, SO_EINVAL,
        "row 1: guesses must come last, in the order of the rows with logits");
    so_seq_abort(a);
    SO_OK_OR_FAIL(so_seq_begin(a, 3, &err), err);
    BAD((rows[1].token = SO_ROW_GUESS, rows[2] = (so_row){2, 5, 0, 1, .want_logits = true}), 3,
        SO_EINVAL, "row 2: guesses must come last");
    so_seq_abort(a);
    SO_OK_OR_FAIL(so_seq_begin(a, 2, &err), err);
    BAD(rows[1].pos = 5, 2, SO_EINVAL,
        "row 1: position 5 does not follow its parent; 4 is expected");
    BAD(rows[0].pos = 0, 2, SO_EINVAL, "row 0: position 0");
    BAD(rows[0].parent = 1, 2, SO_EINVAL, "row 0: parent 1 is not an earlier row");
    BAD(rows[1].parent = 1, 2, SO_EINVAL, "row 1: parent 1 is not an earlier row");
    BAD(rows[1].parent = so_row_after(0), 2, SO_EINVAL, "row 1: slot 0 holds no node");
    BAD(rows[1].parent = so_row_after(3), 2, SO_EINVAL, "row 1: slot 3 holds no node");
    BAD(rows[1].parent = INT32_MIN, 2, SO_EINVAL, "row 1: slot 2147483646 holds no node");
    BAD(rows[0].seq = 2, 2, SO_EINVAL, "row 0: sequence 2 is not one of the batch's 2");
    BAD(rows[0].seq = -1, 2, SO_EINVAL, "row 0: sequence -1 is not one of the batch's 2");
    BAD((rows[1].seq = 1, rows[1].pos = 4), 2, SO_EINVAL,
        "row 1: parent 0 belongs to another sequence");
    BAD((void)0, 1, SO_EINVAL, "sequence 0 has 1 rows; its open speculation has 2 nodes");
    BAD((void)0, 0, SO_EINVAL, "a batch of 0 rows");
    BAD((void)0, 5, SO_EINVAL, "a batch of 5 rows");
    refused(&r, twice, 2, good, 2, SO_EINVAL, "sequences 0 and 1 are the same");

    so_kv *other;
    so_kv_shape shape = *so_kv_get_shape(r.kv);
    SO_OK_OR_FAIL(so_kv_create(r.b, &shape, &other, &err), err);
    so_seq *stranger = so_seq_create(other);
    refused(&r, (so_seq *[]){a, stranger}, 2, good, 2, SO_EINVAL, "another KV cache");
    so_seq_free(stranger);
    so_kv_free(other);

    /* the valid batch still runs afterwards */
    SO_OK_OR_FAIL(so_pass_run(r.p, &(so_batch){good, 2, both, 2}, SO_PASS_LOGITS, &err), err);

    /* a later pass of the same speculation */
    so_seq_abort(a);
    so_seq_reserve_nodes(a, 4);
    SO_OK_OR_FAIL(so_seq_begin(a, 2, &err), err);
    SO_OK_OR_FAIL(so_pass_run(r.p, &(so_batch){good, 2, both, 2}, SO_PASS_LOGITS, &err), err);
    SO_OK_OR_FAIL(so_seq_extend(a, 2, &err), err);
    const so_row later[] = {{.token = 5, .pos = 5, .parent = so_row_after(4), .want_logits = true},
                            {.token = 6, .pos = 4, .parent = so_row_after(3), .want_logits = true}};
#define BAD_LATER(change, message)                         \
    do {                                                   \
        memcpy(rows, later, sizeof later);                 \
        change;                                            \
        refused(&r, both, 2, rows, 2, SO_EINVAL, message); \
    } while (0)
    BAD_LATER(rows[0].pos = 4, "row 0: position 4 does not follow its parent; 5 is expected");
    BAD_LATER(rows[0].parent = so_row_after(5), "row 0: slot 5 holds no node of an earlier pass");
    BAD_LATER(rows[0].parent = so_row_after(2), "row 0: slot 2 holds no node of an earlier pass");
    BAD_LATER(rows[1].seq = 1, "row 1: slot 3 holds no node of an earlier pass");
    SO_OK_OR_FAIL(so_pass_run(r.p, &(so_batch){later, 2, both, 2}, SO_PASS_LOGITS, &err), err);
    so_seq_free(a);
    so_seq_free(b);
    so_rig_close(&r);
}

static void refuses_sizes(void **state) {
    (void)state;
    so_rig r;
    so_err err = {0};
    so_rig_open(&r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO});
    so_pass *p = NULL;
    assert_int_equal(so_pass_create(r.m, r.kv, 0, 0, &p, &err), SO_EINVAL);
    assert_int_equal(so_pass_create(r.m, r.kv, 4, 5, &p, &err), SO_EINVAL);
    so_kv *other;
    so_kv_shape shape = *so_kv_get_shape(r.kv);
    shape.head_dim = 8;
    SO_OK_OR_FAIL(so_kv_create(r.b, &shape, &other, &err), err);
    assert_int_equal(so_pass_create(r.m, other, 4, 4, &p, &err), SO_EMISMATCH);
    assert_non_null(
        strstr(err.msg, "1 heads of size 8; the model has 1 layers, 1 heads of size 16"));
    so_kv_free(other);
    /* three rows with logits in a pass created for two */
    SO_OK_OR_FAIL(so_pass_create(r.m, r.kv, 4, 2, &p, &err), err);
    so_seq *s = so_seq_create(r.kv);
    so_row rows[] = {{1, 0, 0, -1, .want_logits = true},
                     {2, 1, 0, 0, .want_logits = true},
                     {3, 2, 0, 1, .want_logits = true}};
    SO_OK_OR_FAIL(so_seq_begin(s, 3, &err), err);
    so_batch batch = {rows, 3, &s, 1};
    assert_int_equal(so_pass_run(p, &batch, SO_PASS_LOGITS, &err), SO_EINVAL);
    rows[1].want_logits = false;
    SO_OK_OR_FAIL(so_pass_run(p, &batch, SO_PASS_LOGITS, &err), err);
    so_seq_free(s);
    so_pass_free(p);
    so_rig_close(&r);
}

static void past_learned_positions(void **state) {
    (void)state;
    so_rig r;
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", so_test_data("golden/models/gpt2"));
    so_rig_open(&r, folder, &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 129});
    so_row rows[129];
    so_err err = {0};
    so_seq *s = so_seq_create(r.kv);
    for (int i = 0; i < 129; i++)
        rows[i] = (so_row){i % 131, i, 0, i - 1, .want_logits = false};
    SO_OK_OR_FAIL(so_seq_begin(s, 129, &err), err);
    refused(&r, &s, 1, rows, 129, SO_ERANGE, "position 128 is past the 128 positions");
    so_seq_free(s);
    so_rig_close(&r);
}

/* Logits only for rows with want_logits, in row order; argmax and hidden states of the same
 * rows. */
static void results(void **state) {
    (void)state;
    so_rig r;
    so_err err = {0};
    so_rig_open(&r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = true});
    int32_t tokens[5] = {9, 8, 7, 6, 5};
    float all[5 * 67], hidden[2 * 32];
    so_seq *s = so_seq_create(r.kv);
    so_rig_chain(&r, s, tokens, 5, all);
    so_seq_truncate_to(s, 0);
    so_row rows[5];
    for (int i = 0; i < 5; i++)
        rows[i] = (so_row){tokens[i], i, 0, i - 1, .want_logits = i == 1 || i == 4};
    SO_OK_OR_FAIL(so_seq_begin(s, 5, &err), err);
    so_batch batch = {rows, 5, &s, 1};
    SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_LOGITS | SO_PASS_ARGMAX | SO_PASS_HIDDEN, &err),
                  err);
    const int picked[] = {1, 4};
    for (int k = 0; k < 2; k++) {
        const float *want = all + picked[k] * 67;
        assert_memory_equal(so_pass_logits(r.p, k), want, 67 * sizeof(float));
        int best = 0;
        for (int v = 1; v < 67; v++)
            best = want[v] > want[best] ? v : best;
        assert_int_equal(so_pass_argmax(r.p, k), best);
        memcpy(hidden + k * 32, so_pass_hidden(r.p, k), 32 * sizeof(float));
    }
    /* computed alone, each row gives the same bits */
    SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_HIDDEN, &err), err);
    assert_memory_equal(so_pass_hidden(r.p, 0), hidden, 32 * sizeof(float));
    SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_ARGMAX, &err), err);
    SO_OK_OR_FAIL(so_pass_run(r.p, &batch, 0, &err), err);
    /* logits are the output matrix times the hidden state */
    const so_tensor *w = so_checkpoint_tensor(r.ck, "output.weight");
    for (int v = 0; v < 67; v++) {
        double sum = 0;
        for (int i = 0; i < 32; i++)
            sum += (double)((const float *)w->data)[v * 32 + i] * (double)hidden[i];
        assert_float_equal((float)sum, all[67 + v],
                           strcmp(so_test_device(), "cpu") == 0 ? 1e-4F : 1e-2F);
    }
    so_seq_free(s);
    so_rig_close(&r);
}

/* ---- guesses ---- */

enum { N_CHAINS = 3, N_GIVEN = 5, DEPTH = 6, MAX_WIDTH = 100 };

/* The results of a chain of guesses: of level k of chain c at [c][k]. */
typedef struct guesses {
    int32_t argmax[N_CHAINS][DEPTH];
    float logits[N_CHAINS][DEPTH][MAX_WIDTH], hidden[N_CHAINS][DEPTH][64];
} guesses;

static void keep(const so_rig *r, guesses *g, int c, int level, int out) {
    g->argmax[c][level] = so_pass_argmax(r->p, out);
    memcpy(g->logits[c][level], so_pass_logits(r->p, out), (size_t)r->width * sizeof(float));
    memcpy(g->hidden[c][level], so_pass_hidden(r->p, out),
           (size_t)so_model_hparams(r->m)->d_model * sizeof(float));
}

/* n_chains texts of 1 … N_GIVEN tokens that are yet to be read, then the guesses: the first
 * n_levels in one pass, and so on. */
static void guess(so_rig *r, int n_chains, int n_levels, const float *hidden, guesses *g) {
    so_err err = {0};
    so_seq *seqs[N_CHAINS];
    int n_given[N_CHAINS];
    for (int c = 0; c < n_chains; c++) {
        seqs[c] = so_seq_create(r->kv);
        so_rig_chain(r, seqs[c], (int32_t[]){7, 3 + c, 2}, 3, NULL);
        n_given[c] = 1 + c * 2 % N_GIVEN;
    }
    for (int done = 0; done < DEPTH; done += n_levels) {
        so_row rows[N_CHAINS * (N_GIVEN + DEPTH)];
        int n = 0, last[N_CHAINS];
        for (int c = 0; c < n_chains; c++) {
            int len = so_seq_len(seqs[c]), n_new = done ? 1 : n_given[c];
            for (int i = 0; i < n_new; i++, n++)
                rows[n] = (so_row){done ? SO_MAX(g->argmax[c][done - 1], 0) : 11 + 5 * c + i,
                                   len + i,
                                   c,
                                   i ? n - 1 : -1,
                                   .want_logits = i + 1 == n_new,
                                   .target_hidden = done ? NULL : hidden};
            last[c] = n - 1;
            SO_OK_OR_FAIL(so_seq_begin(seqs[c], n_new + n_levels - 1, &err), err);
        }
        for (int level = 1; level < n_levels; level++)
            for (int c = 0; c < n_chains; c++, n++) {
                rows[n] =
                    (so_row){SO_ROW_GUESS, rows[last[c]].pos + 1, c, last[c], .want_logits = true};
                last[c] = n;
            }
        SO_OK_OR_FAIL(so_pass_run(r->p, &(so_batch){rows, n, seqs, n_chains},
                                  SO_PASS_LOGITS | SO_PASS_ARGMAX | SO_PASS_HIDDEN, &err),
                      err);
        for (int level = 0; level < n_levels; level++)
            for (int c = 0; c < n_chains; c++)
                keep(r, g, c, done + level, level * n_chains + c);
        for (int c = 0; c < n_chains; c++)
            so_seq_commit_chain(seqs[c], so_seq_open_nodes(seqs[c]));
    }
    for (int c = 0; c < n_chains; c++)
        so_seq_free(seqs[c]);
}

static void check_guesses(const so_shape *shape, so_dtype kv, const float *hidden) {
    for (int deferred = 0; deferred < 2; deferred++) {
        so_rig r;
        static guesses want, got;
        so_shape_open(&r, shape,
                      &(so_rig_opts){.level = SO_CPU_AUTO,
                                     .deferred = deferred,
                                     .kv_dtype = kv,
                                     .n_threads = 2,
                                     .model = {.draft = true}});
        for (int n = 1; n <= N_CHAINS; n++) {
            memset(&want, 0, sizeof want);
            guess(&r, n, 1, hidden, &want);
            for (int levels = 2; levels <= DEPTH; levels += levels == 3 ? 3 : 1) {
                memset(&got, 0, sizeof got);
                guess(&r, n, levels, hidden, &got);
                if (memcmp(&got, &want, sizeof got) != 0)
                    fail_msg("%d chains, %d levels%s: other results than step by step", n, levels,
                             deferred ? ", deferred" : "");
            }
        }
        so_rig_close(&r);
    }
}

/* Levels of guesses in one pass have the bits of one pass per level: for one chain and several, with
 * rows before the guesses, with a vocabulary subset, with hidden states of a target, after
 * rows without an argmax, and for every type of cache. */
static void guesses_have_the_bits_of_steps(void **state) {
    (void)state;
    so_shape subset = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = 96, .n_ctx = 256, .seed = 22};
    so_shape reads = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = 96,
                      .n_ctx = 256,   .d_state = 32, .seed = 23};
    unsigned char mask[12];
    float hidden[32];
    memset(mask, 0x35, sizeof mask);
    subset.vocab_mask = mask;
    subset.n_vocab_mask = sizeof mask;
    for (int i = 0; i < 32; i++)
        hidden[i] = (float)(i % 7) - 3;
    check_guesses(&SHAPE, SO_DTYPE_F32, NULL);
    check_guesses(&SHAPE, SO_DTYPE_F16, NULL);
    check_guesses(&SHAPE, SO_DTYPE_Q8_0, NULL);
    check_guesses(&subset, SO_DTYPE_F16, NULL);
    check_guesses(&reads, SO_DTYPE_F16, hidden);
    check_guesses(&reads, SO_DTYPE_F16, NULL);
    reads.nan_token = 11; /* the first chain's */
    check_guesses(&reads, SO_DTYPE_F16, NULL);
}

/* As many levels as a batch may have, and one more. */
static void levels_have_a_limit(void **state) {
    (void)state;
    enum { MAX = SO_PASS_LEVELS };
    so_rig r;
    so_err err = {0};
    int32_t argmax[MAX];
    so_row rows[MAX + 1] = {{9, 0, 0, -1, .want_logits = true}};
    so_shape_open(&r, &SHAPE, &(so_rig_opts){.level = SO_CPU_AUTO});
    so_seq *s = so_seq_create(r.kv);
    for (int i = 1; i <= MAX; i++)
        rows[i] = (so_row){SO_ROW_GUESS, i, 0, i - 1, .want_logits = true};
    SO_OK_OR_FAIL(so_seq_begin(s, MAX + 1, &err), err);
    assert_int_equal(so_pass_submit(r.p, &(so_batch){rows, MAX + 1, &s, 1}, SO_PASS_ARGMAX, &err),
                     SO_EINVAL);
    assert_non_null(strstr(err.msg, "row 32: more than 32 levels"));
    so_seq_abort(s);
    SO_OK_OR_FAIL(so_seq_begin(s, MAX, &err), err);
    SO_OK_OR_FAIL(so_pass_run(r.p, &(so_batch){rows, MAX, &s, 1}, SO_PASS_ARGMAX, &err), err);
    for (int i = 0; i < MAX; i++)
        argmax[i] = so_pass_argmax(r.p, i);
    for (int i = 1; i < MAX; i++) /* the same tokens, known beforehand */
        rows[i].token = argmax[i - 1];
    SO_OK_OR_FAIL(so_pass_run(r.p, &(so_batch){rows, MAX, &s, 1}, SO_PASS_ARGMAX, &err), err);
    for (int i = 0; i < MAX; i++)
        assert_int_equal(so_pass_argmax(r.p, i), argmax[i]);
    so_seq_free(s);
    so_rig_close(&r);
}

static void lose(so_backend *b, const so_op *op) {
    (void)b;
    (void)op;
}

static int fail_sync(so_backend *b, so_err *err) {
    (void)b;
    return so_err_set(err, SO_EIO, "injected");
}

/* Also after a pass that failed and lost all that it had uploaded. */
static void guesses_after_a_failed_pass(void **state) {
    (void)state;
    for (int deferred = 0; deferred < 2; deferred++) {
        so_rig r;
        so_err err = {0};
        static guesses want, got;
        so_shape_open(&r, &SHAPE, &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = deferred});
        guess(&r, 2, 1, NULL, &want);
        const so_backend_vt *real = r.b->vt;
        so_backend_vt faulty = *real;
        faulty.submit = lose;
        faulty.sync = fail_sync;
        so_seq *s = so_seq_create(r.kv);
        SO_OK_OR_FAIL(so_seq_begin(s, 2, &err), err);
        const so_row rows[] = {{9, 0, 0, -1, .want_logits = true},
                               {SO_ROW_GUESS, 1, 0, 0, .want_logits = true}};
        r.b->vt = &faulty;
        assert_int_equal(so_pass_run(r.p, &(so_batch){rows, 2, &s, 1}, SO_PASS_LOGITS, &err),
                         SO_EIO);
        r.b->vt = real;
        so_seq_free(s);
        guess(&r, 2, 2, NULL, &got);
        assert_memory_equal(&got, &want, sizeof got);
        so_rig_close(&r);
    }
}

/* ---- submit and wait ---- */

static so_batch open_row(const so_row *row, so_seq **s) {
    so_err err = {0};
    SO_OK_OR_FAIL(so_seq_begin(*s, 1, &err), err);
    return (so_batch){row, 1, s, 1};
}

/* Results become readable at so_pass_wait. A pointer kept from the previous pass shows what code
 * that reads too early would get: on the deferred backend, bytes that are not logits. */
static void results_appear_at_wait(void **state) {
    (void)state;
    for (int deferred = 0; deferred < 2; deferred++) {
        so_rig r;
        so_err err = {0};
        so_rig_open(&r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = deferred});
        so_seq *s = so_seq_create(r.kv);
        const so_row row = {9, 0, 0, -1, .want_logits = true};
        so_batch batch = open_row(&row, &s);
        SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_LOGITS, &err), err);
        const float *kept = so_pass_logits(r.p, 0);
        float want[67];
        memcpy(want, kept, sizeof want);
        SO_OK_OR_FAIL(so_pass_submit(r.p, &batch, SO_PASS_LOGITS, &err), err);
        for (int i = 0; i < 67 && deferred && strcmp(so_test_device(), "cpu") == 0; i++)
            assert_true(so_f32_bits(kept[i]) == 0xA5A5A5A5u);
        SO_OK_OR_FAIL(so_pass_wait(r.p, &err), err);
        assert_memory_equal(so_pass_logits(r.p, 0), want, sizeof want);
        so_seq_free(s);
        so_rig_close(&r);
    }
}

/* A refused pass, or one without logits, has nothing to wait for or to read. */
static void refused_passes_are_not_submitted(void **state) {
    (void)state;
    so_rig r;
    so_err err = {0};
    so_rig_open(&r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = true});
    so_seq *s = so_seq_create(r.kv);
    so_row row = {67, 0, 0, -1, .want_logits = true};
    so_batch batch = open_row(&row, &s);
    assert_int_equal(so_pass_submit(r.p, &batch, SO_PASS_LOGITS, &err), SO_EINVAL);
    row.token = 66;
    SO_OK_OR_FAIL(so_pass_submit(r.p, &batch, SO_PASS_LOGITS, &err), err);
    SO_OK_OR_FAIL(so_pass_wait(r.p, &err), err);
    so_pass_submit(r.p, &batch, SO_PASS_LOGITS, &err); /* freed without so_pass_wait */
    so_seq_free(s);
    so_rig_close(&r);
}

typedef struct early {
    so_rig r;
    so_seq *s;
    so_row row;
    enum {
        READ_LOGITS,
        READ_ARGMAX,
        READ_HIDDEN,
        READ_CHECK,
        SUBMIT_TWICE,
        WAIT_TWICE,
        N_EARLY
    } what;
} early;

static void too_early(void *user) {
    early *e = user;
    so_batch batch = open_row(&e->row, &e->s);
    unsigned want = SO_PASS_LOGITS | SO_PASS_ARGMAX | SO_PASS_HIDDEN;
    if (so_pass_submit(e->r.p, &batch, want, NULL) != 0)
        _exit(3);
    if (e->what == READ_LOGITS)
        so_pass_logits(e->r.p, 0);
    else if (e->what == READ_ARGMAX)
        so_pass_argmax(e->r.p, 0);
    else if (e->what == READ_HIDDEN)
        so_pass_hidden(e->r.p, 0);
    else if (e->what == READ_CHECK)
        so_pass_check_all(e->r.p, NULL);
    else if (e->what == SUBMIT_TWICE)
        so_pass_submit(e->r.p, &batch, want, NULL);
    else if (so_pass_wait(e->r.p, NULL) == 0)
        so_pass_wait(e->r.p, NULL);
}

static void early_reads_abort(void **state) {
    (void)state;
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer answers the signals itself");
    if (strcmp(so_test_device(), "cpu") != 0)
        SO_SKIP("a GPU cannot be used after fork");
    for (int deferred = 0; deferred < 2; deferred++) {
        early e = {.row = {9, 0, 0, -1, .want_logits = true}};
        so_rig_open(&e.r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = deferred});
        e.s = so_seq_create(e.r.kv);
        for (e.what = 0; e.what < N_EARLY; e.what++)
            assert_int_equal(so_test_dies_of(too_early, &e), SIGABRT);
        so_seq_free(e.s);
        so_rig_close(&e.r);
    }
}

/* Two long branches and many forks: more branch slots and pages than the pass was created for. */
static void tables_grow(void **state) {
    (void)state;
    enum { N = 64, SEQS = 64 };
    so_rig r;
    so_err err = {0};
    so_rig_open(&r, g_path, &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = N, .n_pages = 80});
    so_seq *s = so_seq_create(r.kv);
    so_row rows[N];
    for (int i = 0; i < N; i++) /* two chains, alternating: each row has a tail */
        rows[i] = (so_row){i, i / 2, 0, i - 2 < 0 ? -1 : i - 2, .want_logits = i == N - 1};
    SO_OK_OR_FAIL(so_seq_begin(s, N, &err), err);
    so_batch batch = {rows, N, &s, 1};
    SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_LOGITS, &err), err);
    float *branch = SO_NEW_N(float, 67), *chain = SO_NEW_N(float, N * 67);
    memcpy(branch, so_pass_logits(r.p, 0), 67 * sizeof(float));
    so_seq_abort(s);
    int32_t odd[N / 2];
    for (int i = 0; i < N / 2; i++)
        odd[i] = 2 * i + 1;
    so_rig_chain(&r, s, odd, N / 2, chain);
    assert_memory_equal(branch, chain + (N / 2 - 1) * 67, 67 * sizeof(float));

    /* 64 forks of 10 pages each, all pages shared except the last */
    int32_t text[N];
    for (int i = 0; i < N; i++)
        text[i] = i;
    for (int i = 0; i < 4; i++)
        so_rig_chain(&r, s, text, N, NULL); /* 288 positions, 9 pages */
    so_seq *forks[SEQS];
    for (int i = 0; i < SEQS; i++) {
        forks[i] = so_seq_fork(s, 288);
        SO_OK_OR_FAIL(so_seq_begin(forks[i], 1, &err), err);
        rows[i] = (so_row){11, 288, i, -1, .want_logits = i == 0 || i == SEQS - 1};
    }
    SO_OK_OR_FAIL(so_pass_run(r.p, &(so_batch){rows, SEQS, forks, SEQS}, SO_PASS_LOGITS, &err),
                  err);
    assert_memory_equal(so_pass_logits(r.p, 0), so_pass_logits(r.p, 1), 67 * sizeof(float));
    for (int i = 0; i < SEQS; i++)
        so_seq_free(forks[i]);
    so_seq_free(s);
    so_rig_close(&r);
    free(branch);
    free(chain);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_batches),
        cmocka_unit_test(refuses_sizes),
        cmocka_unit_test(past_learned_positions),
        cmocka_unit_test(results),
        cmocka_unit_test(guesses_have_the_bits_of_steps),
        cmocka_unit_test(levels_have_a_limit),
        cmocka_unit_test(guesses_after_a_failed_pass),
        cmocka_unit_test(results_appear_at_wait),
        cmocka_unit_test(refused_passes_are_not_submitted),
        cmocka_unit_test(early_reads_abort),
        cmocka_unit_test(tables_grow),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
