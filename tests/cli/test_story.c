/* The model and draft model that come with the program (models/story): found by name, the draft
 * model found by its registration, output equal to plain decoding, damaged copies refused. The
 * weights are real, so the acceptance is that of users; no download is needed. */
#include "rig.h"

#include <sys/stat.h>

#define ASK "-p 'Tell me a story about a cat.' -n 40 "

/* Paths of the two files; NULL outside a source tree. */
static char *target, *draft, *heads;

static int open_pair(void **state) {
    char self[3000];
    open_fixture(state);
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[SO_MAX(n, 0)] = '\0';
    char *cut = strstr(self, "/build/obj/");
    if (!cut)
        return 0;
    *cut = '\0';
    target = so_path_join(self, "models/story/story-q8_0.gguf");
    draft = so_path_join(self, "models/story/story-draft-q4_0.gguf");
    heads = so_path_join(self, "models/story/draft-medusa-q8_0.gguf");
    return 0;
}

static int close_pair(void **state) {
    free(target);
    free(draft);
    free(heads);
    return close_fixture(state);
}

static void need_pair(void) {
    if (!target || !so_file_exists(target) || !so_file_exists(draft))
        SO_SKIP("models/story is not beside this program");
}

static json_t *answer(const fixture *f, const char *options) {
    char line[5000];
    snprintf(line, sizeof line, "sooth run -m '%s' " ASK "--json %s", target, options);
    return json_of(f, line);
}

static double timing(const json_t *o, const char *name) {
    return json_number_value(json_object_get(json_object_get(o, "timings"), name));
}

/* More than half of the shipped draft model's guesses are accepted, and the output is unchanged. */
static void test_found_and_exact(void **state) {
    fixture *f = *state;
    static const char *const sampling[] = {"--temp 0", "--temp 0.8 --seed 3",
                                           "--temp 1 --seed 4 --top-p 0.9 --repeat-penalty 1.1"};
    static const char *const ways[] = {"--spec model --spec-length 3", "--spec auto",
                                       "--spec lookup,ngram,model", "--spec model --kv-type q8_0"};
    need_pair();
    for (size_t s = 0; s < SO_LEN(sampling); s++)
        for (size_t i = 0; i < SO_LEN(ways); i++) {
            char with[300], without[300];
            bool q8 = strstr(ways[i], "q8_0") != NULL;
            snprintf(with, sizeof with, "%s %s", sampling[s], ways[i]);
            snprintf(without, sizeof without, "%s --no-spec %s", sampling[s],
                     q8 ? "--kv-type q8_0" : "");
            json_t *plain = answer(f, without), *o = answer(f, with);
            if (!json_equal(json_object_get(o, "tokens"), json_object_get(plain, "tokens")))
                fail_msg("%s: not the tokens of plain decoding", with);
            if (s == 0 && i == 0)
                assert_true(timing(o, "draft_n_accepted") > 0.5 * timing(o, "draft_n"));
            json_decref(o);
            json_decref(plain);
        }
}

static void test_prove(void **state) {
    fixture *f = *state;
    need_pair();
    ran r = run(f, "sooth prove -m '%s' --spec model -n 16", target);
    if (r.status != 0)
        fail_msg("status %d: %s%s", r.status, text_of(&r.out), text_of(&r.err));
    done(&r);
}

/* By name, without paths. A fixed length, because on a busy machine the planner may choose none. */
static void test_by_name(void **state) {
    fixture *f = *state;
    need_pair();
    ran r = run(f, "sooth demo --json -n 48 --spec-length 4");
    if (r.status != 0 && strstr(text_of(&r.err), "no model found"))
        SO_SKIP("this program is built where it does not look for models/story");
    assert_int_equal(r.status, 0);
    json_error_t je;
    json_t *o = json_loads(text_of(&r.out), 0, &je);
    assert_non_null(o);
    assert_true(json_is_true(json_object_get(o, "identical")));
    assert_true(json_number_value(json_object_get(o, "tokens_per_pass")) > 1.5);
    json_decref(o);
    done(&r);
    expect(f, 0, "", "sooth run -m story " ASK);
}

