/* The grid: a real model, prompts × drafters × lengths × ways of sampling, and every token equal to
 * plain decoding's, with ==.
 *
 *   greedy  every prompt with every drafter and length; the requests of a batch share both
 *   match   temperature 0.7 and 1.0 with three seeds, penalties, top-p and logit bias on: the
 *           product is shuffled, so that a batch mixes temperatures, seeds, drafters and lengths
 *   alone   a sample of both, one request at a time, and plain decoding itself alone
 *   model   the target's own weights, rounded again, as its draft: greedy and match
 *   trees   every kind of tree, with the registered drafts and heads (files of random weights where none
 *           are registered): together in mixed batches, paged and slotted, with and without room
 *           for all of them, so that requests find prefixes and are preempted; and alone
 *   own     the target as its own draft: not one guess may fail
 *   edits   `lookup` on "rewrite this function" emits at least 2.5 tokens per pass
 *
 *   grid MODEL [--quick] [--part NAME] [--prompts N] [--tokens N] [--every N] [--threads N]
 *        [--from DRAFTER] [FILE.jsonl…]
 *
 * MODEL is a file or a pulled model's name; without files the prompts are the shared ones, else
 * those of bench/prompts. Run from the repository's root.
 *
 * Plain texts are made once, by an engine without speculation. --quick takes 8 prompts and few
 * tokens and still lets every drafter meet every length (minutes); --every N takes
 * each N-th of match's product (its default: 12; 1 is all of it, hours); --from goes on with greedy
 * where an earlier run was stopped. Prints a line per part and drafter; exit 1 on any difference.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "draft/registry.h"
#include "draft/shape.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "so_heads_file.h"
#include "so_rig.h"
#include "so_test.h"

enum { MAX_PROMPTS = 40, N_SEEDS = 3, N_SETTINGS = 1 + 2 * N_SEEDS, AT_ONCE = 8, N_CTX = 1024 };
enum { MAX_PROMPT_TOKENS = 512, MAX_DRAFT = 16, EDIT_TOKENS = 256, EDIT_LENGTH = 8 };

static const char EDITS[] = "bench/prompts/edits.jsonl";
static const char *const OURS[] = {"bench/prompts/content.jsonl", "bench/prompts/chat.jsonl",
                                   EDITS};

static const int LENGTHS[] = {1, 2, 4, 5, 8, 16};
enum { N_LENGTHS = SO_LEN(LENGTHS) };

/* Capitals stand for files (file_of). */
static const char *const DRAFTERS[] = {"none",
                                       "ngram",
                                       "ngram(draw)",
                                       "lookup",
                                       "corpus",
                                       "unigram(U)",
                                       "bigram(B)",
                                       "predict",
                                       "random",
                                       "oracle(0.7)",
                                       "user",
                                       "auto",
                                       "lookup,ngram",
                                       "ngram+lookup",
                                       "medusa",
                                       "medusa(nodes=16)",
                                       "medusa(best)",
                                       "lookahead",
                                       "lookahead(best)",
                                       "blockwise"};
static const char *const WITH_MODEL[] = {"model", "model(ngram)", "lookup,model", "model(k=2)",
                                         "model(best)"};
static const char *const TREES[] = {"medusa(k=2)",
                                    "medusa(tree=T)",
                                    "medusa(best,nodes=24)",
                                    "blockwise(H)",
                                    "lookahead(nodes=12)",
                                    "lookahead(ends=2)",
                                    "lookahead(best,nodes=8,ends=3)",
                                    "model(D)",
                                    "model(D,k=2,nodes=12)",
                                    "model(D,k=4,nodes=24)",
                                    "model(D,tree=T)",
                                    "model(D,best,nodes=24)",
                                    "model(D,ngram)",
                                    "model(D)+model(E)",
                                    "model(D,best,nodes=8)+model(E,k=2,nodes=8)",
                                    "model(D,k=2,nodes=6)+medusa(best,nodes=6)+lookup"};
enum { N_DRAFTERS = SO_LEN(DRAFTERS), N_WITH_MODEL = SO_LEN(WITH_MODEL), N_TREES = SO_LEN(TREES) };
enum { FIRST_TREE = N_DRAFTERS + N_WITH_MODEL, N_NAMES = FIRST_TREE + N_TREES };
enum { TREE_PROMPTS = 4, SPARE_PAGES = 2 };

/* One way of sampling one prompt, and what plain decoding says. */
typedef struct text {
    so_sample_params sample;
    so_tokens plain;
    so_finish finish;
    bool made;
} text;

typedef struct job {
    int setting, prompt, drafter, length;
} job;

typedef struct tally {
    int requests, different, wasteful;
    int64_t tokens, passes, drafted, accepted;
} tally;

