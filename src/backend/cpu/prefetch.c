/* Chooses how packed weights are prefetched (backend/prefetch.h):
 *
 *   1. Read the kept choice; if enough measurements agreed on it, use it and stop.
 *   2. For each class (cpu.h) and each candidate, in ROUNDS rounds: all threads multiply one
 *      activation row, or ROWS of them, with a slice of the packed weights. The bytes are read as
 *      weights of one fixed type per block length (probe_types), whatever their real type: any
 *      bytes are valid weights, and NaN or infinity in the sums costs no time. Consecutive
 *      measurements use consecutive slices, so that each slice was last read many megabytes ago and
 *      comes from the same cache or memory as in a pass of the model.
 *      Products of several rows are measured first. Their choice is the initial choice for one
 *      row.
 *   3. The candidate with the smallest median replaces the choice so far only if it is faster by
 *      more than MARGIN, so that candidates that are equally fast do not alternate. For one row the
 *      margin is ONE_ROW_MARGIN: there the measured times hardly depend on the candidate, though
 *      those of whole passes do (Zen 4, Q4_K: no prefetch 1.3 times slower than 8 KB into L2).
 *   4. Write the result.
 *
 * Called by the thread that owns the backend. */
#include "backend/prefetch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/pack.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/statistics.h"

enum {
    ROUNDS = 7,
    THREAD_BYTES = 2 << 20, /* limit of what one thread reads in a measurement */
    SLICE_MAX = 16 << 20,   /* limit of what all threads read in a measurement */
    MIN_SLICES = 8, /* with fewer slices nothing is measured: they may still be in a cache */
    COLS = 1536,
    ROWS = 4, /* of products with several activation rows */
    MAX_FILE = 4096,
};
static const double MARGIN = 0.05, ONE_ROW_MARGIN = 0.15;
static const char HEAD[] = "sooth prefetch 2\n";

/* [0]: for blocks of 32, [1]: for blocks of 256. The first of each is the default. */
static const so_prefetch candidates[2][6] = {
    {{12 << 10, true},
     {0, false},
     {2 << 10, true},
     {4 << 10, true},
     {8 << 10, false},
     {32 << 10, false}},
    {{4 << 10, true},
     {0, false},
     {2 << 10, true},
     {12 << 10, true},
     {8 << 10, false},
     {32 << 10, false}},
};
enum { N_CANDIDATES = SO_LEN(candidates[0]) };
static const so_dtype probe_types[2] = {SO_DTYPE_Q4_1, SO_DTYPE_Q4_K};
static const char *const class_names[SO_PREFETCH_CLASSES] = {"blocks32", "blocks256",
                                                             "blocks32rows", "blocks256rows"};

/* The candidates and the type of weights depend only on the block length: 0 means 32, 1 means 256. */
static int length_of(int class) { return class % 2; }

void so_cpu_prefetch_init(so_cpu *b) {
    for (int c = 0; c < SO_PREFETCH_CLASSES; c++)
        b->prefetch[c] = candidates[length_of(c)][0];
}

static bool same(so_prefetch a, so_prefetch b) {
    return a.lead == b.lead && (a.lead == 0 || a.l1 == b.l1);
}

/* ---- measuring ---- */

typedef struct kept {
    so_prefetch choice[SO_PREFETCH_CLASSES];
    int agreed[SO_PREFETCH_CLASSES];
} kept;

static bool is_settled(const kept *k, int class) { return k->agreed[class] >= SO_PREFETCH_AGREED; }

typedef struct probe_job {
    so_cpu *b;
    so_mm mm;
    const uint8_t *slice;
    size_t part; /* bytes of the slice that one thread reads */
    float *out;  /* [threads][ROWS][mm.m] */
} probe_job;

static void multiply_part(void *arg, int index, int count) {
    (void)count;
    const probe_job *job = arg;
    so_mm mm = job->mm;
    mm.w = job->slice + (size_t)index * job->part;
    mm.out = job->out + (size_t)index * ROWS * (size_t)mm.m;
    job->b->kernels->matmul[probe_types[mm.act.blocks256 != NULL]](&mm, 0, mm.m);
}

