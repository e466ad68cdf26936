#!/usr/bin/env python3
"""Generates text with the target itself, to train drafts on: a draft must guess what the target writes.

  generate.py --target T.gguf --out MORE.npz [--data D.npz.xz] [--own 90000] [--passages 14000] [--second 6000] [--again 2]
              [--prompts FILE.jsonl] [--temps 0,0.7,1] [--minutes 3]

  own        the target also writes the user turn (after the beginning of the chat format, at temperature 1), then answers
  passages   texts from --data (answers to prompts that are not held out, and long tasks) with an instruction, up to 1,500
             tokens: summaries, and questions about passages with a generated user turn as the question
  second     a dialogue of --data followed by a new user turn
  again      the tasks and maths questions of --data, this many times each
  --prompts  a file of prompts, see chat.py

The prompts are answered at the --temps in turn, with min-p. Everything runs in slots (decode.py). User turns get a quarter
of the time, long prompts two fifths of what is left. Answers that have not ended by then are dropped. --minutes 0: no
limit, so that a slow machine writes as much as a fast one. The file has the format of dialogues.py and appears when it is
complete. Needs torch, numpy, gguf, jinja2.
"""
import argparse
import math
import os
import sys
import time

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import chat as chat_format
import decode
import dialogues
import llama
from progress import START, log_line

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--data")
    p.add_argument("--own", type=int, default=0)
    p.add_argument("--openers", type=float, default=0.5, help="fraction of user turns with given first words, for variety")
    p.add_argument("--passages", type=int, default=0)
    p.add_argument("--second", type=int, default=0)
    p.add_argument("--again", type=int, default=0)
    p.add_argument("--prompts", action="append", default=[])
    p.add_argument("--temps", default="0,0.7,1")
    p.add_argument("--min-p", type=float, default=0.03)
    p.add_argument("--max-new", type=int, default=320)
    p.add_argument("--max-prompt", type=int, default=1500)
    p.add_argument("--short-ctx", type=int, default=512)
    p.add_argument("--slots", type=int, default=4096, help="slots of --short-ctx tokens; longer slots use the same memory")
    p.add_argument("--minutes", type=float, default=3, help="0: no limit")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    if (args.passages or args.second or args.again) and not args.data:
        p.error("--passages, --second and --again need --data")
    if not 0 <= args.minutes < math.inf:
        p.error(f"--minutes {args.minutes}: must be 0 (no limit) or more")
    if args.short_ctx <= args.max_new:
        p.error(f"--short-ctx {args.short_ctx}: must be larger than --max-new {args.max_new}")
    return args


NAMES = {number: name for name, number in dialogues.KINDS.items()}


