/* Internals of the template interpreter: values, syntax tree, and the context of one compile or
 * render. Included only by files of this folder.
 *
 *   source ─ lex ─ tokens ─ parse, expr ─ tree ─ scope ─ tree with slots
 *   tree + variables ─ exec (statements), eval (expressions) ─ text
 *
 * A compile allocates from the template's arena, a render from an arena of its own; a value is
 * never freed alone. Errors leave by longjmp (so_jj_fail): no C stack frame of the interpreter owns
 * a resource, so nothing has to be released on the way, and no function passes errors on. Every
 * loop over input counts steps (so_jj_tick), every allocation counts against the arena's maximum,
 * every recursion goes through so_jj_enter. One so_jj belongs to one thread. */
#ifndef SO_JINJA_IMPL_H
#define SO_JINJA_IMPL_H

#include <jansson.h>
#include <setjmp.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"

/* ---- limits ---- */
enum {
    SO_JJ_MAX_SOURCE = 1 << 20,
    SO_JJ_MAX_COMPILE_BYTES = 64 << 20,
    SO_JJ_MAX_RENDER_BYTES = 128 << 20, /* plus SO_JJ_INPUT_FACTOR × size of the variables */
    SO_JJ_MAX_OUTPUT = 16 << 20,        /* bytes; plus the same amount */
    SO_JJ_INPUT_FACTOR = 32,
    SO_JJ_MAX_STEPS = 4000000, /* plus SO_JJ_STEP_FACTOR per step of converting the variables */
    SO_JJ_STEP_FACTOR = 1000,
    SO_JJ_MAX_TREE_DEPTH = 250, /* of the syntax tree */
    SO_JJ_MAX_DEPTH = 1000,     /* of evaluation: nested nodes, macro calls, nested data */
    SO_JJ_MAX_RANGE = 100000,   /* as in Jinja2's sandbox */
};

/* ---- values ---- */
typedef enum so_jj_kind {
    SO_JJ_MISSING, /* argument not given, variable not set; templates never see it */
    SO_JJ_UNDEFINED,
    SO_JJ_NONE,
    SO_JJ_BOOL,
    SO_JJ_INT,
    SO_JJ_FLOAT,
    SO_JJ_STR,
    SO_JJ_LIST,
    SO_JJ_TUPLE,
    SO_JJ_DICT,
    SO_JJ_ITER, /* result of a lazy filter: iterated once, without a length */
    SO_JJ_NAMESPACE,
    SO_JJ_LOOP,
    SO_JJ_MACRO,
    SO_JJ_FUNC,
    SO_JJ_METHOD,
    SO_JJ_JOINER,
} so_jj_kind;

typedef struct so_jj so_jj;
typedef struct so_jj_val so_jj_val;
typedef struct so_jj_node so_jj_node;
typedef struct so_jj_frame so_jj_frame;
typedef struct so_jj_dict so_jj_dict;
typedef struct so_jj_gen so_jj_gen;
typedef struct so_jj_loop so_jj_loop;
typedef struct so_jj_args so_jj_args;
typedef struct so_jj_chunk so_jj_chunk;

/* A buffer that grows at its end. Strings may be views of the start of a buffer: written bytes
 * never change, so appending does not affect them (see so_jj_concat). */
typedef struct so_jj_buf {
    char *data;
    size_t len, cap;
} so_jj_buf;

/* Always valid UTF-8. */
typedef struct so_jj_str {
    const char *ptr;
    size_t len, n_chars;
    bool markup;    /* result of |safe or |escape: text added to it is escaped */
    so_jj_buf *buf; /* the buffer that starts at ptr, or NULL */
} so_jj_str;

typedef struct so_jj_undef so_jj_undef;
typedef struct so_jj_list so_jj_list;
typedef struct so_jj_macro so_jj_macro;
typedef struct so_jj_method so_jj_method;
typedef struct so_jj_joiner so_jj_joiner;
typedef struct so_jj_func so_jj_func;

struct so_jj_val {
    so_jj_kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        const so_jj_str *s;
        so_jj_list *list; /* also tuples */
        so_jj_dict *dict; /* also namespaces */
        const so_jj_undef *undef;
        so_jj_gen *gen;
        so_jj_loop *loop;
        const so_jj_macro *macro;
        const so_jj_func *func;
        const so_jj_method *method;
        so_jj_joiner *joiner;
    };
};

