/* The --spec language: parsing, meaning, error messages, and the drafters that are built. */
#include "rig.h"

#include <stdio.h>

#include "base/file.h"
#include "draft/spec.h"

static int parse(const char *text, so_spec *s, so_err *err) {
    return so_spec_parse(so_str_c(text), s, err);
}

static void parses_and_prints(void **state) {
    (void)state;
    const char *cases[][2] = {
        {"none", "none"},
        {"lookup,ngram", "lookup,ngram"},
        {" lookup , ngram ", "lookup,ngram"},
        {"oracle(0.8)", "oracle(0.8)"},
        {"oracle(1e-1)", "oracle(0.1)"},
        {"oracle(model, 0.5)", "oracle(0.5,model)"},
        {"oracle(0.5,model(a.gguf))", "oracle(0.5,model(a.gguf))"},
        {"async(oracle(0.5,model,hit=0.25),fan=4)", "async(fan=4,oracle(0.5,hit=0.25,model))"},
        {"async(device=cuda:1,model,fallback=lookup)",
         "async(model,device=cuda:1,fallback=lookup)"},
        {"lookup(min=4)", "lookup(min=4)"},
        {"ngram(order=3,window=512,draw)", "ngram(order=3,window=512,draw=1)"},
        {"model(ngram)", "model(ngram)"},
        {"model(ngram,lookup(min=3))", "model(ngram,lookup(min=3))"},
        {"model(ngram+lookup,a.gguf)", "model(a.gguf,ngram+lookup)"},
        {"model(model(ngram))", "model(model(ngram))"},
        {"model(a.gguf)+model(/x/b.gguf)", "model(a.gguf)+model(/x/b.gguf)"},
        {"lookup,ngram+bigram(w.tbl),model", "lookup,ngram+bigram(w.tbl),model"},
        {"unigram(\"odd, (name).tbl\",draw)", "unigram(\"odd, (name).tbl\",draw=1)"},
        {"model(\"ngram\")", "model(\"ngram\")"},
        {"model(k=4)", "model(k=4)"},
        {"model(nodes=16, best)", "model(nodes=16,best=1)"},
        {"model(a.gguf,distinct,k=2)", "model(a.gguf,k=2,distinct=1)"},
        {"model(k=2)+model(best,nodes=256)", "model(k=2)+model(nodes=256,best=1)"},
        {"model(nodes=9,tree=t.json)", "model(nodes=9,tree=t.json)"},
        {"model(tree=\"a b.json\",x.gguf)", "model(x.gguf,tree=\"a b.json\")"},
        {"model(\"tree\")", "model(\"tree\")"},
        {"auto", "auto"},
        {"corpus(min=2,mb=16)", "corpus(min=2,mb=16)"},
        {"predict,random", "predict,random"},
        {"async(model)", "async(model)"},
        {"async(model(a.gguf),wait=1, fan=8)", "async(fan=8,wait=1,model(a.gguf))"},
        {"lookup,async(ngram,fallback=none)", "lookup,async(ngram,fallback=none)"},
        {"async(ngram,fallback=sync)", "async(ngram,fallback=sync)"},
        {"async(worker=tcp://127.0.0.1:7070,model , wait=1),model",
         "async(wait=1,model,worker=tcp://127.0.0.1:7070),model"},
        {"async(model(a.gguf),worker=\"ipc:///tmp/a b\",fallback=lookup)",
         "async(model(a.gguf),worker=\"ipc:///tmp/a b\",fallback=lookup)"},
        {"async(ngram,fallback=lookup, sync,ngram+random),lookup",
         "async(ngram,fallback=lookup,ngram+random,sync),lookup"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_spec s, again;
        so_err err = {0};
        so_buf out = {0}, twice = {0};
        SO_OK_OR_FAIL(parse(cases[i][0], &s, &err), err);
        so_spec_print(&s, &out);
        assert_string_equal(out.data, cases[i][1]);
        SO_OK_OR_FAIL(parse(out.data, &again, &err), err);
        so_spec_print(&again, &twice);
        assert_string_equal(twice.data, out.data);
        so_buf_free(&out);
        so_buf_free(&twice);
    }
}

static void structure(void **state) {
    (void)state;
    so_spec s;
    so_err err = {0};
    SO_OK_OR_FAIL(parse("lookup(min=5),model(x.gguf,ngram,random)+oracle(0.25)", &s, &err), err);
    const so_spec_node *root = &s.nodes[s.root];
    assert_int_equal(root->name, SO_SPEC_FIRST);
    const so_spec_node *lookup = &s.nodes[root->first], *merge = &s.nodes[lookup->next];
    assert_int_equal(lookup->name, SO_SPEC_LOOKUP);
    assert_true(so_spec_has(lookup, SO_SPEC_OPT_MIN) && lookup->opt[SO_SPEC_OPT_MIN] == 5);
    assert_false(so_spec_has(lookup, SO_SPEC_OPT_MB));
    assert_int_equal(merge->name, SO_SPEC_MERGE);
    assert_int_equal(merge->next, -1);
    const so_spec_node *model = &s.nodes[merge->first], *oracle = &s.nodes[model->next];
    assert_int_equal(model->name, SO_SPEC_MODEL);
    assert_int_equal(model->column, 15);
    assert_true(so_str_eq_c(so_spec_file(&s, model), "x.gguf"));
    assert_int_equal(s.nodes[model->first].name, SO_SPEC_FIRST);
    assert_true(oracle->opt[SO_SPEC_OPT_NUMBER] == 0.25);
}

static void errors_say_where_and_what(void **state) {
    (void)state;
    const char *cases[][3] = {
        {"", "column 1", "missing at the end"},
        {"ngrm", "column 1", "unknown drafter \"ngrm\": must be one of none, ngram, lookup,"},
        {"medussa", "column 1", "unknown drafter \"medussa\": must be one of none, ngram,"},
        {"medusa(distinct)", "column 8",
         "medusa does not take distinct; it takes k=N nodes=N best tree=FILE"},
        {"lookahead(ends=9)", "column 11", "it must be a whole number from 1 to 8"},
        {"medusa(ends=2)", "column 8", "medusa does not take ends"},
        {"blockwise(k=2)", "column 11", "blockwise does not take k; it takes no options"},
        {"lookahead(nodes=0)", "column 11", "1 to 256"},
        {"ngram,azync(model)", "column 7", "unknown drafter \"azync\": must be one of"},
        {"async", "column 1", "needs the drafter that it runs"},
        {"async(fan=2)", "column 1", "needs the drafter that it runs"},
        {"async(fallback=none)", "column 1", "needs the drafter that it runs"},
        {"async(ngram,lookup)", "column 7", "runs one drafter"},
        {"async(ngram+lookup)", "column 7", "runs one drafter"},
        {"async(corpus)", "column 7", "not corpus"},
        {"async(model(medusa))", "column 7", "nor heads"},
        {"async(ngram,fan=0)", "column 13", "1 to 64"},
        {"async(ngram,wait=17)", "column 13", "0 to 16"},
        {"async(ngram)+lookup", "column 1", "an alternative of its own"},
        {"lookup,model(async(ngram))", "column 14", "an alternative of its own"},
        {"async(async(ngram))", "column 7", "an alternative of its own"},
        {"async(ngram,fallback=async(ngram))", "column 22", "an alternative of its own"},
        {"async(ngram,fallback=", "column 22", "missing at the end"},
        {"async(ngram,fallback=4)", "column 22", "unknown drafter"},
        {"async(ngram,worker=a)", "column 7", "a worker runs `model`"},
        {"async(model(k=2),worker=a)", "column 7", "without options"},
        {"async(model(ngram),worker=a)", "column 7", "without options"},
        {"async(model,worker=a,fallback=sync)", "column 1", "without sync"},
        {"async(model,worker=a,worker=b)", "column 22", "one worker"},
        {"async(model,worker=)", "column 20", "a name is missing"},
        {"lookup(worker=a)", "column 8", "unknown option"},
        {"model(fallback=ngram)", "column 7", "unknown option \"fallback\""},
        {"lookup,", "column 8", "missing at the end"},
        {"lookup,,ngram", "column 8", "missing before ','"},
        {"lookup ngram", "column 8", "'n' is not expected"},
        {"lookup)", "column 7", "')' is not expected"},
        {"lookup(min=4", "column 13", "')' is missing"},
        {"lookup(min", "column 8", "does not take \"min\"; it takes min=N"},
        {"lookup(", "column 8", "missing at the end"},
        {"lookup()", "column 8", "missing before ')'"},
        {"lookup(mni=4)", "column 8", "unknown option \"mni\" of lookup; it takes min"},
        {"lookup(min=x)", "column 12", "not a number"},
        {"lookup(min=0)", "column 8", "1 to 64"},
        {"lookup(min=2.5)", "column 8", "whole number"},
        {"lookup(min=2,min=3)", "column 14", "twice"},
        {"lookup(mb=2)", "column 8", "does not take mb; it takes min"},
        {"lookup(3)", "column 8", "does not take a number"},
        {"random(draw)", "column 8", "does not take draw; it takes no options"},
        {"oracle", "column 1", "needs its rate"},
        {"oracle(1.5)", "column 8", "0 to 1"},
        {"async(oracle(0.5,hit=1.5,model))", "column 18", "0 to 1"},
        {"async(oracle(0.5,hit=0.5))", "column 7", "with a model"},
        {"async(model,device=tpu)", "column 20", "cpu, cuda or cuda:N"},
        {"async(model,device=cpu,device=cuda)", "column 24", "one device"},
        {"async(model,device=cpu,worker=tcp://h:1)", "column 1", "without device="},
        {"model(device=cpu)", "column 7", "device"},
        {"oracle(-0.5)", "column 8", "0 to 1"},
        {"oracle(model)", "column 1", "needs its rate"},
        {"oracle(0.5,lookup)", "column 12", "must be one model"},
        {"oracle(0.5,model+lookup)", "column 12", "must be one model"},
        {"oracle(0.5,model,model(a))", "column 8", "must be one model"},
        {"oracle(0.5,a.gguf)", "column 12", "does not take \"a.gguf\""},
        {"oracle(nan)", "column 8", "does not take \"nan\"; it takes a number"},
        {"ngram(lookup)", "column 7", "does not take \"lookup\""},
        {"model(a,b)", "column 9", "one file"},
        {"model(\"a)", "column 7", "not closed"},
        {"model(\"\")", "column 7", "empty"},
        {"model(k=0)", "column 7", "k of model is 0; it must be a whole number from 1 to 64"},
        {"model(k=65)", "column 7", "1 to 64"},
        {"model(k=1.5)", "column 7", "whole number"},
        {"model(best,nodes=257)", "column 12", "1 to 256"},
        {"model(best,nodes=0)", "column 12", "1 to 256"},
        {"model(tree=a,best)", "column 1", "tree=FILE has its own shape: without best"},
        {"model(tree=a,tree=b)", "column 14", "model takes one tree"},
        {"model(tree=a,ngram)", "column 1", "without tree"},
        {"model(nodes=16)", "column 1", "nodes needs a tree: give k=N, best or tree=FILE"},
        {"model(best,distinct)", "column 1", "distinct needs k"},
        {"model(best,ngram)", "column 1", "makes chains: without best"},
        {"lookup,model(ngram,k=2)", "column 8", "makes chains: without k"},
        {"lookup(k=2)", "column 8", "does not take k; it takes min=N"},
        {"none,ngram", "column 1", "none cannot be combined"},
        {"model(auto)", "column 7", "auto cannot be combined"},
        {"ngram++lookup", "column 7", "missing before '+'"},
        {"\"ngram\"", "column 2", "unknown drafter"},
        {"model(model(model(model(model(model(model(ngram)))))))", "column 43", "deeper than 6"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_spec s = {.n_nodes = -7};
        so_err err = {0};
        int rc = parse(cases[i][0], &s, &err);
        if (rc != SO_EINVAL || !strstr(err.msg, cases[i][1]) || !strstr(err.msg, cases[i][2]))
            fail_msg("%s: %d, %s", cases[i][0], rc, err.msg);
        assert_int_equal(s.n_nodes, -7); /* untouched */
    }
}

static void limits(void **state) {
    (void)state;
    so_spec s;
    so_err err = {0};
    so_buf b = {0};
    for (int i = 0; i < 40; i++)
        so_buf_append_c(&b, i ? ",ngram" : "ngram");
    assert_int_equal(so_spec_parse(so_buf_str(&b), &s, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "more than 32"));
    for (int i = 0; i < 400; i++)
        so_buf_append_c(&b, ",ngram");
    assert_int_equal(so_spec_parse(so_buf_str(&b), &s, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "bytes"));
    so_buf_free(&b);
    assert_int_equal(so_spec_parse((so_str){"ngram\0x", 7}, &s, &err), SO_EINVAL);
    assert_int_equal(so_spec_parse((so_str){NULL, 0}, &s, &err), SO_EINVAL);
}

/* Building. */

typedef struct hook {
    int calls;
    so_spec_name seen;
    bool had_inner;
    int rc;
} hook;

static int make(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                so_drafter **out, so_err *err) {
    (void)s;
    hook *h = user;
    h->calls++;
    h->seen = n->name;
    h->had_inner = inner != NULL;
    if (h->rc != 0)
        return so_err_set(err, h->rc, "no such file");
    so_drafter_free(inner); /* ours on success */
    *out = so_none_create();
    return 0;
}

static int build(const char *text, const so_draft_config *cfg, so_draft_set *set, so_err *err) {
    so_spec s;
    SO_OK_OR_FAIL(parse(text, &s, err), *err);
    return so_spec_build(&s, cfg, set, err);
}

static void builds(void **state) {
    (void)state;
    so_corpus *corpus = NULL;
    hook h = {0};
    so_draft_config cfg = {
        .n_vocab = RIG_VOCAB, .tokenizer_hash = 0, .corpus = &corpus, .make = make, .user = &h};
    so_draft_set set;
    so_err err = {0};
    SO_OK_OR_FAIL(build("lookup,ngram+random,corpus(mb=1),oracle(0.5)", &cfg, &set, &err), err);
    assert_int_equal(set.n_leaves, 5);
    const char *names[] = {"lookup", "ngram", "random", "corpus", "oracle"};
    for (int i = 0; i < 5; i++) {
        assert_string_equal(set.leaves[i]->vt->name, names[i]);
        assert_int_equal(set.leaves[i]->index, i);
    }
    assert_string_equal(set.root->vt->name, "first");
    assert_non_null(corpus);
    assert_true(so_corpus_bytes(corpus) <= 1 << 20);
    rig r;
    int32_t out[8];
    rig_open(&r, set.root, (int32_t[]){1, 2, 3, 1, 2}, 5);
    assert_tokens(out, rig_chain(&r, 2, out), (int32_t[]){3, 1}, 2);
    rig_end(&r);
    so_draft_set_deinit(&set);
    SO_OK_OR_FAIL(build("model(ngram)", &cfg, &set, &err), err);
    assert_true(h.calls == 1 && h.seen == SO_SPEC_MODEL && h.had_inner);
    so_draft_set_deinit(&set);
    SO_OK_OR_FAIL(build("none", &cfg, &set, &err), err);
    so_draft_set_deinit(&set);
    so_corpus_free(corpus);
}

/* The message for an unknown name lists the names that can be built, all of them and no others. */
static void listed_names_can_be_built(void **state) {
    (void)state;
    so_corpus *corpus = NULL;
    hook h = {0};
    so_async_host *host = NULL;
    so_draft_config cfg = {.n_vocab = RIG_VOCAB,
                           .tokenizer_hash = 0,
                           .corpus = &corpus,
                           .make = make,
                           .user = &h,
                           .host = &host};
    so_spec s;
    so_err err = {0};
    int n = 0;
    assert_int_equal(parse("no-such-drafter", &s, &err), SO_EINVAL);
    const char *list = strstr(err.msg, "must be one of ");
    assert_non_null(list);
    char names[256], text[64], *at = names;
    snprintf(names, sizeof names, "%s", list + strlen("must be one of "));
    for (char *name; (name = strsep(&at, ", ")) != NULL;) {
        so_draft_set set;
        if (!*name)
            continue;
        snprintf(text, sizeof text, "%s%s", name,
                 strcmp(name, "oracle") == 0  ? "(0.5)"
                 : strcmp(name, "async") == 0 ? "(ngram)"
                                              : "");
        h.calls = 0;
        SO_OK_OR_FAIL(build(text, &cfg, &set, &err), err);
        /* The engine's hook implements only these. */
        bool hooked = (h.seen >= SO_SPEC_MODEL && h.seen <= SO_SPEC_AUTO) ||
                      h.seen == SO_SPEC_UNIGRAM || h.seen == SO_SPEC_BIGRAM;
        assert_true(h.calls == 0 || hooked);
        so_draft_set_deinit(&set);
        n++;
    }
    assert_int_equal(n, SO_SPEC_N_NAMES);
    so_async_host_free(host);
    so_corpus_free(corpus);
    so_buf long_name = {0};
    for (int i = 0; i < 500; i++)
        so_buf_append_char(&long_name, 'x');
    assert_int_equal(so_spec_parse(so_buf_str(&long_name), &s, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "lookahead, auto")); /* a long name does not cut the list */
    so_buf_free(&long_name);
}

/* The cache, the fallbacks, then X in the engine's time, under the number that X has. */
static void async_becomes_alternatives(void **state) {
    (void)state;
    so_async_host *host = NULL;
    so_draft_config cfg = {.n_vocab = RIG_VOCAB,
                           .tokenizer_hash = 0,
                           .corpus = NULL,
                           .make = make,
                           .user = NULL,
                           .host = &host,
                           .n_parallel = 2};
    so_draft_set set;
    so_err err = {0};
    static const struct {
        const char *spec, *stages[6];
    } cases[] = {
        {"async(ngram)", {"async", "ngram"}},
        {"async(ngram,fallback=none)", {"async"}},
        {"async(ngram,fallback=lookup,random)", {"async", "lookup", "random"}},
        {"lookup,async(ngram,fallback=random,sync),predict",
         {"lookup", "async", "random", "ngram", "predict"}},
        {"async(ngram),async(lookup)", {"async", "ngram", "async", "lookup"}},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        int n = 0;
        SO_OK_OR_FAIL(build(cases[i].spec, &cfg, &set, &err), err);
        for (; cases[i].stages[n]; n++)
            assert_string_equal(set.stages[n].drafter->vt->name, cases[i].stages[n]);
        assert_int_equal(set.n_stages, n);
        for (int k = 0; k < set.n_leaves; k++)
            assert_int_equal(set.leaves[k]->index, k);
        so_draft_set_deinit(&set);
    }
    so_async_host_free(host);
    cfg.host = NULL;
    assert_int_equal(build("async(ngram)", &cfg, &set, &err), SO_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "column 1: async: needs an engine"));
}

static void auto_falls_back(void **state) {
    (void)state;
    hook h = {.rc = SO_ENOTFOUND};
    so_draft_config cfg = {
        .n_vocab = RIG_VOCAB, .tokenizer_hash = 0, .corpus = NULL, .make = make, .user = &h};
    so_draft_set set;
    so_err err = {0};
    for (int i = 0; i < 2; i++) {
        SO_OK_OR_FAIL(build("auto", &cfg, &set, &err), err);
        assert_int_equal(set.n_leaves, 2);
        assert_string_equal(set.leaves[0]->vt->name, "lookup");
        assert_string_equal(set.leaves[1]->vt->name, "ngram");
        so_draft_set_deinit(&set);
        cfg.make = NULL;
    }
    assert_int_equal(h.calls, 1);
}

static void failures_name_the_drafter(void **state) {
    (void)state;
    so_draft_config cfg = {
        .n_vocab = RIG_VOCAB, .tokenizer_hash = 0, .corpus = NULL, .make = NULL, .user = NULL};
    const char *cases[][2] = {
        {"lookup,model", "column 8: model: needs a draft model: give --draft-model"},
        {"model(ngram)", "column 1: model: needs a draft model"},
        {"bigram", "column 1: bigram: needs a counted table"},
        {"corpus", "column 1: corpus: needs the texts of finished"},
        {"ngram,unigram(/nonexistent/x.tbl)", "column 7: unigram: /nonexistent/x.tbl"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_draft_set set = {.n_leaves = -7};
        so_err err = {0};
        int rc = build(cases[i][0], &cfg, &set, &err);
        if (rc == 0 || !strstr(err.msg, cases[i][1]))
            fail_msg("%s: %d, %s", cases[i][0], rc, err.msg);
        assert_int_equal(set.n_leaves, -7);
    }
    hook h = {.rc = SO_ENOTFOUND};
    cfg.make = make;
    cfg.user = &h;
    so_draft_set set;
    so_err err = {0};
    assert_int_equal(build("lookup,model(ngram,random)", &cfg, &set, &err), SO_ENOTFOUND);
    assert_non_null(strstr(err.msg, "column 8: model: no such file"));
}

/* A draft model that does not fit is an error of the spec only if the spec names its file. */
static void misfits_are_located(void **state) {
    (void)state;
    hook h = {.rc = SO_EMISMATCH};
    so_draft_config cfg = {
        .n_vocab = RIG_VOCAB, .tokenizer_hash = 0, .corpus = NULL, .make = make, .user = &h};
    const char *cases[][2] = {
        {"model", "no such file"},
        {"lookup,model(ngram)", "no such file"},
        {"auto", "no such file"},
        {"lookup,model(a.gguf)", "--spec, column 8: model: a.gguf: no such file"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_draft_set set;
        so_err err = {0};
        assert_int_equal(build(cases[i][0], &cfg, &set, &err), SO_EMISMATCH);
        assert_string_equal(err.msg, cases[i][1]);
    }
}

static void tables_by_file(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "a, b.tbl"), spec[512];
    so_table_counter *c = NULL;
    so_table *t = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_table_counter_create(2, RIG_VOCAB, &c, &err), err);
    SO_OK_OR_FAIL(so_table_counter_add(c, (int32_t[]){1, 2, 3}, 3, &err), err);
    SO_OK_OR_FAIL(so_table_counter_finish(c, 77, &t, &err), err);
    SO_OK_OR_FAIL(so_table_save(t, path, &err), err);
    so_table_free(t);
    so_draft_config cfg = {
        .n_vocab = RIG_VOCAB, .tokenizer_hash = 77, .corpus = NULL, .make = NULL, .user = NULL};
    so_draft_set set;
    snprintf(spec, sizeof spec, "bigram(\"%s\")", path);
    SO_OK_OR_FAIL(build(spec, &cfg, &set, &err), err);
    assert_string_equal(set.root->vt->name, "bigram");
    so_draft_set_deinit(&set);
    snprintf(spec, sizeof spec, "unigram(\"%s\")", path);
    assert_int_equal(build(spec, &cfg, &set, &err), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "this is a bigram table"));
    free(path);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parses_and_prints),
        cmocka_unit_test(structure),
        cmocka_unit_test(errors_say_where_and_what),
        cmocka_unit_test(limits),
        cmocka_unit_test(builds),
        cmocka_unit_test(listed_names_can_be_built),
        cmocka_unit_test(async_becomes_alternatives),
        cmocka_unit_test(auto_falls_back),
        cmocka_unit_test(failures_name_the_drafter),
        cmocka_unit_test(misfits_are_located),
        cmocka_unit_test(tables_by_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
