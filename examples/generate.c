/* Answers one question: prints the answer while it is generated, then the speed.
 *
 *   cc generate.c $(pkg-config --cflags --libs sooth) -o generate
 *   ./generate model.gguf "Why is the sea blue?" [max_tokens [seed]] */
#include <sooth.h>
#include <stdio.h>
#include <stdlib.h>

static int show(void *user, const sooth_event *ev) {
    (void)user;
    fwrite(ev->text, 1, ev->text_len, stdout);
    return fflush(stdout) != 0; /* a value other than 0 cancels the request */
}

static int answer(sooth_engine *engine, const char *question, const sooth_params *params,
                  int has_chat, sooth_error *err) {
    sooth_message ask = {"user", question};
    sooth_result result;
    sooth_result_init(&result);
    int rc = has_chat ? sooth_chat(engine, &ask, 1, params, show, NULL, &result, err)
                      : sooth_generate(engine, question, params, show, NULL, &result, err);
    if (rc == SOOTH_OK)
        fprintf(stderr, "\n%d tokens, %.1f per second, seed %llu\n", result.timings.predicted_n,
                result.timings.predicted_n * 1000.0 / result.timings.predicted_ms,
                (unsigned long long)result.seed);
    sooth_result_deinit(&result);
    return rc;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL QUESTION [MAX_TOKENS [SEED]]\n", argv[0]);
        return 2;
    }
    sooth_error err;
    sooth_model *model = NULL;
    sooth_engine *engine = NULL;
    sooth_params params;
    sooth_params_init(&params);
    if (argc > 3)
        params.max_tokens = (int)strtol(argv[3], NULL, 10);
    if (argc > 4) {
        params.has_seed = 1;
        params.seed = strtoull(argv[4], NULL, 10);
    }
    int rc = sooth_model_load(argv[1], NULL, &model, &err);
    if (rc == SOOTH_OK)
        rc = sooth_engine_create(model, NULL, &engine, &err);
    if (rc == SOOTH_OK)
        rc = answer(engine, argv[2], &params, sooth_model_has_chat(model), &err);
    if (rc != SOOTH_OK)
        fprintf(stderr, "%s\n", err.message);
    sooth_engine_free(engine);
    sooth_model_free(model);
    return rc != SOOTH_OK;
}
