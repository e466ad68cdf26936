/* The translation model that comes with the program (models/ende): found by name, translates, and
 * its registered draft changes no token, which `prove` confirms. The measuring commands give it a
 * source text. */
#include <math.h>

#include "rig.h"

static const char PROMPTS[] =
    "{\"prompt\": \"The citizens know nothing about the European Parliament's television.\"}\n"
    "{\"prompt\": \"We must be able to protect our citizens and our economy.\"}\n"
    "{\"prompt\": \"The debate is closed, and the vote will take place tomorrow at noon.\"}\n"
    "{\"prompt\": \"I voted in favour of this report because it is balanced.\"}\n"
    "{\"prompt\": \"Mr President, what does the Commission intend to do about it?\"}\n"
    "{\"prompt\": \"Economic growth must not be achieved at the cost of the environment.\"}\n";
static const char SOURCE[] = "I would like to thank the rapporteur for her excellent report.";

/* Colours of `sooth trace`. */
#define ENCODER "#c0504d"
#define DRAFT_ENCODER "#e08a5f"

static bool here(void) {
    char self[3000];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[SO_MAX(n, 0)] = '\0';
    char *cut = strstr(self, "/build/obj/");
    if (!cut)
        return false;
    *cut = '\0';
    char *path = so_path_join(self, "models/ende/ende-q4_0.gguf");
    bool found = so_file_exists(path);
    free(path);
    return found;
}

static json_t *translate(const fixture *f, const char *options) {
    char line[1000];
    snprintf(line, sizeof line, "sooth run -m ende -p '%s' --json %s", SOURCE, options);
    return json_of(f, line);
}

static void test_translates(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    json_t *o = translate(*state, "--temp 0 --no-spec");
    const char *text = json_string_value(json_object_get(o, "text"));
    if (!strstr(text, "Bericht") || !strstr(text, "danken"))
        fail_msg("\"%s\"", text);
    assert_string_equal(json_string_value(json_object_get(o, "finish_reason")), "stop");
    json_decref(o);
}

static void test_speculation_changes_nothing(void **state) {
    static const char *const sampling[] = {"--temp 0", "--temp 0.8 --seed 3", "--beams 3"};
    static const char *const ways[] = {"--spec model --spec-length 3", "--spec lookup",
                                       "--spec auto"};
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    for (size_t s = 0; s < SO_LEN(sampling); s++)
        for (size_t i = 0; i < (s == 2 ? 1 : SO_LEN(ways)); i++) {
            char with[200], without[200];
            snprintf(with, sizeof with, "%s %s", sampling[s], s == 2 ? "--spec model" : ways[i]);
            snprintf(without, sizeof without, "%s --no-spec", sampling[s]);
            json_t *plain = translate(*state, without), *o = translate(*state, with);
            if (!json_equal(json_object_get(o, "text"), json_object_get(plain, "text")))
                fail_msg("%s: not the text of plain decoding", with);
            json_decref(plain);
            json_decref(o);
        }
}

static void test_prove(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    json_t *o = json_of(*state, "sooth prove -m ende --spec model --spec-length 2 -n 4 --json");
    assert_true(json_is_true(json_object_get(o, "exact")));
    assert_int_equal(json_integer_value(json_object_get(o, "chi_square_tests")), 4);
    json_decref(o);
}

static double number_of(const json_t *o, const char *name) {
    const json_t *v = json_object_get(o, name);
    if (!json_is_number(v))
        fail_msg("%s is not a number", name);
    return json_number_value(v);
}

/* The encoder reads the prompt in every run: 50 times as many tokens take longer. */
static void test_bench_prompt(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    json_t *few = json_of(*state, "sooth bench prompt -m ende -n 8 --repeats 9 --json");
    json_t *many = json_of(*state, "sooth bench prompt -m ende -n 400 --repeats 2 --json");
    assert_true(number_of(many, "min_ms") > 2 * number_of(few, "min_ms"));
    /* all weights once, in Q4_0: 18 bytes for 32 parameters; the embedding is the output, too */
    assert_true(fabs(number_of(few, "bytes") / (33.29e6 * 18 / 32) - 1) < 0.05);
    assert_int_equal(number_of(many, "n"), 400);
    assert_true(number_of(many, "tokens_per_second") > 0);
    json_decref(few);
    json_decref(many);
    expect(*state, 2, "exceeds the model's context of 512", "sooth bench prompt -m ende -n 513");
}

