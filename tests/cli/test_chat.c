/* `sooth chat`: from a pipe, where a conversation must give the same tokens as `run` does for the
 * same turns, and on a terminal, key by key. */
#include "rig.h"

#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>

#define CHAT "sooth chat -m tiny.gguf -s 7 -n 12 "

/* --- from a pipe --- */

/* The objects of stdout, one per line. */
static json_t *lines_of(const ran *r) {
    json_t *list = json_array();
    for (const char *p = text_of(&r->out); *p;) {
        size_t n = strcspn(p, "\n");
        json_error_t je;
        json_t *o = json_loadb(p, n, JSON_ALLOW_NUL, &je);
        if (!o)
            fail_msg("%s in: %s", je.text, text_of(&r->out));
        json_array_append_new(list, o);
        p += n + (p[n] == '\n');
    }
    return list;
}

static json_t *tokens(json_t *list, size_t i) {
    json_t *ids = json_object_get(json_array_get(list, i), "tokens");
    if (!json_is_array(ids))
        fail_msg("no answer %zu among %zu", i, json_array_size(list));
    return ids;
}

static void has(const so_buf *b, const char *text) {
    if (!strstr(text_of(b), text))
        fail_msg("'%s' is not in: %s", text, text_of(b));
}

static void lacks(const so_buf *b, const char *text) {
    if (strstr(text_of(b), text))
        fail_msg("'%s' is in: %s", text, text_of(b));
}

/* Answers of chat have the same tokens as those of run for the same conversation; turns of several
 * lines work in every form. */
static void test_equals_run(void **state) {
    fixture *f = *state;
    spill(f, "p.jsonl",
          "{\"turns\": [\"the sea\", \"or in\\nthe well\", \"he\\nll\", \"/sea\"]}\n");
    spill(f, "in.txt", "the sea\n\nor in\\\nthe well\n\"\"\"\nhe\nll\n\"\"\"\n//sea\n");
    json_t *want =
        json_of(f, "sooth run -m tiny.gguf -s 7 -n 12 --prompts p.jsonl --json --system 'the in'");
    ran r = run(f, CHAT "--json --system 'the in' <in.txt");
    json_t *got = lines_of(&r), *turns = json_object_get(want, "turns");
    assert_int_equal(r.status, 0);
    assert_int_equal(json_array_size(got), 4);
    for (size_t i = 0; i < 4; i++) {
        assert_true(json_array_size(tokens(got, i)) > 0);
        assert_true(json_equal(tokens(got, i), tokens(turns, i)));
    }
    assert_string_equal(text_of(&r.err), "");
    done(&r);
    r = run(f, CHAT "--system 'the in' <in.txt"); /* as text: the same answers and nothing else */
    size_t at = 0;
    for (size_t i = 0; i < 4; i++) {
        json_t *text = json_object_get(json_array_get(got, i), "text");
        size_t n = json_string_length(text);
        assert_true(at + n < r.out.len && r.out.data[at + n] == '\n');
        assert_memory_equal(r.out.data + at, json_string_value(text), n);
        at += n + 1;
    }
    assert_int_equal(at, r.out.len);
    done(&r);
    json_decref(got);
    json_decref(want);
}

static void test_retry_undo_seed(void **state) {
    fixture *f = *state;
    spill(f, "in.txt",
          "the sea\n/retry\n/seed 7\n/retry\nor\n/undo\nor\n/spec none\n/seed 7\n/ret\n"
          "/spec random\n/seed 7\n/retry\n/temp 0\n/retry\n/reset\nthe sea\n");
    ran r = run(f, CHAT "--json <in.txt");
    json_t *got = lines_of(&r);
    assert_int_equal(r.status, 0);
    assert_int_equal(json_array_size(got), 9);
    assert_false(json_equal(tokens(got, 0), tokens(got, 1))); /* another seed */
    assert_true(json_equal(tokens(got, 0), tokens(got, 2)));  /* the same seed */
    assert_true(json_equal(tokens(got, 3), tokens(got, 4)));  /* removed and sent again */
    assert_true(json_equal(tokens(got, 4), tokens(got, 5)));  /* with any drafter */
    assert_true(json_equal(tokens(got, 4), tokens(got, 6)));
    assert_string_equal(json_string_value(json_object_get(
                            json_object_get(json_array_get(got, 5), "spec"), "drafter")),
                        "none");
    assert_false(json_equal(tokens(got, 0), tokens(got, 8))); /* the temperature has changed */
    has(&r.err, "removed: or");
    has(&r.err, "at temperature 0 the answer is always the same");
    done(&r);
    json_decref(got);
}

