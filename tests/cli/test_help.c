/* `sooth help spec` documents what the parser of --spec accepts: every drafter, every option of
 * each with its range, and nothing else. */
#include "rig.h"

#include "draft/spec.h"

enum { MAX_ROWS = 64 };

typedef struct row {
    char head[64], text[300];
} row;

/* Rows of a help page: a head after two spaces, its text beside it and on the indented lines
 * below. */
static int read_rows(const so_buf *page, row rows[MAX_ROWS]) {
    int n = 0;
    for (const char *line = text_of(page); *line; line += strcspn(line, "\n") + 1) {
        size_t len = strcspn(line, "\n"), indent = strspn(line, " ");
        const char *text = line + indent;
        if (indent < 2 || indent >= len)
            continue;
        if (indent == 2) {
            const char *gap = memmem(text, len - indent, "  ", 2);
            size_t head = gap ? (size_t)(gap - text) : len - indent;
            assert_true(n < MAX_ROWS && head < sizeof rows[n].head);
            rows[n].text[0] = '\0';
            snprintf(rows[n++].head, sizeof rows[0].head, "%.*s", (int)head, text);
            text += head + (gap ? strspn(gap, " ") : 0);
        }
        assert_true(n > 0);
        size_t used = strlen(rows[n - 1].text);
        snprintf(rows[n - 1].text + used, sizeof rows[0].text - used, "%s%.*s", used ? " " : "",
                 (int)(line + len - text), text);
    }
    return n;
}

static bool parses(const char *text, so_spec *out) {
    so_err err = {0};
    return so_spec_parse(so_str_c(text), out, &err) == SO_OK;
}

static int name_of(const char *text, size_t len) {
    for (int i = 0; i < SO_SPEC_N_NAMES; i++)
        if (strlen(so_spec_name_text((so_spec_name)i)) == len &&
            memcmp(so_spec_name_text((so_spec_name)i), text, len) == 0)
            return i;
    return -1;
}

/* Options of a drafter that need k, because their rows are like "model(k=N,nodes=N)". */
static bool needs_k[SO_SPEC_N_NAMES][SO_SPEC_N_OPTIONS];

/* The option of a row like "ngram(order=N)", "unigram(FILE,draw)" or "model(k=N,distinct)"; the
 * range, where it is stated, is the parser's. Returns false where the row is about something else. */
static bool check_option_row(const row *r, char words[][16], unsigned documented[]) {
    char word[16], text[80];
    so_spec spec;
    double low = 0, high = 1;
    size_t len = strcspn(r->head, "(");
    int name = name_of(r->head, len);
    const char *at = r->head + len + 1;
    if (name < 0 || r->head[len] == '\0')
        return false;
    bool after_k = strncmp(at, "k=N,", 4) == 0, after_a = strncmp(at, "A,", 2) == 0;
    at += strncmp(at, "FILE,", 5) == 0 ? 5 : after_k ? 4 : after_a ? 2 : 0;
    if (strncmp(at, "fallback=LIST", 13) == 0) {
        snprintf(words[SO_SPEC_OPT_FALLBACK], sizeof words[0], "fallback");
        documented[name] |= 1u << SO_SPEC_OPT_FALLBACK;
        return true;
    }
    size_t word_len = strcspn(at, "=)");
    if (word_len >= sizeof word || name_of(at, word_len) >= 0 || *at < 'a')
        return false; /* model(ngram), model(FILE) */
    if (strncmp(at, "tree=FILE", 9) == 0 || strncmp(at, "device=D", 8) == 0) /* no range */
        return false;
    snprintf(word, sizeof word, "%.*s", (int)word_len, at);
    const char *range = strstr(r->text, ": ");
    if (at[word_len] == '=' && (!range || sscanf(range, ": %lf to %lf", &low, &high) != 2))
        fail_msg("%s: no range in '%s'", r->head, r->text);
    static const double beyond[] = {0, -1, 0, 1}; /* low, low − 1, high, high + 1 */
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text, "%.*s(%s%s=%.15g)", (int)len, r->head,
                 after_k   ? "k=1,"
                 : after_a ? "ngram,"
                           : "",
                 word, (i < 2 ? low : high) + beyond[i]);
        if (parses(text, &spec) != (i % 2 == 0))
            fail_msg("%s: '%s' is wrong about %s", r->head, r->text, text);
        if (i != 0)
            continue;
        int bit = __builtin_ctz(spec.nodes[0].has & ~(after_k ? 1u << SO_SPEC_OPT_K : 0));
        needs_k[name][bit] = after_k;
        snprintf(words[bit], sizeof words[bit], "%s", word);
        documented[name] |= 1u << bit;
    }
    return true;
}

