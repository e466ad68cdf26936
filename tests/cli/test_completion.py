#!/usr/bin/env python3
"""The completion scripts of `sooth completion`: they parse, and they offer what the tables have. Prints TAP.

bash runs the function itself; fish has `complete -C`; zsh is checked with `zsh -n` (by hand: press Tab). Shells that are not
installed are skipped.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", "build/sooth"))
n_tests = n_failed = 0


def check(ok, name, why=""):
    global n_tests, n_failed
    n_tests += 1
    n_failed += not ok
    print(f"{'ok' if ok else 'not ok'} {n_tests} - {name}" + ("" if ok else f": {why}"))


def skip(name):
    global n_tests
    n_tests += 1
    print(f"ok {n_tests} - {name} # SKIP not installed")


def sooth(*args):
    return subprocess.run([SOOTH, *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def options_of(command):
    """{"--name": value or None} as `sooth help COMMAND` states them."""
    return dict(re.findall(r"^ {2,6}(?:-\w+, )?(--[\w-]+)(?:\[=| )?([A-Z*1|][\w|.*=]*)?", sooth("help", command), re.M))


def complete_bash(folder, *words):
    quoted = " ".join("'" + w + "'" for w in words)
    script = (f"source script.bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _sooth; "
              'printf "%s\\n" "${COMPREPLY[@]}"')
    out = subprocess.run(["bash", "--norc", "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return sorted(filter(None, out.stdout.split("\n"))), out.stderr


def complete_fish(folder, line):
    out = subprocess.run(["fish", "-N", "-c", f"source script.fish; complete -C '{line}'"], cwd=folder, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    return sorted(row.split("\t")[0] for row in out.stdout.split("\n") if row), out.stderr


# words before the cursor, what must be offered, what must not
CASES = [
    (["ru"], ["run"], ["serve"]),
    ([""], ["run", "chat", "serve", "bench", "completion", "help"], ["spec"]),
    (["run", "--kv-t"], ["--kv-type"], ["--port"]),
    (["serve", "--po"], ["--port"], ["--prompt"]),
    (["run", "--kv-type", ""], ["f16", "f32", "q8_0"], ["a.gguf"]),
    (["run", "--kv-type", "q"], ["q8_0"], ["f16"]),
    (["run", "--verify", "l"], ["lenient="], ["match"]),
    (["run", "--cpu-level", "avx"], ["avx2", "avx512", "avxvnni"], ["auto"]),
    (["run", "--quantize", "Q4"], ["Q4_0", "Q4_K"], ["Q8_0"]),
    (["run", "--spec", ""], ["auto", "ngram", "lookup", "none", "medusa"], ["callback"]),
    (["run", "-m", ""], ["mine", "pulled", "a.gguf"], []),
    (["run", "-md", "pu"], ["pulled"], ["mine"]),
    (["run", "-f", "a"], ["a.gguf", "a file.txt"], ["script.bash"]),
    (["run", "--temp", ""], [], ["a.gguf", "run"]),
    (["bench", "c"], ["curve"], ["decode"]),
    (["pull", "s"], ["smollm2"], []),
    (["inspect", "m"], ["mine"], []),
    (["trace", "a"], ["a.gguf"], []),
    (["completion", ""], ["bash", "zsh", "fish"], []),
    (["help", "sp"], ["spec"], ["run"]),
]


def make_folder(folder):
    for shell in ("bash", "zsh", "fish"):
        with open(f"{folder}/script.{shell}", "w") as f:
            f.write(sooth("completion", shell))
    os.makedirs(f"{folder}/cache/sooth/models")
    os.mkdir(f"{folder}/models")
    os.mkdir(f"{folder}/bin")
    os.symlink(SOOTH, f"{folder}/bin/sooth")
    for name in ("a.gguf", "a file.txt", "models/mine.gguf", "cache/sooth/models/pulled.gguf"):
        open(f"{folder}/{name}", "w").close()
    os.environ.update(XDG_CACHE_HOME=f"{folder}/cache", SOOTH_MODELS=f"{folder}/models", HOME=folder,
                      PATH=f"{folder}/bin:" + os.environ["PATH"])


def check_bash(folder):
    for words, wanted, unwanted in CASES:
        got, err = complete_bash(folder, "sooth", *words)
        ok = set(wanted) <= set(got) and not set(unwanted) & set(got) and not err
        check(ok, "bash: " + " ".join(words), f"{got} {err}")
    got, err = complete_bash(folder, "sooth", "run", "--kv-type", "=", "q")  # as bash splits --kv-type=q
    check(got == ["q8_0"], "bash: --option=value", f"{got} {err}")
    for command in re.findall(r"^  ([a-z]+) ", sooth("help").split("Help topics:")[0], re.M):
        options = options_of(command)
        got, _ = complete_bash(folder, "sooth", command, "--")
        missing = set(options) - set(got)
        extra = {g.split("=")[0] for g in got} - set(options)
        check(not missing and not extra, f"bash: options of {command}", f"missing {missing}, extra {extra}")
        for name, value in options.items():
            if value.startswith("FILE"):
                got, _ = complete_bash(folder, "sooth", command, name, "a.g")
                if got != ["a.gguf"]:
                    check(False, f"bash: files for {command} {name}", got)


def check_fish(folder):
    for words, wanted, unwanted in CASES:
        got, err = complete_fish(folder, " ".join(["sooth"] + words))
        got = [g.replace("\\ ", " ") for g in got]
        ok = set(wanted) <= set(got) and not set(unwanted) & set(got) and not err
        check(ok, "fish: " + " ".join(words), f"{got} {err}")
    os.unlink(f"{folder}/bin/sooth")  # typed as a path, and not in PATH
    got, err = complete_fish(folder, "build/sooth run -m a")
    check("a.gguf" in got and not err, "fish: program not in PATH", f"{got} {err}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder)
        for shell in ("bash", "zsh", "fish"):
            if not shutil.which(shell):
                skip(f"{shell} -n")
                continue
            out = subprocess.run([shell, "-n", f"script.{shell}"], cwd=folder, stderr=subprocess.PIPE, text=True)
            check(out.returncode == 0 and not out.stderr, f"{shell} -n", out.stderr)
        check(sooth("completion", "models").split()[-2:] == ["mine", "pulled"], "names of models", sooth("completion", "models"))
        bad = subprocess.run([SOOTH, "completion", "tcsh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        check(bad.returncode == 2 and "must be bash, zsh, fish" in bad.stderr and not bad.stdout, "unknown shell", bad)
        if shutil.which("bash"):
            check_bash(folder)
        else:
            skip("bash")
        if shutil.which("fish"):
            check_fish(folder)
        else:
            skip("fish")
    print(f"1..{n_tests}")
    return 1 if n_failed else 0


sys.exit(main())
