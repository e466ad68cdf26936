/* Prints the memory budget as a table or as JSON. model/budget.c computes it. Main thread only. */
#include "cli/budget.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/load.h"
#include "cli/models.h"
#include "format/describe.h"
#include "model/budget.h"

enum { MAX_DEFAULT_CTX = 4096 };

typedef struct part {
    const char *role; /* "target", "draft" */
    char *path;
    so_budget b;
} part;

static int read_part(const char *model, const char *role, int64_t ctx, int n_seqs, so_dtype kv,
                     part *out, so_err *err) {
    so_checkpoint *ck;
    int rc = so_model_resolve(model, &out->path, err);
    if (rc != SO_OK)
        return rc;
    rc = so_checkpoint_open(out->path, SO_CHECKPOINT_CONFIG, &ck, err);
    if (rc != SO_OK)
        return rc;
    out->role = role;
    rc = so_budget_of(ck, SO_MAX(ctx, (int64_t)0), n_seqs, kv, &out->b, err);
    /* without --ctx: the default of `run` */
    if (rc == SO_OK && ctx < 0 && out->b.ctx > MAX_DEFAULT_CTX)
        rc = so_budget_of(ck, MAX_DEFAULT_CTX, n_seqs, kv, &out->b, err);
    so_checkpoint_close(ck);
    return rc;
}

static int64_t total(const part *parts, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += parts[i].b.weight_bytes + parts[i].b.kv_bytes + parts[i].b.source_bytes;
    return sum;
}

/* The memory of the device that --device names. */
typedef struct device_memory {
    const char *name; /* NULL: not asked for */
    size_t free_bytes, total_bytes;
} device_memory;

static int ask_device(const so_args *a, device_memory *out, so_err *err) {
    const char *name = so_args_str(a, SO_OPT_DEVICE, "cpu");
    so_backend *b = NULL;
    if (strcmp(name, "cpu") == 0)
        return SO_OK;
    int rc =
        so_backend_open(strcmp(name, "auto") == 0 ? "cuda" : name, &(so_backend_opts){0}, &b, err);
    if (rc == SO_OK && !b->vt->memory)
        rc = so_err_set(err, SO_EINVAL, "--device %.40s has no memory of its own", name);
    if (rc == SO_OK)
        rc = b->vt->memory(b, &out->free_bytes, &out->total_bytes, err);
    if (rc == SO_OK)
        out->name = name;
    so_backend_free(b);
    return rc;
}

static void print_device(const device_memory *d, int64_t need) {
    if (d->name)
        printf("--device %s: %zu MiB free of %zu MiB; target and draft %s\n", d->name,
               d->free_bytes >> 20, d->total_bytes >> 20,
               need <= (int64_t)d->free_bytes ? "fit" : "do not fit");
}

static void print_human(const part *parts, int n, int n_seqs, const char *kv_type) {
    printf("%d sequence%s of %" PRId64 " tokens, KV cache %s\n\n", n_seqs, n_seqs == 1 ? "" : "s",
           parts[0].b.ctx, kv_type);
    printf("%-8s %16s %15s %16s %16s\n", "", "weights", "KV per token", "per sequence", "total");
    bool estimated = false;
    for (int i = 0; i < n; i++) {
        const so_budget *b = &parts[i].b;
        printf("%-8s %15" PRId64 "%s %15" PRId64 " %16" PRId64 " %16" PRId64 "  %s\n",
               parts[i].role, b->weight_bytes, b->estimated ? "*" : " ", b->kv_bytes_per_token,
               b->kv_bytes_per_seq, b->kv_bytes, parts[i].path);
        if (b->n_sources > 0)
            printf("%-8s %16s %15s %16s %16" PRId64 "  keys and values of %d source texts\n", "",
                   "", "", "", b->source_bytes, b->n_sources);
        estimated |= b->estimated;
        if (b->ctx > b->hp.n_ctx_train)
            printf("%-8s trained for contexts of %d tokens\n", "", b->hp.n_ctx_train);
    }
    int64_t sum = total(parts, n);
    printf("\ntotal %" PRId64 " bytes (%.2f GB, %.2f GiB), without the scratch memory of passes\n",
           sum, (double)sum * 1e-9, (double)sum / (1 << 30));
    if (estimated)
        puts("* estimated from the shape: the weight files are missing");
}

static json_t *json_part(const part *p) {
    const so_budget *b = &p->b;
    return json_pack("{s:o, s:s, s:I, s:I, s:b, s:I, s:I, s:I, s:i, s:I}", "path",
                     so_describe_json_text(so_str_c(p->path)), "arch", b->hp.arch_name,
                     "parameters", (json_int_t)b->n_params, "weight_bytes",
                     (json_int_t)b->weight_bytes, "estimated", b->estimated, "kv_bytes_per_token",
                     (json_int_t)b->kv_bytes_per_token, "kv_bytes_per_sequence",
                     (json_int_t)b->kv_bytes_per_seq, "kv_bytes", (json_int_t)b->kv_bytes,
                     "sources", b->n_sources, "source_bytes", (json_int_t)b->source_bytes);
}

static void print_json(const part *parts, int n, int n_seqs, const char *kv_type,
                       const device_memory *d) {
    json_t *o = json_pack("{s:I, s:i, s:s, s:o, s:o, s:I}", "ctx", (json_int_t)parts[0].b.ctx,
                          "parallel", n_seqs, "kv_type", kv_type, "target", json_part(&parts[0]),
                          "draft", n > 1 ? json_part(&parts[1]) : json_null(), "total_bytes",
                          (json_int_t)total(parts, n));
    if (d->name)
        json_object_set_new(o, "device",
                            json_pack("{s:s, s:I, s:I}", "name", d->name, "free_bytes",
                                      (json_int_t)d->free_bytes, "total_bytes",
                                      (json_int_t)d->total_bytes));
    json_dumpf(o, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(o);
}

int so_cli_budget(const so_args *a, const char *target) {
    part parts[2] = {0};
    so_err err;
    const char *draft = so_args_str(a, SO_OPT_DRAFT_MODEL, NULL);
    const char *kv_type = so_args_str(a, SO_OPT_KV_TYPE, "f16");
    so_dtype kv = so_cli_kv_dtype(a);
    int n_seqs = (int)so_args_int(a, SO_OPT_PARALLEL, 1), n = draft ? 2 : 1;
    int rc =
        read_part(target, "target", so_args_int(a, SO_OPT_CTX, -1), n_seqs, kv, &parts[0], &err);
    /* the draft model's cache must hold the target's context */
    if (rc == SO_OK && draft)
        rc = read_part(draft, "draft", parts[0].b.ctx, n_seqs, kv, &parts[1], &err);
    device_memory device = {0};
    if (rc == SO_OK)
        rc = ask_device(a, &device, &err);
    int status = 0;
    if (rc != SO_OK) {
        status = so_args_fail(a, &err);
    } else if (so_args_has(a, SO_OPT_JSON)) {
        print_json(parts, n, n_seqs, kv_type, &device);
    } else {
        print_human(parts, n, n_seqs, kv_type);
        print_device(&device, total(parts, n));
    }
    free(parts[0].path);
    free(parts[1].path);
    return status;
}
