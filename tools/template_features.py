"""Small templates, one feature each, for golden_templates.py; Jinja2's results are the expected ones.

VARS are their variables. MUTATING templates run in an environment that allows changes of lists and dicts.
"""

VARS = {
    "n": None, "t": True, "f": False, "i": 7, "neg": -3, "big": 9007199254740993, "fl": 2.5, "tiny": 1e-7,
    "s": "Hello World", "e": "", "u": "Grüße, 世界 🌍 Straße", "html": "<a href=\"x\">it's & that</a>",
    "ws": " \t\n padded \u00a0\n", "lines": "one\ntwo\r\nthree\n\nfive", "csv": "a,b,,c", "quote": "it's", "quotes": "it's \"x\"",
    "l": [3, 1, 2], "ls": ["b", "A", "c", "a"], "el": [], "nested": [[1, 2], [3, [4, 5]]],
    "d": {"b": 1, "a": 2, "c": {"x": [1, 2, {"y": "z"}]}}, "ed": {}, "mixed": [1, "a", None, True, 2.5, [1], {"k": 1}],
    "users": [{"name": "Ann", "age": 30, "tags": ["x"], "addr": {"city": "Bonn"}}, {"name": "bob", "age": 25, "addr": {"city": "Aachen"}},
              {"name": "Cid", "age": 30, "addr": {"city": "bonn"}}],
    "items_key": {"items": "shadowed", "keys": 1, "get": 2, "x": 3},
    "uni": {"ключ": "значение", "emoji": "🙂", "ctl": "\x00\x1f\x7f\u2028"},
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}],
}

