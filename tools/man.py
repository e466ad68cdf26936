#!/usr/bin/env python3
"""Writes the manual page from what the command says of itself, so that the two cannot drift apart.

usage: man.py build/sooth > man/sooth.1        (tests/cli/test_man.py checks that the committed page is current)
"""
import re
import subprocess
import sys


def say(*args):
    return subprocess.run([sys.argv[1], *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def roff(text):
    """Escapes what roff would read as a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def unwrap(lines):
    """(head, text) pairs of an option block: a head at column 2 or 6, its text from column 31 on."""
    pairs = []
    for line in lines:
        if re.match(r"  ( {4})?-", line):
            head, _, text = line.strip().partition("  ")
            pairs.append([head, text.strip()])
        elif line.strip():
            pairs[-1][1] = (pairs[-1][1] + " " + line.strip()).strip()
    return pairs


def command(name):
    blocks = say("help", name).rstrip("\n").split("\n\n")
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
    names = re.findall(r"^  ([a-z]+) ", say("--help").split("Commands:")[1], re.M)
    general = say("help", "run").split("General:\n")[1].rstrip("\n").split("\n")
    out = [".\\\" Written by tools/man.py from the command's own help; do not edit.",
           '.TH SOOTH 1 "" "sooth" "User Commands"', ".SH NAME",
           "sooth \\- run language models faster without changing what they say", ".SH SYNOPSIS",
           "\\fBsooth\\fP \\fICOMMAND\\fP [options]", ".SH DESCRIPTION",
           roff("sooth runs language models from GGUF files and Hugging Face folders. The logits of a position are the same "
                "bits whatever is computed beside them, so checking guessed tokens never changes the text."),
           ".SH COMMANDS"]
    for name in names:
        out += command(name)
    out += [".SH GENERAL OPTIONS"]
    for head, text in unwrap(general):
        out += [".TP", "\\fB" + roff(head) + "\\fP", roff(text)]
    out += [".SH EXIT STATUS", "0 done, 1 failed, 2 used wrongly.", ".SH FILES", ".TP",
            roff("$XDG_CACHE_HOME/sooth/models (~/.cache/sooth/models)"), "models fetched by \\fBsooth pull\\fP", ".TP",
            roff("$XDG_STATE_HOME/sooth/chat_history (~/.local/state/sooth/chat_history)"),
            "lines typed in \\fBsooth chat\\fP, for its user alone",
            ".SH EXAMPLES", ".nf", roff('sooth pull smollm2\nsooth run -m smollm2 -p "Why does the sea look blue?"\n'
                                        "sooth run -m smollm2 --prompts questions.jsonl --parallel 8 --json\n"
                                        "sooth inspect smollm2"), ".fi"]
    print("\n".join(out))


main()
