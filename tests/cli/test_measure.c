/* `theory --measure` and `count`: reported figures must be right for drafters of known quality,
 * agree with the engine's own counts, and be consistent. Tiny model, seconds. */
#include "rig.h"

#include <math.h>

#define MEASURE "sooth theory --measure -m tiny.gguf -t 1 -f p.jsonl --json "
enum { N_VOCAB = 294 };

/* Many different prompts, so that texts differ. */
static void write_prompts(const fixture *f, int n) {
    so_buf text = {0};
    for (int i = 0; i < n; i++)
        so_buf_printf(&text, "{\"prompt\": \"%c%c the sea %d\"}\n", 'a' + i % 26, 'a' + i / 26, i);
    spill(f, "p.jsonl", text.data);
    so_buf_free(&text);
}

static double value(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_number(v))
        fail_msg("%s is not a number", key);
    return json_number_value(v);
}

/* The row of a drafter at a temperature. */
static const json_t *find(const json_t *root, const char *table, const char *drafter, double temp) {
    size_t i;
    json_t *row;
    json_array_foreach(
        json_object_get(root, table), i,
        row) if (strcmp(json_string_value(json_object_get(row, "drafter")), drafter) == 0 &&
                 value(row, "temp") == temp) return row;
    fail_msg("%s: no %s at %g", table, drafter, temp);
    return NULL;
}

static void near(double x, double want, double by) {
    if (!(fabs(x - want) <= by))
        fail_msg("%.12g, wanted %.12g within %g", x, want, by);
}

/* The figures of a row are consistent. */
static void check_row(const json_t *row, double n_tokens) {
    near(value(row, "tokens"), n_tokens, 0);
    near(value(row, "covered"), value(row, "guesses") / n_tokens, 1e-9);
    const json_t *list = json_object_get(row, "lenience");
    double before = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        double alpha = value(json_array_get(list, i), "alpha");
        if (i == 0)
            near(alpha, value(row, "alpha"), 1e-9);
        assert_true(alpha >= before - 1e-12 && alpha <= 1 + 1e-9);
        assert_true(value(json_array_get(list, i), "speedup") > 0);
        before = alpha;
    }
}

/* The formula in measure_speed.c, from the reported figures. */
static void check_speed(const json_t *root, const json_t *s, double sample_ms) {
    const json_t *passes = json_object_get(root, "passes");
    int gamma = (int)value(s, "gamma");
    double alpha = value(s, "alpha"), rho = value(s, "covered"), d = value(s, "draft_ms");
    double one = value(json_array_get(passes, 0), "ms"), tokens = 1;
    for (int i = 0; i < gamma; i++)
        tokens = 1 + alpha * tokens;
    double wide = value(json_array_get(passes, (size_t)gamma), "ms"), plain = one + sample_ms;
    double made = rho * tokens + 1 - rho, c = d / one;
    near(value(s, "c"), c, 1e-6 * c);
    near(value(s, "ideal"), made / (rho * (gamma * c + 1) + 1 - rho), 1e-6);
    near(value(s, "predicted"),
         made * plain / (rho * (gamma * d + wide + tokens * sample_ms) + (1 - rho) * plain), 1e-6);
    assert_true(value(s, "measured") > 0 && value(s, "planned") > 0);
    assert_true(json_is_true(json_object_get(s, "identical")));
}

static void test_known_drafters(void **state) {
    fixture *f = *state;
    enum { N = 600 };
    static const char *const drafters[] = {"model",  "oracle(0.6)",     "random",
                                           "lookup", "unigram(draw=1)", "bigram"};
    write_prompts(f, 40);
    json_t *root = json_of(f, MEASURE "-md tiny.gguf -n 600 --spec 'model;oracle(0.6)' --spec "
                                      "'random;lookup;unigram(draw);bigram'");
    assert_true(json_is_true(json_object_get(root, "complete")));
    assert_int_equal(json_array_size(json_object_get(root, "passes")), 17);
    for (int temp = 0; temp < 2; temp++) {
        const json_t *texts = json_array_get(json_object_get(root, "texts"), (size_t)temp);
        near(value(texts, "tokens"), N, 0);
        assert_true(value(texts, "texts") >= 8);
        for (size_t i = 0; i < SO_LEN(drafters); i++) {
            const json_t *row = find(root, "acceptance", drafters[i], temp);
            check_row(row, N);
            if (value(row, "guesses") > 0)
                check_speed(root, find(root, "speed", drafters[i], temp),
                            value(texts, "sample_ms"));
        }
        const json_t *self = find(root, "acceptance", "model", temp);
        near(value(self, "alpha"), 1, 1e-9);
        near(value(self, "alpha_error"), 0, 1e-9);
        near(value(self, "match"), 1, 1e-9);
        near(value(self, "covered"), 1, 0);
        /* five standard errors of N independent outcomes */
        const json_t *oracle = find(root, "acceptance", "oracle(0.6)", temp);
        near(value(oracle, "alpha"), 0.6, 5 * sqrt(0.6 * 0.4 / N));
        assert_int_equal(json_array_size(json_object_get(oracle, "lenience")), 0);
        const json_t *random = find(root, "acceptance", "random", temp);
        double v = 1.0 / N_VOCAB;
        near(value(random, "match"), v, 5 * sqrt(v / N));
    }
    /* Σ min(p, 1/V) is at least 1/V, and far above the acceptance of one sample by `match` */
    const json_t *random = find(root, "acceptance", "random", 1);
    assert_true(value(random, "alpha") > 3.0 / N_VOCAB);
    assert_string_equal(json_string_value(json_object_get(random, "kind")), "drawn");
    assert_true(value(find(root, "acceptance", "lookup", 0), "covered") < 1);
    json_decref(root);
}