FEATURES = r'''
{{ n }} {{ t }} {{ f }} {{ i }} {{ neg }} {{ big }} {{ fl }} {{ tiny }} {{ 1e16 }} {{ 1e15 }} {{ 123456789012345680.0 }} {{ 0.1+0.2 }} {{ 1.0 }} {{ -0.0 }} {{ 1e300*1e300 }}
{{ 100.0 }} {{ 1e22 }} {{ 1.5e-5 }} {{ 0.0001 }} {{ 3.14159 }} {{ 1e3 }} {{ 2E-3 }}
{{ l }} {{ d }} {{ mixed }} {{ (1,) }} {{ (1,2) }} {{ () }} {{ [] }} {{ {} }} {{ {1: 'a', 'b': none} }}
{{ [quote, quotes, html, u, e, ws] }}
{{ ['\\', '\x00', '\x7f', '\u200b', '\xa0', 'é', '\U0001f600', '\t\r\n'] }}
{{ 'a\tb' }}|{{ 'a\\b' }}|{{ 'a\'b' }}|{{ "a\"b" }}|{{ '\q' }}|{{ 'a' 'b' "c" }}
{{ '\x41\u00e9' }}
{{ missing }}|{{ d.missing }}|{{ l[10] }}|{{ s[100] }}|{{ n.x }}|{{ i.x }}
{{ missing.x }}
{{ d.missing.x }}
{{ missing[0] }}
{{ missing() }}
{{ missing + 1 }}
{{ 1 + missing }}
{{ 'a' + missing }}
{{ 'a' ~ missing ~ 1 ~ none ~ [1] }}
{{ missing == missing }} {{ missing == none }} {{ missing != 1 }} {{ missing in [1] }} {{ 1 in missing }} {{ missing in [missing2] }}
{{ missing < 1 }}
{{ -missing }}
{{ missing|int }}
{{ missing|float }}
{{ missing|string }}|{{ missing|upper }}|{{ missing|trim }}|{{ missing|length }}|{{ missing|list }}|{{ missing|join }}|{{ missing|first }}|{{ missing|default('d') }}|{{ missing|d }}
{{ missing|tojson }}
{{ missing|last }}|{{ missing|sum }}|{{ missing|sort }}|{{ missing|items|list }}|{{ missing|map('upper')|list }}
{{ missing|abs }}
{{ missing|round }}
{{ missing|dictsort }}
{{ missing|reverse|list }}|{{ missing|unique|list }}|{{ missing|e }}|{{ missing|safe }}|{{ missing|title }}|{{ missing|replace('a','b') }}
{{ missing|min }}
{{ 1 if false }}|{{ (1 if false) is defined }}
{{ (1 if false).x }}
{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }}
{{ 7.5 // 2 }} {{ -7.5 // 2 }} {{ 7.5 % 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ 1 / 3 }} {{ 6 / 3 }} {{ 2 * 2.5 }}
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 1.0 / 0 }}
{{ 0 ** -1 }}
{{ 9223372036854775807 - 1 }}
{{ true + 1 }} {{ true + true }} {{ true * 3 }} {{ -true }} {{ +true }} {{ not 1 }} {{ not none }} {{ not not [] }}
{{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ 'a' * 0 }} {{ 'a' * -1 }} {{ [1] * 2 }} {{ [1] + [2] }} {{ (1,) + (2,) }} {{ (1,2) * 2 }}
{{ 'a' + 1 }}
{{ 1 + 'a' }}
{{ [1] + (1,) }}
{{ {} + {} }}
{{ none + 1 }}
{{ 'a' - 'b' }}
{{ +'a' }}
{{ 1 < 2 }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 > 1 }} {{ 1 == 1.0 }} {{ 1 == true }} {{ 'a' < 'b' }} {{ 'a' == 1 }} {{ [1,2] < [1,3] }} {{ (1,) == [1] }} {{ [1] == [1.0] }} {{ {'a':1} == {'a':1.0} }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ {} < {} }}
{{ [1] < (1,) }}
{{ [1,'a'] < [1,2] }}
{{ 9007199254740993 == 9007199254740992.0 }} {{ 9007199254740993 > 9007199254740992.0 }} {{ big < 9007199254740994.0 }}
{{ 1 in l }} {{ 9 in l }} {{ 'a' in 'cat' }} {{ '' in 'cat' }} {{ 'b' in d }} {{ 'z' not in d }} {{ 1 not in l }} {{ not 1 in l }} {{ 1.0 in l }} {{ true in l }} {{ [1,2] in nested }}
{{ 1 in 'a' }}
{{ 1 in 1 }}
{{ [] in d }}
{{ 'a' in none }}
{{ t and f }} {{ t or f }} {{ 0 or 'x' }} {{ '' or none }} {{ 1 and 2 }} {{ [] and 1 }} {{ e or 'default' }} {{ not t and f }} {{ not (t and f) }}
{{ 'x' if t else 'y' }} {{ 'x' if f else 'y' }} {{ 'x' if f else 'y' if t else 'z' }} {{ ('a' if t) }} {{ 1 if t else 1/0 }}
{{ s[0] }}{{ s[-1] }} {{ s[0:5] }} {{ s[::-1] }} {{ s[::2] }} {{ s[-5:] }} {{ s[:-6] }} {{ s[3:1] }} {{ s[100:] }} {{ s[-100:3] }} {{ u[0:5] }} {{ u[::-1] }} {{ u[7] }} {{ u[-8:-1:2] }}
{{ l[0] }} {{ l[-1] }} {{ l[1:] }} {{ l[::-1] }} {{ l[:2] }} {{ l[5:] }} {{ l[-2:] }} {{ l[::2] }} {{ l[2:0:-1] }} {{ l[none:2] }} {{ (1,2,3)[1:] }} {{ range(10)[2:8:3]|list }}
{{ l[::0] }}
{{ l['a'] }}|{{ l[1.0] }}|{{ d[[1]] }}|{{ d[1] }}|{{ l[true] }}|{{ s['upper'] is callable }}
{{ l['a':] }}
{{ d[0:1] }}
{{ d.a }} {{ d['a'] }} {{ d.c.x[2].y }} {{ d['c']['x'][2]['y'] }} {{ l.0 }} {{ nested[1][1][0] }} {{ nested.1.0 }} {{ d.c['x'].0 }}
{{ items_key['items'] }} {{ items_key['keys'] }} {{ items_key.x }} {{ items_key.get('get') }}
{{ (5).x is defined }} {{ 'a'.foo is defined }} {{ d.foo is defined }} {{ d.items is defined }} {{ s.upper is defined }} {{ d.__class__ is defined }} {{ d._x is defined }}
{{ d.items()|list }} {{ d.items()|length }} {{ d.keys()|first }} {{ 'a' in d.keys() }} {{ 2 in d.values() }} {{ ('a', 2) in d.items() }}
{{ d.get('a') }} {{ d.get('zz') }} {{ d.get('zz', 5) }} {{ d.get('zz', default=1) }}
{{ d.get() }}
{{ d.copy() }} {{ l.index(2) }} {{ l.count(1) }} {{ (1,1,2).count(1) }} {{ (1,2).index(2) }}
{{ l.index(99) }}
{{ l.foo() }}
{{ s.foo() }}
{{ d.items(1) }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ s.capitalize() }} {{ u.upper() }} {{ u.lower() }} {{ u.title() }} {{ "they're bill's".title() }} {{ 'ǆ'.title() }}
[{{ ws.strip() }}] [{{ ws.lstrip() }}] [{{ ws.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ 'abcab'.strip('ba') }}] [{{ 'xxaxx'.lstrip('x') }}] [{{ 'xxaxx'.rstrip('x') }}] [{{ s.strip('') }}] [{{ s.strip(none) }}]
{{ s.strip(1) }}
{{ s.strip(chars='H') }}
{{ csv.split(',') }} {{ csv.split(',', 1) }} {{ csv.rsplit(',', 1) }} {{ ' a  b '.split() }} {{ ' a  b c '.split(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a--b'.split('--') }} {{ csv.split(sep=',', maxsplit=2) }} {{ 'abc'.split('x') }} {{ csv.split(',')[-1] }} {{ 'aXbXc'.rsplit('X') }} {{ ' a b '.split(' ') }}
{{ csv.split('') }}
{{ lines.splitlines() }} {{ lines.splitlines(true) }} {{ ''.splitlines() }} {{ 'a\n'.splitlines() }} {{ 'a\u2028b\x0bc\x85d'.splitlines() }}
{{ s.startswith('He') }} {{ s.startswith('x') }} {{ s.startswith(('x','H')) }} {{ s.startswith('World', 6) }} {{ s.startswith('') }} {{ s.endswith('ld') }} {{ s.endswith(('a','d')) }} {{ s.endswith('Hello', 0, 5) }} {{ s.startswith('', 100) }} {{ s.startswith('', 11) }}
{{ s.startswith(1) }}
{{ s.startswith(['H']) }}
{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 1) }} {{ 'abc'.replace('', '-') }} {{ 'abc'.replace('', '-', 2) }} {{ 'aaa'.replace('aa', 'b') }} {{ ''.replace('', 'x') }} {{ s.replace('x', 'y') }}
{{ s.find('o') }} {{ s.find('o', 5) }} {{ s.rfind('o') }} {{ s.find('zz') }} {{ s.index('W') }} {{ s.rindex('o') }} {{ s.count('l') }} {{ s.count('') }} {{ 'aaa'.count('aa') }} {{ s.find('o', -4) }} {{ s.find('', 20) }} {{ u.find('世') }} {{ u.rfind('e') }} {{ u.find('ß', 4) }} {{ s.count('o', 5) }} {{ s.rfind('o', 0, 5) }}
{{ s.index('zz') }}
{{ ','.join(ls) }} {{ ''.join([]) }} {{ '-'.join('abc') }} {{ ', '.join(d) }}
{{ ','.join(l) }}
{{ '42'.isdigit() }} {{ '4.2'.isdigit() }} {{ ''.isdigit() }} {{ 'abc'.isalpha() }} {{ 'äß世'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' \t\u3000'.isspace() }} {{ ''.isspace() }} {{ 'abc'.islower() }} {{ 'ABC'.isupper() }} {{ 'a1!'.islower() }}
{{ 'abc'.partition('b') }} {{ 'abcbd'.rpartition('b') }} {{ 'abc'.partition('x') }} {{ 'abc'.rpartition('x') }} {{ 'prefix'.removeprefix('pre') }} {{ 'suffix'.removesuffix('fix') }} {{ 'abc'.removeprefix('x') }}
{{ 'a'.center(3, 'xx') }}
{{ '{} and {}'.format(1, 'a') }} {{ '{0} {1} {0}'.format('a', 'b') }} {{ '{x} {y}'.format(x=1, y=[2]) }} {{ '{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd') }}
{{ '{{}} {}'.format(1) }} {{ '{:.3}'.format('abcdef') }} {{ '{}'.format(none) }} {{ '{:d}'.format(true) }} {{ '{:5}|'.format(true) }}
{{ '{:05d} {:+d} {:x} {:,}'.format(42, 42, 255, 1234567) }} {{ '{:.2f} {:8.3f} {:%} {:.1%} {:10,.2f}|{:<8.1f}|{:010.2f}'.format(3.14159, 2.5, 0.25, 0.256, 1234567.891, 2.25, -3.14159) }} {{ '{!r} {!s}'.format('a', 'b') }} {{ '%5.2f|%-5d|%05d|%+d|%x|%r|%%' % (3.14159, 3, 42, 5, 255, 'q') }} {{ '{:+,} {:x} {:>+6}|{:é^5}'.format(-1234.5, -255, 7, 'a') }}
{{ '{} {}'.format(1) }}
{{ '{x}'.format() }}
{{ '{'.format(1) }}
{{ '}'.format(1) }}
{{ '{} {0}'.format(1) }}
{{ '{:d}'.format('a') }}
{{ '{:.2d}'.format(1) }}
{{ '{:x}'.format(1.5) }}
{{ '%s' % 'a' }} {{ '%s %d' % ('a', 5) }} {{ '%(a)s-%(b)05.1f' % {'a': 1, 'b': 2} }} {{ '%s' % l }} {{ '%s' % none }} {{ '%d' % 3.99 }} {{ '%d' % true }} {{ '%5s|%-5s|%.2s' % ('a', 'b', 'abc') }} {{ 'abc' % [] }} {{ '%s' % missing }} {{ '%i' % -7 }} {{ '%05s|' % 'a' }} {{ '%.0f %.0f %.0f' % (0.5, 1.5, 2.5) }}
{{ '%d' % 'a' }}
{{ '%s %s' % 'a' }}
{{ 'abc' % 1 }}
{{ '%s' % (1, 2) }}
{{ '%z' % 1 }}
{{ '%(x)s' % {} }}
{{ '%' % 1 }}
{{ s|upper }} {{ s|lower }} {{ s|title }} {{ s|capitalize }} {{ "they're bill's (x-y) [z] {q} <r>"|title }} {{ 'ß'|title }} {{ ws|trim }} {{ 'xxaxx'|trim('x') }} {{ s|replace('l', 'L') }} {{ s|replace('l', 'L', 1) }} {{ 12|replace(1, 3) }} {{ i|string }} {{ i|string|length }} {{ 5|upper }} {{ l|upper }}
{{ s|length }} {{ u|length }} {{ l|count }} {{ d|length }} {{ range(5)|length }} {{ d.values()|length }}
{{ 5|length }}
{{ l|map('string')|length }}
{{ n|length }}
{{ l|first }} {{ l|last }} {{ el|first }} {{ el|last }} {{ s|first }} {{ s|last }} {{ d|first }} {{ d|last }} {{ range(3)|last }} {{ l|join }} {{ l|join(', ') }} {{ users|join(', ', attribute='name') }} {{ users|join(attribute='addr.city') }} {{ s|join('-') }} {{ mixed|join('|') }} {{ d|join(',') }}
{{ l|map('string')|last }}
{{ 5|first }}
{{ l|sort }} {{ ls|sort }} {{ ls|sort(case_sensitive=true) }} {{ l|sort(reverse=true) }} {{ users|sort(attribute='age')|map(attribute='name')|list }} {{ users|sort(attribute='addr.city', reverse=true)|map(attribute='name')|list }} {{ d|sort }} {{ s|sort }}
{{ mixed|sort }}
{{ [none, none]|sort }}
{{ [missing, missing]|sort }}
{{ users|sort(attribute='zz') }}
{{ l|reverse|list }} {{ s|reverse }} {{ d|reverse|list }} {{ range(3)|reverse|list }} {{ l|map('string')|reverse|list }} {{ (1,2)|reverse|list }}
{{ l|min }} {{ l|max }} {{ ls|min }} {{ ls|max(case_sensitive=true) }} {{ users|max(attribute='age') }} {{ el|min }} {{ users|min(attribute='name') }} {{ l|sum }} {{ users|sum(attribute='age') }} {{ [[1],[2]]|sum(start=[]) }} {{ l|sum(start=10) }} {{ el|sum }} {{ [0.1]*3|sum }}
{{ ls|sum }}
{{ mixed|min }}
{{ [1,2,1,'a','A','a',1.0,true]|unique|list }} {{ ls|unique(case_sensitive=true)|list }} {{ users|unique(attribute='age')|map(attribute='name')|list }}
{{ [[1],[1]]|unique|list }}
{{ d|dictsort }} {{ {'b':1,'A':2}|dictsort }} {{ {'b':1,'A':2}|dictsort(true) }} {{ {'b':1,'A':2}|dictsort(false,'value') }} {{ {'b':1,'A':2}|dictsort(reverse=true) }}
{{ l|dictsort }}
{{ d|dictsort(by='x') }}
{{ l|map('string')|list }} {{ ls|map('upper')|join }} {{ users|map(attribute='name')|list }} {{ users|map(attribute='tags')|list }} {{ users|map(attribute='tags', default=['q'])|list }} {{ users|map(attribute='addr.city')|list }} {{ nested|map(attribute=0)|list }} {{ nested|map(attribute='1')|list }} {{ ls|map('replace', 'b', 'x')|list }} {{ l|map('round', precision=1)|list }} {{ el|map('nope')|list }}
{{ l|map('nope')|list }}
{{ l|map|list }}
{{ l|map(attribute='x', foo=1)|list }}
{{ l|map(missing)|list }}
{{ [0,1,'',none,'a']|select|list }} {{ [0,1,'',none,'a']|reject|list }} {{ l|select('odd')|list }} {{ l|reject('odd')|list }} {{ l|select('gt', 1)|list }} {{ l|select('>', 1)|list }} {{ l|select('in', [1,2])|list }} {{ users|selectattr('tags')|map(attribute='name')|list }} {{ users|selectattr('age', 'equalto', 30)|map(attribute='name')|list }} {{ users|rejectattr('age', 'eq', 30)|map(attribute='name')|list }} {{ users|selectattr('tags', 'defined')|list|length }} {{ users|selectattr('addr.city', '==', 'Bonn')|list|length }} {{ messages|selectattr('role','equalto','user')|list }} {{ [1,2,3]|select('divisibleby', 2)|list }}
{{ l|select('nope')|list }}
{{ users|selectattr|list }}
{{ 'yes' if l|select('gt', 100) else 'no' }} {{ (l|select)[0] is defined }} {{ l|select is iterable }} {{ l|select is sequence }} {{ l|map('string') is string }}
{% set g = l|map('string') %}{{ g|join }}{{ g|join }}|
{{ range(7)|slice(0)|list }}
{{ s|list }} {{ d|list }} {{ (1,2)|list }} {{ range(3)|list }}
{{ 5|list }}
{{ '42'|int }} {{ '42.9'|int }} {{ 'abc'|int }} {{ 'abc'|int(7) }} {{ 3.99|int }} {{ -3.99|int }} {{ true|int }} {{ none|int }} {{ [1]|int }} {{ ' 5 '|int }} {{ '1_000'|int }} {{ '1e3'|int }} {{ 'inf'|int }} {{ ''|int }} {{ '-5'|int }} {{ '+5'|int }} {{ '5_'|int }}
{{ '3.14'|float }} {{ 'abc'|float }} {{ 'abc'|float(1.5) }} {{ 5|float }} {{ 'inf'|float }} {{ '-nan'|float }} {{ '1e5'|float }} {{ none|float }} {{ ' 2.5 '|float }} {{ '1_0.5'|float }} {{ '0x10'|float }} {{ true|float }} {{ '.5'|float }} {{ '5.'|float }} {{ 'infinity'|float }}
{{ -5|abs }} {{ -2.5|abs }} {{ (-5)|abs }} {{ true|abs }} {{ 2.567|round(2) }} {{ 2.5|round }} {{ 3.5|round }} {{ 2.567|round(1,'ceil') }} {{ 2.567|round(1,'floor') }} {{ 5|round }} {{ 42.55|round|int }} {{ 2.675|round(2) }} {{ -2.5|round }} {{ 1e20|round(2) }} {{ 5|round(1,'ceil') }}
{{ 's'|abs }}
{{ 2.5|round(1, 'x') }}
{{ 's'|round }}
{{ d|tojson }} {{ mixed|tojson }} {{ uni|tojson }} {{ s|tojson }} {{ html|tojson }} {{ quotes|tojson }} {{ n|tojson }} {{ t|tojson }} {{ fl|tojson }} {{ 1e16|tojson }} {{ (1,2)|tojson }} {{ el|tojson }} {{ ed|tojson }} {{ {1:2, none:3, true:4, 1.5:5}|tojson }} {{ 'a\x7f\u2028é\b\f'|tojson }}
{{ d|tojson(indent=2) }}
{{ mixed|tojson(indent=0) }}
{{ d|tojson(indent='--', sort_keys=true) }}
{{ d|tojson(separators=(',', ':')) }} {{ d|tojson(sort_keys=true) }} {{ uni|tojson(ensure_ascii=true) }} {{ [el, ed]|tojson(indent=4) }} {{ 1e400|tojson }} {{ (-1e400)|tojson }} {{ d|tojson(true, 2) }} {{ [1,[2]]|tojson(indent=1, separators=(';', '=')) }}
{{ {(1,2): 3}|tojson }}
{{ {1: 2, 'a': 3}|tojson(sort_keys=true) }}
{{ l|map('string')|tojson }}
{{ namespace(a=1)|tojson }}
{{ html|e }} {{ html|escape|upper }} {{ (html|e)|e }} {{ html|safe }} {{ (html|safe)|e }} {{ '<' + (html|safe) }} {{ (html|safe) + '<' }} {{ (html|safe) ~ '<' }} {{ ('<b>'|safe) * 2 + '<' }} {{ ['<', '>'|safe]|join('<') }} {{ [html|safe] }} {{ ('<%s>'|safe) % '<' }} {{ ('<{}>'|safe).format('<') }} {{ ('a<b'|safe).replace('a', '<') }} {{ ('<'|safe).join(['<','>']) }} {{ (html|e).split('&') }} {{ (html|safe)[0:2] + '<' }} {{ 'x'|e is escaped }} {{ 'x' is escaped }} {{ (html|safe)|string is escaped }} {{ ('<'|safe)|replace('<','>') is escaped }} {{ ('<'|safe)|trim + '<' }}
{{ lines|indent }}|{{ lines|indent(2, true) }}|{{ lines|indent(2, blank=true) }}|{{ lines|indent('> ') }}|{{ ''|indent }}|{{ 'a\n'|indent(first=true) }}|
{{ 5|indent }}
{{ 'foo bar baz qux'|truncate(9) }} {{ 'foo bar baz qux'|truncate(9, true) }} {{ 'foo bar baz qux'|truncate(11) }} {{ 'foo bar baz qux'|truncate(11, false, '...', 0) }} {{ 'foobarbazqux'|truncate(5, end='') }} {{ u|truncate(8, true, '…', 0) }} {{ s|truncate }}
{{ 'foo bar'|truncate(2) }}
{{ '%s-%s'|format(1, 'b') }} {{ '%(x)s'|format(x=1) }}
{{ '%s'|format(1, x=2) }}
{{ d|items|list }} {{ e|default('x') }}|{{ e|default('x', true) }}|{{ n|default('x') }}|{{ f|d('x', boolean=true) }}|{{ missing|default }}|{{ missing|default(default_value='k') }}
{{ l|items|list }}
{{ 1|nope }}
{% if false %}{{ 1|nope }}{% endif %}ok
{% if true %}{{ 1|nope }}{% endif %}ok
{{ 1|nope if false else 'ok' }}
{% if false %}{% for x in l %}{{ 1|nope }}{% endfor %}{% endif %}ok
{{ 1 is nope }}
{% if false %}{{ 1 is nope }}{% endif %}ok
{{ i is defined }} {{ missing is defined }} {{ missing is undefined }} {{ n is none }} {{ missing is none }} {{ t is boolean }} {{ 1 is boolean }} {{ t is true }} {{ f is false }} {{ 1 is true }} {{ i is integer }} {{ t is integer }} {{ fl is float }} {{ i is number }} {{ t is number }} {{ s is number }} {{ s is string }} {{ i is string }} {{ d is mapping }} {{ l is mapping }} {{ l is sequence }} {{ d is sequence }} {{ s is sequence }} {{ i is sequence }} {{ missing is sequence }} {{ l is iterable }} {{ d is iterable }} {{ i is iterable }} {{ missing is iterable }} {{ n is iterable }} {{ d.items() is iterable }} {{ range(3) is sequence }}
{{ 3 is odd }} {{ 4 is even }} {{ 3 is even }} {{ 9 is divisibleby(3) }} {{ 9 is divisibleby 4 }} {{ 2.0 is even }} {{ -3 is odd }} {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 1 is lower }} {{ 1 is eq 1 }} {{ 1 is equalto(1) }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 1 is le 1 }} {{ 2 is gt 1 }} {{ 2 is ge 3 }} {{ 1 is in [1] }} {{ 1 is not in [1] }} {{ 'a' is in 'abc' }} {{ n is sameas none }} {{ t is sameas true }} {{ 1 is sameas true }} {{ l is sameas l }} {{ range is callable }} {{ s.upper is callable }} {{ s is callable }} {{ missing is callable }} {{ i is not defined }} {{ not i is defined }} {{ 1 is not none and true }} {{ i is defined and i is number }} {{ s is string or f }} {{ l is not string and l is iterable }}
{{ 's' is odd }}
{{ missing is odd }}
{{ 1 is divisibleby }}
{{ 1 is lt 'a' }}
{{ 1 is defined is true }}
{{ (1 is defined) is true }}
{{ range(5)|list }} {{ range(2,5)|list }} {{ range(5,0,-2)|list }} {{ range(0)|list }} {{ 3 in range(5) }} {{ range(5)[-1] }} {{ range(5)|sum }} {{ range(3) == range(0,3) }}
{{ range(100001) }}
{{ range(1.5) }}
{{ range(1,2,0) }}
{{ range() }}
{{ dict(a=1, b=2) }} {{ dict([('x', 1), ('y', 2)]) }} {{ dict(d, z=9) }} {{ dict() }} {{ dict({'a': 1}, a=2) }}
{{ dict([1]) }}
{{ dict(1) }}
{% set ns = namespace(a=1, b=[]) %}{{ ns.a }}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns['a'] }}{{ ns.zz is defined }}{% for x in l %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}{% set ns.c, ns.d = 5, 6 %}{{ ns.c + ns.d }}{{ namespace({'q': 1}, r=2).r }}
{% set d.x = 1 %}
{% set missing.x = 1 %}
{% set ns = namespace() %}{{ 1 in ns }}
{% set j = joiner('|') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}{% set k = joiner() %}{{ k() }}a{{ k() }}b
{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%dT%H:%M:%S') }} {{ strftime_now('') }} {{ strftime_now('é') }}
{{ strftime_now('%A %B %j %p %y %% %z%Z') }}|
{{ raise_exception('boom') }}
{{ raise_exception() }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a','b') }}{{ loop.changed(x) }};{% endfor %}
{% for x in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop['index'] }}{% endfor %}
{% for x in el %}x{% else %}empty{% endfor %}{% for x in l %}x{% else %}empty{% endfor %}{% for x in missing %}x{% else %}none{% endfor %}
{% for x in l if x > 1 %}{{ x }}{{ loop.index }}{{ loop.last }}{{ loop.length }};{% endfor %}{% for x in l if x > 100 %}{% else %}none{% endfor %}
{% for a, b in nested if a %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% for c in 'añb' %}{{ c }}.{% endfor %}{% for a, b in ['xy', 'zw'] %}{{ a }}{{ b }}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for a, b in [(1,2,3)] %}{% endfor %}
{% for a, b in [(1,)] %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in none %}{% endfor %}
{% for x in l %}{% for y in l %}{{ loop.index }}{{ x }}{{ y }},{% endfor %}{{ loop.index }};{% endfor %}
{% for x in range(10) %}{% if x == 3 %}{% continue %}{% endif %}{% if x == 6 %}{% break %}{% endif %}{{ x }}{% endfor %}|{% for x in l %}{% continue %}{% else %}E{% endfor %}|{% for x in l %}{% break %}{% else %}E{% endfor %}
{% for x in l %}{% set y = x %}{% endfor %}{{ y is defined }}{% set z = 1 %}{% for x in l %}{% set z = z + x %}{{ z }},{% endfor %}{{ z }}
{% for x in l %}{% set loop = 1 %}{% endfor %}
{% for loop in l %}{% endfor %}
{% break %}
{% for x in l %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{% for x in l %}{{ loop([1]) }}{% endfor %}
{% set loop = 5 %}{{ loop }}{% for x in l %}{{ loop.index }}{% endfor %}{{ loop }}
{% for x in l %}{% set q %}{{ x }}{% if x == 1 %}{% break %}{% endif %}{% endset %}{{ q }};{% endfor %}
{% set ns = namespace(stop=false) %}{% for x in range(6) if not ns.stop %}{{ x }}{% if x == 2 %}{% set ns.stop = true %}{% endif %}{% endfor %}
{% for x in l if loop is defined %}{{ x }}{% endfor %}
{% if i == 7 %}a{% elif i == 8 %}b{% else %}c{% endif %}{% if f %}a{% elif i == 7 %}b{% else %}c{% endif %}{% if f %}a{% elif f %}b{% else %}c{% endif %}{% if e %}x{% endif %}{% if 1, 2 %}t{% endif %}
{% set x = 1 %}{{ x }}{% set x, y = 2, 3 %}{{ x }}{{ y }}{% set x = 1, 2 %}{{ x }}{% set (a, b) = [4, 5] %}{{ a }}{{ b }}{% set v %}block {{ i }}{% endset %}{{ v }}{% set v | upper | replace('B', 'x') %}block{% endset %}{{ v }}
{% set a, b = 1 %}
{% set true = 1 %}
{% set 1 = 1 %}
{% set a.b.c = 1 %}
{% if f %}{% set i = 1 %}{% endif %}{{ i }}{% if t %}{% set i = 1 %}{% endif %}{{ i }}{% if f %}{% set zz = 1 %}{% endif %}{{ zz is defined }}
{{ i }}{% set i = 2 %}{{ i }}{% for x in l %}{{ i }}{% if x == 1 %}{% set i = 99 %}{% endif %}{{ i }},{% endfor %}{{ i }}
{% set i = i + 1 %}{{ i }}
{% macro m(a, b=2, c=a) %}[{{ a }},{{ b }},{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}{{ m(1,2,3) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=1) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
{% macro m(a) %}{{ a.x }}{% endmacro %}{{ m() }}
{% macro m() %}({{ caller() }}){% endmacro %}{% call m() %}body {{ i }}{% endcall %}{% macro k() %}{{ caller(1, 2) }}{% endmacro %}{% call(a, b) k() %}{{ a }}+{{ b }}{% endcall %}
{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}
{% macro fact(n) %}{% if n <= 1 %}1{% else %}{{ n * fact(n - 1)|int }}{% endif %}{% endmacro %}{{ fact(5) }}
{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}
{% macro m() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}
{% macro m() %}{% set x = 5 %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}{{ x }}
{% for x in l %}{% macro m() %}{{ x }}{{ loop.index }}{% endmacro %}{{ m() }}{% endfor %}
{% macro m(x) %}{{ x }}{{ i }}{% endmacro %}{% set i = 3 %}{{ m(1) }}{{ m(*[5]) }}{{ m(**{'x': 6}) }}
{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}
{% macro m(a, a) %}{% endmacro %}
{% macro m(a=1, b) %}{% endmacro %}
{% filter upper %}abc {{ s }}{% endfilter %}{% filter replace('a', 'b') | upper %}aaa{% endfilter %}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% set a = 5 %}{{ a }}{% endwith %}{{ a is defined }}{% with %}{% set q = 1 %}{% endwith %}{{ q is defined }}{% with i = i + 1 %}{{ i }}{% endwith %}{{ i }}
{% generation %}text {{ i }}{% set zz = 1 %}{% endgeneration %}{{ zz is defined }}
{% raw %}{{ x }} {% if %}{% endraw %} {%- raw -%}  a  {%- endraw -%}  b
{# comment #}a{#- c -#} b {#+ c +#} c
a {{- 1 -}} b {{ 2 }} c {%- if t -%} d {%- endif -%} e
{{ [1,2,3,] }} {{ {'a':1,} }} {{ (1,2,) }} {{ s.replace('a','b',) }} {{ 1, 2 }} {{ {'a': {'b': {}}} }}
{{ 1 if t else 2, 3 }} {{ (1 if t) , 2 }} {{ [x, 1] if x is defined else 'u' }} {{ -1|abs }} {{ -l|first }} {{ 'a' ~ 1 + 2 }}
{{ 1 ~ 2 * 3 }} {{ 2 * 3 ~ 4 }} {{ not l|length > 5 }} {{ l|length + 1 }} {{ 'a' in 'abc' and 'b' }} {{ 1 + 1 ~ 'x' }} {{ 5 - 3 - 1 }} {{ 2 ** 2 ** 3 }} {{ 100 / 10 / 2 }} {{ 'x' * 2 ~ 'y' }}
{{ s.split()[0][1:3].upper()|lower ~ '!' }} {{ (s|upper).lower() }} {{ s|upper|lower|title }} {{ 'abc'[1] }} {{ [1,2][0] }} {{ {'a': 5}.a }} {{ {'a': 5}['a'] }} {{ (1,2)[1] }} {{ 'a,b'.split(',')|join('-')|upper }} {{ "%s"|format(1)|int + 1 }} {{ s.split('o')|map('trim')|list }}
{{ foo(1, 2 }}
{{ 1 + }}
{{ }}
{% if %}{% endif %}
{% if t %}
{% for x in l %}
{% endfor %}
{% nope %}
{% else %}
{{ 'abc }}
{{ a b }}
{{ 1 | }}
{% set x %}
{# unclosed
{% raw %} unclosed
{{ [1, 2 }}
{{ (1 }}
{{ ) }}
{{ {1} }}
{{ $ }}
{{ a! }}
{{ s.upper( }}
{{ f(a=1, 2) }}
{{ f(a=1, a=2) }}
{{ f(**d, 1) }}
{% include 'x' %}
{% import 'x' as y %}
{% from 'x' import y %}
{% extends 'x' %}
{% do 1 %}
{{ "\ud800" }}
{{ "\x4" }}
{{ "\N{DASH}" }}
{{ l is }}
{{ 'a' is string is true }}
{% for x in l %}{{ x }}{% endfor x %}
{% if t %}x{% endif y %}
{% macro %}{% endmacro %}
{% call 5 %}{% endcall %}
'''.strip("\n").split("\n")

