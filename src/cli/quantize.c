/* `sooth quantize IN OUT TYPE`: writes IN as a GGUF file with its weights rounded to TYPE.
 *
 * format/recipe.h has the rule for which tensor gets which dtype, format/convert.c does the work.
 * This file prints the result on one line: sizes, the number of tensors of each dtype, and how many
 * could not get the dtype they should have. --verbose lists these one by one. An interrupt leaves
 * no file behind. */
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/pool.h"
#include "cli/models.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "format/checkpoint.h"
#include "format/convert.h"
#include "format/describe.h"
#include "model/convert.h"

static void on_signal(int sig) {
    so_out_cleanup_on_signal();
    _exit(128 + sig);
}

typedef struct result {
    const char *in, *out, *type;
    so_convert_report report;
    double seconds;
} result;

static const char *dtype_name(so_dtype t) { return so_dtype_get((int)t)->name; }

/* Tensors whose row length is not a multiple of the wanted dtype's block length are written in
 * another dtype. Prints for every pair of dtypes "; 181 tensors are Q4_0 instead of Q4_K (row length
 * not a multiple of 256)". */
static void print_fallbacks(const so_convert_report *p) {
    size_t n[SO_DTYPE_COUNT][SO_DTYPE_COUNT] = {0};
    for (size_t i = 0; i < p->n_fallbacks; i++) {
        const so_convert_fallback *f = &p->fallbacks[i];
        n[f->wanted][f->dtype]++;
        so_log(SO_LOG_INFO,
               "%s: row length %" PRId64
               " is not a multiple of %s's block length %d; written as %s",
               f->tensor, f->row_len, dtype_name(f->wanted), so_dtype_get(f->wanted)->block_len,
               dtype_name(f->dtype));
    }
    for (int w = 0; w < SO_DTYPE_COUNT; w++)
        for (int t = 0; t < SO_DTYPE_COUNT; t++)
            if (n[w][t])
                printf("; %zu %s %s instead of %s (row length not a multiple of %d)", n[w][t],
                       n[w][t] == 1 ? "tensor is" : "tensors are", dtype_name((so_dtype)t),
                       dtype_name((so_dtype)w), so_dtype_get(w)->block_len);
}

static void print_human(const result *r) {
    const so_convert_report *p = &r->report;
    printf("%s: %s, %.1f MB from %.1f MB in %.1f s: ", r->out, r->type, (double)p->bytes_out * 1e-6,
           (double)p->bytes_in * 1e-6, r->seconds);
    const char *sep = "";
    for (int t = 0; t < SO_DTYPE_COUNT; t++)
        if (p->n_tensors[t]) {
            printf("%s%zu %s", sep, p->n_tensors[t], dtype_name((so_dtype)t));
            sep = ", ";
        }
    print_fallbacks(p);
    if (p->n_requantised)
        printf("; %zu %s quantised already, so rounding errors add up", p->n_requantised,
               p->n_requantised == 1 ? "tensor was" : "tensors were");
    putchar('\n');
}

static void print_json(const result *r) {
    const so_convert_report *p = &r->report;
    json_t *types = json_object(), *fallbacks = json_array();
    for (int t = 0; t < SO_DTYPE_COUNT; t++)
        if (p->n_tensors[t])
            json_object_set_new(types, dtype_name((so_dtype)t),
                                json_integer((json_int_t)p->n_tensors[t]));
    for (size_t i = 0; i < p->n_fallbacks; i++) {
        const so_convert_fallback *f = &p->fallbacks[i];
        json_array_append_new(fallbacks,
                              json_pack("{s:o, s:I, s:s, s:s}", "tensor",
                                        so_describe_json_text(so_str_c(f->tensor)), "row",
                                        (json_int_t)f->row_len, "wanted", dtype_name(f->wanted),
                                        "dtype", dtype_name(f->dtype)));
    }
    json_t *o = json_pack("{s:o, s:o, s:s, s:I, s:I, s:o, s:o, s:I, s:f}", "input",
                          so_describe_json_text(so_str_c(r->in)), "output",
                          so_describe_json_text(so_str_c(r->out)), "type", r->type, "bytes_in",
                          (json_int_t)p->bytes_in, "bytes_out", (json_int_t)p->bytes_out, "tensors",
                          types, "fallbacks", fallbacks, "requantised",
                          (json_int_t)p->n_requantised, "seconds", r->seconds);
    json_dumpf(o, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(o);
}

static int open_source(so_checkpoint *ck, so_convert_source *src, so_err *err) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    if (!g)
        return so_model_convert_source(ck, src, err);
    so_convert_from_gguf(g, src);
    return SO_OK;
}

static int convert(const so_args *a, so_checkpoint *ck, const so_recipe *recipe, result *r,
                   so_err *err) {
    so_convert_source src;
    int rc = open_source(ck, &src, err);
    if (rc != SO_OK)
        return rc;
    so_progress bar;
    int64_t n_threads = so_args_int(a, SO_OPT_THREADS, 0), start = so_clock_ns();
    so_convert_opts opts = {.n_threads = n_threads ? (int)n_threads : so_cpu_count(),
                            .progress = so_progress_callback,
                            .user = &bar};
    so_progress_begin(&bar, "quantizing");
    rc = so_convert(&src, recipe, r->out, &opts, &r->report, err);
    so_progress_end(&bar);
    if (so_checkpoint_gguf(ck))
        so_convert_source_free(&src);
    else
        so_model_convert_source_free(&src);
    r->seconds = so_clock_ms_since(start) * 1e-3;
    return rc;
}

static int quantize(const so_args *a, const so_recipe *recipe) {
    so_err err;
    char *path;
    so_checkpoint *ck;
    if (so_model_resolve(a->pos[0], &path, &err) != SO_OK)
        return so_args_fail(a, &err);
    result r = {.in = path, .out = a->pos[1], .type = recipe->name};
    int rc = so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err);
    if (rc == SO_OK) {
        rc = convert(a, ck, recipe, &r, &err);
        so_checkpoint_close(ck);
    }
    if (rc != SO_OK)
        so_args_fail(a, &err);
    else if (so_args_has(a, SO_OPT_JSON))
        print_json(&r);
    else
        print_human(&r);
    so_convert_report_free(&r.report);
    free(path);
    return rc == SO_OK ? 0 : 1;
}

int so_cmd_quantize(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_QUANTIZE, argc, argv))
        return a.status;
    so_recipe recipe;
    int status;
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (so_recipe_parse(a.pos[2], &recipe))
        status = quantize(&a, &recipe);
    else
        status = so_args_bad(&a, "unknown type '%.40s'; known: %s", a.pos[2], so_recipe_names());
    so_args_free(&a);
    return status;
}
