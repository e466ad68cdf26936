/* Writes the tiny model with the library's own GGUF writer. Weights are drawn from a fixed seed and
 * scaled so that logits spread over a few nats: sampling at different temperatures differs. */
#include "so_test.h"

#include "so_tiny.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/rng.h"
#include "format/gguf.h"

enum { D = 64, FF = 96, HEADS = 4, HEADS_KV = 2, HEAD_DIM = 16, LAYERS = 2, MAX_LAYERS = 256 };
enum { N_SPECIAL = 3, N_BYTES = 256, N_LETTERS = 27, N_WORDS = 8 };
enum { N_VOCAB = N_SPECIAL + N_BYTES + N_LETTERS + N_WORDS };

static const char TEMPLATE[] =
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}";

static void add_vocab(so_gguf_writer *w, const so_tiny_opts *o) {
    static char text[N_VOCAB][16];
    static const char *const words[N_WORDS] = {"he", "ll", "▁w", "or", "▁the", "in", "▁s", "ea"};
    so_str pieces[N_VOCAB];
    float scores[N_VOCAB];
    int32_t types[N_VOCAB];
    for (int i = 0; i < N_VOCAB; i++) {
        int byte = i - N_SPECIAL, letter = byte - N_BYTES, word = letter - N_LETTERS;
        if (i < N_SPECIAL)
            snprintf(text[i], sizeof text[i], "%s", (const char *[]){"<unk>", "<s>", "</s>"}[i]);
        else if (byte < N_BYTES)
            snprintf(text[i], sizeof text[i], "<0x%02X>", (unsigned)byte);
        else if (letter < N_LETTERS)
            snprintf(text[i], sizeof text[i], letter ? "%c" : "▁", 'a' + letter - 1);
        else
            snprintf(text[i], sizeof text[i], "%s", words[word]);
        pieces[i] = so_str_c(text[i]);
        scores[i] = word >= 0 ? -(float)word : -100 - (float)i;
        types[i] = i == 0 ? 2 : i < N_SPECIAL ? 3 : byte < N_BYTES ? 6 : 1;
    }
    if (o->other_vocab) {
        so_str last = pieces[N_VOCAB - 1];
        pieces[N_VOCAB - 1] = pieces[N_VOCAB - 2];
        pieces[N_VOCAB - 2] = last;
    }
    so_gguf_writer_str(w, "tokenizer.ggml.model", SO_STR("llama"));
    so_gguf_writer_strs(w, "tokenizer.ggml.tokens", pieces, N_VOCAB);
    so_gguf_writer_f32s(w, "tokenizer.ggml.scores", scores, N_VOCAB);
    so_gguf_writer_i32s(w, "tokenizer.ggml.token_type", types, N_VOCAB);
    so_gguf_writer_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    so_gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", 1);
    so_gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", o->other_end ? 1 : 2);
    so_gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", true);
}

static int n_layers(const so_tiny_opts *o) { return o->layers ? o->layers : LAYERS; }

static void add_shape(so_gguf_writer *w, const so_tiny_opts *o) {
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_str(w, "general.name", SO_STR("tiny"));
    so_gguf_writer_u32(w, "llama.block_count", (uint32_t)n_layers(o));
    so_gguf_writer_u32(w, "llama.embedding_length", D);
    so_gguf_writer_u32(w, "llama.feed_forward_length", FF);
    so_gguf_writer_u32(w, "llama.attention.head_count", HEADS);
    so_gguf_writer_u32(w, "llama.attention.head_count_kv", HEADS_KV);
    so_gguf_writer_u32(w, "llama.context_length", SO_TINY_CTX);
    so_gguf_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    const char *template = o->template ? o->template : TEMPLATE;
    if (!o->no_chat)
        so_gguf_writer_str(w, "tokenizer.chat_template", so_str_c(template));
    if (o->temp > 0)
        so_gguf_writer_f32(w, "general.sampling.temp", o->temp);
}

typedef struct shape {
    char name[48];
    int64_t dims[2];
    float mean, spread;
} shape;

