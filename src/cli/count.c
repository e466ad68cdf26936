/* `sooth count`: counts a text file into a unigram or bigram table for --spec unigram(FILE) or
 * bigram(FILE).
 *
 * The file is mapped and encoded in pieces of at most 1 MiB that end after a line (or after a
 * character, if the line is longer), so memory use is that of the table, independent of the file's
 * size. (Standard input is read into memory first.) A pair of tokens that spans two pieces is not
 * counted. The table holds token ids of the model's tokenizer and that tokenizer's hash; drafters
 * refuse it with any other tokenizer.
 *
 * Refuses input that is not text (a zero byte or invalid UTF-8) and names the offset. The output is
 * opened once before the counting, so that an unwritable path fails at once, and is replaced
 * atomically at the end. No weights are loaded. */
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/models.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "draft/table.h"
#include "format/describe.h"
#include "model/hparams.h"
#include "token/tokenizer.h"
#include "token/utf8.h"

enum { PIECE = 1 << 20, MAX_STDIN = 256 << 20 };

static void on_signal(int sig) {
    so_out_cleanup_on_signal();
    _exit(128 + sig);
}

typedef struct job {
    const char *in, *out;
    int order;
    so_tokenizer *tok;
    int n_vocab; /* of the model, including padding rows: drafters compare this number */
    so_map_file map;
    so_buf piped;
    so_str text;
    so_table *table;
    so_err err;
} job;

static int load_vocabulary(job *j, const char *model) {
    char *path = NULL;
    so_checkpoint *ck = NULL;
    so_hparams hp;
    int rc = so_model_resolve(model, &path, &j->err);
    if (rc != SO_OK)
        return rc;
    rc = so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &j->err);
    free(path);
    if (rc != SO_OK)
        return rc;
    rc = so_hparams_read(ck, &hp, &j->err);
    if (rc == SO_OK)
        rc = so_tokenizer_load(ck, &j->tok, &j->err);
    if (rc == SO_OK)
        j->n_vocab = hp.n_vocab;
    so_checkpoint_close(ck);
    return rc;
}

static int open_text(job *j) {
    int rc;
    if (strcmp(j->in, "-") == 0) {
        j->piped.max = MAX_STDIN;
        rc = so_file_read(j->in, MAX_STDIN, &j->piped, &j->err);
        j->text = so_buf_str(&j->piped);
    } else {
        rc = so_file_map(j->in, &j->map, &j->err);
        j->text = (so_str){(const char *)j->map.data, j->map.len};
    }
    if (rc == SO_OK && j->text.len == 0)
        rc = so_err_set(&j->err, SO_EFORMAT, "%s: is empty; give a file with text", j->in);
    return rc;
}

/* Fails now, not after minutes of counting, if the output cannot be written. */
static int try_output(job *j) {
    so_out_file *f = NULL;
    int rc = so_out_begin(j->out, &f, &j->err);
    so_out_abort(f);
    return rc;
}

static int check_text(job *j, size_t at, so_str piece) {
    size_t len;
    uint32_t cp = 0;
    for (size_t i = 0; i < piece.len; i += len)
        if (so_utf8_next(piece.ptr + i, piece.len - i, &cp, &len) != SO_UTF8_OK || cp == 0)
            return so_err_set(&j->err, SO_EFORMAT, "%s: is not text: byte 0x%02X at offset %zu %s",
                              j->in, (unsigned char)piece.ptr[i], at + i,
                              piece.ptr[i] ? "is not valid UTF-8" : "is a zero");
    return SO_OK;
}

/* The end of the piece that starts at `at`. */
static size_t piece_end(so_str text, size_t at) {
    size_t end = at + PIECE;
    if (text.len - at <= PIECE)
        return text.len;
    for (size_t i = end; i > at + 1; i--) /* after a newline that no other newline follows */
        if (text.ptr[i - 1] == '\n' && text.ptr[i] != '\n')
            return i;
    while (end > at + 1 && ((unsigned char)text.ptr[end] & 0xC0) == 0x80)
        end--;
    return end;
}