static void test_saved_conversation_continues(void **state) {
    fixture *f = *state;
    spill(f, "a.txt", "/system in the well\nthe sea\nor in\n/save c.json\nhe\n");
    spill(f, "b.txt", "/load c.json\nhe\n/save c.json\n/save b.txt\n");
    ran a = run(f, CHAT "--json <a.txt"), b = run(f, CHAT "--json <b.txt");
    json_t *first = lines_of(&a), *second = lines_of(&b);
    assert_int_equal(json_array_size(first), 3);
    assert_true(json_equal(tokens(first, 2), tokens(second, 0)));
    has(&a.err, "saved 4 messages");
    has(&b.err, "saved 6 messages");
    has(&b.err, "b.txt exists and was not saved or loaded here");
    so_buf saved = {0};
    slurp(f, "c.json", &saved);
    has(&saved, "\"in the well\"");
    so_buf_free(&saved);
    done(&a);
    done(&b);
    json_decref(first);
    json_decref(second);
}

static void test_load_refuses(void **state) {
    fixture *f = *state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"{", "line 1"},
        {"{\"x\": 1}", "must be {\"messages\""},
        {"[1]", "message 1: must be an object"},
        {"[{\"role\": \"user\"}]", "message 1: must be an object"},
        {"[{\"role\": \"tool\", \"content\": \"x\"}]", "role 'tool' must be"},
        {"[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"system\",\"content\":\"x\"}]",
         "message 2: a system message must be the first"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        spill(f, "bad.json", cases[i].text);
        ran r = run(f, "printf 'the sea\\n/load bad.json\\n/undo\\n' | " CHAT);
        assert_int_equal(r.status, 0);
        has(&r.err, cases[i].says);
        has(&r.err, "removed: the sea"); /* the conversation is as it was */
        done(&r);
    }
}

static void test_command_words(void **state) {
    fixture *f = *state;
    spill(f, "in.txt",
          "/help\n/s\n/tmp\n/sats\n/temp hot\n/temp 101\n/t 0.5\n/view maybe\n/seed -1\n/undo now\n"
          "/save\n/retry\n/undo\n/spec nobody\n/spec model\n/spec predict\n/stats\n/exit\nnever "
          "said\n");
    ran r = run(f, CHAT "<in.txt");
    assert_int_equal(r.status, 0);
    assert_string_equal(text_of(&r.out), "");
    static const char *const says[] = {"/system [TEXT]",
                                       "/s could be /system, /seed, /spec, /stats, /save",
                                       "unknown command /tmp",
                                       "did you mean /stats?",
                                       "/temp 'hot': must be a number from 0 to 100",
                                       "/temp '101': must be",
                                       "temperature: 0.5",
                                       "/view 'maybe': must be on, off or rounds",
                                       "/seed '-1': must be",
                                       "/undo takes no argument",
                                       "/save needs FILE",
                                       "nothing to answer",
                                       "no turn to remove",
                                       "nobody",
                                       "model needs a draft model: start with -md",
                                       "predict needs the expected text",
                                       "answers: 0"};
    for (size_t i = 0; i < SO_LEN(says); i++)
        has(&r.err, says[i]);
    done(&r);
    r = run(f, "echo /help | " CHAT);
    for (const char *line = text_of(&r.err); *line; line += strcspn(line, "\n") + 1)
        assert_in_range(strcspn(line, "\n"), 0, 80); /* bytes; fits a terminal without wrapping */
    done(&r);
    r = run(f, "printf '/usr/bin\\n/ 1\\n/4\\n' | " CHAT "--json"); /* ordinary turns */
    json_t *got = lines_of(&r);
    assert_int_equal(json_array_size(got), 3);
    json_decref(got);
    done(&r);
}

