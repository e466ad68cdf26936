#!/usr/bin/env python3
"""The training tools in tiny, on the CPU: a random target writes, a draft is trained on it, sooth runs the two; and a target is
made from nothing. Speaks TAP.

Needs torch, numpy, gguf and jinja2 for the Python that SOOTH_TRAIN_PYTHON names (default: this one); skipped where they are missing."""
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRAIN = os.path.join(ROOT, "tools", "train")
SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", "build/sooth"))

other = os.environ.pop("SOOTH_TRAIN_PYTHON", None)
if other:
    os.execv(other, [other, *sys.argv])
try:
    import gguf
    import jinja2  # noqa: F401
    import numpy as np
    import torch
except ImportError as e:
    print(f"1..1\nok 1 - training tools # SKIP {e.name} is missing\nskip: the training tools need torch, numpy, gguf, jinja2: {e}")
    sys.exit(0)

sys.path.insert(0, TRAIN)
import chat
import decode
import dialogues
import llama
import loss
import optim

torch.manual_seed(1)
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # idle threads that spin cost more than they give at these sizes
SPECIAL = ["<|end|>", "<|user|>", "<|bot|>"]
TEMPLATE = "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}{{ m.content }}<|end|>{% endfor %}<|bot|>"
SHAPE = llama.Shape(n_layers=2, d=64, n_heads=2, n_kv=1, head_dim=32, ff=96, n_vocab=320, n_ctx=512)


