#!/usr/bin/env python3
"""Bad input: every case gets a defined answer and disturbs no other request. After each test a good request gets the same
answer as before, and nothing is left running."""
import json
import os
import re
import resource
import socket
import struct
import threading
import time

import rig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {"prompt": "the sea", "ignore_eos": True, "max_tokens": 30, "seed": 3}
MESSAGES = [{"role": "user", "content": "he"}]


def undisturbed():
    assert S.ok(TEXT, GOOD)["choices"] == WANT
    rig.eventually(lambda: S.metrics()["sooth_requests_running"] == 0, what="nothing runs")


def bad(path, body, status, *says):
    got, _, o = S.post(path, body)
    assert got == status, (body if len(str(body)) < 300 else "…", got, o)
    message = json.dumps(o)
    for word in says:
        assert word in message, (word, message)


def malformed_json():
    for body in (b"", b"{", b"[]", b"null", b"nonsense", b'{"prompt": "x"', b'{"prompt": "x"} y', b'{"a":1,}', b"\xff\xfe",
                 b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"\0" * 100, b'{"prompt": 1e999}',
                 b'{"seed": 99999999999999999999}'):
        bad(TEXT, body, 400, "invalid_json")
        bad(CHAT, body, 400)
        bad("/tokenize", body, 400)
        bad("/detokenize", body, 400)
    bad(TEXT, '{"prompt": "é"}'.encode("latin-1"), 400, "UTF-8")
    undisturbed()


def deep_nesting():
    for n in (100, 3000, 60000):
        bad(TEXT, b'{"prompt":' + b"[" * n + b"]" * n + b"}", 400)
        bad(CHAT, b'{"messages":' + b'[{"content":' * n + b"1" + b"}]" * n + b"}", 400)
        bad(TEXT, b'{"prompt": "x", "max_tokens": 1, "nested": ' + b'{"a":' * n + b"1" + b"}" * n + b"}",
            200 if n < 2000 else 400)
    kwargs = {}
    for _ in range(900):
        kwargs = {"a": kwargs}
    got, _, o = S.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": kwargs})
    assert got in (200, 400), o
    undisturbed()


WRONG_TYPES = {
    "model": 5, "max_tokens": "5", "max_completion_tokens": [], "temperature": "hot", "top_p": {}, "top_k": 1.5, "min_p": [],
    "repeat_penalty": "x", "presence_penalty": None, "frequency_penalty": "", "seed": "7", "n": "2", "stop": 5, "stream": 1,
    "stream_options": 1, "logit_bias": [1], "ignore_eos": "no", "prediction": "x", "speculative": "fast", "sooth": 1,
    "priority": "high", "echo": 1, "repeat_last_n": "x"}