static int list_tensors(shape *out, int layers) {
    static const struct {
        const char *name;
        int in, out;
    } layer[] = {{"attn_norm", D, 0},
                 {"attn_q", D, HEADS * HEAD_DIM},
                 {"attn_k", D, HEADS_KV * HEAD_DIM},
                 {"attn_v", D, HEADS_KV * HEAD_DIM},
                 {"attn_output", HEADS * HEAD_DIM, D},
                 {"ffn_norm", D, 0},
                 {"ffn_gate", D, FF},
                 {"ffn_up", D, FF},
                 {"ffn_down", FF, D}};
    int n = 0;
    out[n++] = (shape){"token_embd.weight", {D, N_VOCAB}, 0, 0.6f};
    for (int l = 0; l < layers; l++)
        for (size_t i = 0; i < SO_LEN(layer); i++, n++) {
            bool norm = layer[i].out == 0;
            out[n] = (shape){.dims = {layer[i].in, layer[i].out}};
            out[n].mean = norm ? 1 : 0;
            out[n].spread = norm ? 0.1f : 1.5f / sqrtf((float)layer[i].in);
            snprintf(out[n].name, sizeof out[n].name, "blk.%d.%s.weight", l, layer[i].name);
        }
    out[n++] = (shape){"output_norm.weight", {D, 0}, 1, 0.1f};
    return n;
}

/* From place `as` of the random numbers. */
static void write_tensor(so_gguf_writer *w, const shape *s, int as, int nan_token) {
    so_rng_key key = {.seed = 99, .position = (uint32_t)as, .purpose = SO_RNG_TEST};
    int64_t count = s->dims[0] * (s->dims[1] ? s->dims[1] : 1);
    float *x = SO_NEW_N(float, count);
    so_err err = {0};
    for (int64_t k = 0; k < count; k++)
        x[k] = s->mean + s->spread * 1.7f * (float)(2 * so_rng_uniform(&key, (uint32_t)k) - 1);
    for (int64_t k = 0; k < D && nan_token > 0; k++)
        x[nan_token * D + k] = NAN;
    SO_OK_OR_FAIL(so_gguf_writer_data(w, x, (size_t)count * sizeof *x, &err), err);
    free(x);
}

static void add_registration(so_gguf_writer *w, const so_draft_target *f) {
    if (f && *f->vocab)
        so_gguf_writer_str(w, "sooth.draft.target.vocab_sha256", so_str_c(f->vocab));
    if (f && *f->name)
        so_gguf_writer_str(w, "sooth.draft.target.name", so_str_c(f->name));
    if (f && f->d_model)
        so_gguf_writer_u32(w, "sooth.draft.target.embedding_length", (uint32_t)f->d_model);
    if (f && f->n_layers)
        so_gguf_writer_u32(w, "sooth.draft.target.block_count", (uint32_t)f->n_layers);
    if (f && f->agreement != 0)
        so_gguf_writer_f32(w, "sooth.draft.agreement", (float)f->agreement);
}

/* Zeros where such a layer would add to the stream; the last norm is that of the default model.
 * Returns its place among the tensors. */
static int make_idle(shape *list, int layers) {
    for (int l = LAYERS; l < layers; l++)
        for (int i = 1 + 9 * l; i < 1 + 9 * (l + 1); i++)
            if (strstr(list[i].name, "output") || strstr(list[i].name, "down"))
                list[i].spread = 0;
    return 1 + 9 * layers;
}

void so_tiny_write(const char *path, const so_tiny_opts *o) {
    static const so_tiny_opts none = {0};
    static shape list[3 + 9 * MAX_LAYERS];
    so_err err = {0};
    so_gguf_writer *w = so_gguf_writer_create();
    o = o ? o : &none;
    SO_ASSERT(n_layers(o) <= MAX_LAYERS);
    int n = list_tensors(list, n_layers(o)), sick = o->nan_token;
    if (sick > 0) { /* an output matrix of its own: the embeddings as they were */
        list[n] = list[0];
        snprintf(list[n++].name, sizeof list[0].name, "output.weight");
    }
    add_shape(w, o);
    add_vocab(w, o);
    add_registration(w, o->registered);
    int norm = o->idle ? make_idle(list, n_layers(o)) : -1;
    for (int i = 0; i < n; i++)
        so_gguf_writer_tensor(w, list[i].name, SO_DTYPE_F32, list[i].dims[1] ? 2 : 1, list[i].dims);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    for (int i = 0; i < n; i++)
        write_tensor(w, &list[i],
                     sick > 0 && i == n - 1 ? 0
                     : i == norm            ? 1 + 9 * LAYERS
                                            : i,
                     i == 0 ? sick : 0);
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
}
