/* Which tensor gets which dtype when a model is quantised. One rule, stated here and nowhere else:
 *
 *   kept F32    tensors with one dimension, names with "norm", names that do not end in ".weight",
 * and position_embd.weight TYPE        every other tensor, where TYPE is a plain dtype (the
 * embedding and the output too) TYPE_S      Q2_K … Q5_K as TYPE, but the output matrix gets the
 * better dtype TYPE_M      also attn_v and ffn_down of the first and last eighth of the layers and
 * of every third between them TYPE_L      also attn_v and ffn_down of all layers
 *
 * The better dtype is Q4_K for Q2_K, Q5_K for Q3_K, Q6_K for Q4_K and Q5_K. The output matrix is
 * output.weight, or token_embd.weight where a model has no other.
 * Where rows are no multiple of the dtype's block, a K dtype falls back to Q8_0, and where they are
 * no multiple of 32 either, to F16. */
#ifndef SO_FORMAT_RECIPE_H
#define SO_FORMAT_RECIPE_H

#include "format/dtype.h"

typedef struct so_recipe {
    char name[16]; /* in capitals */
    so_dtype base, better;
    char mix;      /* 0, 'S', 'M' or 'L' */
    int file_type; /* the number that general.file_type takes */
    /* about the model, filled by so_recipe_observe */
    int n_layers;
    bool has_output;
} so_recipe;

/* By name, any case; false if unknown. */
bool so_recipe_parse(const char *name, so_recipe *out);
/* All names, separated by spaces, for messages and help. */
const char *so_recipe_names(void);
/* To be told every tensor's name before the first choice. */
void so_recipe_observe(so_recipe *r, so_str tensor);

typedef struct so_choice {
    so_dtype dtype;
    so_dtype wanted; /* differs from dtype where the rows forced a fallback */
} so_choice;

so_choice so_recipe_choose(const so_recipe *r, so_str tensor, int n_dims, const int64_t *dims);

#endif