typedef struct grid {
    so_bundle b, draft;
    char *model_path;
    so_tokens prompts[MAX_PROMPTS];
    int n_prompts, want, n_tokens, every, n_threads;
    bool quick, natural; /* natural: every text may end by itself; else every second one */
    bool one_by_one;
    const char *part; /* NULL: all */
    const char *from; /* greedy goes on with this drafter; NULL: begins */
    text texts[N_SETTINGS][MAX_PROMPTS];
    char *names[N_NAMES]; /* specs with their files; NULL: heads or drafts that this model lacks */
    char *dir;
    int64_t started;
    int n_submitted, failures;
} grid;

static void die(const char *what, const so_err *err) {
    fprintf(stderr, "failed: %s: %s\n", what, err->msg);
    exit(1);
}

/* --- prompts --- */

static void encode(grid *g, const char *words) {
    so_err err = {0};
    json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", words);
    so_tokens t = {0};
    if (so_chat_encode(g->b.chat, messages, NULL, &t, &err) != SO_OK)
        die("prompt", &err);
    json_decref(messages);
    if (t.len <= MAX_PROMPT_TOKENS)
        g->prompts[g->n_prompts++] = t;
    else
        so_tokens_free(&t);
}

/* `want` prompts of a file, spread over it, since files are sorted by kind; one that is too long
 * is passed over for the next. */
static void read_prompts(grid *g, const char *path, int want) {
    so_buf file = {0};
    so_err err = {0};
    int n_lines = 0, line = 0, before = g->n_prompts;
    if (so_file_read(path, 1 << 26, &file, &err) != SO_OK)
        die("prompts", &err);
    for (size_t i = 0; i < file.len; i++)
        n_lines += file.data[i] == '\n';
    for (size_t at = 0; at < file.len && g->n_prompts < MAX_PROMPTS; line++) {
        char *end = memchr(file.data + at, '\n', file.len - at);
        size_t len = end ? (size_t)(end - file.data) - at : file.len - at;
        if (g->n_prompts - before < (line + 1) * want / SO_MAX(n_lines, 1)) {
            json_t *o = json_loadb(file.data + at, len, 0, NULL);
            const json_t *turns = json_object_get(o, "turns");
            const char *words =
                json_string_value(turns ? json_array_get(turns, 0) : json_object_get(o, "prompt"));
            if (words)
                encode(g, words);
            json_decref(o);
        }
        at += len + 1;
    }
    so_buf_free(&file);
}

/* --- ways of sampling --- */

/* Setting 0 is greedy; then two temperatures with three seeds each. A third of those texts is
 * sampled plainly, a third with penalties and top-p, a third with everything. */
static so_sample_params sampling(int setting, int prompt) {
    static const so_bias bias[] = {{284, 2.0f}, {28, -INFINITY}, {1000, 1.5f}};
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = setting == 0 ? 0 : setting <= N_SEEDS ? 0.7f : 1;
    p.seed = 1 + (uint64_t)((setting + N_SEEDS - 1) % N_SEEDS);
    int kind = setting == 0 ? 0 : (setting + prompt) % 3;
    if (kind > 0) {
        p.repeat_penalty = 1.15f;
        p.presence_penalty = 0.3f;
        p.frequency_penalty = 0.2f;
        p.top_p = 0.9f;
    }
    if (kind == 2) {
        p.repeat_last_n = 32;
        p.top_k = 60;
        p.min_p = 0.02f;
        p.bias = bias;
        p.n_bias = SO_LEN(bias);
    }
    return p;
}

/* --- running --- */

/* Whoever repeats the text shifted by one is wrong, and sometimes not. */
static int user_guess(void *user, const int32_t *tokens, int n, int n_prompt, int32_t *out,
                      int max) {
    (void)user;
    (void)n_prompt;
    int at = n - 2;
    while (at >= 0 && tokens[at] != tokens[n - 1])
        at--;
    for (int i = 0; i < max; i++)
        out[i] = tokens[(at + 1 + i) % n];
    return max;
}

static so_engine_opts engine_opts(const grid *g, int n_parallel, bool speculates,
                                  const so_bundle *draft) {
    so_engine_opts o;
    so_engine_defaults(g->b.model, &o);
    o.n_ctx = N_CTX;
    o.n_parallel = n_parallel;
    o.max_draft = speculates ? MAX_DRAFT : 0;
    o.draft = draft ? draft->model : NULL;
    o.draft_tok = draft ? draft->tok : NULL;
    o.draft_temp = -1;
    o.user_drafter = user_guess;
    return o;
}

