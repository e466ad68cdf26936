"""Prompts as token ids: the pieces of the target's chat format, and a small byte-level BPE encoder.

Prompts are built from ids (turns and passages that the target wrote itself). Text is tokenised only for instructions and
--prompts files. The pre-tokenizer is GPT-2's with single digits. If the model's own differs, some prompts are split in an
unusual way; this is harmless, because the draft learns the target's answers to exactly these ids. Needs jinja2 for the
chat template.
"""
import functools
import json
import re

WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

SUMMARIES = ("Summarize the following text in a few sentences.\n\n", "Write a short summary of this article:\n\n",
             "Read the text below and list its main points.\n\n", "What is this text about? Answer in one paragraph.\n\n",
             "Give the text below a title and a two-sentence summary.\n\n", "Rewrite the following text in simpler words.\n\n")
AFTER = ("\n\nSummarize the text above.", "\n\nTL;DR:", "\n\nExplain the text above to a child.", "\n\nWhat are the key points of this text?")
QUESTIONS = (("Answer the question using the passages below.\n\nPassages:\n", "\n\nQuestion: "), ("Context:\n", "\n\nBased on the context above: "),
             ("Here are some documents.\n\n", "\n\nUse them where they help. "))

# First words for user turns that the model writes. Without them the turns are too similar ("I'm planning …", "Can you
# …"), and a draft trained on the answers is poor at everything else.
OPENERS = ("Write", "Write a short", "Write a story about", "Write a poem about", "Write an email", "Write a function that", "Compose",
           "Describe", "Describe a", "Explain", "Explain why", "Explain how", "What is", "What are the", "What does", "What was the", "Who",
           "Who was", "When did", "Where", "Where is the", "Which", "Why", "Why do", "How", "How many", "How does", "How can I", "Is it",
           "Does", "Can", "If", "Imagine you are", "Suppose", "Pretend to be", "List", "Name", "Give me", "Compare", "Translate", "Rewrite",
           "Edit the following", "Correct the", "Classify", "Find the", "Solve", "Calculate", "Tell me about", "Suggest", "Design", "Create",
           "Develop", "Summarize", "Identify", "Read the following", "Discuss", "Argue", "Act as", "In", "The", "A", "My", "Let's")


def byte_letters():
    """{byte: its character in a byte-level vocabulary}"""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out, extra = {b: chr(b) for b in plain}, 256
    for b in range(256):
        if b not in out:
            out[b] = chr(extra)
            extra += 1
    return out


class Encoder:
    def __init__(self, reader, tokens, types):
        if reader.get_field("tokenizer.ggml.model").contents() != "gpt2":
            raise SystemExit("only byte-level BPE tokenizers are supported: give prompts as {\"ids\": […]}")
        self.id = {t.decode("utf-8", "replace"): i for i, t in enumerate(tokens)}
        self.rank = {tuple(m.split(" ", 1)): i for i, m in enumerate(reader.get_field("tokenizer.ggml.merges").contents())}
        self.letters = byte_letters()
        special = sorted((tokens[i].decode() for i, t in enumerate(types) if t == 3), key=len, reverse=True)
        self.special = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None

    @functools.lru_cache(maxsize=65536)
    def word(self, text):
        parts = [self.letters[b] for b in text.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: self.rank.get((parts[i], parts[i + 1]), 1 << 60))
            if (parts[best], parts[best + 1]) not in self.rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        return [self.id[p] for p in parts if p in self.id]

    def __call__(self, text, special=False):
        out = []
        for i, piece in enumerate(self.special.split(text) if special and self.special else [text]):
            out += [self.id[piece]] if i % 2 else [t for w in WORDS.findall(piece) for t in self.word(w)]
        return out


class Chat:
    """The chat format as ids. First prompt: before + user text + after. Next: prompt + answer + between + user text + after."""

    def __init__(self, reader, encode):
        field = reader.get_field("tokenizer.chat_template")
        if field is None:
            self.before = self.after = self.between = []
            return
        import jinja2.sandbox
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = env.from_string(field.contents())
        render = lambda *turns: template.render(add_generation_prompt=True, messages=[
            {"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)])
        before, after = render("\1").split("\1")
        between = render("\1", "\2", "\3").split("\2")[1].split("\3")[0]
        self.before, self.after, self.between = (encode(t, special=True) for t in (before, after, between))


def read_prompts(path, encode, chat, max_len):
    """Prompts of a JSON-lines file: {"ids": […]} is used unchanged, {"prompt": …} or {"turns": [first, …]} becomes a user turn."""
    out = []
    for n, line in enumerate(open(path, encoding="utf-8"), 1):
        try:
            o = json.loads(line)
            ids = o["ids"] if "ids" in o else chat.before + encode(o["prompt"] if "prompt" in o else o["turns"][0]) + chat.after
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise SystemExit(f"{path}:{n}: {e}: expected an object with ids, prompt or turns")
        if len(ids) <= max_len:
            out.append(ids)
    return out
