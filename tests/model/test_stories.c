/* A real model end to end: stories260K, greedy, against the text that the tests of llama2.c expect
 * from this checkpoint at temperature 0. */
#include "so_test.h"

#include <stdlib.h>

#include "base/mem.h"
#include "so_rig.h"
#include "so_stories.h"
#include "token/tokenizer.h"

static const char STORY[] =
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She "
    "said, \"I want to play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to "
    "do.\"\n"
    "Lily didn't want to help her mom, so she";

static void greedy(so_rig *r, int n, so_tokens *out) {
    so_err err = {0};
    so_seq *s = so_seq_create(r->kv);
    int32_t token = 1; /* begin */
    for (int i = 0; i < n; i++) {
        so_row row = {token, i, 0, -1, .want_logits = true};
        SO_OK_OR_FAIL(so_seq_begin(s, 1, &err), err);
        SO_OK_OR_FAIL(so_pass_run(r->p, &(so_batch){&row, 1, &s, 1}, SO_PASS_ARGMAX, &err), err);
        so_seq_commit_chain(s, 1);
        token = so_pass_argmax(r->p, 0);
        so_tokens_push(out, token);
    }
    so_seq_free(s);
}

static void tells_the_story(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_stories_write(dir);
    if (!path) {
        so_test_tmp_free(dir);
        SO_SKIP("shared/stories260K is not here");
    }
    const so_cpu_level levels[] = {SO_CPU_SCALAR, SO_CPU_AUTO};
    for (size_t i = 0; i < SO_LEN(levels); i++) {
        so_rig r;
        so_err err = {0};
        so_tokenizer *t;
        so_tokens ids = {0};
        so_buf text = {0};
        so_rig_open(&r, path, &(so_rig_opts){.level = levels[i], .kv_dtype = SO_DTYPE_F32});
        SO_OK_OR_FAIL(so_tokenizer_load(r.ck, &t, &err), err);
        greedy(&r, 200, &ids);
        so_tokenizer_decode(t, ids.ids, ids.len, false, &text);
        const char *got = text.data[0] == ' ' ? text.data + 1 : text.data;
        if (strncmp(got, STORY, sizeof STORY - 1) != 0)
            fail_msg("the story goes: %s", got);
        so_tokens_free(&ids);
        so_buf_free(&text);
        so_tokenizer_free(t);
        so_rig_close(&r);
    }
    free(path);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(tells_the_story)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