/* Fills ns[candidate][round] for one class. *at: position in the weights, for so_slab_run. */
static void measure(probe_job *job, int class, size_t *at, double (*ns)[ROUNDS]) {
    so_pool *pool = job->b->pool;
    int count = so_pool_count(pool);
    job->mm.tile_bytes = so_pack_tile_bytes(probe_types[length_of(class)], COLS);
    job->mm.m = (long)(job->part / job->mm.tile_bytes) * SO_PACK_TILE;
    for (int r = -1; r < ROUNDS; r++)
        for (int i = 0; i < N_CANDIDATES; i++) {
            job->slice = so_slab_run(&job->b->slab, at, job->part * (size_t)count);
            job->mm.prefetch = candidates[length_of(class)][i];
            int64_t t = so_clock_ns();
            so_pool_run(pool, multiply_part, job);
            if (r >= 0) /* the first round warms up */
                ns[i][r] = (double)(so_clock_ns() - t);
        }
}

/* The best candidate, or `incumbent` if none is clearly better. */
static so_prefetch pick(int class, so_prefetch incumbent, double (*ns)[ROUNDS]) {
    double best = 0, limit = 0;
    so_prefetch out = incumbent;
    const so_prefetch *all = candidates[length_of(class)];
    for (int i = 0; i < N_CANDIDATES; i++)
        if (same(all[i], incumbent))
            limit = so_median(ns[i], ROUNDS) * (1 - (class < 2 ? ONE_ROW_MARGIN : MARGIN));
    for (int i = 0; i < N_CANDIDATES; i++) {
        double t = so_median(ns[i], ROUNDS);
        if ((limit == 0 || t < limit) && (best == 0 || t < best)) {
            best = t;
            out = all[i];
        }
    }
    return out;
}

/* Measures the classes that are not settled and updates *k. Returns false if nothing was measured. */
static bool remeasure(so_cpu *b, kept *k) {
    size_t count = (size_t)so_pool_count(b->pool), at = 0;
    size_t part = SO_MIN((size_t)THREAD_BYTES, SLICE_MAX / count);
    if (so_slab_largest(&b->slab) < part * count ||
        so_slab_bytes(&b->slab) < part * count * MIN_SLICES)
        return false;
    float x[ROWS * COLS];
    int8_t q[ROWS * COLS];
    so_q32 blocks32[ROWS * COLS / 32];
    so_q256 blocks256[ROWS * COLS / 256];
    for (int i = 0; i < ROWS * COLS; i++)
        x[i] = (float)(i % 17 - 8);
    probe_job job = {.b = b, .part = part};
    job.out = SO_NEW_N(float, (long)(count * part / 256 * ROWS));
    for (int i = 0; i < SO_PREFETCH_CLASSES; i++) {
        double ns[N_CANDIDATES][ROUNDS];
        int c = (i + 2) % SO_PREFETCH_CLASSES; /* several rows first */
        if (is_settled(k, c))
            continue;
        if (c < 2 && k->agreed[c] == 0)
            k->choice[c] = k->choice[c + 2];
        job.mm.act = (so_act){.n = c < 2 ? 1 : ROWS, .k = COLS, .x = x, .q = q};
        if (length_of(c) == 0) {
            job.mm.act.blocks32 = blocks32;
            b->kernels->quantize32(x, ROWS * COLS, q, blocks32);
        } else {
            job.mm.act.blocks256 = blocks256;
            b->kernels->quantize256(x, ROWS * COLS, q, blocks256);
        }
        measure(&job, c, &at, ns);
        so_prefetch now = pick(c, k->choice[c], ns);
        k->agreed[c] = same(now, k->choice[c]) ? k->agreed[c] + 1 : 1;
        k->choice[c] = now;
    }
    free(job.out);
    return true;
}

/* ---- the file ---- */

static void key_of(const so_cpu *b, so_buf *out) {
    b->base.vt->describe(&b->base, out);
    so_buf_append_c(out, ", sooth " SO_VERSION "\n");
}

static bool parse_class(const char *line, int class, kept *out) {
    unsigned lead, cache, agreed;
    int end = 0;
    size_t name = strlen(class_names[class]);
    if (strncmp(line, class_names[class], name) != 0 ||
        sscanf(line + name, " %7u %1u %3u%n", &lead, &cache, &agreed, &end) != 3 ||
        line[name + (size_t)end] != '\n' || cache < 1 || cache > 2)
        return false;
    const so_prefetch *all = candidates[length_of(class)];
    for (int i = 0; i < N_CANDIDATES; i++)
        if (same(all[i], (so_prefetch){lead, cache == 1})) {
            out->choice[class] = all[i];
            out->agreed[class] = (int)agreed;
            return true;
        }
    return false; /* written by a version with other candidates */
}

