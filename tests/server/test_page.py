#!/usr/bin/env python3
"""The page of `sooth serve` in a real Chromium: it chats, races, shows the figures that the server sent, survives reloads. Speaks TAP.

Needs chromium and a pulled smollm2; without them the tests are skipped. SOOTH_SHOTS=FOLDER keeps screenshots; SOOTH_SERVE adds options to the server's.
"""
import decimal
import json
import os
import re
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import browser  # noqa: E402

SOOTH = os.path.abspath(os.environ.get("SOOTH_BIN", "build/sooth"))
SHOTS = os.environ.get("SOOTH_SHOTS")
MORE = os.environ.get("SOOTH_SERVE", "").split()
PAGE = "web/index.html"


class Server:
    def __init__(self, *args):
        self.p = subprocess.Popen([SOOTH, "serve", "-m", "smollm2", *(() if "--port" in args else ("--port", "0")), *args, *MORE], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True)
        self.said = ""
        for line in self.p.stderr:
            self.said += line
            found = re.search(r"ready at (http://\S+)", line)
            if found:
                self.url = found.group(1)
                return
        raise RuntimeError(f"the server did not start: {self.said}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.p.terminate()
        self.p.wait(30)


def events(body):
    return [json.loads(line[5:]) for line in body.split("\n") if line.startswith("data:") and "[DONE]" not in line]


def rounds_of(stream):
    return [e["sooth"] for e in stream if "sooth" in e]


def tokens(rounds):
    return [t for r in rounds for t in r["tokens"]]


def say(page, text):
    page.eval("document.getElementById('message').focus()")
    page.type(text)
    page.key("Enter", text="\r")


def idle(page, seconds=300):
    page.wait("['Send', 'Race'].includes(document.getElementById('send').textContent)", seconds)
    page.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def settle(page, **values):
    for name, value in values.items():
        page.eval(f"document.getElementById('set-{name}').value = {json.dumps(str(value))}")


def shown(page, name):
    return page.eval(f"document.getElementById('{name}').textContent")


def fixed(x, digits):
    """As a browser rounds: ties away from zero, where Python's format goes to the even digit."""
    return str(decimal.Decimal(x).quantize(decimal.Decimal(1).scaleb(-digits), decimal.ROUND_HALF_UP))


def equal(got, want, what):
    assert got == want, f"{what}: the page shows {got!r}, the server said {want!r}"


def check_figures(page, rounds, last):
    """The figures beside the answer are those that came with its end."""
    spec, timings = last["spec"], last["timings"]
    equal(shown(page, "fig-rate"), fixed(timings["predicted_per_second"], 1), "tokens per second")
    equal(shown(page, "fig-tpp"), fixed(spec["tokens_per_pass"], 2), "tokens per pass")
    equal(shown(page, "fig-accepted"), "–" if spec["mean_accepted"] is None else fixed(spec["mean_accepted"], 2), "accepted")
    equal(shown(page, "fig-alpha"), "–" if spec["alpha"] is None else fixed(100 * spec["alpha"], 1) + " %", "alpha")
    equal(page.eval("document.getElementById('hits').hidden"), "hit_rate" not in spec, "the hit rate is shown only with async")
    if spec.get("hit_rate") is not None:
        equal(shown(page, "fig-hits"), fixed(100 * spec["hit_rate"], 1) + " %", "hit rate")
    bars = page.eval("[...document.querySelectorAll('#depths [data-tested]')].map(e => [+e.dataset.tested, +e.dataset.accepted])")
    equal(bars, [[d["tested"], d["accepted"]] for d in spec["per_depth"][:16]], "acceptance by depth")
    made = tokens(rounds)
    for origin in ("draft", "correction", "bonus", "plain"):
        equal(int(shown(page, "n-" + origin)), sum(t["origin"] == origin for t in made), origin)
    equal(int(shown(page, "n-rejected")), sum(len(r["rejected"]) for r in rounds), "rejected")
    equal(page.eval("+document.getElementById('pass').max"), len(rounds) - 1, "passes")
    equal(page.eval("document.querySelectorAll('#tree text[class]').length"), len(rounds[-1]["tree"]), "nodes of the last draft")
    return spec


def text_of(page, box):
    """The text of an answer before Markdown takes its marks out."""
    return page.eval(f"document.querySelector({json.dumps(box)}).answer.text")


def calm(page):
    assert page.problems == [], f"console: {page.problems}"
    own = page.eval("location.origin")
    foreign = [u for u in page.requests if not u.startswith((own, "data:"))]
    assert foreign == [], f"outside requests: {foreign}"


def shot(page, name):
    if SHOTS:
        page.shot(os.path.join(SHOTS, name))


def test_file():
    """One small file that asks nobody else for anything and builds no markup out of text."""
    source = open(PAGE, encoding="utf-8").read()
    assert len(source.encode()) < 60000
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", source) == []
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=\"", "onclick"):
        assert banned not in source, banned


