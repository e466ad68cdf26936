#!/usr/bin/env python3
"""Writes tests/golden/tokenizers/*.json: token ids computed by the reference libraries.

  corpus.json   texts of many kinds, base64 (some are not valid UTF-8)
  NAME.json     ids of the corpus for a real tokenizer.json, by Hugging Face `tokenizers`
  small.json    made-up tokenizers, one per component and flag, with their ids and decoded texts
  unigram.json  the same for Unigram models and a small precompiled charsmap
  gguf-NAME.json  ids of the corpus for a real GGUF file, by llama-cpp-python

Bytes are passed to the libraries as bytes.decode("utf-8", errors="replace"), which is sooth's rule too.
Usage: golden_tokenizers.py SHARED_FOLDER [MODELS_FOLDER]; needs tokenizers, llama-cpp-python.
"""
import base64
import datetime
import json
import lzma
import os
import random
import sys

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUT = "tests/golden/tokenizers"
DATE = datetime.date.today().isoformat()

TEXTS = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\t\n", " \n \n\n", "a", " a", "a ", "  a  b   c    d",
    "Hello, world!", " Hello World", "don't I'll we've THEY'RE it'S 'tis ''s 'ſ 'K", "snake_case camelCase HTTPServer2Go",
    "def f(x):\n    if x > 1:\n\treturn [i**2 for i in range(x)]  # ²\n\n\n    return None\r\n",
    "int main(void) { printf(\"%5.2f\\n\", a[i]->b); /* ünï */ return 0; }\n\t\t}\n",
    "<div class=\"a b\">&nbsp;<br/></div>\n<!-- x --> https://example.org/a?b=c&d=%20#e",
    "{\"key\": [1, 2.5e-10, null, true], \"ключ\": \"значение\"}",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Straße, GROẞ, naïve Café.",
    "Größenwahn\u00a0– „Zitat“ ‚einfach‘ … 3 % von 1.234,56 €",
    "我想在apple工作1314151天～ 你好，世界！《书名》「引号」",
    "吾輩は猫である。名前はまだ無い。カタカナ ﾊﾝｶｸ ひらがな々〆ヵヶ",
    "대한민국 한국어 띄어쓰기 ㄱㄴㄷ", "مرحبا بالعالم، كيف حالك؟ ٠١٢٣", "שלום עולם", "नमस्ते दुनिया हिन्दी १२३",
    "កាន់តែពិសេសអាច ไทยภาษา Việt Nam Cửa", "нещо на Български Ёлка ђ", "Ἀρχὴ σοφίας ὀνομάτων ἐπίσκεψις ς Σ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ ☺ 🦙.cpp 😶‍🌫️", "🚀🚀🚀 (normal) ✅", "e\u0301 a\u0308o\u0302\u0323 \u1e9b\u0323 \u212b \u2126 \uac00\u11a8 \u0958",
    "q\u0323\u0307 q\u0307\u0323 \u0344 \u0300\u0301\u0302 x\u0334\u0335\u0336", "ﬁ ﬂ ① Ⅷ ㎏ ﷺ ½ ¼ x² y₃ ſt",
    "0 1 12 123 1234 12345 123456 1234567 3.14 1,000 0xFF 1e9 ٣٤ ೪೫ 四 Ⅻ ²³", "00000000000000000000", "1a2b3c 4-5-6 7/8",
    "a\u200bb\u200cc\u200dd \ufeffbom \u2060 \u00ad\u180e \u2028 \u2029 \u0085 \u3000全角", "\x00", "a\x00b\x00\x00c", "\x01\x02\x7f\x1b[31mred\x1b[0m\x08",
    "      leading", "trailing      ", "tabs\t\t\tand    spaces \t \t mixed\n   \n\t\n  x", "a\n\n\n\n\n\n\n\n\n\nb", " \r\n \r\n\r\n", "\u2003em\u2002en\u00a0nb",
    "<s>", "</s>", "<unk>", "<|endoftext|>", "x<|endoftext|>y", "<|endoftext|><|endoftext|> <|endoftext|>",
    "<|im_start|>system\nYou are.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "<s>[INST] Hi [/INST] Hello </s> <s>x",
    "<think>\nhm\n</think>\n\n<tool_call>{}</tool_call><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "<|im_end", "<|im_end|", "<<|im_end|>>", "< |im_end|>",
    "<0x0A> <0xE2> ▁ ▁▁▁ Ġ Ċ Ġa", "<bos> <eos> <start_of_turn>user\nhi<end_of_turn>\n<pad><mask><unused0>", "[multimodal]<table><td>x</td></table>>▁</",
    "a" * 300, "ab" * 200, "supercalifragilisticexpialidocious" * 8, "ACGT" * 100, "=" * 120 + "-" * 77 + "." * 33, "!" * 50 + "?" * 31, " " * 500, "\n" * 70, "\t" * 65,
    "é" * 90, "漢" * 90, "🦙" * 40, "\u0301" * 60, "x y " * 60, "\u4e00\u4e8c\u31350\U00031350\U000323af\U0002ebf0 \U0001e4d0 \u1c89\u1c8a \ua7cb\U00010d50\U00011f00",
    "\U0001f9d1\u200d\U0001f4bb \U0001fae8 \U0001fac3 \u20ff \U000e0001 \U0010ffff \ufffe \uffff", "\U0001d54f\U0001d538 𝓗𝓮𝓵𝓵𝓸 𝟙𝟚𝟛",
]
BYTES = [
    b"\xff", b"\xfe\xff", b"abc\x80def", b"\xc3", b"\xc3\x28", b"\xe2\x82", b"\xe2\x82x", b"\xf0\x9f\x98", b"\xf0\x9f\x98 x", b"\xf0\x9f\x98\xf0\x9f\x98\x80",
    b"\xc0\xaf\xc1\x81", b"\xed\xa0\x80\xed\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xe0\x80\x80\xe0\x9f\xbf", b"\xf0\x80\x80\x80\xf0\x8f\xbf\xbf",
    b"caf\xe9 na\xefve", b"\xbf\xbf\xbf <|im_end|\xff> \xe4\xbd\xa0\xe5\xa5", b"\xe3\x81\x82\xe3\x81\xe3\x82", b"a\xffb\xfec\xfd",
]