struct so_jj_undef {
    const char *hint;    /* error message; NULL: made from obj and name */
    so_jj_val obj, name; /* obj MISSING: name is a variable, else an attribute or item of obj */
};
struct so_jj_list {
    so_jj_val *v;
    size_t n, cap;
};
struct so_jj_macro {
    const so_jj_node *node;
    so_jj_frame *env;
};
struct so_jj_joiner {
    so_jj_val sep;
    bool used;
};

typedef struct so_jj_entry {
    so_jj_val key, value;
    uint64_t hash;
} so_jj_entry;

/* Entries in order of insertion. index: hash table (open addressing) of entry number + 1, or NULL
 * while there are few entries. */
struct so_jj_dict {
    so_jj_entry *e;
    size_t n, cap;
    uint32_t *index;
    size_t index_cap;
};

/* ---- calls ---- */
struct so_jj_args {
    so_jj_val *pos;
    size_t n_pos;
    so_jj_entry *kw; /* key is a string */
    size_t n_kw;
};

enum { SO_JJ_MAX_PARAMS = 5 };

/* One row of a table of filters, tests, methods or global functions. params: names separated by
 * commas; a leading '/' makes them positional only; NULL: the function reads `args` itself. p has
 * the value of each parameter, SO_JJ_MISSING if it was not given. */
typedef so_jj_val so_jj_fn(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_val *p);
struct so_jj_func {
    const char *name;
    so_jj_fn *fn;
    const char *params;
    int n_required;
};
/* The head of a function in such a table. */
#define SO_JJ_FN(name)                                                                       \
    so_jj_val name(so_jj *x __attribute__((unused)), so_jj_val self __attribute__((unused)), \
                   const so_jj_args *args __attribute__((unused)),                           \
                   const so_jj_val *p __attribute__((unused)))

struct so_jj_method {
    so_jj_val self;
    const so_jj_func *func;
};

/* ---- syntax tree ---- */
typedef enum so_jj_op {
    SO_JJ_OP_NONE,
    SO_JJ_OP_ADD,
    SO_JJ_OP_SUB,
    SO_JJ_OP_MUL,
    SO_JJ_OP_DIV,
    SO_JJ_OP_FLOORDIV,
    SO_JJ_OP_MOD,
    SO_JJ_OP_EQ,
    SO_JJ_OP_NE,
    SO_JJ_OP_LT,
    SO_JJ_OP_LE,
    SO_JJ_OP_GT,
    SO_JJ_OP_GE,
    SO_JJ_OP_IN,
    SO_JJ_OP_NOTIN,
} so_jj_op;

/* clang-format off */
/* Fields used by each kind of node:                    a        b        c       kids      extra   body */
typedef enum so_jj_node_kind {
    SO_JJ_N_CONST,    /* value */
    SO_JJ_N_NAME,     /* name; hops, slot */
    SO_JJ_N_NSREF,    /* name, attr (only a target) */
    SO_JJ_N_TUPLE,    /*                                                          items */
    SO_JJ_N_LIST,     /*                                                          items */
    SO_JJ_N_DICT,     /*                                                          keys      values */
    SO_JJ_N_CONCAT,   /*                                                          parts */
    SO_JJ_N_BIN,      /* op                              left     right */
    SO_JJ_N_AND,      /*                                 left     right */
    SO_JJ_N_OR,       /*                                 left     right */
    SO_JJ_N_NOT,      /*                                 operand */
    SO_JJ_N_NEG,      /*                                 operand */
    SO_JJ_N_POS,      /*                                 operand */
    SO_JJ_N_COMPARE,  /*                                 first                    OPERANDs */
    SO_JJ_N_OPERAND,  /* op                              right */
    SO_JJ_N_COND,     /*                                 then     test     else? */
    SO_JJ_N_GETATTR,  /* name                            object */
    SO_JJ_N_GETITEM,  /*                                 object   index or SLICE */
    SO_JJ_N_SLICE,    /*                                 start?   stop?    step? */
    SO_JJ_N_CALL,     /*                                 callee   *args?   **kw?  args      KEYWORDs */
    SO_JJ_N_KEYWORD,  /* name                            value */
    SO_JJ_N_FILTER,   /* name; func                      value?   *args?   **kw?  args      KEYWORDs */
    SO_JJ_N_TEST,     /* name; func                      value    *args?   **kw?  args      KEYWORDs */
    SO_JJ_N_TEXT,     /* value */
    SO_JJ_N_OUTPUT,   /*                                 expression */
    SO_JJ_N_FOR,      /* scope, else_scope, test_scope   target   iterable test?   target*   else    body */
                      /* kids[0] of FOR: a copy of the target, bound in the scope of the test */
    SO_JJ_N_IF,       /*                                                          BRANCHes */
    SO_JJ_N_BRANCH,   /*                                 test?                                      body */
    SO_JJ_N_SET,      /*                                 target   value */
    SO_JJ_N_SETBLOCK, /* scope                           target   filter?                           body */
    SO_JJ_N_MACRO,    /* name; scope                     target                   params    defaults body */
    SO_JJ_N_CALLBLOCK, /* scope                          call                     params    defaults body */
    SO_JJ_N_FILTERBLOCK, /* scope                        filter                                     body */
    SO_JJ_N_WITH,     /* scope                                                    targets   values  body */
    SO_JJ_N_GENERATION, /* scope                                                                    body */
    SO_JJ_N_BREAK,
    SO_JJ_N_CONTINUE,
    SO_JJ_N_TEMPLATE, /* scope                                                                      body */
} so_jj_node_kind;
/* clang-format on */

