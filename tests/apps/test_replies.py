"""The parts of replies by the marks of many models, whole and however a reply is cut."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.chat import NO_ARGUMENTS
from edgedec_apps.call_bodies import ToolCall, tool_call_schema
from edgedec_apps.replies import USUAL, Parts, ReplyStream, joined, split_reply
from edgedec_apps.reply_marks import MARKS, Mark, marks_of, opened_mark, schemas_of, thinking_mark

TIME = ToolCall("time", '{"zone": "UTC"}')
LIST = ToolCall("list", "{}")


def _behind(value: Any) -> dict[str, Any]:
    """Return schemas of a number or a text that say its type in other ways than by "type"."""
    reference = {"$ref": "#/$defs/n" if isinstance(value, int) else "#/$defs/s~1%25~0"}
    ways = {"const": {"const": value}, "enum": {"enum": [value, None]}, "ref": reference}
    ways |= {"all": {"allOf": [{"description": "x"}, reference]}, "any": {"anyOf": [{"type": "null"}, reference]}}
    return ways | {"one": {"oneOf": [{"const": value}, {"type": "boolean"}]}}


WAYS = [f"{kind}_{key}" for kind in ("n", "s") for key in _behind(5)]
SCHEMA = {
    "properties": {
        "zone": {"type": "string"},
        "n": {"type": "integer"},
        "flag": {"type": ["boolean", "null"]},
        "items": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "size": {"enum": [1, 2]},
        "code": {"enum": ["1", "2"]},
        **{f"{kind}_{key}": value for kind in ("n", "s") for key, value in _behind({"n": 5, "s": "5"}[kind]).items()},
    },
    "allOf": [{"$ref": "#/$defs/more"}],
    "patternProperties": {"^in_": {"type": "integer"}},
    "$defs": {
        "more": {"properties": {"inherited": {"type": "integer"}}},
        "n": {"type": "integer"},
        "s/%~": {"allOf": [{"$ref": "#/$defs/text"}, {"type": ["integer", "string"]}]},
        "text": {"type": "string", "minLength": 1},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"time": SCHEMA, "list": {}}
DIGITS = (
    '{"n": 12345678901234567890, "x": [0.12345678901234567890, {"y": 1e400}], "z": 123456789.12345679, "half": 0.5}'
)
Case = tuple[str, str, list[ToolCall]]


def called(reply: str, *calls: ToolCall) -> Case:
    """Return a reply of calls alone, its content and the calls."""
    return reply, "", list(calls)


PLAIN: dict[str, Case] = {
    "qwen": called('<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>', TIME),
    "text between": ('<tool_call>{"name": "list"}</tool_call>\nand <b>', "\nand <b>", [LIST]),
    "not closed": called('<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}', TIME),
    "arguments as text": called(
        '<tool_call>{"name": "time", "arguments": "{\\"zone\\": \\"UTC\\"}"}</tool_call>', TIME
    ),
    "the mark in a string": called(
        '<tool_call>{"name": "time", "arguments": {"zone": "\\"</tool_call>\\\\"}}</tool_call>',
        ToolCall("time", '{"zone": "\\"</tool_call>\\\\"}'),
    ),
    "a line break in a string": called(
        '<tool_call>{"name": "time", "arguments": {"zone": "a\nb"}}</tool_call>', ToolCall("time", '{"zone": "a\\nb"}')
    ),
    "an array of calls": called('<tool_call>[{"name": "list"}, {"name": "list"}]</tool_call>', LIST, LIST),
    "an unknown name": called('<tool_call>{"name": "rm"}</tool_call>', ToolCall("rm", "{}")),
    "digits": called(f'<tool_call>{{"name": "time", "arguments": {DIGITS}}}</tool_call>', ToolCall("time", DIGITS)),
    "openai": called('{"type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}', TIME),
    "fence": called('```json\n{"name": "list", "arguments": {}}\n```\n', LIST),
    # Text that stays text:
    "empty": ("", "", []),
    "words": ("  Nothing to call. ", "  Nothing to call. ", []),
    "json": ('{"answer": {"name": "x"}}', '{"answer": {"name": "x"}}', []),
    "no arguments": ('{"name": "Ada"}', '{"name": "Ada"}', []),
    "another tool": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "broken": ('<tool_call>{"name": </tool_call> so ', '<tool_call>{"name": </tool_call> so ', []),
    "half a tag": ("a <tool_call", "a <tool_call", []),
    "arguments are no object": ('<tool_call>{"name": "list", "arguments": [1]}</tool_call>',) * 2 + ([],),
    "no number of JSON": ('<tool_call>{"name": "list", "arguments": {"n": NaN}}</tool_call>',) * 2 + ([],),
    "a mark in words": ("Write <tool_call> first.",) * 2 + ([],),
    "code": ("```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    "doubled braces": called('{{"name": "list", "arguments": {}}}', LIST),
    "half doubled braces": ('{{"name": "list", "arguments": {}}', '{{"name": "list", "arguments": {}}', []),
    "json and words": ('{"name": "list", "arguments": {}} is it', '{"name": "list", "arguments": {}} is it', []),
    "a broken call, and a call": (
        '<tool_call>{"name": "list", "arguments": {"a": "b}}</tool_call> so <tool_call>{"name": "list"}</tool_call>',
        '<tool_call>{"name": "list", "arguments": {"a": "b}}</tool_call> so',
        [LIST],
    ),
}
XML: dict[str, Case] = {
    "types": called(
        "<tool_call><function=time><parameter=zone>5</parameter><parameter=n>\n5\n</parameter>"
        "<parameter=flag>True</parameter><parameter=items>[1, {}]</parameter><parameter=size>2</parameter>"
        '<parameter=code>2</parameter><parameter=other>7</parameter><parameter=more>{"a": [7]}</parameter>'
        "</function></tool_call>",
        ToolCall(
            "time",
            '{"zone": "5", "n": 5, "flag": true, "items": [1, {}], "size": 2, "code": "2", "other": "7", '
            '"more": {"a": [7]}}',
        ),
    ),
    "digits": called(
        "<tool_call><function=time><parameter=n>12345678901234567890</parameter>"
        "<parameter=items>[0.12345678901234567890]</parameter></function></tool_call>",
        ToolCall("time", '{"n": 12345678901234567890, "items": [0.12345678901234567890]}'),
    ),
    "types said elsewhere": called(
        "<tool_call><function=time>"
        + "".join(f"<parameter={name}>5</parameter>" for name in (*WAYS, "inherited", "in_pattern"))
        + "</function></tool_call>",
        ToolCall(
            "time",
            json.dumps({name: "5" if name[0] == "s" else 5 for name in WAYS} | {"inherited": 5, "in_pattern": 5}),
        ),
    ),
    "not of its type": called(
        "<tool_call><function=time><parameter=n>many</parameter><parameter=flag>null</parameter></function>"
        "</tool_call>",
        ToolCall("time", '{"n": "many", "flag": null}'),
    ),
    "marks in a value": called(
        '<tool_call>\n<function=time>\n<parameter=zone>\n\n"{</tool_call>\n <function=x> \n\n</parameter>\n'
        "</function>\n</tool_call>",
        ToolCall("time", json.dumps({"zone": '\n"{</tool_call>\n <function=x> \n'})),
    ),
    "a parameter without an end": called("<tool_call>\n<function=time>\n<parameter=zone>\nUTC\n</tool_call>", TIME),
    "an unknown name": called("<tool_call><function=rm></function></tool_call>", ToolCall("rm", "{}")),
    "cut off in a value": ("<tool_call>\n<function=time>\n<parameter=zone>\nUT",) * 2 + ([],),
    "words between": ("<tool_call><function=list>words</function></tool_call>",) * 2 + ([],),
    "cut off": ("<tool_call>\n<function=ti",) * 2 + ([],),
}
FUNCTION: dict[str, Case] = {
    "one": ("Look.\n<function=time>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>", "Look.", [TIME]),
    "with its tag": called("<tool_call>\n<function=list>\n</function>\n</tool_call>\n", LIST),
    "a tag that is not closed": (
        "<tool_call>\n<function=list></function> and <function=time><parameter=zone>UTC</parameter></function>",
        "<tool_call> and",
        [LIST, TIME],
    ),
    "an unknown name": ("<function=rm></function> so",) * 2 + ([],),
    "words": ("Write <function=time> first.",) * 2 + ([],),
}
GEMMA: dict[str, Case] = {
    "one": ('Look.\n<|tool_call>call:time{zone:<|"|>UTC<|"|>}<tool_call|>', "Look.", [TIME]),
    "nested": called(
        '<|tool_call>call:time{a:{b:[1,-2.5,true,null,{c:<|"|>}]<|"|>}],<|"|>d<|"|>:<|"|><|"|>},e:[]}<tool_call|>',
        ToolCall("time", '{"a": {"b": [1, -2.5, true, null, {"c": "}]"}], "d": ""}, "e": []}'),
    ),
    "the mark in a string": called(
        '<|tool_call>call:time{zone:<|"|>"<tool_call|>,x:{<|"|>}<tool_call|>',
        ToolCall("time", '{"zone": "\\"<tool_call|>,x:{"}'),
    ),
    "strings of JSON": called(
        '<|tool_call>call:time{"zone": "U\\nT\\u0043", n: \'x\'}<tool_call|>',
        ToolCall("time", '{"zone": "U\\nTC", "n": "x"}'),
    ),
    "a string without an end": ('<|tool_call>call:list{a:<|"|>b}<tool_call|>',) * 2 + ([],),
    "a string without an end, and a call": (
        '<|tool_call>call:list{a:<|"|>b}<tool_call|><|tool_call>call:list{}<tool_call|>',
        '<|tool_call>call:list{a:<|"|>b}<tool_call|>',
        [LIST],
    ),
    "not closed": called('<|tool_call>call:time{zone:<|"|>UTC<|"|>}', TIME),
    "cut off": ('<|tool_call>call:time{zone:<|"|>UT',) * 2 + ([],),
    "no call": ("<|tool_call>response<tool_call|>",) * 2 + ([],),
    "a stray end of a thought": ("<channel|>Yes.", "Yes.", []),
    "deep": ("<|tool_call>call:list{a:" + "[" * 3000 + "<tool_call|>",) * 2 + ([],),
}
LFM: dict[str, Case] = {
    "one": ('<|tool_call_start|>[time(zone="UTC")]<|tool_call_end|>Looking.', "Looking.", [TIME]),
    "values": called(
        "<|tool_call_start|>[a.b(x=-1, y=[True, None, 'z'], z={'k': \"(v)\"}, t=true)]<|tool_call_end|>",
        ToolCall("a.b", '{"x": -1, "y": [true, null, "z"], "z": {"k": "(v)"}, "t": true}'),
    ),
    "quotes that are not escaped": called(
        "<|tool_call_start|>[time(zone='it's a \"zone\",\nno?', n=1)]<|tool_call_end|>",
        ToolCall("time", '{"zone": "it\'s a \\"zone\\",\\nno?", "n": 1}'),
    ),
    "escapes": called(
        "<|tool_call_start|>[time(zone='it\\'s \\\\d\\n')]<|tool_call_end|>",
        ToolCall("time", '{"zone": "it\'s \\\\d\\n"}'),
    ),
    "json": called('<|tool_call_start|>[{"name": "time", "arguments": {"zone": "UTC"}}]<|tool_call_end|>', TIME),
    "a value by its place": ("<|tool_call_start|>[time('UTC')]<|tool_call_end|>",) * 2 + ([],),
    "a call in a call": ("<|tool_call_start|>[time(zone=f(1))]<|tool_call_end|>",) * 2 + ([],),
    "cut off": ("<|tool_call_start|>[time(zone='U",) * 2 + ([],),
}
MISTRAL: dict[str, Case] = {
    "one": ('Look.[TOOL_CALLS]time[ARGS]{"zone": "UTC"}', "Look.", [TIME]),
    "with an id": called('[TOOL_CALLS]time[CALL_ID]abc123def[ARGS]{"zone": "UTC"}', TIME),
    "brackets in strings": (
        '[TOOL_CALLS]time[ARGS]{"zone": "}]\\"[TOOL_CALLS]", "a": {"b": [1]}} after',
        " after",
        [ToolCall("time", '{"zone": "}]\\"[TOOL_CALLS]", "a": {"b": [1]}}')],
    ),
    "no mark of arguments": called('[TOOL_CALLS]time{"zone": "UTC"}', TIME),
    "cut off": ('[TOOL_CALLS]time[ARGS]{"zone": "U',) * 2 + ([],),
    "a mark in words": ("Mistral writes [TOOL_CALLS] before calls. " * 9,) * 2 + ([],),
}
_TO_TIME = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>"
HARMONY: dict[str, Case] = {
    "one": called(_TO_TIME + '{"zone": "UTC"}<|call|>', TIME),
    "text alone": ("<|channel|>final<|message|>Four.\n<|return|>", "Four.", []),
    "two texts": (
        "<|channel|>commentary<|message|>One.<|end|>\n<|start|>assistant<|channel|>final<|message|>Two.",
        "One.\n\nTwo.",
        [],
    ),
    "no JSON": (_TO_TIME + "zone<|call|>", _TO_TIME + "zone", []),
    "cut off in the head": ("<|channel|>comm",) * 2 + ([],),
}
FORMS: dict[str, dict[str, Case]] = {
    "tool_call": PLAIN | {f"xml, {name}": case for name, case in XML.items()},
    "function": FUNCTION,
    "gemma4": GEMMA,
    "lfm2": LFM,
    "mistral": MISTRAL,
    "harmony": HARMONY,
}
CASES = [(form, name) for form, cases in FORMS.items() for name in cases]


def marks(form: str) -> tuple[Mark, ...]:
    """Return the marks of a model that writes calls in a form."""
    return (*USUAL, *(MARKS[form] if form != "tool_call" else ()))


def in_pieces(text: str, cuts: Sequence[int], form: str, opened: str = "") -> Parts:
    """Return the parts of a text that comes in pieces."""
    stream = ReplyStream(marks(form), tools=TOOLS, opened=opened)
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return joined([*(stream.feed(piece) for piece in pieces), stream.finish()])


@pytest.mark.parametrize(("form", "name"), CASES)
def test_replies_are_read(form: str, name: str) -> None:
    """The calls in order, and the text without them; what only looks like a call stays in the text."""
    reply, content, calls = FORMS[form][name]
    assert split_reply(reply, marks(form), tools=TOOLS) == Parts("", content, calls)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name"), CASES)
def test_pieces_of_every_length_add_up_to_the_whole(form: str, name: str) -> None:
    """Pieces of 1 to 40 characters give the text and the calls of the whole, and no piece shows a torn mark."""
    reply, content, calls = FORMS[form][name]
    for n in (*range(1, 41), len(reply) + 1) if len(reply) < 1000 else (997,):
        assert in_pieces(reply, range(n, len(reply), n), form) == Parts("", content, calls)


@pytest.mark.slow
@given(st.sampled_from([case for case in CASES if case[1] != "deep"]), st.data())
def test_pieces_add_up_to_the_whole(case: tuple[str, str], data: st.DataObject) -> None:
    """However a reply is cut, text and calls are those of the whole."""
    form, name = case
    reply, content, calls = FORMS[form][name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=6)))
    assert in_pieces(reply, cuts, form) == Parts("", content, calls)


_SHARDS = sorted(
    {part for form in MARKS.values() for mark in form for part in (*mark.opens, *mark.closes, mark.head_ends) if part}
)
_BITS = [
    *_SHARDS,
    '{"name": "list"}',
    "<function=list>",
    "call:list{",
    "[list()]",
    "list[ARGS]{}",
    '"',
    "}",
    "<|",
    "x\n",
]


@pytest.mark.slow
@given(st.sampled_from(sorted(MARKS)), st.lists(st.sampled_from(_BITS), max_size=14), st.integers(1, 9))
def test_any_text_is_read_alike_in_pieces(form: str, bits: list[str], n: int) -> None:
    """Marks, halves of calls and quotes in any order give the same parts whole and in pieces."""
    reply = "".join(bits)
    assert in_pieces(reply, range(n, len(reply), n), form) == split_reply(reply, marks(form), tools=TOOLS)


THOUGHTS = {
    "tool_call": ("<think>", "</think>", "<think>\n"),
    "gemma4": ("<|channel>thought\n", "<channel|>", "<|channel>thought\n"),
    "mistral": ("[THINK]", "[/THINK]", "[THINK]"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
}
CALL = {form: cases["one"][0].replace("Look.", "").strip() for form, cases in FORMS.items() if form != "tool_call"}
CALL["tool_call"] = PLAIN["qwen"][0]


@pytest.mark.parametrize("form", THOUGHTS)
def test_thoughts_stand_apart(form: str) -> None:
    """Of each family what is thought, also where the prompt begins it, and a call and a text behind it."""
    first, last, opened = THOUGHTS[form]
    final = "<|start|>assistant<|channel|>final<|message|>" if form == "harmony" else ""
    start = "<|start|>assistant" if form == "harmony" else ""
    replies = {
        f"{first} One {{two}}. \n{last}\n\n{final}Yes.": Parts("One {two}.", "Yes.", []),
        f"{first}{last}{final}Yes.": Parts("", "Yes.", []),
        f"{first}Cut off": Parts("Cut off", "", []),
        f"{first}I look.{last}\n{start}{CALL[form]}": Parts("I look.", "", [TIME]),
    }
    for reply, expected in replies.items():
        for n in (1, 2, 3, 5, 8, len(reply)):
            assert in_pieces(reply, range(n, len(reply), n), form) == expected, (reply, n)
    assert opened_mark(f"<user>{opened}", marks(form)) == opened.strip()
    begun = f"One.{last}{final}Yes." if form != "harmony" else f"{first}One.{last}{final}Yes."
    assert in_pieces(begun, range(1, len(begun)), form, opened.strip()) == Parts("One.", "Yes.", [])


@pytest.mark.parametrize("form", ["tool_call", "gemma4", "mistral"])
def test_a_call_in_the_midst_of_a_thought(form: str) -> None:
    """A whole call of a known tool counts; what follows is thought. A mention of the mark and another name don't."""
    first, last, _ = THOUGHTS[form]
    call, mark = CALL[form], next(mark.opens[0] for mark in MARKS[form] if mark.kind == "call")
    other = call.replace("time", "rm")
    replies = {
        f"{first}So: {call}": Parts("So:", "", [TIME]),
        f"{first}So: {call} and {call}{last}Yes.": Parts("So:\n\nand", "Yes.", [TIME, TIME]),
        f"{first}So: {other} no.{last}Yes.": Parts(f"So: {other} no.", "Yes.", []),
        f"{first}I write {mark} first.{last}Yes.{call}": Parts(f"I write {mark} first.", "Yes.", [TIME]),
    }
    for reply, expected in replies.items():
        for n in (1, 2, 3, 5, 8, len(reply)):
            assert in_pieces(reply, range(n, len(reply), n), form) == expected, (reply, n)


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\nWell.\n</think>\n\nYes.", "", "Well.", "Yes."),
        ("\n <think>Well.</think>Yes.\n", "", "Well.", "Yes.\n"),
        ("Well.\n</think>\n\nYes.", "<think>", "Well.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "", "Yes."),
        ("<think>Cut off </thi", "", "Cut off </thi", ""),
        (" No tags at all. ", "", "", " No tags at all. "),
        ("First <think>text</think>.", "", "", "First <think>text</think>."),
        ("<think>a</think>b<think>c</think>", "", "a", "b<think>c</think>"),
        ("<think", "", "", "<think"),
        ("", "<think>", "", ""),
    ],
)
def test_only_a_beginning_is_thought(text: str, opened: str, thought: str, answer: str) -> None:
    """Of `<think>` only a part at the beginning is what the model thinks; pieces of any size add up to the same."""
    for n in range(1, len(text) + 2):
        stream = ReplyStream(opened=opened)
        parts = [stream.feed(text[i : i + n]) for i in range(0, len(text), n)] + [stream.finish()]
        assert joined(parts) == Parts(thought, answer, [])