def corpus():
    rng = random.Random(7)
    out = [t.encode() for t in TEXTS] + list(BYTES)
    for n in (8, 16, 24, 40, 64, 100):
        out += [bytes(rng.randrange(256) for _ in range(n)) for _ in range(3)]
    pools = ["abc ABC'\n", " \t\n\r\u00a0x", "0123 .,", "äöüßÄ e\u0301\u0308", "的是不我一 ，。", "<|>/s im_end", "\u0300\u0323\u0345\u093c\u3099 aか", "𐍈🙂️\u200d a"]
    for pool in pools:
        for n in (7, 19, 45):
            out.append("".join(rng.choice(pool) for _ in range(n)).encode())
    while len(out) < 190:
        n = rng.randrange(3, 25)
        out.append("".join(chr(c) for c in (rng.randrange(0x30000) for _ in range(n)) if not 0xD800 <= c < 0xE000).encode())
    return out


def text(b):
    return b.decode("utf-8", errors="replace")


def header(**more):
    return {"made_by": "tools/golden_tokenizers.py", "date": DATE, **more}


def write(name, data):
    path = f"{OUT}/{name}.json"
    with open(path, "w") as f:
        f.write(json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("],[", "],\n[") + "\n")
    print(path, os.path.getsize(path))


def wrapping(plain, special):
    """The prefix and suffix that add_special_tokens puts around every text."""
    for k in range(len(special[0]) + 1):
        pre, suf = special[0][:k], special[0][k + len(plain[0]):]
        if all(s == pre + p + suf for p, s in zip(plain, special)):
            return pre, suf
    raise SystemExit("special tokens do not just surround the text")


