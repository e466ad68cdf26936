#!/usr/bin/env python3
"""Renders random templates with Jinja2 and with sooth and prints every difference.

usage: fuzz_templates.py CLI [COUNT [SEED]]

CLI is the built tests/jinja/template_cli. Jinja2's sandbox allows changes of lists and dicts here, as
sooth does. The texts must be equal, or both must fail. Results that differ by design are skipped:
integers beyond 64 bits, printed Python objects, features that sooth does not support.
"""
import json
import os
import random
import signal
import subprocess
import sys
import warnings

import template_env

warnings.simplefilter("ignore")

VARS = {
    "n": None, "t": True, "f": False, "i": 7, "k": -3, "z": 0, "x": 2.5, "y": -0.125, "s": "Hello World", "e": "", "u": "Grüße 世界 ß Яя",
    "w": "  padded\t\n", "m": "one\ntwo\r\n\nthree", "h": "<b>\"it's\" & co</b>", "p": "a,b,,c", "num": "42", "flt": " 3.5 ", "pct": "%s|%d", "br": "{}-{a}",
    "l": [3, 1, 2], "ls": ["b", "A", "c", "a", ""], "el": [], "mx": [1, "a", None, True, 2.5, [1, 2], {"k": 1}], "ll": [[1, 2], [3, 4]], "pairs": [["a", 1], ["b", 2]],
    "d": {"b": 1, "a": 2, "c": {"x": [1, 2], "y": "z"}}, "ed": {}, "users": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 25}, {"name": "Cid", "age": 30, "tags": []}],
    "messages": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
}
NAMES = list(VARS) + ["missing", "v1", "v2", "ns", "loop", "m1"]
STRINGS = ["''", "'a'", "'b'", "'x y'", "'ab'", "'role'", "'name'", "'age'", "'A'", "'é'", "'ß'", "'\\n'", "'a\\tb'", "\"it's\"", "'0'", "'-1'", "'1.5'", "'%s'", "'{}'", "'upper'", "'<'", "','", "' '", "'世'"]
NUMBERS = ["0", "1", "2", "3", "-1", "10", "0.5", "2.0", "1e3", "7", "100", "-2.5"]
FILTERS = {
    "upper": [], "lower": [], "title": [], "capitalize": [], "trim": ["S?"], "replace": ["S", "S", "N?"], "string": [], "indent": ["N?", "E?", "E?"],
    "escape": [], "e": [], "safe": [], "abs": [], "int": ["E?"], "float": ["E?"], "round": ["N?", "R?"], "default": ["E?", "E?"], "d": ["E?"],
    "tojson": ["K?"], "length": [], "count": [], "first": [], "last": [], "list": [], "join": ["S?"], "sort": ["B?", "B?"], "reverse": [], "unique": [], "min": [], "max": [], "sum": [],
    "map": ["F"], "select": ["T?"], "reject": ["T?"], "selectattr": ["A", "T?"], "rejectattr": ["A", "T?"], "dictsort": ["B?"], "items": [], "format": ["E?", "E?"],
}
TESTS = ["defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping", "iterable", "sequence", "callable", "escaped", "lower", "upper", "odd", "even",
         "divisibleby(3)", "in([1,2,'a'])", "eq(1)", "ne('a')", "lt(5)", "ge(2)", "equalto('a')", "divisibleby 2", "eq 7"]