static int count_pieces(job *j, so_table_counter *c, so_progress *bar) {
    so_tokens ids = {0};
    int rc = SO_OK;
    for (size_t at = 0, end; at < j->text.len && rc == SO_OK; at = end) {
        end = piece_end(j->text, at);
        so_str piece = {j->text.ptr + at, end - at};
        ids.len = 0;
        rc = check_text(j, at, piece);
        if (rc == SO_OK)
            rc = so_tokenizer_encode(j->tok, piece, 0, &ids, &j->err);
        if (rc == SO_OK)
            rc = so_table_counter_add(c, ids.ids, ids.len, &j->err);
        so_progress_set(bar, (double)end / (double)j->text.len);
    }
    so_tokens_free(&ids);
    return rc;
}

static int count(job *j) {
    so_table_counter *c = NULL;
    so_progress bar;
    int rc = so_table_counter_create(j->order, j->n_vocab, &c, &j->err);
    if (rc != SO_OK)
        return rc;
    so_progress_begin(&bar, "counting");
    rc = count_pieces(j, c, &bar);
    so_progress_end(&bar);
    if (rc != SO_OK) {
        so_table_counter_free(c);
        return rc;
    }
    rc = so_table_counter_finish(c, so_tokenizer_hash(j->tok), &j->table, &j->err);
    if (rc == SO_OK && j->table->starts[j->table->n_contexts] == 0)
        rc = so_err_set(&j->err, SO_EFORMAT, "%s: is too short for a %s table", j->in,
                        j->order == 1 ? "unigram" : "bigram");
    return rc;
}

static void print_result(const job *j, bool json) {
    const so_table *t = j->table;
    const char *kind = j->order == 1 ? "unigram" : "bigram";
    uint32_t n_entries = t->starts[t->n_contexts];
    int n_contexts = 0;
    for (int i = 0; i < t->n_contexts; i++)
        n_contexts += t->starts[i + 1] > t->starts[i];
    if (json)
        so_report_print_json(json_pack("{s:o, s:s, s:I, s:i, s:I, s:i}", "file",
                                       so_describe_json_text(so_str_c(j->out)), "kind", kind,
                                       "tokens", (json_int_t)t->n_tokens, "contexts", n_contexts,
                                       "entries", (json_int_t)n_entries, "vocabulary", t->n_vocab));
    else
        printf("%s: %" PRIu64 " tokens, %d contexts, %" PRIu32 " entries\nuse it with --spec "
               "'%s(%s)'\n",
               j->out, t->n_tokens, n_contexts, n_entries, kind, j->out);
}

static int run(const so_args *a) {
    job j = {.in = so_args_str(a, SO_OPT_FILE, NULL),
             .out = so_args_str(a, SO_OPT_OUT, NULL),
             .order = (int)so_args_int(a, SO_OPT_ORDER, 2)};
    if (!so_args_has(a, SO_OPT_MODEL))
        return so_args_bad(a, "-m is missing: the table counts the tokens of a model's vocabulary");
    if (!j.in || !j.out)
        return so_args_bad(a, "count needs a text and an output file: -f TEXT -o FILE");
    int rc = load_vocabulary(&j, so_args_str(a, SO_OPT_MODEL, ""));
    if (rc == SO_OK)
        rc = open_text(&j);
    if (rc == SO_OK)
        rc = try_output(&j);
    if (rc == SO_OK)
        rc = count(&j);
    if (rc == SO_OK)
        rc = so_table_save(j.table, j.out, &j.err);
    if (rc == SO_OK)
        print_result(&j, so_args_has(a, SO_OPT_JSON));
    so_table_free(j.table);
    so_buf_free(&j.piped);
    so_file_unmap(&j.map);
    so_tokenizer_free(j.tok);
    return rc == SO_OK ? 0 : so_args_fail(a, &j.err);
}

int so_cmd_count(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_COUNT, argc, argv))
        return a.status;
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    int status = run(&a);
    so_args_free(&a);
    return status;
}
