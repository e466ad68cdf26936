#!/usr/bin/env python3
"""The API with well-formed requests: every endpoint, streamed and not, each field, and figures that agree with each other."""
import os
import shutil
import subprocess

import rig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "hello world"}]
BASE = {"ignore_eos": True, "max_tokens": 24, "seed": 7, "temperature": 0.8}


def chat(**more):
    return {"messages": ASK, **BASE, **more}


def text(**more):
    return {"prompt": "hello the sea", **BASE, **more}


def shapes():
    o = S.ok(CHAT, chat())
    assert o["object"] == "chat.completion" and o["id"].startswith("chatcmpl-") and o["model"] == "tiny"
    assert o["system_fingerprint"].startswith("sooth-") and o["seed"] == 7
    c = o["choices"][0]
    assert c["message"]["role"] == "assistant" and c["finish_reason"] == "length" and c["logprobs"] is None
    u = o["usage"]
    assert u["completion_tokens"] == 24 == o["timings"]["predicted_n"]
    assert u["prompt_tokens"] == o["timings"]["prompt_n"] and u["total_tokens"] == u["prompt_tokens"] + 24
    assert set(o["spec"]) >= {"drafter", "verify", "rounds", "tokens_per_pass", "alpha", "per_depth"}
    o = S.ok(TEXT, text())
    assert o["object"] == "text_completion" and o["id"].startswith("cmpl-") and o["choices"][0]["text"]


def as_the_command():
    """The same prompt, seed and settings give the text of `sooth run`."""
    run = subprocess.run([*rig.RUNNER, rig.SOOTH, "run", "-m", os.path.join(S.tmp.name, "tiny.gguf"), "-p", "hello world",
                          "--json", "--ignore-eos", "-n", "24", "-s", "7", "--temp", "0.8"], check=True, env=S.env,
                         stdout=subprocess.PIPE, text=True)
    import json
    assert json.loads(run.stdout)["text"] == S.ok(CHAT, chat())["choices"][0]["message"]["content"]


def whole_equals_stream():
    for path, body in ((CHAT, chat(n=2)), (TEXT, text(n=2)), (TEXT, text(prompt=["he", "sea"], echo=True)),
                       (CHAT, chat(stop=["e", "in"])), (TEXT, text(stop="the", temperature=0))):
        whole = S.ok(path, body)
        parts = {}
        ends = {}
        for event in S.stream(path, {**body, "stream_options": {"include_usage": True}}):
            if not event["choices"]:
                assert all(event["usage"][k] == whole["usage"][k] for k in ("prompt_tokens", "completion_tokens"))
                continue
            assert event["usage"] is None
            c = event["choices"][0]
            parts[c["index"]] = parts.get(c["index"], "") + (c["delta"].get("content") or "" if "delta" in c else c["text"])
            if c["finish_reason"]:
                ends[c["index"]] = c["finish_reason"]
        for c in whole["choices"]:
            full = c["message"]["content"] if path == CHAT else c["text"]
            assert parts[c["index"]] == full, (parts, full)
            assert ends[c["index"]] == c["finish_reason"]


def seeds_and_choices():
    a, b = S.ok(TEXT, text(n=3)), S.ok(TEXT, text(n=3))
    texts = [c["text"] for c in a["choices"]]
    assert texts == [c["text"] for c in b["choices"]] and len(set(texts)) == 3
    assert S.ok(TEXT, text())["choices"][0]["text"] == texts[0]  # choice 0 equals the answer with n = 1
    many = S.ok(TEXT, text(prompt=["hello the sea", "he"], n=2))
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in many["choices"][:2]] == texts[:2]
    assert many["choices"][2]["text"] == S.ok(TEXT, text(prompt="he"))["choices"][0]["text"]
    random = S.ok(TEXT, {k: v for k, v in text().items() if k != "seed"})
    again = S.ok(TEXT, text(seed=random["seed"]))
    assert again["choices"][0]["text"] == random["choices"][0]["text"]


