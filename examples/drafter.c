/* A program with its own drafter. It finds the previous occurrence of the last token and guesses
 * that the same tokens follow again. The text is the model's own, whatever is guessed; good guesses
 * only make it faster.
 *
 *   cc drafter.c $(pkg-config --cflags --libs sooth) -o drafter
 *   ./drafter model.gguf "Repeat three times: red green blue." [max_tokens]
 *
 * A chat model gets the prompt in its chat format. Given the bare text, such a model often ends at
 * once, because a question without an answer format looks complete to it. */
#include <sooth.h>
#include <stdio.h>
#include <stdlib.h>

/* Writes at most `max` guesses to `out`; returns how many. */
static int guess(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                 int max) {
    int at = n_tokens - 2, n = 0;
    (void)user;
    (void)n_prompt;
    while (at >= 0 && tokens[at] != tokens[n_tokens - 1])
        at--;
    for (at++; at > 0 && at < n_tokens && n < max; at++)
        out[n++] = tokens[at];
    return n;
}

static int answer(sooth_engine *engine, const char *prompt, const sooth_params *params,
                  int has_chat, sooth_error *err) {
    sooth_message ask = {"user", prompt};
    sooth_result result;
    sooth_result_init(&result);
    int rc = has_chat ? sooth_chat(engine, &ask, 1, params, NULL, NULL, &result, err)
                      : sooth_generate(engine, prompt, params, NULL, NULL, &result, err);
    if (rc == SOOTH_OK) {
        printf("%s\n", result.text);
        fprintf(stderr, "%d tokens in %d passes; %d guesses, %d accepted\n",
                result.timings.predicted_n, result.timings.rounds, result.timings.draft_n,
                result.timings.draft_n_accepted);
    }
    sooth_result_deinit(&result);
    return rc;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT [MAX_TOKENS]\n", argv[0]);
        return 2;
    }
    sooth_error err;
    sooth_model *model = NULL;
    sooth_engine *engine = NULL;
    sooth_engine_params ep;
    sooth_params params;
    sooth_engine_params_init(&ep);
    ep.drafter = guess;
    sooth_params_init(&params);
    params.temp = 0;
    params.max_tokens = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 64;
    params.spec = "user";
    params.spec_length = 4; /* 0: the planner decides, and may decide not to guess */
    int rc = sooth_model_load(argv[1], NULL, &model, &err);
    if (rc == SOOTH_OK)
        rc = sooth_engine_create(model, &ep, &engine, &err);
    if (rc == SOOTH_OK)
        rc = answer(engine, argv[2], &params, sooth_model_has_chat(model), &err);
    if (rc != SOOTH_OK)
        fprintf(stderr, "%s\n", err.message);
    sooth_engine_free(engine);
    sooth_model_free(model);
    return rc == SOOTH_OK ? 0 : 1;
}