/* Copies the first `part` (0 … 1) of a file under another name. */
static void cut_copy(const fixture *f, const char *from, const char *to, double part) {
    so_err err = {0};
    so_buf all = {0};
    SO_OK_OR_FAIL(so_file_read(from, 1 << 26, &all, &err), err);
    char *path = so_path_join(f->dir, to);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    size_t n = (size_t)(part * (double)all.len);
    assert_int_equal(fwrite(all.data, 1, n, file), n);
    fclose(file);
    free(path);
    so_buf_free(&all);
}

static void test_broken_copies(void **state) {
    fixture *f = *state;
    static const double shares[] = {0, 0.0001, 0.003, 0.2, 0.99999};
    need_pair();
    for (size_t i = 0; i < SO_LEN(shares); i++) {
        char line[5000];
        cut_copy(f, target, "cut.gguf", shares[i]);
        expect(f, 1, "cut.gguf", "sooth run -m ./cut.gguf " ASK);
        cut_copy(f, draft, "cut-draft.gguf", shares[i]);
        snprintf(line, sizeof line, "sooth run -m '%s' -md ./cut-draft.gguf " ASK, target);
        expect(f, 1, "cut-draft.gguf", line);
    }
}

/* Another vocabulary or another target is detected before any output. */
static void test_wrong_partners(void **state) {
    fixture *f = *state;
    char line[9000];
    need_pair();
    snprintf(line, sizeof line, "sooth run -m tiny.gguf -md '%s' -p hello -n 4", draft);
    expect(f, 1, "registered for", line);
    snprintf(line, sizeof line, "sooth run -m '%s' -md tiny.gguf " ASK, target);
    expect(f, 1, "token", line);
}

/* `calibrate`: the tree has the budget's nodes, its first accuracy is the draft's agreement with the
 * target, drafting with it changes no token and accepts more than a chain of as many guesses. */
static void test_calibrate(void **state) {
    fixture *f = *state;
    char line[5000];
    need_pair();
    spill(f, "p.jsonl",
          "{\"prompt\": \"Tell me a story about a dog.\"}\n"
          "{\"prompt\": \"Tell me a story about a boat.\"}\n");
    snprintf(line, sizeof line,
             "sooth calibrate -m '%s' --prompts p.jsonl -o t.json --draft-nodes 24 --draft-max 6 "
             "--svg t.svg --json",
             target);
    json_t *o = json_of(f, line);
    const json_t *nodes = json_object_get(o, "nodes");
    assert_int_equal(json_array_size(nodes), 24);
    double first =
        json_number_value(json_array_get(json_array_get(json_object_get(o, "accuracy"), 0), 0));
    assert_true(first > 0.6 && first < 1);
    double chance = json_number_value(json_object_get(json_array_get(nodes, 0), "chance"));
    assert_true(chance > first - 1e-5 && chance < first + 1e-5);
    json_decref(o);
    ran r = run(f, "cat t.svg");
    assert_non_null(strstr(text_of(&r.out), "</svg>"));
    done(&r);
    r = run(f, "sooth calibrate --show --mask t.json");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "24 nodes"));
    done(&r);
    json_t *plain = answer(f, "--temp 0 --no-spec");
    json_t *chain = answer(f, "--temp 0 --spec model --spec-length 24 --draft-max 24");
    json_t *tree =
        answer(f, "--temp 0 --spec 'model(tree=t.json)' --spec-length 6 --draft-nodes 24");
    assert_true(json_equal(json_object_get(plain, "tokens"), json_object_get(tree, "tokens")));
    double rate[2];
    for (int i = 0; i < 2; i++)
        rate[i] = json_number_value(
            json_object_get(json_object_get(i ? tree : chain, "spec"), "tokens_per_pass"));
    assert_true(rate[1] > 1.5 && rate[0] > 1.5);
    json_decref(plain);
    json_decref(chain);
    json_decref(tree);
    expect(f, 1, "none.json", "sooth calibrate --show none.json");
    expect(f, 2, "--prompts FILE", "sooth calibrate -m story");
    expect(f, 2, "tree file to show", "sooth calibrate");
}

