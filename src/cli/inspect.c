/* `sooth inspect`: prints the metadata and tensors of a model file. With -md, --ctx, --parallel,
 * --kv-type or --device it prints the memory that the model would need instead (budget.c).
 * format/describe.c produces the description; this file prints it in columns. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "cli/budget.h"
#include "cli/models.h"
#include "cli/options.h"
#include "format/describe.h"
#include "model/heads.h"

enum { VALUE_WIDTH = 64 };

static void print_metadata(const so_gguf *g) {
    so_buf key = {0}, type = {0}, value = {0};
    printf("\nmetadata (%zu)\n", so_gguf_n_kv(g));
    for (size_t i = 0; i < so_gguf_n_kv(g); i++) {
        const so_gguf_kv *kv = so_gguf_kv_at(g, i);
        so_buf_clear(&key);
        so_buf_clear(&type);
        so_buf_clear(&value);
        so_describe_text(kv->key, 80, &key);
        so_describe_type(kv, &type);
        so_describe_value(kv, VALUE_WIDTH, &value);
        printf("  %-42s %-15s %s\n", so_buf_str(&key).ptr, so_buf_str(&type).ptr,
               so_buf_str(&value).ptr);
    }
    so_buf_free(&key);
    so_buf_free(&type);
    so_buf_free(&value);
}

static void print_config(const json_t *config) {
    const char *key;
    json_t *v;
    printf("\nconfig.json (%zu)\n", json_object_size(config));
    json_object_foreach((json_t *)(uintptr_t)config, key, v) {
        char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
        so_buf name = {0}, value = {0};
        so_describe_text(so_str_c(key), 80, &name);
        so_describe_text(so_str_c(text ? text : ""), VALUE_WIDTH + 16, &value);
        printf("  %-42s %s\n", so_buf_str(&name).ptr, so_buf_str(&value).ptr);
        so_buf_free(&name);
        so_buf_free(&value);
        free(text);
    }
}

/* The column width for tensor names: the longest name, at least 24 and at most 80. */
static int name_width(const so_checkpoint *ck) {
    size_t width = 24;
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++)
        width = SO_MAX(width, so_checkpoint_tensor_at(ck, i)->name.len);
    return (int)SO_MIN(width, (size_t)80);
}

static void print_tensors(const so_checkpoint *ck) {
    int width = name_width(ck);
    bool slowest_first = !so_checkpoint_gguf(ck);
    printf("\ntensors (%zu)\n", so_checkpoint_n_tensors(ck));
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++) {
        const so_tensor *t = so_checkpoint_tensor_at(ck, i);
        so_buf name = {0}, shape = {0};
        so_describe_text(t->name, 80, &name);
        for (int d = 0; d < t->n_dims; d++)
            so_buf_printf(&shape, "%s%" PRId64, d ? " x " : "",
                          t->dims[slowest_first ? t->n_dims - 1 - d : d]);
        printf("  %-*s %-5s %-20s %14zu\n", width, so_buf_str(&name).ptr,
               so_dtype_get((int)t->dtype)->name, so_buf_str(&shape).ptr, t->n_bytes);
        so_buf_free(&name);
        so_buf_free(&shape);
    }
}

static void print_type(const char *name, size_t n, uint64_t params, uint64_t bytes) {
    printf("  %-6s %6zu tensors %15" PRIu64 " parameters %15" PRIu64 " bytes %7.3f bits each\n",
           name, n, params, bytes, params ? (double)bytes * 8 / (double)params : 0);
}

static void print_types(const so_checkpoint *ck, const so_description *d) {
    printf("\ntypes\n");
    for (int t = 0; t < SO_DTYPE_COUNT; t++)
        if (d->by_dtype[t].n_tensors)
            print_type(so_dtype_get(t)->name, d->by_dtype[t].n_tensors, d->by_dtype[t].n_params,
                       d->by_dtype[t].n_bytes);
    print_type("all", so_checkpoint_n_tensors(ck), d->n_params, d->tensor_bytes);
}

