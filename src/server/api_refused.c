/* Parameters of the OpenAI API, llama.cpp, vLLM, SGLang and others that would change an answer and
 * that this server does not have.
 *
 * Ignoring such a parameter would silently give another answer than the client asked for. So a value
 * that changes something is refused by name. null and the neutral value in the table are accepted,
 * because clients often send all their defaults. Parameters that act only together with one of
 * these (mirostat_tau, dry_base, xtc_threshold, …) are not in the table: without the other one they
 * have no effect, and they are ignored like unknown fields. docs/server.md lists the same names.
 *
 * Pure functions. Any thread. */
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "server/api.h"

typedef enum neutral {
    EMPTY,  /* false, "", [] and {} */
    NUMBER, /* a number from min to max */
    TRUE,
    WORD, /* the string `word`, or EMPTY */
} neutral;

typedef struct refused {
    const char *name;
    neutral kind;
    double min, max;
    const char *word;
} refused;

#define NONE(name) \
    { name, EMPTY, 0, 0, NULL }
#define AT(name, x) \
    { name, NUMBER, x, x, NULL }
#define WITHIN(name, min, max) \
    { name, NUMBER, min, max, NULL }

static const refused TABLE[] = {
    /* tools, other media */
    NONE("tools"),
    NONE("functions"),
    NONE("audio"),
    NONE("web_search_options"),
    NONE("image_data"),
    NONE("multi_modal_data"),
    NONE("mm_processor_kwargs"),
    /* constrained output */
    NONE("grammar"),
    NONE("json_schema"),
    NONE("format"),
    NONE("guided_json"),
    NONE("guided_regex"),
    NONE("guided_choice"),
    NONE("guided_grammar"),
    NONE("structured_outputs"),
    NONE("structural_tag"),
    NONE("regex"),
    NONE("ebnf"),
    NONE("stop_regex"),
    NONE("force_words_ids"),
    /* allowed tokens */
    NONE("allowed_token_ids"),
    NONE("sequence_bias"),
    NONE("banned_tokens"),
    NONE("banned_strings"),
    NONE("custom_token_bans"),
    NONE("ban_eos_token"),
    AT("no_repeat_ngram_size", 0),
    NONE("logits_processors"),
    NONE("custom_logit_processor"),
    /* sampling */
    AT("mirostat", 0),
    AT("typical_p", 1),
    AT("typ_p", 1),
    AT("tfs_z", 1),
    AT("tfs", 1),
    AT("top_a", 0),
    WITHIN("top_n_sigma", -INFINITY, 0),
    AT("dry_multiplier", 0),
    AT("xtc_probability", 0),
    AT("dynatemp_range", 0),
    AT("smoothing_factor", 0),
    AT("epsilon_cutoff", 0),
    AT("eta_cutoff", 0),
    AT("penalty_alpha", 0),
    AT("encoder_repetition_penalty", 1),
    AT("guidance_scale", 1),
    AT("cfg_scale", 1),
    NONE("negative_prompt"),
    WITHIN("min_keep", 0, 1),
    NONE("samplers"),
    NONE("sampler_order"),
    NONE("sampler_priority"),
    NONE("temperature_last"),
    {"do_sample", TRUE, 0, 0, NULL},
    {"penalize_nl", TRUE, 0, 0, NULL},
    NONE("sampling_params"),
    NONE("options"),
    NONE("parameters"),
    /* beam search */
    WITHIN("num_beams", 0, 1), /* here it is use_beam_search and best_of */
    /* the prompt and the model */
    NONE("suffix"),
    NONE("chat_template"),
    NONE("documents"),
    NONE("prompt_embeds"),
    NONE("input_embeds"),
    NONE("input_ids"),
    NONE("truncate_prompt_tokens"),
    NONE("add_special_tokens"),
    {"add_bos_token", TRUE, 0, 0, NULL},
    NONE("lora"),
    NONE("lora_path"),
    NONE("lora_id"),
    NONE("adapter_id"),
    NONE("enable_thinking"),
    NONE("thinking"),
    NONE("reasoning"),
    {"reasoning_effort", WORD, 0, 0, "none"},
    {"verbosity", WORD, 0, 0, "medium"},
    /* the form of the response */
    NONE("echo"),
    NONE("include_stop_str_in_output"),
    NONE("no_stop_trim"),
    {"skip_special_tokens", TRUE, 0, 0, NULL},
    {"detokenize", TRUE, 0, 0, NULL},
    NONE("prompt_logprobs"),
    NONE("return_tokens_as_token_ids"),
    AT("n_probs", 0),
    NONE("post_sampling_probs"),
    AT("n_indent", 0),
    WITHIN("t_max_predict_ms", -INFINITY, 0),
};

bool so_api_is_empty(const json_t *v) {
    return (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0) || json_is_false(v);
}

static bool is_neutral(const refused *r, const json_t *v) {
    double x = json_number_value(v);
    switch (r->kind) {
    case NUMBER:
        return json_is_number(v) && x >= r->min && x <= r->max;
    case TRUE:
        return json_is_true(v);
    case WORD:
        if (json_is_string(v) && strcmp(json_string_value(v), r->word) == 0)
            return true;
        break;
    default:
        break;
    }
    return so_api_is_empty(v);
}

/* " or set it to 1": the neutral value, unless that is an empty one. */
static void hint(const refused *r, char out[64]) {
    out[0] = '\0';
    if (r->kind == NUMBER)
        snprintf(out, 64, " or set it to %g", isinf(r->min) ? r->max : r->min);
    else if (r->kind == TRUE)
        snprintf(out, 64, " or set it to true");
    else if (r->kind == WORD)
        snprintf(out, 64, " or set it to \"%s\"", r->word);
}

bool so_api_refuse(so_api_error *e, const char *name, const char *more) {
    return so_api_fail(e, 400, "unsupported_parameter", name,
                       "'%s' is not supported by this server: leave it out%s", name, more);
}

bool so_api_check_refused(const char *name, const json_t *v, bool *known, so_api_error *e) {
    char more[64];
    *known = true;
    for (size_t i = 0; i < SO_LEN(TABLE); i++) {
        if (strcmp(TABLE[i].name, name) != 0)
            continue;
        if (json_is_null(v) || is_neutral(&TABLE[i], v))
            return true;
        hint(&TABLE[i], more);
        return so_api_refuse(e, name, more);
    }
    *known = false;
    return true;
}
