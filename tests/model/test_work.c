/* The least work of a pass, counted by hand for a small shape, with and without a window. */
#include "so_test.h"

#include <stdlib.h>

#include "model/work.h"
#include "so_rig.h"
#include "so_shape.h"

/* d·(2·d_q + 2·d_kv) + 3·d·d_ff per layer, then d·n_vocab. */
enum { LAYERS = 2, LAYER = 32 * (64 + 32) + 3 * 32 * 48, OUTPUT = 32 * 67, NORMS = 5 * 32 };

static void open_shape(so_rig *r, int window) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = LAYERS, .n_vocab = 67,
                      .n_ctx = 512,   .window = window,   .seed = 3};
    so_shape_open(r, &shape, &(so_rig_opts){.level = SO_CPU_AUTO});
}

static void counts(void **state) {
    (void)state;
    so_rig r;
    open_shape(&r, 0);
    so_work w = so_model_work(r.m, SO_DTYPE_F16, 10, 3, 2);
    /* three rows see 11, 12 and 13 positions: q·k and the sum of v, 2 heads of 16 */
    assert_int_equal((int64_t)w.n_macs, 3 * LAYERS * LAYER + 2 * OUTPUT + LAYERS * 2 * 36 * 2 * 16);
    /* the embedding is only looked up: it is another matrix of the same size */
    assert_int_equal((int64_t)so_model_weight_bytes(r.m),
                     4 * (LAYERS * LAYER + 2 * OUTPUT + NORMS));
    assert_int_equal((int64_t)w.n_bytes,
                     4 * (LAYERS * LAYER + OUTPUT + NORMS) + LAYERS * 13 * 2 * 16 * 2 + 2 * 67 * 4);
    so_work none = so_model_work(r.m, SO_DTYPE_F16, 10, 3, 0);
    assert_int_equal((int64_t)(w.n_bytes - none.n_bytes), 4 * OUTPUT + 2 * 67 * 4);
    assert_int_equal((int64_t)(w.n_macs - none.n_macs), 2 * OUTPUT);
    so_rig_close(&r);
}

static void window_bounds_what_is_seen(void **state) {
    (void)state;
    so_rig r;
    open_shape(&r, 8);
    so_work a = so_model_work(r.m, SO_DTYPE_F32, 100, 4, 0);
    so_work b = so_model_work(r.m, SO_DTYPE_F32, 400, 4, 0);
    assert_true(a.n_macs == b.n_macs && a.n_bytes == b.n_bytes);
    assert_int_equal((int64_t)a.n_macs, 4 * LAYERS * LAYER + LAYERS * 2 * (4 * 8) * 2 * 16);
    /* eight positions, and three more that only later rows see */
    assert_int_equal((int64_t)a.n_bytes, 4 * (LAYERS * LAYER + NORMS) + LAYERS * 11 * 2 * 16 * 4);
    so_rig_close(&r);
}

/* A decoder reads neither the encoder nor what makes keys and values of a source. The shape is that
 * of tests/golden/models/t5_v10: d 32, 4 heads of 16, ff 64 without a gate, output tied. */
static void encoders_are_not_read(void **state) {
    (void)state;
    enum { D = 32, D_Q = 64, FF = 64, VOCAB = 131, DEC = 3, BUCKETS = 16, HEADS = 4 };
    enum { READ = D * 6 * D_Q + 2 * D * FF, PER_LAYER_NORMS = 3 * D };
    so_rig r;
    so_test_skip_encoders();
    so_rig_open(&r, so_test_data("golden/models/t5_v10"), &(so_rig_opts){.level = SO_CPU_AUTO});
    so_work w = so_model_work(r.m, SO_DTYPE_F32, 10, 2, 1);
    assert_int_equal((int64_t)w.n_macs, 2 * DEC * READ + VOCAB * D + DEC * 2 * (11 + 12) * D_Q);
    int64_t weights = 4 * (DEC * (READ + PER_LAYER_NORMS) + D + BUCKETS * HEADS + VOCAB * D);
    assert_int_equal((int64_t)w.n_bytes, weights + DEC * 12 * 2 * D_Q * 4 + VOCAB * 4);
    size_t source = so_model_source_bytes(r.m);
    assert_int_equal((int64_t)(so_model_weight_bytes(r.m) - source), weights);
    /* 5 tokens of a source: two layers of the encoder, all positions seeing all, and keys and values */
    enum { N = 5, ENC = 2 };
    so_work s = so_model_source_work(r.m, N);
    int64_t own = D * 4 * D_Q + 2 * D * FF;
    assert_int_equal((int64_t)s.n_bytes, source);
    assert_int_equal((int64_t)s.n_macs, ENC * (N * own + 2 * N * N * D_Q) + DEC * N * 2 * D * D_Q);
    so_rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts),
        cmocka_unit_test(window_bounds_what_is_seen),
        cmocka_unit_test(encoders_are_not_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
