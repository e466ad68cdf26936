/* `--spec auto` with registered draft models: found, used, refused, and their records kept. The
 * target is deep and gives the same output as the draft model, so that speculation gains time. */
#include "rig.h"

#include <sys/stat.h>

#include "base/sha256.h"

enum { DEEP = 160 };
#define RUN "sooth run -m deep.gguf -p hello --ignore-eos -n 96 --temp 0 "

static so_draft_target key;

static void write_models(const fixture *f) {
    so_gguf *g = NULL;
    so_err err = {0};
    so_sha256 h;
    char *deep = so_path_join(f->dir, "deep.gguf"), *draft = so_path_join(f->dir, "draft.gguf");
    so_tiny_write(deep, &(so_tiny_opts){.layers = DEEP, .idle = true});
    SO_OK_OR_FAIL(so_gguf_open(deep, &g, &err), err);
    const so_gguf_kv *kv = so_gguf_find(g, "tokenizer.ggml.tokens");
    key = (so_draft_target){.name = "deep", .d_model = 64, .n_layers = DEEP};
    so_sha256_init(&h);
    for (uint64_t i = 0; i < kv->n; i++) {
        so_sha256_add(&h, "", i > 0);
        so_sha256_add(&h, kv->strings[i].ptr, kv->strings[i].len);
    }
    so_sha256_hex(&h, key.vocab);
    so_gguf_close(g);
    so_tiny_write(draft, &(so_tiny_opts){.registered = &key});
    free(deep);
    free(draft);
}

static int open_models(void **state) {
    open_fixture(state);
    write_models(*state);
    return 0;
}

static double number_at(const json_t *o, const char *object, const char *name) {
    const json_t *v = json_object_get(json_object_get(o, object), name);
    return json_number_value(v);
}

/* Greedy and sampled, found and named: the text equals that of plain decoding, and the draft model
 * is used. */
static void test_found_and_used(void **state) {
    fixture *f = *state;
    static const char *const ways[] = {"", "--spec auto", "--spec model", "-md draft.gguf",
                                       "--spec auto -md draft.gguf"};
    for (int temp = 0; temp < 2; temp++) {
        const char *sampling = temp ? "--temp 0.7 --seed 5 " : "";
        char line[300];
        snprintf(line, sizeof line, RUN "--no-spec --json %s", sampling);
        json_t *plain = json_of(f, line);
        for (size_t i = 0; i < SO_LEN(ways); i++) {
            snprintf(line, sizeof line, RUN "--json %s %s", sampling, ways[i]);
            json_t *o = json_of(f, line);
            assert_true(json_equal(json_object_get(o, "tokens"), json_object_get(plain, "tokens")));
            if (number_at(o, "timings", "draft_n_accepted") < 8)
                fail_msg("%s: %s", line, json_dumps(o, 0));
            json_decref(o);
        }
        json_decref(plain);
    }
}

/* --speculative-decoding without -md, and theory --measure, take the registered draft model too. */
static void test_found_by_other_options(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, RUN "--json --speculative-decoding"), *row, *drafter = NULL;
    assert_string_equal(json_string_value(json_object_get(json_object_get(o, "spec"), "drafter")),
                        "model");
    assert_int_equal(json_array_size(json_object_get(json_object_get(o, "spec"), "per_depth")), 5);
    assert_true(number_at(o, "timings", "draft_n_accepted") >= 8);
    json_decref(o);
#define MEASURE "sooth theory --measure -m deep.gguf -n 40 --temp 0 --json "
    static const char *const lines[] = {MEASURE, MEASURE "--spec model", MEASURE "--spec auto"};
    for (size_t i = 0; i < SO_LEN(lines); i++) {
        size_t k;
        o = json_of(f, lines[i]);
        drafter = NULL;
        json_array_foreach(json_object_get(o, "acceptance"), k, row) {
            const char *name = json_string_value(json_object_get(row, "drafter"));
            if (name && strcmp(name, i < 2 ? "model" : "auto") == 0)
                drafter = row;
        }
        if (!drafter)
            fail_msg("%s: %s", lines[i], json_dumps(o, 0));
        json_decref(o);
    }
