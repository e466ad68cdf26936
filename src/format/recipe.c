/* Implements the rule in recipe.h. Tensor names are GGUF's (blk.N.attn_v.weight); sources with
 * other names map them first. No state outside so_recipe; any thread. */
#include "format/recipe.h"

#include <stdio.h>
#include <strings.h>

#include "base/mem.h"
#include "format/blocks.h"

typedef struct row {
    const char *name;
    so_dtype base, better;
    char mix;
    int file_type;
} row;

#define PLAIN(T, number) \
    { #T, SO_DTYPE_##T, SO_DTYPE_##T, 0, number }
static const row rows[] = {
    PLAIN(F32, 0),
    PLAIN(F16, 1),
    PLAIN(BF16, 32),
    PLAIN(Q8_0, 7),
    PLAIN(Q4_0, 2),
    PLAIN(Q4_1, 3),
    PLAIN(Q5_0, 8),
    PLAIN(Q5_1, 9),
    PLAIN(Q2_K, 10),
    PLAIN(Q3_K, 11),
    PLAIN(Q4_K, 14),
    PLAIN(Q5_K, 16),
    PLAIN(Q6_K, 18),
    {"Q2_K_S", SO_DTYPE_Q2_K, SO_DTYPE_Q4_K, 'S', 21},
    {"Q2_K_M", SO_DTYPE_Q2_K, SO_DTYPE_Q4_K, 'M', 10},
    {"Q3_K_S", SO_DTYPE_Q3_K, SO_DTYPE_Q5_K, 'S', 11},
    {"Q3_K_M", SO_DTYPE_Q3_K, SO_DTYPE_Q5_K, 'M', 12},
    {"Q3_K_L", SO_DTYPE_Q3_K, SO_DTYPE_Q5_K, 'L', 13},
    {"Q4_K_S", SO_DTYPE_Q4_K, SO_DTYPE_Q6_K, 'S', 14},
    {"Q4_K_M", SO_DTYPE_Q4_K, SO_DTYPE_Q6_K, 'M', 15},
    {"Q5_K_S", SO_DTYPE_Q5_K, SO_DTYPE_Q6_K, 'S', 16},
    {"Q5_K_M", SO_DTYPE_Q5_K, SO_DTYPE_Q6_K, 'M', 17},
};

bool so_recipe_parse(const char *name, so_recipe *out) {
    for (size_t i = 0; i < SO_LEN(rows); i++) {
        if (strcasecmp(rows[i].name, name) == 0) {
            *out = (so_recipe){.base = rows[i].base,
                               .better = rows[i].better,
                               .mix = rows[i].mix,
                               .file_type = rows[i].file_type};
            snprintf(out->name, sizeof out->name, "%s", rows[i].name);
            return true;
        }
    }
    return false;
}

const char *so_recipe_names(void) {
    return "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q2_K_S Q2_K_M Q3_K_S "
           "Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M";
}

int so_recipe_file_type(so_dtype dtype) {
    for (size_t i = 0; i < SO_LEN(rows); i++)
        if (rows[i].mix == 0 && rows[i].base == dtype)
            return rows[i].file_type;
    return 0;
}

/* The layer number N of a name blk.N.…, or −1. */
static int layer_of(so_str name) {
    int n = 0;
    size_t i = 4;
    if (!so_str_starts(name, SO_STR("blk.")))
        return -1;
    for (; i < name.len && name.ptr[i] >= '0' && name.ptr[i] <= '9' && n < 100000; i++)
        n = 10 * n + (name.ptr[i] - '0');
    return i > 4 && i < name.len && name.ptr[i] == '.' ? n : -1;
}

void so_recipe_observe(so_recipe *r, so_str tensor) {
    r->n_layers = SO_MAX(r->n_layers, layer_of(tensor) + 1);
    r->has_output |= so_str_eq_c(tensor, "output.weight");
}

static bool contains(so_str s, const char *part) {
    return memmem(s.ptr, s.len, part, strlen(part)) != NULL;
}

static bool ends(so_str s, const char *tail) {
    size_t n = strlen(tail);
    return s.len >= n && memcmp(s.ptr + s.len - n, tail, n) == 0;
}

static bool stays_f32(so_str name, int n_dims) {
    return n_dims < 2 || !ends(name, ".weight") || contains(name, "norm") ||
           so_str_eq_c(name, "position_embd.weight");
}

static bool is_better(const so_recipe *r, so_str name) {
    if (r->mix == 0)
        return false;
    if (so_str_eq_c(name, r->has_output ? "output.weight" : "token_embd.weight"))
        return true;
    int layer = layer_of(name), n = r->n_layers;
    if (r->mix == 'S' || layer < 0 || !(contains(name, ".attn_v.") || contains(name, ".ffn_down")))
        return false;
    return r->mix == 'L' || layer < n / 8 || layer >= n - n / 8 || (layer - n / 8) % 3 == 2;
}

/* The largest dtype with blocks of 32 that takes no more bits per element than `wanted`; Q4_0, the
 * smallest, if there is none. */
static so_dtype same_size(so_dtype wanted) {
    static const so_dtype small[] = {SO_DTYPE_Q4_0, SO_DTYPE_Q4_1, SO_DTYPE_Q5_0, SO_DTYPE_Q5_1,
                                     SO_DTYPE_Q8_0};
    size_t limit = so_dtype_row_bytes(wanted, SO_QK_K);
    so_dtype best = small[0];
    for (size_t i = 1; i < SO_LEN(small); i++)
        if (so_dtype_row_bytes(small[i], SO_QK_K) <= limit)
            best = small[i];
    return best;
}

so_recipe_choice so_recipe_choose(const so_recipe *r, so_str tensor, int n_dims,
                                  const int64_t *dims) {
    if (stays_f32(tensor, n_dims))
        return (so_recipe_choice){SO_DTYPE_F32, SO_DTYPE_F32};
    so_dtype wanted = is_better(r, tensor) ? r->better : r->base;
    if (dims[0] % so_dtype_get((int)wanted)->block_len == 0)
        return (so_recipe_choice){wanted, wanted};
    bool k_type = so_dtype_get((int)wanted)->block_len == SO_QK_K;
    return (so_recipe_choice){k_type && dims[0] % SO_QK == 0 ? same_size(wanted) : SO_DTYPE_F16,
                              wanted};
}
