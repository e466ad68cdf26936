/* Packed weights against unpacked ones, bit by bit: every dtype, every level, row counts on both
 * sides of all tile borders, shapes that fill no row group, one to four threads, and blocks of
 * extreme numbers, which would reveal an integer overflow. */
#include "op_cases.h"

#include <limits.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/pack.h"
#include "so_rig.h"

static const so_dtype dtypes[] = {SO_DTYPE_Q4_0, SO_DTYPE_Q4_1, SO_DTYPE_Q5_0, SO_DTYPE_Q5_1,
                                  SO_DTYPE_Q8_0, SO_DTYPE_Q2_K, SO_DTYPE_Q3_K, SO_DTYPE_Q4_K,
                                  SO_DTYPE_Q5_K, SO_DTYPE_Q6_K};

static so_backend *cpu(int n_threads, so_cpu_level level) {
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open("cpu", &(so_backend_opts){.n_threads = n_threads, .level = level},
                                  &b, &err),
                  err);
    return b;
}

static bool has_two_halves(so_dtype t) {
    return t == SO_DTYPE_Q4_1 || t == SO_DTYPE_Q5_1 || t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K;
}

static bool is_k(so_dtype t) { return so_dtype_get((int)t)->block_len == 256; }

/* ---- the layout alone ---- */

static void round_trip(so_dtype t, int n_rows, int n_blocks, int fill) {
    const so_dtype_info *info = so_dtype_get((int)t);
    size_t row_bytes = (size_t)info->block_bytes * (size_t)n_blocks, tile_bytes;
    uint8_t *rows = so_alloc(row_bytes * (size_t)n_rows), *block = so_alloc(256);
    assert_true(so_pack_bytes(t, n_blocks * info->block_len, n_rows, &tile_bytes));
    uint8_t *tile = so_alloc(tile_bytes + 1);
    noise z = noise_of((uint64_t)t);
    for (size_t i = 0; i < row_bytes * (size_t)n_rows; i++)
        rows[i] = fill < 0 ? (uint8_t)noise_u32(&z) : (uint8_t)fill;
    memset(tile, 0xCD, tile_bytes + 1);
    so_pack_tile(t, rows, row_bytes, n_rows, n_blocks * info->block_len, tile);
    assert_int_equal(tile[tile_bytes], 0xCD);
    for (int r = 0; r < n_rows; r++)
        for (int b = 0; b < n_blocks; b++) {
            so_pack_block(t, tile, so_pack_groups(n_rows, 0), r, b, block);
            assert_memory_equal(block, rows + (size_t)r * row_bytes + b * info->block_bytes,
                                (size_t)info->block_bytes);
        }
    free(rows);
    free(block);
    free(tile);
}

static void packing_loses_nothing(void **state) {
    (void)state;
    static const int n_rows[] = {1, 6, 15, 16, 17, 22, 31, 32};
    for (size_t i = 0; i < SO_LEN(dtypes); i++)
        for (size_t r = 0; r < SO_LEN(n_rows); r++)
            for (int n_blocks = 1; n_blocks < 5; n_blocks++) {
                round_trip(dtypes[i], n_rows[r], n_blocks, -1);
                round_trip(dtypes[i], n_rows[r], n_blocks, 0xFF);
            }
}

/* Packing may add at most 4 % to the file's size, and one group of rows to a matrix. */
static void sizes(void **state) {
    (void)state;
    size_t packed;
    for (size_t i = 0; i < SO_LEN(dtypes); i++) {
        size_t row = so_dtype_row_bytes(dtypes[i], 1536);
        assert_true(so_pack_bytes(dtypes[i], 1536, 320, &packed));
        assert_int_equal(packed, 10 * so_pack_tile_bytes(dtypes[i], 1536));
        assert_true(packed >= 320 * row && packed * 100 <= 320 * row * 104);
        assert_true(so_pack_bytes(dtypes[i], 1536, 321, &packed));
        assert_true(packed * 100 <= 336 * row * 104 + 1536 / 32 * 32 * 100);
    }
    assert_int_equal(so_pack_tile_bytes(SO_DTYPE_F16, 64), 0);
    assert_false(so_pack_bytes(SO_DTYPE_F16, 64, 64, &packed));
    assert_false(so_pack_bytes(SO_DTYPE_Q8_0, 1 << 24, LONG_MAX, &packed));
}

/* ---- products ---- */

typedef struct plain {
    op_data o;
    float *want; /* [n][m], unpacked, scalar */
} plain;