#undef MEASURE
}

/* Records are kept: the next run drafts from its second pass on. A damaged or wrong record does not
 * change the text. */
static void test_second_run_starts_at_once(void **state) {
    fixture *f = *state;
    expect(f, 0, "", "rm -rf cache && " RUN);
    expect(f, 0, "", RUN);
    ran r = run(f, "cat cache/sooth/costs/*.txt");
    assert_int_equal(strncmp(text_of(&r.out), "sooth plan 1\n", 13), 0);
    assert_non_null(strstr(text_of(&r.out), "\ndrafter model "));
    done(&r);
    r = run(f, RUN "--view=rounds --no-color");
    assert_int_equal(r.status, 0);
    const char *second = strstr(text_of(&r.out), "\n   2  ");
    assert_non_null(second);
    assert_non_null(strchr(second, '{')); /* an accepted guess in the second pass */
    assert_true(strchr(second, '{') < strchr(second + 1, '\n'));
    done(&r);
    ran plain = run(f, RUN "--no-spec");
    static const char *const damages[] = {
        "sed -i 's/^\\([0-9]* [0-9]*\\) [0-9.]* \\([0-9.]*\\)$/\\1 0 \\2/'", /* never accepted */
        "sed -i 's/^drafter model .*/drafter model zzzz 1/'",
        "truncate -s -3",
        "cp /dev/null",
    };
    for (size_t i = 0; i < SO_LEN(damages); i++) {
        char line[400];
        snprintf(line, sizeof line, "%s cache/sooth/costs/*.txt && " RUN, damages[i]);
        r = run(f, "%s", line);
        assert_int_equal(r.status, 0);
        assert_string_equal(text_of(&r.out), text_of(&plain.out));
        done(&r);
    }
    done(&plain);
}

/* More programs want to run than there are cores, this test not counted. */
static bool machine_is_busy(void) {
    double load;
    return getloadavg(&load, 1) == 1 && load > (double)sysconf(_SC_NPROCESSORS_ONLN) + 1;
}

/* With a draft model that is always right and confident, drafts become long. A pass takes a fraction of
 * a millisecond, so other programs may make drafts look expensive: the best of some runs counts. */
static void test_confident_drafts_are_long(void **state) {
    fixture *f = *state;
    double best = 0;
    for (int i = 0; i < 8 && !(best > 4); i++) {
        expect(f, 0, "", "rm -rf cache && " RUN);
        json_t *o = json_of(f, RUN "--json --spec model");
        best = SO_MAX(best, number_at(o, "spec", "tokens_per_pass"));
        json_decref(o);
    }
    if (!(best > 4) && machine_is_busy())
        SO_SKIP("the machine is busy already");
    if (!(best > 4))
        fail_msg("%g tokens per pass", best);
}

/* A named draft model that does not fit: exit status 1 and the reason. A found one: a debug
 * message, and the answer without it. */
