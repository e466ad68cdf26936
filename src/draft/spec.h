/* The language of --spec: which drafters run, and how they are combined.
 *
 *   spec  = merge { "," merge }          alternatives, tried in order: the next one drafts if this
 *                                        one has no guesses, or if the planner drops them
 *                                        (so_plan_keep_guesses)
 *   merge = item { "+" item }            all of them, merged into one tree
 *   item  = name [ "(" arg { "," arg } ")" ]
 *   arg   = number | option "=" value | option | file | "tree" "=" file | merge
 *         | "worker" "=" address                  of async: a process that runs its drafter
 *         | "device" "=" ("cpu" | "cuda" | "cuda:N")  of async: what its draft model runs on
 *         | "fallback" "=" merge { "," merge }    of async, at the end; `sync` and `none` are names
 *                                                 there
 *
 *   lookup,ngram     oracle(0.8)     lookup(min=4)     bigram(words.tbl)     model(ngram)
 *   oracle(0.8,model)                 model(k=4,nodes=16)                     medusa(nodes=16)
 *   async(model)     async(model,fan=8,fallback=lookup,ngram)
 *   async(model,worker=tcp://127.0.0.1:7070)
 *   model(a.gguf)+model(b.gguf)       unigram("odd, name.tbl",draw)
 *   model(tree=tree.json)
 *
 * An argument that is a drafter's name is an inner drafter, which drafts for the outer one; several
 * of them are alternatives. (Only `model`, `oracle` and `async` have one.) `async` is an alternative of
 * its own: it becomes several (draft/async.h). Other words are options or files.
 * File names that contain , ( ) + = or spaces are quoted. Parsing checks names, options and ranges and opens no file. so_spec_build
 * creates the drafters: those of this folder directly, those that need a model by calling
 * so_draft_config.make. */
#ifndef SO_DRAFT_SPEC_H
#define SO_DRAFT_SPEC_H

#include "base/str.h"
#include "draft/async.h"
#include "draft/drafters.h"
#include "draft/remote.h"

typedef enum so_spec_name {
    SO_SPEC_NONE,
    SO_SPEC_NGRAM,
    SO_SPEC_LOOKUP,
    SO_SPEC_CORPUS,
    SO_SPEC_UNIGRAM,
    SO_SPEC_BIGRAM,
    SO_SPEC_PREDICT,
    SO_SPEC_RANDOM,
    SO_SPEC_ORACLE,
    SO_SPEC_MODEL,
    SO_SPEC_MEDUSA,
    SO_SPEC_BLOCKWISE,
    SO_SPEC_LOOKAHEAD,
    SO_SPEC_AUTO,
    SO_SPEC_ASYNC,
    SO_SPEC_N_NAMES,
    SO_SPEC_FIRST = SO_SPEC_N_NAMES, /* a,b */
    SO_SPEC_MERGE,                   /* a+b */
} so_spec_name;

typedef enum so_spec_option {
    SO_SPEC_OPT_NUMBER, /* the bare number: oracle(0.8) */
    SO_SPEC_OPT_ORDER,
    SO_SPEC_OPT_WINDOW,
    SO_SPEC_OPT_MIN,
    SO_SPEC_OPT_MB,
    SO_SPEC_OPT_DRAW,
    SO_SPEC_OPT_K,
    SO_SPEC_OPT_NODES,
    SO_SPEC_OPT_BEST,
    SO_SPEC_OPT_DISTINCT,
    SO_SPEC_OPT_HIT,
    SO_SPEC_OPT_FAN,
    SO_SPEC_OPT_WAIT,
    SO_SPEC_OPT_ENDS,
    SO_SPEC_OPT_FALLBACK, /* 1: `sync` is among them */
    SO_SPEC_N_OPTIONS,
} so_spec_option;

enum { SO_SPEC_MAX_NODES = 32, SO_SPEC_MAX_DEPTH = 6, SO_SPEC_MAX_TEXT = 1023 };

typedef struct so_spec_node {
    so_spec_name name;
    int first;    /* index of the first member of a group, or of the inner spec; −1: none */
    int next;     /* index of the next member of the same group; −1: none */
    int fallback; /* async: index of its first fallback, a list by `next`; −1: none */
    unsigned has; /* bits of so_spec_option */
    double opt[SO_SPEC_N_OPTIONS]; /* valid if the bit is set */
    int file_at, file_len;         /* file name in text; length 0: none */
    int tree_at, tree_len;         /* tree=FILE, the same */
    int worker_at, worker_len;     /* async: worker=ADDRESS, the same */
    int device_at, device_len;     /* async: device=NAME, the same */
    int column;                    /* from 1 */
} so_spec_node;