# templates with line feeds, for whitespace control
FEATURES += [
    "a\n  {% if t %}\n  b\n  {% endif %}\nc\n", "a\n  {{ 1 }}\n  b\n", "  {% set x = 1 %}  \n{{ x }}", "x  {% if t %}\ny{% endif %}\n\nz",
    "a\n\t {%+ if t %}b{% endif +%}\n c", "a \n {%- if t %} b {%- endif %} \n c", "{% if t %}\n\n\na{% endif %}", "a\n  {# c #}\nb\n  {#- c -#}\n d",
    "line1\r\nline2\rline3\n\n", "\n", "\n\n", "", "a\n", " \n {% if t -%} \n x \n {%- endif %} \n", "{% for x in l %}\n  {{ x }}\n{% endfor %}\nend",
    "  {{ 1 }}\n  {{- 2 }}\n  {{ 3 -}}\n  4", "a\n   {% raw %}\n {{ x }}\n   {% endraw %}\nb", "{%- set x = 1 -%}\n\n  {{ x }}", "é {% if t %}\n  ü{% endif %}",
    "a\u00a0\u3000{%- if t %}x{% endif -%}\u00a0\u3000b", "{{\n 1 +\n 2\n}}\n{{ missing\n.x }}", "a{% if t %}\n{% endif %}\n{% if t %}\n{% endif %}\nb", "{{ 'multi\nline' }}", "{{ '''x''' }}",
    "{{ \"a\\\nb\" }}", "  {#+ keep #}\n  x", "x {#- a -#}\n\n y", "{% raw -%}\n  a\n{%- endraw %}\n b", "{{ 1 }}\n\n{{ 2 }}\n", "{{ 1 }}{# #}\n{{ 2 }}", "{% if t %}a{% endif +%}\nb",
    "{%+ if t %}a{% endif %}", "x\n  \n  {% if t %}y{% endif %}", "{{ l[0]\n}}", "{#", "{{", "{%", "{", "}}", "%}", "a{b}c", "{ {", "{{ '}}' }}", "{% set x = '%}' %}{{ x }}", "{{ {'a':{'b':1}}}}", "{{{'a':1}}}", "{{-1}}", "{{- -1 -}}", "{%if t%}x{%endif%}",
]

