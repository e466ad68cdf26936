/* Decoding heads (model/heads.h): the numbers that they compute, and the files that are refused. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "so_heads_file.h"
#include "so_rig.h"
#include "so_shape.h"

enum { D = 32, N_VOCAB = 67, N_TEXT = 6, N_HEADS = 3 };

static so_rig target;
static char *dir, *path;
static float *logits;           /* [N_TEXT][N_VOCAB] of the target */
static float states[N_TEXT][D]; /* its hidden states */

static int open_all(void **state) {
    (void)state;
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = N_VOCAB, .n_ctx = 64, .seed = 5};
    int32_t text[N_TEXT];
    so_row rows[N_TEXT];
    so_err err = {0};
    so_shape_open(&target, &shape, &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = true});
    so_shape_tokens(&shape, 3, text, N_TEXT);
    so_seq *s = so_seq_create(target.kv);
    for (int i = 0; i < N_TEXT; i++)
        rows[i] = (so_row){text[i], i, 0, i - 1, .want_logits = true};
    SO_OK_OR_FAIL(so_seq_begin(s, N_TEXT, &err), err);
    so_batch b = {rows, N_TEXT, &s, 1};
    SO_OK_OR_FAIL(so_pass_run(target.p, &b, SO_PASS_LOGITS | SO_PASS_HIDDEN, &err), err);
    logits = SO_NEW_N(float, N_TEXT *N_VOCAB);
    for (int i = 0; i < N_TEXT; i++) {
        memcpy(logits + i * N_VOCAB, so_pass_logits(target.p, i), N_VOCAB * sizeof *logits);
        memcpy(states[i], so_pass_hidden(target.p, i), sizeof states[i]);
    }
    so_seq_free(s);
    dir = so_test_tmp();
    path = so_path_join(dir, "heads.gguf");
    return 0;
}

static int close_all(void **state) {
    (void)state;
    so_rig_close(&target);
    free(logits);
    free(path);
    so_test_tmp_free(dir);
    return 0;
}

typedef struct opened {
    so_checkpoint *ck;
    so_heads *h;
} opened;

static opened load(const char *at, int max_rows) {
    opened o = {0};
    so_err err = {0};
    SO_OK_OR_FAIL(so_checkpoint_open(at, SO_CHECKPOINT_ALL, &o.ck, &err), err);
    SO_OK_OR_FAIL(so_heads_load(o.ck, target.m, max_rows, &o.h, &err), err);
    return o;
}

static void unload(opened *o) {
    so_heads_free(o->h);
    so_checkpoint_close(o->ck);
}

static void run(so_heads *h, const float *x, int n) {
    so_err err = {0};
    SO_OK_OR_FAIL(so_heads_run(h, x, n, &err), err);
}

static so_heads_file medusa(void) {
    return (so_heads_file){.kind = "medusa", .n_heads = N_HEADS, .n_layers = 2, .d = D, .seed = 9};
}

static so_heads_file blockwise(void) {
    return (so_heads_file){
        .kind = "blockwise", .n_heads = N_HEADS, .d = D, .d_hidden = 48, .seed = 10};
}

/* --- numbers --- */

/* As trained: blocks begin at zero, where every head is the target's own output, bit for bit. */
static void untrained_heads_are_the_target(void **state) {
    (void)state;
    static const unsigned char mask[] = {0x35, 0, 0xFF, 0x80, 0, 0, 0, 1, 4};
    for (int subset = 0; subset < 2; subset++) {
        so_heads_file f = medusa();
        f.zero = true;
        f.mask = subset ? mask : NULL;
        f.n_mask = sizeof mask;
        so_heads_write(path, &f);
        opened o = load(path, N_TEXT);
        const int32_t *ids = so_heads_subset(o.h);
        int len = so_heads_logits_len(o.h);
        assert_int_equal(len, subset ? 15 : N_VOCAB);
        run(o.h, states[0], N_TEXT);
        for (int i = 0; i < N_TEXT; i++)
            for (int k = 0; k < N_HEADS; k++)
                for (int c = 0; c < len; c++)
                    assert_true(so_heads_logits(o.h, i, k)[c] ==
                                logits[i * N_VOCAB + (ids ? ids[c] : c)]);
        unload(&o);
    }
}

static void product(const so_checkpoint *ck, const char *name, const double *x, int k, int m,
                    double *out) {
    const so_tensor *t = so_checkpoint_tensor(ck, name);
    assert_non_null(t);
    for (int r = 0; r < m; r++) {
        out[r] = 0;
        for (int c = 0; c < k; c++)
            out[r] += (double)((const float *)t->data)[r * k + c] * x[c];
    }
}

