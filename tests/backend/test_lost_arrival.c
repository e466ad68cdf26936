/* A thread block of the persistent kernel that hands over nothing (src/backend/cuda/persist.cu): the
 * others wait in vain, and the kernel's watchdog ends the pass with an error instead of a hang. Needs a
 * GPU that runs the kernel. The GPU is lost to the process afterwards, so this is a program of its own. */
#include "so_test.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "base/clock.h"
#include "so_rig.h"
#include "so_shape.h"

static const so_shape SHAPE = {.d_model = 256,
                               .n_layers = 2,
                               .n_heads = 4,
                               .n_heads_kv = 2,
                               .head_dim = 64,
                               .d_ff = 512,
                               .n_vocab = 512,
                               .n_ctx = 64,
                               .seed = 3};

static int find_library(struct dl_phdr_info *info, size_t size, void *user) {
    (void)size;
    if (strstr(info->dlpi_name, "libsooth_cuda.so"))
        *(void **)user = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    return 0;
}

/* A pass over n rows at the start of the sequence. */
static int run(so_rig *r, so_seq *s, int n, so_err *err) {
    so_row rows[4];
    for (int i = 0; i < n; i++)
        rows[i] = (so_row){.token = 5 + i, .pos = i, .parent = i - 1, .want_logits = true};
    so_batch batch = {rows, n, &s, 1};
    SO_OK_OR_FAIL(so_seq_begin(s, n, err), *err);
    int rc = so_pass_run(r->p, &batch, SO_PASS_ARGMAX, err);
    so_seq_abort(s);
    return rc;
}

static void watchdog_ends_the_pass(void **state) {
    (void)state;
    so_rig r;
    so_err err = {0};
    void *lib = NULL;
    if (strncmp(so_test_device(), "cuda", 4) != 0)
        SO_SKIP("SOOTH_DEVICE=cuda is not set");
    so_shape_open(&r, &SHAPE,
                  &(so_rig_opts){.kv_dtype = SO_DTYPE_F16,
                                 .model = {.quantize = true, .dtype = SO_DTYPE_F16}});
    dl_iterate_phdr(find_library, &lib);
    assert_non_null(lib);
    int *lost = dlsym(lib, "so_cuda_lost_product");
    assert_non_null(lost);
    so_seq *s = so_seq_create(r.kv);
    for (int i = 0; i < 3; i++) /* the second one is planned */
        SO_OK_OR_FAIL(run(&r, s, 1, &err), err);
    *lost = 1;
    SO_OK_OR_FAIL(run(&r, s, 1, &err), err); /* an old plan */
    SO_OK_OR_FAIL(run(&r, s, 2, &err), err); /* no plan yet */
    int64_t start = so_clock_ns();
    if (run(&r, s, 2, &err) == SO_OK) {
        so_seq_free(s);
        so_rig_close(&r);
        SO_SKIP("this GPU does not run the persistent kernel");
    }
    double seconds = so_clock_ms_since(start) / 1000;
    assert_int_equal(err.code, SO_EIO);
    assert_non_null(strstr(err.msg, "the GPU failed"));
    if (seconds > 60)
        fail_msg("the pass took %.0f s", seconds);
    *lost = -1;
    assert_int_equal(run(&r, s, 1, &err), SO_EIO); /* the device is lost */
    so_seq_free(s);
    so_rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(watchdog_ends_the_pass)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