/* −log of the probability that a row of logits gives to a token. */
static double surprise(const float *row, int n, int token) {
    double max = row[0], sum = 0;
    for (int i = 0; i < n; i++)
        max = fmax(max, (double)row[i]);
    for (int i = 0; i < n; i++)
        sum += exp((double)row[i] - max);
    return log(sum) + max - (double)row[token];
}

/* Logits of a translation, given its source: their maxima are the translation, which would not be so
 * after another source. Returns the sum of −log p of its tokens, and their number. */
static double read_logits(const fixture *f, int *n) {
    enum { VOCAB = 16000 };
    json_t *o = translate(f, "--temp 0 --no-spec"), *out = json_object_get(o, "tokens"), *in;
    char line[300];
    snprintf(line, sizeof line, "sooth tokenize -m ende --add-special --json '%s'", SOURCE);
    json_t *source = json_of(f, line);
    in = json_pack("{s:O, s:[i]}", "source", json_object_get(source, "tokens"), "tokens", 0);
    json_array_extend(json_object_get(in, "tokens"), out);
    char *text = json_dumps(in, 0);
    spill(f, "ids.json", text);
    json_decref(json_of(f, "sooth bench logits -m ende -f ids.json -o rows.bin --json"));
    so_buf rows = {0};
    slurp(f, "rows.bin", &rows);
    *n = (int)json_array_size(out) + 1;
    assert_int_equal(rows.len, (size_t)*n * VOCAB * sizeof(float));
    const float *row = (const float *)(const void *)rows.data;
    double sum = 0;
    for (int i = 0; i < *n; i++, row += VOCAB) {
        int token = i + 1 < *n ? (int)json_integer_value(json_array_get(out, (size_t)i)) : 1;
        for (int k = 0; k < VOCAB; k++)
            assert_true(row[k] <= row[token]);
        sum += surprise(row, VOCAB, token);
    }
    so_buf_free(&rows);
    free(text);
    json_decref(o);
    json_decref(source);
    json_decref(in);
    return sum;
}

/* The perplexity of a text given its source, from `bench ppl` and from `bench logits`. */
static void test_ppl_and_logits(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    const fixture *f = *state;
    int n;
    double sum = read_logits(f, &n);
    json_t *o = translate(f, "--temp 0 --no-spec");
    const char *text = json_string_value(json_object_get(o, "text"));
    char lines[600];
    snprintf(lines, sizeof lines, "%s\t%s\n\n%s\t%s\r\n", SOURCE, text, SOURCE, text);
    spill(f, "pairs.tsv", lines);
    json_t *ppl = json_of(f, "sooth bench ppl -m ende -f pairs.tsv --json");
    assert_int_equal(number_of(ppl, "tokens"), 2 * n);
    assert_true(fabs(log(number_of(ppl, "ppl")) - sum / n) < 1e-6);
    snprintf(lines, sizeof lines, "The vote is tomorrow.\t%s", text);
    spill(f, "other.tsv", lines);
    json_t *other = json_of(f, "sooth bench ppl -m ende -f other.tsv --json");
    assert_true(number_of(other, "ppl") > 3 * number_of(ppl, "ppl"));
    json_decref(o);
    json_decref(ppl);
    json_decref(other);
}

static void test_bad_texts(void **state) {
    static const struct {
        const char *text, *why;
    } lines[] = {
        {"Yes.\tJa.\nNo.\n", "t.tsv, line 2: must be SOURCE<tab>TEXT"},
        {"Yes.\tJa.\tOui.\n", "line 1: must be SOURCE<tab>TEXT"},
        {"Yes.\tJa.\n\n \tNein.\n", "line 3: the source is empty"},
        {"Yes.\t\n", "line 1: the text is empty"},
        {"\n\n", "has no lines"},
        {"a b c d e f g h i\tJa.\n", "the source has 10 tokens, more than --ctx-size (8)"},
        {"Yes.\ta b c d e f g h i\n", "the text has 10 tokens, more than --ctx-size (8)"},
    };
    static const struct {
        const char *text, *why;
    } ids[] = {
        {"{\"tokens\": [0, 5]}", "must be {\"source\": [ID, ...], \"tokens\": [ID, ...]}"},
        {"{\"source\": [], \"tokens\": [0]}", "must be {\"source\""},
        {"{\"source\": [5, 1], \"tokens\": []}", "must be {\"source\""},
        {"{\"source\": [16000], \"tokens\": [0]}", "source: token 0 is not an id"},
        {"{\"source\": [1,1,1,1,1,1,1,1,1], \"tokens\": [0]}", "each at most --ctx-size (8)"},
        {"{\"source\": [1], \"tokens\": [1,1,1,1,1,1,1,1,1]}", "each at most --ctx-size (8)"},
    };
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    for (size_t i = 0; i < SO_LEN(lines); i++) {
        spill(*state, "t.tsv", lines[i].text);
        expect(*state, 1, lines[i].why, "sooth bench ppl -m ende -f t.tsv -c 8");
    }
    for (size_t i = 0; i < SO_LEN(ids); i++) {
        spill(*state, "t.json", ids[i].text);
        expect(*state, 1, ids[i].why, "sooth bench logits -m ende -f t.json -o t.bin -c 8");
    }
    spill(*state, "t.json", "{\"source\": [1], \"tokens\": [1]}");
    expect(*state, 1, "\"source\" is for models with an encoder",
           "sooth bench logits -m story -f t.json -o t.bin");
}