static plain plain_create(const op_case *c, uint64_t seed) {
    plain p = {.o = op_data_create(c, seed), .want = SO_NEW_N(float, c->n *SO_MAX(c->m, c->d))};
    so_backend *b = cpu(1, SO_CPU_SCALAR);
    op_run(b, &p.o, 0, c->n, p.want);
    so_backend_free(b);
    return p;
}

static void plain_free(plain *p) {
    op_data_free(&p->o);
    free(p->want);
}

static void run_packed(so_backend *b, const plain *p, const so_weight *w, int first, int n,
                       float *out) {
    op_bench bench = {.b = b};
    so_err err = {0};
    so_op op = op_make(&bench, &p->o, first, n, w);
    so_submit(b, &op);
    so_submit(b,
              &(so_op){.kind = SO_OP_DOWNLOAD,
                       .n = n,
                       .download = {op_result(&op), out, (size_t)n * (size_t)p->o.out_width * 4}});
    SO_OK_OR_FAIL(b->vt->sync(b, &err), err);
    op_bench_free(&bench);
}

/* Multiplies the last n rows of the case, for each of the given row counts n. */
static void check_packed(const plain *p, so_cpu_level level, int threads, const int *counts,
                         int n_counts) {
    const op_case *c = &p->o.c;
    so_backend *b = cpu(threads, level);
    so_weight *w = NULL;
    so_err err = {0};
    char what[64];
    float *got = SO_NEW_N(float, c->n * c->m);
    SO_OK_OR_FAIL(b->vt->weight_create(b, &p->o.tensor, &w, &err), err);
    assert_true(b->vt->weight_pack(b, w));
    assert_true(b->vt->weight_pack(b, w)); /* a second call changes nothing */
    for (int i = 0; i < n_counts; i++) {
        int n = SO_MIN(counts[i], c->n);
        run_packed(b, p, w, c->n - n, n, got);
        snprintf(what, sizeof what, "packed, %s, %d threads, %d rows", so_cpu_level_name(level),
                 threads, n);
        assert_same_floats(c, what, got, p->want + (size_t)(c->n - n) * (size_t)c->m,
                           (size_t)n * (size_t)c->m);
    }
    free(got);
    b->vt->weight_free(b, w);
    so_backend_free(b);
}

static void all_levels(const plain *p, int threads, const int *counts, int n_counts) {
    so_cpu_level levels[8];
    int n = so_rig_levels(levels);
    for (int l = 0; l < n; l++)
        check_packed(p, levels[l], threads, counts, n_counts);
}

static void row_counts(void **state) {
    (void)state;
    int counts[66];
    for (int i = 0; i < 65; i++)
        counts[i] = i + 1;
    counts[65] = 100;
    for (size_t i = 0; i < SO_LEN(dtypes); i++) {
        int k = is_k(dtypes[i]) ? 512 : 96;
        plain p = plain_create(&(op_case){SO_OP_MATMUL, dtypes[i], 100, k, 37, true, 0}, i);
        all_levels(&p, 1, counts, SO_LEN(counts));
        plain_free(&p);
    }
}

static void shapes(void **state) {
    (void)state;
    static const int rows[] = {16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 80, 97, 100};
    static const int counts[] = {1, 3, 6};
    for (size_t i = 0; i < SO_LEN(dtypes); i++)
        for (size_t r = 0; r < SO_LEN(rows); r++) {
            static const int small[] = {32, 64, 576, 1536}, wide[] = {256, 768, 1536, 2304};
            int k = is_k(dtypes[i]) ? wide[r % 4] : small[r % 4];
            plain p =
                plain_create(&(op_case){SO_OP_MATMUL, dtypes[i], 6, k, rows[r], r % 2, 0}, 40 + i);
            all_levels(&p, 1 + (int)(r + i) % 4, counts, SO_LEN(counts));
            plain_free(&p);
        }
}

/* A matrix so large that threads claim its last rows dynamically. */
static void pieces(void **state) {
    (void)state;
    static const int counts[] = {2, 1};
    op_case c = {SO_OP_MATMUL, SO_DTYPE_Q8_0, 2, 1024, 5 * 1024 + 21, true, 0};
    plain p = plain_create(&c, 17);
    float *got = SO_NEW_N(float, c.n *c.m);
    for (int threads = 1; threads <= 4; threads++) {
        so_backend *b = cpu(threads, SO_CPU_AUTO);
        check_packed(&p, so_cpu_best_level(), threads, counts, SO_LEN(counts));
        for (int again = 0; again < 3; again++) {
            op_run(b, &p.o, 0, c.n, got);
            assert_same_floats(&c, "pieces", got, p.want, (size_t)c.n * (size_t)c.m);
        }
        so_backend_free(b);
    }
    free(got);
    plain_free(&p);
}

