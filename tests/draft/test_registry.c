/* Registered drafts: found in all searched places, refused if they do not fit; a broken file never
 * prevents a model from working without a draft. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "draft/model.h"
#include "draft/registry.h"
#include "so_heads_file.h"
#include "so_shape.h"
#include "so_tiny.h"

typedef struct fixture {
    char *dir;
    so_checkpoint *ck; /* the target: many layers, so that drafts are small compared with it */
    so_hparams hp;
    so_tokenizer *tok;
    char vocab[65];
} fixture;

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_err err = {0};
    f->dir = so_test_tmp();
    char *path = so_path_join(f->dir, "target.gguf");
    so_tiny_write(path, &(so_tiny_opts){.layers = 24});
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &f->ck, &err), err);
    SO_OK_OR_FAIL(so_hparams_read(f->ck, &f->hp, &err), err);
    SO_OK_OR_FAIL(so_tokenizer_load(f->ck, &f->tok, &err), err);
    /* as tools/train writes it: from the file's own strings */
    const so_gguf_kv *kv = so_gguf_find(so_checkpoint_gguf(f->ck), "tokenizer.ggml.tokens");
    so_sha256 h;
    so_sha256_init(&h);
    for (uint64_t i = 0; i < kv->n; i++) {
        so_sha256_add(&h, "", i > 0);
        so_sha256_add(&h, kv->strings[i].ptr, kv->strings[i].len);
    }
    so_sha256_hex(&h, f->vocab);
    free(path);
    setenv("XDG_CACHE_HOME", "/nowhere", 1);
    setenv("XDG_DATA_HOME", "/nowhere", 1);
    setenv("SOOTH_MODELS", "", 1);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_tokenizer_free(f->tok);
    so_checkpoint_close(f->ck);
    so_test_tmp_free(f->dir);
    free(f);
    return 0;
}

static void cut(const char *from, const char *to, double part) {
    so_buf b = {0};
    so_err err = {0};
    SO_OK_OR_FAIL(so_file_read(from, 1 << 26, &b, &err), err);
    FILE *out = fopen(to, "wb");
    assert_non_null(out);
    fwrite(b.data, 1, (size_t)((double)b.len * part), out);
    fclose(out);
    so_buf_free(&b);
}

static void write_draft(const char *path, const so_draft_target *k) {
    so_tiny_write(path, &(so_tiny_opts){.layers = 1, .registered = k});
}

static so_draft_target fitting(const fixture *f) {
    so_draft_target k = {.name = "tiny", .d_model = f->hp.d_model, .n_layers = f->hp.n_layers};
    memcpy(k.vocab, f->vocab, sizeof k.vocab);
    return k;
}

static char *put(const fixture *f, const char *name, const so_draft_target *k) {
    char *path = so_path_join(f->dir, name);
    write_draft(path, k);
    return path;
}

static so_registry_found search(const fixture *f) {
    so_registry_found found;
    so_registry_search(f->ck, &f->hp, f->tok, SO_REGISTRY_MODEL, &found);
    return found;
}

static void test_found_beside_the_target(void **state) {
    fixture *f = *state;
    so_draft_target k = fitting(f);
    so_registry_found found = search(f);
    assert_int_equal(found.n, 0); /* the target itself is not a draft */
    char *b = put(f, "b.gguf", &k), *a = put(f, "a.gguf", &k);
    found = search(f);
    assert_int_equal(found.n, 2);
    assert_string_equal(found.paths[0], a); /* sorted by name: the same at every start */
    assert_string_equal(found.paths[1], b);
    so_registry_found_free(&found);
    unlink(a);
    unlink(b);
    free(a);
    free(b);
}

/* Heads are registered with their kind: each search finds its own, and a draft model is none. */
static void test_kinds_are_apart(void **state) {
    fixture *f = *state;
    static const char *const kinds[] = {"medusa", "blockwise", "lookahead"};
    so_draft_target k = fitting(f);
    char *paths[4] = {put(f, "draft.gguf", &k)};
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s.gguf", kinds[i]);
        paths[1 + i] = so_path_join(f->dir, name);
        so_heads_write(paths[1 + i], &(so_heads_file){.kind = kinds[i],
                                                      .n_heads = 2,
                                                      .n_layers = 1,
                                                      .d = f->hp.d_model,
                                                      .d_hidden = 16,
                                                      .registered = &k});
    }
    for (int kind = SO_REGISTRY_MODEL; kind <= SO_REGISTRY_LOOKAHEAD; kind++) {
        so_registry_found found;
        so_registry_search(f->ck, &f->hp, f->tok, (so_registry_kind)kind, &found);
        assert_int_equal(found.n, 1);
        assert_string_equal(found.paths[0], paths[kind]);
        so_registry_found_free(&found);
    }
    for (int i = 0; i < 4; i++) {
        unlink(paths[i]);
        free(paths[i]);
    }
}

