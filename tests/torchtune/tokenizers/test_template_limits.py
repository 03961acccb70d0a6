"""Templates that would fill the memory end with one sentence, wherever they run."""

import resource
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtune.data import DataError
from torchtune.tokenizers import _chat_template
from torchtune.tokenizers._chat_template import ChatTemplate

PUBLISHED = Path(find_spec("trl").origin).parent / "chat_templates"
CHAT = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
ROUNDS = "{% for i in range(9999) %}"
HOSTILE = {
    "a long range": "{% for i in range(10**12) %}x{% endfor %}",
    "nested loops": ROUNDS + ROUNDS + "{% endfor %}{% endfor %}",
    "loops that write": ROUNDS + ROUNDS + "x" * 1000 + "{% endfor %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tripling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x + n.x %}"
    "{% endfor %}",
    "a list that triples": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x + n.x %}"
    "{% endfor %}",
    "doubling by a block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling by join": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}"
    "{% endfor %}",
    "doubling by a method": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = ''.join([n.x, n.x]) %}"
    "{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('a', 'aa').replace('b', 'bb') %}{% endfor %}",
    "doubling by the filter replace": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('a', 'aa') | replace('b', 'bb') %}{% endfor %}",
    "doubling by format": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = '{}{}'.format(n.x, n.x) %}{% endfor %}",
    "doubling by %": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = '%s%s' % (n.x, n.x) %}"
    "{% endfor %}",
    "a list in itself": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
    "a list in itself as JSON": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x | tojson }}",
    "a longer and longer list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "a multiplied text": "{{ 'x' * 10**11 }}",
    "a multiplied list": "{{ [0] * 10**11 }}",
    "a multiplied constant": "{% set x = 'x' * 99999999999 %}",
    "a power": "{{ 10 ** 99999999 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a wide text": "{{ 'x'.center(10**11) }}",
    "a wide filter": "{{ 'x' | center(99999999999) }}",
    "a wide format": "{{ '{:99999999999}'.format(1) }}",
    "a wide format that memory would hold": "{{ '{:>9999999999}'.format(1) }}",
    "a wide format by another name": "{% set f = '{:>9999999999}'['format'] %}{{ f(1) }}",
    "a wide format of a mapping": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "many formats": "{{ ('{0:9999}' * 100000).format(1) }}",
    "many %": "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
    "bytes": "{{ 'x'.encode().ljust(9999999999) }}",
    "bytes of a number": "{{ (1).to_bytes(9999999999, 'big') }}",
    "a wide separator": "{{ (range(9999) | list) | join('x' * 300000) }}",
    "a wide separator by a method": "{{ ('x' * 300000).join(['a'] * 9999) }}",
    "a wide indent": "{{ ('a\nb' * 9000) | indent('x' * 300000) }}",
    "a wide separator of JSON": "{{ (range(9999) | list) | tojson(separators=('x' * 300000, ':')) }}",
    "a long JSON with an indent": "{{ (range(9999) | list) | tojson(indent=300000) }}",
    "a wide wrap": "{{ ('ab ' * 9000) | wordwrap(1, wrapstring='x' * 300000) }}",
    "a wide nested format": "{{ '{:{}}'.format(1, 9999999999) }}",
    "a wide %": "{{ '%99999999999d' % 1 }}",
    "a wide % by a star": "{{ '%*d' % (99999999999, 1) }}",
    "a wide filter format": "{{ '%99999999999d' | format(1) }}",
    "an indent": "{{ 'a\nb' | indent(99999999999) }}",
    "an indented JSON": "{{ [1, 2] | tojson(indent=99999999999) }}",
    "filled batches": "{{ [1] | batch(99999999999, 'x') | list }}",
    "slices": "{{ [1] | slice(99999999999) | list }}",
    "a sum of lists": "{{ (range(9999) | batch(1) | list * 9) | sum(start=[]) | length }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "slices of a text": "{% set x = 'ab' * 9999999 %}{{ [" + "x[1:], " * 200 + "x[1:]] | length }}",
    "letters of a text": "{{ ('\u20ac' * 30000000) | list | length }}",
    "letters through a filter": "{{ ('\u20ac' * 30000000) | map('upper') | list | length }}",
    "a long text divided": "{{ ('a ' * 30000000).split() | length }}",
    "a rounded number": "{{ 1 | round(9999999, 'ceil') }}",
    "a text in a list of lists": "{% set x = ['x' * 999999] %}{{ [[x] * 9999] * 9999 }}",
    "filters over big texts": "{% set x = 'ab' * 4000000 %}{{ ([x] * 9999) | map('upper') | list | length }}",
    "a text of texts": "{{ lipsum(n=10**9) }}",
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "a very long source": "x" * (1 << 21),
}