def wrong_types():
    for name, value in WRONG_TYPES.items():
        if value is None:
            continue
        bad(TEXT, {**GOOD, name: value}, 400, name)
    for body, word in (({}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": []}, "messages"),
                       ({"messages": ["hi"]}, "messages[0]"), ({"messages": [{}]}, "role"),
                       ({"messages": [{"role": 5, "content": "x"}]}, "role"),
                       ({"messages": [{"role": "king", "content": "x"}]}, "king"),
                       ({"messages": [{"role": "user"}]}, "messages[0].content"),
                       ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
                       ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
                       ({"messages": MESSAGES, "logprobs": 5}, "logprobs"),
                       ({"messages": MESSAGES, "top_logprobs": 5}, "logprobs"),
                       ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
                       ({"messages": MESSAGES, "chat_template_kwargs": 5}, "chat_template_kwargs")):
        bad(CHAT, body, 400, word)
    for body, word in (({}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": []}, "prompt"),
                       ({"prompt": ["a", 5]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1.5]}, "prompt"),
                       ({"prompt": [-1]}, "prompt"), ({"prompt": [99999999]}, "vocabulary"), ({"prompt": [2 ** 40]}, "prompt"),
                       ({"prompt": [[]]}, "empty"), ({"prompt": {"a": 1}}, "prompt")):
        bad(TEXT, body, 400, word)
    undisturbed()


def out_of_range():
    for name, value in (("max_tokens", -2), ("max_tokens", 2 ** 40), ("temperature", -1), ("temperature", 1000), ("top_p", 2),
                        ("top_p", -0.1), ("top_k", -2), ("min_p", 1.1), ("n", 0), ("n", -1), ("n", 129), ("n", 10 ** 12),
                        ("repeat_penalty", 0), ("repeat_last_n", -5), ("presence_penalty", 1000), ("logprobs", -1),
                        ("logprobs", 21), ("stop", [""]), ("stop", ["x"] * 65), ("logit_bias", {"x": 1}),
                        ("logit_bias", {"5": "1"}), ("logit_bias", {"5": 10 ** 9}), ("logit_bias", {"-1": 1}),
                        ("priority", 10 ** 9)):
        bad(TEXT, {**GOOD, name: value}, 400, name)
    bad(TEXT, {**GOOD, "logit_bias": {"99999999": 1}}, 400, "99999999")
    for spec, word in (({"drafter": "nonsense"}, "speculative.drafter"), ({"drafter": ""}, "speculative.drafter"),
                       ({"length": 65}, "speculative.length"), ({"length": -1}, "speculative.length"),
                       ({"length": 40}, "speculative.length"), ({"verify": "guess"}, "speculative.verify"),
                       ({"verify": "lenient=2"}, "speculative.verify"), ({"drafter": "model"}, "draft model"),
                       ({"drafter": "predict"}, "prediction"), ({"drafter": "oracle(0.5)"}, "prediction"),
                       ({"drafter": "model(/etc/passwd)"}, "names a file"), ({"drafter": "bigram(/etc/passwd)"}, "names a file"),
                       ({"drafter": "async(model,worker=tcp://127.0.0.1:22)"}, "names a draft worker"),
                       ({"drafter": "ngram,model(/etc/passwd)"}, "names a file"), ({"drafter": "ngram\0x"}, "speculative.drafter"),
                       ({"drafter": "user"}, "user"), ({"drafter": "lookup," * 500 + "ngram"}, "speculative.drafter")):
        bad(TEXT, {**GOOD, "speculative": spec}, 400, word)
    bad(TEXT, {**GOOD, "prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options")
    undisturbed()


def odd_values():
    """Borderline values: each has one meaning or is refused; none is silently taken for another value."""
    for body, word in (({"best_of": 0}, "best_of"), ({"best_of": -5}, "best_of"), ({"prompt": ["he", []]}, "prompt[1]"),
                       ({"prompt": ["he", [99999999]]}, "prompt[1]"), ({"seed": 1.5}, "seed"), ({"seed": 1e300}, "seed"),
                       ({"nonce": -1}, "nonce"), ({"nonce": 2 ** 53}, "nonce"), ({"nonce": 0.5}, "nonce"), ({"nonce": "1x"}, "nonce"),
                       ({"nonce": ""}, "nonce"), ({"nonce": "-3"}, "nonce"), ({"nonce": "99999999999999999999"}, "nonce"),
                       ({"nonce": "5\u0000"}, "nonce"), ({"nonce": [1]}, "nonce"),
                       ({"prompt": [[[1]]]}, "prompt"), ({"max_tokens": 2.5}, "max_tokens"), ({"max_tokens": 2 ** 31}, "max_tokens"),
                       ({"stop": [None]}, "stop"), ({"logit_bias": {"5 ": 1}}, "5 "), ({"logit_bias": {"1e3": 1}}, "1e3"),
                       ({"speculative": {"verify": "lenient=nan"}}, "verify"), ({"speculative": {"drafter": "+++"}}, "drafter"),
                       ({"temperature": "x" + "é" * 60}, "temperature"), ({"model": "a\0b"}, "model")):
        bad(TEXT, {**GOOD, **body}, 400, word)
    for message, word in (({"role": "user\0x", "content": "he"}, "role"), ({"role": "USER", "content": "he"}, "USER"),
                          ({"role": "user", "content": None}, "content"), ({"role": "user", "content": "he", "name": 5}, "name"),
                          ({"role": "user", "content": [{"type": 5, "text": "he"}]}, "content[0]"),
                          ({"role": "user", "content": [{"type": "text\0", "text": "he"}]}, "content[0]"),
                          ({"role": "assistant", "content": "he", "function_call": {"name": "f"}}, "function_call")):
        bad(CHAT, {"messages": [message]}, 400, "messages[0]", word)
    for kwargs in ({"messages": []}, {"add_generation_prompt": False}):
        bad(CHAT, {"messages": MESSAGES, "chat_template_kwargs": kwargs}, 400, "chat_template_kwargs")
    for same in ({"seed": 3.0}, {"max_tokens": 30.0}, {"best_of": 1}, {"stop": []}, {"logit_bias": {}}, {"n": 1.0}, {"top_k": 0}):
        assert S.ok(TEXT, {**GOOD, **same})["choices"] == WANT, same
    ids = S.ok("/tokenize", {"content": "the sea", "add_special": True})["tokens"]
    assert S.ok(TEXT, {**GOOD, "prompt": [float(i) for i in ids]})["choices"] == WANT
    most = S.ok(TEXT, {**GOOD, "max_tokens": 2 ** 31 - 1})  # as many as fit the context
    assert most["usage"]["total_tokens"] == 256 and most["choices"][0]["finish_reason"] == "length"
    undisturbed()


def unknown_inside():
    """Unknown members of messages, of parts and of /tokenize and /detokenize are listed too; null and empty ones are not."""
    message = {"role": "user", "content": [{"type": "text", "text": "he", "cache_control": {"type": "x"}}], "weight": 1,
               "refusal": None, "tool_calls": [], "function_call": None, "name": "me"}
    status, headers, _ = S.post(CHAT, {"messages": [message], "max_tokens": 1})
    assert status == 200 and headers["x-sooth-ignored"] == "messages[0].weight, messages[0].content[0].cache_control", headers
    _, headers, _ = S.post("/tokenize", {"content": "he", "wibble": 1})
    assert headers["x-sooth-ignored"] == "wibble"
    _, headers, _ = S.post("/detokenize", {"tokens": [5], "wobble": 1, "": 2})
    assert sorted(headers["x-sooth-ignored"].split(", ")) == ["?", "wobble"]
    undisturbed()


def errors_name_fields():
    """Errors of the engine name the field of the API, not the option of the command line."""
    for body, param in (({"logit_bias": {"99999999": 1}}, "logit_bias"), ({"prompt": [1, 99999999]}, "prompt"),
                        ({"speculative": {"drafter": "model"}}, "speculative.drafter"),
                        ({"speculative": {"drafter": "nonsense"}}, "speculative.drafter"),
                        ({"speculative": {"drafter": "bigram"}}, "speculative.drafter"), ({"prompt": []}, "prompt")):
        status, _, o = S.post(TEXT, {**GOOD, **body})
        e = o["error"]
        assert status == 400 and e["param"] == param and e["code"] and f"'{param}'" in e["message"], o
        assert not e["message"].startswith("--") and ": --" not in e["message"], o
    undisturbed()


def small_cache():
    """max_tokens is limited by the cache if that is smaller than the context."""
    with rig.Server("--kv-pages", "3", "--parallel", "2") as s:
        for most in (200, -1, 100000):
            o = s.ok(TEXT, {**GOOD, "max_tokens": most})
            assert o["usage"]["total_tokens"] == 96 and o["choices"][0]["finish_reason"] == "length", o["usage"]
        status, _, o = s.post(TEXT, {**GOOD, "prompt": "the sea " * 20})
        assert status == 400 and o["error"]["code"] == "context_length_exceeded" and "--kv-pages" in o["error"]["message"], o


def too_many_logprobs():
    """A small request cannot ask for gigabytes of logprobs."""
    with rig.Server(model=rig.real_model("smollm2")) as s:
        ids = [504] * 3000
        for more in ({"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 0, "stream": True}, {"prompt": [504], "max_tokens": -1}):
            status, _, o = s.post(TEXT, {"prompt": ids, "n": 70, "logprobs": 20, **more})
            assert status == 400 and o["error"]["param"] == "logprobs" and "lower n" in o["error"]["message"], o
        assert len(s.ok(TEXT, {"prompt": ids[:8], "n": 70, "logprobs": 20, "echo": True, "max_tokens": 1})["choices"]) == 70


def unsupported():
    """Unsupported fields that would change the answer are refused by name."""
    tool = {"type": "function", "function": {"name": "f"}}
    for name, value in (("tools", [tool]), ("functions", [{"name": "f"}]), ("tool_choice", "required"), ("audio", {"voice": "x"}),
                        ("response_format", {"type": "json_object"}),
                        ("response_format", {"type": "json_schema", "json_schema": {}}), ("modalities", ["audio"]),
                        ("grammar", "root ::= x"), ("json_schema", {"a": 1}), ("guided_json", {"a": 1})):
        bad(CHAT, {"messages": MESSAGES, name: value}, 400, name, "not supported" if name != "modalities" else "text")
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    bad(CHAT, {"messages": [{"role": "user", "content": [image]}]}, 400, "messages[0].content[0]", "image_url")
    bad(CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "tool")
    bad(CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [tool]}]}, 400, "tool_calls")
    bad(TEXT, {**GOOD, "suffix": "x"}, 400, "suffix")
    bad(TEXT, {**GOOD, "best_of": 5}, 400, "best_of")
    for name, value in (("tools", []), ("tool_choice", "none"), ("response_format", {"type": "text"}), ("modalities", ["text"]),
                        ("functions", None)):
        assert S.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, name: value})[0] == 200, name
    undisturbed()