def beams():
    """Choices are the best hypotheses, as of `sooth run --beams`; streamed at the end."""
    import json
    body = {"prompt": "hello the sea", "max_tokens": 12, "use_beam_search": True, "n": 3, "best_of": 4, "length_penalty": 0.5}
    whole = S.ok(TEXT, {**body, "logprobs": 2})
    run = subprocess.run([*rig.RUNNER, rig.SOOTH, "run", "-m", os.path.join(S.tmp.name, "tiny.gguf"), "-p", "hello the sea", "--raw",
                          "--json", "-n", "12", "--beams", "4", "--n-best", "3", "--length-penalty", "0.5"], check=True, env=S.env,
                         stdout=subprocess.PIPE, text=True)
    best = json.loads(run.stdout)["n_best"]
    assert [c["text"] for c in whole["choices"]] == [b["text"] for b in best] and len({b["text"] for b in best}) == 3
    assert all(abs(c["score"] - b["score"]) < 1e-6 for c, b in zip(whole["choices"], best))
    assert [c["finish_reason"] for c in whole["choices"]] == [b["finish_reason"] for b in best]
    assert whole["usage"]["completion_tokens"] == sum(len(b["tokens"]) for b in best)
    for c, b in zip(whole["choices"], best):
        assert len(c["logprobs"]["tokens"]) == len(b["tokens"])
        assert abs(sum(c["logprobs"]["token_logprobs"]) - b["logprob"]) < 1e-3 or b["finish_reason"] == "stop"
    texts, ends = {}, {}
    for event in S.stream(TEXT, {**body, "stream_options": {"include_usage": True}}):
        for c in event["choices"]:
            texts[c["index"]] = texts.get(c["index"], "") + c["text"]
            if c["finish_reason"]:
                ends[c["index"]] = c["score"]
    assert texts == {i: b["text"] for i, b in enumerate(best)}
    assert all(abs(ends[i] - b["score"]) < 1e-6 for i, b in enumerate(best))
    one = S.ok(CHAT, {"messages": ASK, "max_tokens": 12, "use_beam_search": True, "best_of": 4, "early_stopping": "never",
                      "temperature": 0, "speculative": False})
    assert len(one["choices"]) == 1 and one["choices"][0]["score"] < 0
    many = S.ok(TEXT, {**body, "prompt": ["hello the sea", "he"], "n": 2})
    assert [c["text"] for c in many["choices"][:2]] == [b["text"] for b in best[:2]] and len(many["choices"]) == 4
    for _ in range(3):
        assert S.ok(TEXT, body)["choices"] == S.ok(TEXT, body)["choices"]


def prompts_as_ids():
    ids = S.ok("/tokenize", {"content": "hello the sea", "add_special": True})["tokens"]
    assert S.ok(TEXT, text(prompt=ids))["choices"][0]["text"] == S.ok(TEXT, text())["choices"][0]["text"]
    assert len(S.ok(TEXT, text(prompt=[ids, ids]))["choices"]) == 2
    plain = S.ok("/tokenize", {"content": "hello the sea"})["tokens"]
    assert ids[1:] == plain
    assert S.ok("/detokenize", {"tokens": plain})["content"].strip() == "hello the sea"
    pieces = S.ok("/tokenize", {"content": "hello", "with_pieces": True})["tokens"]
    assert "".join(p["piece"] for p in pieces).strip() == "hello"


def content_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]}]
    joined = [{"role": "user", "content": "hello\nworld"}]
    assert S.ok(CHAT, chat(messages=parts))["choices"] == S.ok(CHAT, chat(messages=joined))["choices"]
    a = S.ok(CHAT, chat(messages=[{"role": "developer", "content": "x"}, *ASK]))
    assert a["choices"] == S.ok(CHAT, chat(messages=[{"role": "system", "content": "x"}, *ASK]))["choices"]


def sampling_fields():
    plain = S.ok(TEXT, text())["choices"][0]["text"]
    for change in ({"temperature": 1.7}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"repetition_penalty": 1.9},
                   {"repeat_penalty": 1.9}, {"presence_penalty": 4}, {"frequency_penalty": 4}, {"seed": 8}):
        assert S.ok(TEXT, text(**change))["choices"][0]["text"] != plain, change
    first = S.ok(TEXT, text(logprobs=0, temperature=0))["choices"][0]
    banned = S.ok("/tokenize", {"content": first["logprobs"]["tokens"][0]})["tokens"][-1]
    other = S.ok(TEXT, text(logit_bias={str(banned): -100}, temperature=0))["choices"][0]
    assert other["text"] != first["text"]
    assert S.ok(TEXT, text(max_tokens=3))["usage"]["completion_tokens"] == 3
    assert S.ok(TEXT, text(max_completion_tokens=5))["usage"]["completion_tokens"] == 5
    assert S.ok(TEXT, {**text(), "max_tokens": None, "ignore_eos": True})["usage"]["completion_tokens"] == 16
    long = S.ok(TEXT, text(max_tokens=100000))  # as many as fit the context
    assert long["choices"][0]["finish_reason"] == "length" and long["usage"]["total_tokens"] == 256
    zero = S.ok(TEXT, text(max_tokens=0, echo=True))
    assert zero["choices"][0]["text"] == "hello the sea" and zero["usage"]["completion_tokens"] == 0


