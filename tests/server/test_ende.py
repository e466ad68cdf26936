#!/usr/bin/env python3
"""An encoder-decoder model behind the API: the translator that comes with the program. Its prompt is the source, which the context of the
answer does not hold; what does not fit is refused in the API's words, and service goes on."""
import os
import time

import rig

MODEL = os.path.join(rig.ROOT, "models", "ende", "ende-q4_0.gguf")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SOURCE = "I would like to thank the rapporteur for her excellent report."
BASE = {"prompt": SOURCE, "temperature": 0, "max_tokens": 40}
CTX, PAGES = 64, 4


def ids(n):
    return [100 + i % 50 for i in range(n)]


def translates():
    plain = S.ok(TEXT, {**BASE, "speculative": {"drafter": "none"}})
    assert "Bericht" in plain["choices"][0]["text"] and plain["choices"][0]["finish_reason"] == "stop", plain
    for more in ({}, {"speculative": {"drafter": "model", "length": 4}}, {"speculative": {"drafter": "lookup"}}):
        o = S.ok(TEXT, {**BASE, **more})
        assert o["choices"][0]["text"] == plain["choices"][0]["text"], (more, o)


def prompts_leave_the_context_to_the_answer():
    """max_tokens holds after a source that is almost as long as the context, and the answer may fill the context."""
    for n_source in (3, CTX - 1, CTX):
        for most in (1, 20, CTX - 1, CTX, 1000, -1):
            o = S.ok(TEXT, {**BASE, "prompt": ids(n_source), "max_tokens": most, "ignore_eos": True})
            want = min(most, CTX - 1) if most > 0 else CTX - 1
            assert o["usage"]["completion_tokens"] == want, (n_source, most, o["usage"])
            assert o["choices"][0]["finish_reason"] == "length", o


def refused(body, param, *words, path=TEXT):
    status, _, o = S.post(path, body)
    e = o["error"]
    assert status == 400 and e["param"] == param and e["code"], o
    for w in words:
        assert w in e["message"], (w, e)
    assert S.ok(TEXT, BASE)["choices"][0]["finish_reason"] == "stop"


def bad_sources():
    refused({**BASE, "prompt": ids(CTX + 1)}, "prompt", f"{CTX + 1} tokens", f"at most {CTX}", "shorten it", "raise the server's --ctx-size")
    refused({**BASE, "prompt": "the house " * 100}, "prompt", "shorten it")
    refused({**BASE, "prompt": []}, "prompt")
    for empty in ("", " ", [1]):  # nothing but the end token
        refused({**BASE, "prompt": empty}, "prompt", "'prompt' is empty: the encoder needs a text")
    refused({**BASE, "prompt": [SOURCE, ""]}, "prompt[1]", "is empty")
    refused({**BASE, "prompt": [99999]}, "prompt", "99999", "vocabulary")
    refused({**BASE, "echo": True, "logprobs": 1, "max_tokens": 0}, "logprobs", "'logprobs' for the prompt", "source text")
    refused({"messages": [{"role": "user", "content": "hi"}]}, None, "no chat template", "/v1/completions", path=CHAT)


def beams():
    o = S.ok(TEXT, {**BASE, "max_tokens": 20, "use_beam_search": True, "n": 2, "best_of": 4})
    assert len({c["text"] for c in o["choices"]}) == 2, o
    refused({**BASE, "max_tokens": CTX - 1, "use_beam_search": True, "best_of": 30}, "best_of", "lower 'best_of' or 'max_tokens'",
            "raise the server's --kv-pages")
    refused({**BASE, "use_beam_search": True, "best_of": 4, "length_penalty": -11}, "length_penalty", "-10")
    o = S.ok(TEXT, {**BASE, "max_tokens": 20, "use_beam_search": True, "best_of": 2, "length_penalty": -1})
    assert o["choices"][0]["text"], o


def streamed(body):
    """Texts and ends of all choices of a stream."""
    texts, ends = {}, {}
    for event in S.stream(TEXT, body):
        for c in event["choices"]:
            texts[c["index"]] = texts.get(c["index"], "") + c["text"]
            ends[c["index"]] = c["finish_reason"] or ends.get(c["index"])
    return [(texts[i], ends[i]) for i in sorted(texts)]


def streams_are_whole_answers():
    """Beams, several of the best, stop strings, sampled choices: streamed or not, guessed or not."""
    search = {**BASE, "use_beam_search": True, "best_of": 3, "n": 2}
    for body in (search, {**search, "stop": ["."]}, {**search, "stop": ["e"]}, {**search, "prompt": [SOURCE, "Yes."]},
                 {**BASE, "temperature": 1, "seed": 3, "n": 3}):
        plain = S.ok(TEXT, {**body, "speculative": False})
        want = [(c["text"], c["finish_reason"]) for c in plain["choices"]]
        for more in ({}, {"speculative": {"drafter": "model", "length": 3}}):
            whole = S.ok(TEXT, {**body, **more})
            assert [(c["text"], c["finish_reason"]) for c in whole["choices"]] == want, (body, more)
            assert [c.get("score") for c in whole["choices"]] == [c.get("score") for c in plain["choices"]], (body, more)
            assert streamed({**body, **more}) == want, (body, more)


def cancelled_while_reading():
    """Clients that go away while the encoder reads their source, or soon after; others get their answers, and no page is lost."""
    want = S.ok(TEXT, BASE)["choices"][0]["text"]
    for i in range(30):
        body = {**BASE, "prompt": [100 + (7 * i + k) % 900 for k in range(CTX)], "stream": i % 2 == 0}
        if i % 3 == 0:
            body.update(use_beam_search=True, best_of=3, max_tokens=20)
        with S.raw(rig.http_bytes(TEXT, body)):
            time.sleep(0.001 * (i % 7))
        if i % 10 == 0:
            assert S.ok(TEXT, BASE)["choices"][0]["text"] == want
    assert S.ok(TEXT, BASE)["choices"][0]["text"] == want
    rig.eventually(lambda: S.metrics()["sooth_kv_pages_used"] == 0, what="all pages are free")


def same_source_together():
    o = S.ok(TEXT, {**BASE, "prompt": [SOURCE, "The house is big.", SOURCE]})
    texts = [c["text"] for c in o["choices"]]
    assert texts[0] == texts[2] != texts[1] and texts[0] == S.ok(TEXT, BASE)["choices"][0]["text"], texts


if not os.path.exists(MODEL):
    print("1..1\nskip: models/ende is not here\nok 1 # SKIP all")
    raise SystemExit(0)
with rig.Server("--ctx-size", str(CTX), "--kv-pages", str(PAGES), "--parallel", "2", model=MODEL) as S:
    rig.main([translates, prompts_leave_the_context_to_the_answer, bad_sources, beams, streams_are_whole_answers,
              cancelled_while_reading, same_source_together])