/* One folder below models/ of the program, of XDG data, of the cache; SOOTH_MODELS itself. A folder
 * that is several of them is searched once. */
static void test_found_elsewhere(void **state) {
    fixture *f = *state;
    so_draft_target k = fitting(f);
    so_err err = {0};
    static const char *const places[][2] = {
        {"XDG_DATA_HOME", "home/sooth/models/tiny"},
        {"XDG_CACHE_HOME", "home/sooth/models"},
        {"SOOTH_MODELS", "home"},
        {"SOOTH_MODELS", "home/below"},
    };
    char *home = so_path_join(f->dir, "home");
    for (size_t i = 0; i < SO_LEN(places); i++) {
        char *dir = so_path_join(f->dir, places[i][1]);
        SO_OK_OR_FAIL(so_dir_create(dir, &err), err);
        char *path = so_path_join(dir, "draft.gguf");
        write_draft(path, &k);
        setenv(places[i][0], home, 1);
        so_registry_found found = search(f);
        assert_int_equal(found.n, 1);
        assert_non_null(strstr(found.paths[0], places[i][1]));
        so_registry_found_free(&found);
        setenv(places[i][0], i < 2 ? "/nowhere" : "", 1);
        unlink(path);
        free(path);
        free(dir);
    }
    char *dir = so_path_join(f->dir, "home/sooth/models"), *path = so_path_join(dir, "draft.gguf");
    write_draft(path, &k);
    setenv("XDG_DATA_HOME", home, 1);
    setenv("XDG_CACHE_HOME", home, 1);
    setenv("SOOTH_MODELS", dir, 1);
    so_registry_found found = search(f);
    assert_int_equal(found.n, 1);
    so_registry_found_free(&found);
    setenv("XDG_DATA_HOME", "/nowhere", 1);
    setenv("XDG_CACHE_HOME", "/nowhere", 1);
    setenv("SOOTH_MODELS", "", 1);
    unlink(path);
    free(path);
    free(dir);
    free(home);
}

/* A draft that was found and does not fit is skipped; one that was named is refused. */
static void test_misfits(void **state) {
    fixture *f = *state;
    const so_draft_target good = fitting(f);
    struct {
        so_draft_target k;
        int rc;
        const char *says;
    } cases[9] = {
        {good, SO_OK, ""},
        {{.name = ""}, SO_OK, ""}, /* unregistered: may be named, is not found */
        {good, SO_EMISMATCH, "whose vocabulary differs"},
        {good, SO_EMISMATCH, "'wide'"},
        {good, SO_EMISMATCH, "'a?[2Jb'"},
        {good, SO_EFORMAT, "embedding_length"},
        {good, SO_EFORMAT, "block_count"},
        {good, SO_EFORMAT, "hexadecimal"},
        {good, SO_EFORMAT, "agreement is 1.5"},
    };
    cases[2].k.vocab[0] ^= 1;
    snprintf(cases[3].k.name, sizeof good.name, "wide");
    cases[3].k.d_model *= 2;
    snprintf(cases[4].k.name, sizeof good.name, "a\033[2Jb");
    cases[4].k.n_layers = 7;
    cases[5].k.d_model = 0;
    cases[6].k.n_layers = 0;
    cases[7].k.vocab[3] = '\0';
    cases[8].k.agreement = 1.5;
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        char *path = put(f, "draft.gguf", &cases[i].k);
        so_checkpoint *ck = NULL;
        so_err err = {0};
        SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
        err = (so_err){0};
        assert_int_equal(so_registry_check_file(ck, &f->hp, f->tok, &err), cases[i].rc);
        if (!strstr(err.msg, cases[i].says) || (cases[i].rc != SO_OK && !strstr(err.msg, path)))
            fail_msg("case %zu: %s", i, err.msg);
        so_checkpoint_close(ck);
        so_registry_found found = search(f);
        assert_int_equal(found.n, i == 0);
        so_registry_found_free(&found);
        unlink(path);
        free(path);
    }
}

/* Truncated files, empty files, unreadable files and folders with the name of a file beside a good
 * draft: the good one is found. */
static void test_broken_neighbours(void **state) {
    fixture *f = *state;
    so_draft_target k = fitting(f);
    char *good = put(f, "good.gguf", &k), name[32], *path;
    static const double parts[] = {0, 0.001, 0.1, 0.5, 0.999};
    for (size_t i = 0; i < SO_LEN(parts); i++) {
        snprintf(name, sizeof name, "cut%zu.gguf", i);
        path = so_path_join(f->dir, name);
        cut(good, path, parts[i]);
        free(path);
    }
    path = so_path_join(f->dir, "folder.gguf");
    mkdir(path, 0000);
    free(path);
    path = so_path_join(f->dir, "fifo.gguf");
    mkfifo(path, 0600); /* opening it would block forever */
    free(path);
    path = so_path_join(f->dir, "closed");
    mkdir(path, 0000);
    setenv("SOOTH_MODELS", path, 1);
    so_registry_found found = search(f);
    assert_int_equal(found.n, 1);
    assert_string_equal(found.paths[0], good);
    so_registry_found_free(&found);
    setenv("SOOTH_MODELS", "", 1);
    unlink(good);
    free(good);
    free(path);
}