/* Wide enough for every kind of blocking over activation rows. */
static void prompts(void **state) {
    (void)state;
    static const int counts[] = {512, 129};
    for (size_t i = 0; i < SO_LEN(dtypes); i++) {
        int k = is_k(dtypes[i]) ? 768 : 576;
        plain p = plain_create(&(op_case){SO_OP_MATMUL, dtypes[i], 512, k, 50, false, 0}, 80 + i);
        so_cpu_level best = so_cpu_best_level();
        check_packed(&p, best, 2, counts, SO_LEN(counts));
        plain_free(&p);
    }
}

static float sign_pattern(uint32_t pattern, int i) {
    switch (pattern) {
    case 0:
        return 1;
    case 1:
        return -1;
    case 2:
        return i % 2 ? 1.0f : -1.0f;
    default:
        return i / 16 % 2 ? 1.0f : -1.0f;
    }
}

/* Fills a block with one bit pattern, except for its halves. */
static void fill_block(so_dtype t, uint8_t pattern, uint8_t *block) {
    const so_dtype_info *info = so_dtype_get((int)t);
    size_t len = has_two_halves(t) || t == SO_DTYPE_Q2_K ? 4 : 2;
    size_t off = t >= SO_DTYPE_Q2_K && !has_two_halves(t) ? (size_t)info->block_bytes - len : 0;
    uint8_t halves[4];
    memcpy(halves, block + off, len);
    memset(block, pattern, (size_t)info->block_bytes);
    memcpy(block + off, halves, len);
}

/* Quants, scales and minima of one bit pattern, and activations that all round to ±127. */
static void extreme(const op_case *c, uint8_t pattern) {
    static const int counts[] = {50, 4, 1};
    int block_bytes = so_dtype_get((int)c->dtype)->block_bytes;
    plain p = plain_create(c, pattern);
    for (size_t at = 0; at < p.o.tensor.n_bytes; at += (size_t)block_bytes)
        fill_block(c->dtype, pattern, p.o.weight_bytes + 1 + at);
    for (int r = 0; r < c->n; r++)
        for (int e = 0; e < c->d; e++)
            p.o.a[r * c->d + e] = sign_pattern((uint32_t)r, e);
    so_backend *b = cpu(1, SO_CPU_SCALAR);
    op_run(b, &p.o, 0, c->n, p.want);
    so_backend_free(b);
    all_levels(&p, 1, counts, SO_LEN(counts));
    plain_free(&p);
}

static void extremes(void **state) {
    (void)state;
    static const uint8_t patterns[] = {0x00, 0xFF, 0x80, 0x7F, 0xF0, 0x0F, 0xAA, 0x55};
    for (size_t i = 0; i < SO_LEN(dtypes); i++)
        for (size_t f = 0; f < SO_LEN(patterns); f++)
            /* as many rows as every kind of tile needs */
            extreme(&(op_case){SO_OP_MATMUL, dtypes[i], is_k(dtypes[i]) ? 50 : 4,
                               is_k(dtypes[i]) ? 512 : 64, 35, false, 0},
                    patterns[f]);
}

static void lookups(void **state) {
    (void)state;
    so_backend *b = cpu(2, SO_CPU_AUTO);
    for (size_t i = 0; i < SO_LEN(dtypes); i++) {
        plain p = plain_create(
            &(op_case){SO_OP_EMBED, dtypes[i], 40, is_k(dtypes[i]) ? 512 : 96, 77, 0, 0}, i);
        so_weight *w = NULL;
        so_err err = {0};
        SO_OK_OR_FAIL(b->vt->weight_create(b, &p.o.tensor, &w, &err), err);
        float *got = SO_NEW_N(float, p.o.c.n *p.o.out_width);
        float *want = SO_NEW_N(float, p.o.c.n *p.o.out_width);
        run_packed(b, &p, w, 0, p.o.c.n, want);
        assert_true(b->vt->weight_pack(b, w));
        memset(p.o.weight_bytes, 0, p.o.tensor.n_bytes); /* not read any more */
        run_packed(b, &p, w, 0, p.o.c.n, got);
        assert_same_floats(&p.o.c, "packed", got, want, (size_t)(p.o.c.n * p.o.out_width));
        free(got);
        free(want);
        b->vt->weight_free(b, w);
        plain_free(&p);
    }
    so_backend_free(b);
}

/* ---- refusals ---- */