/* The engine's accepted / tested at depth 1 over all prompts. */
static double engine_rate(fixture *f, const char *verify, double *tested) {
    ran r = run(f,
                "sooth run -m tiny.gguf -md q4.gguf --temp 1 -t 1 --prompts p.jsonl --json -n 60 "
                "-s 77 --spec-length 1 --verify %s",
                verify);
    double accepted = 0;
    *tested = 0;
    assert_int_equal(r.status, 0);
    for (char *line = r.out.data, *end; line && *line; line = end + 1) {
        end = strchr(line, '\n');
        json_t *o = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL);
        const json_t *depth =
            json_array_get(json_object_get(json_object_get(o, "spec"), "per_depth"), 0);
        if (depth) {
            accepted += value(depth, "accepted");
            *tested += value(depth, "tested");
        }
        json_decref(o);
    }
    done(&r);
    return accepted / *tested;
}

/* A draft model close to the target: Σ min(p,q) over given text must equal the acceptance of
 * `reject` in the engine, and the shared-noise formula that of `match` (within 5 standard errors of
 * the engine's count and of the measured mean). */
static void test_agrees_with_the_engine(void **state) {
    fixture *f = *state;
    static const char *const verify[] = {"reject", "match"}, *const keys[] = {"alpha", "match"},
                             *const errors[] = {"alpha_error", "match_error"};
    write_prompts(f, 150);
    json_t *root = json_of(f, "sooth quantize tiny.gguf q4.gguf Q4_0 >/dev/null && " MEASURE
                              "-md q4.gguf -n 3000 --temp 1 --spec model");
    const json_t *row = find(root, "acceptance", "model", 1);
    assert_true(value(row, "alpha") < 0.99 && value(row, "alpha") > 0.5);
    assert_true(value(row, "match") < value(row, "alpha"));
    for (int i = 0; i < 2; i++) {
        double tested, rate = engine_rate(f, verify[i], &tested), a = value(row, keys[i]);
        assert_true(tested > 1000);
        near(rate, a, 5 * (sqrt(a * (1 - a) / tested) + value(row, errors[i])));
    }
    json_decref(root);
}

/* Greedy texts of one prompt would be equal, so they begin with sampled tokens; the number of
 * tokens is as requested. Also checks the tables. */
static void test_one_prompt_and_text(void **state) {
    fixture *f = *state;
    write_prompts(f, 1);
    ran r = run(f, "sooth theory --measure -m tiny.gguf -t 1 -f p.jsonl -n 200 --gamma 3 --spec "
                   "'ngram;bigram(draw)'");
    assert_int_equal(r.status, 0);
    static const char *const says[] = {"Text generated by the target: 200 tokens in",
                                       "Table 3: acceptance",
                                       "t(n): milliseconds",
                                       "Table 4: speed-up",
                                       "Table 5: lenience",
                                       "bigram(draw=1)*",
                                       "* counted from one half"};
    for (size_t i = 0; i < SO_LEN(says); i++)
        if (!strstr(text_of(&r.out), says[i]))
            fail_msg("'%s' is missing in: %s", says[i], text_of(&r.out));
    assert_null(strstr(text_of(&r.out), "DIFFERENT"));
    assert_null(strstr(text_of(&r.out), "nan"));
    assert_int_equal(r.err.len, 0); /* no progress bar in a file */
    done(&r);
}