static void test_spec_topic_is_complete(void **state) {
    fixture *f = *state;
    static row rows[MAX_ROWS];
    char words[SO_SPEC_N_OPTIONS][16] = {{0}};
    unsigned documented[SO_SPEC_N_NAMES] = {0};
    ran r = run(f, "sooth help spec");
    int n = read_rows(&r.out, rows), n_options = 0;
    for (int i = 0; i < n; i++)
        n_options += strchr(rows[i].head, ',') && !strstr(rows[i].head, "FILE,") &&
                             !strstr(rows[i].head, "(k=N,") && !strstr(rows[i].head, "(A,")
                         ? 0
                         : check_option_row(&rows[i], words, documented);
    assert_true(n_options >= 8);
    assert_non_null(strstr(text_of(&r.out), "\n  oracle(P) ")); /* the option without a name */
    assert_non_null(strstr(text_of(&r.out), "hit=H"));          /* in the row of another option */
    for (int o = SO_SPEC_OPT_NUMBER + 1; o < SO_SPEC_N_OPTIONS; o++)
        if (!words[o][0] && o != SO_SPEC_OPT_HIT)
            fail_msg("option %d of the parser is in no row", o);
    for (int i = 0; i < SO_SPEC_N_NAMES; i++) {
        const char *name = so_spec_name_text((so_spec_name)i);
        bool listed = false;
        for (int k = 0; k < n; k++)
            for (const char *at = rows[k].head; *at; at += strspn(at, ", ")) {
                listed |= name_of(at, strcspn(at, ",(")) == i;
                at += strcspn(at, ",");
            }
        if (!listed)
            fail_msg("drafter %s is in no row", name);
        for (int o = SO_SPEC_OPT_NUMBER + 1; o < SO_SPEC_N_OPTIONS; o++) {
            char text[80];
            so_spec spec;
            bool list = o == SO_SPEC_OPT_FALLBACK;
            snprintf(text, sizeof text, "%s(%s%s=%s)", name,
                     needs_k[i][o]        ? "k=1,"
                     : i == SO_SPEC_ASYNC ? "ngram,"
                                          : "",
                     words[o],
                     list                     ? "sync"
                     : o == SO_SPEC_OPT_ORDER ? "2"
                                              : "1");
            if (parses(text, &spec) != (documented[i] >> o & 1))
                fail_msg("%s is %sdocumented", text, documented[i] >> o & 1 ? "" : "not ");
        }
    }
    done(&r);
}

/* The examples are specs. */
static void test_spec_examples_parse(void **state) {
    fixture *f = *state;
    static row rows[MAX_ROWS];
    so_spec spec;
    ran r = run(f, "sooth help spec | sed -n '/^Examples:/,$p'");
    int n = read_rows(&r.out, rows);
    assert_true(n > 0);
    for (int i = 0; i < n; i++)
        if (!parses(rows[i].head, &spec))
            fail_msg("%s does not parse", rows[i].head);
    done(&r);
    r = run(f, "sooth help run | tr -s ' \\n' ' '");
    assert_non_null(strstr(text_of(&r.out), "`sooth help spec`"));
    done(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spec_topic_is_complete),
        cmocka_unit_test(test_spec_examples_parse),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