static double value(const so_checkpoint *ck, const char *name, int i) {
    return (double)((const float *)so_checkpoint_tensor(ck, name)->data)[i];
}

static double silu(double z) { return z / (1 + exp(-z)); }

/* The state of a head, by its definition. */
static void by_definition(const so_checkpoint *ck, const so_heads_file *f, int head, const float *h,
                          double *x) {
    double z[64];
    char name[64];
    for (int i = 0; i < D; i++)
        x[i] = (double)h[i];
    for (int j = 0; j < f->n_layers; j++) {
        snprintf(name, sizeof name, "head.%d.blk.%d.weight", head, j);
        product(ck, name, x, D, D, z);
        snprintf(name, sizeof name, "head.%d.blk.%d.bias", head, j);
        for (int i = 0; i < D; i++)
            x[i] += silu(z[i] + value(ck, name, i));
    }
    if (f->d_hidden > 0) {
        double y[D];
        snprintf(name, sizeof name, "head.%d.up.weight", head);
        product(ck, name, x, D, f->d_hidden, z);
        snprintf(name, sizeof name, "head.%d.up.bias", head);
        for (int i = 0; i < f->d_hidden; i++)
            z[i] = silu(z[i] + value(ck, name, i));
        snprintf(name, sizeof name, "head.%d.down.weight", head);
        product(ck, name, z, f->d_hidden, D, y);
        for (int i = 0; i < D; i++)
            x[i] += y[i];
    }
}

/* Medusa and blockwise blocks, with the target's output and with their own; and a state alone gives
 * the same bits as among others. */
static void blocks_are_their_definition(void **state) {
    (void)state;
    for (int variant = 0; variant < 4; variant++) {
        so_heads_file f = variant % 2 ? blockwise() : medusa();
        f.n_output = variant < 2 ? 0 : N_VOCAB;
        so_heads_write(path, &f);
        opened o = load(path, N_TEXT);
        float *alone = SO_NEW_N(float, N_HEADS *N_VOCAB);
        for (int i = 0; i < N_TEXT; i++) {
            run(o.h, states[i], 1);
            for (int k = 0; k < N_HEADS; k++)
                memcpy(alone + k * N_VOCAB, so_heads_logits(o.h, 0, k), N_VOCAB * sizeof *alone);
            run(o.h, states[0], N_TEXT);
            for (int k = 0; k < N_HEADS; k++) {
                double x[D], z[N_VOCAB];
                char name[64] = "output.weight";
                assert_memory_equal(so_heads_logits(o.h, i, k), alone + k * N_VOCAB,
                                    N_VOCAB * sizeof *alone);
                by_definition(o.ck, &f, k, states[i], x);
                if (f.n_output > 0)
                    snprintf(name, sizeof name, "head.%d.output.weight", k);
                product(f.n_output > 0 ? o.ck : target.ck, name, x, D, N_VOCAB, z);
                for (int c = 0; c < N_VOCAB; c++)
                    assert_true(fabs(z[c] - (double)alone[k * N_VOCAB + c]) <
                                (so_test_on_gpu() ? 2e-2 : 2e-4));
            }
        }
        free(alone);
        unload(&o);
    }
}

/* The published layout in a folder holds the same heads. */
static void folders_are_read(void **state) {
    (void)state;
    so_heads_file f = medusa();
    f.n_output = N_VOCAB;
    so_heads_write(path, &f);
    so_heads_write_folder(dir, &f);
    opened a = load(path, N_TEXT), b = load(dir, N_TEXT);
    run(a.h, states[0], N_TEXT);
    run(b.h, states[0], N_TEXT);
    assert_int_equal(so_heads_get_info(b.h)->kind, SO_HEADS_MEDUSA);
    for (int i = 0; i < N_TEXT; i++)
        for (int k = 0; k < N_HEADS; k++)
            assert_memory_equal(so_heads_logits(a.h, i, k), so_heads_logits(b.h, i, k),
                                N_VOCAB * sizeof(float));
    unload(&a);
    unload(&b);
}

