#!/usr/bin/env python3
"""Writes the manual page from the program's own help, so that the two always agree.

usage: man.py build/sooth > man/sooth.1        (tests/cli/test_man.py checks that the committed page is current)
"""
import re
import subprocess
import sys

INTRO = ("sooth runs language models from GGUF files and Hugging Face folders. It speeds them up with speculative decoding: "
         "a cheap drafter proposes tokens, and the model verifies several of them in one pass. The logits of a position have the "
         "same bits whether it is computed alone or beside others, so verification never changes the text.")
EXIT_STATUS = [
    ("0", "Success."),
    ("1", "Failure: a file, a model, a prompt or a check. For `prove` and `demo`, also a difference between plain and "
          "speculative output."),
    ("2", "Wrong usage: an unknown option, a value out of range, or options that contradict each other."),
    ("130", "Interrupted by Ctrl-C. Output produced until then has been printed."),
]
EXAMPLES = [
    ("Download a small model and ask it something:",
     'sooth pull smollm2\nsooth run -m smollm2 "Why does the sea look blue?"'),
    ("Compare plain and speculative decoding side by side, without any download:", "sooth demo"),
    ("Show which tokens were proposed and accepted:",
     'sooth run -m story "Tell me a story about a cat." --view'),
    ("Answer a file of prompts, eight at a time:",
     "sooth run -m smollm2 --prompts questions.jsonl --parallel 8 --json"),
    ("Start a server with the OpenAI API and use it:",
     "sooth serve -m smollm2 --port 8080 &\n"
     "curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'"),
    ("Measure what speculation gains with your own model:", "sooth theory --measure -m model.gguf -md draft.gguf"),
]


def program(*args):
    return subprocess.run([sys.argv[1], *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def roff(text):
    """Escapes what roff would read as a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def item(head, text):
    return [".TP", "\\fB" + roff(head) + "\\fP", roff(text)]


def unwrap(lines):
    """(head, text) pairs of a block of rows: a head at column 2 or 6, its text beside it or on the lines below."""
    pairs = []
    for line in lines:
        if re.match(r"  ( {4})?\S", line):
            head, _, text = line.strip().partition("  ")
            pairs.append([head, text.strip()])
        elif line.strip():
            pairs[-1][1] = (pairs[-1][1] + " " + line.strip()).strip()
    return pairs


def command(name):
    blocks = program("help", name).rstrip("\n").split("\n\n")
    out = [f".SS {name}"]
    for usage in re.sub(r"\n {11}", " ", blocks[0]).replace("Usage: ", "").split("\n"):
        out += [".br", "\\fB" + roff(usage.strip()) + "\\fP"]
    out += [".PP", roff(" ".join(blocks[1].split()))]
    for block in blocks[2:]:
        title, *lines = block.split("\n")
        if not title.startswith("General"):
            for head, text in unwrap(lines):
                out += item(head, text)
    return out


def topic(name):
    """A help topic: its paragraphs, and {heading: rows}."""
    paragraphs, blocks = [], {}
    for block in program("help", name).rstrip("\n").split("\n\n"):
        title, *lines = block.split("\n")
        if title.endswith(":"):
            blocks[title[:-1]] = unwrap(lines)
        else:
            paragraphs += [".PP", roff(" ".join(block.split()))]
    return paragraphs, blocks


def section(title, rows):
    out = [f".SH {title}"]
    for head, text in rows:
        out += item(head, text)
    return out


def main():
    names = re.findall(r"^  ([a-z-]+) ", program("help").split("Help topics:")[0], re.M)
    out = [".\\\" Written by tools/man.py from the program's help; do not edit.",
           '.TH SOOTH 1 "" "sooth" "User Commands"', ".SH NAME",
           "sooth \\- run language models faster without changing their output", ".SH SYNOPSIS",
           "\\fBsooth\\fP \\fICOMMAND\\fP [options]", ".br", "\\fBsooth help\\fP [\\fICOMMAND\\fP|\\fITOPIC\\fP]",
           ".SH DESCRIPTION", roff(INTRO), ".SH COMMANDS"]
    for name in names:
        out += command(name)
    out += section("GENERAL OPTIONS", unwrap(program("help", "run").split("General:\n")[1].split("\n")))
    paragraphs, blocks = topic("spec")
    out += [".SH DRAFTERS"] + paragraphs
    for title, rows in blocks.items():
        out += [".SS " + roff(title)]
        for head, text in rows:
            out += item(head, text)
    paragraphs, blocks = topic("environment")
    out += section("EXIT STATUS", EXIT_STATUS)
    out += [".SH ENVIRONMENT"] + paragraphs + section("", blocks["Variables"])[1:]
    out += section("FILES", blocks["Files"])
    out += [".SH EXAMPLES"]
    for text, lines in EXAMPLES:
        out += [".PP", roff(text), ".PP", ".RS 4", ".nf", roff(lines), ".fi", ".RE"]
    print("\n".join(out))


main()
