"""Llama-shaped models in torch, with GGUF's names and conventions.

A model is a Shape and a dict {GGUF tensor name: tensor}. Nothing is renamed or permuted between file and training, so the
exported tensors are the trained ones (q and k rows are in GGUF's order: rope rotates the pairs 2i, 2i+1). The texts of a
batch are concatenated, and attention stays within each text by its borders (Docs): no padding, and no n x n mask on a GPU.

Files are not trusted: missing keys, wrong shapes and other architectures raise SystemExit with the file's name. Needs
torch, numpy, gguf.
"""
import dataclasses
import hashlib
import os

import numpy as np
import torch
import torch.nn.functional as F


STATE = "target_state.weight"


@dataclasses.dataclass(frozen=True)
class Shape:
    n_layers: int
    d: int
    n_heads: int
    n_kv: int
    head_dim: int
    ff: int
    n_vocab: int
    rope_base: float = 100000.0
    eps: float = 1e-5
    n_ctx: int = 4096
    d_state: int = 0  # width of the target's hidden states if the draft reads them, else 0

    def tensors(self):
        """{name: torch shape} of all tensors of a file with this shape. The output matrix is the embedding."""
        q, kv = self.n_heads * self.head_dim, self.n_kv * self.head_dim
        out = {"token_embd.weight": (self.n_vocab, self.d), "output_norm.weight": (self.d,)}
        if self.d_state:
            out[STATE] = (self.d, self.d_state)
        for i in range(self.n_layers):
            b = f"blk.{i}."
            out |= {b + "attn_norm.weight": (self.d,), b + "attn_q.weight": (q, self.d), b + "attn_k.weight": (kv, self.d),
                    b + "attn_v.weight": (kv, self.d), b + "attn_output.weight": (self.d, q), b + "ffn_norm.weight": (self.d,),
                    b + "ffn_gate.weight": (self.ff, self.d), b + "ffn_up.weight": (self.ff, self.d),
                    b + "ffn_down.weight": (self.d, self.ff)}
        return out

    def check(self):
        if self.n_heads % self.n_kv or self.head_dim % 32 or self.d % 32 or self.ff % 32 or self.d_state % 32:
            raise SystemExit(f"{self}: row lengths must be multiples of 32 and heads a multiple of key heads, or the file cannot be quantised")
        return self


# --- files ---

def _field(reader, path, key, default=None):
    f = reader.get_field(key)
    if f is None:
        if default is None:
            raise SystemExit(f"{path}: {key} is missing: not a Llama GGUF file")
        return default
    return f.contents()


def read_shape(reader, path):
    arch = _field(reader, path, "general.architecture")
    if arch != "llama":
        raise SystemExit(f"{path}: architecture {arch}: only llama is supported")
    get = lambda key, default=None: _field(reader, path, "llama." + key, default)
    d, heads = get("embedding_length"), get("attention.head_count")
    width = {t.name: [int(n) for n in t.shape] for t in reader.tensors if t.name in ("token_embd.weight", STATE)}
    if "token_embd.weight" not in width:
        raise SystemExit(f"{path}: token_embd.weight is missing")
    return Shape(n_layers=get("block_count"), d=d, n_heads=heads, n_kv=get("attention.head_count_kv", heads),
                 head_dim=get("rope.dimension_count", d // heads), ff=get("feed_forward_length"), n_vocab=width["token_embd.weight"][1],
                 rope_base=float(get("rope.freq_base", 10000.0)), eps=float(get("attention.layer_norm_rms_epsilon")),
                 n_ctx=get("context_length"), d_state=width.get(STATE, [0])[0])


def load(path, device="cpu", dtype=torch.float32):
    """(shape, weights, reader) of a Llama GGUF of any dtype; weights are dequantised to `dtype`, norms to float32."""
    import gguf
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as e:
        raise SystemExit(f"{path}: {e}")
    shape = read_shape(reader, path)
    found, weights = {t.name: t for t in reader.tensors}, {}
    wanted = shape.tensors()
    if "output.weight" in found:
        wanted["output.weight"] = (shape.n_vocab, shape.d)
    if "rope_freqs.weight" in found:
        raise SystemExit(f"{path}: rope_freqs.weight: scaled rope is not supported")
    for name, size in wanted.items():
        t = found.get(name)
        if t is None or tuple(int(n) for n in reversed(t.shape)) != size:
            raise SystemExit(f"{path}: tensor {name} {'is missing' if t is None else f'has shape {list(t.shape)}'}, expected {size}")
        x = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(t.data, t.tensor_type)).reshape(size).astype(np.float32))
        weights[name] = x.to(device, torch.float32 if len(size) == 1 else dtype)
    return shape, weights, reader


