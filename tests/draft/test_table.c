/* Unigram and bigram tables: counting, the file, hostile files, and drafting from them. */
#include "rig.h"

#include <math.h>
#include <stdio.h>

#include "base/file.h"

enum { VOCAB = 50 };

static so_table *count(int order, const int32_t *ids, size_t n) {
    so_table_counter *c = NULL;
    so_table *t = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_table_counter_create(order, VOCAB, &c, &err), err);
    SO_OK_OR_FAIL(so_table_counter_add(c, ids, n, &err), err);
    SO_OK_OR_FAIL(so_table_counter_finish(c, 0xABCDEF, &t, &err), err);
    return t;
}

static void counts_equal_naive_counting(void **state) {
    (void)state;
    enum { N = 5000 };
    static int32_t ids[N];
    static int want[VOCAB][VOCAB];
    dice d = {.seed = 71};
    for (int i = 0; i < N; i++) {
        double u = dice_uniform(&d);
        ids[i] = (int32_t)(u * u * VOCAB);
        if (i > 0)
            want[ids[i - 1]][ids[i]]++;
    }
    so_table *t = count(2, ids, N);
    assert_int_equal(t->n_contexts, VOCAB);
    for (int c = 0; c < VOCAB; c++) {
        uint32_t n = t->starts[c + 1] - t->starts[c];
        int kinds = 0;
        for (int k = 0; k < VOCAB; k++)
            kinds += want[c][k] > 0;
        assert_int_equal(n, SO_MIN(kinds, 32));
        for (uint32_t i = 0; i < n; i++) {
            const so_table_entry *e = &t->entries[t->starts[c] + i];
            assert_int_equal(e->count, want[c][e->token]);
            if (i > 0)
                assert_true(e[-1].count > e->count ||
                            (e[-1].count == e->count && e[-1].token < e->token));
        }
        /* entries that were cut are not more frequent than those kept */
        for (int k = 0; n == 32 && k < VOCAB; k++) {
            bool kept = false;
            for (uint32_t i = 0; i < n; i++)
                kept |= t->entries[t->starts[c] + i].token == (uint32_t)k;
            assert_true(kept || want[c][k] <= (int)t->entries[t->starts[c + 1] - 1].count);
        }
    }
    so_table_free(t);
    t = count(1, ids, N);
    uint64_t total = 0;
    for (uint32_t i = 0; i < t->starts[1]; i++)
        total += t->entries[i].count;
    assert_int_equal(total, N);
    so_table_free(t);
}

static void file_round_trip(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "t.tbl");
    so_err err = {0};
    so_table *back = NULL, *t = count(2, (int32_t[]){1, 2, 3, 1, 2, 4, 1, 2, 3}, 9);
    SO_OK_OR_FAIL(so_table_save(t, path, &err), err);
    SO_OK_OR_FAIL(so_table_load(path, VOCAB, 0xABCDEF, &back, &err), err);
    assert_int_equal(back->order, 2);
    assert_int_equal(back->n_tokens, 9);
    assert_memory_equal(back->starts, t->starts, (VOCAB + 1) * sizeof *t->starts);
    assert_memory_equal(back->entries, t->entries, t->starts[VOCAB] * sizeof *t->entries);
    so_table_free(back);
    back = NULL;
    assert_int_equal(so_table_load(path, VOCAB + 1, 0xABCDEF, &back, &err), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "vocabulary of 50"));
    assert_int_equal(so_table_load(path, VOCAB, 0xABCDEE, &back, &err), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "another tokenizer"));
    assert_int_equal(so_table_load(dir, VOCAB, 0, &back, &err), SO_EINVAL);
    assert_null(back);
    so_table_free(t);
    free(path);
    so_test_tmp_free(dir);
}

/* Corrects the checksum of a file, so that the other checks are reached. */
static void seal(unsigned char *data, size_t len) {
    uint64_t sum = so_hash_bytes(data, len - 8);
    for (int i = 0; i < 8; i++)
        data[len - 8 + (size_t)i] = (unsigned char)(sum >> 8 * i);
}

static void read_back(const char *path, so_buf *out) {
    so_err err = {0};
    SO_OK_OR_FAIL(so_file_read(path, 1 << 20, out, &err), err);
}

