/* See lines.h. On a terminal, lines are edited by libedit, but characters are read by this file
 * (EL_GETCFN), because libedit's reader cannot do three things: end a line on Ctrl-C without a jump
 * out of a signal handler, take a paste as one piece, and leave signals to the program. Handlers set
 * flags, read() returns with EINTR, and the flags are handled here, outside of any handler.
 *
 * A paste arrives between ESC[200~ and ESC[201~ if the terminal supports that mode. It is read
 * whole, control characters are removed, and it is inserted at once with its line breaks, so pasted
 * text is never executed. libedit shows a line break in its buffer as a line break, so turns of
 * several lines can be edited, and recalled from the history, as a whole.
 *
 * Each turn is appended to the history file at once, so that no turn is lost if two sessions run
 * at a time or one is killed. If the file exceeds MAX_HISTORY_BYTES, the next start reduces it to
 * the newest HISTORY_TURNS turns. Its mode is 0600. */
#include "cli/lines.h"

#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#include <wchar.h>

#include "base/log.h"
#include "base/mem.h"
#include "token/utf8.h"

enum { HISTORY_TURNS = 1000, MAX_HISTORY_BYTES = 1 << 20 };
enum { PASTE_KEY = 0x1E, ESC = 0x1B }; /* PASTE_KEY: Ctrl-^, bound to nothing else */

#define PASTE_BEGIN "[200~" /* after ESC */
#define PASTE_END "\033[201~"

struct so_lines {
    so_lines_opts o;
    EditLine *el; /* NULL: input is a pipe */
    History *hist;
    char prompt[32];
    unsigned char ahead[8]; /* bytes read ahead while looking for a paste mark */
    int n_ahead;
    so_buf paste;
    bool typed;  /* the interrupted line was not empty */
    bool pastes; /* the terminal may mark pastes */
};

static volatile sig_atomic_t resumed, resized;

static void on_continue(int sig) { resumed = sig; }
static void on_resize(int sig) { resized = sig; }

/* --- characters --- */

/* Redraws after a resize, and after the program was stopped and continued, when the terminal's
 * modes may have changed. libedit assumes that the cursor is in the first column and that the
 * terminal has libedit's modes. */
static void redraw(so_lines *l) {
    fputc('\r', l->o.terminal);
    el_set(l->el, EL_PREP_TERM, 0);
    el_set(l->el, EL_PREP_TERM, 1);
    el_resize(l->el);
    el_set(l->el, EL_REFRESH);
    resumed = resized = 0;
}

/* Returns 1, 0 at the end of input, −1 if *o.interrupted is set. */
static int next_byte(so_lines *l, unsigned char *out) {
    if (l->n_ahead > 0) {
        *out = l->ahead[0];
        memmove(l->ahead, l->ahead + 1, (size_t)--l->n_ahead);
        return 1;
    }
    for (;;) {
        if (*l->o.interrupted)
            return -1;
        if (resumed || resized)
            redraw(l);
        ssize_t n = read(STDIN_FILENO, out, 1);
        if (n >= 0)
            return (int)n;
        if (errno != EINTR)
            return 0;
    }
}

/* Whether the next bytes are `mark`. If so they are consumed, else they stay in `ahead`. */
static bool take_mark(so_lines *l, const char *mark) {
    for (int i = 0; mark[i]; i++) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        if (i ==
            l->n_ahead) { /* the bytes of a sequence arrive together; a typed key comes later */
            if (poll(&p, 1, 20) != 1 || read(STDIN_FILENO, &l->ahead[i], 1) != 1)
                return false;
            l->n_ahead++;
        }
        if (l->ahead[i] != (unsigned char)mark[i])
            return false;
    }
    l->n_ahead = 0;
    return true;
}

/* Converts line breaks to '\n' and removes control characters. */
static void clean_paste(so_buf *b) {
    size_t n = 0;
    for (size_t i = 0; i < b->len; i++) {
        unsigned char c = (unsigned char)b->data[i];
        if (c == '\r' && i + 1 < b->len && b->data[i + 1] == '\n')
            continue;
        if (c == '\r')
            c = '\n';
        if ((c >= 0x20 && c != 0x7F) || c == '\n' || c == '\t')
            b->data[n++] = (char)c;
    }
    while (n > 0 && b->data[n - 1] == '\n')
        n--;
    b->len = n;
    if (b->data)
        b->data[n] = '\0';
}