@dataclasses.dataclass
class Vocab:
    """The tokenizer metadata of a file."""
    tokens: list  # bytes, as in the file
    types: list
    merges: list
    model: str = "gpt2"
    pre: str = "default"
    special: dict = dataclasses.field(default_factory=dict)  # "eos": id, …
    add_bos: bool = False
    template: str = None

    @staticmethod
    def of(reader):
        tokens, types = vocabulary(reader)
        get = lambda key: reader.get_field("tokenizer." + key).contents() if reader.get_field("tokenizer." + key) else None
        ids = {key: get(f"ggml.{key}_token_id") for key in ("bos", "eos", "unknown", "padding")}
        return Vocab(tokens, types, get("ggml.merges") or [], get("ggml.model") or "gpt2", get("ggml.pre") or "default",
                     {k: v for k, v in ids.items() if v is not None}, bool(get("ggml.add_bos_token")), get("chat_template"))


def vocabulary(reader):
    """(token strings as in the file, token types) of a GGUF file."""
    f = reader.get_field("tokenizer.ggml.tokens")
    if f is None:
        raise SystemExit("the target has no tokenizer.ggml.tokens")
    return [bytes(f.parts[i]) for i in f.data], list(reader.get_field("tokenizer.ggml.token_type").contents())


def vocabulary_sha256(tokens):
    return hashlib.sha256(b"\0".join(tokens)).hexdigest()


def _add_shape(w, shape):
    w.add_block_count(shape.n_layers)
    w.add_context_length(shape.n_ctx)
    w.add_embedding_length(shape.d)
    w.add_feed_forward_length(shape.ff)
    w.add_head_count(shape.n_heads)
    w.add_head_count_kv(shape.n_kv)
    w.add_rope_freq_base(shape.rope_base)
    w.add_rope_dimension_count(shape.head_dim)
    w.add_key_length(shape.head_dim)
    w.add_value_length(shape.head_dim)
    w.add_layer_norm_rms_eps(shape.eps)
    w.add_vocab_size(shape.n_vocab)


def _add_vocab(w, v):
    w.add_tokenizer_model(v.model)
    w.add_tokenizer_pre(v.pre)
    w.add_token_list(v.tokens)
    w.add_token_types(v.types)
    if v.merges:
        w.add_token_merges(v.merges)
    for key, i in v.special.items():
        w.add_uint32(f"tokenizer.ggml.{key}_token_id", i)
    w.add_bool("tokenizer.ggml.add_bos_token", v.add_bos)
    if v.template:
        w.add_chat_template(v.template)