def ids_of(words):
    return S.ok("/tokenize", {"content": words})["tokens"]


def token_ids(body):
    """The ids of an answer, from its rounds."""
    rounds = S.ok(TEXT, {**body, "sooth": {"rounds": True}})["choices"][0]["sooth"]["rounds"]
    return [t["id"] for r in rounds for t in r["tokens"]]


SPECS = ({"enabled": False}, {"drafter": "ngram", "length": 4}, {"drafter": "lookup,ngram"}, {"drafter": "random", "length": 3})


def stop_tokens_and_min_tokens():
    """stop_token_ids end an answer as an end token does; min_tokens delays every kind of end; the same with speculation."""
    free = token_ids(text(max_tokens=40, speculative={"enabled": False}))
    stop = free[12]
    for spec in SPECS:
        o = S.ok(TEXT, text(max_tokens=40, stop_token_ids=[stop], speculative=spec))
        assert o["choices"][0]["finish_reason"] == "stop" and o["usage"]["completion_tokens"] == free.index(stop), spec
    late = [token_ids(text(max_tokens=40, stop_token_ids=free[:3], min_tokens=20, speculative=spec)) for spec in SPECS]
    assert all(ids == late[0] for ids in late) and len(late[0]) >= 20 and not set(free[:3]) & set(late[0])
    hot = text(max_tokens=60, temperature=5, ignore_eos=False)
    early = next(seed for seed in range(200) if S.ok(TEXT, {**hot, "seed": seed})["usage"]["completion_tokens"] < 10)
    for name in ("min_tokens", "min_new_tokens"):
        for spec in SPECS:
            o = S.ok(TEXT, {**hot, "seed": early, name: 30, "speculative": spec})
            assert o["usage"]["completion_tokens"] >= 30, o["usage"]
    word = S.ok(TEXT, text(temperature=0))["choices"][0]["text"][2:5]
    assert S.ok(TEXT, text(temperature=0, stop=word))["usage"]["completion_tokens"] < 10
    o = S.ok(TEXT, text(temperature=0, stop=word, min_tokens=15))
    assert o["usage"]["completion_tokens"] >= 15 and word in o["choices"][0]["text"]


def bad_words():
    """No form of a bad word is generated, of one token or several; the same with speculation."""
    seen = set()
    for seed in range(40):
        body = text(max_tokens=60, temperature=0 if seed == 0 else 2, seed=seed)
        free = token_ids({**body, "speculative": {"enabled": False}})
        for n in (1, 2, 3):  # a span of tokens that the tokenizer gives for its text
            spans = ((free[i:i + n], S.ok("/detokenize", {"tokens": free[i:i + n]})["content"].strip()) for i in range(60 - n))
            word = next((w for span, w in spans if w and span in (ids_of(w), ids_of(" " + w))), None)
            if word is None or n in seen:
                continue
            seen.add(n)
            got = [token_ids({**body, "bad_words": [word, "qzqzqz"], "speculative": spec}) for spec in SPECS]
            assert all(g == got[0] for g in got) and got[0] != free, (seed, word)
            for form in (ids_of(word), ids_of(" " + word)):
                assert not any(got[0][i:i + len(form)] == form for i in range(60)), (word, form)
        if seen >= {1, 2}:
            break
    assert seen >= {1, 2}, seen
    plain = S.ok(TEXT, text())["choices"]
    assert S.ok(TEXT, text(bad_words=[]))["choices"] == plain == S.ok(TEXT, text(bad_words="qzqzqzqz"))["choices"]