/* A failed answer removes neither the turn before it nor the old answer. */
static void test_failed_retry(void **state) {
    fixture *f = *state;
    spill(f, "in.txt",
          "the sea\n/spec bigram(none.tbl)\n/retry\nor\n/spec none\n/save r.json\n/retry\n");
    ran r = run(f, CHAT "--json <in.txt");
    json_t *got = lines_of(&r);
    assert_int_equal(r.status, 1);
    assert_int_equal(json_array_size(got), 4);
    assert_non_null(json_object_get(json_array_get(got, 1), "error"));
    assert_non_null(json_object_get(json_array_get(got, 2), "error"));
    has(&r.err, "none.tbl");
    has(&r.err, "saved 2 messages");
    assert_true(json_array_size(tokens(got, 3)) > 0);
    json_decref(got);
    done(&r);
}

static void test_loaded_turns(void **state) {
    fixture *f = *state;
    spill(f, "l.json", "[{\"role\": \"user\", \"content\": \"the sea\"}]");
    ran a = run(f, "printf '/load l.json\\n/retry\\n' | " CHAT "--json"),
        b = run(f, "printf 'the sea\\n' | " CHAT "--json"),
        c = run(f, "printf '/load l.json\\nor in\\n/save m.json\\n' | " CHAT "--json");
    json_t *x = lines_of(&a), *y = lines_of(&b);
    assert_true(json_equal(tokens(x, 0), tokens(y, 0)));
    has(&a.err, "/retry answers the last one");
    has(&c.err, "the unanswered turn before this one is removed");
    has(&c.err, "saved 2 messages");
    json_decref(x);
    json_decref(y);
    done(&a);
    done(&b);
    done(&c);
}

/* The beginning of a long conversation is hidden, with a message; a turn that cannot fit is
 * refused. */
static void test_full_context(void **state) {
    fixture *f = *state;
    spill(f, "in.txt", "the sea\nor in\nhe\nthe well\nin the sea\n/save all.json\n");
    ran r = run(f, CHAT "-c 96 --json --ignore-eos <in.txt");
    json_t *got = lines_of(&r);
    assert_int_equal(r.status, 0);
    assert_int_equal(json_array_size(got), 5);
    has(&r.err, "no longer fits the context of 96 tokens");
    has(&r.err, "saved 10 messages"); /* hidden ones too */
    json_decref(got);
    done(&r);
    spill(f, "in.txt",
          "the sea\nthe sea the sea the sea the sea the sea the sea the sea the sea the sea the "
          "sea the sea the sea the sea the sea the sea the sea the sea\nthe sea\n");
    r = run(f, CHAT "-c 64 --json <in.txt");
    got = lines_of(&r);
    assert_int_equal(r.status, 1);
    assert_int_equal(json_array_size(got), 3);
    has(&r.err, "and the context 64: shorten it");
    assert_non_null(json_object_get(json_array_get(got, 1), "error"));
    assert_true(json_array_size(tokens(got, 2)) > 0);
    json_decref(got);
    done(&r);
}

static void test_bad_input(void **state) {
    fixture *f = *state;
    char *path = so_path_join(f->dir, "mute.gguf");
    so_tiny_write(path, &(so_tiny_opts){.no_chat = true});
    free(path);
    expect(f, 1, "mute.gguf has no chat template", "sooth chat -m mute.gguf");
    expect(f, 2, "-m MODEL is missing", "sooth chat");
    expect(f, 2, "not an option of this command", "sooth chat -m tiny.gguf -p x");
    ran r = run(f, "printf 'a\\377b\\nthe sea\\n' | " CHAT "--json");
    assert_int_equal(r.status, 1);
    has(&r.err, "not valid UTF-8: byte 0xFF at offset 1");
    json_t *got = lines_of(&r);
    assert_int_equal(json_array_size(got), 2);
    assert_true(json_array_size(tokens(got, 1)) > 0);
    json_decref(got);
    done(&r);
    r = run(f, "{ head -c 5000000 /dev/zero | tr '\\0' a; printf '\\nthe sea\\n'; "
               "printf '\"\"\"'; head -c 5000000 /dev/zero | tr '\\0' a; printf "
               "'\\nx\\n\"\"\"\\n'; } | " CHAT "--json");
    has(&r.err, "a turn of more than 4 MB is ignored");
    got = lines_of(&r);
    assert_int_equal(json_array_size(got), 1);
    json_decref(got);
    done(&r);
}