typedef struct so_jj_nodes {
    so_jj_node **v;
    size_t n, cap;
} so_jj_nodes;

/* Initial value of a variable when its scope is entered: an argument, the variable of the render
 * with that name, a copy of an outer variable, or none. Jinja2's rules, see scope.c. */
typedef enum so_jj_load { SO_JJ_PARAM, SO_JJ_RESOLVE, SO_JJ_ALIAS, SO_JJ_UNSET } so_jj_load;
typedef struct so_jj_sym {
    so_str name;
    so_jj_load load;
    uint32_t slot, from_hops, from_slot;
} so_jj_sym;
typedef struct so_jj_scope {
    struct so_jj_scope *parent;
    so_jj_node *owner; /* the node whose frame holds the slots: TEMPLATE, MACRO, CALLBLOCK or
                          GENERATION */
    so_jj_sym *sym;
    size_t n, cap;
} so_jj_scope;

struct so_jj_node {
    so_jj_node_kind kind;
    so_jj_op op;
    int line, depth;
    bool store;          /* NAME: assigned, not read */
    uint32_t hops, slot; /* NAME: slot of the frame that is `hops` frames outwards */
    uint32_t n_slots;    /* owner of a frame: the frame's length */
    so_str name, attr;
    so_jj_val value;
    so_jj_node *a, *b, *c;
    so_jj_nodes kids, extra, body;
    so_jj_scope *scope, *else_scope, *test_scope;
    const so_jj_func *func; /* NULL: unknown name; an error when it is evaluated */
};

/* ---- one compile or render ---- */
struct so_jj_frame {
    so_jj_frame *up;
    so_jj_val slots[];
};

struct so_jj {
    so_arena *arena;
    so_err *err;
    jmp_buf exit;
    int code; /* SO_E… that so_jj_fail left with */
    int line, depth;
    uint64_t steps, max_steps;
    size_t in_bytes; /* length of all strings in the variables */
    size_t out_bytes, max_out;
    const so_jj_dict *vars;
    so_jj_frame *frame;
    so_jj_buf *out; /* receives output; replaced while a block is captured */
    int64_t now;
    bool track_origins;  /* see origin.c */
    bool reads_data;     /* so_jj_from_json is reading the caller's data: flag its strings */
    so_jj_chunk *chunks; /* newest first */
};

