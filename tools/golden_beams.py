#!/usr/bin/env python3
"""Writes tests/golden/beams.json: results of beam search by `generate` of Hugging Face transformers, on tiny models of tests/golden/models.

usage: golden_beams.py tests/golden      (needs torch, transformers)

Each case has a prompt (T5: the source), a width, length penalty, kind of early stopping, end tokens, a maximum length and a number of
results; end tokens are chosen from likely answers, so that many hypotheses end. Models run in float32, on the CPU.

Near ties. Rounding decides between two candidates that are almost equal, and it differs between programs. So each case runs N_NOISY times
more, with a random number of up to NOISE added to every log probability of every hypothesis and step. If one of these runs gives another text
or order, the case is left out. Errors of float32 are below 2e-5 here: NOISE is ten times that, and a tie that such an error could decide
survives all N_NOISY runs once in 2^N_NOISY.

A width of 1 is what transformers calls greedy search: it has no scores; they are computed here from the log probabilities.

generate() runs without a cache for T5: transformers 5.23 makes as many layers of a cache as the encoder has (num_hidden_layers stands for
num_layers in its T5Config), and fails if the decoder has more, as t5_v10's has ("list index out of range" in cache_utils.py). A real model with
these layers fails in the same way; without a cache the results are the same.
"""
import datetime
import json
import os
import sys

import torch
import transformers

MODELS, N_CASES = ("llama", "t5_v10", "t5_v11"), 40
WIDTHS, PENALTIES, STOPS = (1, 2, 4, 8), (1.0, 1.0, 0.0, 2.0, -1.0, 0.5), (False, True, "never")
NOISE, N_NOISY = 2e-4, 16


class Noise(transformers.LogitsProcessor):
    """Adds noise to the log probabilities of all but the first of the searches that run together."""

    def __init__(self, beams, generator):
        self.beams, self.generator = beams, generator

    def __call__(self, ids, scores):
        noise = NOISE * (2 * torch.rand(scores.shape, generator=self.generator) - 1)
        noise[:self.beams] = 0
        return scores + noise


class LogProbs(transformers.LogitsProcessor):
    """Greedy search works on logits; beam search has normalised them already, and a second time changes nothing."""

    def __call__(self, ids, scores):
        return torch.log_softmax(scores, -1)


def load(folder):
    if json.load(open(os.path.join(folder, "config.json"))).get("is_encoder_decoder"):
        m = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    else:
        m = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return m.eval()


def generate(m, case, generator):
    """[(tokens, score)], best first; None near a tie."""
    beams, n = case["beams"], case["n_best"]
    t5 = m.config.is_encoder_decoder
    m.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=case["eos"] or None,
                                                        decoder_start_token_id=0 if t5 else None)
    extra = {} if beams == 1 else dict(length_penalty=case["length_penalty"], early_stopping=case["early_stopping"], num_return_sequences=n)
    ids = torch.tensor([case["prompt"]] * (1 + N_NOISY))
    o = m.generate(input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=beams, do_sample=False, max_new_tokens=case["max_new"],
                   use_cache=not t5, return_dict_in_generate=True, output_scores=True,
                   logits_processor=transformers.LogitsProcessorList([LogProbs(), Noise(beams, generator)]), **extra)
    sequences = [s[1 if t5 else len(case["prompt"]):].tolist() for s in o.sequences]
    sequences = [cut(s, case["eos"]) for s in sequences]
    runs = [sequences[i:i + n] for i in range(0, len(sequences), n)]
    if any(r != runs[0] for r in runs):
        return None
    if beams > 1:
        return list(zip(runs[0], o.sequences_scores[:n].tolist()))
    text = runs[0][0]
    total = sum(float(o.scores[i][0, t]) for i, t in enumerate(text))
    return [(text, total / len(text) ** case["length_penalty"])]


def cut(tokens, eos):
    """Without what pads shorter answers."""
    for i, t in enumerate(tokens):
        if t in eos:
            return tokens[:i + 1]
    return tokens


def draw_case(m, generator):
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    case = dict(prompt=torch.randint(3, m.config.vocab_size, (draw(1, 40),), generator=generator).tolist(), beams=WIDTHS[draw(0, len(WIDTHS))],
                eos=[], max_new=draw(2, 25), length_penalty=PENALTIES[draw(0, len(PENALTIES))], early_stopping=STOPS[draw(0, len(STOPS))])
    case["n_best"] = draw(1, case["beams"] + 1)
    free = generate(m, dict(case, beams=1, n_best=1), generator)
    likely = free[0][0] if free else []
    case["eos"] = sorted({likely[draw(0, len(likely))] for _ in range(draw(0, 4))}) if likely else []
    return case


def main(folder):
    torch.set_num_threads(1)
    generator, out, left_out, ended, n_answers = torch.Generator().manual_seed(20261119), [], 0, 0, 0
    for name in MODELS:
        m, cases = load(os.path.join(folder, "models", name)), []
        while len(cases) < N_CASES:
            case = draw_case(m, generator)
            with torch.no_grad():
                answers = generate(m, case, generator)
            if answers is None:
                left_out += 1
                continue
            case["sequences"], case["scores"] = [a for a, _ in answers], [s for _, s in answers]
            ended += sum(a[-1] in case["eos"] for a, _ in answers)
            n_answers += len(answers)
            cases.append(case)
        out.append(dict(model=name, cases=cases))
    source = (f"tools/golden_beams.py tests/golden on {datetime.date.today()}: transformers {transformers.__version__}, torch "
              f"{torch.__version__.split('+')[0]}, float32, CPU")
    with open(os.path.join(folder, "beams.json"), "w") as f:
        json.dump(dict(source=source, models=out), f)
        f.write("\n")
    print(f"{sum(len(x['cases']) for x in out)} cases, {left_out} left out near ties, {ended} of {n_answers} answers ended by an end token")


if __name__ == "__main__":
    main(sys.argv[1])
