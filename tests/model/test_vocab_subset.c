/* Drafts with a vocabulary subset: their logits have the bits that the whole output matrix gives
 * for those tokens, in every layout, CPU level and batch; invalid masks are refused. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/work.h"
#include "so_rig.h"
#include "so_shape.h"

enum { N_VOCAB = 261, N_BYTES = 33, N_TEXT = 24 };

static const so_shape SHAPE = {.d_model = 64,
                               .n_layers = 2,
                               .n_heads = 2,
                               .n_heads_kv = 1,
                               .head_dim = 32,
                               .d_ff = 96,
                               .n_vocab = N_VOCAB,
                               .n_ctx = 256,
                               .seed = 31};

/* Ids with gaps of every size, including the first and the last id: 0, 1, 4, 9, 16 …, 256, 260. */
static int make_mask(unsigned char mask[N_BYTES], int32_t *ids) {
    int n = 0;
    memset(mask, 0, N_BYTES);
    for (int i = 0; i <= 17; i++) {
        ids[n] = i < 17 ? i * i : N_VOCAB - 1;
        mask[ids[n] / 8] |= (unsigned char)(1 << ids[n] % 8);
        n++;
    }
    return n;
}

static void check_rows(so_rig *whole, so_rig *narrow, const int32_t *ids, int n, int chunk) {
    static float a[N_TEXT * N_VOCAB], b[N_TEXT * N_VOCAB];
    int32_t text[N_TEXT];
    so_seq *s = so_seq_create(whole->kv), *t = so_seq_create(narrow->kv);
    so_shape_tokens(&SHAPE, 5, text, N_TEXT);
    so_rig_chunks(whole, s, text, N_TEXT, 1, a);
    so_rig_chunks(narrow, t, text, N_TEXT, chunk, b);
    assert_int_equal(narrow->width, n);
    assert_memory_equal(so_model_vocab_subset(narrow->m), ids, (size_t)n * sizeof *ids);
    for (int i = 0; i < N_TEXT; i++)
        for (int k = 0; k < n; k++)
            if (memcmp(&a[i * N_VOCAB + ids[k]], &b[i * n + k], sizeof *a) != 0)
                fail_msg("position %d, token %d: %g and not %g", i, ids[k], (double)b[i * n + k],
                         (double)a[i * N_VOCAB + ids[k]]);
    so_seq_free(s);
    so_seq_free(t);
}

/* Tied or with a separate output matrix, unchanged or rounded, packed or not. */
static void logits_match_full_vocabulary(void **state) {
    (void)state;
    unsigned char mask[N_BYTES];
    int32_t ids[N_VOCAB];
    so_cpu_level levels[SO_CPU_LEVELS];
    int n = make_mask(mask, ids), n_levels = so_rig_levels(levels);
    for (int variant = 0; variant < 8; variant++) {
        so_shape full = SHAPE, some;
        full.drop = variant & 1 ? "output.weight" : NULL;
        some = full;
        some.vocab_mask = mask;
        some.n_vocab_mask = N_BYTES;
        so_rig_opts o = {.n_pages = 8};
        so_rig whole, narrow;
        o.model.quantize = variant & 2;
        o.model.dtype = SO_DTYPE_Q4_0;
        o.model.no_pack = variant & 4;
        so_shape_open(&whole, &full, &o);
        for (int l = 0; l < n_levels; l++) {
            o.level = levels[l];
            o.model.draft = true;
            o.n_threads = 1 + l % 2;
            so_shape_open(&narrow, &some, &o);
            check_rows(&whole, &narrow, ids, n, l % 2 ? 7 : 1);
            so_rig_close(&narrow);
        }
        so_rig_close(&whole);
    }
}

/* An argmax is a token id of the subset; so_model_work counts only the output rows of the
 * subset. */