/* ---- value.c: errors, limits, making and examining values ---- */
/* Arguments for "%.*s": at most 300 bytes of s, whole characters. */
#define SO_JJ_ARG(s) so_jj_clip(s), (s).ptr
int so_jj_clip(so_str s);
_Noreturn void so_jj_exit(so_jj *x, int code); /* err is already set */
_Noreturn void so_jj_fail(so_jj *x, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
_Noreturn void so_jj_fail_type(so_jj *x, const char *what, so_jj_val v); /* "what, not 'int'" */
void so_jj_tick(so_jj *x, size_t n); /* counts n steps; fails at the limit */
void so_jj_enter(so_jj *x);          /* before a recursion; fails at the limit */
static inline void so_jj_leave(so_jj *x) { x->depth--; }
void *so_jj_alloc(so_jj *x, size_t n, size_t size);

#define SO_JJ_NEW(x, T) ((T *)so_jj_alloc(x, 1, sizeof(T)))
#define SO_JJ_NONE_V ((so_jj_val){.kind = SO_JJ_NONE})
#define SO_JJ_MISSING_V ((so_jj_val){.kind = SO_JJ_MISSING})
static inline so_jj_val so_jj_bool(bool b) { return (so_jj_val){.kind = SO_JJ_BOOL, .b = b}; }
static inline so_jj_val so_jj_int(int64_t i) { return (so_jj_val){.kind = SO_JJ_INT, .i = i}; }
static inline so_jj_val so_jj_float(double f) { return (so_jj_val){.kind = SO_JJ_FLOAT, .f = f}; }
static inline so_str so_jj_bytes(so_jj_val v) { return (so_str){v.s->ptr, v.s->len}; }

so_jj_val so_jj_undefined_hint(so_jj *x, const char *hint);
so_jj_val so_jj_undefined_var(so_jj *x, so_str name);
so_jj_val so_jj_undefined_of(so_jj *x, so_jj_val obj, so_jj_val name);
_Noreturn void so_jj_fail_undefined(so_jj *x, so_jj_val v);

so_jj_val so_jj_str_borrow(so_jj *x, so_str s); /* s outlives the arena and is valid UTF-8 */
so_jj_val so_jj_str_copy(so_jj *x, so_str s);
so_jj_val so_jj_str_c(so_jj *x, const char *s);
so_jj_val so_jj_str_printf(so_jj *x, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
so_jj_val so_jj_markup(so_jj *x, so_jj_val str);
so_jj_val so_jj_plain(so_jj *x, so_jj_val str); /* the same text, not markup */

void so_jj_buf_add(so_jj *x, so_jj_buf *b, so_str s);
void so_jj_buf_char(so_jj *x, so_jj_buf *b, char c);
void so_jj_buf_cp(so_jj *x, so_jj_buf *b, int32_t cp);
void so_jj_buf_fill(so_jj *x, so_jj_buf *b, so_str s, size_t times);
so_jj_val so_jj_buf_str(so_jj *x, so_jj_buf *b); /* a view of its text; b may still grow */

so_jj_list *so_jj_list_new(so_jj *x, size_t cap);
void so_jj_list_push(so_jj *x, so_jj_list *l, so_jj_val v);
so_jj_val so_jj_list_val(so_jj_list *l);
so_jj_val so_jj_tuple_val(so_jj_list *l);
so_jj_val so_jj_pair(so_jj *x, so_jj_val a, so_jj_val b); /* a tuple */
const char *so_jj_type(so_jj_val v);                      /* Python's name of the type */
bool so_jj_truth(so_jj_val v);
bool so_jj_flag(so_jj_val v);               /* a missing argument is false */
bool so_jj_len(so_jj_val v, size_t *n);     /* false: v has no length */
bool so_jj_is_num(so_jj_val v);             /* bool, int, float */
bool so_jj_is_int(so_jj_val v, int64_t *i); /* bool, int */
double so_jj_to_double(so_jj_val v);
int64_t so_jj_int_arg(so_jj *x, so_jj_val v, int64_t missing);
int64_t so_jj_index_arg(so_jj *x, so_jj_val v, int64_t missing); /* None counts as missing */
so_jj_val so_jj_from_json(so_jj *x, const json_t *j);

/* ---- origin.c: which bytes came from the caller's data ---- */
char *so_jj_text_alloc(so_jj *x, size_t n);
/* The flags of the bytes at p; NULL: not tracked. */
uint8_t *so_jj_origin(const so_jj *x, const char *p);
void so_jj_origin_copy(so_jj *x, char *to, const char *from, size_t n);
/* Sets the flags of the bytes of b from `start` on to that of the character at `source`. */
void so_jj_origin_like(so_jj *x, so_jj_buf *b, size_t start, const char *source);
so_str so_jj_text_from_data(so_jj *x, so_str s); /* a flagged copy if origins are tracked */

/* ---- dict.c ---- */
so_jj_dict *so_jj_dict_new(so_jj *x);
so_jj_val so_jj_dict_val(so_jj_dict *d);
bool so_jj_dict_get(so_jj *x, const so_jj_dict *d, so_jj_val key, so_jj_val *out);
bool so_jj_dict_get_str(so_jj *x, const so_jj_dict *d, so_str key, so_jj_val *out);
void so_jj_dict_set(so_jj *x, so_jj_dict *d, so_jj_val key, so_jj_val value);
bool so_jj_dict_remove(so_jj *x, so_jj_dict *d, so_jj_val key, so_jj_val *out);
so_jj_list *so_jj_dict_items(so_jj *x, const so_jj_dict *d); /* tuples of key and value */
so_jj_dict *so_jj_dict_copy(so_jj *x, const so_jj_dict *d);
void so_jj_dict_update(so_jj *x, so_jj_dict *d, so_jj_val from, const so_jj_args *kw);
uint64_t so_jj_hash(so_jj *x, so_jj_val v); /* fails for lists and dicts, as in Python */

/* ---- iter.c ---- */
typedef struct so_jj_iter {
    so_jj_val src;
    size_t i, n_at_start;
    const char *p; /* strings: the next character */
} so_jj_iter;
bool so_jj_iterable(so_jj_val v);
so_jj_iter so_jj_iter_of(so_jj *x, so_jj_val v); /* fails if v is not iterable */
bool so_jj_iter_next(so_jj *x, so_jj_iter *it, so_jj_val *out);
so_jj_list *so_jj_collect(so_jj *x, so_jj_val v);
/* A lazy sequence: `next` returns the next value, or false at the end. The other fields belong to
 * the filter that made it (filters_seq.c). */
typedef bool so_jj_gen_fn(so_jj *x, so_jj_gen *g, so_jj_val *out);
struct so_jj_gen {
    so_jj_gen_fn *next;
    so_jj_iter src;
    const so_jj_func *func;
    so_jj_args args;
    so_jj_val a;
    so_jj_list *path;
    so_jj_dict *seen;
    int64_t n;
    bool negate, started;
};
so_jj_val so_jj_gen_val(so_jj_gen *g);
/* A running for loop; templates see it as `loop`. */
struct so_jj_loop {
    so_jj_iter it;
    const so_jj_node *node;
    so_jj_frame *frame;
    int64_t index0, length;           /* length −1: not known yet */
    bool rest_stored;                 /* `it` iterates over a list of items that passed the test */
    so_jj_val before, current, after; /* items; after MISSING: not read ahead */
    so_jj_val changed;                /* arguments of the last loop.changed() that was true */
};
so_jj_loop *so_jj_loop_new(so_jj *x, const so_jj_node *node, so_jj_val iterable);
bool so_jj_loop_next(so_jj *x, so_jj_loop *l, so_jj_val *out);
so_jj_val so_jj_loop_attr(so_jj *x, so_jj_loop *l, so_str name); /* MISSING: no such attribute */
int64_t so_jj_loop_length(so_jj *x, so_jj_loop *l);

/* ---- repr.c: str(), repr(), JSON ---- */
so_jj_val so_jj_to_str(so_jj *x, so_jj_val v);
void so_jj_write_str(so_jj *x, so_jj_buf *b, so_jj_val v);
void so_jj_write_repr(so_jj *x, so_jj_buf *b, so_jj_val v);
so_jj_val so_jj_repr(so_jj *x, so_jj_val v);
enum { SO_JJ_FLOAT_BUF = 40 };
void so_jj_float_repr(double f, char out[SO_JJ_FLOAT_BUF]);
void so_jj_write_escaped(so_jj *x, so_jj_buf *b, so_str s); /* HTML escapes */
so_jj_val so_jj_escaped(so_jj *x, so_jj_val s);             /* escaped, unless it is markup */
so_jj_fn so_jj_tojson;

/* ---- unicode.c ---- */
typedef enum so_jj_class {
    SO_JJ_C_SPACE,
    SO_JJ_C_ALPHA,
    SO_JJ_C_DIGIT,
    SO_JJ_C_ALNUM,
    SO_JJ_C_PRINTABLE,
    SO_JJ_C_LOWER,
    SO_JJ_C_UPPER,
    SO_JJ_C_ID_START,
    SO_JJ_C_ID_PART,
    SO_JJ_C_LINE_END,
} so_jj_class;
bool so_jj_cp_is(int32_t cp, so_jj_class c);
/* The character at p (valid UTF-8, p < end); *n: its length in bytes. */
int32_t so_jj_cp_at(const char *p, const char *end, size_t *n);
/* Counts the characters of s, or returns false with the offset of the first invalid byte in *bad. */
bool so_jj_utf8_check(so_str s, size_t *n_chars, size_t *bad);
so_str so_jj_trim(so_str s, const so_str *chars, bool left, bool right); /* chars NULL: spaces */
size_t so_jj_count_chars(so_str s);
typedef enum so_jj_case { SO_JJ_TO_LOWER, SO_JJ_TO_UPPER, SO_JJ_TO_TITLE } so_jj_case;
/* Appends the character cp, which is at `at`, in another case and with the same origin. */
void so_jj_buf_case(so_jj *x, so_jj_buf *b, const char *at, int32_t cp, so_jj_case to);

/* ---- ops.c ---- */
so_jj_val so_jj_binary(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b);
so_jj_val so_jj_negate(so_jj *x, so_jj_val v);
so_jj_val so_jj_concat(so_jj *x, so_jj_val a, so_jj_val b); /* strings; in value.c */
bool so_jj_equal(so_jj *x, so_jj_val a, so_jj_val b);
bool so_jj_less(so_jj *x, so_jj_val a, so_jj_val b);
bool so_jj_compare(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b);
bool so_jj_contains(so_jj *x, so_jj_val seq, so_jj_val item);

/* ---- attr.c: subscripts, attributes, methods of lists and dicts, global functions ---- */
so_jj_val so_jj_getitem(so_jj *x, so_jj_val obj, so_jj_val key);
so_jj_val so_jj_getattr(so_jj *x, so_jj_val obj, so_str name);
so_jj_val so_jj_attr_only(so_jj *x, so_jj_val obj, so_str name); /* MISSING: no such attribute */
so_jj_val so_jj_slice(so_jj *x, so_jj_val obj, so_jj_val start, so_jj_val stop, so_jj_val step);
const so_jj_func *so_jj_find_func(const so_jj_func *table, size_t n, so_str name);
so_jj_val so_jj_call_func(so_jj *x, const so_jj_func *f, so_jj_val self, const so_jj_args *args);
const so_jj_func *so_jj_find_global(so_str name);

/* ---- str.c, split.c, format.c ---- */
const so_jj_func *so_jj_find_str_method(so_str name);
so_jj_fn so_jj_str_split, so_jj_str_rsplit, so_jj_str_splitlines, so_jj_str_partition,
    so_jj_str_rpartition, so_jj_str_find, so_jj_str_rfind, so_jj_str_index, so_jj_str_rindex,
    so_jj_str_count, so_jj_str_startswith, so_jj_str_endswith, so_jj_str_replace;
so_jj_list *so_jj_split_lines(so_jj *x, so_jj_val s, bool keep_ends);
so_jj_val so_jj_replace(so_jj *x, so_str s, so_str from, so_str to, int64_t count);
so_jj_val so_jj_recase(so_jj *x, so_jj_val s, so_jj_case first, so_jj_case others);
so_jj_val so_jj_strip(so_jj *x, so_jj_val s, so_jj_val chars, bool left, bool right);
so_jj_val so_jj_substr(so_jj *x, so_jj_val s, so_str part);  /* keeps markup */
so_jj_val so_jj_like(so_jj *x, so_jj_val like, so_jj_val v); /* v, as markup if `like` is markup */
so_str so_jj_str_arg(so_jj *x, so_jj_val v);                 /* fails if v is not a string */
bool so_jj_is_case(so_jj *x, so_str s, bool upper);          /* has letters, all of this case */
bool so_jj_parse_int(so_jj *x, so_str s, int64_t *out);      /* false: not a number */
bool so_jj_parse_float(so_str s, double *out);
so_jj_val so_jj_percent(so_jj *x, so_jj_val fmt, so_jj_val arg);
so_jj_fn so_jj_str_format;

/* ---- filters.c, filters_seq.c, tests.c ---- */
const so_jj_func *so_jj_find_filter(so_str name);
const so_jj_func *so_jj_find_test(so_str name);
extern const so_jj_func so_jj_seq_filters[];
extern const size_t so_jj_n_seq_filters;

/* ---- eval.c, exec.c ---- */
so_jj_val so_jj_eval(so_jj *x, const so_jj_node *n);
so_jj_args so_jj_eval_args(so_jj *x, const so_jj_node *n, const so_jj_val *caller);
so_jj_val so_jj_call(so_jj *x, so_jj_val f, const so_jj_args *args);
so_jj_val so_jj_apply_filter(so_jj *x, const so_jj_node *n, so_jj_val v);
so_jj_val so_jj_call_macro(so_jj *x, const so_jj_macro *m, const so_jj_args *args);
void so_jj_assign(so_jj *x, const so_jj_node *target, so_jj_val v);
void so_jj_enter_scope(so_jj *x, const so_jj_scope *s);
void so_jj_run(so_jj *x, const so_jj_node *tmpl);

/* ---- lex.c ---- */
typedef enum so_jj_tok_kind {
    SO_JJ_T_EOF,
    SO_JJ_T_DATA,
    SO_JJ_T_VAR_BEGIN,
    SO_JJ_T_VAR_END,
    SO_JJ_T_BLOCK_BEGIN,
    SO_JJ_T_BLOCK_END,
    SO_JJ_T_NAME,
    SO_JJ_T_STRING,
    SO_JJ_T_INT,
    SO_JJ_T_FLOAT,
    SO_JJ_T_OP, /* see text */
} so_jj_tok_kind;
typedef struct so_jj_tok {
    so_jj_tok_kind kind;
    int line;
    so_str text; /* names, operators; data and strings with escapes resolved */
    so_jj_val value;
} so_jj_tok;
typedef struct so_jj_lexer {
    so_jj *x;
    so_str src;
    size_t pos;
    int line_at_pos; /* line number of line_pos */
    size_t line_pos;
    enum { SO_JJ_L_TEXT, SO_JJ_L_VAR, SO_JJ_L_BLOCK } state;
    char balance[SO_JJ_MAX_TREE_DEPTH + 2]; /* closing brackets still to come, the next one last */
    int n_balance;
    bool has_pending;
    so_jj_tok pending;
} so_jj_lexer;
void so_jj_lexer_init(so_jj *x, so_jj_lexer *l, so_str source);
so_jj_tok so_jj_lex(so_jj_lexer *l);

/* ---- parse.c (statements), expr.c (expressions) ---- */
typedef struct so_jj_parser {
    so_jj *x;
    so_jj_lexer lexer;
    so_jj_tok cur, ahead;
    bool has_ahead;
    int depth;
} so_jj_parser;
so_jj_node *so_jj_parse(so_jj *x, so_str source);
void so_jj_advance(so_jj_parser *p);
so_jj_tok so_jj_look(so_jj_parser *p);
bool so_jj_at_op(const so_jj_parser *p, const char *op);
bool so_jj_at_name(const so_jj_parser *p, const char *name);
bool so_jj_skip_op(so_jj_parser *p, const char *op);
bool so_jj_skip_name(so_jj_parser *p, const char *name);
void so_jj_expect_op(so_jj_parser *p, const char *op);
so_str so_jj_expect_name(so_jj_parser *p);
_Noreturn void so_jj_fail_token(so_jj_parser *p, const char *expected);
so_jj_node *so_jj_node_new(so_jj_parser *p, so_jj_node_kind kind, int line);
so_jj_node *so_jj_node_sealed(so_jj_parser *p, so_jj_node *n); /* sets and checks the depth */
void so_jj_nodes_push(so_jj *x, so_jj_nodes *l, so_jj_node *n);
void so_jj_parse_enter(so_jj_parser *p);
static inline void so_jj_parse_leave(so_jj_parser *p) { p->depth--; }
so_jj_node *so_jj_parse_expr(so_jj_parser *p, bool with_cond);
so_jj_node *so_jj_parse_tuple(so_jj_parser *p, bool with_cond);
so_jj_node *so_jj_parse_target(so_jj_parser *p, bool with_namespace);
so_jj_node *so_jj_parse_filter(so_jj_parser *p, so_jj_node *value, bool at_name);
bool so_jj_is_constant_name(so_str name); /* true, false, none and their capital forms */

/* ---- scope.c ---- */
void so_jj_resolve(so_jj *x, so_jj_node *tmpl);

#endif
