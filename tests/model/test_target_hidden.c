/* Drafts that read their target's hidden states: the product of a hidden state with the draft's
 * matrix is added to the token's embedding; a row without one has the same bits as in a batch
 * without any; invalid files are refused. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "so_rig.h"
#include "so_shape.h"

enum { N_VOCAB = 61, D = 64, D_HIDDEN = 96, N_TEXT = 9 };

static const so_shape SHAPE = {.d_model = D,
                               .n_layers = 2,
                               .n_heads = 2,
                               .n_heads_kv = 1,
                               .head_dim = 32,
                               .d_ff = 96,
                               .n_vocab = N_VOCAB,
                               .n_ctx = 256,
                               .d_state = D_HIDDEN,
                               .seed = 41};

static void make_hidden(float hidden[N_TEXT][D_HIDDEN]) {
    for (int i = 0; i < N_TEXT; i++)
        for (int k = 0; k < D_HIDDEN; k++)
            hidden[i][k] = sinf((float)(1 + i * D_HIDDEN + k));
}

/* Logits of a text as one batch; hidden[i] may be NULL. */
static void run(so_rig *r, const int32_t *text, const float *const *hidden, float *out) {
    so_row rows[N_TEXT];
    so_err err = {0};
    so_seq *s = so_seq_create(r->kv);
    for (int i = 0; i < N_TEXT; i++)
        rows[i] = (so_row){text[i], i, 0, i - 1, .want_logits = true, .target_hidden = hidden[i]};
    SO_OK_OR_FAIL(so_seq_begin(s, N_TEXT, &err), err);
    SO_OK_OR_FAIL(so_pass_run(r->p, &(so_batch){rows, N_TEXT, &s, 1}, SO_PASS_LOGITS, &err), err);
    for (int i = 0; i < N_TEXT; i++)
        memcpy(out + i * N_VOCAB, so_pass_logits(r->p, i), N_VOCAB * sizeof *out);
    so_seq_abort(s);
    so_seq_free(s);
}

/* The file of SHAPE, with the embeddings of the tokens of `text` replaced by the sum of embedding
 * and product. Every position of the text has a different token. */
static void open_summed(so_rig *r, const int32_t *text, float hidden[N_TEXT][D_HIDDEN]) {
    char *dir = so_test_tmp(), *path = so_shape_write(dir, &SHAPE);
    so_err err = {0};
    so_checkpoint *ck;
    so_buf file = {0};
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
    SO_OK_OR_FAIL(so_file_read(path, 1 << 24, &file, &err), err);
    const float *e = so_checkpoint_tensor(ck, "token_embd.weight")->data;
    const float *w = so_checkpoint_tensor(ck, "target_state.weight")->data;
    for (int i = 0; i < N_TEXT; i++) {
        const float *row = e + text[i] * D;
        float *at = memmem(file.data, file.len, row, D * sizeof *row);
        assert_non_null(at);
        for (int o = 0; o < D; o++) {
            double sum = (double)row[o];
            for (int k = 0; k < D_HIDDEN; k++)
                sum += (double)w[o * D_HIDDEN + k] * (double)hidden[i][k];
            float x = (float)sum;
            memcpy((char *)at + (size_t)o * sizeof x, &x, sizeof x);
        }
    }
    so_checkpoint_close(ck);
    FILE *f = fopen(path, "wb");
    assert_int_equal(fwrite(file.data, 1, file.len, f), file.len);
    fclose(f);
    so_rig_open(r, path, &(so_rig_opts){.model = {.draft = true}, .max_rows = 16});
    so_buf_free(&file);
    free(path);
    so_test_tmp_free(dir);
}

