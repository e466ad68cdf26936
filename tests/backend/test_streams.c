/* Packed weights are one ascending stream: a thread that multiplies rows begin … end-1 touches the
 * cache lines from the first of its first tile to the last of its last tile in ascending order and
 * leaves none out. Checked twice:
 *
 *   layout    for every dtype and every level, the addresses of all loads of a block, computed with
 *             the functions of pack.h that the kernels use, in the order in which the kernels load
 *   kernels   the levels that this processor has run on memory of which only a window of
 *             pages, as large as a block, is readable; every fault moves the window by one page
 *
 * Loads that touch a line again are not restricted: the line is in the L1 cache. Two orders differ
 * from the strict one within a block, and the walk states by how many lines: types with separate high
 * bits load their first eight words of high and of low bits in turn, 512 bytes apart; AMX decodes 64
 * elements of both row groups at a time. */
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/pack.h"
#include "base/mem.h"
#include "so_rig.h"
#include "so_test.h"

static const so_dtype dtypes[] = {SO_DTYPE_Q4_0, SO_DTYPE_Q4_1, SO_DTYPE_Q5_0, SO_DTYPE_Q5_1,
                                  SO_DTYPE_Q8_0, SO_DTYPE_Q2_K, SO_DTYPE_Q3_K, SO_DTYPE_Q4_K,
                                  SO_DTYPE_Q5_K, SO_DTYPE_Q6_K};

static bool is_k(so_dtype t) { return so_dtype_get((int)t)->block_len == 256; }

/* ---- the layout ---- */

enum { LINE = 64, LINES_MAX = 1 << 14 };

/* The lines that were touched, and whether each was touched when all lines before it had been,
 * except for those of the last `slack` lines. */
typedef struct walk {
    bool touched[LINES_MAX];
    size_t n_first, slack; /* lines below n_first were all touched */
    bool ascending;
} walk;

static walk *walk_create(size_t slack) {
    walk *w = SO_NEW(walk);
    w->slack = slack;
    w->ascending = true;
    return w;
}

static void touch(walk *w, size_t at, size_t n_bytes) {
    for (size_t line = at / LINE; line <= (at + n_bytes - 1) / LINE; line++) {
        assert_true(line < LINES_MAX);
        if (!w->touched[line] && line > w->n_first + w->slack)
            w->ascending = false;
        w->touched[line] = true;
        while (w->n_first < LINES_MAX && w->touched[w->n_first])
            w->n_first++;
    }
}

/* How a level loads a tile. */
typedef struct level_order {
    so_cpu_level level;
    int lanes;     /* rows per vector */
    bool quarters; /* 64 elements of both groups at a time; otherwise whole blocks */
} level_order;
static const level_order orders[] = {{SO_CPU_AVX2, 8, false},
                                     {SO_CPU_AVXVNNI, 8, false},
                                     {SO_CPU_AVX512, 16, false},
                                     {SO_CPU_AMX, 16, true}};

static void touch_head(walk *w, so_dtype t, size_t block, int row, int lanes) {
    for (size_t at = 0; at < so_pack_head(t); at += 32)
        touch(w, block + so_pack_head_at(t, row) + at, 2 * (size_t)lanes);
}

static bool has_high(so_dtype t) {
    return t == SO_DTYPE_Q3_K || t == SO_DTYPE_Q5_K || t == SO_DTYPE_Q6_K;
}

/* Elements 32s … 32s+31 of `lanes` rows. */
static void touch_words(walk *w, so_dtype t, size_t words, int s, int lanes) {
    for (size_t i = 0; i < (is_k(t) ? 8 : so_pack_words(t) / SO_PACK_WORD); i++) {
        size_t low = is_k(t) ? (size_t)so_pack_low_word(t, s) : 0;
        if (has_high(t))
            touch(w, words + SO_PACK_WORD * ((size_t)so_pack_high_word(t, s) + i),
                  4 * (size_t)lanes);
        touch(w, words + SO_PACK_WORD * (low + i), 4 * (size_t)lanes);
    }
}

