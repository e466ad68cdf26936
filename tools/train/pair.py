#!/usr/bin/env python3
"""Trains a small target with its own tokenizer from scratch, on text that another model wrote. draft.py then trains its draft.

  pair.py --teacher T.gguf --data TEXTS.npz [--data MORE.npz] --out DIR [--minutes 9] [--resume]

  1. texts      dialogues of the teacher (generate.py) are decoded, up to where they repeat themselves; dialogues with
                characters beyond ASCII are skipped
  2. tokenizer  byte-level BPE of --vocab tokens, trained on these texts: DIR/tokenizer.json
  3. dialogues  the texts in the new ids, some after an earlier dialogue, so that the model learns second turns:
                DIR/dialogues.npz, which draft.py and generate.py read
  4. training   cross entropy of the answers. One prompt in 50, chosen by a hash, is held out; its loss and the fraction of
                tokens that were the likeliest are printed during training
  5. file       DIR/target.gguf (float32, for `sooth quantize`), with the tokenizer and a chat template

A run ends within --minutes and writes DIR/checkpoint.pt. An interrupted run continues with --resume (steps 1 to 3 are then
read from DIR). The learning rate is constant until the last --decay of the run, then falls to 0. Needs torch, numpy, gguf,
tokenizers, jinja2.
"""
import argparse
import json
import os
import re
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import chat
import dialogues
import draft
import llama
import optim
from progress import log_line

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
PLAIN = re.compile(r"[ -~\n]*")
SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]")


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", required=True)
    p.add_argument("--data", required=True, action="append")
    p.add_argument("--out", required=True)
    p.add_argument("--name", default="sooth story")
    p.add_argument("--license", default="apache-2.0")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--max-steps", type=int, default=1 << 60)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--kinds", default="story,file", help="kinds of dialogues to use (dialogues.py)")
    p.add_argument("--second", type=float, default=0.12, help="fraction of dialogues that follow an earlier one")
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--d", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=1)
    p.add_argument("--ff", type=int, default=704)
    p.add_argument("--ctx", type=int, default=1024)
    p.add_argument("--batch", type=int, default=65536, help="tokens per step")
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=2e-3)
    p.add_argument("--decay", type=float, default=0.5, help="final fraction of the run in which the rate falls")
    p.add_argument("--save", type=float, default=120)
    p.add_argument("--log", type=float, default=15)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true")
    return p.parse_args()


# --- texts ---

def trim(text, ended):
    """(usable part of an answer, whether it ends there).

    The answer is cut where a sentence occurs a second time: from there a small teacher repeats itself. An answer without an end
    is cut after its last complete paragraph, which then counts as its end, or else after its last complete sentence."""
    seen, at = set(), len(text)
    for m in SENTENCE.finditer(text):
        key = m.group().strip().lower()
        if len(key) > 25 and key in seen:
            at, ended = m.start(), False
            break
        seen.add(key)
    text = text[:at]
    if ended:
        return text.strip(), True
    paragraph = text.rfind("\n\n")
    if paragraph >= 250:
        return text[:paragraph].strip(), True
    sentence = max(text.rfind(c) for c in ".!?")
    return text[:sentence + 1].strip(), False


def teacher_texts(args):
    """[(user text, answer, whether it ends there, kind, temperature)]"""
    import gguf
    reader = gguf.GGUFReader(args.teacher)
    vocab = llama.Vocab.of(reader)
    back = {c: b for b, c in chat.byte_letters().items()}
    bytes_of = [bytes(back[c] for c in t.decode()) if all(c in back for c in t.decode()) else None for t in vocab.tokens]
    form = chat.Chat(reader, chat.Encoder(reader, vocab.tokens, vocab.types))
    before, after, end = form.before, form.after, vocab.special["eos"]
    kinds = {dialogues.KINDS[k] for k in args.kinds.split(",")}
    out, left = [], 0
    for path in args.data:
        d = dialogues.read(path, len(vocab.tokens))
        for i in np.flatnonzero(np.isin(d.kind, list(kinds))):
            prompt, answer = d.prompt(i).tolist(), d.response(i).tolist()
            if prompt[:len(before)] != before or prompt[-len(after):] != after:
                left += 1
                continue
            ended = answer[-1] == end
            parts = [[bytes_of[t] for t in ids] for ids in (prompt[len(before):-len(after)], answer[:-1] if ended else answer)]
            if any(b is None for p in parts for b in p):
                left += 1
                continue
            user, text = (b"".join(p).decode("utf-8", "replace").replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"').strip()
                          for p in parts)
            text, ended = trim(text, ended)
            if user and len(text) > 20 and PLAIN.fullmatch(user + text):
                out.append((user, text, ended, int(d.kind[i]), float(d.temp[i])))
            else:
                left += 1
    log_line(f"{len(out)} dialogues, {sum(len(t) for _, t, *_ in out) / 1e6:.1f} MB of answers; {left} skipped")
    if not out:
        raise SystemExit("no usable dialogues: give more --data or other --kinds")
    return out