# Parameters of other servers: a value that changes the answer there, and the neutral value.
REFUSED = {
    "mirostat": (2, 0), "typical_p": (0.9, 1.0), "typ_p": (0.5, 1), "tfs_z": (0.5, 1), "top_a": (0.1, 0), "top_n_sigma": (1, -1),
    "dry_multiplier": (0.8, 0), "xtc_probability": (0.5, 0.0), "dynatemp_range": (0.5, 0), "smoothing_factor": (0.3, 0),
    "epsilon_cutoff": (3e-4, 0), "eta_cutoff": (3e-4, 0), "penalty_alpha": (0.6, 0), "encoder_repetition_penalty": (1.2, 1),
    "guidance_scale": (2, 1), "cfg_scale": (3, 1), "negative_prompt": ("x", ""), "min_keep": (5, 1), "samplers": (["top_k"], []),
    "sampler_order": ([1], []), "temperature_last": (True, False), "do_sample": (False, True), "penalize_nl": (False, True),
    "no_repeat_ngram_size": (3, 0), "allowed_token_ids": ([1, 2], []), "logits_processors": (["x"], []), "sequence_bias": ([[[1], 2]], []),
    "custom_logit_processor": ("x", ""), "num_beams": (4, 1), "length_penalty": (2, 1),
    "early_stopping": (True, False), "best_of": (3, 1), "grammar": ("root ::= x", ""), "json_schema": ({"a": 1}, {}),
    "guided_json": ({"a": 1}, None), "guided_regex": ("a+", None), "guided_choice": (["a"], []), "guided_grammar": ("x", ""),
    "structured_outputs": ({"json": {}}, {}), "structural_tag": ("x", None), "regex": ("a", ""), "ebnf": ("a", ""), "stop_regex": ("a", None),
    "response_format": ({"type": "json_object"}, {"type": "text"}), "tools": ([{"type": "function"}], []), "suffix": ("x", ""),
    "chat_template": ("{{ x }}", ""), "documents": ([{"text": "x"}], []), "prompt_embeds": ("x", None), "input_embeds": ([1], []),
    "truncate_prompt_tokens": (5, None), "add_bos_token": (False, True), "lora": ([{"id": 0, "scale": 1}], []), "lora_path": ("x", None),
    "reasoning_effort": ("high", "none"), "verbosity": ("low", "medium"), "thinking": ({"type": "enabled"}, {}),
    "include_stop_str_in_output": (True, False), "skip_special_tokens": (False, True), "detokenize": (False, True),
    "prompt_logprobs": (1, None), "return_tokens_as_token_ids": (True, False), "n_probs": (5, 0), "post_sampling_probs": (True, False),
    "n_indent": (2, 0), "t_max_predict_ms": (5, 0), "sampling_params": ({"temperature": 0}, {}), "options": ({"seed": 1}, {})}