def real(shared, texts):
    for name in sorted(os.listdir(f"{shared}/tokenizers")):
        raw = lzma.open(f"{shared}/tokenizers/{name}/tokenizer.json.xz").read().decode()
        tok = Tokenizer.from_str(raw)
        plain = [tok.encode(text(b), add_special_tokens=False).ids for b in texts]
        special = [tok.encode(text(b), add_special_tokens=True).ids for b in texts]
        pre, suf = wrapping(plain, special)
        write(name, header(source=f"tokenizers/{name}/tokenizer.json", tokenizers=tokenizers.__version__,
                           prefix=pre, suffix=suf, ids=plain))


def gguf(models_dir, texts):
    import llama_cpp
    for name in ("smollm2",):
        path = f"{models_dir}/{name}.gguf"
        if not os.path.exists(path):
            print("skip", path)
            continue
        m = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        ids = [m.tokenize(text(b).encode(), add_bos=False, special=True) for b in texts]
        write("gguf-" + name, header(source=f"{name}.gguf", llama_cpp_python=llama_cpp.__version__, ids=ids))


# --- made-up tokenizers ---------------------------------------------------------------------------

TRAIN = ("the cat sat on the mat and the dog ate the hat that the cat had. don't we'll it's 12 123 1234 2024 "
         "Größe Straße über naïve café 你好 世界 a  b   c\n\n def main():\n    return 0\n ") * 4


def trained(pre, norm=None, alphabet=(), byte_fallback=False, **opts):
    """A small BPE model as JSON, trained on TRAIN under the given pre-tokenizer."""
    t = Tokenizer(models.BPE(byte_fallback=byte_fallback, **opts))
    if norm:
        t.normalizer = norm
    if pre:
        t.pre_tokenizer = pre
    special = (["<unk>"] if "unk_token" in opts else []) + (["<0x%02X>" % b for b in range(256)] if byte_fallback else [])
    t.train_from_iterator([TRAIN], trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 120, initial_alphabet=list(alphabet), special_tokens=special, show_progress=False))
    return json.loads(t.to_str())["model"]


def added(i, content, **flags):
    base = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    return {"id": i, "content": content, **base, **flags}