def test_chat(b, server):
    page = b.open(server.url, 1280, 900, prefers_color_scheme="light")
    page.wait("document.getElementById('about').textContent.includes('smollm2')")
    settle(page, temp=0, max=160)
    say(page, "Explain why the sea looks blue, then say it again word for word. <img src=x onerror=alert(1)>")
    idle(page)
    first = events(page.bodies("/v1/chat/completions")[-1])
    spec = check_figures(page, rounds_of(first), first[-1])
    assert spec["rounds"] > 0
    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in first if e["choices"])
    equal(text_of(page, ".turn.model .text"), said, "the answer")
    assert page.eval("document.querySelectorAll('img').length") == 0, "a message became markup"
    spans = page.eval("document.querySelectorAll('.turn.model .t:not(.rejected)').length")
    assert spans >= sum(bool(t["text"]) for t in tokens(rounds_of(first))) * 0.9, "tokens have no spans of their own"
    spoken = page.eval("[...document.querySelectorAll('#spoken p')].map(e => e.textContent)")
    equal("".join("".join(spoken).split()), "".join(said.split()), "what is read out")
    assert len(spoken) < len(tokens(rounds_of(first))) / 4, "read out in crumbs"
    page.eval("document.getElementById('show-rejected').click()")
    shot(page, "page-light.png")
    say(page, "Again, in one sentence.")  # the conversation goes on
    idle(page)
    second = events(page.bodies("/v1/chat/completions")[-1])
    check_figures(page, rounds_of(second), second[-1])
    assert page.eval("document.querySelectorAll('.turn').length") == 4
    calm(page)