def continued_messages():
    """continue_final_message: the prompt ends within the last message, as transformers renders it."""
    with rig.Server(template="{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
                             "{% if add_generation_prompt %}<assistant>{% endif %}") as s:
        ask = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " the sea in "}]
        for more, end in (({}, "</s>\n<assistant>"), ({"add_generation_prompt": False}, "</s>\n"),
                          ({"continue_final_message": True}, ""), ({"continue_final_message": True, "add_generation_prompt": False}, "")):
            chat_ = s.ok(CHAT, {"messages": ask, **BASE, **more})
            raw = s.ok(TEXT, {"prompt": f"<user>hello</s>\n<assistant>the sea in{end}", **BASE})
            assert chat_["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"], (more, chat_["usage"], raw["usage"])
            if more.get("continue_final_message"):
                assert chat_["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
    with rig.Server(template="{% for m in messages %}[{{ m.content }}]{% endfor %}") as s:  # keeps the space
        ask = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "the sea "}]
        chat_ = s.ok(CHAT, {"messages": ask, **BASE, "continue_final_message": True})
        assert chat_["choices"][0]["message"]["content"] == s.ok(TEXT, {"prompt": "[the sea][the sea ", **BASE})["choices"][0]["text"]
    with rig.Server(template="{% for m in messages %}{{ m.content | upper }}{% endfor %}") as s:
        status, _, o = s.post(CHAT, {"messages": ask, **BASE, "continue_final_message": True})
        assert status == 400 and "changes the text of the last message" in o["error"]["message"], o


def special_tokens():
    with_bos, without = (S.ok(TEXT, text(add_special_tokens=add))["usage"]["prompt_tokens"] for add in (True, False))
    assert with_bos == without + 1 == S.ok(TEXT, text())["usage"]["prompt_tokens"]
    # a BOS that the client writes itself is part of the echoed text
    bos = S.ok("/tokenize", {"content": "", "add_special": True, "with_pieces": True})["tokens"][0]["piece"]
    c = S.ok(TEXT, text(prompt=bos + "in the sea", add_special_tokens=False, max_tokens=0, logprobs=1, echo=True))["choices"][0]
    assert bos and c["logprobs"]["tokens"][0] == bos and c["text"].startswith(bos)
    assert c["logprobs"]["text_offset"][:2] == [0, len(bos)], c["logprobs"]


