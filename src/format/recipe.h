/* Recipes: which dtype each tensor gets when a model is quantised. The rule:
 *
 *   F32      tensors with one dimension, names that contain "norm", names that do not end in
 *            ".weight", and position_embd.weight
 *   TYPE     every other tensor, including the embedding and the output matrix
 *   TYPE_S   as TYPE (Q2_K … Q5_K), but the output matrix gets the better dtype
 *   TYPE_M   as TYPE_S; attn_v and ffn_down of the first and the last eighth of the layers, and of
 *            every third layer between them, get the better dtype too
 *   TYPE_L   as TYPE_S; attn_v and ffn_down of all layers get the better dtype too
 *
 * The better dtype is Q4_K for Q2_K, Q5_K for Q3_K, and Q6_K for Q4_K and Q5_K. The output matrix
 * is output.weight, or token_embd.weight if the model has no output.weight.
 *
 * Fallback, if the row length is not a multiple of the dtype's block length: a K dtype becomes the
 * largest dtype with blocks of 32 that takes no more bits per element, so that the file does not
 * grow. Q2_K and Q3_K are smaller than all of these and become the smallest:
 *
 *   Q2_K 2.625, Q3_K 3.4375, Q4_K 4.5 bits → Q4_0 4.5      Q5_K 5.5 → Q5_0 5.5
 *                                                          Q6_K 6.5625 → Q5_1 6.0
 *
 * If the row length is not a multiple of 32 either, the tensor becomes F16. */
#ifndef SO_FORMAT_RECIPE_H
#define SO_FORMAT_RECIPE_H

#include "format/dtype.h"

typedef struct so_recipe {
    char name[16]; /* upper case */
    so_dtype base, better;
    char mix;      /* 0, 'S', 'M' or 'L' */
    int file_type; /* value for general.file_type */
    /* facts about the model, set by so_recipe_observe */
    int n_layers;
    bool has_output;
} so_recipe;

/* By name, ignoring case; false if unknown. */
bool so_recipe_parse(const char *name, so_recipe *out);
/* All names, separated by spaces, for messages and help. */
const char *so_recipe_names(void);
/* Must be called with the name of every tensor before the first so_recipe_choose. */
void so_recipe_observe(so_recipe *r, so_str tensor);

typedef struct so_recipe_choice {
    so_dtype dtype;
    so_dtype wanted; /* differs from dtype if the row length required a fallback */
} so_recipe_choice;

/* The value of general.file_type for a file that is mostly of this dtype. */
int so_recipe_file_type(so_dtype dtype);

so_recipe_choice so_recipe_choose(const so_recipe *r, so_str tensor, int n_dims,
                                  const int64_t *dims);

#endif