def write_target(path):
    """A random model that is sure of itself, with a byte-level vocabulary; uses the tool's own writer for the shape."""
    letters = chat.byte_letters()
    tokens = SPECIAL + [letters[b] for b in range(256)] + ["th", "the"] + [f"unused{i}" for i in range(SHAPE.n_vocab - 261)]
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny")
    for add, value in ((w.add_block_count, SHAPE.n_layers), (w.add_context_length, SHAPE.n_ctx), (w.add_embedding_length, SHAPE.d),
                       (w.add_feed_forward_length, SHAPE.ff), (w.add_head_count, SHAPE.n_heads), (w.add_head_count_kv, SHAPE.n_kv),
                       (w.add_rope_freq_base, SHAPE.rope_base), (w.add_rope_dimension_count, SHAPE.head_dim),
                       (w.add_layer_norm_rms_eps, SHAPE.eps), (w.add_tokenizer_model, "gpt2"), (w.add_tokenizer_pre, "smollm"),
                       (w.add_token_list, tokens), (w.add_token_types, [3] * 3 + [1] * (SHAPE.n_vocab - 3)),
                       (w.add_token_merges, ["t h", "th e"]), (w.add_eos_token_id, 0), (w.add_bos_token_id, 1),
                       (w.add_chat_template, TEMPLATE)):
        add(value)
    for name, dims in SHAPE.tensors().items():
        x = torch.ones(dims) if len(dims) == 1 else torch.randn(dims) * dims[1] ** -0.5 * (1 if name.startswith("blk.") else 2)
        # channel 0 is the same for all tokens, and the end's row has more of it: texts end after a dozen tokens
        if name == "token_embd.weight":
            x[:, 0] = 2
            x[0] = 0
            x[0, 0] = 6
        elif "attn_output" in name or "ffn_down" in name:
            x[0] = 0
        w.add_tensor(name, x.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def run(*cmd, want=0):
    p = subprocess.run([str(c) for c in cmd], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert p.returncode == want, f"{cmd}: status {p.returncode}\n{p.stdout[-3000:]}"
    return p.stdout


def tool(name, *args, want=0):
    return run(sys.executable, os.path.join(TRAIN, name), *args, want=want)


def test_loss_gradient():
    """The hand-written gradient of KL + w·TV is autograd's, with and without a smaller vocabulary."""
    for kept in (None, torch.rand(50) > 0.3):
        said = None if kept is None else torch.nonzero(kept).flatten()
        h, e = torch.randn(7, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        th, te, w = torch.randn(7, 6), torch.randn(50, 6), torch.rand(7)
        value, stats = loss.Head.apply(h, e if said is None else e[said], th, loss.arrange(te, said), w, 0.7, 3)
        value.backward()
        got = h.grad.clone(), e.grad.clone()
        h.grad = e.grad = None
        z = h @ e.T if kept is None else (h @ e.T).masked_fill(~kept, -1e30)
        lp, lq = (th @ te.T).log_softmax(-1), z.log_softmax(-1)
        kl = lp.exp() * (lp - lq)
        kl = (kl if kept is None else kl.masked_fill(~kept, 0)).sum(-1)
        want = ((kl + 0.7 * (1 - torch.minimum(lp.exp(), lq.exp()).sum(-1))) * w).sum() / w.sum()
        want.backward()
        assert abs((value - want).item()) < 1e-5
        assert stats[:, 2].tolist() == ((th @ te.T).argmax(-1) == z.argmax(-1)).float().tolist()
        for a, b in zip(got, (h.grad, e.grad)):
            assert (a - b).abs().max() < 1e-5, (a - b).abs().max()


def test_split_and_batches():
    """A prompt is on one side whatever file it is in; a batch's rows predict the responses, each once."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 300, rng.integers(2, 9)) for _ in range(400)]
    said = [(p, rng.integers(0, 300, rng.integers(1, 12)), 3, 0.7) for p in prompts + prompts[:100]]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "d.npz")
        dialogues.write(path, said, 320)
        d = dialogues.read(path, 320)
        held = d.held_out()
        assert 0 < held[:400].sum() < 40 and (held[:100] == held[400:]).all()
        assert [len(x[3]) for x in dialogues.Batches(d, np.array([7]), 1024)(np.array([7]))] == [len(said[7][1])]  # one short text alone
        b, seen = dialogues.Batches(d, np.arange(len(d)), 128), []
        for at, pos, borders, rows, states in b(np.arange(len(d))):
            assert borders[-1] == 128 and (np.diff(borders) <= b.max_len).all() and (np.diff(borders) >= 0).all()
            seen += list(zip(states, d.ids[at[rows] + 1]))
        want = np.concatenate([d.response(i) for i in range(len(d))])
        assert sorted(seen) == list(enumerate(want))
        broken = open(path, "rb").read()[:-200]
        open(path, "wb").write(broken)
        try:
            dialogues.read(path, 320)
        except SystemExit as e:
            assert path in str(e)
        else:
            raise AssertionError("a truncated file was read")


def test_texts_do_not_see_each_other(target):
    """States of a text are the same alone and between others."""
    shape, weights, _ = llama.load(target)
    m = llama.Model(shape, weights, "cpu", 64)
    a, b = torch.randint(0, 300, (11,)), torch.randint(0, 300, (7,))
    one = m.hidden(b, torch.arange(7), llama.Docs(torch.tensor([0, 7]), 7))
    both = m.hidden(torch.cat([a, b]), torch.cat([torch.arange(11), torch.arange(7)]), llama.Docs(torch.tensor([0, 11, 18, 18]), 11))
    assert (both[11:] - one).abs().max() < 1e-4


def test_rounding():
    """round_q4_0 is what the reference quantiser keeps."""
    x = torch.randn(40, 96)
    x[3] = 0
    q = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q4_0)
    want = gguf.quants.dequantize(q, gguf.GGMLQuantizationType.Q4_0)
    assert (optim.round_q4_0(x) - torch.from_numpy(want)).abs().max() == 0


def test_slots(target):
    """Decoding in refilled slots at temperature 0 is argmax after argmax of the plain pass."""
    shape, weights, _ = llama.load(target)
    m = llama.Model(shape, weights, "cpu", 64)
    jobs = [(torch.randint(1, 300, (n,)).tolist(), 0.0) for n in (3, 9, 1, 5, 7)]
    slots = decode.Slots(m, "cpu", 2, 40, 12, 0, -3.0, 1)
    got = dict(decode.generate(slots, jobs, 1e18, lambda text: None, every=4))
    assert sorted(got) == list(range(5))
    for j, (prompt, _) in enumerate(jobs):
        ids = list(prompt)
        while len(ids) - len(prompt) < 12 and (len(ids) == len(prompt) or ids[-1] != 0):
            n = len(ids)
            h = m.hidden(torch.tensor(ids), torch.arange(n), llama.Docs(torch.tensor([0, n]), n))
            ids.append(int((h[-1] @ m.output().T).argmax()))
        assert got[j].tolist() == ids[len(prompt):], j


def test_sooth_agrees(target, folder):
    """The same file, the same logits in sooth: names, rope and norms mean the same on both sides."""
    ids = torch.randint(3, 250, (24,))
    json.dump({"tokens": ids.tolist()}, open(f"{folder}/ids.json", "w"))
    run(SOOTH, "bench", "logits", "-m", target, "-f", f"{folder}/ids.json", "--out", f"{folder}/logits.bin", "--kv-type", "f32")
    got = np.fromfile(f"{folder}/logits.bin", np.float32).reshape(24, -1)
    shape, weights, _ = llama.load(target)
    m = llama.Model(shape, weights, "cpu", 64)
    want = m.hidden(ids, torch.arange(24), llama.Docs(torch.tensor([0, 24]), 24)) @ m.output().T
    assert np.abs(got - want.numpy()).max() < 0.02, np.abs(got - want.numpy()).max()


def sum_min(out):
    """Held-out Σmin of all kinds of text; one kind alone may be a dialogue or two here."""
    last = out.split("held out  ")[-1].split("\n")[0]
    values = [float(part.split()[0].rstrip(";")) for part in last.split("Σmin ")[1:]]
    return sum(values) / len(values)


def test_all(target, folder):
    """generate, draft, resume, boost, quantize; sooth says the same with the draft as without."""
    out = f"{folder}/run"
    tool("generate.py", "--target", target, "--out", f"{folder}/a.npz", "--min-p", 0.001, "--own", 500, "--slots", 32, "--short-ctx", 200, "--max-new", 24,
         "--max-prompt", 300, "--minutes", 0, "--temps", "0,1")
    tool("generate.py", "--target", target, "--out", f"{folder}/b.npz", "--data", f"{folder}/a.npz", "--passages", 20, "--second", 20,
         "--slots", 32, "--short-ctx", 200, "--max-new", 24, "--max-prompt", 360, "--minutes", 8)
    common = ("--target", target, "--data", f"{folder}/a.npz", "--data", f"{folder}/b.npz", "--layers", 1, "--d", 64, "--heads", 2,
              "--kv-heads", 1, "--ff", 64, "--batch", 1024, "--minutes", 1, "--log", 0.5, "--device", "cpu", "--no-compile")
    first = tool("draft.py", *common, "--out", out, "--decay", 0, "--minutes", 0, "--max-steps", 2)
    assert "would never end" in tool("draft.py", *common, "--out", out, "--minutes", 0, want=2)
    second = tool("draft.py", *common, "--out", out, "--resume", "--qat", "--max-steps", 60)
    assert "resuming at step 2" in second
    assert sum_min(second) > sum_min(first) + 0.1, (first, second)
    third = tool("draft.py", *common, "--out", f"{folder}/more", "--from", f"{out}/draft.gguf", "--layers", 2, "--max-steps", 1)
    assert sum_min(third) > sum_min(second) - 0.05 and llama.load(f"{folder}/more/draft.gguf")[0].n_layers == 1, (second, third)
    fed = tool("draft.py", *common, "--out", f"{folder}/fed", "--from", f"{out}/draft.gguf", "--states", "--qat", "--max-steps", 60)
    without = sum_min(fed.replace("held out  ", "").replace("held out, no states  ", "held out  "))
    assert sum_min(fed) > without + 0.02 and llama.load(f"{folder}/fed/draft.gguf")[0].d_state == SHAPE.d, fed
    assert "has layers 0 to 0" in tool("draft.py", *common, "--out", f"{folder}/cut", "--from", f"{out}/draft.gguf", "--keep", "0,1", want=1)
    tool("draft.py", *common, "--out", f"{folder}/boost", "--boost", f"{out}/draft.gguf", "--max-steps", 3)
    small = tool("draft.py", *common, "--out", f"{folder}/small", "--vocab", 100, "--max-steps", 3)
    assert "held out" in small
    mask = gguf.GGUFReader(f"{folder}/small/draft.gguf").get_field(llama.MASK).contents()
    assert len(mask) == 40 and sum(bin(b).count("1") for b in mask) == 100
    tool("draft.py", *common, "--out", f"{folder}/boost", "--boost", f"{folder}/small/draft.gguf", "--max-steps", 1)
    tool("draft.py", *common, "--out", f"{folder}/more", "--from", f"{folder}/small/draft.gguf", "--max-steps", 1)
    assert gguf.GGUFReader(f"{folder}/more/draft.gguf").get_field(llama.MASK).contents() == mask
    kept = llama.vocab_subset(gguf.GGUFReader(f"{folder}/small/draft.gguf"), SHAPE.n_vocab, "cpu")
    assert llama.output_mask(kept.numpy(), SHAPE.n_vocab) == bytes(mask)
    run(SOOTH, "quantize", f"{out}/draft.gguf", f"{folder}/draft.gguf", "Q4_0")
    _, f32, _ = llama.load(f"{out}/draft.gguf")
    _, q4, _ = llama.load(f"{folder}/draft.gguf")
    assert max(float((f32[n] - q4[n]).abs().max() / f32[n].abs().max()) for n in f32) < 1e-3, "rounded weights were rounded again"
    narrow = ("--draft", f"{folder}/draft.gguf", "--data", f"{folder}/a.npz", "--data", f"{folder}/b.npz", "--out", f"{folder}/narrow.gguf")
    assert "100 ids cover" in tool("vocab.py", *narrow, "--vocab", 100)
    assert "must be from 1 to" in tool("vocab.py", *narrow, "--vocab", 320, want=1)
    tool("vocab.py", "--draft", f"{folder}/narrow.gguf", "--vocab", 0, "--out", f"{folder}/again.gguf")
    assert open(f"{folder}/again.gguf", "rb").read() == open(f"{folder}/draft.gguf", "rb").read(), "more than the mask has changed"
    said = [json.loads(run(SOOTH, "run", "-m", target, "--temp", 0, "-n", 40, "-p", "the thing", "--json", *spec))
            for spec in (("--no-spec",), ("--spec", "model", "-md", f"{folder}/draft.gguf"), ("--spec", "model", "-md", f"{folder}/narrow.gguf"),
                         ("--spec", "model", "-md", f"{folder}/small/draft.gguf"))]
    assert all(s["tokens"] == said[0]["tokens"] for s in said)
    assert "it is a draft" in run(SOOTH, "run", "-m", f"{folder}/narrow.gguf", "-p", "the", want=1)
    data = open(f"{out}/checkpoint.pt", "rb").read()
    open(f"{out}/checkpoint.pt", "wb").write(data[:len(data) // 2])
    assert "cannot be resumed" in tool("draft.py", *common, "--out", out, "--resume", want=1)


def losses(out):
    """The cross entropy of head 1 in every step that was logged."""
    return [float(part.split()[0]) for part in out.split("cross entropy of head  1: ")[1:]]


def test_heads(target, folder):
    """Heads of every kind, and a target trained together with its heads; sooth drafts with them and says the same as without."""
    tool("generate.py", "--target", target, "--out", f"{folder}/h.npz", "--min-p", 0.001, "--own", 500, "--slots", 32, "--short-ctx", 200, "--max-new", 24,
         "--max-prompt", 300, "--minutes", 0, "--temps", "0,1")
    common = ("--target", target, "--data", f"{folder}/h.npz", "--heads", 2, "--minutes", 1, "--log", 0, "--device", "cpu", "--max-steps", 100)
    rows = ("--batch", 1024, "--rows", 512, "--no-compile", "--muon-lr", 0.1)
    alone = losses(tool("medusa.py", *common, *rows, "--layers", 1, "--out", f"{folder}/m1"))
    assert len(alone) == 100 and np.mean(alone[-20:]) < np.mean(alone[:20]) - 0.05, alone
    both = tool("medusa.py", *common, *rows, "--layers", 1, "--out", f"{folder}/m2", "--backbone", 1, "--backbone-lr", 1e-3)
    together = losses(both)[100:]
    kept = float(both.split("new and old target: KL ")[1].split()[0])
    assert len(together) == 100 and np.mean(together[-20:]) < np.mean(together[:20]) - 0.05 and kept < 0.5, both
    _, old, _ = llama.load(target)
    _, new, _ = llama.load(f"{folder}/m2/target.gguf")
    assert all((old[n] != new[n]).any() for n in old), "part of the target was not trained"
    tool("blockwise.py", *common, *rows, "--hidden", 64, "--out", f"{folder}/blockwise")
    tool("lookahead.py", *common, "--out", f"{folder}/ahead", "--batch", 1024, "--docs", 16)
    for model, spec in ((target, f"medusa({folder}/m1/heads.gguf,best)"), (f"{folder}/m2/target.gguf", f"medusa({folder}/m2/heads.gguf)"),
                        (target, f"blockwise({folder}/blockwise/heads.gguf)"), (target, f"lookahead({folder}/ahead/heads.gguf,ends=2)")):
        said = [json.loads(run(SOOTH, "run", "-m", model, "--temp", 0, "-n", 40, "-p", "the thing", "--json", *options))
                for options in (("--no-spec",), ("--spec", spec, "--spec-length", 2))]
        assert said[0]["tokens"] == said[1]["tokens"] and said[1]["timings"]["draft_n"] > 0, (spec, said)
    assert "must be 0" in tool("medusa.py", *common, "--out", f"{folder}/m3", "--backbone", -1, want=2)


def test_pair(target, folder):
    """Prompts, a tokenizer and a target from nothing; sooth splits text as the tokenizer does and writes in the chat format."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        print("# skip: pair.py needs tokenizers")
        return
    out = f"{folder}/pair"
    tool("prompts.py", "--out", f"{folder}/p.jsonl", "-n", 300, "--most", 3)
    reader = gguf.GGUFReader(target)
    encode = chat.Encoder(reader, *llama.vocabulary(reader))
    form = chat.Chat(reader, encode)
    tale = "Once there was a cat. The cat saw number {n} of the 12 mice, and the mouse ran away. "
    said = [(form.before + encode(json.loads(line)["prompt"]) + form.after, encode(tale.format(n=i) * (2 - i % 2)) + [0] * (i % 2),
             dialogues.KINDS["file"], 0.7) for i, line in enumerate(open(f"{folder}/p.jsonl"))]
    dialogues.write(f"{folder}/said.npz", said, SHAPE.n_vocab)
    common = ("--teacher", target, "--data", f"{folder}/said.npz", "--out", out, "--vocab", 400, "--layers", 2, "--d", 64, "--heads", 2,
              "--ff", 64, "--ctx", 256, "--batch", 2048, "--minutes", 1, "--log", 0.5, "--device", "cpu", "--no-compile")
    first = tool("pair.py", *common, "--decay", 0, "--max-steps", 2)
    assert "300 dialogues" in first and "0 skipped" in first, first
    second = tool("pair.py", *common, "--resume", "--max-steps", 40)
    loss_of = lambda text: float(text.split("held out  loss ")[-1].split()[0])
    assert loss_of(second) < loss_of(first) - 1, (first, second)
    d = dialogues.read(f"{out}/dialogues.npz", 400)
    tok = Tokenizer.from_file(f"{out}/tokenizer.json")
    text = "Once there was a cat that saw 1024 mice,\n\n  didn't it?"
    ids = json.loads(run(SOOTH, "tokenize", "-m", f"{out}/target.gguf", text, "--json"))
    assert (ids["tokens"] if "tokens" in ids else ids["ids"]) == tok.encode(text, add_special_tokens=False).ids, ids
    prompts = [tuple(d.prompt(i)) for i in range(len(d))]
    alone = [p for p in prompts if p.count(2) == 1]
    assert 0.7 < len(alone) / len(prompts) < 1, "some dialogues stand behind another"
    answer = json.loads(run(SOOTH, "run", "-m", f"{out}/target.gguf", "-p", "Tell me a story.", "-n", 20, "--temp", 0, "--json"))
    assert len(answer["tokens"]) > 0
    assert "start without --resume" in tool("pair.py", *common, "--resume", "--ff", 96, want=1)


def main():
    tests = [(n, f) for n, f in globals().items() if n.startswith("test_")]
    failed = 0
    print(f"1..{len(tests)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/target.gguf"
        write_target(target)
        for i, (name, f) in enumerate(tests, 1):
            args = {"target": target, "folder": folder}
            try:
                f(**{k: args[k] for k in f.__code__.co_varnames[:f.__code__.co_argcount]})
                print(f"ok {i} - {name}", flush=True)
            except Exception as e:
                failed += 1
                print(f"not ok {i} - {name}: {type(e).__name__}: {e}", flush=True)
    sys.exit(1 if failed else 0)


main()