static void hidden_state_is_added(void **state) {
    (void)state;
    static float hidden[N_TEXT][D_HIDDEN], got[N_TEXT * N_VOCAB], want[N_TEXT * N_VOCAB];
    const float *given[N_TEXT], *none[N_TEXT] = {0};
    int32_t text[N_TEXT];
    so_rig reads, summed;
    make_hidden(hidden);
    for (int i = 0; i < N_TEXT; i++) {
        text[i] = 3 + 5 * i;
        given[i] = hidden[i];
    }
    so_shape_open(&reads, &SHAPE, &(so_rig_opts){.model = {.draft = true}, .max_rows = 16});
    assert_int_equal(so_model_d_target_hidden(reads.m), D_HIDDEN);
    open_summed(&summed, text, hidden);
    run(&reads, text, given, got);
    run(&summed, text, none, want);
    double worst = 0, plain = 0;
    for (int i = 0; i < N_TEXT * N_VOCAB; i++)
        worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
    run(&reads, text, none, want);
    for (int i = 0; i < N_TEXT * N_VOCAB; i++)
        plain = fmax(plain, fabs((double)got[i] - (double)want[i]));
    /* a GPU rounds activations to fp16 */
    double allowed = strncmp(so_test_device(), "cuda", 4) == 0 ? 0.03 : 1e-3;
    if (worst > allowed || plain < 0.5)
        fail_msg("off by %g; without hidden states by %g", worst, plain);
    so_rig_close(&reads);
    so_rig_close(&summed);
}

/* On every CPU level, bit for bit: rows before the first hidden state are as without any, and zeros
 * are as none. */
static void rows_without_hidden_state_are_unchanged(void **state) {
    (void)state;
    static float hidden[N_TEXT][D_HIDDEN], a[N_TEXT * N_VOCAB], b[N_TEXT * N_VOCAB];
    static const float zeros[D_HIDDEN];
    so_cpu_level levels[SO_CPU_LEVELS];
    int n_levels = so_rig_levels(levels);
    int32_t text[N_TEXT];
    make_hidden(hidden);
    so_shape_tokens(&SHAPE, 3, text, N_TEXT);
    for (int l = 0; l < n_levels; l++) {
        const float *none[N_TEXT] = {0}, *late[N_TEXT] = {0}, *empty[N_TEXT] = {0};
        so_rig r;
        late[N_TEXT - 2] = hidden[0];
        empty[2] = zeros;
        so_shape_open(
            &r, &SHAPE,
            &(so_rig_opts){.level = levels[l],
                           .model = {.draft = true, .quantize = l % 2, .dtype = SO_DTYPE_Q4_0},
                           .max_rows = 16});
        run(&r, text, none, a);
        run(&r, text, late, b);
        assert_memory_equal(a, b, (N_TEXT - 2) * N_VOCAB * sizeof *a);
        assert_memory_not_equal(a + (N_TEXT - 2) * N_VOCAB, b + (N_TEXT - 2) * N_VOCAB,
                                2 * N_VOCAB * sizeof *a);
        run(&r, text, empty, b);
        assert_memory_equal(a, b, sizeof a);
        so_rig_close(&r);
    }
}

static void expect(const so_shape *s, bool draft, int code, const char *message) {
    char *dir = so_test_tmp(), *path = so_shape_write(dir, s);
    so_checkpoint *ck = NULL;
    so_backend *b;
    so_model *m = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(
        so_backend_open("cpu", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_AUTO}, &b, &err),
        err);
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
    int rc = so_model_load(ck, b, &(so_model_opts){.draft = draft}, &m, &err);
    if (rc != code || !strstr(err.msg, message))
        fail_msg("%d '%s', and not %d '%s'", rc, err.msg, code, message);
    so_model_free(m);
    so_backend_free(b);
    so_checkpoint_close(ck);
    free(path);
    so_test_tmp_free(dir);
}

static void refuses(void **state) {
    (void)state;
    so_shape s = SHAPE;
    expect(&s, true, 0, "");
    expect(&s, false, SO_EUNSUPPORTED, "it is a draft for that model");
    s.d_state = (1 << 16) + 32;
    expect(&s, true, SO_ELIMIT, "takes hidden states of 65568 numbers; at most 65536");
    s.d_state = 0;
    s.extra = "target_state.weight";
    expect(&s, true, SO_EFORMAT, "tensor target_state.weight has shape [1]; [1, 64] is expected");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hidden_state_is_added),
        cmocka_unit_test(rows_without_hidden_state_are_unchanged),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
