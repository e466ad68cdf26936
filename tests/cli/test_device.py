#!/usr/bin/env python3
"""--device where the GPU cannot be used: one line that names the device, the cause and a remedy; `auto` takes the CPU.
The program is copied next to libraries that fail in each way (fake_cuda.c). Prints TAP."""
import os
import shutil
import subprocess
import sys
import tempfile

SOOTH = os.environ.get("SOOTH_BIN", "build/sooth")
MODEL = "models/story/story-q8_0.gguf"
T5 = "models/ende/ende-draft-q4_0.gguf"
CC = os.environ.get("CC", "cc").split()
results = []


def check(ok, name, why=""):
    results.append(ok)
    print(f"{'ok' if ok else 'not ok'} {len(results)} - {name}" + ("" if ok else ": " + why.replace("\n", " | ")))


def run(folder, *args, fault=None):
    env = {k: v for k, v in os.environ.items() if k not in ("FAKE_GPU", "LD_LIBRARY_PATH")}
    if fault:
        env["FAKE_GPU"] = fault
    return subprocess.run([os.path.join(folder, "sooth"), *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120)


def need(folder, name, device, *texts, fault=None):
    """Fails with status 1 and one line that has all the texts."""
    r = run(folder, "run", "-m", MODEL, "-p", "x", "-n", "2", "--device", device, fault=fault)
    ok = r.returncode == 1 and r.stderr.count("\n") == 1 and all(t in r.stderr for t in texts) and not r.stdout
    check(ok, name, f"status {r.returncode}: {r.stderr}")


def main():
    if shutil.which(CC[0]) is None or not os.path.exists(MODEL) or not os.path.exists(T5):
        print("1..0 # SKIP needs a C compiler, models/story and models/ende")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "libsooth_cuda.so")
        shutil.copy(SOOTH, folder)
        need(folder, "no library", "cuda", "cuda:0: ", "libsooth_cuda.so", "make cuda", "--device cpu")
        def draft(name, status, text, *args):
            r = run(folder, "run", "-m", MODEL, "-md", MODEL, "-p", "x", "-n", "2", *args)
            check(r.returncode == status and text in r.stderr and r.stderr.count("\n") <= 2, name, f"status {r.returncode}: {r.stderr}")

        draft("a draft on a GPU without CUDA", 1, "libsooth_cuda.so", "--spec", "async(model,device=cuda:0)")
        draft("two devices for the draft", 2, "name one device", "--spec", "async(model,device=cuda)", "--draft-device", "cpu")
        draft("cores and a GPU for the draft", 2, "name one of them", "--spec", "async(model,device=cuda)", "--draft-cores", "1")
        draft("an unknown device", 2, "must be cpu, cuda or cuda:N", "--spec", "async(model,device=tpu)")
        if os.cpu_count() > 1:
            draft("a draft on the CPU", 0, "", "--spec", "async(model,device=cpu)")
        open(library, "w").write("no library")
        need(folder, "a file that is no library", "cuda", "could not be loaded", library, "make cuda")
        os.remove(library)
        empty = os.path.join(folder, "empty.c")
        open(empty, "w").write("int nothing;\n")
        subprocess.run([*CC, "-shared", "-fPIC", empty, "-o", library], check=True)
        need(folder, "a library of another version", "cuda", "another version", "make cuda")
        os.remove(library)
        fake = [*CC, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Isrc", "tests/cli/fake_cuda.c", "src/base/err.c",
                "src/base/str.c", "src/base/mem.c", "src/format/dtype.c", "-o", library]
        subprocess.run([*fake, "-DFAKE_ABI=7"], check=True)
        need(folder, "a library built from other declarations", "cuda", "another version", "make cuda")
        os.remove(library)
        subprocess.run(fake, check=True)
        old = "the driver is too old: it has CUDA 11.4"
        need(folder, "the library's own cause", "cuda:0", "cuda:0: " + old, "--device cpu", fault=old)
        need(folder, "a number that no GPU has", "cuda:7", "cuda:7: GPU 7 does not exist; this machine has 1")
        for device in ("cuda:", "cuda:x", "cuda:-1", "cuda:0x", "cuda:99999999999", "gpu"):
            need(folder, f"--device {device}", device, f"'{device}'", "cuda:N", "from 0")
        need(folder, "a model larger than the card", "cuda", "out of memory", "a file of 18 MiB does not fit this device",
             "--quantize", "--device cpu")
        r = run(folder, "run", "-m", MODEL, "-p", "x", "-n", "2", "--device", "auto", fault=old)
        check(r.returncode == 0 and r.stderr.count("fail") == 0 and r.stdout, "auto takes the CPU if there is no GPU", r.stderr)
        r = run(folder, "run", "-m", MODEL, "-p", "x", "-n", "2", "--device", "auto", "-v")
        check(r.returncode == 0 and "the CPU is used" in r.stderr, "auto takes the CPU if the model does not fit", r.stderr)
        for device, status, text in (("auto", 0, "the CPU is used"), ("cuda", 1, "use --device cpu")):
            r = run(folder, "run", "-m", T5, "-p", "x", "-n", "2", "--device", device, "-v")
            check(r.returncode == status and text in r.stderr, f"a model that the GPU cannot compute, {device}", r.stderr)
        for level, n in ((["-v", "-v"], 1), (["-v"], 0)):
            r = run(folder, "run", "-m", MODEL, "-p", "x", "-n", "2", "--device", "auto", *level)
            check(r.stderr.count("cuda:0: this GPU has no persistent kernel") == n, f"what is slower on this GPU, {level}", r.stderr)
        r = run(folder, "inspect", "-m", MODEL, "--device", "cuda")
        check(r.returncode == 0 and "--device cuda: 10 MiB free of 64 MiB; target and draft do not fit" in r.stdout,
              "inspect prints the budget", r.stdout + r.stderr)
        r = run(folder, "inspect", "-m", MODEL, "--device", "cuda:3")
        check(r.returncode == 1 and "GPU 3 does not exist" in r.stderr, "inspect of a GPU that does not exist", r.stderr)
    print(f"1..{len(results)}")
    return 0 if all(results) else 1


sys.exit(main())