def refused_parameters():
    """Each is refused by name; its neutral value and null change nothing and are not listed as ignored."""
    for name, (value, neutral) in REFUSED.items():
        bad(TEXT, {**GOOD, name: value}, 400, f"'{name}'", "unsupported_parameter")
        bad(CHAT, {"messages": MESSAGES, name: value}, 400, f"'{name}'", "unsupported_parameter")
        for same in (neutral, None):
            status, headers, o = S.post(TEXT, {**GOOD, name: same})
            assert status == 200 and o["choices"] == WANT and "x-sooth-ignored" not in headers, (name, same, o)
    source = open(os.path.join(rig.ROOT, "src/server/api_refused.c")).read().split("TABLE[] = {")[1].split("};")[0]
    names, manual = re.findall(r'"(\w+)"', source), open(os.path.join(rig.ROOT, "docs/server.md")).read()
    assert len(names) > 80 and all(f"`{name}`" in manual for name in names), [n for n in names if f"`{n}`" not in manual]
    bad(CHAT, {"messages": MESSAGES, "echo": True}, 400, "'echo'")
    beams = {"prompt": "the sea", "max_tokens": 4, "use_beam_search": True, "n": 2}
    for name, value in (("use_beam_search", 1), ("use_beam_search", "yes"), ("best_of", 1), ("best_of", 65), ("best_of", 2.5),
                        ("best_of", "4"), ("length_penalty", "1"), ("length_penalty", 11), ("early_stopping", "soon"),
                        ("early_stopping", 1), ("temperature", 0.5), ("repetition_penalty", 1.2), ("presence_penalty", 1),
                        ("max_tokens", 0), ("n", 65)):
        bad(TEXT, {**beams, name: value}, 400, name)
    status, _, o = S.post(TEXT, {**beams, "n": 60, "max_tokens": 200})
    assert status == 400 and o["error"]["param"] == "best_of", o
    for words in ("lower 'best_of' or 'max_tokens'", "raise the server's --kv-pages"):
        assert words in o["error"]["message"], o
    bad(CHAT, {"messages": MESSAGES, "add_special_tokens": True}, 400, "'add_special_tokens'")
    for name, value in (("min_tokens", -1), ("min_tokens", "5"), ("min_tokens", 31), ("stop_token_ids", 5), ("stop_token_ids", ["a"]),
                        ("stop_token_ids", [-1]), ("stop_token_ids", [99999999]), ("stop_token_ids", [1] * 65), ("bad_words", 5),
                        ("bad_words", [""]), ("bad_words", [5]), ("bad_words", ["x"] * 129), ("add_special_tokens", 1)):
        bad(TEXT, {**GOOD, name: value}, 400, name)
    user, bot = MESSAGES[0], {"role": "assistant", "content": "he"}
    for body in ({"messages": [user], "continue_final_message": True}, {"messages": [user, {**bot, "content": " "}], "continue_final_message": True},
                 {"messages": [user, bot], "continue_final_message": True, "add_generation_prompt": True},
                 {"messages": [user, bot], "continue_final_message": 1}, {"messages": [user, bot], "add_generation_prompt": "no"}):
        bad(CHAT, body, 400)
    undisturbed()