static so_engine *open_engine(grid *g, int n_parallel, bool speculates, const so_bundle *draft) {
    so_engine_opts o = engine_opts(g, n_parallel, speculates, draft);
    so_engine *e = NULL;
    so_err err = {0};
    if (so_engine_create(g->b.model, g->b.tok, &o, &e, &err) != SO_OK)
        die("engine", &err);
    return e;
}

static so_request *submit(grid *g, so_engine *e, int setting, int prompt,
                          const so_spec_opts *spec) {
    so_request_opts o = {.prompt = g->prompts[prompt].ids,
                         .n_prompt = (int)g->prompts[prompt].len,
                         .sample = g->texts[setting][prompt].sample,
                         .max_tokens = g->n_tokens,
                         .priority = g->n_submitted++, /* matters where pages are scarce */
                         .ignore_end = !g->natural && prompt % 2 == 1};
    so_request *r = NULL;
    so_err err = {0};
    if (spec)
        o.spec = *spec;
    if (so_engine_submit(e, &o, &r, &err) != SO_OK)
        die(spec ? spec->drafter : "plain", &err);
    return r;
}

static void step(so_engine *e) {
    so_err err = {0};
    if (so_engine_step(e, &err) < 0)
        die("step", &err);
}

/* The plain texts of a setting, eight at a time. */
static void make_plain(grid *g, int setting) {
    if (g->texts[setting][0].made)
        return;
    so_engine *e = open_engine(g, AT_ONCE, false, NULL);
    so_request *r[MAX_PROMPTS];
    for (int i = 0; i < g->n_prompts; i++) {
        g->texts[setting][i].sample = sampling(setting, i);
        r[i] = submit(g, e, setting, i, NULL);
    }
    for (int i = 0; i < g->n_prompts; i++) {
        int n;
        text *t = &g->texts[setting][i];
        while (so_request_finish(r[i]) == SO_FINISH_NONE)
            step(e);
        const int32_t *out = so_request_output(r[i], &n);
        so_tokens_append(&t->plain, out, (size_t)n);
        t->finish = so_request_finish(r[i]);
        t->made = true;
    }
    for (int i = 0; i < g->n_prompts; i++)
        so_request_free(r[i]);
    so_engine_free(e);
}

static bool same_as_plain(const text *t, const so_request *r) {
    int n;
    const int32_t *out = so_request_output(r, &n);
    return so_request_finish(r) == t->finish && n == (int)t->plain.len &&
           (n == 0 || memcmp(out, t->plain.ids, (size_t)n * sizeof *out) == 0);
}

/* Told the text, a drafter needs no more passes than ⌈n/(K+1)⌉. */
static bool wastes_passes(const char *name, const text *t, int length, const so_request *r) {
    int n = (int)t->plain.len;
    return strcmp(name, "predict") == 0 && t->finish == SO_FINISH_LENGTH &&
           so_request_get_stats(r)->rounds != (n + length) / (length + 1);
}

static void settle(grid *g, const job *j, so_request *r, tally *sum) {
    const text *t = &g->texts[j->setting][j->prompt];
    const so_request_stats *s = so_request_get_stats(r);
    const char *name = g->names[j->drafter];
    bool same = same_as_plain(t, r), wasteful = wastes_passes(name, t, j->length, r);
    sum->requests++;
    sum->different += !same;
    sum->wasteful += wasteful;
    sum->tokens += s->predicted_n;
    sum->passes += s->rounds;
    sum->drafted += s->draft_n;
    sum->accepted += s->draft_n_accepted;
    if (!same || wasteful)
        printf("%s: %s, length %d, prompt %d, temperature %g, seed %llu\n",
               same ? "TOO MANY PASSES" : "DIFFERENT", name, j->length, j->prompt,
               (double)t->sample.temp, (unsigned long long)t->sample.seed);
    g->failures += !same || wasteful;
    so_request_free(r);
}

/* Runs the jobs, `n_parallel` at once: where one ends the next begins. one_by_one: at most one begins in
 * a step. */
static void run_jobs(grid *g, so_engine *e, const job *jobs, int n, int n_parallel, tally *sums) {
    so_request *running[AT_ONCE] = {NULL};
    const job *of[AT_ONCE];
    int next = 0, left = n;
    while (left > 0) {
        int room = g->one_by_one ? 1 : n_parallel;
        for (int i = 0; i < n_parallel && next < n && room > 0; i++)
            if (!running[i]) {
                room--;
                const job *j = of[i] = &jobs[next++];
                const so_tokens *plain = &g->texts[j->setting][j->prompt].plain;
                so_spec_opts spec = {.drafter = g->names[j->drafter],
                                     .length = j->length,
                                     .expected = plain->ids,
                                     .n_expected = (int)plain->len};
                running[i] = submit(g, e, j->setting, j->prompt, &spec);
            }
        step(e);
        for (int i = 0; i < n_parallel; i++)
            if (running[i] && so_request_finish(running[i]) != SO_FINISH_NONE) {
                settle(g, of[i], running[i], &sums[of[i]->drafter]);
                running[i] = NULL;
                left--;
            }
    }
}