static int read_paste(so_lines *l) {
    static const int end_len = sizeof PASTE_END - 1;
    unsigned char c;
    so_buf_clear(&l->paste);
    l->paste.max = SO_LINES_MAX_TURN;
    l->paste.full = false;
    for (int matched = 0; matched < end_len;) {
        int rc = next_byte(l, &c);
        if (rc != 1)
            return rc;
        so_buf_append_char(&l->paste, (char)c);
        matched = c == (unsigned char)PASTE_END[matched] ? matched + 1 : c == ESC;
    }
    if (!l->paste.full)
        l->paste.len -= (size_t)end_len;
    clean_paste(&l->paste);
    return 1;
}

/* libedit's reader: returns 1 with a character, 0 at the end of input, −1 if interrupted. */
static int get_char(EditLine *el, wchar_t *out) {
    so_lines *l = NULL;
    unsigned char c[4];
    uint32_t cp = 0;
    size_t n = 0, len = 0;
    el_get(el, EL_CLIENTDATA, &l);
    for (so_utf8 found = SO_UTF8_SHORT; found == SO_UTF8_SHORT && n < sizeof c;) {
        int rc = next_byte(l, &c[n]);
        if (rc != 1) {
            const LineInfo *line = el_line(el);
            l->typed = rc < 0 && line->lastchar > line->buffer;
            errno = rc < 0 ? EINTR : errno;
            return rc;
        }
        found = so_utf8_next((const char *)c, ++n, &cp, &len);
        if (found == SO_UTF8_BAD)
            cp = 0xFFFD;
    }
    if (cp == ESC && take_mark(l, PASTE_BEGIN)) {
        int rc = read_paste(l);
        *out = PASTE_KEY;
        return rc;
    }
    *out = (wchar_t)cp;
    return 1;
}

/* --- keys --- */

static unsigned char insert_paste(EditLine *el, int ch) {
    so_lines *l = NULL;
    (void)ch;
    el_get(el, EL_CLIENTDATA, &l);
    if (l->paste.len == 0 || el_insertstr(el, l->paste.data) != 0)
        return CC_ERROR;
    return CC_REFRESH;
}

static unsigned char insert_newline(EditLine *el, int ch) {
    (void)ch;
    return el_insertstr(el, "\n") == 0 ? CC_REFRESH : CC_ERROR;
}

/* If the line begins with a slash: completes the first word to a command, later ones to file
 * names. */
static unsigned char complete(EditLine *el, int ch) {
    so_lines *l = NULL;
    const LineInfo *line = el_line(el);
    size_t n = (size_t)(line->cursor - line->buffer);
    const char *found = NULL;
    int n_found = 0;
    el_get(el, EL_CLIENTDATA, &l);
    if (n == 0 || line->buffer[0] != '/')
        return CC_ERROR;
    if (memchr(line->buffer, ' ', n))
        return _el_fn_complete(el, ch);
    for (int i = 0; l->o.word_at(i); i++)
        if (strncmp(l->o.word_at(i), line->buffer, n) == 0) {
            found = l->o.word_at(i);
            n_found++;
        }
    if (n_found != 1)
        return CC_ERROR;
    el_insertstr(el, found + n);
    el_insertstr(el, " ");
    return CC_REFRESH;
}

static char *prompt(EditLine *el) {
    so_lines *l = NULL;
    el_get(el, EL_CLIENTDATA, &l);
    return l->prompt;
}

/* --- history --- */

