/* The table of pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.
 *
 * A GGUF file has no pattern, only a name; the patterns are those of the tokenizer.json of the
 * model family with that name. They are applied in order, with behaviour Isolated. If the original
 * tokenizer normalises (Qwen: NFC), so do we: a GGUF file and the folder it was converted from give
 * the same ids. An unknown name is refused, because a wrong pattern gives plausible but wrong ids.
 * Loading only; one thread. */
#include "base/mem.h"
#include "token/pretok.h"

/* clang-format off */
#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define GPT2 CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
/* Llama 3, Qwen 2 and related models differ in how many digits form a piece. */
#define CL100K(digits) \
    "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K(suffix, digits) \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" suffix "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER \
    "*" suffix "|" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define BLOOM " ?[^(\\s|.,!?…。，、।۔،)]+"
#define CJK "[一-龥぀-ゟ゠-ヿ]+"
#define DEEPSEEK3 \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?" \
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define DEEPSEEK_LETTERS \
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ" \
    "ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\\x{1F7D}ᾀ-ᾴᾶ-ᾼ\\x{1FBE}ῂ-ῄῆ-ῌῐ-\\x{1FD3}ῖ-\\x{1FDB}ῠ-Ῥ" \
    "ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\\x{2126}ℨ\\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ" \
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
/* clang-format on */

const char so_pretok_gpt2_pattern[] = GPT2;

typedef struct family {
    const char *names; /* separated by spaces */
    const char *patterns[6];
    so_pretok_traits traits;
} family;

static const family families[] = {
    {"gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat mellum a.x-4.0 granite-docling jina-es "
     "jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert",
     {GPT2},
     {0}},
    {"smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
     {"\\p{N}", GPT2},
     {0}},
    {"default", {"[\\p{P}\\$\\+<=>\\^~\\|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}, {0}},
    {"falcon", {"[\\p{P}\\$\\+<=>\\^~\\|`]+", GPT2, "[0-9][0-9][0-9]"}, {0}},
    {"llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     {CL100K("\\p{N}{1,3}")},
     {.ignore_merges = true, .adds_bos = true}},
    {"dbrx smaug-bpe glm4 chatglm-bpe", {CL100K("\\p{N}{1,3}")}, {0}},
    {"qwen2 deepseek-r1-qwen megrez kormo f2llmv2", {CL100K("\\p{N}")}, {.nfc = true}},
    {"stablelm2 hunyuan solar-open grok-2", {CL100K("\\p{N}")}, {0}},
    {"tekken", {O200K("", "\\p{N}")}, {.ignore_merges = true, .adds_bos = true}},
    {"gpt-4o llama4 kanana2 minimax-m2", {O200K("(?i:" CONTRACTIONS ")?", "\\p{N}{1,3}")}, {0}},
    {"deepseek-llm",
     {"[\\r\\n]", DEEPSEEK_LETTERS, "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$",
      "[一-龥ࠀ-一가-퟿]+", "\\p{N}+"},
     {0}},
    {"deepseek-coder",
     {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+", "\\p{N}"},
     {0}},
    {"deepseek-v3 hunyuan-dense joyai-llm", {"\\p{N}{1,3}", CJK, DEEPSEEK3}, {0}},
    {"bloom poro-chat gpt3-finnish", {BLOOM}, {0}},
    {"qwen35",
     {"(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
      "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
     {.nfc = true}},
    {"seed-coder",
     {"(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}\\r\\n]+"
      "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
     {0}},
    {"bailingmoe bailingmoe2 llada-moe",
     {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*"
      "|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"},
     {0}},
    {"superbpe", {"\\p{N}+", "(?=(\\d{3})+(?!\\d))"}, {0}},
    {"viking", {BLOOM, "\\p{N}"}, {0}},
};

static bool has_name(const char *names, so_str name) {
    for (const char *p = names; *p;) {
        size_t len = strcspn(p, " ");
        if (so_str_eq((so_str){p, len}, name))
            return true;
        p += len + (p[len] == ' ');
    }
    return false;
}

int so_pretok_by_name(so_str name, so_pretok *p, so_pretok_traits *traits, so_err *err) {
    for (size_t i = 0; i < SO_LEN(families); i++) {
        const family *f = &families[i];
        if (!has_name(f->names, name))
            continue;
        for (size_t k = 0; k < SO_LEN(f->patterns) && f->patterns[k]; k++) {
            int rc = so_pretok_add_pattern(p, so_str_c(f->patterns[k]), err);
            if (rc)
                return rc;
        }
        *traits = f->traits;
        so_pretok_stage *spell = so_pretok_add(p);
        SO_ASSERT(spell);
        spell->rewrites = true;
        spell->op.kind = SO_TEXT_SPELL_BYTES;
        return 0;
    }
    return so_err_set(err, SO_EUNSUPPORTED, "unknown pre-tokenizer name \"%.*s\"",
                      SO_STR_ARG(name));
}