def test_passes(b, server):
    """Every pass can be looked at, by the slider and from its tokens."""
    page = b.open(server.url, 1280, 900)
    settle(page, temp=0, max=80, drafter="ngram+lookup", length=4)
    say(page, "Say one two three one two three one two three one two three.")
    idle(page)
    rounds = rounds_of(events(page.bodies("/v1/chat/completions")[-1]))
    drafted = [k for k, r in enumerate(rounds) if len(r["tree"]) > 1 and r["tokens"]]
    assert drafted, "nothing was guessed"
    k = drafted[len(drafted) // 2]
    page.eval(f"(() => {{ const e = document.getElementById('pass'); e.value = {k}; e.dispatchEvent(new Event('input')); }})()")
    equal(shown(page, "pass-name"), f"{k + 1} of {len(rounds)}", "the pass")
    equal(page.eval("document.querySelectorAll('#tree text[class]').length"), len(rounds[k]["tree"]), "nodes")
    equal(page.eval("document.querySelectorAll('#tree text.accepted').length"), sum(n["accepted"] for n in rounds[k]["tree"][1:]), "accepted")
    chances = [f" {int(100 * n['chance'] + 0.5)}%" for n in rounds[k]["tree"][1:] if n["chance"] is not None]
    equal(page.eval("[...document.querySelectorAll('#tree tspan')].map(t => t.textContent)"), chances, "chances")
    marked = page.eval("[...document.querySelectorAll('.t.here')].map(e => e.textContent).join('')")
    equal(marked.strip(), "".join(t["text"] for t in rounds[k]["tokens"]).strip(), "the words of a pass")
    page.eval(f"document.querySelector('.t[data-round=\"{drafted[0]}\"]').click()")
    equal(shown(page, "pass-name"), f"{drafted[0] + 1} of {len(rounds)}", "the pass of a token")
    calm(page)


def test_race(b, server):
    page = b.open(server.url, 1280, 900, prefers_color_scheme="dark")
    page.wait("document.getElementById('about').textContent.includes('smollm2')")
    page.eval("document.getElementById('tab-race').click()")
    settle(page, temp=0.7, seed=11, max=96)
    say(page, "Write a Python function that tells whether a number is prime.")
    idle(page)
    plain, spec = (json.loads(x) for x in page.bodies("/v1/chat/completions")[-2:])
    rounds = [o["choices"][0]["sooth"]["rounds"] for o in (plain, spec)]
    ids = [[t["id"] for t in tokens(r)] for r in rounds]
    assert len(ids[0]) > 8 and ids[0] == ids[1], "plain and speculative differ"
    equal(page.eval("document.getElementById('verdict').dataset.identical"), "yes", "identical")
    assert f"all {len(ids[0])} token ids" in shown(page, "verdict")
    assert plain["spec"]["drafter"] == "none" and spec["spec"]["drafter"] != "none"
    for lane, o in (("plain", plain), ("spec", spec)):
        equal(text_of(page, f"#lane-{lane} .text"), o["choices"][0]["message"]["content"], "the text")
        took, t = page.eval(f"document.querySelector('#lane-{lane} .took').textContent"), o["timings"]
        seconds, rate = fixed(t["predicted_ms"] / 1000, 2), fixed(t["predicted_per_second"], 1)
        equal(took, f"{len(ids[0])} tokens, {seconds} s, {rate} tokens/s", "time")
    ratio = plain["timings"]["predicted_ms"] / spec["timings"]["predicted_ms"]
    assert f"{fixed(ratio, 2)} times the speed" in shown(page, "verdict")
    check_figures(page, rounds[1], spec)
    shot(page, "page-race-dark.png")
    page.eval("document.getElementById('replay').click()")
    idle(page)
    equal(text_of(page, "#lane-spec .text"), text_of(page, "#lane-plain .text"), "the texts of the replay")
    settle(page, verify="reject", seed=12)
    say(page, " Why?")
    idle(page)
    verdict = shown(page, "verdict")
    assert "identical: yes" in verdict or "the same distribution, not the same text" in verdict, verdict
    calm(page)


def test_stop(b, server):
    page = b.open(server.url, 1280, 900)
    settle(page, temp=0, max=2000, drafter="none")
    say(page, "Count from one to five hundred in words.")
    page.wait("document.querySelectorAll('.turn.model .t').length > 5")
    page.key("Escape")
    idle(page)
    equal(page.eval("document.querySelector('.turn.model .note').textContent"), "Stopped.", "the end of the answer")
    before = text_of(page, ".turn.model .text")
    time.sleep(0.5)
    equal(text_of(page, ".turn.model .text"), before, "the stopped answer")
    settle(page, max=8)
    say(page, "Thanks.")
    idle(page)
    assert page.eval("document.querySelectorAll('.turn').length") == 4
    calm(page)


def test_errors(b, server):
    page = b.open(server.url, 1280, 900)
    settle(page, temp="warm")
    say(page, "Hello.")
    idle(page)
    assert "“warm” is not a number" in page.eval("document.querySelector('#log .error').textContent")
    settle(page, temp="-3")
    say(page, "Hello.")
    idle(page)
    said = page.eval("[...document.querySelectorAll('#log .error')].at(-1).textContent")
    want = json.loads(page.bodies("/v1/chat/completions")[-1])["error"]["message"]
    equal(said, want, "the server's error")
    settle(page, temp=0, max=4)
    say(page, "Hello.")
    idle(page)
    assert page.eval("!!document.querySelector('.turn:last-child .note')"), "an error spoiled the conversation"


MARKDOWN = """# Title

One **bold** and *soft* `x = 1` line,
and a second with 2*3*4 and snake_case_name. <b>not markup</b>

- first
- second with **bold**
  - inner
1. one
2. two

> quoted

```python
def f(x):
    return x ** 2  # `kept`
```
after"""


def test_markdown(b, server):
    """Markdown becomes elements, the same ones however the text is cut into tokens, and every token keeps its span."""
    page = b.open(server.url, 1280, 900)
    build = """(size => { const text = %s, box = make("div", "text"), w = new Writer(box);
        for (let i = 0; i < text.length; i += size) { w.add(text.slice(i, i + size), "draft", i); w.update(); }
        document.getElementById("log").append(box); return box; })""" % json.dumps(MARKDOWN)
    shape = "(e => { const f = e => e.nodeType === 3 ? e.data : ['SPAN'].includes(e.tagName) ? e.textContent : `<${e.tagName}>` + [...e.childNodes].map(f).join('') + '</>'; return f(e); })"
    whole = page.eval(f"{shape}({build}(100000))")
    for size in (1, 2, 3, 7, 40):
        equal(page.eval(f"{shape}({build}({size}))"), whole, f"pieces of {size}")
    for part in ("<H3>Title</>", "<STRONG>bold</>", "<EM>soft</>", "<CODE>x = 1</>", "2*3*4", "snake_case_name", "<b>not markup</b>",
                 "<UL><LI>first\n</><LI>second with <STRONG>bold</>", "<UL><LI>inner\n</>", "<BLOCKQUOTE>quoted\n</>",
                 "def f(x):\n    return x ** 2  # `kept`\n</>", "<P>after</>"):
        assert part in whole, f"{part} is missing in {whole}"
    assert "```" not in whole and "**bold" not in whole, whole
    spans = page.eval(f"{build}(1).querySelectorAll('.t').length")
    assert spans > len(MARKDOWN) * 0.6, spans
    calm(page)


def test_reload(b, server):
    """The conversation is there again after a reload, can be continued, answered anew and cleared."""
    page = b.open(server.url, 1280, 900)
    page.wait("document.getElementById('about').textContent.includes('smollm2')")
    settle(page, temp=1, max=24)
    say(page, "Tell me about rivers.")
    idle(page)
    text, figures = text_of(page, ".turn.model .text"), shown(page, "fig-tpp")
    spans = page.eval("document.querySelectorAll('.turn.model .t.draft').length")
    page.call("Page.reload")
    page.wait("document.readyState === 'complete' && document.querySelectorAll('.turn.model').length === 1")
    page.wait("document.getElementById('about').textContent.includes('smollm2')")
    page.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    equal(text_of(page, ".turn.model .text"), text, "the answer after a reload")
    equal(shown(page, "fig-tpp"), figures, "its figures")
    equal(page.eval("document.querySelectorAll('.turn.model .t.draft').length"), spans, "its origins")
    settle(page, temp=1, max=24, seed=5)
    page.eval("document.getElementById('again').click()")
    page.wait("document.getElementById('send').textContent === 'Stop'")
    idle(page)
    assert page.eval("document.querySelectorAll('.turn').length") == 2 and text_of(page, ".turn.model .text") != text
    asked = json.loads(page.eval("JSON.stringify(messages)"))
    equal([m["role"] for m in asked], ["user", "assistant"], "the conversation")
    page.eval("document.getElementById('new').click()")
    page.call("Page.reload")
    page.wait("document.readyState === 'complete' && !document.getElementById('welcome').hidden")
    assert page.eval("document.querySelectorAll('.turn').length") == 0
    calm(page)


def test_gone(b, _):
    """A server that goes away, and one that comes back."""
    with Server() as server:
        page = b.open(server.url, 800, 700)
        page.wait("document.getElementById('about').textContent.includes('smollm2')")
        settle(page, max=4)
        say(page, "Hello.")
        idle(page)
        assert shown(page, "pass-name") != "–"
    say(page, "Hello.")
    idle(page)
    equal(page.eval("document.querySelector('#log .error').textContent"), "The server cannot be reached.", "the error")
    equal((shown(page, "pass-name"), shown(page, "tree"), shown(page, "plan")), ("–", "", ""), "the draft of an answer without passes")
    page.eval("greet()")
    page.wait("document.getElementById('about').textContent.includes('trying again')")
    port = server.url.rstrip("/").rsplit(":", 1)[1]
    with Server("--port", port):
        page.wait("document.getElementById('about').textContent.includes('smollm2')", 30)


def test_key(b, _):
    with Server("--api-key", "opensesame") as server:
        page = b.open(server.url, 800, 700)
        page.wait("!document.getElementById('key-form').hidden")
        equal(shown(page, "about"), "This server requires an API key.", "no key")
        page.eval("document.getElementById('key').focus()")
        page.type("wrong")
        page.key("Enter", text="\r")
        page.wait("!document.getElementById('key-note').hidden")
        equal(shown(page, "key-note"), "The server refused this key.", "a wrong key")
        equal(shown(page, "about"), "The server refused the API key.", "a wrong key")
        page.eval("document.getElementById('key').value = ''")
        page.type("opensesame")
        page.key("Enter", text="\r")
        page.wait("document.getElementById('about').textContent.includes('smollm2')")
        settle(page, max=4)
        say(page, "Hello.")
        idle(page)
        assert page.eval("!!document.querySelector('.turn .note')")


def test_keyboard(b, server):
    """Tab goes through every control, and each shows that it has the focus."""
    page = b.open(server.url, 1280, 900)
    page.wait("document.getElementById('about').textContent.includes('smollm2')")
    page.eval("document.getElementById('settings').open = true")
    page.eval("document.getElementById('pass').disabled = false")
    want = set(page.eval("""[...document.querySelectorAll('button, input, select, textarea, summary')]
        .filter(e => e.checkVisibility() && e.tabIndex >= 0).map((e, i) => e.id || e.textContent)"""))
    seen = set()
    for _ in range(60):
        page.key("Tab")
        name, outline = page.eval("(() => { const e = document.activeElement; return [e.id || e.textContent, getComputedStyle(e).outlineStyle]; })()")
        if name in want:
            seen.add(name)
            assert outline != "none", f"{name} shows no focus"
    assert seen == want, f"not reached by Tab: {want - seen}"
    nameless = page.eval("""[...document.querySelectorAll('button, input, select, textarea')].filter(e =>
        !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()).map(e => e.id)""")
    assert nameless == [], f"controls without a name: {nameless}"
    page.eval("document.getElementById('tab-chat').focus()")
    page.key("ArrowRight")
    assert page.eval("document.activeElement.id") == "tab-race" and page.eval("!document.getElementById('race').hidden")
    calm(page)


def luminance(rgb):
    part = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in rgb)]
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2]