def render(source, caught):
    try:
        ChatTemplate(source, {}).render(CHAT)
    except (DataError, RecursionError, MemoryError) as error:
        caught.append(error)


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused(source):
    """In a thread, where no signal can interrupt it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    caught = []
    thread = threading.Thread(target=render, args=(source, caught), daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000, "KiB"
    (error,) = caught
    assert isinstance(error, DataError)
    assert "\n" not in str(error)


SLOW = {
    "a search in a long text": "{% set x = 'a' * 1000000 %}"
    + ROUNDS
    + ROUNDS
    + "{% if 'b' in x %}{% endif %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW.keys())
def test_template_that_creates_nothing_but_works_too_long_is_refused(source, monkeypatch):
    """In a thread, where no signal can interrupt it."""
    monkeypatch.setattr(_chat_template, "MAX_CPU_SECONDS", 0.2)
    caught = []
    thread = threading.Thread(target=render, args=(source, caught), daemon=True)
    thread.start()
    thread.join(300)
    (error,) = caught
    assert "0.2 seconds" in str(error)


def test_time_limit_starts_anew_with_every_conversation(monkeypatch):
    monkeypatch.setattr(_chat_template, "MAX_CPU_SECONDS", 0.2)
    template = ChatTemplate("{% for i in range(300) %}{% endfor %}{{ messages[0].content }}", {})
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        assert template.render(CHAT)[0] == "red"


def test_long_conversations_are_not_hostile():
    """Four million characters in 200 turns, each of which looks at all others and joins what was said."""
    source = (
        "{% set n = namespace(text='', last=0) %}{% for m in messages %}{% for k in messages %}"
        "{% if k.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
        "{{ '<' + m.role + '>\n' + m.content.strip() | replace('a', 'b') ~ '\n' }}{% endfor %}"
        "{{ messages | tojson | length }}"
    )
    messages = [{"role": "user", "content": "word " * 4000} for _ in range(200)]
    text = ChatTemplate(source, {}).render(messages)[0]
    assert text.startswith("<user>\nword word")
    assert len(text) > 4_000_000 - 400


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.jinja")), ids=lambda path: path.stem)
def test_published_templates_render_in_the_sandbox(path):
    assert ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}).render(CHAT)[0]


def test_formats_are_those_of_python():
    source = "{{ '{:>8.2f}|{a:*^9}|{{}}'.format(2.5, a='x') }}{{ '%-6s|%05d' % ('y', 7) }}{{ '%s!' | format(1) }}"
    assert ChatTemplate(source, {}).render(CHAT)[0] == f"{2.5:>8.2f}|{'x':*^9}|{{}}y     |000071!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' + 'b' + messages[0].content + '\n' }}{{ 1 + 2 + 3 }}{{ ([1] + [2] + [3]) | length }}",
        "{{ 'a' + ('b' + 'c') + 'd' * 2 + 'e' }}{{ 'a' ~ 'b' + 'c' + 'd' ~ 1 }}{{ 1 + 2 * 3 + 4 - 5 + 6 }}",
        "{% for m in messages %}{{ loop.index + loop.index0 + loop.revindex }}{{ loop.first }}{{ loop.last }}"
        "{{ loop.previtem }}{{ loop.nextitem }}{{ loop.length }}{{ loop.depth }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{{ m.get('role') }}{{ m.items() | list }}{{ m.none }}{% endfor %}",
        "{{ messages[0].__class__ }}",
        "{{ 'a' + 'b' + 1 }}",
        "{{ 'a' + messages[0].nothing + 'b' }}",
    ],
)
def test_sandbox_writes_what_jinja_writes(source):
    messages = [{"role": "user", "content": "x", "items": 1}, {"role": "assistant", "content": "y", "get": 2}]
    texts = []
    for render in (
        ImmutableSandboxedEnvironment().from_string(source).render,
        lambda messages: ChatTemplate(source, {}).render(messages)[0],
    ):
        try:
            texts.append(render(messages=messages))
        except (DataError, TemplateError, TypeError) as error:
            texts.append(str(error).removeprefix("the chat template refuses the conversation: "))
    assert texts[0] == texts[1]