static void print_tally(const grid *g, const char *part, const char *name, const tally *t) {
    if (t->requests == 0)
        return;
    printf("%-6s %-14s %5d requests %7lld tokens %7lld passes %8lld guesses %7lld accepted  "
           "identical: %s  (%.0f s)\n",
           part, name, t->requests, (long long)t->tokens, (long long)t->passes,
           (long long)t->drafted, (long long)t->accepted, t->different ? "NO" : "yes",
           so_clock_ms_since(g->started) / 1000);
}

/* --- parts --- */

static int first_drafter(const grid *g) {
    int d = 0;
    while (g->from && d < N_DRAFTERS && strcmp(DRAFTERS[d], g->from) != 0)
        d++;
    return d;
}

static void run_greedy(grid *g) {
    so_engine *e = open_engine(g, AT_ONCE, true, NULL);
    job *jobs = SO_NEW_N(job, MAX_PROMPTS * N_LENGTHS);
    make_plain(g, 0);
    for (int d = first_drafter(g); d < N_DRAFTERS; d++) {
        if (!g->names[d])
            continue;
        tally sums[N_NAMES] = {0};
        int n = 0;
        bool twice = strcmp(DRAFTERS[d], "corpus") == 0; /* it knows nothing the first time */
        for (int k = 0; k < N_LENGTHS; k++)
            for (int p = 0; p < g->n_prompts; p++)
                if (!g->quick || (p + d) % N_LENGTHS == k ||
                    (twice && (p + d + 1) % N_LENGTHS == k))
                    jobs[n++] = (job){0, p, d, LENGTHS[k]};
        run_jobs(g, e, jobs, n, AT_ONCE, sums);
        print_tally(g, "greedy", DRAFTERS[d], &sums[d]);
    }
    free(jobs);
    so_engine_free(e);
}

/* Number `i` of settings × prompts × drafters × lengths. */
static job nth(const grid *g, int i, int first_setting, int n_settings) {
    job j = {.drafter = i % N_DRAFTERS};
    i /= N_DRAFTERS;
    j.setting = first_setting + i % n_settings;
    i /= n_settings;
    j.length = LENGTHS[i % N_LENGTHS];
    j.prompt = i / N_LENGTHS % g->n_prompts;
    return j;
}

