#!/usr/bin/env python3
"""The openai package from PyPI and curl as clients. SOOTH_OPENAI_PYTHON: a Python that has openai, if this one does not."""
import json
import os
import shutil
import subprocess
import sys

import rig

try:
    import openai
except ImportError:
    other = os.environ.get("SOOTH_OPENAI_PYTHON")
    if other:
        os.execv(other, [other, *sys.argv])
    openai = None

ASK = [{"role": "user", "content": "hello world"}]
MORE = {"seed": 7, "extra_body": {"ignore_eos": True}}


def client(s=None):
    if openai is None:
        raise rig.Skip("openai is not installed (pip install openai)")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{(s or S).port}/v1", api_key="none", max_retries=0)


def chat():
    r = client().chat.completions.create(model="any", messages=ASK, max_tokens=12, **MORE)
    assert r.choices[0].message.content and r.choices[0].finish_reason == "length"
    assert r.usage.completion_tokens == 12 and r.usage.prompt_tokens_details.cached_tokens is not None
    assert r.timings["predicted_n"] == 12 and r.spec["drafter"] and r.system_fingerprint.startswith("sooth-")


def streaming():
    want = client().chat.completions.create(model="any", messages=ASK, max_completion_tokens=20, **MORE)
    with client().chat.completions.create(model="any", messages=ASK, max_completion_tokens=20, stream=True,
                                          stream_options={"include_usage": True}, **MORE) as chunks:
        chunks = list(chunks)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 20
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == want.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def completions():
    c = client()
    r = c.completions.create(model="any", prompt=["he", "sea"], max_tokens=8, echo=True, **MORE)
    assert r.choices[0].text.startswith("he") and r.choices[1].text.startswith("sea")
    text = "".join(p.choices[0].text for p in c.completions.create(model="any", prompt="he", max_tokens=8, echo=True,
                                                                   stream=True, **MORE))
    assert text == r.choices[0].text


def logprobs():
    r = client().chat.completions.create(model="any", messages=ASK, max_tokens=6, logprobs=True, top_logprobs=4, **MORE)
    items = r.choices[0].logprobs.content
    assert len(items) == 6 and len(items[0].top_logprobs) == 4 and bytes(items[0].bytes)
    r = client().completions.create(model="any", prompt="he", max_tokens=6, logprobs=3, **MORE)
    assert len(r.choices[0].logprobs.tokens) == 6 and r.choices[0].logprobs.text_offset[0] == 0


def choices_and_seeds():
    ask = {"model": "any", "messages": ASK, "max_tokens": 16, "n": 3, "temperature": 1, **MORE}
    a, b = (client().chat.completions.create(**ask) for _ in range(2))
    texts = [c.message.content for c in a.choices]
    assert texts == [c.message.content for c in b.choices] and len(set(texts)) == 3


def predicted_outputs():
    plain = client().chat.completions.create(model="any", messages=ASK, max_tokens=50, temperature=0, **MORE)
    fixed = {"extra_body": {**MORE.get("extra_body", {}), "speculative": {"length": 4}}}  # a fixed length, so that there are guesses
    told = client().chat.completions.create(model="any", messages=ASK, max_tokens=50, temperature=0, **{**MORE, **fixed}, prediction={
        "type": "content", "content": plain.choices[0].message.content})
    assert told.choices[0].message.content == plain.choices[0].message.content
    assert told.usage.completion_tokens_details.accepted_prediction_tokens > 10


def errors():
    c = client()
    for kind, ask in ((openai.BadRequestError, {"messages": []}), (openai.BadRequestError, {"messages": ASK, "temperature": -1}),
                      (openai.BadRequestError, {"messages": ASK, "response_format": {"type": "json_object"}}),
                      (openai.BadRequestError, {"messages": ASK, "tools": [{"type": "function", "function": {"name": "f"}}]})):
        try:
            c.chat.completions.create(model="any", **ask)
            raise AssertionError(f"no error for {ask}")
        except kind as e:
            assert e.body["message"] and e.body["type"] == "invalid_request_error", e.body
    with rig.Server("--api-key", "k", "--strict-model") as s:
        for key, model, kind in (("wrong", "tiny", openai.AuthenticationError), ("k", "gpt", openai.NotFoundError)):
            try:
                client(s).with_options(api_key=key).completions.create(model=model, prompt="he")
                raise AssertionError("no error")
            except kind:
                pass
        assert client(s).with_options(api_key="k").models.list().data[0].id == "tiny"
    assert c.models.list().data[0].id == "tiny" and c.models.retrieve("tiny").id == "tiny"


def raw_curl():
    if not shutil.which("curl"):
        raise rig.Skip("curl is not installed")

    def curl(*args):
        return subprocess.run(["curl", "-sS", "--max-time", "30", *args], check=True, stdout=subprocess.PIPE).stdout
    base = f"http://127.0.0.1:{S.port}"
    body = json.dumps({"messages": ASK, "max_tokens": 5, "ignore_eos": True})
    assert json.loads(curl(base + "/v1/chat/completions", "-d", body))["usage"]["completion_tokens"] == 5
    out = curl("-N", base + "/v1/chat/completions", "-d", body[:-1] + ', "stream": true}').decode()
    assert out.endswith("data: [DONE]\n\n")
    assert curl("-0", "-N", base + "/v1/chat/completions", "-d", body[:-1] + ', "stream": true}').endswith(b"[DONE]\n\n")
    assert curl("-H", "Expect: 100-continue", base + "/v1/chat/completions", "-d", body).startswith(b"{")
    assert b'"status":"ready"' in curl(base + "/health")


with rig.Server() as S:
    rig.main([chat, streaming, completions, logprobs, choices_and_seeds, predicted_outputs, errors, raw_curl])