static void load_history(so_lines *l) {
    HistEvent ev;
    struct stat st;
    const char *path = l->o.history;
    if (!path || stat(path, &st) != 0)
        return;
    if (!S_ISREG(st.st_mode) || history(l->hist, &ev, H_LOAD, path) < 0) {
        so_log(SO_LOG_WARN, "%s: is not a history file; it is left unchanged", path);
        free(l->o.history);
        l->o.history = NULL;
        return;
    }
    if (st.st_size <= MAX_HISTORY_BYTES)
        return;
    so_buf tmp = {0};
    so_buf_printf(&tmp, "%s.partial-%ld", path, (long)getpid());
    int fd = open(tmp.data, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (f && history(l->hist, &ev, H_SAVE_FP, f) >= 0 && fclose(f) == 0)
        rename(tmp.data, path);
    else if (fd >= 0)
        unlink(tmp.data);
    so_buf_free(&tmp);
}

/* Uses a separate history object: versions of libedit differ in which entries "the newest n"
 * are. */
static bool append_turn(const char *path, const char *turn) {
    HistEvent ev;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    FILE *f = fd >= 0 ? fdopen(fd, "a") : NULL;
    if (!f)
        return false;
    History *one = history_init();
    history(one, &ev, H_SETSIZE, 1);
    bool ok = history(one, &ev, H_ENTER, turn) >= 0 && fseek(f, 0, SEEK_END) == 0 &&
              history(one, &ev, H_SAVE_FP, f) >= 0;
    history_end(one);
    return fclose(f) == 0 && ok;
}

static void remember(so_lines *l, const so_buf *turn) {
    HistEvent ev;
    if (turn->len == 0 || memchr(turn->data, '\0', turn->len) ||
        history(l->hist, &ev, H_ENTER, turn->data) <= 0 || !l->o.history)
        return;
    if (!append_turn(l->o.history, turn->data)) {
        so_log(SO_LOG_WARN, "%s: the history cannot be written: %s", l->o.history, strerror(errno));
        free(l->o.history);
        l->o.history = NULL;
    }
}

/* --- turns --- */

static void set_prompt(so_lines *l, bool first) {
    const char *on = l->o.color ? "\1\033[1m\1" : "", *off = l->o.color ? "\1\033[0m\1" : "";
    snprintf(l->prompt, sizeof l->prompt, "%s%s%s ", on, first ? ">" : ".", off);
}

static so_line_end edit_line(so_lines *l, so_buf *line) {
    int n = 0;
    l->typed = false;
    el_set(l->el, EL_PREP_TERM,
           1); /* before the prompt, so that keys typed early are not echoed twice */
    fputs(l->pastes ? "\033[?2004h" : "", l->o.terminal);
    const char *text = el_gets(l->el, &n);
    fputs(l->pastes ? "\033[?2004l" : "", l->o.terminal);
    fflush(l->o.terminal);
    if (*l->o.interrupted || !text || n <= 0) {
        fputc('\n', l->o.terminal);
        fflush(l->o.terminal);
        return *l->o.interrupted ? l->typed ? SO_LINE_CLEARED : SO_LINE_INTERRUPTED : SO_LINE_END;
    }
    so_buf_append(line, text, (size_t)n - (text[n - 1] == '\n'));
    return SO_LINE_OK;
}

static so_line_end pipe_line(so_lines *l, so_buf *line) {
    int c;
    bool any = false;
    while ((c = getc(stdin)) != EOF && c != '\n') {
        so_buf_append_char(line, (char)c);
        any = true;
    }
    if (*l->o.interrupted)
        return SO_LINE_INTERRUPTED;
    return c == EOF && !any ? SO_LINE_END : SO_LINE_OK;
}

/* Offset of the closing triple quote, or −1. */
static ptrdiff_t find_close(so_str s) {
    const char *at = memmem(s.ptr, s.len, "\"\"\"", 3);
    return at ? at - s.ptr : -1;
}

/* Whether the turn continues on another line; removes the marks (\ or """) that decide it. */
static bool continues(so_buf *turn, size_t line_at, bool *quoted) {
    so_str line = {so_buf_str(turn).ptr + line_at, turn->len - line_at};
    if (line_at == 0 && !*quoted && so_str_starts(line, SO_STR("\"\"\""))) {
        *quoted = true;
        memmove(turn->data, turn->data + 3, turn->len -= 3);
        line = so_buf_str(turn);
    }
    if (*quoted) {
        ptrdiff_t end = find_close(line);
        if (end >= 0)
            turn->len = line_at + (size_t)end;
        return end < 0;
    }
    if (line.len == 0 || line.ptr[line.len - 1] != '\\')
        return false;
    turn->len--;
    return true;
}

/* Removes the empty first and last line that triple quotes on lines of their own leave. */
static void trim_breaks(so_buf *turn) {
    if (turn->len > 0 && turn->data[0] == '\n')
        memmove(turn->data, turn->data + 1, --turn->len);
    if (turn->len > 0 && turn->data[turn->len - 1] == '\n')
        turn->len--;
}

so_line_end so_lines_read(so_lines *l, so_buf *turn) {
    bool quoted = false, more = true, too_long = false;
    so_buf_clear(turn);
    turn->max = SO_LINES_MAX_TURN;
    for (bool first = true; more; first = false) {
        if (!first)
            so_buf_append_char(turn, '\n');
        size_t at = turn->len;
        set_prompt(l, first);
        so_line_end rc = l->el ? edit_line(l, turn) : pipe_line(l, turn);
        if (rc == SO_LINE_END &&
            !first) /* take the lines so far; the next read returns the end again */
            break;
        if (rc != SO_LINE_OK)
            return rc;
        more = continues(turn, at, &quoted);
        if (turn->full) { /* discarded, but read to its end */
            so_buf_clear(turn);
            turn->full = false;
            too_long = true;
        }
    }
    if (quoted)
        trim_breaks(turn);
    if (turn->data)
        turn->data[turn->len] = '\0';
    if (l->el && !too_long)
        remember(l, turn);
    return too_long ? SO_LINE_TOO_LONG : SO_LINE_OK;
}

void so_lines_set_echo(so_lines *l, bool on) {
    struct termios t;
    if (!l->el || tcgetattr(STDIN_FILENO, &t) != 0)
        return;
    if (on)
        t.c_lflag |= ECHO;
    else
        t.c_lflag &= ~(tcflag_t)ECHO;
    tcsetattr(STDIN_FILENO, TCSANOW, &t);
}

/* --- opening --- */

static void watch_signals(void) {
    struct sigaction sa = {.sa_handler = on_continue};
    sigemptyset(&sa.sa_mask);
    sigaction(SIGCONT, &sa, NULL);
    sa.sa_handler = on_resize;
    sigaction(SIGWINCH, &sa, NULL);
}

static void open_editor(so_lines *l) {
    HistEvent ev;
    const char *ctype = setlocale(LC_CTYPE, "");
    if (!ctype || MB_CUR_MAX == 1) /* libedit's char functions convert with the locale */
        setlocale(LC_CTYPE, "C.UTF-8");
    l->el = el_init("sooth", stdin, l->o.terminal, stderr);
    if (!l->el)
        return;
    const char *kind = NULL;
    el_get(l->el, EL_TERMINAL, &kind);
    l->pastes = kind && *kind && strcmp(kind, "dumb") != 0;
    watch_signals();
    l->hist = history_init();
    history(l->hist, &ev, H_SETSIZE, HISTORY_TURNS);
    history(l->hist, &ev, H_SETUNIQUE, 1);
    load_history(l);
    el_set(l->el, EL_CLIENTDATA, l);
    el_set(l->el, EL_EDITOR, "emacs");
    el_source(l->el, NULL); /* ~/.editrc */
    el_set(l->el, EL_PROMPT_ESC, prompt, '\1');
    el_set(l->el, EL_HIST, history, l->hist);
    el_set(l->el, EL_GETCFN, get_char);
    /* The wide form keeps our strings; the char form would leak converted copies. */
    el_wset(l->el, EL_ADDFN, L"sooth-paste", L"insert what was pasted", insert_paste);
    el_wset(l->el, EL_ADDFN, L"sooth-newline", L"insert a line break", insert_newline);
    el_wset(l->el, EL_ADDFN, L"sooth-complete", L"complete a command", complete);
    el_set(l->el, EL_BIND, "^^", "sooth-paste", NULL);
    el_set(l->el, EL_BIND, "\033\r", "sooth-newline", NULL);
    el_set(l->el, EL_BIND, "\033\n", "sooth-newline", NULL);
    el_set(l->el, EL_BIND, "\t", "sooth-complete", NULL);
    el_set(l->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
}

so_lines *so_lines_open(const so_lines_opts *o) {
    so_lines *l = SO_NEW(so_lines);
    l->o = *o;
    if (o->terminal)
        open_editor(l);
    return l;
}

void so_lines_close(so_lines *l) {
    if (!l)
        return;
    if (l->el)
        el_end(l->el);
    if (l->hist)
        history_end(l->hist);
    so_buf_free(&l->paste);
    free(l->o.history);
    free(l);
}