def write(path, shape, weights, vocab, name, extra):
    """Writes a float32 GGUF, for `sooth quantize`; extra(writer) adds keys and tensors. The file appears when it is complete."""
    import gguf
    w = gguf.GGUFWriter(path + ".part", "llama")
    w.add_name(name)
    _add_shape(w, shape)
    _add_vocab(w, vocab)
    for tensor, x in weights.items():
        w.add_tensor(tensor, x.detach().float().cpu().numpy())
    extra(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(path + ".part", path)


MASK = "sooth.draft.output_mask"


def output_mask(ids, n_vocab):
    """A vocabulary subset as bits, one per id; the lowest bit of the first byte is id 0."""
    subset = np.zeros(n_vocab, bool)
    subset[np.asarray(ids)] = True
    return np.packbits(subset, bitorder="little").tobytes()


def vocab_subset(reader, n_vocab, device):
    """The vocabulary subset of a file as ascending ids; None if it has none."""
    f = reader.get_field(MASK)
    if f is None:
        return None
    bits = np.unpackbits(np.array(f.contents(), np.uint8), bitorder="little")
    return torch.from_numpy(np.flatnonzero(bits[:n_vocab])).to(device)


def export(path, shape, weights, target, name, output_ids=None, agreement=None):
    """Writes a draft with the vocabulary of its target (a reader) and its registration for this target. output_ids: vocabulary
    subset, None: all; agreement: with the target, on held-out text.

    The input of a draft is ids, never text, so only the first of the tokenizer's merges is written, and no chat template:
    they would take a tenth of the file."""
    vocab = Vocab.of(target)
    vocab.merges, vocab.template = vocab.merges[:1], None
    get = lambda key: target.get_field(key).contents() if target.get_field(key) else None

    def extra(w):
        w.add_string("sooth.draft.target.name", str(get("general.name")))
        w.add_string("sooth.draft.target.vocab_sha256", vocabulary_sha256(vocab.tokens))
        w.add_uint32("sooth.draft.target.embedding_length", get("llama.embedding_length"))
        w.add_uint32("sooth.draft.target.block_count", get("llama.block_count"))
        if get("general.license"):
            w.add_license(get("general.license"))
        if agreement is not None:
            w.add_float32("sooth.draft.agreement", agreement)
        if output_ids is not None:
            w.add_array(MASK, output_mask(output_ids, shape.n_vocab))

    write(path, shape, weights, vocab, name, extra)


# --- the pass ---

class Docs:
    """Concatenated texts: borders [n+1] (the last ones may repeat: empty texts), and a bound on their lengths."""

    def __init__(self, borders, max_len):
        self.borders, self.max_len, self._mask = borders, max_len, None

    def mask(self):
        if self._mask is None:
            n = int(self.borders[-1])
            at = torch.arange(n, device=self.borders.device)
            doc = torch.searchsorted(self.borders[1:].contiguous(), at.to(self.borders.dtype), right=True)
            self._mask = (doc[:, None] == doc[None, :]) & (at[:, None] >= at[None, :])
        return self._mask


def attend(q, k, v, docs):
    """q [T][heads][D], k and v [T][key heads][D] -> [T][heads][D], causal within each text."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn
        return varlen_attn(q, k, v, docs.borders, docs.borders, docs.max_len, docs.max_len, window_size=(-1, 0))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=docs.mask())[0].transpose(0, 1)


def rope_table(shape, n, device):
    """cos and sin [n][head_dim/2] in float32."""
    i = torch.arange(0, shape.head_dim, 2, dtype=torch.float64)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * shape.rope_base ** (-i / shape.head_dim)[None, :]
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x, cos, sin):
    """x [T][heads][D]; cos and sin [T][D/2]; rotates the pairs (2i, 2i+1), as in GGUF's Llama."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def rms_norm(x, w, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def qkv(x, cos, sin, norm, wq, wk, wv, shape):
    h = rms_norm(x, norm, shape.eps)
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, shape.head_dim)) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def attn_out_ffn(x, a, wo, norm, gate, up, down, shape):
    x = x + F.linear(a.flatten(-2), wo)
    h = rms_norm(x, norm, shape.eps)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


FIRST = ("attn_norm", "attn_q", "attn_k", "attn_v")
SECOND = ("attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def layer(weights, i, names):
    return [weights[f"blk.{i}.{n}.weight"] for n in names]


class Model:
    """A Llama over a weights dict. hidden() returns the hidden states after the last norm; logits are these times the output matrix."""

    def __init__(self, shape, weights, device, n_ctx, compiled=False):
        self.shape, self.weights = shape, weights
        self.cos, self.sin = rope_table(shape, n_ctx, device)
        self.qkv, self.attn_out_ffn = qkv, attn_out_ffn
        if compiled:
            self.qkv, self.attn_out_ffn = torch.compile(qkv), torch.compile(attn_out_ffn)

    def output(self, weights=None):
        w = weights or self.weights
        return w["output.weight"] if "output.weight" in w else w["token_embd.weight"]

    def hidden(self, ids, pos, docs, weights=None, keep=None, read=None):
        """ids, pos [T] -> [T][d] float32. `keep(i, k, v)` gets each layer's keys and values; read: (positions, the target's hidden states there)."""
        w, s = weights or self.weights, self.shape
        x = F.embedding(ids, w["token_embd.weight"]).to(w["blk.0.attn_q.weight"].dtype)
        if read and s.d_state:
            x = x.index_add(0, read[0], read[1].to(x.dtype) @ w[STATE].to(x.dtype).T)
        cos, sin = self.cos[pos], self.sin[pos]
        for i in range(s.n_layers):
            q, k, v = self.qkv(x, cos, sin, *layer(w, i, FIRST), s)
            if keep:
                keep(i, k, v)
            x = self.attn_out_ffn(x, attend(q, k, v, docs), *layer(w, i, SECOND), s)
        return rms_norm(x.float(), w["output_norm.weight"], s.eps)