METHODS = {
    "upper": [], "lower": [], "title": [], "capitalize": [], "strip": ["S?"], "lstrip": ["S?"], "rstrip": ["S?"], "split": ["S?", "N?"], "rsplit": ["S?", "N?"], "splitlines": ["B?"],
    "startswith": ["S", "N?"], "endswith": ["S", "N?", "N?"], "replace": ["S", "S", "N?"], "find": ["S", "N?", "N?"], "rfind": ["S", "N?"], "index": ["S"], "count": ["S"], "join": ["E"],
    "format": ["E?", "E?"], "isdigit": [], "isalpha": [], "isspace": [], "isupper": [], "islower": [], "isalnum": [],
    "partition": ["S"], "rpartition": ["S"], "removeprefix": ["S"], "removesuffix": ["S"],
    "items": [], "keys": [], "values": [], "get": ["A", "E?"], "copy": [], "append": ["E"], "pop": ["N?"], "extend": ["E"], "insert": ["N", "E"], "update": ["E"],
}
SPECS = ["", ":>5", ":<4", ":^6", ":*^7", ":05d", ":+d", ":x", ":,", ":.2f", ":8.3f", ":.1%", "!r", "!s", ":5", ":10,.1f"]
PERCENTS = ["%s", "%r", "%d", "%5d", "%-5d|", "%05d", "%+d", "%x", "%f", "%.2f", "%8.3f", "%%", "%5s", "%.2s", "%i", "%.0f", "%(a)s"]


