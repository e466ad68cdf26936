/* The table of subcommands, in the order `sooth --help` lists them. */
#include "cli/commands.h"

#include <string.h>

#include "base/mem.h"

static const so_command table[] = {
    {SO_CMD_DEMO, "demo", so_cmd_demo, "[-m MODEL] [-p TEXT] [options]",
     "one answer twice, plainly and speculatively: the same text, and how much sooner", 0, 0},
    {SO_CMD_RUN, "run", so_cmd_run,
     "-m MODEL (-p TEXT | -f FILE) [options]\n-m MODEL --prompts FILE.jsonl [options]",
     "answer a prompt, or every prompt of a file", 0, 0},
    {SO_CMD_CHAT, "chat", so_cmd_chat, "-m MODEL [options]",
     "talk with a model in the terminal, or answer standard input line by line", 0, 0},
    {SO_CMD_SERVE, "serve", so_cmd_serve, "-m MODEL [--port N] [options]",
     "answer over HTTP, with the OpenAI API and a page to look at", 0, 0},
    {SO_CMD_PULL, "pull", so_cmd_pull, "[--check | --force] [NAME]",
     "fetch a model by name; without a name, list them", 0, 1},
    {SO_CMD_INSPECT, "inspect", so_cmd_inspect,
     "FILE|FOLDER|NAME\n-m MODEL [-md DRAFT] --ctx C --parallel N",
     "show what a model file holds, or the memory it takes", 0, 1},
    {SO_CMD_QUANTIZE, "quantize", so_cmd_quantize, "IN OUT TYPE",
     "write a model as GGUF with its weights rounded to a type", 3, 3},
    {SO_CMD_TOKENIZE, "tokenize", so_cmd_tokenize, "-m MODEL [TEXT | -p TEXT | -f FILE]",
     "show a text's token ids", 0, 1},
    {SO_CMD_COUNT, "count", so_cmd_count, "-m MODEL -f TEXT -o TABLE [--order 1|2]",
     "count a text into a unigram or bigram table for --spec", 0, 0},
    {SO_CMD_THEORY, "theory", so_cmd_theory,
     "--alpha A [--gamma G] [--c C]\n[--json] [--svg FILE]\n--measure -m MODEL [-md DRAFT] "
     "[--spec A;B;...] [-n TOKENS] [-f PROMPTS.jsonl]",
     "what speculation can gain: formulas, the paper's tables and figures, or measured", 0, 0},
    {SO_CMD_PROVE, "prove", so_cmd_prove, "-m MODEL [-md DRAFT] [--spec DRAFTERS] [options]",
     "show on this machine that speculation leaves the model's words as they are", 0, 0},
    {SO_CMD_TRACE, "trace", so_cmd_trace, "FILE.jsonl... [--svg OUT.svg]",
     "where the time of runs with --trace went, as a table or a picture", 1, 16},
    {SO_CMD_BENCH, "bench", so_cmd_bench,
     "spec -m MODEL --spec DRAFTERS --prompts FILE.jsonl [options]\ncurve -m MODEL [options]\nppl "
     "-m MODEL -f TEXT [options]\ndecode -m MODEL [options]\nprompt "
     "-m MODEL [options]\nlogits -m MODEL -f IDS.json -o FILE [options]\npasses -m MODEL -c TOKENS "
     "[options]",
     "measure: spec (plain against speculative), curve (time of a pass by its rows), ppl "
     "(perplexity), decode, prompt, kernels, logits, passes (as standard input asks)",
     1, 1},
};

const so_command *so_command_at(int i) {
    return i >= 0 && i < (int)SO_LEN(table) ? &table[i] : NULL;
}

const so_command *so_command_find(const char *name) {
    for (size_t i = 0; i < SO_LEN(table); i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

const so_command *so_command_by_bit(int bit) {
    for (size_t i = 0; i < SO_LEN(table); i++)
        if (table[i].bit == bit)
            return &table[i];
    return NULL;
}
