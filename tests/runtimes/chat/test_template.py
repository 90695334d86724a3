"""Chat templates: the text they give, the messages they refuse, and what a hostile one can't do."""

import threading
import tracemalloc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
import pytest
from support.models.real_models import real_model

from edgedec.errors import CancelledError, RequestError, TemplateError
from edgedec.gguf.file import read_gguf
from edgedec.progress import CancelToken
from edgedec_runtimes.chat import budget as chat_budget
from edgedec_runtimes.chat.budget import Budget
from edgedec_runtimes.chat.filters import FILTERS, METHODS
from edgedec_runtimes.chat.template import ChatTemplate, check_messages

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO: list[Message] = [{"role": "user", "content": "Hello"}]
TURNS: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Sum of 2 and 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Times 4?"},
]
TOOLS: list[Message] = [{"name": "weather", "description": 'It\'s <now> & "then", in °C'}]
TOOL_TURNS: list[Message] = [
    {"role": "user", "content": "Is it cold in Köln?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]},
    {"role": "tool", "content": "7"},
    {"role": "tool", "content": "windy"},
]

LLAMA_STYLE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set instructions = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set instructions = '' %}
{%- endif %}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{{- '<H>system</H>\n\nDate: ' ~ date_string ~ '\n' ~ instructions ~ '<E>' }}
{%- for message in messages %}
    {{- '<H>' + message['role'] + '</H>\n\n' + message['content'] | trim + '<E>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<H>assistant</H>\n\n' }}
{%- endif %}
"""
MISTRAL_STYLE = """{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if turn.role == 'user' and loop.last and ns.system %}
        {{- '[INST] ' ~ ns.system ~ '\n\n' ~ turn.content ~ ' [/INST]' }}
    {%- elif turn.role == 'user' %}
        {{- '[INST] ' ~ turn.content ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ turn.content ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
GEMMA_STYLE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('No system role here') }}{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\n' + message['content'] | trim + '</turn>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}
"""
QWEN_STYLE = """{%- macro open(role) %}{{ '<S>' + role + '\n' }}{% endmacro %}
{%- if tools %}
    {{- open('system') + '# Tools' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '<E>\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- open('user') | trim }}{% endif %}
        {{- '\n<R>' + message.content + '</R>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<E>\n' }}{% endif %}
    {%- else %}
        {{- open(message.role) + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<C>{"name": "' ~ call.function.name ~ '", ' }}
            {{- '"arguments": ' ~ call.function.arguments | tojson ~ '}</C>' }}
        {%- endfor %}
        {{- '<E>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- open('assistant') }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<T></T>' ~ ns.last_user }}{% endif %}
{%- endif %}
"""


def template(source: str) -> ChatTemplate:
    """Compile with the special tokens that the expected texts have."""
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def rendered(source: str, messages: list[Message] = HELLO, **options: Any) -> str:
    return template(source).render(messages, **options)


# What comes out.


STYLES: dict[str, tuple[str, list[Message], dict[str, Any], str]] = {
    "chatml": (
        *(CHATML, TURNS, {}),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSum of 2 and 3?<|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>\n<|im_start|>user\nTimes 4?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "no generation prompt": (*(CHATML, HELLO, {"add_generation_prompt": False}), "<|im_start|>user\nHello<|im_end|>\n"),
    "llama": (
        *(LLAMA_STYLE, TURNS, {"date_string": "26 Jul 2024"}),
        "<s><H>system</H>\n\nDate: 26 Jul 2024\nBe brief.<E><H>user</H>\n\nSum of 2 and 3?<E>"
        "<H>assistant</H>\n\n5<E><H>user</H>\n\nTimes 4?<E><H>assistant</H>\n\n",
    ),
    "mistral": (
        *(MISTRAL_STYLE, TURNS, {}),
        "<s>[INST] Sum of 2 and 3? [/INST] 5</s>[INST] Be brief.\n\nTimes 4? [/INST]",
    ),
    "gemma": (
        *(GEMMA_STYLE, TURNS[1:], {}),
        "<s><turn>user\nSum of 2 and 3?</turn>\n<turn>model\n5</turn>\n<turn>user\nTimes 4?</turn>\n<turn>model\n",
    ),
    "qwen with tools": (
        *(QWEN_STYLE, TOOL_TURNS, {"tools": TOOLS}),
        '<S>system\n# Tools\n{"name": "weather", "description": "It\'s <now> & \\"then\\", in °C"}<E>\n'
        "<S>user\nIs it cold in Köln?<E>\n"
        '<S>assistant\n<C>{"name": "weather", "arguments": {"city": "Köln"}}</C><E>\n'
        "<S>user\n<R>7</R>\n<R>windy</R><E>\n<S>assistant\n",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_what_styles_of_templates_give(style: str) -> None:
    """The system message goes where the style has it, roles are renamed, and blocks leave no blank lines.

    Variables reach the template. Tools are plain JSON (no HTML escapes, no ASCII escapes); their answers share a turn.
    """
    source, messages, options, expected = STYLES[style]
    assert rendered(source, messages, **options) == expected


def test_strftime_now_is_the_clock() -> None:
    """A template without a date asks for today's."""
    before = datetime.now()
    text = rendered("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert text in {f"{moment:%Y-%m-%d %H:%M}" for moment in (before, datetime.now())}


@pytest.mark.parametrize(
    ("source", "messages", "complaint"),
    [
        (MISTRAL_STYLE, HELLO + HELLO, r"line 11: Roles must alternate: user, assistant, user, \.\.\.$"),
        (GEMMA_STYLE, TURNS, "No system role here"),
    ],
)
def test_raise_exception_gives_the_templates_own_message(source: str, messages: list[Message], complaint: str) -> None:
    """Two user messages in a row, or a system message, are refused in the template's words, with its line."""
    with pytest.raises(TemplateError, match=complaint):
        rendered(source, messages)


def test_qwen_style_without_thinking() -> None:
    """`enable_thinking` is one of the variables that a caller may pass; the loop over [::-1] found message 3."""
    assert rendered(QWEN_STYLE, TURNS, enable_thinking=False).endswith("<S>assistant\n<T></T>3")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("{{ [{'b': 1, 'a': '<é'}] | tojson }}", '[{"b": 1, "a": "<é"}]'),
        ("{{ {'b': [], 'a': [1]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    1\n  ],\n  "b": []\n}'),
        ("{{ [1, 'é'] | tojson(ensure_ascii=true, separators=(',', ':')) }}", '[1,"\\u00e9"]'),
        ("{{ tools is none and documents is none and nothing is not defined }}", "True"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "user"),
        ("{{ 'generators are true' if messages | selectattr('role', 'equalto', 'x') }}", "generators are true"),
        ("{{ messages | rejectattr('role', 'in', ['x']) | list | length }}", "1"),
        ("{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' not in 'b' }} {{ 2 in [1, 2] }}", "True False True True"),
        ("{{ (1, 2) + (3,) }}{{ [1] * 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 'a' * -1 }}", "(1, 2, 3)[1, 1]3332"),
        ("{{ '%s-%03d' % ('a', 7) }} {{ '{:>4}|{x}'.format('b', x=1) }} {{ '%d%%' | format(5) }}", "a-007    b|1 5%"),
        ("{{ '{%d}' % 1764000000 }} {{ '{{{}}}'.format(1764000000) }}", "{1764000000} {1764000000}"),
        ("{{ 'a\nb' | indent(2) }}{{ ' x ' | trim }}{{ 'ab' | replace('a', 'c') | upper }}", "a\n  bxCB"),
        ("{{ [1, 1.0, true, 2, 0.5, 0.5, 'A', 'a', none, none, '1'] | unique | list }}", "[1, 2, 0.5, 'A', None, '1']"),
        ("{{ [(1, 'a'), (1.0, 'a'), (1, ('b',)), (1, ('b',))] | unique | list }}", "[(1, 'a'), (1, ('b',))]"),
        (
            "{{ ['A', 'a'] | unique(true) | list }}{{ [{'n': 1}, {'n': 1}] | unique(attribute='n') | list }}",
            "['A', 'a'][{'n': 1}]",
        ),
        ("{{ [3, 1, 2] | sort | reverse | list }}{{ [1, 1] | unique | list }}{{ [1, 2] | sum }}", "[3, 2, 1][1]3"),
        ("{{ ('<' | e) ~ ('<' | safe) ~ ('a' | safe + '<') }}", "&lt;<a<"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "a1True"),
        ("{% for n in [2, 0] recursive %}{{ n }}{% if n %}{{ loop([n - 1]) }}{% endif %}{% endfor %}", "2100"),
        ("{% macro twice() %}{{ caller() * 2 }}{% endmacro %}{% call twice() %}ab{% endcall %}", "abab"),
        ("{% set x %}{{ 'a' }}{% endset %}{% filter upper %}{{ x }}{% endfilter %}", "A"),
        ("{% set ns = namespace({'a': 1}, b=2) %}{% set ns.a = ns.a + ns.b %}{{ ns.a }}{{ dict(c=3).c }}", "33"),
        ("{{ 'a</think>b'.split('</think>')[-1] }}{{ 'xax'.strip('x') }}{{ 'ab'.startswith(('c', 'a')) }}", "baTrue"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    """Every feature gives what transformers' environment gives, but that `e` and `safe` make plain strings."""
    assert rendered(source) == expected


def test_a_message_is_not_a_template() -> None:
    """Jinja in a user's message is text."""
    assert "{{ bos_token }}{% x %}" in rendered(CHATML, [{"role": "user", "content": "{{ bos_token }}{% x %}"}])


def test_one_template_serves_many_threads() -> None:
    """Renderings at the same time don't share a budget or a text."""
    chat = template("{% for i in range(2000) %}{% endfor %}{{ messages[0].content }}")
    texts = [str(i) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: chat.render([{"role": "user", "content": text}]), texts)) == texts


def test_a_long_conversation_is_within_the_budget() -> None:
    """200 messages of 3,000 characters, more than any context here holds, render."""
    text = rendered(QWEN_STYLE, [{"role": "user", "content": "wörd " * 600}] * 200)
    assert text.count("wörd") == 120_000


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty renderings of forty messages use what was compiled for the first one."""
    compiled: list[object] = []
    compile_ = jinja2.Environment.compile

    def counted(self: jinja2.Environment, source: Any, *args: Any, **options: Any) -> Any:
        compiled.append(source)
        return compile_(self, source, *args, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", counted)
    chat = template(QWEN_STYLE)
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 60} for i in range(40)]
    assert len({chat.render(messages) for _ in range(20)}) == 1
    assert len(compiled) == 1


# Messages.


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        ("Hello", "messages must be a sequence of mappings, not str"),
        ({"role": "user"}, "messages must be a sequence of mappings, not dict"),
        ([*HELLO, "Hello"], "message 1 must be a mapping, not str"),
        ([{"content": "Hello"}], "message 0: 'role' must be a string, not None"),
        ([*HELLO, {"role": 1, "content": "Hello"}], "message 1: 'role' must be a string, not 1"),
        ([{"role": "user"}], "message 0: 'content' must be a string or a list of text parts, not None"),
        ([*HELLO, {"role": "user", "content": 5}], "message 1: 'content' must be"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "message 0: part 0 of 'content'"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}], "message 0: part 1 of"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, complaint: str) -> None:
    """The error says which message is wrong, and what with it."""
    with pytest.raises(RequestError, match=complaint) as caught:
        template(CHATML).render(messages)
    assert not isinstance(caught.value, TemplateError)


def test_roles_that_clients_send_or_the_template_names_pass() -> None:
    """Those of OpenAI's interfaces, and one that only the template knows, such as Llama's; others are refused."""
    named = template(CHATML + "{% if messages[0].role == 'ipython' %}{% endif %}")
    for role in ("system", "user", "assistant", "tool", "developer", "function", "ipython"):
        assert "Hello" in named.render([{"role": role, "content": "Hello"}, *HELLO])
    for role, hint in (
        ("usr", "did you mean user\\?$"),
        ("Assistant", "did you mean assistant\\?$"),
        ("robot", "it must be one of system, user, .*function$"),
    ):
        with pytest.raises(RequestError, match=rf"message 1: 'role' is '{role}'; {hint}"):
            named.render([*HELLO, {"role": role, "content": "Hello"}])


def test_tools_are_checked() -> None:
    """A tool that is no mapping is the caller's mistake."""
    with pytest.raises(RequestError, match="tool 0 must be a mapping, not str"):
        rendered(QWEN_STYLE, tools=["weather"])


def test_any_mapping_is_a_tool() -> None:
    """Tools need not be dicts for a template to encode them."""
    assert '{"name": "weather"}' in rendered(QWEN_STYLE, tools=[MappingProxyType({"name": "weather"})])


def test_any_mapping_is_a_message() -> None:
    """Messages need not be dicts, and are not changed."""
    message: Mapping[str, Any] = MappingProxyType({"role": "user", "content": "Hello"})
    assert check_messages((message,)) == HELLO


PARTS: list[Message] = [
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}
]


SET = "{% set content = m.content %}"
BOTH = "{% if m.content is string %}[{{ m.content }}]{% else %}{{ m.content[0]['type'] }}{% endif %}"
LOOKS = "{% for part in m.content %}{% if part['type'] == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "messages", "expected"),
    [
        (SET + "{{ content }}", PARTS, "Hello\nthere"),
        (SET + "{{ content | tojson }}", PARTS, '"Hello\\nthere"'),
        (SET + "{{ '' + content }}", PARTS, "Hello\nthere"),
        (SET + "{{ content | string }}", PARTS, "Hello\nthere"),
        ("{% for part in m.content %}<{{ part.text }}>{% endfor %}", PARTS, "<Hello><there>"),
        (LOOKS, HELLO, "<Hello>"),
        (BOTH, HELLO, "[Hello]"),
    ],
)
def test_a_template_gets_the_content_that_it_takes(body: str, messages: list[Message], expected: str) -> None:
    """Parts are joined where the template prints, encodes or adds them; a string becomes a part where it loops only."""
    assert rendered(f"{{% for m in messages %}}{body}{{% endfor %}}", messages) == expected


# Templates that do not compile.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\n{% if %}", r"line 2: Expected an expression"),
        ("a\n\n{{ x", r"line 3: unexpected end of template"),
        ("{% frobnicate %}", r"line 1: Encountered unknown tag 'frobnicate'"),
        ("\n{{ 'a' | urlize }}", r"line 2: No filter named 'urlize'"),
        ("{% include 'x' %}", r"line 1: Include is not available"),
        ("{% import 'x' as y %}", r"line 1: Import is not available"),
        ("{% from 'x' import y %}", r"line 1: FromImport is not available"),
        ("{% extends 'x' %}", r"line 1: Extends is not available"),
        ("{% block a %}{% endblock %}", r"line 1: Block is not available"),
        ("{% autoescape true %}{% endautoescape %}", r"line 1: ScopedEvalContextModifier is not available"),
        ("{% set ns = namespace() %}{% set ns.__call__ = 1 %}", r"line 1: names with an underscore"),
        ("x" * 200_000, r"line 1: it has 200,000 characters, more than 131,072"),
        ("{{ a }}" * 10_000, r"line 1: it has more than 10,000 parts"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "recursion"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "1" * 5000 + " }}", "4300 digits"),
    ],
    ids=lambda value: value[:30],
)
def test_templates_that_do_not_compile(source: str, complaint: str) -> None:
    """The error names the line where there is one; odd sources fail as quickly as wrong ones."""
    with pytest.raises(TemplateError, match=complaint):
        template(source)


# Hostile templates. LIMIT is smaller than the real budget, so that the tests are quick.

LIMIT_BYTES = 1 << 20


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give renderings 1 MiB, or 32,768 steps, and as much time as the machine needs for that."""
    monkeypatch.setattr(chat_budget, "LIMIT_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(chat_budget, "LIMIT_S", 600.0)


def times(n: int, body: str) -> str:
    """Repeat `body` n times, with a namespace whose x starts as "abcdefgh"."""
    return "{% set ns = namespace(x='abcdefgh') %}{% for i in range(" + str(n) + ") %}" + body + "{% endfor %}"


def grown(start: str, step: str, use: str) -> str:
    """Apply `step` to x sixty times, then use it."""
    loop = f"{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{loop}{use}"


FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
BIG = "{% set a = 'a' * 99999 %}{% set b = a ~ 'b' %}{% set c = a ~ 'c' %}"
LISTS = "{% set big = range(999) | list %}"
MACROS = "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(20))
MANY_PARTS = "a{% if 1 %}{% endif %}" * 1500

TOO_MUCH = [
    # loops
    FOR_EVER,
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% filter upper %}" + FOR_EVER + "{% endfilter %}",
    "{% for i in range(999) %}" + "x" * 5000 + "{% endfor %}",
    "{% set x %}" + FOR_EVER.replace("BODY", MANY_PARTS) + "{% endset %}",
    "{% macro f() %}" + FOR_EVER.replace("BODY", MANY_PARTS) + "{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}",
    LISTS + FOR_EVER.replace("BODY", "{% set c = big | sort | unique | max %}"),
    LISTS + FOR_EVER.replace("BODY", "{% set c = big | select('odd') %}"),
    LISTS + FOR_EVER.replace("BODY", "{% set c = big | reverse %}{% set c = -1 in big %}"),
    LISTS + "{% macro f() %}{{ varargs | length }}{% endmacro %}" + FOR_EVER.replace("BODY", "{{ f(*big) }}"),
    "{{ range(1000) | map(attribute='.'.join(['real'] * 3000)) | list }}",
    "{{ range(999) | map('string') | map('replace', '', 'a' * 100) | join }}",
    # one operation
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * [0] }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ ('a' * -9) ~ 'a'.center(-10**12) ~ 'a'.center(10**9) }}",
    "{{ 'a\n' | indent(10**9) }}",
    "{{ ('a\n' * 100000) | indent(100000) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%.999999999f' | format(1) }}",
    "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
    "{{ ('%(a)s' * 10000) % {'a': 'x' * 10000} }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>٩٩٩٩٩٩٩٩٩}'.format(1) }}",
    "{{ ('{0}' * 10000).format('x' * 10000) }}",
    "{{ ('a' * 999).join('b' * 9999) }}",
    "{{ (['b'] * 9999) | join('a' * 999) }}",
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('ab ' * 100000).split() }}",
    "{{ ('ab ' * 100000).split(' ') }}",
    "{{ ('ab\n' * 99999).splitlines() }}",
    "{{ ('ab ' * 100000) | title }}",
    "{{ ('é' * 20000) | list }}",
    "{{ ('<' * 200000) | e }}",
    "{{ ['\x00' * 400000] | tojson }}",
    grown("[]", "[ns.x]", "{{ ([ns.x] * 20) | tojson(indent=16) }}"),
    # an unlucky search
    BIG + "{{ ([b, c] * 10000) | sort | length }}",
    BIG + "{{ c in [b] * 10000 }}",
    BIG + "{{ c.startswith(([b] * 10000)[0:]) }}",
    BIG + "{{ a | sort(attribute=0) }}",
    BIG + "{{ a.strip(b) }}",
    BIG + "{{ b | trim(c) }}",
    BIG + "{{ a.rfind('ab' ~ 'a' * 20000) }}",
    BIG + "{{ a.rsplit('ab' ~ 'a' * 20000) }}",
    # growth
    times(100, "{% set ns.x = ns.x ~ ns.x %}"),
    times(100, "{% set ns.x = ns.x + ns.x %}"),
    times(100, "{% set ns.x = ns.x | replace('a', 'aaaaaaaa') %}"),
    times(100, "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}"),
    times(100, "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    times(100, "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    times(100, "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "{% set s = 'a' * 50000 %}" + times(99999, "{% set ns.x = [ns.x, s[1:]] %}"),
    "{% set l = ['a'] * 5000 %}" + times(99999, "{% set ns.x = [ns.x, l[1:], l + l, dict(a=l)] %}"),
    times(99999, "{% set ns.x = [ns.x, [" + "1," * 5000 + "]] %}"),
    times(99999, "{% set ns.x = namespace(y=ns.x) %}"),
    times(99999, "{% set ns.x = namespace(y=ns.x, a=0, b=0, c=0, d=0, e=0, f=0) %}"),
    times(99999, "{% set ns.x = namespace(y=ns.x, f=''.format) %}"),
    times(99999, MACROS + "{% set ns.x = namespace(y=ns.x, " + ", ".join(f"m{i}=m{i}" for i in range(20)) + ") %}"),
    times(99999, "{% for k in [1] %}{% set ns.x = namespace(y=ns.x, loop=loop) %}{% endfor %}"),
    # small in memory, endless to print, compare or hash: such a value can't be made
    *(
        grown("['a']", way, "")
        for way in (
            *("[ns.x, ns.x]", "(ns.x, ns.x)", "{'a': ns.x, 'b': ns.x}", "dict(a=ns.x, b=ns.x)", "[ns.x] + [ns.x]"),
            *("([ns.x] * 2)[0:]", "[ns.x, 1, ns.x] | reject('eq', 1) | list"),
        )
    ),
    "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}" + times(60, "{{ f(ns.x, ns.x) }}"),
    "{% macro f() %}{% set ns.x = kwargs %}{% endmacro %}" + times(60, "{{ f(a=ns.x, b=ns.x) }}"),
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ range(999) | list | tojson(separators=('a' * 999, ':')) }}",
]


@pytest.mark.slow
@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("source", TOO_MUCH, ids=lambda source: source[-60:])
def test_templates_that_want_too_much(source: str) -> None:
    """A loop, an operation or a value over the budget ends in an error, without the memory it asks for."""
    chat = template(source)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError, match="it needs more than 1 MiB or 32,768 steps"):
            chat.render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * LIMIT_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "use",
    [
        *("{{ ns }}", "{{ ns ~ '' }}", "{{ '%s' % ns }}", "{{ [ns] }}", "{{ {ns: 1} }}", "{{ raise_exception(ns) }}"),
        *("{{ messages[0][ns] }}", "{{ messages[0].get(ns) }}", "{{ ns is lower }}", "{{ [ns.f] }}"),
        "{{ '{a}'.format(a=ns) }}",
        "{% for i in [1] %}{{ [loop] }}{% endfor %}",
        "{% macro f() %}{{ kwargs }}{% endmacro %}{{ f(a=ns) }}",
        "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(ns) }}",
        "{% macro f() %}{% endmacro %}{{ [f] }}",
        *(f"{{{{ {use} }}}}" for name in FILTERS for use in (f"ns | {name}", f"'a' | {name}(ns)")),
        *(f"{{{{ 'a'.{name}(ns) }}}}" for name in METHODS if hasattr(str, name)),
    ],
)
def test_only_plain_data_is_printed_or_kept_in_data(use: str) -> None:
    """A namespace may hold itself many times over, so nothing prints, hashes or walks through it."""
    with pytest.raises(TemplateError, match="is no text or plain data"):
        rendered("{% set ns = namespace(f=''.format) %}" + use)


NOT_ALLOWED = [
    ("{{ ''.__class__ }}", "access to attribute '__class__' of 'str'"),
    ("{{ ''['__class__'] }}", "access to attribute '__class__' of 'str'"),
    ("{{ '{0.__class__}'.format('x') }}", "access to attribute '__class__' of 'str'"),
    ("{{ ['a'] | map(attribute='__class__') }}", "access to attribute '__class__' of 'str'"),
    ("{{ ['a'] | sort(attribute='__class__') }}", "access to attribute '__class__' of 'str'"),
    ("{{ raise_exception.__globals__ }}", "access to attribute '__globals__'"),
    ("{{ messages.append(1) }}", "access to attribute 'append' of 'list'"),
    ("{{ messages[0].update({}) }}", "access to attribute 'update' of 'dict'"),
    ("{{ lipsum() }}{{ cycler }}", "'lipsum' is undefined"),
    ("{{ cycler('a') }}", "'cycler' is undefined"),
    ("{{ (1).to_bytes(10**9, 'big') }}", "calling int.to_bytes is not available"),
    ("{{ 'a'.encode() }}", "calling str.encode is not available"),
    ("{{ '\t'.expandtabs(10**9) }}", "calling str.expandtabs is not available"),
    ("{{ 'a'() }}", "calling str is not available"),
    ("{{ namespace(__call__=1) }}", "names with an underscore"),
    ("{{ namespace({'__call__': 1})() }}", "names with an underscore"),
    ("{{ range(10**9) | list }}", "Range too big"),
    ("{{ 10 ** (10 ** 9) }}", "integers of more than 10,000 digits"),
    (times(99, "{% set ns.x = (ns.x if i else 9) * (ns.x if i else 9) %}"), "integers of more than 10,000 digits"),
    ("{{ 5 | round(-10**9) }}", "round takes at most 300 digits"),
    ("{{ 5 | round(10**9, 'ceil') }}", "round takes at most 300 digits"),
    ("{{ 'a' | round(9, 'ceil') }}", "a number is expected, not a str"),
    ("{{ [[1]] | sum(start=[]) }}", "a number is expected, not a list"),
    ("{{ '%999999999d' is odd }}", "a number is expected, not a str"),
    ("{{ '%999999999d' is divisibleby(3) }}", "a number is expected, not a str"),
    ("{{ '%*d' % (10**9, 1) }}", "as a width is not available"),
    ("{{ '%.*f' | format(10**9, 1) }}", "as a width is not available"),
    ("{{ '{0:{1}}'.format(1, 10**9) }}", "a format inside a format"),
    ("{{ 'a'.center('nan' | float) }}", "cannot be interpreted as an integer"),
    ("{{ strftime_now('%c' * 999) }}", "a time format has at most 200"),
    ("{{ self }}", "a TemplateReference is no text"),
    ("{{ 'a' | map('upper') }}", "a list_iterator is no text"),
    ("{{ ['a' | map('upper')] }}", "a list_iterator is no text"),
    ("{{ messages[0].keys() - ['role'] }}", "unsupported operands of -"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "maximum recursion depth"),
    (times(300, "{% set ns.x = [ns.x] %}"), "data nested more than 200 deep"),
    (times(300, "{% set ns.x = (ns.x,) %}"), "data nested more than 200 deep"),
    ("{{ ('f' * 20000) | int(0, 16) }}", "integers of more than 10,000 digits"),
    ("{{ (('f' * 400000) | int(0, 16)) is divisibleby(('f' * 200000) | int(0, 16)) }}", "integers of more than 10,000"),
    ("{{ no_such_function() }}", "'no_such_function' is undefined"),
    ("a\nb\n{{ messages[0].content.a.b }}", "line 3: 'str object' has no attribute 'a'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "complaint"), NOT_ALLOWED, ids=lambda value: value[-60:])
def test_templates_that_reach_too_far(source: str, complaint: str) -> None:
    """Attributes, functions and operands that no chat template needs are refused with the reason."""
    with pytest.raises(TemplateError, match=complaint.replace("(", r"\(")):
        rendered(source)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["[ns.x].none", "namespace(a=ns.x)"])
def test_deep_chains_of_objects_are_freed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that hold each other 30,000 deep do not overflow the stack when they go."""
    monkeypatch.setattr(chat_budget, "LIMIT_S", 600.0)
    assert rendered(times(30_000, f"{{% set ns.x = {step} %}}") + "done") == "done"


PRIME = 2**61 - 1  # Python's hash of a multiple of this is 0


@pytest.mark.parametrize("kind", ["int", "float"])
def test_unique_keeps_numbers_with_equal_hashes(kind: str) -> None:
    """They are all different, and come out once each; no set or dict of them is made, which would take for ever."""
    numbers = f"range(0, 300 * {PRIME}, {PRIME})"
    assert rendered(f"{{{{ (({numbers} | map('{kind}') | list) * 2) | unique | list | length }}}}") == "300"


def test_a_rendering_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is cancelled while an endless loop runs ends it; one that was cancelled before, at once."""
    monkeypatch.setattr(chat_budget, "LIMIT_BYTES", 1 << 50)
    monkeypatch.setattr(chat_budget, "LIMIT_S", 60.0)
    cancel = CancelToken()
    timer = threading.Timer(0.1, cancel.cancel)
    timer.start()
    with pytest.raises(CancelledError):
        rendered(FOR_EVER, cancel=cancel)
    timer.join()
    with pytest.raises(CancelledError):
        rendered(CHATML, cancel=cancel)
    parts: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    with pytest.raises(CancelledError):
        rendered(CHATML, parts, cancel=cancel)


@pytest.mark.slow
def test_an_endless_loop_spends_the_whole_budget() -> None:
    """An endless loop on the real budget ends, at 2,097,152 steps or 5 s."""
    with pytest.raises(TemplateError, match=r"more than 64 MiB or 2,097,152 steps|more than 5 s"):
        rendered(FOR_EVER.replace("BODY", ""))


def test_time_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering stops at its deadline, whatever is left of the budget."""
    monkeypatch.setattr(chat_budget, "LIMIT_S", 0.0)
    with pytest.raises(TemplateError, match="it ran for more than 0 s"):
        rendered(CHATML)


@pytest.mark.parametrize("price", [-1, float("nan"), chat_budget.LIMIT_BYTES + 1])
def test_prices_that_would_undo_the_budget(price: Any) -> None:
    """A negative price, a NaN and one over the budget are refused and change nothing."""
    budget = Budget()
    with pytest.raises(Exception, match="it needs more than"):
        budget.spend(price)
    assert budget.left_bytes == chat_budget.LIMIT_BYTES


def test_a_value_weighs_what_it_takes_to_print() -> None:
    """A list in a list twice counts twice."""
    inner = ["word"] * 10
    assert Budget().weigh([inner, inner]) > 1.9 * Budget().weigh([inner])


# Real models.


def chat_template_of(name: str) -> str:
    """Return the template in a real model's file."""
    source = read_gguf(real_model(name)).metadata["tokenizer.chat_template"]
    assert isinstance(source, str)
    return source


@pytest.mark.model
def test_the_template_of_smollm2() -> None:
    """SmolLM2 puts its own system message before a conversation that has none."""
    assert rendered(chat_template_of("smollm2-135m.gguf")) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_the_template_of_qwen25_coder() -> None:
    """It takes the system message as it is; tool calls and answers come out as Qwen2.5 was trained on them."""
    source = chat_template_of("qwen2.5-coder-0.5b.gguf")
    assert rendered(source, TURNS) == rendered(CHATML, TURNS)
    text = rendered(source, TOOL_TURNS, tools=TOOLS)
    assert '<tools>\n{"name": "weather", "description": "It\'s <now> & \\"then\\", in °C"}\n</tools>' in text
    assert text.endswith(
        "<|im_start|>user\nIs it cold in Köln?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\nwindy\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_variables_that_a_template_reads() -> None:
    """Names that a template reads are its variables; attributes and names in texts are none."""
    source = "{% if enable_thinking is not defined or enable_thinking %}{{ m.thinking ~ 'other' }}{% endif %}"
    template = ChatTemplate(source, bos_token="", eos_token="")
    assert template.variables == {"enable_thinking", "m"}
    assert template.source == source
