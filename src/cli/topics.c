/* The topics of `sooth help`: what no single option or command can explain. tools/man.py makes
 * sections of the manual page from them. ASCII only.
 *
 * `spec` lists every drafter and option of the parser in src/draft/spec.c, and `environment` every
 * variable of src/base/env.c: tests/cli/test_help.c and tests/cli/test_man.py compare them. */
#include <string.h>

#include "base/mem.h"
#include "cli/help.h"

static const so_topic topics[] = {
    {"spec", "drafters and their options, for --spec",
     "--spec names the drafters, which propose draft tokens. The model verifies every draft token. "
     "With --verify match (the default) drafters change only the speed; with reject they may "
     "change "
     "the text above temperature 0, but not its distribution; lenient and typical are lossy.\n"
     "A FILE whose name contains a space or one of , ( ) + = must be in double quotes.",
     "Combining drafters\n"
     "A,B\task the drafters in this order; use the first whose draft tokens are expected to pay\n"
     "A+B\tmerge the draft tokens of both drafters into one tree\n"
     "model(A)\tlet drafter A propose draft tokens to the draft model\n"
     "Drafters\n"
     "none\tno drafter: plain decoding\n"
     "auto\tlookup, then ngram, then the draft model, if there is one\n"
     "model\tthe draft model of -md, or the one registered for the model\n"
     "model(FILE)\tthe draft model in this file\n"
     "lookup\tthe text that followed the last tokens when they occurred before\n"
     "ngram\tthe most frequent continuation of the last tokens in this request\n"
     "corpus\tas lookup, in the texts of finished requests\n"
     "unigram(FILE)\tthe most frequent token of a table that `sooth count` wrote\n"
     "bigram(FILE)\tthe most frequent successor of the last token in such a table\n"
     "predict\tthe text of --prediction\n"
     "random\trandom tokens: the worst case, for tests\n"
     "oracle(P)\tthe right token with probability P, 0 to 1, for measurements; needs --prediction "
     "except in bench and prove\n"
     "oracle(P,model)\tthe same, and the draft model is run for its time alone: simulated "
     "acceptance; in async(oracle(P,hit=H,model),fan=N) the hit rate is simulated, too\n"
     "medusa\tMedusa heads: the ones registered for the model, or medusa(FILE)\n"
     "blockwise\theads of blockwise parallel decoding: registered, or blockwise(FILE)\n"
     "lookahead\tlook-ahead embeddings: registered, or lookahead(FILE)\n"
     "async(A)\tdrafter A drafts for the likely ends of a round while the model verifies it, on "
     "cores of its own (--draft-cores)\n"
     "Options of drafters\n"
     "lookup(min=N)\tshortest repetition that is continued: 1 to 64 tokens (default: 2)\n"
     "ngram(order=N)\tlongest n-gram: 2 to 4 tokens (default: 4)\n"
     "ngram(window=N)\tnumber of last tokens that are counted: 1 to 4194304 (default: 8192)\n"
     "ngram(draw)\tsample from the counts instead of taking the most frequent token\n"
     "model(k=N)\tguesses after every token, a tree: 1 to 64; the N most likely tokens, or N "
     "samples with --verify reject\n"
     "model(k=N,distinct)\tthe same, sampling without replacement\n"
     "model(best)\ta tree of the most likely paths\n"
     "model(tree=FILE)\ta tree of the shape in FILE, which `sooth calibrate` writes\n"
     "model(k=N,nodes=N)\tnode budget of a tree: 1 to 256 (default: --draft-nodes)\n"
     "medusa(k=N)\ta tree of the N best tokens of every head: 1 to 64\n"
     "medusa(best)\ta tree of the most likely paths by the heads' own probabilities\n"
     "medusa(nodes=N)\ta tree grown from the accuracies in the heads' file: 1 to 256\n"
     "medusa(tree=FILE)\ta tree of the shape in FILE, which `sooth calibrate --heads` writes\n"
     "lookahead(k=N)\tthe same trees over the look-ahead rows: 1 to 64\n"
     "lookahead(best)\tthe most likely paths by the rows' own probabilities\n"
     "lookahead(nodes=N)\ta tree grown from the accuracies in the file: 1 to 256\n"
     "lookahead(ends=N)\tthe rows are part of the pass that verifies, on the N likeliest ends of "
     "the "
     "tree, instead of a pass of their own: 1 to 8\n"
     "corpus(min=N)\tshortest repetition that is continued: 1 to 64 tokens (default: 3)\n"
     "corpus(mb=N)\tmemory for finished texts: 1 to 65536 MB (default: 64)\n"
     "unigram(FILE,draw)\tsample from the table instead of taking the most frequent token\n"
     "bigram(FILE,draw)\tsample from the table instead of taking the most frequent token\n"
     "async(A,fan=N)\tnumber of ends that are drafted for: 1 to 64 (default: chosen in each round "
     "by probability and time)\n"
     "async(A,device=D)\tdevice of the draft model: cpu, cuda or cuda:N (as --draft-device)\n"
     "async(A,wait=N)\tguesses that the model waits for, if they are not ready: 0 to 16 (default: "
     "0)\n"
     "async(model,worker=ADDRESS)\tthe same by a process elsewhere, `sooth draft-worker`; ADDRESS "
     "is "
     "tcp://HOST:PORT or ipc://PATH\n"
     "async(A,fallback=LIST)\twhat drafts if nothing is ready: drafters, sync (A, while the model "
     "waits) or none (default: sync)\n"
     "Examples\n"
     "lookup,ngram(order=3)\tprompt lookup; n-grams where it finds nothing useful\n"
     "model+lookup(min=4)\tdraft model and prompt lookup, merged\n"
     "model(ngram)\ta draft model that n-grams draft for\n"
     "model(best,nodes=16)\tthe 16 most likely continuations of the draft model, as a tree\n"
     "async(model,fallback=lookup,sync)\tthe draft model drafts while the model verifies; if the "
     "round ends otherwise, prompt lookup, or else a draft that the model waits for"},
    {"environment", "environment variables and files", "An empty variable counts as unset.",
     "Variables\n"
     "NO_COLOR\tif set, output has no colour\n"
     "TERM\tif unset or dumb, output has no control sequences: no colour and no progress bar\n"
     "SOOTH_MODELS\ta folder of NAME.gguf files that -m NAME looks in first\n"
     "SOOTH_API_KEY\tthe key that `sooth serve` requires if --api-key is not given\n"
     "SOOTH_PYTHON\tthe Python that `sooth pull` runs pip with (default: python3)\n"
     "SOOTH_NO_PIN\tif set, threads are not bound to cores\n"
     "XDG_CACHE_HOME\tfolder for downloads and measured costs (default: ~/.cache)\n"
     "XDG_STATE_HOME\tfolder for the history of `sooth chat` (default: ~/.local/state)\n"
     "XDG_DATA_HOME\tfolder for draft models of your own (default: ~/.local/share)\n"
     "HOME\tthe home folder, ~ in these defaults\n"
     "NOTIFY_SOCKET\tthe socket where `sooth serve` and `sooth draft-worker` report to systemd "
     "that they are "
     "ready\n"
     "Files\n"
     "$XDG_CACHE_HOME/sooth/models\tmodels that `sooth pull` downloaded, as NAME.gguf\n"
     "$XDG_CACHE_HOME/sooth/costs\tmeasured times of passes and acceptance rates of drafters, kept "
     "between runs; may be deleted at any time\n"
     "$XDG_DATA_HOME/sooth/models\tdraft models that are found by the target they are registered "
     "for\n"
     "$XDG_STATE_HOME/sooth/chat_history\tlines typed in `sooth chat`, readable by their user "
     "only\n"
     "~/.editrc\tkey bindings of the line editor in `sooth chat`; see editrc(5)"},
};

const so_topic *so_topic_at(int i) { return i >= 0 && i < (int)SO_LEN(topics) ? &topics[i] : NULL; }

const so_topic *so_topic_find(const char *name) {
    for (size_t i = 0; i < SO_LEN(topics); i++)
        if (strcmp(topics[i].name, name) == 0)
            return &topics[i];
    return NULL;
}