# --- tokenizer ---

def learn_tokenizer(texts, n_vocab, path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tok.train_from_iterator((t for user, text, *_ in texts[:200000] for t in (user, text)), trainers.BpeTrainer(
        vocab_size=n_vocab, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.save(path)
    return tok


def vocab_of(path):
    """The tokenizer in GGUF's form. The pre-tokenizer name `smollm` means single digits and GPT-2's words."""
    model = json.load(open(path, encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return llama.Vocab([t.encode() for t in tokens], [3 if t in SPECIAL else 1 for t in tokens], merges, "gpt2", "smollm",
                       {"bos": 1, "eos": END, "unknown": 0, "padding": 0}, False, TEMPLATE)


def encode(texts, tok, args):
    """Dialogues in the new ids, in the form that dialogues.write expects."""
    ids = lambda words: [e.ids for e in tok.encode_batch_fast(words, add_special_tokens=False)]
    user, answers = ids([u for u, *_ in texts]), ids([t for _, t, *_ in texts])
    mark = {w: i for w, i in zip(("user\n", "assistant\n", "\n"), ids(["user\n", "assistant\n", "\n"]))}
    turn = lambda i: [1] + mark["user\n"] + user[i] + [END] + mark["\n"] + [1] + mark["assistant\n"]
    rng, out = np.random.default_rng(args.seed), []
    for i, (_, _, ended, kind, temp) in enumerate(texts):
        prompt, answer = turn(i), answers[i] + [END] * ended
        j = int(rng.integers(len(texts)))
        if rng.random() < args.second and texts[j][2]:
            earlier = turn(j) + answers[j] + [END] + mark["\n"]
            prompt = earlier + prompt if len(earlier) + len(prompt) + len(answer) < args.ctx else prompt
        if len(prompt) + len(answer) <= args.ctx:
            out.append((prompt, answer, kind, temp))
    return out


def prepare(args):
    """Steps 1 to 3, or their results from an earlier run. Writes DIR/dialogues.npz and returns the vocabulary."""
    tok_path, data_path = (os.path.join(args.out, n) for n in ("tokenizer.json", "dialogues.npz"))
    if not (args.resume and os.path.exists(tok_path) and os.path.exists(data_path)):
        texts = teacher_texts(args)
        tok = learn_tokenizer(texts, args.vocab, tok_path)
        log_line(f"tokenizer of {tok.get_vocab_size()} tokens")
        encoded = encode(texts, tok, args)
        dialogues.write(data_path, encoded, tok.get_vocab_size())
        log_line(f"{data_path}: {len(encoded)} dialogues, {sum(len(a) for _, a, *_ in encoded) / 1e6:.1f} M tokens of answers, "
                 f"{sum(len(t) for _, t, *_ in texts) / sum(len(a) for _, a, *_ in encoded):.2f} characters per token")
    args.data = [data_path]
    return vocab_of(tok_path)


# --- training ---

class Target:
    def __init__(self, args, shape, weights, data):
        self.shape = shape
        self.weights = {n: w.clone().to(data.device).requires_grad_() for n, w in weights.items()}
        self.model = llama.Model(shape, self.weights, data.device, args.ctx, not args.no_compile)
        self.dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32

    def loss(self, batch):
        """(cross entropy of each answer token [n], whether it was the likeliest [n])"""
        ids, pos, docs, rows, want = batch
        ready = {n: w.to(self.dtype) if w.ndim == 2 else w for n, w in self.weights.items()}
        ready["token_embd.weight"] = self.weights["token_embd.weight"]
        h = self.model.hidden(ids, pos, docs, ready)[rows]
        logits = h.to(self.dtype) @ ready["token_embd.weight"].to(self.dtype).T
        return F.cross_entropy(logits.float(), want, reduction="none"), logits.argmax(-1) == want


class Data(draft.Data):
    """Batches whose last element has the id that each row predicts."""

    def to_device(self, batch, max_len):
        at = torch.from_numpy(batch[0][batch[3]]).to(self.device, non_blocking=True)
        return (*super().to_device(batch, max_len)[:4], self.ids[at + 1].long())


def first_weights(shape, seed):
    gen, out = torch.Generator().manual_seed(seed), {}
    for name, dims in shape.tensors().items():
        zero = "attn_output" in name or "ffn_down" in name
        scale = 0 if zero else 0.05 if name.startswith("token_embd") else dims[-1] ** -0.5
        out[name] = torch.ones(dims) if len(dims) == 1 else torch.randn(dims, generator=gen) * scale
    return out


@torch.no_grad()
def held_out(target, data, args):
    total, right, n = 0.0, 0.0, 0
    for batch in data.batches(data.held, args.batch):
        value, same = target.loss(batch)
        total, right, n = total + float(value.sum()), right + float(same.sum()), n + len(value)
    return f"held out  loss {total / n:.4f}  likeliest {right / n:.4f}"


def save(path, target, opt, step, n_rows):
    torch.save({"shape": target.shape, "weights": {n: w.detach() for n, w in target.weights.items()}, "optimizer": opt.dump(),
                "step": step, "rows": n_rows}, path + ".part")
    os.replace(path + ".part", path)


def train(args, target, opt, data, step, n_rows):
    clock, path = draft.Clock(args, step), os.path.join(args.out, "checkpoint.pt")
    log = open(os.path.join(args.out, "log.tsv"), "a")
    since, saved, mean, count, logged_rows = time.monotonic(), time.monotonic(), torch.zeros(2, device=data.device), 0, n_rows
    stream = data.stream(args.batch, args.seed + step)
    while (fraction := clock.fraction(step)) < 1:
        value, same = target.loss(next(stream))
        value.mean().backward()
        opt.step(max(0.0, clock.rate(step, fraction)))
        mean += torch.stack((value.detach().mean(), same.float().mean()))
        step, n_rows, count = step + 1, n_rows + len(value), count + 1
        if time.monotonic() - since > args.log:
            loss, right = (mean / count).tolist()
            took = time.monotonic() - since
            log_line(f"step {step}  loss {loss:.4f}  likeliest {right:.4f}  {n_rows / 1e6:.0f} M rows, {(n_rows - logged_rows) / took / 1e6:.2f} M/s")
            log.write(f"{step}\t{n_rows}\t{loss:.5f}\t{right:.5f}\n")
            log.flush()
            logged_rows, count, since = n_rows, 0, time.monotonic()
            mean.zero_()
        if time.monotonic() - saved > args.save:
            log_line(held_out(target, data, args))
            save(path, target, opt, step, n_rows)
            saved = time.monotonic()
    save(path, target, opt, step, n_rows)
    return step, n_rows


def main():
    args = options()
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.out, exist_ok=True)
    vocab = prepare(args)
    data = Data(args, len(vocab.tokens))
    path = os.path.join(args.out, "checkpoint.pt")
    shape = llama.Shape(args.layers, args.d, args.heads, args.kv_heads, args.d // args.heads, args.ff, len(vocab.tokens), 10000.0, 1e-5,
                        args.ctx).check()
    saved = draft.restore(path, data.device) if args.resume and os.path.exists(path) else None
    if saved and saved["shape"] != shape:
        raise SystemExit(f"{path}: has the shape {saved['shape']}, not {shape}: start without --resume")
    target = Target(args, shape, saved["weights"] if saved else first_weights(shape, args.seed), data)
    opt = optim.Optimizer(target.weights, args.muon_lr, args.adam_lr)
    if saved:
        opt.restore(saved["optimizer"])
    step, n_rows = train(args, target, opt, data, saved["step"] if saved else 0, saved["rows"] if saved else 0)
    log_line(held_out(target, data, args))
    out = os.path.join(args.out, "target.gguf")
    llama.write(out, shape, target.weights, vocab, args.name, lambda w: w.add_license(args.license))
    log_line(f"{out}: {sum(w.numel() for w in target.weights.values()) / 1e6:.2f} M parameters, {n_rows / 1e6:.0f} M answer tokens seen")


if __name__ == "__main__":
    main()