/* The same weights with another vocabulary subset are another draft, with its own record. */
static void test_id_of_vocab_subset(void **state) {
    fixture *f = *state;
    so_shape s = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = 16, .n_ctx = 64, .seed = 3};
    uint64_t ids[3];
    for (int i = 0; i < 3; i++) {
        so_checkpoint *ck = NULL;
        so_err err = {0};
        s.vocab_mask = i ? (const unsigned char[]){(unsigned char)i, 1} : NULL;
        s.n_vocab_mask = 2;
        char *path = so_shape_write(f->dir, &s);
        SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
        ids[i] = so_registry_id(ck);
        so_checkpoint_close(ck);
        unlink(path);
        free(path);
    }
    assert_true(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
}

/* A copy is the same draft; one with other weights of the same shape is not. */
static void test_id(void **state) {
    fixture *f = *state;
    so_draft_target k = fitting(f);
    char *a = put(f, "a.gguf", &k), *b = so_path_join(f->dir, "b.gguf");
    so_gguf *g = NULL;
    so_checkpoint *ca = NULL, *cb = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_checkpoint_open(a, SO_CHECKPOINT_ALL, &ca, &err), err);
    cut(a, b, 1);
    SO_OK_OR_FAIL(so_checkpoint_open(b, SO_CHECKPOINT_ALL, &cb, &err), err);
    assert_true(so_registry_id(ca) == so_registry_id(cb) && so_registry_id(ca) != 0);
    so_checkpoint_close(cb);
    SO_OK_OR_FAIL(so_gguf_open(b, &g, &err), err);
    const so_tensor *t = so_gguf_tensor_at(g, 0);
    so_map_file m;
    SO_OK_OR_FAIL(so_file_map(b, &m, &err), err);
    uint64_t byte = 0;
    while (memcmp(m.data + byte, t->data, t->n_bytes) != 0)
        byte++;
    so_file_unmap(&m);
    so_gguf_close(g);
    FILE *file = fopen(b, "r+b");
    fseek(file, (long)byte, SEEK_SET);
    fputc(77, file);
    fclose(file);
    SO_OK_OR_FAIL(so_checkpoint_open(b, SO_CHECKPOINT_ALL, &cb, &err), err);
    assert_true(so_registry_id(ca) != so_registry_id(cb));
    so_checkpoint_close(ca);
    so_checkpoint_close(cb);
    unlink(a);
    unlink(b);
    free(a);
    free(b);
}

/* The message has both sizes, the remedy and the first token that differs. */
static void test_other_vocabulary(void **state) {
    fixture *f = *state;
    char *path = so_path_join(f->dir, "other.gguf"), want[128];
    so_tokenizer *draft = NULL;
    so_err err = {0};
    int n = so_tokenizer_n_vocab(f->tok);
    assert_int_equal(so_draft_check_tokenizers(f->tok, f->tok, &err), SO_OK);
    so_tiny_write(path, &(so_tiny_opts){.other_vocab = true});
    SO_OK_OR_FAIL(so_tokenizer_open(path, &draft, &err), err);
    assert_int_equal(so_draft_check_tokenizers(f->tok, draft, &err), SO_EMISMATCH);
    snprintf(want, sizeof want,
             "vocabulary differs from the target's (%d and %d tokens): use a draft model", n, n);
    assert_non_null(strstr(err.msg, want));
    snprintf(want, sizeof want, "token %d is '", n - 2);
    assert_non_null(strstr(err.msg, want));
    so_tokenizer_free(draft);
    so_tiny_write(path, &(so_tiny_opts){.other_end = true});
    SO_OK_OR_FAIL(so_tokenizer_open(path, &draft, &err), err);
    assert_int_equal(so_draft_check_tokenizers(f->tok, draft, &err), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "the draft model's end token is"));
    so_tokenizer_free(draft);
    unlink(path);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_found_beside_the_target),
        cmocka_unit_test(test_kinds_are_apart),
        cmocka_unit_test(test_found_elsewhere),
        cmocka_unit_test(test_misfits),
        cmocka_unit_test(test_id),
        cmocka_unit_test(test_id_of_vocab_subset),
        cmocka_unit_test(test_broken_neighbours),
        cmocka_unit_test(test_other_vocabulary),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