static void test_bad_measures(void **state) {
    fixture *f = *state;
    static const struct {
        int status;
        const char *args, *says;
    } cases[] = {
        {2, "--measure", "-m MODEL is missing"},
        {2, "-m tiny.gguf", "need --measure"},
        {2, "--alpha 0.5 --spec ngram", "need --measure"},
        {2, "--alpha 0.5 --device cpu", "need --measure"},
        {2, "--alpha 0.5 --draft-device cpu", "need --measure"},
        {2, "--measure -m tiny.gguf --alpha 0.5", "--alpha"},
        {2, "--measure -m tiny.gguf --svg x.svg", "--svg"},
        {2, "--measure -m tiny.gguf -n 0", "--predict 0: must be from 1"},
        {2, "--measure -m tiny.gguf -n -1", "--predict -1"},
        {2, "--measure -m tiny.gguf -n 16000000", "to 10000000"},
        {2, "--measure -m tiny.gguf --gamma 0", "--gamma 0: must be from 1 to 64"},
        {2, "--measure -m tiny.gguf --gamma 65", "--gamma 65"},
        {2, "--measure -m tiny.gguf --spec ngarm", "unknown drafter \"ngarm\""},
        {2, "--measure -m tiny.gguf --spec 'ngram;'", "--spec"},
        {2, "--measure -m tiny.gguf --spec none", "makes no guesses"},
        {2, "--measure -m tiny.gguf --spec 'ngram+lookup'", "one by one"},
        {2, "--measure -m tiny.gguf --spec model", "needs a draft model"},
        {1, "--measure -m tiny.gguf -f p.jsonl -md other.gguf", "vocabulary"},
        {1, "--measure -m tiny.gguf -f p.jsonl --spec 'model(other.gguf)'", "vocabulary"},
        {1, "--measure -m tiny.gguf -f p.jsonl --spec 'model(none.gguf)'", "none.gguf"},
        {1, "--measure -m tiny.gguf -f p.jsonl --spec 'bigram(p.jsonl)'", "not a table"},
        {1, "--measure -m tiny.gguf -f p.jsonl --spec medusa", "bench spec"},
        {1, "--measure -m tiny.gguf -f nowhere.jsonl", "nowhere.jsonl"},
        {1, "--measure -m tiny.gguf -f p.jsonl -c 20", "no room for an answer"},
        {1, "--measure -m nowhere.gguf", "nowhere.gguf"},
    };
    char *path = so_path_join(f->dir, "other.gguf"), line[512];
    so_tiny_write(path, &(so_tiny_opts){.other_vocab = true});
    free(path);
    write_prompts(f, 3);
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        snprintf(line, sizeof line, "sooth theory %s", cases[i].args);
        expect(f, cases[i].status, cases[i].says, line);
    }
}

/* After Ctrl-C the results so far are printed, valid and marked as incomplete. */
static void test_interrupt(void **state) {
    fixture *f = *state;
    write_prompts(f, 40);
    ran r = run(f,
                "%s theory --measure -m tiny.gguf -t 1 -f p.jsonl --json -n 9000000 --spec ngram & "
                "pid=$!; sleep 1.5; kill -INT $pid; wait $pid",
                f->bin);
    if (r.status != 130)
        fail_msg("status %d: %s", r.status, text_of(&r.err));
    json_t *o = json_loadb(text_of(&r.out), r.out.len, 0, NULL);
    assert_non_null(o);
    assert_true(json_is_false(json_object_get(o, "complete")));
    json_decref(o);
    done(&r);
}

/* --- count --- */

static void test_count(void **state) {
    fixture *f = *state;
    /* a model biased to one letter, and a text of that letter: every guess is accepted */
    static const char *const kinds[] = {"unigram", "bigram"};
    json_t *plain =
        json_of(f, "sooth run -m tiny.gguf -p 'the sea' --temp 0 --ignore-eos -n 60 -l 264=+100 "
                   "--no-spec --json");
    assert_string_equal(json_string_value(json_object_get(plain, "text")) + 50, "eeeeeeeeee");
    spill(f, "said.txt", "eeeeeeeeeeeeeeeeeeeeeeeeeeeeee");
    for (int order = 1; order <= 2; order++) {
        char line[512];
        snprintf(line, sizeof line,
                 "sooth count -m tiny.gguf -f said.txt -o t%d.tbl --order %d --json", order, order);
        json_t *o = json_of(f, line);
        assert_string_equal(json_string_value(json_object_get(o, "kind")), kinds[order - 1]);
        assert_true(value(o, "tokens") >= 30 && value(o, "entries") >= value(o, "contexts"));
        near(value(o, "vocabulary"), N_VOCAB, 0);
        json_decref(o);
        snprintf(line, sizeof line,
                 "sooth run -m tiny.gguf -p 'the sea' --temp 0 --ignore-eos -n 60 -l 264=+100 "
                 "--json --spec-length 2 --spec '%s(t%d.tbl)'",
                 kinds[order - 1], order);
        o = json_of(f, line);
        const json_t *spec = json_object_get(o, "spec");
        assert_true(json_equal(json_object_get(o, "tokens"), json_object_get(plain, "tokens")));
        assert_true(value(json_object_get(o, "timings"), "draft_n_accepted") >= 38);
        near(value(spec, "alpha"), 1, order == 1 ? 0 : 0.1); /* the prompt does not end with an e */
        json_decref(o);
    }
    json_decref(plain);
    json_t *o = json_of(f, "sooth count -m tiny.gguf -f - -o t.tbl --json <said.txt");
    assert_string_equal(json_string_value(json_object_get(o, "kind")), "bigram");
    json_decref(o);
    expect(f, 1, "is a unigram table",
           "sooth run -m tiny.gguf -p x --spec 'bigram(t1.tbl)' --spec-length 2");
}