/* The loads of one block; `groups` row groups are left. */
static void walk_block(walk *w, so_dtype t, const level_order *o, int groups, size_t block) {
    int rows = groups * SO_PACK_ROWS, n_subs = is_k(t) ? 8 : 1;
    for (int row = 0; row < rows; row += o->lanes)
        touch_head(w, t, block, row, o->lanes);
    if (o->quarters)
        for (int s = 0; s < n_subs; s += 2)
            for (int row = 0; row < rows; row += o->lanes)
                for (int half = 0; half < 2; half++)
                    touch_words(w, t, block + so_pack_words_at(t, groups, row), s + half, o->lanes);
    else
        for (int first = 0; first < rows; first += SO_PACK_ROWS)
            for (int s = 0; s < n_subs; s++)
                for (int row = first; row < first + SO_PACK_ROWS; row += o->lanes)
                    touch_words(w, t, block + so_pack_words_at(t, groups, row), s, o->lanes);
}

/* All tiles of a matrix from row `begin` on. */
static void walk_rows(so_dtype t, const level_order *o, long begin, long n_rows) {
    int n_blocks = 5, k = n_blocks * so_dtype_get((int)t)->block_len;
    size_t bytes, start = (size_t)(begin / SO_PACK_TILE) * so_pack_tile_bytes(t, k);
    walk *w = walk_create(o->quarters ? so_pack_block_bytes(t, 2) / LINE : has_high(t) ? 8 : 0);
    assert_true(so_pack_bytes(t, k, n_rows, &bytes));
    assert_int_equal(start % LINE, 0);
    for (long r = begin; r < n_rows; r += SO_PACK_TILE) {
        int groups = so_pack_groups(n_rows, r);
        size_t tile = (size_t)(r / SO_PACK_TILE) * so_pack_tile_bytes(t, k) - start;
        for (int b = 0; b < n_blocks; b++)
            walk_block(w, t, o, groups, tile + (size_t)b * so_pack_block_bytes(t, groups));
    }
    if (!w->ascending || w->n_first != (bytes - start) / LINE)
        fail_msg("%s, %s, rows %ld to %ld: not one ascending stream, or %zu of %zu lines touched",
                 so_dtype_get((int)t)->name, so_cpu_level_name(o->level), begin, n_rows, w->n_first,
                 (bytes - start) / LINE);
    free(w);
}

static void layout_is_one_stream(void **state) {
    (void)state;
    static const long rows[] = {16, 17, 32, 33, 64, 81, 160};
    for (size_t i = 0; i < SO_LEN(dtypes); i++)
        for (size_t o = 0; o < SO_LEN(orders); o++)
            for (size_t r = 0; r < SO_LEN(rows); r++)
                if (is_k(dtypes[i]) || !orders[o].quarters) {
                    walk_rows(dtypes[i], &orders[o], 0, rows[r]);
                    if (rows[r] > 32)
                        walk_rows(dtypes[i], &orders[o], 32, rows[r]);
                }
}

/* The walk detects heads that are apart from their words, groups that are apart, and gaps. */
static void walk_detects_other_layouts(void **state) {
    (void)state;
    enum { HEAD = 64, WORDS = 256, N = 4 };
    for (int kind = 0; kind < 4; kind++) {
        walk *w = walk_create(0);
        for (size_t b = 0; b < N; b++)
            for (size_t g = 0; g < 2; g++) {
                size_t group = g * N * (HEAD + WORDS), block = b * 2 * (HEAD + WORDS);
                size_t head = kind == 0   ? group + b * HEAD
                              : kind == 1 ? group + b * (HEAD + WORDS)
                                          : block + g * (HEAD + WORDS) + (kind == 2 ? b * LINE : 0);
                touch(w, head, HEAD);
                touch(w, kind == 0 ? group + N * HEAD + b * WORDS : head + HEAD, WORDS);
            }
        assert_true(w->ascending == (kind == 3));
        free(w);
    }
}

/* ---- the kernels ---- */

enum { PAGE = 4096 };

/* Of the memory at `base` only the pages newest-window+1 … newest are readable. */
static struct {
    uint8_t *base;
    long n_pages, newest, window;
    volatile sig_atomic_t n_strays, n_faults;
} trap;