def logprobs():
    c = S.ok(CHAT, chat(logprobs=True, top_logprobs=3))["choices"][0]
    content = c["logprobs"]["content"]
    assert len(content) == 24
    for item in content:
        assert item["logprob"] <= 0 and len(item["top_logprobs"]) == 3 and item["bytes"]
        assert item["top_logprobs"][0]["logprob"] >= item["top_logprobs"][1]["logprob"]
    none = S.ok(CHAT, chat(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [i["logprob"] for i in none] == [i["logprob"] for i in content] and none[0]["top_logprobs"] == []
    streamed = [i for e in S.stream(CHAT, chat(logprobs=True, top_logprobs=3)) for c in e["choices"]
                if c["logprobs"] for i in c["logprobs"]["content"]]
    assert streamed == content
    c = S.ok(TEXT, text(logprobs=2, temperature=0))["choices"][0]
    lp = c["logprobs"]
    assert len(lp["tokens"]) == len(lp["token_logprobs"]) == len(lp["top_logprobs"]) == len(lp["text_offset"]) == 24
    assert max(lp["top_logprobs"][0].values()) == lp["token_logprobs"][0]
    # speculation does not change the numbers
    off = S.ok(TEXT, text(logprobs=2, temperature=0, speculative={"enabled": False}))["choices"][0]
    assert off["logprobs"] == lp and off["text"] == c["text"]


def echoed_logprobs():
    """Logprobs of the prompt equal those that its tokens have as an answer, cached or not."""
    long = S.ok(TEXT, text(prompt="in the sea he or the world ", max_tokens=60, logprobs=3, temperature=0))["choices"][0]
    ids = S.ok("/tokenize", {"content": "in the sea he or the world ", "add_special": True})["tokens"]
    n = len(ids)
    whole = S.ok(TEXT, text(prompt="in the sea he or the world ", max_tokens=60, logprobs=3, temperature=0, echo=True))["choices"][0]
    lp = whole["logprobs"]
    assert whole["text"] == "in the sea he or the world " + long["text"]
    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None and lp["text_offset"][0] == 0
    assert all(v <= 0 for v in lp["token_logprobs"][1:]) and len(lp["tokens"]) == n + 60
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert lp[name][n:] == long["logprobs"][name], name
    assert [o - lp["text_offset"][n] for o in lp["text_offset"][n:]] == long["logprobs"]["text_offset"]
    assert lp["text_offset"][n] == len("in the sea he or the world ") and lp["text_offset"] == sorted(lp["text_offset"])
    # the answer as part of a prompt: the same numbers, though its pages are in the cache now
    answer = S.ok("/tokenize", {"content": whole["text"], "add_special": True})["tokens"]
    for most in (0, 0, 5):
        for prompt in (whole["text"], answer):
            again = S.ok(TEXT, text(prompt=prompt, max_tokens=most, logprobs=3, temperature=0, echo=True))
            got = again["choices"][0]["logprobs"]
            assert len(got["tokens"]) == len(answer) + most and got["token_logprobs"][:n] == lp["token_logprobs"][:n]
            if len(answer) == n + 60:  # tokenizing the text gives the generated ids
                assert got["token_logprobs"][:n + 60] == lp["token_logprobs"] and got["top_logprobs"][:n + 60] == lp["top_logprobs"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with rig.Server("--no-spec", "--batch-size", "3") as cold:
        assert cold.ok(TEXT, text(prompt=answer, max_tokens=5, logprobs=3, temperature=0, echo=True))["choices"] == again["choices"]
    body = text(prompt=["in the sea", "he"], n=2, max_tokens=4, logprobs=1, echo=True)
    parts = {}
    for event in S.stream(TEXT, body):
        c = event["choices"][0]
        if c["logprobs"]:
            for name, values in c["logprobs"].items():
                parts.setdefault(c["index"], {}).setdefault(name, []).extend(values)
    assert [parts[i] for i in range(4)] == [c["logprobs"] for c in S.ok(TEXT, body)["choices"]]
    single = S.ok(TEXT, text(prompt=[5], max_tokens=0, logprobs=1, echo=True))["choices"][0]["logprobs"]
    assert single["token_logprobs"] == [None] and len(single["tokens"]) == 1


def chosen_among_alternatives():
    """Completions: `logprobs` alternatives, and the sampled token if it is none of them."""
    lp = S.ok(TEXT, text(logprobs=1, temperature=3))["choices"][0]["logprobs"]
    assert any(len(top) == 2 for top in lp["top_logprobs"])
    for token, value, top in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]):
        assert top[token] == value or token == "\ufffd"


def speculation_per_request():
    want = S.ok(TEXT, text(max_tokens=64, speculative={"enabled": False}))
    assert want["spec"]["drafter"] == "none" and want["spec"]["verify"] is None
    for spec in ({"drafter": "ngram", "length": 4}, {"drafter": "lookup,ngram"}, {"drafter": "random", "length": 3},
                 {"drafter": "ngram+lookup", "length": 5}, {"enabled": True}):
        got = S.ok(TEXT, text(max_tokens=64, speculative=spec))
        assert got["choices"] == want["choices"], spec
        if "drafter" in spec:
            assert got["spec"]["drafter"] == spec["drafter"]
        if "length" in spec:  # without it the planner may decide not to draft
            assert got["timings"]["draft_n"] > 0
    lenient = S.ok(TEXT, text(speculative={"drafter": "ngram", "length": 4, "verify": "lenient=0.5"}))
    assert lenient["spec"]["verify"] == "lenient=0.5" and lenient["spec"]["lossy"] is True


def nonces():
    """With `reject`, answers report a nonce. With a fixed length it depends on the request only; sent back, it replays the text."""
    for spec in ({"enabled": False, "verify": "reject"}, {"drafter": "random", "length": 3, "verify": "match"}):
        assert S.ok(TEXT, text(speculative=spec, nonce=5))["nonce"] is None
    assert S.ok(TEXT, text(temperature=0, speculative={"drafter": "random", "length": 3, "verify": "reject"}))["nonce"] is None
    fixed, shared, free = ({"drafter": d, "verify": "reject", **more} for d, more in
                           (("random", {"length": 3}), ("corpus,random", {"length": 3}), ("random", {})))
    for path, body in ((TEXT, text(n=2)), (CHAT, chat())):
        a, b = (S.ok(path, {**body, "speculative": fixed}) for _ in range(2))
        assert a["choices"] == b["choices"] and a["nonce"] == b["nonce"] and 0 < a["nonce"] < 2 ** 53
        for spec in (shared, free):
            assert S.ok(path, {**body, "speculative": spec})["nonce"] != S.ok(path, {**body, "speculative": spec})["nonce"]
        for kind in (int, str, float):  # as a string too, and as a double
            again = S.ok(path, {**body, "speculative": fixed, "nonce": kind(a["nonce"])})
            assert again["nonce"] == a["nonce"] and again["choices"] == a["choices"], kind
    # another nonce gives another text; a stream reports the nonce in the last chunk of each choice
    assert S.ok(TEXT, text(speculative=fixed, nonce=1))["choices"] != S.ok(TEXT, text(speculative=fixed, nonce=2))["choices"]
    whole = S.ok(TEXT, text(n=2, speculative=fixed))
    ends = [e for e in S.stream(TEXT, text(n=2, speculative=fixed)) if e["choices"] and e["choices"][0]["finish_reason"]]
    assert [e["nonce"] for e in ends] == [whole["nonce"]] * 2 and [e["seed"] for e in ends] == [7, 7]
    # several prompts: one nonce each
    many = S.ok(TEXT, text(prompt=["he", "sea"], n=2, speculative=fixed))
    a, b, c, d = (x["nonce"] for x in many["choices"])
    assert a == b != c == d and many["nonce"] == a
    alone = S.ok(TEXT, text(prompt="sea", n=2, speculative=fixed, nonce=c))
    assert [x["text"] for x in alone["choices"]] == [x["text"] for x in many["choices"][2:]]


def prediction():
    plain = S.ok(CHAT, chat(max_tokens=60, temperature=0))
    answer = plain["choices"][0]["message"]["content"]
    told = S.ok(CHAT, chat(max_tokens=60, temperature=0, prediction={"type": "content", "content": answer}, speculative={"length": 4}))
    assert told["choices"] == plain["choices"]
    d = told["usage"]["completion_tokens_details"]
    assert d["accepted_prediction_tokens"] > 20, d
    assert told["spec"]["rounds"] < plain["spec"]["rounds"] and told["spec"]["drafter"].startswith("predict")
    wrong = S.ok(CHAT, chat(max_tokens=60, temperature=0, prediction={"type": "content", "content": "qqq zzz " * 20},
                            speculative={"length": 4, "drafter": "predict"}))
    assert wrong["choices"] == plain["choices"]
    assert plain["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def rounds():
    body = chat(max_tokens=48, sooth={"rounds": True}, speculative={"drafter": "ngram", "length": 4}, temperature=0)
    events = S.stream(CHAT, body)
    last = next(e for e in events if e.get("timings"))
    seen = [e["sooth"] for e in events if "sooth" in e]
    tokens = [t for r in seen for t in r["tokens"]]
    assert len(seen) == last["spec"]["rounds"] and [r["round"] for r in seen] == list(range(len(seen)))
    assert len(tokens) == 48
    assert sum(t["origin"] == "draft" for t in tokens) == last["timings"]["draft_n_accepted"]
    guesses = [n for r in seen for n in r["tree"][1:]]
    assert len(guesses) == last["timings"]["draft_n"]
    tested = sum(d["tested"] for d in last["spec"]["per_depth"])
    assert sum(n["tested"] for n in guesses) == tested
    assert sum(len(r["rejected"]) for r in seen) == tested - last["timings"]["draft_n_accepted"]
    for r in seen:
        assert r["tree"][0]["parent"] == -1 and all(n["parent"] < i for i, n in enumerate(r["tree"]))
        assert r["pass_ms"] > 0 and r["plan"]["requests"] == 1
    whole = S.ok(CHAT, body)["choices"][0]["sooth"]["rounds"]
    assert [[t["id"] for t in r["tokens"]] for r in whole] == [[t["id"] for t in r["tokens"]] for r in seen]


def ends_in_mid_round():
    """Accepted guesses behind a stop string count nowhere: not in the answer, its rounds, its usage or the metrics."""
    plain = S.ok(CHAT, chat(max_tokens=60, temperature=0))
    answer = plain["choices"][0]["message"]["content"]
    stop = next(answer[i:i + 2] for i in range(12, 40) if answer[i:i + 2].isascii() and answer[i:i + 2] not in answer[:i + 1])
    before = S.metrics()
    o = S.ok(CHAT, chat(max_tokens=60, temperature=0, stop=stop, prediction={"type": "content", "content": answer},
                        speculative={"length": 16, "drafter": "predict"}, sooth={"rounds": True}))
    choice, t, spec = o["choices"][0], o["timings"], o["spec"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == answer[:answer.index(stop)]
    tree = [n for r in choice["sooth"]["rounds"] for n in r["tree"][1:]]
    assert sum(t["origin"] == "draft" for r in choice["sooth"]["rounds"] for t in r["tokens"]) == t["draft_n_accepted"] > 0
    assert sum(n["accepted"] for n in tree) == t["draft_n_accepted"] < t["draft_n"] == len(tree)
    assert sum(n["tested"] for n in tree) == sum(d["tested"] for d in spec["per_depth"])
    assert sum(d["accepted"] for d in spec["per_depth"]) == t["draft_n_accepted"]
    assert abs(spec["tokens_per_pass"] - t["predicted_n"] / spec["rounds"]) < 1e-6
    assert abs(spec["mean_accepted"] - t["draft_n_accepted"] / spec["rounds"]) < 1e-6
    d = o["usage"]["completion_tokens_details"]
    assert d["accepted_prediction_tokens"] == t["draft_n_accepted"] < o["usage"]["completion_tokens"] + 1
    assert d["accepted_prediction_tokens"] + d["rejected_prediction_tokens"] == t["draft_n"]
    after = S.metrics()

    def grown(name):
        return after[name] - before.get(name, 0)
    accepted = "sooth_spec_decode_num_accepted_tokens_"
    assert grown(accepted + "total") == t["draft_n_accepted"]
    assert sum(grown(name) for name in after if name.startswith(accepted + "per_pos")) == t["draft_n_accepted"]
    assert grown("sooth_spec_decode_num_tested_tokens_total") == sum(d["tested"] for d in spec["per_depth"])
    assert grown("sooth_spec_decode_num_draft_tokens_total") == t["draft_n"]
    assert grown("sooth_spec_decode_num_drafts_total") == sum(len(r["tree"]) > 1 for r in choice["sooth"]["rounds"])


def rates_need_two_tokens():
    """The first round counts as prompt time, so its tokens have no rate: null in the answer, absent from the log."""
    for n in (0, 1, 2, 24):
        o = S.ok(TEXT, text(max_tokens=n, speculative={"enabled": False}))
        t = o["timings"]
        assert (t["predicted_per_second"] is None) == (n < 2) and (t["ttft_ms"] is None) == (n == 0), t
        line = S.wait_log(lambda line: line.get("id") == o["id"])
        assert ("tokens_per_second" in line) == (n >= 2) and ("ttft_ms" in line) == (n > 0), line
        if n:
            assert 0 < t["ttft_ms"] and abs(line["ttft_ms"] - t["ttft_ms"]) < 0.001
        if n >= 2:
            want = 1000 * (n - 1) / t["predicted_ms"]
            assert abs(t["predicted_per_second"] / want - 1) < 1e-6 and abs(line["tokens_per_second"] - want) < 0.01 + 1e-6 * want
    answer = S.ok(TEXT, text(max_tokens=3, temperature=0))["choices"][0]["text"]
    o = S.ok(TEXT, text(max_tokens=3, temperature=0, prediction={"type": "content", "content": answer}, speculative={"length": 8}))
    assert o["spec"]["rounds"] > 1 or o["timings"]["predicted_per_second"] is None, o
    both = S.ok(TEXT, text(n=2))  # the earliest first token of all choices
    assert 0 < both["timings"]["ttft_ms"] <= S.wait_log(lambda line: line.get("id") == both["id"])["ms"]
    ends = [e for e in S.stream(TEXT, text(n=2)) if e["choices"][0]["finish_reason"]]
    assert all(e["timings"]["ttft_ms"] > 0 for e in ends)


def long_drafter_names():
    """`spec.drafter` is reported whole."""
    name = ",".join(f"lookup(min={i})" for i in range(10, 22))
    assert len(name) > 120
    o = S.ok(TEXT, text(speculative={"drafter": name, "length": 2}))
    assert o["spec"]["drafter"] == name
    assert S.wait_log(lambda line: line.get("id") == o["id"])["drafter"] == name


def prefix_cache():
    """A repeated prompt gets the same answer, which reports how many tokens were cached."""
    ask = text(prompt="in the sea he or the world " * 6)
    first, again = S.ok(TEXT, ask), S.ok(TEXT, ask)
    assert again["choices"] == first["choices"]
    details = again["usage"]["prompt_tokens_details"]
    assert 0 < details["cached_tokens"] <= again["usage"]["prompt_tokens"] and again["timings"]["cache_n"] > 0
    m = S.metrics()
    assert m["sooth_prefix_cache_hits_total"] > 0 and m["sooth_kv_pages_cached"] > 0 and m["sooth_kv_pages_used"] == 0


def many_at_once():
    bodies = [text(prompt=p, seed=i, temperature=t, max_tokens=20 + i % 7, speculative={"drafter": d, "length": 3})
              for i, (p, t, d) in enumerate((p, t, d) for p in ("he", "the sea", "in or") for t in (0, 0.9)
                                            for d in ("ngram", "none", "random", "lookup"))]
    alone = [S.ok(TEXT, b)["choices"] for b in bodies]
    together = rig.parallel([lambda b=b: S.ok(TEXT, b)["choices"] for b in bodies])
    assert together == alone


def names():
    status, _, o = S.get("/v1/models")
    assert status == 200 and o["data"][0]["id"] == "tiny" and o["data"][0]["meta"]["n_ctx"] == 256
    assert S.get("/v1/models/tiny")[2]["id"] == "tiny"
    status, _, o = S.get("/v1/models/gpt-5")
    assert status == 404 and o["error"]["code"] == "model_not_found"
    assert S.ok(TEXT, text(model="whatever"))["model"] == "tiny"
    with rig.Server("--strict-model", "--alias", "mine") as s:
        assert s.ok(TEXT, text(model="mine"))["model"] == "mine"
        status, _, o = s.post(TEXT, text(model="gpt-5"))
        assert status == 404 and o["error"]["param"] == "model" and "gpt-5" in o["error"]["message"]


def small_endpoints():
    assert S.get("/health") [2]["status"] == "ready"
    props = S.get("/props")[2]
    assert props["parallel"] == 8 and "messages" in props["chat_template"] and props["speculative"]["drafter"] == "auto"
    status, headers, page = S.get("/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"<html" in page
    assert "default-src 'none'" in headers["content-security-policy"]
    assert S.request("HEAD", "/health")[0] == 200
    status, headers, o = S.request("DELETE", "/health")
    assert status == 405 and headers["allow"] == "GET, HEAD"
    assert S.get("/v1/completions")[0] == 405 and S.get("/elsewhere")[0] == 404


def metrics():
    before = S.metrics()
    body = text(max_tokens=40, temperature=0, speculative={"drafter": "ngram", "length": 4})
    o = S.ok(TEXT, body)
    rig.eventually(lambda: S.metrics()['sooth_requests_finished_total{reason="length"}'] >
                   before['sooth_requests_finished_total{reason="length"}'])
    after = S.metrics()

    def grown(name):
        return after[name] - before.get(name, 0)
    assert grown("sooth_generation_tokens_total") == 40
    assert grown("sooth_prompt_tokens_total") == o["usage"]["prompt_tokens"]
    assert grown("sooth_spec_decode_num_draft_tokens_total") == o["timings"]["draft_n"] > 0
    assert grown("sooth_spec_decode_num_accepted_tokens_total") == o["timings"]["draft_n_accepted"]
    assert grown('sooth_spec_decode_num_accepted_tokens_per_pos_total{position="0"}') == o["spec"]["per_depth"][0]["accepted"]
    assert grown("sooth_time_to_first_token_seconds_count") == 1 and grown("sooth_request_seconds_count") == 1
    assert grown("sooth_inter_token_seconds_count") == 40 - 1 - 0 or grown("sooth_inter_token_seconds_count") < 40
    assert after["sooth_requests_running"] == 0 and after['sooth_state{state="ready"}'] == 1
    tool = shutil.which("promtool")
    if not tool:
        raise rig.Skip("promtool is not installed: the metrics' form is unchecked")
    p = subprocess.run([tool, "check", "metrics"], input=S.get("/metrics")[2], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT)
    assert p.returncode == 0 and not p.stdout, p.stdout


def access_log():
    S.post(TEXT, text(max_tokens=9, speculative={"drafter": "ngram", "length": 2}, wibble=1))
    line = S.wait_log(lambda o: o.get("ignored") == "wibble")
    assert line["status"] == 200 and line["path"] == TEXT and line["completion_tokens"] == 9 and line["drafter"] == "ngram"
    assert line["finish"] == "length" and line["ms"] > 0 and "acceptance" in line and line["client"] == "127.0.0.1"
    S.get("/nowhere")
    assert S.wait_log(lambda o: o["path"] == "/nowhere")["status"] == 404


def unknown_fields():
    status, headers, _ = S.post(TEXT, text(wibble=1, speculative={"wobble": 2}, logit_bias=None, user="me",
                                           **{"x\r\nEvil: 1": 1}))
    assert status == 200, status
    assert headers["x-sooth-ignored"] == "wibble, speculative.wobble, x??Evil??1", headers
    assert "evil" not in headers


with rig.Server() as S:
    rig.main([shapes, as_the_command, whole_equals_stream, seeds_and_choices, beams, nonces, prompts_as_ids, content_parts, sampling_fields, stop_tokens_and_min_tokens, bad_words, continued_messages, special_tokens,
              logprobs, echoed_logprobs, chosen_among_alternatives, speculation_per_request, prediction, rounds, ends_in_mid_round, rates_need_two_tokens, long_drafter_names, prefix_cache, many_at_once, names, small_endpoints, metrics,
              access_log, unknown_fields])