def split(pattern, behavior, invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def small_specs():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bl = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bl_raw = {**bl, "use_regex": False}
    mods = {
        "bytes": trained(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet=sorted(alphabet)),
        "meta": trained(None, norm=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
                        byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        "chars": trained(pre_tokenizers.Whitespace(), unk_token="<unk>"),
    }
    n = {k: len(m["vocab"]) for k, m in mods.items()}
    word = {"Regex": "\\w+"}
    dash = {"String": "-"}
    specs = []

    def spec(name, model, **parts):
        specs.append({"name": name, "model": model, **parts})

    spec("bytes", "bytes", pre_tokenizer=bl, decoder=bl)
    spec("bytes, prefix space", "bytes", pre_tokenizer={**bl, "add_prefix_space": True}, decoder=bl)
    spec("bytes, no regex", "bytes", pre_tokenizer=bl_raw, decoder=bl)
    spec("bytes, ignore_merges", "bytes", model_options={"ignore_merges": True}, pre_tokenizer=bl, decoder=bl)
    for b in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for inv in (False, True):
            spec(f"split {b} {inv}", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [split(word, b, inv), bl_raw]})
        spec(f"split string {b}", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [split(dash, b), bl_raw]})
        spec(f"punctuation {b}", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Punctuation", "behavior": b}, bl_raw]})
    spec("split empty matches", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [split({"Regex": "(?=(\\d{3})+(?!\\d))|x*"}, "Isolated"), bl_raw]})
    spec("nested classes", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [split({"Regex": " ?[^(\\s|[.,!?…。，、])]+"}, "Isolated"), bl_raw]})
    spec("ruby syntax", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [split({"Regex": "^\\h+$|(?m:a.b)|\\bth\\B|\\W{2}|\\u00e9"}, "Isolated"), bl_raw]})
    spec("digits", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bl]})
    spec("digits contiguous after bytes", "bytes", decoder=bl, pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"}, bl, {"type": "Digits", "individual_digits": False}, split({"Regex": "[0-9][0-9][0-9]"}, "Isolated")]})
    norm = [("NFC", {}), ("NFD", {}), ("NFKC", {}), ("NFKD", {}), ("Lowercase", {}), ("StripAccents", {}),
            ("Strip", {"strip_left": True, "strip_right": False}), ("Strip", {"strip_left": False, "strip_right": True}),
            ("Replace", {"pattern": {"Regex": "a+|\\s{2,}"}, "content": "é"}), ("Prepend", {"prepend": "the "})]
    for kind, args in norm:
        spec(f"normalizer {kind} {args}", "bytes", normalizer={"type": kind, **args}, pre_tokenizer=bl, decoder=bl)
    spec("normalizer sequence", "bytes", pre_tokenizer=bl, decoder=bl, normalizer={"type": "Sequence", "normalizers": [
        {"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, {"type": "Strip", "strip_left": True, "strip_right": True}]})
    spec("byte-level normalizer", "bytes", normalizer={"type": "ByteLevel"}, decoder=bl)
    llama_dec = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                                                  {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    llama_norm = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    spec("llama 2 form", "meta", normalizer=llama_norm, decoder=llama_dec)
    spec("gemma form", "meta", normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, decoder={**llama_dec, "decoders": llama_dec["decoders"][:3]})
    spec("no byte fallback", "meta", model_options={"byte_fallback": False}, normalizer=llama_norm, decoder=llama_dec)
    spec("no byte fallback, no fusing", "meta", model_options={"byte_fallback": False, "fuse_unk": False}, normalizer=llama_norm, decoder=llama_dec)
    for scheme in ("always", "first", "never"):
        for sp in (True, False):
            m = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": sp}
            spec(f"metaspace {scheme} {sp}", "meta", pre_tokenizer=m, decoder=m if sp else None)
    spec("whitespace", "chars", pre_tokenizer={"type": "Whitespace"})
    spec("whitespace split", "chars", pre_tokenizer={"type": "WhitespaceSplit"})
    spec("delimiter", "chars", pre_tokenizer={"type": "CharDelimiterSplit", "delimiter": "t"})
    spec("bert", "chars", pre_tokenizer={"type": "BertPreTokenizer"})
    spec("nothing", "chars")
    b = n["bytes"]
    specials = [added(b, "<s>", special=True), added(b + 1, "</s>", special=True), added(b + 2, "<think>"), added(b + 3, "<thi"), added(b + 4, "é!")]
    tmpl = {"type": "TemplateProcessing", "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [b], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [b + 1], "tokens": ["</s>"]}},
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]}
    tmpl["pair"] = tmpl["single"] + [{"Sequence": {"id": "B", "type_id": 0}}]
    spec("added tokens", "bytes", pre_tokenizer=bl, decoder=bl, added_tokens=specials, post_processor={"type": "Sequence", "processors": [bl, tmpl]})
    for flag in ("lstrip", "rstrip", "single_word"):
        spec("added " + flag, "bytes", pre_tokenizer=bl, decoder=bl, added_tokens=[added(b, "<s>", special=True, **{flag: True}), added(b + 1, "cat", **{flag: True})])
    spec("added lstrip and rstrip", "bytes", pre_tokenizer=bl, decoder=bl, added_tokens=[added(b, "<s>", lstrip=True, rstrip=True), added(b + 1, "</s>", lstrip=True)])
    spec("added normalized", "bytes", normalizer={"type": "Lowercase"}, pre_tokenizer=bl, decoder=bl,
         added_tokens=[added(b, "CAT", normalized=True), added(b + 1, "DoG"), added(b + 2, "<S>", normalized=True, special=True)])
    spec("added with metaspace first", "meta", pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
         added_tokens=[added(n["meta"], "<s>", special=True)])
    return mods, specs


SMALL_TEXTS = [
    "", " ", "the cat sat on the mat", "  the  cat\n\n sat ", "don't we'll IT'S", "12 123 1234567 x2024y", "1000000-25-x-", "--a--b--", "a-b -c- -",
    "Größe Straße NAÏVE café über", "e\u0301a\u0308 \u212b ﬁ ½ ① İI", "你好，世界！ hello。", "a.b,c!?(d) [e]…", "x\ta\r\nb\u00a0c\u3000d", "🙂👍🏽 ok", "naïve\u0301 ẛ̣", "²³¹ ò¼ é",
    "<s>the</s> <think>cat<thi nk>", " <s>  the  </s> cat", "the cat category concat cat-cat cat", "CAT cat Dog DoG dog <S>x<s>", "<s> the cat <s>", "beef\ndead!\na\nb acb",
    "the that ath bath", "▁the ▁▁ cat", "\x00a\x01 \x7f", "tttt t t", "aaaa  bbb   ccc", "def main():\n    return 0\n", "_x_ __init__ a\u0301_b\u200dc \u0660",
]
SMALL_BYTES = [b"caf\xe9", b"\xf0\x9f\x98 the", b"\xed\xa0\x80cat\xff"]


def charsmap(pairs):
    """A precompiled charsmap in SentencePiece's binary form: a double array with one child block per node, and the replacements."""
    units, texts, n_blocks = {}, b"", 1
    leaves = {}
    for src, dst in pairs:
        leaves[src.encode()] = len(texts)
        texts += dst.encode() + b"\0"
    base = {b"": 256}  # children of a prefix are at base ^ byte
    for key in leaves:
        for i in range(1, len(key)):
            if key[:i] not in base:
                n_blocks += 1
                base[key[:i]] = 256 * n_blocks
    values = 256 * (n_blocks + 1)
    for key in sorted({k[:i] for k in leaves for i in range(1, len(k) + 1)}, key=len):
        at = base[key[:-1]] ^ key[-1]
        # a key's value is in the unit that its offset leads to; a key that is also a prefix keeps it beside its children, at byte 0
        to = base.get(key, values)
        units[at] = key[-1] | (at ^ to) << 10 | (256 if key in leaves else 0)
        if key in leaves:
            units[to] = leaves[key] | 1 << 31
            values += key not in base
    units[0] = 256 << 10
    array = [units.get(i, 0) for i in range(max(units) + 1)]
    trie = b"".join(u.to_bytes(4, "little") for u in array)
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + texts).decode()


def trained_unigram(**opts):
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"] + (["<0x%02X>" % b for b in range(256)] if opts.get("byte_fallback") else [])
    t.train_from_iterator([TRAIN], trainers.UnigramTrainer(vocab_size=len(special) + 90, special_tokens=special, unk_token="<unk>", show_progress=False))
    return {**json.loads(t.to_str())["model"], "unk_id": 2, **opts}


def unigram_specs():
    mods = {"bytes": trained_unigram(byte_fallback=True), "plain": trained_unigram(byte_fallback=False)}
    # equal scores, ties, pieces of several unknown characters
    mods["ties"] = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [
        ["<unk>", 0.0], ["\u2581", -2.0], ["a", -1.0], ["b", -1.0], ["ab", -2.0], ["ba", -2.0], ["aba", -3.0], ["\u4f60\u597d", -40.0], ["e\u0301", -3.0], ["t", -4.5]]}
    meta = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    t5 = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, meta]}
    maps = {"type": "Precompiled", "precompiled_charsmap": charsmap([
        ("\ufb01", "fi"), ("e\u0301", "\u00e9"), ("\u3000", " "), ("\u00a0", " "), ("\t", " "), ("\n", " "), ("\u2460", "1"), ("\u0301", ""), ("A", "a"),
        ("AB", "x"), ("\U0001f642", ":)"), ("\u212b", "\u00c5")])}
    spaces = [{"type": "Strip", "strip_left": False, "strip_right": True}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}]
    end = {"type": "TemplateProcessing", "pair": [], "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
           "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]}
    end["pair"] = end["single"] + [{"Sequence": {"id": "B", "type_id": 0}}]
    fall = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, meta]}
    specials = [added(i, t, special=True) for i, t in enumerate(("<pad>", "</s>", "<unk>"))]
    return mods, [
        {"name": "byte fallback", "model": "bytes", "pre_tokenizer": meta, "decoder": fall},
        {"name": "no byte fallback", "model": "plain", "pre_tokenizer": meta, "decoder": meta},
        {"name": "form of T5", "model": "plain", "normalizer": maps, "pre_tokenizer": t5, "decoder": meta, "post_processor": end, "parse_only": True, "added_tokens": specials},
        {"name": "form of converters", "model": "bytes", "normalizer": {"type": "Sequence", "normalizers": [maps] + spaces}, "pre_tokenizer": meta,
         "decoder": fall, "post_processor": end, "parse_only": True, "added_tokens": specials},
        {"name": "ties", "model": "ties", "pre_tokenizer": meta, "decoder": meta},
        {"name": "no pre-tokenizer", "model": "ties"},
    ]