typedef struct so_spec {
    so_spec_node nodes[SO_SPEC_MAX_NODES];
    int n_nodes, root;
    char text[SO_SPEC_MAX_TEXT + 1];
} so_spec;

/* SO_EINVAL: the message has the column, the token and what is allowed there. */
int so_spec_parse(so_str text, so_spec *out, so_err *err);
/* Prints the shortest form; parsing it again gives the same spec. */
void so_spec_print(const so_spec *s, so_buf *out);
const char *so_spec_name_text(so_spec_name name);
so_str so_spec_file(const so_spec *s, const so_spec_node *n);
so_str so_spec_tree(const so_spec *s, const so_spec_node *n);
so_str so_spec_worker(const so_spec *s, const so_spec_node *n);
so_str so_spec_device(const so_spec *s, const so_spec_node *n);

/* The nodes of tree=FILE, which a drafter keeps (draft/shape.h has what they mean). */
typedef struct so_fixed_tree {
    int n; /* 0: none was named */
    int16_t parent[SO_TREE_MAX], rank[SO_TREE_MAX];
} so_fixed_tree;
/* Reads the first *nodes nodes of the node's tree file and reduces *nodes to their number. Without a
 * file it changes nothing. */
int so_spec_read_tree(const so_spec *s, const so_spec_node *n, int *nodes, so_fixed_tree *out,
                      so_err *err);
/* The async() around a node; NULL: there is none. */
const so_spec_node *so_spec_async_of(const so_spec *s, const so_spec_node *n);
/* Whether a node is the drafter inside an async(), or inside that; and if so, whether a worker process
 * runs it. */
bool so_spec_is_async(const so_spec *s, const so_spec_node *n);
bool so_spec_is_remote(const so_spec *s, const so_spec_node *n);
static inline bool so_spec_has(const so_spec_node *n, so_spec_option o) { return n->has >> o & 1; }
static inline bool so_spec_flag(const so_spec_node *n, so_spec_option o) {
    return so_spec_has(n, o) && n->opt[o] != 0;
}

/* Creates a drafter that needs more than this folder has: `model` and heads; for `auto` the draft model,
 * which build.c puts after lookup and ngram (SO_ENOTFOUND: there is none); `unigram` or `bigram`
 * without a file. `inner` (may be NULL) belongs to the new drafter on success only. */
typedef int so_draft_make(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                          so_drafter **out, so_err *err);

typedef struct so_draft_config {
    int n_vocab, d_model; /* of the target */
    uint64_t tokenizer_hash;
    so_corpus **corpus; /* the engine's corpus; created here when `corpus` is first named */
    so_draft_make *make;
    void *user;
    int n_parallel;              /* requests that draft at the same time */
    so_async_host **host;        /* created here when `async` is first named */
    so_async_host **remote_host; /* the same for `async` with a worker */
    const so_remote_engine *remote;
    const so_async_faults *faults; /* of tests; NULL: none */
} so_draft_config;

/* One drafter that the engine calls separately. `a,b+c` has three stages: a is the first
 * alternative; b and c, merged into one tree, are the second. */
typedef struct so_draft_stage {
    so_drafter *drafter;
    int alternative; /* from 0, ascending; tried in this order */
    /* Where it is in root, which may be a list of alternatives that contains merged groups: */
    int outer; /* index of its alternative in that list; −1: root is no such list */
    int inner; /* index in its merged group; −1: it is in none */
} so_draft_stage;

/* The drafters of a spec. Leaves are numbered in the order of the text, an inner drafter before its
 * outer one: leaves[i]->index is i. Stages are the leaves that are not inner drafters, in the same
 * order. */
typedef struct so_draft_set {
    so_drafter *root;
    so_drafter *leaves[SO_SPEC_MAX_NODES];
    int n_leaves;
    so_draft_stage stages[SO_SPEC_MAX_NODES];
    int n_stages;
} so_draft_set;

/* The stage's own part of the state that `root` opened. */
void *so_draft_set_state(const so_draft_set *set, void *state, int stage);
/* Fills stages from root; for sets that so_spec_build did not create. */
void so_draft_set_list_stages(so_draft_set *set);

int so_spec_build(const so_spec *s, const so_draft_config *cfg, so_draft_set *out, so_err *err);
void so_draft_set_deinit(so_draft_set *set);

#endif