static void argmax_is_a_token_id(void **state) {
    (void)state;
    unsigned char mask[N_BYTES];
    int32_t ids[N_VOCAB], text[N_TEXT];
    int n = make_mask(mask, ids), seen = 0;
    so_shape some = SHAPE;
    so_rig r;
    so_err err = {0};
    some.vocab_mask = mask;
    some.n_vocab_mask = N_BYTES;
    so_shape_open(&r, &some, &(so_rig_opts){.model = {.draft = true}});
    so_shape_tokens(&SHAPE, 6, text, N_TEXT);
    so_seq *s = so_seq_create(r.kv);
    for (int i = 0; i < N_TEXT; i++) {
        so_row row = {text[i], i, 0, -1, .want_logits = true};
        SO_OK_OR_FAIL(so_seq_begin(s, 1, &err), err);
        SO_OK_OR_FAIL(
            so_pass_run(r.p, &(so_batch){&row, 1, &s, 1}, SO_PASS_ARGMAX | SO_PASS_LOGITS, &err),
            err);
        so_seq_commit_chain(s, 1);
        const float *x = so_pass_logits(r.p, 0);
        int best = 0;
        for (int k = 1; k < n; k++)
            best = x[k] > x[best] ? k : best;
        assert_int_equal(so_pass_argmax(r.p, 0), ids[best]);
        seen += ids[best] != best;
    }
    assert_true(seen > 0);
    so_work with = so_model_work(r.m, SO_DTYPE_F32, 0, 1, 1);
    so_work without = so_model_work(r.m, SO_DTYPE_F32, 0, 1, 0);
    assert_true(with.n_bytes - without.n_bytes == 4.0 * n * SHAPE.d_model + 4.0 * n);
    so_seq_free(s);
    so_rig_close(&r);
}

static int load(const so_shape *s, bool draft, so_err *err) {
    char *dir = so_test_tmp(), *path = so_shape_write(dir, s);
    so_checkpoint *ck = NULL;
    so_backend *b;
    so_model *m = NULL;
    *err = (so_err){0};
    SO_OK_OR_FAIL(
        so_backend_open("cpu", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_AUTO}, &b, err),
        *err);
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, err), *err);
    int rc = so_model_load(ck, b, &(so_model_opts){.draft = draft}, &m, err);
    if (rc == 0 && s->vocab_mask) /* a mask with all bits set is no subset */
        assert_true(so_model_vocab_subset(m) == NULL || so_model_logits_len(m) < N_VOCAB);
    so_model_free(m);
    so_backend_free(b);
    so_checkpoint_close(ck);
    free(path);
    so_test_tmp_free(dir);
    return rc;
}

static void expect(const so_shape *s, bool draft, int code, const char *message) {
    so_err err;
    int rc = load(s, draft, &err);
    if (rc != code || !strstr(err.msg, message))
        fail_msg("%d '%s', and not %d '%s'", rc, err.msg, code, message);
}

static void refuses_masks(void **state) {
    (void)state;
    unsigned char mask[4 * N_BYTES] = {0};
    int32_t ids[N_VOCAB];
    so_shape s = SHAPE;
    make_mask(mask, ids);
    s.vocab_mask = mask;
    s.n_vocab_mask = N_BYTES;
    expect(&s, true, 0, "");
    expect(&s, false, SO_EUNSUPPORTED, "has logits for only 18 of its 261 tokens");
    s.n_vocab_mask = N_BYTES - 1;
    expect(&s, true, SO_EFORMAT, "has 32 bytes; 33 are expected, a bit for each of 261 tokens");
    s.n_vocab_mask = N_BYTES + 1;
    expect(&s, true, SO_EFORMAT, "has 34 bytes; 33");
    s.n_vocab_mask = 0;
    expect(&s, true, SO_EFORMAT, "has 0 bytes; 33");
    s.n_vocab_mask = N_BYTES;
    s.vocab_mask_type = SO_GGUF_I32; /* ids instead of bits */
    expect(&s, true, SO_EFORMAT, "is of type i32; bytes are expected");
    s.vocab_mask_type = SO_GGUF_U8;
    mask[N_BYTES - 1] |= 1 << 5; /* 261 */
    expect(&s, true, SO_EFORMAT, "selects id 261; the vocabulary has ids 0 to 260");
    memset(mask, 0, sizeof mask);
    expect(&s, true, SO_EFORMAT, "selects no token");
    memset(mask, 255, N_BYTES - 1);
    mask[N_BYTES - 1] = 31;
    expect(&s, true, 0, "");
    expect(&s, false, 0, ""); /* all tokens: not a draft-only file */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_match_full_vocabulary),
        cmocka_unit_test(argmax_is_a_token_id),
        cmocka_unit_test(refuses_masks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
