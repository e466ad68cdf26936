#!/usr/bin/env python3
"""Checks the style rules: layers, function lengths, banned calls, formatting, scripts that can be run.

Prints one line per breach and exits with 1 if there is any. Rules that are not checked here are advice.
"""
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A file may include headers of its own folder and of the folders before it in this list.
LAYERS = ["base", "format", "jinja", "token", "backend", "kv", "model", "sample", "verify", "draft", "plan", "engine", "server",
          "cli"]
MAX_FUNCTION = 60  # lines; kernels and flat switches may be longer
LONG_OK = re.compile(r"src/backend/(cpu|cuda)/|src/cli/options\.c")
MAX_FILE = 900
BANNED = {
    "strcpy": "memcpy or so_buf", "strcat": "so_buf", "sprintf": "snprintf or so_buf", "vsprintf": "vsnprintf",
    "atoi": "strtol with checks", "atol": "strtol with checks", "atof": "strtod with checks", "gets": "fgets",
    "strtok": "so_str", "alloca": "so_alloc", "rand": "so_rng", "srand": "so_rng",
}
ONLY_CLI = {"printf": "stdout belongs to cli/", "puts": "stdout belongs to cli/", "putchar": "stdout belongs to cli/",
            "exit": "only cli/ ends the program"}
GETENV_HOME = "src/base/env.c"
CPU_BACKEND_USERS = ("src/backend/", "tests/backend/")
# draft/ and plan/ exchange values, not callbacks: their headers may declare only these function pointers. For a member of
# a struct the name is that of the struct.
CALLBACK_FREE = re.compile(r"src/(draft|plan)/[^/]+\.h$")
CALLBACKS_OK = {
    "so_drafter_vt",   # what a drafter implements
    "so_draft_draws",  # random numbers of tests
    "so_draft_fn", "so_draft_tree_fn",  # the user's own drafter
    "so_draft_make",   # builds a drafter from a specification
    "visit",           # walks a table inside draft/
}

breaches = []


def breach(path, line, text):
    breaches.append(f"{path}:{line}: {text}")


def strip(code):
    """The code with comments and string contents blanked, line breaks kept."""
    def blank(m):
        s = m.group(0)
        keep = s[0] if s[0] in "\"'" else " "
        return keep + re.sub(r"[^\n]", " ", s[1:-1]) + (s[-1] if keep != " " else " ")
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, code, flags=re.S)


def check_includes(path, code):
    if not path.startswith(CPU_BACKEND_USERS):
        for i, line in enumerate(code.split("\n"), 1):
            if re.match(r'\s*#\s*include\s+"backend/cpu/', line):
                breach(path, i, "backend/cpu/ is private to backend/")
    m = re.match(r"src/([a-z]+)/", path)
    if not m or m.group(1) not in LAYERS:
        return
    mine = LAYERS.index(m.group(1))
    for i, line in enumerate(code.split("\n"), 1):
        q = re.match(r'\s*#\s*include\s+"([a-z]+)/', line)
        if q and q.group(1) in LAYERS and LAYERS.index(q.group(1)) > mine:
            breach(path, i, f"{m.group(1)}/ includes {q.group(1)}/, a higher layer")
        if re.match(r"\s*#\s*if.*\bCUDA\b", line) and m.group(1) != "backend":
            breach(path, i, "CUDA is known only to backend/")


def struct_around(plain, at):
    """The name of the struct that encloses offset `at`, or None."""
    depth = 0
    for m in reversed(list(re.finditer(r"\bstruct\s+(\w+)\s*\{|[{}]", plain[:at]))):
        if m.group(0) == "}":
            depth += 1
        elif depth > 0:
            depth -= 1
        elif m.group(1):
            return m.group(1)
    return None


def check_callbacks(path, plain):
    """Finds function pointers (members, types, parameters) and function types."""
    if not CALLBACK_FREE.match(path):
        return
    for m in re.finditer(r"\(\s*\*\s*(\w+)\s*(?:\[\w*\])?\)\s*\(|\btypedef\s[^;{}()]*?(\w+)\s*\((?!\s*\*)", plain):
        name = struct_around(plain, m.start()) or m.group(1) or m.group(2)
        if name not in CALLBACKS_OK:
            breach(path, plain.count("\n", 0, m.end()) + 1, f"{name}: a callback; pass values instead")


def check_functions(path, plain):
    start = None
    lines = plain.split("\n")
    for i, line in enumerate(lines):
        if re.match(r"^[A-Za-z_].*\)\s*\{\s*$", line) or (re.match(r"^[ \t].*\)\s*\{\s*$", line) and i and re.match(
                r"^[A-Za-z_][^;{}]*[,(]\s*$", lines[i - 1])):
            start = i
        elif line.rstrip() == "}" and start is not None:
            n = i - start + 1
            if n > MAX_FUNCTION and not LONG_OK.match(path):
                breach(path, start + 1, f"function of {n} lines (at most {MAX_FUNCTION})")
            start = None


def check_calls(path, plain):
    for i, line in enumerate(plain.split("\n"), 1):
        for m in re.finditer(r"(?<![\w.>])([a-z_]+)\s*\(", line):
            name = m.group(1)
            if name in BANNED:
                breach(path, i, f"{name}: use {BANNED[name]}")
            if name in ONLY_CLI and path.startswith("src/") and not path.startswith("src/cli/"):
                breach(path, i, f"{name}: {ONLY_CLI[name]}")
            if name == "getenv" and path.startswith("src/") and path != GETENV_HOME:
                breach(path, i, f"getenv: only {GETENV_HOME} reads the environment")


def check_comment(path, code):
    if path.startswith("src/") and not code.startswith("/*"):
        breach(path, 1, "the file does not open with a comment")


def check_format(files):
    tool = shutil.which("clang-format")
    if not tool:
        print("lint: clang-format is not installed, formatting unchecked")
        return
    p = subprocess.run([tool, "--dry-run", *files], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for path in sorted(set(re.findall(r"^(\S+?):\d+:\d+: warning", p.stderr, re.M))):
        breach(path, 1, "not formatted: run clang-format -i")


def check_scripts():
    """Documents name scripts by their path, so each one must be executable."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "bench", "tests", "tools", "packaging", "*.sh"],
                            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    for path in listed:
        full = os.path.join(ROOT, path)
        if os.path.isfile(full) and not os.access(full, os.X_OK) and open(full, "rb").read(2) == b"#!":
            breach(path, 1, "begins with #! but is not executable: chmod +x")


def main():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "src", "include", "tests", "examples"],
                            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    files = [f for f in listed if f.endswith((".c", ".h", ".cu", ".cuh"))]
    for path in files:
        code = open(os.path.join(ROOT, path), encoding="utf-8").read()
        plain = strip(code)
        check_includes(path, code)
        check_calls(path, plain)
        check_callbacks(path, plain)
        if path.startswith("src/"):
            check_functions(path, plain)
            check_comment(path, code)
            if code.count("\n") > MAX_FILE:
                breach(path, 1, f"{code.count(chr(10))} lines (at most {MAX_FILE})")
    check_format(files)
    check_scripts()
    for b in breaches:
        print(b)
    print(f"lint: {len(files)} files, {len(breaches)} breaches")
    sys.exit(1 if breaches else 0)


main()
