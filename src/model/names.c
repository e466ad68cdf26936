/* Finds tensors by name; names.h has the contract. Pure lookups; any thread. */
#include "model/names.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/arch.h"

/* The prefix that a folder puts before the tensor names of its language model. */
static const char *find_prefix(const so_checkpoint *ck, const so_arch_info *a) {
    static const char *const prefixes[] = {"model.", "", "language_model.model.",
                                           "model.language_model.", "transformer."};
    for (size_t i = 0; i < SO_LEN(prefixes); i++) {
        char name[SO_NAME_CAP];
        snprintf(name, sizeof name, "%s%s", prefixes[i], a->global_names[0].hf); /* the embedding */
        if (so_checkpoint_tensor(ck, name))
            return prefixes[i];
    }
    return a->hf_prefix;
}

void so_names_init(so_names *n, const so_checkpoint *ck, const so_hparams *hp) {
    const so_arch_info *a = so_arch_get(hp->arch);
    *n = (so_names){.ck = ck,
                    .folder_name = a->folder_name,
                    .global = a->global_names,
                    .layer = a->layer_names,
                    .n_global = a->n_global_names,
                    .n_layer = a->n_layer_names,
                    .hf_prefix = so_checkpoint_gguf(ck) || a->folder_name ? "" : find_prefix(ck, a),
                    .hf_layers = a->hf_layers};
}

static void file_name(const so_names *n, const so_name_pair *pair, int layer,
                      char buf[SO_NAME_CAP]) {
    bool gguf = so_checkpoint_gguf(n->ck) != NULL;
    if (gguf && layer >= 0)
        snprintf(buf, SO_NAME_CAP, "blk.%d.%s", layer, pair->gguf);
    else if (gguf)
        snprintf(buf, SO_NAME_CAP, "%s", pair->gguf);
    else if (layer >= 0)
        snprintf(buf, SO_NAME_CAP, "%s%s.%d.%s", n->hf_prefix, n->hf_layers, layer, pair->hf);
    else if (strcmp(pair->hf, "lm_head.weight") == 0) /* not under the prefix of the model */
        snprintf(buf, SO_NAME_CAP, "%slm_head.weight",
                 so_checkpoint_tensor(n->ck, "language_model.lm_head.weight") ? "language_model."
                                                                              : "");
    else
        snprintf(buf, SO_NAME_CAP, "%s%s", n->hf_prefix, pair->hf);
}

const so_name_pair *so_names_resolve(const so_names *n, const char *gguf, int layer,
                                     char buf[SO_NAME_CAP]) {
    static const so_name_pair as_given = {"", "", 0};
    if (n->folder_name) {
        if (so_checkpoint_gguf(n->ck))
            snprintf(buf, SO_NAME_CAP, "%s", gguf);
        else if (!n->folder_name(gguf, buf, SO_NAME_CAP))
            return NULL;
        return &as_given;
    }
    const so_name_pair *table = layer >= 0 ? n->layer : n->global;
    int count = layer >= 0 ? n->n_layer : n->n_global;
    for (int i = 0; i < count; i++)
        if (strcmp(table[i].gguf, gguf) == 0) {
            file_name(n, &table[i], layer, buf);
            return &table[i];
        }
    return NULL;
}

static bool ends_with(so_str s, const char *suffix) {
    size_t n = strlen(suffix);
    return s.len >= n && memcmp(s.ptr + s.len - n, suffix, n) == 0;
}

bool so_names_ignored(so_str name) {
    static const char *const prefixes[] = {"vision_tower.", "multi_modal_projector.",
                                           "model.vision_tower.", "model.multi_modal_projector."};
    static const char *const suffixes[] = {".rotary_emb.inv_freq", ".attn.bias",
                                           ".attn.masked_bias"};
    for (size_t i = 0; i < SO_LEN(prefixes); i++)
        if (so_str_starts(name, so_str_c(prefixes[i])))
            return true;
    for (size_t i = 0; i < SO_LEN(suffixes); i++)
        if (ends_with(name, suffixes[i]))
            return true;
    return false;
}