class Gen:
    def __init__(self, rng):
        self.r = rng

    def pick(self, seq):
        return self.r.choice(seq)

    def arg(self, kind, depth):
        k = kind[0]
        if k == "S":
            return self.pick(STRINGS) if self.r.random() < 0.85 else self.expr(depth + 1)
        if k == "N":
            return self.pick(["0", "1", "2", "-1", "5", "10", "none", "20"]) if self.r.random() < 0.9 else self.expr(depth + 1)
        if k == "P":
            return self.pick(["1", "2", "3", "5", "8"])
        if k == "B":
            return self.pick(["true", "false"])
        if k == "A":
            return self.pick(["'name'", "'age'", "'tags'", "'role'", "'a'", "'0'", "0", "'c.x'", "'x'"])
        if k == "R":
            return self.pick(["'common'", "'ceil'", "'floor'"])
        if k == "K":
            return self.pick(["indent=2", "sort_keys=true", "separators=(',',':')", "ensure_ascii=true", "indent=0", "indent='\\t'"])
        if k == "F":
            return self.pick(["'upper'", "'string'", "'length'", "attribute='name'", "attribute='tags', default='q'", "'int'", "'first'", "'tojson'", "'trim'", "'default', 5", "attribute=0", "'list'", "'title'"])
        if k == "T":
            return self.pick(["'defined'", "'string'", "'eq', 1", "'odd'", "'none'", "'in', ['a', 30, 1]", "'gt', 1", "'mapping'", "'equalto', 'user'"])
        return self.expr(depth + 1)

    def args(self, kinds, depth):
        out = []
        for k in kinds:
            if k.endswith("?") and self.r.random() < 0.6:
                break
            out.append(self.arg(k, depth))
        return ", ".join(out)

    def literal(self, depth):
        c = self.r.random()
        if c < 0.4:
            return self.pick(STRINGS)
        if c < 0.7:
            return self.pick(NUMBERS)
        if c < 0.78:
            return self.pick(["true", "false", "none", "True", "None"])
        if c < 0.88:
            return "[" + ", ".join(self.expr(depth + 2) for _ in range(self.r.randrange(4))) + "]"
        if c < 0.94:
            items = [self.expr(depth + 2) for _ in range(self.r.randrange(3))]
            return "(" + "".join(i + ", " for i in items) + ")"
        return "{" + ", ".join(self.pick(["'a'", "'b'", "1", "'name'", "none"]) + ": " + self.expr(depth + 2) for _ in range(self.r.randrange(3))) + "}"

    def subscript(self, depth):
        c = self.r.random()
        if c < 0.4:
            return "[" + self.pick(["0", "1", "-1", "2", "'a'", "'name'", "'role'", "'content'", "10", "true"]) + "]"
        if c < 0.7:
            return "." + self.pick(["a", "b", "c", "x", "name", "age", "role", "content", "zz", "0", "index", "first", "last", "tool_calls", "function"])
        if c < 0.75:
            return "[" + self.expr(depth + 1) + "]"
        part = [self.pick(["", "0", "1", "2", "-1", "-2", "5"]) for _ in range(2)]
        return "[" + ":".join(part) + self.pick(["", "", ":2", ":-1", ":-2"]) + "]"

    def primary(self, depth):
        c = self.r.random()
        if c < 0.55:
            base = self.pick(NAMES)
        elif c < 0.9:
            base = self.literal(depth)
        elif c < 0.94:
            base = self.pick(["range(3)", "range(1, 6, 2)", "range(5, 0, -1)", "dict(a=1)", "dict(pairs)", "namespace(q=1).q", "m1(1)", "m1(a=2)", "strftime_now('%Y')"])
        elif c < 0.97:
            base = "(" + self.pick(STRINGS)[:-1].replace("\"it's", "'") + self.pick(PERCENTS) + self.pick(["", self.pick(PERCENTS)]) + "' % " + self.pick(["", ""]) + self.expr(depth + 1) + ")"
            if not base.startswith("('"):
                base = "('%s' % " + self.expr(depth + 1) + ")"
        else:
            base = "'{" + self.pick(["", "0", "a"]) + self.pick(SPECS) + "}'.format(" + self.expr(depth + 1) + self.pick(["", ", a=" + self.expr(depth + 2)]) + ")"
        while self.r.random() < 0.3:
            if self.r.random() < 0.45:
                name = self.pick(list(METHODS))
                base += f".{name}({self.args(METHODS[name], depth)})"
            else:
                sub = self.subscript(depth)
                # Jinja folds slices of constants by other rules than at run time
                base = f"(z or {base})" + sub if ":" in sub else base + sub
        return base

    def filtered(self, depth):
        s = self.primary(depth)
        while self.r.random() < 0.3:
            name = self.pick(list(FILTERS))
            a = self.args(FILTERS[name], depth)
            s += self.pick(["|", " | "]) + name + (f"({a})" if a or self.r.random() < 0.1 else "")
        if self.r.random() < 0.12:
            s += " is " + self.pick(["", "", "not "]) + self.pick(TESTS)
        return s

    def expr(self, depth=0):
        c = self.r.random()
        if depth > 3 or c < 0.55:
            return self.filtered(depth)
        if c < 0.8:
            op = self.pick(["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or", "+", "~"])
            return f"{self.expr(depth + 1)} {op} {self.expr(depth + 1)}"
        if c < 0.84:
            return "not " + self.expr(depth + 1)
        if c < 0.87:
            return self.pick(["-", "+"]) + self.filtered(depth + 1)
        if c < 0.93:
            return "(" + self.expr(depth + 1) + ")"
        return f"{self.expr(depth + 1)} if {self.expr(depth + 1)}" + (f" else {self.expr(depth + 1)}" if self.r.random() < 0.8 else "")

    # expressions that mostly have a value: kinds that fit together

    def text_expr(self, d=0):
        r, t = self.r.random(), self.text_expr
        if d > 3 or r < 0.3:
            return self.pick(["s", "e", "u", "w", "m", "h", "p", "num", "flt", "messages[0].role", "messages[1]['content']", "users[0].name", "d.c.y", "ls[0]", "l|string"] + STRINGS)
        if r < 0.4:
            return f"{t(d + 1)} {self.pick(['+', '~'])} {t(d + 1)}"
        if r < 0.45:
            return f"({t(d + 1)} ~ {self.value(d + 1)})"
        if r < 0.62:
            name = self.pick(["upper", "lower", "title", "capitalize", "strip", "lstrip", "rstrip", "replace", "removeprefix", "removesuffix"])
            return f"({t(d + 1)}).{name}({self.args(METHODS[name], 3)})"
        if r < 0.78:
            name = self.pick(["upper", "lower", "title", "capitalize", "trim", "replace", "string", "indent", "e", "safe", "reverse"])
            a = self.args(FILTERS.get(name, []), 3)
            return f"({t(d + 1)})|{name}" + (f"({a})" if a else "")
        if r < 0.83:
            return f"{self.list_expr(d + 1)}|join({self.pick(STRINGS)})"
        if r < 0.87:
            return f"{self.value(d + 1)}|tojson" + self.pick(["", "", "(indent=2)", "(sort_keys=true)", "(separators=(',', ':'))", "(ensure_ascii=true)"])
        if r < 0.9:
            return f"'{self.pick(['%s', '%r', '%5s|', '%-4s|', '%.2s'])}' % ({self.value(d + 1)},)"
        if r < 0.92:
            return f"'{self.pick(['%d', '%5.1f', '%05d', '%x', '%+d'])}' % {self.int_expr(d + 2)}"
        if r < 0.94:
            return f"'{{{self.pick(SPECS)}}}'.format({self.pick([self.int_expr(d + 2), t(d + 2)])})"
        if r < 0.97:
            return f"({t(d + 1)})[{self.pick(['', '0', '1', '-3', '2'])}:{self.pick(['', '1', '-1', '5'])}{self.pick(['', ':2', ':-1'])}]"
        return f"({t(d + 1)} if {self.bool_expr(d + 1)} else {t(d + 1)})"

    def int_expr(self, d=0):
        r, t = self.r.random(), self.int_expr
        if d > 3 or r < 0.35:
            return self.pick(["i", "k", "z", "x", "y", "t", "l[0]", "d.a", "users[1].age"] + NUMBERS)
        if r < 0.6:
            return f"({t(d + 1)} {self.pick(['+', '-', '*', '/', '//', '%', '+', '-'])} {t(d + 1)})"
        if r < 0.75:
            return f"({self.pick([self.text_expr, self.list_expr])(d + 1)})|{self.pick(['length', 'count'])}"
        if r < 0.82:
            return f"({self.text_expr(d + 1)}).{self.pick(['count', 'find', 'rfind'])}({self.pick(STRINGS)})"
        if r < 0.9:
            return f"{self.value(d + 1)}|{self.pick(['int', 'float', 'int(3)', 'float(0.5)'])}"
        if r < 0.95:
            return f"({t(d + 1)})|{self.pick(['abs', 'round', 'round(1)', 'round(0, ' + chr(39) + 'ceil' + chr(39) + ')', 'int'])}"
        return f"-({t(d + 1)})"

    def list_expr(self, d=0):
        r, t = self.r.random(), self.list_expr
        if d > 3 or r < 0.3:
            return self.pick(["l", "ls", "el", "ll", "pairs", "users", "messages", "mx", "[1, 2, 3]", "range(4)|list", "d|list", "['b', 'A', none]"])
        if r < 0.4:
            return "[" + ", ".join(self.value(d + 1) for _ in range(self.r.randrange(4))) + "]"
        if r < 0.5:
            return f"({self.text_expr(d + 1)}).{self.pick(['split', 'rsplit', 'splitlines'])}({self.pick(['', '', self.pick(['True']) ]) if self.r.random() < 0.3 else ''})"
        if r < 0.55:
            return f"({self.text_expr(d + 1)}).split({self.pick(STRINGS[1:])}, {self.pick(['-1', '1', '2', '0'])})"
        if r < 0.65:
            return f"({t(d + 1)})[{self.pick(['', '0', '1', '-1'])}:{self.pick(['', '1', '-1', '5'])}{self.pick(['', ':2', ':-1'])}]"
        if r < 0.72:
            return f"({t(d + 1)} + {t(d + 1)})"
        if r < 0.8:
            return f"({t(d + 1)})|{self.pick(['reverse', 'list', 'map(' + self.arg('F', 3) + ')', 'select(' + self.arg('T', 3) + ')', 'reject', 'select', 'unique'])}|list"
        if r < 0.85:
            return self.pick(["l", "ls", "[3, 1.5, -2, true]", "users|map(attribute='name')|list", "(u|list)"]) + "|" + self.pick(["sort", "sort(reverse=true)", "sort(case_sensitive=true)", "unique|list"])
        if r < 0.9:
            return self.pick(["users|sort(attribute='age')", "users|selectattr('tags')|list", "messages|selectattr('role', 'equalto', 'user')|list", "d.items()|list", "d|dictsort", "d|items|list", "messages|rejectattr('content')|list"])
        return f"({self.text_expr(d + 1)})|list"

    def bool_expr(self, d=0):
        r, t = self.r.random(), self.bool_expr
        if d > 3 or r < 0.2:
            return self.pick(["t", "f", "n", "e", "missing", "el", "loop is defined", "v1 is defined"])
        if r < 0.35:
            return f"{self.int_expr(d + 1)} {self.pick(['<', '<=', '>', '==', '!='])} {self.int_expr(d + 1)}"
        if r < 0.45:
            return f"{self.text_expr(d + 1)} {self.pick(['<', '==', '!=', 'in', 'not in'])} {self.text_expr(d + 1)}"
        if r < 0.55:
            return f"{self.value(d + 1)} {self.pick(['in', 'not in', '==', '!='])} {self.list_expr(d + 1)}"
        if r < 0.75:
            return f"{self.value(d + 1)} is {self.pick(['', 'not '])}{self.pick(TESTS[:17])}"
        if r < 0.85:
            return f"({t(d + 1)} {self.pick(['and', 'or'])} {t(d + 1)})"
        if r < 0.92:
            return f"({self.text_expr(d + 1)}).{self.pick(['startswith', 'endswith'])}({self.pick(STRINGS)})"
        return f"not {t(d + 1)}"

    def value(self, d=0):
        return self.pick([self.text_expr, self.text_expr, self.int_expr, self.list_expr, self.bool_expr, lambda d: self.pick(["n", "d", "missing", "messages[2]", "d.c", "d.zz", "i", "v1", "v2", "loop.index", "{'a': 1}", "(1, 'x')"])])(d)

    def any_expr(self, depth=0):
        return self.value() if self.r.random() < 0.88 else self.expr(depth)

    def open(self):
        return "{%" + self.pick(["", "", "", "-", "-", "+"])

    def close(self):
        return self.pick(["", "", "", "-", "-", "+"]) + "%}"

    def tag(self, s):
        return f"{self.open()} {s} {self.close()}"

    def text(self):
        return self.pick(["", " ", "\n", "a", "  b\n", "\n  ", "x {y} ", "\t\n", "é\n", "{ {", "\r\n c"])

    def target(self):
        return self.pick(["v1", "v2", "i", "v1", "s", "m1"])

    def statement(self, depth):
        c = self.r.random()
        body = lambda: self.body(depth + 1)
        if c < 0.4 or depth > 2:
            return "{{" + self.pick(["", "", "-"]) + " " + self.any_expr() + " " + self.pick(["", "", "-"]) + "}}"
        if c < 0.52:
            s = self.tag("if " + self.any_expr(1)) + body()
            if self.r.random() < 0.3:
                s += self.tag("elif " + self.any_expr(1)) + body()
            if self.r.random() < 0.4:
                s += self.tag("else") + body()
            return s + self.tag("endif")
        if c < 0.68:
            target = self.pick(["v1", "v1", "v2", "v1, v2", "i"])
            it = self.pick(["l", "ls", "users", "messages", "d.items()", "pairs", "range(3)", "s", "el", "ll", "missing", "mx", self.expr(2)])
            s = self.tag(f"for {target} in {it}" + (f" if {self.expr(2)}" if self.r.random() < 0.2 else ""))
            s += self.pick(["", "{{ loop.index }}", "{{ loop.last }}", "{{ loop.length }}{{ v1 }}", "{{ v1 }},", "{{ loop.previtem }}{{ loop.nextitem }}", "{{ loop.revindex0 }}{{ loop.cycle(1, 2) }}{{ loop.changed(v1) }}"])
            s += body()
            if self.r.random() < 0.15:
                s += self.tag("if " + self.expr(2)) + self.tag(self.pick(["break", "continue"])) + self.tag("endif") + body()
            if self.r.random() < 0.2:
                s += self.tag("else") + body()
            return s + self.tag("endfor")
        if c < 0.8:
            return self.tag(f"set {self.pick([self.target(), self.target(), 'ns.q', 'v1, v2'])} = {self.any_expr()}" + ("" if self.r.random() < 0.95 else ", 1"))
        if c < 0.84:
            return self.tag("set " + self.target() + self.pick(["", "", " | upper", " | trim | length"])) + body() + self.tag("endset")
        if c < 0.88:
            return self.tag("macro m1(" + self.pick(["", "a", "a, b=2", "a=v1, b=a"]) + ")") + body() + self.pick(["{{ a }}", "{{ b }}", "{{ caller() if caller }}", ""]) + self.tag("endmacro")
        if c < 0.91:
            return self.tag("call" + self.pick(["", "(q)"]) + " m1(" + self.pick(["", "1", "a=1"]) + ")") + body() + self.tag("endcall")
        if c < 0.93:
            return self.tag("filter " + self.pick(["upper", "trim", "replace('a', 'b')", "title", "indent", "length"])) + body() + self.tag("endfilter")
        if c < 0.95:
            return self.tag(f"with {self.pick(['v1', 'i', 'q'])} = {self.any_expr(1)}") + body() + self.tag("endwith")
        if c < 0.965:
            return self.tag("generation") + body() + self.tag("endgeneration")
        if c < 0.98:
            return "{#" + self.pick(["", "-", "+"]) + " c {{ " + self.pick(["", "-", "+"]) + "#}"
        return self.tag("raw").replace("+%}", "%}") + "{{ x }}" + self.text() + self.tag("endraw")

    def body(self, depth):
        return "".join(self.text() + self.statement(depth) for _ in range(self.r.randrange(1, 3))) + self.text()

    def template(self):
        head = self.pick(["", "{% set ns = namespace(q=0) %}", "{% set ns = namespace(q='') %}{% macro m1(a) %}<{{ a }}>{% endmacro %}"])
        return head + self.body(0)


