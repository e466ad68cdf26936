/* The table of commands, in the order in which `sooth help` lists them. */
#include "cli/commands.h"

#include <string.h>

#include "base/mem.h"

static const so_command table[] = {
    {.bit = SO_CMD_RUN,
     .name = "run",
     .run = so_cmd_run,
     .group = SO_GROUP_USE,
     .usage = "-m MODEL PROMPT [options]\n"
              "-m MODEL -f FILE [options]\n"
              "-m MODEL --prompts FILE.jsonl [options]",
     .summary = "answer a prompt, or every prompt of a file",
     .max_pos = 1},
    {.bit = SO_CMD_CHAT,
     .name = "chat",
     .run = so_cmd_chat,
     .group = SO_GROUP_USE,
     .usage = "-m MODEL [options]",
     .summary = "hold a conversation in the terminal or over a pipe"},
    {.bit = SO_CMD_SERVE,
     .name = "serve",
     .run = so_cmd_serve,
     .group = SO_GROUP_USE,
     .usage = "-m MODEL [--port N] [options]",
     .summary = "serve the OpenAI API and a web page over HTTP"},
    {.bit = SO_CMD_WORKER,
     .name = "draft-worker",
     .run = so_cmd_draft_worker,
     .group = SO_GROUP_USE,
     .usage = "-m DRAFT [--listen ADDRESS] [--key FILE] [options]\n"
              "--make-key FILE",
     .summary = "run a draft model for engines in other processes or on other hosts"},
    {.bit = SO_CMD_DEMO,
     .name = "demo",
     .run = so_cmd_demo,
     .group = SO_GROUP_USE,
     .usage = "[-m MODEL] [PROMPT] [options]",
     .summary = "answer a prompt with and without speculation, side by side",
     .max_pos = 1},
    {.bit = SO_CMD_PULL,
     .name = "pull",
     .run = so_cmd_pull,
     .group = SO_GROUP_USE,
     .usage = "[--check | --force] [NAME]",
     .summary = "download a model by name; without a name, list them",
     .max_pos = 1},
    {.bit = SO_CMD_INSPECT,
     .name = "inspect",
     .run = so_cmd_inspect,
     .group = SO_GROUP_USE,
     .usage = "FILE|FOLDER|NAME\n-m MODEL [-md DRAFT] --ctx C --parallel N",
     .summary = "show what a model file contains, or the memory it needs",
     .max_pos = 1},
    {.bit = SO_CMD_QUANTIZE,
     .name = "quantize",
     .run = so_cmd_quantize,
     .group = SO_GROUP_USE,
     .usage = "IN OUT TYPE",
     .summary = "convert a model to a GGUF file with another weight type",
     .min_pos = 3,
     .max_pos = 3},
    {.bit = SO_CMD_TOKENIZE,
     .name = "tokenize",
     .run = so_cmd_tokenize,
     .group = SO_GROUP_USE,
     .usage = "-m MODEL [TEXT | -p TEXT | -f FILE]",
     .summary = "print the token ids of a text",
     .max_pos = 1},
    {.bit = SO_CMD_COUNT,
     .name = "count",
     .run = so_cmd_count,
     .group = SO_GROUP_USE,
     .usage = "-m MODEL -f TEXT -o TABLE [--order 1|2]",
     .summary = "make a unigram or bigram table for --spec from a text"},
    {.bit = SO_CMD_CALIBRATE,
     .name = "calibrate",
     .run = so_cmd_calibrate,
     .group = SO_GROUP_USE,
     .usage = "-m MODEL [-md DRAFT] --prompts FILE.jsonl -o TREE [options]\n"
              "--show TREE [--svg FILE]",
     .summary = "grow the best token tree for a draft model, or show one",
     .max_pos = 1},
    {.bit = SO_CMD_COMPLETION,
     .name = "completion",
     .run = so_cmd_completion,
     .group = SO_GROUP_USE,
     .usage = "WHAT",
     .summary = "print the completion script of a shell",
     .args = "bash\tsource it from ~/.bashrc: source <(sooth completion bash)\n"
             "zsh\tsave it as _sooth in a folder of $fpath\n"
             "fish\tsave it as ~/.config/fish/completions/sooth.fish\n"
             "models\tthe names that -m accepts, one per line (used by the scripts)",
     .min_pos = 1,
     .max_pos = 1},
    {.bit = SO_CMD_PROVE,
     .name = "prove",
     .run = so_cmd_prove,
     .group = SO_GROUP_MEASURE,
     .usage = "-m MODEL [-md DRAFT] [--spec DRAFTERS] [options]",
     .summary = "check that speculation does not change the output"},
    {.bit = SO_CMD_THEORY,
     .name = "theory",
     .run = so_cmd_theory,
     .group = SO_GROUP_MEASURE,
     .usage = "--alpha A [--gamma G] [--c C]\n"
              "[--json] [--svg FILE]\n"
              "--measure -m MODEL [-md DRAFT] [--spec A;B;...] [-n TOKENS] [-f PROMPTS.jsonl]",
     .summary = "compute or measure what speculation can gain"},
    {.bit = SO_CMD_BENCH,
     .name = "bench",
     .run = so_cmd_bench,
     .group = SO_GROUP_MEASURE,
     .usage = "WHAT -m MODEL [options]",
     .summary = "measure speed, speed-up and perplexity",
     .args = "spec\tplain and speculative decoding of --prompts, compared\n"
             "pair\tspeed-up with a draft model at given acceptance rates, which are simulated\n"
             "curve\ttime of a pass over n rows, and the roofline\n"
             "decode\ttokens per second, one token per pass\n"
             "prompt\ttokens per second of prefill\n"
             "ppl\tperplexity of the text of -f\n"
             "kernels\tmatrix products by weight type and number of rows (without -m)\n"
             "logits\tlogits after every token of -f, written to -o\n"
             "passes\tpasses that standard input asks for, one per line",
     .min_pos = 1,
     .max_pos = 1},
    {.bit = SO_CMD_TRACE,
     .name = "trace",
     .run = so_cmd_trace,
     .group = SO_GROUP_MEASURE,
     .usage = "FILE.jsonl... [--svg OUT.svg]",
     .summary = "summarise or draw files of `run --trace`: where the time went",
     .min_pos = 1,
     .max_pos = 16},
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