/* What decoding heads are, and how often they were right. */
static void print_heads(const so_checkpoint *ck) {
    so_heads_info h;
    so_err err;
    if (!so_heads_is(ck))
        return;
    if (so_heads_read_info(ck, &h, &err) != SO_OK) {
        printf("\nheads: %s\n", err.msg);
        return;
    }
    printf("\n%s heads (%d)", so_heads_kind_name(h.kind), h.n_heads);
    if (h.kind == SO_HEADS_MEDUSA)
        printf(", %d residual blocks each", h.n_layers);
    if (h.kind == SO_HEADS_BLOCKWISE)
        printf(", blocks of width %d", h.d_hidden);
    printf("\n");
    for (int i = 0; i < h.n_heads && h.n_ranks > 0; i++) {
        double sum = 0;
        printf("  head %-2d  right on held-out text, by rank:", i + 1);
        for (int r = 0; r < h.n_ranks; r++) {
            sum += h.accuracy[i][r];
            if (r < 5)
                printf(" %.3f", h.accuracy[i][r]);
        }
        printf("; any of %d: %.3f\n", h.n_ranks, sum);
    }
}

static void print_human(const so_checkpoint *ck) {
    so_description d;
    so_describe(ck, &d);
    printf("%s\n%s, %s, %" PRIu64 " parameters (%.3f M), %zu bytes\n", so_checkpoint_path(ck),
           d.format, d.arch, d.n_params, (double)d.n_params * 1e-6, so_checkpoint_bytes(ck));
    print_heads(ck);
    if (so_checkpoint_gguf(ck))
        print_metadata(so_checkpoint_gguf(ck));
    else
        print_config(so_checkpoint_config(ck));
    if (so_checkpoint_n_tensors(ck)) {
        print_tensors(ck);
        print_types(ck, &d);
    }
}

static json_t *heads_json(const so_heads_info *h) {
    json_t *all = json_array();
    for (int i = 0; i < h->n_heads && h->n_ranks > 0; i++) {
        json_t *row = json_array();
        for (int r = 0; r < h->n_ranks; r++)
            json_array_append_new(row, json_real(h->accuracy[i][r]));
        json_array_append_new(all, row);
    }
    return json_pack("{s:s, s:i, s:i, s:i, s:o}", "kind", so_heads_kind_name(h->kind), "count",
                     h->n_heads, "layers", h->n_layers, "hidden", h->d_hidden, "accuracy", all);
}

static void print_json(const so_checkpoint *ck) {
    json_t *o = so_describe_json(ck);
    so_heads_info h;
    if (so_heads_read_info(ck, &h, NULL) == SO_OK)
        json_object_set_new(o, "heads", heads_json(&h));
    json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(15));
    putchar('\n');
    json_decref(o);
}

static int inspect_file(const so_args *a, const char *model) {
    so_err err;
    char *path;
    so_checkpoint *ck;
    if (so_model_resolve(model, &path, &err) != SO_OK)
        return so_args_fail(a, &err);
    int rc = so_checkpoint_open(path, SO_CHECKPOINT_CONFIG, &ck, &err);
    free(path);
    if (rc != SO_OK)
        return so_args_fail(a, &err);
    if (so_args_has(a, SO_OPT_JSON))
        print_json(ck);
    else
        print_human(ck);
    so_checkpoint_close(ck);
    return 0;
}

static bool wants_budget(const so_args *a) {
    return so_args_has(a, SO_OPT_DRAFT_MODEL) || so_args_has(a, SO_OPT_CTX) ||
           so_args_has(a, SO_OPT_PARALLEL) || so_args_has(a, SO_OPT_KV_TYPE) ||
           so_args_has(a, SO_OPT_DEVICE);
}

int so_cmd_inspect(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_INSPECT, argc, argv))
        return a.status;
    const char *model = a.n_pos ? a.pos[0] : so_args_str(&a, SO_OPT_MODEL, NULL);
    int status;
    if (!model || (a.n_pos && so_args_has(&a, SO_OPT_MODEL)))
        status = so_args_bad(&a, "give one model: a file, a folder, or the name of a pulled model");
    else if (wants_budget(&a))
        status = so_cli_budget(&a, model);
    else
        status = inspect_file(&a, model);
    so_args_free(&a);
    return status;
}
