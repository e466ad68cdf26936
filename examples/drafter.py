#!/usr/bin/env python3
"""A drafter in Python: finds the previous occurrence of the last token and guesses that the same tokens follow again.

usage: drafter.py LIBSOOTH.so MODEL PROMPT [MAX_TOKENS]

The text is the model's own, whatever is guessed. The structs follow sooth.h: each begins with its size, and the library
fills in the defaults. A chat model gets the prompt in its chat format, because given the bare text it often ends at once.
"""
import ctypes as c
import sys

DRAFTER = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_int32), c.c_int, c.c_int, c.POINTER(c.c_int32), c.c_int)


class Error(c.Structure):
    _fields_ = [("code", c.c_int), ("message", c.c_char * 512)]


class EngineParams(c.Structure):
    _fields_ = [("size", c.c_size_t), ("n_ctx", c.c_int), ("n_parallel", c.c_int), ("n_batch", c.c_int),
                ("kv_f32", c.c_int), ("max_draft", c.c_int), ("draft_model", c.c_char_p), ("draft_temp", c.c_float),
                ("drafter", DRAFTER), ("drafter_user", c.c_void_p)]


class Params(c.Structure):
    _fields_ = [("size", c.c_size_t), ("max_tokens", c.c_int), ("has_seed", c.c_int), ("seed", c.c_uint64),
                ("temp", c.c_float), ("top_k", c.c_int), ("top_p", c.c_float), ("min_p", c.c_float),
                ("repeat_penalty", c.c_float), ("presence_penalty", c.c_float), ("frequency_penalty", c.c_float),
                ("repeat_last_n", c.c_int), ("bias", c.c_void_p), ("n_bias", c.c_size_t), ("stop", c.c_void_p),
                ("n_stop", c.c_size_t), ("ignore_end", c.c_int), ("spec", c.c_char_p), ("spec_length", c.c_int),
                ("verify", c.c_char_p)]


class Timings(c.Structure):
    _fields_ = [("prompt_n", c.c_int), ("predicted_n", c.c_int), ("prompt_ms", c.c_double), ("predicted_ms", c.c_double),
                ("rounds", c.c_int), ("draft_n", c.c_int), ("draft_n_accepted", c.c_int),
                ("tested_n", c.c_int), ("draft_ms", c.c_double), ("verify_ms", c.c_double)]


class Message(c.Structure):
    _fields_ = [("role", c.c_char_p), ("content", c.c_char_p)]


class Result(c.Structure):
    _fields_ = [("size", c.c_size_t), ("text", c.c_char_p), ("text_len", c.c_size_t), ("tokens", c.POINTER(c.c_int32)),
                ("n_tokens", c.c_size_t), ("finish", c.c_int), ("seed", c.c_uint64), ("timings", Timings)]


@DRAFTER
def guess(_user, tokens, n_tokens, _n_prompt, out, most):
    text = tokens[:n_tokens]
    before = [i for i in range(n_tokens - 1) if text[i] == text[-1]]
    found = text[before[-1] + 1:][:most] if before else []
    for i, token in enumerate(found):
        out[i] = token
    return len(found)


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    lib, err = c.CDLL(sys.argv[1]), Error()

    def check(rc):
        if rc != 0:
            sys.exit(err.message.decode())

    def fresh(kind, init):
        made = kind()
        init(c.byref(made), c.c_size_t(c.sizeof(kind)))
        return made

    engine_params = fresh(EngineParams, lib.sooth_engine_params_init_sized)
    params = fresh(Params, lib.sooth_params_init_sized)
    result = fresh(Result, lib.sooth_result_init_sized)
    engine_params.drafter = guess
    params.spec, params.spec_length, params.temp = b"user", 4, 0
    params.max_tokens = int(sys.argv[4]) if len(sys.argv) > 4 else 64
    model, engine = c.c_void_p(), c.c_void_p()
    check(lib.sooth_model_load(sys.argv[2].encode(), None, c.byref(model), c.byref(err)))
    check(lib.sooth_engine_create(model, c.byref(engine_params), c.byref(engine), c.byref(err)))
    common = (c.byref(params), None, None, c.byref(result), c.byref(err))
    prompt = sys.argv[3].encode()
    if lib.sooth_model_has_chat(model):
        check(lib.sooth_chat(engine, c.byref(Message(b"user", prompt)), c.c_size_t(1), *common))
    else:
        check(lib.sooth_generate(engine, prompt, *common))
    sys.stdout.buffer.write(c.string_at(result.text, result.text_len) + b"\n")
    t = result.timings
    print(f"{t.predicted_n} tokens in {t.rounds} passes; {t.draft_n} guesses, {t.draft_n_accepted} accepted",
          file=sys.stderr)
    lib.sooth_result_deinit(c.byref(result))
    lib.sooth_engine_free(engine)
    lib.sooth_model_free(model)


main()