def oversize():
    status, headers, o = S.post(TEXT, b'{"prompt": "' + b"x" * (2 << 20) + b'"}')
    assert status == 413 and "--max-body" in o["error"]["message"], o
    # chunked: the length is not known in advance
    c = S.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    got = b""
    try:
        for _ in range(400):
            c.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        c.sendall(b"0\r\n\r\n")
        got = c.recv(1000)
    except OSError:
        pass
    c.close()
    assert not got or b" 413 " in got, got
    c = S.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(160):  # a little too long: read to its end, then answered
        c.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
    c.sendall(b"0\r\n\r\n")
    assert b" 413 " in c.recv(1000)
    c.close()
    bad(TEXT, {**GOOD, "prompt": "the " * 300}, 400, "context_length_exceeded", "256")
    bad(CHAT, {"messages": [{"role": "user", "content": "the " * 100000}]}, 400, "context_length_exceeded")
    bad(CHAT, {"messages": [{"role": "user", "content": ""}] * 5000}, 400, "messages")
    bad(TEXT, {**GOOD, "prompt": ["x"] * 200}, 400, "prompt")
    undisturbed()


def broken_http():
    for data in (b"\r\n\r\n", b"GET\r\n\r\n", b"garbage\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200,
                 b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
                 b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 200000 + b"\r\n\r\n",
                 b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n", b"\0" * 5000, bytes(range(256)) * 50):
        try:
            c = S.raw(data, timeout=3)
            c.shutdown(socket.SHUT_WR)
            while c.recv(65536):
                pass
            c.close()
        except OSError:
            pass
    undisturbed()


def answers(data, half_close=False, timeout=20):
    """Sends raw bytes and parses all responses until the server closes: [(status, headers, body)]."""
    c, got = S.raw(data, timeout=timeout), b""
    if half_close:
        c.shutdown(socket.SHUT_WR)
    while part := c.recv(65536):
        got += part
    c.close()
    found = []
    while got:
        head, got = got.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        assert lines[0].startswith("HTTP/1.1 ") and "html" not in headers.get("content-type", ""), head
        n = int(headers.get("content-length", 0))
        found.append((int(lines[0].split()[1]), headers, got[:n]))
        got = got[n:]
    return found


def is_json_error(answer, status, code=None):
    got, headers, body = answer
    error = json.loads(body)["error"]
    assert got == status and headers["content-type"] == "application/json", answer
    assert headers["connection"] == "close" and error["message"] and error["type"] and error["code"], answer
    assert code in (None, error["code"]), error


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = [
    (HEAD + b"Content-Length: -5\r\n\r\n{}", 400, "invalid_length"),
    (HEAD + b"Content-Length: +5\r\n\r\n{}", 400, "invalid_length"),
    (HEAD + b"Content-Length: 1e3\r\n\r\n{}", 400, "invalid_length"),
    (HEAD + b"Content-Length: 5 5\r\n\r\n{}", 400, "invalid_length"),
    (HEAD + b"Content-Length: 2, 2\r\n\r\n{}", 400, "invalid_length"),
    (HEAD + b"Content-Length:\r\n\r\n{}", 400, "invalid_length"),
    (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}", 413, "body_too_large"),
    (HEAD + b"Content-Length: 18446744073709551617\r\n\r\n{}", 413, "body_too_large"),
    (HEAD + b"Content-Length: 9223372036854775807\r\n\r\n{}", 413, "body_too_large"),
    (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400, "ambiguous_length"),
    (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "ambiguous_length"),
    (HEAD + b"\r\n", 411, "length_required"),
    (HEAD + b"\r\n" + b'{"prompt": "he"}', 411, "length_required"),  # the body is not taken for a request
    (HEAD + b"Content-Length: 2000000\r\n\r\n{}", 413, "body_too_large"),  # answered without waiting for the body
    (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501, "unsupported_encoding"),
    (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n", 501, "unsupported_encoding"),
    (HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    (CHUNKED + b"zz\r\n", 400, "invalid_chunk"),
    (CHUNKED + b"-1\r\n", 400, "invalid_chunk"),
    (CHUNKED + b"5\r\nhelloX\r\n0\r\n\r\n", 400, "invalid_chunk"),
    (CHUNKED + b"2\r\n{}\r\n\r\n0\r\n\r\n", 400, "invalid_chunk"),
    (CHUNKED + b"2\n{}\n0\n\n", 400, "invalid_chunk"),
    (CHUNKED + b"ffffffffffffffff\r\n{}", 400, "invalid_chunk"),
    (CHUNKED + b"11111111111111111\r\n{}", 400, "invalid_chunk"),
    (CHUNKED + b"2;" + b"x" * 50000 + b"\r\n", 400, "invalid_chunk"),
    (CHUNKED + b"0\r\n" + b"T: x\r\n" * 20000, 400, "invalid_chunk"),
    (b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n", 414, "uri_too_long"),
    (b"A" * 20 + b" " + b"b" * 40000, 414, "uri_too_long"),
    (b"GET / HTTP/1.1\r\nX: " + b"y" * 200000 + b"\r\n\r\n", 431, "headers_too_large"),
    (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n", 431, "headers_too_large"),
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5460 + b"\r\n", 431, "headers_too_large"),  # complete, but too long
    (b"GET / HTTP/9.9\r\n\r\n", 505, "unsupported_version"),
    (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "unsupported_version"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "unsupported_version"),
    (b"GET\r\n\r\n", 400, "invalid_http"),
    (b"GET /\r\n\r\n", 400, "invalid_http"),
    (b"garbage\r\n\r\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    (b"GET / a b HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200, 400, "invalid_http"),
    (b"\0" * 5000, 400, "invalid_http"),
    (bytes(range(1, 256)) * 50, 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nNo colon\r\n\r\n", 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n: empty\r\n\r\n", 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n folded\r\n\r\n", 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\0c\r\n\r\n", 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\rc\r\n\r\n", 400, "invalid_http"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    (b"GET /health%00foo HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_path"),
    (b"GET /health%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_path"),
    (b"GET /health\0foo HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
]


def malformed_http():
    """A malformed request gets exactly one JSON error, then the connection is closed: alone, sent byte by byte, after good requests
    on the same connection, and before a good one, which is not answered."""
    good = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data, status, code in MALFORMED:
        for tail in (b"", good):
            got = answers(data + tail)
            assert len(got) == 1, (data[:100], got)
            is_json_error(got[0], status, code)
        got = answers(good + good + data)
        assert [g[0] for g in got] == [200, 200, status], (data[:100], got)
        is_json_error(got[2], status, code)
        if len(data) < 400:
            c, back = S.raw(), b""
            for i in range(len(data)):
                try:
                    c.sendall(data[i:i + 1])
                except OSError:  # refused and closed before all was sent
                    break
            try:
                while part := c.recv(65536):
                    back += part
            except ConnectionResetError:
                pass
            c.close()
            assert back.count(b"HTTP/1.1 ") == 1 and b'"code":"%s"' % code.encode() in back, (data[:100], back)
    lines = [line for line in S.log() if line["path"] == "-"]
    assert lines and all(line["method"] == "-" and line["status"] >= 400 for line in lines)
    undisturbed()


def odd_but_good_http():
    """Unusual but valid HTTP, and valid HTTP with a bad request: each is answered, and the connection stays open."""
    end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for data, status in ((b"\r\n\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
                         (b"GET /health HTTP/1.1\nHost: localhost\n\n", 200),
                         (b"GET /health?a=%00&b HTTP/1.1\r\nHOST:localhost\r\n\r\n", 200),
                         (b"GET /%68ealth HTTP/1.1\r\nHost: \t localhost:99 \t\r\n\r\n", 200),
                         (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 200),
                         (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5000 + b"\r\n", 200),
                         (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: \xff\xfe\r\n\r\n", 200),
                         (b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 200),
                         (b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"GET //health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"GET /../health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"GET ?health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
                         (b"get /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
                         (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"GET /%0d%0aSet-Cookie:x HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
                         (b"GET /health HTTP/1.1\r\n\r\n", 400),
                         (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
                         (b"GET /health HTTP/1.1\r\nHost: \r\n\r\n", 403),
                         (b"GET /health HTTP/1.1\r\nHost: [::1\r\n\r\n", 403),
                         (b"GET /health HTTP/1.1\r\nHost: [::1]evil\r\n\r\n", 403),
                         (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:80@evil\r\n\r\n", 403),
                         (b"GET /health HTTP/1.1\r\nHost: localhost:x\r\n\r\n", 403),
                         (b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n\r\n", 403),
                         (HEAD + b"Content-Length: 0\r\n\r\n", 400),
                         (HEAD + b"Content-Length: 000000000000000000000000002\r\n\r\n{}", 400)):
        got = answers(data + end)
        assert [g[0] for g in got] == [status, 200], (data[:200], got)
        assert status == 200 or json.loads(got[0][2])["error"]["code"], got
        assert "connection" not in got[0][1] and got[1][1]["connection"] == "close", got
    page = S.get("/")[2]
    c = S.raw(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    got = b""
    while part := c.recv(65536):
        got += part
    assert got.endswith(b"\r\n\r\n") and b"Content-Length: %d\r\n" % len(page) in got, got
    old = answers(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + b"GET /health HTTP/1.0\r\n\r\n")
    assert [g[1]["connection"] for g in old] == ["keep-alive", "close"]
    stream = exchange(rig.http_bytes(TEXT, {**GOOD, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))  # no chunks, ends with the connection
    assert b"chunked" not in stream and stream.endswith(b"data: [DONE]\n\n"), stream[-100:]
    undisturbed()


def send_all(c, data):
    try:
        c.sendall(data)
    except OSError:  # the server has closed the connection
        pass


def pipelines_and_early_ends():
    """Pipelined requests, bodies in one-byte chunks, and clients that leave at any byte."""
    one = rig.http_bytes(TEXT, {**GOOD, "max_tokens": 2})
    got = answers(one * 50 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert [g[0] for g in got] == [200] * 51 and len({json.dumps(json.loads(g[2])["choices"]) for g in got[:50]}) == 1
    body = json.dumps(GOOD).encode()
    pieces = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % b for b in body) + b"0\r\n\r\n"
    whole = pieces + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert [g[0] for g in answers(whole)] == [200, 200]
    for n in range(0, len(pieces), 7):  # a client that leaves after n bytes
        c = S.raw(pieces[:n])
        if n % 2:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        c.close()
    for n in (10, len(HEAD), len(HEAD) + 40):  # half a request, then the end: closed without an answer
        assert answers(pieces[:n], half_close=True) == []
    for framing, piece in ((b"Content-Length: 5000000", b"x" * 100000), (b"Transfer-Encoding: chunked", b"186a0\r\n" + b"x" * 100000 + b"\r\n")):
        late = S.raw(HEAD + framing + b"\r\n\r\n")  # a client that reads the answer only after it has sent its body
        for _ in range(50):
            late.sendall(piece)
        got = late.recv(65536)
        assert got.startswith(b"HTTP/1.1 413 ") and b"Connection: close" in got, got
        late.close()
    endless = S.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")  # more than is read before the connection is closed
    sender = threading.Thread(target=lambda: send_all(endless, (b"186a0\r\n" + b"x" * 100000 + b"\r\n") * 400))
    sender.start()
    assert endless.recv(65536).startswith(b"HTTP/1.1 413 ")
    endless.close()
    sender.join()
    flood = [S.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 1000) for _ in range(100)]
    assert S.get("/health")[0] == 200
    for c in flood:
        c.close()
    rig.eventually(lambda: S.metrics()["sooth_http_connections"] <= 2, what="they are closed")
    undisturbed()


def keys_of_all_kinds():
    with rig.Server("--api-key", "secret") as s:
        for value in (b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer secretx", b"Bearer secre", b"Basic secret", b"secret",
                      b"Bearer " + b"x" * 20000, b"Bearer \xff\xfe", b"Bearer secret\t x"):
            c = s.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: " + value + b"\r\n\r\n")
            got = b""
            while part := c.recv(65536):
                got += part
            assert got.startswith(b"HTTP/1.1 401 ") and b'"code":"invalid_api_key"' in got and b"secret" not in got, (value, got)
        assert s.get("/v1/models", headers={"Authorization": "bearer   secret"})[0] == 200


def exchange(data, end=b""):
    """Sends raw bytes; returns what is received until the server closes or `end` was received."""
    c, got = S.raw(data, timeout=20), b""
    while part := c.recv(65536):
        got += part
        if end and end in got:
            break
    c.close()
    return got


def forms_of_http():
    """Less common forms of requests are answered, ambiguous ones refused."""
    good = rig.http_bytes(TEXT, GOOD, "Connection: close\r\n")
    body = good.split(b"\r\n\r\n", 1)[1]
    half = len(body) // 2
    chunked = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n" % TEXT.encode()
    pieces = b"%x\r\n%s\r\n%x;ext=1\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (half, body[:half], len(body) - half, body[half:])
    for data in (good, chunked + b"\r\n" + pieces, good.replace(b"POST /", b"POST http://x:80/"), good.replace(b"HTTP/1.1", b"HTTP/1.0"),
                 good.replace(b"POST /v1", b"POST /%76%31"), good.replace(b"Content-Type", b"Content-Encoding: identity\r\nContent-Type")):
        assert json.loads(exchange(data).split(b"\r\n\r\n", 1)[1])["choices"] == WANT, data
    twice = b"Content-Length: 3\r\nContent-Type"
    assert b" 400 " in exchange(good.replace(b"Content-Type", twice)).split(b"\r\n")[0]
    assert b" 400 " in exchange(chunked + b"Content-Length: 3\r\n\r\n" + pieces).split(b"\r\n")[0]
    assert b" 415 " in exchange(good.replace(b"Content-Type", b"Content-Encoding: gzip\r\nContent-Type")).split(b"\r\n")[0]
    several = rig.http_bytes(TEXT, GOOD) + rig.http_bytes(TEXT, {**GOOD, "stream": True}) + good  # pipelined
    got = exchange(several)
    assert got.count(b"HTTP/1.1 200 OK") == 3 and got.count(b"data: [DONE]") == 1, got
    undisturbed()


def asks_before_sending():
    """Expect: 100-continue: good requests get 100, bad ones their error, before the body is sent."""
    head, body = rig.http_bytes(TEXT, GOOD, "Expect: 100-continue\r\n").split(b"\r\n\r\n", 1)
    c = S.raw(head + b"\r\n\r\n")
    assert c.recv(1000).startswith(b"HTTP/1.1 100 ")
    c.sendall(body)
    assert c.recv(1000).startswith(b"HTTP/1.1 200 ")
    c.close()
    for change, status in (((TEXT.encode(), b"/nowhere"), b" 404 "), ((b"POST", b"PUT"), b" 405 "),
                           ((b"Content-Length: ", b"Content-Length: 99999"), b" 413 ")):
        assert status in exchange(head.replace(*change) + b"\r\n\r\n", end=b"\r\n").split(b"\r\n")[0], change
    undisturbed()


def template_bomb():
    """A template that would run or write without end fails with an error."""
    for bomb, word in (("{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}", "messages"),
                       ("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "messages"),
                       ("{{ raise_exception('no such role here') }}", "no such role here")):
        with rig.Server(template=bomb) as s:
            start = time.monotonic()
            status, _, o = s.post(CHAT, {"messages": MESSAGES})
            assert status == 400 and word in json.dumps(o), o
            assert time.monotonic() - start < 20
            assert s.ok(TEXT, GOOD)["choices"]
    undisturbed()


def clients_that_leave():
    """Resets and hang-ups in mid-answer cancel the request, streamed or not."""
    long = {**GOOD, "max_tokens": 240, "n": 60}
    with rig.Server("--threads", "1", layers=100) as s:  # without cancellation the answer would take many seconds
        for stream in (True, False):
            for i in range(4):
                before = s.metrics()['sooth_requests_finished_total{reason="cancelled"}']
                c = s.raw(rig.http_bytes(TEXT, {**long, "stream": stream}))
                if stream:
                    c.recv(100)
                else:  # a reset discards a request that the server has not read yet
                    rig.eventually(lambda: s.metrics()["sooth_requests_running"] > 0, what="it runs")
                if i % 2:  # a reset instead of a close
                    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                c.close()
                rig.eventually(lambda: s.metrics()['sooth_requests_finished_total{reason="cancelled"}'] > before,
                               what="it is cancelled")
                # nothing waits either: 60 more choices would not fit the queue beside the cancelled ones
                rig.eventually(lambda: s.metrics()["sooth_requests_running"] + s.metrics()["sooth_requests_waiting"] == 0,
                               what="nothing runs")
        s.wait_log(lambda line: line["status"] == 499 and line["finish"] == "cancelled")
        assert s.ok(TEXT, {**GOOD, "max_tokens": 2})["choices"]


def slow_and_silent_clients():
    with rig.Server("--timeout", "1") as s:
        silent = [s.raw() for _ in range(5)]
        trickle = s.raw(b"POST /v1/completions HTTP/1.1\r\n")
        body = s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        unread = s.raw(rig.http_bytes(TEXT, {**GOOD, "max_tokens": 250, "stream": True, "n": 16, "logprobs": 20,
                                             "sooth": {"rounds": True}}), receive=2048)
        closed = set()

        def all_closed():
            for c in (trickle, body):
                try:
                    c.send(b"x" if c is body else b"X: y\r\n")
                except OSError:
                    closed.add(c)
            return len(closed) == 2
        rig.eventually(all_closed, what="clients that trickle are gone")
        for c in silent:
            assert c.recv(10) == b""
        rig.eventually(lambda: s.metrics()["sooth_http_connections"] <= 1, what="all are closed")
        assert s.ok(TEXT, GOOD)["choices"] == WANT
        assert s.metrics()["sooth_requests_running"] == 0
        unread.close()


def many_connections():
    """Far more connections than --max-connections: a good request is still answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = min(10000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with rig.Server("--max-connections", "256") as s:
        idle = []
        try:
            for i in range(n):
                try:
                    idle.append(s.raw(b"GET /he" if i % 3 else b"", timeout=5))
                except OSError:
                    pass  # the backlog is full
                if i % 2000 == 1999:
                    assert s.ok(TEXT, GOOD)["choices"] == WANT
            assert s.ok(TEXT, GOOD)["choices"] == WANT
            assert s.metrics()["sooth_http_connections"] <= 2 * 256
        finally:
            for c in idle:
                c.close()
        start = time.monotonic()
        rig.eventually(lambda: s.metrics()["sooth_http_connections"] <= 2, what="idle connections are closed")
        assert time.monotonic() - start < 30  # before the timeout
        assert s.ok(TEXT, GOOD)["choices"] == WANT
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    undisturbed()


def more_requests_than_connections():
    """More requests at once than --max-connections: all are answered."""
    with rig.Server("--max-connections", "16", "--queue", "200") as s:
        got = rig.parallel([lambda: s.ok(TEXT, GOOD)["choices"] for _ in range(60)])
        assert all(g == WANT for g in got)


with rig.Server() as S:
    WANT = S.ok(TEXT, GOOD)["choices"]
    rig.main([malformed_json, deep_nesting, wrong_types, out_of_range, odd_values, unknown_inside, errors_name_fields, small_cache, too_many_logprobs, unsupported, refused_parameters, oversize, broken_http, malformed_http, odd_but_good_http, pipelines_and_early_ends, keys_of_all_kinds, forms_of_http, asks_before_sending, template_bomb,
              clients_that_leave, slow_and_silent_clients, many_connections, more_requests_than_connections])