static void hostile_files(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "t.tbl");
    so_err err = {0};
    so_buf good = {0};
    so_table *out = NULL, *t = count(2, (int32_t[]){1, 2, 3, 1, 2, 4, 1, 2, 3}, 9);
    SO_OK_OR_FAIL(so_table_save(t, path, &err), err);
    read_back(path, &good);
    unsigned char *bad = so_alloc(good.len);
    /* every truncation and every changed byte is refused or parses to a valid table */
    for (size_t len = 0; len < good.len; len++)
        assert_int_not_equal(so_table_parse(good.data, len, "cut", &out, &err), 0);
    for (size_t i = 0; i < good.len; i++) {
        memcpy(bad, good.data, good.len);
        bad[i] ^= 0x41;
        assert_int_not_equal(so_table_parse(bad, good.len, "flip", &out, &err), 0);
        seal(bad, good.len);
        if (so_table_parse(bad, good.len, "sealed", &out, &err) == 0)
            so_table_free(out);
    }
    const struct {
        size_t at;
        uint32_t value;
        const char *says;
    } cases[] = {
        {0, 0, "not a table"},
        {8, 2, "version 2"},
        {12, 3, "order 3"},
        {16, 0, "vocabulary of 0"},
        {16, 0xFFFFFFFF, "vocabulary of 4294967295"},
        {40, 0x7FFFFFFF, "do not fit"},
        {44, 0xFFFFFFFF, "do not fit"},
        {48 + 4 * VOCAB, 6, "cover"},
        {48 + 4 * 2, 0xFFFFFFFF, "ends before it starts"},
        {48 + 4 * (VOCAB + 1), VOCAB, "out of range"},  /* token */
        {48 + 4 * (VOCAB + 1) + 4, 0, "out of range"},  /* count */
        {48 + 4 * (VOCAB + 1) + 20, 3, "out of order"}, /* 2→4 more frequent than 2→3 */
        {48 + 4 * (VOCAB + 1) + 16, 3, "out of order"}, /* a token twice */
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        memcpy(bad, good.data, good.len);
        for (int k = 0; k < 4; k++)
            bad[cases[i].at + (size_t)k] = (unsigned char)(cases[i].value >> 8 * k);
        seal(bad, good.len);
        int rc = so_table_parse(bad, good.len, "bad.tbl", &out, &err);
        if (rc == 0 || !strstr(err.msg, cases[i].says) || !strstr(err.msg, "bad.tbl"))
            fail_msg("case %zu: %d, %s", i, rc, err.msg);
    }
    free(bad);
    so_buf_free(&good);
    so_table_free(t);
    free(path);
    so_test_tmp_free(dir);
}

static void bad_counting(void **state) {
    (void)state;
    so_table_counter *c = NULL;
    so_err err = {0};
    assert_int_equal(so_table_counter_create(3, 10, &c, &err), SO_EINVAL);
    assert_int_equal(so_table_counter_create(1, 0, &c, &err), SO_ERANGE);
    SO_OK_OR_FAIL(so_table_counter_create(2, 10, &c, &err), err);
    assert_int_equal(so_table_counter_add(c, (int32_t[]){1, 10}, 2, &err), SO_ERANGE);
    assert_int_equal(so_table_counter_add(c, (int32_t[]){-1}, 1, &err), SO_ERANGE);
    so_table_counter_free(c);
}

static void drafts_by_table(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    /* 1 → 2 (3 of 3), 2 → 3 (2 of 3), 3 → 1 */
    so_table *t = count(2, (int32_t[]){1, 2, 3, 1, 2, 4, 1, 2, 3}, 9);
    rig_open(&r, so_table_drafter_create(t, false), (int32_t[]){9, 1}, 2);
    assert_string_equal(r.d->vt->name, "bigram");
    assert_tokens(out, rig_chain(&r, 5, out), (int32_t[]){2, 3, 1, 2, 3}, 5);
    assert_int_equal(r.tree.proposals[1].kind, SO_Q_POINT);
    assert_true(r.tree.proposals[0].confidence > r.tree.proposals[1].confidence);
    int32_t unseen = 30, foreign = 700;
    rig_emit(&r, &unseen, 1, true);
    assert_int_equal(rig_chain(&r, 5, out), 0);
    rig_emit(&r, &foreign, 1, true); /* outside the table's contexts */
    assert_int_equal(rig_chain(&r, 5, out), 0);
    rig_close(&r);
    rig_open(&r, so_table_drafter_create(count(1, (int32_t[]){5, 6, 6}, 3), false), (int32_t[]){9},
             1);
    assert_string_equal(r.d->vt->name, "unigram");
    assert_tokens(out, rig_chain(&r, 3, out), (int32_t[]){6, 6, 6}, 3);
    rig_close(&r);
}

/* Sampled: 2 → 3 with 2/3 and 4 with 1/3, by row and by frequency (5 standard errors). */
static void draws_by_table(void **state) {
    (void)state;
    enum { DRAWS = 20000 };
    rig r;
    int32_t out[8];
    int threes = 0;
    so_table *t = count(2, (int32_t[]){1, 2, 3, 1, 2, 4, 1, 2, 3}, 9);
    rig_open(&r, so_table_drafter_create(t, true), (int32_t[]){2}, 1);
    r.temp = 0.7f;
    for (int i = 0; i < DRAWS; i++) {
        rig_chain(&r, 1, out);
        threes += out[0] == 3;
        const float *row = so_tree_row(&r.tree, r.tree.proposals[0].row);
        assert_true(row[3] == (float)(2 / 3.0) && row[4] == (float)(1 / 3.0) && row[5] == 0);
    }
    assert_true(fabs(threes - DRAWS * 2 / 3.0) < 5 * sqrt(DRAWS * 2 / 9.0));
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_equal_naive_counting),
        cmocka_unit_test(file_round_trip),
        cmocka_unit_test(hostile_files),
        cmocka_unit_test(bad_counting),
        cmocka_unit_test(drafts_by_table),
        cmocka_unit_test(draws_by_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