def test_the_marks_are_those_of_the_model() -> None:
    """A family's where the template or the vocabulary has one of them; `<think>` and `<tool_call>` always."""
    assert marks_of("") == USUAL
    for template, form in {
        "<function=": "function",
        "{{ '<|tool_call>' }}": "gemma4",
        "<|tool_call_start|>": "lfm2",
        "{{ '[TOOL_CALLS]' }}": "mistral",
        "[THINK]": "mistral",
        "<|channel|>": "harmony",
    }.items():
        assert marks_of(template) == marks(form)
    assert thinking_mark(marks_of("[THINK]"), "[THINK]").closes == ("[/THINK]",)
    assert thinking_mark(marks_of("[TOOL_CALLS] <think>"), "[TOOL_CALLS] <think>").closes == ("</think>",)
    assert thinking_mark(marks_of("[TOOL_CALLS]"), "[TOOL_CALLS]").closes == ("</think>",)


def test_without_tools_calls_are_text() -> None:
    """Where no tool may be called, nothing is a call, and what is thought still stands apart."""
    for form, call in CALL.items():
        if form != "harmony":
            reply = f"{THOUGHTS.get(form, ('', ''))[0]}x{THOUGHTS.get(form, ('', ''))[1]}{call} "
            found = split_reply(reply, marks(form))
            assert found == Parts("x" if form in THOUGHTS else "", ("" if form in THOUGHTS else "x") + call + " ", [])