static void on_fault(int signal_number, siginfo_t *info, void *context) {
    (void)context;
    long page = ((uint8_t *)info->si_addr - trap.base) / PAGE;
    if ((uint8_t *)info->si_addr < trap.base || page >= trap.n_pages) {
        signal(signal_number, SIG_DFL); /* a crash of another kind: fault again */
        return;
    }
    trap.n_faults++;
    if (page == trap.newest + 1) {
        trap.newest = page;
        if (page >= trap.window)
            mprotect(trap.base + (page - trap.window) * PAGE, PAGE, PROT_NONE);
    } else {
        trap.n_strays++;
    }
    mprotect(trap.base + page * PAGE, PAGE, PROT_READ);
}

/* Multiplies n rows with rows begin … m-1 of the matrix in the trap. */
static void multiply(so_cpu_level level, so_dtype t, int n, int k, long begin, long m) {
    const so_kernels *kernels = so_cpu_kernels(level);
    float *x = SO_NEW_N(float, n *k), *out = SO_NEW_N(float, n *m);
    int8_t *q = SO_NEW_N(int8_t, n * k);
    so_q32 *blocks32 = SO_NEW_N(so_q32, n * k / 32);
    so_q256 *blocks256 = SO_NEW_N(so_q256, n * k / 256);
    for (int i = 0; i < n * k; i++)
        x[i] = (float)(i % 7 - 3);
    so_mm mm = {.act = {n, k, x, q, blocks32, blocks256},
                .w = trap.base,
                .tile_bytes = so_pack_tile_bytes(t, k),
                .m = m,
                .out = out};
    if (is_k(t))
        kernels->quantize256(x, n * k, q, blocks256);
    else
        kernels->quantize32(x, n * k, q, blocks32);
    kernels->matmul[t](&mm, begin, m);
    free(x);
    free(out);
    free(q);
    free(blocks32);
    free(blocks256);
}

static void check_kernel(so_cpu_level level, so_dtype t, int n) {
    enum { TILES = 3 };
    size_t row = so_dtype_row_bytes(t, 2048), bytes;
    int k = (int)(16 * PAGE / (row * SO_PACK_TILE / PAGE + 1)) / 256 * 256 + 2048;
    long m = TILES * SO_PACK_TILE - 5, begin = SO_PACK_TILE;
    assert_true(so_pack_bytes(t, k, m, &bytes));
    trap.n_pages = (long)((bytes + PAGE - 1) / PAGE);
    trap.base = mmap(NULL, (size_t)trap.n_pages * PAGE, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(trap.base != MAP_FAILED);
    memset(trap.base, 0x35, bytes);
    mprotect(trap.base, (size_t)trap.n_pages * PAGE, PROT_NONE);
    long first = (long)(so_pack_tile_bytes(t, k) / PAGE);
    trap.newest = first - 1;
    /* as many pages as a block may touch; AMX reads the heads of a block once more after the next */
    trap.window = level == SO_CPU_AMX ? 6 : 3;
    trap.n_strays = trap.n_faults = 0;
    multiply(level, t, n, k, begin, m);
    if (trap.n_strays > 0 || trap.newest != trap.n_pages - 1 ||
        trap.n_faults != trap.n_pages - first)
        fail_msg("%s, %s, %d rows: %d of %d page faults are not the next page; page %ld of %ld",
                 so_dtype_get((int)t)->name, so_cpu_level_name(level), n, (int)trap.n_strays,
                 (int)trap.n_faults, trap.newest, trap.n_pages);
    munmap(trap.base, (size_t)trap.n_pages * PAGE);
}

static void kernels_read_one_stream(void **state) {
    (void)state;
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer handles SIGSEGV itself");
    static const int counts[] = {1, 2, 5, 33};
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels);
    struct sigaction old, mine = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    assert_int_equal(sigaction(SIGSEGV, &mine, &old), 0);
    for (int l = 0; l < n_levels; l++)
        for (size_t i = 0; i < SO_LEN(dtypes) && levels[l] != SO_CPU_SCALAR; i++)
            for (size_t c = 0; c < SO_LEN(counts); c++)
                check_kernel(levels[l], dtypes[i], counts[c]);
    sigaction(SIGSEGV, &old, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_is_one_stream),
        cmocka_unit_test(walk_detects_other_layouts),
        cmocka_unit_test(kernels_read_one_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
