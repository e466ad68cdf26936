/* `sooth tokenize`: prints the token ids of a text.
 *
 * The text is an argument (TEXT or -p TEXT), a file (-f FILE), or standard input if none of them is
 * given and standard input is not a terminal. It is used byte for byte; a newline at the end of a
 * file is part of it. By default only the text is encoded, without BOS and EOS, and control tokens
 * spelt out in the text are recognised (add_special_tokens=False in the `tokenizers` library).
 * Works with a vocabulary-only GGUF file and with a folder that holds only tokenizer.json. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/file.h"
#include "cli/models.h"
#include "cli/options.h"
#include "token/tokenizer.h"

static const size_t MAX_TEXT = (size_t)256 << 20;

static int load(const char *model, so_tokenizer **out, so_err *err) {
    char *path;
    int rc = so_model_resolve(model, &path, err);
    if (rc)
        return rc;
    rc = so_tokenizer_open(path, out, err);
    free(path);
    return rc;
}

static void print_json(const so_tokens *tokens) {
    fputs("{\"tokens\":[", stdout);
    for (size_t i = 0; i < tokens->len; i++)
        printf("%s%d", i ? "," : "", tokens->ids[i]);
    puts("]}");
}

/* The token's bytes as in the vocabulary; control characters and backslashes as \xHH. */
static void print_piece(so_str piece) {
    for (size_t i = 0; i < piece.len; i++) {
        unsigned char c = (unsigned char)piece.ptr[i];
        if (c < 0x20 || c == 0x7F || c == '\\')
            printf("\\x%02X", c);
        else
            putchar(c);
    }
}

static void print_human(const so_tokenizer *t, const so_tokens *tokens) {
    for (size_t i = 0; i < tokens->len; i++) {
        printf("%8d  ", tokens->ids[i]);
        print_piece(so_tokenizer_piece(t, tokens->ids[i]));
        putchar('\n');
    }
}

static int tokenize(const so_args *a, so_str text) {
    so_err err;
    so_tokenizer *t;
    so_tokens tokens = {0};
    unsigned flags = (so_args_has(a, SO_OPT_ADD_SPECIAL) ? SO_ENCODE_ADD_SPECIAL : 0) |
                     (so_args_has(a, SO_OPT_NO_PARSE_SPECIAL) ? 0 : SO_ENCODE_PARSE_SPECIAL);
    if (load(so_args_str(a, SO_OPT_MODEL, NULL), &t, &err) != SO_OK)
        return so_args_fail(a, &err);
    int status = 0;
    if (so_tokenizer_encode(t, text, flags, &tokens, &err) != SO_OK)
        status = so_args_fail(a, &err);
    else if (so_args_has(a, SO_OPT_JSON))
        print_json(&tokens);
    else
        print_human(t, &tokens);
    so_tokens_free(&tokens);
    so_tokenizer_free(t);
    return status;
}

int so_cmd_tokenize(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_TOKENIZE, argc, argv))
        return a.status;
    const char *file = so_args_str(&a, SO_OPT_FILE, NULL);
    const char *given = so_args_str(&a, SO_OPT_PROMPT, a.n_pos ? a.pos[0] : NULL);
    int n_sources = a.n_pos + so_args_has(&a, SO_OPT_PROMPT) + so_args_has(&a, SO_OPT_FILE);
    so_buf text = {.max = MAX_TEXT};
    so_err err;
    int status;
    if (n_sources == 0 && isatty(STDIN_FILENO) != 1) {
        file = "-";
        n_sources = 1;
    }
    if (!so_args_has(&a, SO_OPT_MODEL))
        status = so_args_bad(&a, "-m is missing: a GGUF file, a folder with tokenizer.json, or the "
                                 "name of a pulled model");
    else if (n_sources != 1)
        status = so_args_bad(&a, "give one of TEXT, -p TEXT, -f FILE or a text on standard input");
    else if (file && so_file_read(file, MAX_TEXT, &text, &err) != SO_OK)
        status = so_args_fail(&a, &err);
    else
        status = tokenize(&a, file ? so_buf_str(&text) : so_str_c(given));
    so_buf_free(&text);
    so_args_free(&a);
    return status;
}