static void test_bench_pair(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    json_t *o = json_of(*state, "sooth bench pair -m ende -md ende -c 12 -n 8 --draft-max 2 "
                                "--repeats 1 --json");
    assert_true(json_is_true(json_object_get(o, "identical")));
    assert_int_equal(json_array_size(json_object_get(o, "cells")), 4 * 2);
    assert_int_equal(number_of(o, "passes_after"), 1 + 8 / 2); /* the source is not among them */
    /* keys and values of 7 layers with 6 heads of 64, F16: of the text, and of the source */
    const json_t *memory = json_object_get(o, "memory");
    assert_int_equal(number_of(memory, "kv_bytes"), 8.0 * 4096 * 2 * 7 * 2 * 6 * 64 * 2);
    json_decref(o);
    expect(*state, 1, "use a draft model of the target's own family",
           "sooth bench pair -m ende -md story -c 12 -n 8");
    expect(*state, 2, "ende has a context of 512 tokens, and 656 are needed",
           "sooth bench pair -m ende -md ende -n 600");
}

static void test_bench(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    spill(*state, "p.jsonl", PROMPTS);
    static const char *const commands[] = {
        "sooth bench decode -m ende -c 32 -n 4 --repeats 1 --json",
        "sooth bench decode -m ende -c 32 -n 4 --repeats 1 --json --prompts p.jsonl"};
    for (size_t i = 0; i < SO_LEN(commands); i++) {
        json_t *o = json_of(*state, commands[i]);
        assert_true(json_number_value(json_object_get(o, "tokens_per_second")) > 0);
        /* less than the weights of the decoder and the output, 4 times */
        assert_true(json_number_value(json_object_get(o, "bytes")) < 4 * 13e6);
        json_decref(o);
    }
    ran r = run(*state, "sooth bench curve -m ende -c 32 --repeats 1 --json");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "{\"n\":64,"));
    done(&r);
    expect(*state, 1, "none.jsonl", "sooth bench curve -m ende -c 32 --prompts none.jsonl");
}

/* How often the draft's most likely token is the target's, by two commands on the same translations:
 * `calibrate` reads them with the draft, `theory` with the target while the draft drafts. Each would
 * give something else without the source. */
static void test_measured(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    spill(*state, "p.jsonl", PROMPTS);
    json_t *tree = json_of(*state, "sooth calibrate -m ende --prompts p.jsonl --json");
    json_t *all = json_of(*state, "sooth theory --measure -m ende --prompts p.jsonl --temp 0 "
                                  "--spec 'model;oracle(1)' -n 2000 --json");
    const json_t *first = json_array_get(json_object_get(tree, "accuracy"), 0);
    double accuracy = json_number_value(json_array_get(first, 0));
    int positions = (int)json_integer_value(json_object_get(tree, "positions"));
    const json_t *found = json_object_get(all, "acceptance");
    assert_int_equal(json_array_size(found), 2);
    const json_t *model = json_array_get(found, 0), *oracle = json_array_get(found, 1);
    assert_int_equal(json_integer_value(json_object_get(model, "tokens")), positions);
    double alpha = json_number_value(json_object_get(model, "alpha"));
    if (fabs(alpha - accuracy) > 1e-5 || alpha < 0.5 || alpha > 0.95)
        fail_msg("alpha %.6f, accuracy %.6f", alpha, accuracy);
    assert_true(json_number_value(json_object_get(oracle, "alpha")) == 1);
    size_t i;
    const json_t *o;
    json_array_foreach(json_object_get(all, "speed"), i, o)
        assert_false(json_is_false(json_object_get(o, "identical"))); /* null: not timed */
    json_decref(tree);
    json_decref(all);
}

