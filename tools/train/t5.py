"""T5-shaped encoder-decoders in torch, with GGUF's tensor names.

A model is a Shape and a dict {GGUF tensor name: tensor}. Inside this file the weights are scaled so that one learning rate
suits all of them; exported() gives those that a file holds:

  attn_q, cross_attn_q    the file's scores are not divided by sqrt(head_dim): the factor is part of the weights
  token_embd              the file's is larger by sqrt(d), because a tied output is multiplied by 1/sqrt(d)

Texts are packed: a row of a batch holds several pairs, numbered from 1 in `seg`; 0 is padding. A position attends only to
positions of its own pair. All batches have one shape, so a layer is compiled once. Needs torch.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Shape:
    n_enc: int
    n_dec: int
    d: int
    n_heads: int
    head_dim: int
    ff: int
    n_vocab: int
    buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6

    def tensors(self):
        """{name: torch shape}. Gated GELU; the output matrix is the embedding."""
        d, q = self.d, self.n_heads * self.head_dim
        attn = lambda p: {p + "_q.weight": (q, d), p + "_k.weight": (q, d), p + "_v.weight": (q, d), p + "_o.weight": (d, q)}
        ffn = lambda b: {b + "ffn_norm.weight": (d,), b + "ffn_gate.weight": (self.ff, d), b + "ffn_up.weight": (self.ff, d),
                         b + "ffn_down.weight": (d, self.ff)}
        out = {"token_embd.weight": (self.n_vocab, d), "enc.output_norm.weight": (d,), "dec.output_norm.weight": (d,),
               "enc.blk.0.attn_rel_b.weight": (self.buckets, self.n_heads), "dec.blk.0.attn_rel_b.weight": (self.buckets, self.n_heads)}
        for i in range(self.n_enc):
            b = f"enc.blk.{i}."
            out |= {b + "attn_norm.weight": (d,)} | attn(b + "attn") | ffn(b)
        for i in range(self.n_dec):
            b = f"dec.blk.{i}."
            out |= {b + "attn_norm.weight": (d,)} | attn(b + "attn") | {b + "cross_attn_norm.weight": (d,)} | attn(b + "cross_attn") | ffn(b)
        return out

    def check(self):
        if self.d % 32 or self.ff % 32 or (self.n_heads * self.head_dim) % 32:
            raise SystemExit(f"{self}: row lengths must be multiples of 32, or the file cannot be quantised")
        return self


def is_matrix(name):
    """Matrices of layers: trained by Muon, rounded to Q4_0."""
    return not name.startswith("token_embd") and "norm" not in name and "rel_b" not in name


def exported(shape, weights):
    out = {}
    for name, w in weights.items():
        w = w.detach().float().cpu()
        if name.endswith("attn_q.weight"):
            w = w * shape.head_dim ** -0.5
        if name == "token_embd.weight":
            w = w * math.sqrt(shape.d)
        out[name] = w
    return out


def first_weights(shape, seed):
    gen, out = torch.Generator().manual_seed(seed), {}
    for name, dims in shape.tensors().items():
        if "rel_b" in name or name.endswith("_o.weight") or "ffn_down" in name:
            out[name] = torch.zeros(dims)
        elif len(dims) == 1:
            out[name] = torch.ones(dims)
        else:
            out[name] = torch.randn(dims, generator=gen) * dims[1] ** -0.5
    return out


def bucket(distance, both, buckets, max_distance):
    """The bias bucket of key position - query position: exact up to half of the buckets, then logarithmic."""
    base = torch.zeros_like(distance)
    n = -distance
    if both:
        buckets //= 2
        base, n = (distance > 0).long() * buckets, n.abs()
    n = n.clamp(min=0)
    exact = buckets // 2
    far = exact + (torch.log(n.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)).long()
    return base + torch.where(n < exact, n, far.clamp(max=buckets - 1))


def rms_norm(x, w, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def split(x, w, head_dim):
    return F.linear(x, w).unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attend(q, k, v, bias, mask):
    """q [B][H][n][D], k and v [B][H][m][D], bias [H][n][m] or None, mask [B][1][n][m] -> [B][n][H·D]"""
    s = (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).float()
    if bias is not None:
        s = s + bias
    p = torch.where(mask, s, -1e9).softmax(-1).to(v.dtype)
    return (p @ v).transpose(1, 2).flatten(-2)


def ffn(x, norm, gate, up, down, eps, drop):
    h = rms_norm(x, norm, eps)
    return x + F.dropout(F.linear(F.gelu(F.linear(h, gate), approximate="tanh") * F.linear(h, up), down), drop, drop > 0)


def enc_layer(x, seg, bias, w, head_dim, eps, drop):
    h = rms_norm(x, w[0], eps)
    q, k, v = (split(h, m, head_dim) for m in w[1:4])
    a = attend(q, k, v, bias, (seg[:, :, None] == seg[:, None, :])[:, None])
    x = x + F.dropout(F.linear(a, w[4]), drop, drop > 0)
    return ffn(x, *w[5:9], eps, drop)


def dec_layer(x, seg, enc, enc_seg, bias, w, head_dim, eps, drop):
    n = x.shape[1]
    at = torch.arange(n, device=x.device)
    h = rms_norm(x, w[0], eps)
    q, k, v = (split(h, m, head_dim) for m in w[1:4])
    mask = (seg[:, :, None] == seg[:, None, :]) & (at[:, None] >= at[None, :])
    x = x + F.dropout(F.linear(attend(q, k, v, bias, mask[:, None]), w[4]), drop, drop > 0)
    h = rms_norm(x, w[5], eps)
    q, k, v = split(h, w[6], head_dim), split(enc, w[7], head_dim), split(enc, w[8], head_dim)
    a = attend(q, k, v, None, (seg[:, :, None] == enc_seg[:, None, :])[:, None])
    x = x + F.dropout(F.linear(a, w[9]), drop, drop > 0)
    return ffn(x, *w[10:14], eps, drop)


FFN = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
SELF = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_o")
ENC, DEC = SELF + FFN, SELF + ("cross_attn_norm", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_o") + FFN


class Model:
    """hidden() gives the decoder's hidden states after the last norm; logits are these times the embedding of this file."""

    def __init__(self, shape, length, device, compiled=False):
        self.shape, self.length = shape, length
        at = torch.arange(length)
        self.hot = {}
        for name, both in (("enc", True), ("dec", False)):
            table = bucket(at[None, :] - at[:, None], both, shape.buckets, shape.max_distance)
            self.hot[name] = F.one_hot(table, shape.buckets).float().to(device)
        self.enc_layer, self.dec_layer = enc_layer, dec_layer
        if compiled:
            torch._dynamo.config.cache_size_limit = 64  # several models, with and without gradients
            self.enc_layer, self.dec_layer = torch.compile(enc_layer, dynamic=False), torch.compile(dec_layer, dynamic=False)

    def bias(self, w, part, n=None):
        """[H][n][n]: a product with a one-hot table, whose gradient is a product too."""
        n = n or self.length
        return (self.hot[part][:n, :n] @ w[part + ".blk.0.attn_rel_b.weight"].float()).permute(2, 0, 1)

    def embed(self, w, ids, dtype):
        return (F.embedding(ids, w["token_embd.weight"]) * math.sqrt(self.shape.d)).to(dtype)

    def encode(self, w, src, seg, drop=0.0, plain=False):
        s = self.shape
        dtype = w["enc.blk.0.attn_q.weight"].dtype
        x = F.dropout(self.embed(w, src, dtype), drop, drop > 0)
        bias = self.bias(w, "enc", src.shape[1])
        for i in range(s.n_enc):
            layer = [w[f"enc.blk.{i}.{n}.weight"] for n in ENC]
            x = (enc_layer if plain else self.enc_layer)(x, seg, bias, layer, s.head_dim, s.eps, drop)
        return F.dropout(rms_norm(x, w["enc.output_norm.weight"], s.eps), drop, drop > 0)

    def hidden(self, w, src, src_seg, tgt, tgt_seg, drop=0.0, plain=False):
        s = self.shape
        enc = self.encode(w, src, src_seg, drop, plain)
        x = F.dropout(self.embed(w, tgt, enc.dtype), drop, drop > 0)
        bias = self.bias(w, "dec", tgt.shape[1])
        for i in range(s.n_dec):
            layer = [w[f"dec.blk.{i}.{n}.weight"] for n in DEC]
            x = (dec_layer if plain else self.dec_layer)(x, tgt_seg, enc, src_seg, bias, layer, s.head_dim, s.eps, drop)
        return rms_norm(x.float(), w["dec.output_norm.weight"], s.eps)

    @torch.no_grad()
    def generate(self, w, src, seg, temp, max_len, eos=1, start=0):
        """src [B][S], seg 1 for text and 0 for padding -> ids [B][≤ max_len], padded with 0. One text per row."""
        s, n = self.shape, len(src)
        enc = self.encode(w, src, seg, plain=True)
        mask = (seg > 0)[:, None, None, :]
        get = lambda i, name: w[f"dec.blk.{i}.{name}.weight"]
        cross = [[split(enc, get(i, f"cross_attn_{c}"), s.head_dim) for c in "kv"] for i in range(s.n_dec)]
        cache = [[torch.zeros(n, s.n_heads, max_len, s.head_dim, dtype=enc.dtype, device=enc.device) for _ in "kv"] for _ in range(s.n_dec)]
        bias, out = self.bias(w, "dec", max_len), torch.zeros(n, max_len, dtype=torch.long, device=src.device)
        e, token = w["token_embd.weight"].to(enc.dtype), torch.full((n,), start, device=src.device)
        done, every = torch.zeros(n, dtype=torch.bool, device=src.device), torch.ones(1, 1, 1, 1, dtype=torch.bool, device=src.device)
        for t in range(max_len):
            x = self.embed(w, token, enc.dtype)[:, None]
            for i in range(s.n_dec):
                h = rms_norm(x, get(i, "attn_norm"), s.eps)
                for c, store in zip("kv", cache[i]):
                    store[:, :, t:t + 1] = split(h, get(i, "attn_" + c), s.head_dim)
                a = attend(split(h, get(i, "attn_q"), s.head_dim), cache[i][0][:, :, :t + 1], cache[i][1][:, :, :t + 1],
                           bias[:, t:t + 1, :t + 1], every)
                x = x + F.linear(a, get(i, "attn_o"))
                h = rms_norm(x, get(i, "cross_attn_norm"), s.eps)
                x = x + F.linear(attend(split(h, get(i, "cross_attn_q"), s.head_dim), *cross[i], None, mask), get(i, "cross_attn_o"))
                x = ffn(x, *[get(i, f) for f in FFN], s.eps, 0.0)
            logits = (rms_norm(x[:, 0].float(), w["dec.output_norm.weight"], s.eps).to(enc.dtype) @ e.T).float()
            if temp > 0:
                logits = logits / temp - torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
            token = torch.where(done, 0, logits.argmax(-1))
            out[:, t] = token
            done |= token == eos
            if t % 8 == 7 and bool(done.all()):
                break
        return out