def unprintable(text):
    """Texts of Python objects that ours prints in another way, and negative zero."""
    t = (text or "").lower()
    return any(p in t for p in (" at 0x", "<function", "<class", "built-in method", "generator object", "iterator object", "&lt;", "<namespace", "range(", "dict_", "<loopcontext", "-0.0"))


def too_big(err):
    return err is not None and ("64 bits" in err or "steps" in err or "memory" in err or "nested deeper" in err)


def unlike(err, got):
    """Errors that only one side has: a call block whose macro ignores it; what ours leaves out."""
    return (err and "special caller" in err) or any(p in got.get("error", "") for p in ("unsupported format", "'loop'", "not supported", "round: the precision"))


def ours(cli, jobs):
    p = subprocess.run([cli], input="".join(json.dumps(j) + "\n" for j in jobs), capture_output=True, text=True, env=dict(os.environ, TZ="UTC"))
    lines = [json.loads(line) for line in p.stdout.split("\n") if line]
    if p.returncode != 0 or len(lines) != len(jobs):
        print("CRASH", p.returncode, p.stderr[-2000:], jobs[len(lines)]["template"] if len(lines) < len(jobs) else "")
        sys.exit(1)
    return lines


def main():
    cli, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10000
    rng = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    gen, env = Gen(rng), template_env.make_env(mutable=True)
    signal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(TimeoutError()))
    done = bad = errors = skipped = 0
    while done < count:
        jobs = [{"template": gen.template(), "vars": VARS, "now": template_env.NOW} for _ in range(500)]
        for job, got in zip(jobs, ours(cli, jobs)):
            done += 1
            signal.setitimer(signal.ITIMER_REAL, 5)
            try:
                text, err = template_env.render(env, job["template"], json.loads(json.dumps(VARS)))
            except (TimeoutError, RecursionError, MemoryError):
                skipped += 1
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if unprintable(text) or unprintable(got.get("text")) or too_big(got.get("error")) or unlike(err, got) or (err and "TimeoutError" in err):
                skipped += 1
                continue
            errors += err is not None
            if (err is None) != ("text" in got) or (err is None and text != got["text"]):
                bad += 1
                if bad <= 25:
                    print(f"--- {job['template']!r}\nwant {text!r} {err}\ngot  {got.get('text')!r} {got.get('error')}")
    print(f"{done} templates, {errors} with errors on both sides, {skipped} not comparable, {bad} differences")
    sys.exit(1 if bad else 0)


main()