/* A trace has the time of the encoders, and the drawing a box for each. */
static void test_trace(void **state) {
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    so_buf svg = {0};
    for (int spec = 0; spec < 2; spec++) {
        char line[300];
        snprintf(line, sizeof line, "--temp 0 %s --trace t%d.jsonl",
                 spec ? "--spec model --spec-length 3" : "--no-spec", spec);
        json_decref(translate(*state, line));
    }
    json_t *plain = json_of(*state, "sooth trace t0.jsonl --json --svg plain.svg");
    json_t *spec = json_of(*state, "sooth trace t1.jsonl --json --svg spec.svg");
    assert_true(json_number_value(json_object_get(plain, "encode_ms")) > 0);
    assert_true(json_number_value(json_object_get(spec, "encode_ms")) > 0);
    slurp(*state, "plain.svg", &svg);
    assert_non_null(strstr(text_of(&svg), ENCODER));
    assert_null(strstr(text_of(&svg), DRAFT_ENCODER));
    so_buf_clear(&svg);
    slurp(*state, "spec.svg", &svg);
    assert_non_null(strstr(text_of(&svg), ENCODER));
    assert_non_null(strstr(text_of(&svg), DRAFT_ENCODER));
    so_buf_free(&svg);
    json_decref(plain);
    json_decref(spec);
}

/* Nothing is computed after a guess that ends the text: this draft is sure of what follows, and it
 * would be a long pass in vain at the end of every sentence. */
static void test_no_guesses_after_the_end(void **state) {
    static const char *const options[] = {"--temp 0", "--temp 1 --seed 2",
                                          "--temp 1 --seed 2 --verify reject"};
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    for (size_t i = 0; i < SO_LEN(options); i++) {
        so_buf trace = {0};
        int n_ends = 0;
        char line[300];
        snprintf(line, sizeof line, "%s --spec model --spec-length 12 --trace ends.jsonl",
                 options[i]);
        json_decref(translate(*state, line));
        slurp(*state, "ends.jsonl", &trace);
        char *save, *text = so_strdup(text_of(&trace));
        for (char *at = strtok_r(text, "\n", &save); at; at = strtok_r(NULL, "\n", &save)) {
            json_t *o = json_loads(at, 0, NULL);
            const json_t *tree = json_object_get(o, "tree"), *node;
            size_t k;
            json_array_foreach(tree, k, node) {
                int parent = (int)json_integer_value(json_object_get(node, "parent"));
                n_ends += json_integer_value(json_object_get(node, "token")) == 1;
                const json_t *before = json_array_get(tree, (size_t)SO_MAX(parent, 0));
                assert_false(parent >= 0 &&
                             json_integer_value(json_object_get(before, "token")) == 1);
            }
            json_decref(o);
        }
        assert_true(n_ends > 0);
        free(text);
        so_buf_free(&trace);
    }
}

/* What does not fit a translation is refused with its remedy. */
static void test_bad_requests(void **state) {
    static const struct {
        const char *options, *why;
    } cases[] = {
        {"-p ' '", "the source text is empty"},
        {"-p hello -c 64 -n 100", "--predict 100 after the start token does not fit the context"},
        {"-p hello --beams 64 -n 500", "lower --beams or --predict, or raise --kv-pages"},
        {"-c 8 -p 'a b c d e f g h i j k l'", "shorten it or raise --ctx-size"},
        {"-p hello -md story --spec model", "use a draft model of the target's own family"},
    };
    if (!here())
        SO_SKIP("models/ende is not beside this program");
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        char line[300];
        snprintf(line, sizeof line, "sooth run -m ende %s", cases[i].options);
        expect(*state, 1, cases[i].why, line);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_translates),
        cmocka_unit_test(test_speculation_changes_nothing),
        cmocka_unit_test(test_prove),
        cmocka_unit_test(test_bench),
        cmocka_unit_test(test_bench_prompt),
        cmocka_unit_test(test_ppl_and_logits),
        cmocka_unit_test(test_bad_texts),
        cmocka_unit_test(test_bench_pair),
        cmocka_unit_test(test_measured),
        cmocka_unit_test(test_trace),
        cmocka_unit_test(test_no_guesses_after_the_end),
        cmocka_unit_test(test_bad_requests),
    };
    return cmocka_run_group_tests_name("ende", tests, open_fixture, close_fixture);
}