UNIGRAM_TEXTS = ["abab ababa bab aab", "\u4f60\u597d\u4f60 x\u4f60\u597d", "e\u0301 \u0301 A AB ABA \ufb01ne \u3000 a\u00a0b", "\U0001f642\U0001f642 \U0001f642\u200d\U0001f642",
                 "\u212bngstr\u00f6m \u2460\u2461", "x<0x40>y", "\u2581\u2581a\u2581 b", "   spaces   at both ends   "]


def unigram():
    mods, specs = unigram_specs()
    made("unigram", mods, specs, [t.encode() for t in SMALL_TEXTS + UNIGRAM_TEXTS] + SMALL_BYTES)


def small():
    made("small", *small_specs(), [t.encode() for t in SMALL_TEXTS] + SMALL_BYTES)


def made(file, mods, specs, texts):
    for s in specs:
        model = {**mods[s["model"]], **s.get("model_options", {})}
        full = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": s.get("added_tokens", []), "normalizer": s.get("normalizer"),
                "pre_tokenizer": s.get("pre_tokenizer"), "post_processor": s.get("post_processor"), "decoder": s.get("decoder"), "model": model}
        tok = Tokenizer.from_str(json.dumps(full))
        plain = [tok.encode(text(b), add_special_tokens=False).ids for b in texts]
        s["special"] = wrapping(plain, [tok.encode(text(b)).ids for b in texts])
        s["ids"] = plain
        # For an added token matched after normalisation the library prints the normalised spelling; sooth prints the original.
        s["decoded"] = None if s["name"] == "added normalized" else [tok.decode(p) for p in plain]
        tok.encode_special_tokens = True
        s["unparsed"] = [tok.encode(text(b), add_special_tokens=False).ids for b in texts] if "added_tokens" in s and not s.pop("parse_only", False) else None
    write(file, header(tokenizers=tokenizers.__version__, texts=[base64.b64encode(b).decode() for b in texts], models=mods, tokenizers_made=specs))


def main():
    shared, models_dir = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    os.makedirs(OUT, exist_ok=True)
    texts = corpus()
    write("corpus", header(texts=[base64.b64encode(b).decode() for b in texts]))
    small()
    unigram()
    real(shared, texts)
    if models_dir:
        gguf(models_dir, texts)


if __name__ == "__main__":
    main()