def test_contrast(b, server):
    """Text on every ground it stands on, in both schemes: at least 4.5 to 1."""
    page = b.open(server.url, 1280, 900)
    for scheme in ("light", "dark"):
        page.media(prefers_color_scheme=scheme)
        names = ["ink", "soft", "draft", "correction", "bonus", "rejected", "paper", "raised", "wash"]
        colors = page.eval("Object.fromEntries(" + json.dumps(names) + ".map(n => { const e = document.createElement('i');"
                           "e.style.color = `var(--${n})`; document.body.append(e); const c = getComputedStyle(e).color; e.remove();"
                           "return [n, c.match(/\\d+/g).map(Number)]; }))")
        for ink in names[:6]:
            for ground in names[6:]:
                a, z = sorted((luminance(colors[ink]), luminance(colors[ground])))
                ratio = (z + 0.05) / (a + 0.05)
                assert ratio >= 4.5, f"{scheme}: {ink} on {ground} is {ratio:.2f} to 1"


def test_phone(b, server):
    page = b.open(server.url, 360, 740, phone=True)
    page.wait("document.getElementById('about').textContent.includes('smollm2')")
    settle(page, temp=0, max=120)
    say(page, "Explain why the sea looks blue, then say it again word for word.")
    idle(page)
    assert page.eval("document.documentElement.scrollWidth") <= 360, "wider than the screen"
    assert "tokens per second" in shown(page, "brief")
    page.size(390, 844, True, 2)
    page.eval("scrollTo(0, 0)")
    shot(page, "page-phone.png")
    page.size(360, 740, True)
    page.eval("document.getElementById('tab-race').click()")
    settle(page, max=24)
    say(page, "Why is the sky blue?")
    idle(page)
    page.eval("document.getElementById('settings').open = true")
    assert page.eval("document.documentElement.scrollWidth") <= 360, "the race is wider than the screen"
    small = page.eval("[...document.querySelectorAll('button.main, [role=tab]')].filter(e => e.getBoundingClientRect().height < 40).length")
    assert small == 0, "controls too small for a finger"
    calm(page)


def missing():
    if not browser.find():
        return "chromium is not here"
    probe = subprocess.run([SOOTH, "tokenize", "-m", "smollm2", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return None if probe.returncode == 0 else "smollm2 is not here (sooth pull smollm2)"


def main():
    tests = [test_chat, test_passes, test_race, test_stop, test_errors, test_markdown, test_reload, test_gone, test_key, test_keyboard, test_contrast, test_phone]
    print(f"1..{len(tests) + 1}")
    failed = 0

    def check(i, name, work):
        nonlocal failed
        try:
            work()
            print(f"ok {i} {name}", flush=True)
        except Exception as e:  # noqa: a test must not stop the others
            failed += 1
            print(f"not ok {i} {name}: {type(e).__name__} {e}", flush=True)

    check(1, "test_file", test_file)
    why = missing()
    if why:
        print(f"skip: {why}")
        for i, test in enumerate(tests, 2):
            print(f"ok {i} {test.__name__} # SKIP {why}")
    else:
        with Server() as server, browser.Browser() as b:
            for i, test in enumerate(tests, 2):
                check(i, test.__name__, lambda: test(b, server))
    raise SystemExit(1 if failed else 0)


main()
