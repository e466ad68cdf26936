/* Unigram and bigram tables: counted from token ids and kept in a small file, which is treated as
 * hostile when it is read.
 *
 * The file (version 1, all numbers little-endian):
 *
 *    0  8 bytes  "SOOTHTBL"
 *    8  u32      version, 1
 *   12  u32      order: 1 unigram, 2 bigram
 *   16  u32      n_vocab
 *   20  u32      0
 *   24  u64      hash of the tokenizer of the ids (so_tokenizer_hash)
 *   32  u64      tokens counted
 *   40  u64      n_entries
 *   48  u32[n_contexts + 1]     start of each context's entries; the last is n_entries
 *    …  {u32 token, u32 count}[n_entries]   per context: count descending, then token ascending;
 *                                           no token twice
 *   end u64      FNV-1a of all bytes before
 *
 * n_contexts is 1 for a unigram table and n_vocab for a bigram table (the previous token). */
#ifndef SO_DRAFT_TABLE_H
#define SO_DRAFT_TABLE_H

#include "base/err.h"

#include <stdint.h>

typedef struct so_table_entry {
    uint32_t token, count;
} so_table_entry;

typedef struct so_table {
    int order, n_vocab, n_contexts;
    uint64_t tokenizer_hash, n_tokens;
    uint32_t *starts;        /* [n_contexts + 1] */
    so_table_entry *entries; /* [starts[n_contexts]] */
} so_table;

/* Counting. No pair of tokens spans two calls of so_table_counter_add. For each context of a bigram
 * table the 32 most frequent followers are kept. */
typedef struct so_table_counter so_table_counter;
int so_table_counter_create(int order, int n_vocab, so_table_counter **out, so_err *err);
int so_table_counter_add(so_table_counter *c, const int32_t *ids, size_t n, so_err *err);
/* Frees c, also on failure. */
int so_table_counter_finish(so_table_counter *c, uint64_t tokenizer_hash, so_table **out,
                            so_err *err);
void so_table_counter_free(so_table_counter *c); /* NULL is fine */

int so_table_save(const so_table *t, const char *path, so_err *err);
/* Refuses a table of another vocabulary or tokenizer (hash 0: any) and every malformed file. */
int so_table_load(const char *path, int n_vocab, uint64_t tokenizer_hash, so_table **out,
                  so_err *err);
/* The same from memory; `name` is for messages. */
int so_table_parse(const void *data, size_t len, const char *name, so_table **out, so_err *err);
void so_table_free(so_table *t); /* NULL is fine */

#endif
