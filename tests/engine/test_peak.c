/* Peak memory of a run, including the file's mapping: at most the file, the cache, and 15 percent.
 * Packed weights replace those of the file, so both must not be resident at the same time. This is
 * a separate program because the kernel keeps one peak value per process. */
#include "so_test.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "so_rig.h"
#include "sooth.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { CONTEXT = 512, KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2 }; /* SmolLM2 135M, F16 */

static size_t peak_rss(void) {
    struct rusage u;
    assert_int_equal(getrusage(RUSAGE_SELF, &u), 0);
    return (size_t)u.ru_maxrss * 1024;
}

static void generate(const char *path) {
    sooth_model *m = NULL;
    sooth_engine *e = NULL;
    sooth_error err;
    sooth_engine_params ep;
    sooth_params p;
    sooth_engine_params_init(&ep);
    sooth_params_init(&p);
    ep.n_ctx = CONTEXT;
    p.max_tokens = 2;
    if (sooth_model_load(path, NULL, &m, &err) != 0 || sooth_engine_create(m, &ep, &e, &err) != 0 ||
        sooth_generate(e, "Once upon a time", &p, NULL, NULL, NULL, &err) != 0)
        fail_msg("%s", err.message);
    sooth_engine_free(e);
    sooth_model_free(m);
}

static void file_and_cache(void **state) {
    (void)state;
    const char *path = so_test_model("smollm2");
    struct stat st;
    if (SANITIZED || getenv("SOOTH_RUNNER"))
        SO_SKIP("a sanitizer or an emulator takes memory of its own");
    if (so_test_on_gpu())
        SO_SKIP("the driver of a GPU takes memory of its own");
    if (!path)
        SO_SKIP("smollm2 is not pulled");
    assert_int_equal(stat(path, &st), 0);
    size_t allowed = (size_t)st.st_size + (size_t)CONTEXT * KV_BYTES_PER_TOKEN;
    allowed += allowed / 100 * 15;
    generate(path);
    assert_true(peak_rss() > (size_t)st.st_size / 2); /* the value includes the file's mapping */
    if (peak_rss() > allowed)
        fail_msg("%zu bytes at the highest, %zu allowed for a file of %lld", peak_rss(), allowed,
                 (long long)st.st_size);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(file_and_cache)};
    return cmocka_run_group_tests_name("peak", tests, NULL, NULL);
}
