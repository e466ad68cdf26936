/* The colours are those of figure 1 of Leviathan et al.: green for accepted guesses, red and struck
 * through for rejected ones, blue for tokens of the target (correction or bonus). Without colour:
 *
 *   {accepted}  [-rejected-]  [+from the target+]
 *
 * --view=rounds prints one line per round, with line breaks as \n, and shows the end token. --view
 * prints the answer with its line breaks, except those of rejected guesses. A rejected guess may be
 * half a character or a control character; such bytes are written as \xNN, so that a guess neither
 * moves the cursor nor breaks the encoding of the line. Writes to stdout. */
#include "cli/view.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "cli/terminal.h"
#include "token/utf8.h"

typedef struct style {
    const char *on, *off, *open, *close;
} style;

static const style ACCEPTED = {"\033[32m", "\033[0m", "{", "}"};
static const style REJECTED = {"\033[9;31m", "\033[0m", "[-", "-]"};
static const style OWN = {"\033[34m", "\033[0m", "[+", "+]"};

const char *so_painter_color(so_origin o) {
    return o == SO_ORIGIN_PLAIN ? "" : o == SO_ORIGIN_DRAFT ? ACCEPTED.on : OWN.on;
}

static bool is_control(uint32_t cp) {
    return (cp < 0x20 && cp != '\n' && cp != '\t') || (cp >= 0x7F && cp < 0xA0);
}

static void print_text(so_str text, bool breaks) {
    uint32_t cp;
    for (size_t i = 0, len; i < text.len; i += len) {
        so_utf8 found = so_utf8_next(text.ptr + i, text.len - i, &cp, &len);
        if (found != SO_UTF8_OK || is_control(cp))
            for (size_t j = 0; j < len; j++)
                printf("\\x%02X", (unsigned char)text.ptr[i + j]);
        else if (!breaks && cp == '\n')
            fputs("\\n", stdout);
        else
            fwrite(text.ptr + i, 1, len, stdout);
    }
}

void so_view_print(so_str text) {
    if (so_terminal_is(STDOUT_FILENO))
        print_text(text, true);
    else
        fwrite(text.ptr, 1, text.len, stdout);
}

static void print_styled(const so_painter *v, const style *s, so_str text) {
    if (text.len == 0)
        return;
    fputs(v->color ? s->on : s->open, stdout);
    print_text(text, !v->rounds && s != &REJECTED);
    fputs(v->color ? s->off : s->close, stdout);
}

/* Collects the rejected guesses: the tested children of the last accepted node. */
static void note_rejected(so_painter *v, const so_round *round) {
    const so_verdict *d = round->verdict;
    const so_tree *t = round->tree;
    int last = d->n_accepted ? d->path[d->n_accepted - 1] : 0;
    so_buf_clear(&v->rejected);
    for (int i = 0; i < d->n_tested; i++) {
        const so_node *n = &t->nodes[t->proposals[d->tested[i]].child];
        if (n->parent == last)
            so_buf_append_str(&v->rejected, so_tokenizer_text(v->tok, n->token));
    }
}

void so_painter_init(so_painter *v, const so_tokenizer *tok, const so_args *a) {
    *v = (so_painter){.tok = tok, .on = so_args_has(a, SO_OPT_VIEW)};
    v->terminal = so_terminal_is(STDOUT_FILENO);
    v->color = so_args_color(a, STDOUT_FILENO);
    v->rounds = v->on && so_args_str(a, SO_OPT_VIEW, NULL) != NULL;
}

static void note_end(so_painter *v, const so_round *round) {
    const so_verdict *d = round->verdict;
    v->n_shown = 0;
    v->end_at = -1;
    for (int i = 0; i <= d->n_accepted && v->end_at < 0; i++) {
        bool guess = i < d->n_accepted;
        int32_t token = guess ? round->tree->nodes[d->path[i]].token : d->token;
        if (token == SO_TOKEN_NONE || !so_tokenizer_is_end(v->tok, token))
            continue;
        v->end_at = i;
        v->end_token = token;
        v->end_origin = guess                       ? SO_ORIGIN_DRAFT
                        : round->tree->n_nodes == 1 ? SO_ORIGIN_PLAIN
                        : d->bonus                  ? SO_ORIGIN_BONUS
                                                    : SO_ORIGIN_CORRECTION;
    }
}

void so_painter_round(so_painter *v, const so_round *round) {
    if (!v->on)
        return;
    note_rejected(v, round);
    note_end(v, round);
    if (v->rounds)
        printf("%s%4d  ", v->n_rounds ? "\n" : "", v->n_rounds + 1);
    v->n_rounds++;
}

static void print_token(so_painter *v, const so_event *ev) {
    switch (ev->origin) {
    case SO_ORIGIN_PLAIN:
        print_text(ev->text, !v->rounds);
        break;
    case SO_ORIGIN_DRAFT:
        print_styled(v, &ACCEPTED, ev->text);
        break;
    case SO_ORIGIN_CORRECTION:
        print_styled(v, &REJECTED, so_buf_str(&v->rejected));
        print_styled(v, &OWN, ev->text);
        break;
    case SO_ORIGIN_BONUS:
        print_styled(v, &OWN, ev->text);
        break;
    }
}

/* The guesses that the end token replaced and, with --view=rounds, the end token itself. */
static void print_end(so_painter *v) {
    so_event end = {.origin = v->end_origin};
    if (v->rounds)
        end.text = so_tokenizer_text(v->tok, v->end_token);
    print_token(v, &end);
}

void so_painter_event(so_painter *v, const so_event *ev) {
    bool ends = ev->finish == SO_FINISH_STOP && v->n_shown == v->end_at;
    v->n_tokens += ev->token != SO_TOKEN_NONE;
    v->n_shown += ev->token != SO_TOKEN_NONE;
    if (v->on)
        print_token(v, ev);
    else if (v->terminal)
        print_text(ev->text, !v->rounds);
    else
        fwrite(ev->text.ptr, 1, ev->text.len, stdout);
    if (v->on && ends)
        print_end(v);
    if (ev->text.len)
        v->mid_line = v->rounds || ev->text.ptr[ev->text.len - 1] != '\n';
    fflush(stdout);
}

void so_painter_end(so_painter *v) {
    if (v->rounds)
        printf("\n%d tokens in %d passes of the target", v->n_tokens, v->n_rounds);
    putchar('\n');
    fflush(stdout);
    v->mid_line = false;
    v->n_rounds = v->n_tokens = 0;
}

static void break_line(void *user) {
    so_painter *v = user;
    fflush(stdout);
    if (v->mid_line)
        fputc('\n', stderr);
    v->mid_line = false;
}

void so_painter_guard(so_painter *v) {
    struct stat out, err;
    if (so_terminal_is(STDOUT_FILENO) && so_terminal_is(STDERR_FILENO) &&
        fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
        out.st_rdev == err.st_rdev)
        so_log_set_hook(break_line, v);
}

void so_painter_unguard(void) { so_log_set_hook(NULL, NULL); }

void so_painter_free(so_painter *v) { so_buf_free(&v->rejected); }