/* `text`: a whole file, NUL-terminated. */
static bool parse(const char *text, const char *key, kept *out) {
    size_t head = sizeof HEAD - 1, n = strlen(key);
    if (strncmp(text, HEAD, head) != 0 || strncmp(text + head, key, n) != 0)
        return false;
    text += head + n;
    for (int c = 0; c < SO_PREFETCH_CLASSES; c++) {
        const char *end = strchr(text, '\n');
        if (!end || !parse_class(text, c, out))
            return false;
        text = end + 1;
    }
    return strcmp(text, "end\n") == 0;
}

static bool read_kept(const char *path, const char *key, kept *out) {
    so_buf file = {0};
    kept k = {0};
    bool good = so_file_exists(path) && so_file_read(path, MAX_FILE, &file, NULL) == SO_OK;
    if (good) {
        so_buf_append_char(&file, '\0');
        good = parse(file.data, key, &k);
    }
    so_buf_free(&file);
    if (good)
        *out = k;
    return good;
}

static int write_kept(const char *path, const char *key, const kept *k, so_err *err) {
    so_buf text = {0};
    char *dir = so_strndup(path, (size_t)(strrchr(path, '/') - path));
    int rc = so_dir_create(dir, err);
    so_buf_append_c(&text, HEAD);
    so_buf_append_c(&text, key);
    for (int c = 0; c < SO_PREFETCH_CLASSES; c++)
        so_buf_printf(&text, "%s %u %d %d\n", class_names[c], (unsigned)k->choice[c].lead,
                      k->choice[c].l1 ? 1 : 2, k->agreed[c]);
    so_buf_append_c(&text, "end\n");
    if (rc == SO_OK)
        rc = so_out_put(path, text.data, text.len, err);
    so_buf_free(&text);
    free(dir);
    return rc;
}

static char *path_of(const char *cache_dir, const so_buf *key) {
    char name[48];
    snprintf(name, sizeof name, "prefetch-%016llx.txt",
             (unsigned long long)so_hash_bytes(key->data, key->len));
    char *costs = so_path_join(cache_dir, "costs"), *path = so_path_join(costs, name);
    free(costs);
    return path;
}

/* ---- the choice ---- */

static void apply(so_cpu *b, const so_prefetch *choice, so_prefetch_origin origin) {
    memcpy(b->prefetch, choice, sizeof b->prefetch);
    b->prefetch_origin = origin;
}

void so_prefetch_choose(so_backend *base, const char *cache_dir) {
    if (strcmp(base->vt->name, "cpu") != 0)
        return;
    so_cpu *b = (so_cpu *)base;
    so_buf key = {0};
    so_err err = {0};
    kept k = {0};
    memcpy(k.choice, b->prefetch, sizeof k.choice); /* the default */
    if (b->kernels->level == SO_CPU_SCALAR)
        return;
    key_of(b, &key);
    so_buf_append_char(&key, '\0');
    char *path = cache_dir ? path_of(cache_dir, &key) : NULL;
    bool found = path && read_kept(path, key.data, &k);
    bool settled = found;
    for (int c = 0; c < SO_PREFETCH_CLASSES; c++)
        settled &= is_settled(&k, c);
    if (settled) {
        apply(b, k.choice, SO_PREFETCH_KEPT);
    } else if (remeasure(b, &k)) {
        apply(b, k.choice, SO_PREFETCH_MEASURED);
        if (path && write_kept(path, key.data, &k, &err) != SO_OK)
            so_log(SO_LOG_DEBUG, "the choice of prefetch is not kept: %s", err.msg);
    }
    free(path);
    so_buf_free(&key);
}

static void describe_one(so_prefetch p, so_buf *out) {
    if (p.lead == 0)
        so_buf_append_c(out, "none");
    else
        so_buf_printf(out, "%u KB ahead into L%d", (unsigned)p.lead >> 10, p.l1 ? 1 : 2);
}

void so_prefetch_describe(const so_backend *base, so_buf *out) {
    static const char *const origins[] = {"default", "measured in this run", "measured earlier"};
    if (strcmp(base->vt->name, "cpu") != 0)
        return;
    const so_cpu *b = (const so_cpu *)base;
    for (int length = 32; length <= 256; length += 256 - 32) {
        so_buf_printf(out, "%sblocks of %d: ", length == 32 ? "" : "; ", length);
        describe_one(b->prefetch[so_prefetch_class(length, 1)], out);
        so_buf_append_c(out, ", several rows ");
        describe_one(b->prefetch[so_prefetch_class(length, 2)], out);
    }
    so_buf_printf(out, " (%s)", origins[b->prefetch_origin]);
}