/* A text that is read in several pieces is counted like its parts. */
static void test_count_is_additive(void **state) {
    fixture *f = *state;
    json_t *one = json_of(f, "yes 'the sea and the world' | head -n 20000 >a.txt; "
                             "sooth count -m tiny.gguf -f a.txt -o a.tbl --order 1 --json");
    json_t *six = json_of(f, "cat a.txt a.txt a.txt a.txt a.txt a.txt >b.txt; "
                             "sooth count -m tiny.gguf -f b.txt -o b.tbl --order 1 --json");
    near(value(six, "entries"), value(one, "entries"), 1); /* a piece may begin with a space */
    near(value(six, "tokens"), 6 * value(one, "tokens"), 8);
    json_decref(one);
    json_decref(six);
    /* a line of three pieces is not split inside a character */
    expect(f, 0, "",
           "yes 'ä€' | head -c 2500000 | tr -d '\\n' >c.txt; printf x >>c.txt; "
           "iconv -c -f utf-8 -t utf-8 c.txt >d.txt; "
           "sooth count -m tiny.gguf -f d.txt -o d.tbl");
}

static void test_bad_counts(void **state) {
    fixture *f = *state;
    spill(f, "empty.txt", "");
    spill(f, "short.txt", "a");
    expect(f, 2, "-m is missing", "sooth count -f short.txt -o t.tbl");
    expect(f, 2, "needs a text and an output file", "sooth count -m tiny.gguf -f short.txt");
    expect(f, 2, "--order '3'", "sooth count -m tiny.gguf -f short.txt -o t.tbl --order 3");
    expect(f, 1, "empty.txt", "sooth count -m tiny.gguf -f empty.txt -o t.tbl");
    expect(f, 1, "is empty", "sooth count -m tiny.gguf -f - -o t.tbl");
    expect(f, 1, "nowhere.txt", "sooth count -m tiny.gguf -f nowhere.txt -o t.tbl");
    expect(f, 1, "is a zero", "sooth count -m tiny.gguf -f tiny.gguf -o t.tbl");
    expect(f, 1, "byte 0xFF at offset 2 is not valid UTF-8",
           "printf 'ab\\377' >bad.txt; sooth count -m tiny.gguf -f bad.txt -o t.tbl");
    expect(f, 1, "nowhere/t.tbl", "sooth count -m tiny.gguf -f short.txt -o nowhere/t.tbl");
    expect(f, 1, "directory", "mkdir -p d; sooth count -m tiny.gguf -f d -o t.tbl");
    expect(f, 1, "garbage.gguf",
           "echo x >garbage.gguf; sooth count -m garbage.gguf -f short.txt "
           "-o t.tbl");
    /* a failed count leaves the old table unchanged and no other file */
    expect(f, 0, "",
           "echo 'the sea the sea' >good.txt; sooth count -m tiny.gguf -f good.txt -o "
           "t.tbl; cp t.tbl was.tbl; sooth count -m tiny.gguf -f bad.txt -o t.tbl "
           "2>/dev/null; cmp t.tbl was.tbl && test $(ls | grep -c t.tbl) = 1");
    char *path = so_path_join(f->dir, "other.gguf");
    so_tiny_write(path, &(so_tiny_opts){.other_vocab = true});
    free(path);
    expect(f, 1, "another tokenizer",
           "sooth run -m other.gguf -p x --spec 'bigram(t.tbl)' --spec-length 2");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_drafters),      cmocka_unit_test(test_agrees_with_the_engine),
        cmocka_unit_test(test_one_prompt_and_text), cmocka_unit_test(test_bad_measures),
        cmocka_unit_test(test_interrupt),           cmocka_unit_test(test_count),
        cmocka_unit_test(test_count_is_additive),   cmocka_unit_test(test_bad_counts),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
