"""The Jinja2 environment that transformers builds for chat templates, with a fixed clock.

Used by golden_templates.py and fuzz_templates.py. Needs jinja2 (3.1).
"""
import datetime
import json

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

NOW = 1735787045  # 2025-01-02 03:04:05 UTC


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text; its body is output unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_out"), [], [], body).set_lineno(line)

    def _out(self, caller):
        return caller()


def make_env(mutable=False):
    """mutable: allow changes of lists and dicts, which transformers' environment refuses."""

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(fmt):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None).strftime(fmt)

    kind = SandboxedEnvironment if mutable else ImmutableSandboxedEnvironment
    env = kind(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def render(env, template, variables):
    """(text, None) or (None, error)."""
    try:
        text = env.from_string(template).render(**variables)
        text.encode("utf-8")
        return text, None
    except RecursionError:
        raise
    except Exception as e:  # any error of the template
        return None, f"{type(e).__name__}: {e}"