/* --- on a terminal --- */

typedef struct term {
    pid_t pid;
    int fd;
    so_buf out;
} term;

static term open_term(const fixture *f, const char *args, const char *kind) {
    term t = {0};
    so_buf cmd = {0};
    struct winsize size = {.ws_row = 24, .ws_col = 100};
    so_buf_printf(&cmd,
                  "cd '%s' && export XDG_CACHE_HOME='%s/cache' XDG_STATE_HOME='%s/state' "
                  "HOME='%s' TERM=%s LC_ALL=C.UTF-8 NO_COLOR=1 && exec %s chat %s",
                  f->dir, f->dir, f->dir, f->dir, kind, f->bin, args);
    t.pid = forkpty(&t.fd, NULL, NULL, &size);
    if (t.pid == 0) {
        execl("/bin/sh", "sh", "-c", cmd.data, (char *)NULL);
        _exit(127);
    }
    so_buf_free(&cmd);
    if (t.pid < 0)
        SO_SKIP("no pseudo-terminals here");
    return t;
}

/* Reads until `text` and n more bytes have arrived after `from`; returns where the text ends. */
static size_t await_more(term *t, size_t from, const char *text, size_t n_more) {
    char part[4096];
    for (time_t end = time(NULL) + 60; time(NULL) < end;) {
        so_str seen = so_buf_str(&t->out);
        const char *at = seen.len > from ? strstr(seen.ptr + from, text) : NULL;
        size_t to = at ? (size_t)(at - seen.ptr) + strlen(text) : 0;
        if (at && seen.len >= to + n_more)
            return to;
        struct pollfd p = {.fd = t->fd, .events = POLLIN};
        if (poll(&p, 1, 1000) != 1)
            continue;
        ssize_t n = read(t->fd, part, sizeof part);
        if (n <= 0)
            break;
        so_buf_append(&t->out, part, (size_t)n);
    }
    kill(t->pid, SIGKILL);
    fail_msg("'%s' never came after byte %zu of: %s", text, from, text_of(&t->out));
    return 0;
}

static size_t await(term *t, size_t from, const char *text) { return await_more(t, from, text, 0); }

static void type(term *t, const char *keys) {
    assert_int_equal(write(t->fd, keys, strlen(keys)), (ssize_t)strlen(keys));
}