static void test_drafts_that_do_not_fit(void **state) {
    fixture *f = *state;
    so_draft_target other = key;
    char *path = so_path_join(f->dir, "wrong.gguf"), *last = so_path_join(f->dir, "draft.gguf");
    other.n_layers = 7;
    snprintf(other.name, sizeof other.name, "seven");
    so_tiny_write(path, &(so_tiny_opts){.registered = &other});
    expect(f, 1, "registered for 'seven'", RUN "-md wrong.gguf");
    expect(f, 1, "registered for 'seven'", RUN "--spec 'model(wrong.gguf)'");
    expect(f, 1, "registered for 'seven'", RUN "--spec auto -md wrong.gguf");
    expect(f, 1, "is not downloaded yet", RUN "-md smollm2");
    so_tiny_write(path, &(so_tiny_opts){.registered = &key, .other_vocab = true});
    expect(f, 1, "-md wrong.gguf does not fit -m deep.gguf: the draft model's vocabulary ",
           RUN "-md wrong.gguf");
    expect(f, 1, "in the target and", RUN "-md wrong.gguf"); /* its file claims this vocabulary */
    expect(f, 1, "-md wrong.gguf does not fit -m deep.gguf: the draft model's vocabulary ",
           "sooth theory --measure -m deep.gguf -md wrong.gguf -n 8");
    unlink(last);
    expect(f, 0, "in the target and",
           RUN "-v -v"); /* not an error where it was found and not named */
    so_tiny_write(path, &(so_tiny_opts){.registered = &other});
    expect(f, 0, "is skipped", RUN "-v -v");
    ran r = run(f, RUN);
    assert_int_equal(r.status, 0);
    assert_null(strstr(text_of(&r.err), "wrong.gguf"));
    done(&r);
    expect(f, 2, "--spec model needs a draft model, and none is registered for deep.gguf",
           RUN "--spec model");
    expect(f, 2, "--speculative-decoding needs a draft model, and none is registered",
           RUN "--speculative-decoding");
    expect(f, 2, "--spec model needs a draft model, and none is registered",
           "sooth theory --measure -m deep.gguf --spec model -n 8");
    expect(f, 0, "is skipped", "head -c 3000 wrong.gguf > cut.gguf && " RUN "-v -v");
    unlink(path);
    free(path);
    free(last);
    write_models(f);
}

/* Of two draft models each is used once; then the better one. */
/* As expect, in one of a few runs: in the first ones other programs may keep the planner from drafting,
 * so that nothing is learned of a draft. False if none of them did on a busy machine. */
static bool expect_soon(const fixture *f, const char *on_stderr, const char *args) {
    bool found = false;
    for (int i = 0; i < 8 && !found; i++) {
        ran r = run(f, "%s", args);
        assert_int_equal(r.status, 0);
        found = strstr(text_of(&r.err), on_stderr) != NULL;
        done(&r);
    }
    if (!found && !machine_is_busy())
        fail_msg("%s: none of 8 runs said '%s'", args, on_stderr);
    return found;
}

static void test_the_better_of_two(void **state) {
    fixture *f = *state;
    char *path = so_path_join(f->dir, "a-worse.gguf");
    so_tiny_write(path, &(so_tiny_opts){.layers = 6, .registered = &key}); /* has other output */
    expect(f, 0, "draft model: ./a-worse.gguf", "rm -rf cache && " RUN "-v");
    bool learned = true;
    for (int i = 0; i < 4 && learned; i++)
        learned = expect_soon(f, "draft model: ./draft.gguf", RUN "-v");
    unlink(path);
    free(path);
    if (!learned)
        SO_SKIP("the machine is busy already");
}

/* One that claims a lower agreement than the other is not tried. */
static void test_a_worse_one_is_not_tried(void **state) {
    fixture *f = *state;
    char *good = so_path_join(f->dir, "draft.gguf"), *other = so_path_join(f->dir, "z-other.gguf");
    so_draft_target high = key, low = key;
    high.agreement = 0.9;
    low.agreement = 0.2;
    so_tiny_write(good, &(so_tiny_opts){.registered = &high});
    so_tiny_write(other, &(so_tiny_opts){.layers = 6, .registered = &low});
    expect(f, 0, "draft model: ./draft.gguf", "rm -rf cache && " RUN "-v");
    for (int i = 0; i < 2; i++)
        expect(f, 0, "draft model: ./draft.gguf", RUN "-v");
    unlink(other);
    free(good);
    free(other);
    write_models(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_found_by_other_options),
        cmocka_unit_test(test_found_and_used),
        cmocka_unit_test(test_second_run_starts_at_once),
        cmocka_unit_test(test_confident_drafts_are_long),
        cmocka_unit_test(test_drafts_that_do_not_fit),
        cmocka_unit_test(test_the_better_of_two),
        cmocka_unit_test(test_a_worse_one_is_not_tried),
    };
    return cmocka_run_group_tests(tests, open_models, close_fixture);
}