/* An input of a row's own: the embedding of a token gives the bits of the token. */
static void rows_may_bring_their_input(void **state) {
    (void)state;
    const so_tensor *t = so_checkpoint_tensor(target.ck, "token_embd.weight");
    so_seq *s[2] = {so_seq_create(target.kv), so_seq_create(target.kv)};
    so_err err = {0};
    float want[N_TEXT][N_VOCAB];
    int32_t text[N_TEXT];
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 4, text, N_TEXT);
    for (int own = 0; own < 2; own++) {
        so_row rows[N_TEXT];
        for (int i = 0; i < N_TEXT; i++)
            rows[i] = (so_row){own && i % 3 ? 0 : text[i], i, 0, i - 1, .want_logits = true};
        for (int i = 0; i < N_TEXT; i++)
            if (own && i % 3)
                rows[i].embedding = (const float *)t->data + text[i] * D;
        SO_OK_OR_FAIL(so_seq_begin(s[own], N_TEXT, &err), err);
        so_batch b = {rows, N_TEXT, &s[own], 1};
        SO_OK_OR_FAIL(so_pass_run(target.p, &b, SO_PASS_LOGITS, &err), err);
        for (int i = 0; i < N_TEXT; i++)
            if (own)
                assert_memory_equal(so_pass_logits(target.p, i), want[i], sizeof want[i]);
            else
                memcpy(want[i], so_pass_logits(target.p, i), sizeof want[i]);
    }
    so_seq_free(s[0]);
    so_seq_free(s[1]);
}

/* --- files that are refused --- */

static void refused(const char *at, const char *part) {
    so_checkpoint *ck = NULL;
    so_heads *h = NULL;
    so_err err = {0};
    int rc = so_checkpoint_open(at, SO_CHECKPOINT_ALL, &ck, &err);
    if (rc == SO_OK)
        rc = so_heads_load(ck, target.m, 2, &h, &err);
    assert_true(rc < 0 && h == NULL);
    if (!strstr(err.msg, part))
        fail_msg("\"%s\" lacks \"%s\"", err.msg, part);
    so_checkpoint_close(ck);
}

static void broken_files(void **state) {
    (void)state;
    static const unsigned char past[] = {1, 0, 0, 0, 0, 0, 0, 0, 0x80}, empty[9] = {0};
    static const float accuracy[] = {0.5f, 0.25f, 2, 0.25f, 0.5f, 0.25f};
    const struct {
        so_heads_file f;
        const char *part;
    } cases[] = {
        {{.kind = "medusae", .n_output = N_VOCAB}, "must be medusa, blockwise or lookahead"},
        {{.no_key = "sooth.heads.kind"}, "sooth.heads.kind"},
        {{.no_key = "sooth.heads.count"}, "sooth.heads.count is missing"},
        {{.no_key = "sooth.heads.layers"}, "sooth.heads.layers is missing"},
        {{.n_heads = 17}, "must be from 1 to 16"},
        {{.n_layers = 9, .n_heads = 1}, "must be from 0 to 8"},
        {{.d = 48}, "give heads that were trained for it"},
        {{.drop = "head.1.blk.0.bias"}, "head.1.blk.0.bias"},
        {{.widen = "head.2.blk.1.weight"}, "head.2.blk.1.weight"},
        {{.extra = "head.7.blk.0.bias"}, "13 tensors"},
        {{.sicken = "head.0.blk.1.bias"}, "NaN or infinity"},
        {{.n_output = N_VOCAB - 1}, "66 rows"},
        {{.mask = past, .n_mask = sizeof past}, "selects id 71"},
        {{.mask = empty, .n_mask = sizeof empty}, "selects no token"},
        {{.mask = empty, .n_mask = 8}, "9 are expected"},
        {{.accuracy = accuracy, .n_ranks = 2}, "element 2 is 2"},
        {{.accuracy = accuracy, .n_ranks = 2, .n_accuracy = 5}, "array of 6 numbers"},
        {{.accuracy = accuracy, .n_ranks = 65, .n_accuracy = 6}, "must be from 1 to 64"},
        {{.kind = "blockwise", .d_hidden = 40, .no_key = "sooth.heads.hidden"},
         "hidden is missing"},
        {{.kind = "lookahead", .widen = "look_ahead"}, "look_ahead"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_heads_file f = cases[i].f;
        f.kind = f.kind ? f.kind : "medusa";
        f.n_heads = f.n_heads ? f.n_heads : N_HEADS;
        f.n_layers = f.n_layers ? f.n_layers : 2;
        f.d = f.d ? f.d : D;
        so_heads_write(path, &f);
        refused(path, cases[i].part);
    }
    so_shape draft = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = N_VOCAB, .n_ctx = 64, .seed = 1};
    char *other = so_shape_write(dir, &draft);
    refused(other, "holds no heads");
    free(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(untrained_heads_are_the_target),
        cmocka_unit_test(blocks_are_their_definition),
        cmocka_unit_test(folders_are_read),
        cmocka_unit_test(rows_may_bring_their_input),
        cmocka_unit_test(broken_files),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
