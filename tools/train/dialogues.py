"""Dialogues as arrays, the held-out split, and batches of concatenated texts.

A file is .npz or .npz.xz with `ids` (uint16, or uint32 for large vocabularies), `plen` and `rlen` (prompt and response
length of each dialogue; the dialogues are concatenated in `ids`), `kind` and `temp`. A hash of the prompt decides what is
held out, so a prompt that is answered at several temperatures, or occurs in several files, is always on the same side.
"""
import hashlib
import io
import lzma
import os
import zipfile

import numpy as np

KINDS = {"task": 0, "maths": 1, "story": 2, "own": 3, "passages": 4, "second": 5, "file": 6}
HELD_OUT = 50  # one prompt in 50 is held out


class Dialogues:
    def __init__(self, ids, plen, rlen, kind, temp):
        self.ids, self.kind, self.temp = ids, np.asarray(kind, np.uint8), np.asarray(temp, np.float32)
        self.plen, self.rlen = np.asarray(plen, np.int64), np.asarray(rlen, np.int64)
        self.start = np.concatenate([[0], np.cumsum(self.plen + self.rlen)])

    def __len__(self):
        return len(self.plen)

    def prompt(self, i):
        return self.ids[self.start[i]:self.start[i] + self.plen[i]]

    def response(self, i):
        return self.ids[self.start[i] + self.plen[i]:self.start[i + 1]]

    def held_out(self):
        """bool [n]"""
        return np.array([held_out(self.prompt(i)) for i in range(len(self))], bool)


def held_out(prompt):
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, np.uint32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


def read(path, n_vocab):
    try:
        data = lzma.open(path).read() if path.endswith(".xz") else open(path, "rb").read()
        z = np.load(io.BytesIO(data))
        d = Dialogues(*(z[k] for k in ("ids", "plen", "rlen", "kind", "temp")))
    except (OSError, ValueError, KeyError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as e:
        raise SystemExit(f"{path}: {e}: not a file of dialogues, or truncated")
    if not len(d) == len(d.rlen) == len(d.kind) == len(d.temp) or d.start[-1] != len(d.ids):
        raise SystemExit(f"{path}: lengths add up to {d.start[-1]} ids, the file has {len(d.ids)}")
    if d.plen.min() < 1 or d.rlen.min() < 1 or d.ids.max() >= n_vocab:
        raise SystemExit(f"{path}: an empty prompt or response, or id {d.ids.max()} for a vocabulary of {n_vocab}")
    return d


def write(path, dialogues, n_vocab):
    """dialogues: list of (prompt ids, response ids, kind, temp). The file appears under its name when it is complete."""
    flat = [x for p, r, _, _ in dialogues for x in (p, r)]
    ids = np.concatenate([np.asarray(x, np.uint32) for x in flat]).astype(np.uint16 if n_vocab <= 65536 else np.uint32)
    with open(path + ".part", "wb") as f:
        np.savez(f, ids=ids, plen=np.array([len(p) for p, *_ in dialogues], np.uint16),
                 rlen=np.array([len(r) for _, r, *_ in dialogues], np.uint16),
                 kind=np.array([k for *_, k, _ in dialogues], np.uint8), temp=np.array([t for *_, t in dialogues], np.float16))
    os.replace(path + ".part", path)


def join(parts):
    return Dialogues(np.concatenate([p.ids for p in parts]), *(np.concatenate([getattr(p, k) for p in parts])
                                                              for k in ("plen", "rlen", "kind", "temp")))


def frequent(d, which, n_vocab, n):
    """The n most frequent ids in the responses of `which`, ascending; ties go to the lower id."""
    counts = np.bincount(d.ids[ranges(d.start[which] + d.plen[which], d.rlen[which])], minlength=n_vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:n])


def ranges(starts, lengths):
    """The concatenated ranges start … start + length − 1."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


class Batches:
    """Batches of whole texts, at most `n_tokens` together, in arrays of constant size.

    The last token of a dialogue is predicted and never an input. Yields numpy arrays: `at` [T] indices into ids, `pos` [T],
    `borders` [D+1], `rows` (positions in the batch that predict a response token), `states` (the same rows, numbered over all
    dialogues)."""

    def __init__(self, d, which, n_tokens):
        self.d, self.which, self.n_tokens = d, np.asarray(which), n_tokens
        self.n_docs = max(16, n_tokens // 16)
        self.row0 = np.concatenate([[0], np.cumsum(d.rlen)])
        self.lens = d.plen + d.rlen - 1
        longest = int(self.lens[self.which].max()) if len(self.which) else 1
        if longest > n_tokens:
            raise SystemExit(f"a dialogue of {longest} tokens does not fit a batch of {n_tokens}")
        self.max_len = max(longest, 2 * n_tokens // self.n_docs)  # so that n_docs / 2 texts can fill unused positions

    def one(self, docs):
        lens, n = self.lens[docs], self.n_tokens
        total = int(lens.sum())
        borders = np.full(self.n_docs + 1, n, np.int32)
        borders[0], borders[1:len(docs) + 1] = 0, np.cumsum(lens)
        at, pos = np.zeros(n, np.int64), np.zeros(n, np.int64)
        at[:total], pos[:total] = ranges(self.d.start[docs], lens), ranges(np.zeros_like(lens), lens)
        # unused positions become padding texts of at most max_len
        spare = list(range(total, n, self.max_len)) + [n]
        borders[len(docs):len(docs) + len(spare)] = spare
        rows = ranges(borders[:len(docs)] + self.d.plen[docs] - 1, self.d.rlen[docs])
        return at, pos, borders, rows, ranges(self.row0[docs], self.d.rlen[docs])

    def __call__(self, order):
        docs, total = [], 0
        for i in order:
            room = self.n_docs - self.n_tokens // self.max_len - 2
            if docs and (total + self.lens[i] > self.n_tokens or len(docs) >= room):
                yield self.one(np.array(docs))
                docs, total = [], 0
            docs.append(i)
            total += int(self.lens[i])
        if docs:
            yield self.one(np.array(docs))

    def epochs(self, seed, skip=0):
        """Endless batches; the order of epoch n depends only on the seed and n."""
        epoch = skip
        while True:
            yield from self(np.random.default_rng([seed, epoch]).permutation(self.which))
            epoch += 1