# refused by transformers' immutable sandbox, allowed by other engines
MUTATING = [
    "{% set _ = l.append(9) %}{{ l }}", "{% set a = [] %}{% for x in l %}{% set _ = a.append(x * 2) %}{% endfor %}{{ a }}", "{{ l.pop() }}{{ l.pop(0) }}{{ l }}", "{{ l.pop(5) }}",
    "{{ el.pop() }}", "{% set _ = l.insert(1, 'x') %}{% set _ = l.insert(-1, 'y') %}{% set _ = l.insert(100, 'z') %}{{ l }}", "{{ l.extend([7, 8]) }}{{ l.extend('ab') }}{{ l }}", 
    "{{ d.update({'z': 1}) }}{{ d.update(y=2) }}{{ d }}", "{{ d.pop('a') }}{{ d.pop('q', 5) }}{{ d }}", "{{ d.pop('q') }}",
    "{% for x in l %}{% if loop.index < 3 %}{% set _ = l.append(x) %}{% endif %}{{ x }}{% endfor %}",
    "{% for k in d %}{% set _ = d.pop(k) %}{% endfor %}", "{% set a = l %}{% set _ = a.append(1) %}{{ l }}", "{% set c = d.copy() %}{% set _ = c.update(a=99) %}{{ d.a }}{{ c.a }}", "{% set c = l[:] %}{% set _ = c.append(1) %}{{ l|length }}",
]
