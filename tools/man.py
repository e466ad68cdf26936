#!/usr/bin/env python3
"""Generates the manual page from the command's own help texts, so that the two always agree.

usage: man.py build/sooth > man/sooth.1        (tests/cli/test_man.py checks that the committed page is current)
"""
import re
import subprocess
import sys


def help_text(*args):
    return subprocess.run([sys.argv[1], *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def roff(text):
    """Escapes characters that roff would interpret."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def unwrap(lines):
    """Splits an option block into (head, text) pairs: a head starts at column 2 or 6, its text at column 31."""
    pairs = []
    for line in lines:
        if re.match(r"  ( {4})?-", line):
            head, _, text = line.strip().partition("  ")
            pairs.append([head, text.strip()])
        elif line.strip():
            pairs[-1][1] = (pairs[-1][1] + " " + line.strip()).strip()
    return pairs


def command(name):
    blocks = help_text("help", name).rstrip("\n").split("\n\n")
    out = [f".SS {name}"]
    for line in blocks[0].replace("Usage: ", "").split("\n"):
        out += [".br", "\\fB" + roff(line.strip()) + "\\fP"]
    out += [".PP", roff(blocks[1].strip())]
    for block in blocks[2:]:
        title, *lines = block.split("\n")
        if title.startswith("General"):
            continue
        for head, text in unwrap(lines):
            out += [".TP", "\\fB" + roff(head) + "\\fP", roff(text)]
    return out


def main():
    names = re.findall(r"^  ([a-z]+) ", help_text("--help").split("Commands:")[1], re.M)
    general = help_text("help", "run").split("General:\n")[1].rstrip("\n").split("\n")
    out = [".\\\" Written by tools/man.py from the command's own help; do not edit.",
           '.TH SOOTH 1 "" "sooth" "User Commands"', ".SH NAME",
           "sooth \\- run language models faster without changing what they say", ".SH SYNOPSIS",
           "\\fBsooth\\fP \\fICOMMAND\\fP [options]", ".SH DESCRIPTION",
           roff("sooth runs language models from GGUF files and Hugging Face folders. The logits of a position are "
                "bit-identical whatever else is computed in the same pass, so verifying guessed tokens never changes the text."),
           ".SH COMMANDS"]
    for name in names:
        out += command(name)
    out += [".SH GENERAL OPTIONS"]
    for head, text in unwrap(general):
        out += [".TP", "\\fB" + roff(head) + "\\fP", roff(text)]
    out += [".SH EXIT STATUS", "0 success, 1 failure, 2 wrong usage, 128 + N ended by signal N.", ".SH FILES", ".TP",
            roff("$XDG_CACHE_HOME/sooth/models (~/.cache/sooth/models)"), "models fetched by \\fBsooth pull\\fP", ".TP",
            roff("$XDG_STATE_HOME/sooth/chat_history (~/.local/state/sooth/chat_history)"),
            "lines typed in \\fBsooth chat\\fP, for its user alone",
            ".SH EXAMPLES", ".nf", roff('sooth pull smollm2\nsooth run -m smollm2 -p "Why does the sea look blue?"\n'
                                        "sooth run -m smollm2 --prompts questions.jsonl --parallel 8 --json\n"
                                        "sooth inspect smollm2"), ".fi"]
    print("\n".join(out))


main()