def test_text_comes_as_soon_as_it_is_certain() -> None:
    """Text is held back only where a mark may begin, and a call comes with the mark that closes it."""
    stream = ReplyStream(tools=TOOLS)
    assert stream.feed("Well, ") == Parts("", "Well,", [])
    assert stream.feed("a < b") == Parts("", " a < b", [])
    assert stream.feed(" <tool_") == Parts("", "", [])
    assert stream.feed('call>{"name": "list"') == Parts("", "", [])
    assert stream.feed("}</tool_call>") == Parts("", "", [LIST])
    assert stream.finish() == Parts("", "", [])
    other = ReplyStream(tools=TOOLS)
    assert other.feed('{"ans') == Parts("", "", [])
    assert other.feed('wer": 1') == Parts("", '{"answer": 1', [])
    thinking = ReplyStream(tools=TOOLS)
    thinking.feed("<think>The mark is <tool_call>")
    assert thinking.feed(" and") == Parts(" <tool_call> and", "", [])  # no call begins so


def test_many_broken_calls_are_text() -> None:
    """A reply of broken calls is not read again for each; mentions of a mark are no broken calls."""
    mentions = "Write <tool_call> first. " * 200
    assert split_reply(mentions + PLAIN["qwen"][0], tools=TOOLS) == Parts("", mentions.rstrip(), [TIME])
    broken = '<tool_call>{"name": </tool_call>' * 60
    assert split_reply(broken + PLAIN["qwen"][0], tools=TOOLS) == Parts("", broken + PLAIN["qwen"][0], [])
    for reply in (
        '<tool_call>{"name": "' * 3000,
        '<|tool_call>call:time{a:<|"|>' * 3000,
        "[TOOL_CALLS]x[ARGS]{" * 3000,
    ):
        for form in ("gemma4", "mistral"):
            assert split_reply(reply, marks(form), tools=TOOLS) == Parts("", reply, [])