/* The same for the story model's Medusa heads, which are registered: as deep as there are heads. */
static void test_calibrate_heads(void **state) {
    fixture *f = *state;
    char line[5000];
    need_pair();
    spill(f, "q.jsonl",
          "{\"prompt\": \"Tell me a story about a cat.\"}\n"
          "{\"prompt\": \"Tell me a story about a lake.\"}\n");
    snprintf(line, sizeof line,
             "sooth calibrate -m '%s' --heads '%s' --prompts q.jsonl -o h.json --draft-nodes 16 "
             "--json",
             target, heads);
    json_t *o = json_of(f, line);
    const json_t *accuracy = json_object_get(o, "accuracy");
    assert_int_equal(json_array_size(json_object_get(o, "nodes")), 16);
    assert_int_equal(json_array_size(accuracy), 4);
    assert_int_equal(json_array_size(json_array_get(accuracy, 0)), 64);
    double first = json_number_value(json_array_get(json_array_get(accuracy, 0), 0));
    assert_true(first > 0.25 && first < 0.75);
    json_decref(o);
    json_t *plain = answer(f, "--temp 0 --no-spec");
    static const char *const specs[] = {"medusa", "medusa(tree=h.json)", "medusa(best,nodes=16)"};
    for (size_t i = 0; i < SO_LEN(specs); i++) {
        char options[100];
        snprintf(options, sizeof options, "--temp 0 --spec '%s' --spec-length 4", specs[i]);
        json_t *got = answer(f, options);
        assert_true(json_equal(json_object_get(plain, "tokens"), json_object_get(got, "tokens")));
        assert_true(json_number_value(
                        json_object_get(json_object_get(got, "spec"), "tokens_per_pass")) > 1.1);
        json_decref(got);
    }
    json_decref(plain);
    snprintf(line, sizeof line, "sooth calibrate -m '%s' --heads '%s' -md '%s' --prompts q.jsonl",
             target, heads, heads);
    expect(f, 2, "measures one of them", line);
}

/* A node budget above what a request's pages hold is reduced with one warning, however many requests
 * use it, and changes no token. */
static void test_budget_above_the_cache(void **state) {
    static const char *const specs[] = {"model(best,nodes=200)", "medusa(best,nodes=200)"};
    static const char reduced[] = "trees of 200 nodes are reduced to 63";
    fixture *f = *state;
    char line[5000];
    need_pair();
    spill(f, "three.jsonl",
          "{\"prompt\": \"A cat.\"}\n{\"prompt\": \"A dog.\"}\n{\"prompt\": \"A boat.\"}\n");
    snprintf(line, sizeof line,
             "sooth run -m '%s' --prompts three.jsonl -n 8 --temp 0 -c 64 --no-spec", target);
    ran plain = run(f, line);
    for (size_t i = 0; i < SO_LEN(specs); i++) {
        snprintf(line, sizeof line,
                 "sooth run -m '%s' --prompts three.jsonl -n 8 --temp 0 -c 64 --spec '%s' "
                 "--spec-length 4 --draft-nodes 200",
                 target, specs[i]);
        ran r = run(f, line);
        const char *at = strstr(text_of(&r.err), reduced);
        assert_int_equal(r.status, 0);
        assert_non_null(at);
        assert_null(strstr(at + 1, reduced));
        assert_string_equal(text_of(&r.out), text_of(&plain.out));
        done(&r);
    }
    done(&plain);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budget_above_the_cache),
        cmocka_unit_test(test_calibrate_heads),
        cmocka_unit_test(test_found_and_exact),
        cmocka_unit_test(test_prove),
        cmocka_unit_test(test_by_name),
        cmocka_unit_test(test_broken_copies),
        cmocka_unit_test(test_wrong_partners),
        cmocka_unit_test(test_calibrate),
    };
    return cmocka_run_group_tests(tests, open_pair, close_pair);
}
