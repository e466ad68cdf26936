#!/usr/bin/env python3
"""Writes the tiny models of tests/golden/models, with the logits that Hugging Face transformers computes for them.

usage: golden_models.py OUT_FOLDER      (needs torch, transformers, safetensors; a CPU suffices)

Each OUT/<name>/ holds config.json, model.safetensors (F32) and expect.safetensors: `tokens` I32 [n] and
`logits` F32 [n][vocab], computed in float32 with eager attention. All parameters are random: matrices
normal with deviation 1.4/sqrt(inputs), embeddings normal (T5's position biases too), norm weights 1 ± 0.3 (Gemma stores them
minus 1), biases ± 0.5. The texts are longer than the sliding window and the original rope context.
Half of the configs are rewritten in the older form (rope_theta, rope_scaling).
"""
import datetime
import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file

VOCAB, N = 131, 100
COMMON = dict(vocab_size=VOCAB, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
              attention_dropout=0.0)


def small(**kw):
    return dict(COMMON, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, **kw)


CASES = {
    # name: (class, config, write the older config form)
    "llama": ("Llama", small(rms_norm_eps=1e-5, rope_theta=10000.0), True),
    "llama3_rope": ("Llama", small(rope_theta=500000.0, tie_word_embeddings=True, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)), True),
    "llama_linear_bias": ("Llama", dict(small(rope_theta=10000.0, attention_bias=True, mlp_bias=True, rope_scaling=dict(
        rope_type="linear", factor=4.0)), num_key_value_heads=4), False),
    "mistral_window": ("Mistral", small(sliding_window=24, head_dim=16, rope_theta=10000.0), False),
    "qwen2": ("Qwen2", small(tie_word_embeddings=True, rope_theta=1000000.0, use_sliding_window=False), True),
    "qwen2_yarn": ("Qwen2", small(rope_theta=1000000.0, rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32)), True),
    "qwen3": ("Qwen3", small(head_dim=16, rope_theta=1000000.0), False),
    "gemma3": ("Gemma3", dict(COMMON, hidden_size=40, intermediate_size=64, num_hidden_layers=7,
                              num_attention_heads=4, num_key_value_heads=1, head_dim=16, sliding_window=20,
                              query_pre_attn_scalar=20), False),
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_positions=128, n_embd=48, n_layer=3, n_head=4, bos_token_id=1,
                          eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), True),
}
NAMES = {"Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM", "Qwen2": "Qwen2ForCausalLM",
         "Qwen3": "Qwen3ForCausalLM", "Gemma3": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def randomise(model, gemma):
    g = torch.Generator().manual_seed(20261115)
    for name, p in model.named_parameters():
        uniform = torch.rand(p.shape, generator=g) * 2 - 1
        with torch.no_grad():
            if name.endswith("bias"):
                p.copy_(0.5 * uniform)
            elif p.dim() == 1:
                p.copy_(0.3 * uniform if gemma else 1 + 0.3 * uniform)
            elif "embed" in name or "wte" in name or "wpe" in name:
                p.copy_(torch.randn(p.shape, generator=g) * (0.5 if "wpe" in name else 1))
            else:
                fan_in = p.shape[0] if "c_" in name else p.shape[1]  # GPT-2's Conv1D is [in][out]
                p.copy_(torch.randn(p.shape, generator=g) * 1.4 / fan_in ** 0.5)


def older_form(cfg):
    """Replaces rope_parameters by rope_theta and rope_scaling, as in files from before transformers 5."""
    rope = cfg.pop("rope_parameters", None)
    if rope:
        cfg["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            cfg["rope_scaling"] = rope
    for key in ("layer_types", "dtype"):
        cfg.pop(key, None)


def make(out, name, cls, kw, old):
    config_class = getattr(transformers, CONFIGS.get(cls, cls + "Config"))
    kw = dict(kw)
    theta, scaling = kw.pop("rope_theta", None), kw.pop("rope_scaling", None)
    if theta:
        kw["rope_parameters"] = dict({"rope_type": "default"}, **(scaling or {}), rope_theta=theta)
    config = config_class(**kw)
    config._attn_implementation = "eager"
    model = getattr(transformers, NAMES[cls])(config).float().eval()
    randomise(model, cls == "Gemma3")
    tokens = torch.randint(0, VOCAB, (1, N), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(tokens).logits[0].float()
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    for extra in ("generation_config.json",):
        path = os.path.join(folder, extra)
        if os.path.exists(path):
            os.remove(path)
    path = os.path.join(folder, "config.json")
    cfg = json.load(open(path))
    if old:
        older_form(cfg)
    json.dump(cfg, open(path, "w"), indent=1, sort_keys=True)
    save_file({"tokens": tokens[0].to(torch.int32), "logits": logits.contiguous()},
              os.path.join(folder, "expect.safetensors"))
    print(f"{name:20} parameters {sum(p.numel() for p in model.parameters()):7}  logits' deviation {logits.std():.2f}"
          f"  largest {logits.abs().max():.2f}")
    assert logits.std() >= 1, name


T5_CASES = {
    # tied, ReLU, few buckets and a short distance; and untied, gated, the usual ones. Texts are longer than the distances.
    "t5_v10": dict(tie_word_embeddings=True, feed_forward_proj="relu", relative_attention_num_buckets=16, relative_attention_max_distance=40,
                   num_layers=2, num_decoder_layers=3),
    "t5_v11": dict(tie_word_embeddings=False, feed_forward_proj="gated-gelu", num_layers=3, num_decoder_layers=2),
}


def make_t5(out, name, kw):
    """expect.safetensors also has `source` I32: what the encoder reads."""
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=64, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
                                   eos_token_id=1, pad_token_id=0, **kw)
    config._attn_implementation = "eager"
    model = transformers.T5ForConditionalGeneration(config).float().eval()
    randomise(model, False)
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p_name, p in model.named_parameters():
            if p_name == "shared.weight":
                p.copy_(torch.randn(p.shape, generator=g))
            elif "relative_attention_bias" in p_name:
                p.copy_(2 * torch.randn(p.shape, generator=g))
            elif p_name.endswith(".q.weight"):  # scores are not divided by sqrt(d_kv)
                p.mul_(config.d_kv ** -0.5)
    source = torch.randint(3, VOCAB, (1, 150), generator=g)
    tokens = torch.randint(3, VOCAB, (1, 160), generator=g)
    tokens[0, 0] = 0
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=tokens).logits[0].float()
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    os.remove(os.path.join(folder, "generation_config.json"))
    save_file({"tokens": tokens[0].to(torch.int32), "source": source[0].to(torch.int32), "logits": logits.contiguous()},
              os.path.join(folder, "expect.safetensors"))
    print(f"{name:20} parameters {sum(p.numel() for p in model.parameters()):7}  logits' deviation {logits.std():.2f}"
          f"  largest {logits.abs().max():.2f}")


def main():
    out = sys.argv[1]
    torch.set_num_threads(4)
    for name, kw in T5_CASES.items():
        make_t5(out, name, kw)
    for name, (cls, kw, old) in CASES.items():
        make(out, name, cls, kw, old)
    with open(os.path.join(out, "README.md"), "w") as f:
        f.write("# Tiny models with the logits of Hugging Face transformers\n\n"
                f"Written by `python3 tools/golden_models.py tests/golden/models` on {datetime.date.today()} with torch "
                f"{torch.__version__.split('+')[0]} and transformers {transformers.__version__}, float32, eager attention, CPU.\n"
                "The script's opening comment says what each file holds and how the parameters are drawn.\n")


if __name__ == "__main__":
    main()