class Writer:
    def __init__(self, args):
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.args = args
        self.shape, weights, reader = llama.load(args.target, args.device, dtype)
        self.long_ctx = args.max_prompt + args.max_new
        self.model = llama.Model(self.shape, weights, args.device, max(self.long_ctx, args.short_ctx))
        tokens, types = llama.vocabulary(reader)
        self.encode = chat_format.Encoder(reader, tokens, types)
        self.chat = chat_format.Chat(reader, self.encode)
        self.control = {i for i, t in enumerate(types) if t == 3}
        self.eos = int(reader.get_field("tokenizer.ggml.eos_token_id").contents())
        self.temps = [float(t) for t in args.temps.split(",")]
        self.rng = np.random.default_rng(args.seed)
        self.end = START + args.minutes * 60 - min(10, 6 * args.minutes) if args.minutes else math.inf

    def until(self, fraction):
        """The time at which `fraction` of the remaining time has passed."""
        return time.monotonic() + max(0.0, self.end - time.monotonic()) * fraction

    def answers(self, jobs, n_ctx, n_slots, max_new, until):
        if not jobs:
            return
        slots = decode.Slots(self.model, self.args.device, min(n_slots, len(jobs)), n_ctx, max_new, self.eos,
                             math.log(max(self.args.min_p, 1e-6)), int(self.rng.integers(1 << 30)))
        yield from decode.generate(slots, jobs, until, log_line)
        del slots
        if self.args.device == "cuda":
            torch.cuda.empty_cache()

    def turns(self, n, until):
        """At most n different user turns, written by the target."""
        if not n:
            return []
        log_line(f"{n} user turns")
        room, seen = 128, {}
        begun = [self.encode(str(self.rng.choice(chat_format.OPENERS))) if self.rng.random() < self.args.openers else [] for _ in range(n)]
        jobs = [(self.chat.before + b, 1.0) for b in begun]
        n_ctx = max(len(p) for p, _ in jobs) + room
        for j, ids in self.answers(jobs, n_ctx, 2 * self.args.slots, room, until):
            words = begun[j] + ids[:-1].tolist()
            if ids[-1] == self.eos and len(words) > 3 and not self.control & set(words):
                seen[tuple(words)] = True
        return [list(t) for t in seen]

    def with_passages(self, d, which, long_tasks, turns):
        """A prompt about texts of the target, or about long tasks that people wrote."""
        rng, c = self.rng, self.chat
        budget = int(rng.integers(100, self.args.max_prompt - len(c.before) - len(c.after) - 200))
        texts, size = [], 0
        people = len(long_tasks) and rng.random() < 0.5
        while size < budget and len(texts) < 12:
            i = int(rng.choice(long_tasks if people else which))
            t = d.prompt(i)[len(c.before):d.plen[i] - len(c.after)] if people else d.response(i)
            t = [x for x in t.tolist() if x not in self.control]
            texts += ([self.encode("\n\n")] if texts else []) + [t[:budget - size]]
            size += len(t) + 1
        body = [x for t in texts for x in t]
        how = rng.integers(3)
        if how == 0 or not turns:
            return c.before + self.encode(str(rng.choice(chat_format.SUMMARIES))) + body + c.after
        if how == 1:
            return c.before + body + self.encode(str(rng.choice(chat_format.AFTER))) + c.after
        first, then = chat_format.QUESTIONS[rng.integers(len(chat_format.QUESTIONS))]
        return c.before + self.encode(first) + body + self.encode(then) + turns[rng.integers(len(turns))] + c.after

    def second_turn(self, d, which, turns):
        i, c = int(self.rng.choice(which)), self.chat
        earlier = d.prompt(i).tolist() + d.response(i).tolist()
        between = c.between
        if between and earlier[-1] == between[0]:
            between = between[1:]
        return earlier + between + turns[self.rng.integers(len(turns))] + c.after

    def prompts(self):
        """[(ids, kind)]"""
        a, out = self.args, []
        n = a.own + (a.second or a.passages) // 4 + 1
        turns = self.turns(n, self.until(1 / 4)) if a.own or a.second or a.passages else []
        if a.data:
            d = dialogues.read(a.data, self.shape.n_vocab)
            which = np.flatnonzero(~d.held_out())
            given = [i for i in which if d.kind[i] in (dialogues.KINDS["task"], dialogues.KINDS["maths"])]
            long_tasks = [i for i in given if d.plen[i] > 160]
            out += [(self.with_passages(d, which, long_tasks, turns), "passages") for _ in range(a.passages)]
            out += [(self.second_turn(d, which, turns), "second") for _ in range(a.second if turns else 0)]
            out += a.again * [(d.prompt(i).tolist(), NAMES[d.kind[i]]) for i in given]
        out += [(self.chat.before + t + self.chat.after, "own") for t in turns[:a.own]]
        for path in a.prompts:
            out += [(p, "file") for p in chat_format.read_prompts(path, self.encode, self.chat, a.max_prompt)]
        return [(p, k) for p, k in out if len(p) <= a.max_prompt]

    def write(self):
        a, finished = self.args, []
        prompts = self.prompts()
        order = self.rng.permutation(len(prompts))
        is_long = lambda i: len(prompts[i][0]) > a.short_ctx - a.max_new
        slots_long = max(1, a.slots * a.short_ctx // self.long_ctx)
        pools = (([i for i in order if is_long(i)], self.long_ctx, slots_long, 0.4),
                 ([i for i in order if not is_long(i)], a.short_ctx, a.slots, 1.0))
        for pool, n_ctx, n_slots, fraction in pools:
            log_line(f"{len(pool)} prompts in {n_slots} slots of {n_ctx}")
            jobs = [(prompts[i][0], self.temps[n % len(self.temps)]) for n, i in enumerate(pool)]
            for j, ids in self.answers(jobs, n_ctx, n_slots, a.max_new, self.until(fraction)):
                finished.append((jobs[j][0], ids, dialogues.KINDS[prompts[pool[j]][1]], jobs[j][1]))
        return finished


def main():
    args = options()
    w = Writer(args)
    log_line(f"target read: {w.shape}")
    finished = w.write()
    if not finished:
        raise SystemExit("no answer was finished in time: give more --minutes")
    dialogues.write(args.out, finished, w.shape.n_vocab)
    log_line(f"{args.out}: {len(finished)} dialogues, {sum(len(r) for _, r, *_ in finished) / 1e6:.2f} M tokens of answers")


if __name__ == "__main__":
    main()