static void stays_borrowed(void **state) {
    (void)state;
    so_backend *b = cpu(1, SO_CPU_AUTO);
    so_err err = {0};
    const op_case cases[] = {{SO_OP_MATMUL, SO_DTYPE_F16, 2, 64, 64, false, 0},
                             {SO_OP_MATMUL, SO_DTYPE_Q4_0, 2, 64, 15, false, 0},
                             {SO_OP_MATMUL, SO_DTYPE_Q8_0, 2, 64, 1, true, 0},
                             {SO_OP_MATMUL, SO_DTYPE_Q6_K, 2, 512, 1, false, 0}};
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        plain p = plain_create(&cases[i], i);
        so_weight *w = NULL;
        float got[128];
        SO_OK_OR_FAIL(b->vt->weight_create(b, &p.o.tensor, &w, &err), err);
        assert_false(b->vt->weight_pack(b, w));
        run_packed(b, &p, w, 0, 2, got);
        assert_same_floats(&p.o.c, "borrowed", got, p.want, (size_t)(2 * p.o.c.m));
        b->vt->weight_free(b, w);
        plain_free(&p);
    }
    so_backend_free(b);
}

/* Allocations are released in any order; the last one of a chunk releases the chunk. */
static void slab(void **state) {
    (void)state;
    enum { N = 40 };
    so_slab s = {0};
    so_slab_chunk *chunks[N];
    unsigned char *parts[N];
    size_t size = 5 << 20;
    for (int i = 0; i < N; i++) {
        parts[i] = so_slab_alloc(&s, size + (size_t)i, &chunks[i]);
        assert_non_null(parts[i]);
        assert_int_equal((uintptr_t)parts[i] % 64, 0);
        parts[i][0] = parts[i][size + (size_t)i - 1] = (unsigned char)i;
    }
    assert_ptr_equal(chunks[0], chunks[1]); /* adjacent allocations share a chunk */
    assert_true(parts[1] >= parts[0] + size && parts[1] < parts[0] + size + 64);
    for (int i = 0; i < N; i++)
        assert_true(parts[i][0] == i && parts[i][size + (size_t)i - 1] == i);
    /* runs walk through all chunks and begin again */
    size_t at = 0, n_seen = 0;
    bool seen[N] = {0};
    assert_true(so_slab_bytes(&s) >= N * size && so_slab_largest(&s) >= 6 * size);
    for (int i = 0; i < 2 * N; i++) {
        const unsigned char *run = so_slab_run(&s, &at, 2 << 20);
        for (int j = 0; j < N; j++)
            if (run >= parts[j] && run < parts[j] + size && !seen[j]) {
                seen[j] = true;
                n_seen++;
            }
    }
    assert_true(n_seen > N / 2);
    for (int i = 0; i < N; i++)
        so_slab_release(&s, chunks[i * 7 % N]);
    assert_null(s.chunks);
    assert_null(so_slab_alloc(&s, SIZE_MAX - 5, &chunks[0]));
    assert_null(so_slab_alloc(&s, SIZE_MAX / 2, &chunks[0]));
    parts[0] = so_slab_alloc(&s, 100 << 20, &chunks[0]); /* larger than a chunk */
    assert_non_null(parts[0]);
    so_slab_release(&s, chunks[0]);
    assert_null(s.chunks);
}

/* Returns 0 if a process that cannot map memory keeps the weight borrowed and multiplies
 * correctly. */
static int without_memory(void) {
    plain p = plain_create(&(op_case){SO_OP_MATMUL, SO_DTYPE_Q4_K, 3, 2048, 1600, false, 0}, 1);
    so_backend *b = cpu(1, SO_CPU_AUTO);
    so_weight *w = NULL;
    so_err err = {0};
    if (b->vt->weight_create(b, &p.o.tensor, &w, &err) != 0)
        return 2;
    struct rlimit limited = {1 << 20, RLIM_INFINITY};
    if (setrlimit(RLIMIT_AS, &limited) != 0 || b->vt->weight_pack(b, w))
        return 3;
    static float got[3 * 1600];
    struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_AS, &unlimited);
    run_packed(b, &p, w, 0, 3, got);
    return memcmp(got, p.want, sizeof got) == 0 ? 0 : 4;
}

static void no_memory_for_a_copy(void **state) {
    (void)state;
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer needs address space of its own");
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(without_memory());
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packing_loses_nothing),
        cmocka_unit_test(sizes),
        cmocka_unit_test(row_counts),
        cmocka_unit_test(shapes),
        cmocka_unit_test(pieces),
        cmocka_unit_test(prompts),
        cmocka_unit_test(extremes),
        cmocka_unit_test(lookups),
        cmocka_unit_test(stays_borrowed),
        cmocka_unit_test(no_memory_for_a_copy),
        cmocka_unit_test(slab),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