/* A step that visits all of 0 … n−1, far apart. */
static int stride(int n) {
    for (int s = n * 5 / 13 + 1;; s++) {
        int a = n, b = s;
        while (b) {
            int rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return s;
    }
}

static void run_sample(grid *g, const char *part, int first_setting, int n_settings, int n,
                       int n_parallel) {
    so_engine *e = open_engine(g, n_parallel, true, NULL);
    int all = n_settings * g->n_prompts * N_DRAFTERS * N_LENGTHS;
    tally sums[N_NAMES] = {0};
    job *jobs = SO_NEW_N(job, n);
    for (int s = 0; s < n_settings; s++)
        make_plain(g, first_setting + s);
    int n_jobs = 0;
    for (int i = 0; i < n; i++) {
        jobs[n_jobs] = nth(g, (int)((int64_t)i * stride(all) % all), first_setting, n_settings);
        n_jobs += g->names[jobs[n_jobs].drafter] != NULL;
    }
    n = n_jobs;
    for (int at = 0; at < n; at += 512) {
        int k = SO_MIN(512, n - at);
        run_jobs(g, e, jobs + at, k, n_parallel, sums);
        if (n > 512)
            fprintf(stderr, "%s: %d of %d requests, %.0f s\n", part, at + k, n,
                    so_clock_ms_since(g->started) / 1000);
    }
    for (int d = 0; d < N_DRAFTERS; d++)
        print_tally(g, part, DRAFTERS[d], &sums[d]);
    free(jobs);
    so_engine_free(e);
}

static void run_match(grid *g) {
    int all = (N_SETTINGS - 1) * g->n_prompts * N_DRAFTERS * N_LENGTHS;
    run_sample(g, "match", 1, N_SETTINGS - 1, g->quick ? 4 * N_DRAFTERS : all / g->every, AT_ONCE);
}

/* Plain decoding alone is what all the rest is compared with. */
static void run_alone(grid *g) {
    so_engine *e = open_engine(g, 1, false, NULL);
    tally sum = {0};
    for (int s = 0; s < N_SETTINGS; s += g->quick ? N_SETTINGS - 1 : 2) {
        make_plain(g, s);
        for (int p = s % g->n_prompts; p < g->n_prompts; p += g->n_prompts / 2) {
            so_request *r = submit(g, e, s, p, NULL);
            while (so_request_finish(r) == SO_FINISH_NONE)
                step(e);
            sum.requests++;
            sum.different += !same_as_plain(&g->texts[s][p], r);
            sum.tokens += so_request_get_stats(r)->predicted_n;
            sum.passes += so_request_get_stats(r)->rounds;
            so_request_free(r);
        }
    }
    so_engine_free(e);
    g->failures += sum.different;
    print_tally(g, "alone", "plain", &sum);
    run_sample(g, "alone", 0, N_SETTINGS, g->quick ? N_DRAFTERS : 6 * N_DRAFTERS, 1);
}

/* A draft of the target's own kind: near it, and not it. */
static void open_draft(grid *g, bool own) {
    so_bundle_opts o;
    so_err err = {0};
    so_bundle_defaults(&o);
    o.backend = g->b.backend;
    o.quantize = !own;
    o.dtype = SO_DTYPE_Q4_0;
    if (so_bundle_open(g->model_path, &o, &g->draft, &err) != SO_OK)
        die("draft", &err);
}

static void run_model(grid *g) {
    open_draft(g, false);
    so_engine *e = open_engine(g, AT_ONCE, true, &g->draft);
    job jobs[2 * AT_ONCE * N_LENGTHS];
    int n_prompts = SO_MIN(g->n_prompts, (int)AT_ONCE);
    for (int m = 0; m < N_WITH_MODEL; m++) {
        tally sums[N_NAMES] = {0};
        int n = 0, d = N_DRAFTERS + m;
        for (int k = 0; k < N_LENGTHS; k++)
            for (int p = 0; p < n_prompts; p++)
                for (int s = 0; s < 2; s++)
                    if (!g->quick || (p % N_LENGTHS == k && p % 2 == s && p < 4))
                        jobs[n++] = (job){s ? 1 + (p + k) % (N_SETTINGS - 1) : 0, p, d, LENGTHS[k]};
        for (int i = 0; i < n; i++)
            make_plain(g, jobs[i].setting);
        run_jobs(g, e, jobs, n, AT_ONCE, sums);
        print_tally(g, "model", WITH_MODEL[m], &sums[d]);
    }
    so_engine_free(e);
    so_bundle_close(&g->draft);
}

static int n_tree_prompts(const grid *g, int n_parallel) {
    int most = g->quick ? 2 : TREE_PROMPTS;
    return n_parallel == 1 ? 1 : SO_MIN(g->n_prompts, most);
}

static void tree_jobs(grid *g, int n_prompts, job *jobs, int *n) {
    for (int i = 0; i < N_TREES; i++)
        for (int p = 0; p < n_prompts; p++) { /* long and short ones in turn */
            int setting = (p + i) % 2 ? 1 + (p + i) % (N_SETTINGS - 1) : 0;
            if (!g->names[FIRST_TREE + i])
                continue;
            make_plain(g, setting);
            jobs[(*n)++] =
                (job){setting, p, FIRST_TREE + i, LENGTHS[1 + (i + p) % (N_LENGTHS - 1)]};
        }
}

/* One engine for all trees. expects: what must have happened in it. */
static void run_tree_engine(grid *g, const char *what, const so_engine_opts *o, bool preempts,
                            bool finds, tally sums[N_NAMES]) {
    job jobs[TREE_PROMPTS * N_TREES];
    int n = 0, n_prompts = n_tree_prompts(g, o->n_parallel);
    so_engine *e = NULL;
    so_engine_stats stats;
    so_err err = {0};
    if (so_engine_create(g->b.model, g->b.tok, o, &e, &err) != SO_OK)
        die(what, &err);
    tree_jobs(g, n_prompts, jobs, &n);
    run_jobs(g, e, jobs, n, o->n_parallel, sums);
    so_engine_get_stats(e, &stats);
    bool failed = (preempts && stats.preemptions == 0) || (finds && stats.prefix_hits == 0);
    printf("trees  %-14s %5d requests, %lld preemptions, %lld tokens found in the cache%s\n", what,
           n, (long long)stats.preemptions, (long long)stats.prefix_hits,
           failed ? "  NOT WHAT IS TO BE TESTED" : "");
    g->failures += failed;
    so_engine_free(e);
}

/* As few pages as the longest request needs, and a few more: each new request outranks those before it, which give way. */
static void take_pages(const grid *g, so_engine_opts *o) {
    size_t longest = 0;
    for (int p = 0; p < n_tree_prompts(g, AT_ONCE); p++)
        longest = SO_MAX(longest, g->prompts[p].len);
    o->n_ctx = (int)longest + g->n_tokens + MAX_DRAFT;
    o->n_pages = so_kv_pages_for(o->n_ctx) + SPARE_PAGES;
}

static void run_trees(grid *g) {
    static const struct {
        const char *name;
        so_kv_layout layout;
        int n_parallel;
        bool tight;
    } kinds[] = {{"paged", SO_KV_PAGED, AT_ONCE, false},
                 {"paged, tight", SO_KV_PAGED, AT_ONCE, true},
                 {"slotted", SO_KV_SLOTTED, AT_ONCE, false},
                 {"alone", SO_KV_PAGED, 1, false}};
    tally sums[N_NAMES] = {0};
    for (size_t i = 0; i < SO_LEN(kinds); i++) {
        so_engine_opts o = engine_opts(g, kinds[i].n_parallel, true, NULL);
        o.kv_layout = kinds[i].layout;
        if ((g->one_by_one = kinds[i].tight))
            take_pages(g, &o);
        run_tree_engine(g, kinds[i].name, &o, kinds[i].tight, kinds[i].layout == SO_KV_PAGED, sums);
    }
    for (int d = FIRST_TREE; d < N_NAMES; d++)
        print_tally(g, "trees", TREES[d - FIRST_TREE], &sums[d]);
}

/* The same bits say the same: a guess that fails would show a difference between a row alone and in
 * company. */
static void run_own(grid *g) {
    open_draft(g, true);
    so_engine *e = open_engine(g, 1, true, &g->draft);
    tally sum = {0};
    static const so_verify_mode modes[] = {SO_VERIFY_MATCH, SO_VERIFY_REJECT};
    for (int i = 0; i < (g->quick ? 3 : 12); i++) {
        int p = i % g->n_prompts, setting = i % 3 == 0 ? 0 : 1 + i % (N_SETTINGS - 1);
        make_plain(g, setting);
        so_spec_opts spec = {.drafter = "model",
                             .length = LENGTHS[(i + 2) % N_LENGTHS],
                             .verify = modes[i % 3 == 2]};
        so_request *r = submit(g, e, setting, p, &spec);
        while (so_request_finish(r) == SO_FINISH_NONE)
            step(e);
        const so_request_stats *s = so_request_get_stats(r);
        sum.requests++;
        sum.different += spec.verify == SO_VERIFY_MATCH && !same_as_plain(&g->texts[setting][p], r);
        sum.wasteful += s->tested_n != s->draft_n_accepted;
        sum.tokens += s->predicted_n;
        sum.passes += s->rounds;
        sum.drafted += s->draft_n;
        sum.accepted += s->draft_n_accepted;
        if (s->tested_n != s->draft_n_accepted)
            printf("REJECTED: %d of %d guesses of the target's own, prompt %d, length %d\n",
                   s->tested_n - s->draft_n_accepted, s->tested_n, p, spec.length);
        so_request_free(r);
    }
    g->failures += sum.different + sum.wasteful;
    print_tally(g, "own", "model", &sum);
    so_engine_free(e);
    so_bundle_close(&g->draft);
}

/* Where the answer is the prompt with a few changes, lookup has what it needs. A fixed length: what
 * the planner would choose depends on the clock. */
static void run_edits(grid *g) {
    grid edits = {.b = g->b, .n_tokens = EDIT_TOKENS, .natural = true};
    read_prompts(&edits, EDITS, MAX_PROMPTS);
    so_engine *e = open_engine(&edits, 1, true, NULL);
    for (int p = 0; p < edits.n_prompts; p++) {
        edits.texts[0][p].sample = sampling(0, p);
        so_request *r =
            submit(&edits, e, 0, p, &(so_spec_opts){.drafter = "lookup", .length = EDIT_LENGTH});
        while (so_request_finish(r) == SO_FINISH_NONE)
            step(e);
        const so_request_stats *s = so_request_get_stats(r);
        double per_pass = (double)s->predicted_n / s->rounds;
        printf("edits  lookup, length %d, prompt %d: %d tokens in %d passes, %.2f per pass%s\n",
               EDIT_LENGTH, p, s->predicted_n, s->rounds, per_pass,
               per_pass < 2.5 ? "  TOO FEW" : "");
        g->failures += per_pass < 2.5;
        so_request_free(r);
        so_tokens_free(&edits.prompts[p]);
    }
    so_engine_free(e);
}

/* --- setting up --- */

/* Counts over the plain greedy texts: good tables, where others would never be right. */
static char *count_table(grid *g, int order) {
    so_table_counter *c = NULL;
    so_table *t = NULL;
    so_err err = {0};
    char name[16];
    snprintf(name, sizeof name, "%d.tbl", order);
    char *path = so_path_join(g->dir, name);
    int rc = so_table_counter_create(order, so_model_hparams(g->b.model)->n_vocab, &c, &err);
    for (int i = 0; i < g->n_prompts && rc == SO_OK; i++)
        rc = so_table_counter_add(c, g->texts[0][i].plain.ids, g->texts[0][i].plain.len, &err);
    if (rc == SO_OK)
        rc = so_table_counter_finish(c, so_tokenizer_hash(g->b.tok), &t, &err);
    if (rc == SO_OK)
        rc = so_table_save(t, path, &err);
    if (rc != SO_OK)
        die("table", &err);
    so_table_free(t);
    return path;
}

/* The file of the n-th draft or heads that are registered for this model; NULL: there are fewer. */
static char *registered_file(const grid *g, so_registry_kind kind, int n) {
    so_registry_found found;
    so_registry_search(g->b.ck, so_model_hparams(g->b.model), g->b.tok, kind, &found);
    char *path = n < found.n ? so_strdup(found.paths[n]) : NULL;
    so_registry_found_free(&found);
    return path;
}

/* A tree of 20 nodes, all of whose ranks are tried somewhere. */
static char *write_tree(const grid *g) {
    static const int widths[] = {5, 2, 1};
    so_shape s;
    so_err err = {0};
    so_buf json = {0};
    char *path = so_path_join(g->dir, "tree.json");
    if (so_shape_product(widths, SO_LEN(widths), 20, &s, &err) != SO_OK)
        die("tree", &err);
    so_shape_print(&s, NULL, "model", &json);
    so_out_file *f = NULL;
    if (so_out_begin(path, &f, &err) != SO_OK ||
        so_out_write(f, json.data, json.len, &err) != SO_OK || so_out_commit(f, &err) != SO_OK)
        die("tree", &err);
    so_buf_free(&json);
    return path;
}

/* Heads of random weights guess nothing right, which is as good a test of the rest. */
static char *write_heads(const grid *g) {
    char *path = so_path_join(g->dir, "blockwise.gguf");
    so_heads_write(path, &(so_heads_file){.kind = "blockwise",
                                          .n_heads = 3,
                                          .d = so_model_hparams(g->b.model)->d_model,
                                          .d_hidden = 64,
                                          .seed = 3});
    return path;
}

/* The file that a capital stands for; NULL: this model has none. */
static char *file_of(grid *g, char capital) {
    switch (capital) {
    case 'U':
        return count_table(g, 1);
    case 'B':
        return count_table(g, 2);
    case 'T':
        return write_tree(g);
    case 'H':
        return write_heads(g);
    default:
        return registered_file(g, SO_REGISTRY_MODEL, capital - 'D');
    }
}

/* Whether the spec needs registered heads that this model does not have. */
static bool lacks_heads(const grid *g, const char *spec) {
    static const char *const kinds[] = {"medusa", "blockwise", "lookahead"};
    for (int i = 0; i < (int)SO_LEN(kinds); i++) {
        const char *at = strstr(spec, kinds[i]);
        if (!at || strncmp(at + strlen(kinds[i]), "(H", 2) == 0)
            continue;
        char *path = registered_file(g, (so_registry_kind)(SO_REGISTRY_MEDUSA + i), 0);
        bool none = path == NULL;
        free(path);
        if (none)
            return true;
    }
    return false;
}

/* The spec with its files; NULL: this model lacks one. */
static char *name_of(grid *g, const char *spec) {
    so_buf name = {0};
    bool has_all = !lacks_heads(g, spec);
    for (const char *c = spec; *c && has_all; c++) {
        char *path = *c >= 'A' && *c <= 'Z' ? file_of(g, *c) : NULL;
        so_buf_append(&name, path ? path : c, path ? strlen(path) : 1);
        has_all = path || !(*c >= 'A' && *c <= 'Z');
        free(path);
    }
    char *out = has_all ? so_strndup(name.data, name.len) : NULL;
    so_buf_free(&name);
    return out;
}

static void name_drafters(grid *g) {
    g->dir = so_test_tmp();
    make_plain(g, 0);
    for (int d = 0; d < N_NAMES; d++) {
        const char *spec = d < N_DRAFTERS   ? DRAFTERS[d]
                           : d < FIRST_TREE ? WITH_MODEL[d - N_DRAFTERS]
                                            : TREES[d - FIRST_TREE];
        g->names[d] = name_of(g, spec);
        if (!g->names[d])
            printf("%s: not run, this model has no such draft or heads\n", spec);
    }
}

static const char *const NUMBERS[] = {"--prompts", "--tokens", "--every", "--threads"};

/* Moves the files' names to the front; their number. */
static int read_args(grid *g, int argc, char **argv) {
    int n_files = 0, *fields[] = {&g->want, &g->n_tokens, &g->every, &g->n_threads};
    for (int i = 2; i < argc; i++) {
        size_t k = 0;
        while (k < SO_LEN(NUMBERS) && strcmp(argv[i], NUMBERS[k]) != 0)
            k++;
        if (k < SO_LEN(NUMBERS) && i + 1 < argc)
            *fields[k] = (int)strtol(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--quick") == 0)
            g->quick = true;
        else if (strcmp(argv[i], "--part") == 0 && i + 1 < argc)
            g->part = argv[++i];
        else if (strcmp(argv[i], "--from") == 0 && i + 1 < argc)
            g->from = argv[++i];
        else
            argv[2 + n_files++] = argv[i];
    }
    g->want = SO_MIN(g->want > 0 ? g->want : g->quick ? 8 : MAX_PROMPTS, (int)MAX_PROMPTS);
    g->n_tokens = g->n_tokens > 0 ? g->n_tokens : g->quick ? 24 : 128;
    g->every = g->every > 0 ? g->every : 12;
    return n_files;
}

/* Long prompts stand at the end of the first file: what they leave open the others fill. */
static void read_files(grid *g, char **files, int n) {
    static const char *const shared[] = {"prompts/spec_bench.jsonl", "prompts/humaneval.jsonl",
                                         "prompts/gsm8k.jsonl"};
    bool theirs = n == 0 && so_test_shared(shared[0]) && so_test_shared(shared[2]);
    int n_files = n > 0 ? n : theirs ? (int)SO_LEN(shared) : (int)SO_LEN(OURS);
    for (int i = 0; i < n_files; i++) {
        int share = (g->want - g->n_prompts + n_files - i - 1) / (n_files - i);
        read_prompts(g, n > 0 ? files[i] : theirs ? so_test_shared(shared[i]) : OURS[i], share);
    }
    if (g->n_prompts < 2) {
        fprintf(stderr, "failed: fewer than two prompts\n");
        exit(1);
    }
}

static void open_model(grid *g, const char *path) {
    so_bundle_opts o;
    so_err err = {0};
    g->model_path = so_strdup(path);
    so_bundle_defaults(&o);
    o.device = so_test_device();
    o.n_threads = g->n_threads;
    if (so_bundle_open(path, &o, &g->b, &err) != SO_OK)
        die(path, &err);
    g->started = so_clock_ns();
}

static void close_grid(grid *g) {
    for (int p = 0; p < g->n_prompts; p++) {
        so_tokens_free(&g->prompts[p]);
        for (int s = 0; s < N_SETTINGS; s++)
            so_tokens_free(&g->texts[s][p].plain);
    }
    for (int d = 0; d < N_NAMES; d++)
        free(g->names[d]);
    so_test_tmp_free(g->dir);
    so_bundle_close(&g->b);
    free(g->model_path);
    free(g);
}

static void run_parts(grid *g) {
    static const struct {
        const char *name;
        void (*run)(grid *g);
    } parts[] = {{"edits", run_edits},   {"own", run_own},     {"alone", run_alone},
                 {"greedy", run_greedy}, {"match", run_match}, {"model", run_model},
                 {"trees", run_trees}};
    for (size_t i = 0; i < SO_LEN(parts); i++)
        if (!g->part || strcmp(g->part, parts[i].name) == 0)
            parts[i].run(g);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: grid MODEL [--quick] [--part NAME] [--prompts N] [--tokens N] "
                        "[--every N] [--threads N] [--from DRAFTER] [FILE.jsonl…]\n");
        return 2;
    }
    const char *path = so_file_exists(argv[1]) ? argv[1] : so_test_model(argv[1]);
    if (!path) {
        so_test_note_skip("model %s is not here (sooth pull %s)", argv[1], argv[1]);
        return getenv("SOOTH_STRICT") != NULL;
    }
    setenv("SOOTH_MODELS", "models", 0); /* where our heads are */
    grid *g = SO_NEW(grid);
    int n_files = read_args(g, argc, argv);
    open_model(g, path);
    read_files(g, argv + 2, n_files);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("grid: %d prompts, %d tokens, %d drafters, lengths 1 2 4 5 8 16\n", g->n_prompts,
           g->n_tokens, N_NAMES);
    name_drafters(g);
    run_parts(g);
    int failures = g->failures;
    close_grid(g);
    printf("grid: %s\n", failures ? "FAILED" : "identical");
    return failures != 0;
}