def test_calls_have_openais_shape() -> None:
    """An id of its own, and arguments as text, in which characters are what they are."""
    call = split_reply('{"name": "list", "arguments": {"text": "gr\u00fcn"}}', tools=TOOLS).calls[0]
    assert call.as_dict() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "list", "arguments": '{"text": "gr\u00fcn"}'},
    }
    ids = {split_reply('{"name": "list", "arguments": {}}', tools=TOOLS).calls[0].id for _ in range(9)}
    assert len(ids) == 9
    assert all(name.startswith("call_") for name in ids)


def test_a_schema_asks_for_one_of_the_tools() -> None:
    """What is valid under it is read as a call of the tool."""
    parameters = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "time", "parameters": parameters}},
        {"type": "function", "function": {"name": "list"}},
    ]
    tools[1]["function"]["parameters"] = {"$ref": "#/$defs/none", "$defs": {"none": {"type": "object"}}}
    assert tool_call_schema(tools)["anyOf"][1]["properties"]["arguments"]["$ref"].startswith("#/anyOf/1/")
    del tools[1]["function"]["parameters"]
    first, second = tool_call_schema(tools)["anyOf"]
    assert first["properties"] == {"name": {"const": "time"}, "arguments": parameters}
    assert second["properties"]["arguments"] == NO_ARGUMENTS
    value = {"name": "time", "arguments": {"zone": "UTC"}}
    assert schemas_of(tuple(tools)) == {"time": parameters, "list": {}}
    assert split_reply(json.dumps(value), tools=schemas_of(tuple(tools))) == Parts("", "", [TIME])