/* Waits for the exit status; the program must have been told to quit. */
static int close_term(term *t) {
    char part[4096];
    int status = 0;
    struct pollfd p = {.fd = t->fd, .events = POLLIN};
    for (ssize_t n = 1; n > 0;) {
        if (poll(&p, 1, 60000) != 1)
            kill(t->pid, SIGKILL);
        n = read(t->fd, part, sizeof part);
        if (n > 0)
            so_buf_append(&t->out, part, (size_t)n);
    }
    close(t->fd);
    waitpid(t->pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) == 1)
        print_error("%s\n", text_of(&t->out));
    so_buf_free(&t->out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

#define PROMPT "\033[?2004h> "
#define TINY "-m tiny.gguf -s 7 -n 8 "

static void test_terminal_turns(void **state) {
    fixture *f = *state;
    term t = open_term(f, TINY, "xterm");
    size_t at = await(&t, 0, PROMPT);
    type(&t, "the seq\177a\r"); /* edited */
    at = await(&t, at, "first after");
    at = await(&t, at, PROMPT);
    type(&t, "/vi\ton\r"); /* completed */
    at = await(&t, at, "view: on");
    at = await(&t, at, PROMPT);
    type(&t, "or \\\r");
    at = await(&t, at, "\033[?2004h. ");
    type(&t, "in\033\rthe \xC3\xBC\r"); /* Alt-Enter */
    at = await(&t, at, "first after");
    at = await(&t, at, PROMPT);
    type(&t, "/save t.json\r");
    at = await(&t, at, "saved 4 messages");
    at = await(&t, at, PROMPT);
    type(&t, "\004");
    lacks(&t.out, "\033[2m"); /* NO_COLOR */
    lacks(&t.out, "\033[1m");
    assert_int_equal(close_term(&t), 0);
    so_buf saved = {0};
    slurp(f, "t.json", &saved);
    has(&saved, "\"the sea\"");
    has(&saved, "\"or \\nin\\nthe \xC3\xBC\"");
    so_buf_free(&saved);
}

/* No escape sequences where TERM is dumb. */
static void test_terminal_dumb(void **state) {
    fixture *f = *state;
    term t = open_term(f, TINY, "dumb");
    size_t at = await(&t, 0, "> ");
    type(&t, "the sea\r");
    at = await(&t, at, "first after");
    await(&t, at, "> ");
    lacks(&t.out, "\033[?");
    type(&t, "\004");
    assert_int_equal(close_term(&t), 0);
}

static void test_terminal_paste(void **state) {
    fixture *f = *state;
    term t = open_term(f, TINY, "xterm");
    size_t at = await(&t, 0, PROMPT);
    type(&t, "see: \033[200~one\r/quit\rthree\033[31m\007\ttab\n\033[201~.\r");
    at = await(&t, at, "first after");
    at = await(&t, at, PROMPT);
    type(&t, "/save p.json\r");
    at = await(&t, at, "saved 2 messages");
    at = await(&t, at, PROMPT);
    type(&t, "\033[D\004"); /* keys whose sequence begins like a paste mark */
    assert_int_equal(close_term(&t), 0);
    so_buf saved = {0};
    slurp(f, "p.json", &saved);
    has(&saved, "\"see: one\\n/quit\\nthree[31m\\ttab.\"");
    so_buf_free(&saved);
}

static void test_terminal_history(void **state) {
    fixture *f = *state;
    struct stat st;
    term t = open_term(f, TINY, "xterm");
    size_t at = await(&t, 0, PROMPT);
    type(&t, "\"\"\"in the\rwell\"\"\"\r");
    at = await(&t, at, "first after");
    at = await(&t, at, PROMPT);
    type(&t, "/quit\r");
    assert_int_equal(close_term(&t), 0);
    char *path = so_path_join(f->dir, "state/sooth/chat_history");
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    t = open_term(f, TINY, "xterm"); /* another session, two lines up */
    at = await(&t, 0, PROMPT);
    type(&t, "\033[A\033[A!\r");
    at = await(&t, at, "first after");
    at = await(&t, at, PROMPT);
    type(&t, "/undo\r");
    at = await(&t, at, "removed: in the well!");
    await(&t, at, PROMPT); /* keys typed before the editor is ready may be lost */
    type(&t, "\004");
    assert_int_equal(close_term(&t), 0);
    assert_int_equal(unlink(path), 0);
    t = open_term(f, TINY "--no-history", "xterm");
    at = await(&t, 0, PROMPT);
    type(&t, "/quit\r");
    assert_int_equal(close_term(&t), 0);
    assert_int_not_equal(stat(path, &st), 0);
    spill(f, "state/sooth/chat_history", "not ours\n"); /* and it is not written */
    t = open_term(f, TINY, "xterm");
    at = await(&t, 0, "it is left unchanged");
    await(&t, at, PROMPT);
    type(&t, "/quit\r");
    assert_int_equal(close_term(&t), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 9);
    unlink(path);
    free(path);
}

static void test_terminal_interrupt_at_prompt(void **state) {
    fixture *f = *state;
    term t = open_term(f, TINY, "xterm");
    size_t at = await(&t, 0, PROMPT);
    type(&t, "never sai");
    at = await(&t, at, "never sai");
    type(&t, "\003");
    at = await(&t, at, PROMPT);
    type(&t, "\003");
    at = await(&t, at, "Ctrl-D or /quit ends the program");
    at = await(&t, at, PROMPT);
    type(&t, "or\\\r");
    at = await(&t, at, "\033[?2004h. ");
    type(&t, "\003");
    at = await(&t, at, PROMPT);
    type(&t, "/undo\r");
    at = await(&t, at, "no turn to remove");
    at = await(&t, at, PROMPT);
    kill(-t.pid, SIGTERM);
    assert_int_equal(close_term(&t), 128 + SIGTERM);
}

/* Stopped and continued by a shell that leaves the terminal with echo on. */
static void test_terminal_resume(void **state) {
    fixture *f = *state;
    struct termios sane, now;
    term t = open_term(f, TINY, "xterm");
    assert_int_equal(tcgetattr(t.fd, &sane), 0);
    assert_true(sane.c_lflag & ECHO);
    size_t at = await(&t, 0, PROMPT);
    type(&t, "half");
    at = await(&t, at, "half");
    assert_int_equal(kill(t.pid, SIGSTOP), 0);
    assert_int_equal(tcsetattr(t.fd, TCSANOW, &sane), 0);
    assert_int_equal(kill(t.pid, SIGCONT), 0);
    at = await(&t, at, "> half"); /* drawn again */
    for (int i = 0; i < 200 && tcgetattr(t.fd, &now) == 0 && (now.c_lflag & ECHO); i++)
        usleep(10000);
    assert_false(now.c_lflag & ECHO);
    type(&t, " and half\r");
    at = await(&t, at, "first after");
    at = await(&t, at, PROMPT);
    type(&t, "/undo\r");
    at = await(&t, at, "removed: half and half");
    await(&t, at, PROMPT); /* keys typed before the program has the terminal are lost */
    type(&t, "\004");
    assert_int_equal(close_term(&t), 0);
}

/* Only JSON on stdout; the editor uses stderr. */
static void test_terminal_json(void **state) {
    fixture *f = *state;
    term t = open_term(f, TINY "--json >j.txt", "xterm");
    size_t at = await(&t, 0, PROMPT);
    type(&t, "the sea\r");
    await(&t, at, PROMPT);
    type(&t, "\004");
    assert_int_equal(close_term(&t), 0);
    ran r = run(f, "cat j.txt");
    json_t *got = lines_of(&r);
    assert_int_equal(json_array_size(got), 1);
    json_decref(got);
    done(&r);
}

/* Needs a slow model. */
static void test_terminal_interrupt_answer(void **state) {
    fixture *f = *state;
    const char *model = so_test_model("smollm2");
    char line[4200];
    if (!model || SO_TEST_SANITIZED)
        SO_SKIP(model ? "too slow under a sanitizer" : "smollm2 is not here (sooth pull smollm2)");
    snprintf(line, sizeof line, "-m '%s' --temp 0 --no-spec --ignore-eos", model);
    term t = open_term(f, line, "xterm");
    size_t at = await(&t, 0, PROMPT);
    type(&t, "Count from one to three hundred.\r");
    at = await_more(&t, at, "\033[?2004l", 40); /* part of the answer */
    type(&t, "typed ahead");
    type(&t, "\003");
    at = await(&t, at, "stopped; /retry answers again");
    at = await(&t, at, PROMPT);
    type(&t, "/stats\r");
    at = await(&t, at, "answers: 1, ");
    at = await(&t, at, PROMPT);
    lacks(&t.out, "typed ahead"); /* not echoed into the answer */
    type(&t, "/undo\r");
    at = await(&t, at, "removed: Count from one");
    await(&t, at, PROMPT); /* keys typed before the editor is ready may be lost */
    type(&t, "\004");
    assert_int_equal(close_term(&t), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_run),
        cmocka_unit_test(test_retry_undo_seed),
        cmocka_unit_test(test_saved_conversation_continues),
        cmocka_unit_test(test_load_refuses),
        cmocka_unit_test(test_command_words),
        cmocka_unit_test(test_failed_retry),
        cmocka_unit_test(test_loaded_turns),
        cmocka_unit_test(test_full_context),
        cmocka_unit_test(test_bad_input),
        cmocka_unit_test(test_terminal_turns),
        cmocka_unit_test(test_terminal_dumb),
        cmocka_unit_test(test_terminal_paste),
        cmocka_unit_test(test_terminal_history),
        cmocka_unit_test(test_terminal_interrupt_at_prompt),
        cmocka_unit_test(test_terminal_resume),
        cmocka_unit_test(test_terminal_json),
        cmocka_unit_test(test_terminal_interrupt_answer),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
